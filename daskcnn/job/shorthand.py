"""Short forms that a job may have in place of a table or a list: a name, `cpu=2,gpu=1`, one value alone."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel


def named(value: Any, example: str) -> Any:
    """Let a name stand for the table that has it alone."""
    if isinstance(value, dict | BaseModel):
        return value
    if not isinstance(value, str):
        raise ValueError(f"write a name, or a table such as {example}")
    return {"name": value}


def named_schedule(value: Any) -> Any:
    """Let `schedule = "step"` stand for `{name = "step"}`; `linear` is the polynomial of power 1."""
    return {"name": "poly", "power": 1.0} if value == "linear" else named(value, '{name = "step", every = 10}')


def weights_of_classes(value: Any) -> Any:
    """Refuse what is none of the three forms by one reason, instead of one for each form."""
    numbers = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if value is None or value == "balanced":
        return value
    if numbers and all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= 1e30 for n in numbers):
        return value
    raise ValueError('write "balanced", or numbers of 0 to 1e30 as a list or as a table by class')


def counted_workers(value: Any) -> Any:
    """Read the flag's form `cpu=2,gpu=1`; anything else is left to the model."""
    if isinstance(value, dict | BaseModel):
        return value
    if not re.fullmatch(r"\s*\w+\s*=\s*\d[\d. ]*(,\s*\w+\s*=\s*\d[\d. ]*)*", str(value)):
        raise ValueError("write cpu=2, gpu=1 or cpu=2,gpu=1, or a range such as cpu=2..8")
    pairs = [[each.strip() for each in part.split("=")] for part in value.split(",")]
    found = {kind: int(count) if count.isdigit() else count for kind, count in pairs}
    if len(found) < len(pairs):
        raise ValueError("a kind stands there twice; give each once, with all of its workers")
    return found


def number_or_range(value: Any) -> Any:
    """Read a number of workers, or a range such as "2..8", which is returned without spaces."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    found = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", value) if isinstance(value, str) else None
    if found is None:
        raise ValueError('write a number such as 2, or a range such as "2..8"')
    least, most = map(int, found.groups())
    if least > most:
        raise ValueError(f'the least comes first: write "{most}..{least}"')
    if not most:
        raise ValueError("write 0 for no workers of this kind")
    return f"{least}..{most}"


_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def duration(value: Any) -> Any:
    """Read a time such as 2h, 1h30m, 1.5h, 1:30:00 or 1-12:00:00 as seconds; numbers are seconds already."""
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "").lower()
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]?\d):([0-5]?\d)", text):
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return seconds + 60 * (minutes + 60 * (hours + 24 * days))
    parts = re.findall(r"(\d+(?:\.\d+)?)(d|h|m|s)[a-z]*", text)
    if not re.fullmatch(r"(\d+(\.\d+)?(d|days?|h|hours?|m|mins?|minutes?|s|secs?|seconds?))+", text):
        raise ValueError("write a time with its unit, such as 2h, 90m, 1h30m or 1:30:00 (hours, minutes, seconds)")
    return float(sum(float(count) * _UNITS[unit] for count, unit in parts))


def listed(value: Any) -> Any:
    """Let values that are separated by commas stand for a list of them, and so one alone."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def is_module(name: str) -> bool:
    """Return True for the name of a module, which is no path."""
    return not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))


def module_names(names: list[str] | None) -> list[str] | None:
    """Refuse a path in place of a module's name."""
    for name in names or ():
        if not is_module(name):
            raise ValueError(
                f"{name!r:.60}: write a module's name as `import` has it, such as my_module for my_module.py"
            )
    return names
