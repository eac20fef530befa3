"""Data sets made and checked: `daskcnn data prepare` and `daskcnn data verify`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from daskcnn import store
from daskcnn.datasets.array_sources import opened
from daskcnn.datasets.names import path_of
from daskcnn.datasets.prepare_arrays import prepare as prepare_arrays
from daskcnn.datasets.prepare_folder import Request, interruptible
from daskcnn.datasets.prepare_folder import prepare as prepare_images
from daskcnn.errors import DataError
from daskcnn.files import local_path
from daskcnn.job.tables import Cluster
from daskcnn.show.renderers.terminal import shown, warnings_by
from daskcnn.store.making.folder_plan import Appearance
from daskcnn.store.making.prepare import summary_of
from daskcnn.store.manifest import Fit, ValueRange


def prepare(name: str, *, out: str | None, say: Callable[[str], None], **options: Any) -> str:
    """Write a data set where workers can read it; returns what was done."""
    path, warn = out or f"data/{name}.zarr", warnings_by(say)
    return store.prepare(name, out=path, progress=shown(say), warn=warn, **options)


def prepare_array_files(
    *,
    images: str,
    labels: str,
    weights: str | None,
    classes: str | None,
    out: str | None,
    name: str | None,
    say: Callable[[str], None],
    **options: Any,
) -> str:
    """Write a data set from array files of NumPy; returns what was done."""
    path = out or path_of(name or "arrays")
    names = None if classes is None else [each.strip() for each in classes.split(",")]
    if names is not None and not all(names):
        raise DataError(f"--classes {classes}", "a name is empty", "write NAME,NAME with one comma between two names")
    with ExitStack() as stack:
        options["check"] = stack.enter_context(interruptible())
        pixels, answers = (stack.enter_context(opened(file)) for file in (images, labels))
        options["weights"] = None if weights is None else stack.enter_context(opened(weights))
        options |= {"classes": names, "name": name, "progress": shown(say), "warn": warnings_by(say)}
        dataset = prepare_arrays(pixels, answers, path, **options)
    return f"wrote {path}: {summary_of(dataset)}"


def prepare_folder(
    path: str,
    *,
    out: str | None,
    size: tuple[int, int],
    fit: Fit,
    grey: bool,
    value_range: ValueRange | None,
    cluster: Cluster | None,
    say: Callable[[str], None],
    **options: Any,
) -> str:
    """Write the images of a folder where workers can read them; returns what was done."""
    name = options.get("name") or local_path(path).absolute().name or "images"
    request = Request(path, out or path_of(name), Appearance(size, fit, grey, value_range), **options)
    dataset = prepare_images(request, cluster=cluster, say=say, warn=warnings_by(say), handle_signals=True)
    return f"wrote {request.out}: {summary_of(dataset)}"


def verify(path: str) -> str:
    """Read and check all of a prepared data set. Raises DataError naming what is wrong."""
    dataset = store.open_dataset(path)
    store.verify(dataset)
    return f"{path}: {dataset.name}, {len(dataset.train):,} + {len(dataset.test):,} images, all chunks as recorded"
