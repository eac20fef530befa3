"""Nested dicts of arrays: params, state and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from daskcnn.arrays import Array


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Array]]:
    """Yield every array with its path ("conv1/w"), in the order of the dicts."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def inside(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the part of a tree that belongs to the layer of this path; empty where it has none."""
    for name in path.split("/"):
        tree = tree.get(name, {})
    return tree


def map_leaves(function: Callable[[Array], Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Return the same nesting with `function` of every array."""
    return {
        name: map_leaves(function, value) if isinstance(value, dict) else function(value)
        for name, value in tree.items()
    }
