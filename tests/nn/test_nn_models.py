"""The named models: their layers, shapes and numbers of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.nn import (
    MODELS,
    Layer,
    Sequential,
    Shape,
    build_model,
    describe,
    init_network,
    leaves,
    model_problem,
    summarise,
)
from daskcnn.nn.layers import LRN, Conv, Dense, MaxPool, ReLU

CIFAR, MNIST = (32, 32, 3), (28, 28, 1)
# the kernels of `fast` begin as the identity, whatever the seed
SMALL = [name for name, model in MODELS.items() if model.image[0] <= 32 and "case" not in name and name != "fast"]


def count(model: Sequential, in_shape: Shape) -> int:
    return sum(row.parameters for row in summarise(model, in_shape))


@pytest.mark.parametrize(
    ("name", "in_shape", "parameters"),
    [
        ("quick", CIFAR, 89_578),
        ("compact", CIFAR, 27 * 16 + 9 * 16 * 32 + 9 * 32 * 64 + 9 * 64 * 64 + 2 * (16 + 32 + 64 + 64) + 650),
        ("compact", (8, 8, 3), 27 * 16 + 9 * 16 * 32 + 2 * (16 + 32) + 330),
        ("lenet5", MNIST, 61_706),
        ("lenet5", (32, 32, 1), 61_706),
        ("50:500", CIFAR, 25 * 3 * 50 + 50 + 25 * 50 * 500 + 500 + 64 * 500 * 10 + 10),
        ("8:16", CIFAR, 25 * 3 * 8 + 8 + 25 * 8 * 16 + 16 + 64 * 16 * 10 + 10),
    ],
)
def test_numbers_of_parameters(name: str, in_shape: Shape, parameters: int) -> None:
    model = build_model(name, None, in_shape, 10)
    assert count(model, in_shape) == parameters
    assert sum(p.size for _, p in leaves(init_network(model, 0, in_shape, "float32")[0])) == parameters


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # to the digits that the papers print, in their units
        ("resnet20", "0.27 M"),
        ("fast", "1.97 M"),
        ("resnet32", "0.46 M"),
        ("resnet56", "0.85 M"),
        ("vgg11", "133 M"),
        ("vgg16", "138 M"),
        ("alexnet", "60965224"),
        # those of torchvision's networks of these names, whose papers print none
        ("resnet18", "11689512"),
        ("resnet34", "21797672"),
        # case 1 by hand: 3×3 kernels of 3 and 4 channels, four maps of 16×16, then 500, 500, 500 and 10 units
        ("case1", str(4 * 28 + 4 * 37 + 1025 * 500 + 2 * 501 * 500 + 501 * 10)),
    ],
)
def test_numbers_of_parameters_of_the_papers_networks(name: str, parameters: str) -> None:
    model = MODELS[name]
    found = count(build_model(name, None, model.image, model.classes), model.image)
    number, _, million = parameters.partition(" ")
    digits = len(number.partition(".")[2])
    assert (f"{found / 1e6:.{digits}f}" if million else str(found)) == number


def test_googlenet_has_the_parameters_of_caffes_network() -> None:
    # the paper's Table 1 does not follow from its own kernels, by up to 5 % of a module
    rows = summarise(build_model("googlenet", None, (224, 224, 3), 1000), (224, 224, 3))
    assert sum(row.parameters for row in rows) == 13_378_280
    assert sum(row.parameters for row in rows if not row.name.startswith("auxiliary")) == 6_998_552


def test_quick_is_the_networks_list() -> None:
    shapes = [(row.name, row.out_shape) for row in summarise(build_model("quick", None, CIFAR, 10), CIFAR)]
    assert shapes == [
        ("conv1", (32, 32, 32)),
        ("maxpool1", (16, 16, 32)),
        ("relu1", (16, 16, 32)),
        ("conv2", (16, 16, 32)),
        ("relu2", (16, 16, 32)),
        ("averagepool1", (8, 8, 32)),
        ("conv3", (8, 8, 64)),
        ("relu3", (8, 8, 64)),
        ("averagepool2", (4, 4, 64)),
        ("dense1", (10,)),
    ]


@pytest.mark.parametrize("relu", [True, False])
def test_two_convolutions_are_the_papers_list(relu: bool) -> None:
    def stage(kernels: int) -> list[Layer]:
        return [Conv(kernels, 5, pad=2), *([ReLU()] if relu else []), LRN(5, 1e-4, 0.75, 1.0), MaxPool(2)]

    model = build_model("50:500", None, CIFAR, 10, relu)
    assert [layer for _, layer in model.layers] == [*stage(50), *stage(500), Dense(10)]


@pytest.mark.parametrize("name", ["quick", "lenet5", "50:500", "1:1"])
def test_known_models_have_no_problem(name: str) -> None:
    assert model_problem(name) is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("quik", "C1:C2"),
        ("50:", "C1:C2"),
        ("0:5", "C1:C2"),
        ("50:-5", "C1:C2"),
        ("quick ", "quick, lenet5, "),
    ],
)
def test_unknown_models_are_named_with_a_remedy(name: str, remedy: str) -> None:
    problem = model_problem(name)
    assert problem is not None
    assert name in problem
    assert remedy in problem
    with pytest.raises(ValueError, match=name):
        build_model(name, None, CIFAR, 10)


def test_layers_make_a_model_too() -> None:
    model = build_model(None, [{"layer": "dense", "units": 3}], MNIST, 3)
    assert model.layers == (("dense1", Dense(3)),)


def test_a_model_that_does_not_end_in_the_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"output is \(4,\), of 3 classes: end it with a dense layer of 3"):
        build_model(None, [{"layer": "dense", "units": 4}], MNIST, 3)


@pytest.mark.parametrize("reconstructs", [False, True])
def test_a_head_in_the_middle_has_the_outputs_of_the_end(reconstructs: bool) -> None:
    units, others = (784, 3) if reconstructs else (3, 784)

    def layers(of_head: int) -> list[dict[str, Any]]:
        head = {"layer": "auxiliary", "path": [{"layer": "dense", "units": of_head}]}
        return [{"layer": "dense", "units": 4}, head, {"layer": "dense", "units": units}]

    assert build_model(None, layers(units), MNIST, 3, reconstructs=reconstructs).out_shape(MNIST) == (units,)
    with pytest.raises(ValueError, match=rf"layer auxiliary1: its path's output is \({others},\)"):
        build_model(None, layers(others), MNIST, 3, reconstructs=reconstructs)


def test_a_model_that_does_not_fit_the_images_is_refused() -> None:
    with pytest.raises(ValueError, match="layer maxpool2: size=2"):
        build_model("8:8", None, (3, 3, 1), 10)


@pytest.mark.parametrize("layers", [None, [{"layer": "relu"}]])
def test_name_or_layers_exactly_one(layers: list[dict[str, Any]] | None) -> None:
    with pytest.raises(ValueError, match="give one of the two"):
        build_model(None if layers is None else "quick", layers, CIFAR, 10)


def test_the_autoencoder_goes_back_by_the_weights_of_its_encoder() -> None:
    model = build_model("sae", None, MNIST, 10, reconstructs=True)
    params, _ = init_network(model, 0, MNIST, "float32")
    shapes = {name: a.shape for name, a in leaves(params)}
    assert {name: shape for name, shape in shapes.items() if name.endswith("w")} == {
        "dense1/w": (28, 28, 1, 500),
        "dense2/w": (500, 250),
        "dense3/w": (250, 10),
    }
    assert [shapes[f"dense{i}/b"] for i in range(1, 7)] == [(500,), (250,), (10,), (250,), (500,), (784,)]
    assert count(model, MNIST) == model.numbers(MNIST) == sum(a.size for _, a in leaves(params))


@pytest.mark.parametrize("name", SMALL)
def test_seed_and_dtype_decide_the_weights(name: str) -> None:
    model = build_model(name, None, CIFAR, 10, reconstructs=MODELS[name].reconstructs)
    single, double = (init_network(model, 3, CIFAR, dtype)[0] for dtype in ("float32", "float64"))
    other = init_network(model, 4, CIFAR, "float32")[0]
    for (path, a), (_, b), (_, c) in zip(leaves(single), leaves(double), leaves(other), strict=True):
        assert (a.dtype, b.dtype) == (np.dtype("float32"), np.dtype("float64"))
        np.testing.assert_array_equal(a, b.astype("float32"))
        assert path.endswith(("/b", "/scale", "/shift")) or (a != c).any()


def test_the_table_shows_every_layer_and_the_total() -> None:
    table = describe(build_model("50:500", None, CIFAR, 10), CIFAR)
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["layer", "output", "parameters"]
    assert lines[1] == ["conv1", "Conv(kernels=50,", "size=5,", "pad=2)", "32×32×50", "3,800"]
    assert lines[3] == ["lrn1", "LRN()", "32×32×50", "0"]
    assert lines[-1] == ["total", "949,310"]
