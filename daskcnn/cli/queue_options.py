"""Options that name a queue, for commands that need neither Dask nor a job for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

_SCHEDULER = click.option(
    "--scheduler", metavar="ADDRESS", help="Address of the Dask scheduler, such as tcp://host:8786."
)
_SCHEDULER_FILE = click.option("--scheduler-file", metavar="FILE", help="File that the scheduler wrote its address to.")
spool_option = click.option(
    "--spool", metavar="DIR", help="Folder of the queue, on the machine of its service; no scheduler is asked then."
)


def scheduler_options(function: Any) -> Any:
    """Add the options that name a scheduler."""
    return _SCHEDULER(_SCHEDULER_FILE(function))


def queue_options(function: Any) -> Any:
    """Add the options that name a queue: its scheduler, or its spool on this machine."""
    return scheduler_options(spool_option(function))


def scheduler_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the keys of `[cluster]` that name the scheduler, if they are given."""
    return {key: keys[key] for key in ("scheduler", "scheduler_file") if keys.get(key)}
