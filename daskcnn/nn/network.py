"""A network as training uses it: initial values, gradients, frozen layers, and prediction from several views.

The table of a network's layers: shapes, parameters, operations, and the memory of their outputs.

Initial kernels that whiten: the first convolution's outputs are uncorrelated over patches of the training images.

As in airbench94 (Jordan 2024), after tysam-code's hlb-CIFAR10: eigenvectors of the patches' second moments, divided by
the root of the eigenvalue, and their negatives. Such kernels are usually not trained on (`freeze`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import reduce
from math import prod
from operator import add
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Backend
from daskcnn.nn.layer import Context, Layer, Params, Shape, State, walk
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.layers.normalise import BatchNorm
from daskcnn.nn.losses import Loss, Targets, correct, labels_for, mixed_loss
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.vector import leaves, map_leaves, undrawn


def init_network(model: Layer, seed: int, in_shape: Shape, dtype: str) -> tuple[Params, State]:
    """Return parameters and state of this dtype on the host. They are the same values, rounded, for every dtype."""
    params, state, _ = model.init(np.random.default_rng(seed), in_shape)
    return map_leaves(lambda a: a.astype(dtype), params), map_leaves(lambda a: a.astype(dtype), state)


class Growing(Protocol):
    """Takes in a training pass while it goes on."""

    def scored(self, loss: Array, state: State) -> None:
        """Take in the loss, and the new state of the layers."""

    def found(self, name: str, gradients: Params) -> None:
        """Take in the gradients of a child of the network, the last child's first."""


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
    growing: Growing | None = None,
) -> tuple[Any, Any, Params, State]:
    """Run one training pass over a batch on the host.

    A network that diverges gives a loss that is not finite, and no warnings.

    Parameters
    ----------
    x : images (H, W, N, C)
    labels : (N,), or (N, L) for a loss of several labels
    weights : (N,), of the samples, as `Loss` has them
    partners : labels and weights that the samples have besides, where images are mixed
    growing : is told what is found, as soon as it is

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
    if growing is not None:
        growing.scored(value, new_state)
        ctx = replace(ctx, told=growing.found)
    _, grads = model.backward(params, residual, dscores, ctx)
    return value, correct(scores, targets[0], backend.xp), grads, new_state


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


def most_held(layer: Layer, in_shape: Shape) -> int:
    """Return the most numbers of one sample that a prediction holds at once, besides the layer's input.

    Those are inputs and outputs of layers; of paths side by side all outputs count.
    """
    children = [*layer.children(in_shape)]
    inside = [most_held(child, shape) for _, child, shape in children]
    if isinstance(layer, Sequential):  # its caller holds the first one's input
        inputs = [0, *(prod(shape) for _, _, shape in children[1:])]
        return max(map(add, inputs, inside))
    paths = sum(prod(child.out_shape(shape)) for _, child, shape in children)
    return paths + max(prod(layer.out_shape(in_shape)), *inside, 0)


def freeze(model: Sequential, patterns: Sequence[str], in_shape: Shape) -> Sequential:
    """Return the network with the layers frozen whose paths, or those of layers around them, match one of the patterns.

    Frozen layers keep their parameters. Batch normalising among them is fixed: it goes by its running mean and
    variance, and keeps them. Raises ValueError for a pattern that matches no layer with weights, or if all layers with
    parameters are frozen.
    """
    if not patterns:
        return model
    layers = [*walk(model, in_shape)]
    weighted = [path for path, layer, shape in layers if layer.numbers(shape)]
    found = {p: {w for w in weighted if fnmatchcase(w, p) or fnmatchcase(w, f"{p}/*")} for p in patterns}
    for pattern, matched in found.items():
        if not matched:
            known = ", ".join(weighted) or "none"
            raise ValueError(f"freeze = {pattern!r}: matches no layer with weights; there are {known}")
    frozen = frozenset[str]().union(*found.values())
    trained = [path for path, layer, shape in layers if undrawn(layer, shape)[0]]
    if frozen.issuperset(trained):
        raise ValueError(f"freeze = {list(patterns)!r}: leaves no layer to train; there are {', '.join(trained)}")
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


@dataclass(frozen=True)
class LayerSummary:
    """A layer's row of the table.

    Attributes
    ----------
    name, layer : its path; kind and options
    parameters : numbers that are trained; 0 for a layer of layers, which have rows of their own
    forward, backward : floating-point operations of its products for one sample; other operations are not counted
    outputs : numbers that it puts out for one sample; 0 for a layer of layers
    """

    name: str
    layer: str
    out_shape: Shape
    parameters: int
    forward: int
    backward: int
    outputs: int


def summarise(model: Sequential, in_shape: Shape) -> tuple[LayerSummary, ...]:
    """Return one entry per layer, in order. Those inside a layer of layers come in front of it.

    Nothing is drawn: a network may be larger than this machine's memory. Raises LayerError for a layer that does not
    fit. The first layer with weights makes no gradient of its input, so its way back is as long as its way there.
    """
    rows, trained = list[LayerSummary](), False
    for path, layer, shape in walk(model, in_shape, composite=True):
        if isinstance(layer, Sequential):
            continue
        inner = next(layer.children(shape), None) is not None
        params, _, out_shape = ({}, {}, layer.out_shape(shape)) if inner else undrawn(layer, shape)
        forward = 0 if inner else layer.operations(shape)
        backward = forward * (2 if trained else 1)
        trained = trained or bool(params)
        numbers = sum(leaf.size for _, leaf in leaves(params)), forward, backward, 0 if inner else prod(out_shape)
        rows.append(LayerSummary(path, label(layer), out_shape, *numbers))
    return tuple(rows)


def label(layer: Layer) -> str:
    """Return the layer with the options that are set: "MaxPool(size=2)"; those that are layers are left out."""

    def holds_layers(value: Any) -> bool:
        return any(isinstance(each, Layer) for each in (value if isinstance(value, tuple) else (value,)))

    options = [(f.name, getattr(layer, f.name), f.default) for f in fields(layer)]  # type: ignore[arg-type] # every layer is a dataclass
    own = [(n, v) for n, v, default in options if (default is MISSING or v != default) and not holds_layers(v)]
    return f"{type(layer).__name__}({', '.join(f'{n}={v!r}' for n, v in own)})"


def describe(model: Sequential, in_shape: Shape) -> str:
    """Return the table of the layers: name, kind, output shape (without N), parameters; and the total."""
    rows = summarise(model, in_shape)
    cells = [(r.name, r.layer, "×".join(map(str, r.out_shape)), f"{r.parameters:,}" if r.outputs else "") for r in rows]
    total = ("", "", "total", f"{sum(r.parameters for r in rows):,}")
    table = [("layer", "", "output", "parameters"), *cells, total]
    w = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join(f"{a:<{w[0]}}  {b:<{w[1]}}  {c:>{w[2]}}  {d:>{w[3]}}" for a, b, c, d in table)


WHITENING = "whitening"
SAMPLES = 5000
"""Images whose patches are looked at, as in airbench94."""
EPS = 5e-4
"""Added to eigenvalues, that of airbench94: patches hardly vary along the last eigenvectors."""

Moments = npt.NDArray[np.float64]


def whitened_layer(model: Sequential) -> tuple[str, Conv] | None:
    """Return name and layer of the first convolution, if it is to whiten; None if not."""
    name, first = model.layers[0]
    return (name, first) if isinstance(first, Conv) and first.initial == WHITENING else None


def check_whitening(model: Sequential, in_shape: Shape) -> None:
    """Raise ValueError where a convolution is to whiten that cannot, for images (H, W, C)."""
    found = whitened_layer(model)
    for path, layer, _ in walk(model, in_shape):
        if isinstance(layer, Conv) and layer.initial == WHITENING and (found is None or path != found[0]):
            of_first = "is for the network's first layer, as it is made of patches of the images; remove it there"
            raise ValueError(f"layer {path}: initial = {WHITENING!r} {of_first}")
    if found is None:
        return
    (name, conv), (H, W, C) = found, in_shape
    said = f"layer {name}: initial = {WHITENING!r}"
    if not isinstance(conv.size, int) or conv.groups > 1:
        raise ValueError(f"{said} is for square kernels that see all channels")
    if conv.size > min(H, W):
        raise ValueError(f"{said}: images of {H}x{W} have no patches of size {conv.size}; lower size")
    if conv.kernels != (n := 2 * conv.size**2 * C):
        raise ValueError(f"{said} makes 2·size²·channels = {n} kernels, not {conv.kernels}; set kernels = {n}")


def patch_moments(x: Array, size: int) -> tuple[Moments, int]:
    """Return the sum of products of all pairs of pixels of a patch, over all patches of x (H, W, N, C).

    The sums are (size²·C, size²·C), for pixels in the order of a kernel (size, size, C).
    """
    H, W, _, C = x.shape
    high, wide = H - size + 1, W - size + 1
    taps = [x[i : i + high, j : j + wide].reshape(-1, C) for i in range(size) for j in range(size)]
    patches = np.concatenate(taps, axis=1, dtype=np.float64)
    return patches.T @ patches, len(patches)


def whitening_kernels(moments: Moments, size: int, eps: float = EPS) -> Array:
    """Return kernels (size, size, C, 2·size²·C) from the mean products of a patch's pixels, likeliest patterns first.

    The second half are the negatives of the first. An eigenvector's sign is free: its largest number is positive.
    """
    values, vectors = np.linalg.eigh(moments)
    values, vectors = values[::-1].clip(0), vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    kernels = vectors * np.where(largest < 0, -1, 1) / np.sqrt(values + eps)
    return np.concatenate([kernels, -kernels], axis=1).reshape(size, size, -1, 2 * len(moments))
