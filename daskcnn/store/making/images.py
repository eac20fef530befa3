"""Image files into arrays, with limits: whatever is in a file, decoding it takes a bounded amount of memory.

The only place that decodes images: predictions and the preparation of folders see the same pixels.
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, UnidentifiedImageError

from daskcnn.errors import DataError
from daskcnn.files import read_regular
from daskcnn.store.manifest import Fit as Fit
from daskcnn.store.manifest import ValueRange

Pixels = npt.NDArray[np.uint8]
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
"""Those that Pillow decodes by itself; others call programs, such as Ghostscript."""
MAX_BYTES = 64 << 20
MAX_PIXELS = 24_000_000
"""The largest image that is decoded: a photograph of 24 megapixels. Decoding takes up to twelve bytes a pixel."""
_GAP = 2
"""Least ratio of the decoded size to the result's, for a JPEG image that can be decoded at a part of its size.

Resizing joins the pixels that this leaves out. In the root mean square the two ways differ by half a level of 256
to two, measured on grainy images.
"""
_REMEDY = "scale it down first"
_GIVE = "give a PNG or JPEG file"
_DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")
_SIXTEEN: ValueRange = (0, 65535)
_ROWS = 64
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The turn that undoes each EXIF orientation."""
_SWAPPING = {_TURNS[number] for number in (5, 6, 7, 8)}


def read_file(path: str | Path) -> bytes:
    """Return the content of an image file. Raises DataError, for what is no regular file and what is too large too."""
    try:
        return read_regular(path, MAX_BYTES, remedy=_REMEDY)
    except FileNotFoundError as error:
        if os.path.islink(path):
            raise DataError(path, "a link to a file that is not there", "mend or remove it") from error
        raise DataError(path, "there is no such file", "correct the path") from error
    except OSError as error:
        raise DataError(path, f"not an image that can be read ({error.strerror or error})", _GIVE) from error


def dimensions(data: bytes, *, name: str) -> tuple[int, int]:
    """Return (H, W) of an image as it is looked at, turned by its EXIF orientation. Raises DataError as `decode`."""
    with _opened(data, name) as image:
        W, H = image.size
        return (W, H) if _turn(image) in _SWAPPING else (H, W)


def is_deep(data: bytes, *, name: str) -> bool:
    """Return True for an image of more than 8 bits, grey or coloured. Raises DataError as `decode`."""
    with _opened(data, name) as image:
        return image.mode in _DEEP or _halved(image)


def decode(
    data: bytes,
    *,
    name: str,
    size: tuple[int, int],
    fit: Fit = "stretch",
    grey: bool = False,
    value_range: ValueRange | None = None,
) -> Pixels:
    """Return an image (H, W, 3), or (H, W, 1) if `grey`, as it is looked at.

    It is turned by its EXIF orientation. What is transparent shows black. The first frame of an animation is taken. A
    JPEG image of four times the size or more is decoded at a part of it, and then resized.

    Grey values of more than 8 bits are black at the first number of `value_range` and white at the second: of 16 bits
    at 0 and 65,535 without one. Others need one, as nothing in a file says what its numbers mean. Colours
    and grey with transparency have 8 bits: of 16 the upper ones are taken, and a range is refused.

    Where its proportions are others, "stretch" changes them, "crop" cuts off what is too much from both sides, "pad"
    adds black to both sides. Raises DataError, with the name of the file, for what is no image, is damaged, has more
    than `MAX_PIXELS` pixels, metadata beyond measure, or numbers without a range.
    """
    with _opened(data, name) as image:
        if value_range is not None and _halved(image):
            reason = "colours or transparency of 16 bits, whose white is always 65,535"
            remedy = "leave --value-range LOW,HIGH (value_range=) out, or give files of 8 bits"
            raise DataError(name, reason, remedy)
        turn = _turn(image)
        frame = (size[0], size[1]) if turn in _SWAPPING else (size[1], size[0])
        # a JPEG image is decoded small, its last pixels may lie across its border; only its brightness if grey
        drafted = image.draft("L" if grey else None, (frame[0] * _GAP, frame[1] * _GAP))
        within = None if drafted is None else drafted[1][2:]
        small = _fitted(_resizable(image, name, value_range), within, frame, fit)
        if turn is not None:
            small = small.transpose(turn)
        if small.mode == "RGBa":  # on black: its colours are multiplied by the transparency already
            small = Image.merge("RGB", small.split()[:3])
        return np.asarray(small.convert("L" if grey else "RGB"), np.uint8).reshape(*size, 1 if grey else 3).copy()


@contextmanager
def _opened(data: bytes, name: str) -> Iterator[Image.Image]:
    """The image, its size checked. What Pillow raises or warns of is raised as DataError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged metadata, which are not looked at
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if len(data) > MAX_BYTES:
                raise DataError(name, f"{len(data):,} bytes, more than the {MAX_BYTES:,} allowed", _REMEDY)
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise _too_large(name, f"{width}x{height} pixels, more than the {MAX_PIXELS:,} allowed")
                yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(name, str(error)) from error
    except DataError:
        raise
    except (MemoryError, RecursionError) as error:
        raise _too_large(name, type(error).__name__) from error
    except Exception as error:  # each of Pillow's decoders has errors of its own
        reason = "cannot identify image file" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(name, f"not an image that can be read ({reason!s:.200})", _GIVE) from error


def _halved(image: Image.Image) -> bool:
    """True if the pixels have 16 bits of which Pillow takes 8, as it does for colours; asked before they are read."""
    tiles = getattr(image, "tile", None)
    how = tiles[0][3] if tiles else ""  # such as RGB;16B, alone or first
    kind = str(how[0] if isinstance(how, tuple) else how)
    return ";16" in kind and not kind.startswith("BGR") and image.mode not in _DEEP  # BGR;16: of all colours together


def _too_large(name: str, why: str) -> DataError:
    return DataError(name, f"too large for an image to look at ({why})", _REMEDY)


def _turn(image: Image.Image) -> Image.Transpose | None:
    """The turn that undoes the image's orientation; None where there is none, or its EXIF data are damaged."""
    if image.format == "TIFF":  # which Pillow turns by itself
        return None
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except (ValueError, TypeError, KeyError, IndexError, OSError, SyntaxError, struct.error):
        return None
    return _TURNS.get(orientation) if isinstance(orientation, int) else None


def _resizable(image: Image.Image, name: str, value_range: ValueRange | None) -> Image.Image:
    """The image in a mode of 8 bits that can be resized: L, RGB or, where it has transparent parts, RGBa."""
    if image.mode in _DEEP:
        return Image.fromarray(_eight_bits(image, name, value_range))
    if image.has_transparency_data:
        return (image if image.mode == "RGBA" else image.convert("RGBA")).convert("RGBa")  # a copy less
    mode = "L" if image.mode in ("1", "L") else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _eight_bits(image: Image.Image, name: str, value_range: ValueRange | None) -> Pixels:
    """Grey values (H, W) of the range from black to white. NaN is black."""
    values = np.asarray(image)
    if value_range is None and image.mode in ("I", "F"):
        kind = "real numbers" if image.mode == "F" else "integers of 32 bits"
        known = values[~np.isnan(values)]
        least, most = (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)
        without = "no --value-range LOW,HIGH (value_range=) says which are black and white"
        reason = f"{kind} from {least:g} to {most:g}, and {without}"
        raise DataError(name, reason, "prepare the images to train on with one, or give files of 8 or 16 bits")
    low, high = value_range or _SIXTEEN
    found = np.empty(values.shape, np.uint8)
    for row in range(0, len(values), _ROWS):
        part = np.nan_to_num(values[row : row + _ROWS].astype(np.float64), nan=low, posinf=high, neginf=low)
        found[row : row + _ROWS] = np.rint((np.clip(part, low, high) - low) * (255 / (high - low)))
    return found


def _fitted(image: Image.Image, within: tuple[float, float] | None, frame: tuple[int, int], fit: Fit) -> Image.Image:
    """The image, which ends at `within` where that is given, in another size; each is (W, H)."""
    width, height = within or image.size
    box = 0.0, 0.0, float(width), float(height)
    if fit == "crop":
        part = min(width / frame[0], height / frame[1])
        left, upper = (width - part * frame[0]) / 2, (height - part * frame[1]) / 2
        box = max(0.0, left), max(0.0, upper), min(width, width - left), min(height, height - upper)
    if fit != "pad":
        return image.resize(frame, Image.Resampling.BILINEAR, box)
    whole = max(width / frame[0], height / frame[1])
    inner = max(1, round(width / whole)), max(1, round(height / whole))
    padded = Image.new(image.mode, frame)
    place = (frame[0] - inner[0]) // 2, (frame[1] - inner[1]) // 2
    padded.paste(image.resize(inner, Image.Resampling.BILINEAR, box), place)
    return padded
