"""The coordinator of a layer-sharded run: segments of steps, snapshots, shares that move, going back.

Theory of operation. One replica lies in pieces on all workers. A run goes through *lives*: in each the pieces of the
snapshot are placed on the workers, a segment of steps is trained on them, and the pieces are collected into the next
snapshot. The shell keeps the snapshot's weights.

Segments. A segment ends with the epoch, when a checkpoint is due, or after `snapshot_every` steps: a longer chain of
tasks burdens the scheduler, and a lost worker costs the steps since the snapshot. It is stopped early by a signal, or
to move kernels. An epoch's snapshot is judged.

Shares. The first go by calibration and measured links. Every `report_every` steps the workers are asked for their
counters; the run goes on meanwhile. If other shares would save enough, the segment stops and its snapshot is placed by
them. A snapshot's pieces are placed anew anyway, so a smaller gain is enough there.

Workers that come. One that becomes ready in mid-run measures itself beside the run. Then the segment stops; the links
of the new worker are measured, and the snapshot's pieces are placed by shares among all. No step is trained twice.

Going back. A run that loses a worker, or has tasks out of step, goes on from the snapshot. It ends after tasks out of
step `GO_BACK` times on end from the same one. One that diverges goes back once, with a third of the learning rate. An
unsaved snapshot is saved before a run ends, unless it diverged.

Silence. The clock begins with the first tick after an order and again with each result. After the stall timeout the
coordinator asks for whom the run waits, and ends the run with their names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from daskcnn.errors import Diverged, Lost, UserError
from daskcnn.events import WorkerJoined, WorkersCalibrated
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import Coordinating, Phase
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer_records import REPLICA, LayerRecords, LayerSnapshot
from daskcnn.training.coordinator.roster import Refusal
from daskcnn.training.coordinator.settings import PATIENCE, LayerSettings
from daskcnn.training.coordinator.shares import WORTH_ANYWAY, Links, Sharing

GO_BACK = 5
"""A run ends if tasks out of step take it back to the same snapshot this many times on end."""


class LayerCoordinator(Coordinating):
    """Decides a layer-sharded run, as the module's text describes it. snapshot: the state to go on from."""

    def __init__(self, settings: LayerSettings, snapshot: LayerSnapshot | None = None) -> None:
        super().__init__(settings)
        self.settings = settings
        self.records = LayerRecords(settings, snapshot or LayerSnapshot(), self._out)
        self.done = self.end = self.snapshot.step  # steps that have ended; the segment's end
        self.links = Links(wanted=settings.measures_links)
        self.sharing = Sharing(settings.between_moves)
        self._fewer = False  # a worker was lost since kernels were shared
        self._newcomers: list[str] = []  # calibrated since then
        self._stopping = False  # the segment
        self._gone_back: deque[int] = deque(maxlen=GO_BACK)  # the steps gone back to, last
        self._last_ask = False  # True if the answer that is awaited is the epoch's last
        self._heard: float | None = None  # since when there is no result
        self._asked = False  # it was asked for whom the run waits, and the answer is to come

    def _own_handlers(self) -> dict[type[Fact], Callable[[Any], None]]:
        return {
            facts.WorkerGone: self._on_worker_gone,
            facts.LinksMeasured: self._on_links_measured,
            facts.StepDone: self._on_step_done,
            facts.SegmentStopped: self._on_segment_stopped,
            facts.PiecesCollected: self._on_pieces_collected,
            facts.Judged: self._on_judged,
            facts.Counted: self._on_counted,
            facts.OutOfStep: self._on_out_of_step,
            facts.Waits: self._on_waits,
            facts.Saved: lambda fact: None,  # nothing waits for it: orders are carried out in turn
            facts.Tick: self._on_tick,
        }

    @property
    def snapshot(self) -> LayerSnapshot:
        """The state to go on from."""
        return self.records.snapshot

    # --- workers come ---

    def _closed(self) -> Refusal | None:
        over = self._interrupted is not None or self.records.ending(self.done)
        return ("the run is about to end", "") if over and self.phase is not Phase.CALIBRATING else None

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        late = self.phase is not Phase.CALIBRATING and fact.worker in self.roster.calibrating
        super()._on_calibrated(fact)
        if late:
            self._out.log(WorkersCalibrated(workers=[fact.row]))
            self._newcomers.append(fact.worker)
            if self.phase is Phase.STEPPING and self._interrupted is None:
                self._stop_segment()

    def _begin(self, now: float) -> None:
        self.records.begin_epoch(now)
        if self.records.over:
            self._end("done", None)
        else:
            self._go_on_from_snapshot()

    # --- shares ---

    def _go_on_from_snapshot(self) -> None:
        """Share out the network over the workers that are left, once there are enough and their links are known."""
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
        balance = self.settings.balancing(self.roster.fastest, self.roster.alive, self.links.known)
        for worker in self._newcomers:
            self._out.log(WorkerJoined(worker=worker))
        self._newcomers = []
        for event in self.sharing.make(balance, self.snapshot.step, self.settings.eq2):
            self._out.log(event)
        self.records.report_from(self.snapshot.step, self._now)
        self._place()

    # --- a segment ---

    def _place(self) -> None:
        """Place the snapshot's pieces, and train on them."""
        shares = self.sharing.shares
        assert shares is not None
        self.life += 1
        self.done, self.end = self.snapshot.step, self.records.segment_end
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
        self.records.keep(self.done, None)
        if self._interrupted is not None:
            self._end_interrupted()
        elif fact.step % self.settings.steps_per_epoch == 0:
            self._judge()
        else:
            self._go_on(better=False)

    def _judge(self) -> None:
        self._enter(Phase.JUDGING)
        self._out.put(orders.Judge(self.records.to_judge(self.done, self.roster.seconds, self._now)))

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
        if self._fewer or self._newcomers or self.sharing.move is not None:
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

    # --- workers go, and tasks out of step ---

    def _on_worker_gone(self, fact: facts.WorkerGone) -> None:
        self._leave_out_lost(fact)
        if lost := [worker for worker in fact.workers if worker in self.roster.alive]:
            self._lose(lost, fact.reason)

    def _lose(self, lost: Sequence[str], reason: str) -> None:
        """Go on with the workers that are left. A snapshot that is complete does not need the others."""
        missed = any(worker not in self._newcomers for worker in lost)
        for worker in lost:
            self._drop(worker, reason)
            if not self.roster.alive:
                return
        if not missed and self.phase in (Phase.STEPPING, Phase.COLLECTING):  # they have no kernels yet
            return
        self._fewer = True
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            self._out.put(orders.CancelAll())
            self._judge() if self.phase is Phase.JUDGING else self._end_epoch()
        elif self._interrupted is not None:
            self._end_interrupted()
        else:
            count = len(self.roster.alive)
            self._out.warn(f"back to the snapshot of step {self.snapshot.step}, on {count} workers")
            self._go_back()

    def _drop(self, worker: str, reason: str, samples: int = 0, done: int | None = None) -> None:
        self.links.forget(worker)
        self._newcomers = [each for each in self._newcomers if each != worker]
        super()._drop(worker, reason, samples, done)

    def _lost_last(self, error: Lost) -> None:
        """Begin anew with workers that came, or that come while the run pauses; without any the run ends."""
        if (self.roster.calibrating or self._least) and self._interrupted is None:
            self._out.put(orders.CancelAll())
            self._enter(Phase.CALIBRATING)
            self._is_short(self._now)
        else:
            self._give_up(error)

    def _go_back(self) -> None:
        """Train again from the snapshot."""
        self._out.put(orders.CancelAll())
        self.records.begin_epoch(self._now)
        self._go_on_from_snapshot()

    def _on_out_of_step(self, fact: facts.OutOfStep) -> None:
        if self.phase not in (Phase.STEPPING, Phase.COLLECTING) or fact.life != self.life:
            return
        if self._interrupted is not None:
            self._end_interrupted()
            return
        step = self.snapshot.step
        self._out.warn(f"{fact.message}: back to step {step}")
        self._gone_back.append(step)
        if self._gone_back.count(step) == GO_BACK:
            remedy = "do all workers reach each other? `daskcnn doctor --scheduler ADDRESS` tries their links"
            self._give_up(Lost(f"{fact.message}, for the {GO_BACK}th time behind step {step}: {remedy}"))
        else:
            self._go_back()

    # --- silence ---

    def _on_tick(self, fact: facts.Tick) -> None:
        self._tend_workers(fact.at)
        if self.phase not in (Phase.CALIBRATING, Phase.MEASURING, Phase.ENDED):  # a transfer has a limit of its own
            if self._heard is None:
                self._heard = fact.at
            if not self._asked and fact.at - self._heard > self._limit:
                self._asked = True
                self._out.put(orders.AskWaiting((REPLICA,)))

    @property
    def _limit(self) -> float:
        """Seconds without a result after which the run is stuck."""
        limit = self.settings.stall_timeout
        if self.phase is Phase.JUDGING:
            limit += PATIENCE * self.settings.validation / sum(1 / each for each in self.roster.seconds.values())
        return limit

    def _on_waits(self, fact: facts.Waits) -> None:
        asked, self._asked = self._asked, False
        if not asked or self._heard is None or fact.at - self._heard <= self._limit:
            return
        silent = [worker for worker in fact.silent if worker in self.roster.alive]
        if silent and len(silent) < len(self.roster.alive):
            self._lose(silent, f"no sign of life for {self._limit:g} s")
            return
        awaited = {
            Phase.STEPPING: f"step {self.done}",
            Phase.COLLECTING: f"weights after step {self.done}",
            Phase.JUDGING: f"score of step {self.done}",
            Phase.COUNTING: "counters",
        }[self.phase]
        names = ", ".join(fact.stuck.get(REPLICA, ())) or "the scheduler"
        self._give_up(Lost(f"{awaited}: no progress for {self._limit:g} s, waiting for {names}"))

    # --- the end ---

    def _stop(self) -> None:
        if self.phase is Phase.STEPPING:
            self._stop_segment()
        elif self.phase is not Phase.COLLECTING:
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Save the snapshot, unless there is none or its weights are ruined, and end."""
        if self.records.evaluated is not None and self.records.ruined is not None:
            self.records.restore()
        if self.phase not in (Phase.CALIBRATING, Phase.MEASURING) or self.records.unsaved:
            self.records.save()
        self._end("interrupted", self._interrupted)

    def _give_up(self, error: UserError) -> None:
        """Save an unsaved snapshot, and end: nothing more can be trained."""
        if self._interrupted is not None:
            self._end_interrupted()
            return
        if self.records.unsaved:
            self.records.save()
        self._end("lost", error)

    def validate(self) -> None:
        """Assert every invariant that holds between two facts."""
        self.roster.validate()
        if self.phase is Phase.CALIBRATING or self.ended:
            return
        settings, snapshot, alive = self.settings, self.snapshot, self.roster.alive
        assert alive, "a run without workers goes on"
        assert self.records.saved <= snapshot.step <= self.done <= self.end <= settings.steps
        assert not self._stopping or self.phase is Phase.STEPPING
        assert self._interrupted is None or self.phase in (Phase.STEPPING, Phase.COLLECTING)
        if self.phase is Phase.STEPPING:
            assert self.done < self.end, "a segment that has ended goes on"
            begun, last = (step // settings.steps_per_epoch for step in (snapshot.step, self.end - 1))
            assert begun == last, "a segment goes over an epoch's end"
        if self.phase in (Phase.STEPPING, Phase.COLLECTING):
            shares = self.sharing.shares
            assert shares is not None
            assert not self._fewer
            assert self.end - snapshot.step <= settings.snapshot_every
            assert shares.balance.compute.keys() | {*self._newcomers} == alive.keys(), "shares of other workers"
            shares.validate()
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            assert snapshot.step == self.done
            assert self.done % settings.steps_per_epoch == 0, "judged within an epoch"
        assert (self.records.evaluated is not None) == (self.phase is Phase.COUNTING)
