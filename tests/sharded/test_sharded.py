"""A network cut for layer sharding computes what it computes whole, and takes the same steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.job.tables import Job
from daskcnn.nn import (
    LOSSES,
    Layout,
    OptimizerState,
    Params,
    State,
    StepPace,
    init_network,
    labels_for,
    leaves,
    sequential_from_spec,
)
from daskcnn.nn.layers import BatchNorm, Conv, Dense, MaxPool, ReLU, Tanh
from daskcnn.nn.layers.dense import Bias
from daskcnn.nn.score import Score
from daskcnn.nn.sequential import Sequential
from daskcnn.partition import kernel_shards
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.passes import (
    Held,
    ShardResidual,
    descended,
    descended_alike,
    gradient_vector,
    gradients_of,
    loss_of,
    merged_backward,
    merged_forward,
    own_addends,
    shard_backward,
    shard_forward,
    summed_up,
)
from daskcnn.sharded.pieces import Edge, Edges, Piece, cut_pieces, join_pieces
from daskcnn.sharded.stages import By, Share, neighbours, samples_first, shares_of
from daskcnn.store import Batch, BatchPlan, Dataset, batches
from daskcnn.training.replica import Replica
from tests.standin import device_of
from tests.toy_data import toy_dataset

BATCH = 8
STEPS = {"float64": 29, "float32": 50}
"""More than a pass, which has 26; rounding in float32 adds up."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
# rounding may turn a ReLU or the maximum of a pool the other way: a jump in the curve, the higher the rate the larger
RATE = {"float64": 0.01, "float32": 0.0003}


def _conv(kernels: int, **options: Any) -> dict[str, Any]:
    return {"layer": "conv", "kernels": kernels, "size": 3, **options}


def _lrn(size: int) -> dict[str, Any]:
    return {"layer": "lrn", "size": size, "alpha": 0.5}  # it makes a difference


def _spec(*layers: str | dict[str, Any]) -> list[dict[str, Any]]:
    own: dict[str, dict[str, Any]] = {
        "maxpool": {"size": 2},
        "averagepool": {"size": 2},
        "dense": {"units": 10},
        "dropout": {"rate": 0.3},
    }
    return [{"layer": each, **own.get(each, {})} if isinstance(each, str) else each for each in layers]


_RESIDUAL = {"layer": "residual", "path": _spec(_conv(4, pad=1), "batchnorm", "relu", _conv(6, pad=1), "dropout")}
_PROJECTED = {
    "layer": "residual",
    "path": _spec(_conv(5, pad=1, stride=2), "batchnorm", "relu", _conv(8, pad=1), "batchnorm"),
    "shortcut": _spec({"layer": "conv", "kernels": 8, "size": 1, "stride": 2}, "batchnorm"),
}
_PADDED = {
    "layer": "residual",
    "path": _spec(_conv(9, pad=1, stride=2), "relu", _conv(11, pad=1)),
    "shortcut": [{"layer": "maxpool", "size": 1, "stride": 2}, {"layer": "pad", "channels": 5}],
}
"""Shortcuts of a block that halves the map: a convolution, and zeros behind the channels."""
_BRANCHES = {
    "layer": "branches",
    "branches": [
        _spec({**_conv(3), "size": 1}, "relu"),
        _spec(_conv(4, pad=1), "batchnorm", _conv(5, pad=1), "dropout"),
        _spec({"layer": "pad", "size": 1}, {"layer": "maxpool", "size": 3, "stride": 1}, {**_conv(2), "size": 1}),
    ],
}
_NESTED = {"layer": "residual", "path": [_BRANCHES, {**_conv(6), "size": 1}, {**_RESIDUAL, "shortcut": _spec("tanh")}]}
NETWORKS: dict[str, dict[str, Any]] = {
    "quick": {"name": "quick"},
    "C1:C2": {"name": "6:10"},
    "begins without a convolution": {
        "layers": _spec("averagepool", "batchnorm", _conv(5, bias=False), "relu", "maxpool", _conv(2), "tanh", "dense")
    },
    "batch norm": {"layers": _spec(_conv(6, stride=2), "batchnorm", "relu", _conv(5, pad=1), "batchnorm", "dense")},
    "dropout": {"layers": _spec(_conv(6), "relu", "maxpool", "dropout", _conv(5), "dropout", "dense")},
    "convolutions in a row": {"layers": _spec("maxpool", _conv(6, stride=3), {**_conv(10), "size": 2}, "flatten")},
    "normalised": {
        "layers": _spec(
            *(_conv(36), "batchnorm", _lrn(3), "dropout", "relu", "maxpool"),
            *(_conv(40), _lrn(3), "batchnorm", "tanh", "averagepool", "dense"),
        )
    },
    "no bias": {"layers": _spec(_conv(4), "relu", _conv(6), _lrn(3), {"layer": "dense", "units": 10, "bias": False})},
    "means of maps": {"layers": _spec(_conv(5), "gelu", _conv(6), "silu", "globalpool", "dropout", "dense")},
    "residual": {
        "layers": _spec(
            *(_conv(6, pad=1), "relu", _RESIDUAL, "relu"),
            {"layer": "branches", "branches": [_spec(_conv(3, pad=1), "batchnorm"), [], _spec("tanh")]},
            *(_conv(5), "relu", "globalpool", "dense"),
        )
    },
    "groups": {
        "layers": _spec(
            *(_conv(6, size=[3, 1], pad=[1, 0]), "relu"),
            {"layer": "residual", "path": _spec("dropout", _conv(4, groups=2), "tanh", _conv(6, groups=2, pad=2))},
            *(_conv(12, groups=3, dilation=[1, 2], pad="same"), _lrn(3), "tanh", "maxpool"),
            *(_conv(24, groups=12, stride=2, pad="same"), "tanh", "dense"),
        )
    },
    "decoder": {
        "layers": _spec(
            *(_conv(5), {"layer": "batchnorm", "scale": False, "shift": False}, "tanh", "averagepool"),
            *({"layer": "dense", "units": 7}, {"layer": "dense", "units": 245, "tied": "dense1"}),
            *({"layer": "reshape", "shape": [7, 7, 5]}, {"layer": "conv", "kernels": 4, "size": 1}),
            *({"layer": "upsample"}, {"layer": "scale", "factor": 0.5}, {**_conv(3), "pad": 2}),
        ),
        "train": {"loss": "reconstruction"},
    },
    "projection": {"layers": _spec(_conv(6), "relu", _PROJECTED, "relu", _PROJECTED, "globalpool", "dense")},
    "zeros behind": {"layers": _spec(_conv(6), _lrn(3), _PADDED, "relu", "dropout", _conv(4), "dense")},
    "branches": {"layers": _spec(_conv(6), "relu", _BRANCHES, "maxpool", _BRANCHES, "batchnorm", "dense")},
    "nested": {"layers": _spec(_conv(6), "maxpool", _NESTED, "relu", "dropout", "globalpool", "dense")},
    "begins with a sum": {
        "layers": _spec(
            {"layer": "residual", "path": _spec(_conv(5, pad=1), "relu", _conv(3, pad=1))},
            {"layer": "add", "branches": [_spec(_conv(7, pad=1)), _spec(_conv(4), "relu", _conv(7, pad=2), "tanh")]},
            *("batchnorm", "averagepool", _BRANCHES, "flatten", "dense"),
        )
    },
    "no convolution": {"layers": _spec("averagepool", "batchnorm", "dropout", "dense", "tanh", "dense")},
}
# seconds of each worker; the last worker of `idle` is too slow to get any kernel, `sliver`'s second gets one of forty
WORKERS: dict[str, tuple[float, ...]] = {
    "one": (1.0,),
    "two": (1.0, 1.0),
    "three": (1.0, 1.0, 1.0),
    "unequal": (1.0, 3.0),
    "idle": (1.0, 2.0, 1e4),
    "sliver": (1.0, 20.0, 1.0),
}

networks = pytest.mark.parametrize("network", NETWORKS)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def as_on_a_worker() -> Iterator[None]:
    with single_threaded_blas():
        yield


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"))


def _job(network: str, dtype: str, **train: Any) -> Job:
    own = NETWORKS[network]
    train = own.get("train", {}) | train
    return Job.model_validate(
        {
            "data": {"validation": 27},
            "model": {"dtype": dtype} | {key: value for key, value in own.items() if key != "train"},
            "train": {"batch_size": BATCH, "epochs": 2, "lr": RATE[dtype], **train},
        }
    )


def _exact() -> Device:
    """Winograd's rounding turns many more ReLUs and maxima the other way."""
    return Device(exact=True)


def _replica(network: str, dtype: str, dataset: Dataset, device: Device | None = None, **train: Any) -> Replica:
    return Replica(_job(network, dtype, **train), dataset, device or Device(), clock=lambda: 0.0)


def _batches(dataset: Dataset, dtype: str, steps: int) -> list[Batch]:
    """Two passes over 203 samples: some batches are partial ones."""
    found: list[Batch] = []
    for presentation in range(2):
        with batches(dataset, dataset.train, BatchPlan(((0, 203),), BATCH, 0, presentation), dtype) as ready:
            found += ready
    return [Batch(_sent(b.x), b.labels, b.keys) for b in found][:steps]


def _sent(array: Array) -> Array:
    """What arrives elsewhere: a copy on the host that nobody can write to."""
    assert type(array) is np.ndarray
    copy = array.copy()
    copy.flags.writeable = False
    return copy


# --- one process that plays the workers ---


@dataclass
class Shards:
    """The pieces of a network on several devices: kernels by worker, merged layers on the first one."""

    kernels: list[dict[int, int]]
    shards: list[dict[int, Piece]]
    merged: list[Piece | None]


class Workers:
    """Takes steps as the cluster layer does: a worker without kernels of a layer has no part in it.

    by: what of the first convolution is divided.
    """

    def __init__(
        self, replica: Replica, devices: Sequence[Device], seconds: Sequence[float], *, by: By = "kernels"
    ) -> None:
        self.replica, self.devices, self.home = replica, devices, devices[0]
        stages = samples_first(stages_of(replica.model)) if by == "samples" else stages_of(replica.model)
        counts = [kernel_shards(s.conv.kernels, seconds) if s.conv else [] for s in stages]
        self.kernels = [{w: n for w, n in enumerate(own) if n} for own in counts]
        self.stages = [s.spread_for(list(own.values())) for s, own in zip(stages, self.kernels, strict=True)]

    def shares(self, i: int) -> dict[str, Share]:
        """By worker, whose names are their numbers."""
        own = self.kernels[i]
        return dict(zip(map(str, own), shares_of(list(own.values()), self.stages[i].reach), strict=True))

    def place(self, weights: Array, optimizer: OptimizerState) -> Shards:
        counts = [list(own.values()) for own in self.kernels]
        shards, merged = cut_pieces(self.stages, self.replica.layout, weights, optimizer, counts)
        placed = [
            {w: _frozen(piece).on(self.devices[w]) for w, piece in zip(own, pieces, strict=True)}
            for own, pieces in zip(self.kernels, shards, strict=True)
        ]
        return Shards(self.kernels, placed, [piece and _frozen(piece).on(self.home) for piece in merged])

    def collect(self, at: Shards) -> tuple[Array, OptimizerState]:
        shards = [[piece.on_host(self.devices[w]) for w, piece in own.items()] for own in at.shards]
        merged = [piece and piece.on_host(self.home) for piece in at.merged]
        return join_pieces(self.stages, self.replica.layout, shards, merged)

    def step(self, at: Shards, batch: Batch, pace: StepPace) -> tuple[Score, Shards]:
        passed = self._forward(at, batch)
        labels = labels_for(self.replica.loss, batch.x, batch.labels)
        dscores, score = loss_of(self.replica.loss, passed[-1].y, labels, self.home)
        new = Shards(at.kernels, [{} for _ in self.stages], [None for _ in self.stages])
        parts: list[list[Held]] = [[] for _ in self.stages]
        parts[-1].append(Held(0, _sent(dscores)))
        for i in reversed(range(len(self.stages))):
            stage, went, whole = self.stages[i], passed[i], at.merged[i]
            total = summed_up(parts[i])
            assert (total.start, total.stop) == (0, went.y.shape[-1])
            args = stage, went.residual, [_sent(total.array)], whole, batch.keys, self.home
            dy, grads = merged_backward(*args, need_dx=bool(at.kernels[i] or stage.inputs))
            new.merged[i] = whole and self._descended(whole, grads, went.state, pace, self.home)
            widths, vectors = self._widths(passed), []
            for source, part in gradients_of(stage, None, dy, (), widths) if not at.kernels[i] else ():
                parts[source].append(part)
            for (w, piece), share in zip(at.shards[i].items(), self.shares(i).values(), strict=True):
                assert dy is not None
                device, kept, samples = self.devices[w], went.kept[w], self._samples(i, share, batch)
                wanted = slice(None) if stage.summed else share.graded
                own = dy[..., samples, :] if stage.by == "samples" else dy[..., wanted]
                to_shard = stage, kept, [_sent(own)], piece, self._channels(i, share), batch.keys[samples], device
                dx, grads, more = shard_backward(*to_shard, need_dx=bool(stage.inputs))
                if stage.by == "samples":
                    vectors.append(_sent(gradient_vector(piece, grads, device)))
                else:
                    new.shards[i][w] = self._descended(piece, grads, kept.state, pace, device)
                assert (dx is None) == (not stage.inputs)
                for source, part in gradients_of(stage, share, dx, more, widths):
                    parts[source].append(Held(part.start, _sent(part.array)))
            for w, piece in at.shards[i].items() if vectors else ():
                new.shards[i][w] = descended_alike(piece, vectors, self.replica.descent, pace, self.devices[w])
        return score, new

    def _samples(self, i: int, share: Share, batch: Batch) -> slice:
        return share.samples(len(batch.labels)) if self.stages[i].by == "samples" else slice(None)

    def _channels(self, i: int, share: Share) -> Share:
        return share.whole if self.stages[i].by == "samples" else share

    def _descended(self, piece: Piece, grads: Params, state: State, pace: StepPace, device: Device) -> Piece:
        return descended(piece, grads, state, self.replica.descent, pace, device)

    def _forward(self, at: Shards, batch: Batch) -> list[Passed]:
        """Every stage in turn."""
        passed: list[Passed] = []
        for i, stage in enumerate(self.stages):
            ys, kept = [], {}
            xs = [_sent(passed[source].y) for source in stage.inputs] or [batch.x]
            held = {source: Held(0, _sent(passed[source].y)) for source in stage.consumed}
            for w, piece in at.shards[i].items():
                share = self.shares(i)[str(w)]
                samples, channels = self._samples(i, share, batch), self._channels(i, share)
                own = xs if stage.inputs else [x[..., samples, :] for x in xs]
                addends = own_addends(stage, share, held, self._widths(passed), batch.x)
                args = own, piece, channels, self._edges(at, i, w), batch.keys[samples], self.devices[w]
                y, kept[w] = shard_forward(stage, *args, need_dx=bool(stage.inputs), addends=addends)
                ys.append(_sent(y))
            if stage.by == "samples":
                passed.append(Passed(np.concatenate(ys, axis=-2), kept, None, {}))
                continue
            y, residual, state = merged_forward(stage, ys or xs, at.merged[i], batch.keys, self.home)
            passed.append(Passed(_sent(y), kept, residual, state))
        return passed

    def _widths(self, passed: list[Passed]) -> dict[int, int]:
        return {i: each.y.shape[-1] for i, each in enumerate(passed)}

    def _edges(self, at: Shards, i: int, w: int) -> Edges:
        """Of the neighbours, as they arrive."""
        before: list[Edge] = []
        after: list[Edge] = []
        for other, side, count in neighbours(self.shares(i), str(w)):
            edge = at.shards[i][int(other)].edge(self.stages[i], side, count, self.devices[int(other)])
            (before if side == "right" else after).append((_tree(edge[0], _sent), _tree(edge[1], _sent)))
        return Edges(before, after)


@dataclass
class Passed:
    """What a stage's way there leaves: its output, and for the way back."""

    y: Array
    kept: dict[int, ShardResidual]
    residual: Any
    state: Any


def _frozen(piece: Piece) -> Piece:
    """The piece as it arrives from the driver."""
    params, state = ({k: _tree(v, _sent) for k, v in tree.items()} for tree in (piece.params, piece.state))
    return Piece(params, state, piece.optimizer.moved(_sent), piece.layout)


def _tree(value: Any, function: Callable[[Array], Any]) -> Any:
    return {k: _tree(v, function) for k, v in value.items()} if isinstance(value, dict) else function(value)


def _arrays(shards: Shards) -> Iterator[Array]:
    for piece in (*(p for own in shards.shards for p in own.values()), *filter(None, shards.merged)):
        yield piece.optimizer.vectors
        for tree in (piece.params, piece.state):
            yield from (leaf for _, leaf in leaves(tree))


@pytest.fixture(scope="module")
def alone(dataset: Dataset) -> Callable[[str, str], tuple[list[Score], Replica]]:
    """The scores of the steps of one replica by itself, and the replica."""

    @cache
    def train(network: str, dtype: str) -> tuple[list[Score], Replica]:
        replica = _replica(network, dtype, dataset, _exact())
        scores = []
        for i, batch in enumerate(_batches(dataset, dtype, STEPS[dtype])):
            loss, right = replica.step(batch, replica.pace_at(i / STEPS[dtype]))
            scores.append(Score(loss * len(batch.labels), right, len(batch.labels)))
        return scores, replica

    return train


# --- following a replica ---


BY_SAMPLES = ("quick", "C1:C2", "dropout", "no bias")
"""Networks whose first convolution can be divided by samples."""
DIVIDED: list[tuple[str, By]] = [*((name, "kernels") for name in NETWORKS), *((name, "samples") for name in BY_SAMPLES)]


def _following(network: str, by: By, workers: str, dtype: str) -> Any:
    """Every time: each network on three workers, one on all kinds of workers. Few of its kernels are a sliver."""
    kind = {"C1:C2": workers != "sliver", "normalised": workers == "sliver"}.get(network, False)
    every_time = (workers == "three" or kind) if dtype == "float64" else (network, workers) == ("C1:C2", "unequal")
    return pytest.param(network, by, workers, dtype, marks=() if every_time else pytest.mark.slow)


@pytest.mark.parametrize(
    ("network", "by", "workers", "dtype"),
    [_following(*divided, workers, dtype) for divided in DIVIDED for workers in WORKERS for dtype in TOLERANCE],
)
def test_a_sharded_network_follows_the_replica(
    network: str, by: By, workers: str, dtype: str, dataset: Dataset, alone: Callable[..., tuple[list[Score], Replica]]
) -> None:
    """The last minibatch of a pass has three samples only."""
    expected, trained = alone(network, dtype)
    replica, seconds = _replica(network, dtype, dataset), WORKERS[workers]
    group = Workers(replica, [_exact() for _ in seconds], seconds, by=by)
    shards, scores = group.place(replica.host_weights(), replica.host_optimizer()), []
    for i, batch in enumerate(_batches(dataset, dtype, STEPS[dtype])):
        score, shards = group.step(shards, batch, replica.pace_at(i / STEPS[dtype]))
        scores.append(score)
    tolerance = TOLERANCE[dtype]
    assert [s.loss for s in scores] == pytest.approx([s.loss for s in expected], rel=tolerance)
    assert [s.samples for s in scores] == [s.samples for s in expected]
    assert dtype == "float32" or [s.correct for s in scores] == [s.correct for s in expected]
    weights, state = group.collect(shards)
    assert {a.dtype for a in (weights, state.vectors, *_arrays(shards))} == {np.dtype(dtype)}
    scale = np.abs(trained.weights).max()
    np.testing.assert_allclose(weights, trained.weights, rtol=0, atol=tolerance * scale)
    assert state.count == trained.optimizer_state.count == STEPS[dtype]
    np.testing.assert_allclose(state.vectors, trained.optimizer_state.vectors, rtol=0, atol=tolerance * scale)


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "decay_all": False, "rates": {"conv1": 0.5, "dense*": 2.0}},
    {"optimizer": "adamw", "lookahead": {"steps": 3, "last": 0.2}, "ema": 0.9},
    {"optimizer": "sgd", "lookahead": {}, "rates": {"*norm*": 0.1}, "decay_all": False},
]


@pytest.mark.parametrize("train", OPTIMIZERS)
@pytest.mark.parametrize("network", ["normalised", "batch norm"])
def test_a_sharded_network_follows_the_replica_with_every_optimizer(
    train: dict[str, Any], network: str, dataset: Dataset
) -> None:
    alone, replica = (_replica(network, "float64", dataset, _exact(), **train) for _ in range(2))
    group = Workers(replica, [_exact()] * 3, WORKERS["three"])
    shards = group.place(replica.host_weights(), replica.host_optimizer())
    for i, batch in enumerate(_batches(dataset, "float64", 8)):
        pace = StepPace(0.01, i / 8)
        score, shards = group.step(shards, batch, pace)
        assert score.loss == pytest.approx(alone.step(batch, pace)[0], rel=1e-9)
    weights, state = group.collect(shards)
    # the gradient of a bias in front of batch normalising is what rounding leaves, which AdamW divides by as little
    rounded = network == "batch norm" and "adamw" in str(train)
    tolerance = 1e-8 if rounded else 1e-9
    np.testing.assert_allclose(weights, alone.weights, rtol=0, atol=tolerance)
    # weights that lookahead and the average keep are among them
    np.testing.assert_allclose(state.vectors, alone.optimizer_state.vectors, rtol=0, atol=tolerance)
    assert state.count == alone.optimizer_state.count == 8


@pytest.mark.parametrize("devices", [("numpy",) * 3, ("standin", "numpy", "standin")])
@pytest.mark.parametrize("train", [{"weight_decay": 0.0}, {"weight_decay": 0.01}, *OPTIMIZERS[:2]])
def test_workers_that_divide_samples_keep_the_same_kernels_to_the_bit(
    devices: tuple[str, ...], train: dict[str, Any], dataset: Dataset
) -> None:
    """However unequal their parts are; the second one's has no sample of any minibatch."""
    replica = _replica("quick", "float32", dataset, **train)
    group = Workers(replica, [device_of(name) for name in devices], (1.0, 30.0, 2.0), by="samples")
    assert group.shares(0)["1"].samples(BATCH) == slice(5, 5)
    shards = group.place(replica.host_weights(), replica.host_optimizer())
    begin = [piece.on_host(group.devices[w]).optimizer.vectors.copy() for w, piece in shards.shards[0].items()]
    for batch in _batches(dataset, "float32", 5):
        _, shards = group.step(shards, batch, StepPace(0.05))
    first, *others = (piece.on_host(group.devices[w]) for w, piece in shards.shards[0].items())
    assert len(others) == 2
    assert not np.array_equal(first.optimizer.vectors, begin[0])
    for other in others:
        np.testing.assert_array_equal(first.optimizer.vectors, other.optimizer.vectors)
        for (_, one), (_, two) in zip(leaves(first.params), leaves(other.params), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        ("batch norm", "batchnorm1 takes the mean of a whole minibatch"),
        ("begins without a convolution", "only where a convolution comes first"),
        ("no convolution", "only where a convolution comes first"),
    ],
)
def test_networks_that_cannot_be_divided_by_samples_say_why(network: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        samples_first(stages_of(_network(network)))


def test_a_convolution_with_nothing_but_the_end_behind_it_goes_by_kernels() -> None:
    with pytest.raises(ValueError, match="another behind"):
        samples_first(stages_of(sequential_from_spec(_spec(_conv(6), "relu", "dense"))))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 300))
def test_shares_cut_any_number_of_samples_without_a_gap(kernels: list[int], samples: int) -> None:
    cuts = [share.samples(samples) for share in shares_of(kernels)]
    assert cuts[0].start == 0
    assert cuts[-1].stop == samples
    assert all(one.stop == two.start for one, two in pairwise(cuts))
    for cut, n in zip(cuts, kernels, strict=True):
        assert abs((cut.stop - cut.start) - samples * n / sum(kernels)) < 1


def test_the_replica_learns_meanwhile(alone: Callable[..., tuple[list[Score], Replica]]) -> None:
    """Else following it would prove little."""
    scores, _ = alone("batch norm", "float64")
    first, last = sum(scores[:10], Score(0, 0, 0)), sum(scores[-10:], Score(0, 0, 0))
    assert last.loss < 0.95 * first.loss


def test_an_idle_worker_has_no_kernels(dataset: Dataset) -> None:
    group = Workers(_replica("quick", "float32", dataset), [Device()] * 3, WORKERS["idle"])
    assert [sorted(own) for own in group.kernels] == [[0, 1]] * 3


@networks
def test_a_step_leaves_its_pieces_and_can_be_repeated(network: str, dataset: Dataset) -> None:
    replica = _replica(network, "float32", dataset)
    group = Workers(replica, [Device(), Device()], (1.0, 1.0))
    first, second = _batches(dataset, "float32", 2)
    _, begin = group.step(group.place(replica.host_weights(), replica.host_optimizer()), first, StepPace(0.05))
    before = [a.copy() for a in _arrays(begin)]
    score, end = group.step(begin, second, StepPace(0.05))
    again, other = group.step(begin, second, StepPace(0.05))
    assert score == again
    for kept, array in zip(before, _arrays(begin), strict=True):
        np.testing.assert_array_equal(kept, array)
    for one, two in zip(_arrays(end), _arrays(other), strict=True):
        np.testing.assert_array_equal(one, two)
        assert not np.shares_memory(one, two)


@networks
@pytest.mark.parametrize(
    "devices",
    [("standin", "standin"), ("standin", "numpy"), pytest.param(("numpy", "standin"), marks=pytest.mark.slow)],
)
def test_devices_of_all_kinds_work_together(network: str, devices: tuple[str, ...], dataset: Dataset) -> None:
    replica = _replica(network, "float64", dataset)
    group = Workers(replica, [device_of(name) for name in devices], (1.0, 1.0))
    shards = group.place(replica.host_weights(), replica.host_optimizer())
    for batch in _batches(dataset, "float64", 3):
        score, shards = group.step(shards, batch, StepPace(0.01))
        assert score.loss == pytest.approx(replica.step(batch, StepPace(0.01))[0], rel=1e-12)
    weights, state = group.collect(shards)
    np.testing.assert_allclose(weights, replica.weights, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(state.vectors, replica.optimizer_state.vectors, rtol=1e-9, atol=1e-12)


def test_divergence_is_a_score_that_is_not_finite(dataset: Dataset) -> None:
    """And neither an exception nor a warning: steps behind it are under way already."""
    replica = _replica("C1:C2", "float32", dataset, momentum=0.0)
    group = Workers(replica, [Device(), Device()], (1.0, 1.0))
    shards, losses = group.place(replica.host_weights(), replica.host_optimizer()), []
    for batch in _batches(dataset, "float32", 4):
        score, shards = group.step(shards, batch, StepPace(1e30))
        losses.append(score.loss)
    assert np.isfinite(losses[0])
    assert not np.isfinite(losses[-1])


# --- cutting and joining ---


@st.composite
def cuts(draw: st.DrawFn) -> tuple[str, list[list[int]], str, int]:
    """A network, how many kernels of each of its convolutions each worker gets, a dtype and a seed."""
    network = draw(st.sampled_from([name for name, keys in NETWORKS.items() if "layers" in keys]))
    kernels = []
    for stage in stages_of(_network(network)):
        total = stage.conv.kernels if stage.conv else 0
        edges = sorted(draw(st.lists(st.integers(0, total), max_size=3)))
        kernels.append([b - a for a, b in zip([0, *edges], [*edges, total], strict=True)])
    return network, kernels, draw(st.sampled_from(sorted(TOLERANCE))), draw(st.integers(0, 99))


def _network(name: str) -> Sequential:
    return sequential_from_spec(NETWORKS[name]["layers"])


@settings(max_examples=50, deadline=None)
@given(cuts())
def test_joining_is_the_inverse_of_cutting(cut: tuple[str, list[list[int]], str, int]) -> None:
    network, kernels, dtype, seed = cut
    model, rng = _network(network), np.random.default_rng(seed)
    layout = Layout.of(*init_network(model, 0, (16, 16, 3), dtype))
    weights = rng.standard_normal(layout.size).astype(dtype)
    optimizer = OptimizerState(rng.standard_normal((seed % 3, layout.parameter_size)).astype(dtype), seed)
    stages = stages_of(model)
    shards, merged = cut_pieces(stages, layout, weights, optimizer, kernels)
    for own, counts, stage in zip(shards, kernels, stages, strict=True):
        assert [piece.params[stage.name or ""]["w"].shape[-1] for piece in own] == (counts if stage.conv else [])
    for piece in (*(p for own in shards for p in own), *filter(None, merged)):
        assert piece.optimizer.vectors.dtype == piece.layout.dtype == dtype
        assert piece.optimizer.vectors.shape == (seed % 3, piece.layout.parameter_size)
    joined, state = join_pieces(stages, layout, shards, merged)
    assert state.count == optimizer.count
    for one, other in ((joined, weights), (state.vectors, optimizer.vectors)):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, other)


def test_a_piece_s_optimizer_has_a_column_for_each_of_its_parameters() -> None:
    params = {"norm": {"scale": np.ones(2), "shift": np.zeros(2)}}
    rows = {"norm": {"scale": np.array([[1.0, 2.0], [5.0, 6.0]]), "shift": np.array([[3.0, 4.0], [7.0, 8.0]])}}
    piece = Piece.of(params, {"norm": {"mean": np.zeros(2)}}, rows, 3)
    assert piece.optimizer.vectors.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [a.tolist() for _, a in leaves(piece.rows)] == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert piece.optimizer.count == 3


def test_layers_that_go_by_channel_are_spread() -> None:
    (stage, _) = stages_of(_network("normalised"))
    assert stage.names == ["batchnorm1", "lrn1", "dropout1", "relu1", "maxpool1"]
    assert (stage.rest, stage.reach) == (None, 1)


def test_normalising_is_spread_where_few_channels_are_computed_twice() -> None:
    (stage, _) = stages_of(_network("normalised"))
    assert stage.spread_for([18, 18]) == stage  # four of 36
    few = stage.spread_for([2] * 18)
    assert few.names == ["batchnorm1"]
    assert few.rest is not None
    assert [name for name, _ in few.rest.layers] == ["lrn1", "dropout1", "relu1", "maxpool1"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_a_worker_holds_its_own_channels_and_its_neighbours_ends(kernels: list[int], reach: int) -> None:
    shares = dict(zip("abcdef", shares_of(kernels, reach), strict=False))
    total = sum(kernels)
    for worker, share in shares.items():
        held: list[int] = []
        own = range(share.start, share.stop)
        for other, side, count in neighbours(shares, worker):
            theirs = range(shares[other].start, shares[other].stop)
            if side == "left" and not set(own) <= set(held):
                held += own
            assert count <= 2 * reach  # as many as an edge has
            held += theirs[:count] if side == "left" else theirs[-count:]
        held += [] if set(own) <= set(held) else own
        assert held == list(range(total)[share.held])
        assert range(total)[share.held][share.within(share.own)] == own


def test_stages_begin_at_the_convolutions() -> None:
    stages = stages_of(sequential_from_spec(_spec("relu", "maxpool", _conv(3), _conv(4), "relu", "dense")))
    assert [s.name for s in stages] == [None, "conv1", "conv2"]
    assert [s.rest and [name for name, _ in s.rest.layers] for s in stages] == [["relu1", "maxpool1"], None, ["dense1"]]
    assert [s.names for s in stages] == [[], [], ["relu2"]]


def test_a_layer_that_sums_is_divided_but_for_its_bias() -> None:
    (stage,) = stages_of(sequential_from_spec(_spec(_conv(3), "relu", "dense", "tanh")))
    assert stage.summed == ("dense1", Dense(10, bias=False))
    assert stage.divided == ["conv1", "relu1", "dense1"]
    assert stage.rest is not None
    assert stage.rest.layers == (("dense1", Bias()), ("tanh1", Tanh()))
    whole = stage.spread_to(0)  # its inputs are not all there any more
    assert whole.summed is None
    assert whole.rest is not None
    assert whole.rest.layers == (("relu1", ReLU()), ("dense1", Dense(10)), ("tanh1", Tanh()))


def test_without_a_bias_nothing_may_be_left_to_put_together() -> None:
    (stage,) = stages_of(sequential_from_spec(_spec(_conv(3), "relu", {"layer": "dense", "units": 10, "bias": False})))
    assert (stage.summed, stage.rest) == (("dense1", Dense(10, bias=False)), None)
    assert stage.spread_to(0).rest is not None
    assert stage.spread_to(0).divided == ["conv1"]


def test_a_convolution_inside_a_composite_layer_stays_whole(dataset: Dataset) -> None:
    inner = Sequential((("conv", Conv(4, 3)), ("norm", BatchNorm()), ("relu", ReLU())))
    model = Sequential((("conv1", Conv(5, 3)), ("block", inner), ("pool", MaxPool(2)), ("dense1", Dense(10))))
    (stage,) = stages_of(model)
    assert stage.rest is not None
    replica = _replica("quick", "float64", dataset)
    params, state = init_network(model, 0, dataset.shape, "float64")
    replica.model, replica.layout = model, Layout.of(params, state)
    group = Workers(replica, [Device(), Device()], (1.0, 1.0))
    weights = replica.layout.flatten(params, state)
    (batch,) = _batches(dataset, "float64", 1)
    begin = group.place(weights, replica.host_optimizer())
    score, end = group.step(begin, batch, StepPace(0.1))
    joined, _ = group.collect(end)
    assert np.isfinite(score.loss)
    assert (joined != weights).mean() > 0.9  # all of it took a step, batch norm's statistics too


@pytest.mark.parametrize("weights", [None, np.array([0.5, 2.0, 0.0, 1.0, 1.5])])
def test_a_shard_of_a_loss_is_the_loss(device: Device, weights: np.ndarray | None) -> None:
    rng = np.random.default_rng(0)
    scores, classes = rng.standard_normal((5, 10)), np.array([1, 0, 9, 3, 3])
    rows = rng.integers(0, 2, (5, 10)).astype(np.uint8)
    for loss in LOSSES.values():
        if loss.labels == "image":
            continue
        labels = classes if loss.labels == "classes" else rows
        right = scores.argmax(axis=1) == classes if loss.labels == "classes" else (scores > 0) == rows
        dscores, score = loss_of(loss, _sent(scores), labels, device, 0.25, weights)
        value, expected = loss(scores, labels, np, weights)
        assert type(dscores) is np.ndarray
        np.testing.assert_allclose(dscores, expected * 0.25)
        assert score.loss == pytest.approx(float(value))
        assert (score.correct, score.samples, score.answers) == (right.sum(), 5, right.size // 5)


def test_a_shard_of_a_reconstruction_is_the_loss_and_nothing_is_right(device: Device) -> None:
    rng = np.random.default_rng(0)
    scores, images = rng.standard_normal((5, 12)), rng.random((2, 3, 5, 2))
    for loss in (loss for loss in LOSSES.values() if loss.labels == "image"):
        dscores, score = loss_of(loss, _sent(scores), images, device, 0.25)
        value, expected = loss(scores, images)
        np.testing.assert_allclose(dscores, expected * 0.25)
        assert score.loss == pytest.approx(float(value))
        assert (score.correct, score.samples, score.accuracy) == (None, 5, None)


def test_layers_that_share_weights_across_a_convolution_are_not_cut() -> None:
    tied = ({"layer": "dense", "units": 4}, {"layer": "reshape", "shape": [2, 2, 1]}, _conv(3), "globalpool")
    back = (
        {"layer": "dense", "units": 3},
        {"layer": "dense", "units": 4},
        {"layer": "dense", "units": 3, "tied": "dense3"},
    )
    assert len(stages_of(sequential_from_spec(_spec(*tied, *back)))) == 2
    across = {"layer": "dense", "units": 4}, {"layer": "dense", "units": 3, "tied": "dense1"}
    with pytest.raises(ValueError, match="layers dense3 and dense1 share weights, and a convolution lies between them"):
        stages_of(sequential_from_spec(_spec(*tied, *across)))


def test_a_composite_layer_with_tied_layers_in_a_path_stays_whole() -> None:
    tied = {"layer": "dense", "units": 4}, {"layer": "dense", "units": 3, "tied": "dense2"}
    other, cut = _spec(_conv(2), "globalpool"), ["branches1/branch1/conv1", "branches1/branch2/conv1"]
    for layers, names in ((tied, []), (tied[:1], cut)):
        path = _spec(_conv(3), "globalpool", {"layer": "dense", "units": 3}, *layers)
        model = sequential_from_spec(_spec(_conv(5), {"layer": "branches", "branches": [path, other]}))
        assert [stage.name for stage in stages_of(model) if stage.name] == ["conv1", *names]
