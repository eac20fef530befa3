"""Networks as data: [{"layer": "conv", "kernels": 32, "size": 5, "pad": 2}, {"layer": "relu"}, ...]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_origin, get_type_hints

from daskcnn.errors import nearest
from daskcnn.nn.layer import Layer
from daskcnn.nn.layers import LAYERS
from daskcnn.nn.sequential import Sequential

_MOST = 1 << 31
"""The largest number that a layer takes: sizes beyond it fit no machine, and no real number needs more."""


def sequential_from_spec(spec: Sequence[Mapping[str, Any]]) -> Sequential:
    """Return the network of these layers, named by kind and number: conv1, relu1, conv2, ...

    Raises ValueError for an unknown layer or option (naming the nearest right one), a missing option or a wrong value.
    """
    seen: Counter[str] = Counter()
    layers = []
    for position, entry in enumerate(spec):
        try:
            kind, layer = _layer(entry)
        except ValueError as error:
            raise ValueError(f"layers[{position}]: {error}") from error
        seen[kind] += 1
        layers.append((f"{kind}{seen[kind]}", layer))
    return Sequential(tuple(layers))


def spec_of(network: Sequential) -> list[dict[str, Any]]:
    """Invert `sequential_from_spec`: return the network's layers as tables, every option included.

    Raises ValueError for a layer that `LAYERS` does not have.
    """
    kinds = {layer: kind for kind, layer in LAYERS.items()}
    for name, layer in network.layers:
        if type(layer) not in kinds:
            raise ValueError(f"layer {name}: {type(layer).__name__} is none of LAYERS")
    return [
        {"layer": kinds[type(layer)]} | {f.name: v for f in fields(layer) if (v := getattr(layer, f.name)) is not None}  # type: ignore[arg-type] # every layer is a dataclass
        for _, layer in network.layers
    ]


def _layer(entry: Mapping[str, Any]) -> tuple[str, Layer]:
    options = dict(entry)
    kind = options.pop("layer", None)
    if kind is None:
        raise ValueError(f'{entry}: the key "layer" is missing; it is one of {", ".join(LAYERS)}')
    if not isinstance(kind, str) or kind not in LAYERS:
        raise ValueError(f'layer = "{kind}": there is none of this name{nearest(kind, LAYERS)}')
    layer = LAYERS[kind]
    known: dict[str, Field[Any]] = {field.name: field for field in fields(layer)}  # type: ignore[arg-type] # every layer is a dataclass
    for name in options.keys() - known.keys():
        raise ValueError(f"{name}: {kind} has no such option{nearest(name, known)}")
    if missing := [name for name, field in known.items() if field.default is MISSING and name not in options]:
        raise ValueError(f"{kind} needs {', '.join(missing)}")
    _check_types(kind, layer, options)
    return kind, layer(**options)


def _check_types(kind: str, layer: type[Layer], options: Mapping[str, Any]) -> None:
    hints = get_type_hints(layer)
    for name, value in options.items():
        allowed = (list, tuple) if get_origin(hints[name]) is tuple else get_args(hints[name]) or (hints[name],)
        if not any(_is_a(value, kind) for kind in allowed):
            wanted = " or ".join(t.__name__ for t in allowed if t is not type(None))
            raise ValueError(f"{name} = {value!r:.60}: {kind} needs {wanted} here, not {type(value).__name__}")
        if isinstance(value, int | float) and not abs(value) <= _MOST:
            raise ValueError(f"{name} = {value!r:.60}: {kind} takes numbers of at most {_MOST:,}")


def _is_a(value: object, wanted: type) -> bool:
    """isinstance, but a bool is not a number and an int is a float too."""
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)
