"""Training a resolved job, from its data set and its cluster to its summary."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from distributed import Client

from daskcnn.cluster.link.calls import Signals
from daskcnn.cluster.link.client import lend_client
from daskcnn.cluster.link.connect import await_scheduler, check_scheduler, connect
from daskcnn.cluster.run.admission import admit
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.shell.data_parallel import DataParallel
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.cluster.shell.shell import Heard, Shell
from daskcnn.dashboard.feed import fed
from daskcnn.datasets.job_dataset import find_dataset, forget, must_be_made, outlined
from daskcnn.errors import DataError, Diverged, Interrupted, Lost, UserError
from daskcnn.events import EpochEnded, Event, RunEnded, RunResumed, RunStarted
from daskcnn.followers import Feeds, FollowedRun, check_tools, check_tools_there
from daskcnn.job.network import at_rest, network_of
from daskcnn.job.tables import LAYER, Job
from daskcnn.launch.prepared_job import Prepared, checked_job
from daskcnn.launch.recorder import Listener, OnEvent, Recorder
from daskcnn.launch.resume import epochs_of, has_checkpoint
from daskcnn.markup import as_lines
from daskcnn.nn.score import Score
from daskcnn.nn.summary import LayerSummary, summarise
from daskcnn.runs.checkpoint import Checkpoint, latest
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import TrainingState, check_of, facts_of, parse_record, replicas_of, to_state
from daskcnn.runs.summary import Evaluated, Summary, Traffic, WorkerSummary
from daskcnn.runs.totals import worker_totals
from daskcnn.show.renderers.run_text import format_summary
from daskcnn.show.renderers.terminal import Progress, choose, shown, warnings_by
from daskcnn.store.array_index import INDEX, ArrayChanged, write_index
from daskcnn.store.image_facts import Facts
from daskcnn.trained.fine_tuning import first_weights
from daskcnn.trained.trained_model import TrainedModel
from daskcnn.training.coordinator.layer_records import REPLICA
from daskcnn.training.trained_network import Classifier

_ALIKE = 1e-6
"""How far, relatively, the statistics of the same images may be apart: sums over other chunks round otherwise."""
STATUS: dict[type[Exception], str] = {Diverged: "diverged", Interrupted: "interrupted", Lost: "lost"}


@dataclass(frozen=True)
class Result:
    """A run that has ended, with its trained network.

    Attributes
    ----------
    run : the run directory.
    summary : how the run ended, as `summary.json` has it. Its `status` is "done", or "stopped" where a function that
        was told the events raised `Stop`.
    history : the events of every epoch.
    model : the trained network.
    """

    run: Path
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    model: TrainedModel

    def __repr__(self) -> str:
        return f"<Result\n{format_summary(self.summary)}>"

    def _repr_html_(self) -> str:
        return as_lines(str(self.run), format_summary(self.summary))


class Silent:
    """A display that shows nothing, for use from Python."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def handle(self, event: Event) -> None:
        """Show nothing of the event."""
        return


def train_job(
    job: Job,
    *,
    client: Client | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    handle_signals: bool = False,
    say: Callable[[str], None] = lambda _: None,
    heard: Heard | None = None,
    on_event: OnEvent | None = None,
) -> Result:
    """Run a resolved job, or go on with the run in `resume`, on the client's cluster or the job's own.

    `heard` is told every fact of the run's coordinator with the orders that it led to: what a replay needs. `on_event`
    is told every event. The run keeps its state and ends where it raises: with status "stopped" for `Stop`.
    Raises UserError: bad data or job (nothing started), an unusable cluster, or a run that ended early; then the
    run directory has its summary and the message names the last checkpoint.
    """
    signals = Signals()
    with ExitStack() as stack:
        if handle_signals:
            stack.enter_context(signals.installed())
        if client is None:
            check_scheduler(job.cluster)
        check_place(job, resume)
        check_tools(job)
        stack.enter_context(_forgetting_what_changed(job))
        if client is None and must_be_made(job.data):
            await_scheduler(job.cluster, signals.check, say)
        told: Any = {"progress": shown(say), "warn": warnings_by(say)}
        dataset = outlined(job, **told)
        signals.polled = True
        begins = not has_checkpoint(resume)
        prepared = checked_job(job, dataset, progress=shown(say), between=signals.check, begins=begins)
        job = prepared.job
        if prepared.start is not None and not prepared.start.new:
            say(f"weights: {prepared.start}")
        there = stack.enter_context(nullcontext(client) if client else connect(job.cluster, signals.check, say))
        lend_client(there)
        settle = job.cluster.settle if client or job.cluster.scheduler or job.cluster.scheduler_file else 0.0
        fingerprint, index = prepared.dataset.fingerprint, prepared.dataset.index
        members, warnings = admit(there, job, fingerprint, signals.check, say, settle=settle, index=index)
        if job.data.in_place:
            beside = resume / INDEX if resume is not None else None
            dataset = find_dataset(job, client=there, beside=beside, check=signals.check, **told)
            prepared = replace(prepared, dataset=dataset)
        check_tools_there(job, there)
        feeds = Feeds(job)
        display = fed(progress or Silent(), there, _layers(prepared), say, wanted=job.run.dashboard)
        listener = Listener(display, on_event, feeds)
        recorder, checkpoint = stack.enter_context(_recorded(prepared, resume, listener))
        followed = FollowedRun(job, there, lambda: recorder.directory.path)
        stack.enter_context(feeds.following(followed, recorder.emit))
        if prepared.start is not None and prepared.start.new:
            recorder.warn(f"weights: {prepared.start}")
        for warning in (*prepared.doubts, *warnings):
            recorder.warn(warning)
        name = _task_name(recorder.directory.path)
        context = RunContext.of(
            there,
            name,
            job,
            prepared.dataset,
            members,
            emit=recorder.emit,
            save=recorder.save,
            interrupted=lambda: listener.signal if signals.first is None else signals.first,
        )
        return _train(context, recorder, checkpoint, listener, heard)


def _layers(prepared: Prepared) -> tuple[LayerSummary, ...]:
    return summarise(network_of(prepared.job, prepared.dataset), prepared.dataset.shape)


@contextmanager
def _forgetting_what_changed(job: Job) -> Iterator[None]:
    """Drop the cached index of arrays that turn out not to be what it says: the next run reads them anew."""
    try:
        yield
    except ArrayChanged:
        forget(job)
        raise


def check_place(job: Job, resume: Path | None) -> None:
    """Raise DataError where the run could not be kept, before anything starts."""
    if resume is not None:
        RunDirectory.open(resume, writable=True).close()
        return
    root = Path(job.run.dir)
    there = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise DataError(there, "no folder that may be written", "set run.dir (--run-dir) to one")
    if job.run.name and (path := root / job.run.name).exists():
        remedy = "choose another run.name (--name), or go on with it: --resume RUN, resume=RUN in Python"
        raise DataError(path, "exists already", remedy)


def _task_name(path: Path) -> str:
    """The run as it shows in task names; another life of the same run has another."""
    return f"{path.name}-{os.getpid():x}{time.time_ns() & 0xFFFFF:05x}"


@contextmanager
def _recorded(
    prepared: Prepared, resume: Path | None, progress: Progress
) -> Iterator[tuple[Recorder, Checkpoint | None]]:
    """The run directory, new or resumed, with the checkpoint to go on from."""
    job = prepared.job
    if resume is None:
        directory = RunDirectory.create(job.run.dir, job.run.name, strategy=job.train.strategy, now=datetime.now(UTC))
        directory.write_job(job.model_dump(mode="json"))
        if (index := prepared.dataset.index) is not None:
            write_index(directory.path / INDEX, index)
    else:
        directory = RunDirectory.open(resume, writable=True)
    with directory, progress:
        recorder = Recorder(directory, progress, prepared)
        checkpoint = None
        if resume is not None and (
            checkpoint := latest(directory.checkpoints, warn=recorder.warn, check=check_of(job))
        ):
            recorder.seconds_before, recorder.checkpoint = float(checkpoint.state["seconds"]), checkpoint.path
        if checkpoint:
            _check_same_data(checkpoint, prepared)
        if resume is not None and epochs_of(directory) != job.train.epochs:
            directory.lengthen(job.model_dump(mode="json"))
        directory.write_environment(sys.argv)
        recorder.emit(_start_event(recorder))
        if checkpoint:
            recorder.emit(RunResumed(path=str(checkpoint.path), step=checkpoint.step))
        try:
            yield recorder, checkpoint
        finally:
            recorder.directory.close()  # another one, where the run had to be kept elsewhere


def _start_event(recorder: Recorder) -> RunStarted:
    prepared, job = recorder.prepared, recorder.prepared.job
    return RunStarted(
        run=str(recorder.directory.path),
        strategy=job.train.strategy,
        partition=job.train.partition,
        increments=job.train.increments,
        replica_size=job.train.replica_size,
        rule=job.model_dump(include={"rule"})["rule"],
        dataset=prepared.dataset.name,
        model=job.model.name or f"{len(job.model.layers or ())} layers",
        epochs=job.train.epochs,
        batch_size=job.train.batch_size,
        optimizer=job.train.optimizer.name,
        lr=job.train.lr,
        seed=job.train.seed,
        samples=prepared.samples,
        validation_samples=job.data.validation,
        parameters=prepared.layout.parameter_size,
        wire=job.cluster.wire,
        vector_bytes=prepared.layout.size * np.dtype(job.cluster.wire).itemsize,
    )


def _check_same_data(checkpoint: Checkpoint, prepared: Prepared) -> None:
    found, dataset = facts_of(checkpoint), prepared.dataset
    if (found.classes, found.shape) != (dataset.classes, dataset.shape):
        raise DataError(dataset.path, f"other classes or shapes than {checkpoint.path} was trained on", "give its data")
    of_both = ((getattr(found, name), getattr(dataset, name)) for name in ("mean", "deviation"))
    if not all(np.allclose(*pair, rtol=_ALIKE) for pair in of_both):
        reason = f"images with another mean or deviation than {checkpoint.path} was trained on"
        raise DataError(dataset.path, reason, "give its data")
    record, remedy = parse_record(checkpoint.state, checkpoint.path), "take another checkpoint of the run"
    allocation = record.allocation
    if allocation is not None and allocation.total != prepared.samples:
        reason = f"{prepared.samples:,} samples to train on, {checkpoint.path} was trained on {allocation.total:,}"
        raise DataError(dataset.path, reason, "give its data")
    if prepared.job.train.strategy == LAYER:
        if REPLICA not in replicas_of(checkpoint):
            raise DataError(checkpoint.path, "no optimizer's state of a layer-sharded run", remedy)
    elif allocation is None and checkpoint.state["book"]:
        raise DataError(checkpoint.path, "its state does not say who has which samples", remedy)


def _train(
    context: RunContext,
    recorder: Recorder,
    checkpoint: Checkpoint | None,
    listener: Listener,
    heard: Heard | None = None,
) -> Result:
    job = context.job
    shell: Shell | None = None
    try:
        state = to_state(checkpoint, job) if checkpoint else _started(recorder)
        if checkpoint and state is not None:
            recorder.resumed(state)
        shell = Shell(context, driver_of(job)(context, state), heard)
        status, final = _trained(shell, listener)
        seconds = recorder.seconds
        test = context.scoring.score(final.weights, "test", 0, len(context.dataset.test))
    except Exception as error:
        status = STATUS.get(type(error), "failed")
        reached = shell.state if shell else TrainingState(0, 0.0, np.zeros(0), {}, {})
        _finish(recorder, status, reached, recorder.seconds, None)
        if error is listener.error:
            error.add_note(f"raised by on_event; go on with the run by resume={str(recorder.directory.path)!r}")
        elif isinstance(error, UserError) and shell:
            raise _with_remedy(error, recorder) from error
        raise
    finally:
        with suppress(Exception):  # the run has ended: workers that cannot be told are gone, or soon will be
            context.close()
    if final is not recorder.last:
        recorder.save(final)
    summary = _finish(recorder, status, final, seconds, test, listener.reason or _stopped_early(job, status, final))
    recorder.raise_if_not_kept()
    listener.raise_error()
    history = [event.record() for event in recorder.directory.events() if isinstance(event, EpochEnded)]
    model = TrainedModel(Classifier(job, Facts.of(context.dataset), final.weights))
    return Result(recorder.directory.path, summary, history, model)


def _stopped_early(job: Job, status: str, final: TrainingState) -> str | None:
    """Why a run that is done has trained for fewer epochs than its job has."""
    if status != "done" or job.train.early_stopping is None or final.epoch >= job.train.epochs:
        return None
    looks = f"the last {job.train.early_stopping} looks" if job.train.early_stopping > 1 else "the last look"
    return f"no better on the validation samples in {looks} (train.early_stopping)"


def _started(recorder: Recorder) -> TrainingState | None:
    """The state of a run that starts from trained weights, or from some made of the images; None for a job's own.

    It is kept at once: resuming the run neither reads nor makes them again.
    """
    prepared = recorder.prepared
    if (weights := first_weights(prepared.job, prepared.dataset, prepared.start)) is None:
        return None
    layout = prepared.layout
    optimizers = {REPLICA: at_rest(prepared.job, layout, weights)} if prepared.job.train.strategy == LAYER else {}
    state = TrainingState(0, 0.0, weights, optimizers, {})
    recorder.save(state)
    return state


def _trained(shell: Shell, listener: Listener) -> tuple[str, TrainingState]:
    """Train; return the status and the last state.

    An error of training is raised, and so is an error of the user's function.
    """
    try:
        return "done", shell.train()
    except Interrupted as error:
        if not listener.ended(error):
            raise
    listener.raise_error()
    return "stopped", shell.state


def driver_of(job: Job) -> type[DataParallel] | type[LayerSharded]:
    """Return the strategy that a shell drives for this job."""
    return LayerSharded if job.train.strategy == LAYER else DataParallel


def _summary(
    recorder: Recorder, status: str, state: TrainingState, seconds: float, test: Score | None, reason: str | None
) -> dict[str, Any]:
    workers = worker_totals(recorder.directory.events())
    prepared = recorder.prepared
    return Summary(
        run=str(recorder.directory.path),
        status=status,
        strategy=prepared.job.train.strategy,
        epochs=state.epoch,
        seconds=seconds,
        images_per_second=round(state.epoch * prepared.samples) / seconds if seconds > 0 else None,
        test=_result(test),
        validation=_result(state.validation),
        bytes=Traffic(up=sum(w.bytes_up for w in workers), down=sum(w.bytes_down for w in workers)),
        workers=[WorkerSummary.model_validate(w) for w in workers],
        checkpoint=None if recorder.checkpoint is None else str(recorder.checkpoint),
        reason=reason,
    ).model_dump()


def _result(score: Score | None) -> Evaluated | None:
    return None if score is None else Evaluated.model_validate(score.judged)


def _finish(
    recorder: Recorder,
    status: str,
    state: TrainingState,
    seconds: float,
    test: Score | None,
    reason: str | None = None,
) -> dict[str, Any]:
    """Keep how the run ended; returns the summary."""
    return recorder.finish(
        lambda: _summary(recorder, status, state, seconds, test, reason),
        lambda summary: RunEnded(**{key: summary[key] for key in ("status", "seconds", "test", "reason")}),
    )


def _with_remedy(error: UserError, recorder: Recorder) -> UserError:
    """The same error with the last good checkpoint and how to go on."""
    run, checkpoint = recorder.directory.path, recorder.checkpoint
    kept = f"last good checkpoint: {checkpoint}" if checkpoint else "no checkpoint was written yet"
    message = f"{error}\n{kept}"
    if recorder.not_kept:
        message += f"\nthe run could not be kept where it was asked to be ({recorder.not_kept})"
    if not isinstance(error, Diverged):
        message += f"\ngo on with: python -m daskcnn.run --resume {run}"
    found = Interrupted(message, error.signum) if isinstance(error, Interrupted) else type(error)(message)
    found.value, found.reason, found.remedy = error.value, error.reason, error.remedy
    return found


def display(json_mode: bool, quiet: bool = False) -> Progress:
    """The display for this process's terminal."""
    return choose(sys.stdout, json_mode, quiet)
