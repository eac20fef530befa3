"""Layer-sharded training: one replica over all workers, the kernels of every convolution spread by speed.

Steps (`layers.graph`) are submitted ahead; each chains to the one before through its shards. A snapshot gathers all
pieces and sends them anew, which also cuts the scheduler's memory of the chain. A lost worker takes the run back to
the last snapshot, on those that are left. Where workers have become slower or faster than their shares were made for
(`layers.balance`), a snapshot is taken at once and the kernels placed by what was measured since.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import numpy as np
from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.layers.balance import BETWEEN_MOVES, WORTH_ANYWAY, Move, ShareDrift, added_up, adopt, fastest
from daskcnn.cluster.layers.graph import LayerGraph, MinibatchStep
from daskcnn.cluster.layers.messages import OutOfStep
from daskcnn.cluster.link_speeds import measure_links
from daskcnn.cluster.run_context import NotYet, RunContext, WorkersLost
from daskcnn.cluster.session.tasks import Counters
from daskcnn.errors import Diverged, Interrupted, Lost
from daskcnn.job.network import initial_weights, network_of, rate_of
from daskcnn.nn.score import Score
from daskcnn.runs.state import TrainingState
from daskcnn.sharded import eq2_elements, stage_shapes, stages_of

K = TypeVar("K")
AHEAD = 3  # steps submitted before the oldest has ended
SNAPSHOT_EVERY = 250  # steps between two snapshots at the most: what a lost worker costs, and the chain's length
REPORT_EVERY = 25  # steps
GO_BACK = 5  # times on end to the same snapshot, before the run ends
MOMENTUM = "layer"  # the one replica's name among the velocities of a state


class LayerSharded:
    """Drives one run of plain SGD over the workers of a context."""

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        self.context, self.job = context, context.job
        self.layout, weights = initial_weights(self.job, context.dataset)
        self.stages = stages_of(network_of(self.job, context.dataset))
        self.rate = rate_of(self.job.train.schedule)
        self._eq2 = self._numbers_by_eq2()
        self.steps_per_epoch = -(-context.samples // self.job.train.batch_size)
        self.steps = self.steps_per_epoch * self.job.train.epochs
        still = np.zeros(self.layout.parameter_size, self.layout.dtype)
        self.state = resumed or TrainingState(0, 0.0, weights, {MOMENTUM: still}, {})
        self.best, self.worse = float(self.state.book.get("best", 0.0)), int(self.state.book.get("worse", 0))
        self._saved, self._generation = self.state.step, 0
        self._idle: Set[tuple[str, str]] = set()  # of which workers it was said that they get no kernels of a layer
        self._move: Move | None = None
        self._gone_back: deque[int] = deque(maxlen=GO_BACK)  # to which steps, last
        # of the epoch: since when and with what score, what was spent, what is asked for
        self._epoch = (time.monotonic(), Score(0.0, 0, 0))
        self._spent: dict[str, Counters] = {}
        self._asked: dict[str, Future] = {}

    def _numbers_by_eq2(self) -> int:
        """What the papers' scheme would exchange in a step."""
        shapes, batch = stage_shapes(self.stages, self.context.dataset.shape), self.job.train.batch_size
        shaped = zip(self.stages, shapes, strict=True)
        convs = [(stage.conv, H, W, C) for stage, (H, W, C) in shaped if stage.conv]
        return eq2_elements([conv.spec((H, W, batch, C), conv.kernels) for conv, H, W, C in convs])

    def train(self) -> TrainingState:
        """Train to the end and return the last state.

        Raises Diverged, Lost, or Interrupted once the state after the last whole step is saved.
        """
        self._begin_epoch()
        while not self._ended():
            try:
                self._go_on()
                continue
            except WorkersLost as lost:
                self._drop(lost.names)
            except OutOfStep as repeated:
                self._go_back(repeated)
            except Lost:
                self._save_what_is_new()
                raise
            self._begin_epoch()
        return self.state

    def _go_back(self, repeated: OutOfStep) -> None:
        """To the last snapshot. Raises Lost where that did not help so many times on end."""
        self.context.emit({"event": "warning", "message": f"{repeated}: back to step {self.state.step}"})
        self._gone_back.append(self.state.step)
        if len(self._gone_back) == GO_BACK and len(set(self._gone_back)) == 1:
            self._save_what_is_new()
            remedy = "do all workers reach each other? `daskcnn doctor --scheduler ADDRESS` tries their links"
            raise Lost(f"{repeated}, for the {GO_BACK}th time behind step {self.state.step}: {remedy}")

    def _save_what_is_new(self) -> None:
        if self.state.step > self._saved:
            self._save()

    def _ended(self) -> bool:
        patience = self.job.train.early_stopping
        return self.state.step >= self.steps or (patience is not None and self.worse >= patience)

    def _drop(self, names: tuple[str, ...]) -> None:
        """Go on without the workers that are gone, from the last snapshot."""
        for name in names:
            self.context.lose(name, "connection lost")
        message = f"back to the snapshot of step {self.state.step}, on {len(self.context.alive)} workers"
        self.context.emit({"event": "warning", "message": message})

    def _go_on(self) -> None:
        """From the present state, a snapshot at a time, on the workers that are alive; until kernels have to move."""
        if self.context.links is None and len(self.context.alive) > 1:
            self.context.links = measure_links(self.context, fastest(self.context))
        self._share_out()
        self._rated = (time.monotonic(), self.state.step)
        while not self._ended() and self._move is None:
            self._generation = self.graph.generation + 1  # even if placing fails half-way: what it left is older then
            self.graph.place(self.state.weights, self.state.velocities[MOMENTUM], self.state.step)
            self._flight: deque[tuple[MinibatchStep, Future]] = deque()
            self._submitted = self.state.step
            end = self._segment_end()
            try:
                while self._submitted < end and self._move is None:
                    self._submit(self._step(self._submitted))
                    self._drain(AHEAD)
                self._drain(0)
                self._snapshot(self._submitted)
                self._adjust()
            except Interrupted:
                self._finish_and_save()
                raise
        if self._move is not None:
            self._take_counters()
            adopt(self.context, self._move)

    def _share_out(self) -> None:
        """Cut the kernels over the workers by what is known of them now."""
        self.graph = LayerGraph(self.context, self.stages, self.layout, generation=self._generation)
        kernels = self.graph.by_worker()
        cut = {"kernels": kernels, "divided": self.graph.divided(), "of": self.graph.of(), "eq2": self._eq2}
        self.context.emit({"event": "shards", "home": self.graph.home, **cut})
        idle = self.graph.balance.idle(self.graph.kernels)
        for (worker, layer), reason in idle.items():
            if (worker, layer) not in self._idle:
                message = f"worker {worker} gets no kernels of {layer}: {reason}"
                self.context.emit({"event": "warning", "message": message})
        self._idle = idle.keys()
        self._drift = ShareDrift(self.graph.balance, self.graph.kernels)
        self._move = None
        self._shared_out = self.state.step

    def _adjust(self) -> None:
        """Behind a snapshot the pieces are placed anew: by what steps took, if that is any better."""
        if self._move is None and self._submitted - self._shared_out >= BETWEEN_MOVES and not self._ended():
            self._move = self._drift.move(WORTH_ANYWAY)

    def _segment_end(self) -> int:
        """The next snapshot's step: an epoch's end, a checkpoint that is due, or as far as a chain may grow."""
        step = self.state.step
        epoch_end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        return min(step + SNAPSHOT_EVERY, epoch_end, max(step + 1, self._saved + self._between_checkpoints()))

    def _between_checkpoints(self) -> int:
        return max(1, round(self.job.run.checkpoint_every * self.steps_per_epoch))

    def _step(self, number: int) -> MinibatchStep:
        presentation, position = divmod(number, self.steps_per_epoch)
        lr = self.rate.rate(self.job.train.lr, number / self.steps, number / self.steps_per_epoch)
        size = self.job.train.batch_size
        return MinibatchStep(number, presentation, position, lr, min(size, self.context.samples - position * size))

    def _submit(self, step: MinibatchStep) -> None:
        self._flight.append((step, self.graph.submit(step)))
        self._submitted = step.number + 1

    # --- following the steps ---

    def _drain(self, ahead: int) -> None:
        """Wait until no more than `ahead` steps are under way."""
        while len(self._flight) > ahead:
            step, future = self._flight[0]
            score = self._wait(step, future)
            self._flight.popleft()
            if not math.isfinite(score.loss_sum):
                raise Diverged(f"loss = {score.loss} at step {step.number}: training diverged; lower train.lr")
            self._count(step, score)

    def _wait(self, step: MinibatchStep, future: Future) -> Score:
        """The step's score. Raises Lost where it does not come within the stall timeout."""
        score: Score = self._gathered({0: future}, f"step {step.number}")[0]
        return score

    def _gathered(self, futures: Mapping[K, Future], of: str) -> dict[K, Any]:
        """Results by the same keys. Raises Lost, which says whom they wait for, after the stall timeout."""
        limit = self.job.cluster.stall_timeout
        deadline, found = time.monotonic() + limit, dict[K, Any]()
        while left := [key for key in futures if key not in found]:
            self.context.look_round()
            if time.monotonic() > deadline:
                raise Lost(f"{of}: no progress for {limit:g} s, waiting for {self._awaited(limit)}")
            if not self.context.turn([futures[left[0]]]):
                with suppress(NotYet):
                    found[left[0]] = self.context.fetch(futures[left[0]])
        return found

    def _awaited(self, limit: float) -> str:
        """Whom the scheduler has not heard of meanwhile, else who has tasks to do: those wait for each other's data."""
        processing = self.context.client.processing()
        busy = [name for name, member in self.context.alive.items() if processing.get(member.address)]
        return ", ".join(self.context.silent(limit / 2) or busy) or "the scheduler"

    def _count(self, step: MinibatchStep, score: Score) -> None:
        begun, total = self._epoch
        self._epoch = (begun, total + score)
        if self._asked and all(future.done() for future in self._asked.values()):
            self._take_counters()
        done, (since, rated) = step.number + 1, self._rated
        if done - rated < REPORT_EVERY and done < self.steps:
            return
        self._rated = (time.monotonic(), done)
        self.context.emit(
            {
                "event": "steps",
                "step": done,
                "epoch": done / self.steps_per_epoch,
                "loss": score.loss,
                "lr": step.lr,
                "seconds_per_step": (self._rated[0] - since) / (done - rated),
                "workers": [{"name": w, "kernels": own} for w, own in self.graph.by_worker().items()],
            }
        )
        if not self._asked:
            self._ask_for_counters()

    # --- what steps take the workers ---

    def _ask_for_counters(self) -> None:
        """Between two tasks of steps; nobody waits for the answers."""
        self._asked = {worker: self.graph.counters(worker) for worker in self.context.alive}

    def _take_counters(self) -> None:
        """What was asked for, once all of it is there: is there reason for other shares?"""
        asked, self._asked = self._asked, {}
        found: dict[str, Counters] = self._gathered(asked, "counters")
        self._spent = {**self._spent, **{w: added_up(self._spent.get(w, Counters()), own) for w, own in found.items()}}
        self._drift.take(found)
        if self._submitted - self._shared_out >= BETWEEN_MOVES and self._move is None:
            self._move = self._drift.move()
            if self._move is not None:
                self.context.emit({"event": "warning", "message": f"after step {self._submitted}: {self._move}"})

    # --- snapshots ---

    def _snapshot(self, step: int) -> None:
        """Gather the pieces after this step; at an epoch's end judge them. Kept on disk where a checkpoint is due."""
        weights, velocity = self._collected(step)
        validation, better = None, False
        if step % self.steps_per_epoch == 0:
            lo, hi = self.context.samples, len(self.context.dataset.train)
            validation = self.context.score(weights, "train", lo, hi)
            better = validation.accuracy > self.best
            self.best, self.worse = max(self.best, validation.accuracy), 0 if better else self.worse + 1
            self._report_epoch(step, validation)
        self._remember(step, weights, velocity, validation)
        if better or step - self._saved >= self._between_checkpoints() or self._ended():
            self._save()

    def _collected(self, step: int) -> tuple[Array, Array]:
        return self.graph.collect(partial(self._gathered, of=f"weights after step {step}"))

    def _remember(self, step: int, weights: Array, velocity: Array, validation: Score | None) -> None:
        if not np.isfinite(weights).all():  # the last step may have spoilt what its own loss does not show yet
            raise Diverged(f"weights after step {step}: not finite, training diverged; lower train.lr")
        book = {"best": self.best, "worse": self.worse}
        epoch = step / self.steps_per_epoch
        self.state = TrainingState(step, epoch, weights, {MOMENTUM: velocity}, book, validation)

    def _save(self) -> None:
        self.context.save(self.state)
        self._saved = self.state.step

    def _finish_and_save(self) -> None:
        """After a signal: the steps under way end, and what they leave is kept; the last snapshot if they cannot."""
        self.context.ignore_signals()
        with suppress(WorkersLost, Lost):
            self._drain(0)
            self._remember(self._submitted, *self._collected(self._submitted), None)
        self._save()

    def _report_epoch(self, step: int, validation: Score) -> None:
        (begun, trained), now = self._epoch, time.monotonic()
        workers = self._counters(trained.samples, now - begun)
        self._begin_epoch()
        self.context.emit(
            {
                "event": "epoch",
                "epoch": step / self.steps_per_epoch,
                "epochs": self.job.train.epochs,
                "step": step,
                "loss": trained.loss,
                "accuracy": trained.accuracy,
                "validation": {"loss": validation.loss, "accuracy": validation.accuracy},
                "samples_per_second": trained.samples / (now - begun),
                "lr": self._step(step - 1).lr,
                "seconds": now - begun,
                "workers": workers,
            }
        )

    def _begin_epoch(self) -> None:
        self._epoch = (time.monotonic(), Score(0.0, 0, 0))
        self._spent, self._asked = {}, {}

    def _counters(self, samples: int, seconds: float) -> list[dict[str, Any]]:
        """What every worker spent and moved since the last epoch; its wait is all that it did not compute in."""
        self._take_counters()
        self._ask_for_counters()
        self._take_counters()
        return [
            {"name": w, "samples": samples, "wait": max(0.0, seconds - own.busy), "communication": 0.0, **asdict(own)}
            for w, own in self._spent.items()
        ]
