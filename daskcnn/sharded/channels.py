"""Channels of what belongs to a shard: parameters, gradients, state, by path.

They lie along the last axis of every array, but for the weights of a stage's summed layer, which have them before its
outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from daskcnn.nn import map_leaves
from daskcnn.sharded.stages import Stage


def of_channels(stage: Stage, tree: dict[str, Any], part: slice) -> dict[str, Any]:
    """Views of these channels, in the same tree."""
    found = {}
    for name, own in tree.items():
        cut = itemgetter((..., part) if _axis(stage, name) == -1 else (..., part, slice(None)))
        found[name] = map_leaves(cut, own)
    return found


def side_by_side(stage: Stage, trees: Sequence[dict[str, Any]], xp: Any) -> dict[str, Any]:
    """Trees of the same layers, their channels in turn."""
    return {name: _joined([tree[name] for tree in trees], _axis(stage, name), xp) for name in trees[0]}


def _joined(parts: Sequence[Any], axis: int, xp: Any) -> Any:
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts], axis, xp) for name in parts[0]}
    return xp.concatenate(parts, axis=axis)


def _axis(stage: Stage, layer: str) -> int:
    return -2 if stage.summed and layer == stage.summed[0] else -1
