"""Events as plain lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from daskcnn.show.text import clean, count, duration, number, percent, size

Event = Mapping[str, Any]


def describe(event: Event) -> list[str]:
    """The event in a line or a few, ASCII but for names and messages; none for those that come too often."""
    describer = _DESCRIBERS.get(event["event"])
    return [clean(line) for line in describer(event)] if describer else []


def _start(e: Event) -> list[str]:
    return [
        f"run {e['run']}: {e['strategy']}, {e['epochs']:g} epochs of {count(e['samples'])} samples, "
        f"{count(e['validation_samples'])} for validation, {count(e['parameters'])} parameters"
    ]


def _calibration(e: Event) -> list[str]:
    return [
        f"worker {w['name']}: {w['device']}, {count(w['threads'])} thread{'s' * (w['threads'] != 1)}, "
        f"{size(w['memory'])}, {count(w['images_per_second'])} images/s, {w['host']} ({w['address']})"
        for w in e["workers"]
    ]


def _groups(e: Event) -> list[str]:
    return [
        f"group {g['name']}: {', '.join(g['members'])} (home {g['home']}), {count(g['images_per_second'])} images/s "
        "together"
        for g in e["groups"]
    ]


def _epoch(e: Event) -> list[str]:
    validation = e.get("validation")
    parts = [
        f"epoch {e['epoch']:.4g}/{e['epochs']:g}",
        f"step {count(e['step'])}",
        f"loss {number(e['loss'])}",
        f"accuracy {percent(e['accuracy'])}",
        f"validation {percent(validation['accuracy'])} (loss {number(validation['loss'])})" if validation else "",
        f"{count(e['samples_per_second'])} images/s",
        f"lr {number(e['lr'])}",
        duration(e["seconds"]),
    ]
    return ["  ".join(part for part in parts if part)]


def _steps(e: Event) -> list[str]:
    pace = f"{number(e['seconds_per_step'])} s/step"
    return [f"epoch {e['epoch']:.4g}  step {count(e['step'])}  loss {number(e['loss'])}  {pace}"]


def _links(e: Event) -> list[str]:
    rows = [
        f"link of worker {w['name']}: {size(w['bandwidth'])}/s, {1e3 * (w['latency'] + w.get('handover', 0.0)):.1f} ms "
        "before a step goes on there"
        for w in e["workers"]
    ]
    return [*rows, *([f"scheduler: {1e3 * e['task']:.2g} ms a task"] if "task" in e else [])]


def _worker_lost(e: Event) -> list[str]:
    moved = f"; {count(e['samples_moved'])} samples moved to the others" if e["samples_moved"] else ""
    return [f"warning: worker {e['worker']} lost: {e['reason']}{moved}"]


_DESCRIBERS: dict[str, Callable[[Event], list[str]]] = {
    "start": _start,
    "calibration": _calibration,
    "groups": _groups,
    "epoch": _epoch,
    "steps": _steps,
    "links": _links,
    "worker-lost": _worker_lost,
    "worker-ignored": lambda e: [f"warning: worker {e['address']} joined late and is ignored"],
    "warning": lambda e: [f"warning: {e['message']}"],
    "checkpoint": lambda e: [f"checkpoint of step {count(e['step'])}: {e['path']}"],
    "resume": lambda e: [f"resumed from step {count(e['step'])}: {e['path']}"],
    "end": lambda e: [f"end: {e['status']}"],
}
