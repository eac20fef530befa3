"""Maps of whose windows of 2×2 pixels one number is left, on processors: one loop over a map's numbers, both ways.

Layers whose output depends only on nearby input, run together on processors.

A chain of such layers is one compiled loop over blocks (`daskcnn.compiled.chain`), which keeps only the chain's input
for the backward pass. Frequent chains have loops of their own, over whole maps (`scaled`, `pooled`). On GPUs each layer
is array expressions of its own, and keeps what it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import Array, Device
from daskcnn.compiled.program import AVERAGE, LEAST_PART, MAX, PARTS, RELU, RUN, SCALE, TANH, Operation, Program
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State
from daskcnn.nn.scaled import THREAD_NUMBERS, THREAD_PARTS, ScaledPass, Scaling, rows_of

NONE = -1
"""No activation."""
_KINDS = {
    (MAX,): (MAX, NONE),
    (RELU, MAX): (MAX, RELU),
    (MAX, RELU): (MAX, RELU),
    (AVERAGE,): (AVERAGE, NONE),
    (RELU, AVERAGE): (AVERAGE, RELU),
    (TANH, AVERAGE): (AVERAGE, TANH),
}
"""Pool and activation of a chain's operations. A ReLU and a greatest number may change places."""


@dataclass(frozen=True)
class PooledPass:
    """A pass of a map x (H, W, N, C) through batch normalising, an activation and a pool, or a part of these."""

    x: Array
    device: Device
    pool: int
    activation: int

    @classmethod
    def of(cls, operations: Sequence[Operation], x: Array, device: Device, *, scaled: bool) -> PooledPass | None:
        """Return the pass of these operations behind batch normalising, if it is `scaled`; None if there is none."""
        kind = _KINDS.get(tuple(operation.code for operation in operations))
        if kind is None or x.ndim != 4 or min(x.shape[:2]) < 2:
            return None
        if not all((o.size, o.step) == (2, 2) for o in operations if o.code in (MAX, AVERAGE)):
            return None
        pixels_left_out = x.shape[0] % 2 or x.shape[1] % 2
        if scaled and (kind[0] == AVERAGE or pixels_left_out):
            return None
        return cls(device.backend.contiguous(x), device, *kind)

    def forward(self, scaling: Scaling | None) -> Array:
        """Return y."""
        y, tiled = np.empty(self._out_shape, self.x.dtype), self._tiled(scaling, None)
        x, out = _runs_of(self.x), _runs_of(y)
        self._each(lambda lo, hi: compiled.pooled.forward(self.pool, self.activation, x, tiled, out, lo, hi))
        return y

    def sums(self, dy: Array, scaling: Scaling) -> tuple[Array, Array, Array]:
        """Return the sums over pixels and samples of d and of d·(x - mean), each (C,), and dy.

        d is dy where x is the greatest of its window and, behind a ReLU, above 0; elsewhere 0.
        """
        tiled, parts = self._tiled(scaling, None), np.empty((-(-self._runs // self._size), 2, self.x.shape[-1]))
        x, change = _runs_of(self.x), self._map(dy)

        def add_up(part: slice) -> None:
            scratch = self.device.workspace.take(f"sums {self.device.pool.thread}", (2, self._run), self.x.dtype)
            compiled.pooled.sums(self.activation, x, tiled, change, parts, self._size, part.start, part.stop, scratch)

        self.device.pool.map(add_up, self._slices)
        total, product = parts.sum(axis=0)
        return total, product, dy

    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return dx; with a scaling d·factor + (x - mean)·by_x + by_all, by_x being back's factor, by_all its shift."""
        H, W = self.x.shape[:2]
        dx = (np.zeros if H % 2 or W % 2 else np.empty)(self.x.shape, self.x.dtype)
        kind = self.pool, self.activation, scaling is not None
        own = _runs_of(self.x), self._tiled(scaling, back), self._map(dy), _runs_of(dx)
        self._each(lambda lo, hi: compiled.pooled.backward(*kind, *own, lo, hi))
        return dx

    @property
    def _out_shape(self) -> tuple[int, ...]:
        H, W, *rest = self.x.shape
        return H // 2, W // 2, *rest

    def _map(self, dy: Array) -> Array:
        return _runs_of(self.device.backend.contiguous(dy))

    @cached_property
    def _run(self) -> int:
        """Numbers of a run: of whole samples."""
        N, C = self.x.shape[2:]
        return int(C * min(N, max(1, RUN // C)))

    @property
    def _runs(self) -> int:
        H, W, N, C = self._out_shape
        return H * W * -(-N * C // self._run)

    @cached_property
    def _size(self) -> int:
        """Runs of a part, the same for any number of threads: sums are taken part by part."""
        return -(-self._runs // max(1, min(PARTS, self.x.size // LEAST_PART)))

    @property
    def _slices(self) -> list[slice]:
        parts = -(-self._runs // self._size)
        return self.device.pool.slices(parts, at_least=-(-THREAD_NUMBERS * parts // self.x.size))

    def _tiled(self, scaling: Scaling | None, back: Scaling | None) -> Array:
        if scaling is None:
            return _unscaled(self._run, self.x.dtype)
        return np.tile(rows_of(scaling, back), self._run // self.x.shape[-1])

    def _each(self, call: Callable[[int, int], None]) -> None:
        """Call the loop for ranges of runs, on threads."""

        def work(part: slice) -> None:
            call(part.start * self._size, min(self._runs, part.stop * self._size))

        self.device.pool.map(work, self._slices)


def _runs_of(a: Array) -> Array:
    """Return a map with samples and channels as one axis."""
    return a.reshape(*a.shape[:2], -1)


@lru_cache
def _unscaled(run: int, dtype: np.dtype[Any]) -> Array:
    """Return the rows by which nothing is scaled."""
    rows = np.zeros((5, run), dtype)
    rows[1] = 1
    return rows


ALL = slice(None)
"""Every channel."""


class LocalLayer(Layer):
    """Base of layers without parameters, each pixel of whose output depends on a window of pixels of the input.

    rectifies: whether it is a ReLU, which others may do in a pass of theirs.
    """

    rectifies: ClassVar[bool] = False

    @abstractmethod
    def operation(self, ctx: Context) -> Operation | None:
        """Return what the layer is in a compiled chain; None if this pass leaves x as it is."""

    @abstractmethod
    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return (y, residual) by array expressions over `ctx.device.xp`."""

    @abstractmethod
    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dx by array expressions."""

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Run the layer as a chain of one, or by array expressions."""
        if ctx.device.backend.compiled:
            return Chain((self,)).forward(params, state, x, [ctx])
        y, residual = self.array_forward(x, ctx)
        return y, state, residual

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Run the chain of one backward, or array expressions."""
        if ctx.device.backend.compiled:
            dx, grads = Chain((self,)).backward(params, residual, dy, [ctx])
            assert dx is not None, "it has no parameters, so it is run backward for dx alone"
            return dx, grads
        return self.array_backward(residual, dy, ctx), {}


class ScalingLayer(Layer):
    """Base of layers that shift and scale each channel by numbers of the whole minibatch: they may head a chain."""

    @abstractmethod
    def scaling(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Scaling, State]:
        """Return what the pass does to x, and the new state."""

    @abstractmethod
    def gradients(
        self, params: Params, scaling: Scaling, total: Array, product: Array, count: int
    ) -> tuple[Params, Scaling]:
        """Return the gradients, and what makes dx = (x - mean) · factor + shift without the term dy · factor of before.

        total, product: sums (C,) over `count` pixels and samples of dy and of dy · (x - mean).
        """

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Run the layer as a chain of one, or by array expressions; the residual holds x and the scaling."""
        if ctx.device.backend.compiled:
            return Chain((self,)).forward(params, state, x, [ctx])
        s, state = self.scaling(params, state, x, ctx)
        return (x - s.mean) * s.factor + s.shift, state, (x, s)

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dx (None if not needed) and the gradients, by two passes over x and dy."""
        if ctx.device.backend.compiled:
            return Chain((self,)).backward(params, residual, dy, [ctx])
        x, s = residual
        axes, centred = tuple(range(x.ndim - 1)), x - s.mean
        total, product = dy.sum(axis=axes), (dy * centred).sum(axis=axes)
        grads, back = self.gradients(params, s, total, product, x.size // x.shape[-1])
        return dy * s.factor + centred * back.factor + back.shift if ctx.need_dx else None, grads

    def scaled_back(
        self, params: Params, way: ScaledPass | PooledPass, scaling: Scaling, dy: Array, *, need_dx: bool
    ) -> tuple[Array | None, Params]:
        """Return dx (None if not needed) and the gradients of a pass over a whole map."""
        total, product, _ = way.sums(dy, scaling)
        grads, back = self.gradients(params, scaling, total, product, way.x.size // way.x.shape[-1])
        return way.backward(dy, scaling, back) if need_dx else None, grads


@dataclass(frozen=True)
class Chain:
    """Neighbouring local layers that run as one compiled loop. A scaling layer may be the first."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Chain:
        """Return the longest chain that these layers begin with."""
        count = 0
        while count < len(layers) and isinstance(layers[count], LocalLayer if count else LocalLayer | ScalingLayer):
            count += 1
        return cls(tuple(layers[:count]))

    def forward(
        self, params: Params, state: State, x: Array, contexts: Sequence[Context]
    ) -> tuple[Array, State, Residual]:
        """Return (y, state, residual) of a map or of vectors. params, state: of the head. contexts: of each layer."""
        scaling = None
        if isinstance(self.layers[0], ScalingLayer):
            scaling, state = self.layers[0].scaling(params, state, x, contexts[0])
        way = self._whole(x, contexts) or _ChainPass(self, x, contexts, goes_back=False)
        if isinstance(way, ScaledPass):
            assert scaling is not None, "only a scaling head makes such a pass"
            return way.forward(scaling), state, (x, scaling)
        return way.forward(scaling), state, (x, scaling)

    def backward(
        self,
        params: Params,
        residual: Residual,
        dy: Array,
        contexts: Sequence[Context],
        *,
        given: slice = ALL,
        wanted: slice = ALL,
    ) -> tuple[Array | None, Params]:
        """Return dx (None if the head has parameters and its dx is not needed) and the head's gradients.

        `given` are the channels that dy has (it is 0 elsewhere), `wanted` those that dx is needed for. Selecting them
        in cache costs less than a larger dy or dx in memory.
        """
        (x, scaling), head = residual, self.layers[0]
        whole = self._whole(x, contexts) if given == wanted == ALL else None
        if isinstance(whole, PooledPass) and scaling is None:
            return whole.backward(dy, None, None), {}
        if whole is not None:
            assert isinstance(head, ScalingLayer)
            return head.scaled_back(params, whole, scaling, dy, need_dx=contexts[0].need_dx)
        way = _ChainPass(self, x, contexts, goes_back=True)
        if scaling is None:
            return way.backward(dy, None, None, given, wanted), {}
        assert isinstance(head, ScalingLayer)
        total, product = way.sums(dy, scaling, given)
        grads, back = head.gradients(params, scaling, total, product, x.size // x.shape[-1])
        return way.backward(dy, scaling, back, given, wanted) if contexts[0].need_dx else None, grads

    def _whole(self, x: Array, contexts: Sequence[Context]) -> ScaledPass | PooledPass | None:
        """Return the pass that need not cut the map into blocks; None if the chain is not of that kind."""
        device, scaled = contexts[0].device, isinstance(self.layers[0], ScalingLayer)
        own = _operations(self.layers, contexts)
        codes = [operation.code for operation in own]
        if scaled and codes in ([], [RELU]):
            return ScaledPass(x, device, codes == [RELU])
        return PooledPass.of(own, x, device, scaled=scaled)


def _operations(layers: Sequence[Layer], contexts: Sequence[Context]) -> list[Operation]:
    """Return what the layers behind a scaling head are in the loop."""
    local = [(la, ctx) for la, ctx in zip(layers, contexts, strict=True) if isinstance(la, LocalLayer)]
    return [operation for layer, ctx in local if (operation := layer.operation(ctx)) is not None]


class _ChainPass:
    """A pass of a map through a chain, on the device's threads."""

    def __init__(self, chain: Chain, x: Array, contexts: Sequence[Context], *, goes_back: bool) -> None:
        self._shape, self._ctx, self._device = x.shape, contexts[0], contexts[0].device
        x = self._device.backend.contiguous(x)
        self._x = x if x.ndim == 4 else x[None, None]
        first = (Operation(SCALE),) if isinstance(chain.layers[0], ScalingLayer) else ()
        self._operations = (*first, *_operations(chain.layers, contexts))
        self._goes_back = goes_back
        keys = self._ctx.keys
        self._keys = np.zeros(0, np.uint64) if keys is None else self._device.backend.contiguous(keys)
        self._place = np.array([self._ctx.channel, x.ndim == 2], np.int64)

    @cached_property
    def _program(self) -> Program:
        return self._composed(self._operations, goes_back=self._goes_back)

    def _composed(self, operations: tuple[Operation, ...], *, goes_back: bool) -> Program:
        return _program(operations, self._x.shape, self._x.dtype, self._device.backend.block_bytes, goes_back)

    def forward(self, scaling: Scaling | None) -> Array:
        """Return y."""
        if not self._operations:
            return self._as_given(self._x.copy())
        return self._as_given(self._forward(self._program, _rows(scaling, None, self._x)))

    def _forward(self, program: Program, by_channel: Array) -> Array:
        y = np.empty(program.out_shape, self._x.dtype)
        self._each(program, lambda *own: compiled.chain.forward(self._x, y, by_channel, *own))
        return y

    def sums(self, dy: Array, scaling: Scaling, given: slice) -> tuple[Array, Array]:
        """Return the sums over pixels and samples of the gradient behind the head, and of it times (x - mean)."""
        dy_map, x = self._map(dy), self._x
        parts, none = np.empty((len(self._program.parts), 2, x.shape[-1])), np.empty((0, 0, 0, 0), x.dtype)
        by_channel, start = _rows(scaling, None, x), given.start or 0
        self._each(
            self._program,
            lambda *own: compiled.chain.backward(x, dy_map, none, parts, start, 0, False, by_channel, *own),
        )
        total, product = parts.sum(axis=0)
        return total, product

    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None, given: slice, wanted: slice) -> Array:
        """Return dx of the wanted channels; back: what else than the scaled gradient it is made of."""
        x, dy_map = self._x, self._map(dy)
        adds = not self._program.tiles
        by_channel = _rows(scaling, None if adds else back, x)
        dx, parts = self._start(scaling, back, wanted, adds=adds), np.empty((0, 0, 0))
        starts = given.start or 0, wanted.start or 0
        self._each(
            self._program, lambda *own: compiled.chain.backward(x, dy_map, dx, parts, *starts, adds, by_channel, *own)
        )
        return self._as_given(dx)

    def _start(self, scaling: Scaling | None, back: Scaling | None, wanted: slice, *, adds: bool) -> Array:
        """Return memory for dx, or what windows that overlap, or leave pixels out, add their gradients to."""
        x = self._x
        if not adds:
            return np.empty((*x.shape[:-1], len(range(x.shape[-1])[wanted])), x.dtype)
        if scaling is None or back is None:
            return np.zeros((*x.shape[:-1], len(range(x.shape[-1])[wanted])), x.dtype)
        program = self._composed((Operation(SCALE),), goes_back=False)
        base = self._forward(program, _rows(replace(back, mean=scaling.mean), None, x))
        return np.ascontiguousarray(base[..., wanted])

    def _each(self, program: Program, call: Callable[..., None]) -> None:
        """Call the loop for ranges of the program's parts, on threads."""
        device, dtype = self._device, self._x.dtype
        own = (program.table, program.numbers, program.block, program.parts, self._keys, self._place)

        def work(part: slice) -> None:
            thread, take = device.pool.thread, device.workspace.take
            scratch = take(f"chain {thread}", (program.scratch,), dtype)
            tiled = take(f"tiled {thread}", program.tiled, dtype) if program.tiled[0] else np.empty((0, 0), dtype)
            bits = take(f"keys {thread}", (program.bits,), np.uint64) if program.bits else np.empty(0, np.uint64)
            call(*own, part.start, part.stop, scratch, tiled, bits)

        device.pool.map(work, device.pool.slices(len(program.parts), at_least=THREAD_PARTS))

    def _map(self, dy: Array) -> Array:
        return self._device.backend.contiguous(dy).reshape(*self._program.out_shape[:3], dy.shape[-1])

    def _as_given(self, y: Array) -> Array:
        return y if len(self._shape) == 4 else y[0, 0]


def _rows(scaling: Scaling | None, back: Scaling | None, x: Array) -> Array:
    """Return what the loops take by channel; (0, C) without a head."""
    return np.empty((0, x.shape[-1]), x.dtype) if scaling is None else rows_of(scaling, back)


def rectifies(layer: Layer) -> bool:
    """Return whether the layer is a ReLU."""
    return isinstance(layer, LocalLayer) and layer.rectifies


@lru_cache(maxsize=1024)
def _program(
    operations: tuple[Operation, ...], shape: Shape, dtype: np.dtype[Any], limit: int, goes_back: bool
) -> Program:
    return Program.of(operations, shape, dtype, limit, goes_back=goes_back)
