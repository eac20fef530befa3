"""The shares of a layer-sharded network's kernels, compared with the workers' speeds as these change."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from statistics import median

from daskcnn.events import Event, KernelsSharded, Spent, Warned
from daskcnn.sharded.balance import ShareSearch, WorkerLinks
from daskcnn.sharded.plan_parts import Kernels
from daskcnn.training.coordinator.roster import Measured, Roster

REPORTS = 3
"""The median of the last reports is a worker's speed."""
WORTH = 0.1
"""The part of a step's time that other shares must save."""
WORTH_ANYWAY = 0.02
"""The same if all pieces are placed anew anyway."""


@dataclass(frozen=True, slots=True)
class Shares:
    """A network cut over workers.

    balance: the measurements that the cut was made from. kernels: of each stage by worker, without workers that have
    none.
    """

    balance: ShareSearch
    kernels: Kernels

    @classmethod
    def of(cls, balance: ShareSearch) -> Shares:
        """Return the cut with the shortest step."""
        return cls(balance, tuple(balance.kernels()))

    @property
    def home(self) -> str:
        """The worker that holds the layers that are not sharded."""
        return self.balance.home

    def by_worker(self) -> dict[str, dict[str, int]]:
        """Return the kernels of each layer by worker; of a layer divided by samples, parts out of as many."""
        named = [(stage.name, own) for stage, own in zip(self.balance.stages, self.kernels, strict=True) if stage.name]
        return {worker: {name: own.get(worker, 0) for name, own in named} for worker in self.balance.compute}

    def idle(self) -> dict[tuple[str, str], str]:
        """Return the reasons why workers have no kernels of layers, by worker and layer."""
        return self.balance.idle(self.kernels)

    def validate(self) -> None:
        """Assert that every kernel has one worker."""
        assert self.home in self.balance.compute
        for stage, own in zip(self.balance.stages, self.kernels, strict=True):
            assert stage.conv is None or sum(own.values()) == stage.conv.kernels, f"kernels of {stage.name}: {own}"
            assert own.keys() <= self.balance.compute.keys()

    def event(self, eq2: int | None = None) -> KernelsSharded:
        """Return the shares as they are logged when they are made."""
        stages = [stage for stage in self.balance.stages if stage.name]
        by = {stage.name: stage.by for stage in stages if stage.name}
        return KernelsSharded(
            home=self.home,
            kernels=self.by_worker(),
            divided={worker: dict(by) for worker in self.balance.compute},
            of={stage.name: stage.conv.kernels for stage in stages if stage.name and stage.conv},
            eq2=eq2,
        )


def _in_words(idle: Mapping[tuple[str, str], str], shares: Shares) -> Iterator[str]:
    """Yield the reasons why workers have no kernels; of one that has none of several layers, one sentence."""
    layers = {layer for own in shares.by_worker().values() for layer in own}
    without = {worker for worker, own in shares.by_worker().items() if not any(own.values())}
    unused = shares.balance.unused(shares.kernels) if len(layers) > 1 and without else {}
    for worker in sorted(without & unused.keys() & {worker for worker, _ in idle}):
        yield f"worker {worker} gets no kernels, for another worker does not pay: {unused[worker]}"
    for (worker, layer), reason in idle.items():
        if worker not in unused:
            yield f"worker {worker} gets no kernels of {layer}: {reason}"


@dataclass(frozen=True, slots=True)
class Move:
    """Other shares, by these measurements. now, then: seconds of a step with the present shares, and with them."""

    balance: ShareSearch
    now: float
    then: float

    def __str__(self) -> str:
        seconds = f"a step takes about {self.now:.3g} s, with others {self.then:.3g} s"
        return f"shares no longer fit the workers' speeds: {seconds}; kernels move"

    def measured(self, before: Mapping[str, Measured]) -> dict[str, Measured]:
        """Return the workers' calibrations, corrected by the measurements of the move."""
        found = {}
        for worker, own in self.balance.compute.items():
            seconds, row = before[worker].seconds, before[worker].row
            slower = sum(own.values()) - sum(row.conv_seconds.values())
            new = {"conv_seconds": dict(own), "conv_fixed": dict(self.balance.fixed.get(worker, {}))}
            found[worker] = Measured(max(seconds + slower, sum(own.values())), row.model_copy(update=new))
        return found


class ShareWatch:
    """Compares the time of each worker's steps, by its counters, with the measurements behind its shares."""

    def __init__(self, shares: Shares) -> None:
        self._balance, self._kernels = shares.balance, shares.kernels
        self._last: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=REPORTS))

    def take(self, spent: Mapping[str, Spent]) -> None:
        """Take in a report of all workers."""
        for i, (stage, own) in enumerate(zip(self._balance.stages, self._kernels, strict=True)):
            for worker in own:
                counted = spent.get(worker)
                if counted and stage.name and (samples := counted.conv_samples.get(stage.name, 0.0)):
                    seconds = counted.conv_seconds[stage.name] / samples
                    whole = self._balance.whole_seconds(worker, i, own, seconds)
                    self._last[worker, stage.name].append(whole)

    def measured(self) -> ShareSearch:
        """Return the balance by the medians of the last reports.

        A worker that has become slower or faster is taken to be so in stages that it has no part in as well.
        """
        seconds: dict[str, dict[str, float]] = {}
        for (worker, stage), found in self._last.items():
            seconds.setdefault(worker, {})[stage] = median(found)
        for worker, own in seconds.items():
            before = self._balance.compute[worker]
            slower = median(own[stage] / before[stage] for stage in own)
            seconds[worker] = {stage: own.get(stage, slower * old) for stage, old in before.items()}
        return self._balance.measured(seconds)

    def move(self, worth: float = WORTH) -> Move | None:
        """Return other shares if they should shorten a step by so large a part that it is worth the move."""
        if not self._last or min(map(len, self._last.values())) < REPORTS:
            return None
        found = self.measured()
        now, then = found.step_seconds(self._kernels), found.step_seconds(found.kernels())
        return Move(found, now, then) if then < (1 - worth) * now else None


class Links:
    """The workers' links as they become known (`known`). wanted: they are to be measured."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted, self.known = wanted, WorkerLinks()
        self._asked: tuple[str, ...] = ()
        self._measured: set[str] = set()

    def to_measure(self, roster: Roster) -> tuple[str, tuple[str, ...]] | None:
        """Return home, and the workers whose links to it are to be measured; None: all are known, or of no use.

        The first time home is one of them. Workers that come later are measured to a worker whose link is known.
        """
        new = tuple(worker for worker in roster.alive if worker not in self._measured)
        if not (self._wanted and new and len(roster.alive) > 1):
            return None
        self._asked, seconds = new, roster.seconds
        known = [worker for worker in seconds if worker in self._measured]
        return min(known or seconds, key=seconds.__getitem__), new

    def measured(self, found: WorkerLinks) -> None:
        """Take the answer in."""
        self._measured.update(self._asked)
        self.known = WorkerLinks({**self.known.by_worker, **found.by_worker}, self.known.task or found.task)

    def forget(self, worker: str) -> None:
        """Forget a worker that is gone: it may come back to another place."""
        self._measured.discard(worker)
        left = {name: link for name, link in self.known.by_worker.items() if name != worker}
        self.known = WorkerLinks(left, self.known.task)


class Sharing:
    """The shares of a run as they change, and other shares (`move`) once they are worth it."""

    def __init__(self, between: int) -> None:
        self._between = between
        self.shares: Shares | None = None
        self.watch: ShareWatch | None = None
        self.move: Move | None = None
        self._made = 0
        self._idle: Set[tuple[str, str]] = set()

    def home(self, seconds: Mapping[str, float]) -> str:
        """Return the worker for what is not sharded: the fastest, unless the present one is nearly as fast.

        seconds: a sample, by worker. Another home loads the samples and plans its layers first.
        """
        least = min(seconds, key=seconds.__getitem__)
        now = self.shares.home if self.shares else least
        return now if now in seconds and seconds[now] * (1 - WORTH) <= seconds[least] else least

    def make(self, balance: ShareSearch, step: int, eq2: int) -> list[Event]:
        """Cut the kernels before this step. Returns the events to log; why a worker has no kernels is said once."""
        self.shares = shares = Shares.of(balance)
        self.watch, self.move, self._made = ShareWatch(shares), None, step
        before, idle = self._idle, shares.idle()
        self._idle = idle.keys()
        new = {key: reason for key, reason in idle.items() if key not in before}
        return [shares.event(eq2), *(Warned(message=text) for text in _in_words(new, shares))]

    def seek(self, done: int, worth: float = WORTH) -> bool:
        """Return True if other shares have become worth it just now. Shares stay for `between` steps at least."""
        if self.watch is None or self.move is not None or done - self._made < self._between:
            return False
        self.move = self.watch.move(worth)
        return self.move is not None
