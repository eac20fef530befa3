"""Named blocks of layers with parameters, and repeated entries: what a list of layers is written with for short.

[model.blocks.basic]
defaults = { stride = 1 }
layers = [{ layer = "conv", kernels = "$kernels", size = 3, stride = "$stride", pad = 1 }, { layer = "relu" }]

[[model.layers]]
block = "basic"
kernels = 32
repeat = 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from daskcnn.errors import nearest

Spec = list[dict[str, Any]]
MOST_REPEATS, MOST_LAYERS = 1000, 2000
"""The most times that an entry is repeated, and the most layers of a network."""


class BlockOfLayers(Protocol):
    """Layers in which "$name" stands for a parameter; `defaults` are the values of those that are not given."""

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers, in order."""
        ...

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of parameters by name."""
        ...


def expand(layers: Sequence[Mapping[str, Any]], blocks: Mapping[str, BlockOfLayers]) -> tuple[Spec, list[str]]:
    """Return the list of layers with blocks and repetitions written out, and all that is wrong with it, with places."""
    work = _Expansion(blocks)
    for name in blocks:
        work.check_uses(name)
    return list(work.entries(layers, "layers", {}, ())), work.problems


class _Expansion:
    """One list's expansion. A problem is noted, and its entry left out."""

    def __init__(self, blocks: Mapping[str, BlockOfLayers]) -> None:
        self.blocks, self.problems, self._made = blocks, list[str](), 0

    def check_uses(self, name: str) -> None:
        """Note defaults of a block that its layers do not use."""
        used = set(_parameters(self.blocks[name].layers))
        for unused in sorted(self.blocks[name].defaults.keys() - used):
            self.problems.append(f"blocks.{name}.defaults.{unused}: no layer of the block has ${unused}; remove it")

    def entries(
        self, layers: Sequence[Mapping[str, Any]], place: str, values: Mapping[str, Any], within: tuple[str, ...]
    ) -> Iterator[dict[str, Any]]:
        """Yield the layers of a list in a block's place; values: of its parameters; within: the blocks around it."""
        for i, entry in enumerate(layers):
            here = f"{place}[{i}]"
            given = {key: self._filled(value, f"{here}.{key}", values) for key, value in entry.items()}
            repeat = given.pop("repeat", 1)
            if isinstance(repeat, bool) or not isinstance(repeat, int) or not 1 <= repeat <= MOST_REPEATS:
                self._note(f"{here}.repeat = {repeat!r:.40}: write a whole number of 1 to {MOST_REPEATS:,}")
                continue
            for _ in range(repeat):
                if self._made > MOST_LAYERS:
                    self._note(f"{here}: the network has more than {MOST_LAYERS:,} layers; repeat less")
                    return
                yield from self._entry(given, here, within)

    def _entry(self, entry: dict[str, Any], here: str, within: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        if "block" in entry:
            yield from self._block(entry, here, within)
            return
        self._made += 1
        yield {key: self._inner(value, f"{here}.{key}", within) for key, value in entry.items()}

    def _inner(self, value: Any, here: str, within: tuple[str, ...]) -> Any:
        """Expand the lists of layers inside a layer."""
        if not isinstance(value, list):
            return value
        if value and all(isinstance(each, Mapping) for each in value):
            return list(self.entries(value, here, {}, within))
        return [self._inner(each, f"{here}[{i}]", within) for i, each in enumerate(value)]

    def _block(self, entry: dict[str, Any], here: str, within: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        name = entry["block"]
        given = {key: value for key, value in entry.items() if key != "block"}
        block = self.blocks.get(name) if isinstance(name, str) else None
        if block is None:
            known = nearest(str(name), self.blocks) if self.blocks else "; there are no [model.blocks]"
            self._note(f"{here}.block = {name!r:.60}: there is none of this name{known}")
            return
        if name in within:
            self._note(f"{here}.block = {name!r}: it is inside itself ({' in '.join((name, *reversed(within)))})")
            return
        parameters = set(_parameters(block.layers))
        for key in sorted(given.keys() - parameters):
            self._note(f"{here}.{key}: block {name} has no such parameter{nearest(key, parameters)}")
        values = {**block.defaults, **given}
        if missing := sorted(parameters - values.keys()):
            self._note(f"{here}: block {name} needs {', '.join(missing)}")
            return
        yield from self.entries(block.layers, f"{here} blocks.{name}.layers", values, (*within, name))

    def _filled(self, value: Any, here: str, values: Mapping[str, Any]) -> Any:
        """Return the value with the block's parameters in it. Missing ones were noted where the block is used."""
        if isinstance(value, str) and value.startswith("$"):
            if value[1:] not in values:
                self._note(f"{here} = {value!r:.60}: only a block's layers have parameters")
            return values.get(value[1:], 1)
        if isinstance(value, Mapping):
            return {key: self._filled(each, f"{here}.{key}", values) for key, each in value.items()}
        if isinstance(value, list):
            return [self._filled(each, f"{here}[{i}]", values) for i, each in enumerate(value)]
        return value

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def _parameters(value: Any) -> Iterator[str]:
    """Yield the names of the parameters in a block's layers."""
    if isinstance(value, str):
        if value.startswith("$"):
            yield value[1:]
        return
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inner:
        yield from _parameters(each)
