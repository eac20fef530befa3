"""Exported to ONNX, a network answers in onnxruntime as it does here."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daskcnn import __version__
from daskcnn.errors import JobError, UserError
from daskcnn.export import onnx_file
from daskcnn.export.onnx_file import CONVERTERS, onnx_model, write_onnx
from daskcnn.nn import LAYERS
from daskcnn.nn.layers import ReLU
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


def answers(model: onnx.ModelProto, images: npt.NDArray[Any]) -> npt.NDArray[Any]:
    alone = onnxruntime.SessionOptions()
    alone.intra_op_num_threads = 1  # others would wait in loops for a core that the tests beside this one use
    session = onnxruntime.InferenceSession(model.SerializeToString(), alone, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"images": images})
    return np.asarray(found)


def check(trained: Classifier, images: npt.NDArray[Any] | None = None) -> None:
    model = onnx_model(trained, "a run")
    onnx.checker.check_model(model, full_check=True)
    some = pictures(trained.facts) if images is None else images
    for images in (some[:1], some):  # the batch dimension is free
        atol = 1e-3 if trained.reconstructs else rounding(trained, images)  # pixels go up to 255
        np.testing.assert_allclose(answers(model, images), exactly(trained, images), rtol=1e-5, atol=atol)


def test_every_layer_has_a_converter() -> None:
    assert CONVERTERS.keys() == LAYERS.keys()


@pytest.mark.parametrize(("spec", "shape"), [pytest.param(s, shape, id=n) for n, s, shape in [*every_layer(), *MORE]])
def test_layers(spec: Spec, shape: tuple[int, int, int]) -> None:
    check(classifier({"layers": spec}, facts(shape)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_named_networks(name: str, shape: tuple[int, int, int]) -> None:
    check(classifier({"name": name}, facts(shape)))


@pytest.mark.parametrize(("model", "shape", "loss"), [pytest.param(*rest, id=n) for n, *rest in AUTOENCODERS])
def test_autoencoders(model: dict[str, Any], shape: tuple[int, int, int], loss: str) -> None:
    trained = classifier(model, facts(shape), loss=loss)
    check(trained)
    (output,) = onnx_model(trained).graph.output
    assert output.name == "reconstructed"


def test_tied_weights_are_in_the_model_once() -> None:
    model = onnx_model(classifier({"name": "sae"}, facts((6, 5, 1)), loss="reconstruction"))
    sizes = sorted(int(np.prod(constant.dims)) for constant in model.graph.initializer)
    assert sizes[-3:] == [10 * 250, 30 * 500, 250 * 500]
    assert sum(size >= 10 * 250 for size in sizes) == 3


def test_a_network_of_float64_is_exported_in_float32() -> None:
    check(classifier({"name": "lenet5", "dtype": "float64"}, facts((28, 28, 1))))


def test_a_running_variance_below_zero_counts_as_zero() -> None:
    trained = classifier({"layers": [{"layer": "batchnorm"}, {"layer": "dense", "units": 4}]})
    trained.layout.views(trained.weights)[1]["batchnorm1"]["variance"][0] = -1e-3
    check(trained)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float16", "float32", "float64"])
def test_number_types(dtype: str) -> None:
    check(classifier({"layers": MORE[0][1]}, facts(MORE[0][2], dtype=np.dtype(dtype))))


def test_the_mean_is_taken_off_images_of_float64_before_they_are_cut_to_float32() -> None:
    far = replace(facts((9, 7, 2), dtype=np.dtype("float64")), mean=np.full(2, 1e9), deviation=np.full(2, 2.6))
    check(classifier({"name": "5:7"}, far), 1e9 + np.random.default_rng(0).normal(0, 2.6, (5, 9, 7, 2)))


@pytest.mark.parametrize(("dtype", "nodata"), NODATA)
def test_pixels_without_data(dtype: str, nodata: float) -> None:
    check(classifier({"layers": MORE[0][1]}, facts(MORE[0][2], dtype=np.dtype(dtype), nodata=nodata)))


@pytest.mark.parametrize("name", ["lenet5", "5:7"])
def test_several_labels(name: str) -> None:
    trained = classifier({"name": name}, facts((28, 28, 1), labels="several"))
    assert not np.allclose(trained.predict(pictures(trained.facts)).sum(axis=1), 1)
    check(trained)


def test_a_channel_that_is_the_same_everywhere() -> None:
    same = replace(facts((9, 7, 2)), deviation=np.array([1e-30, 60.0]))
    trained = classifier({"name": "5:7"}, same)
    images = pictures(same)
    images[..., 0] = 90  # its mean
    assert np.isfinite(trained.predict(images)).all()
    check(trained, images)


def test_inputs_outputs_and_metadata(tmp_path: Path) -> None:
    (file,) = write_onnx(classifier({"name": "5:7"}, facts((9, 7, 2))), "runs/a", tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (images,), (probabilities,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["N", 9, 7, 2])
    assert (probabilities.name, probabilities.type, probabilities.shape) == (
        "probabilities",
        "tensor(float)",
        ["N", 4],
    )
    properties = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(properties["classes"])) == CLASSES
    assert (properties["run"], properties["version"], properties["labels"]) == ("runs/a", __version__, "classes")


@dataclass(frozen=True)
class Unknown(ReLU):
    """A layer of somebody else."""


def test_a_layer_without_converter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "unknown", Unknown)
    trained = classifier({"layers": [{"layer": "unknown"}, {"layer": "dense", "units": 4}]})
    with pytest.raises(UserError, match="layer unknown1: Unknown has no converter to ONNX") as caught:
        onnx_model(trained)
    assert "daskcnn/export/onnx_file.py" in caught.value.remedy


def test_a_network_larger_than_the_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_file, "_MOST", 100)
    with pytest.raises(UserError, match=r"more than a file of ONNX holds; use --to safetensors"):
        onnx_model(classifier({"name": "5:7"}))


# --- parameters at their bounds: what a job allows, a runtime reads ---

_SMALL = [0.0, 1e-50, 1e-4, 1.0, 3.0]  # float32 has no 1e-50
_SIDE = st.integers(1, 4)


def _layer(kind: str, **options: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"layer": st.just(kind), **options})


EXTREME = st.one_of(
    _layer("lrn", size=st.integers(1, 9), alpha=st.sampled_from(_SMALL), beta=st.sampled_from([*_SMALL, -1e-50, -0.5])),
    _layer("lrn", size=st.sampled_from([1, 2, 1001]), k=st.sampled_from([1e-3, 1e3]), alpha=st.sampled_from(_SMALL)),
    _layer("batchnorm", epsilon=st.sampled_from([1e-50, 1e-10, 1e3])),
    _layer("leakyrelu", slope=st.sampled_from([*_SMALL, 100.0])),
    _layer("scale", factor=st.sampled_from([-2.0, 1e-50, -1e-50, 1e3])),
    _layer("dropout", rate=st.sampled_from([0.0, 0.999999])),
    _layer("pad", size=st.integers(1, 12), channels=st.integers(0, 9)),
    _layer("upsample", factor=st.integers(1, 5), mode=st.sampled_from(["nearest", "bilinear"])),
    *(
        _layer(kind, size=st.integers(1, 7), stride=st.sampled_from([1, 2, 50]))
        for kind in ("maxpool", "averagepool", "l2pool")
    ),
    _layer(
        "conv",
        kernels=st.sampled_from([3, 6]),
        size=st.tuples(_SIDE, _SIDE).map(list),
        pad=st.one_of(st.just("same"), st.tuples(st.integers(0, 9), st.integers(0, 9)).map(list)),
        stride=st.sampled_from([1, 2, 11]),
        dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)).map(list),
        groups=st.sampled_from([1, 3]),
    ),
)


@settings(max_examples=30, deadline=None)
@given(layer=EXTREME, of_vectors=st.booleans())
@example(layer={"layer": "lrn", "alpha": 0.0}, of_vectors=False)
@example(layer={"layer": "lrn", "beta": -0.5}, of_vectors=False)
def test_parameters_at_their_bounds(layer: dict[str, Any], of_vectors: bool) -> None:
    layers = [*([{"layer": "globalpool"}] if of_vectors else []), layer, {"layer": "dense", "units": 4}]
    try:
        trained = classifier({"layers": layers}, facts((9, 7, 3)))
    except (JobError, ValueError):  # no such network: a layer of maps behind vectors, or an even window with "same"
        return
    check(trained)
