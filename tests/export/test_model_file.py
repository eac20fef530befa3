"""A model file gives the network back, and a hostile one is refused before anything large is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from daskcnn.errors import DataError, UserError
from daskcnn.export.model_file import read_model, write_model
from daskcnn.job.resolve import resolve
from daskcnn.nn import LAYERS
from daskcnn.nn.layers.dense import Bias
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.spec import sequential_from_spec, spec_of
from daskcnn.store.manifest import MOST_CLASSES
from tests.export.networks import CLASSES, MORE, NAMES, Spec, classifier, every_layer, facts, pictures
from tests.special_files import SPECIAL, special


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (found,) = write_model(classifier({"name": "5:7"}, facts((9, 7, 3))), "runs/a", tmp_path / "m.safetensors")
    return found


@pytest.mark.parametrize(("spec", "shape"), [pytest.param(s, shape, id=n) for n, s, shape in [*every_layer(), *MORE]])
def test_layers_come_back(spec: Spec, shape: tuple[int, int, int], tmp_path: Path) -> None:
    trained = classifier({"layers": spec}, facts(shape))
    found = read_model(*write_model(trained, "", tmp_path / "m.safetensors"))
    assert found.model == trained.model
    assert found.weights.tobytes() == trained.weights.tobytes()
    assert found.facts.to_dict() == trained.facts.to_dict()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_named_networks_come_back(name: str, dtype: str, tmp_path: Path) -> None:
    trained = classifier({"name": name, "dtype": dtype}, facts((32, 32, 2)))
    found = read_model(*write_model(trained, "", tmp_path / "m.safetensors"))
    assert found.job.model.dtype == dtype
    images = pictures(trained.facts)
    assert found.predict(images).tobytes() == trained.predict(images).tobytes()


def test_as_many_classes_as_a_data_set_has_at_most_come_back(tmp_path: Path) -> None:
    names = tuple(f"class {number:0100}" for number in range(MOST_CLASSES))
    layers = [{"layer": "dense", "units": MOST_CLASSES}]
    trained = classifier({"layers": layers}, replace(facts((1, 1, 1)), classes=names))
    found = read_model(*write_model(trained, "", tmp_path / "m.safetensors"))
    assert found.classes == names
    assert found.weights.tobytes() == trained.weights.tobytes()


def test_what_others_read_in_the_file(file: Path) -> None:
    with safe_open(file, "numpy") as opened:
        metadata = {key: json.loads(value) for key, value in opened.metadata().items()}
        assert opened.get_tensor("conv1/w").shape == (5, 5, 3, 5)
    conv = {"layer": "conv", "kernels": 5, "size": 5, "stride": 1, "pad": 2, "bias": True, "groups": 1, "dilation": 1}
    assert metadata["layers"][0] == conv
    assert tuple(metadata["images"]["classes"]) == CLASSES
    assert (metadata["images"]["shape"], metadata["dtype"], metadata["run"]) == ([9, 7, 3], "float32", "runs/a")


def test_a_spec_is_the_inverse_of_its_network() -> None:
    for _, spec, _ in [*every_layer(), *MORE]:
        network = sequential_from_spec(spec)
        assert sequential_from_spec(spec_of(network)) == network


def test_a_layer_that_no_list_has_is_named() -> None:
    assert Bias not in LAYERS.values()
    with pytest.raises(ValueError, match="layer b: Bias is none of LAYERS"):
        spec_of(Sequential((("b", Bias()),)))


# --- hostile files ---


def rewritten(file: Path, change: Callable[[dict[str, Any]], object], body: bytes | None = None) -> Path:
    """The file with another header."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + (data[8 + length :] if body is None else body))
    return file


def described(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Change an entry of the metadata."""

    def apply(header: dict[str, Any]) -> None:
        metadata = header["__metadata__"]
        metadata[key] = json.dumps(change(json.loads(metadata[key])))

    return apply


def more_kernels(layers: Spec) -> Spec:
    return [layers[0] | {"kernels": 10**9}, *layers[1:]]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no metadata": (lambda h: h.pop("__metadata__"), "not a model of daskcnn"),
    "of another program": (lambda h: h.update(__metadata__={"format": "pt"}), "not a model of daskcnn"),
    "no strings": (lambda h: h.update(__metadata__={"format": 3}), "no table of strings"),
    "another format": (described("format", lambda _: "daskcnn 2"), "format 'daskcnn 2', this version reads"),
    "not JSON": (lambda h: h["__metadata__"].update(layers="[{"), "layers: not JSON"),
    "no list of layers": (described("layers", lambda _: "conv"), "describe no layers and images"),
    "no layers": (described("layers", lambda _: []), "layers"),
    "unknown layer": (described("layers", lambda v: [{"layer": "cnov"}, *v[1:]]), "there is none of this name"),
    "a mean too few": (described("images", lambda v: v | {"mean": v["mean"][1:]}), "2 channel means for 3 channels"),
    "no images": (described("images", lambda v: {}), "a damaged model"),
    "larger images": (described("images", lambda v: v | {"shape": [1 << 20, 1 << 20, 3]}), "larger than"),
    "larger layers": (described("layers", more_kernels), "weights, its layers have"),
    "more layers": (described("layers", lambda v: [*v[:1], *v]), "its layers have"),
    "other layers of the size": (described("layers", lambda v: [v[0] | {"pad": 10**9}, *v[1:]]), "fit|have|takes"),
    "another number type": (described("dtype", lambda _: "float64"), "conv1/. is float32"),
    "kernels beyond measure": (
        described("layers", lambda v: [v[0] | {"kernels": 10**400}]),
        "kernels = 1000.* at most",
    ),
    "a window beyond measure": (
        described("layers", lambda v: [{"layer": "lrn", "size": 1 << 40}]),
        "size = .* at most",
    ),
    "not a number": (described("layers", lambda v: [{"layer": "lrn", "alpha": float("nan")}, *v]), "alpha = nan"),
    "a loss for other labels": (described("loss", lambda _: "sigmoid"), "safetensors: a damaged model .*'sigmoid'"),
    "no number type": (described("dtype", lambda _: "int8"), "dtype"),
    "another name": (lambda h: h.update({"x/w": h.pop("conv1/w")}), "conv1/w is missing"),
    "many values": (lambda h: h["__metadata__"].update(layers="[" + "1," * 60_000 + "1]"), "more than the 50,000"),
    "deep": (lambda h: h["__metadata__"].update(layers="[" * 19_000), "not JSON"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_hostile_metadata(file: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_model(rewritten(file, change))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, struct.pack("<Q", 1 << 40) + b"{}"])
def test_what_is_no_safetensors_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(DataError, match=str(file)):
        read_model(file)


def test_a_truncated_file(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match="not a safetensors file"):
        read_model(file)


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a regular file"):
        read_model(special(tmp_path / "m.safetensors", kind))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_model(tmp_path / "m.safetensors")


def test_the_job_of_a_model_is_whole(file: Path) -> None:
    job = read_model(file).job
    assert resolve(job.model_dump(mode="json", exclude_unset=True)).model == job.model
    assert np.isfinite(read_model(file).weights).all()
