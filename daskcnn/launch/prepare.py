"""Data sets made and checked: `daskcnn data prepare` and `daskcnn data verify`."""

from __future__ import annotations

from collections.abc import Callable

from daskcnn.launch.training import shown
from daskcnn.store import open_dataset
from daskcnn.store import prepare as prepare_dataset
from daskcnn.store import verify as verify_dataset
from daskcnn.store.manifest import Order


def prepare(
    name: str, *, archive: str | None, out: str | None, order: Order, seed: int, say: Callable[[str], None]
) -> str:
    """Write a data set where workers can read it; returns what was done."""
    return prepare_dataset(
        name,
        archive=archive,
        out=out or f"data/{name}.zarr",
        order=order,
        seed=seed,
        progress=shown(say),
        warn=lambda message: say(f"warning: {message}"),
    )


def verify(path: str) -> str:
    """Read and check all of a prepared data set. Raises DataError naming what is wrong."""
    dataset = open_dataset(path)
    verify_dataset(dataset)
    return f"{path}: {dataset.name}, {len(dataset.train):,} + {len(dataset.test):,} images, all chunks as recorded"
