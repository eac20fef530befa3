"""Layers that use the weights of an earlier layer of the same `Sequential`, transposed.

The weights are parameters of the earlier layer alone, their owner. A pass lends them to the tied layer, and the way
back adds the tied layer's gradients to the owner's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from daskcnn.arrays import Array
from daskcnn.errors import nearest
from daskcnn.nn.layer import Layer, LayerError, Params, Shape

Ties = Mapping[str, str]
"""The owner of each tied layer, by name."""


def ties_of(layers: Sequence[tuple[str, Layer]]) -> Ties:
    """Return who is tied to whom. Raises LayerError for a layer that is tied to none, or to one that cannot be."""
    for name, problem in tie_problems(layers).items():
        raise LayerError(name, problem)
    return {name: layer.tied_to for name, layer in layers if layer.tied_to is not None}


def tie_problems(layers: Sequence[tuple[str, Layer]]) -> Mapping[str, str]:
    """Return what is wrong with ties, by the name of the tied layer."""
    before: dict[str, Layer] = {}
    problems: dict[str, str] = {}
    for name, layer in layers:
        if layer.tied_to is not None and (problem := _problem(name, layer, before, [other for other, _ in layers])):
            problems[name] = f"tied = {layer.tied_to!r}: {problem}"
        before[name] = layer
    return problems


def _problem(name: str, layer: Layer, before: Mapping[str, Layer], names: Collection[str]) -> str | None:
    owner = layer.tied_to
    assert owner is not None
    if owner not in names:
        return f"there is no layer of this name beside it{nearest(owner, before)}"
    if owner not in before:
        return f"comes no earlier than {name}, so each would wait for the other; name a layer before it"
    if type(before[owner]) is not type(layer):
        return f"is a {type(before[owner]).__name__}, whose weights a {type(layer).__name__} cannot use"
    if (first := before[owner].tied_to) is not None:
        return f"has no weights of its own; name {first!r}, which it takes them from"
    return None


def check_tie(ties: Ties, name: str, in_shapes: Mapping[str, Shape], out_shapes: Mapping[str, Shape]) -> None:
    """Raise LayerError for a tied layer that does not go from its owner's outputs back to the owner's inputs."""
    if (owner := ties.get(name)) is None:
        return
    back = (prod(in_shapes[owner]),)
    if in_shapes[name] != out_shapes[owner]:
        wanted = f"{owner} transposed takes {out_shapes[owner]}; put a layer with such outputs before it"
        raise LayerError(name, f"input shape {in_shapes[name]}: {wanted}")
    if out_shapes[name] != back:
        raise LayerError(name, f"units = {out_shapes[name][0]}: {owner} transposed has {back[0]}; set units to it")


def lent(params: Params, ties: Ties) -> Params:
    """Return the parameters with a view of its owner's weights w (…, units) for each tied layer: (units, …)."""
    if not ties:
        return params
    return params | {name: params.get(name, {}) | {"w": _transposed(params[ties[name]]["w"])} for name in ties}


def given_back(grads: Params, ties: Ties) -> Params:
    """Return the gradients with those of lent weights added to their owners', where these have any."""
    for name, owner in ties.items():
        if name not in grads:
            continue
        tied = dict(grads[name])
        lent_w = tied.pop("w")
        grads = {other: own for other, own in grads.items() if other != name} | ({name: tied} if tied else {})
        if owner in grads:
            w = grads[owner]["w"]
            grads[owner] = grads[owner] | {"w": w + _transposed(lent_w).reshape(w.shape)}
    return grads


def _transposed(w: Array) -> Array:
    return w.reshape(-1, w.shape[-1]).T
