"""Figures into files: `daskcnn plot`, and `daskcnn simulate --figures`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from daskcnn.errors import DataError, UserError
from daskcnn.launch.paper_figures import paper_figures
from daskcnn.launch.report import events
from daskcnn.launch.simulate import Scenario
from daskcnn.show.drawing import draw, need_matplotlib
from daskcnn.show.step_breakdown import step_parts


def draw_paper_figures(chosen: Scenario, folder: str, *, suffix: str = "svg", seed: int = 0) -> Iterator[Path]:
    """Draw every figure into the folder, which is made. Raises UserError without matplotlib, DataError on disk."""
    need_matplotlib()
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(folder, error.strerror or error, "give a folder that may be written") from error
    for figure in paper_figures(chosen, seed):
        yield draw(figure, path / f"{figure.name}.{suffix}")


def draw_breakdown(runs: Sequence[str], file: str) -> Path:
    """Draw what the steps of layer-sharded runs are made of, side by side; SVG or PNG by the file's ending.

    Raises UserError without matplotlib or for another ending, DataError for a log without sharded epochs, or on disk.
    """
    need_matplotlib()
    path = Path(file)
    if path.suffix not in (".svg", ".png"):
        raise UserError(file, "pictures are SVG or PNG", "give a file that ends in .svg or .png")
    return draw(step_parts({name: events(run) for name, run in _named(runs).items()}), path)


def _named(runs: Sequence[str]) -> dict[str, str]:
    """Runs by the names of their folders, or by their whole paths where several folders have the same."""
    names = [Path(run).name or run for run in runs]
    return dict(zip(names if len(set(names)) == len(names) else runs, runs, strict=True))
