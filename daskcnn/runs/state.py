"""A training state as a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import DataError
from daskcnn.job.network import initial_weights, network_of, optimizer_of
from daskcnn.job.tables import Job
from daskcnn.nn import Layout, OptimizerState, leaves
from daskcnn.nn.score import Score
from daskcnn.runs.arrays_file import Header
from daskcnn.runs.checkpoint import Check, Checkpoint
from daskcnn.runs.record import parse_record
from daskcnn.store import Described
from daskcnn.store.facts import Facts


@dataclass(frozen=True)
class TrainingState:
    """All that resuming needs. step: merges or minibatches so far; epoch: presentations a sample, on average.

    weights (size,) and the optimizers' states by replica lie on the host; book is JSON and the strategy's own.
    rule_state: what the update rule keeps on the server, by name.
    """

    step: int
    epoch: float
    weights: Array
    optimizers: dict[str, OptimizerState]
    book: Mapping[str, Any]
    validation: Score | None = None
    rule_state: Mapping[str, Array] = field(default_factory=dict)


RULE = "rule:"
_ONE_RUN = "use the job and the checkpoint of one run"
_SMALL = 1 << 20
"""Numbers that are allocated without a second thought."""


def to_checkpoint(
    state: TrainingState, layout: Layout, images: Described, seconds: float, vectors: Sequence[str] = ()
) -> Checkpoint:
    """The state as arrays and JSON.

    Weights have the network's own names. A vector of an optimizer has its own name and that of its replica, such as
    velocity:cpu-0. seconds: trained so far. vectors: names of the optimizers' vectors.
    """
    arrays = {name: a for tree in layout.views(state.weights) for name, a in leaves(tree)}
    kept = {
        _name_of(vector, replica): row
        for replica, own in state.optimizers.items()
        for vector, row in zip(vectors, own.vectors, strict=True)
    }
    rule_state = {f"{RULE}{name}": v for name, v in state.rule_state.items()}
    validation = state.validation
    record = {
        "epoch": state.epoch,
        "seconds": seconds,
        "book": dict(state.book),
        "images": Facts.of(images).to_dict(),
        "validation": validation and _kept(validation),
        "optimizer_steps": {replica: own.count for replica, own in state.optimizers.items()},
    }
    score = validation.quality if validation else None
    return Checkpoint({**arrays, **kept, **rule_state}, record, state.step, score)


def _kept(score: Score) -> list[float | None]:
    """The score as versions before several labels wrote it, with the answers a sample has where it has several."""
    return [score.loss_sum, score.correct, score.samples, *([score.answers] if score.answers > 1 else [])]


def to_state(checkpoint: Checkpoint, job: Job) -> TrainingState:
    """The inverse of `to_checkpoint`. Raises DataError where it is damaged, or not of the job's network."""
    weights = weights_of(checkpoint, job, facts_of(checkpoint))
    layout, _ = initial_weights(job, facts_of(checkpoint))
    rule_state, wanted = _beginning_with(RULE, checkpoint), np.empty(layout.size, layout.dtype)
    for name, vector in rule_state.items():
        _check_like(checkpoint.path, f"{RULE}{name}", wanted, vector)
    _check_rule_state(checkpoint.path, rule_state, job)
    record = parse_record(checkpoint.state, checkpoint.path)
    optimizers = _optimizers(checkpoint, job, layout, record.optimizer_steps)
    return TrainingState(
        checkpoint.step, record.epoch, weights, optimizers, checkpoint.state["book"], record.score, rule_state
    )


def _name_of(vector: str, replica: str) -> str:
    return f"{vector}:{replica}"


def replicas_of(checkpoint: Checkpoint) -> set[str]:
    """The replicas that the checkpoint keeps an optimizer's state of."""
    return {name.partition(":")[2] for name in checkpoint.arrays if ":" in name and not name.startswith(RULE)}


def _optimizers(
    checkpoint: Checkpoint, job: Job, layout: Layout, steps: Mapping[str, int]
) -> dict[str, OptimizerState]:
    """The optimizers' states by replica. Raises DataError where they are none of the job's optimizer.

    Version 0.1.0 had SGD alone, and counted no steps, which it does not go by.
    """
    names, wanted = optimizer_of(job).vectors, np.empty(layout.parameter_size, layout.dtype)
    replicas = sorted(replicas_of(checkpoint))
    known = {_name_of(vector, replica) for vector in names for replica in replicas}
    kept = {name for name in checkpoint.arrays if ":" in name and not name.startswith(RULE)}
    if others := sorted(kept - known):
        reason = (
            f"it keeps {', '.join(others):.80} of an optimizer, {job.train.optimizer.name!r} keeps {', '.join(names)}"
        )
        raise DataError(checkpoint.path, reason, _ONE_RUN)
    found = {}
    for replica in replicas:
        rows: dict[str, Any] = {name: checkpoint.arrays.get(name) for name in (_name_of(v, replica) for v in names)}
        for name, row in rows.items():
            _check_like(checkpoint.path, name, wanted, row)
        found[replica] = OptimizerState(np.stack([*rows.values()]), steps.get(replica, 0))
    return found


def _check_like(path: Path | None, name: str, wanted: Any, found: Any) -> None:
    """Raise DataError for an array that is missing, or of another shape or dtype."""
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise _misfit(path, name, wanted, found)


def _check_rule_state(path: Path | None, found: Mapping[str, Any], job: Job) -> None:
    """Raise DataError where the rule keeps other vectors than these; none stands for those before the first merge."""
    wanted = set() if job.rule is None else set(job.rule.init(np.zeros(1, job.model.dtype)))
    if found and set(found) != wanted:
        names = ", ".join(sorted(wanted)) or "nothing"
        reason = f"it keeps {', '.join(sorted(found)):.80} for the update rule, {job.train.strategy!r} keeps {names}"
        raise DataError(path, reason, _ONE_RUN)


def _beginning_with(prefix: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return {name.removeprefix(prefix): a for name, a in checkpoint.arrays.items() if name.startswith(prefix)}


def facts_of(checkpoint: Checkpoint) -> Facts:
    """What the checkpoint says of the images. Raises DataError where it is damaged."""
    return Facts.from_dict(checkpoint.state.get("images", {}))


def check_of(job: Job) -> Check:
    """What looks at a checkpoint of this job before its arrays are read."""

    def check(state: Mapping[str, Any], header: Header, path: Path) -> None:
        parse_record(state, path)
        sizes = {name: prod(stored.shape) for name, stored in header.items()}
        _check_size(path, job, Facts.from_dict(state.get("images", {})), sizes)

    return check


def _check_size(path: Path | None, job: Job, facts: Facts, sizes: Mapping[str, int]) -> None:
    """Raise DataError for a network far larger than the arrays: nothing is allocated that was never written."""
    stored = sum(size for name, size in sizes.items() if ":" not in name)  # the others are no weights
    try:
        wanted = network_of(job, facts).numbers(facts.shape)
    except ValueError as error:
        raise DataError(path, f"the job's network does not fit its images: {error}", _ONE_RUN) from error
    if wanted > max(2 * stored, _SMALL):  # of one not so large the array that differs is named
        raise DataError(path, f"{stored:,} weights, the job's network has {wanted:.6g}", _ONE_RUN)
    if (other := max(sizes.values(), default=0)) > max(wanted, _SMALL):
        raise DataError(path, f"an array of {other:,} numbers, the job's network has {wanted:,} in all", _ONE_RUN)


def weights_of(checkpoint: Checkpoint, job: Job, facts: Facts) -> Any:
    """The checkpoint's weights as one vector. Raises DataError where they are not those of the job's network."""
    _check_size(checkpoint.path, job, facts, {name: array.size for name, array in checkpoint.arrays.items()})
    layout, weights = initial_weights(job, facts)
    for tree in layout.views(weights):
        for name, view in leaves(tree):
            found = checkpoint.arrays.get(name)
            _check_like(checkpoint.path, name, view, found)
            view[...] = found
    return weights


def _misfit(path: Path | None, name: str, view: Any, found: Any) -> DataError:
    has = "is missing" if found is None else f"is {found.dtype}{found.shape}"
    return DataError(
        path,
        f"{name} {has}, the job's network wants {np.dtype(view.dtype)}{view.shape}",
        _ONE_RUN,
    )
