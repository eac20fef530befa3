"""`daskcnn export` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from daskcnn.cli import main as daskcnn
from daskcnn.errors import installing
from daskcnn.export import FORMATS, read_model
from daskcnn.job.resolve import resolve
from daskcnn.nn import LAYERS
from daskcnn.trained.place import find_network
from tests.export.test_onnx import Unknown
from tests.rounding_of_networks import of_probabilities
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    raw = tiny_job(tiny_data(tmp_path))
    job = resolve(raw)
    return tiny_run(tmp_path, raw, random_state(job, step=7), random_state(job, seed=1, step=9))


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(daskcnn, [str(a) for a in args])
    assert "Traceback" not in result.output
    return result


def refused(*args: object) -> str:
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


@pytest.mark.parametrize("to", FORMATS)
def test_each_format_is_written_into_the_run(run: Path, to: str) -> None:
    result = invoke("export", run, "--to", to)
    written = [Path(line) for line in result.stdout.split()]
    assert result.exit_code == 0, result.output
    assert written[0] == run / f"model{FORMATS[to].suffix}"
    assert all(file.stat().st_size for file in written)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("out", [".", "/", "runs"])
def test_a_folder_is_no_file_to_write(run: Path, to: str, out: str) -> None:
    Path("runs").mkdir()
    assert f"{out}: Is a directory; give a file that may be written" in refused("export", run, "--to", to, "--out", out)


def test_onnx_of_a_run_answers_as_predict_does(run: Path) -> None:
    invoke("export", run, "--to", "onnx", "--out", "m.onnx")
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    network = find_network(str(run), "last", pytest.fail).classifier
    expected, allowed = network.predict(images), of_probabilities(network, images)
    np.testing.assert_allclose(session.run(None, {"images": images})[0], expected, rtol=allowed)
    assert session.get_modelmeta().custom_metadata_map["run"] == run.name


def test_a_checkpoint_and_a_model_file_stand_for_a_run(run: Path) -> None:
    first, last = sorted((run / "checkpoints").iterdir())
    for source, out in ((first, "first"), (last, "last"), (run, "run")):
        assert invoke("export", source, "--to", "safetensors", "--out", f"{out}.safetensors").exit_code == 0
    weights = {out: read_model(f"{out}.safetensors").weights.tobytes() for out in ("first", "last", "run")}
    assert weights["last"] == weights["run"] != weights["first"]
    assert invoke("export", "run.safetensors", "--to", "onnx").stdout == "model.onnx\n"
    itself = "run.safetensors"
    assert "this is the model itself" in refused("export", itself, "--to", "safetensors", "--out", itself)


def test_predict_takes_a_model_file(run: Path) -> None:
    invoke("export", run, "--to", "safetensors", "--out", "m.safetensors")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save("a.png")
    by_run, by_file = (json.loads(invoke("predict", m, "a.png", "--json").stdout) for m in (run, "m.safetensors"))
    assert by_run == by_file
    assert read_model("m.safetensors").classes == tuple("abcdefghij")


def test_a_missing_package_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith(("onnx.", "daskcnn.export.onnx"))]:
        monkeypatch.delitem(sys.modules, name)
    missing: Any = None
    monkeypatch.setitem(sys.modules, "onnx", missing)
    told = refused("export", run, "--to", "onnx")
    assert f"package onnx: it is not installed; {installing('onnx')}" in told


def test_what_cannot_be_written_is_named(run: Path) -> None:
    assert "none/m.onnx: No such file" in refused("export", run, "--to", "onnx", "--out", "none/m.onnx")


def test_no_run_is_named() -> None:
    assert "no trained network there" in refused("export", "elsewhere", "--to", "onnx")


def test_a_layer_without_converter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYERS, "unknown", Unknown)
    layers = [{"layer": "unknown"}, {"layer": "maxpool", "size": 4}, {"layer": "dense", "units": 10}]
    raw = tiny_job(tiny_data(tmp_path), model={"layers": layers})
    path = tiny_run(tmp_path, raw, random_state(resolve(raw)))
    assert "layer unknown1: Unknown has no converter to ONNX" in refused("export", path, "--to", "onnx")
    assert invoke("export", path, "--to", "safetensors").exit_code == 0
