"""Predict whole data sets: workers predict parts, which are kept in files; the output is made of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import compile_here
from daskcnn.cluster.link.allowed import AllowedWorkers
from daskcnn.cluster.link.client import heed_signals
from daskcnn.cluster.link.connect import check_scheduler, connect
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.link.sent import require_modules, sent_function
from daskcnn.cluster.link.signals import Signals
from daskcnn.cluster.run.admission import check_versions
from daskcnn.cluster.spread.spread import spread
from daskcnn.errors import DataError, Interrupted, Lost, UserError
from daskcnn.job.tables import CheckpointChoice, Cluster
from daskcnn.nn.network import Views
from daskcnn.show.renderers.terminal import Counter, warnings_by
from daskcnn.trained.place import find_network
from daskcnn.trained.predictions.parts import KeptParts, Predicted, PredictionTask, identity
from daskcnn.trained.predictions.sources import Part, PartChoice, source_of
from daskcnn.trained.predictions.tables import Columns, check_table, write_table

Say = Callable[[str], None]
_MOST_TOLD = 10  # samples without a prediction, by name


def predict_whole(
    place: str,
    data: Sequence[str],
    out: str,
    *,
    checkpoint: CheckpointChoice | None,
    part: PartChoice | None,
    cluster: Cluster,
    skip_bad: bool,
    say: Say,
    views: Views | None = None,
) -> dict[str, Any]:
    """Predict all samples of a data set or all image files into a table, and return a summary.

    Parts that an earlier call has kept are not predicted again.

    Parameters
    ----------
    place, checkpoint, views : as for `find_network`.
    data, part, skip_bad : as for `source_of`.

    Raises
    ------
    UserError : parts that are done by then are kept.
    """
    target = Path(out)
    check_table(target)
    check_scheduler(cluster)
    network = find_network(place, checkpoint, say, views=views)
    classifier = network.classifier
    say(f"weights: {network.weights}")
    if classifier.reconstructs:
        reason = "a table has the probabilities of classes, and this network reconstructs images"
        raise UserError(
            place, reason, f"use daskcnn.load({place!r}).predict(images) in Python, which takes Dask arrays"
        )
    source = source_of(data, part, classifier.facts, skip_bad=skip_bad)
    classifier.facts = replace(classifier.facts, nodata=source.nodata)
    begun = time.monotonic()
    with KeptParts(target, identity(classifier, source), len(classifier.classes)) as kept:
        left = [p for p in source.parts if not kept.has(p)]
        samples = sum(map(len, source.parts))
        done = samples - sum(map(len, left))
        if done:
            say(f"going on: {done:,} of {samples:,} samples are predicted already")
        try:
            check_table(target)  # another process may have written it meanwhile
            if left:
                counter = Counter("predict", samples, done)
                _predict(PredictionTask(classifier, source.read), left, kept, cluster, counter, say)
        except UserError:
            kept.remove_empty()
            raise
        several = classifier.facts.labels == "several"
        columns = Columns(source.key, len(source.splits) > 1, classifier.classes, source.label_names, several)
        bad, unread = _write(target, columns, samples, kept, source.parts)
        kept.remove()
    for problem in bad[:_MOST_TOLD]:
        say(f"warning: passed over: {problem}")
    if len(bad) > _MOST_TOLD:
        say(f"warning: … and {len(bad) - _MOST_TOLD:,} more")
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
    """Spread the parts over the workers and keep the results. Raises UserError, which says how to continue."""
    signals = Signals()
    try:
        if not (settings.scheduler or settings.scheduler_file):  # the workers will be of this machine
            compile_here(task.classifier.job.model.dtype, say)
        with ExitStack() as stack:
            stack.enter_context(signals.installed())
            signals.polled = True
            client = stack.enter_context(connect(settings, signals.check, say, server=False))
            settle = settings.settle if settings.scheduler or settings.scheduler_file else 0.0
            how: dict[str, Any] = {"say": say, "settle": settle, "only": AllowedWorkers.of(settings)}
            members = wait_for_members(client, settings.workers, settings.wait, signals.check, **how)
            check_versions(client, members.workers, signals.check)
            names = {m.address: f"worker {m.name} ({m.address})" for m in members.workers}
            require_modules(client, names, task.classifier.job.run.imports, signals.check)
            found = spread(
                client,
                sent_function(task.predict, task.classifier.job),
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
        told = f"{error}\nwhat is predicted is kept; the same command goes on with it"
        more = (error.signum,) if isinstance(error, Interrupted) else ()
        raise type(error)(told, *more) from error


def _write(out: Path, columns: Columns, samples: int, kept: KeptParts, parts: Sequence[Part]) -> tuple[list[str], int]:
    """Write the table from the kept parts. Return messages about samples without a prediction, and their number."""
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
