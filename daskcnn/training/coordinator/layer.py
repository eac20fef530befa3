"""The coordinator of a layer-sharded run: how it goes on where workers come or go, with tasks out of step, and its end.

Theory of operation. One replica lies in pieces on all workers. A run goes through *lives*: in each the pieces of the
snapshot are placed on the workers, a segment of steps is trained on them, and the pieces are collected into the next
snapshot. The shell keeps the snapshot's weights. `LayerSegments` decides that while all goes well.

Workers that come. One that becomes ready in mid-run measures itself beside the run. Then the segment stops; the links
of the new worker are measured, and the snapshot's pieces are placed by shares among all. No step is trained twice.

Workers that leave in good order. The segment stops; what they have is in the snapshot, which goes on without them.

Going back. A run that loses a worker, or has tasks out of step, goes on from the snapshot. It ends after tasks out of
step `GO_BACK` times on end from the same one. One that diverges goes back once, with a third of the learning rate. An
unsaved snapshot is saved before a run ends, unless it diverged.

Silence. The clock begins with the first tick after an order and again with each result. After the stall timeout the
coordinator asks for whom the run waits, and ends the run with their names.

The end. After a signal the steps that are submitted end first, and their pieces are collected. If that takes too long
the snapshot is saved that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from daskcnn.errors import Lost, UserError
from daskcnn.events import WorkersCalibrated
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import CUT, Phase
from daskcnn.training.coordinator.departures import LONGEST
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer_records import REPLICA, LayerSnapshot
from daskcnn.training.coordinator.layer_segments import LayerSegments
from daskcnn.training.coordinator.roster import Refusal
from daskcnn.training.coordinator.settings import PATIENCE, LayerSettings


class LayerCoordinator(LayerSegments):
    """Decides a layer-sharded run, as the module's text describes it. snapshot: the state to go on from."""

    def __init__(self, settings: LayerSettings, snapshot: LayerSnapshot | None = None) -> None:
        super().__init__(settings, snapshot)
        self._keep_by = 0.0  # the time when the snapshot of a run that is to end is saved, whatever is under way

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
        self.records.go_back(now)
        self.done = self.end = self.snapshot.step
        if self.records.to_judge_first:
            self._fewer = True
            self._judge()
        elif self.records.over:
            self._end("done", None)
        else:
            self._go_on_from_snapshot()

    # --- workers go, and tasks out of step ---

    def _on_worker_leaving(self, fact: facts.WorkerLeaving) -> None:
        """Let workers go behind the next snapshot. Those without kernels go at once."""
        if self.phase is Phase.CALIBRATING:
            known = {*self.roster.calibrating, *self.roster.alive}
            self._leave_out([worker for worker in fact.workers if worker in known], fact.reason, "", fact.at)
            return
        super()._on_worker_leaving(fact)
        for worker in fact.workers:
            if worker in self._newcomers and self.phase in (Phase.STEPPING, Phase.COLLECTING):
                self._drop(worker, fact.reason, done=0)
            elif worker in self.roster.alive:
                self._leaving.setdefault(worker, fact.reason)
        if self._leaving and self.phase is Phase.MEASURING:
            self._out.put(orders.CancelAll())
            self._go_on_from_snapshot()
        elif self._leaving and self.phase is Phase.STEPPING and self._interrupted is None:
            self._stop_segment()

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
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            self._end_epoch_without_pieces()
        elif self._interrupted is not None:
            self._end_interrupted()
        else:
            self._fewer = True
            count = len(self.roster.alive)
            self._out.warn(f"back to the snapshot of step {self.snapshot.step}, on {count} workers")
            self._go_back()

    def _end_epoch_without_pieces(self) -> None:
        """Judge again, or report the epoch that was judged: nothing is placed any more that would have counters."""
        self._fewer = True
        self._out.put(orders.CancelAll())
        self._judge() if self.phase is Phase.JUDGING else self._end_epoch()

    def _on_cut(self, fact: facts.ConnectionCut) -> None:
        """Repeat what was under way."""
        super()._on_cut(fact)
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            self._end_epoch_without_pieces()
        else:
            self._on_out_of_step(facts.OutOfStep(self.life, CUT, fact.at))

    def _progress(self) -> int:
        return self.snapshot.step

    def _lost_last(self, error: Lost) -> None:
        """Begin anew with workers that came, or that come while the run pauses; without any the run ends."""
        self._call_up_last()
        if (self.roster.calibrating or self._least) and self._interrupted is None:
            self._out.put(orders.CancelAll())
            self._enter(Phase.CALIBRATING)
            self._is_short(self._now)
        else:
            self._give_up(error)

    def _on_out_of_step(self, fact: facts.OutOfStep) -> None:
        if self.phase not in (Phase.STEPPING, Phase.COLLECTING) or fact.life != self.life:
            return
        if self._interrupted is not None:
            self._end_interrupted()
            return
        step = self.snapshot.step
        self._out.warn(f"{fact.message}: back to step {step}")
        if (error := self._back_too_often(fact.message, step)) is not None:
            self._give_up(error)
        else:
            self._go_back()

    # --- silence ---

    def _on_tick(self, fact: facts.Tick) -> None:
        if self._interrupted is not None and fact.at >= self._keep_by:
            self._end_interrupted()
            return
        self._tend_workers(fact.at)
        goes_on = self.phase is Phase.STEPPING and self.end == self.records.segment_end  # it was not stopped
        if goes_on and fact.at - self._placed > self.settings.snapshot_every:
            self._stop_segment()
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
        within, limit = self._before_save, self._time_limit
        if limit is None or not limit.near(self._now, within):  # the sender of a signal may not wait any longer
            within = min(LONGEST, within)
        self._keep_by = self._now + within
        if self.phase is Phase.STEPPING:
            self._stop_segment()
        elif self.phase is not Phase.COLLECTING:
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Save the snapshot, unless there is none or its weights are ruined, and end. A judged epoch is told."""
        if self.records.evaluated is not None:
            if self.records.ruined is None:
                self.records.end_epoch(self._now)
            else:
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
        assert self._leaving.keys() <= alive.keys()
        assert self._interrupted is None or self.phase in (Phase.STEPPING, Phase.COLLECTING)
        if self.phase is Phase.STEPPING:
            assert self.done < self.end, "a segment that has ended goes on"
            begun, last = (step // settings.steps_per_epoch for step in (snapshot.step, self.end - 1))
            assert begun == last, "a segment goes over an epoch's end"
        if self.phase in (Phase.STEPPING, Phase.COLLECTING):
            shares = self.sharing.shares
            assert shares is not None
            assert not self._fewer
            assert self.end - snapshot.step <= settings.chain
            assert shares.balance.compute.keys() | {*self._newcomers} == alive.keys(), "shares of other workers"
            shares.validate()
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            assert snapshot.step == self.done
            assert self.done % settings.steps_per_epoch == 0, "judged within an epoch"
        assert (self.records.evaluated is not None) == (self.phase is Phase.COUNTING)
