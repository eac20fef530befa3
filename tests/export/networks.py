"""Trained networks with random weights: of every kind of layer, and of every name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Device
from daskcnn.job.network import initial_weights
from daskcnn.job.resolve import resolve
from daskcnn.nn import LAYERS, Sequential, leaves
from daskcnn.nn.spec import spec_of
from daskcnn.store import normalise
from daskcnn.store.image_facts import Facts
from daskcnn.training.trained_network import Classifier
from tests.nn.nn_cases import CASES

CLASSES = ("cat", 'quo"te', "new\nline", "ügly \\ }{")
Spec = list[dict[str, Any]]


def facts(shape: tuple[int, int, int] = (9, 7, 3), **more: Any) -> Facts:
    """What images of this shape are like, each channel with a mean and a deviation of its own."""
    return Facts(CLASSES, shape, np.linspace(90, 140, shape[2]), np.linspace(50, 70, shape[2]), **more)


def classifier(
    model: dict[str, Any], images: Facts | None = None, seed: int = 0, *, loss: str | None = None
) -> Classifier:
    """A network whose parameters and running statistics are random."""
    train = {} if loss is None else {"loss": loss}
    job, images = resolve({"model": model, "train": train}), images or facts()
    layout, weights = initial_weights(job, images)
    rng = np.random.default_rng(seed)
    params, state = layout.views(weights)
    for name, view in leaves(params):
        view += 0.1 * rng.standard_normal(view.shape) + (0.2 if name.endswith(("b", "shift")) else 0)
    for name, view in leaves(state):
        view[...] = rng.uniform(0.5, 2, view.shape) if name.endswith("variance") else rng.normal(0, 0.3, view.shape)
    return Classifier(job, images, weights)


def exactly(trained: Classifier, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Its probabilities, by convolutions that round as those of other libraries do."""
    return trained.on(Device(exact=True)).probabilities(images)


def rounding(trained: Classifier, images: npt.NDArray[Any]) -> float:
    """What a probability may be off by in float32: the scores of these networks go up to hundreds."""
    scores = trained.on(Device(exact=True))._scores(normalise(trained.facts, images, trained.job.model.dtype))
    return max(1e-5, float(4 * np.finfo("float32").eps * np.abs(scores).max()))


def pictures(images: Facts, count: int = 5, seed: int = 1) -> npt.NDArray[Any]:
    """Random images at rest, (count, H, W, C); some pixels have no data, where there is a mark for that."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 256, (count, *images.shape)).astype(images.dtype)
    if images.dtype.kind == "f":
        numbers += rng.random(numbers.shape).astype(images.dtype)
    if images.nodata is not None:
        if abs(images.nodata) <= largest(images.dtype):
            numbers[rng.random(numbers.shape) < 0.1] = images.nodata
        if images.dtype.kind == "f":
            numbers[rng.random(numbers.shape) < 0.1] = np.nan
    return numbers


def largest(dtype: np.dtype[Any]) -> float:
    """The largest number of a type."""
    return float(np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max)


def table(kind: str, layer: Any) -> dict[str, Any]:
    """A layer as a job has it."""
    (found,) = spec_of(Sequential(((kind, layer),)))
    return found


def around(kind: str, layer: Any, in_shape: tuple[int, ...]) -> tuple[Spec, tuple[int, int, int]]:
    """A network with this layer in it, and the shape of its images. What stands in front keeps the layer's input."""
    last = {"layer": "dense", "units": len(CLASSES)}
    if len(in_shape) == 3:
        H, W, C = in_shape
        return [table(kind, layer), last], (H, W, C)
    return [{"layer": "dense", "units": in_shape[0]}, table(kind, layer), last], (4, 5, 2)


def every_layer() -> list[tuple[str, Spec, tuple[int, int, int]]]:
    """A network for each example of each kind of layer."""
    found = []
    for kind in LAYERS:
        for number, (layer, in_shape) in enumerate(CASES[kind]):
            found.append((f"{kind}-{number}", *around(kind, layer, in_shape)))
    return found


MORE: list[tuple[str, Spec, tuple[int, int, int]]] = [
    ("pools of 3/2 on odd maps", [
        {"layer": "conv", "kernels": 5, "size": 3, "stride": 2, "pad": 2},
        {"layer": "maxpool", "size": 3, "stride": 2}, {"layer": "relu"},
        {"layer": "averagepool", "size": 3, "stride": 2}, {"layer": "dense", "units": 4},
    ], (23, 17, 5)),
    ("flatten between dense layers", [
        {"layer": "conv", "kernels": 3, "size": 2}, {"layer": "flatten"}, {"layer": "batchnorm"},
        {"layer": "lrn", "size": 4, "alpha": 0.5}, {"layer": "dropout", "rate": 0.5},
        {"layer": "dense", "units": 7}, {"layer": "tanh"}, {"layer": "dense", "units": 4},
    ], (5, 3, 2)),
    ("windows wider than the channels", [
        {"layer": "lrn", "size": 9, "alpha": 2.0}, {"layer": "lrn", "size": 8, "alpha": 2.0},
        {"layer": "dense", "units": 4, "bias": False}, {"layer": "dropout", "rate": 0.1},
    ], (3, 4, 2)),
    ("twelve channels", [
        {"layer": "batchnorm"}, {"layer": "conv", "kernels": 6, "size": 5, "pad": 2, "bias": False},
        {"layer": "l2pool", "size": 2}, {"layer": "sigmoid"}, {"layer": "flatten"}, {"layer": "dense", "units": 4},
    ], (11, 8, 12)),
]  # fmt: skip
NODATA = [
    ("uint8", 0),
    ("int16", -9999),
    ("float16", -9999),
    ("float32", 0.1),
    ("float64", -1e300),
    ("uint16", 0.5),
    ("float16", -99999),
]
"""Number types with the value that stands for no data, which not every type has room for."""
NAMES = ["quick", "lenet5", "case1", "resnet20", "5:7", "6:9"]
SHAPES = [(32, 32, 3), (28, 28, 1), (33, 41, 5)]
_SHORT: Spec = [
    {"layer": "dense", "units": 6}, {"layer": "sigmoid"}, {"layer": "dense", "units": 5},
    {"layer": "dense", "units": 6, "tied": "dense2"}, {"layer": "dense", "units": 24, "tied": "dense1", "bias": False},
]  # fmt: skip
_OF_MAPS: Spec = [
    {"layer": "conv", "kernels": 3, "size": 3, "pad": 1}, {"layer": "maxpool", "size": 2},
    {"layer": "dense", "units": 5}, {"layer": "dense", "units": 24, "tied": "dense1"},
    {"layer": "reshape", "shape": [2, 4, 3]}, {"layer": "upsample", "mode": "bilinear"},
    {"layer": "conv", "kernels": 2, "size": 3, "pad": 1},
]  # fmt: skip
AUTOENCODERS: list[tuple[str, dict[str, Any], tuple[int, int, int], str]] = [
    ("sae", {"name": "sae"}, (6, 5, 1), "reconstruction"),
    ("vectors", {"layers": _SHORT}, (3, 4, 2), "reconstruction"),
    ("shares", {"layers": _SHORT}, (3, 4, 2), "sigmoid-reconstruction"),
    ("maps", {"layers": _OF_MAPS}, (4, 8, 2), "sigmoid-reconstruction"),
]
"""Networks that reconstruct images: name, table, shape of the images, loss."""
