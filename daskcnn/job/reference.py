"""Every key of a job with type, default and meaning, read from the models that check them.

Names and values stand in backticks, as in Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from daskcnn.job.options import meaning_of
from daskcnn.job.tables import LAYER, Job, keys_of
from daskcnn.nn import MODELS, OPTIMIZERS
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES
from daskcnn.store import DATASETS
from daskcnn.store.augmentation import STEPS

_NAMES: dict[str, tuple[Iterable[str], ...]] = {
    "data.name": (DATASETS,),
    "model.name": (MODELS, ["C1:C2"]),
    "train.strategy": (RULES, [LAYER]),
    "train.partition": (PARTITIONERS,),
    "train.optimizer.name": (OPTIMIZERS,),
}
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}


def names_of(key: str) -> tuple[str, ...]:
    """Return the names from registries that `section.key` may have; none for other keys."""
    return tuple(chain(*_NAMES.get(key, ())))


@dataclass(frozen=True)
class KeyEntry:
    """A key of a table: what its value may be, its default (empty where that depends on others), and its meaning."""

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class TableEntry:
    """A table of a job.

    Attributes
    ----------
    name : as in a job file, such as `train.schedule`; of a rule's parameters `rule`, of a step's `data.augment`.
    member : the update rule or the step of augmentation whose parameters these are; empty for other tables.
    """

    name: str
    member: str
    meaning: str
    keys: tuple[KeyEntry, ...]


def tables() -> Iterator[TableEntry]:
    """The job's tables, each followed by those inside it; those of the rules and of steps of augmentation come last."""
    for name, field in Job.model_fields.items():
        if table := _table(field):
            yield TableEntry(name, "", _words(table), _keys(name, table))
            for key, value in keys_of(table).items():
                if inner := _table(value):
                    yield TableEntry(f"{name}.{key}", "", _words(inner), _keys(f"{name}.{key}", inner))
    for name, rule in RULES.items():
        keys = () if rule.chooses_workers else _keys("rule", rule)  # those of what it chooses are not its own
        yield TableEntry("rule", name, _first_paragraph(rule), keys)
    for name, step in STEPS.items():
        yield TableEntry("data.augment", name, _first_paragraph(step), _keys("data.augment", step))


def default_of(key: str) -> str:
    """The default of `section.key`; empty where it depends on other keys."""
    section, name = key.split(".")
    table: Any = Job.model_fields[section].annotation
    return _default(keys_of(table)[name])


def _keys(section: str, table: type[BaseModel]) -> tuple[KeyEntry, ...]:
    return tuple(
        KeyEntry(key, _type(f"{section}.{key}", field), _default(field), meaning_of(table, key))
        for key, field in keys_of(table).items()
    )


def _first_paragraph(member: type[BaseModel]) -> str:
    return re.sub(r"\s+", " ", (member.__doc__ or "").strip().split("\n\n")[0])


def _words(table: type[BaseModel]) -> str:
    """The model's own sentence, without the name that stands above it."""
    text = re.sub(r"\s+", " ", (table.__doc__ or "").strip().split(": ", 1)[-1])
    return text[0].upper() + text[1:]


def _table(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _type(key: str, field: FieldInfo) -> str:
    """The type of a value, with its bounds."""
    if names := names_of(key):
        return ("text; imported are " if key == "data.name" else "one of ") + ", ".join(f"`{name}`" for name in names)
    bounds = [text.format(getattr(m, at)) for m in field.metadata for at, text in BOUNDS.items() if hasattr(m, at)]
    extra = field.json_schema_extra
    word = extra.get("or") if isinstance(extra, dict) else None  # a text that stands for other keys
    return ", ".join([_kind(field.annotation), *bounds]) + (f"; or `{word}`" if word else "")


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        values = ", ".join(f"`{value}`" for value in get_args(kind))
        return f"one of {values}" if len(get_args(kind)) > 1 else values
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_kind(each) for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is list:
        (entry,) = get_args(kind)
        if get_origin(entry) is dict:
            return "list of tables"
        return "list of numbers" if _kind(entry) == "number" else "list of text"
    if get_origin(kind) is tuple:
        return f"list of {'tables' if _kind(get_args(kind)[0]) == 'table' else 'numbers'}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return plain.get(kind) or _kind(get_args(kind)[0])


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "needed"
    if value is None or isinstance(value, BaseModel):
        return ""
    shown = list(value) if isinstance(value, tuple) else value
    return str(shown).lower() if isinstance(shown, bool) else str(shown)
