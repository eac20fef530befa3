"""A network cut into stages, one for each convolution. Residual blocks and branches are cut too.

A block's paths become stages that read the same outputs. The last stage of a sum's last path adds the others: each
shard adds its own channels, most of which its worker already has. Outputs of branches are joined only by the stages
that read them. A composite layer whose paths do not end like that stays whole, among the layers that are not divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from daskcnn.nn import Layer, Sequential
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.layers.dense import Bias, Dense
from daskcnn.nn.layers.dropout import Dropout
from daskcnn.nn.layers.parallel import Add, Branches, Parallel, Path, Residual
from daskcnn.nn.layers.reshape import Pad
from daskcnn.sharded.stages import Addend, Named, Stage

Value: TypeAlias = tuple[int, ...]
"""Stages whose outputs, side by side, make one array; none: the network's input."""


def stages_of(model: Sequential) -> tuple[Stage, ...]:
    """Cut the network into stages, each behind those that it reads. The last one's outputs are the scores.

    Raises ValueError if layers of different stages share weights, as these lie on different workers.
    """
    cut = _CutLayers(frozenset(model.ties.values()))
    value = cut.sequence(model.layers, (), "")
    if cut.apart:
        raise ValueError(f"layers {', '.join(cut.apart)} share weights, and a convolution lies between them")
    if value != (len(cut.stages) - 1,):
        cut.added(Stage(None, None, None, None, inputs=value))
    return tuple(cut.stages)


class _StaysWhole(Exception):
    """A composite layer cannot be cut."""


class _CutLayers:
    """The stages so far. apart: pairs of layers in different stages that share weights, which rule stages out.

    owners: layers whose weights later layers use. They are not divided.
    """

    def __init__(self, owners: frozenset[str]) -> None:
        self.stages: list[Stage] = []
        self.apart: list[str] = []
        self._owners = owners
        self._shared: Counter[int] = Counter()  # outputs that several paths of a block under way read

    def added(self, stage: Stage) -> Value:
        """Add a stage. Returns its outputs."""
        self.stages.append(stage)
        return (len(self.stages) - 1,)

    def sequence(self, layers: Sequence[Named], value: Value, inside: str) -> Value:
        """Add layers in sequence. inside: the path of the composite layer around them with a slash, or empty."""
        lead: tuple[Named, ...] = ()
        for name, layer in layers:
            named = inside + name, layer
            if layer.tied_to is not None and self._is_apart(layer.tied_to, value, inside):
                self.apart.append(f"{name} and {layer.tied_to}")
            elif isinstance(layer, Conv):
                led = Sequential(lead) if lead else None
                value, lead = self.added(Stage(named[0], layer, None, None, lead=led, inputs=value)), ()
            elif isinstance(layer, Parallel) and (found := self._cut(layer, value, lead, named[0])) is not None:
                value, lead = found, ()
            elif not lead and self._extended(value, named, summing=not inside and name not in self._owners):
                pass
            elif (inside or value) and layer.reach is not None and _is_plain(layer):
                lead += (named,)
            else:
                value, lead = self._together(value, (*lead, named)), ()
        return self._together(value, lead) if lead else value

    def _together(self, value: Value, layers: tuple[Named, ...]) -> Value:
        return self.added(Stage(None, None, None, Sequential(layers), inputs=value))

    # --- layers behind a stage's convolution ---

    def _extended(self, value: Value, named: Named, *, summing: bool) -> bool:
        """Add a layer to the stages whose outputs it reads. Returns False if others need these outputs without it."""
        if not value or any(self._is_needed(stage) for stage in value):
            return False
        stages, layer = [self.stages[i] for i in value], named[1]
        alike = layer.reach == 0 and _is_plain(layer) and not isinstance(layer, Dropout)  # whatever a channel's number
        if len(stages) > 1 and not (alike and all(map(_is_open, stages))):
            return False
        for i, stage in zip(value, stages, strict=True):
            self.stages[i] = _with_layer(stage, named, summing=summing)
        return True

    def _is_apart(self, owner: str, value: Value, inside: str) -> bool:
        """True if a layer that uses this one's weights would be in another stage."""
        if inside:
            raise _StaysWhole  # the owner's name leaves out the composite layer around the path
        if len(value) != 1 or self._is_needed(value[0]):
            return True
        rest = self.stages[value[0]].rest
        return rest is None or owner not in dict(rest.layers)

    def _is_needed(self, stage: int) -> bool:
        return self._shared[stage] > 0 or any(stage in other.consumed for other in self.stages)

    # --- composite layers ---

    def _cut(self, layer: Parallel, value: Value, lead: tuple[Named, ...], path: str) -> Value | None:
        """Cut a composite layer. Returns None if it has to stay whole."""
        before = list(self.stages)
        value = self._together(value, lead) if lead else value
        self._shared.update(value)
        try:
            match layer:
                case Branches():
                    return self._side_by_side(layer.paths, value, path)
                case Add():
                    return self._sum(layer.paths, value, path)
                case Residual():
                    return self._sum(layer.paths[::-1], value, path)  # the path adds the shortcut
        except _StaysWhole:
            self.stages = before
        finally:
            self._shared.subtract(value)
        return None

    def _side_by_side(self, paths: Sequence[Path], value: Value, inside: str) -> Value:
        found: list[int] = []
        for name, path in paths:
            if path is None:
                found += value
            elif _has_convolution(path):
                found += self.sequence(path.layers, value, f"{inside}/{name}/")
            else:
                raise _StaysWhole
        if not value or len({*found}) < len(found):
            raise _StaysWhole
        return tuple(found)

    def _sum(self, paths: Sequence[Path], value: Value, inside: str) -> Value:
        """Add a sum: the last path with a convolution adds the others' outputs, and the input through plain layers."""
        terms: list[tuple[Value, Sequential | None]] = []
        last: Value = ()
        for name, path in paths:
            if path is None or not _has_convolution(path):
                terms.append((value, path and _by_channel(path, f"{inside}/{name}/")))
                continue
            terms += [(last, None)] if last else []
            last = self.sequence(path.layers, value, f"{inside}/{name}/")
        if len(last) != 1 or self._is_needed(last[0]):
            raise _StaysWhole
        stage = self.stages[last[0]]
        if not _is_open(stage) or stage.reach:
            raise _StaysWhole
        addends = (Addend(each, layers, len(stage.names)) for each, layers in terms)
        self.stages[last[0]] = replace(stage, addends=(*stage.addends, *addends))
        return last


def _is_open(stage: Stage) -> bool:
    """True if its outputs are those of its shards, side by side."""
    return not stage.merged and stage.summed is None


def _with_layer(stage: Stage, named: Named, *, summing: bool) -> Stage:
    """Return the stage with another layer, spread if possible. No layer may reach over channels behind an addition.

    summing: whether a fully connected layer may be divided.
    """
    layer = named[1]
    rest = stage.rest.layers if stage.rest else ()
    if _is_open(stage) and layer.reach is not None and not (stage.addends and layer.reach):
        return replace(stage, spread=Sequential((*(stage.spread.layers if stage.spread else ()), named)))
    if _is_open(stage) and summing and isinstance(layer, Dense):
        bias = Sequential(((named[0], Bias()),)) if layer.bias else None
        return replace(stage, summed=(named[0], replace(layer, bias=False)), rest=bias)
    return replace(stage, rest=Sequential((*rest, named)))


def _is_plain(layer: Layer) -> bool:
    """True if a layer that goes by channel has neither parameters nor state."""
    return layer.numbers((1, 1, 1)) == 0


def _has_convolution(layer: Layer) -> bool:
    """True if a path has a convolution at any depth."""
    if isinstance(layer, Parallel):
        return any(path is not None and _has_convolution(path) for _, path in layer.paths)
    if isinstance(layer, Sequential):
        return any(_has_convolution(child) for _, child in layer.layers)
    return isinstance(layer, Conv)


def _by_channel(path: Sequential, inside: str) -> Sequential | None:
    """The layers of a path that each worker computes for its own channels, without zero channels padded at its end."""
    *before, (name, last) = path.layers
    layers = [*before, (name, last)]
    if isinstance(last, Pad) and last.channels:
        layers = [*before, *([(name, replace(last, channels=0))] if last.size else [])]
    if not all(layer.reach == 0 and _is_plain(layer) for _, layer in layers):
        raise _StaysWhole
    return Sequential(tuple((inside + name, layer) for name, layer in layers)) if layers else None
