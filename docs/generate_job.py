"""Writes docs/job.md, the reference of all keys of a job, from the models that check them.

`python docs/generate_job.py` writes the page; with `--check` it fails where the page is not what it would write.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from made_page import write_or_check
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from daskcnn.job.tables import LAYER, Job, keys_of
from daskcnn.nn import MODELS, OPTIMIZERS
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES, UpdateRule
from daskcnn.store import DATASETS

PAGE = Path(__file__).with_name("job.md")
NAMES = {
    "model.name": (*MODELS, "C1:C2"),
    "train.strategy": (*RULES, LAYER),
    "train.partition": PARTITIONERS,
    "train.optimizer.name": OPTIMIZERS,
}
"""Keys whose values are names from a registry."""
BOUNDS = {"ge": "≥ {}", "gt": "> {}", "le": "≤ {}", "lt": "< {}"}
HEAD = """# Keys of a job

<!-- Generated from the models in `daskcnn/job` and `daskcnn/ps` by docs/generate_job.py: do not edit. -->

A job is a TOML file of these tables, or flags (`python -m daskcnn.run --help`), or both. Any key can be set by
`--set section.key=value`. Every key has a default: an empty job trains `quick` on the built-in data set.
Unknown keys and values out of range are refused before anything starts, all at once.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD, *(part for name, table in _sections() for part in _section(name, table))]
    parts.append(
        "## `[rule]`\n\nThe parameters of the update rule that `train.strategy` names. Strategy `layer` has no rule.\n"
    )
    parts += [_rule(name, rule) for name, rule in RULES.items()]
    return "\n".join(parts)


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Job.model_fields.items():
        if table := _table(field):
            yield name, table


def _section(name: str, table: type[BaseModel]) -> Iterator[str]:
    yield f"## `[{name}]`\n\n{_words(table)}\n\n{_rows(name, table)}"
    for key, field in keys_of(table).items():
        if inner := _table(field):
            yield f"### `[{name}.{key}]`\n\n{_words(inner)}\n\n{_rows(f'{name}.{key}', inner)}"


def _rule(name: str, rule: type[UpdateRule]) -> str:
    first = (rule.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    rows = _rows("rule", rule) if rule.model_fields else "No keys.\n"
    return f"### `{name}`\n\n{re.sub(' +', ' ', first)}\n\n{rows}"


def _words(table: type[BaseModel]) -> str:
    """The model's own sentence, without the name that stands above it."""
    text = (table.__doc__ or "").strip().split(": ", 1)[-1].replace("\n", " ")
    return re.sub(" +", " ", text[0].upper() + text[1:])


def _rows(section: str, table: type[BaseModel]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in keys_of(table).items():
        cells = f"`{key}`", _type(f"{section}.{key}", field), _default(field), field.description or ""
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _table(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _type(key: str, field: FieldInfo) -> str:
    """What a value may be, with its bounds."""
    if key == "data.name":
        return "text; imported are " + ", ".join(f"`{name}`" for name in DATASETS)
    if key in NAMES:
        return "one of " + ", ".join(f"`{name}`" for name in NAMES[key])
    bounds = [text.format(getattr(m, at)) for m in field.metadata for at, text in BOUNDS.items() if hasattr(m, at)]
    return ", ".join([_kind(field.annotation), *bounds])


def _kind(kind: Any) -> str:
    if get_origin(kind) is Literal:
        values = ", ".join(f"`{value}`" for value in get_args(kind))
        return f"one of {values}" if len(get_args(kind)) > 1 else values
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_kind(each) for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is list:
        entry = get_args(kind)[0]
        return (
            "list of tables"
            if get_origin(entry) is dict
            else {"number": "list of numbers"}.get(_kind(entry), "list of text")
        )
    if get_origin(kind) is dict:
        return "table"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "table"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return plain.get(kind) or _kind(get_args(kind)[0])


def _default(field: FieldInfo) -> str:
    value = field.default
    assert value is not PydanticUndefined, "every key of a job has a default"
    if value is None or isinstance(value, BaseModel):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:]))
