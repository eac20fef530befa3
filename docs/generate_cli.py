"""Write docs/cli.md, the reference of all commands, from what click knows of them.

`python docs/generate_cli.py` writes the page; with `--check` it fails where the page is not what it would write.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from made_page import write_or_check

from daskcnn.cli import main
from daskcnn.cli.data import prepare
from daskcnn.store import DATASETS

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Commands

<!-- Generated from the commands in daskcnn/cli by docs/generate_cli.py: do not edit. -->

`daskcnn COMMAND`, `dask cnn COMMAND` and, for `run`, `python -m daskcnn.run` are the same programs.
`-h` or `--help` after any command prints what stands here. [faults.md](faults.md#exit-codes) lists the exit codes.
"""


def page() -> str:
    """The whole page."""
    found = list(commands(main, ["daskcnn"]))
    rows = [f"| [`{' '.join(path)}`](#{anchor(path)}) | {_first_sentence(command)} |" for path, command, _ in found]
    index = "\n".join(["| command | what it does |", "|---|---|", *rows])
    return "\n\n".join([HEAD.strip(), index, *(section(*each) for each in found)]) + "\n"


def commands(group: click.Group, path: list[str]) -> Iterator[tuple[list[str], click.Command, click.Context]]:
    """Every command that is no group, with the words that call it. Of the named data sets the first one alone."""
    context = click.Context(group, info_name=path[-1])
    names = [name for name in group.list_commands(context) if group is not prepare or name not in list(DATASETS)[1:]]
    for name in names:
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, [*path, name])
        else:
            yield [*path, name], command, click.Context(command, info_name=" ".join([*path, name]))


def section(path: list[str], command: click.Command, context: click.Context) -> str:
    """Usage, meaning, and every option of a command."""
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    parts = [f"## `{' '.join(path)}`", f"```text\n{usage}\n```", _help(command)]
    if path[-1] in DATASETS:
        parts.append(f"Names: {', '.join(f'`{name}`' for name in DATASETS)}. All have the same options.")
    options = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and "--help" not in param.opts and (record := param.get_help_record(context))
    ]
    return "\n\n".join([*parts, "\n".join(f"- `{plain(flags)}`: {_said(text)}" for flags, text in options)])


def anchor(path: list[str]) -> str:
    """The anchor of a command's heading."""
    return "-".join(path)


def plain(text: str) -> str:
    """A line of click's help without what only a terminal needs."""
    return " ".join(text.split())


def _said(text: str) -> str:
    """The meaning of an option, as Markdown."""
    readable = plain(text).replace("<=", " ≤ ").replace(">=", " ≥ ")
    return re.sub(r"([*<>])", r"\\\1", readable)


def _help(command: click.Command) -> str:
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    return "\n\n".join(plain(part) for part in text.split("\n\n"))


def _first_sentence(command: click.Command) -> str:
    return _help(command).partition("\n\n")[0].partition(". ")[0].rstrip(".") + "."


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page(), sys.argv[1:]))
