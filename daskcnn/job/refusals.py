"""What the models refuse, in words: `key = value: reason; because`, or `unknown key` with the nearest right one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from daskcnn.errors import all_known, similar
from daskcnn.job.tables import LAYER, Job, NoRule, keys_of
from daskcnn.ps import RULES


def refusals(error: ValidationError, strategy: str | None) -> Iterator[str]:
    """A line for each problem that the models found in a job. strategy: whose rule `[rule]` belongs to.

    All keys of a table are told once, however many unknown ones it has.
    """
    listed: set[tuple[str, ...]] = set()
    for item in error.errors():
        loc = [str(part) for part in item["loc"]]
        key, value = ".".join(loc), f"{item['input']!r:.80}"
        if item["type"] == "extra_forbidden":
            yield f"{key}: {_unknown(loc, strategy, listed)}"
        elif item["type"] in ("model_type", "dict_type"):
            yield f"{key} = {value}: write a table of keys"
        else:
            reason = item["msg"].removeprefix("Value error, ")
            yield f"{key} = {value}: {reason[0].lower()}{reason[1:]}{_because(loc, strategy)}"


def _unknown(loc: list[str], strategy: str | None, listed: set[tuple[str, ...]]) -> str:
    """Why there is no such key, and what is meant. listed: the tables whose keys were told; this one comes to them."""
    if loc[0] == "rule" and strategy == LAYER:
        return f"strategy {LAYER!r} has no rule; remove it"
    hint, table = _meant(loc, strategy), tuple(loc[:-1])
    if not hint and table not in listed:
        hint = all_known(_keys(_table(loc[:-1], strategy)))
        listed.add(table)
    return f"unknown {'key' if table else 'section'}{hint}"


def _meant(loc: list[str], strategy: str | None) -> str:
    """The one section that has this key, or else the nearest key of its own table; empty where there is none."""
    name = loc[-1]
    homes = [f"{s}.{name}" for s, f in Job.model_fields.items() if name in _keys(f.annotation)]
    if len(homes) == 1:
        return f"; did you mean {homes[0]!r}?"
    return similar(name, _keys(_table(loc[:-1], strategy)))


def _keys(table: Any) -> dict[str, FieldInfo]:
    """The keys of a table; none of what is no table."""
    return keys_of(table) if isinstance(table, type) and issubclass(table, BaseModel) else {}


def _because(loc: list[str], strategy: str | None) -> str:
    """Why the key's value may not be another, where its field says so (`json_schema_extra={"because": …}`)."""
    table = _table(loc[:-1], strategy)
    field = _keys(table).get(loc[-1])
    extra = field.json_schema_extra if field else None
    return f"; {extra['because']}" if isinstance(extra, dict) and "because" in extra else ""


def _table(names: list[str], strategy: str | None) -> type[BaseModel] | None:
    """The model of the table at this place; None for what has no model."""
    model: Any = Job
    for i, name in enumerate(names):
        if i == 0 and name == "rule":
            model = RULES.get(strategy or "", NoRule)
            continue
        field = _keys(model).get(name)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
    found: type[BaseModel] = model
    return found
