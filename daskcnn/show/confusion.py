"""A confusion matrix drawn with matplotlib, as SVG or PNG."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from daskcnn.errors import DataError
from daskcnn.show.drawing import need_matplotlib
from daskcnn.show.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CELL, EDGE, LEAST, MOST = 0.42, 2.6, 4.8, 24.0
"""Inches: a class in the picture, what stands around, and the picture at the least and at the most."""
LONGEST = 24
"""Characters of a class's name."""
MOST_NAMES, MOST_NUMBERS = 50, 30
"""Classes up to which a picture has their names, and numbers in its cells."""


def draw_confusion(classes: Sequence[str], confusion: Sequence[Sequence[int]], path: Path, *, title: str) -> Path:
    """Draw which classes are taken for which, in shares of the samples of each; the same bytes for the same numbers.

    confusion: samples of the class of the row that were answered with the class of the column. Raises UserError without
    matplotlib, DataError where the file cannot be written.
    """
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure

    look = {"svg.hashsalt": "confusion", "font.size": 9, "svg.fonttype": "none", "text.parse_math": False}
    with matplotlib.rc_context(look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in letters that the font lacks
        side = min(max(LEAST, CELL * len(classes) + EDGE), MOST)
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        _cells(axes, np.asarray(confusion))
        _names(axes, [_short(name) for name in classes])
        axes.set_title(_short(title, 80), fontsize=10)
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise DataError(path, error.strerror or error, "give a folder that may be written") from error
    return path


def _cells(axes: Axes, counts: np.ndarray) -> None:
    """Shares of each row as shades, with the numbers of samples where there is room."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(counts) <= MOST_NUMBERS:
        for (row, column), n in np.ndenumerate(counts):
            if n:
                shade = "white" if shares[row, column] > 0.5 else "black"
                axes.text(column, row, str(n), ha="center", va="center", fontsize=7, color=shade)


def _names(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xlabel("answer")
    axes.set_ylabel("class")
    if len(names) <= MOST_NAMES:
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)


def _short(name: str, most: int = LONGEST) -> str:
    name = clean(name)
    return name if len(name) <= most else f"{name[: most - 1]}…"
