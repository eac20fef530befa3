"""The timeline of a run: a lane for each worker, from a report's rounds.

A log has the sums of a round and the time of its end. The parts of a round are laid out back from its end in the order
of `SPENT`: only their lengths were measured. A round that would begin before the last one of its worker has ended is
shortened. Lanes of a long run are divided into equal stretches, each with the seconds of every part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from daskcnn.show.history import SPENT, RoundRow
from daskcnn.show.report_tables import RunReport
from daskcnn.show.text import spread

MOST_LANES, MOST_PARTS = 48, 12_000  # workers that have a lane, and parts of all lanes together, in a page
MOST_STRETCHES = 800  # stretches of a lane where it is divided: about one a pixel


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a lane. begin, end: seconds of the run; spent: seconds in it of each of `SPENT`."""

    begin: float
    end: float
    spent: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """The rounds of one worker, and their seconds of each of `SPENT`."""

    worker: str
    rounds: int
    stretches: tuple[Stretch, ...]
    spent: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lanes over the same seconds. workers: of the run, also without a lane; whole: True if no lane is divided."""

    lanes: tuple[Lane, ...]
    seconds: float
    workers: int
    whole: bool


def timeline(report: RunReport, *, most: int = MOST_PARTS, lanes: int = MOST_LANES) -> Timeline:
    """Return the lanes of at most `lanes` workers, evenly spread, without rounds that were made again.

    most: parts of all lanes together, more or less, above which lanes are divided.
    """
    names = [worker.name for worker in report.workers]
    rounds: dict[str, list[RoundRow]] = {name: [] for name in spread(names, lanes)}
    for row in standing(report):
        if row.worker in rounds:
            rounds[row.worker].append(row)
    laid = {name: tuple(_laid_out(own)) for name, own in rounds.items()}
    seconds = max([report.seconds, *(own[-1].end for own in laid.values() if own)], default=0.0)
    whole = len(SPENT) * sum(map(len, laid.values())) <= most
    width = (seconds or 1.0) / max(1, min(MOST_STRETCHES, most // (len(SPENT) * max(len(laid), 1))))
    cut = {name: tuple(_parts(own) if whole else divided(own, width)) for name, own in laid.items()}
    sums = {name: tuple(sum(each.spent[i] for each in own) for i in range(len(SPENT))) for name, own in laid.items()}
    found = tuple(Lane(name, len(laid[name]), cut[name], sums[name]) for name in laid)
    return Timeline(found, seconds, len(names), whole)


def standing(report: RunReport) -> list[RoundRow]:
    """Return the rounds without those that were made again: a life that begins earlier undoes them."""
    began = report.began.items()
    until = {life: min((at for later, at in began if later > life), default=inf) for life in report.began}
    return [row for row in report.rounds if row.at <= until[row.life]]


def _laid_out(rounds: Iterable[RoundRow]) -> Iterator[Stretch]:
    """A stretch for each round of one worker, none of which overlap."""
    last = 0.0
    for row in rounds:
        spent, end = row.spent, max(last, row.at)
        total = sum(spent)
        begin = end - total
        if begin < last:
            begin, scale = last, (end - last) / total
            spent = tuple([scale * part for part in spent])
        yield Stretch(begin, end, spent)
        last = end


def _parts(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """The same with a stretch for each part, one after the other; those that took no time are left out."""
    for each in stretches:
        begin = each.begin
        for i, seconds in enumerate(each.spent):
            if seconds > 0:
                end = min(begin + seconds, each.end)
                yield Stretch(begin, end, tuple(seconds if i == j else 0.0 for j in range(len(SPENT))))
                begin = end


def divided(stretches: Sequence[Stretch], width: float) -> Iterator[Stretch]:
    """Yield stretches of equal width, in seconds, each with the parts of the given ones in it; no empty ones."""
    sums: dict[int, list[float]] = {}
    for each in stretches:
        first, last = int(each.begin / width), int(each.end / width)
        length = each.end - each.begin
        for i in range(first, last + 1):
            inside = min(each.end, (i + 1) * width) - max(each.begin, i * width)
            share = inside / length if length > 0 else float(i == first)
            if share > 0:
                own = sums.setdefault(i, [0.0] * len(SPENT))
                for j, seconds in enumerate(each.spent):
                    own[j] += share * seconds
    for i in sorted(sums):
        yield Stretch(i * width, (i + 1) * width, tuple(sums[i]))
