"""The record of a run: its events go to log, display and the user's function, its states into checkpoints.

A run that cannot be kept in its directory is kept elsewhere.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, Self

from daskcnn.errors import DataError, JobError, NotKept, Stop
from daskcnn.events import (
    CheckpointWritten,
    ClockSet,
    Event,
    RunEnded,
    RunResumed,
    RunStarted,
    Warned,
    WorkersCalibrated,
)
from daskcnn.followers import Feeds
from daskcnn.job.network import optimizer_of
from daskcnn.job.prepared import Prepared
from daskcnn.job.tables import CheckpointChoice, Job
from daskcnn.launch.resume import EarlierRun, check_same_data
from daskcnn.nn.score import Score
from daskcnn.ps.wire import bytes_of
from daskcnn.runs.checkpoint import Checkpoint, best, latest, save
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import TrainingState, check_of, to_checkpoint, to_state
from daskcnn.runs.summary import AloneSummary, Evaluated, Summary, Traffic, WorkerSummary
from daskcnn.runs.totals import worker_totals
from daskcnn.show.alone import alone_of
from daskcnn.show.history import History, without_kernels
from daskcnn.show.renderers.terminal import Progress
from daskcnn.store.array_index import INDEX, write_index
from daskcnn.training.coordinator.settings import Settings

JUMP = 1.0  # seconds; smaller corrections of a clock are not logged
OnEvent = Callable[[Event], object]


def check_listener(function: Any) -> None:
    """Raise JobError for what cannot be told the events, before anything starts."""
    if function is None:
        return
    if not callable(function):
        raise JobError([f"on_event = {function!r:.60}: give a function of one argument, the event"])
    if iscoroutinefunction(function):
        raise JobError([f"on_event = {function!r:.60}: it is never awaited; give a function that is not async"])


ENDED_BY_LISTENER = 0
"""Number in place of a signal's, where the function ends the run: the run ends as after a signal."""


class Listener:
    """A display that also tells tools and the function every event. What the function raises is kept, and ends the run.

    Attributes
    ----------
    stopped, reason : whether the function raised `Stop`, and what that says.
    interrupted : whether it raised KeyboardInterrupt: the run ends as by Ctrl-C.
    error : any other exception. The function is not called again.
    training : whether the workers are calibrated. What is raised before waits: nothing could judge the network.
    """

    def __init__(self, display: Progress, function: OnEvent | None = None, tools: Feeds | None = None) -> None:
        self._display, self._function, self._tools = display, function, tools
        self.stopped = self.training = self.interrupted = False
        self.reason: str | None = None
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._display.__exit__(*exc)

    def handle(self, event: Event) -> None:
        """Show the event, and tell the tools and the function."""
        self._display.handle(event)
        if self._tools is not None:
            self._tools.handle(event)
        self.training |= isinstance(event, WorkersCalibrated)
        if self._function is None or self.error is not None:
            return
        try:
            self._function(event)
        except Stop as stop:
            self.stopped, self.reason = True, str(stop) or None
        except KeyboardInterrupt:
            self.interrupted = True
        except Exception as error:
            self.error = error

    @property
    def signal(self) -> int | None:
        """The number in place of a signal's, once the function has ended the run; else None."""
        if self.interrupted:
            return signal.SIGINT
        return ENDED_BY_LISTENER if self.training and (self.stopped or self.error is not None) else None

    def raise_error(self) -> None:
        """Raise the function's error, if there was one."""
        if self.error is not None:
            raise self.error


@dataclass
class Recorder:
    """The writer of a run. Writing may fail; training goes on.

    Attributes
    ----------
    directory : the run directory; another one once the run had to be kept elsewhere.
    last : the state that was to be kept last.
    kept : whether `checkpoint`, the last one that was written, holds it.
    choice : the weights that the run hands back, once that is decided (`hand_back`).
    handed : their state, where it is not the last.
    finished : whether its end was to be kept.
    not_kept : the reason why the run is not kept where it was asked to be; empty where it is.
    """

    directory: RunDirectory
    progress: Progress
    prepared: Prepared
    seconds_before: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    checkpoint: Path | None = None
    last: TrainingState | None = None
    kept: bool = True
    choice: CheckpointChoice = "last"
    handed: TrainingState | None = None
    not_kept: str = ""
    _handed_at: Path | None = None
    finished: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    _training: bool = False  # the workers are calibrated
    _offset: float = field(default_factory=lambda: time.time() - time.monotonic())
    _told: bool = False  # that the directory is gone
    _ended: bool = False  # the last event is in the log

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self.seconds_before + time.monotonic() - self.begun

    def emit(self, event: Event) -> None:
        """Log and show an event. A run directory that was removed is written anew at once, with a warning.

        Seconds of training count from when the workers that the run begins with are calibrated.
        """
        if isinstance(event, WorkersCalibrated) and not self._training:
            self.begun, self._training = time.monotonic(), True
        with self.lock:
            offset = time.time() - time.monotonic()
            jump, self._offset = offset - self._offset, offset
            for each in (*([ClockSet(seconds=jump)] if abs(jump) > JUMP else []), event):
                self.directory.log(each)
                self.progress.handle(each)
        if not self._told and not self.directory.in_place:
            self._restore()

    def warn(self, message: str) -> None:
        """Log and show a warning."""
        self.emit(Warned(message=message))

    def events(self) -> list[Event]:
        """Return the events of the run so far; none, with a warning, where its log was damaged while it went on."""
        try:
            return self.directory.events()
        except DataError as error:
            if not self._ended:
                self.warn(f"{error}; the summary has no figures of the workers")
            return []

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint; a full disk is a warning, and the old checkpoints stay."""
        self.last, self.kept = state, False
        if not self.directory.in_place:
            self._restore()
        if not self.kept:
            self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self._save()
        except OSError as error:
            step = self.last.step if self.last else 0
            self.warn(f"checkpoint of step {step} not written: {error}; the last one stays")

    def _save(self) -> None:
        """Write the last state. Raises OSError."""
        assert self.last is not None, "there is one to be kept"
        here = self._handed_at is not None and self._handed_at.parent == self.directory.checkpoints
        if self.handed is not None and not (here and self._handed_at and self._handed_at.is_dir()):
            self._handed_at = self._write(self.handed)
        self.checkpoint = self._write(self.last)
        self.kept = True

    def _write(self, state: TrainingState) -> Path:
        """Write a checkpoint of this state. Raises OSError."""
        layout, vectors = self.prepared.layout, optimizer_of(self.prepared.job).vectors
        checkpoint = to_checkpoint(state, layout, self.prepared.dataset, self.seconds, vectors)
        path = save(self.directory.checkpoints, checkpoint, keep=self.prepared.job.run.keep)
        if not self._ended:
            self.emit(CheckpointWritten(path=str(path), step=state.step))
        return path

    def _restore(self) -> None:
        """Write the run anew at its path, which is gone. Where that fails the next checkpoint tries it again."""
        path, told, self._told = self.directory.path, self._told, True
        try:
            self.directory.restore()
        except (OSError, DataError) as error:
            if not told:
                self.warn(f"run directory {path}: gone, and not written anew ({_reason(error)}); training goes on")
            return
        self._told, self.checkpoint, self.kept = False, None, self.last is None
        self.warn(f"run directory {path}: gone (was it removed?), and written anew; its older checkpoints are lost")
        if self.last is not None:
            self._try_to_save()

    def turn(self, job: Job, workers: int) -> None:
        """Keep another kind of job, which is trained in place of the first one. Raises DataError."""
        self.prepared, self._training = replace(self.prepared, job=job), False
        self.directory.write_job(job.model_dump(mode="json"))
        self.emit(start_event(self.prepared, workers, run=str(self.directory.path)))

    # --- the end ---

    def hand_back(self, final: TrainingState) -> TrainingState:
        """Return the state whose weights the run hands back, as its job says: the final one, or the best one kept."""
        job = self.prepared.job
        self.choice = job.train.hands_back
        if self.choice == "best":
            with suppress(DataError):  # all are damaged, and the final one is at hand
                found = best(self.directory.checkpoints, warn=self.warn, check=check_of(job))
                if found is not None and found.step != final.step:
                    self.handed, self._handed_at = to_state(found, job), found.path
        return self.handed or final

    def finish(
        self, status: str, state: TrainingState, seconds: float, test: Score | None, reason: str | None = None
    ) -> dict[str, Any]:
        """Keep how the run ended in its directory, or else in another one: then `not_kept` says why.

        Returns the summary.
        """
        self.finished = True
        summary = partial(self._summary, status, state, seconds, test, reason)
        try:
            return self._complete(summary)
        except (OSError, DataError) as error:
            self.not_kept = f"{self.directory.path}: {_reason(error)}"
        if self.last is None:  # no network to be kept
            self.warn(f"summary.json not written: {self.not_kept}")
            return summary()
        for root in self._elsewhere():
            if (made := self._complete_in(root, summary)) is not None:
                return made
        self.kept, self.checkpoint = False, None
        self.warn(f"the run could be kept nowhere: {self.not_kept}")
        return summary()

    def _summary(
        self, status: str, state: TrainingState, seconds: float, test: Score | None, reason: str | None
    ) -> dict[str, Any]:
        history = History()
        workers = worker_totals(history.followed(self.events()), seconds)
        alone = alone_of(history)
        handed, checkpoint = (state, self.checkpoint) if self.handed is None else (self.handed, self._handed_at)
        tested, validated = (
            None if score is None else Evaluated.model_validate(score.judged) for score in (test, handed.validation)
        )
        return Summary(
            run=str(self.directory.path),
            status=status,
            strategy=self.prepared.job.train.strategy,
            epochs=state.epoch,
            seconds=seconds,
            images_per_second=round(state.epoch * self.prepared.samples) / seconds if seconds > 0 else None,
            test=tested,
            validation=validated,
            bytes=Traffic(up=sum(w.bytes_up for w in workers), down=sum(w.bytes_down for w in workers)),
            workers=[WorkerSummary.model_validate(w) for w in workers],
            checkpoint=None if checkpoint is None else str(checkpoint),
            reason=reason,
            weights=self.choice,
            weights_epoch=handed.epoch,
            alone=None if alone is None else AloneSummary(**asdict(alone)),
            no_kernels=without_kernels(history.kernels),
        ).model_dump()

    def _complete(self, summary: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Keep all of the run in its directory. Raises OSError or DataError where it cannot be."""
        if not self.directory.in_place:
            self._restore()
            self.directory.restore()  # raises why it could not
        if self.last is not None and not (self.kept and self.checkpoint and self.checkpoint.is_dir()):
            self._save()
        made = summary()
        if not self._ended:
            self.emit(RunEnded(**{key: made[key] for key in ("status", "seconds", "test", "reason")}))
            self._ended = True
        self.directory.flush()
        self.directory.write_summary(made)
        return made

    def _complete_in(self, root: Path, summary: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Keep all of the run in a new directory in this folder; return None where that fails."""
        before = self.directory, self.checkpoint, self.kept
        try:
            self.directory, self.kept = before[0].copied_to(root), False
        except DataError as error:
            self.not_kept += f"; {_reason(error)}"
            return None
        try:
            made = self._complete(summary)
        except (OSError, DataError) as error:
            self.directory.close()
            shutil.rmtree(self.directory.path, ignore_errors=True)
            self.not_kept += f"; {self.directory.path}: {_reason(error)}"
            self.directory, self.checkpoint, self.kept = before
            return None
        before[0].close()
        return made

    def _elsewhere(self) -> Iterator[Path]:
        """Folders that may have room: that of the runs, unless its disk is gone, and a new one for temporary files."""
        if self.directory.disk_is_there:
            yield Path(self.prepared.job.run.dir)
        try:
            own = Path(tempfile.mkdtemp(prefix="daskcnn-"))
        except OSError as error:
            self.not_kept += f"; folder for temporary files: {_reason(error)}"
            return
        yield own
        with suppress(OSError):  # there was no room either, and it is empty
            own.rmdir()

    def raise_if_not_kept(self) -> None:
        """Raise NotKept where the trained network is elsewhere than it was asked to be, or nowhere."""
        if not self.not_kept:
            return
        if not self.kept:
            raise NotKept(f"trained, but kept nowhere, the network is lost: {self.not_kept}", None)
        place = self.directory.path
        raise NotKept(
            f"trained, but not kept in its run directory ({self.not_kept}); the whole run is in {place}\n"
            f"make room, then move it where it belongs; `daskcnn evaluate {place}` works there too",
            place,
        )


def _reason(error: OSError | DataError) -> str:
    return str(getattr(error, "strerror", None) or error).partition("; ")[0]


@contextmanager
def recorded(
    prepared: Prepared, resume: EarlierRun | None, progress: Progress, workers: int
) -> Iterator[tuple[Recorder, Checkpoint | None]]:
    """Record a run in a new directory, or in that of the run to resume, which is open to be written.

    workers: those that the run begins with. Yields the recorder, and the checkpoint to go on from if any.
    """
    job = prepared.job
    if resume is None:
        directory = RunDirectory.create(job.run.dir, job.run.name, strategy=job.train.strategy, now=datetime.now(UTC))
        directory.write_job(job.model_dump(mode="json"))
        if (index := prepared.dataset.index) is not None:
            write_index(directory.path / INDEX, index)
    else:
        directory = resume.directory
    with directory, progress:
        recorder = Recorder(directory, progress, prepared)
        checkpoint, damaged = None, list[str]()
        if resume is not None:
            checkpoint = latest(directory.checkpoints, warn=damaged.append, check=check_of(job))
        if checkpoint:
            recorder.seconds_before, recorder.checkpoint = float(checkpoint.state["seconds"]), checkpoint.path
            check_same_data(checkpoint, prepared)
        if resume is not None and resume.kept.train.epochs != job.train.epochs:
            directory.lengthen(job.model_dump(mode="json"))
        elif resume is not None:
            directory.reopen()
        directory.write_environment(sys.argv)
        recorder.emit(start_event(prepared, workers, run=str(recorder.directory.path)))
        if checkpoint:
            known = {"epoch": checkpoint.state["epoch"], "best": checkpoint.state["book"].get("best") or None}
            recorder.emit(RunResumed(path=str(checkpoint.path), step=checkpoint.step, **known))
        for message in damaged:  # behind the start: what comes before it is of the run's earlier life
            recorder.warn(message)
        try:
            yield recorder, checkpoint
        finally:
            recorder.directory.close()  # another one, where the run had to be kept elsewhere


def _pace(prepared: Prepared, workers: int) -> dict[str, Any]:
    job = prepared.job
    if job.rule is None:
        return {"step_samples": job.train.batch_size}
    return Settings.of(job, prepared.samples).pace(workers, job.train.lr)


def start_event(prepared: Prepared, workers: int, *, run: str = "") -> RunStarted:
    """Return the first event of a run on this number of workers."""
    job = prepared.job
    return RunStarted(
        run=run,
        strategy=job.train.strategy,
        partition=job.train.partition,
        increments=job.train.increments,
        replica_size=job.train.replica_size,
        rule=job.model_dump(include={"rule"})["rule"],
        dataset=prepared.dataset.name,
        model=job.model.name or f"{len(job.model.layers or ())} layers",
        epochs=job.train.epochs,
        batch_size=job.train.batch_size,
        largest_batch=0 if job.train.largest_batch == "memory" else job.train.largest_batch,
        optimizer=job.train.optimizer.name,
        lr=job.train.lr,
        **_pace(prepared, workers),
        seed=job.train.seed,
        samples=prepared.samples,
        validation_samples=job.data.validation,
        parameters=prepared.layout.parameter_size,
        wire=job.cluster.wire,
        vector_bytes=bytes_of(job.cluster.wire, prepared.layout.size),
    )
