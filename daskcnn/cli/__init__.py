"""The command line: `daskcnn …`, and the same as `dask cnn …`."""

from __future__ import annotations

from importlib import import_module

import click

from daskcnn import __version__
from daskcnn.cli.command import CommandGroup

_HOMES = {
    "data": ["data"],
    "doctor": ["doctor"],
    "model": ["evaluate", "export", "model", "models", "predict"],
    "plan": ["plan", "plan-conv", "simulate"],
    "queue": ["cancel", "hold", "jobs", "release", "serve"],
    "run": ["run"],
    "runs": ["compare", "logs", "plot", "report", "runs"],
    "submit": ["submit"],
}
COMMANDS = {command: home for home, commands in _HOMES.items() for command in commands}
"""Every command by its name, with its file in this folder. The function there has the command's name."""

MEANT = {
    "train": "run",
    "fit": "run",
    "test": "evaluate",
    "prepare": "data",
    "ls": "runs",
    "sbatch": "submit",
    "squeue": "jobs",
    "queue": "jobs",
}
"""Commands by words that other programs have for them."""


class Commands(CommandGroup):
    """A group that imports a command when it is called: `report` does not wait for what only training needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name, in order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name."""
        if (home := COMMANDS.get(cmd_name)) is None:
            return None
        command: click.Command = getattr(import_module(f"daskcnn.cli.{home}"), cmd_name.replace("-", "_"))
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
