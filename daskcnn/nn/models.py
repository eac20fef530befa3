"""Networks that have a name, as lists of layers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from daskcnn.errors import similar
from daskcnn.nn.layer import LayerError, Shape, walk
from daskcnn.nn.layers.auxiliary import Auxiliary
from daskcnn.nn.network import check_whitening
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.spec import sequential_from_spec

Spec = list[dict[str, Any]]
Builder = Callable[[Shape, int], Spec]
"""(in_shape, classes) -> the layers."""

LARGE = 64
"""Rows or columns from which networks for photographs keep the strides of their first layers."""


@dataclass(frozen=True)
class NamedModel:
    """A network that has a name; `image` (H, W, C) and `classes` are those that it was described for.

    rate : SGD's on such images, in minibatches of 64. Where the network was studied it is the one that reached an
        accuracy first (`benchmarks/studies/named_models.py`).
    """

    layers: Builder
    origin: str
    image: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    reconstructs: bool = False
    rate: float = 0.01


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


def quick(in_shape: Shape, classes: int) -> Spec:
    """Three 5×5 convolutions of 32, 32 and 64 kernels, for 32×32 images: "quick" of cuda-convnet and Caffe."""
    return [
        *(conv(32, 5, pad=2), pool("maxpool"), *only("relu")),
        *(conv(32, 5, pad=2), *only("relu"), pool("averagepool")),
        *(conv(64, 5, pad=2), *only("relu"), pool("averagepool")),
        dense(classes),
    ]


def compact(in_shape: Shape, classes: int) -> Spec:
    """Few weights and batch normalising, for a few hundred images: 3×3 convolutions of 16, 32, 64, 64, … kernels.

    A pool follows each while maps are larger than 8 by 8; two convolutions and the mean of each map end it, so that it
    matters little where in the image a thing is.
    """
    layers: Spec = []
    kernels, size = 16, min(in_shape[:2])
    for _ in range(max(0, math.ceil(math.log2(size / 8)))):
        layers += [*normalised(kernels, 3, pad=1), *only("relu"), pool("maxpool")]
        kernels = min(64, 2 * kernels)
    for _ in range(2):
        layers += [*normalised(kernels, 3, pad=1), *only("relu")]
        kernels = min(64, 2 * kernels)
    return [*layers, *only("globalpool"), dense(classes)]


def lenet5(in_shape: Shape, classes: int) -> Spec:
    """LeCun et al. 1998, Fig. 2, with plain averages and full connections. 28×28 images are padded to its 32×32."""
    return [
        *(conv(6, 5, pad=0 if min(in_shape[:2]) >= 32 else 2), *only("tanh"), pool("averagepool")),
        *(conv(16, 5, pad=0), *only("tanh"), pool("averagepool")),
        *(dense(120), *only("tanh"), dense(84), *only("tanh"), dense(classes)),
    ]


def alexnet(in_shape: Shape, classes: int) -> Spec:
    """Krizhevsky et al. 2012, Fig. 2, with its two groups. Images of 224×224 are padded by 2, for maps of 55×55."""
    lrn = only("lrn", size=5, alpha=1e-4, beta=0.75, k=2.0)
    hidden = [*only("dropout", rate=0.5), dense(4096), *only("relu")]
    return [
        *(conv(96, 11, stride=4, pad=2), *only("relu"), *lrn, pool("maxpool", 3)),
        *(conv(256, 5, pad=2, groups=2), *only("relu"), *lrn, pool("maxpool", 3)),
        *(conv(384, 3, pad=1), *only("relu")),
        *(conv(384, 3, pad=1, groups=2), *only("relu")),
        *(conv(256, 3, pad=1, groups=2), *only("relu"), pool("maxpool", 3)),
        *(*hidden, *hidden, dense(classes)),
    ]


VGG_A, VGG_D = (1, 1, 2, 2, 2), (2, 2, 3, 3, 3)
"""Convolutions of each stage, by the table's columns."""


def vgg(stages: tuple[int, ...], batchnorm: bool, in_shape: Shape, classes: int) -> Spec:
    """3×3 convolutions in five stages, `batchnorm` behind each; small images have no hidden layers of 4,096 units."""
    layers: Spec = []
    for kernels, count in zip((64, 128, 256, 512, 512), stages, strict=True):
        for _ in range(count):
            layers += [*(normalised(kernels, 3, pad=1) if batchnorm else [conv(kernels, 3, pad=1)]), *only("relu")]
        layers.append(pool("maxpool"))
    if min(in_shape[:2]) >= LARGE:
        layers += [dense(4096), *only("relu"), *only("dropout", rate=0.5)] * 2
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
    lrn, modules = only("lrn", size=5, alpha=1e-4, beta=0.75, k=1.0), {n: inception(*MODULES[n]) for n in MODULES}
    return [
        *(*_relu(64, 7, stride=2, pad=3), *_halved(), *lrn),
        *(*_relu(64, 1), *_relu(192, 3, pad=1), *lrn, *_halved()),
        *(modules["3a"], modules["3b"], *_halved()),
        *(modules["4a"], _head(classes), modules["4b"], modules["4c"], modules["4d"], _head(classes), modules["4e"]),
        *(*_halved(), modules["5a"], modules["5b"]),
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


def resnet_for_small_images(blocks: int, in_shape: Shape, classes: int) -> Spec:
    """Section 4.2: 6·blocks + 2 layers, three stages of 16, 32 and 64 kernels, shortcuts without parameters (A)."""
    stages = [(kernels, blocks, [pool("maxpool", 1), *only("pad", channels=kernels // 2)]) for kernels in (16, 32, 64)]
    return [*normalised(16, 3, pad=1), *only("relu"), *_blocks(stages), *only("globalpool"), dense(classes)]


def resnet_for_photographs(blocks: tuple[int, int, int, int], in_shape: Shape, classes: int) -> Spec:
    """Table 1: four stages of `blocks`, with projections (B). Small images keep their size at first."""
    if min(in_shape[:2]) >= LARGE:
        first = [*normalised(64, 7, stride=2, pad=3), *only("relu"), *_halved()]
    else:
        first = [*normalised(64, 3, pad=1), *only("relu")]
    kernels = (64, 128, 256, 512)
    stages = [(k, count, normalised(k, 1, stride=2)) for k, count in zip(kernels, blocks, strict=True)]
    return [*first, *_blocks(stages), *only("globalpool"), dense(classes)]


def _blocks(stages: list[tuple[int, int, Spec]]) -> Spec:
    """Fig. 2: blocks of two 3×3 convolutions; stages: kernels, blocks, shortcut where a stage halves the map."""
    layers: Spec = []
    for stage, (kernels, count, shortcut) in enumerate(stages):
        for i in range(count):
            halves = stage > 0 and i == 0
            first = [*normalised(kernels, 3, stride=2 if halves else 1, pad=1), *only("relu")]
            block = {"layer": "residual", "path": [*first, *normalised(kernels, 3, pad=1)]}
            layers += [block | ({"shortcut": shortcut} if halves else {}), *only("relu")]
    return layers


def fast(in_shape: Shape, classes: int) -> Spec:
    """Whitening 2×2 kernels, three blocks of two 3×3 convolutions, and scaled scores.

    Convolutions begin as the identity on the channels that come in; their other kernels, and the weights of the scores,
    are drawn as PyTorch draws them. Normalising shifts but does not scale.
    """
    layers = [conv(2 * 2**2 * in_shape[-1], 2, initial="whitening"), *only("gelu")]
    active = [*only("batchnorm", scale=False, momentum=0.4, epsilon=1e-12), *only("gelu")]
    for kernels in (64, 256, 256):
        convolution = conv(kernels, 3, pad=1, bias=False, initial="dirac")
        layers += [convolution, pool("maxpool"), *active, convolution, *active]
    scores = {"layer": "dense", "units": classes, "bias": False, "initial": "uniform"}
    return [*layers, pool("maxpool", 3, 3), scores, *only("scale", factor=1 / 9)]


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


def two_convolutions(c1: int, c2: int, classes: int, *, relu: bool = True) -> Spec:
    """The network of Marques et al. with c1 and c2 kernels. Without `relu` it has exactly the layers that they list."""
    behind = [*(only("relu") if relu else []), *only("lrn"), pool("maxpool")]
    return [conv(c1, 5, pad=2), *behind, conv(c2, 5, pad=2), *behind, dense(classes)]


def case(scale: tuple[int, int, int, int], in_shape: Shape, classes: int) -> Spec:
    """The network of one of BPT-CNN's cases, by its row of Table 2.

    The paper names counts only. Convolutions are 3×3 here, every second one is pooled by 2 while maps are larger than
    4×4, and the scores have a layer of their own.
    """
    convolutions, filters, hidden, neurons = scale
    layers, side = Spec(), min(in_shape[:2])
    for i in range(convolutions):
        layers += [conv(filters, 3, pad=1), *only("relu")]
        if i % 2 and side > 4:
            layers.append(pool("maxpool"))
            side //= 2
    layers += [dense(neurons), *only("relu")] * hidden
    return [*layers, dense(classes)]


def sae(in_shape: Shape, classes: int) -> Spec:
    """Stacked autoencoder of sigmoid units: 500, 250 and 10, and back by the same weights, transposed."""
    sizes = (prod(in_shape), 500, 250, 10)
    there = [dense(units) for units in sizes[1:]]
    back = [dense(sizes[i]) | {"tied": f"dense{i + 1}"} for i in (2, 1, 0)]
    return [layer for each in (*there, *back) for layer in (each, *only("sigmoid"))]


CIFAR10 = (32, 32, 3)
"""Images that Marques et al. train C1:C2 on."""
PHOTOGRAPHS = (224, 224, 3), 1000
"""Images and classes of ImageNet."""

MODELS: Mapping[str, NamedModel] = {
    "quick": NamedModel(quick, "cuda-convnet and Caffe, CIFAR-10", rate=0.02),
    "lenet5": NamedModel(lenet5, "LeCun et al. 1998, Fig. 2", (28, 28, 1), rate=0.02),
    "fast": NamedModel(fast, "airbench94 (Jordan 2024, section 3)"),
    "compact": NamedModel(compact, "here, for a few hundred images (docs/own-images.md)", rate=0.08),
    **{
        f"case{i}": NamedModel(
            partial(case, scale), f"BPT-CNN (Chen et al. 2019), Table 2, case {i}", rate=0.02 if i == 1 else 0.01
        )
        for i, scale in enumerate(_CASES, 1)
    },
    "sae": NamedModel(sae, "Marques 2016, thesis, appendix A", (28, 28, 1), reconstructs=True),
    "resnet20": NamedModel(partial(resnet_for_small_images, 3), "He et al. 2016, section 4.2"),
    "resnet32": NamedModel(partial(resnet_for_small_images, 5), "He et al. 2016, section 4.2"),
    "resnet56": NamedModel(partial(resnet_for_small_images, 9), "He et al. 2016, section 4.2"),
    "resnet18": NamedModel(partial(resnet_for_photographs, (2, 2, 2, 2)), "He et al. 2016, Table 1", *PHOTOGRAPHS),
    "resnet34": NamedModel(partial(resnet_for_photographs, (3, 4, 6, 3)), "He et al. 2016, Table 1", *PHOTOGRAPHS),
    "vgg11": NamedModel(partial(vgg, VGG_A, False), "Simonyan & Zisserman 2015, Table 1, A", *PHOTOGRAPHS),
    "vgg11-bn": NamedModel(partial(vgg, VGG_A, True), "the same with batch normalising", *PHOTOGRAPHS),
    "vgg16": NamedModel(partial(vgg, VGG_D, False), "Simonyan & Zisserman 2015, Table 1, D", *PHOTOGRAPHS),
    "vgg16-bn": NamedModel(partial(vgg, VGG_D, True), "the same with batch normalising", *PHOTOGRAPHS),
    "alexnet": NamedModel(alexnet, "Krizhevsky et al. 2012, Fig. 2", *PHOTOGRAPHS),
    "googlenet": NamedModel(googlenet, "Szegedy et al. 2015, Table 1", *PHOTOGRAPHS),
}
"""A new network is a function and a line of this."""


def model_problem(name: str) -> str | None:
    """Return what is wrong with a model's name, None if nothing is."""
    if name in MODELS or _counts(name):
        return None
    known = f"it is one of {', '.join(MODELS)} or C1:C2, such as 50:500"
    return f'model "{name}": there is none of this name{similar(name, MODELS)}; {known}'


def described_for(name: str) -> Shape:
    """Return the shape (H, W, C) of the images that a named network was described for."""
    return MODELS[name].image if name in MODELS else CIFAR10


def rate_of(name: str) -> float:
    """Return SGD's rate for a named network, on the images that it was described for, in minibatches of 64."""
    return MODELS[name].rate if name in MODELS else NamedModel.rate


def _counts(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"([1-9]\d{0,4}):([1-9]\d{0,4})", name)
    return (int(match[1]), int(match[2])) if match else None


def model_spec(name: str, in_shape: Shape, classes: int, *, relu: bool = True) -> Spec:
    """Return the layers of a named model. Raises ValueError for an unknown name."""
    if problem := model_problem(name):
        raise ValueError(problem)
    if counts := _counts(name):
        return two_convolutions(*counts, classes, relu=relu)
    return MODELS[name].layers(in_shape, classes)


def build_model(
    name: str | None,
    layers: Sequence[Mapping[str, Any]] | None,
    in_shape: Shape,
    classes: int,
    relu: bool = True,
    *,
    reconstructs: bool = False,
) -> Sequential:
    """Return the network of this name, or of these layers, for images (H, W, C) and this number of classes.

    Raises ValueError for an unknown name, a wrong layer, a layer that does not fit the images, or a number of
    outputs that differs from the number of classes; of a network that `reconstructs` images, from theirs. `relu`
    matters to C1:C2 only.
    """
    if (name is None) == (layers is None):
        raise ValueError(f"model name={name!r} and layers={layers!r}: give one of the two")
    model = sequential_from_spec(model_spec(name, in_shape, classes, relu=relu) if name is not None else layers or [])
    check_whitening(model, in_shape)
    if problem := _of_output(model.out_shape(in_shape), in_shape, classes, reconstructs):
        raise ValueError(f"the model's output is {problem}")
    for path, layer, shape in walk(model, in_shape, composite=True):
        if isinstance(layer, Auxiliary) and (
            problem := _of_output(layer.scores_shape(shape), in_shape, classes, reconstructs)
        ):
            raise LayerError(path, f"its path's output is {problem}")
    return model


def _of_output(out: Shape, image: Shape, classes: int, reconstructs: bool) -> str | None:
    """Return what is wrong with scores of this shape, and the remedy."""
    values = prod(image)
    of_image = out in (image, (values,))
    if reconstructs:
        ending = f"end it with a map of that shape, or with a dense layer of {values} units"
        return None if of_image else f"{out}, and the loss compares it with images {image}: {ending}"
    if out == (classes,):
        return None
    other = "; or set train.loss = 'reconstruction'" if of_image else ""
    return f"{out}, of {classes} classes: end it with a dense layer of {classes} units{other}"
