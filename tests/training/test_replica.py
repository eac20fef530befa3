"""A replica's round is plain SGD on its samples; what it measures and reports is exact."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import daskcnn.training.replica
from daskcnn.arrays import Array, Device
from daskcnn.conv import plan
from daskcnn.errors import Diverged
from daskcnn.job.network import convolutions, initial_weights, optimizer_of, rate_of, training_samples
from daskcnn.job.tables import Job, Schedule
from daskcnn.nn import LOSSES, SCHEDULES, SGD, Context, Sequential, StepPace, build_model
from daskcnn.nn.layers import ReLU
from daskcnn.nn.optimizers import LARS, AdamW, Averaged, Lookahead
from daskcnn.nn.schedule import ConstantRate, CosineDecay, OneCycle, PolyDecay, StepDecay, WarmUp
from daskcnn.nn.score import Score
from daskcnn.partition import PARTITIONERS
from daskcnn.partition.rounds import Round, Rounds
from daskcnn.partition.step_shares import LAG, StepSizes
from daskcnn.ps import RULES, Local
from daskcnn.store import Batch, BatchPlan, Dataset, batches, normalise
from daskcnn.store.loader import batch_edges, presentation_order
from daskcnn.training.cadence import steps_of_round
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica, Stopped, Trained, evaluation_batch, shared_presentations, workspace_batch
from daskcnn.training.stopwatch import Stopwatch
from daskcnn.training.worker_calibration import conv_seconds, fixed_seconds, step_seconds
from tests.standin import device_of
from tests.toy_data import toy_dataset

LAYERS = [
    {"layer": "conv", "kernels": 4, "size": 3},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 2},
    {"layer": "conv", "kernels": 3, "size": 3},
    {"layer": "dropout", "rate": 0.2},
    {"layer": "dense", "units": 10},
]
dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), size=10)


def _job(dtype: str = "float64", *, layers: list[dict[str, Any]] | None = None, **train: Any) -> Job:
    return Job.model_validate(
        {
            "data": {"validation": 30},
            "model": {"dtype": dtype, "layers": layers or LAYERS},
            "train": {"batch_size": 32, "epochs": 3, "lr": 0.05, "loss": "softmax", **train},
        }
    )


def _replica(dataset: Dataset, dtype: str = "float64", device: Device | None = None, **train: Any) -> Replica:
    ticks = count()
    return Replica(_job(dtype, **train), dataset, device or Device(), clock=lambda: float(next(ticks)))


def _round(replica: Replica, samples: int = 200, **changes: Any) -> Trained:
    return replica.train(((0, 200),), samples, **{"presentation": 0, "progress": (0.0, 1 / 3), **changes})


@dataclass
class Recorder:
    """A schedule that notes where in the run it was asked, and answers with the job's rate."""

    asked: list[tuple[float, float]]

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        self.asked.append((progress, epoch))
        return lr


# --- a round is SGD ---


def _by_hand(replica: Replica, plan: BatchPlan, rates: Iterator[float]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and batch-norm statistics after SGD with Nesterov's momentum, array by array."""
    t, model, dataset = replica.job.train, replica.model, replica.dataset
    layout, host = initial_weights(replica.job, dataset)
    params, state = layout.views(host)
    moving = {name: {k: np.zeros_like(a) for k, a in own.items()} for name, own in params.items()}
    with batches(dataset, dataset.train, plan, "float64") as ready:
        for batch in ready:
            ctx, lr = Context(Device(), training=True, keys=batch.keys), next(rates)
            scores, state, residual = model.forward(params, state, batch.x, ctx)
            _, grads = model.backward(params, residual, LOSSES["softmax"](scores, batch.labels)[1], ctx)
            for name, own in params.items():
                for key, p in own.items():
                    g, v = grads[name][key] + t.weight_decay * p, moving[name][key]
                    v[...] = t.momentum * v + g
                    p -= lr * (g + t.momentum * v if t.nesterov else v)
    return params, state


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_round_is_a_loop_of_sgd(nesterov: bool, dataset: Dataset) -> None:
    replica = _replica(dataset, nesterov=nesterov, momentum=0.8, weight_decay=0.01, schedule="linear")
    plan = BatchPlan(((0, 60), (100, 200)), 32, 0, presentation=2, limit=130)
    rates = iter([0.05 * (1 - 0.5 * shown / 130) for shown in range(0, 130, 32)])
    params, state = _by_hand(replica, plan, rates)
    trained = replica.train(plan.ranges, 130, presentation=2, progress=(0.0, 0.5))
    assert trained.score.samples == 130
    expected = replica.layout.flatten(params, state)
    np.testing.assert_allclose(replica.host_weights(), expected, rtol=1e-12, atol=1e-14)
    assert trained.lr == pytest.approx(0.05 * (1 - 0.5 * 128 / 130))
    assert next(rates, None) is None


def test_the_reported_loss_is_the_mean_over_samples(dataset: Dataset) -> None:
    replica, losses = _replica(dataset, lr=1e-12), []
    plan = BatchPlan(((0, 200),), 32, 0, 0)
    other = _replica(dataset, lr=1e-12)
    with batches(dataset, dataset.train, plan, "float64") as ready:
        losses = [(other.step(batch, StepPace(0.0)), len(batch.labels)) for batch in ready]
    assert [n for _, n in losses] == [32] * 6 + [8]  # the last batch is a partial one
    trained = _round(replica)
    assert trained.score.loss == pytest.approx(sum(loss * n for (loss, _), n in losses) / 200, rel=1e-9)
    assert trained.score.correct == sum(right or 0 for (_, right), _ in losses)


def test_a_limit_shows_the_beginning_of_the_presentation(dataset: Dataset) -> None:
    whole, part = _replica(dataset), _replica(dataset)
    stops = iter([False, False, True])
    with pytest.raises(Stopped):
        _round(whole, stop=lambda: next(stops), progress=(0.0, 0.0))
    assert _round(part, 64, progress=(0.0, 0.0)).score.samples == 64
    np.testing.assert_array_equal(whole.weights, part.weights)


def test_rounds_depend_on_presentation_and_seed_alone(dataset: Dataset) -> None:
    def after(seed: int, presentation: int) -> bytes:
        replica = _replica(dataset, seed=seed)
        replica.adopt(initial_weights(_job(), dataset)[1])
        _round(replica, presentation=presentation)
        return replica.host_weights().tobytes()

    runs = [after(seed, presentation) for seed, presentation in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert runs[0] == runs[1]
    assert len(set(runs)) == 3


@dtypes
def test_everything_keeps_the_job_s_dtype(dtype: str, dataset: Dataset) -> None:
    replica = _replica(dataset, dtype)
    addresses = [a.__array_interface__["data"] for a in (replica.weights, replica.optimizer_state.vectors)]
    _round(replica)
    for array in (
        replica.weights,
        replica.optimizer_state.vectors,
        replica.host_weights(),
        replica.host_optimizer().vectors,
    ):
        assert array.dtype == dtype
    assert addresses == [a.__array_interface__["data"] for a in (replica.weights, replica.optimizer_state.vectors)]
    layout, start = initial_weights(_job(dtype), dataset)
    assert start.dtype == layout.dtype == dtype
    np.testing.assert_array_equal(start, initial_weights(_job("float64"), dataset)[1].astype(dtype))


def test_batch_norm_s_statistics_lie_in_the_weights(dataset: Dataset) -> None:
    replica = _replica(dataset)
    _, before = replica.layout.views(replica.host_weights())
    batch = _first_batch(dataset)
    replica.step(batch, StepPace(0.05))
    params, _ = replica.layout.views(initial_weights(replica.job, dataset)[1])
    ctx = Context(Device(), training=True, keys=batch.keys)
    y, _, _ = replica.model.layers[0][1].forward(params["conv1"], {}, batch.x, ctx)
    _, after = replica.layout.views(replica.host_weights())
    mean, variance = y.mean(axis=(0, 1, 2)), y.var(axis=(0, 1, 2), ddof=1)
    np.testing.assert_allclose(after["batchnorm1"]["mean"], 0.1 * mean)
    np.testing.assert_allclose(after["batchnorm1"]["variance"], 0.9 + 0.1 * variance)
    assert before["batchnorm1"]["mean"].tolist() == [0.0] * 4


def _first_batch(dataset: Dataset, dtype: str = "float64", n: int = 32) -> Batch:
    with batches(dataset, dataset.train, BatchPlan(((0, 200),), n, 0), dtype) as ready:
        return next(ready)


# --- several passes, so many steps, and what a rule does ---


def test_several_passes_are_presentations_one_after_the_other(dataset: Dataset) -> None:
    """The last one is cut short. No rate falls, so that where in the run they are does not matter."""
    once, one_by_one = (_replica(dataset, schedule="constant") for _ in range(2))
    trained = once.train(((0, 60), (100, 130)), 250, presentation=4, progress=(0.0, 0.5))
    assert trained.score.samples == 250
    scores = [
        one_by_one.train(((0, 60), (100, 130)), samples, presentation=number, progress=(0.0, 0.5)).score
        for number, samples in ((4, 90), (5, 90), (6, 70))
    ]
    np.testing.assert_array_equal(once.host_weights(), one_by_one.host_weights())
    assert trained.score.correct == sum(score.correct or 0 for score in scores)


def test_progress_runs_on_through_all_passes(dataset: Dataset) -> None:
    replica = _replica(dataset, layers=[{"layer": "dense", "units": 10}])
    replica.rate = Recorder([])
    replica.train(((0, 40),), 100, presentation=0, progress=(0.5, 1.0))
    expected = [0.5 + 0.5 * shown / 100 for shown in (0, 32, 40, 72, 80)]  # 40, 40, 20 in batches of 32
    assert [progress for progress, _ in replica.rate.asked] == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("steps", [1, 3, 7, 200, None])
def test_a_round_makes_the_steps_it_is_told(steps: int | None, dataset: Dataset) -> None:
    replica = _replica(dataset, layers=[{"layer": "dense", "units": 10}])
    seen: list[int] = []
    _round(replica, 200, steps=steps, after=lambda so_far, last: seen.append(so_far.score.samples))
    sizes = np.diff([0, *seen])
    assert len(seen) == (steps or 7)
    assert seen[-1] == 200
    assert sizes.max() - sizes.min() <= (1 if steps else 24)


def test_steps_are_those_of_each_pass(dataset: Dataset) -> None:
    replica = _replica(dataset, layers=[{"layer": "dense", "units": 10}])
    seen: list[int] = []
    after = lambda so_far, last: seen.append(so_far.score.samples)  # noqa: E731
    replica.train(((0, 40),), 100, presentation=0, progress=(0.0, 1.0), steps=2, after=after)
    assert seen == [20, 40, 60, 80, 90, 100]


def test_after_each_step_it_is_told_what_the_round_came_to_and_which_is_the_last(dataset: Dataset) -> None:
    replica, told = _replica(dataset, lr=0.01, schedule="linear"), list[tuple[Any, bool, bytes]]()
    trained = _round(replica, 100, after=lambda *what: told.append((*what, replica.host_weights().tobytes())))
    assert [last for _, last, _ in told] == [False, False, False, True]
    assert [so_far.score.samples for so_far, _, _ in told] == [32, 64, 96, 100]
    assert told[-1][0] == trained
    assert len({weights for _, _, weights in told}) == 4  # each after its own step
    assert [so_far.lr for so_far, _, _ in told] == sorted((so_far.lr for so_far, _, _ in told), reverse=True)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
@pytest.mark.parametrize("backend", ["numpy", "standin"])
def test_large_gradients_descend_from_where_they_were_made(
    dataset: Dataset, optimizer: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not through the vector of all, which others see that adjust it."""
    more: dict[str, Any] = {"momentum": 0.0, "nesterov": False} if optimizer == "adamw" else {}
    found = []
    for alone in (1, 64 * 8, 1 << 30):
        monkeypatch.setattr(daskcnn.training.replica, "ALONE", alone)
        replica = _replica(dataset, device=device_of(backend), optimizer=optimizer, **more)
        replica._grads[...] = np.nan
        _round(replica, 64)
        found.append(replica.host_weights())
        left = np.isnan(replica.device.backend.to_host(replica._grads)).sum()
        assert left == sum(at.stop - at.start for _, at in replica.layout.places() if 8 * (at.stop - at.start) >= alone)
        _round(replica, 64, adjust=lambda grads: grads)
        assert not np.isnan(replica.device.backend.to_host(replica._grads)).any()
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[2])


def test_weights_put_in_place_after_a_step_are_those_of_the_next(dataset: Dataset) -> None:
    """As a rule does that adopts the center in the middle of a round."""
    replica, start = _replica(dataset, momentum=0.0), initial_weights(_job(), dataset)[1]

    def after(so_far: Any, last: bool) -> None:
        replica.weights[...] = start

    def adjust(grads: Array) -> Array:
        seen.append(replica.host_weights().tobytes())
        return grads

    seen: list[bytes] = []
    _round(replica, 64, adjust=adjust, after=after)
    params = replica.layout.parameter_size * start.itemsize
    assert [weights[:params] for weights in seen] == [start.tobytes()[:params]] * 2
    np.testing.assert_array_equal(replica.host_weights(), start)


def test_the_rate_is_scaled(dataset: Dataset) -> None:
    scaled, faster = _replica(dataset, lr=0.05), _replica(dataset, lr=0.1)
    assert _round(scaled, scale=2.0).lr == _round(faster).lr
    np.testing.assert_array_equal(scaled.host_weights(), faster.host_weights())


def test_gradients_are_adjusted_before_momentum_and_decay(dataset: Dataset) -> None:
    """The adjusted ones are all that the optimizer sees: with none, only decay is left."""
    replica = _replica(dataset, momentum=0.0, weight_decay=0.1, lr=0.05, schedule="constant")
    n, start = replica.layout.parameter_size, replica.host_weights()
    seen: list[Array] = []

    def nothing(grads: Array) -> Array:
        seen.append(grads.copy())
        grads[...] = 0
        return grads

    _round(replica, 64, adjust=nothing)
    np.testing.assert_allclose(replica.host_weights()[:n], start[:n] * (1 - 0.05 * 0.1) ** 2, rtol=1e-12)
    assert [grads.shape for grads in seen] == [(n,)] * 2
    assert all(grads.any() for grads in seen)


def test_other_gradients_may_be_returned_than_were_given(dataset: Dataset) -> None:
    doubled, faster = (_replica(dataset, momentum=0.0, weight_decay=0.0, lr=lr) for lr in (0.05, 0.1))
    _round(doubled, adjust=lambda grads: 2 * grads)
    _round(faster)
    np.testing.assert_allclose(doubled.host_weights(), faster.host_weights(), rtol=1e-9, atol=1e-12)


# --- where in the run a step is ---


def test_progress_is_the_part_of_the_samples_shown(dataset: Dataset) -> None:
    replica = _replica(dataset)
    replica.rate = Recorder([])
    _round(replica, 150, progress=(0.25, 0.5))
    expected = [0.25 + 0.25 * shown / 150 for shown in (0, 32, 64, 96, 128)]
    assert [progress for progress, _ in replica.rate.asked] == pytest.approx(expected, rel=1e-15)
    assert [epoch for _, epoch in replica.rate.asked] == pytest.approx([3 * p for p in expected], rel=1e-15)


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("partition", PARTITIONERS)
def test_a_replica_alone_follows_the_schedule_exactly(partition: str, barrier: bool, dataset: Dataset) -> None:
    """Whatever the increments: at every step, progress is what was presented so far out of all presentations."""
    replica = _replica(dataset, layers=[{"layer": "dense", "units": 10}])
    replica.rate = Recorder([])
    rounds, shown, expected = Rounds(PARTITIONERS[partition](), 200, {"w0": 1.0}, epochs=3, barrier=barrier), 0, []
    while due := rounds.due():
        (each,) = due
        trained = replica.train(each.ranges, each.samples, presentation=each.number, progress=each.progress)
        expected += [(shown + done) / 600 for done in range(0, each.samples, 32)]
        shown += trained.score.samples
        rounds.finished("w0", 1.0)
    assert shown == 600
    assert [progress for progress, _ in replica.rate.asked] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("constant", ConstantRate()),
        ("linear", PolyDecay(1.0)),
        ({"name": "poly", "power": 0.5}, PolyDecay(0.5)),
        ({"name": "step", "every": 4, "factor": 0.5}, StepDecay(4.0, 0.5)),
        ({"name": "cosine", "final": 0.1}, CosineDecay(0.1)),
        ({"name": "onecycle", "peak": 0.2, "warmup": 2}, WarmUp(OneCycle(0.2), 2.0)),
    ],
)
def test_a_schedule_is_given_its_own_keys(table: Any, expected: Any) -> None:
    assert rate_of(_job(schedule=table).train.schedule) == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_asked_for(name: str) -> None:
    assert type(rate_of(Schedule.model_validate({"name": name}))) is SCHEDULES[name]


def test_without_momentum_there_is_nothing_to_look_ahead_with() -> None:
    assert optimizer_of(_job(momentum=0.0, weight_decay=0.1)) == SGD(0.0, False, 0.1)
    assert optimizer_of(_job(momentum=0.5)) == SGD(0.5, True, 1e-3)


def test_an_optimizer_is_given_its_own_keys() -> None:
    """Those of its table, and those of `[train]` that it shares with others."""
    job = _job(optimizer={"name": "adamw", "beta1": 0.5}, weight_decay=0.1)
    assert optimizer_of(job) == AdamW(0.5, 0.999, 1e-8, 0.1)
    assert optimizer_of(_job(optimizer="lars", momentum=0.5)) == LARS(0.001, 0.5, 1e-8, 1e-3)
    around: dict[str, Any] = {"optimizer": "adamw", "lookahead": {"steps": 3}, "ema": 0.9}
    ahead = Lookahead(AdamW(weight_decay=1e-3), 3, 0.5)
    assert optimizer_of(_job(strategy="layer", **around)) == Averaged(ahead, 0.9)
    assert optimizer_of(_job(**around)) == ahead  # the server averages the center


def test_gradients_are_clipped_once_they_are_adjusted(dataset: Dataset) -> None:
    options: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.0, "lr": 0.5, "schedule": "constant"}
    for most, moved in ((0.02, 0.01), (1e-6, 5e-7)):
        replica = _replica(dataset, clip=most, **options)
        before = replica.host_weights()
        replica.step(_first_batch(dataset, "float64"), StepPace(0.5), lambda grads: 100 * grads)
        n = replica.layout.parameter_size
        assert np.linalg.norm((replica.host_weights() - before)[:n]) == pytest.approx(moved)


def test_layers_have_rates_of_their_own(dataset: Dataset) -> None:
    """A step of plain descent."""
    options: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.1}
    plain, own = _replica(dataset, **options), _replica(dataset, rates={"conv*": 0.5, "conv2": 2.0}, **options)
    start = plain.host_weights()
    for replica in (plain, own):
        replica.step(_first_batch(dataset, "float64"), StepPace(0.1))
    places = dict(plain.layout.places())
    for layer, factor in (("conv1", 0.5), ("conv2", 2.0), ("dense1", 1.0)):
        for name in ("w", "b"):
            at = places[f"{layer}/{name}"]
            np.testing.assert_allclose(
                own.weights[at] - start[at], factor * (plain.weights[at] - start[at]), atol=1e-15
            )


def test_biases_decay_unless_they_are_left_out(dataset: Dataset) -> None:
    options: dict[str, Any] = {"momentum": 0.0, "weight_decay": 0.1}
    without, decaying = _replica(dataset, decay_all=False, **options), _replica(dataset, **options)
    at = dict(without.layout.places())["dense1/b"]
    for replica in (without, decaying):
        replica.weights[at] = 1.0
        replica.step(_first_batch(dataset, "float64"), StepPace(0.1))
    np.testing.assert_allclose(without.weights[at] - decaying.weights[at], 0.1 * 0.1, rtol=1e-9)


def test_lookahead_begins_a_round_where_the_weights_are(dataset: Dataset) -> None:
    """A merge has moved them."""
    replica = _replica(dataset, lookahead={"steps": 4})
    _round(replica, 64)
    merged = replica.host_weights() + 1.0
    replica.adopt(merged)
    round_ = Round("w", 1, ((0, 200),), 64, (0.0, 0.5))
    local = Local(replica.weights, replica.weights)
    with closing(steps_of_round(replica, RULES["sgwu"](), round_, local)) as steps:
        np.testing.assert_array_equal(replica.host_optimizer().vectors[-1], merged[: replica.layout.parameter_size])
        next(steps)
    assert replica.optimizer_state.count == 3


@pytest.mark.parametrize(("progress", "kept"), [(0.0, 1.0), (0.5, 0.9375), (0.9, 0.6355)])
def test_lookahead_keeps_what_the_progress_of_the_run_asks_for(progress: float, kept: float, dataset: Dataset) -> None:
    alike: dict[str, Any] = {"momentum": 0.0, "schedule": "constant"}
    plain = _replica(dataset, **alike)
    ahead = _replica(dataset, **alike, lookahead={"steps": 1, "alpha": 1.0, "last": 0.5})
    start, n = plain.host_weights(), plain.layout.parameter_size
    for replica in (plain, ahead):
        _round(replica, 32, progress=(progress, 1.0))
    moved, expected = ((replica.host_weights() - start)[:n] for replica in (ahead, plain))
    np.testing.assert_allclose(moved, kept * expected, rtol=1e-9, atol=1e-15)


def test_the_validation_slice_is_not_trained_on(dataset: Dataset) -> None:
    assert training_samples(_job(), dataset) == 200


# --- weights and momentum from elsewhere ---


def test_adopted_vectors_are_copied(device: Device, dataset: Dataset) -> None:
    replica, other = _replica(dataset, "float32", device), _replica(dataset, "float32")
    _round(other)
    weights, state = other.host_weights(), other.host_optimizer()
    for array in (weights, state.vectors):
        array.flags.writeable = False  # as they come from the network
    replica.adopt(weights)
    replica.adopt_optimizer(state)
    np.testing.assert_array_equal(replica.host_weights(), weights)
    np.testing.assert_array_equal(replica.host_optimizer().vectors, state.vectors)
    assert replica.optimizer_state.count == state.count > 0
    _round(replica, presentation=1)
    _round(other, presentation=1)
    np.testing.assert_allclose(replica.host_weights(), other.host_weights(), rtol=1e-4, atol=1e-6)
    kept = replica.host_optimizer().vectors
    replica.adopt_optimizer(None)
    assert not replica.host_optimizer().vectors.any()
    assert kept.any()


def test_a_replica_works_on_a_device_as_on_the_host(dataset: Dataset) -> None:
    host, own = (_replica(dataset, device=device_of(name)) for name in ("numpy", "standin"))
    # compiled loops add up in another order than the device's expressions
    found, expected = _round(own).score, _round(host).score
    assert replace(found, loss_sum=expected.loss_sum) == expected
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-13)
    np.testing.assert_allclose(own.host_weights(), host.host_weights(), rtol=0, atol=1e-13)
    found, expected = (replica.evaluate(dataset.train, 200, 230) for replica in (own, host))
    assert replace(found, loss_sum=expected.loss_sum) == expected
    assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-13)
    assert conv_seconds(own, steps=1).keys() == conv_seconds(host, steps=1).keys()


# --- judging ---


def test_evaluation_is_the_loss_of_a_pass_outside_training(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = _replica(dataset)
    _round(replica)
    before = replica.host_weights()
    images, labels = dataset.train.read(170, 230)
    params, state = replica.layout.views(before)
    scores, _, _ = replica.model.forward(params, state, normalise(dataset, images, "float64"), Context(Device()))
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    likelihood = (shifted / shifted.sum(axis=1, keepdims=True))[np.arange(60), labels]
    for batch in (500, 60, 7, 1):
        monkeypatch.setattr(daskcnn.training.replica, "EVALUATION_BATCH", batch)
        found = replica.evaluate(dataset.train, 170, 230)
        assert found.loss == pytest.approx(-np.log(likelihood).mean(), rel=1e-12)
        assert (found.correct, found.samples) == (int((scores.argmax(axis=1) == labels).sum()), 60)
    np.testing.assert_array_equal(replica.host_weights(), before)


def test_a_part_that_is_drawn_is_judged_as_its_samples_are(dataset: Dataset) -> None:
    replica = _replica(dataset)
    found = replica.evaluate(dataset.train, 205, 217, draw=4)
    seed = replica.job.train.seed
    drawn = JudgedPart(205, 217, 4).indices(len(dataset.train) - replica.job.data.validation, len(dataset.train), seed)
    each = [replica.evaluate(dataset.train, int(i), int(i) + 1) for i in drawn]
    assert (found.correct, found.samples) == (sum(score.correct or 0 for score in each), 12)
    assert found.loss == pytest.approx(sum(score.loss_sum for score in each) / 12, rel=1e-12)
    assert [*drawn] != [*range(205, 217)]


def test_other_weights_are_judged_without_the_replica_s_own(device: Device, dataset: Dataset) -> None:
    replica, other = _replica(dataset, "float32", device), _replica(dataset, "float32")
    _round(other)
    start, velocity = replica.host_weights(), replica.host_optimizer().vectors
    theirs = device.backend.from_host(other.host_weights())
    found, expected = replica.evaluate(dataset.test, 0, 40, weights=theirs), other.evaluate(dataset.test, 0, 40)
    assert (found.correct, found.samples) == (expected.correct, expected.samples)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert found.loss != replica.evaluate(dataset.test, 0, 40).loss
    np.testing.assert_array_equal(replica.host_weights(), start)
    np.testing.assert_array_equal(replica.host_optimizer().vectors, velocity)
    np.testing.assert_array_equal(device.backend.to_host(theirs), other.host_weights())


def test_parts_of_an_evaluation_add_up(dataset: Dataset) -> None:
    replica = _replica(dataset)
    parts = [replica.evaluate(dataset.test, lo, hi, whole=40) for lo, hi in ((0, 13), (13, 13), (13, 40))]
    whole, total = replica.evaluate(dataset.test, 0, 40, whole=40), reduce(Score.__add__, parts)
    assert total.judged.auc == whole.judged.auc is not None
    assert replica.evaluate(dataset.test, 0, 40).classes is None, "nobody asked"
    assert (total.correct, total.samples) == (whole.correct, whole.samples)
    assert total.loss == pytest.approx(whole.loss, rel=1e-12)


scores = st.builds(Score, st.integers(-9, 9).map(float), st.integers(0, 9), st.integers(0, 9))


@given(scores, scores, scores)
def test_scores_add_up_in_any_order(a: Score, b: Score, c: Score) -> None:
    assert (a + b) + c == c + (b + a)
    assert a + Score(0.0, 0, 0) == a


def test_a_score_of_nothing_has_no_loss() -> None:
    nothing = Score(0.0, 0, 0)
    assert math.isnan(nothing.loss)
    assert nothing.accuracy == 0
    assert (Score(6.0, 1, 4).loss, Score(6.0, 1, 4).accuracy) == (1.5, 0.25)


# --- ending early ---


def _loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("daskcnn-loader")]


def test_a_stop_ends_a_round_before_its_next_step(dataset: Dataset) -> None:
    replica, steps, recorder = _replica(dataset), list[int](), Recorder([])
    replica.rate = recorder

    def stop() -> bool:
        steps.append(len(recorder.asked))
        return len(steps) == 3

    with pytest.raises(Stopped):
        _round(replica, stop=stop)
    assert steps == [0, 1, 2]
    assert not _loader_threads()


def test_a_stop_ends_an_evaluation(dataset: Dataset) -> None:
    with pytest.raises(Stopped):
        _replica(dataset).evaluate(dataset.test, 0, 40, lambda: True)
    assert not _loader_threads()


@dtypes
def test_a_loss_that_is_not_finite_ends_training(dtype: str, dataset: Dataset) -> None:
    """With weights and momentum as they were, and without warnings."""
    replica = _replica(dataset, dtype)
    _round(replica)
    bad = replica.host_weights()
    bad[-9] = np.nan
    replica.adopt(bad)
    velocity = replica.host_optimizer().vectors
    with pytest.raises(Diverged, match=r"loss = nan.*learning rate 0\.05.*lower train\.lr"):
        replica.step(_first_batch(dataset, dtype), StepPace(0.05))
    np.testing.assert_array_equal(replica.host_weights(), bad)
    np.testing.assert_array_equal(replica.host_optimizer().vectors, velocity)
    assert math.isnan(replica.evaluate(dataset.test, 0, 40).loss)


def test_a_rate_that_is_far_too_high_diverges_without_warnings(dataset: Dataset) -> None:
    layers = [{"layer": "conv", "kernels": 4, "size": 3}, {"layer": "relu"}, {"layer": "dense", "units": 10}]
    replica = _replica(dataset, "float32", layers=layers, lr=1e30, loss="squared")
    with pytest.raises(Diverged):
        _round(replica)
    assert not _loader_threads()


# --- time ---


def test_seconds_are_those_of_the_clock(dataset: Dataset) -> None:
    """A clock that ticks once a look: every batch is waited for one second, and takes one."""
    trained = _round(_replica(dataset))
    assert (trained.load, trained.compute) == (7.0, 7.0)


@pytest.mark.parametrize("throttle", [1.0, 3.5])
def test_a_throttle_stretches_what_is_computed(throttle: float, dataset: Dataset) -> None:
    ticks, pauses = count(), list[float]()
    replica = Replica(
        _job(), dataset, Device(), clock=lambda: float(next(ticks)), throttle=throttle, pause=pauses.append
    )
    trained = _round(replica)
    assert (trained.load, trained.compute) == (7.0, 7 * throttle)
    assert pauses == ([2.5] * 7 if throttle > 1 else [])
    assert step_seconds(replica, steps=3) * 32 == throttle
    assert [each * 32 for each in conv_seconds(replica, steps=3).values()] == [throttle] * 2


@pytest.mark.parametrize(("own", "pause", "seconds"), [(1.0, 1.0, 4.0), (1.5, 3.0, 6.0), (0.5, 0.0, 3.0)])
def test_a_wait_for_a_core_is_not_stretched(own: float, pause: float, seconds: float) -> None:
    """Work is there after 3 s. It takes 4 times its own seconds, or as long as it took if that is longer."""
    pauses, ticks, of_thread = list[float](), iter([0.0, 3.0]), iter([0.0, own])
    watch = Stopwatch(lambda: next(ticks), lambda: None, 4.0, pauses.append, lambda: next(of_thread))
    assert watch.seconds(lambda: None) == seconds
    assert pauses == [pause]


class ScriptedClock:
    """Every second look comes these many 64ths of a second after the one before."""

    def __init__(self, durations: list[float]) -> None:
        self.looks = [look for each in durations for look in (0.0, each / 64)]

    def __call__(self) -> float:
        return self.looks.pop(0)


def test_calibration_drops_the_warm_up_and_keeps_the_median(dataset: Dataset) -> None:
    clock = ScriptedClock([100.0, 5.0, 1.0, 2.0, *(70.0, 8.0, 4.0, 9.0), *(50.0, 3.0, 3.0, 99.0)])
    replica = Replica(_job(), dataset, Device(), clock=clock)
    assert step_seconds(replica, steps=3) == 2 / 64 / 32
    assert conv_seconds(replica, steps=3) == {"conv1": 8 / 64 / 32, "conv2": 3 / 64 / 32}
    assert not clock.looks


def test_a_slow_worker_repeats_no_measurement_for_longer_than_it_tells(dataset: Dataset) -> None:
    clock = ScriptedClock([64 * seconds for seconds in (9.0, 1.5, 1.0, 8.0, 2.5, 7.0, 0.5, 1.5)])
    replica = Replica(_job(), dataset, Device(), clock=clock)
    assert step_seconds(replica, steps=5) == 1.25 / 32
    assert conv_seconds(replica, steps=5) == {"conv1": 2.5 / 32, "conv2": 1.0 / 32}


def test_the_fixed_part_of_a_step_is_what_an_eighth_of_its_samples_does_not_save(dataset: Dataset) -> None:
    def fixed(took: float, whole: float) -> float:
        clock = ScriptedClock([100.0, took, took, took])
        return 64 * fixed_seconds(Replica(_job(), dataset, Device(), clock=clock), whole / 64 / 32, steps=3)

    assert fixed(0.5 + 1.0 / 8, 1.5) == pytest.approx(0.5)
    assert fixed(0.1, 1.6) == 0.0  # fewer samples are quicker each
    assert fixed(2.0, 1.5) == 1.5  # a disturbance: no more than the whole step


@dtypes
def test_calibration_leaves_the_replica_as_it_was(dtype: str, device: Device, dataset: Dataset) -> None:
    replica = _replica(dataset, dtype, device)
    _round(replica, 64)
    weights, velocity = replica.host_weights(), replica.host_optimizer().vectors
    fixed_seconds(replica, step_seconds(replica, steps=2), steps=2)
    np.testing.assert_array_equal(replica.host_weights(), weights)
    np.testing.assert_array_equal(replica.host_optimizer().vectors, velocity)


def test_a_network_without_convolutions_is_calibrated_too(dataset: Dataset) -> None:
    replica = _replica(dataset, layers=[{"layer": "dense", "units": 10}], batch_size=500)
    assert step_seconds(replica, steps=1) == 1 / 200  # no more than the samples there are
    assert conv_seconds(replica, steps=1) == {}


def test_as_many_are_scored_at_once_as_fit() -> None:
    conv = {"layer": "conv", "kernels": 8, "size": 3, "stride": 2, "pad": 2}
    model = build_model(None, [conv, {"layer": "dense", "units": 10}], (32, 32, 3), 10)
    small, large = Device(workspace_limit=1 << 20), Device()
    assert evaluation_batch(model, (32, 32, 3), "float32", large, 500) == 500
    fits = evaluation_batch(model, (32, 32, 3), "float32", small, 500)
    assert 1 < fits < 500
    ((_, spec),) = convolutions(model, (32, 32, 3), fits, "float32")
    plan(spec, small)
    with pytest.raises(ValueError, match="smaller batch"):
        plan(replace(spec, N=2 * fits), small)


@pytest.mark.parametrize(
    ("name", "side", "size"), [("quick", 32, 500), ("resnet20", 32, 500), ("vgg16", 32, 500), ("vgg16", 224, 10)]
)
def test_large_maps_are_scored_a_few_at_once(name: str, side: int, size: int) -> None:
    """256 MiB: the second convolution of vgg16 reads and writes 64 channels of float32."""
    model, shape = build_model(name, None, (side, side, 3), 10), (side, side, 3)
    assert evaluation_batch(model, shape, "float32", Device(), 500) == size
    assert workspace_batch(model, shape, "float32", Device(), 500) == 500


def test_an_image_however_large_is_scored_alone() -> None:
    model = Sequential((("relu", ReLU()),))
    assert evaluation_batch(model, (1 << 14, 1 << 14, 3), "float64", Device(), 500) == 1


# --- minibatches that change in a round ---


def test_minibatches_that_do_not_change_are_those_of_the_round(dataset: Dataset) -> None:
    replica, other = _replica(dataset, schedule="linear"), _replica(dataset, schedule="linear")
    _round(replica, 150, steps=7)
    _round(other, 150, steps=7, sizes=StepSizes(150, 7))
    assert replica.host_weights().tobytes() == other.host_weights().tobytes()


def test_a_replica_with_more_than_its_samples_goes_around_them_again(dataset: Dataset) -> None:
    """A pass shows each sample once at most; another has another order; the learning rate goes on as planned."""
    sizes, plans, seen = StepSizes(60, 6), list[BatchPlan](), list[int]()
    replica = _replica(dataset)
    replica.rate = Recorder([])
    how: dict[str, Any] = {"presentation": 1, "progress": (0.0, 0.6), "steps": 6, "sizes": sizes}
    with closing(replica.training(((0, 60),), 60, **how)) as steps:
        for made, trained in enumerate(steps, 1):
            seen.append(trained.score.samples)
            if made == 1:
                sizes.change(1 + LAG, 25)
    assert seen == [10, 20, 30, 65, 100, 135]
    assert [progress for progress, _ in replica.rate.asked] == pytest.approx([0.1 * made for made in range(6)])
    sizes, made = StepSizes(60, 6), 0
    sizes.change(4, 25)
    for each in shared_presentations(replica.job, ((0, 60),), sizes, 1):
        plans.append(each)
        order, edges = presentation_order(dataset, dataset.train, each), list(batch_edges(each, 60))
        made += len(edges)
        assert all(len(set(order[lo:hi].tolist())) == hi - lo for lo, hi in edges)
        assert edges[-1][1] <= len(set(order.tolist())) == 60
    assert made == 6
    assert len({each.presentation for each in plans}) == len(plans) == 4


def test_a_minibatch_may_be_larger_than_all_of_a_replica_s_samples(dataset: Dataset) -> None:
    sizes = StepSizes(12, 6)
    sizes.change(5, 30)
    replica = _replica(dataset)
    how: dict[str, Any] = {"presentation": 0, "progress": (0.0, 1.0), "steps": 6, "sizes": sizes}
    with closing(replica.training(((0, 12),), 12, **how)) as steps:
        assert [each.score.samples for each in steps] == [2, 4, 6, 8, 40, 72]
