"""The runs of a folder as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daskcnn.show.text import aligned, clean, duration, percent


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run.

    Attributes
    ----------
    state : how it ended, or "running", "broken off" (killed before it could say so) or "damaged".
    accuracy : on the test samples once it has ended, before that on the validation samples; None where none is known.
    seconds : of training; of a run without a summary since it was last started.
    """

    run: str
    state: str
    strategy: str = ""
    epochs: float = 0.0
    accuracy: float | None = None
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def readable_runs(rows: Sequence[RunRow], folder: str) -> str:
    """A line a run, under a heading."""
    if not rows:
        return f"{clean(folder)}: no runs here"
    cells = [("run", "state", "strategy", "epochs", "accuracy", "duration"), *map(_cells, rows)]
    return "\n".join(aligned(cells, left=3))


def _cells(row: RunRow) -> tuple[str, ...]:
    epochs, state = f"{row.epochs:.4g}", clean(row.state)
    return clean(row.run), state, clean(row.strategy), epochs, percent(row.accuracy), duration(row.seconds)
