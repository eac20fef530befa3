"""What a prepared data set holds: `daskcnn data show`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.errors import DataError
from daskcnn.show.contact_sheet import CELL, SheetRow, contact_sheet
from daskcnn.show.text import count
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.chunk_source import StoredChunks
from daskcnn.store.examples import SHOWN, as_pictures, find_examples, small_images

COLUMNS = 8
"""Samples of each class on a contact sheet."""
CLASSES = 20
"""Classes on a contact sheet."""
SHEETS = 5


def show_data(path: str, picture: str | None = None) -> dict[str, Any]:
    """The facts of a data set. With `picture`, contact sheets are written to this file and beside it.

    Raises DataError for a store that is none, for a damaged chunk, and for a file that cannot be written.
    """
    dataset = open_dataset(path)
    sheets = _sheets(dataset, _checked(picture)) if picture is not None else []
    manifest = dataset.manifest
    counts = zip(dataset.classes, manifest.train.class_counts, manifest.test.class_counts, strict=True)
    return {
        "path": dataset.path,
        "name": dataset.name,
        "format": manifest.format,
        "fingerprint": dataset.fingerprint,
        "shape": list(dataset.shape),
        "dtype": dataset.dtype.name,
        "nodata": dataset.nodata,
        "labels": dataset.labels,
        "bytes": (len(dataset.train) + len(dataset.test)) * dataset.sample_bytes,
        "chunk": manifest.chunk,
        "train": {"samples": len(dataset.train), "chunks": dataset.train.stored.chunks},
        "test": {"samples": len(dataset.test), "chunks": dataset.test.stored.chunks},
        "order": dataset.order,
        "seed": dataset.seed,
        "sources": len(manifest.sources),
        "mean": dataset.mean.tolist(),
        "deviation": dataset.deviation.tolist(),
        "weights": _weights(dataset.train.stored),
        "classes": [{"class": name, "train": train, "test": test} for name, train, test in counts],
        "pictures": sheets,
    }


def _weights(stored: StoredChunks) -> dict[str, float] | None:
    """Least, mean and most of the samples' weights, read chunk by chunk; None where they have none."""
    if "weights" not in stored.arrays:
        return None
    least, total, most = np.inf, 0.0, -np.inf
    for chunk in range(stored.chunks):
        weights = stored.load("weights", chunk).astype(np.float64)
        least, total, most = min(least, weights.min()), total + weights.sum(), max(most, weights.max())
    return {"least": float(least), "mean": float(total / stored.part.samples), "most": float(most)}


# --- contact sheets ---


def _checked(picture: str) -> Path:
    path = Path(picture)
    if path.suffix.lower() != ".png":
        raise DataError(path, "contact sheets are PNG files", "give a name that ends in .png")
    if path.exists() and not path.is_file():
        raise DataError(path, "not a regular file", "give the name of a new file")
    return path


def _sheets(dataset: Dataset, path: Path) -> list[str]:
    """Write the sheets of the training part; returns their files. The second is FILE-2.png, and so on."""
    shown = min(len(dataset.classes), CLASSES * SHEETS)
    found = find_examples(dataset.train, shown, COLUMNS)
    indices = {index for own in found.values() for index in own}
    pictures = as_pictures(small_images(dataset.train, indices, CELL), dataset.nodata)
    counts = dataset.manifest.train.class_counts
    rows = [
        SheetRow(dataset.classes[c], f"{count(counts[c])} to train", [pictures[index] for index in own])
        for c, own in found.items()
    ]
    return [
        _written(path, number, _title(dataset, shown, number), rows[first : first + CLASSES])
        for number, first in enumerate(range(0, shown, CLASSES), 1)
    ]


def _written(path: Path, number: int, title: list[str], rows: Sequence[SheetRow]) -> str:
    file = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
    try:
        file.write_bytes(contact_sheet(title, rows, COLUMNS))
    except OSError as error:
        raise DataError(file, error.strerror or error, "give a file that may be written") from error
    return str(file)


def _title(dataset: Dataset, shown: int, number: int) -> list[str]:
    H, W, C = dataset.shape
    first = CLASSES * (number - 1)
    left_out = f" (the first {shown:,} of {len(dataset.classes):,})" if shown < len(dataset.classes) else ""
    part = f", classes {first + 1} to {min(shown, first + CLASSES)}{left_out}" if shown > CLASSES or left_out else ""
    return [f"{dataset.name}: {H}x{W}x{C} {dataset.dtype.name}, training samples{part}", how_shown(dataset)]


def how_shown(dataset: Dataset) -> str:
    """What of an image a picture shows, and how."""
    H, W, C = dataset.shape
    channels = {1: "", 2: "channel 0 of 2 as grey; ", 3: ""}.get(C, f"channels 0, 1, 2 of {C} as red, green, blue; ")
    values = "values as they are"
    if dataset.dtype != np.uint8:
        values = "percentile {} of each channel is black, {} white".format(*SHOWN)
    step = -(-max(H, W) // CELL)
    pixels = f"; every {step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'} pixel" if step > 1 else ""
    return f"{channels}{values}{pixels}" + ("; magenta: no data" if dataset.nodata is not None else "")
