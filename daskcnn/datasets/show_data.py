"""The facts of a prepared data set, and small samples of each class in bounded memory: `daskcnn data show`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.files import output_file
from daskcnn.show.renderers.drawing import SAMPLE_CELL, SheetRow, contact_sheet
from daskcnn.show.text import count
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.chunk_facts import Images, missing_pixels
from daskcnn.store.chunk_source import StoredChunks
from daskcnn.store.dataset import Split

SHOWN = (1, 99)
"""Percentiles of a channel's values that are shown as black and as white."""
_MISSING = (255, 0, 255)


def find_examples(split: Split, classes: int, each: int) -> dict[int, list[int]]:
    """Return the first samples of the first `classes` classes or labels, at most `each` of one.

    Labels are read chunk by chunk, as far as it takes. Raises DataError for a chunk that is damaged.
    """
    stored = split.stored
    missing = {c: min(each, n) for c, n in enumerate(stored.part.class_counts[:classes]) if n}
    found: dict[int, list[int]] = {c: [] for c in range(classes)}
    for chunk in range(stored.chunks):
        labels = stored.load("labels", chunk)
        for c in list(missing):
            here = np.flatnonzero(labels == c if labels.ndim == 1 else labels[:, c])[: missing[c]]
            found[c] += (chunk * stored.chunk + here).tolist()
            missing[c] -= len(here)
            if not missing[c]:
                del missing[c]
        if not missing:
            break
    return found


def small_images(split: Split, indices: set[int], side: int) -> dict[int, Images]:
    """Return these samples with at most `side` pixels a side and three channels. Pixels between are left out.

    One chunk is held at a time. Raises DataError for one that is damaged.
    """
    by_chunk = defaultdict[int, list[int]](list)
    for index in sorted(indices):
        by_chunk[index // split.stored.chunk].append(index)
    found: dict[int, Images] = {}
    for chunk, wanted in by_chunk.items():
        found |= _small(split.stored, chunk, wanted, side)
    return found


def _small(stored: StoredChunks, chunk: int, wanted: Sequence[int], side: int) -> dict[int, Images]:
    images = stored.load("images", chunk)  # let go of before the next one is read
    step = -(-max(images.shape[1:3]) // side)
    shown = 3 if images.shape[3] >= 3 else 1
    return {index: images[index - chunk * stored.chunk, ::step, ::step, :shown].copy() for index in wanted}


def as_pictures(images: dict[int, Images], nodata: float | None) -> dict[int, npt.NDArray[np.uint8]]:
    """Return images (h, w, 1 or 3) of any number type as (h, w, 3) uint8; uint8 as they are.

    Others are scaled channel by channel: percentile 1 of all these images becomes 0, percentile 99 becomes 255.
    Pixels without data are magenta.
    """
    masks = {index: missing_pixels(image, nodata) for index, image in images.items()}
    numbers = {index: image.astype(np.float32) for index, image in images.items()}
    if images and next(iter(images.values())).dtype != np.uint8:
        numbers = _scaled(numbers, masks)
    pictures = {}
    for index, image in numbers.items():
        picture = np.broadcast_to(np.clip(image, 0, 255).astype(np.uint8), (*image.shape[:2], 3)).copy()
        if (mask := masks[index]) is not None:
            picture[mask.any(axis=-1)] = _MISSING
        pictures[index] = picture
    return pictures


def _scaled(
    images: dict[int, npt.NDArray[np.float32]], masks: dict[int, npt.NDArray[np.bool_] | None]
) -> dict[int, npt.NDArray[np.float32]]:
    channels = next(iter(images.values())).shape[2]
    low, high = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    known = {index: np.isfinite(image) for index, image in images.items()}
    known |= {index: known[index] & ~mask for index, mask in masks.items() if mask is not None}
    for c in range(channels):
        values = np.concatenate([image[..., c][known[index][..., c]] for index, image in images.items()])
        if values.size:
            low[c], high[c] = np.percentile(values, SHOWN)
    width = np.where(high > low, high - low, np.float32(np.inf))  # a channel of one value is shown as black
    return {
        index: np.where(known[index], (np.where(known[index], image, low) - low) / width * 255, 0).astype(np.float32)
        for index, image in images.items()
    }


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


def _checked(picture: str) -> Path:
    path = Path(picture)
    if path.suffix.lower() != ".png":
        raise DataError(path, "contact sheets are PNG files", "give a name that ends in .png")
    output_file(path)
    return path


def _sheets(dataset: Dataset, path: Path) -> list[str]:
    """Write the sheets of the training part; returns their files. The second is FILE-2.png, and so on."""
    shown = min(len(dataset.classes), CLASSES * SHEETS)
    found = find_examples(dataset.train, shown, COLUMNS)
    indices = {index for own in found.values() for index in own}
    pictures = as_pictures(small_images(dataset.train, indices, SAMPLE_CELL), dataset.nodata)
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
    """Return a line on the channels and pixels that a picture shows."""
    H, W, C = dataset.shape
    channels = {1: "", 2: "channel 0 of 2 as grey; ", 3: ""}.get(C, f"channels 0, 1, 2 of {C} as red, green, blue; ")
    scaled = "percentile {} of each channel is black, {} white".format(*SHOWN)
    values = "values as they are" if dataset.dtype == np.uint8 else scaled
    step = -(-max(H, W) // SAMPLE_CELL)
    pixels = f"; every {step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'} pixel" if step > 1 else ""
    return f"{channels}{values}{pixels}" + ("; magenta: no data" if dataset.nodata is not None else "")
