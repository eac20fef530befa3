"""`daskcnn evaluate`: figures by class, the confusion matrix as table, CSV and picture."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from daskcnn.arrays import Device
from daskcnn.cli import main as daskcnn
from daskcnn.errors import installing
from daskcnn.job.resolve import resolve
from daskcnn.nn import Context, predict, score
from daskcnn.nn.score import ClassScores
from daskcnn.runs.summary import kept_evaluation
from daskcnn.show.renderers.drawing import draw_confusion
from daskcnn.show.renderers.network_text import confusion_table, readable_evaluation
from daskcnn.store import Dataset, normalise, open_dataset
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from daskcnn.trained import evaluate
from daskcnn.trained.place import find_network
from tests.tiny_runs import CLASSES, random_state, tiny_job, tiny_run
from tests.toy_data import toy_dataset


@pytest.fixture
def trained(tmp_path: Path, path: str) -> Path:
    raw = tiny_job(path)
    return tiny_run(tmp_path / "runs", raw, random_state(resolve(raw)))


def _evaluate(run: Path, *args: object, code: int = 0) -> str:
    result = CliRunner().invoke(daskcnn, ["evaluate", str(run), *map(str, args)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def _json(run: Path, *args: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_evaluate(run, "--json", *args))
    return found


def test_the_figures_are_those_of_the_networks_answers(trained: Path, path: str) -> None:
    found = _json(trained)
    network = find_network(str(trained), "last", print).classifier
    images, labels = open_dataset(path).test.read(0, 60)
    probabilities = network.predict(images)
    answers, order = probabilities.argmax(axis=1), np.argsort(-probabilities, axis=1)
    expected = [[int(((labels == a) & (answers == b)).sum()) for b in range(10)] for a in range(10)]
    assert found["confusion"] == expected
    assert found["accuracy"] == pytest.approx(np.trace(expected) / 60)
    assert found["top5"] == pytest.approx((order[:, :5] == labels[:, None]).any(axis=1).mean())
    assert [each["class"] for each in found["classes"]] == list(CLASSES)
    assert [each["samples"] for each in found["classes"]] == [6] * 10
    for c, each in enumerate(found["classes"]):
        answered = sum(row[c] for row in expected)
        assert each["recall"] == expected[c][c] / 6
        assert each["precision"] == (expected[c][c] / answered if answered else None)
    assert np.mean([each["auc"] for each in found["classes"]]) == pytest.approx(found["auc"])
    assert (found["labels"], found["auc_samples"]) == ("classes", 60)


def test_the_text_has_a_table_by_class_and_the_matrix(trained: Path) -> None:
    found, lines = _json(trained), _evaluate(trained).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("class"))
    assert lines[head].split() == ["class", "samples", "precision", "recall", "AUC"]
    assert lines[head + 3].split()[:2] == ["c", "6"]
    heads, *matrix = [line.split() for line in lines[-11:]]
    assert heads == [row[0] for row in matrix] == list(CLASSES)
    assert [list(map(int, row[1:])) for row in matrix] == found["confusion"]


def test_classes_with_long_names_have_numbers_above_the_matrix() -> None:
    names = ["a name of very many letters, far too long", "another"]
    result = {"classes": [{"class": name} for name in names], "confusion": [[1, 2], [3, 4]]}
    table = confusion_table(result)
    assert table.head == ("", "", "0", "1")
    assert table.rows == (("0", names[0], "1", "2"), ("1", names[1], "3", "4"))


def test_the_csv_has_a_row_for_each_class(trained: Path, tmp_path: Path) -> None:
    found, file = _json(trained), tmp_path / "classes.csv"
    assert _evaluate(trained, "--csv", file).startswith("accuracy")
    text = file.read_text()
    assert _evaluate(trained, "--csv", "-") == text
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["class"] for row in rows] == list(CLASSES)
    assert [[int(row[f"answered {name}"]) for name in CLASSES] for row in rows] == found["confusion"]
    assert [float(row["recall"]) for row in rows] == [each["recall"] for each in found["classes"]]
    precisions = [each["precision"] for each in found["classes"]]
    assert [row["precision"] for row in rows] == ["" if each is None else str(each) for each in precisions]
    assert "--csv -" in _evaluate(trained, "--csv", "-", "--json", code=2)
    assert "give a file that may be written" in _evaluate(trained, "--csv", tmp_path / "no" / "such", code=2)


def test_what_is_kept_is_what_was_found(trained: Path) -> None:
    assert kept_evaluation(trained) is None
    found = _json(trained, "--keep")
    kept = kept_evaluation(trained)
    assert kept is not None
    assert json.loads(json.dumps(kept)) == {name: found[name] for name in kept}
    assert readable_evaluation(kept) == _evaluate(trained).rstrip("\n")
    (trained / "evaluation.json").unlink()
    (trained / "evaluation.json").mkdir()
    assert "leave --keep out, or make the folder writable" in _evaluate(trained, "--keep", code=2)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture_is_the_matrix(trained: Path, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        _evaluate(trained, "--picture", file)
    assert files[0].read_bytes() == files[1].read_bytes()
    if suffix == "svg":
        counts = [n for row in _json(trained)["confusion"] for n in row if n]
        assert all(f">{n}</text>" in files[0].read_text() for n in counts)


def test_a_picture_that_cannot_be_is_refused_before_anything_is_computed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "pictures are SVG or PNG" in _evaluate(trained, "--picture", tmp_path / "a.jpg", code=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = _evaluate(trained, "--picture", tmp_path / "a.svg", code=2)
    assert f"matplotlib is not installed; {installing('plot')}" in told


@pytest.mark.parametrize("option", ["--csv", "--picture", "--keep"])
def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(evaluate, "compile_here", None)  # which would fail
    (trained / "evaluation.json").mkdir()
    places = {"--csv": [tmp_path / "no" / "x.csv"], "--picture": [tmp_path / "no" / "x.svg"], "--keep": []}
    told = _evaluate(trained, option, *places[option], code=2)
    assert ("Is a directory; leave --keep" if option == "--keep" else "No such file or directory; give a file") in told


def test_names_of_classes_are_drawn_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["$\\frac{$", "\x1b[2Jship", "舟", "n" * 300]
    drawn = draw_confusion(names, np.eye(4, dtype=int).tolist(), tmp_path / "a.svg", title="$x\n")
    text = drawn.read_text()
    assert "$\\frac{$" in text
    assert "\\x1b[2Jship" in text
    assert "n" * 300 not in text


def test_other_data_are_seen_as_the_training_data_were(trained: Path, path: str, tmp_path: Path) -> None:
    """Not shifted and scaled by their own mean and deviation: `predict` has none of theirs either."""
    dark = tmp_path / "dark.zarr"
    images, labels = open_dataset(path).test.read(0, 60)
    source = Source("synthetic", CLASSES, (images // 4, labels), (images // 2, labels), {})
    write(source, describe(source, chunk=50, order="shuffled", seed=0), str(dark), lambda _: None)
    network = find_network(str(trained), "last", print).classifier
    right = network.predict(images // 2).argmax(axis=1) == labels
    assert _json(trained, "--data", dark)["accuracy"] == pytest.approx(right.mean())


def test_few_chunks_are_kept_while_all_are_read(trained: Path) -> None:
    CACHE.clear()
    limit, one = CACHE.limit, 50 * 8 * 8 * 3
    with mock.patch.object(evaluate, "ONE_PASS", one):
        _evaluate(trained)
    assert 0 < CACHE.nbytes <= one
    assert CACHE.limit == limit


# --- data sets with other classes ---


def named(folder: Path, classes: tuple[str, ...], labels: Any, *, test: Any = None, dtype: str = "uint8") -> str:
    """The path of a data set of 60 images to train on and 60 to judge on, the same ones whatever their labels."""
    x = np.random.default_rng(1).integers(0, 256, (60, 8, 8, 3)).astype(dtype)
    y = np.array([classes.index(label) for label in labels], np.uint8) if isinstance(labels, str) else labels
    test = y if test is None else test
    source = Source("named", classes, (x, y), (x, test), {})
    path = str(folder / f"{len(list(folder.iterdir()))}.zarr")
    write(source, describe(source, chunk=25, order="stored", seed=0), path, lambda _: None)
    return path


def test_classes_go_by_their_names_and_one_that_is_not_there_has_no_figures(trained: Path, tmp_path: Path) -> None:
    labels = "jbdb" * 15
    whole = _json(trained, "--data", named(tmp_path, CLASSES, labels))
    fewer = named(tmp_path, ("j", "d", "b"), labels)
    found = _json(trained, "--data", fewer)
    for key in ("accuracy", "loss", "auc", "classes", "confusion", "samples"):
        assert found[key] == whole[key]
    rows = {row["class"]: row for row in found["classes"]}
    assert list(rows) == list(CLASSES)
    assert {name: row["samples"] for name, row in rows.items() if row["samples"]} == {"b": 30, "d": 15, "j": 15}
    assert all(rows["a"][figure] is None for figure in ("precision", "recall", "auc"))
    assert ["a", "0", "-", "-", "-"] in [line.split() for line in _evaluate(trained, "--data", fewer).splitlines()]


def test_a_class_that_the_network_does_not_know_is_named(trained: Path, tmp_path: Path) -> None:
    told = _evaluate(trained, "--data", named(tmp_path, ("a", "eel"), np.arange(60, dtype=np.uint8) % 2), code=2)
    assert f"{trained} was not trained on 'eel'; give a data set of its classes, by the same names: 'a', 'b', " in told
    unused = named(tmp_path, ("a", "eel", "b"), np.arange(60, dtype=np.uint8) % 3, test=np.zeros(60, np.uint8))
    assert _json(trained, "--data", unused)["samples"] == 60, "no sample to be judged is of that class"


def test_other_numbers_are_named(trained: Path, tmp_path: Path) -> None:
    told = _evaluate(trained, "--data", named(tmp_path, CLASSES, "ab" * 30, dtype="float32"), code=2)
    assert f"numbers of type float32, and {trained} was trained on uint8" in told


def test_float32_and_float64_are_judged_alike(tmp_path: Path) -> None:
    raw = tiny_job(named(tmp_path, CLASSES, "ab" * 30, dtype="float32"))
    run = tiny_run(tmp_path / "runs", raw, random_state(resolve(raw)))
    found = _json(run, "--data", named(tmp_path, CLASSES, "ab" * 30, dtype="float64"))
    assert (found["accuracy"], found["classes"]) == ((own := _json(run))["accuracy"], own["classes"])


def test_several_labels_go_by_their_names(by_label: tuple[Path, Dataset], tmp_path: Path) -> None:
    run, _ = by_label
    rows = (np.random.default_rng(0).random((60, 10)) < 0.4).astype(np.uint8)
    found = _json(run, "--data", named(tmp_path, CLASSES, rows))
    turned = _json(run, "--data", named(tmp_path, CLASSES[::-1], rows[:, ::-1]))
    assert (turned["classes"], turned["loss"]) == (found["classes"], found["loss"])
    told = _evaluate(run, "--data", named(tmp_path, CLASSES[1:], rows[:, 1:]), code=2)
    assert "no label 'a'; give a data set of its classes" in told


# --- several labels a sample ---


@pytest.fixture
def by_label(tmp_path: Path) -> tuple[Path, Dataset]:
    data = toy_dataset(tmp_path, size=8, several=True)
    raw = tiny_job(data.path)
    state = random_state(resolve(raw))
    parameters = state.weights[: state.optimizers["w0"].vectors.size]
    parameters -= 0.55  # so that some answers are yes, some no, and none is quite sure
    parameters *= 0.2
    return tiny_run(tmp_path / "by-label", raw, state), data


def test_several_labels_have_figures_each_and_no_matrix(by_label: tuple[Path, Dataset], tmp_path: Path) -> None:
    run, data = by_label
    found = _json(run)
    network = find_network(str(run), "last", print).classifier
    images, rows = data.test.read(0, 40)
    probabilities = network.predict(images)
    yes = probabilities > 0.5
    assert 0 < yes.mean() < 1
    assert found["accuracy"] == pytest.approx((yes == rows).mean())
    assert (found["labels"], found["top5"], found["confusion"]) == ("several", None, None)
    for c, each in enumerate(found["classes"]):
        hits = int((yes[:, c] & (rows[:, c] == 1)).sum())
        assert each["samples"] == rows[:, c].sum()
        assert each["recall"] == pytest.approx(hits / rows[:, c].sum())
        assert each["precision"] == (pytest.approx(hits / yes[:, c].sum()) if yes[:, c].any() else None)
        assert each["auc"] == ClassScores(probabilities[:, [c]], rows[:, [c]]).auc
    lines = _evaluate(run).splitlines()
    assert lines[0].startswith("accuracy by label ")
    assert lines[3].split() == ["label", "samples", "precision", "recall", "AUC"]
    assert len(lines) == 4 + 10
    assert _evaluate(run, "--csv", "-").splitlines()[0] == "class,samples,precision,recall,auc"


def test_a_picture_of_several_labels_is_refused(by_label: tuple[Path, Dataset], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    told = _evaluate(by_label[0], "--picture", tmp_path / "a.svg", code=2)
    assert "several labels a sample" in told
    assert "so there is no confusion matrix; leave --picture out" in told


def test_predict_gives_the_likeliest_labels_each_with_its_own_probability(
    by_label: tuple[Path, Dataset], tmp_path: Path
) -> None:
    run, data = by_label
    image = data.test.read(0, 1)[0]
    np.save(tmp_path / "image.npy", image[0])
    args = ["predict", str(run), str(tmp_path / "image.npy"), "--top", "10", "--json"]
    (found,) = json.loads(CliRunner().invoke(daskcnn, args).stdout)
    classifier = find_network(str(run), "last", print).classifier
    params, state = classifier.layout.views(classifier.weights)
    scores = predict(classifier.model, params, state, normalise(data, image), Context(Device()))[0]
    expected = sorted(zip(1 / (1 + np.exp(-scores.astype(np.float64))), CLASSES, strict=True), reverse=True)
    assert [each["class"] for each in found["classes"]] == [name for _, name in expected]
    assert [each["probability"] for each in found["classes"]] == [pytest.approx(p, rel=1e-4) for p, _ in expected]
    assert sum(each["probability"] for each in found["classes"]) != pytest.approx(1, abs=1e-3)


def test_a_run_of_classes_is_not_judged_on_several_labels(trained: Path, by_label: tuple[Path, Dataset]) -> None:
    told = _evaluate(trained, "--data", by_label[1].path, code=2)
    assert f"several labels a sample, and {trained} was trained on one class a sample; give" in told


def test_of_many_samples_the_auc_is_that_of_some(trained: Path) -> None:
    with mock.patch.object(score, "MOST", 200):
        found, text = _json(trained), _evaluate(trained)
    assert found["auc_samples"] == 20
    assert sum(each["samples"] for each in found["classes"]) == 60
    assert "AUC of 20 of the samples" in text


def test_views_are_the_job_s_or_those_that_are_given(tmp_path: Path, path: str, trained: Path) -> None:
    raw = tiny_job(path, data={"views": "mirror-translate"})
    run = tiny_run(tmp_path / "viewed", raw, random_state(resolve(raw)))
    plain, given, own = _json(trained), _json(trained, "--views", "mirror-translate"), _json(run)
    assert (plain["views"], given["views"], own["views"]) == ("none", "mirror-translate", "mirror-translate")
    assert given["loss"] == own["loss"] != plain["loss"] == _json(run, "--views", "none")["loss"]
    assert "scores averaged over views: mirror-translate" in _evaluate(run)
    assert "averaged" not in _evaluate(trained)


def test_very_many_classes_are_left_to_the_csv() -> None:
    classes = [{"class": str(i), "samples": 1, "precision": None, "recall": 0.0, "auc": None} for i in range(300)]
    figures = {
        "accuracy": 0.0,
        "top5": 0.0,
        "loss": 1.0,
        "auc": None,
        "samples": 300,
        "auc_samples": 300,
        "views": "none",
    }
    facts: dict[str, Any] = {
        "labels": "classes",
        "data": "d",
        "checkpoint": "c",
        "classes": classes,
        "confusion": [[0] * 300] * 300,
    }
    facts |= {"choice": "last", "epoch": 1.0}
    lines = readable_evaluation({**figures, **facts}).splitlines()
    assert len(lines) < 10
    assert "300 classes: --csv FILE has the figures of each" in lines
