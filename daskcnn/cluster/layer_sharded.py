"""Layer-sharded training: one replica over all workers, the kernels of every convolution spread by speed.

Steps (`layer_graph`) are submitted ahead; each chains to the one before through its shards. A snapshot gathers all
pieces and sends them anew, which also cuts the scheduler's memory of the chain. A lost worker takes the run back to
the last snapshot, on those that are left.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.context import NotYet, RunContext, TrainingState, WorkersLost
from daskcnn.cluster.layer_graph import LayerGraph, Step
from daskcnn.errors import Diverged, Interrupted, Lost
from daskcnn.replica import Score, initial_weights, network_of, rate_of
from daskcnn.sharded import stages_of

AHEAD = 3  # steps submitted before the oldest has ended
SNAPSHOT_EVERY = 250  # steps between two snapshots at the most: what a lost worker costs, and the chain's length
REPORT_EVERY = 25  # steps
MOMENTUM = "layer"  # the one replica's name among the velocities of a state


class LayerSharded:
    """Drives one run of plain SGD over the workers of a context."""

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        self.context, self.job = context, context.job
        self.layout, weights = initial_weights(self.job, context.dataset)
        self.stages = stages_of(network_of(self.job, context.dataset))
        self.rate = rate_of(self.job.train.schedule)
        self.steps_per_epoch = -(-context.samples // self.job.train.batch_size)
        self.steps = self.steps_per_epoch * self.job.train.epochs
        still = np.zeros(self.layout.parameter_size, self.layout.dtype)
        self.state = resumed or TrainingState(0, 0.0, weights, {MOMENTUM: still}, {})
        self.best, self.worse = float(self.state.book.get("best", 0.0)), int(self.state.book.get("worse", 0))
        self._saved = self.state.step

    def train(self) -> TrainingState:
        """Train to the end and return the last state.

        Raises Diverged, Lost, or Interrupted once the state after the last whole step is saved.
        """
        while not self._ended():
            try:
                self._go_on()
            except WorkersLost as lost:
                self._drop(lost.names)
        return self.state

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
        """From the present state, a snapshot at a time, on the workers that are alive now."""
        self.graph = LayerGraph(self.context, self.stages, self.layout)
        self.context.emit({"event": "shards", "home": self.graph.home, "kernels": self.graph.by_worker()})
        self._rated = (time.monotonic(), self.state.step)
        self._epoch = (time.monotonic(), Score(0.0, 0, 0))
        while not self._ended():
            self.graph.place(self.state.weights, self.state.velocities[MOMENTUM])
            self._flight: deque[tuple[Step, Future]] = deque()
            self._submitted = self.state.step
            end = self._segment_end()
            try:
                for number in range(self.state.step, end):
                    self._submit(self._step(number))
                    self._drain(AHEAD)
                self._drain(0)
                self._snapshot(end)
            except Interrupted:
                self._finish_and_save()
                raise

    def _segment_end(self) -> int:
        """The next snapshot's step: an epoch's end, a checkpoint that is due, or as far as a chain may grow."""
        step = self.state.step
        epoch_end = (step // self.steps_per_epoch + 1) * self.steps_per_epoch
        return min(step + SNAPSHOT_EVERY, epoch_end, max(step + 1, self._saved + self._between_checkpoints()))

    def _between_checkpoints(self) -> int:
        return max(1, round(self.job.run.checkpoint_every * self.steps_per_epoch))

    def _step(self, number: int) -> Step:
        presentation, position = divmod(number, self.steps_per_epoch)
        lr = self.rate.rate(self.job.train.lr, number / self.steps, number / self.steps_per_epoch)
        return Step(number, presentation, position, lr)

    def _submit(self, step: Step) -> None:
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

    def _wait(self, step: Step, future: Future) -> Score:
        """The step's score. Raises Lost where it does not come within the stall timeout."""
        limit = self.job.cluster.stall_timeout
        deadline = time.monotonic() + limit
        while True:
            self.context.look_round()
            if time.monotonic() > deadline:
                raise Lost(f"step {step.number}: no progress for {limit:g} s, waiting for {self._busy()}")
            if not self.context.turn([future]):
                with suppress(NotYet):
                    score: Score = self.context.fetch(future)
                    return score

    def _busy(self) -> str:
        """Who has tasks to do."""
        processing = self.context.client.processing()
        names = [name for name, member in self.context.alive.items() if processing.get(member.address)]
        return ", ".join(names) or "the scheduler"

    def _count(self, step: Step, score: Score) -> None:
        begun, total = self._epoch
        self._epoch = (begun, total + score)
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

    # --- snapshots ---

    def _snapshot(self, step: int) -> None:
        """Gather the pieces after this step; at an epoch's end judge them. Kept on disk where a checkpoint is due."""
        weights, velocity = self.graph.collect()
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
            self._remember(self._submitted, *self.graph.collect(), None)
        self._save()

    def _report_epoch(self, step: int, validation: Score) -> None:
        (begun, trained), now = self._epoch, time.monotonic()
        self._epoch = (now, Score(0.0, 0, 0))
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
                "workers": self._counters(trained.samples, now - begun),
            }
        )

    def _counters(self, samples: int, seconds: float) -> list[dict[str, Any]]:
        """What every worker spent and moved since the last epoch; its wait is all that it did not compute in."""
        found = self.context.gather({w: self.graph.counters(w) for w in self.context.alive})
        return [
            {"name": w, "samples": samples, "wait": max(0.0, seconds - own.busy), "communication": 0.0, **asdict(own)}
            for w, own in found.items()
        ]
