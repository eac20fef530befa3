"""The coordinator of a layer-sharded run: segments of steps, snapshots, shares that move, going back.

Theory of operation. One replica lies in pieces on all workers. A run goes through *lives*: in each the pieces of the
snapshot are placed on the workers, a segment of steps is trained on them, and the pieces are collected into the next
snapshot. What a shell finds out comes in as facts, with the time; what is to be done goes out as orders. Nothing here
does I/O, looks at a clock, or holds weights: the shell keeps the snapshot's.

Segments. A segment ends with the epoch, where a checkpoint is due, or after `snapshot_every` steps: a longer chain of
tasks burdens the scheduler, and a lost worker costs the steps since the snapshot. It is stopped early by a signal, or
where kernels are to move. An epoch's snapshot is judged.

Shares. The first go by calibration and measured links. Every `report_every` steps the workers are asked for what they
spent; nobody waits for the answers. Where other shares would save enough, the segment stops and its snapshot is placed
by them. A snapshot's pieces are placed anew anyway, so a smaller gain is enough there.

Going back. Whoever loses a worker, or tasks that no longer fit together, goes on from the snapshot; after tasks out of
step `GO_BACK` times on end from the same one, the run ends. A snapshot that was not saved is saved before a run ends,
unless it diverged.

Silence. The clock begins with the first tick after an order and again with each result. After the stall timeout the
coordinator asks for whom the run waits, and ends the run with their names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from daskcnn import errors
from daskcnn.errors import ClusterError, Diverged, Lost, UserError
from daskcnn.events import Event, StepsEnded, Warned, WorkerLost
from daskcnn.nn.score import Score
from daskcnn.sharded import WorkerLinks
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.calibration import CalibrationPhase
from daskcnn.training.coordinator.costs import StepCosts
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.looks import Look, Looks
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import PATIENCE, LayerSettings
from daskcnn.training.coordinator.shares import WORTH_ANYWAY, Sharing
from daskcnn.training.coordinator.silence import Silence

REPLICA = "layer"
"""The name of the only replica."""
GO_BACK = 5
"""Times on end that tasks out of step take a run back to the same snapshot before it ends."""


class Phase(Enum):
    """What the run does now."""

    CALIBRATING = auto()
    MEASURING = auto()  # links
    STEPPING = auto()
    COLLECTING = auto()  # the pieces, behind a segment
    JUDGING = auto()  # the snapshot at an epoch's end
    COUNTING = auto()  # what the epoch cost the workers
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """The state that a life begins from, without its arrays: fields as in `Keep`."""

    step: int = 0
    epoch: float = 0.0
    book: Mapping[str, Any] = field(default_factory=dict)
    validation: Score | None = None


class LayerCoordinator:
    """Decides a layer-sharded run. See the module's text for how it works.

    Parameters
    ----------
    settings : the job's numbers.
    snapshot : the state to go on from.
    """

    def __init__(self, settings: LayerSettings, snapshot: LayerSnapshot | None = None) -> None:
        self.settings, self.snapshot = settings, snapshot or LayerSnapshot()
        self.roster = Roster(settings.wanted)
        self.calibration = CalibrationPhase(self.roster, settings.stall_timeout)
        self.phase = Phase.CALIBRATING
        self.life = 0
        self.saved = self.snapshot.step  # the step of the last checkpoint
        self.done = self.end = self.snapshot.step  # steps that have ended; the segment's end
        self.links: WorkerLinks | None = None
        self.sharing = Sharing(settings.between_moves)
        self._fewer = False  # a worker was lost since kernels were shared
        self._stopping = False  # the segment
        self._gone_back: deque[int] = deque(maxlen=GO_BACK)  # the steps gone back to, last
        book = self.snapshot.book
        best, worse = float(book.get("best", 0.0)), int(book.get("worse", 0))
        self.looks = Looks(patience=settings.patience, epoch=self.snapshot.epoch, best=best, worse=worse, now=0.0)
        self._look: tuple[Look, bool] | None = None  # the epoch that is reported once the counters are there
        self._lr: float | None = None  # of the last step
        self._reported = (0.0, 0)  # when and at which step the last report of steps was
        self.costs = StepCosts()
        self._last_ask = False  # whether the answer that is awaited is the epoch's last
        self.silence = Silence()
        self._now = 0.0
        self._interrupted: errors.Interrupted | None = None
        self._out: list[Order] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            facts.WorkerReady: self._on_worker_ready,
            facts.Calibrated: self._on_calibrated,
            facts.CalibrationFailed: self._on_calibration_failed,
            facts.WorkerGone: self._on_worker_gone,
            facts.LinksMeasured: self._on_links_measured,
            facts.StepDone: self._on_step_done,
            facts.SegmentStopped: self._on_segment_stopped,
            facts.PiecesCollected: self._on_pieces_collected,
            facts.Judged: self._on_judged,
            facts.Counted: self._on_counted,
            facts.OutOfStep: self._on_out_of_step,
            facts.Waits: self._on_waits,
            facts.Saved: self._on_saved,
            facts.SchedulerGone: self._on_scheduler_gone,
            facts.Interrupted: self._on_interrupted,
            facts.Tick: self._on_tick,
        }

    def handle(self, fact: Fact) -> list[Order]:
        """Take a fact in; returns what is to be done now, in order."""
        if self.phase is Phase.ENDED:
            return []
        self._out, self._now = [], fact.at
        self._handlers[type(fact)](fact)
        return self._out

    @property
    def ended(self) -> bool:
        """Whether the last order was `End`."""
        return self.phase is Phase.ENDED

    # --- workers come ---

    def _on_worker_ready(self, fact: facts.WorkerReady) -> None:
        calibration = self.calibration
        self._out += calibration.ignored(fact) if calibration.begun else calibration.ready(fact)

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        if self.calibration.calibrated(fact):
            self._begin_if_calibrated()

    def _on_calibration_failed(self, fact: facts.CalibrationFailed) -> None:
        self._out += self.calibration.failed(fact)
        if self._out:
            self._begin_if_calibrated()

    def _begin_if_calibrated(self) -> None:
        if not self.calibration.over:
            return
        try:
            self._out += self.calibration.begin()
        except ClusterError as error:
            self._end("unusable", error)
            return
        self.looks.restart(self._now)
        if self._over:
            self._end("done", None)
        else:
            self._go_on_from_snapshot()

    # --- shares ---

    def _go_on_from_snapshot(self) -> None:
        """Share out the network over the workers that are left, once their links are known."""
        self._fewer = False
        if self.settings.measures_links and self.links is None and len(self.roster.alive) > 1:
            self._enter(Phase.MEASURING)
            self.life += 1
            self._out.append(orders.MeasureLinks(self.life, self._fastest))
        else:
            self._share_out()

    @property
    def _fastest(self) -> str:
        seconds = self.roster.seconds
        return min(seconds, key=seconds.__getitem__)

    def _on_links_measured(self, fact: facts.LinksMeasured) -> None:
        if self.phase is Phase.MEASURING and fact.life == self.life:
            self.links = fact.links
            self._share_out()

    def _share_out(self) -> None:
        """Cut the kernels over the workers by what is known of them now."""
        balance = self.settings.balancing(self._fastest, self.roster.alive, self.links or WorkerLinks())
        for event in self.sharing.make(balance, self.snapshot.step, self.settings.eq2):
            self._log(event)
        self._reported = self._now, self.snapshot.step
        self._place()

    # --- a segment ---

    def _place(self) -> None:
        """Place the snapshot's pieces, and train on them."""
        shares = self.sharing.shares
        assert shares is not None
        self.life += 1
        self.done, self.end = self.snapshot.step, self._segment_end()
        self._enter(Phase.STEPPING)
        self._out += [
            orders.Place(self.life, self.done, shares),
            orders.RunSegment(self.life, self.done, self.end),
        ]

    def _segment_end(self) -> int:
        step, settings = self.snapshot.step, self.settings
        epoch_end = (step // settings.steps_per_epoch + 1) * settings.steps_per_epoch
        return min(step + settings.snapshot_every, epoch_end, max(step + 1, self.saved + settings.between_checkpoints))

    def _enter(self, phase: Phase) -> None:
        """The shell has something new to carry out; how long that takes is none of the workers' silence."""
        self.phase, self._stopping = phase, False
        self.silence.restart()

    def _on_step_done(self, fact: facts.StepDone) -> None:
        if self.phase is not Phase.STEPPING or fact.life != self.life or fact.number != self.done:
            return
        if not math.isfinite(fact.score.loss_sum):
            message = f"loss = {fact.score.loss} at step {fact.number}: training diverged; lower train.lr"
            self._end("diverged", Diverged(message))
            return
        self.done, self._lr = fact.number + 1, fact.lr
        self.silence.heard(fact.at)
        self.looks.trained(fact.score)
        if self.done - self._reported[1] >= self.settings.report_every or self.done >= self.settings.steps:
            self._report_steps(fact.score)
        if self.done >= self.end:
            self._collect()

    def _report_steps(self, last: Score) -> None:
        since, before = self._reported
        self._reported = self._now, self.done
        shares = self.sharing.shares
        assert shares is not None
        event = StepsEnded(
            step=self.done,
            epoch=self._epoch_of(self.done),
            loss=last.loss,
            lr=self._lr,
            seconds_per_step=(self._now - since) / (self.done - before),
            workers=shares.rows(),
        )
        self._log(event)
        if not self.costs.awaited:
            self._ask_for_counters()

    def _epoch_of(self, step: int) -> float:
        return step / self.settings.steps_per_epoch

    def _stop_segment(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._out.append(orders.StopSegment(self.life))

    def _on_segment_stopped(self, fact: facts.SegmentStopped) -> None:
        if self._stopping and fact.life == self.life and self.done <= fact.end <= self.end:
            self._stopping, self.end = False, fact.end
            if self.done >= self.end:
                self._collect()

    # --- a snapshot ---

    def _collect(self) -> None:
        self._enter(Phase.COLLECTING)
        self._out.append(orders.Collect(self.life, self.done))

    def _on_pieces_collected(self, fact: facts.PiecesCollected) -> None:
        if self.phase is not Phase.COLLECTING or (fact.life, fact.step) != (self.life, self.done):
            return
        if not fact.finite:  # the last step may have spoilt what its own loss does not show yet
            message = f"weights after step {fact.step}: not finite, training diverged; lower train.lr"
            self._end("diverged", Diverged(message))
            return
        self._keep(None)
        if self._interrupted is not None:
            self._end_interrupted()
        elif fact.step % self.settings.steps_per_epoch == 0:
            self._judge()
        else:
            self._go_on(better=False)

    def _keep(self, validation: Score | None) -> None:
        """The pieces collected last are the snapshot from here on."""
        book = {"best": self.looks.best, "worse": self.looks.worse}
        self.snapshot = kept = LayerSnapshot(self.done, self._epoch_of(self.done), book, validation)
        self._out.append(orders.Keep(kept.step, kept.epoch, book, validation))

    def _judge(self) -> None:
        self._enter(Phase.JUDGING)
        lo = self.settings.samples
        self._out.append(orders.Judge(lo, lo + self.settings.validation))

    def _on_judged(self, fact: facts.Judged) -> None:
        if self.phase is not Phase.JUDGING:
            return
        if fact.score is not None:
            self.looks.scored(fact.score)
        self._look = self.looks.look(fact.at)
        self._keep(fact.score)
        self._enter(Phase.COUNTING)
        self._last_ask = False
        if self._fewer:
            self._end_epoch()
        elif not self.costs.awaited:
            self._last_ask = True
            self._ask_for_counters()

    def _end_epoch(self) -> None:
        """Report the epoch that was judged, and go on."""
        assert self._look is not None
        look, better = self._look
        settings, step = self.settings, self.snapshot.step
        event = look.event(epoch=self.snapshot.epoch, epochs=settings.epochs, step=step, lr=self._lr)
        self._log(event.model_copy(update={"workers": tuple(self.costs.rows(look))}))
        self._begin_epoch()
        self._go_on(better=better)

    def _begin_epoch(self) -> None:
        """Count anew."""
        self.looks.restart(self._now)
        self.costs.forget()
        self._look = None

    def _go_on(self, *, better: bool) -> None:
        """Behind a snapshot: save it if that is due, and train on, with other shares where these are worth it."""
        if better or self.snapshot.step - self.saved >= self.settings.between_checkpoints or self._over:
            self._save()
        if self._over:
            self._end("done", None)
            return
        if self._fewer:
            self._go_on_from_snapshot()
            return
        self.sharing.seek(self.done, WORTH_ANYWAY)
        if (move := self.sharing.move) is not None:
            self.roster.alive |= move.measured(self.roster.alive)
            self._share_out()
        else:
            self._place()

    @property
    def _over(self) -> bool:
        """Whether the snapshot is the last."""
        return self.snapshot.step >= self.settings.steps or self.looks.stopping

    @property
    def _ending(self) -> bool:
        """Whether no step is left to be trained."""
        return self.done >= self.settings.steps or self.looks.stopping

    def _save(self) -> None:
        kept = self.snapshot
        self.saved = kept.step
        self._out.append(orders.Save(kept.epoch, kept.book, (REPLICA,), kept.validation))

    def _on_saved(self, fact: facts.Saved) -> None:
        """Nothing waits for it: orders are carried out in turn."""

    # --- what the workers spent ---

    def _ask_for_counters(self) -> None:
        watch = self.sharing.watch
        assert watch is not None
        self._out.append(orders.AskCounters(self.costs.ask(watch)))

    def _on_counted(self, fact: facts.Counted) -> None:
        watch = self.costs.answered(fact.ask, fact.spent)
        if watch is None:
            return
        watch.take(fact.spent)  # of the shares that there were when it was asked
        self._move_if_worth_it()
        if self.phase is not Phase.COUNTING:
            return
        if self._last_ask:
            self._end_epoch()
        else:
            self._last_ask = True
            self.silence.restart()
            self._ask_for_counters()

    def _move_if_worth_it(self) -> None:
        if self._ending or self._interrupted is not None or not self.sharing.seek(self.done):
            return
        self._warn(f"after step {self.done}: {self.sharing.move}")
        if self.phase is Phase.STEPPING:
            self._stop_segment()

    # --- workers go, and tasks out of step ---

    def _on_worker_gone(self, fact: facts.WorkerGone) -> None:
        if not self.calibration.begun:
            self._out += self.calibration.gone(fact)
            if self._out:
                self._begin_if_calibrated()
        elif lost := [worker for worker in fact.workers if worker in self.roster.alive]:
            self._lose(lost, fact.reason)

    def _lose(self, lost: Iterable[str], reason: str) -> None:
        """Go on with the workers that are left. A snapshot that is complete does not need the others."""
        for worker in lost:
            address = self.roster.alive[worker].row.address
            self.roster.drop(worker)
            self._log(WorkerLost(worker=worker, reason=reason, samples_moved=0))
            self._out.append(orders.Dismiss(worker))
            if not self.roster.alive:
                self._give_up(Lost(f"worker {worker} ({address}): {reason}, and it was the last of the run"))
                return
        self._fewer = True
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            self._out.append(orders.CancelAll())
            self._judge() if self.phase is Phase.JUDGING else self._end_epoch()
        elif self._interrupted is not None:
            self._end_interrupted()
        else:
            count = len(self.roster.alive)
            self._warn(f"back to the snapshot of step {self.snapshot.step}, on {count} workers")
            self._go_back()

    def _go_back(self) -> None:
        """Train again from the snapshot."""
        self._out.append(orders.CancelAll())
        self._begin_epoch()
        self._go_on_from_snapshot()

    def _on_out_of_step(self, fact: facts.OutOfStep) -> None:
        if self.phase not in (Phase.STEPPING, Phase.COLLECTING) or fact.life != self.life:
            return
        if self._interrupted is not None:
            self._end_interrupted()
            return
        step = self.snapshot.step
        self._warn(f"{fact.message}: back to step {step}")
        self._gone_back.append(step)
        if self._gone_back.count(step) == GO_BACK:
            remedy = "do all workers reach each other? `daskcnn doctor --scheduler ADDRESS` tries their links"
            self._give_up(Lost(f"{fact.message}, for the {GO_BACK}th time behind step {step}: {remedy}"))
        else:
            self._go_back()

    # --- silence ---

    def _on_tick(self, fact: facts.Tick) -> None:
        if not self.calibration.begun:
            self._out += self.calibration.overdue(fact.at)
            if self._out:
                self._begin_if_calibrated()
        elif self.phase is Phase.MEASURING:  # each transfer has a limit of its own
            return
        elif self.silence.overdue(fact.at, self._limit):
            self._out.append(orders.AskWaiting((REPLICA,)))

    @property
    def _limit(self) -> float:
        """Seconds after which nothing more is expected."""
        limit = self.settings.stall_timeout
        if self.phase is Phase.JUDGING:
            limit += PATIENCE * self.settings.validation / sum(1 / each for each in self.roster.seconds.values())
        return limit

    def _on_waits(self, fact: facts.Waits) -> None:
        asked, self.silence.asked = self.silence.asked, False
        if not asked or not self.silence.longer(fact.at, self._limit):
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

    def _on_interrupted(self, fact: facts.Interrupted) -> None:
        if self._interrupted is not None:
            return
        self._interrupted = errors.Interrupted(f"interrupted by signal {fact.signum}", fact.signum)
        if self.phase is Phase.STEPPING:
            self._stop_segment()
        elif self.phase is not Phase.COLLECTING:
            self._end_interrupted()

    def _end_interrupted(self) -> None:
        """The snapshot is saved; where training has not begun there is none."""
        if self.phase not in (Phase.CALIBRATING, Phase.MEASURING) or self.snapshot.step > self.saved:
            self._save()
        self._end("interrupted", self._interrupted)

    def _on_scheduler_gone(self, fact: facts.SchedulerGone) -> None:
        self._give_up(fact.error)

    def _give_up(self, error: UserError) -> None:
        """Nothing more can be trained: save what is new, and end."""
        if self._interrupted is not None:
            self._end_interrupted()
            return
        if self.snapshot.step > self.saved:
            self._save()
        self._end("lost", error)

    def _end(self, status: orders.Status, error: UserError | None) -> None:
        self._out += [orders.CancelAll(), orders.End(status, error)]
        self.phase = Phase.ENDED

    # --- parts of all that ---

    def _log(self, event: Event) -> None:
        self._out.append(orders.Log(event))

    def _warn(self, message: str) -> None:
        self._log(Warned(message=message))

    def validate(self) -> None:
        """Assert every invariant that holds between two facts."""
        self.roster.validate()
        if not self.calibration.begun or self.ended:
            return
        settings, snapshot, alive = self.settings, self.snapshot, self.roster.alive
        assert alive, "a run without workers goes on"
        assert self.saved <= snapshot.step <= self.done <= self.end <= settings.steps
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
            assert shares.balance.compute.keys() == alive.keys(), "shares of other workers"
            shares.validate()
        if self.phase in (Phase.JUDGING, Phase.COUNTING):
            assert snapshot.step == self.done
            assert self.done % settings.steps_per_epoch == 0, "judged within an epoch"
        assert (self._look is not None) == (self.phase is Phase.COUNTING)
