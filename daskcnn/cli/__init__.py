"""The command line: `daskcnn …`, and the same as `dask cnn …`. A file a command."""

from __future__ import annotations

from importlib import import_module

import click

from daskcnn import __version__
from daskcnn.cli.command import CommandGroup

COMMANDS = {
    "compare": "compare",
    "data": "data",
    "doctor": "doctor",
    "evaluate": "evaluate",
    "export": "export",
    "logs": "logs",
    "model": "model",
    "models": "models",
    "plan": "plan",
    "plan-conv": "plan_conv",
    "plot": "plot",
    "predict": "predict",
    "report": "report",
    "run": "run",
    "runs": "runs",
    "simulate": "simulate",
}
"""Every command by its name: its file in this folder, and the function in that file."""

MEANT = {"train": "run", "fit": "run", "test": "evaluate", "prepare": "data", "ls": "runs"}
"""Commands by words that other programs have for them."""


class Commands(CommandGroup):
    """A group that imports a command when it is called: `report` does not wait for what only training needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if (name := COMMANDS.get(cmd_name)) is None:
            return None
        command: click.Command = getattr(import_module(f"daskcnn.cli.{name}"), name)
        return command


@click.group(
    "cnn",  # the name Dask shows it by
    cls=Commands,
    meant=MEANT,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="daskcnn")
def main() -> None:
    """Distributed training of convolutional networks on clusters of unequal machines."""
