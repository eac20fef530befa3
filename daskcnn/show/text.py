"""Numbers, messages and tables for people, in ASCII: the material of text and pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from daskcnn.errors import escaped

_SPACES = str.maketrans("\n\t", "  ")


def clean(message: object) -> str:
    """Return one line in which spaces stand for line feeds and tabs, and escapes for other control characters."""
    return escaped(str(message).translate(_SPACES)).strip()


def plain(text: object) -> str:
    """Return lines without control characters."""
    return escaped(str(text), keep="\n")


def number(value: float | None) -> str:
    """Return four significant digits: 0.1235, 1.235, 12.35; '-' for None."""
    if value is None:
        return "-"
    if not math.isfinite(value) or abs(value) >= 1e5 or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


def percent(share: float | None, error: float | None = None) -> str:
    """Return a share of 1 as '55.1 %', with a standard error as '55.1 ± 1.2 %'; '-' for None."""
    if share is None:
        return "-"
    return f"{100 * share:.1f} %" if error is None else f"{100 * share:.1f} ± {100 * error:.1f} %"


def time_shares(
    of: float, *, busy: float, evaluation: float | None, wait: float | None, communication: float | None
) -> str:
    """Return the shares of the workers' seconds: 'busy 67.5 %, waiting 1.5 %, other 31.0 %'; empty if no time passed.

    of: seconds that the workers took part. None: not measured apart. Other: before, between and after their rounds.
    """
    measured = {"busy": busy, "evaluation": evaluation, "waiting": wait, "communication": communication}
    spent = {what: seconds for what, seconds in measured.items() if seconds is not None}
    if not of or not any(spent.values()):
        return ""
    of = max(of, sum(spent.values()))  # exchanges may be measured beside the training
    shares = {what: seconds / of for what, seconds in (spent | {"other": of - sum(spent.values())}).items()}
    return ", ".join(f"{what} {percent(share)}" for what, share in shares.items())


def judged(
    accuracy: float | None, loss: float | None, auc: float | None, metrics: Mapping[str, float | None] | None = None
) -> str:
    """Return the quality of a network: 'accuracy 55.1 %, loss 1.235, AUC 0.9012'; a loss without accuracy alone.

    metrics: the job's own, by name.
    """
    found = [] if accuracy is None and loss is not None else [f"accuracy {percent(accuracy)}"]
    more = [] if auc is None else [f"AUC {auc:.4f}"]
    return ", ".join([*found, f"loss {number(loss)}", *more, *measured(metrics or {})])


def measured(metrics: Mapping[str, float | None]) -> list[str]:
    """Return the job's own metrics in words, each 'top3 0.9012'."""
    return [f"{clean(name)} {'-' if value is None else f'{value:.4g}'}" for name, value in metrics.items()]


def brought(*, worker: str, epoch: float, accuracy: float | None, seconds: float, alone: float, at_most: bool) -> str:
    """Return what a cluster brought, against its fastest worker by itself. See `AloneEstimate`."""
    did = f"made {plural(f'{epoch:.4g}', 'epoch')}" if accuracy is None else f"reached {percent(accuracy)}"
    estimated = "at most (estimated: it may need fewer samples)" if at_most else "(estimated)"
    there = f"{clean(worker)} alone would have taken about {duration(alone)} {estimated}"
    return f"this cluster {did} in {duration(seconds)}; {there}"


def no_kernels(workers: Sequence[str]) -> str:
    """Return the workers without kernels, with the reason: their rows would look like those of a defect."""
    named = ", ".join(map(clean, workers))
    return f"{named}: a part of the work there would cost more than it saves" if named else ""


def checkpoint_text(place: str, choice: str | None, epoch: float | None) -> str:
    """Return a checkpoint with the choice that led to it: 'run/checkpoints/step-000000375 (best, epoch 3)'."""
    known = [*([] if choice is None else [choice]), *([] if epoch is None else [f"epoch {epoch:.4g}"])]
    return f"{place} ({', '.join(known)})" if known else place


def count(value: float | None) -> str:
    """Return a whole number with separators, or one decimal below ten: '48,000', '2.5'; '-' for None."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.1f}" if abs(value) < 10 and value != int(value) else f"{value:,.0f}"


WITHIN_ERROR = "unknown (the gradient is within its error)"
"""A gradient noise scale that was measured, and cannot be told."""


def noise_text(scale: float, error: float | None) -> str:
    """Return a gradient noise scale with its standard error: '1,250 ± 90'."""
    return count(scale) if error is None else f"{count(scale)} ± {count(error)}"


def shard_texts(kernels: Mapping[str, int], divided: Mapping[str, str], of: Mapping[str, int]) -> dict[str, str]:
    """Return a worker's part of each layer: its kernels, or its share of the samples where those are divided."""
    return {
        layer: f"{100 * n / max(of.get(layer, n), 1):.0f} %" if divided.get(layer) == "samples" else count(n)
        for layer, n in kernels.items()
    }


def epochs(value: float) -> str:
    """Return epochs with at most two decimals: '3', '0.75', '2.33'."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def plural(amount: int | str, thing: str) -> str:
    """Return '1 core', '2 cores', '0.5 epochs'."""
    return f"{amount} {thing}" if str(amount) == "1" else f"{amount} {thing}s"


def clock(seconds: float | None) -> str:
    """Return '1:23' or '2:01:23'; '-' for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float | None) -> str:
    """Return '4.2 s', '4 min 12 s' or '2 h 05 min'; '-' for None."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(nbytes: float | None) -> str:
    """Return '812 B', '12.3 MB', '1.2 GB', in powers of 1000; '-' for None."""
    if nbytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return lines of equal columns: the first `left` ones to the left, the others, of numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(text.ljust(n) if i < left else text.rjust(n) for i, (text, n) in cells).rstrip())
    return lines


Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], Any], Callable[[Any], str]]
"""A heading, the value of a row, and its text. A column without any value is left out."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text, whose first `left` columns are aligned to the left."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    workers: tuple[str | None, ...] = ()  # of each row; None for a row about several
    note: str = ""  # on rows that are left out
    headed: bool = True  # `lines` begin with the headings

    def lines(self) -> list[str]:
        """Return aligned text: the headings, a line for each row, and the note."""
        rows = [self.head, *self.rows] if self.headed else self.rows
        return [*aligned(rows, left=self.left), *self.note.splitlines()] if self.rows else []


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: lines with labels, or a table. name: for links; title: empty for none in text."""

    name: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: TextTable | None = None


def text_table(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    *,
    left: int = 1,
    most: int | None = None,
    worker: Callable[[Row], str | None] | None = None,
) -> TextTable:
    """Return the table of these rows, or of `most` of them, evenly spread. worker: gives the worker of a row."""
    shown = [(heading, value, text) for heading, value, text in columns if any(value(row) is not None for row in rows)]
    kept = spread(rows, most)
    note = "" if len(kept) == len(rows) else f"({len(kept)} of {count(len(rows))}; --rounds shows all)"
    return TextTable(
        head=tuple(heading for heading, _, _ in shown),
        rows=tuple(tuple("-" if (v := value(row)) is None else text(v) for _, value, text in shown) for row in kept),
        left=left,
        workers=tuple(worker(row) for row in kept) if worker else (None,) * len(kept),
        note=note,
    )


def spread(rows: Sequence[Row], most: int | None) -> list[Row]:
    """Return at most `most` of the rows, evenly spread, in their order, with the first and the last."""
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[i * (len(rows) - 1) // max(most - 1, 1)] for i in range(most)]
