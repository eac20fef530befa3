"""Sweeps: a job, values for some of its keys, and seeds become named jobs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

from daskcnn.errors import JobError
from daskcnn.job.resolve import override, parse_value, resolve
from daskcnn.job.tables import Train

SEED = "train.seed"
_MOST = 1000  # jobs
_LONG = 60  # letters of a name
_NAMED = r"[A-Za-z0-9][A-Za-z0-9._-]*"


@dataclass(frozen=True, slots=True)
class SweepChild:
    """One job of a sweep: its name, its tables, and the values of the keys that the sweep varies."""

    name: str
    tables: Mapping[str, Any]
    values: Mapping[str, Any]


def grid_values(text: str) -> tuple[str, list[Any]]:
    """Return the key and the values of `train.lr=0.01,0.02`. Values are read as those of --set. Raises JobError."""
    key, given, values = text.partition("=")
    key = key.strip()
    if not given or not values.strip() or "." not in key:
        raise JobError([f"--grid {text}: write section.key=value,value, for example train.lr=0.01,0.02"])
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
    except (ValueError, RecursionError):
        found = [parse_value(part.strip()) for part in _parts(values)]
    if "" in found:
        raise JobError([f"--grid {text}: a value is empty; write one between all commas"])
    if repeated := [value for i, value in enumerate(found) if value in found[:i]]:
        raise JobError([f"--grid {text}: {repeated[0]!r} stands there twice; leave one out"])
    return key, found


def _parts(values: str) -> Iterator[str]:
    """Yield the text between the commas that stand in no list, table or quotes."""
    depth, quote, begin = 0, "", 0
    for i, letter in enumerate(values):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and (depth or not values[begin:i].strip()):  # not an apostrophe within a word
            quote = letter
        elif letter in "[{]}":
            depth += 1 if letter in "[{" else -1
        elif letter == "," and depth <= 0:
            yield values[begin:i]
            begin = i + 1
    yield values[begin:]


def expanded(raw: Mapping[str, Any], grid: Sequence[str], seeds: int = 1, *, name: str) -> tuple[SweepChild, ...]:
    """Return a job for each combination of the values, and for each of `seeds` seeds from the job's own on.

    The jobs are named `name`, the values and the seed. Raises JobError with the problems of all jobs; one that all have
    is told once.
    """
    axes = _axes(raw, grid, seeds)
    if re.fullmatch(_NAMED, name) is None:
        raise JobError([f"run.name = {name!r}: a sweep is named by letters, digits and . _ -"])
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    names = _names(name, combinations)
    children, problems = [], dict[str, list[str]]()
    for child, values in zip(names, combinations, strict=True):
        tables: dict[str, Any] = deepcopy(dict(raw))
        try:
            for key, value in {**values, "run.name": child}.items():
                override(tables, key, deepcopy(value))
            resolve(tables)
        except JobError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(child)
        children.append(SweepChild(child, tables, values))
    if problems:
        raise JobError([*_told(problems, len(children))])
    return tuple(children)


def _axes(raw: Mapping[str, Any], grid: Sequence[str], seeds: int) -> dict[str, list[Any]]:
    """The keys that vary, each with its values; the seed is the last one."""
    problems, axes = list[str](), dict[str, list[Any]]()
    for text in grid:
        try:
            key, values = grid_values(text)
        except JobError as error:
            problems += error.problems
            continue
        if key == "run.name":
            problems.append("--grid run.name: a sweep names its jobs by their values; give its own name with --name")
        if key in axes:
            problems.append(f"--grid {key}: it is given twice; give all of its values together")
        axes[key] = values
    if SEED in axes and seeds > 1:
        problems.append(f"--seeds {seeds}: --grid {SEED} gives the seeds already; leave one of them out")
    train = raw.get("train", {})
    first = train.get("seed", Train().seed) if isinstance(train, Mapping) else None
    if seeds > 1 and isinstance(first, int):
        axes[SEED] = [first + i for i in range(seeds)]
    many = 1
    for values in axes.values():
        many *= len(values)
    if many > _MOST:
        problems.append(f"--grid: {many:,} jobs; a sweep has at most {_MOST:,}")
    if problems:
        raise JobError(problems)
    return axes


def _told(problems: Mapping[str, Sequence[str]], jobs: int) -> Iterator[str]:
    """Yield each problem, with the jobs that have it unless all have."""
    for problem, names in problems.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield problem if len(names) == jobs else f"{', '.join(names[:3])}{more}: {problem}"


def _names(sweep: str, combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each job by its values, such as `lab-lr0.01-sgwu-seed0`; by number where these are long or alike."""
    names = ["-".join([sweep, *(_word(key, value) for key, value in values.items())]) for values in combinations]
    if len({*names}) == len(names) and all(len(name) <= len(sweep) + _LONG for name in names):
        return names
    return [f"{sweep}-{i:0{len(str(len(names)))}}" for i in range(1, len(names) + 1)]


def _word(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else f"{key.rpartition('.')[2]}{value}"
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text)
