"""A network as training uses it: initial values, the gradients of a step, and prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Shape, State
from daskcnn.nn.losses import Loss, correct, labels_for
from daskcnn.nn.tree import map_leaves


def init_network(model: Layer, seed: int, in_shape: Shape, dtype: str) -> tuple[Params, State]:
    """Return parameters and state of this dtype on the host. They are the same values, rounded, for every dtype."""
    params, state, _ = model.init(np.random.default_rng(seed), in_shape)
    return map_leaves(lambda a: a.astype(dtype), params), map_leaves(lambda a: a.astype(dtype), state)


@np.errstate(over="ignore", invalid="ignore")
def loss_and_gradients(
    model: Layer,
    params: Params,
    state: State,
    x: Array,
    labels: npt.NDArray[Any],
    loss: Loss,
    ctx: Context,
    weights: npt.NDArray[Any] | None = None,
) -> tuple[Any, Any, Params, State]:
    """Run one training pass over a host batch x (H, W, N, C), labels (N,): (mean loss, correct, gradients, new state).

    The loss of heads in the middle of the network is added. labels may be (N, L), if the loss is for such. weights
    (N,): of the samples, as `Loss` has them.

    Loss and number of right answers (None where there are none) are 0-d arrays of the device, so that the pass does not
    wait for the device; `backend.scalar` fetches them. A network that diverges gives a loss that is not finite, and no
    warnings.
    """
    backend, ctx = ctx.device.backend, replace(ctx, training=True, need_dx=False, heads={})
    images = backend.from_host(x)
    scores, new_state, residual = model.forward(params, state, images, ctx)
    targets = labels_for(loss, images, backend.from_host(labels))
    counts = None if weights is None else backend.from_host(weights)
    value, dscores = loss(scores, targets, backend.xp, counts)
    for head in (ctx.heads or {}).values():
        own, gradient = loss(head.scores, targets, backend.xp, counts)
        value, head.gradient = value + head.weight * own, gradient * gradient.dtype.type(head.weight)
    _, grads = model.backward(params, residual, dscores, ctx)
    return value, correct(scores, targets), grads, new_state


@np.errstate(over="ignore", invalid="ignore")
def predict(model: Layer, params: Params, state: State, x: Array, ctx: Context) -> Array:
    """Return the scores, (N, classes) of a classifier, on the device, of a host batch x (H, W, N, C)."""
    scores, _, _ = model.forward(params, state, ctx.device.backend.from_host(x), replace(ctx, training=False))
    return scores
