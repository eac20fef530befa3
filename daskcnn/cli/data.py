"""`daskcnn data prepare`, `daskcnn data verify` and `daskcnn data show`."""

from __future__ import annotations

import json
import re
from typing import Any

import click

from daskcnn.cli.command import Command, CommandGroup, as_json, import_option, tell, verbose
from daskcnn.cli.flags import Flags, cluster_of, cluster_options
from daskcnn.datasets import prepare as data_sets
from daskcnn.datasets.show_data import show_data
from daskcnn.show.renderers.network_text import readable_dataset
from daskcnn.show.renderers.terminal import say
from daskcnn.store import DATASETS
from daskcnn.store.manifest import Order


@click.group(cls=CommandGroup)
def data() -> None:
    """Prepare and check data sets."""


def out_options(function: Any) -> Any:
    """Add the options of every command that writes a data set."""
    for option in (
        click.option("--out", metavar="PATH", help="Path of the zarr store to write.  [default: data/NAME.zarr]"),
        click.option("--order", type=click.Choice(["shuffled", "stored"]), default="shuffled", show_default=True),
        click.option(
            "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the shuffle."
        ),
        verbose,
    ):
        function = option(function)
    return function


def _named(name: str) -> click.Command:
    """The command that prepares the data set of this name. Of an unknown one it says which there are."""

    @click.option("--archive", metavar="FILE", help="The data set's own archive or folder.  [default: download it]")
    @import_option
    @out_options
    def named(archive: str | None, out: str | None, order: Order, seed: int, **_: Any) -> None:
        tell(data_sets.prepare(name, archive=archive, out=out, order=order, seed=seed, say=say))

    return click.command(name, cls=Command, help=f"Prepare the data set {name}.")(named)


class _Sources(CommandGroup):
    """The sources of data sets: commands of their own, and the data sets that have a name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands and of the data sets."""
        return [*super().list_commands(ctx), *DATASETS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        """The command of this name, or that of the data set of this name."""
        return super().get_command(ctx, cmd_name) or _named(cmd_name)


@data.group(cls=_Sources)
def prepare() -> None:
    """Prepare a data set: write it in chunks that workers can read."""


@prepare.command(cls=Command)
@click.option("--images", metavar="FILE", required=True, help=".npy file, or FILE.npz:NAME, of (N, H, W, C).")
@click.option("--labels", metavar="FILE", required=True, help=".npy file, or FILE.npz:NAME, of (N,) or (N, L).")
@click.option("--weights", metavar="FILE", help=".npy file of (N,): how much each sample counts in training.")
@click.option("--test", metavar="SHARE", type=float, default=0.2, show_default=True, help="Part kept for testing.")
@click.option("--classes", metavar="NAME,NAME", help="Names of the classes, by number.  [default: the numbers]")
@click.option("--layout", type=click.Choice(["NHWC", "NCHW"]), default="NHWC", show_default=True)
@click.option("--nodata", metavar="VALUE", type=float, help="Value that stands for no data, as NaN then does too.")
@click.option(
    "--labelling",
    type=click.Choice(["classes", "several"]),
    help="Rows of labels: the 1 of each is its class, or columns are labels of their own.  [default: several]",
)
@click.option("--name", metavar="NAME", help="Name of the data set.  [default: the output's name]")
@out_options
def arrays(verbose: bool, **options: Any) -> None:
    """Prepare a data set from array files of NumPy."""
    tell(data_sets.prepare_array_files(**options, say=say))


def _size(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """Height and width of a size such as 64x48; one number stands for both."""
    numbers = value.lower().split("x")
    if len(numbers) > 2 or not all(re.fullmatch("[1-9][0-9]{0,5}", number) for number in numbers):
        raise click.BadParameter(f"{value!r}: give height and width, such as 64x64", ctx, param)
    return int(numbers[0]), int(numbers[-1])


def _value_range(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, float] | None:
    """The two numbers of a range such as 0,4095."""
    if value is None:
        return None
    try:
        low, high = map(float, value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r}: give two numbers, such as 0,4095", ctx, param) from None
    return low, high


@prepare.command(cls=Command)
@click.argument("path")
@click.option(
    "--size",
    metavar="HEIGHTxWIDTH",
    required=True,
    callback=_size,
    help="Size of the images in the data set, such as 64x64.",
)
@click.option(
    "--fit",
    type=click.Choice(["crop", "pad", "stretch"]),
    default="crop",
    show_default=True,
    help="Other proportions: cut off what is too much, add black, or distort.",
)
@click.option("--grey", is_flag=True, help="One channel, and not red, green and blue.")
@click.option(
    "--value-range",
    metavar="LOW,HIGH",
    callback=_value_range,
    help="Black and white among grey values of more than 8 bits.  [default: 0,65535 for 16 bits; others need it]",
)
@click.option(
    "--test",
    type=float,
    metavar="SHARE",
    help="Share of each class that is kept for testing.  [default: 0.2, or the folders train/ and test/]",
)
@click.option("--skip-bad", is_flag=True, help="Leave out images that cannot be read. Without it they are refused.")
@click.option("--name", help="Name of the data set.  [default: that of the store]")
@cluster_options
@out_options
def folder(
    path: str,
    out: str | None,
    scheduler: str | None,
    scheduler_file: str | None,
    workers: str | None,
    only: tuple[str, ...],
    wait: str | None,
    verbose: bool,
    **options: Any,
) -> None:
    """Prepare the images in the folder PATH, which has a sub-folder for each class.

    Images are decoded by the workers of a cluster: the scheduler's, or a local one.
    """
    flags: Flags = {"scheduler": scheduler, "scheduler_file": scheduler_file, "workers": workers, "wait": wait}
    flags = {**flags, "only": only}
    tell(data_sets.prepare_folder(path, out=out, cluster=cluster_of(flags), **options, say=say))


@data.command(cls=Command)
@click.argument("path")
@verbose
def verify(path: str, **_: Any) -> None:
    """Read every chunk of a prepared data set and check it."""
    tell(data_sets.verify(path))


@data.command(cls=Command)
@click.argument("path", metavar="STORE")
@click.option("--picture", metavar="FILE.png", help="Write a contact sheet: samples of each class. 20 classes a file.")
@as_json
@verbose
def show(path: str, picture: str | None, as_json: bool, **_: Any) -> None:
    """Print what a prepared data set holds: classes with counts, shape, type, statistics, origin."""
    found = show_data(path, picture)
    tell(json.dumps(found, indent=2) if as_json else readable_dataset(found))
