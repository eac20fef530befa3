"""Networks that reconstruct images: what is refused, and what each command says of a run without an accuracy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from daskcnn import CNNClassifier, load
from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.cli import main as daskcnn
from daskcnn.errors import DataError, JobError
from daskcnn.events import EpochEnded, Judged, RunEnded, RunStarted
from daskcnn.job.resolve import resolve
from daskcnn.launch.prepared_job import fitted
from daskcnn.nn.score import Score
from daskcnn.runs.checkpoint import best
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import to_state
from daskcnn.runs.summary import kept_evaluation
from daskcnn.show.board import Board
from daskcnn.show.lines import describe
from daskcnn.show.renderers.network_text import readable_evaluation
from daskcnn.show.report_tables import tables
from daskcnn.show.run_figures import run_figures
from daskcnn.store import open_dataset
from daskcnn.training.replica import Replica
from tests.show.html_page import parsed_page
from tests.tiny_runs import random_state, tiny_job, tiny_run

UNIT = {"mean": [0.0] * 3, "deviation": [255.0] * 3}
LAYERS: list[dict[str, Any]] = [
    {"layer": "dense", "units": 20},
    {"layer": "tanh"},
    {"layer": "dense", "units": 192, "tied": "dense1"},
]


def job_of(path: str, layers: list[dict[str, Any]] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    train = {"loss": "reconstruction"} | sections.pop("train", {})
    return tiny_job(path, train=train, model={"layers": layers or LAYERS}, **sections)


@pytest.fixture
def trained(tmp_path: Path, path: str) -> Path:
    """A run with two checkpoints, the first of which has the lower loss."""
    raw = job_of(path)
    first = random_state(resolve(raw), step=1, validation=Score(4.0, None, 20))
    second = replace(first, step=2, weights=first.weights / 2, validation=Score(9.0, None, 20))
    run = tiny_run(tmp_path / "runs", raw, first, second)
    judged = [Judged(loss=0.2), Judged(loss=0.45)]
    with RunDirectory.open(run, writable=True) as directory:
        directory.log(RunStarted(run=str(run), strategy="sgwu", epochs=2))
        for epoch, validation in enumerate(judged, 1):
            directory.log(EpochEnded(epoch=epoch, epochs=2, step=epoch, loss=0.5, validation=validation))
        directory.log(RunEnded(status="done", seconds=1.0, test=Judged(loss=0.3)))
    return run


def said(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(daskcnn, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def problems(raw: dict[str, Any], path: str) -> str:
    with pytest.raises(JobError) as told:
        fitted(resolve(raw), open_dataset(path))
    return str(told.value)


# --- what is refused ---


def test_the_output_is_to_have_the_size_of_an_image(path: str) -> None:
    told = problems(job_of(path, [{"layer": "dense", "units": 10}]), path)
    assert "the model's output is (10,), and the loss compares it with images (8, 8, 3)" in told
    assert "or with a dense layer of 192 units" in told


def test_without_the_loss_a_decoder_has_the_wrong_number_of_classes(path: str) -> None:
    assert "or set train.loss = 'reconstruction'" in problems(job_of(path, train={"loss": "softmax"}), path)


@pytest.mark.parametrize(
    ("layers", "loss"), [(LAYERS, "sigmoid-reconstruction"), ([*LAYERS, {"layer": "sigmoid"}], "reconstruction")]
)
def test_pixels_between_0_and_1_are_asked_for_where_there_are_no_others(
    layers: list[dict[str, Any]], loss: str, path: str
) -> None:
    raw = job_of(path, layers, train={"loss": loss})
    assert "set data.scale to mean = [0.0, 0.0, 0.0] and deviation = [255.0, 255.0, 255.0]" in problems(raw, path)
    raw["data"]["scale"] = UNIT
    dataset = open_dataset(path).scaled(UNIT["mean"], UNIT["deviation"])
    assert fitted(resolve(raw), dataset).samples == 100


def test_two_sigmoids_are_one_too_many(path: str) -> None:
    raw = job_of(path, [*LAYERS, {"layer": "sigmoid"}], train={"loss": "sigmoid-reconstruction"})
    assert "it takes the sigmoid itself; leave out sigmoid1" in problems(raw, path)


def test_options_for_labels_are_refused(path: str) -> None:
    with pytest.raises(JobError, match=r"train\.class_weights: the loss 'reconstruction' ignores the labels"):
        resolve(job_of(path, train={"class_weights": "balanced"}))
    told = problems(job_of(path, train={"label_smoothing": 0.1}), path)
    assert "it is for the loss 'softmax', and this one is 'reconstruction'" in told


@pytest.mark.parametrize("views", ["mirror", "mirror-translate"])
def test_views_average_scores_of_classes(views: str, trained: Path, path: str) -> None:
    reason = f"views = '{views}': views average scores of classes, and this network reconstructs images; use 'none'"
    assert f"data.{reason}" in problems(job_of(path, data={"views": views}), path)
    assert reason in said("evaluate", trained, "--views", views, code=2)
    assert json.loads(said("evaluate", trained, "--views", "none", "--json"))["views"] == "none"


def test_a_classifier_of_scikit_learns_kind_has_classes() -> None:
    X, y = np.zeros((20, 8, 8)), np.arange(20) % 2
    with pytest.raises(JobError, match="a classifier has classes"):
        CNNClassifier(job={"train": {"loss": "reconstruction"}}).fit(X, y)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (
            [*LAYERS[:2], {"layer": "dense", "units": 192, "tied": "dense7"}],
            "model.layers[2]: tied = 'dense7': there is no",
        ),
        ([{"layer": "dense", "units": 9, "tied": "dense2"}, *LAYERS[:1]], "comes no earlier than dense1"),
        ([{"layer": "dense", "units": 9, "tied": "dense1"}], "comes no earlier than dense1"),
        ([*LAYERS[:2], {"layer": "dense", "units": 9, "tied": "tanh1"}], "is a Tanh, whose weights a Dense cannot use"),
        ([*LAYERS, {"layer": "dense", "units": 20, "tied": "dense2"}], "has no weights of its own; name 'dense1'"),
        (
            [LAYERS[0], {"layer": "residual", "path": [LAYERS[1], {"layer": "dense", "units": 9, "tied": "dense1"}]}],
            "model.layers[1].path[1]: tied = 'dense1': comes no earlier than dense1",
        ),
    ],
)
def test_ties_that_cannot_be_are_refused_without_data(layers: list[dict[str, Any]], words: str, path: str) -> None:
    with pytest.raises(JobError) as told:
        resolve(job_of(path, layers))
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([*LAYERS[:2], {"layer": "dense", "units": 191, "tied": "dense1"}], "units = 191: dense1 transposed has 192"),
        (
            [LAYERS[0], {"layer": "dense", "units": 5}, LAYERS[2]],
            "layer dense3: input shape (5,): dense1 transposed takes (20,)",
        ),
        (
            [{"layer": "flatten"}, {"layer": "residual", "path": [LAYERS[0], {**LAYERS[2], "units": 191}]}],
            "layer residual1/path/dense2: units = 191: dense1 transposed has 192",
        ),
    ],
)
def test_ties_that_do_not_fit_are_refused(layers: list[dict[str, Any]], words: str, path: str) -> None:
    assert words in problems(job_of(path, layers), path)


def test_every_wrong_tie_of_a_list_is_named(path: str) -> None:
    wrong = [{"layer": "dense", "units": 9, "tied": owner} for owner in ("dense7", "tanh1")]
    with pytest.raises(JobError) as told:
        resolve(job_of(path, [*LAYERS[:2], *wrong]))
    assert "model.layers[2]: tied = 'dense7'" in str(told.value)
    assert "model.layers[3]: tied = 'tanh1'" in str(told.value)


@pytest.mark.parametrize("train", [{"strategy": "layer"}, {"replica_size": 2}])
def test_ties_across_a_convolution_are_not_for_sharded_kernels(train: dict[str, Any], path: str) -> None:
    back: list[dict[str, Any]] = [
        {"layer": "reshape", "shape": [2, 2, 5]},
        {"layer": "conv", "kernels": 5, "size": 1},
        {"layer": "flatten"},
    ]
    raw = job_of(path, [LAYERS[0], *back, LAYERS[2]])
    assert fitted(resolve(raw), open_dataset(path)).samples == 100
    raw["train"] |= train
    assert "layers dense2 and dense1 share weights, and a convolution lies between them" in problems(raw, path)


# --- what a run says ---


def test_training_and_judging_have_a_loss_alone(path: str) -> None:
    raw = job_of(path, train={"lr": 2.0, "momentum": 0.5, "batch_size": 20, "schedule": "constant"})
    dataset = open_dataset(path)
    job = fitted(resolve(raw), dataset).job
    replica = Replica(job, dataset, Device(), clock=lambda: 0.0)
    with single_threaded_blas():
        before = replica.evaluate(dataset.train, 100, 120, whole=20)
        found = replica.train(((0, 100),), 400, presentation=0, progress=(0.0, 1.0)).score
        after = replica.evaluate(dataset.train, 100, 120, whole=20)
    assert (found.correct, found.accuracy, found.samples) == (None, None, 400)
    assert after.loss < before.loss
    assert after.quality == 1 / (1 + after.loss) > before.quality
    assert after.judged == Judged(accuracy=None, loss=after.loss, auc=None)


def test_the_best_checkpoint_has_the_least_loss(trained: Path) -> None:
    found = best(trained / "checkpoints", warn=print)
    assert found is not None
    assert (found.step, found.score) == (1, 1 / 1.2)
    state = to_state(found, resolve(RunDirectory.open(trained).job()))
    assert state.validation == Score(4.0, None, 20)


def test_evaluate_prints_the_loss(trained: Path, path: str, tmp_path: Path) -> None:
    found = json.loads(said("evaluate", trained, "--json"))
    images, _ = open_dataset(path).test.read(0, 60)
    classifier = load(trained).classifier
    assert found["loss"] == pytest.approx(np.mean(classifier.losses(images)), rel=1e-5)
    assert (found["accuracy"], found["auc"], found["labels"], found["classes"]) == (None, None, "image", [])
    text = said("evaluate", trained)
    assert text.startswith("loss ")
    assert "accuracy" not in text
    assert "no class has figures" in said("evaluate", trained, "--csv", tmp_path / "a.csv", code=2)


def test_what_is_kept_of_an_evaluation_has_no_accuracy(trained: Path) -> None:
    found = json.loads(said("evaluate", trained, "--json", "--keep"))
    kept = kept_evaluation(trained)
    assert kept is not None
    assert json.loads(json.dumps(kept)) == {name: found[name] for name in kept}
    assert readable_evaluation(kept) == said("evaluate", trained).rstrip("\n")
    file = trained / "evaluation.json"
    file.write_text(json.dumps(found | {"labels": "classes"}))
    with pytest.raises(DataError, match="there is no accuracy, and labels = 'classes' have one"):
        kept_evaluation(trained)


def test_the_page_of_a_report_shows_losses(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said("evaluate", trained, "--keep")
    file = tmp_path / "page.html"
    said("report", trained, "--html", file)
    page = parsed_page(file.read_text(encoding="utf-8"))
    headings = [each.text for each in page.all("h2", "h3")]
    assert "Loss" in headings
    assert "Test samples" in headings
    assert {"Accuracy", "Classes", "By class", "Confusion matrix"}.isdisjoint(headings)
    assert said("evaluate", trained).splitlines()[0] in [each.text for each in page.all("p")]
    assert "accuracy" not in page.text.lower()
    names = [figure.name for figure in run_figures({"run": tables(RunDirectory.open(trained).events())})]
    assert names == ["loss-by-time", "loss-by-epoch"]


def test_predict_gives_images_and_their_losses(trained: Path, path: str, tmp_path: Path) -> None:
    images, _ = open_dataset(path).test.read(0, 6)
    model = load(trained)
    found = model.predict(images)
    assert (found.shape, found.dtype) == (images.shape, np.float32)
    deviation = model.classifier.facts.deviation
    errors = (((found - images) / deviation) ** 2).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(model.classifier.losses(images), errors, rtol=1e-4)
    lazy = model.predict(da.from_array(images, chunks=(2, 8, 8, 3)))
    np.testing.assert_allclose(lazy.compute(), found, rtol=1e-5, atol=1e-4)
    assert "reconstructed" in repr(model)
    Image.fromarray(images[0]).save(tmp_path / "a.png")
    assert said("predict", trained, tmp_path / "a.png").endswith(f": loss {errors[0]:.4g}\n")
    told = said("predict", trained, path, "--out", tmp_path / "p.csv", code=2)
    assert "a table has the probabilities of classes, and this network reconstructs images" in told


def test_report_and_comparison_show_losses(trained: Path) -> None:
    report = said("report", trained)
    assert "loss 0.300" in report
    assert "accuracy" not in report
    compared = said("compare", trained, trained)
    for line in ("test loss", "validation loss", "least of the run"):
        assert line in compared
    assert "accuracy" not in compared
    assert "time to" not in compared
    assert "0.0 %" not in compared


def test_lines_and_display_show_losses() -> None:
    board = Board()
    for loss in (0.2, 0.45):
        event = EpochEnded(epoch=1, epochs=2, step=3, loss=0.5, validation=Judged(loss=loss))
        board.apply(event, 0.0)
        assert board.best_validation is None
    assert (board.validation_loss, board.least_validation_loss) == (0.45, 0.2)
    (line,) = describe(event)
    assert "loss 0.500  validation loss 0.450" in line
    assert "accuracy" not in line


def test_a_classifier_may_start_from_an_encoder(trained: Path, path: str) -> None:
    layers = [*LAYERS[:2], {"layer": "dense", "units": 10}]
    raw = tiny_job(path, model={"layers": layers, "from": str(trained)})
    start = fitted(resolve(raw), open_dataset(path)).start
    assert start is not None
    assert start.loaded == ("dense1",)
    assert start.new == {"dense2": "one of the two reconstructs images"}


def test_a_network_of_images_is_not_taken_for_one_of_classes(trained: Path, path: str) -> None:
    raw = {key: value for key, value in tiny_job(path).items() if key != "model"}
    raw["model"] = {"from": str(trained)}
    assert "answers with images, train.loss with others; give model" in problems(raw, path)
