"""Members of registries that are not this package's: rules, layers and others of a user's own that a job names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from daskcnn.conv import ALGORITHMS
from daskcnn.job.tables import Job
from daskcnn.nn import LOSSES, METRICS, OPTIMIZERS, SCHEDULES
from daskcnn.nn.layers import LAYERS
from daskcnn.nn.metrics import module_of
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES
from daskcnn.store.augmentation import STEPS, steps_of

REGISTRIES: dict[str, dict[str, Any]] = {
    "rules": RULES,
    "partitioners": PARTITIONERS,
    "layers": LAYERS,
    "losses": LOSSES,
    "metrics": METRICS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "steps": STEPS,
    "algorithms": ALGORITHMS,
}
"""The registries that a module of a user's own may add to."""
INTERACTIVE = "__main__"
"""The module of a notebook or a script, which no other process can import."""


def modules_of(job: Job) -> Iterator[str]:
    """Yield the modules of the members that the job names and that are neither this package's nor interactive."""
    yield from filter(None, map(module_of, job.train.metrics or ()))
    for _, module in _named_members(job):
        if module != INTERACTIVE and module in sys.modules:
            yield module


def interactive_names(job: Job) -> list[str]:
    """Return the members that the job names and that a notebook or a script has added."""
    return [name for name, module in _named_members(job) if module == INTERACTIVE]


def _named_members(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the members that the job names and that are not this package's, each with its module."""
    train, names = job.train, layers_in(job.model.layers)
    pairs: list[tuple[dict[str, Any], str | None]] = [
        (RULES, train.strategy),
        (PARTITIONERS, train.partition),
        (OPTIMIZERS, train.optimizer.name),
        (LOSSES, train.loss),
        *((METRICS, name) for name in train.metrics or ()),
        *((LAYERS, name) for name in names),
        *((STEPS, step.name) for step in steps_of(job.data.augment or "none")),
        *((ALGORITHMS, name) for name in ALGORITHMS),
    ]
    for registry, name in pairs:
        if _is_own(module := _module_of(registry.get(name or ""))):
            yield name or "", module


def interactive_members() -> dict[tuple[str, str], Any]:
    """Return the members that a notebook or a script has added, by registry and name: they travel by value."""
    return {
        (kind, name): member
        for kind, registry in REGISTRIES.items()
        for name, member in registry.items()
        if _module_of(member) == INTERACTIVE
    }


def register(members: dict[tuple[str, str], Any]) -> None:
    """Add members that `interactive_members` returned to the registries of this process."""
    for (kind, name), member in members.items():
        REGISTRIES[kind][name] = member


def layers_in(tables: Any) -> Iterator[str]:
    """Yield the names of the layers in a list of tables, at all depths."""
    waiting = [tables]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict) and isinstance(name := inner.get("layer"), str):
            yield name
        inner = list(inner.values()) if isinstance(inner, dict) else inner
        waiting += [each for each in inner or () if isinstance(each, dict | list | tuple)]


def _module_of(member: Any) -> str:
    named = member if isinstance(member, type | FunctionType) else type(member)
    return str(named.__module__)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] not in ("daskcnn", "builtins")
