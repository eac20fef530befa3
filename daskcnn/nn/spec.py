"""Networks as data: [{"layer": "conv", "kernels": 32, "size": 5, "pad": 2}, {"layer": "relu"}, ...].

Named blocks of layers with parameters, and repeated entries, make such lists short:

[model.blocks.basic]
defaults = { stride = 1 }
layers = [{ layer = "conv", kernels = "$kernels", size = 3, stride = "$stride", pad = 1 }, { layer = "relu" }]

[[model.layers]]
block = "basic"
kernels = 32
repeat = 3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from daskcnn.errors import nearest, or_own
from daskcnn.nn.layer import Layer
from daskcnn.nn.layers import LAYERS, kind_of
from daskcnn.nn.sequential import Sequential, tie_problems

Spec = list[dict[str, Any]]
MOST_REPEATS, MOST_LAYERS = 1000, 2000
"""The most times that an entry is repeated, and the most layers of a network."""


class BlockOfLayers(Protocol):
    """Layers in which "$name" stands for a parameter; `defaults` are the values of those that are not given."""

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers, in order."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of parameters by name."""


def expand(layers: Sequence[Mapping[str, Any]], blocks: Mapping[str, BlockOfLayers]) -> tuple[Spec, list[str]]:
    """Return the list of layers with blocks and repetitions written out, and all that is wrong with it, with places."""
    work = _Expansion(blocks)
    for name, block in blocks.items():
        for unused in sorted(block.defaults.keys() - set(_parameters(block.layers))):
            work.problems.append(f"blocks.{name}.defaults.{unused}: no layer of the block has ${unused}; remove it")
    return list(work.entries(layers, "layers", {}, ())), work.problems


class _Expansion:
    """One list's expansion. A problem is noted, and its entry left out."""

    def __init__(self, blocks: Mapping[str, BlockOfLayers]) -> None:
        self.blocks, self.problems, self._made = blocks, list[str](), 0

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
                made = self._made
                if made > MOST_LAYERS:
                    self._note(f"{here}: the network has more than {MOST_LAYERS:,} layers; repeat less")
                    return
                if "block" in given:
                    yield from self._block(given, here, within)
                else:
                    self._made += 1
                    yield {key: self._inner(value, f"{here}.{key}", within) for key, value in given.items()}
                if self._made == made:  # and no repetition would make more
                    break

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
    if isinstance(value, str) and value.startswith("$"):
        yield value[1:]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inner:
        yield from _parameters(each)


_MOST = 1 << 31
"""The largest number that a layer takes: sizes beyond it fit no machine, and no real number needs more."""


def sequential_from_spec(spec: Sequence[Mapping[str, Any]], key: str = "layers") -> Sequential:
    """Return the network of these layers, named by kind and number: conv1, relu1, conv2, ...

    The list is under `key`. Raises SpecError with all unknown, missing and wrong layers and options, the nearest right
    ones named.
    """
    seen: Counter[str] = Counter()
    layers, problems = [], list[str]()
    for position, entry in enumerate(spec):
        try:
            kind, layer = _layer(entry)
        except ValueError as error:
            mark = "." if type(error) is SpecError else ": "
            own = error.problems if isinstance(error, SpecError) else (error,)
            problems += [f"{key}[{position}]{mark}{problem}" for problem in own]
        else:
            seen[kind] += 1
            layers.append((f"{kind}{seen[kind]}", layer))
    if not problems:
        wrong = tie_problems(layers)
        problems = [f"{key}[{i}]: {wrong[name]}" for i, (name, _) in enumerate(layers) if name in wrong]
    if problems:
        raise SpecError(problems)
    return Sequential(tuple(layers))


class SpecError(ValueError):
    """All that is wrong with a list of layers; each problem begins with its place in the list."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class _OptionsError(SpecError):
    """All that is wrong with the options of one layer, which have no places."""


def spec_of(network: Sequential) -> list[dict[str, Any]]:
    """Return the layers as tables, every option included. Raises ValueError for one that `LAYERS` does not have."""
    tables = []
    for name, layer in network.layers:
        if (kind := kind_of(layer)) is None:
            raise ValueError(f"layer {name}: {type(layer).__name__} is none of LAYERS")
        given = ((field.name, getattr(layer, field.name)) for field in fields(layer))  # type: ignore[arg-type] # every layer is a dataclass
        tables.append({"layer": kind} | {name: _as_given(value) for name, value in given if value is not None})
    return tables


def _as_given(value: Any) -> Any:
    if isinstance(value, Sequential):
        return spec_of(value)
    if isinstance(value, tuple):
        return [[] if each is None else _as_given(each) for each in value]
    return value


def _layer(entry: Mapping[str, Any]) -> tuple[str, Layer]:
    options = dict(entry)
    kind = options.pop("layer", None)
    if kind is None:
        raise ValueError(f'{entry}: the key "layer" is missing; it is one of {", ".join(LAYERS)}')
    if not isinstance(kind, str) or kind not in LAYERS:
        raise ValueError(f'layer = "{kind}": there is none of this name{_meant(kind, LAYERS)}')
    layer = LAYERS[kind]
    known: dict[str, Field[Any]] = {field.name: field for field in fields(layer)}  # type: ignore[arg-type] # every layer is a dataclass
    hints = get_type_hints(layer)
    wrong = [f"{name}: {kind} has no such option{_meant(name, known)}" for name in options if name not in known]
    told = "".join(wrong)  # a key that was meant is not missing too
    needed = [name for name, field in known.items() if field.default is MISSING and name not in options]
    if missing := [name for name in needed if f"did you mean {name!r}?" not in told]:
        wrong.append(f"{kind} needs {', '.join(missing)}")
    wrong += _of_wrong_types(kind, hints, {name: value for name, value in options.items() if name in known})
    if wrong:
        raise _OptionsError(wrong)
    reads = {name: _PATHS[hint] for name, hint in hints.items() if name in options and hint in _PATHS}
    options |= _each((name, convert, options[name]) for name, convert in reads.items())
    return kind, layer(**{name: tuple(v) if isinstance(v, list) else v for name, v in options.items()})


def _each(paths: Iterable[tuple[str, Callable[[str, Any], Any], Any]]) -> dict[str, Any]:
    """Return what is read from values, by key. Raises SpecError with all that is wrong with them."""
    found, problems = dict[str, Any](), list[str]()
    for key, convert, value in paths:
        try:
            found[key] = convert(key, value)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return found


_ELSEWHERE = {
    there: here
    for here, names in {
        "conv": "conv2d",
        "dense": "linear fc",
        "batchnorm": "batchnorm2d batchnormalization",
        "maxpool": "maxpool2d maxpooling2d",
        "averagepool": "avgpool2d averagepooling2d",
        "globalpool": "adaptiveavgpool2d globalaveragepooling2d",
        "lrn": "localresponsenorm",
        "branches": "concatenate",
        "size": "kernel_size pool_size",
        "kernels": "out_channels filters",
        "pad": "padding",
        "stride": "strides",
        "dilation": "dilation_rate",
        "units": "out_features",
        "rate": "p",
        "slope": "negative_slope",
        "epsilon": "eps",
        "factor": "scale_factor",
    }.items()
    for there in names.split()
}
"""Names of layers and options in PyTorch and Keras, with those here."""


def _meant(word: Any, known: Collection[str]) -> str:
    """Return the end of a message about an unknown word."""
    name = str(word).lower()
    if name == "softmax" and known is LAYERS:
        return "; leave it out: the loss makes probabilities of the last layer's scores"
    here = _ELSEWHERE.get(name)
    if here in known:
        return f"; did you mean {here!r}?"
    return or_own(nearest(word, known)) if known is LAYERS else nearest(word, known)


def _path(key: str, value: Any) -> Sequential | None:
    """Return the layers of a list of tables; None for an empty one."""
    if not isinstance(value, list | tuple) or not all(isinstance(entry, Mapping) for entry in value):
        raise ValueError(f"{key} = {value!r:.60}: write a list of layers, each a table")
    return sequential_from_spec(value, key) if value else None


def _own_path(key: str, value: Any) -> Sequential:
    if (path := _path(key, value)) is None:
        raise ValueError(f"{key} = []: it needs a layer at least")
    return path


def _paths(key: str, value: Any) -> tuple[Sequential | None, ...]:
    """Return the paths of a list of lists."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} = {value!r:.60}: write a list of lists of layers")
    return tuple(_each((f"{key}[{i}]", _path, each) for i, each in enumerate(value)).values())


_PATHS: Mapping[Any, Callable[[str, Any], Any]] = {
    Sequential: _own_path,
    Sequential | None: _path,
    tuple[Sequential | None, ...]: _paths,
}
"""Readers of options that hold layers, by their types."""


def _of_wrong_types(kind: str, hints: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if (hint := hints[name]) in _PATHS:
            continue
        allowed = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if not any(_is_a(value, kind) for kind in allowed):
            wanted = " or ".join(_said(t) for t in allowed if t is not NoneType)
            yield f"{name} = {value!r:.60}: {kind} needs {wanted} here, not {type(value).__name__}"
            continue
        numbers = [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, int | float)]
        if not all(abs(v) <= _MOST for v in numbers):
            yield f"{name} = {value!r:.60}: {kind} takes numbers of at most {_MOST:,}"


def _is_a(value: object, wanted: Any) -> bool:
    """isinstance, but a bool is not a number, an int is a float too, and a list is a tuple of these types."""
    if get_origin(wanted) is Literal:
        return isinstance(value, str) and value in get_args(wanted)
    if of_each := get_args(wanted):
        return isinstance(value, list | tuple) and len(value) == len(of_each) and all(map(_is_a, value, of_each))
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, (int, float) if wanted is float else wanted)


def _said(wanted: Any) -> str:
    """Return what people call a type: "int", "[int, int]", or the only strings that are allowed."""
    if get_origin(wanted) is Literal:
        return " or ".join(f'"{each}"' for each in get_args(wanted))
    if of_each := get_args(wanted):
        return f"[{', '.join(map(_said, of_each))}]"
    return str(wanted.__name__)
