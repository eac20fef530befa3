"""Laws of all that is told of a run, over logs of the real coordinator: workers join, are lost, return; runs resume."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import pytest
from rich.console import Console

from daskcnn import events
from daskcnn.dashboard.live_run import LiveRun, Message, heading, shown
from daskcnn.events import Event
from daskcnn.partition import PARTITIONERS
from daskcnn.runs.summary import WorkerSummary
from daskcnn.runs.totals import worker_totals
from daskcnn.show.board import Board
from daskcnn.show.history import History
from daskcnn.show.lines import describe
from daskcnn.show.renderers.notebook import NotebookProgress
from daskcnn.show.renderers.page import report_page
from daskcnn.show.renderers.run_text import format_report, format_summary
from daskcnn.show.renderers.terminal import TerminalProgress
from daskcnn.show.report_tables import RunReport, report_of, tables
from daskcnn.show.run_figures import run_figures
from daskcnn.show.timeline import timeline
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer_records import LayerSnapshot
from daskcnn.training.coordinator.orders import Order, StartRound
from daskcnn.training.coordinator.records import Kept
from tests.training import layer_shell
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator_machine import EPOCHS, EXCHANGES, GUESS, SAMPLES, settings_of
from tests.training.test_coordinator_random import Course

STEPS, CLOSE = 60, 1e-6


@dataclass
class Recorder(Shell):
    """A shell that keeps the log of its run, with rounds that take up some of the time that passes."""

    random: Random = field(default_factory=Random)
    before: float = 0.0  # seconds of training before a resume
    log: list[Event] = field(default_factory=list)
    saved: tuple[Kept, float] | None = None  # the last checkpoint, and the seconds of training until then
    began: float | None = None
    started: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        return self.before + (0.0 if self.began is None else self.now - self.began)

    def tell(self, fact: Fact) -> list[Order]:
        self.now = max(self.now, fact.at)
        found = super().tell(fact)
        if isinstance(fact, facts.Saved) and self.coordinator.kept.book is not None:
            self.saved = self.coordinator.kept, self.seconds
            self.write(events.CheckpointWritten(step=self.coordinator.kept.step))
        for order in found:
            match order:
                case orders.Log(event):
                    if self.began is None and isinstance(event, events.WorkersCalibrated):
                        self.began = self.now
                    self.write(event)
                case orders.FormGroups(groups, left_out):
                    rows = [events.FormedGroup(name=name, members=own) for name, own in groups.items()]
                    self.write(events.GroupsFormed(groups=rows, left_out=left_out))
                case StartRound():
                    self.started[order.round.worker] = self.now
                case orders.End(status):
                    self.write(events.RunEnded(status=status, seconds=self.seconds))
        return found

    def write(self, event: Event) -> None:
        self.log.append(event.logged(self.now))

    def _round_done(self, order: StartRound, at: float) -> Fact:
        fact = super()._round_done(order, at)
        assert isinstance(fact, facts.RoundDone)
        spent = at - self.started[order.round.worker]
        parts = [self.random.random() for _ in range(4)]
        busy, wait, communication, evaluation = (spent * each / max(1.0, sum(parts)) for each in parts)
        report = fact.report._replace(busy=busy, load=busy / 2, wait=wait, communication=communication)
        up, down = (self.random.randrange(100) for _ in range(2))
        report = report._replace(evaluation=evaluation, bytes_up=up, bytes_down=down)
        return replace(fact, report=report)


class Recorded(Course):
    """A run by facts at random, killed now and then, and resumed from what was saved last."""

    def __init__(self, seed: int) -> None:
        self.random = draw = Random(seed)
        which, partition = draw.choice(EXCHANGES), draw.choice(sorted(PARTITIONERS))
        size = 1 if which[1] else draw.choice([1, 1, 1, 2])
        goes_back = {"lowers": True, "guess": GUESS}
        least = draw.choice([{}, {"cpu": 2}]) if size == 1 else {}
        self.settings = settings_of(which, partition, replica_size=size, least=least, wait=1e6, **goes_back)
        self.log: list[Event] = []
        self.start(0.0, None)

    def start(self, now: float, saved: tuple[Kept, float] | None) -> None:
        kept, before = saved or (None, 0.0)
        version = kept.step if kept else 0
        self.shell = Recorder(self.settings, kept, now=now, version=version, random=self.random, before=before)
        self.shell.log, self.shell.saved = self.log, saved
        self.coordinator, self.interrupted = self.shell.coordinator, False
        asked, rule = self.settings, self.settings.rule.model_dump()
        about = {"strategy": asked.strategy, "rule": rule, "epochs": EPOCHS, "samples": SAMPLES, "parameters": 10}
        self.shell.write(events.RunStarted(run="runs/one", increments=asked.partitioner.increments, **about))
        if kept:
            self.shell.write(events.RunResumed(path="c", step=kept.step, epoch=kept.epoch))
        self.came = 0
        for _ in range(self.random.randint(2, 4)):
            self.come()

    def come(self) -> None:
        """A worker comes: a new one, or one that was there before."""
        roster = self.coordinator.roster
        gone = [i for i in range(self.came) if not {f"cpu-{i}"} & {*roster.alive, *roster.calibrating}]
        number = self.random.choice([*gone, self.came])
        self.came = max(self.came, number + 1)
        self.shell.tell(facts.WorkerReady(f"cpu-{number}", "cpu", self.shell.now))

    def ruin(self) -> None:
        self.shell.ruins = True

    def run(self) -> orders.End:
        happenings: dict[Callable[[], None], float] = {
            self.answer: 60,
            self.report_again: 5,
            self.come: 8,
            self.go: 8,
            self.lose_server: 3,
        }
        happenings |= {self.get_out_of_step: 2, self.hang: 2, self.interrupt: 0.3, self.ruin: 1, self.kill: 2}
        happenings |= {self.pass_time: 1, self.leave: 2}
        for _ in range(STEPS):
            if self.coordinator.ended:
                break
            self.shell.now += self.random.random()
            (happening,) = self.random.choices([*happenings], [*happenings.values()])
            happening()
        while not self.coordinator.ended:
            self.answer_first_or_come()
        return self.shell.end

    def leave(self) -> None:
        """A worker is asked to end."""
        if workers := [*self.coordinator.roster.alive]:
            self.shell.tell(facts.WorkerLeaving((self.random.choice(workers),), "SIGTERM", self.shell.now))

    def kill(self) -> None:
        """The driver is killed; a while later the run is resumed."""
        assert isinstance(self.shell, Recorder)
        self.start(self.shell.now + 100 * self.random.random(), self.shell.saved)


class ShardedRecorder(layer_shell.Shell):
    """The same of a layer-sharded run, whose workers compute for a small part of the time that passes."""

    def __init__(self, log: list[Event], now: float, saved: tuple[LayerSnapshot, float] | None) -> None:
        snapshot, self.before = saved or (LayerSnapshot(), 0.0)
        super().__init__(layer_shell.settings_of(epochs=EPOCHS, lowers=True, checkpoint_every=0.5), snapshot)
        self.log, self.now, self.last, self.began = log, now, saved, float("nan")
        self.write(events.RunStarted(run="runs/one", strategy="layer", epochs=EPOCHS, samples=80))
        if saved:
            self.write(events.RunResumed(step=snapshot.step, epoch=snapshot.epoch))
        self.seconds = dict.fromkeys(SHARDED, 1e-3)
        self.start(**dict.fromkeys(SHARDED, 0.5))

    def write(self, event: Event) -> None:
        self.log.append(event.logged(self.now))

    def tell(self, fact: Fact) -> list[Order]:
        found = super().tell(fact)
        for order in found:
            match order:
                case orders.Log(event):
                    self.began = self.now if isinstance(event, events.WorkersCalibrated) else self.began
                    self.write(event)
                case orders.Save():
                    self.last = self.coordinator.snapshot, self.before + self.now - self.began
                    self.write(events.CheckpointWritten(step=self.coordinator.snapshot.step))
                case orders.End(status):
                    self.write(events.RunEnded(status=status, seconds=self.before + self.now - self.began))
        return found

    def answer(self) -> None:
        """Answer what was asked, or end a step."""
        answers = {orders.MeasureLinks: self.links, orders.Collect: self.pieces, orders.Judge: self.judged}
        answers |= {orders.StopSegment: self.stopped, orders.AskCounters: self.counted}
        found = next((answer for kind, answer in answers.items() if kind in self.open), self.step)
        found()


SHARDED = ("cpu-0", "cpu-1", "cpu-2")


def sharded_log(seed: int) -> list[Event]:
    """The log of a layer-sharded run that loses workers, diverges, is killed and resumed."""
    draw, log = Random(seed), list[Event]()
    shell = ShardedRecorder(log, 0.0, None)
    for _ in range(4 * STEPS):
        if shell.coordinator.ended:
            break
        chance = draw.random()
        if chance < 0.01 and len(shell.alive) > 1:
            shell.lose(draw.choice(sorted(shell.alive)))
        elif chance < 0.02 and shell.trained < shell.end:
            shell.step(math.nan)
        elif chance < 0.03:
            shell.then(facts.OutOfStep, shell.life, "a task was run twice")
        elif chance < 0.04:
            shell = ShardedRecorder(log, shell.now + 100 * draw.random(), shell.last)
        else:
            shell.answer()
    return log


def log_of(seed: int) -> list[Event]:
    if seed % 5 == 4:
        return sharded_log(seed)
    course = Recorded(seed)
    course.run()
    return course.log


# --- laws ---


def rises(values: Iterable[float]) -> bool:
    return all(a <= b + CLOSE for a, b in pairwise(values))


def check_shares(line: str) -> None:
    """The parts of the workers' time are shares of it, and add up to it."""
    shares = [float(share) for share in re.findall(r"([\d.]+) %", line)]
    assert all(0 <= share <= 100 for share in shares), line
    assert not shares or sum(shares) == pytest.approx(100, abs=0.3), line


def check_report(report: RunReport, log: Sequence[Event]) -> None:
    total, ended = report.total, [event for event in log if isinstance(event, events.RoundEnded)]
    counted = () if report.start.strategy == "layer" else ("samples",)  # there all workers see the same samples
    for name in (*counted, "rounds", "pushes", "busy", "wait", "communication", "evaluation", "present"):
        assert sum(getattr(worker, name) or 0 for worker in report.workers) == pytest.approx(getattr(total, name) or 0)
    if report.start.strategy != "layer":
        assert (total.samples, total.rounds) == (sum(event.samples for event in ended), len(ended))
        assert total.busy == pytest.approx(sum(event.busy for event in ended))
    for parts in report.breakdown.values():
        assert min(parts.comm, parts.conv, parts.comp) >= 0
    for worker in report.workers:
        spent = worker.busy + worker.wait + (worker.communication or 0.0) + (worker.evaluation or 0.0)
        assert spent <= worker.present + CLOSE, f"{worker.name} was busy for longer than it was there"
    assert total.busy <= total.present + CLOSE
    assert report.utilisation is None or 0 <= report.utilisation <= 1
    assert {worker.name for worker in report.workers if worker.lost} <= lost_in(log)
    keys = [(row.life, row.number, row.worker) for row in report.rounds]
    assert len(set(keys)) == len(keys), "a round is counted twice"
    for life in report.began:
        assert rises(row.at for row in report.rounds if row.life == life)
    looks = report.looks
    for values in ([look.epoch for look in looks], [look.at for look in looks], [look.step for look in looks]):
        assert rises(values), "a curve runs backwards"
    assert all(look.at <= report.seconds + CLOSE for look in looks)
    assert all(note.at >= 0 for note in report.notes)
    for found in (*report.by_round, *report.increments):
        assert 0 <= found.mean_busy <= found.max_busy + CLOSE
        assert found.balance is None or 0 < found.balance <= 1 + CLOSE
        assert found.wait >= -CLOSE
    for figure in run_figures({"one": report}):
        for xs, ys in () if figure.stacked else figure.curves.values():
            assert rises(xs), f"{figure.name} runs backwards"
            assert all(math.isfinite(y) and y >= 0 for y in ys)


def lost_in(log: Sequence[Event]) -> set[str]:
    """Workers that events call lost, and that did nothing since."""
    lost = set[str]()
    for event in log:
        match event:
            case events.WorkerLost():
                lost.add(event.worker)
            case events.WorkersCalibrated():
                lost -= {worker.name for worker in event.workers}
            case events.RoundEnded():
                lost.discard(event.worker)
    return lost


def check_lanes(report: RunReport) -> None:
    found = timeline(report)
    for lane in found.lanes:
        for each in lane.stretches:
            assert -CLOSE <= each.begin <= each.end <= found.seconds + CLOSE
            assert sum(each.spent) <= each.end - each.begin + CLOSE
        assert rises(edge for each in lane.stretches for edge in (each.begin, each.end))


def check_texts(report: RunReport, log: Sequence[Event]) -> None:
    text = format_report(report, full=True)
    for line in text.splitlines():
        if line.startswith("time "):
            check_shares(line)
    workers = [WorkerSummary.model_validate(each).model_dump() for each in worker_totals(log)]
    summary = {"run": "r", "status": "done", "strategy": "s", "epochs": report.epoch, "images_per_second": None}
    summary |= {"seconds": report.seconds, "workers": workers, "checkpoint": None, "bytes": {"up": 0, "down": 0}}
    told = format_summary({**summary, "test": None, "validation": None})
    for line in told.splitlines():
        if line.startswith("time "):
            check_shares(line)
            said = line.partition(",")[0] if report.start.strategy == "layer" else line  # not all is measured apart
            assert " ".join(said.split()) in " ".join(text.split()), "report and summary differ"


def check_changes(report: RunReport, log: Sequence[Event]) -> None:
    kinds = {"joined": events.WorkerJoined, "lost": events.WorkerLost, "left": events.WorkerLeft}
    for change, kind in (*kinds.items(), ("paused", events.RunContinued)):
        assert sum(row.change == change for row in report.changes) == sum(isinstance(event, kind) for event in log)
    assert all(row.lost is None or row.lost >= 0 for row in report.changes)
    assert all(row.at >= 0 for row in report.changes)


def check_renderings(log: Sequence[Event]) -> None:
    """Everything that a person reads of a run is made without an error, and names each worker of the run."""
    report = tables(log)
    page = report_page(report)
    console = Console(file=io.StringIO(), width=120)
    terminal, notebook = TerminalProgress(console), NotebookProgress(lambda _: None, now=lambda: 0.0)
    with notebook:
        for event in log:
            terminal.handle(event)
            notebook.handle(event)
            describe(event)
    console.print(terminal.render())
    text = format_report(report, full=True)
    for row in report.changes:
        assert row.worker in text
        assert row.worker in page
    json.dumps(report.to_dict())


class Watching:
    """The display and the live page of a run, with their laws after each event."""

    def __init__(self) -> None:
        self.history, self.board, self.live = History(), Board(), LiveRun("key")
        self.start = 0.0

    def take(self, number: int, event: Event) -> None:
        before, done = self.history.now, self.board.fraction
        assert event.at is not None
        if isinstance(event, events.RunStarted):
            self.board, before, done = Board(), 0.0, 0.0
            assert self.board.calibrating
        self.history.take(event)
        self.board.apply(event, event.at)
        self.live.hear(Message("key", "feed", number, [event.record()]), event.at)
        assert self.history.now >= (0.0 if isinstance(event, events.RunResumed) else before), "time falls"
        assert 0 <= self.history.now <= event.at
        assert done <= self.board.fraction <= 1
        if isinstance(event, events.RunResumed):
            assert event.epoch is not None
            assert self.board.epoch == self.history.epoch == event.epoch
            assert f"epoch {event.epoch:.4g} of {EPOCHS}" in heading(self.live, event.at)
        self.check_time_left(event)
        for row in self.board.workers.values():
            assert row.shares is None or sum(row.shares) == pytest.approx(1)
        assert self.live.board.epoch == self.board.epoch

    def check_time_left(self, event: Event) -> None:
        """The pace since training began, or was resumed, foretells the rest."""
        left = self.board.remaining(event.at or 0.0)
        if left is None:
            return
        assert left >= 0
        if isinstance(event, events.RoundEnded) and self.board.fraction < 1:
            assert left > 0

    def check_page(self) -> None:
        now = shown(self.live)
        assert all(part.begin <= part.end + CLOSE for part in now.parts)
        times = [at for at, _ in self.live.lines]
        assert all(at >= 0 for at in times)
        for name, figure in now.figures.items():
            for xs, ys in figure.curves.values():
                assert rises(xs), f"{name} runs backwards"
                assert all(y >= 0 for y in ys)


def check(log: Sequence[Event], prefixes: Iterable[int]) -> None:
    watching, ends = Watching(), {*prefixes, len(log)}
    for number, event in enumerate(log, start=1):
        watching.take(number - 1, event)
        if number in ends:
            report = report_of(watching.history)
            check_report(report, log[:number])
            check_lanes(report)
            check_texts(report, log[:number])
            check_changes(report, log[:number])
            watching.check_page()


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 200), marks=pytest.mark.slow)])
def test_totals_obey_their_laws_whatever_happens_to_a_run(seeds: range) -> None:
    for seed in seeds:
        log = log_of(seed)
        try:
            check(log, Random(seed).choices(range(1, len(log) + 1), k=2))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_every_rendering_of_a_run_that_workers_join_leave_and_return_to_is_made() -> None:
    for seed in range(40, 43):
        check_renderings(log_of(seed))


def test_the_logs_hold_what_the_laws_are_about() -> None:
    found = [event for seed in range(60) for event in log_of(seed)]
    presence = events.WorkerJoined, events.WorkerLost, events.WorkerLeft, events.RunPaused, events.RunContinued
    for kind in (*presence, events.RunResumed, events.GroupsFormed, events.EpochEnded):
        assert sum(isinstance(event, kind) for event in found) > 5, kind.kind


def test_the_pause_before_a_resume_is_nobodys_time() -> None:
    log = list[Event]()
    for at, seconds in ((0.0, 2.0), (100.0, 4.0)):
        log.append(events.RunStarted().logged(at))
        log += [events.RunResumed(step=1, epoch=1.0).logged(at)] if at else []
        log.append(events.WorkersCalibrated(workers=[events.CalibratedWorker(name="a")]).logged(at + 1))
        log.append(events.EpochEnded(step=1 + bool(at), epoch=1.0 + bool(at)).logged(at + 3))
        log.append(events.CheckpointWritten(step=1 + bool(at)).logged(at + 3))
        log.append(events.RunEnded(status="interrupted", seconds=seconds).logged(at + 3))
    history = History()
    for event in log:
        history.take(event)
    (row,) = report_of(history).workers
    assert row.present == pytest.approx(4)
    assert [worker.present for worker in worker_totals(log)] == [pytest.approx(4)]
