"""Pooling: each window of size×size pixels, every `stride` pixels, becomes one pixel.

Pixels in no window are ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.nn.blocks import over_rows, row_blocks
from daskcnn.nn.layer import Context, Params, Residual, Shape, State, check_at_least, map_shape
from daskcnn.nn.local import BlockSteps, LocalLayer


@dataclass(frozen=True)
class _Pool(LocalLayer):
    """Base of the pools. A window is size² strided views of the map, one for each place in the window.

    If windows tile the map it goes in blocks, otherwise in bands of rows.
    """

    size: int
    stride: int | None = None
    """Pixels from one window to the next; None for the size."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "size")
        if self.stride is not None:
            check_at_least(self, 1, "stride")

    @abstractmethod
    def reduce(self, places: list[Array], y: Array, block: BlockSteps) -> Residual:
        """Write y of the windows whose pixels `places` holds, one array per place; return what `spread` needs."""

    @abstractmethod
    def spread(self, residual: Residual, dy: Array, places: list[Array], block: BlockSteps) -> None:
        """Write the gradient of every place's pixels to `places`."""

    @property
    def step(self) -> int:
        """Pixels from one window to the next."""
        return self.size if self.stride is None else self.stride

    @property
    def reach(self) -> int | None:
        return 0

    def out_shape(self, in_shape: Shape) -> Shape:
        H, W, C = map_shape(self, in_shape)
        if self.size > min(H, W):
            raise ValueError(f"size={self.size}: the window is larger than the map, {H}x{W}; use a smaller one")
        return (H - self.size) // self.step + 1, (W - self.size) // self.step + 1, C

    def window(self, in_shape: Shape) -> int | None:
        H, W, _ = map_shape(self, in_shape)
        return self.size if self.step == self.size and H % self.size == 0 and W % self.size == 0 else None

    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        y = block.result(self._y_shape(x.shape))
        return y, (x.shape, self.reduce(self._places(x), y, block))

    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        x_shape, kept = residual
        dx = block.result(x_shape)
        self.spread(kept, dy, self._places(dx), block)
        return dx

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        y_shape = self._y_shape(x.shape)
        if self.window(_without_samples(x.shape)) is not None:
            return super().forward(params, state, x, ctx)
        y = ctx.device.xp.empty(y_shape, x.dtype)

        def pool(rows: slice) -> None:
            block = BlockSteps(ctx, x, goes_back=False)
            self.reduce(self._places(x[self._band(rows)]), y[rows], block)
            block.run()

        over_rows(ctx.device, pool, len(y), x[0].nbytes * self.step)
        return y, state, x

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        x = residual
        if self.window(_without_samples(x.shape)) is not None:
            return super().backward(params, residual, dy, ctx)
        dx = ctx.device.xp.zeros(x.shape, x.dtype)
        row_bytes = x[0].nbytes * self.step
        if self.step >= self.size:
            over_rows(ctx.device, lambda rows: self._band_backward(rows, x, dy, dx, ctx), len(dy), row_bytes)
        else:  # neighbouring rows' windows share pixels, which two threads must not add to at once
            for rows in row_blocks(ctx.device, len(dy), row_bytes):
                self._band_backward(rows, x, dy, dx, ctx)
        return dx, {}

    def _band_backward(self, rows: slice, x: Array, dy: Array, dx: Array, ctx: Context) -> None:
        """Add to dx what these rows of dy contribute."""
        block = BlockSteps(ctx, x, goes_back=True)
        places, y = self._places(dx[self._band(rows)]), block.take(dy[rows].shape)
        kept = self.reduce(self._places(x[self._band(rows)]), y, block)
        shared = self.step < self.size
        parts = [block.take(y.shape) for _ in places] if shared else places
        self.spread(kept, dy[rows], parts, block)
        for place, part in zip(places, parts if shared else (), strict=shared):
            block.do(block.xp.add, place, part, out=place)
        block.run()

    def _band(self, rows: slice) -> slice:
        """Return the rows of x in the windows of these rows of y."""
        return slice(rows.start * self.step, (rows.stop - 1) * self.step + self.size)

    def _y_shape(self, x_shape: Shape) -> Shape:
        H, W, _ = self.out_shape(_without_samples(x_shape))
        return H, W, *x_shape[-2:]

    def _places(self, x: Array) -> list[Array]:
        """Return for each place in the window its pixels: (out_H, out_W, N, C), views of x."""
        H, W, _, _ = self._y_shape(x.shape)
        step, places = self.step, range(self.size)
        bottom, right = (H - 1) * step + 1, (W - 1) * step + 1
        return [x[i : i + bottom : step, j : j + right : step] for i in places for j in places]


def _without_samples(x_shape: Shape) -> Shape:
    return *x_shape[:-2], x_shape[-1]


@dataclass(frozen=True)
class MaxPool(_Pool):
    """Greatest number of the window. The gradient goes to the first of equal pixels, by rows."""

    def reduce(self, places: list[Array], y: Array, block: BlockSteps) -> list[Array]:
        """Return for each place but the first whether it raised the maximum of those before."""
        xp, raised, highest = block.xp, [], places[0]
        for place in places[1:]:
            if block.goes_back:
                raised.append(block.do(xp.greater, place, highest, out=block.take(y.shape, bool)))
            highest = block.do(xp.maximum, highest, place, out=y)
        if len(places) == 1:
            block.copy(highest, y)
        return raised

    def spread(self, residual: list[Array], dy: Array, places: list[Array], block: BlockSteps) -> None:
        """Give the gradient to the last place that raised the maximum, or to the first place if none did."""
        xp, do = block.xp, block.do
        left = None  # the windows whose gradient no place has got yet; all at first
        for place, raised in zip(reversed(places[1:]), reversed(residual), strict=True):
            if left is None:
                left = do(xp.logical_not, raised, out=block.take(dy.shape, bool))
            else:
                do(xp.logical_and, raised, left, out=raised)
                do(xp.not_equal, left, raised, out=left)
            do(xp.multiply, dy, raised, out=place)
        if left is None:
            block.copy(dy, places[0])
        else:
            do(xp.multiply, dy, left, out=places[0])


@dataclass(frozen=True)
class AveragePool(_Pool):
    """Mean of the window."""

    def reduce(self, places: list[Array], y: Array, block: BlockSteps) -> None:
        """Write the mean of the places to y. Nothing is kept."""
        if block.goes_back and block.ends:
            return  # the gradient does not need it
        block.copy(places[0], y)
        for place in places[1:]:
            block.do(block.xp.add, y, place, out=y)
        block.do(block.xp.multiply, y, 1 / self.size**2, out=y)

    def spread(self, residual: None, dy: Array, places: list[Array], block: BlockSteps) -> None:
        """Write dy / size² to every place."""
        for place in places:
            block.do(block.xp.multiply, dy, 1 / self.size**2, out=place)


@dataclass(frozen=True)
class L2Pool(_Pool):
    """Square root of the sum of the window's squares. Where the root is 0 the gradient is 0."""

    def reduce(self, places: list[Array], y: Array, block: BlockSteps) -> tuple[list[Array], Array]:
        """Write the root of the sum of squares to y; keep the pixels and y."""
        xp, do = block.xp, block.do
        do(xp.multiply, places[0], places[0], out=y)
        with block.arena:
            square = block.take(y.shape)
            for place in places[1:]:
                do(xp.multiply, place, place, out=square)
                do(xp.add, y, square, out=y)
        do(xp.sqrt, y, out=y)
        return places, y

    def spread(self, residual: tuple[list[Array], Array], dy: Array, places: list[Array], block: BlockSteps) -> None:
        """Write dy · x / y to every place, 0 where y is 0."""
        found, y = residual
        xp, do = block.xp, block.do
        with block.arena:
            zero = do(xp.equal, y, 0, out=block.take(y.shape, bool))
            divisor = do(xp.add, y, zero, out=block.take(y.shape))
            ratio = do(xp.divide, dy, divisor, out=divisor)
            for x, place in zip(found, places, strict=True):
                do(xp.multiply, x, ratio, out=place)
