"""A network as training uses it: initial values, the gradients of a step, and prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Backend
from daskcnn.nn.layer import Context, Layer, Params, Shape, State
from daskcnn.nn.losses import Loss, Targets, correct, labels_for, mixed_loss
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.tree import leaves, map_leaves


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
    partners: Targets | None = None,
) -> tuple[Any, Any, Params, State]:
    """Run one training pass over a host batch x (H, W, N, C), labels (N,): (mean loss, correct, gradients, new state).

    The loss of heads in the middle of the network is added. labels may be (N, L), if the loss is for such. weights
    (N,): of the samples, as `Loss` has them. partners: labels and weights that the samples have besides, where images
    are mixed.

    Loss and number of right answers (None where there are none) are 0-d arrays of the device, so that the pass does not
    wait for the device; `backend.scalar` fetches them. A network that diverges gives a loss that is not finite, and no
    warnings.
    """
    backend, ctx = ctx.device.backend, replace(ctx, training=True, need_dx=False, heads={})
    images, others = backend.from_host(x), partners and on_device(partners, backend)
    scores, new_state, residual = model.forward(params, state, images, ctx)
    own_labels, counts = on_device((labels, weights), backend)
    targets = labels_for(loss, images, own_labels), counts
    value, dscores = mixed_loss(loss, scores, targets, others, backend.xp)
    for head in (ctx.heads or {}).values():
        own, gradient = mixed_loss(loss, head.scores, targets, others, backend.xp)
        value, head.gradient = value + head.weight * own, gradient * gradient.dtype.type(head.weight)
    _, grads = model.backward(params, residual, dscores, ctx)
    return value, correct(scores, targets[0]), grads, new_state


@np.errstate(over="ignore", invalid="ignore")
def first_not_finite(model: Sequential, params: Params, state: State, x: Array, ctx: Context) -> str | None:
    """Return where the first value that is no finite number appears in a pass over a host batch; None: nowhere.

    Weights are looked at before what they make: "weights of conv1", "output of conv2".
    """
    xp, images = ctx.device.xp, ctx.device.backend.from_host(x)
    for path, array in leaves(params):
        if not bool(xp.isfinite(array).all()):
            return f"weights of {path.rpartition('/')[0]}"
    if not bool(xp.isfinite(images).all()):
        return "images"
    ctx = replace(ctx, heads={})
    outputs = model.outputs(params, state, images, ctx)
    return next((f"output of {name}" for name, y in outputs if not bool(xp.isfinite(y).all())), None)


def on_device(targets: Targets, backend: Backend) -> Targets:
    """Return labels and weights from the host on the device."""
    labels, weights = targets
    return backend.from_host(labels), None if weights is None else backend.from_host(weights)


@np.errstate(over="ignore", invalid="ignore")
def predict(model: Layer, params: Params, state: State, x: Array, ctx: Context) -> Array:
    """Return the scores, (N, classes) of a classifier, on the device, of a host batch x (H, W, N, C)."""
    scores, _, _ = model.forward(params, state, ctx.device.backend.from_host(x), replace(ctx, training=False))
    return scores
