"""What click makes of the words of a command line, so that pages and manifests can be checked without running it.

And a job's values as they are written in its words and in its file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click


def context_of(command: click.Command, arguments: Sequence[str]) -> click.Context:
    """The context of the innermost command that these words name. Raises click's errors for words it does not know."""
    if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        inner = command.get_command(click.Context(command), arguments[0])
        assert inner is not None, f"{command.name} has no command {arguments[0]}"
        return context_of(inner, arguments[1:])
    return command.make_context(command.name, list(arguments))


def toml(value: Any) -> str:
    """A value as TOML has it: arrays, strings and numbers are JSON's, tables are written inline."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)
