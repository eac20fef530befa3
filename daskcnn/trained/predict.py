"""Predictions of image files: `daskcnn predict` without `--out`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import compile_here
from daskcnn.errors import DataError
from daskcnn.files import open_regular
from daskcnn.job.tables import CheckpointChoice
from daskcnn.nn.network import Views
from daskcnn.store import Described
from daskcnn.store.chunk_facts import check_finite, missing_pixels
from daskcnn.store.making.images import decode, dimensions, read_file
from daskcnn.store.manifest import MAX_CHUNK_BYTES
from daskcnn.trained.place import find_network
from daskcnn.training.trained_network import Classifier

_TOGETHER_BYTES = 64 << 20


def predict(
    place: str,
    images: Sequence[str],
    *,
    checkpoint: CheckpointChoice | None,
    top: int,
    say: Callable[[str], None],
    views: Views | None = None,
) -> list[dict[str, Any]]:
    """Return the likeliest classes of each image or array file, or the loss of each if the network reconstructs images.

    Image files are resized to the network's size.

    Parameters
    ----------
    place, checkpoint, views : as for `find_network`.
    top : number of classes.
    """
    network = find_network(place, checkpoint, say, views=views)
    classifier = network.classifier
    for path in images:
        if os.path.isdir(path):
            reason = "a folder, a data set or an array, not an image file"
            raise DataError(path, reason, "say where to write: --out p.csv")
    several, found = together(classifier.facts), list[dict[str, Any]]()
    for lo in range(0, len(images), several):
        seen = np.stack([pixels(path, classifier.facts, say) for path in images[lo : lo + several]])
        if not lo:
            say(f"weights: {network.weights}")
            compile_here(classifier.job.model.dtype, say)
        found += _predicted(classifier, seen, top)
    return [{"image": path, **each} for path, each in zip(images, found, strict=True)]


def together(facts: Described) -> int:
    """Return how many images of files are in memory at a time."""
    return max(1, _TOGETHER_BYTES // (int(np.prod(facts.shape)) * facts.dtype.itemsize))


def _predicted(classifier: Classifier, seen: npt.NDArray[Any], top: int) -> Iterator[dict[str, Any]]:
    if classifier.reconstructs:
        yield from ({"loss": loss} for loss in classifier.losses(seen))
        return
    for probabilities in classifier.predict(seen):
        order = np.argsort(-probabilities)[:top]
        classes = [{"class": classifier.classes[i], "probability": float(probabilities[i])} for i in order]
        yield {"classes": classes}


def pixels(path: str, facts: Described, say: Callable[[str], None]) -> npt.NDArray[Any]:
    """Return a file as an image (H, W, C). Raises DataError for a file that the network cannot take."""
    H, W, C = facts.shape
    if path.endswith(".npy"):
        return _array(path, facts)
    if C not in (1, 3) or facts.dtype != np.uint8:
        what = f"of {C} channels" if C not in (1, 3) else f"in {facts.dtype}"
        reason = f"the network looks at images {what}, which image files do not have"
        raise DataError(path, reason, f"give a .npy file of {facts.dtype} ({H}, {W}, {C})")
    data = read_file(path)
    height, width = dimensions(data, name=path)
    if (height, width) != (H, W) and facts.fit is None:  # not as the preparation has done it
        say(f"warning: {path}: {width}x{height} pixels, resized to {W}x{H}")
    how: Any = {"fit": facts.fit or "stretch", "grey": C == 1, "value_range": facts.value_range}
    return decode(data, name=path, size=(H, W), **how)


def _array(path: str, facts: Described) -> npt.NDArray[Any]:
    """Return the array in a file. The header is checked before the data are read: the network has one shape."""
    shape, wanted = facts.shape, facts.dtype
    remedy = f"give {wanted} of shape {shape}, as NumPy's save writes it"
    count = int(np.prod(shape))
    try:
        with open_regular(path) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            found, fortran, dtype = read(file, max_header_size=10_000)
            if found != shape or dtype.newbyteorder("=") != wanted:
                raise DataError(path, f"{dtype} of shape {found}", remedy)
            data = file.read(min(count * wanted.itemsize, MAX_CHUNK_BYTES))
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file", "correct the path") from error
    except OSError as error:
        raise DataError(path, error.strerror or error, remedy) from error
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise DataError(path, f"not an array file that can be read ({error!s:.120})", remedy) from error
    if len(data) != count * wanted.itemsize:
        raise DataError(path, f"{len(data):,} bytes of data, truncated", remedy)
    values = np.frombuffer(data, dtype).astype(wanted, copy=False).reshape(shape, order="F" if fortran else "C")
    image = values[None]
    check_finite(image, missing_pixels(image, facts.nodata), where=path, first=0, option="data.nodata in training")
    return values
