"""`daskcnn data prepare` and `daskcnn data verify`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, tell, verbose
from daskcnn.launch import prepare as data_sets
from daskcnn.show.stderr import say
from daskcnn.store.manifest import Order


@click.group()
def data() -> None:
    """Prepare and check data sets."""


@data.command(cls=Command)
@click.argument("name")
@click.option("--archive", metavar="FILE", help="The data set's own archive or folder.  [default: download it]")
@click.option("--out", metavar="PATH", help="Path of the zarr store to write.  [default: data/NAME.zarr]")
@click.option("--order", type=click.Choice(["shuffled", "stored"]), default="shuffled", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the shuffle.")
@verbose
def prepare(name: str, archive: str | None, out: str | None, order: Order, seed: int, **_: Any) -> None:
    """Prepare data set NAME: write it in chunks that workers can read."""
    tell(data_sets.prepare(name, archive=archive, out=out, order=order, seed=seed, say=say))


@data.command(cls=Command)
@click.argument("path")
@verbose
def verify(path: str, **_: Any) -> None:
    """Read every chunk of a prepared data set and check it."""
    tell(data_sets.verify(path))
