"""Events as plain lines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from daskcnn import events
from daskcnn.errors import told
from daskcnn.show.text import clean, count, duration, number, percent, plural, size


def describe(event: events.Event) -> list[str]:
    """The event in a line or a few, ASCII but for names and messages; none for those that come too often."""
    describer = _DESCRIBERS.get(type(event))
    return [clean(line) for line in describer(event)] if describer else []


def stamped(event: events.Event, at: datetime) -> list[str]:
    """The event's lines, each behind the time."""
    return [f"{at:%Y-%m-%d %H:%M:%S}  {line}" for line in describe(event)]


def _started(e: events.RunStarted) -> list[str]:
    epochs = "-" if e.epochs is None else f"{e.epochs:g}"
    lines = [
        f"run {e.run}: {e.strategy}, {plural(epochs, 'epoch')} of {count(e.samples)} samples, "
        f"{count(e.validation_samples)} for validation, {count(e.parameters)} parameters"
    ]
    if e.optimizer is not None and e.lr is not None:
        lines.append(f"training by {e.optimizer}, learning rate {e.lr:g}, minibatches of {count(e.batch_size)}")
    return lines


def _calibrating(e: events.Calibrating) -> list[str]:
    parts = f" ({e.done} of {e.of} done)" if e.of else ""
    return [f"worker {e.worker}: calibrating, {e.doing}{parts}"]


def _calibrated(e: events.WorkersCalibrated) -> list[str]:
    return [
        f"worker {w.name}: {w.device}, {plural(count(w.threads), 'thread')}, "
        f"{size(w.memory)}, {count(w.images_per_second)} images/s, {w.host} ({w.address})"
        for w in e.workers
    ]


def _groups(e: events.GroupsFormed) -> list[str]:
    return [
        f"group {g.name}: {', '.join(g.members)} (home {g.home}), {count(g.images_per_second)} images/s together"
        for g in e.groups
    ]


def _epoch(e: events.EpochEnded) -> list[str]:
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


def _steps(e: events.StepsEnded) -> list[str]:
    pace = f"{number(e.seconds_per_step)} s/step"
    return [f"epoch {e.epoch:.4g}  step {count(e.step)}  loss {number(e.loss)}  {pace}"]


def _links(e: events.LinkSpeeds) -> list[str]:
    rows = [
        f"link of worker {w.name}: {size(w.bandwidth)}/s, "
        f"{1e3 * (w.latency + w.handover):.1f} ms before a step goes on there"
        for w in e.workers
    ]
    return [*rows, *([f"scheduler: {1e3 * e.task:.2g} ms a task"] if e.task else [])]


def _lost(e: events.WorkerLost) -> list[str]:
    moved = f"; {count(e.samples_moved)} samples moved to the others" if e.samples_moved else ""
    return [f"warning: worker {e.worker} lost: {e.reason}{moved}"]


def _joined(e: events.WorkerJoined) -> list[str]:
    moved = f" and takes over {count(e.samples)} samples" if e.samples else ""
    return [f"worker {e.worker} joined{moved}"]


_DESCRIBERS: dict[type[events.Event], Callable[[Any], list[str]]] = {
    events.RunStarted: _started,
    events.Calibrating: _calibrating,
    events.WorkersCalibrated: _calibrated,
    events.GroupsFormed: _groups,
    events.EpochEnded: _epoch,
    events.StepsEnded: _steps,
    events.LinkSpeeds: _links,
    events.WorkerLost: _lost,
    events.WorkerJoined: _joined,
    events.WorkerLeftOut: lambda e: [f"warning: {told(f'worker {e.worker} is left out', e.reason, e.remedy)}"],
    events.WorkerIgnored: lambda e: [f"warning: worker {e.address} joined late and is ignored"],
    events.Warned: lambda e: [f"warning: {e.text}"],
    events.CheckpointWritten: lambda e: [f"checkpoint of step {count(e.step)}: {e.path}"],
    events.RunResumed: lambda e: [f"resumed from step {count(e.step)}: {e.path}"],
    events.RunEnded: lambda e: [f"end: {e.status}" + (f", {clean(e.reason)}" if e.reason else "")],
}
