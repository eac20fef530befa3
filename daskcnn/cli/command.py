"""What the commands share: how they fail, and options that several have."""

from __future__ import annotations

import signal
import traceback
from typing import Any

import click

from daskcnn.errors import UserError
from daskcnn.show.text import plain

verbose = click.option("--verbose", is_flag=True, help="Show tracebacks.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
views_option = click.option(
    "--views",
    type=click.Choice(["none", "mirror", "mirror-translate"]),
    help="Views of each image whose scores are averaged.  [default: data.views of the run's job]",
)
settings = click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Set any key of the job.")


class Command(click.Command):
    """A command that turns foreseeable failures into one message and an exit code, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and end the process with the exit code of a user's error."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except UserError as error:
            _say(f"error: {error}", ctx.params.get("verbose"))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)
        except Exception as error:
            _say(f"internal error: {type(error).__name__}: {error}", ctx.params.get("verbose"))
            click.echo("This is a bug of daskcnn's; run again with --verbose and report what it prints.", err=True)
            ctx.exit(1)


def _say(message: str, verbose: Any) -> None:
    if verbose:
        traceback.print_exc()
    click.secho(plain(message), fg="red", err=True)


def tell(text: object, *, nl: bool = True, err: bool = False) -> None:
    """Print a result. Names in it may come from outside: control characters are escaped."""
    click.echo(plain(text), nl=nl, err=err)
