"""Calibration: seconds of a worker for a step of training, each convolution, each stage, and the undivided layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device
from daskcnn.conv.tuner import Begun, tune
from daskcnn.job.network import convolutions
from daskcnn.job.tables import Job
from daskcnn.nn import Context, Shape, StepPace, inside, walk
from daskcnn.nn.layers.conv import Conv
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.passes import descended, loss_of, merged_backward, merged_forward, shard_backward, shard_forward
from daskcnn.sharded.pieces import Edges, Piece, cut_pieces
from daskcnn.sharded.stages import Share, Stage, shares_of, stage_shapes
from daskcnn.store import Batch
from daskcnn.training.replica import Replica

TUNING = 10.0
"""Seconds a worker may spend on measuring convolutions before it is calibrated; next time it remembers."""
HALVES = 3
"""Halvings of a step's samples that are measured where workers share them: shares lie near one of these sizes."""


def tune_convolutions(replica: Replica, seconds: float = TUNING, *, begun: Begun = lambda done, of, spec: None) -> None:
    """Let the planner measure those of the network's convolutions that this machine does not remember.

    They are measured with the samples of a step. Where workers share these, smaller problems follow: with a half of
    them, a quarter and an eighth, for which as much time is added, since the best algorithm depends on the share.
    begun: called with the one that comes next. Tune before `step_seconds`, which should see the speed of training.
    """
    sizes = [replica.batch_size]
    if shares_steps(replica.job):
        sizes += [size for size in (sizes[0] >> i for i in range(1, HALVES + 1)) if size]
        seconds *= 2
    given = [(replica.model, replica.dataset.shape, size, replica.job.model.dtype) for size in sizes]
    specs = [spec for each in given for _, spec in convolutions(*each)]
    tune(specs, replica.device, clock=replica.watch.clock, seconds=seconds, begun=begun)


def shares_steps(job: Job) -> bool:
    """Return True if several replicas may share the samples of a step, as where all meet every few steps."""
    rule, workers = job.rule, job.cluster.workers.most
    alone = bool(workers) and sum(workers.values()) <= job.train.replica_size
    return rule is not None and rule.barrier and rule.period is not None and not (alone or rule.steps_by_speed)


def step_seconds(replica: Replica, *, steps: int = 5) -> float:
    """Return seconds a sample of a whole step on random values.

    The shapes are the real ones, and the code path is that of training. A warm-up is dropped and the median kept.
    Weights and the optimizer's state are the same afterwards.
    """
    return _whole_step(replica, replica.batch_size, steps) / replica.batch_size


def conv_seconds(replica: Replica, *, steps: int = 5) -> dict[str, float]:
    """Return seconds a sample of each convolution, forward and backward, measured as `step_seconds` does."""
    return {
        name: replica.watch.median_seconds(_conv_step(replica, name, layer, shape), steps) / replica.batch_size
        for name, layer, shape in walk(replica.model, replica.dataset.shape)
        if isinstance(layer, Conv)
    }


def fixed_seconds(replica: Replica, whole: float, *, steps: int = 5) -> float:
    """Return the seconds of a step that fewer samples do not shorten: f of f + c·n.

    A step of an eighth of the samples is measured as `step_seconds` measures `whole`, the seconds a sample of all.
    """
    n, few = replica.batch_size, max(1, replica.batch_size >> HALVES)
    if few == n:
        return 0.0
    took = _whole_step(replica, few, steps)
    return min(max(0.0, (took - few * whole) / (1 - few / n)), took, n * whole)


def _whole_step(replica: Replica, n: int, steps: int) -> float:
    """Return the median seconds of a step of n samples. Weights and the optimizer's state are the same afterwards."""
    rng, (H, W, C) = np.random.default_rng(replica.job.train.seed), replica.dataset.shape
    x = rng.standard_normal((H, W, n, C)).astype(replica.job.model.dtype)
    batch = Batch(x, _labels(replica, rng, n), rng.integers(0, 2**63, n).astype(np.uint64))
    weights, state = replica.host_weights(), replica.host_optimizer()
    found = replica.watch.median_seconds(lambda: replica.step(batch, StepPace(0.0)), steps)
    replica.adopt(weights)
    replica.adopt_optimizer(state)
    return found


def _labels(replica: Replica, rng: np.random.Generator, n: int) -> npt.NDArray[np.integer]:
    """Draw labels of n samples such as the replica's data set has."""
    classes = len(replica.dataset.classes)
    return rng.integers(0, classes, n) if replica.dataset.labels == "classes" else rng.integers(0, 2, (n, classes))


def _conv_step(replica: Replica, name: str, layer: Conv, in_shape: Shape) -> Callable[[], None]:
    """Return the work of one convolution, there and back."""
    params, xp = inside(replica.layout.views(replica.weights)[0], name), replica.device.xp
    H, W, C = in_shape
    x, ctx = xp.ones((H, W, replica.batch_size, C), replica.job.model.dtype), Context(replica.device, training=True)

    def step() -> None:
        y, _, residual = layer.forward(params, {}, x, ctx)
        layer.backward(params, residual, y, ctx)

    return step


MOST_FIXED = 0.9
"""Largest share of a stage's seconds that counts as fixed: its kernels take some in any case."""


class StageSeconds(NamedTuple):
    """Seconds a sample, forward and backward, with the optimizer's step.

    whole: of each convolution and the layers spread with it, by name, with all kernels. fixed: the part of those that a
    shard takes however few kernels it has. rest: of the work that home does alone: all layers that are not divided, and
    the loss.
    """

    whole: Mapping[str, float]
    fixed: Mapping[str, float]
    rest: float


def stage_seconds(replica: Replica, *, steps: int = 5) -> StageSeconds:
    """Measure stages on random values of the real shapes, through the code path of training.

    A warm-up is dropped and the median kept. The fixed seconds follow from the shortest times of all kernels and of
    half of them, measured in turn: a disturbance would spoil either.
    """
    n, whole, fixed = replica.batch_size, dict[str, float](), dict[str, float]()
    for i, stage in enumerate(stages_of(replica.model)):
        if stage.name is None or stage.conv is None:
            continue
        kernels = stage.conv.kernels
        sizes = [kernels, kernels // 2][: min(kernels, 2)]
        passes = [_passes(replica, i, size) for size in sizes]
        rounds = replica.watch.rounds(passes, steps)
        seconds = [[each / n for each in taken] for taken in zip(*rounds, strict=True)]
        whole[stage.name], part = median(seconds[0]), sizes[-1] / kernels
        if kernels > 1:  # of seconds = fixed + part · (all - fixed)
            least, halved = map(min, seconds)
            fixed[stage.name] = min(max(0.0, (halved - part * least) / (1 - part)), MOST_FIXED * least)
        else:
            fixed[stage.name] = 0.0
    return StageSeconds(whole, fixed, replica.watch.median_seconds(_at_home(replica), steps) / n)


def _passes(replica: Replica, i: int, kernels: int) -> Callable[[], object]:
    """Return the work of a shard of the stage's first kernels, there and back."""
    n, device, rng = replica.batch_size, replica.device, np.random.default_rng(replica.job.train.seed)
    stages = stages_of(replica.model)
    shapes = stage_shapes(stages, replica.dataset.shape)

    def drawn(shape: Shape, channels: int) -> Array:
        return rng.standard_normal((*shape[:-1], n, channels)).astype(replica.job.model.dtype)

    x = drawn(shapes[i], shapes[i][-1])
    added = [[stages[s].out_shape(shapes[s]) for s in each.inputs] or [shapes[0]] for each in stages[i].addends]
    addends = [drawn(of[0], min(kernels, sum(shape[-1] for shape in of))) for of in added]
    keys = rng.integers(0, 2**63, n).astype(np.uint64)
    stage, share, piece, edges = _shard(replica, i, kernels)
    there = piece.on(device)
    fed, args = bool(stage.inputs), (there, share, edges, keys, device)
    y, _ = shard_forward(stage, [x], *args, need_dx=fed, addends=addends)
    graded = y.shape[-1] if stage.summed else share.graded.stop - share.graded.start
    dy = rng.standard_normal((*y.shape[:-1], graded)).astype(y.dtype)

    def passes() -> None:
        _, kept = shard_forward(stage, [x], *args, need_dx=fed, addends=addends)
        _, grads, _ = shard_backward(stage, kept, [dy], there, share, keys, device, need_dx=fed)
        descended(there, grads, kept.state, replica.descent, StepPace(0.0), device)

    return passes


def _at_home(replica: Replica) -> Callable[[], object]:
    """Return the work of the layers that are not divided, there and back, and of the loss, as home does it."""
    stages = stages_of(replica.model)
    counts = [[stage.conv.kernels] if stage.conv else [] for stage in stages]
    _, merged = cut_pieces(stages, replica.layout, replica.host_weights(), replica.host_optimizer(), counts)
    shapes = stage_shapes(stages, replica.dataset.shape)
    here = [i for i, stage in enumerate(stages) if stage.merged or i == len(stages) - 1]
    each = [_merged_passes(replica, stages[i], merged[i], shapes[i], last=i == len(stages) - 1) for i in here]

    def passes() -> None:
        for one in each:
            one()

    return passes


def _merged_passes(
    replica: Replica, stage: Stage, piece: Piece | None, in_shape: Shape, *, last: bool
) -> Callable[[], object]:
    """Return the work of a stage's layers that are not divided, there and back; of the last one the loss too."""
    n, rng = replica.batch_size, np.random.default_rng(replica.job.train.seed)
    *sides, channels = stage.shard_shape(in_shape)
    x = rng.standard_normal((*sides, n, channels)).astype(replica.job.model.dtype)
    keys = rng.integers(0, 2**63, n).astype(np.uint64)
    H, W, C = replica.dataset.shape
    image = replica.loss.labels == "image"
    labels = rng.standard_normal((H, W, n, C)).astype(x.dtype) if image else _labels(replica, rng, n)
    device = Device() if last and stage.light else replica.device  # it is done on every worker's host then
    there, fed = piece and piece.on(device), stage.conv is not None or bool(stage.inputs)

    def passes() -> None:
        y, residual, state = merged_forward(stage, [x], there, keys, device)
        dy = loss_of(replica.training_loss, y, labels, device)[0] if last else y
        _, grads = merged_backward(stage, residual, [dy], there, keys, device, need_dx=fed)
        if there is not None:
            descended(there, grads, state, replica.descent, StepPace(0.0), device)

    return passes


def _shard(replica: Replica, i: int, kernels: int) -> tuple[Stage, Share, Piece, Edges]:
    """Cut off the stage's first kernels, with those of the next shard that its layers reach over to."""
    stages = stages_of(replica.model)
    counts = [[stage.conv.kernels] if stage.conv else [] for stage in stages]
    stage, conv = stages[i], stages[i].conv
    assert conv is not None, "asked for stages with kernels"
    counts[i] = [n for n in (kernels, conv.kernels - kernels) if n]
    shards, _ = cut_pieces(stages, replica.layout, replica.host_weights(), replica.host_optimizer(), counts)
    own, share = shards[i], shares_of(counts[i], stage.reach)[0]
    if share.alone:
        return stage, share, own[0], Edges()
    next_one = own[1].edge(stage, "left", share.held.stop - share.stop, replica.device)
    return stage, share, own[0], Edges(after=[next_one])
