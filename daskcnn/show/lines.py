"""Events as plain lines."""

from __future__ import annotations

from datetime import datetime
from functools import singledispatch

from daskcnn import events
from daskcnn.errors import told
from daskcnn.show.text import clean, count, duration, number, percent, plural, size


def describe(event: events.Event) -> list[str]:
    """Return the event in a line or a few, ASCII but for names and messages; none for those that come too often."""
    return [clean(line) for line in _told(event)]


def stamped(event: events.Event, at: datetime) -> list[str]:
    """Return the event's lines, each behind the time."""
    return [f"{at:%Y-%m-%d %H:%M:%S}  {line}" for line in describe(event)]


@singledispatch
def _told(event: events.Event) -> list[str]:
    """The lines of an event by its class, which may hold control characters."""
    return []


@_told.register
def _(e: events.RunStarted) -> list[str]:
    epochs = "-" if e.epochs is None else f"{e.epochs:g}"
    lines = [
        f"run {e.run}: {e.strategy}, {plural(epochs, 'epoch')} of {count(e.samples)} samples, "
        f"{count(e.validation_samples)} for validation, {count(e.parameters)} parameters"
    ]
    if e.optimizer is not None and e.lr is not None:
        lines.append(f"training by {e.optimizer}, learning rate {e.lr:g}, minibatches of {count(e.batch_size)}")
    return lines


@_told.register
def _(e: events.Calibrating) -> list[str]:
    parts = f" ({e.done} of {e.of} done)" if e.of else ""
    return [f"worker {e.worker}: calibrating, {e.doing}{parts}"]


@_told.register
def _(e: events.WorkersCalibrated) -> list[str]:
    return [
        f"worker {w.name}: {w.device}, {plural(count(w.threads), 'thread')}, "
        f"{size(w.memory)}, {count(w.images_per_second)} images/s, {w.host} ({w.address})"
        for w in e.workers
    ]


@_told.register
def _(e: events.GroupsFormed) -> list[str]:
    return [
        f"group {g.name}: {', '.join(g.members)} (home {g.home}), {count(g.images_per_second)} images/s together"
        for g in e.groups
    ]


@_told.register
def _(e: events.EpochEnded) -> list[str]:
    epochs = "-" if e.epochs is None else f"{e.epochs:g}"
    parts = [
        f"epoch {e.epoch:.4g}/{epochs}",
        f"step {count(e.step)}",
        f"loss {number(e.loss)}",
        "" if e.accuracy is None and e.loss is not None else f"accuracy {percent(e.accuracy)}",
        _validation(e.validation) if e.validation else "",
        f"{count(e.samples_per_second)} images/s",
        f"lr {number(e.lr)}",
        duration(e.seconds),
    ]
    return ["  ".join(part for part in parts if part)]


def _validation(found: events.Judged) -> str:
    if found.accuracy is None and found.loss is not None:
        return f"validation loss {number(found.loss)}"
    auc = "" if found.auc is None else f", AUC {found.auc:.4f}"
    return f"validation {percent(found.accuracy)} (loss {number(found.loss)}{auc})"


@_told.register
def _(e: events.StepsEnded) -> list[str]:
    pace = f"{number(e.seconds_per_step)} s/step"
    return [f"epoch {e.epoch:.4g}  step {count(e.step)}  loss {number(e.loss)}  {pace}"]


@_told.register
def _(e: events.LinkSpeeds) -> list[str]:
    rows = [
        f"link of worker {w.name}: {size(w.bandwidth)}/s, "
        f"{1e3 * (w.latency + w.handover):.1f} ms before a step goes on there"
        for w in e.workers
    ]
    return [*rows, *([f"scheduler: {1e3 * e.task:.2g} ms a task"] if e.task else [])]


@_told.register
def _(e: events.WorkerLost) -> list[str]:
    moved = f"; {count(e.samples_moved)} samples moved to the others" if e.samples_moved else ""
    return [f"warning: worker {e.worker} lost: {e.reason}{moved}"]


@_told.register
def _(e: events.WorkerJoined) -> list[str]:
    moved = f" and takes over {count(e.samples)} samples" if e.samples else ""
    return [f"worker {e.worker} joined{moved}"]


@_told.register
def _(e: events.WorkerLeftOut) -> list[str]:
    return [f"warning: {told(f'worker {e.worker} is left out', e.reason, e.remedy)}"]


@_told.register
def _(e: events.WorkerIgnored) -> list[str]:
    return [f"warning: worker {e.address} joined late and is ignored"]


@_told.register
def _(e: events.Warned) -> list[str]:
    return [f"warning: {e.text}"]


@_told.register
def _(e: events.CheckpointWritten) -> list[str]:
    return [f"checkpoint of step {count(e.step)}: {e.path}"]


@_told.register
def _(e: events.RunResumed) -> list[str]:
    return [f"resumed from step {count(e.step)}: {e.path}"]


@_told.register
def _(e: events.RunEnded) -> list[str]:
    return [f"end: {e.status}" + (f", {clean(e.reason)}" if e.reason else "")]
