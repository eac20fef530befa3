"""What a trained network sees in image files: `daskcnn predict`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from daskcnn.errors import DataError
from daskcnn.launch.trained_run import Which, load_trained
from daskcnn.training.trained_network import Classifier, to_classifier

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")  # none that another program is called for


def predict(
    run: str, images: Sequence[str], *, which: Which, top: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The likeliest classes of each image file, resized to what the network saw in training."""
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
    """An image file as (H, W, C) uint8. Raises DataError for what is no image, or too large to be one."""
    H, W, C = shape
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning):
            image = Image.open(path, formats=FORMATS)
        with image:
            if image.size != (W, H):
                say(f"warning: {path}: {image.size[0]}x{image.size[1]} pixels, resized to {W}x{H}")
            plain = image.convert("RGB" if C == 3 else "L").resize((W, H), Image.Resampling.BILINEAR)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(path, f"too large for an image to look at ({error})", "scale it down first") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(path, f"not an image that can be read ({error})", "give a PNG or JPEG file") from error
    return np.asarray(plain, np.uint8).reshape(H, W, C)
