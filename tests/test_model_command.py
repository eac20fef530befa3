"""`daskcnn model` and `daskcnn models`: tables, pictures, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daskcnn.cli import main as daskcnn
from daskcnn.nn import build_model
from daskcnn.nn.models import MODELS
from daskcnn.show.renderers.network_drawing import HEIGHT, WIDTH, drawn
from daskcnn.show.renderers.network_text import operations


def invoke(*args: object) -> Result:
    return CliRunner().invoke(daskcnn, [str(arg) for arg in args])


def test_a_line_a_layer_and_the_total() -> None:
    result = invoke("model", "resnet20", "--batch", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "resnet20 for images of 32×32×3, batch 2, float32"
    first = next(line for line in lines if line.startswith("residual1/path/conv1 "))
    assert first.split()[-7:] == ["2,304", "4.72", "M", "9.44", "M", "131.1", "kB"]
    assert "269,722" in next(line for line in lines if line.startswith("total"))


def test_every_named_model_is_listed_with_its_parameters() -> None:
    rows = {row["name"]: row for row in json.loads(invoke("models", "--json").stdout)}
    assert rows.keys() == MODELS.keys()
    assert rows["resnet18"]["parameters"] == 11_689_512
    assert all(row["forward"] > 0 and row["origin"] for row in rows.values())
    text = invoke("models").stdout
    assert all(name in text for name in [*MODELS, "C1:C2"])


def test_weights_that_two_layers_share_count_once() -> None:
    row = next(row for row in json.loads(invoke("models", "--json").stdout) if row["name"] == "sae")
    sizes = [784, 500, 250, 10]
    weights = sum(a * b for a, b in pairwise(sizes))
    biases = sum(sizes[1:]) + sum(sizes[:-1])
    assert (row["image"], row["parameters"], row["forward"]) == ([28, 28, 1], weights + biases, 4 * weights)
    shown = invoke("model", "sae")
    assert shown.exit_code == 0, shown.output
    assert f"{weights + biases:,}" in next(line for line in shown.stdout.splitlines() if line.startswith("total"))


def test_a_job_files_network_is_shown(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[data]\nname = "mnist"\n[model.blocks.b]\nlayers = [{ layer = "dense", units = "$n" }, { layer = "relu" }]\n'
        '[[model.layers]]\nblock = "b"\nn = 7\nrepeat = 2\n[[model.layers]]\nlayer = "dense"\nunits = 10\n'
    )
    result = invoke("model", job)
    assert result.exit_code == 0, result.output
    assert "images of 28×28×1" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[3:8]] == [
        *("dense1", "relu1", "dense2", "relu2", "dense3")
    ]


def test_a_job_s_network_is_that_which_it_trains(tmp_path: Path) -> None:
    """Its outputs are the classes of its data, its network that of the run it goes on from, its minibatch its own."""
    job = tmp_path / "job.toml"
    job.write_text('[data]\nname = "cifar100"\n[model]\nname = "resnet20"\n[train]\nbatch_size = 32\n')
    found = json.loads(invoke("model", job, "--json").stdout)
    assert (found["layers"][-1]["out_shape"], found["batch"]) == ([100], 32)
    assert json.loads(invoke("model", job, "--json", "--batch", 8).stdout)["batch"] == 8
    assert json.loads(invoke("model", job, "--json", "--classes", 7).stdout)["layers"][-1]["out_shape"] == [7]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["resnet21"], ["resnet21", "did you mean", "C1:C2"]),
        (["vgg16", "--dataset", "8x8x3"], ["layer maxpool4", "size=2"]),
        (["quick", "--picture", "quick.gif"], ["quick.gif", "SVG or PNG"]),
        (["quick", "--dataset", "cifar11"], ["cifar11", "HxWxC"]),
        (["missing.toml"], ["missing.toml"]),
    ],
)
def test_what_is_wrong_is_said(args: list[str], words: list[str]) -> None:
    result = invoke("model", *args)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output


@pytest.mark.parametrize("name", ["resnet20", "googlenet", "case3"])
def test_no_two_boxes_overlap(name: str) -> None:
    model = MODELS[name]
    drawing = drawn(build_model(name, None, model.image, model.classes), model.image)
    boxes = drawing.boxes
    assert all(
        WIDTH / 4 <= box.x <= drawing.width - WIDTH / 4 and box.y + HEIGHT / 2 <= drawing.height for box in boxes
    )
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            assert abs(one.y - other.y) >= HEIGHT or abs(one.x - other.x) >= WIDTH


def test_pictures_are_the_same_for_the_same_network(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "one.svg", tmp_path / "other.svg"]
    for file in files:
        result = invoke("model", "resnet20", "--picture", file)
        assert result.exit_code == 0, result.output
    one, other = (file.read_bytes() for file in files)
    assert one == other
    assert b"batchnorm1  BatchNorm" in one


@pytest.mark.parametrize(
    ("count", "text"), [(0, "-"), (999, "999"), (999_600, "1 M"), (81_100_000, "81.1 M"), (3_630_000_000, "3.63 G")]
)
def test_operations_have_three_digits(count: int, text: str) -> None:
    assert operations(count) == text
