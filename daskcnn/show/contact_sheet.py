"""Contact sheets: samples of each class side by side, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import combining, normalize

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from daskcnn.show.text import clean

CELL = 96
"""Pixels a side that a sample has at most. Smaller samples are enlarged by whole factors."""
_GAP, _NAMES, _LINE, _SIZE, _LEAST = 4, 220, 18, 14, 800
_BACK, _INK, _GREY = (255, 255, 255), (0, 0, 0), (110, 110, 110)
_LONGEST = 200


@dataclass(frozen=True)
class SheetRow:
    """One class: its name, a caption, and its samples, (h, w, 3) of at most `CELL` pixels a side."""

    name: str
    caption: str
    samples: Sequence[npt.NDArray[np.uint8]]


def contact_sheet(title: Sequence[str], rows: Sequence[SheetRow], columns: int) -> bytes:
    """Return a PNG with a line for each class.

    Names are written in ASCII: accents are left out, other letters and control characters are escaped. Long names are
    cut.
    """
    samples = [sample for row in rows for sample in row.samples]
    factor = _factor(samples)
    height, width = (factor * max((sample.shape[axis] for sample in samples), default=0) for axis in (0, 1))
    step, across = max(height, 2 * _LINE) + _GAP, width + _GAP
    top = _LINE * len(title) + 2 * _GAP
    wide = max(_NAMES + columns * across + _GAP, _LEAST)
    sheet = Image.new("RGB", (wide, top + step * len(rows) + _GAP), _BACK)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_SIZE)
    for i, line in enumerate(title):
        _write(draw, font, (_GAP, _GAP + _LINE * i), line, wide - 2 * _GAP, _INK)
    for i, row in enumerate(rows):
        y = top + step * i
        _write(draw, font, (_GAP, y), row.name, _NAMES - 2 * _GAP, _INK)
        _write(draw, font, (_GAP, y + _LINE), row.caption, _NAMES - 2 * _GAP, _GREY)
        for j, sample in enumerate(row.samples[:columns]):
            sheet.paste(Image.fromarray(_enlarged(sample, factor)), (_NAMES + j * across, y))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _factor(samples: Sequence[npt.NDArray[np.uint8]]) -> int:
    """How many times the samples are enlarged, all alike."""
    return max(1, CELL // max((max(sample.shape[:2]) for sample in samples), default=CELL))


def _enlarged(sample: npt.NDArray[np.uint8], factor: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(sample[:CELL, :CELL].repeat(factor, axis=0).repeat(factor, axis=1))


def _in_ascii(text: str) -> str:
    """Return the text in the letters of Pillow's own font: without accents, and others as their codes."""
    bare = "".join(c for c in normalize("NFKD", text) if not combining(c))
    return bare.encode("ascii", "backslashreplace").decode()


def _write(
    draw: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    at: tuple[int, int],
    text: str,
    width: int,
    colour: tuple[int, int, int],
) -> None:
    """Write as much of the text as there is room for."""
    cut = line = _in_ascii(clean(text[:_LONGEST]))
    while cut and font.getlength(cut) > width:
        line = line[:-1]
        cut = f"{line}..."
    draw.text(at, cut, colour, font)
