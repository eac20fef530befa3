"""How long a worker takes for the stages of a network."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from daskcnn.nn.layers.conv import Conv
from daskcnn.replica import Replica
from daskcnn.sharded.passes import shard_backward, shard_forward
from daskcnn.sharded.pieces import Edges, Piece, cut_pieces
from daskcnn.sharded.stages import Share, Stage, stages_of


def stage_seconds(replica: Replica, *, steps: int = 5) -> dict[str, float]:
    """Seconds a sample of each convolution and the layers spread with it, forward and backward, on random values.

    All kernels, the real shapes, through the code path of training; a warm-up is dropped and the median kept.
    """
    stages = stages_of(replica.model)
    counts = [[stage.conv.kernels] if stage.conv else [] for stage in stages]
    shards, _ = cut_pieces(stages, replica.layout, replica.host_weights(), replica.host_velocity(), counts)
    shapes = {
        name: shape for name, layer, shape in replica.model.shapes(replica.dataset.shape) if isinstance(layer, Conv)
    }
    n = replica.batch_size
    return {
        stage.name: replica.median_seconds(_passes(replica, stage, piece, shapes[stage.name], need_dx=i > 0), steps) / n
        for i, (stage, own) in enumerate(zip(stages, shards, strict=True))
        for piece in own
        if stage.name
    }


def _passes(
    replica: Replica, stage: Stage, piece: Piece, in_shape: tuple[int, ...], *, need_dx: bool
) -> Callable[[], object]:
    """A shard of all kernels, there and back."""
    (H, W, C), n, device = in_shape, replica.batch_size, replica.device
    rng = np.random.default_rng(replica.job.train.seed)
    x = rng.standard_normal((H, W, n, C)).astype(replica.job.model.dtype)
    keys = rng.integers(0, 2**63, n).astype(np.uint64)
    assert stage.conv is not None
    share, there = Share(0, stage.conv.kernels, stage.conv.kernels, stage.reach), piece.on(device)

    def passes() -> None:
        y, kept = shard_forward(stage, [x], there, share, Edges(), keys, device, need_dx=need_dx)
        shard_backward(stage, kept, [y], there, share, keys, device, need_dx=need_dx)

    return passes
