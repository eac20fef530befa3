"""Local layers, whose output pixels depend on nearby input alone, and the loops that serve runs of them.

On processors neighbouring local layers run together, as `first_run` cuts them, and keep only their input for the way
back. `pass_of` chooses the loop, by the operations that the layers are:

==================================================  ==================================================
batch normalising; a ReLU behind it                 `ScaledPass`, over the whole map
a residual block that ends so; a ReLU behind it     `ScaledPass`, with a sum (`parallel.NormalisedSum`)
pools of 2×2 with these, or some activations        `PooledPass`, over the whole map
any others                                          `BlockPass`, over blocks that stay in cache
==================================================  ==================================================

On GPUs each layer is array expressions of its own, and keeps what it needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import takewhile
from typing import Any, ClassVar

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import Array, Device
from daskcnn.compiled.program import AVERAGE, MAX, RELU, SCALE, TANH, Operation, Program
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State
from daskcnn.nn.scaled import THREAD_PARTS, Pass, PooledPass, ScaledPass, Scaling, WholePass, rows_of

ALL = slice(None)
"""Every channel."""
WholeLoop = Callable[[Array, Device], WholePass]


class LocalLayer(Layer):
    """Base of layers without parameters, each pixel of whose output depends on a window of pixels of the input.

    code: of its compiled loop, one of `compiled.program`. Without one it runs by array expressions everywhere.
    """

    code: ClassVar[int | None] = None

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone."""
        return 0

    @property
    def constants(self) -> tuple[float, ...]:
        """The numbers that the loop computes with."""
        return ()

    def operation(self, ctx: Context) -> Operation | None:
        """Return what the layer is in a compiled chain; None if this pass leaves x as it is."""
        assert self.code is not None, "layers without a loop are in no chain"
        return Operation(self.code, self.constants)

    @abstractmethod
    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return (y, residual) by array expressions over `ctx.device.xp`."""

    @abstractmethod
    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dx by array expressions."""

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Run the layer as a chain of one, or by array expressions."""
        if ctx.device.backend.compiled and self.code is not None:
            return Chain((self,)).forward(params, state, x, [ctx])
        y, residual = self.array_forward(x, ctx)
        return y, state, residual

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Run the chain of one backward, or array expressions."""
        if ctx.device.backend.compiled and self.code is not None:
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


@dataclass(frozen=True)
class Chain:
    """Neighbouring local layers that run as one compiled loop. A scaling layer may be the first."""

    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Chain:
        """Return the longest chain that these layers begin with."""
        headed = bool(layers) and isinstance(layers[0], ScalingLayer)
        behind = takewhile(lambda each: isinstance(each, LocalLayer) and each.code is not None, layers[headed:])
        return cls((*layers[:headed], *behind))

    def forward(
        self, params: Params, state: State, x: Array, contexts: Sequence[Context]
    ) -> tuple[Array, State, Residual]:
        """Return (y, state, residual) of a map or of vectors. params, state: of the head. contexts: of each layer."""
        head, scaling = self.layers[0], None
        if isinstance(head, ScalingLayer):
            scaling, state = head.scaling(params, state, x, contexts[0])
        return self._pass(x, contexts, goes_back=False).forward(scaling), state, (x, scaling)

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
        way = self._pass(x, contexts, goes_back=True, given=given, wanted=wanted)
        if not isinstance(head, ScalingLayer):
            return way.backward(dy, None, None), {}
        total, product = way.sums(dy, scaling)
        grads, back = head.gradients(params, scaling, total, product, x.size // x.shape[-1])
        return way.backward(dy, scaling, back) if contexts[0].need_dx else None, grads

    def _pass(self, x: Array, contexts: Sequence[Context], **options: Any) -> Pass:
        found = [la.operation(ctx) for la, ctx in zip(self.layers, contexts, strict=True) if isinstance(la, LocalLayer)]
        head = (Operation(SCALE),) if isinstance(self.layers[0], ScalingLayer) else ()
        operations = (*head, *(operation for operation in found if operation is not None))
        return pass_of(operations, x, contexts[0], **options)


def first_run(layers: Sequence[Layer]) -> tuple[Chain | Layer, int]:
    """Return what the first of these layers run as on processors, and how many they are.

    They run as a chain, as one layer with the ReLU behind it, or the first one runs alone.
    """
    if (chain := Chain.of(layers)).layers:
        return chain, len(chain.layers)
    first, *others = layers
    followed = bool(others) and isinstance(others[0], LocalLayer) and others[0].code == RELU
    rectified = first.with_relu() if followed else None
    return (first, 1) if rectified is None else (rectified, 2)


_RECTIFIED = partial(PooledPass, pool=MAX, activation=RELU)
LOOPS: Mapping[tuple[int, ...], WholeLoop] = {
    (SCALE,): partial(ScaledPass, rectified=False),
    (SCALE, RELU): partial(ScaledPass, rectified=True),
    (SCALE, MAX): partial(PooledPass, pool=MAX),
    (SCALE, RELU, MAX): _RECTIFIED,
    (SCALE, MAX, RELU): _RECTIFIED,
    (MAX,): partial(PooledPass, pool=MAX),
    (RELU, MAX): _RECTIFIED,
    (MAX, RELU): _RECTIFIED,
    (AVERAGE,): partial(PooledPass, pool=AVERAGE),
    (RELU, AVERAGE): partial(PooledPass, pool=AVERAGE, activation=RELU),
    (TANH, AVERAGE): partial(PooledPass, pool=AVERAGE, activation=TANH),
}
"""Loops over whole maps, by the operations that they serve. A ReLU and a greatest number may change places."""


def pass_of(
    operations: tuple[Operation, ...],
    x: Array,
    ctx: Context,
    *,
    goes_back: bool,
    given: slice = ALL,
    wanted: slice = ALL,
) -> Pass:
    """Return the pass of a map or of vectors x through these operations: over the whole map where there is a loop."""
    whole = whole_loop(operations, x.shape) if given == wanted == ALL else None
    if whole is not None:
        return whole(ctx.device.backend.contiguous(x), ctx.device)
    return BlockPass(operations, x, ctx, goes_back, given, wanted)


@lru_cache(maxsize=1024)
def whole_loop(operations: tuple[Operation, ...], shape: Shape) -> WholeLoop | None:
    """Return the loop of `LOOPS` for a map or vectors of this shape; None if there is none.

    Pools over whole maps have windows of 2×2 pixels side by side. Behind a scaling, every pixel lies in one.
    """
    pools = [(o.size, o.step) for o in operations if o.code in (MAX, AVERAGE)]
    whole = LOOPS.get(tuple(o.code for o in operations))
    if pools and whole is not None:
        sides = shape[:2] if len(shape) == 4 else (0, 0)
        all_in_windows = operations[0].code != SCALE or not any(side % 2 for side in sides)
        return whole if pools == [(2, 2)] and min(sides) >= 2 and all_in_windows else None
    return whole


class BlockPass(Pass):
    """A pass through a chain in blocks that stay in cache; `given` channels of dy, those `wanted` of dx."""

    def __init__(
        self, operations: tuple[Operation, ...], x: Array, ctx: Context, goes_back: bool, given: slice, wanted: slice
    ) -> None:
        self._is_map, self._device, self._operations = x.ndim == 4, ctx.device, operations
        self._goes_back, self._given, self._wanted = goes_back, given, wanted
        contiguous = self._device.backend.contiguous
        self._x = contiguous(x) if self._is_map else contiguous(x)[None, None]
        self._keys = np.zeros(0, np.uint64) if ctx.keys is None else contiguous(ctx.keys)
        self._place = np.array([ctx.channel, x.ndim == 2], np.int64)

    @cached_property
    def _program(self) -> Program:
        return self._composed(self._operations, goes_back=self._goes_back)

    def _composed(self, operations: tuple[Operation, ...], *, goes_back: bool) -> Program:
        limit = self._device.backend.block_bytes
        return _program_of(operations, self._x.shape, self._x.dtype, limit, goes_back=goes_back)

    def forward(self, scaling: Scaling | None) -> Array:
        """Return y."""
        if not self._operations:
            return self._as_given(self._x.copy())
        return self._as_given(self._forward(self._program, self._rows(scaling, None)))

    def _forward(self, program: Program, by_channel: Array) -> Array:
        y = np.empty(program.out_shape, self._x.dtype)
        self._each(program, lambda *own: compiled.chain.forward(self._x, y, by_channel, *own))
        return y

    def sums(self, dy: Array, scaling: Scaling) -> tuple[Array, Array]:
        """Return the sums."""
        parts, none = np.empty((len(self._program.parts), 2, self._x.shape[-1])), np.empty((0, 0, 0, 0), self._x.dtype)
        self._back(dy, none, parts, 0, False, self._rows(scaling, None))
        total, product = parts.sum(axis=0)
        return total, product

    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return dx of the wanted channels."""
        adds = not self._program.tiles
        dx = self._start(scaling, back, adds=adds)
        by_channel = self._rows(scaling, None if adds else back)
        self._back(dy, dx, np.empty((0, 0, 0)), self._wanted.start or 0, adds, by_channel)
        return self._as_given(dx)

    def _back(self, dy: Array, dx: Array, parts: Array, wanted: int, adds: bool, by_channel: Array) -> None:
        dy = self._device.backend.contiguous(dy).reshape(*self._program.out_shape[:3], dy.shape[-1])
        own = self._x, dy, dx, parts, self._given.start or 0, wanted, adds, by_channel
        self._each(self._program, lambda *rest: compiled.chain.backward(*own, *rest))

    def _start(self, scaling: Scaling | None, back: Scaling | None, *, adds: bool) -> Array:
        """Return memory for dx, or what windows that overlap, or leave pixels out, add their gradients to."""
        x = self._x
        if not adds or scaling is None or back is None:
            return (np.zeros if adds else np.empty)((*x.shape[:-1], len(range(x.shape[-1])[self._wanted])), x.dtype)
        program = self._composed((Operation(SCALE),), goes_back=False)
        base = self._forward(program, self._rows(replace(back, mean=scaling.mean), None))
        return np.ascontiguousarray(base[..., self._wanted])

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

    def _rows(self, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return what the loops take by channel; (0, C) without a scaling."""
        return np.empty((0, self._x.shape[-1]), self._x.dtype) if scaling is None else rows_of(scaling, back)

    def _as_given(self, y: Array) -> Array:
        return y if self._is_map else y[0, 0]


_program_of = lru_cache(maxsize=1024)(Program.of)
