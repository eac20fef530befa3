"""The rounds of a run: the next samples of each worker, until every sample was presented `epochs` times on average.

A *round* is `passes` passes of a worker over all its samples. `Rounds` is told that a round ended (`finished`), that a
worker is `lost` or has come (`join`); `due` then returns the rounds that start now. Under a barrier rule all workers
start together; otherwise each starts again when its own round ends. Then increments of the allocation are handed out;
without a barrier, those of workers that come too late for them go to those that begin a round. The last rounds are cut
so that all add up to `total · epochs` presentations.

Behind a barrier the slowest worker decides how long a step takes. Once all increments are given, samples move between
two rounds from workers that have become slower to the others, where that is worth it and the partitioner adapts. With
`resizes_steps` minibatches follow speeds within rounds (`step_shares`), and samples follow the minibatches.

Shares compare like with like. Rounds take longer than calibrations, so the calibration of a worker without a round is
scaled as those of the others turned out. The share of a worker that joined is corrected behind its first round.

With `swaps` pairs of workers swap half of their samples between two rounds, so that each sees more of the data (Hegde &
Usmani §5.1.1). With `batch_size` all workers make the same number of steps in a round, because they meet after every
few of them; their minibatches are in proportion to their samples at a round's beginning. With `shares_steps` the
minibatches of a step have that many samples together, else on average. With `meetings` each has minibatches of
its own of `batch_size` samples; all meet the same number of times in a round, by the time that a meeting takes. With
`alone` a single worker does not meet within its rounds; with `cuts_alone` they are cut into steps all the same.
`batch_size` may be set between two rounds. No clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeAlias

from daskcnn.frozen import frozen
from daskcnn.partition.allocation import Allocation, Ranges, count, take, union
from daskcnn.partition.partitioner import Partitioner
from daskcnn.partition.proportions import proportional
from daskcnn.partition.step_shares import SETTLED, StepSizes

Meetings: TypeAlias = Callable[[int, float, float | None], int]
"""Meetings of a round, by the fastest worker's steps, the seconds of one, and those of a meeting, if known."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Presentations of a sample still to be made. They add up to samples · epochs exactly.

    With growing allocations the early rounds present fewer than all samples, so there are more rounds than epochs.
    BPT-CNN eq. 6 rounds their number down, which loses samples; here the last round is cut instead.
    """

    left: int
    """Below 0 while a worker has presented more than its part of a round, and another has not yet reported fewer."""

    @classmethod
    def of(cls, samples: int, epochs: int) -> Budget:
        """Return the budget of a run. Raises ValueError if there is nothing to present."""
        if samples < 1 or epochs < 1:
            raise ValueError(f"samples={samples}, epochs={epochs}: nothing to train on; both must be 1 or more")
        return cls(samples * epochs)

    @property
    def spent(self) -> bool:
        """True if no presentation is left."""
        return self.left == 0

    def round(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], Budget]:
        """Return the samples each worker presents in a synchronous round of all, and the budget after it.

        The last round is cut in proportion. If fewer presentations are left than workers, some workers present none.
        """
        wanted = sum(sizes.values())
        if wanted <= self.left:
            return dict(sizes), Budget(self.left - wanted)
        return dict(zip(sizes, proportional(self.left, list(sizes.values())), strict=True)), Budget(0)

    def one(self, size: int) -> tuple[int, Budget]:
        """Return the samples one worker presents in its own next round (0: it is done), and the budget after it."""
        now = min(size, self.left)
        return now, Budget(self.left - now)

    def returned(self, number: int) -> Budget:
        """Return the budget with presentations that a worker did not make; others make them. Below 0: it made more."""
        return Budget(self.left + number)


def swap_halves(allocation: Allocation, number: int) -> Allocation:
    """Return the allocation after the exchange of this number, counted from 0. No worker's number of samples changes.

    Workers are the corners of a hypercube and swap along one of its edges after the other: after log2(k) exchanges the
    samples of each come from all k. A worker without a partner keeps its own.
    """
    workers, ranges = allocation.workers, dict(allocation.ranges)
    axes = max(1, (len(workers) - 1).bit_length())
    distance = 1 << (number % axes)
    for i, one in enumerate(workers):
        if not i & distance and i | distance < len(workers):
            other = workers[i | distance]
            half = min(allocation.size(one), allocation.size(other)) // 2
            # a worker's samples lie in runs, one of each worker that they came from: some of every run go on
            (given, kept), (taken, left) = (_spread(ranges[w], half, 2 << axes) for w in (one, other))
            ranges[one], ranges[other] = union(kept, taken), union(left, given)
    return replace(allocation, ranges=ranges)


def _spread(ranges: Ranges, number: int, pieces: int) -> tuple[Ranges, Ranges]:
    """Return `number` samples, at most half of all, from pieces of equal size; and the rest."""
    size, pieces = count(ranges), min(number, pieces)
    taken: list[Ranges] = []
    left: list[Ranges] = []
    for i in range(pieces):
        piece, ranges = take(ranges, size * (i + 1) // pieces - size * i // pieces)
        some, rest = take(piece, number * (i + 1) // pieces - number * i // pieces)
        taken.append(some)
        left.append(rest)
    return union(*taken), union(ranges, *left)


@frozen
class Round:
    """One worker's next round. number: counts the worker's rounds from 0. ranges: the worker's samples.

    samples: how many of them this round presents, unless minibatches change within it. progress: of the whole run, 0 to
    1, at the start and at the end of the round. steps: minibatches to cut it into; None for minibatches of the job's
    size. meetings: of all in this round, at equal distances, where steps differ in number. alone: no other worker has a
    round before this one ends. halved: one step in this number is made of both halves of its minibatch, which tell
    the gradients' noise; 0: none. noise: what was known of that (`ps.gradient_noise`). judged_every: Q is measured
    before one of its pushes in this number, beginning with the first.
    """

    worker: str
    number: int
    ranges: Ranges
    samples: int
    progress: tuple[float, float]
    steps: int | None = None
    alone: bool = False
    meetings: int | None = None
    halved: int = 0
    noise: tuple[float, ...] = ()
    judged_every: int = 1


class Rounds:
    """The rounds of one run. `seconds` per sample are the calibrated ones at first, then the latest measured."""

    def __init__(
        self,
        partitioner: Partitioner,
        total: int,
        seconds: Mapping[str, float],
        *,
        epochs: int,
        barrier: bool,
        passes: int = 1,
        swaps: bool = False,
        batch_size: int | None = None,
        shares_steps: bool = False,
        alone: bool = False,
        cuts_alone: bool = False,
        resizes_steps: bool = False,
        meetings: Meetings | None = None,
    ) -> None:
        self.partitioner = partitioner
        self.allocation = partitioner.start(total, tuple(seconds))
        self.seconds, self._calibrated = dict(seconds), dict(seconds)
        self._unmeasured = set(seconds)
        self._joined: dict[str, None] = {}  # workers whose share is to be corrected; an ordered set
        self.presentations = total * epochs
        self.budget = Budget.of(total, epochs)
        self.barrier, self.passes, self.swaps, self.batch_size = barrier, passes, swaps, batch_size
        self.shares_steps, self._may_be_alone, self._cuts_alone = shares_steps, alone, cuts_alone
        self._meetings, self._exchanges = meetings, dict[str, float]()  # seconds of each worker's last meetings
        self._resizes_steps, self._shares = resizes_steps, dict[str, float]()  # of the last steps of those that ended
        self._whole: dict[str, float] = {}  # seconds per sample with exchanges, of those that ended a round
        self.numbers = dict.fromkeys(seconds, 0)
        self.running: dict[str, Round] = {}
        self._idle = dict.fromkeys(seconds)  # an ordered set
        self._under_way = 0  # presentations
        self.unmerged = 0
        """Presentations of rounds that were cut; behind a barrier they are merged once the others' rounds end."""
        self._before = self.allocation  # the one that the rounds under way began from

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that take part."""
        return tuple(self.seconds)

    @property
    def done(self) -> int:
        """Presentations made: all but those left, those under way, and those that are not merged yet."""
        return self.presentations - self.budget.left - self._under_way - self.unmerged

    @property
    def ended(self) -> bool:
        """True if all presentations were made."""
        return self.budget.spent and not self.running

    def due(self) -> list[Round]:
        """Return the rounds that start now. They are under way until `finished` or `lost`."""
        if self.budget.spent or (self.barrier and self.running):
            return []
        return self._together() if self.barrier else self._alone()

    def finished(
        self,
        worker: str,
        seconds_per_sample: float,
        sizes: StepSizes | None = None,
        *,
        exchanges: float = 0.0,
        hidden: float = 0.0,
        cut: int | None = None,
    ) -> None:
        """Note that the worker's round ended, with its seconds per sample.

        sizes: minibatches that may have changed. exchanges: seconds per sample of exchanges, without waiting; hidden:
        of those besides that went on while steps were made. cut: the samples that were presented, if it ended early:
        the others are presented in later rounds.
        """
        ended = self._stop(worker)
        if cut is not None:
            self.budget = self.budget.returned(ended.samples - cut)
            self.unmerged += cut if self.barrier and self.running else 0
        elif sizes is not None:
            self.budget = self.budget.returned(ended.samples - sizes.until(sizes.steps))
            if sizes.changed or (self._resizes_steps and sizes.steps >= SETTLED):
                self._shares[worker] = sizes.last
        self.seconds[worker] = seconds_per_sample
        part = 1.0 if cut is None else cut / ended.samples
        self._weigh(worker, seconds_per_sample + exchanges, None if sizes is None else sizes.steps * part)
        if ended.meetings is not None:
            self._exchanges[worker] = (exchanges + hidden) * ended.samples / ended.meetings
        self._unmeasured.discard(worker)
        if self.barrier and not self.running:
            self._level(1 if ended.meetings else ended.steps or 1)

    def _weigh(self, worker: str, seconds: float, steps: float | None) -> None:
        """Note the seconds per sample of a round, which count for less the fewer steps it had, where these are resized.

        Else one disturbed round of a few steps would leave its worker hardly any samples, and those are slow ones.
        """
        part = min(1.0, max(1.0, steps) / SETTLED) if self._resizes_steps and steps is not None else 1.0
        self._whole[worker] = self._whole.get(worker, seconds) ** (1 - part) * seconds**part

    def dropped(self, worker: str) -> None:
        """Note that nothing came of the worker's round: all of its samples are presented in later ones."""
        self.budget = self.budget.returned(self._stop(worker).samples)

    def _level(self, steps: int) -> None:
        """Level the shares after a round of all, once all increments are given and all workers measured."""
        given = max(self.allocation.granted.values()) >= self.partitioner.increments
        if not (given and self.partitioner.adapts and self._all_measured):
            return
        shares = {each: 1 / share for each, share in self._shares.items() if each in self.seconds}
        times = shares if shares.keys() == self.seconds.keys() else {**self._like_rounds(), **self._whole}
        self.allocation = self.partitioner.levelled(self.allocation, times, steps)
        self._joined.clear()

    def lost(self, worker: str) -> None:
        """Remove a worker; the others take its samples and unfinished presentations. ValueError if none is left."""
        before, leave, seconds = self._before, self.partitioner.leave, self._like_rounds()
        self._before = leave(before, worker, seconds)
        self.allocation = self._before if before is self.allocation else leave(self.allocation, worker, seconds)
        if worker in self.running:
            self.budget = self.budget.returned(self._stop(worker).samples)
        del self.numbers[worker], self.seconds[worker], self._idle[worker]
        for known in (self._calibrated, self._whole, self._joined, self._exchanges):
            known.pop(worker, None)
        self._unmeasured.discard(worker)

    def join(self, worker: str, seconds_per_sample: float) -> None:
        """Add a calibrated worker, which takes its share from the others. ValueError for one that is already there."""
        unmeasured, calibrated = self._unmeasured | {worker}, {**self._calibrated, worker: seconds_per_sample}
        times = _like_rounds({**self.seconds, worker: seconds_per_sample}, calibrated, unmeasured)
        self._before = self.allocation = self.partitioner.join(self.allocation, worker, times)
        self.seconds[worker] = seconds_per_sample
        self._calibrated, self._unmeasured = calibrated, unmeasured
        self.numbers[worker] = max(self.numbers.values())
        self._idle[worker] = self._joined[worker] = None

    def _like_rounds(self) -> Mapping[str, float]:
        return _like_rounds(self.seconds, self._calibrated, self._unmeasured)

    @property
    def _all_measured(self) -> bool:
        """True if all workers that have samples were measured in a round."""
        return not any(self.allocation.ranges[worker] for worker in self._unmeasured)

    def _settle(self) -> None:
        """Correct the shares of workers that joined, once all that have samples were measured."""
        if self._joined and self._all_measured:
            for worker in [worker for worker in self._joined if worker not in self._unmeasured]:
                self.allocation = self.partitioner.settle(self.allocation, worker, self._like_rounds())
                del self._joined[worker]

    def _together(self) -> list[Round]:
        self._settle()
        self._before = self.allocation
        self._shares = {}
        increment = 1 + max(self.allocation.granted.values())
        if increment <= self.partitioner.increments:
            self.allocation = self.partitioner.allocate(self.allocation, self._like_rounds(), increment=increment)
        elif self.swaps:
            self.allocation = swap_halves(self.allocation, max(self.numbers.values()) - 1)
        if self.batch_size is not None and self._meetings is None:  # else one very slow worker would make steps larger
            least = -(-self.allocation.given // self._whole_step(self.allocation.sizes(), self.batch_size))
            self.allocation = self.partitioner.with_a_sample_each(self.allocation, least)
        done = self.done
        sizes, self.budget = self.budget.round({w: self.passes * n for w, n in self.allocation.sizes().items()})
        sizes, presented = {w: n for w, n in sizes.items() if n}, sum(sizes.values())
        alone = self._may_be_alone and len(self.workers) == 1
        steps, meetings = ({}, None) if alone and not self._cuts_alone else self._cut(sizes, presented)
        progress = done / self.presentations, (done + presented) / self.presentations
        how: dict[str, Any] = {"alone": alone, "meetings": meetings}
        return [self._begin(w, n, progress, steps.get(w), **how) for w, n in sizes.items()]

    def _cut(self, sizes: Mapping[str, int], presented: int) -> tuple[dict[str, int], int | None]:
        """Return each worker's steps in a round of all (none: of the job's size), and their meetings if these differ.

        Every worker makes a step at least between two meetings. If all meet only once there is nothing to fit in.
        """
        batch = self.batch_size
        if batch is None:
            return {}, None
        if self._meetings is None:
            number = min(-(-presented // self._whole_step(sizes, batch)), *sizes.values())
            return dict.fromkeys(sizes, max(1, number)), None
        steps = {worker: -(-size // batch) for worker, size in sizes.items()}
        fastest = max(steps, key=steps.__getitem__)
        exchange = None if self.partitioner.even else max(self._exchanges.values(), default=None)
        step = min(batch, sizes[fastest]) * self._like_rounds()[fastest]
        meetings = min(self._meetings(steps[fastest], step, exchange), *sizes.values())
        return {w: max(number, meetings) for w, number in steps.items()} if meetings > 1 else {}, meetings

    def _whole_step(self, sizes: Mapping[str, int], batch: int) -> int:
        """Return the samples of a step of all workers that have samples."""
        return batch * (1 if self.shares_steps else max(1, sum(size > 0 for size in sizes.values())))

    def _alone(self) -> list[Round]:
        idle = list(self._idle) if len(self._idle) == 1 else [w for w in self.workers if w in self._idle]
        self._settle()
        if any(self.allocation.granted[worker] < self.partitioner.increments for worker in idle):
            self.allocation = self.partitioner.grant_each(self.allocation, self._like_rounds(), idle)
        if self.allocation.free and self._too_late(idle):
            self.allocation = self.partitioner.give_rest(self.allocation, self._like_rounds(), idle)
        done = self.done
        # while a worker makes its round, the others make about one of theirs
        end = min(1.0, (done + self.allocation.given) / self.presentations)
        begun, progress = [], (done / self.presentations, end)
        for worker in idle:
            samples, self.budget = self.budget.one(self.passes * self.allocation.size(worker))
            if samples:
                begun.append(self._begin(worker, samples, progress))
        return begun

    def _too_late(self, idle: list[str]) -> bool:
        """True if workers with increments still to come could not present them once these begin their rounds."""
        sizes, granted = self.allocation.sizes(), self.allocation.granted
        late = sum(size for worker, size in sizes.items() if granted[worker] < self.partitioner.increments)
        left = self.budget.left - self.passes * sum(sizes[worker] for worker in idle)
        return left < late + self.allocation.total - self.allocation.given

    def _begin(
        self,
        worker: str,
        samples: int,
        progress: tuple[float, float],
        steps: int | None = None,
        *,
        alone: bool = False,
        meetings: int | None = None,
    ) -> Round:
        number, ranges = self.numbers[worker], self.allocation.ranges[worker]
        begun = Round(worker, number, ranges, samples, progress, steps, alone, meetings)
        self.numbers[worker] += 1
        self.running[worker] = begun
        self._under_way += samples
        del self._idle[worker]
        return begun

    def _stop(self, worker: str) -> Round:
        """Take the worker's round out of those under way."""
        round_ = self.running.pop(worker)
        self._under_way -= round_.samples
        self.unmerged = self.unmerged if self.running else 0
        self._idle[worker] = None
        return round_

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of what a checkpoint keeps. Rounds under way are not in it: a resume begins them again."""
        whole = self._before if self.running and self.barrier else self.allocation
        return {
            "allocation": whole.to_dict(),
            "seconds": dict(self.seconds),
            "left": self.presentations - self.done,
            "numbers": {w: n - (w in self.running) for w, n in self.numbers.items()},
            "joined": [*self._joined],
            **({"exchanges": dict(self._exchanges)} if self._exchanges else {}),
        }

    def restore(self, state: Mapping[str, Any], workers: Iterable[str], *, done: int | None = None) -> None:
        """Continue from a checkpoint with these workers. Known workers keep their samples; others leave or join.

        done: presentations made, where the run has another number of epochs now. None: those left are as they were.
        """
        now = {w: self.seconds[w] for w in workers}
        self._before = self.allocation = Allocation.from_dict(state["allocation"])
        self.seconds = {w: float(s) for w, s in state["seconds"].items()}
        self.numbers = {w: int(n) for w, n in state["numbers"].items()}
        left = int(state["left"]) if done is None else max(0, self.presentations - done)
        self.budget, self.running = Budget(left), {}
        self._idle, self._under_way, self.unmerged = dict.fromkeys(self.seconds), 0, 0
        stay = [worker for worker in self.workers if worker in now]
        gone = [worker for worker in self.workers if worker not in now]
        self._calibrated, self._unmeasured = {worker: now[worker] for worker in stay}, set(self.seconds)
        self.seconds |= self._calibrated
        self._joined = {worker: None for worker in state.get("joined", ()) if worker in self.seconds}
        self._exchanges = {worker: float(s) for worker, s in state.get("exchanges", {}).items()}
        for worker in gone if stay else ():  # first: they were measured, those that stay are calibrated
            self.lost(worker)
        for worker in now:
            if worker not in self.seconds:
                self.join(worker, now[worker])
        for worker in () if stay else gone:
            self.lost(worker)


def _like_rounds(
    seconds: Mapping[str, float], calibrated: Mapping[str, float], unmeasured: Set[str]
) -> Mapping[str, float]:
    """Return the seconds of every worker as rounds take them: calibrations scaled by the median of the others."""
    if not unmeasured:
        return seconds
    ratios = [seconds[worker] / each for worker, each in calibrated.items() if worker not in unmeasured]
    if not ratios:
        return seconds
    scale = median(ratios)
    return {worker: each * scale if worker in unmeasured else each for worker, each in seconds.items()}
