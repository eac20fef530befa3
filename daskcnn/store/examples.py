"""A few small samples of each class, in bounded memory: what a person looks at to see what a data set holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
        mask = masks[index]
        if mask is not None:
            picture[mask.any(axis=-1)] = _MISSING
        pictures[index] = picture
    return pictures


def _scaled(
    images: dict[int, npt.NDArray[np.float32]], masks: dict[int, npt.NDArray[np.bool_] | None]
) -> dict[int, npt.NDArray[np.float32]]:
    channels = next(iter(images.values())).shape[2]
    low, high = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    known = {index: np.isfinite(image) & ~_mask(masks[index], image) for index, image in images.items()}
    for c in range(channels):
        values = np.concatenate([image[..., c][known[index][..., c]] for index, image in images.items()])
        if values.size:
            low[c], high[c] = np.percentile(values, SHOWN)
    width = np.where(high > low, high - low, np.float32(np.inf))  # a channel of one value is shown as black
    return {
        index: np.where(known[index], (np.where(known[index], image, low) - low) / width * 255, 0).astype(np.float32)
        for index, image in images.items()
    }


def _mask(mask: npt.NDArray[np.bool_] | None, image: Images) -> npt.NDArray[np.bool_]:
    return np.zeros(image.shape, bool) if mask is None else mask
