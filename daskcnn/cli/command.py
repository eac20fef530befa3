"""Shared parts of the commands: how they fail, and options that several have."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import click

from daskcnn.errors import DataError, UserError, nearest
from daskcnn.files import SEEN
from daskcnn.modules import import_modules, import_plugins
from daskcnn.show.text import plain

verbose = click.option("--verbose", is_flag=True, help="Show tracebacks.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
checkpoint_option = click.option(
    "--checkpoint",
    type=click.Choice(["last", "best"]),
    help="Weights of the run: as it left them, or as they were best on its validation samples.  "
    "[default: best with train.early_stopping or train.restore_best, else last]",
)
views_option = click.option(
    "--views",
    type=click.Choice(["none", "mirror", "mirror-translate"]),
    help="Views of each image whose scores are averaged.  [default: data.views of the run's job]",
)
_IMPORTS = "daskcnn.imports"


def _noted(ctx: click.Context, _: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Note the modules; they are imported where errors are told."""
    ctx.meta[_IMPORTS] = names
    return names


def import_own(names: Sequence[str]) -> None:
    """Import the modules that `--import` names. Raises DataError for one that is missing or fails."""
    try:
        import_modules(names)
    except DataError as error:
        raise DataError(f"--import {error.value}", error.reason, error.remedy) from error


import_option = click.option(
    "--import",
    "imports",
    metavar="MODULE",
    multiple=True,
    expose_value=False,
    callback=_noted,
    help="Import a module with layers or other members of your own first. Those of a run's job are imported anyway.",
)
settings = click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Set any key of the job.")


_REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of the system about a path that a user gave, which are no bugs."""
_WHOLE = 1000
"""Characters of a command's first sentence, more than any has."""


class NobodyReads(BrokenPipeError):
    """The reader of the output has ended, as `head` does. Click ends the process without a word."""


class Command(click.Command):
    """A command that turns foreseeable failures into one message and an exit code, never a traceback.

    meant : returns the options that an unknown one, without its dashes, is a word for.
    """

    def __init__(self, *args: Any, meant: Callable[[str], Sequence[str]] = lambda word: (), **options: Any) -> None:
        super().__init__(*args, **options)
        self.meant = meant

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments. Raises UsageError, for an unknown option with the one that is meant."""
        _fill_in_streams()
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not (meant := self.meant(error.option_name.lstrip("-"))):
                raise
            message = f"No such option '{error.option_name}'. Did you mean {' or '.join(map(repr, meant))}?"
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and end the process with the exit code of a user's error."""
        try:
            import_plugins()
            import_own(ctx.meta.get(_IMPORTS, ()))
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort, NobodyReads):
            raise
        except UserError as error:
            _say(f"error: {error}", ctx.params.get("verbose"))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _REFUSED and error.filename:
                _say(f"error: {DataError(error.filename, error.strerror, SEEN)}", ctx.params.get("verbose"))
                ctx.exit(DataError.exit_code)
            _say(f"internal error: {type(error).__name__}: {error}", ctx.params.get("verbose"))
            click.echo("This is a bug of daskcnn's; run again with --verbose and report what it prints.", err=True)
            ctx.exit(1)


class CommandGroup(click.Group):
    """Commands by name; a name that is none is answered with the nearest one, or with all of them.

    meant : commands by words that other programs have for them.
    """

    def __init__(self, *args: Any, meant: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.meant = meant or {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names. Raises UsageError where there is none."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            commands = self.list_commands(ctx)
            hint = nearest(args[0], commands)
            if close := get_close_matches(args[0], [*commands, *self.meant], n=1):
                hint = f"; did you mean {self.meant.get(close[0], close[0])!r}?"
            ctx.fail(f"no such command '{plain(args[0])}'{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, each with the first sentence of its help. Click would cut it at the end of the line."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, each.get_short_help_str(_WHOLE)) for name, each in found if each is not None and not each.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _fill_in_streams() -> None:
    """Open the null device in place of each stream that was closed before the start (`>&-`), where Python has none."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is the stream's own
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))


def _say(message: str, verbose: Any) -> None:
    with suppress(OSError):  # the terminal is gone, and the exit code says how it ended
        if verbose:
            traceback.print_exc()
        click.secho(plain(message), fg="red", err=True)


def tell(text: object, *, nl: bool = True, err: bool = False) -> None:
    """Print a result. Names in it may come from outside: control characters are escaped.

    A terminal that was closed is no error: the command may have been left running without it. A character that the
    stream's encoding lacks is printed as `?`.
    """
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        click.echo(plain(text).encode(encoding, "replace").decode(encoding), nl=nl, err=err)
    except BrokenPipeError as error:
        raise NobodyReads(error.errno, error.strerror) from error
    except OSError as error:
        if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(stream.fileno()).st_mode):
            raise
        with open(os.devnull, "wb") as nowhere:  # what is left in Python's buffer goes there
            os.dup2(nowhere.fileno(), stream.fileno())


def terminal_width() -> int | None:
    """Columns of the terminal that results are printed on; None where they go to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
