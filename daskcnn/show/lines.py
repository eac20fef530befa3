"""Events as plain lines."""

from __future__ import annotations

from datetime import datetime

from daskcnn import events
from daskcnn.errors import told
from daskcnn.show.strategy_table import choice_lines
from daskcnn.show.text import WITHIN_ERROR, clean, count, duration, measured, noise_text, number, percent, plural, size

WARNINGS = (events.Warned, events.WorkerLost, events.WorkerIgnored, events.WorkerLeftOut, events.RunPaused)
"""Events that are shown where nothing but warnings is."""


def describe(event: events.Event) -> list[str]:
    """Return the event in a line or a few, ASCII but for names and messages; none for those that come too often."""
    return [clean(line) for line in _told(event)]


def stamped(event: events.Event, at: datetime | float) -> list[str]:
    """Return the event's lines, each behind the time: seconds are those of a simulation."""
    stamp = f"{at:%Y-%m-%d %H:%M:%S}" if isinstance(at, datetime) else f"{at:10.2f} s"
    return [f"{stamp}  {line}" for line in describe(event)]


def _told(e: events.Event) -> list[str]:
    """The lines of an event, which may hold control characters."""
    match e:
        case events.RunStarted():
            return _start(e)
        case events.WorkersCalibrated():
            return [
                f"worker {w.name}: {w.device}, {plural(count(w.threads), 'thread')}, "
                f"{size(w.memory)}, {count(w.images_per_second)} images/s, {w.host} ({w.address})"
                for w in e.workers
            ]
        case events.GroupsFormed():
            return [
                f"group {g.name}: {', '.join(g.members)} (home {g.home}), "
                f"{count(g.images_per_second)} images/s together"
                for g in e.groups
            ]
        case events.EpochEnded():
            return [_epoch(e)]
        case events.StepResized():
            noise = "" if e.noise_scale is None else f"noise scale {noise_text(e.noise_scale, e.noise_error)}, "
            why = f"{noise}{1e3 * e.fixed:.2g} ms of a step at any size"
            rate = f"learning rate x {e.rate:.4g} of the schedule's"
            return [f"{count(e.samples)} samples a step from here on, {count(e.before)} before: {why}; {rate}"]
        case events.StepsEnded():
            pace = f"{number(e.seconds_per_step)} s/step"
            return [f"epoch {e.epoch:.4g}  step {count(e.step)}  loss {number(e.loss)}  {pace}"]
        case events.StrategyChosen():
            return choice_lines(e)
        case events.SamplesAllocated():
            parts = ", ".join(f"{name} {count(samples)}" for name, samples in e.step.items())
            return [f"samples of a step: {parts}"] if len(e.step) > 1 and not e.alike else []
        case events.LinkSpeeds():
            rows = [
                f"link of worker {w.name}: {size(w.bandwidth)}/s, "
                f"{1e3 * (w.latency + w.handover):.1f} ms before a step goes on there"
                for w in e.workers
            ]
            return [*rows, *([f"scheduler: {1e3 * e.task:.2g} ms a task"] if e.task else [])]
    return [line] if (line := _line(e)) else []


def _start(e: events.RunStarted) -> list[str]:
    epochs = "-" if e.epochs is None else f"{e.epochs:g}"
    lines = [
        f"run {e.run}: {e.strategy}, {plural(epochs, 'epoch')} of {count(e.samples)} samples, "
        f"{count(e.validation_samples)} for validation, {count(e.parameters)} parameters"
    ]
    if e.optimizer is not None and e.lr is not None:
        lines.append(f"training by {e.optimizer}, {step_text(e)}")
    return lines


def step_text(e: events.RunStarted) -> str:
    """Return the learning rate and the minibatches that a run begins with, and if these may grow."""
    if e.largest_batch is None:
        return _first_step(e)
    most = "what the workers' memory has room for" if e.largest_batch == 0 else plural(count(e.largest_batch), "sample")
    return f"{_first_step(e)}, which may grow with the gradient noise scale to {most}"


def _first_step(e: events.RunStarted) -> str:
    if e.replicas is None or e.scaled_lr is None:
        of_all = e.step_samples == e.batch_size is not None
        step = f"{plural(count(e.batch_size), 'sample')} a step" if of_all else f"minibatches of {count(e.batch_size)}"
        return f"learning rate {e.lr:g}, {step}"
    if e.step_samples is not None and e.step_samples == e.batch_size:
        sharing = plural(e.replicas, "group" if (e.replica_size or 1) > 1 else "worker")
        shared = f", shared by {sharing} by speed" if e.replicas > 1 else ""
        return f"learning rate {e.scaled_lr:g}, {plural(count(e.step_samples), 'sample')} a step{shared}"
    scaled = "" if e.scaled_lr == e.lr else f" ({e.lr:g} for one replica)"
    together = "" if e.step_samples is None else f": {plural(count(e.step_samples), 'sample')} a step"
    on = plural(e.replicas, "replica")
    return f"learning rate {e.scaled_lr:.4g}{scaled}, minibatches of {count(e.batch_size)} on {on}{together}"


def _epoch(e: events.EpochEnded) -> str:
    parts = [
        f"epoch {e.epoch:.4g}/{'-' if e.epochs is None else f'{e.epochs:g}'}",
        f"{'step' if e.workers else 'merges'} {count(e.step)}",  # of sharded layers, or of a server
        f"loss {number(e.loss)}",
        "" if e.accuracy is None and e.loss is not None else f"accuracy {percent(e.accuracy)}",
        _validation(e.validation) if e.validation else "",
        f"{count(e.samples_per_second)} images/s",
        f"lr {number(e.lr)}",
        "" if e.step_samples is None else f"{plural(count(e.step_samples), 'sample')} a step",
        "" if e.noise_scale is None else f"noise scale {noise_text(e.noise_scale, e.noise_error)}",
        f"noise scale {WITHIN_ERROR}" if e.noise_within_error else "",
        duration(e.seconds),
    ]
    return "  ".join(filter(None, parts))


def _validation(found: events.Judged) -> str:
    if found.accuracy is None and found.loss is not None:
        return f"validation loss {number(found.loss)}"
    more = ", ".join([*([] if found.auc is None else [f"AUC {found.auc:.4f}"]), *measured(found.metrics)])
    return f"validation {percent(found.accuracy, found.error)} (loss {number(found.loss)}{more and f', {more}'})"


def _gone(e: events.WorkerLost | events.WorkerLeft) -> str:
    """The line of a worker that is gone, in good order or not."""
    moved = f"; {count(e.samples_moved)} samples moved to the others" if e.samples_moved else ""
    if isinstance(e, events.WorkerLost):
        return f"warning: worker {e.worker} lost: {e.reason}{moved}"
    done = f"; {count(e.samples_done)} samples of its last round count" if e.samples_done else ""
    return f"worker {e.worker} left: {e.reason}{done}{moved}"


def _line(e: events.Event) -> str | None:
    """The line of an event that has one."""
    match e:
        case events.Calibrating():
            return f"worker {e.worker}: calibrating, {e.doing}" + (f" ({e.done} of {e.of} done)" if e.of else "")
        case events.Warned():
            return f"warning: {e.text}"
        case events.CheckpointWritten():
            return f"checkpoint of step {count(e.step)}: {e.path}"
        case events.ClockSet():
            way = "forward" if e.seconds > 0 else "back"
            return f"the driver's clock was set {way} by {duration(abs(e.seconds))}, or its computer slept"
        case events.RunResumed():
            epoch = "" if e.epoch is None else f", epoch {e.epoch:.4g}"
            return f"resumed from step {count(e.step)}{epoch}: {e.path}"
        case events.RunEnded():
            return f"end: {e.status}" + (f", {clean(e.reason)}" if e.reason else "")
    return _line_of_presence(e)


def _line_of_presence(e: events.Event) -> str | None:
    """The line of an event that is about who is there."""
    match e:
        case events.WorkerLost() | events.WorkerLeft():
            return _gone(e)
        case events.WorkerJoined():
            return f"worker {e.worker} joined" + (f" and takes over {count(e.samples)} samples" if e.samples else "")
        case events.WorkerLeftOut():
            return f"warning: {told(f'worker {e.worker} is left out', e.reason, e.remedy)}"
        case events.WorkerIgnored():
            return f"warning: {told(f'worker {e.address} joined late and is ignored', e.reason, e.remedy)}"
        case events.WorkersAsked():
            gain = f"another one shortens what is left by {percent(e.gain)}"
            return f"{e.wanted} workers are asked for, {e.workers} are there: {gain}"
        case events.RunPaused():
            more = " and ".join(f"{n} more {kind}" for kind, n in e.missing.items())
            return f"warning: paused with {plural(e.workers, 'worker')}: waiting {e.wait:g} s at most for {more}"
        case events.RunContinued():
            return f"continued with {plural(e.workers, 'worker')} after {duration(e.seconds)}"
    return None
