"""Each worker's part in a run, and the gain of other workers: a table, its verdicts, and both in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from daskcnn.markup import as_lines
from daskcnn.show.text import aligned, duration, percent, size
from daskcnn.training.strategy_choice import PAYS

PROGRESS = "the time to the same progress"


@dataclass(frozen=True)
class Row:
    """A cluster as it is, with workers left out, or with one more.

    seconds: of the whole run. communication, wait: parts of the workers' time. up_and_down: bytes an epoch. needed:
    expected epochs for the progress of one epoch of one machine. added: kind or name of the last worker. gain: the part
    by which the one that is added, or those left out, shorten the time to that progress. speedup: likewise, against the
    cluster as it is.
    """

    workers: int
    seconds: float
    epoch: float
    communication: float
    wait: float
    balance: float | None
    up_and_down: float
    needed: float = 1.0
    added: str = ""
    without: tuple[str, ...] = ()
    gain: float | None = None
    speedup: float = 1.0

    @property
    def progress(self) -> float:
        """Seconds to the progress that one machine makes in an epoch."""
        return self.epoch * self.needed

    @property
    def pays(self) -> bool:
        """True if the workers in question pay."""
        return self.gain is None or self.gain >= PAYS


@dataclass(frozen=True)
class Verdict:
    """The verdict on one kind of worker. stops: the first that does not pay; None if all that were tried do.

    further: workers beyond those asked for that would pay, None if none were tried. reason: why it stops, if the step
    of a sharded network shows it.
    """

    kind: str
    stops: Row | None
    further: int | None = None
    reason: str | None = None


@dataclass(frozen=True)
class WorkerPlan:
    """The cluster as it is and with every change, and the verdict on each kind that is added.

    needed: workers that cannot be left out, with the reasons. merged: the strategy, where its epochs are not those of
    one machine, as replicas are merged.
    """

    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]
    needed: dict[str, str] = field(default_factory=dict)
    merged: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "pays": PAYS}

    def _repr_html_(self) -> str:
        return as_lines("Each worker's part, and what more would bring", format_worker_plan(self))


def format_worker_plan(found: WorkerPlan) -> str:
    """Return the table and the verdicts."""
    columns = [column for column in _COLUMNS if column[0] not in _WHERE_USED or any(map(column[1], found.rows))]
    of = "an epoch" if all(row.needed == 1 for row in found.rows) else PROGRESS
    lines = [[text(row) for _, text in columns] for row in found.rows]
    head = [heading for heading, _ in columns]
    table = aligned([head, *[[cell or "-" for cell in line] for line in lines]], left=int(head[0] == "without"))
    parts = [(", ".join(row.without), _part_in_words(row, of)) for row in found.rows if row.without]
    needed = [(name, f"cannot be left out: {reason}") for name, reason in found.needed.items()]
    added = [(verdict.kind, _in_words(verdict, of)) for verdict in found.verdicts]
    told = [*table, "", *aligned([*parts, *needed, *added], left=2)]
    if of == PROGRESS:
        told.append("epochs needed: expected, for the progress of one epoch of one machine; gains count them")
    if found.merged:
        needs = "to an accuracy it may need more of them than one machine"
        told.append(f"epochs are those of {found.merged}: {needs}; --strategies compares the time to an accuracy")
    return "\n".join(told)


_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("without", lambda row: ", ".join(row.without)),
    ("workers", lambda row: str(row.workers)),
    ("added", lambda row: row.added),
    ("the run", lambda row: _seconds(row.seconds)),
    ("an epoch", lambda row: _seconds(row.epoch)),
    ("epochs needed", lambda row: "" if row.needed == 1 else f"{row.needed:.2f}"),
    ("gain", lambda row: percent(row.gain)),
    ("speed-up", lambda row: f"{row.speedup:.2f}"),
    ("communication", lambda row: percent(row.communication)),
    ("waiting", lambda row: percent(row.wait)),
    ("balance", lambda row: "" if row.balance is None else f"{row.balance:.3f}"),
    ("bytes an epoch", lambda row: size(row.up_and_down)),
]
_WHERE_USED = ("without", "added", "epochs needed")  # columns that only some plans have


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{value:.3g} s"


def _part_in_words(row: Row, of: str) -> str:
    """The verdict on workers that are there. of: what they make shorter."""
    gain, them = round(row.gain or 0.0, 3), "it" if len(row.without) == 1 else "them"
    if gain <= 0:
        return f"no help: with {them} {of} is {f'{percent(-gain)} longer' if gain else 'as long as without'}"
    shorter = f"with {them} {of} is {percent(gain)} shorter"
    return f"help: {shorter}" if row.pays else f"little help: {shorter}, less than {percent(PAYS)}"


def _in_words(verdict: Verdict, of: str) -> str:
    stops, further = verdict.stops, verdict.further
    more = f"each one pays, and so would {further} more" if further else "each one pays"
    if stops is None:
        return more
    gain, reason = stops.gain or 0.0, f": {verdict.reason}" if verdict.reason else ""
    costs, part = gain <= -5e-4, f"{percent(abs(gain))} of {of}"  # less is shown as 0.0 %
    gained = f"{part}{reason}" if costs else f"{part}, less than {percent(PAYS)}{reason}"
    if further is None:
        return (
            f"does not pay from the {_ordinal(stops.workers)} worker on, which {'costs' if costs else 'gains'} {gained}"
        )
    return f"{more}; the {_ordinal(stops.workers)} worker would {'cost' if costs else 'gain'} {gained}"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
