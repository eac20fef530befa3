"""A training state as a checkpoint, and back; the JSON beside the arrays is checked before a run goes on from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, ValidationError

from daskcnn.arrays import Array
from daskcnn.documents import first_problem
from daskcnn.errors import DataError
from daskcnn.job.network import center_descent_of, layout_of, network_of, optimizer_of
from daskcnn.job.tables import Job
from daskcnn.nn import Layout, OptimizerState, leaves
from daskcnn.nn.optimizers import OWN
from daskcnn.nn.score import Score
from daskcnn.partition import Allocation
from daskcnn.ps import UpdateRule
from daskcnn.ps.average import AVERAGE, TRAINED
from daskcnn.ps.gradient_noise import NOISE, NOISE_SIZE
from daskcnn.ps.wire import INT8, misfit_of_coded
from daskcnn.runs.checkpoint import Check, Checkpoint, Header
from daskcnn.store import Described
from daskcnn.store.image_facts import Facts

_REMEDY = "take another checkpoint of the run"
_MOST_WORKERS = 100_000
Count = Annotated[int, Field(ge=0, le=1 << 53)]


class _StateFields(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _Rounds(_StateFields):
    """The samples of each worker, and how often each was presented. joined: workers whose share is to be corrected."""

    allocation: dict[str, Any]
    seconds: dict[str, PositiveFloat]
    numbers: dict[str, NonNegativeInt]
    left: Count
    joined: list[str] = Field(default_factory=list)


class _Judging(_StateFields):
    """Seconds of a replica's training and judging so far, and of judging a sample, once that is measured."""

    trained: NonNegativeFloat
    judged: NonNegativeFloat
    each: NonNegativeFloat | None


class _Book(_StateFields):
    """The coordinator's state."""

    rounds: _Rounds | None = None
    server_epoch: Count = 0
    best: float = 0.0
    worse: Count = 0
    epochs: Count | None = None
    rate_scale: float = Field(1.0, gt=0, le=1)
    told: bool = False
    judging: dict[str, _Judging] = Field(default_factory=dict)


class Record(_StateFields):
    """Everything but the images' description and the arrays. epoch: presentations a sample so far, on average.

    validation: summed loss, right answers (None for a loss without) and samples of the last evaluation, and the answers
    a sample has if it has several; None before the first evaluation.
    """

    epoch: NonNegativeFloat
    seconds: NonNegativeFloat
    book: _Book
    optimizer_steps: dict[str, Count] = Field(default_factory=dict)
    validation: Annotated[list[float | None], Field(min_length=3, max_length=4)] | None

    @property
    def score(self) -> Score | None:
        """The last evaluation on the validation samples."""
        if self.validation is None:
            return None
        loss, correct, samples, *more = self.validation
        answers = max(1, int(more[0] or 1)) if more else 1
        right = None if correct is None else int(correct)
        return Score(math.nan if loss is None else loss, right, int(samples or 0), answers=answers)

    @property
    def allocation(self) -> Allocation | None:
        """The samples of each worker; None if they were not kept. Raises ValueError if it is damaged."""
        return None if self.book.rounds is None else Allocation.from_dict(self.book.rounds.allocation)


def parse_record(state: Mapping[str, Any], path: Path | None) -> Record:
    """Return the record in a checkpoint's state. Raises DataError naming what is wrong with it."""
    where = "checkpoint" if path is None else path
    try:
        _check_count(state)
        record = Record.model_validate(state)
        rounds, allocation = record.book.rounds, record.allocation
        if rounds and allocation and not allocation.ranges.keys() == rounds.seconds.keys() == rounds.numbers.keys():
            raise ValueError("book.rounds: its tables are of different workers")
    except ValidationError as error:
        raise DataError(where, f"its state is damaged ({first_problem(error)})", _REMEDY) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataError(where, f"its state is damaged ({error!s:.200})", _REMEDY) from error
    return record


def _check_count(state: Mapping[str, Any]) -> None:
    """Raise ValueError for tables with more workers than there can be: each entry could be an error."""
    book = state.get("book")
    rounds = book.get("rounds") if isinstance(book, Mapping) else None
    for table in rounds.values() if isinstance(rounds, Mapping) else ():
        if isinstance(table, Mapping | list) and len(table) > _MOST_WORKERS:
            raise ValueError(f"{len(table):,} workers, at most {_MOST_WORKERS:,}")


@dataclass(frozen=True)
class TrainingState:
    """All that a run is resumed from: after `step` merges or minibatches, `epoch` presentations a sample on average.

    weights: (size,) on the host, as are the optimizers' states, by replica. book: JSON of the strategy's own.
    rule_state: vectors that the update rule keeps on the server, by name. Where the weights are an average, the trained
    center is one more (`ps.average`). rests: by replica, what its pushes in int8 have lost so far, coded (`ps.wire`).
    """

    step: int
    epoch: float
    weights: Array
    optimizers: dict[str, OptimizerState]
    book: Mapping[str, Any]
    validation: Score | None = None
    rule_state: Mapping[str, Array] = field(default_factory=dict)
    rests: Mapping[str, Array] = field(default_factory=dict)


def for_rule(
    state: TrainingState, rule: UpdateRule, job: Job, layout: Layout, replicas: Iterable[str]
) -> TrainingState:
    """Return the state as these replicas go on from it by this rule, which the job's run has chosen.

    The optimizer's vectors lie on the server where that makes the steps, else with each replica: their mean, or a copy.
    Other vectors of another rule's are dropped, and what was lost of its pushes.
    """
    steps, found = center_descent_of(job, layout), state.rule_state
    assert steps is not None, "a job that chooses its rule may share steps"
    names = {AVERAGE, TRAINED, *rule.init(np.zeros(1))}
    on_server = {name for name in found if name.startswith(OWN)}
    mean = steps.state_of(found, layout.dtype) if on_server else _mean_of([*state.optimizers.values()])
    if not rule.merges_gradients:
        optimizers = {} if mean is None else {name: state.optimizers.get(name, mean) for name in replicas}
        return replace(state, optimizers=optimizers, rests={}, rule_state={n: found[n] for n in found.keys() & names})
    names |= on_server | {NOISE}
    own = {} if on_server or mean is None else steps.kept(mean)
    return replace(state, optimizers={}, rests={}, rule_state={n: found[n] for n in found.keys() & names} | own)


def _mean_of(states: Sequence[OptimizerState]) -> OptimizerState | None:
    """Return the mean of optimizers' states; None of none."""
    if not states:
        return None
    vectors = np.mean([each.vectors for each in states], axis=0, dtype=states[0].vectors.dtype)
    return OptimizerState(vectors, max(each.count for each in states))


RULE, REST = "rule:", "rest:"
_ONE_RUN = "use the job and the checkpoint of one run"
_SMALL = 1 << 20  # numbers that are allocated without a check


def to_checkpoint(
    state: TrainingState, layout: Layout, images: Described, seconds: float, vectors: Sequence[str] = ()
) -> Checkpoint:
    """Return the state, reached after `seconds` of training, as arrays and JSON. vectors: names of the optimizers' own.

    Weights have the network's own names; a vector has its name and that of its replica, such as velocity:cpu-0.
    """
    arrays = {name: a for tree in layout.views(state.weights) for name, a in leaves(tree)}
    kept = {
        f"{vector}:{replica}": row
        for replica, own in state.optimizers.items()
        for vector, row in zip(vectors, own.vectors, strict=True)
    }
    rule_state = {f"{RULE}{name}": v for name, v in state.rule_state.items()}
    score, kept_score = state.validation, None
    if score is not None:  # as version 0.1.0 wrote it, with the answers of a sample behind it if it has several
        kept_score = [score.loss_sum, score.correct, score.samples, *([score.answers] if score.answers > 1 else [])]
    record = {
        "epoch": state.epoch,
        "seconds": seconds,
        "book": dict(state.book),
        "images": Facts.of(images).to_dict(),
        "validation": kept_score,
        "optimizer_steps": {replica: own.count for replica, own in state.optimizers.items()},
    }
    rests = {f"{REST}{replica}": rest for replica, rest in state.rests.items()}
    return Checkpoint({**arrays, **kept, **rule_state, **rests}, record, state.step, score.quality if score else None)


def to_state(checkpoint: Checkpoint, job: Job) -> TrainingState:
    """Return the inverse of `to_checkpoint`. Raises DataError if it is damaged, or not of the job's network."""
    weights = weights_of(checkpoint, job, facts_of(checkpoint))
    layout = layout_of(job, facts_of(checkpoint))
    rule_state = {name.removeprefix(RULE): a for name, a in checkpoint.arrays.items() if name.startswith(RULE)}
    _check_rule_state(checkpoint.path, rule_state, job, layout)
    record = parse_record(checkpoint.state, checkpoint.path)
    optimizers = _optimizers(checkpoint, job, layout, record.optimizer_steps)
    rests = {name.removeprefix(REST): a for name, a in checkpoint.arrays.items() if name.startswith(REST)}
    for replica, rest in rests.items():
        if problem := misfit_of_coded(rest, layout.size):
            raise DataError(checkpoint.path, f"{REST}{replica}: {problem.reason}", _ONE_RUN)
    of_rule = rule_state, rests if job.cluster.wire == INT8 else {}
    return TrainingState(
        checkpoint.step, record.epoch, weights, optimizers, checkpoint.state["book"], record.score, *of_rule
    )


def replicas_of(checkpoint: Checkpoint) -> set[str]:
    """Return the replicas of which the checkpoint keeps an optimizer's state."""
    return {name.partition(":")[2] for name in checkpoint.arrays if _is_of_optimizer(name)}


def _is_of_optimizer(name: str) -> bool:
    return ":" in name and not name.startswith((RULE, REST))


def _optimizers(
    checkpoint: Checkpoint, job: Job, layout: Layout, steps: Mapping[str, int]
) -> dict[str, OptimizerState]:
    """The optimizers' states by replica, from 0.1.0 without steps. Raises DataError if they are not the job's."""
    names, wanted = optimizer_of(job).vectors, np.empty(layout.parameter_size, layout.dtype)
    replicas = sorted(replicas_of(checkpoint))
    known = {f"{vector}:{replica}" for vector in names for replica in replicas}
    kept = {name for name in checkpoint.arrays if _is_of_optimizer(name)}
    if others := sorted(kept - known):
        reason = (
            f"it keeps {', '.join(others):.80} of an optimizer, {job.train.optimizer.name!r} keeps {', '.join(names)}"
        )
        raise DataError(checkpoint.path, reason, _ONE_RUN)
    found = {}
    for replica in replicas:
        rows: dict[str, Any] = {name: checkpoint.arrays.get(name) for name in (f"{v}:{replica}" for v in names)}
        for name, row in rows.items():
            _check_like(checkpoint.path, name, wanted, row)
        found[replica] = OptimizerState(np.stack([*rows.values()]), steps.get(replica, 0))
    return found


def _check_like(path: Path | None, name: str, wanted: Any, found: Any) -> None:
    """Raise DataError for an array that is missing, or of another shape or dtype."""
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        has = "is missing" if found is None else f"is {found.dtype}{found.shape}"
        reason = f"{name} {has}, the job's network wants {np.dtype(wanted.dtype)}{wanted.shape}"
        raise DataError(path, reason, _ONE_RUN)


def _check_rule_state(path: Path | None, found: Mapping[str, Any], job: Job, layout: Layout) -> None:
    """Raise DataError if the server keeps other vectors than these.

    There are none before the first merge. A run of version 0.1.0 has none of the optimizer's: its replicas had them.
    """
    rules = () if job.rule is None else job.rule.for_resumed()
    possible = [_kept_by(rule, found, job, layout) for rule in rules] or [{}]
    wanted = next((each for each in possible if each.keys() == found.keys()), possible[0])
    if found and set(found) != set(wanted):
        names = ", ".join(sorted(wanted)) or "nothing"
        reason = f"it keeps {', '.join(sorted(found)):.80} for the update rule, {job.train.strategy!r} keeps {names}"
        raise DataError(path, reason, _ONE_RUN)
    for name, vector in found.items():
        _check_like(path, f"{RULE}{name}", wanted[name], vector)


def _kept_by(rule: UpdateRule, found: Mapping[str, Any], job: Job, layout: Layout) -> dict[str, Any]:
    """Return the server's vectors of a run by this rule, in which these were found."""
    own = [*rule.init(np.zeros(1, job.model.dtype)), *([TRAINED] if job.train.ema is not None else [])]
    kept: dict[str, Any] = dict.fromkeys(own, np.empty(layout.size, layout.dtype))
    steps = center_descent_of(job, layout) if rule.merges_gradients else None
    if steps is not None and (not found or any(name.startswith(OWN) for name in found)):
        kept |= steps.begin(np.zeros(layout.size, layout.dtype))
        if NOISE in found:  # once workers have met
            kept[NOISE] = np.empty(NOISE_SIZE)
    return kept


def facts_of(checkpoint: Checkpoint) -> Facts:
    """Return the facts of the images. Raises DataError if they are damaged."""
    return Facts.from_dict(checkpoint.state.get("images", {}))


def check_of(job: Job) -> Check:
    """Return the check of a checkpoint of this job before its arrays are read."""

    def check(state: Mapping[str, Any], header: Header, path: Path) -> None:
        parse_record(state, path)
        sizes = {name: prod(stored.shape) for name, stored in header.items()}
        _check_size(path, job, Facts.from_dict(state.get("images", {})), sizes)

    return check


def _check_size(path: Path | None, job: Job, facts: Facts, sizes: Mapping[str, int]) -> None:
    """Raise DataError for a network far larger than the arrays: nothing is allocated that was never written."""
    stored = sum(size for name, size in sizes.items() if is_weight(name))
    try:
        wanted = network_of(job, facts).numbers(facts.shape)
    except ValueError as error:
        raise DataError(path, f"the job's network does not fit its images: {error}", _ONE_RUN) from error
    if wanted > max(2 * stored, _SMALL):  # of one not so large the array that differs is named
        raise DataError(path, f"{stored:,} weights, the job's network has {wanted:.6g}", _ONE_RUN)
    if (other := max(sizes.values(), default=0)) > max(wanted, _SMALL):
        raise DataError(path, f"an array of {other:,} numbers, the job's network has {wanted:,} in all", _ONE_RUN)


def is_weight(name: str) -> bool:
    """Return True for an array of the network's own: one of a rule, an optimizer or a replica has a colon."""
    return ":" not in name


def weights_of(checkpoint: Checkpoint, job: Job, facts: Facts) -> Any:
    """Return the checkpoint's weights as one vector. Raises DataError if they are not of the job's network."""
    _check_size(checkpoint.path, job, facts, {name: array.size for name, array in checkpoint.arrays.items()})
    layout = layout_of(job, facts)
    weights = np.empty(layout.size, layout.dtype)
    for tree in layout.views(weights):
        for name, view in leaves(tree):
            found = checkpoint.arrays.get(name)
            _check_like(checkpoint.path, name, view, found)
            view[...] = found
    return weights
