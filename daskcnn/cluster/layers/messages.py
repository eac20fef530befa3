"""Messages of a sharded step's tasks to other workers, and the shelf for what they leave on their own.

Dask may copy a result to any worker and forget the first copy, so a result is only what travels. The rest, a
shard and what is kept for the way back, lies on the worker's shelf, marked with the step it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import ClusterError
from daskcnn.ps.half import cast
from daskcnn.sharded import ALL, Edge, Side

Packed: TypeAlias = tuple[Array, str, float]
"""An array as it travels: in the wire's dtype, what it was, the factor that brings it back."""
_LARGEST = 2.0**15
"""What the largest number of an array is brought near to before it is cut to float16: a power of two below its end."""
_MOST = 120
"""Exponent of the factor at most: float32 has it and its inverse, but no factor for numbers near its own least one."""


class OutOfStep(ClusterError):
    """A worker does not have what a task needs, for Dask ran a task again: the run goes back to its last snapshot."""


class Shelf:
    """Keeps values on a worker, by name, with the step that they belong to.

    generation: how often the run has placed its pieces; what tasks of an older one leave behind is not taken.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._things: dict[Any, tuple[int, Any]] = {}

    def put(self, name: Any, step: int, thing: Any) -> None:
        """In the place of what was there."""
        self._things[name] = step, thing

    def has(self, name: Any, step: int) -> bool:
        """Whether it was put there for this step."""
        return self._things.get(name, (None, None))[0] == step

    def get(self, name: Any, step: int) -> Any:
        """The value that was put there for this step. Raises OutOfStep."""
        found, thing = self._things.get(name, (None, None))
        if found != step:
            raise OutOfStep(f"step {step}: {name} is of step {found}; a task was run twice")
        return thing

    def take(self, name: Any, step: int) -> Any:
        """The same, which leaves the shelf."""
        thing = self.get(name, step)
        del self._things[name]
        return thing


@dataclass(frozen=True)
class Claim:
    """To parts on a worker's shelf, each under this name and that of the worker whom it is for."""

    address: str
    run: str
    generation: int
    step: int
    name: tuple[Any, ...]


class TaskResult:
    """maker: the worker it is from. parts: of the workers of these names, or of `ALL`; of gradients, by stage and
    worker. edges: channels at both ends of a shard, for its neighbours. wire: the dtype that parts travel in. arrived:
    whether it came over the wire. claim: to parts that are not in it.
    """

    __slots__ = ("arrived", "claim", "edges", "maker", "parts", "wire")

    def __init__(
        self,
        maker: str,
        parts: Mapping[Any, Array],
        edges: Mapping[Side, Edge] | None = None,
        wire: str = "float32",
        arrived: bool = False,
        claim: Claim | None = None,
    ) -> None:
        self.maker, self.parts, self.edges = maker, dict(parts), dict(edges or {})
        self.wire, self.arrived, self.claim = wire, arrived, claim

    def part(self, worker: str, stage: int | None = None) -> Array:
        """The part for this worker, of gradients that of this stage's outputs."""
        found = next((name for name in ((stage, worker), (stage, ALL), worker) if name in self.parts), ALL)
        return self.parts[found]

    def as_sent(self, worker: str) -> Array:
        """The same, as it arrives where it has come over the wire: there it may have lost digits."""
        part = self.part(worker)
        return part if self.arrived else unpacked(*packed(part, self.wire))

    def __sizeof__(self) -> int:
        return sum(array.nbytes for array in self.parts.values())

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {worker: packed(array, self.wire) for worker, array in self.parts.items()}
        return _arrived, (self.maker, parts, self.edges, self.wire, self.claim)


def _arrived(
    maker: str, parts: dict[Any, Packed], edges: dict[Side, Edge], wire: str, claim: Claim | None
) -> TaskResult:
    whole = {worker: unpacked(*part) for worker, part in parts.items()}
    return TaskResult(maker, whole, edges, wire, arrived=True, claim=claim)


def wire_bytes(array: Array, wire: str) -> int:
    """Bytes that an array takes on its way."""
    return int(array.nbytes if wire == "float32" else array.size * np.dtype(wire).itemsize)


def packed(array: Array, wire: str) -> Packed:
    """In the wire's dtype, what it was, and the factor that brings it back. float64 stays what it is on float32."""
    if wire == "float32":
        return array, array.dtype.name, 1.0
    factor = _factor(array)
    return cast(array * array.dtype.type(factor), wire), array.dtype.name, 1 / factor


def unpacked(array: Array, dtype: str, factor: float) -> Array:
    """The array in its own dtype, as `packed` was given it, rounded by the wire's dtype."""
    if array.dtype.name == dtype:
        return array
    whole: Array = cast(array, dtype)
    return whole if factor == 1 else np.multiply(whole, whole.dtype.type(factor), out=whole)


def _factor(array: Array) -> float:
    """The power of two that makes the most of float16's range: gradients are far smaller than its least number."""
    largest = max(float(array.max()), -float(array.min())) if array.size else 0.0
    if not (math.isfinite(largest) and largest > 0):
        return 1.0
    return float(2.0 ** min(_MOST, math.floor(math.log2(_LARGEST) - math.log2(largest))))


def arrays_of(edge: Edge) -> Iterator[Array]:
    """The arrays of a shard's edge."""
    for tree in edge:
        yield from _leaves(tree)


def _leaves(tree: Mapping[str, Any]) -> Iterator[Array]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value
