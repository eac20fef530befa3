"""What click makes of the words of a command line, so that pages and manifests can be checked without running it."""

from __future__ import annotations

from collections.abc import Sequence

import click


def context_of(command: click.Command, arguments: Sequence[str]) -> click.Context:
    """The context of the innermost command that these words name. Raises click's errors for words it does not know."""
    if isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        inner = command.get_command(click.Context(command), arguments[0])
        assert inner is not None, f"{command.name} has no command {arguments[0]}"
        return context_of(inner, arguments[1:])
    return command.make_context(command.name, list(arguments))
