"""What the drawings of `docs/concepts` share: colours, sizes, and how a figure is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

PICTURES = Path(__file__).parents[1] / "pictures"
BLUE, LIGHT, RED, GREEN, GREY, AMBER = "#2a6f97", "#a9d6e5", "#e07a5f", "#4f9d69", "#888888", "#e9b44c"
COLOURS = (BLUE, RED, GREEN, AMBER, GREY, LIGHT)
SETTINGS = {
    "font.size": 9,
    "svg.hashsalt": "daskcnn",
    "svg.fonttype": "path",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}

Draw = Callable[[], Any]


def panels(columns: int = 1, rows: int = 1, **options: Any) -> Any:
    """A figure and its axes, 8.6 inches wide."""
    mpl.rcParams.update(SETTINGS)
    height = options.pop("height", 3.1)
    return plt.subplots(rows, columns, figsize=(8.6, height), layout="constrained", **options)


def save(figure: Any, name: str, folder: Path = PICTURES) -> Path:
    """Write the figure as SVG, the same bytes each time."""
    path = folder / f"concept-{name}.svg"
    figure.savefig(path, facecolor="white", metadata={"Date": None})
    plt.close(figure)
    lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
