"""What a trained network sees in image files: `daskcnn predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.files import open_regular
from daskcnn.launch.trained_run import Which, load_trained
from daskcnn.store.images import MAX_BYTES, decode, dimensions, read_file
from daskcnn.training.trained_network import Classifier, to_classifier


def predict(
    run: str, images: Sequence[str], *, which: Which, top: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The likeliest classes of each image file, resized to what the network saw in training, or array file."""
    job, checkpoint = load_trained(run, which, say)
    classifier = to_classifier(checkpoint, job)
    pixels = np.stack([_pixels(path, classifier.facts.shape, say) for path in images])
    return [_likeliest(path, p, classifier, top) for path, p in zip(images, classifier.predict(pixels), strict=True)]


def _likeliest(path: str, probabilities: npt.NDArray[Any], classifier: Classifier, top: int) -> dict[str, Any]:
    order = np.argsort(-probabilities)[:top]
    return {
        "image": path,
        "classes": [{"class": classifier.classes[i], "probability": float(probabilities[i])} for i in order],
    }


def _pixels(path: str, shape: tuple[int, int, int], say: Callable[[str], None]) -> npt.NDArray[np.uint8]:
    """A file as (H, W, C) uint8. Raises DataError for what is none that the network can look at."""
    H, W, C = shape
    if path.endswith(".npy"):
        return _array(path, shape)
    if C not in (1, 3):
        raise DataError(
            path,
            f"the network looks at images of {C} channels, which image files do not have",
            f"give a .npy file of uint8 ({H}, {W}, {C})",
        )
    data = read_file(path)
    height, width = dimensions(data, name=path)
    if (height, width) != (H, W):
        say(f"warning: {path}: {width}x{height} pixels, resized to {W}x{H}")
    return decode(data, name=path, size=(H, W), fit="stretch", grey=C == 1)


def _array(path: str, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """An array file, which has to be of the network's own shape: its header is checked before its data are read."""
    remedy = f"give uint8 of shape {shape}, as NumPy's save writes it"
    try:
        with open_regular(path) as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            found, fortran, dtype = read(file, max_header_size=10_000)
            if found != shape or dtype != np.uint8:
                raise DataError(path, f"{dtype} of shape {found}", remedy)
            values = np.frombuffer(file.read(min(int(np.prod(shape)), MAX_BYTES)), np.uint8)
    except FileNotFoundError as error:
        raise DataError(path, "there is no such file", "correct the path") from error
    except OSError as error:
        raise DataError(path, error.strerror or error, remedy) from error
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise DataError(path, f"not an array file that can be read ({error!s:.120})", remedy) from error
    if values.size != np.prod(shape):
        raise DataError(path, f"{values.size:,} bytes of data, truncated", remedy)
    return values.reshape(shape, order="F" if fortran else "C")
