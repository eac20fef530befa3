"""Learners of a simulation: none for timing alone, or a replica's real arithmetic; and a small problem to learn."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from daskcnn.job.network import center_descent_of
from daskcnn.nn import OptimizerState
from daskcnn.nn.optimizers import CenterDescent
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.partition.step_shares import StepSizes
from daskcnn.ps import Local, RuleState, Snapshot, UpdateRule, Vector
from daskcnn.runs.state import TrainingState, for_rule
from daskcnn.store import Dataset, Scattered
from daskcnn.store.manifest import Labelling
from daskcnn.training.cadence import steps_of_round
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica, Trained

LAYERS: list[dict[str, Any]] = [{"layer": "dense", "units": 24}, {"layer": "relu"}, {"layer": "dense", "units": 10}]
"""A network that learns it."""
CLASSES = 10
_SIDE = 4
_CENTERS = 3  # clusters a class
_SPREAD = 46.0  # of a cluster, in values of 0 … 255


@dataclass(frozen=True)
class _Part:
    """Samples in memory, as `store.Split` has them on disk."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    cuts: int = 1 << 30
    source: None = None

    def __len__(self) -> int:
        return len(self.labels)

    def scattered(self, indices: npt.NDArray[np.int64], near: object) -> tuple[Scattered, npt.NDArray[np.int64]]:
        return Scattered.of(self.images[indices]), self.labels[indices]

    def weights(self, indices: npt.NDArray[np.int64]) -> None:
        return None


@dataclass(frozen=True)
class Points:
    """The part of a `store.Dataset` that a replica uses."""

    train: _Part
    test: _Part
    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]
    classes: tuple[str, ...] = tuple(map(str, range(CLASSES)))
    shape: tuple[int, int, int] = (_SIDE, _SIDE, 1)
    sample_bytes: int = _SIDE * _SIDE
    labels: Labelling = "classes"
    nodata: None = None
    fit: None = None


def clusters_of_points(train: int, test: int = 1000, *, seed: int = 0) -> Dataset:
    """Draw ten classes of 3 clusters each, which overlap: about nine points in ten can be told. Labels go in turn."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(40, 215, (CLASSES, _CENTERS, _SIDE * _SIDE))
    learnt, unseen = (_drawn(rng, centers, count) for count in (train, test))
    pixels = learnt.images.astype(np.float64)
    return cast(Dataset, Points(learnt, unseen, pixels.mean(axis=(0, 1, 2)), pixels.std(axis=(0, 1, 2))))


def _drawn(rng: np.random.Generator, centers: npt.NDArray[np.float64], count: int) -> _Part:
    labels = np.arange(count) % CLASSES
    chosen = centers[labels, rng.integers(0, _CENTERS, count)]
    values = np.clip(np.rint(chosen + rng.normal(0, _SPREAD, chosen.shape)), 0, 255)
    return _Part(values.astype(np.uint8).reshape(count, _SIDE, _SIDE, 1), labels.astype(np.int64))


@dataclass(frozen=True, slots=True)
class Learnt:
    """Sums of a round so far: loss and right answers over its samples, the last rate. None: not known."""

    score: Score | None = None
    lr: float | None = None


NOTHING = Learnt()


class Learner(Protocol):
    """A replica's arithmetic. weights: trained in place, but for the places that are frozen.

    steps: the optimizer's on the server, where the rule merges gradients. besides: places of what layers keep besides
    parameters.
    """

    weights: Vector
    frozen: tuple[slice, ...]
    steps: CenterDescent | None
    besides: tuple[slice, ...]

    @property
    def optimizer(self) -> OptimizerState | None:
        """A copy of the optimizer's state of its own; None where it has none, or the server has it."""

    def use(self, rule: UpdateRule) -> None:
        """Train by this rule from now on."""

    def begin(
        self,
        round_: Round,
        local: Local,
        scale: float,
        sizes: StepSizes | None = None,
        optimizer: OptimizerState | None = None,
    ) -> None:
        """Take up a round. scale: of the learning rate. sizes: of its minibatches, if they may change.

        optimizer: the state to begin with; None: its own.
        """

    def train(self, steps: int) -> Learnt:
        """Go on to this step of the round."""

    def judge(self, part: JudgedPart, weights: Vector | None = None) -> Score | None:
        """Return the score of these weights, or its own, on these validation samples; None: not known.

        The score of given weights has the numbers behind their AUC.
        """


class TimingOnly:
    """Learns nothing: a vector of one number stands for the weights."""

    def __init__(self) -> None:
        self.weights = np.zeros(1, np.float32)
        self.frozen: tuple[slice, ...] = ()
        self.steps: CenterDescent | None = None
        self.besides: tuple[slice, ...] = ()
        self.optimizer: OptimizerState | None = None

    def use(self, rule: UpdateRule) -> None:
        """Do nothing."""

    def begin(self, *_: Any, **options: Any) -> None:
        """Do nothing."""

    def train(self, steps: int) -> Learnt:
        """Learn nothing."""
        return NOTHING

    def judge(self, part: JudgedPart, weights: Vector | None = None) -> Score | None:
        """Return None: no score is known."""
        return None


class Training:
    """Real arithmetic: the replica of a cluster, a step at a time."""

    def __init__(self, replica: Replica, rule: UpdateRule) -> None:
        self.replica, self._rule = replica, rule
        self.weights: Vector = replica.weights
        self.frozen, self.besides = replica.frozen, replica.layout.besides
        self.steps = center_descent_of(replica.job, replica.layout, replica.model.frozen)
        self._steps: Generator[Trained, None, None] | None = None
        self._descends = False
        self._taken = self._samples = 0
        self._sizes: StepSizes | None = None
        self._learnt = NOTHING

    def use(self, rule: UpdateRule) -> None:
        """Train by this rule from now on."""
        self.close()
        self._rule, self._steps = rule, None

    @property
    def optimizer(self) -> OptimizerState | None:
        """A copy of the state of its own; None where it has not trained by this rule, or the server makes the steps."""
        return self.replica.host_optimizer() if self._steps is not None and self._descends else None

    def begin(
        self,
        round_: Round,
        local: Local,
        scale: float,
        sizes: StepSizes | None = None,
        optimizer: OptimizerState | None = None,
    ) -> None:
        """Take up a round; the one before ends."""
        self.close()
        how: dict[str, Any] = {"scale": scale, "sizes": sizes, "optimizer": optimizer}
        self._steps = steps_of_round(self.replica, self._rule, round_, local, **how)
        self._descends = round_.alone or not self._rule.merges_gradients
        self._taken, self._samples, self._sizes = 0, round_.samples, sizes

    def train(self, steps: int) -> Learnt:
        """Make the steps up to this one of the round."""
        assert self._steps is not None, "begun"
        while self._taken < steps:
            trained = next(self._steps)
            self._taken, self._learnt = self._taken + 1, Learnt(trained.score, trained.lr)
            ended = trained.score.samples == self._samples if self._sizes is None else self._taken == self._sizes.steps
            if ended:
                self.close()
        return self._learnt

    def judge(self, part: JudgedPart, weights: Vector | None = None) -> Score | None:
        """Judge these weights, or the replica's own, on these validation samples."""
        whole, (lo, hi, draw) = None if weights is None else self.replica.job.data.validation, part
        return self.replica.evaluate(self.replica.dataset.train, lo, hi, draw=draw, weights=weights, whole=whole)

    def close(self) -> None:
        """End the round under way, with the thread that loads for it."""
        if self._steps is not None:
            self._steps.close()


def turned_to(rule: UpdateRule, learners: Mapping[str, Learner], snapshot: Snapshot) -> RuleState | None:
    """Let replicas train by another rule, from what the server and those that trained by the last one hold.

    Returns what the server goes on with. None: what the rule begins with.
    """
    own = {name: each for name, each in learners.items() if isinstance(each, Training)}
    optimizers = {name: kept for name, each in own.items() if (kept := each.optimizer) is not None}
    for each in learners.values():
        each.use(rule)
    if not own:
        return None
    state = TrainingState(snapshot.version, 0.0, snapshot.center, optimizers, {}, rule_state=snapshot.state or {})
    one = next(iter(own.values())).replica
    state = for_rule(state, rule, one.job, one.layout, own)
    for name, each in own.items():
        each.replica.adopt_optimizer(state.optimizers.get(name))
    return dict(state.rule_state)
