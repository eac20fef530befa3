"""Networks that have a name, as lists of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

from daskcnn.nn.layer import Shape

Spec = list[dict[str, Any]]
Builder = Callable[[Shape, int], Spec]
"""(in_shape, classes) -> the layers."""

LARGE = 64
"""Rows or columns from which networks for photographs keep the strides of their first layers."""


@dataclass(frozen=True)
class NamedModel:
    """A network that has a name.

    Attributes
    ----------
    layers : makes its list of layers
    origin : where it is from
    image, classes : what it was described for: the usual shape (H, W, C) and number of classes
    reconstructs : true if it answers images with images
    """

    layers: Builder
    origin: str
    image: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    reconstructs: bool = False


def conv(kernels: int, size: int, **options: Any) -> dict[str, Any]:
    """A convolution."""
    return {"layer": "conv", "kernels": kernels, "size": size, **options}


def normalised(kernels: int, size: int, **options: Any) -> Spec:
    """A convolution without bias, and batch normalising."""
    return [conv(kernels, size, bias=False, **options), *only("batchnorm")]


def dense(units: int) -> dict[str, Any]:
    """A fully connected layer."""
    return {"layer": "dense", "units": units}


def pool(kind: str, size: int = 2, stride: int = 2) -> dict[str, Any]:
    """A pooling layer."""
    return {"layer": kind, "size": size} | ({"stride": stride} if stride != size else {})


def only(kind: str, **options: Any) -> Spec:
    """A list of one layer."""
    return [{"layer": kind, **options}]


def is_large(in_shape: Shape) -> bool:
    """Return whether images are as large as photographs."""
    return min(in_shape[:2]) >= LARGE


def quick(in_shape: Shape, classes: int) -> Spec:
    """Three 5×5 convolutions of 32, 32 and 64 kernels, for 32×32 images: "quick" of cuda-convnet and Caffe."""
    return [
        *(conv(32, 5, pad=2), pool("maxpool"), *only("relu")),
        *(conv(32, 5, pad=2), *only("relu"), pool("averagepool")),
        *(conv(64, 5, pad=2), *only("relu"), pool("averagepool")),
        dense(classes),
    ]


def lenet5(in_shape: Shape, classes: int) -> Spec:
    """LeCun et al. 1998, Fig. 2, with plain averages and full connections. 28×28 images are padded to its 32×32."""
    hidden = [layer for units in (120, 84) for layer in (dense(units), *only("tanh"))]
    return [
        *(conv(6, 5, pad=0 if min(in_shape[:2]) >= 32 else 2), *only("tanh"), pool("averagepool")),
        *(conv(16, 5, pad=0), *only("tanh"), pool("averagepool")),
        *hidden,
        dense(classes),
    ]


def alexnet(in_shape: Shape, classes: int) -> Spec:
    """Krizhevsky et al. 2012, Fig. 2, with its two groups. Images of 224×224 are padded by 2, for maps of 55×55."""
    lrn = only("lrn", size=5, alpha=1e-4, beta=0.75, k=2.0)
    hidden = [layer for _ in range(2) for layer in (*only("dropout", rate=0.5), dense(4096), *only("relu"))]
    return [
        *(conv(96, 11, stride=4, pad=2), *only("relu"), *lrn, pool("maxpool", 3)),
        *(conv(256, 5, pad=2, groups=2), *only("relu"), *lrn, pool("maxpool", 3)),
        *(conv(384, 3, pad=1), *only("relu")),
        *(conv(384, 3, pad=1, groups=2), *only("relu")),
        *(conv(256, 3, pad=1, groups=2), *only("relu"), pool("maxpool", 3)),
        *hidden,
        dense(classes),
    ]


_STAGES = {"A": (1, 1, 2, 2, 2), "D": (2, 2, 3, 3, 3)}
"""Convolutions of each stage, by the table's columns."""


def vgg(column: Literal["A", "D"], *, batchnorm: bool = False) -> Builder:
    """3×3 convolutions of 64 to 512 kernels in five stages. With `batchnorm` each is normalised, without a bias.

    Small images have no hidden layers of 4,096 units.
    """
    return partial(_vgg, _STAGES[column], batchnorm)


def _vgg(stages: tuple[int, ...], batchnorm: bool, in_shape: Shape, classes: int) -> Spec:
    layers: Spec = []
    for kernels, count in zip((64, 128, 256, 512, 512), stages, strict=True):
        for _ in range(count):
            layers += [*(normalised(kernels, 3, pad=1) if batchnorm else [conv(kernels, 3, pad=1)]), *only("relu")]
        layers.append(pool("maxpool"))
    if is_large(in_shape):
        layers += [layer for _ in range(2) for layer in (dense(4096), *only("relu"), *only("dropout", rate=0.5))]
    return [*layers, dense(classes)]


MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Table 1: kernels of 1×1, of the reduction before 3×3, 3×3, of the reduction before 5×5, 5×5, and behind the pool."""


def googlenet(in_shape: Shape, classes: int) -> Spec:
    """Table 1 for 224×224 images, with heads behind 4a and 4d in training (section 5).

    Its pools of 3 round map sizes up. Zeros around maps give the same sizes, with windows one pixel further up and
    left. Behind a ReLU zeros change no maximum.
    """

    def modules(*names: str) -> Spec:
        return [inception(*MODULES[name]) for name in names]

    lrn = only("lrn", size=5, alpha=1e-4, beta=0.75, k=1.0)
    return [
        *(*_relu(64, 7, stride=2, pad=3), *_halved(), *lrn),
        *(*_relu(64, 1), *_relu(192, 3, pad=1), *lrn, *_halved()),
        *(*modules("3a", "3b"), *_halved()),
        *(*modules("4a"), _head(classes), *modules("4b", "4c", "4d"), _head(classes), *modules("4e"), *_halved()),
        *modules("5a", "5b"),
        *(*only("globalpool"), *only("dropout", rate=0.4), dense(classes)),
    ]


def inception(one: int, before_three: int, three: int, before_five: int, five: int, behind_pool: int) -> dict[str, Any]:
    """Fig. 2 b: four branches side by side."""
    branches = [
        _relu(one, 1),
        [*_relu(before_three, 1), *_relu(three, 3, pad=1)],
        [*_relu(before_five, 1), *_relu(five, 5, pad=2)],
        [*only("pad", size=1), pool("maxpool", 3, 1), *_relu(behind_pool, 1)],
    ]
    return {"layer": "branches", "branches": branches}


def _head(classes: int) -> dict[str, Any]:
    """Section 5: a smaller network of its own, whose loss counts 0.3 times."""
    hidden = [dense(1024), *only("relu"), *only("dropout", rate=0.7), dense(classes)]
    return {"layer": "auxiliary", "weight": 0.3, "path": [pool("averagepool", 5, 3), *_relu(128, 1), *hidden]}


def _relu(kernels: int, size: int, **options: int) -> Spec:
    return [conv(kernels, size, **options), *only("relu")]


def _halved() -> Spec:
    return [*only("pad", size=1), pool("maxpool", 3)]


def resnet_for_small_images(blocks: int) -> Builder:
    """Section 4.2: 6·blocks + 2 layers, three stages of 16, 32 and 64 kernels, shortcuts without parameters (A)."""
    return partial(_small, blocks)


def resnet_for_photographs(blocks: tuple[int, int, int, int]) -> Builder:
    """Table 1: four stages of 64 to 512 kernels, with projections (B). Small images keep their size at first.

    blocks: of each stage.
    """
    return partial(_large, blocks)


def _small(blocks: int, in_shape: Shape, classes: int) -> Spec:
    layers = [*normalised(16, 3, pad=1), *only("relu")]
    before = 16
    for kernels in (16, 32, 64):
        for i in range(blocks):
            halved = i == 0 and kernels > before
            shortcut = [pool("maxpool", 1), *only("pad", channels=kernels - before)] if halved else []
            layers += _basic(kernels, 2 if halved else 1, shortcut)
        before = kernels
    return [*layers, *only("globalpool"), dense(classes)]


def _large(blocks: tuple[int, int, int, int], in_shape: Shape, classes: int) -> Spec:
    if is_large(in_shape):
        layers = [*normalised(64, 7, stride=2, pad=3), *only("relu"), *only("pad", size=1), pool("maxpool", 3)]
    else:
        layers = [*normalised(64, 3, pad=1), *only("relu")]
    before = 64
    for kernels, count in zip((64, 128, 256, 512), blocks, strict=True):
        for i in range(count):
            halved = i == 0 and kernels > before
            shortcut = normalised(kernels, 1, stride=2) if halved else []
            layers += _basic(kernels, 2 if halved else 1, shortcut)
        before = kernels
    return [*layers, *only("globalpool"), dense(classes)]


def _basic(kernels: int, stride: int, shortcut: Spec) -> Spec:
    """Fig. 2: two 3×3 convolutions beside a shortcut, which is the input where it is empty."""
    first = [*normalised(kernels, 3, stride=stride, pad=1), *only("relu")]
    path = [*first, *normalised(kernels, 3, pad=1)]
    return [{"layer": "residual", "path": path} | ({"shortcut": shortcut} if shortcut else {}), *only("relu")]


_KERNELS = (64, 256, 256)
_PATCH = 2
_SCALE = 1 / 9
"""Factor of the scores, the paper's."""


def fast(in_shape: Shape, classes: int) -> Spec:
    """Whitening 2×2 kernels, three blocks of two 3×3 convolutions, and scaled scores.

    Convolutions begin as the identity on the channels that come in; their other kernels, and the weights of the scores,
    are drawn as PyTorch draws them. Normalising shifts but does not scale.
    """
    layers = [conv(2 * _PATCH**2 * in_shape[-1], _PATCH, initial="whitening"), *only("gelu")]
    for kernels in _KERNELS:
        layers += [_convolution(kernels), pool("maxpool"), *_normalised(), _convolution(kernels), *_normalised()]
    scores = {"layer": "dense", "units": classes, "bias": False, "initial": "uniform"}
    return [*layers, pool("maxpool", 3, 3), scores, *only("scale", factor=_SCALE)]


def _convolution(kernels: int) -> dict[str, Any]:
    return conv(kernels, 3, pad=1, bias=False, initial="dirac")


def _normalised() -> Spec:
    return [*only("batchnorm", scale=False, momentum=0.4, epsilon=1e-12), *only("gelu")]


_CASES = (
    (2, 4, 3, 500),
    (4, 4, 3, 1000),
    (6, 8, 5, 1500),
    (8, 8, 5, 1500),
    (8, 10, 7, 2000),
    (10, 10, 7, 2000),
    (10, 12, 7, 2000),
)
"""BPT-CNN, Table 2: convolutions, filters of each, fully connected layers, neurons of each."""
_SMALLEST = 4
"""Rows or columns of the smallest map that is pooled."""


def two_convolutions(c1: int, c2: int, classes: int, *, relu: bool = True) -> Spec:
    """The network of Marques et al. with c1 and c2 kernels.

    Without `relu` it has exactly the layers that the paper lists.
    """

    def stage(kernels: int) -> Spec:
        return [conv(kernels, 5, pad=2), *(only("relu") if relu else []), *only("lrn"), pool("maxpool")]

    return [*stage(c1), *stage(c2), dense(classes)]


def case(number: int) -> Builder:
    """The network of BPT-CNN's case 1 to 7.

    The paper names counts only. Convolutions are 3×3 here, every second one is pooled by 2 while maps are larger than
    4×4, and the scores have a layer of their own.
    """
    return partial(_case, _CASES[number - 1])


def _case(scale: tuple[int, int, int, int], in_shape: Shape, classes: int) -> Spec:
    convolutions, filters, hidden, neurons = scale
    layers, side = Spec(), min(in_shape[:2])
    for i in range(convolutions):
        layers += [conv(filters, 3, pad=1), *only("relu")]
        if i % 2 and side > _SMALLEST:
            layers.append(pool("maxpool"))
            side //= 2
    layers += [layer for _ in range(hidden) for layer in (dense(neurons), *only("relu"))]
    return [*layers, dense(classes)]


CASES = {f"case{i}": NamedModel(case(i), f"BPT-CNN (Chen et al. 2019), Table 2, case {i}") for i in range(1, 8)}


def sae(in_shape: Shape, classes: int) -> Spec:
    """Stacked autoencoder of sigmoid units: 500, 250 and 10, and back by the same weights, transposed.

    It reconstructs images of pixels between 0 and 1, by the loss `reconstruction`.
    """
    sizes = (prod(in_shape), 500, 250, 10)
    there = [dense(units) for units in sizes[1:]]
    back = [dense(sizes[i]) | {"tied": f"dense{i + 1}"} for i in (2, 1, 0)]
    return [layer for each in (*there, *back) for layer in (each, *only("sigmoid"))]
