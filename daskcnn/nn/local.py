"""Layers whose output depends only on nearby input, run together block by block.

A map is far larger than the caches, and each of these layers does a few operations per number: alone they would wait
for memory. A chain of them is therefore run on one block after the other: pixels that belong to the same output pixels,
some samples, all channels. Every block is read from memory once and written once. Only the chain's input is kept for
the backward pass; each block goes forward again first, which costs less than writing and reading all residuals.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from daskcnn.arrays import Array
from daskcnn.nn.blocks import arena, block_bytes, cut, share
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State

ALL = slice(None)
"""Every channel."""


class LocalLayer(Layer):
    """Base of layers without parameters, each block of whose output depends on one block of the input.

    A block is a part (h, w, n, C) of a map. Vectors are maps of one pixel.
    """

    @abstractmethod
    def window(self, in_shape: Shape) -> int | None:
        """Return how many pixels a side belong to one output pixel; None if blocks of this input would share pixels."""

    @abstractmethod
    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        """Note the steps of a block's forward pass with `block.do`; return (y, residual for `block_backward`)."""

    @abstractmethod
    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        """Note the steps of a block's backward pass; return dx. They may overwrite the residual and dy, but not x."""

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Run the layer as a chain of one; the residual is x."""
        return self._alone(x, ctx).forward(x, ctx), state, x

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Run the chain of one backward."""
        return self._alone(residual, ctx).backward(residual, dy, ctx), {}

    def _alone(self, x: Array, ctx: Context) -> Chain:
        return Chain.of([(self, ctx.salt)], (*x.shape[:-2], x.shape[-1]))


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A layer of a chain."""

    layer: LocalLayer
    salt: int
    side: int
    """How many pixels a side of its input belong to one pixel of the chain's output."""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """The place of a block: rows and columns of the chain's output, and samples."""

    rows: slice
    columns: slice
    samples: slice

    def of(self, x: Array, side: int) -> Array:
        """Return a view: the block of a map with `side` pixels a side for each output pixel."""
        return x[_times(self.rows, side), _times(self.columns, side), self.samples]


class BlockView:
    """Stands for a part of a map in the steps of a block, which are noted before the block's place is known."""

    def __init__(self, example: Array, at: Callable[[BlockPlace], Array]) -> None:
        self.at = at
        self.shape, self.dtype = example.shape, example.dtype
        self._example = example

    @classmethod
    def of(cls, x: Array, side: int, part: BlockPlace) -> BlockView:
        """Return the view of a map x with `side` pixels a side for each output pixel.

        `part` is any block of this shape.
        """
        return cls(part.of(x, side), lambda part: part.of(x, side))

    def __getitem__(self, index: Any) -> BlockView:
        return BlockView(self._example[index], lambda part: self.at(part)[index])


class BlockSteps:
    """Steps for blocks of one shape: calls on arrays of a thread's arena, noted once and run for every block.

    Noting once matters: a block has a hundred thousand numbers, and NumPy takes a few microseconds for a step.
    """

    def __init__(self, ctx: Context, x: Array, *, goes_back: bool) -> None:
        """Begin the steps for a map or vectors x; `goes_back` says whether residuals are wanted."""
        self.xp, self.dtype, self.training, self.goes_back = ctx.device.xp, x.dtype, ctx.training, goes_back
        self.vectors, self.channel = x.ndim == 2, ctx.channel
        self.arena = arena(ctx.device, x.nbytes)
        self.link: ChainLink
        self.target: Any = None
        """Where the current layer writes its result, if it is the last one."""
        self.ends = True
        """Whether the current layer is the last one: no other layer needs its result."""
        self.part: BlockPlace
        self.keys: Array | None = None
        self._steps: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = []
        self._views: list[tuple[Any, Any, BlockView]] = []

    def take(self, shape: Shape, dtype: Any = None) -> Array:
        """Return uninitialised memory for this block. Inside `with block.arena:` it is valid until the scope ends."""
        return self.arena.take(shape, self.dtype if dtype is None else dtype)

    def result(self, shape: Shape, free: Array | None = None) -> Array:
        """Return where the layer writes its result: the map itself, else `free` (unused memory), or a new array."""
        if self.target is not None:
            return self.target
        return self.take(shape) if free is None or isinstance(free, BlockView) else free

    def do(self, function: Callable[..., Any], *arguments: Any, out: Array) -> Array:
        """Note a call that writes to `out`, which is returned."""
        self._note(function, [*arguments], {"out": out})
        return out

    def copy(self, source: Any, target: Array) -> Array:
        """Note a copy."""
        self._note(self.xp.copyto, [target, source], {})
        return target

    def _note(self, function: Callable[..., Any], arguments: list[Any], named: dict[str, Any]) -> None:
        self._steps.append((function, arguments, named))
        self._views += [(arguments, i, a) for i, a in enumerate(arguments) if isinstance(a, BlockView)]
        self._views += [(named, name, a) for name, a in named.items() if isinstance(a, BlockView)]

    def run(self, part: BlockPlace | None = None, keys: Array | None = None) -> None:
        """Make the calls, with the views at this part of the maps, whose samples have these keys."""
        if part is not None:
            self.part, self.keys = part, keys
            for arguments, place, view in self._views:
                arguments[place] = view.at(part)
        for function, arguments, named in self._steps:
            function(*arguments, **named)


@dataclass(frozen=True)
class Chain:
    """Local layers that run together, one after the other."""

    links: tuple[ChainLink, ...]

    @classmethod
    def of(cls, layers: Iterable[tuple[Layer, int]], in_shape: Shape) -> Chain:
        """Return the longest chain that these layers begin with, for inputs of this shape (no N).

        Layers come with their salts.
        """
        found: list[tuple[LocalLayer, int, int]] = []
        for layer, salt in layers:
            window = layer.window(in_shape) if isinstance(layer, LocalLayer) else None
            if not isinstance(layer, LocalLayer) or window is None:
                break
            found.append((layer, salt, window))
            in_shape = layer.out_shape(in_shape)
        side, links = 1, []
        for layer, salt, window in reversed(found):
            side *= window
            links.append(ChainLink(layer, salt, side))
        return cls(tuple(reversed(links)))

    @property
    def side(self) -> int:
        """How many pixels a side of the input belong to one output pixel."""
        return self.links[0].side

    def forward(self, x: Array, ctx: Context) -> Array:
        """Return y of a map or of vectors x. Backward needs only x."""
        x_map = _as_map(x)
        y = ctx.device.xp.empty(self._out_shape(x_map.shape), x.dtype)

        def note(block: BlockSteps, part: BlockPlace) -> None:
            self._forward(BlockView.of(x_map, self.side, part), block, BlockView.of(y, 1, part))

        self._over_blocks(note, x, ctx, goes_back=False)
        return y if x is x_map else y[0, 0]

    def backward(self, x: Array, dy: Array, ctx: Context, *, given: slice = ALL, wanted: slice = ALL) -> Array:
        """Return dx of the pass that x went through.

        `given` are the channels that dy has (it is 0 elsewhere), `wanted` those that dx is needed for. Selecting them
        here, in cache, costs less than a larger dy or dx in memory.
        """
        x_map, dy_map = _as_map(x), _as_map(dy)
        C = x_map.shape[-1]
        dx = ctx.device.xp.empty((*x_map.shape[:-1], len(range(C)[wanted])), x.dtype)

        def note(block: BlockSteps, part: BlockPlace) -> None:
            residuals = self._forward(BlockView.of(x_map, self.side, part), block, None)
            back = _widened(BlockView.of(dy_map, 1, part), given, C, block)
            self._backward(residuals, back, block, BlockView.of(dx, self.side, part), wanted)

        self._over_blocks(note, x, ctx, goes_back=True)
        return dx if x is x_map else dx[0, 0]

    def _forward(self, x: Any, block: BlockSteps, target: BlockView | None) -> list[Residual]:
        """Note the pass of x through the layers to the target, if any; return the layers' residuals."""
        residuals = []
        for block.link in self.links:
            block.ends = block.link is self.links[-1]
            block.target = target if block.ends else None
            x, kept = block.link.layer.block_forward(x, block)
            residuals.append(kept)
        self._finish(x, block)
        return residuals

    def _backward(
        self, residuals: list[Residual], dy: Any, block: BlockSteps, target: BlockView, wanted: slice
    ) -> None:
        """Note the way of dy back to the target, which has the wanted channels."""
        for block.link, kept in zip(reversed(self.links), reversed(residuals), strict=True):
            block.target = target if block.link is self.links[0] and wanted == ALL else None
            dy = block.link.layer.block_backward(kept, dy, block)
        block.target = target
        self._finish(dy[..., wanted] if wanted != ALL else dy, block)

    @staticmethod
    def _finish(result: Any, block: BlockSteps) -> None:
        if block.target is not None and result is not block.target:
            block.copy(result, block.target)

    def _out_shape(self, x_shape: Shape) -> Shape:
        H, W, N, C = x_shape
        return H // self.side, W // self.side, N, C

    def _over_blocks(
        self, note: Callable[[BlockSteps, BlockPlace], None], x: Array, ctx: Context, *, goes_back: bool
    ) -> None:
        """Run the steps that `note` gives a block on all blocks of x."""
        device, x_map = ctx.device, _as_map(x)
        keys = None if ctx.keys is None else device.backend.from_host(ctx.keys)

        def work(queue: Iterator[BlockPlace]) -> None:
            noted: dict[Shape, BlockSteps] = {}
            for part in queue:
                shape = part.of(x_map, self.side).shape
                if shape not in noted:
                    noted[shape] = BlockSteps(ctx, x, goes_back=goes_back)
                    note(noted[shape], part)
                noted[shape].run(part, None if keys is None else keys[part.samples])

        share(device, work, self._parts(x_map, block_bytes(device, x.nbytes)))

    def _parts(self, x: Array, limit: int) -> list[BlockPlace]:
        """Return blocks of about `limit` bytes: all samples of a few pixels, or a few samples of one output pixel."""
        H, W, N, C = self._out_shape(x.shape)
        fit = max(1, limit // (self.side**2 * C * x.dtype.itemsize))  # pixels of the output and samples, multiplied
        samples, columns = cut(N, fit), cut(W, fit // N)
        rows = cut(H, fit // (N * W))
        return [BlockPlace(h, w, n) for h in rows for w in columns for n in samples]


def _widened(dy: BlockView, given: slice, channels: int, block: BlockSteps) -> Array | BlockView:
    """Return the gradient of all channels from that of some, in the block's memory."""
    if given == ALL:
        return dy
    whole = block.take((*dy.shape[:-1], channels))
    block.copy(0, whole)
    block.copy(dy, whole[..., given])
    return whole


def _as_map(x: Array) -> Array:
    return x if x.ndim == 4 else x[None, None]


def _times(pixels: slice, side: int) -> slice:
    return slice(pixels.start * side, pixels.stop * side)
