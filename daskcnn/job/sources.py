"""Where a job's tables come from: TOML files, flags and `--set section.key=value`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from datetime import date, time
from pathlib import Path
from typing import Any

from daskcnn.documents import parse_toml
from daskcnn.errors import DataError, JobError
from daskcnn.files import read_regular

_MOST_BYTES = 128 << 10


def read_job_file(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML job file. Raises JobError where it cannot be read or parsed."""
    try:
        return parse_toml(read_regular(path, _MOST_BYTES))
    except DataError as error:
        raise JobError([str(error)]) from error
    except OSError as error:
        raise JobError([f"{path}: {error.strerror}; give the path of a job file"]) from error
    except ValueError as error:
        raise JobError([f"{path}: not a TOML file: {error}"]) from error


def parse_value(text: str) -> Any:
    """A flag's value as TOML would read it: numbers, booleans, arrays, tables; anything else is a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, date | time) else value  # 2026-11-20 is a name, as no key is a date


def override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.key` in the raw tables. Raises JobError where `key` has no section, or lies in what is no table."""
    *tables, name = key.split(".")
    if not tables or "" in (*tables, name):
        raise JobError([f"--set {key}: write section.key=value, for example train.epochs=5"])
    table = raw
    for i, part in enumerate(tables, 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            above = ".".join(tables[:i])
            raise JobError([f"{key} = {value!r}: {above} is {table!r}, which has no keys to set; set {above} instead"])
    table[name] = value


def apply_settings(raw: dict[str, Any], settings: Iterable[str]) -> None:
    """Set keys of the raw tables, each written "section.key=value". Raises JobError as `override` does."""
    for setting in settings:
        key, given, text = setting.partition("=")
        if not given:
            raise JobError([f"--set {setting}: write section.key=value, for example train.epochs=5"])
        override(raw, key.strip(), parse_value(text.strip()))
