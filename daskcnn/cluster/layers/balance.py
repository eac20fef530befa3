"""What a layer-sharded run's shares go by: calibration and links at first, then what its own steps take."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import numpy as np

from daskcnn.cluster.run_context import RunContext
from daskcnn.cluster.session.tasks import Counters
from daskcnn.sharded import Kernels, LinkSpeeds, ShareSearch, Stage

REPORTS = 3  # whose median says how fast a worker is
BETWEEN_MOVES = 25  # steps at the least
WORTH = 0.1  # of a step's time, that other shares must save
WORTH_ANYWAY = 0.02  # the same at a snapshot, behind which all pieces are placed anew


def fastest(context: RunContext) -> str:
    """The worker that is home to what is not sharded."""
    return min(context.alive, key=lambda name: context.calibrations[name].seconds_per_sample)


def balance_of(context: RunContext, stages: Sequence[Stage], home: str) -> ShareSearch:
    """For the workers that are alive, by what is known of them now."""
    job, measured = context.job, {name: context.calibrations[name] for name in context.alive}
    whole = np.dtype(job.model.dtype).itemsize
    links = context.links or LinkSpeeds()
    balance = ShareSearch(
        stages,
        context.dataset.shape,
        home,
        {name: own.conv_seconds for name, own in measured.items()},
        links.by_worker,
        samples=min(job.train.batch_size, context.samples),
        itemsize=whole if job.cluster.wire == "float32" else np.dtype(job.cluster.wire).itemsize,
        rest=measured[home].rest_seconds or 0.0,
        fixed={name: own.conv_fixed for name, own in measured.items()},
        task=links.task,
        parts=min(job.train.sub_batches, job.train.batch_size),
        weight_itemsize=whole,
    )
    return balance.divided_by(job.train.first_conv)


@dataclass(frozen=True)
class Move:
    """Other shares: by which measurements, and what their step takes against the present one's."""

    balance: ShareSearch
    now: float
    then: float

    def __str__(self) -> str:
        seconds = f"a step takes about {self.now:.3g} s, with others {self.then:.3g} s"
        return f"shares no longer fit the workers' speeds: {seconds}; kernels move"


def added_up(some: Counters, more: Counters) -> Counters:
    """What was spent and moved in both times."""
    return Counters(
        **{each.name: _sum(getattr(some, each.name), getattr(more, each.name)) for each in fields(Counters)}
    )


def _sum(a: Any, b: Any) -> Any:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}} if isinstance(a, dict) else a + b


def adopt(context: RunContext, move: Move) -> None:
    """From now on shares go by what the move was found by."""
    for name, own in move.balance.compute.items():
        before = context.calibrations[name]
        slower = sum(own.values()) - sum(before.conv_seconds.values())
        seconds = max(before.seconds_per_sample + slower, sum(own.values()))
        fixed = dict(move.balance.fixed.get(name, {}))
        context.calibrations[name] = replace(
            before, conv_seconds=dict(own), conv_fixed=fixed, seconds_per_sample=seconds
        )


class ShareDrift:
    """Compares what steps take each worker, as its counters tell, with what its shares were made from."""

    def __init__(self, balance: ShareSearch, kernels: Kernels) -> None:
        self._balance, self._kernels = balance, kernels
        self._last: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=REPORTS))

    def take(self, counters: Mapping[str, Counters]) -> None:
        """A report of all workers."""
        for i, (stage, own) in enumerate(zip(self._balance.stages, self._kernels, strict=True)):
            for worker in own:
                counted = counters.get(worker, Counters())
                if stage.name and (samples := counted.conv_samples.get(stage.name, 0.0)):
                    seconds = counted.conv_seconds[stage.name] / samples
                    whole = self._balance.whole_seconds(worker, i, own, seconds)
                    self._last[worker, stage.name].append(whole)

    def measured(self) -> ShareSearch:
        """The balance by the medians of the last reports.

        A worker that has become slower or faster will have done so in stages that it has no part in as well.
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
        """Other shares, where their step should be shorter by such a part that it is worth the move."""
        if not self._last or min(map(len, self._last.values())) < REPORTS:
            return None
        found = self.measured()
        now, then = found.step_seconds(self._kernels), found.step_seconds(found.kernels())
        return Move(found, now, then) if then < (1 - worth) * now else None
