"""Predict everything: parts to the workers, results into files beside the output, and the output from these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.cluster.link.calls import Signals
from daskcnn.cluster.link.client import heed_signals
from daskcnn.cluster.link.connect import check_scheduler, connect
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.run.admission import check_versions
from daskcnn.cluster.spread.spread import spread
from daskcnn.errors import DataError, Interrupted, Lost, UserError
from daskcnn.job.tables import Cluster
from daskcnn.nn.network import Views
from daskcnn.show.renderers.terminal import Counter, warnings_by
from daskcnn.trained.place import CheckpointChoice, find_network
from daskcnn.trained.predictions.parts import Columns, KeptParts, Predicted, PredictionTask, identity, predict_part
from daskcnn.trained.predictions.sources import Part, PartChoice, PredictedSource, source_of
from daskcnn.trained.predictions.tables import check_table, write_table
from daskcnn.training.trained_network import Classifier

Say = Callable[[str], None]
_MOST_TOLD = 10  # files that could not be read, by name


def predict_whole(
    run: str,
    data: Sequence[str],
    out: str,
    *,
    checkpoint: CheckpointChoice,
    part: PartChoice | None,
    cluster: Cluster,
    skip_bad: bool,
    say: Say,
    views: Views | None = None,
) -> dict[str, Any]:
    """Predict all samples of a data set or all image files into a table; returns what was done.

    Parts that an earlier call has kept are not predicted again. views: as `find_network` has them. Raises
    UserError; then what is done is kept.
    """
    target = Path(out)
    check_table(target)
    check_scheduler(cluster)
    classifier = find_network(run, checkpoint, say, views=views).classifier
    if classifier.reconstructs:
        reason = "a table has the probabilities of classes, and this network reconstructs images"
        raise UserError(run, reason, f"use daskcnn.load({run!r}).predict(images) in Python, which takes Dask arrays")
    source = source_of(data, part, classifier.facts, skip_bad=skip_bad)
    parts = source.parts()
    kept = KeptParts(target, identity(classifier, source), len(classifier.classes))
    begun = time.monotonic()
    left = [p for p in parts if not kept.has(p)]
    samples, done = sum(map(len, parts)), sum(map(len, parts)) - sum(map(len, left))
    if done:
        say(f"going on: {done:,} of {samples:,} samples are predicted already")
    if left:
        try:
            _predict(PredictionTask(classifier, source), left, kept, cluster, Counter("predict", samples, done), say)
        except UserError:
            kept.remove_empty()
            raise
    bad, unread = _write(target, _columns(classifier, source), samples, kept, parts)
    kept.remove()
    _tell_bad(bad, say)
    return {
        "out": out,
        "data": source.place,
        "samples": samples,
        "unreadable": unread,
        "seconds": time.monotonic() - begun,
    }


def _predict(
    task: PredictionTask, left: Sequence[Part], kept: KeptParts, settings: Cluster, counter: Counter, say: Say
) -> None:
    """Have the parts predicted and keep them. Raises UserError, which says how to go on."""
    signals = Signals()
    try:
        with ExitStack() as stack:
            stack.enter_context(signals.installed())
            signals.polled = True
            client = stack.enter_context(connect(settings, signals.check, say, server=False))
            settle = settings.settle if settings.scheduler or settings.scheduler_file else 0.0
            members = wait_for_members(client, settings.workers, settings.wait, signals.check, say=say, settle=settle)
            check_versions(client, members.workers, signals.check)
            found = spread(
                client,
                partial(predict_part, task),
                left,
                settings,
                whole=True,
                check=heed_signals(lambda: signals.first),
                warn=warnings_by(say),
            )
            with counter:
                for part, rows in found:
                    kept.keep(part, rows)
                    counter.add(len(part))
    except (Interrupted, Lost) as error:
        raise type(error)(*_told(error)) from error


def _told(error: UserError) -> tuple[Any, ...]:
    told = f"{error}\nwhat is predicted is kept; the same command goes on with it"
    return (told, error.signum) if isinstance(error, Interrupted) else (told,)


def _columns(classifier: Classifier, source: PredictedSource) -> Columns:
    several = classifier.facts.labels == "several"
    return Columns(source.key, len(source.splits) > 1, classifier.classes, source.label_names, several)


def _write(out: Path, columns: Columns, samples: int, kept: KeptParts, parts: Sequence[Part]) -> tuple[list[str], int]:
    """Write the table from the kept parts; returns what is said of samples without a prediction, and how many."""
    bad: list[str] = []
    unread = 0

    def noted(found: Iterable[tuple[Part, Predicted]]) -> Iterator[tuple[Part, Predicted]]:
        nonlocal unread
        for part, rows in found:
            bad.extend(rows.bad)
            unread += int(np.isnan(rows.probabilities).all(axis=1).sum())
            yield part, rows

    try:
        write_table(out, columns, samples, noted(kept.read(parts)))
    except OSError as error:
        raise DataError(out, error.strerror or error, "make room; the same command goes on") from error
    return bad, unread


def _tell_bad(bad: Sequence[str], say: Say) -> None:
    for problem in bad[:_MOST_TOLD]:
        say(f"warning: passed over: {problem}")
    if len(bad) > _MOST_TOLD:
        say(f"warning: … and {len(bad) - _MOST_TOLD:,} more")
