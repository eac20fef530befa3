"""Segments of a layer-sharded run's steps while all goes well: shares, snapshots between them, counters.

A segment ends with the epoch, when a checkpoint is due, or after `chain` steps: a longer chain of tasks burdens the
scheduler. It is stopped early by a signal, to move kernels, where workers come or leave, or after `snapshot_every`
seconds: a lost worker costs the steps since the snapshot. An epoch's snapshot is judged.

Shares. The first go by calibration and measured links. Every `report_every` steps the workers are asked for their
counters; the run goes on meanwhile. If other shares would save enough, the segment stops and its snapshot is placed by
them. A snapshot's pieces are placed anew anyway, so a smaller gain is enough there.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from daskcnn.errors import Diverged
from daskcnn.events import WorkerJoined
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import Coordinating, Phase
from daskcnn.training.coordinator.departures import FAR
from daskcnn.training.coordinator.layer_records import LayerRecords, LayerSnapshot
from daskcnn.training.coordinator.settings import STEPS_AHEAD, LayerSettings
from daskcnn.training.coordinator.shares import WORTH_ANYWAY, Links, Sharing


class LayerSegments(Coordinating):
    """Trains segments of steps, as the module's text describes it. snapshot: the state to go on from."""

    def __init__(self, settings: LayerSettings, snapshot: LayerSnapshot | None = None) -> None:
        super().__init__(settings)
        self.settings = settings
        self.records = LayerRecords(settings, snapshot or LayerSnapshot(), self._out)
        self.done = self.end = self.snapshot.step  # steps that have ended; the segment's end
        self.links = Links(wanted=settings.measures_links)
        self.sharing = Sharing(settings.between_moves)
        self._fewer = False  # a worker was lost, or has left, since kernels were shared; or no pieces are placed
        self._newcomers: list[str] = []  # calibrated since then
        self._stopping = False  # the segment
        self._placed = 0.0  # when the snapshot was placed
        self._last_ask = False  # True if the answer that is awaited is the epoch's last
        self._heard: float | None = None  # since when there is no result
        self._asked = False  # it was asked for whom the run waits, and the answer is to come
        self._step = 0.0  # seconds of the last one

    @abstractmethod
    def _end_interrupted(self) -> None:
        """Save what was trained, and end."""

    @property
    def snapshot(self) -> LayerSnapshot:
        """The state to go on from."""
        return self.records.snapshot

    # --- shares ---

    def _go_on_from_snapshot(self) -> None:
        """Share out the network over the workers that stay, once there are enough and their links are known."""
        for worker, reason in [*self._leaving.items()]:
            self._drop(worker, reason, done=0)
        if not self.roster.alive:
            return
        self._fewer = False
        if self._is_short(self._now):
            self._enter(Phase.CALIBRATING)
            return
        if (asked := self.links.to_measure(self.roster)) is not None:
            self._enter(Phase.MEASURING)
            self.life += 1
            self._out.put(orders.MeasureLinks(self.life, *asked))
        else:
            self._share_out()

    def _on_links_measured(self, fact: facts.LinksMeasured) -> None:
        if self.phase is Phase.MEASURING and fact.life == self.life:
            self.links.measured(fact.links)
            self._go_on_from_snapshot()

    def _share_out(self) -> None:
        """Cut the kernels over the workers by their present measurements."""
        balance = self.settings.balancing(self.sharing.home(self.roster.seconds), self.roster.alive, self.links.known)
        for worker in self._newcomers:
            self._out.log(WorkerJoined(worker=worker))
        self._newcomers = []
        for event in self.sharing.make(balance, self.snapshot.step, self.settings.eq2):
            self._out.log(event)
        self.records.report_from(self.snapshot.step, self._now)
        self._place()

    def _leave_out(self, workers: Sequence[str], reason: str, remedy: str, now: float, *, lost: bool = False) -> None:
        for worker in workers:  # it may come back to another place
            self._forget(worker)
        super()._leave_out(workers, reason, remedy, now, lost=lost)

    def _forget(self, worker: str) -> None:
        self.links.forget(worker)
        self._newcomers = [each for each in self._newcomers if each != worker]

    def _drop(self, worker: str, reason: str, samples: int = 0, done: int | None = None) -> None:
        self._forget(worker)
        self._leaving.pop(worker, None)
        self.records.costs.gone(worker, self._now)
        super()._drop(worker, reason, samples, done)

    # --- a segment ---

    def _place(self) -> None:
        """Place the snapshot's pieces, and train on them."""
        shares = self.sharing.shares
        assert shares is not None
        self.life += 1
        self.done, self.end, self._placed = self.snapshot.step, self.records.segment_end, self._now
        self.records.costs.shared(self.roster.alive, self._now)
        self._enter(Phase.STEPPING)
        self._out.put(orders.Place(self.life, self.done, shares))
        self._out.put(orders.RunSegment(self.life, self.done, self.end, self.records.divergence.scale))

    def _enter(self, phase: Phase) -> None:
        """Enter a phase. The clock begins anew: carrying out the orders is none of the workers' silence."""
        self.phase, self._stopping = phase, False
        self._heard, self._asked = None, False

    def _on_step_done(self, fact: facts.StepDone) -> None:
        if self.phase is not Phase.STEPPING or fact.life != self.life or fact.number != self.done:
            return
        if not math.isfinite(fact.score.loss_sum):
            value = f"loss = {fact.score.loss} at step {fact.number}"
            self._diverged(Diverged(value, "training diverged", "lower train.lr"))
            return
        self.done = fact.number + 1
        self._step = self._step if self._heard is None else fact.at - self._heard
        self._heard = fact.at
        self.records.trained(fact.score, fact.lr)
        if self.records.report_due(self.done):
            shares = self.sharing.shares
            assert shares is not None
            self.records.report(self.done, fact.score, shares, self._now)
            if not self.records.costs.awaited:
                self._ask_for_counters()
        if self.done >= self.end:
            self._collect()

    @property
    def _before_save(self) -> float:
        """Seconds within which the steps that are submitted ahead should end, and the pieces be collected."""
        under_way = self.phase in (Phase.STEPPING, Phase.COLLECTING)
        return (STEPS_AHEAD + 1) * self._step + FAR if under_way else 0.0

    def _stop_segment(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._out.put(orders.StopSegment(self.life))

    def _on_segment_stopped(self, fact: facts.SegmentStopped) -> None:
        if self._stopping and fact.life == self.life and self.done <= fact.end <= self.end:
            self._stopping, self.end = False, fact.end
            if self.done >= self.end:
                self._collect()

    # --- a snapshot ---

    def _collect(self) -> None:
        self._enter(Phase.COLLECTING)
        self._out.put(orders.Collect(self.life, self.done))

    def _on_pieces_collected(self, fact: facts.PiecesCollected) -> None:
        if self.phase is not Phase.COLLECTING or (fact.life, fact.step) != (self.life, self.done):
            return
        if not fact.finite:  # the last step may have spoilt what its own loss does not show yet
            value = f"weights after step {fact.step} are not finite"
            self._diverged(Diverged(value, "training diverged", "lower train.lr"))
            return
        self.records.keep(self.done, None, to_judge=self.done % self.settings.steps_per_epoch == 0)
        if self._interrupted is not None:
            self._end_interrupted()
        elif self.records.to_judge_first:
            self._judge()
        else:
            self._go_on(better=False)

    def _judge(self) -> None:
        self._enter(Phase.JUDGING)
        self._out.put(orders.Judge(self.records.judged_part(self.done, self.roster.seconds, self._now)))

    def _on_judged(self, fact: facts.Judged) -> None:
        if self.phase is not Phase.JUDGING:
            return
        self.records.judged(self.done, fact.score, fact.at)
        self._enter(Phase.COUNTING)
        self._last_ask = False
        if self._fewer:
            self._end_epoch()
        elif not self.records.costs.awaited:
            self._last_ask = True
            self._ask_for_counters()

    def _end_epoch(self) -> None:
        """Report the epoch that was judged, and go on."""
        ruined = self.records.ruined
        better = self.records.end_epoch(self._now)
        if ruined is None:
            self._go_on(better=better)
        else:
            self._diverged(ruined)

    def _go_on(self, *, better: bool) -> None:
        """Save the new snapshot if that is due, and train on, with other shares if these are worth it."""
        records = self.records
        if better or records.save_due:
            records.save()
        if records.over:
            self._end("done", None)
            return
        if not self._fewer:
            self.sharing.seek(self.done, WORTH_ANYWAY)
            if (move := self.sharing.move) is not None:
                self.roster.alive |= move.measured(self.roster.alive)
        if self._fewer or self._newcomers or self._leaving or self.sharing.move is not None:
            self._go_on_from_snapshot()
        else:
            self._place()

    def _diverged(self, error: Diverged) -> None:
        """Go back to the snapshot that was saved last, once; then end."""
        divergence = self.records.divergence
        if self._interrupted is not None:
            self._end_interrupted()
        elif divergence.goes_back():
            self.records.restore()
            self._out.warn(divergence.warning(error, f"the state of step {self.snapshot.step}"))
            self._go_back()
        else:
            self._end("diverged", divergence.last(error))

    def _go_back(self) -> None:
        """Train again from the snapshot."""
        self._out.put(orders.CancelAll())
        self._begin(self._now)

    # --- counters ---

    def _ask_for_counters(self) -> None:
        watch = self.sharing.watch
        assert watch is not None
        self._out.put(orders.AskCounters(self.records.costs.ask(watch)))

    def _on_counted(self, fact: facts.Counted) -> None:
        watch = self.records.costs.answered(fact.ask, fact.spent)
        if watch is None:
            return
        watch.take(fact.spent)  # of the shares that there were when it was asked
        moves = not self.records.ending(self.done) and self._interrupted is None and self.sharing.seek(self.done)
        if moves:
            self._out.warn(f"after step {self.done}: {self.sharing.move}")
        if moves and self.phase is Phase.STEPPING:
            self._stop_segment()
        if self.phase is not Phase.COUNTING:
            return
        if self._last_ask:
            self._end_epoch()
        else:
            self._last_ask = True
            self._heard, self._asked = None, False
            self._ask_for_counters()
