"""A report's sections for people: lines and tables, which text and pages show alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from daskcnn.events import Judged, RunStarted
from daskcnn.show import text as texts
from daskcnn.show.alone import LAYER
from daskcnn.show.changes import WorkerChange
from daskcnn.show.history import EvaluationRow, Note, RoundRow, without_kernels
from daskcnn.show.report_tables import WEIGHT, BytesMoved, Counted, RoundBalance, RunReport, WorkerRow
from daskcnn.show.strategy_table import choice_table
from daskcnn.show.text import Column, Section, clean, count, duration, number, percent, plural, size, text_table

Lines = tuple[tuple[str, str], ...]  # labels, and what stands beside them


def sections(
    report: RunReport, *, most: int | None = None, rounds: bool = True, troubles: int | None = None
) -> tuple[Section, ...]:
    """Return the sections of a run that are not empty. rounds: with a table of every worker's rounds.

    most: rows of a table of workers, rounds or evaluations; troubles: rows of theirs. None for all.
    """
    lives = [_measured("life", "life", count)] if any(row.life > 1 for row in report.rounds) else []
    columns = [*_ROUNDS[:1], *lives, *_ROUNDS[1:]]
    made = text_table(_of_each(report.rounds, most), columns, worker=lambda row: row.worker)
    if len(made.rows) < len(report.rounds):
        made = replace(made, note=f"({len(made.rows)} of {count(len(report.rounds))}; --rounds shows all)")

    def one(row: WorkerRow) -> str | None:
        return None if row is report.total else row.name

    workers = [*report.workers, *([report.total] if len(report.workers) > 1 else [])] if report.rounds else []
    pushing = workers if report.total.pushes else []
    all_rounds = [report.balance] if len(report.increments) > 1 and report.balance else []
    balance = text_table([*report.increments, *all_rounds], _BALANCE, left=2)
    losses = all(look.accuracy is None and look.validation_accuracy is None for look in report.looks)
    looks = text_table(report.looks, [*_looks(report.start), *_metrics(report)], left=0, most=most)
    chosen = choice_table(report.choice) if report.choice else None
    notes = text_table(report.notes, _NOTES, left=2, most=troubles)
    found = (
        Section("run", "", facts=_heading(report)),
        Section("choice", "choice of strategy and workers", table=chosen),
        Section("workers", "workers", table=text_table(workers, _WORKERS, most=most, worker=one)),
        Section("pushes", "pushes", table=text_table(pushing, _PUSHES, most=most, worker=one)),
        Section("balance", "balance", table=balance),
        Section(
            "costs", "", facts=(*_waiting(report), *_traffic(report.traffic), *_server(report.server), *_noise(report))
        ),
        Section("sharding", "sharding", table=_sharding(report)),
        Section("accuracy", "loss" if losses else "accuracy", table=looks),
        *([Section("rounds", "rounds", table=made)] if rounds else []),
        Section("changes", "workers that came and went", table=text_table(report.changes, _CHANGES, most=most)),
        Section("troubles", "troubles", table=replace(notes, headed=False)),
    )
    return tuple(part for part in found if part.facts or (part.table and part.table.rows))


def _of_each(rounds: Sequence[RoundRow], most: int | None) -> list[RoundRow]:
    """At most `most` rounds, about as many of every worker, in the order of the log."""
    if most is None or len(rounds) <= most:
        return list(rounds)
    of: dict[str, list[int]] = {}
    for i, row in enumerate(rounds):
        of.setdefault(row.worker, []).append(i)
    kept = sorted(i for own in of.values() for i in texts.spread(own, max(1, most // len(of))))
    return [rounds[i] for i in texts.spread(kept, most)]


def _labelled(*lines: tuple[str, str]) -> Lines:
    return tuple((label, value) for label, value in lines if value)


# --- the head ---


def _heading(report: RunReport) -> Lines:
    start = report.start
    done = f"{report.epoch:.4g}"
    epochs = plural(done, "epoch") if start.epochs is None else f"{done} of {plural(f'{start.epochs:g}', 'epoch')}"
    rate = f", {count(report.images_per_second)} images/s" if report.images_per_second else ""
    return _labelled(
        ("run", clean(start.run)),
        ("status", clean(status_of(start, report.status))),
        ("training", f"{strategy_of(start)}, {epochs} in {duration(report.seconds)}{rate}"),
        ("rule", rule_of(start)),
        ("network", _network(start)),
        ("no kernels", texts.no_kernels(without_kernels(report.kernels))),
        ("test", _judged(report.test) if report.test else ""),
        ("brought", texts.brought(**asdict(report.alone)) if report.alone else ""),
        ("", "" if report.rounds else "no round has ended yet: there is nothing to compare"),
    )


def _judged(test: Judged) -> str:
    return texts.judged(test.accuracy, test.loss, test.auc, test.metrics)


def status_of(start: RunStarted, status: str) -> str:
    """Return the status of a run, and if it is a simulation."""
    return f"{status}, a simulation" if start.simulated else status


def strategy_of(start: RunStarted) -> str:
    """Return strategy and partition: 'agwu + idpa'."""
    return clean(" + ".join(part for part in (start.strategy, start.partition) if part) or "-")


def rule_of(start: RunStarted) -> str:
    """Return the rule's parameters that the job gave: 'alpha=0.5, tau=1'."""
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in start.rule.items()}
    return clean(", ".join(f"{key}={value}" for key, value in plain.items()))


def _network(start: RunStarted) -> str:
    if start.parameters is None:
        return ""
    of = f"{clean(start.model)}, " if start.model else ""
    data = f"{clean(start.dataset)}, " if start.dataset else ""
    return f"{of}{count(start.parameters)} parameters, on {data}{count(start.samples)} samples"


# --- tables ---


def _field(heading: str, name: str, text: Callable[[Any], str]) -> Column[Any]:
    """A column of a field of the same name."""
    return heading, lambda row: getattr(row, name), text


def _measured(heading: str, name: str, text: Callable[[Any], str]) -> Column[RoundRow]:
    """A column of a round."""
    return heading, lambda row: row.value(name), text


def _metrics(report: RunReport) -> list[Column[EvaluationRow]]:
    """A column of each of the job's own metrics."""

    def of(name: str) -> Callable[[EvaluationRow], float | None]:
        return lambda look: look.metrics.get(name)

    names = dict.fromkeys(name for look in report.looks for name in look.metrics)
    return [(clean(name), of(name), number) for name in names]


def _name(row: WorkerRow) -> str:
    return f"{clean(row.name)}{' (lost)' if row.lost else ' (left)' if row.left else ''}"


_WORKERS: list[Column[WorkerRow]] = [
    ("worker", _name, str),
    ("device", lambda row: row.device or None, clean),
    _field("samples", "samples", count),
    _field("rounds", "rounds", count),
    _field("compute", "compute", duration),
    _field("load", "load", duration),
    _field("communication", "communication", duration),
    _field("wait", "wait", duration),
    _field("evaluation", "evaluation", duration),
    _field("images/s", "images_per_second", count),
    _field("up", "bytes_up", size),
    _field("down", "bytes_down", size),
]
_PUSHES: list[Column[WorkerRow]] = [
    ("worker", _name, str),
    _field("pushes", "pushes", count),
    _field("mean staleness", "staleness_mean", number),
    _field("max staleness", "staleness_max", count),
    _field("mean gamma", "gamma", number),
    _field("last Q", "q", number),
]
_BALANCE: list[Column[RoundBalance]] = [
    ("increment", lambda row: "all" if row.increment is None else str(row.increment), str),
    ("rounds", lambda row: str(row.first) if row.first == row.last else f"{row.first}-{row.last}", str),
    _field("workers", "workers", count),
    _field("samples", "samples", count),
    _field("mean busy", "mean_busy", duration),
    _field("max busy", "max_busy", duration),
    _field("balance", "balance", "{:.3f}".format),
    _field("wait by Eq. 8", "wait", duration),
    _field("waited", "waited", duration),
]
_LOOKS: list[Column[EvaluationRow]] = [
    _field("training loss", "loss", number),
    _field("training accuracy", "accuracy", percent),
    _field("validation loss", "validation_loss", number),
    _field("validation accuracy", "validation_accuracy", percent),
    _field("standard error", "validation_error", percent),
    _field("AUC", "auc", "{:.3f}".format),
    _field("samples of a step", "step_samples", count),
    _field("noise scale", "noise_scale", count),
]
_CHANGES: list[Column[WorkerChange]] = [
    _field("worker", "worker", clean),
    _field("change", "change", str),
    _field("time", "at", duration),
    _field("samples moved", "samples", count),
    _field("time lost", "lost", duration),
]
_NOTES: list[Column[Note]] = [_field("time", "at", duration), _field("trouble", "text", str)]
_ROUNDS: list[Column[RoundRow]] = [
    _measured("worker", "worker", clean),
    _measured("round", "number", count),
    _measured("time", "at", duration),
    _measured("samples", "samples", count),
    _measured("busy", "busy", duration),
    _measured("load", "load", duration),
    _measured("comm.", "communication", duration),
    _measured("wait", "wait", duration),
    _measured("eval.", "evaluation", duration),
    _measured("pushes", "pushes", count),
    _measured("base", "base_version", count),
    _measured("version", "version", count),
    _measured("stale", "staleness", count),
    _measured("gamma", "gamma", number),
    _measured("Q", "q", number),
    _measured("accuracy", "accuracy", percent),
    _measured("loss", "loss", number),
]


def _looks(start: RunStarted) -> list[Column[EvaluationRow]]:
    """The columns of evaluations. Replicas are counted by their merges: one that is alone has one a round."""
    steps = "step" if start.strategy == LAYER else "merges"
    when = [_field("epoch", "epoch", "{:.4g}".format), _field("time", "at", duration), _field(steps, "step", count)]
    return [*when, *_LOOKS]


# --- what is one line ---


def _waiting(report: RunReport) -> Lines:
    waited = ""
    if report.balance is not None:
        too = ", communication included" if report.total.communication is None else ""
        waited = f"{duration(report.balance.wait)} by Eq. 8, {duration(report.total.wait)} measured{too}"
    spent = {name: getattr(report.total, name) for name in ("busy", "evaluation", "wait", "communication")}
    return _labelled(("waiting", waited), ("time", texts.time_shares(report.total.present, **spent)))


def _traffic(traffic: BytesMoved) -> Lines:
    if not traffic.up + traffic.down:
        return ()
    pace = f" in {duration(traffic.seconds)}" if traffic.seconds else ""
    foreseen = f"; by Eq. 11: {size(traffic.foreseen)}" if traffic.foreseen else ""
    if traffic.foreseen and traffic.share is not None:
        vector = f"2 x {size(traffic.vector_bytes)} x {count(traffic.pushes)} pushes"
        foreseen += f" ({vector}), measured {traffic.share:.3f} of it"
    a_step = f", {size(traffic.a_step)} a step" if traffic.a_step else ""
    if a_step and traffic.eq2:
        a_step += f"; by Eq. 2: {count(traffic.eq2)} numbers, {size(WEIGHT * traffic.eq2)}"
    return (("traffic", f"{size(traffic.up)} up, {size(traffic.down)} down{pace}{foreseen}{a_step}"),)


def _server(counted: Counted | None) -> Lines:
    if counted is None:
        return ()
    reasons = ", ".join(f"{reason} {count(n)}" for reason, n in sorted(counted.refused.items()))
    refused = f"{count(sum(counted.refused.values()))} events refused ({reasons})" if reasons else "none refused"
    return (("server", f"{count(counted.merged)} pushes merged, {count(counted.repeated)} repeated, {refused}"),)


def _noise(report: RunReport) -> Lines:
    """The gradient noise scale that was known last, and what a step gains by it (McCandlish et al., section 2.2)."""
    last = next((look for look in reversed(report.looks) if look.noise_scale is not None), None)
    hidden = bool(report.looks) and report.looks[-1].noise_within_error
    if last is None or last.noise_scale is None:
        return (("noise", f"gradient noise scale {texts.WITHIN_ERROR}"),) if hidden else ()
    scale, gain = texts.noise_text(last.noise_scale, last.noise_error), ""
    if step := last.step_samples or report.start.step_samples:
        share = percent(step / (step + last.noise_scale))
        gain = f"; steps of {count(step)} gain up to {share} of what steps without noise would"
    since = f"; from epoch {last.epoch:.4g} on {texts.WITHIN_ERROR}" if hidden else ""
    return (("noise", f"gradient noise scale {scale} samples{gain}{since}"),)


def _sharding(report: RunReport) -> texts.TextTable:
    """Kernels of each layer by worker, the seconds that they took, and the parts of each worker's step."""

    def of(values: Any, layer: str) -> Callable[[str], Any]:
        return lambda worker: values.get(worker, {}).get(layer)

    def of_step(part: str) -> Callable[[str], Any]:
        return lambda worker: getattr(report.breakdown.get(worker), part, None)

    layers = list(dict.fromkeys(layer for kernels in report.kernels.values() for layer in kernels))
    columns: list[Column[str]] = [("worker", clean, str)]
    for layer in layers:
        samples = [own[layer].endswith("%") for own in report.shards.values() if layer in own]
        what = "samples" if all(samples) else "shard" if any(samples) else "kernels"
        columns.append((f"{clean(layer)} {what}", of(report.shards, layer), str))
    columns += [(f"{clean(layer)} time", of(report.conv_seconds, layer), duration) for layer in layers]
    columns += [(f"{x} a step", of_step(x), lambda s: f"{1e3 * s:,.0f} ms") for x in ("comm", "conv", "comp")]
    return text_table(list(report.kernels), columns, worker=str)
