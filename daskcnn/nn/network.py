"""A network as training uses it: initial values, gradients, frozen layers, and prediction from several views."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import reduce
from operator import add
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Backend
from daskcnn.nn.layer import Context, Layer, Params, Shape, State, walk
from daskcnn.nn.layers.normalise import BatchNorm
from daskcnn.nn.losses import Loss, Targets, correct, labels_for, mixed_loss
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.vector import leaves, map_leaves


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
    """Run one training pass over a batch on the host.

    A network that diverges gives a loss that is not finite, and no warnings.

    Parameters
    ----------
    x : images (H, W, N, C)
    labels : (N,), or (N, L) for a loss of several labels
    weights : (N,), of the samples, as `Loss` has them
    partners : labels and weights that the samples have besides, where images are mixed

    Returns
    -------
    The mean loss, with that of heads in the middle of the network; the number of right answers, None where there are
    none; the gradients; the new state. The first two are 0-d on the device: `backend.scalar` waits for them.
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
    """Return where a pass over a host batch is not finite first, such as "output of conv2"; weights come first."""
    xp, images = ctx.device.xp, ctx.device.backend.from_host(x)
    for path, array in leaves(params):
        if not bool(xp.isfinite(array).all()):
            return f"weights of {path.rpartition('/')[0]}"
    if not bool(xp.isfinite(images).all()):
        return "images"
    outputs = model.outputs(params, state, images, replace(ctx, heads={}))
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


def freeze(model: Sequential, patterns: Sequence[str], in_shape: Shape) -> Sequential:
    """Return the network with the layers frozen whose paths, or those of layers around them, match one of the patterns.

    Frozen layers keep their parameters. Batch normalising among them is fixed: it goes by its running mean and
    variance, and keeps them. Raises ValueError for a pattern that matches no layer with weights, or if all are frozen.
    """
    if not patterns:
        return model
    weighted = [path for path, layer, shape in walk(model, in_shape) if layer.numbers(shape)]
    found = {p: {w for w in weighted if fnmatchcase(w, p) or fnmatchcase(w, f"{p}/*")} for p in patterns}
    for pattern, matched in found.items():
        if not matched:
            known = ", ".join(weighted) or "none"
            raise ValueError(f"freeze = {pattern!r}: matches no layer with weights; there are {known}")
    frozen = frozenset[str]().union(*found.values())
    if len(frozen) == len(weighted):
        raise ValueError(f"freeze = {list(patterns)!r}: leaves no layer to train; there are {', '.join(weighted)}")
    changed: Sequential = _frozen(model, frozen)
    return changed


def _frozen(layer: Layer, paths: frozenset[str]) -> Any:
    """Return the layer with the layers of these paths inside it frozen; "" is the layer itself."""
    if isinstance(layer, BatchNorm):
        return replace(layer, fixed=True) if "" in paths else layer
    inside: dict[str, set[str]] = defaultdict(set)  # the paths from each child on
    for path in paths:
        name, _, rest = path.partition("/")
        inside[name].add(rest)
    changed = layer.mapped(lambda name, child: _frozen(child, frozenset(inside[name])))
    return replace(changed, frozen=paths) if isinstance(changed, Sequential) else changed


Views: TypeAlias = Literal["none", "mirror", "mirror-translate"]


def predict_views(model: Layer, params: Params, state: State, x: Array, ctx: Context, views: Views) -> Array:
    """Return the mean scores (N, classes), on the device, over the views of a host batch x (H, W, N, C).

    `mirror`: the image and its mirror image. `mirror-translate`: these two with weight 1/4 each, and with 1/8 each both
    after a shift by one pixel to the upper left and to the lower right, edges mirrored (airbench94, Jordan 2024).
    """
    if views == "none":
        return predict(model, params, state, x, ctx)
    weighed = (predict(model, params, state, view, ctx) * x.dtype.type(part) for view, part in weighted_views(x, views))
    return reduce(add, weighed)


def weighted_views(x: Array, views: Views) -> Iterator[tuple[Array, float]]:
    """Yield each view of a host batch x (H, W, N, C) with its weight; the weights add up to 1."""
    if views == "none":
        yield x, 1.0
        return
    weighted = [(x, 1 / 2 if views == "mirror" else 1 / 4)]
    if views == "mirror-translate":
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0), (0, 0)), "reflect")
        weighted += [(padded[:-2, :-2], 1 / 8), (padded[2:, 2:], 1 / 8)]
    for view, weight in weighted:
        yield np.ascontiguousarray(view), weight
        yield np.ascontiguousarray(view[:, ::-1]), weight


def views_problem(views: Views, in_shape: Shape, *, reconstructs: bool = False) -> str | None:
    """Return why a network for images (H, W, C) cannot average these views of them, None if it can."""
    H, W = in_shape[:2]
    if reconstructs and views != "none":
        return f"{views!r}: views average scores of classes, and this network reconstructs images; use 'none'"
    if views == "mirror-translate" and min(H, W) < 2:
        return f"{views!r}: images of {H}x{W} have no pixel beside the outermost one to shift by; use 'mirror'"
    return None
