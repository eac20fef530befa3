"""A report's parts for people: which figures stand together, and how each is written. Text and pages show the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from daskcnn.events import Judged, RunStarted
from daskcnn.show.history import EvaluationRow, Note, RoundRow
from daskcnn.show.report_tables import WEIGHT, BytesMoved, Counted, RoundBalance, RunReport, WorkerRow
from daskcnn.show.text import (
    Column,
    Section,
    TextTable,
    clean,
    count,
    duration,
    judged,
    number,
    percent,
    plural,
    size,
    spread,
    text_table,
    time_shares,
)

Lines = tuple[tuple[str, str], ...]
"""Labels, and what stands beside them."""


def sections(
    report: RunReport, *, most: int | None = None, rounds: bool = True, troubles: int | None = None
) -> tuple[Section, ...]:
    """All parts of a run that have something in them.

    most: rows of a table of workers, rounds or looks; troubles: those of their table. None: all. rounds: with a table
    of every worker's.
    """
    made = text_table(_of_each(report.rounds, most), _round_columns(report), worker=lambda row: row.worker)
    if len(made.rows) < len(report.rounds):
        made = replace(made, note=f"({len(made.rows)} of {count(len(report.rounds))}; --rounds shows all)")

    def one(row: WorkerRow) -> str | None:
        return None if row is report.total else row.name

    found = (
        Section("run", "", facts=_heading(report)),
        Section("workers", "workers", table=text_table(_all_workers(report), _WORKERS, most=most, worker=one)),
        Section("pushes", "pushes", table=text_table(_pushing(report), _PUSHES, most=most, worker=one)),
        Section("balance", "balance", table=_balance_table(report)),
        Section("costs", "", facts=(*_waiting(report), *_traffic(report.traffic), *_server(report.server))),
        Section("sharding", "sharding", table=_sharding(report)),
        Section("accuracy", _title_of_looks(report), table=text_table(report.looks, _LOOKS, left=0, most=most)),
        *([Section("rounds", "rounds", table=made)] if rounds else []),
        Section("troubles", "troubles", table=_notes(report.notes, troubles)),
    )
    return tuple(part for part in found if part.facts or (part.table and part.table.rows))


def _title_of_looks(report: RunReport) -> str:
    has_loss_alone = all(look.accuracy is None and look.validation_accuracy is None for look in report.looks)
    return "loss" if has_loss_alone else "accuracy"


def _of_each(rounds: Sequence[RoundRow], most: int | None) -> list[RoundRow]:
    """At most `most`, about as many of every worker, in the order of the log."""
    if most is None or len(rounds) <= most:
        return list(rounds)
    of: dict[str, list[int]] = {}
    for i, row in enumerate(rounds):
        of.setdefault(row.worker, []).append(i)
    kept = sorted(i for own in of.values() for i in spread(own, max(1, most // len(of))))
    return [rounds[i] for i in spread(kept, most)]


def _labelled(lines: Sequence[tuple[str, str]]) -> Lines:
    return tuple((label, value) for label, value in lines if value)


# --- the head ---


def _heading(report: RunReport) -> Lines:
    start = report.start
    return _labelled(
        [
            ("run", clean(start.run)),
            ("status", clean(report.status) + (", a simulation" if start.simulated else "")),
            ("training", _training(report)),
            ("rule", rule_of(start)),
            ("network", _network(start)),
            ("test", _judged(report.test)),
            ("", "" if report.rounds else "no round has ended yet: there is nothing to compare"),
        ]
    )


def _training(report: RunReport) -> str:
    start = report.start
    done = f"{report.epoch:.4g}"
    epochs = plural(done, "epoch") if start.epochs is None else f"{done} of {plural(f'{start.epochs:g}', 'epoch')}"
    rate = f", {count(report.images_per_second)} images/s" if report.images_per_second else ""
    return f"{strategy_of(start)}, {epochs} in {duration(report.seconds)}{rate}"


def strategy_of(start: RunStarted) -> str:
    """Strategy and partition: 'agwu + idpa'."""
    return clean(" + ".join(part for part in (start.strategy, start.partition) if part) or "-")


def rule_of(start: RunStarted) -> str:
    """The rule's parameters that the job gave: 'alpha=0.5, tau=1'."""
    return clean(", ".join(f"{key}={_plain(value)}" for key, value in start.rule.items()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _network(start: RunStarted) -> str:
    if start.parameters is None:
        return ""
    of = f"{clean(start.model)}, " if start.model else ""
    data = f"{clean(start.dataset)}, " if start.dataset else ""
    return f"{of}{count(start.parameters)} parameters, on {data}{count(start.samples)} samples"


def _judged(result: Judged | None) -> str:
    return "" if result is None else judged(result.accuracy, result.loss, result.auc)


# --- tables ---


def _field(heading: str, name: str, text: Callable[[Any], str]) -> Column[Any]:
    """A column of a field of the same name."""
    return heading, lambda row: getattr(row, name), text


def _measured(heading: str, name: str, text: Callable[[Any], str]) -> Column[RoundRow]:
    """A column of a round."""
    return heading, lambda row: row.value(name), text


def _share(value: float) -> str:
    return f"{value:.3f}"


def _name(row: WorkerRow) -> str:
    return f"{clean(row.name)}{' (lost)' if row.lost else ''}"


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
    _field("balance", "balance", _share),
    _field("wait by Eq. 8", "wait", duration),
    _field("waited", "waited", duration),
]
_LOOKS: list[Column[EvaluationRow]] = [
    _field("epoch", "epoch", lambda epoch: f"{epoch:.4g}"),
    _field("time", "at", duration),
    _field("step", "step", count),
    _field("training loss", "loss", number),
    _field("accuracy", "accuracy", percent),
    _field("validation loss", "validation_loss", number),
    _field("validation accuracy", "validation_accuracy", percent),
    _field("AUC", "auc", _share),
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


def _round_columns(report: RunReport) -> list[Column[RoundRow]]:
    """With the life, where some rounds were made again in a second one."""
    again = any(row.life > 1 for row in report.rounds)
    return [*_ROUNDS[:1], *([_measured("life", "life", count)] if again else []), *_ROUNDS[1:]]


def _all_workers(report: RunReport) -> list[WorkerRow]:
    """And a last row for all together."""
    return [*report.workers, *([report.total] if len(report.workers) > 1 else [])] if report.rounds else []


def _pushing(report: RunReport) -> list[WorkerRow]:
    return _all_workers(report) if report.total.pushes else []


def _balance_table(report: RunReport) -> TextTable:
    """By increment, and of all rounds; what is under the headings is summed over the rounds."""
    several = len(report.increments) > 1 and report.balance
    return text_table([*report.increments, *([report.balance] if several and report.balance else [])], _BALANCE, left=2)


# --- what is one line ---


def _waiting(report: RunReport) -> Lines:
    if report.balance is None:
        return ()
    too = ", communication included" if report.total.communication is None else ""
    waited = f"{duration(report.balance.wait)} by Eq. 8, {duration(report.total.wait)} measured{too}"
    return _labelled([("waiting", waited), ("time", _time(report))])


def _time(report: RunReport) -> str:
    return time_shares(
        report.seconds * len(report.workers),
        busy=report.total.busy,
        evaluation=report.total.evaluation,
        wait=report.total.wait,
        communication=report.total.communication,
    )


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
    return _labelled([("traffic", f"{size(traffic.up)} up, {size(traffic.down)} down{pace}{foreseen}{a_step}")])


def _server(counted: Counted | None) -> Lines:
    if counted is None:
        return ()
    reasons = ", ".join(f"{reason} {count(n)}" for reason, n in sorted(counted.refused.items()))
    refused = f"{count(sum(counted.refused.values()))} events refused ({reasons})" if reasons else "none refused"
    return _labelled(
        [("server", f"{count(counted.merged)} pushes merged, {count(counted.repeated)} repeated, {refused}")]
    )


def _sharding(report: RunReport) -> TextTable:
    """Kernels of each layer by worker, the seconds that they took, and what a step of each worker is made of."""
    layers = list(dict.fromkeys(layer for kernels in report.kernels.values() for layer in kernels))
    columns: list[Column[str]] = [("worker", clean, str)]
    columns += [(_of_what(report, layer), _of(report.shards, layer), str) for layer in layers]
    columns += [(f"{clean(layer)} time", _of(report.conv_seconds, layer), duration) for layer in layers]
    columns += [(f"{part} a step", _part(report, part), _milliseconds) for part in ("comm", "conv", "comp")]
    return text_table(list(report.kernels), columns, worker=str)


def _of_what(report: RunReport, layer: str) -> str:
    """A column's heading."""
    parts = [own[layer].endswith("%") for own in report.shards.values() if layer in own]
    return f"{clean(layer)} {'samples' if all(parts) else 'shard' if any(parts) else 'kernels'}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _part(report: RunReport, part: str) -> Callable[[str], Any]:
    return lambda worker: getattr(report.breakdown.get(worker), part, None)


def _of(values: Any, layer: str) -> Callable[[str], Any]:
    return lambda worker: values.get(worker, {}).get(layer)


def _notes(notes: Sequence[Note], most: int | None) -> TextTable:
    table = text_table(notes, _NOTES, most=most)
    return replace(table, headed=False)
