"""Exported to PyTorch, a network answers as it does here; without PyTorch its text and its weights are looked at."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from daskcnn import __version__
from daskcnn.errors import UserError
from daskcnn.export.torch_module import CONVERTERS, JOINS, write_torch
from daskcnn.nn import LAYERS
from daskcnn.training.trained_network import Classifier
from tests.export.networks import (
    AUTOENCODERS,
    CLASSES,
    MORE,
    NAMES,
    NODATA,
    SHAPES,
    Spec,
    classifier,
    every_layer,
    exactly,
    facts,
    pictures,
    rounding,
)
from tests.export.test_onnx import Unknown

CASES = [pytest.param(spec, shape, id=name) for name, spec, shape in [*every_layer(), *MORE]]


def imported(file: Path) -> Any:
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(trained: Classifier, folder: Path, images: npt.NDArray[Any] | None = None) -> None:
    torch = pytest.importorskip("torch")
    file, _ = write_torch(trained, "a run", folder / "network.py")
    model = imported(file).load()
    images = pictures(trained.facts) if images is None else images
    given = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    if trained.reconstructs:
        found = model.reconstructed(given).numpy().transpose(0, 2, 3, 1)
        np.testing.assert_allclose(found, exactly(trained, images), rtol=1e-5, atol=1e-3)  # pixels go up to 255
        return
    atol = rounding(trained, images)
    np.testing.assert_allclose(model.probabilities(given).numpy(), exactly(trained, images), rtol=1e-5, atol=atol)


def test_every_layer_has_a_converter() -> None:
    assert CONVERTERS.keys() | JOINS.keys() == LAYERS.keys()


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_layers(spec: Spec, shape: tuple[int, int, int], tmp_path: Path) -> None:
    check(classifier({"layers": spec}, facts(shape)), tmp_path)


@pytest.mark.parametrize(("model", "shape", "loss"), [pytest.param(*rest, id=n) for n, *rest in AUTOENCODERS])
def test_autoencoders(model: dict[str, Any], shape: tuple[int, int, int], loss: str, tmp_path: Path) -> None:
    check(classifier(model, facts(shape), loss=loss), tmp_path)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_named_networks(name: str, shape: tuple[int, int, int], tmp_path: Path) -> None:
    check(classifier({"name": name}, facts(shape)), tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_number_type_is_kept(dtype: str, tmp_path: Path) -> None:
    check(classifier({"name": "5:7", "dtype": dtype}), tmp_path)
    _, weights = write_torch(classifier({"name": "5:7", "dtype": dtype}), "", tmp_path / "network.py")
    arrays = load_file(weights)
    assert {array.dtype.name for array in arrays.values()} == {dtype}
    np.testing.assert_allclose(arrays["deviation"].ravel(), [50, 60, 70])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float16", "float32", "float64"])
def test_number_types(dtype: str, tmp_path: Path) -> None:
    check(classifier({"layers": MORE[0][1]}, facts(MORE[0][2], dtype=np.dtype(dtype))), tmp_path)


def test_the_mean_is_taken_off_images_of_float64_before_they_are_cut_to_float32(tmp_path: Path) -> None:
    far = replace(facts((9, 7, 2), dtype=np.dtype("float64")), mean=np.full(2, 1e9), deviation=np.full(2, 2.6))
    images = 1e9 + np.random.default_rng(0).normal(0, 2.6, (5, 9, 7, 2))
    _, weights = write_torch(classifier({"name": "5:7"}, far), "", tmp_path / "network.py")
    assert load_file(weights)["mean"].dtype == np.float64
    check(classifier({"name": "5:7"}, far), tmp_path, images)


@pytest.mark.parametrize(("dtype", "nodata"), NODATA)
def test_pixels_without_data(dtype: str, nodata: float, tmp_path: Path) -> None:
    check(classifier({"layers": MORE[0][1]}, facts(MORE[0][2], dtype=np.dtype(dtype), nodata=nodata)), tmp_path)


@pytest.mark.parametrize("name", ["lenet5", "5:7"])
def test_several_labels(name: str, tmp_path: Path) -> None:
    trained = classifier({"name": name}, facts((28, 28, 1), labels="several"))
    assert not np.allclose(trained.predict(pictures(trained.facts)).sum(axis=1), 1)
    check(trained, tmp_path)


def test_a_channel_that_is_the_same_everywhere(tmp_path: Path) -> None:
    same = replace(facts((9, 7, 2)), deviation=np.array([1e-30, 60.0]))
    trained = classifier({"name": "5:7"}, same)
    images = pictures(same)
    images[..., 0] = 90  # its mean
    assert np.isfinite(trained.predict(images)).all()
    check(trained, tmp_path, images)


def test_it_can_be_trained_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    trained = classifier({"layers": MORE[1][1]}, facts(MORE[1][2]))
    model = imported(write_torch(trained, "", tmp_path / "network.py")[0]).load().train()
    images = torch.from_numpy(pictures(trained.facts).transpose(0, 3, 1, 2).copy())
    loss = torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2, 3, 0]))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# --- without PyTorch ---


def assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """What the module assigns at its top."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def modules(tree: ast.Module) -> dict[str, str]:
    """The layers that the network's constructor makes."""
    return {
        node.targets[0].attr: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    }


@pytest.mark.parametrize(("spec", "shape"), CASES)
def test_the_weights_are_those_of_the_layers_made(spec: Spec, shape: tuple[int, int, int], tmp_path: Path) -> None:
    file, weights = write_torch(classifier({"layers": spec}, facts(shape)), "r", tmp_path / "network.py")
    made, arrays = modules(ast.parse(file.read_text(encoding="utf-8"))), load_file(weights)
    assert {"mean", "deviation"} <= arrays.keys()
    wanted = {name: _shapes(call) for name, call in made.items()}
    found: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in made}
    for name, array in arrays.items():
        if "." in name:
            layer, _, value = name.partition(".")
            found[layer][value] = array.shape
    assert found == wanted


def _shapes(call: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters and buffers of a module of PyTorch, by its documentation."""
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    kind = ast.unparse(node.func)
    if kind == "nn.ParameterDict":  # of a layer with the weights of another one
        (units,) = re.findall(r"torch\.zeros\((\d+)\)", call)
        return {"bias": (int(units),)}
    numbers = [ast.literal_eval(a) for a in node.args]
    bias = all(not (k.arg == "bias" and ast.literal_eval(k.value) is False) for k in node.keywords)
    if kind == "nn.Conv2d":
        inputs, kernels, size = numbers
        groups = next((ast.literal_eval(k.value) for k in node.keywords if k.arg == "groups"), 1)
        taps = size if isinstance(size, tuple) else (size, size)
        return {"weight": (kernels, inputs // groups, *taps)} | ({"bias": (kernels,)} if bias else {})
    if kind == "nn.Linear":
        inputs, outputs = numbers
        return {"weight": (outputs, inputs)} | ({"bias": (outputs,)} if bias else {})
    if kind.startswith("nn.BatchNorm"):
        affine = () if any(k.arg == "affine" for k in node.keywords) else ("weight", "bias")
        values: dict[str, tuple[int, ...]] = dict.fromkeys((*affine, "running_mean", "running_var"), (*numbers,))
        return values | {"num_batches_tracked": ()}
    assert kind == "nn.Dropout"
    return {}


def test_the_dense_weights_are_in_the_order_of_channels_first(tmp_path: Path) -> None:
    trained = classifier({"layers": [{"layer": "dense", "units": 4}]}, facts((2, 3, 5)))
    _, weights = write_torch(trained, "", tmp_path / "network.py")
    x: npt.NDArray[Any] = np.random.default_rng(0).standard_normal((2, 3, 5))
    ours = np.einsum("hwc,hwcu->u", x, trained.layout.views(trained.weights)[0]["dense1"]["w"])
    np.testing.assert_allclose(load_file(weights)["dense1.weight"] @ x.transpose(2, 0, 1).ravel(), ours, rtol=1e-5)


def test_names_from_outside_stay_literals(tmp_path: Path) -> None:
    evil = 'a"""\nimport os; os.abort()\n"""'
    file, _ = write_torch(classifier({"name": "5:7"}), evil, tmp_path / "network.py")
    text = file.read_text(encoding="ascii")
    found = assigned(ast.parse(text))
    assert ast.literal_eval(found["RUN"]) == evil
    assert tuple(ast.literal_eval(found["CLASSES"])) == CLASSES
    assert ast.literal_eval(found["VERSION"]) == __version__
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(n).split()[1].partition(".")[0] for n in imports} == {
        "__future__",
        "pathlib",
        "torch",
        "safetensors",
    }


def test_loading_needs_nothing_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_torch(classifier({"name": "5:7"}), "", tmp_path / "network.py")
    code = "import sys, network; network.load(); assert not [m for m in sys.modules if m.startswith('daskcnn')]"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("name", ["my-net.py", "class.py", "network.txt", "2.py"])
def test_names_that_python_cannot_import_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--out {name}: no name that Python can import"):
        write_torch(classifier({"name": "5:7"}), "", tmp_path / name)


@pytest.mark.parametrize("name", ["torch", "safetensors", "pathlib"])
def test_a_module_that_would_import_itself_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--out {name}.py: the module itself imports {name}"):
        write_torch(classifier({"name": "5:7"}), "", tmp_path / f"{name}.py")


def test_a_layer_without_converter_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(LAYERS, "unknown", Unknown)
    trained = classifier({"layers": [{"layer": "unknown"}, {"layer": "dense", "units": 4}]})
    with pytest.raises(UserError, match="layer unknown1: Unknown has no converter to PyTorch"):
        write_torch(trained, "", tmp_path / "network.py")
    assert list(tmp_path.iterdir()) == []
