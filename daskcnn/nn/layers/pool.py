"""Pooling: a window of size×size pixels, every `stride` pixels, becomes one; pixels in no window are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.nn.blocks import blocks, over_rows
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least, map_shape


@dataclass(frozen=True)
class _Pool(Layer):
    """What pools share: windows seen as size² strided views of the map, one for each place in the window."""

    size: int
    stride: int | None = None
    """None: the size."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "size")
        if self.stride is not None:
            check_at_least(self, 1, "stride")

    @property
    def step(self) -> int:
        """Pixels from one window to the next."""
        return self.size if self.stride is None else self.stride

    def out_shape(self, in_shape: Shape) -> Shape:
        H, W, C = map_shape(self, in_shape)
        if self.size > min(H, W):
            raise ValueError(f"size={self.size}: the window is larger than the map, {H}x{W}; use a smaller one")
        return (H - self.size) // self.step + 1, (W - self.size) // self.step + 1, C

    def _empty(self, x: Array, ctx: Context) -> Array:
        H, W, N, C = x.shape
        out_H, out_W, _ = self.out_shape((H, W, C))
        return ctx.device.xp.empty((out_H, out_W, N, C), x.dtype)

    def _views(self, x: Array, rows: slice, width: int) -> list[Array]:
        """For each place in the window, its pixels for these output rows: (rows, width, N, C), views of x."""
        step, places = self.step, range(self.size)
        top, bottom, right = rows.start * step, (rows.stop - 1) * step + 1, (width - 1) * step + 1
        return [x[top + i : bottom + i : step, j : j + right : step] for i in places for j in places]

    def _gather(self, x: Array, y: Array, ctx: Context, reduce: Callable[[slice, list[Array]], None]) -> None:
        """Call `reduce(rows, views)` for blocks of output rows, on the device's threads."""
        width, row_bytes = y.shape[1], x[0].nbytes * self.step
        over_rows(ctx.device, lambda rows: reduce(rows, self._views(x, rows, width)), len(y), row_bytes)

    def _scatter(self, x_shape: Shape, dy: Array, ctx: Context, parts: Callable[[slice], Iterable[Array]]) -> Array:
        """dx (x_shape) from `parts(rows)`: what these output rows give to each place in their windows, in turn."""
        tiled = self.step == self.size and x_shape[:2] == (len(dy) * self.size, dy.shape[1] * self.size)
        dx = (ctx.device.xp.empty if tiled else ctx.device.xp.zeros)(x_shape, dy.dtype)

        def scatter(rows: slice) -> None:
            for view, part in zip(self._views(dx, rows, dy.shape[1]), parts(rows), strict=True):
                if tiled:
                    view[...] = part
                else:
                    view += part

        row_bytes = dx[0].nbytes * self.step
        if self.step >= self.size:
            over_rows(ctx.device, scatter, len(dy), row_bytes)
        else:  # neighbouring rows' windows share pixels, which two threads must not add to at once
            for rows in blocks(ctx.device, len(dy), row_bytes):
                scatter(rows)
        return dx


@dataclass(frozen=True)
class MaxPool(_Pool):
    """Greatest of the window. The gradient goes to the first of equal pixels, by rows."""

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        xp, y = ctx.device.xp, self._empty(x, ctx)
        raised = xp.empty((self.size**2 - 1, *y.shape), bool) if ctx.training else None

        def reduce(rows: slice, views: list[Array]) -> None:
            out = y[rows]
            out[...] = views[0]
            for k, view in enumerate(views[1:]):
                if raised is not None:
                    xp.greater(view, out, out=raised[k, rows])
                xp.maximum(view, out, out=out)

        self._gather(x, y, ctx, reduce)
        return y, state, (x.shape, raised)

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        x_shape, raised = residual

        def parts(rows: slice) -> Iterator[Array]:
            """The last pixel to raise the maximum gets the gradient, the first one if none did."""
            rest, found = dy[rows].copy(), []
            for k in reversed(range(len(raised))):
                found.append(rest * raised[k, rows])
                rest -= found[-1]
            yield rest
            yield from reversed(found)

        return self._scatter(x_shape, dy, ctx, parts), {}


@dataclass(frozen=True)
class AveragePool(_Pool):
    """Mean of the window."""

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        y = self._empty(x, ctx)

        def reduce(rows: slice, views: list[Array]) -> None:
            out = y[rows]
            out[...] = views[0]
            for view in views[1:]:
                out += view
            out *= 1 / self.size**2

        self._gather(x, y, ctx, reduce)
        return y, state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        count = self.size**2
        return self._scatter(residual, dy, ctx, lambda rows: [dy[rows] * (1 / count)] * count), {}


@dataclass(frozen=True)
class L2Pool(_Pool):
    """Square root of the sum of the window's squares; where that is 0, so is the gradient."""

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        xp, y = ctx.device.xp, self._empty(x, ctx)

        def reduce(rows: slice, views: list[Array]) -> None:
            out = y[rows]
            xp.multiply(views[0], views[0], out=out)
            for view in views[1:]:
                out += view * view
            xp.sqrt(out, out=out)

        self._gather(x, y, ctx, reduce)
        return y, state, (x, y)

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        x, y = residual

        def parts(rows: slice) -> Iterator[Array]:
            ratio = dy[rows] / (y[rows] + (y[rows] == 0))
            for view in self._views(x, rows, dy.shape[1]):
                yield view * ratio

        return self._scatter(x.shape, dy, ctx, parts), {}
