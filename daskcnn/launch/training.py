"""Training a resolved job, from its data set and its cluster to its summary."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from distributed import Client

from daskcnn.arrays import Array
from daskcnn.cluster.link.client import lend_client
from daskcnn.cluster.link.connect import await_scheduler, check_scheduler, connect
from daskcnn.cluster.link.kept_open import kept_open
from daskcnn.cluster.link.leases import holding
from daskcnn.cluster.link.scaled import check_scalable, scaled_cluster
from daskcnn.cluster.link.signals import Signals
from daskcnn.cluster.run.admission import admit
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.shell.data_parallel import DataParallel
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.cluster.shell.shell import Heard, Shell
from daskcnn.dashboard.feed import fed
from daskcnn.datasets.job_dataset import find_dataset, forget, must_be_made, outlined
from daskcnn.errors import DataError, Diverged, Interrupted, Lost, UserError
from daskcnn.events import EpochEnded, Event
from daskcnn.followers import Feeds, FollowedRun, check_tools, check_tools_there
from daskcnn.job.network import at_rest, network_of, server_bytes
from daskcnn.job.resolve import turned
from daskcnn.job.tables import LAYER, Job
from daskcnn.launch.prepared_job import checked_job, may_need_server
from daskcnn.launch.recorder import ENDED_BY_LISTENER, Listener, OnEvent, Recorder, recorded
from daskcnn.launch.resume import EarlierRun, begins
from daskcnn.markup import as_lines
from daskcnn.nn.network import summarise
from daskcnn.runs.checkpoint import Checkpoint
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import TrainingState, to_state
from daskcnn.show.renderers.run_text import format_summary
from daskcnn.show.renderers.terminal import Progress, shown, warnings_by
from daskcnn.store.array_index import INDEX, ArrayChanged
from daskcnn.store.image_facts import Facts
from daskcnn.trained.fine_tuning import first_weights
from daskcnn.trained.trained_model import TrainedModel
from daskcnn.training.coordinator.layer_records import REPLICA
from daskcnn.training.judging import JudgedPart
from daskcnn.training.trained_network import Classifier

STATUS: dict[type[BaseException], str] = {Diverged: "diverged", Interrupted: "interrupted", Lost: "lost"}


@dataclass(frozen=True)
class Result:
    """A run that has ended, with its trained network.

    Attributes
    ----------
    run : the run directory.
    summary : how the run ended, as `summary.json` has it. Its `status` is "done", or "stopped" after `Stop`.
    history : the events of every evaluation: at the end of each epoch, and of each increment of the samples before.
    model : the network with the weights that the run hands back: the last, or the best on the validation samples with
        `train.early_stopping` or `train.restore_best`. The summary's figures are theirs.
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
    resume: EarlierRun | None = None,
    progress: Progress | None = None,
    handle_signals: bool = False,
    say: Callable[[str], None] = lambda _: None,
    heard: Heard | None = None,
    on_event: OnEvent | None = None,
    kept: bool = True,
) -> Result:
    """Run a resolved job, or go on with the run in `resume`, on the client's cluster or the job's own.

    handle_signals : the process is a command's, which signals end. In Python code, where they are KeyboardInterrupt
        and SystemExit, the run is kept first, too.
    heard : is told every fact of the run's coordinator with the orders that it led to: what a replay needs.
    kept : the run directory stays: errors name it, and how to go on.
    on_event : is told every event. Where it raises, the run keeps its state and ends: with status "stopped" for `Stop`.

    Raises UserError for bad data or a bad job (nothing has started then), an unusable cluster, or a run that ended
    early: then the run directory has its summary, and the message names the last checkpoint.
    """
    signals = Signals(of_command=handle_signals, limit=job.run.time_limit)
    with ExitStack() as stack:
        stack.enter_context(signals.installed())
        if client is None:
            check_scheduler(job.cluster)
        check_scalable(job.cluster, client)
        if resume is None:
            check_place(job)
        else:
            written = RunDirectory.open(resume.directory.path, writable=True)
            resume = replace(resume, directory=stack.enter_context(written))
            written.events()  # a damaged log is told before workers are asked for
        check_tools(job)
        stack.enter_context(_forgetting_what_changed(job))
        if client is None and must_be_made(job.data):
            await_scheduler(job.cluster, signals.check, say)
        told: Any = {"progress": shown(say), "warn": warnings_by(say)}
        dataset = outlined(job, **told)
        signals.polled = True
        how: Any = {"progress": shown(say), "between": signals.check, "begins": begins(resume)}
        prepared = checked_job(job, dataset, **how)
        job = prepared.job
        if prepared.start is not None and not prepared.start.new:
            say(f"weights: {prepared.start}")
        if client is None:
            there = stack.enter_context(connect(job.cluster, signals.check, say, server=may_need_server(job)))
        else:
            there = stack.enter_context(kept_open(client))
        lend_client(there)
        settle = job.cluster.settle if client or job.cluster.scheduler or job.cluster.scheduler_file else 0.0
        scaled = stack.enter_context(scaled_cluster(there, job.cluster, own=client is None))
        fingerprint, index = prepared.dataset.fingerprint, prepared.dataset.index
        hold = stack.enter_context(holding(there, _named(job, resume)))
        if may_need_server(job):
            hold.server = server_bytes(job, prepared.dataset)
        how = {"settle": settle, "index": index, "hold": hold}
        members, warnings = admit(there, job, fingerprint, signals.check, say, **how)
        if job.data.in_place:
            beside = resume.directory.path / INDEX if resume is not None else None
            dataset = find_dataset(job, client=there, beside=beside, check=signals.check, **told)
            prepared = replace(prepared, dataset=dataset)
        check_tools_there(job, there)
        feeds = Feeds(job)
        layers = summarise(network_of(job, prepared.dataset), prepared.dataset.shape)
        display = fed(progress or Silent(), there, layers, say, wanted=job.run.dashboard)
        listener = Listener(display, on_event, feeds)
        recorder, checkpoint = stack.enter_context(recorded(prepared, resume, listener, len(members.workers)))
        stack.push(partial(_ended_early, recorder, checkpoint))
        followed = FollowedRun(job, there, lambda: recorder.directory.path)
        stack.enter_context(feeds.following(followed, recorder.emit))
        if prepared.start is not None and prepared.start.new:
            recorder.warn(f"weights: {prepared.start}")
        for warning in (*prepared.doubts, *warnings):
            recorder.warn(warning)
        hold.rename(str(recorder.directory.path.name), signals.check)
        # in the names of tasks: another life of the same run has another
        name = f"{recorder.directory.path.name}-{os.getpid():x}{time.time_ns() & 0xFFFFF:05x}"
        context = RunContext.of(
            there,
            name,
            job,
            prepared.dataset,
            members,
            emit=recorder.emit,
            save=recorder.save,
            interrupted=lambda: listener.signal if signals.first is None else signals.first,
            hold=hold,
            scaled=scaled,
        )
        context.ends = signals.ends
        return _train(context, recorder, checkpoint, listener, heard, kept=kept)


def _named(job: Job, resume: EarlierRun | None) -> str:
    """Return the run's name before it has a directory."""
    return job.run.name or job.train.strategy if resume is None else resume.directory.path.name


def _ended_early(
    recorder: Recorder, checkpoint: Checkpoint | None, _: object, error: BaseException | None, *__: object
) -> None:
    """Keep how a run ended that did not begin to train."""
    if error is not None and not recorder.finished:
        recorder.finish(_status_of(error), _reached(recorder, checkpoint), recorder.seconds, None)


def _status_of(error: BaseException) -> str:
    return STATUS.get(type(error), "failed" if isinstance(error, Exception) else "interrupted")


def _reached(recorder: Recorder, checkpoint: Checkpoint | None) -> TrainingState:
    """Return the state that a run is in which has not trained: that of its checkpoint."""
    with suppress(DataError):
        if checkpoint is not None:
            return to_state(checkpoint, recorder.prepared.job)
    return TrainingState(0, 0.0, np.zeros(0), {}, {})


@contextmanager
def _forgetting_what_changed(job: Job) -> Iterator[None]:
    """Drop the cached index of arrays that turn out not to be what it says: the next run reads them anew."""
    try:
        yield
    except ArrayChanged:
        forget(job)
        raise


def check_place(job: Job) -> None:
    """Raise DataError where a new run could not be kept, before anything starts."""
    root = Path(job.run.dir)
    there = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise DataError(there, "no folder that may be written", "set run.dir (--run-dir) to one")
    if job.run.name and (path := root / job.run.name).exists():
        remedy = "choose another run.name (--name), or go on with it: --resume RUN, resume=RUN in Python"
        raise DataError(path, "exists already", remedy)


def _train(
    context: RunContext,
    recorder: Recorder,
    checkpoint: Checkpoint | None,
    listener: Listener,
    heard: Heard | None = None,
    *,
    kept: bool = True,
) -> Result:
    job = context.job
    shell: Shell | None = None
    try:
        state = to_state(checkpoint, job) if checkpoint else _started(recorder)
        if checkpoint and state is not None:
            recorder.last = state
        shell = Shell(context, driver_of(job)(context, state), heard)
        status, final = _trained(shell, listener)
        if (turn := shell.turn) is not None:
            job = turned(job, turn.strategy, turn.size)
            context = context.turned(job)
            recorder.turn(job, len(context.workers.members.workers))
            state = None if state is None else _begun(recorder, state.weights)
            shell = Shell(context, driver_of(job)(context, state), heard)
            status, final = _trained(shell, listener)
        seconds = recorder.seconds
        if final is not recorder.last:
            recorder.save(final)
        handed = recorder.hand_back(final)
        test = context.scoring.score(handed.weights, "test", JudgedPart(0, len(context.dataset.test)))
    except BaseException as error:
        reached = shell.state if shell else _reached(recorder, checkpoint)
        why = str(error) if isinstance(error, Interrupted) else None
        recorder.finish(_status_of(error), reached, recorder.seconds, None, why)
        if not kept:
            raise
        if error is listener.error:
            error.add_note(f"raised by on_event; go on with the run by resume={str(recorder.directory.path)!r}")
        elif isinstance(error, UserError) and shell:
            raise _with_remedy(error, recorder) from error
        raise
    finally:
        with suppress(Exception):  # the run has ended: workers that cannot be told are gone, or soon will be
            context.close()
    summary = recorder.finish(status, final, seconds, test, listener.reason or _stopped_early(job, status, final))
    if kept:
        recorder.raise_if_not_kept()
    listener.raise_error()
    history = [event.record() for event in recorder.events() if isinstance(event, EpochEnded)]
    model = TrainedModel(Classifier(job, Facts.of(context.dataset), handed.weights))
    return Result(recorder.directory.path, summary, history, model)


def _stopped_early(job: Job, status: str, final: TrainingState) -> str | None:
    """Return the reason why a run that is done has fewer epochs than its job; None where it has all."""
    if status != "done" or job.train.early_stopping is None or final.epoch >= job.train.epochs:
        return None
    last = f"{job.train.early_stopping} evaluations" if job.train.early_stopping > 1 else "evaluation"
    return f"no better on the validation samples in the last {last} (train.early_stopping)"


def _started(recorder: Recorder) -> TrainingState | None:
    """Return the first state of a run with trained weights, or with some made of the images; None for initial ones.

    It is saved at once: resuming the run neither reads nor makes the weights again.
    """
    prepared = recorder.prepared
    if (weights := first_weights(prepared.job, prepared.dataset, prepared.start)) is None:
        return None
    return _begun(recorder, weights)


def _begun(recorder: Recorder, weights: Array) -> TrainingState:
    """Return the first state of a run that begins with these weights. It is saved."""
    job, layout = recorder.prepared.job, recorder.prepared.layout
    optimizers = {REPLICA: at_rest(job, layout, weights)} if job.train.strategy == LAYER else {}
    state = TrainingState(0, 0.0, weights, optimizers, {})
    recorder.save(state)
    return state


def _trained(shell: Shell, listener: Listener) -> tuple[str, TrainingState]:
    """Train, and return the status and the last state. Raises errors of training, and those of the user's function."""
    try:
        return "done", shell.train()
    except Interrupted as error:
        if error.signum != ENDED_BY_LISTENER:
            raise
    listener.raise_error()
    return "stopped", shell.state


def driver_of(job: Job) -> type[DataParallel] | type[LayerSharded]:
    """Return the strategy that a shell drives for this job."""
    return LayerSharded if job.train.strategy == LAYER else DataParallel


def _with_remedy(error: UserError, recorder: Recorder) -> UserError:
    """Return the same error with the last good checkpoint and the command to go on."""
    run, checkpoint = recorder.directory.path, recorder.checkpoint
    kept = f"last good checkpoint: {checkpoint}" if checkpoint else "no checkpoint was written yet"
    message = f"{error}\n{kept}"
    if recorder.not_kept:
        message += f"\nthe run could not be kept where it was asked to be ({recorder.not_kept})"
    if not isinstance(error, Diverged):
        message += (
            f"\ngo on with: python -m daskcnn.run --resume {run}, or in Python daskcnn.train(resume={str(run)!r})"
        )
    found = Interrupted(message, error.signum) if isinstance(error, Interrupted) else type(error)(message)
    found.value, found.reason, found.remedy = error.value, error.reason, error.remedy
    return found
