"""A trained network is found at the same places, with the same weights and errors, by whatever takes one."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from click.testing import CliRunner

import daskcnn
from daskcnn.cli import main
from daskcnn.errors import UserError
from daskcnn.export import read_model
from daskcnn.export.model_file import write_model
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import CheckpointChoice, Cluster
from daskcnn.launch.prepared_job import fitted
from daskcnn.nn.score import Score
from daskcnn.store import open_dataset
from daskcnn.trained.evaluate import evaluate
from daskcnn.trained.place import export, find_network
from daskcnn.trained.predict import predict
from daskcnn.trained.predictions import whole
from tests.tiny_runs import CLASSES, random_state, tiny_data, tiny_job, tiny_run

Vector = npt.NDArray[Any]
BEST, LAST = Path("run/checkpoints/step-000000005"), Path("run/checkpoints/step-000000009")

PLACES: dict[str, tuple[str, CheckpointChoice | None, Path]] = {
    "a run": ("run", "last", LAST),
    "the best of a run": ("run", "best", BEST),
    "a run, without a choice": ("run", None, LAST),
    "a run that stops early, without a choice": ("early", None, Path("early/checkpoints/step-000000005")),
    "the last of a run that stops early": ("early", "last", Path("early/checkpoints/step-000000009")),
    "a run that restores the best, without a choice": ("restores", None, Path("restores/checkpoints/step-000000005")),
    "a run that stops early and keeps the last": ("stays", None, Path("stays/checkpoints/step-000000009")),
    "a checkpoint": (str(BEST), "last", BEST),
    "a checkpoint, with a choice that is another": (str(LAST), "best", LAST),
    "the arrays of a checkpoint": (f"{BEST}/arrays.safetensors", "last", BEST),
    "the state of a checkpoint": (f"{BEST}/state.json", "last", BEST),
    "an exported model": ("model.safetensors", "last", BEST),
    "an exported model by another name": ("model.of-mine", "last", BEST),
    "a run in the home directory": ("~/run", "last", LAST),
}
"""By kind: the place, the choice among a run's checkpoints, and the checkpoint whose weights it has."""

TRAINS = {
    "early": {"early_stopping": 2},
    "restores": {"restore_best": True},
    "stays": {"early_stopping": 2, "restore_best": False},
}
"""Runs by name: the keys of their jobs that decide which weights they hand back."""

WRONG = {
    "nothing": ("nowhere", "no trained network there"),
    "the name of a run": ("named", "no trained network there"),
    "a folder": (".", "no trained network there"),
    "the folder of checkpoints": ("run/checkpoints", "no trained network there"),
    "a checkpoint that is not there": ("run/checkpoints/step-000000001", "no trained network there"),
    "a damaged checkpoint": ("damaged/checkpoints/step-000000005", "SHA-256"),
    "a run without a checkpoint": ("new", "no checkpoint yet"),
    "another file": ("run/job.json", "a header of"),
    "a pipe": ("pipe", "a named pipe, not a regular file"),
    "a name that is too long": ("x" * 300, "File name too long"),
}
"""By kind: the place, and what is said of it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the places."""
    folder = tmp_path_factory.mktemp("places")
    raw = tiny_job(tiny_data(folder))
    job = resolve(raw)
    good, bad = Score(1.0, 15, 20), Score(2.0, 5, 20)
    states = random_state(job, seed=1, step=5, validation=good), random_state(job, seed=2, step=9, validation=bad)
    tiny_run(folder, raw, *states)
    for name, train in TRAINS.items():
        own = {**raw, "train": raw["train"] | train}
        tiny_run(folder / "other", own, *states).rename(folder / name)
    for name in ("model.safetensors", "model.of-mine"):
        write_model(find_network(folder / BEST).classifier, "run", folder / name)
    for name, kept in (("damaged", states[:1]), ("new", ()), ("runs/named", states[:1])):
        (folder / name).parent.mkdir(exist_ok=True)
        tiny_run(folder / "other", raw, *kept).rename(folder / name)
    arrays = folder / WRONG["a damaged checkpoint"][0] / "arrays.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-3] + b"xyz")
    os.mkfifo(folder / "pipe")
    np.save(folder / "image.npy", np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(whole, "connect", lambda *_, **__: nullcontext())
    monkeypatch.setattr(whole, "wait_for_members", lambda *_, **__: SimpleNamespace(workers=()))
    monkeypatch.setattr(whole, "check_versions", lambda *_: None)
    monkeypatch.setattr(whole, "spread", _spread_here)


def _spread_here(client: None, function: Callable[..., Any], parts: Iterable[Any], *_: Any, **__: Any) -> Iterator[Any]:
    return ((part, function(part, kind="cpu", threads=1)) for part in parts)


def quiet(message: str) -> None:
    """Nobody listens."""


# --- what takes a place: each gives what the weights decide ---


def _load(place: str, choice: CheckpointChoice | None, out: Path) -> Vector:
    return np.asarray(daskcnn.load(place, checkpoint=choice).vector)


def _export(place: str, choice: CheckpointChoice | None, out: Path) -> Vector:
    file = out / "m.safetensors"
    export(place, "safetensors", out=str(file), checkpoint=choice, say=quiet)
    return np.asarray(read_model(file).weights)


def _start(place: str, choice: CheckpointChoice | None, out: Path) -> Vector:
    data = str(open_dataset("synthetic.zarr").path)
    model = {"from": place} | ({} if choice is None else {"from_checkpoint": choice})
    prepared = fitted(resolve(tiny_job(data) | {"model": model}), open_dataset(data))
    assert prepared.start is not None
    return np.asarray(prepared.start.weights)


def _predict(place: str, choice: CheckpointChoice | None, out: Path) -> Vector:
    (found,) = predict(place, ["image.npy"], checkpoint=choice, top=10, say=quiet)
    chances = {each["class"]: each["probability"] for each in found["classes"]}
    return np.array([chances[name] for name in CLASSES])


def _predict_whole(place: str, choice: CheckpointChoice | None, out: Path) -> Vector:
    how: dict[str, Any] = {"part": None, "cluster": Cluster(), "skip_bad": False, "say": quiet}
    whole.predict_whole(place, ["image.npy"], str(out / "p.zarr"), checkpoint=choice, **how)
    return np.asarray(zarr.open_array(str(out / "p.zarr/probabilities"), mode="r")[:])


def _evaluate(place: str, choice: CheckpointChoice | None, out: Path) -> Vector:
    found = evaluate(place, checkpoint=choice, path="synthetic.zarr", say=pytest.fail)
    return np.array([found["accuracy"], found["loss"], found["auc"]])


TAKE = {
    "load": _load,
    "export": _export,
    "model.from": _start,
    "predict": _predict,
    "predict --out": _predict_whole,
    "evaluate": _evaluate,
}
takers = pytest.mark.parametrize("take", TAKE.values(), ids=TAKE)


@takers
@pytest.mark.parametrize("kind", PLACES)
def test_each_place_has_the_same_weights_for_whatever_takes_it(
    kind: str, take: Callable[..., Vector], tmp_path: Path
) -> None:
    place, choice, expected = PLACES[kind]
    (tmp_path / "expected").mkdir()
    found = take(place, choice, tmp_path)
    np.testing.assert_array_equal(found, take(str(expected), "last", tmp_path / "expected"))


@pytest.mark.parametrize(
    "args", [("export", "--to", "safetensors", "--out", "m"), ("predict", "image.npy"), ("evaluate",)]
)
@pytest.mark.parametrize(
    ("place", "flags", "words"),
    [
        ("early", (), "early/checkpoints/step-000000005 (best, epoch 1.5)"),
        ("early", ("--checkpoint", "last"), "early/checkpoints/step-000000009 (last, epoch 1.5)"),
        ("run", (), f"{LAST} (last, epoch 1.5)"),
        (str(BEST), (), f"{BEST} (epoch 1.5)"),
    ],
)
def test_a_command_says_whose_weights_it_took(
    args: tuple[str, ...], place: str, flags: tuple[str, ...], words: str
) -> None:
    result = CliRunner().invoke(main, [args[0], place, *args[1:], *flags])
    assert result.exit_code == 0, result.output
    assert words in result.output


@takers
def test_the_weights_matter(take: Callable[..., Vector], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert (take(str(BEST), "last", tmp_path) != take(str(LAST), "last", tmp_path / "other")).any()


def test_a_run_of_that_name_is_hinted_at() -> None:
    with pytest.raises(UserError, match=r"no trained network there; .*; did you mean runs/named"):
        daskcnn.load("named")


@pytest.mark.parametrize("kind", WRONG)
def test_each_wrong_place_has_the_same_error_for_whatever_takes_it(kind: str, tmp_path: Path) -> None:
    place, words = WRONG[kind]
    told = set()
    for take in TAKE.values():
        with pytest.raises(UserError, match=words) as caught:  # a job has absolute paths
            take(place, "last", tmp_path)
        error = caught.value
        told.add((os.path.abspath(error.value), error.reason, error.remedy.partition("; did you mean")[0]))
    assert len(told) == 1


# --- memory ---


def test_the_weights_alone_are_held_in_memory(tmp_path: Path) -> None:
    """A checkpoint has an optimizer's state of each replica too, and is hashed as a whole."""
    layers = [{"layer": "dense", "units": 4096}, {"layer": "relu"}, {"layer": "dense", "units": 10}]
    raw = tiny_job(tiny_data(tmp_path), model={"layers": layers})
    state = random_state(resolve(raw))
    (own, *_) = state.optimizers.values()
    run = tiny_run(tmp_path, raw, replace(state, optimizers={f"w{i}": own for i in range(12)}))
    file = run / "checkpoints" / "step-000000007" / "arrays.safetensors"
    assert file.stat().st_size > 12 * state.weights.nbytes
    tracemalloc.start()
    try:
        found = find_network(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(found.classifier.weights, state.weights)
    assert peak < 3 * state.weights.nbytes


# --- what a model file does not have ---


@pytest.mark.parametrize("inside", ["", "/arrays.safetensors"])
def test_a_checkpoint_has_its_run_s_name_and_folder(folder: Path, inside: str) -> None:
    found = find_network(f"{BEST}{inside}")
    assert (found.name, found.run, found.source) == ("run", Path("run"), BEST)
    assert export(f"{BEST}{inside}", "safetensors", out=None, checkpoint="last", say=quiet) == (
        Path("run/model.safetensors"),
    )


def test_a_checkpoint_from_within_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = find_network(BEST).classifier.weights
    for there, place in (("run", BEST.relative_to("run")), ("run/checkpoints", Path(BEST.name)), (BEST, Path())):
        monkeypatch.chdir(folder / there)
        found = find_network(place)
        assert found.name == "run"
        np.testing.assert_array_equal(found.classifier.weights, expected)


def test_a_model_file_is_evaluated_on_a_data_set_that_is_named(folder: Path) -> None:
    def told(*args: str) -> str:
        result = CliRunner().invoke(main, ["evaluate", "model.safetensors", *args])
        assert result.exit_code == 2, result.output
        return result.stderr

    assert "does not say which data set it was trained on; give one: --data PATH" in told()
    assert "leave --keep out" in told("--data", "synthetic.zarr", "--keep")


def test_a_checkpoint_is_evaluated_on_its_run_s_data_and_kept_in_its_run(folder: Path) -> None:
    result = CliRunner().invoke(main, ["evaluate", str(BEST), "--keep", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 60
    assert json.loads(Path("run/evaluation.json").read_text(encoding="utf-8"))["checkpoint"] == str(BEST)


def test_another_choice_of_checkpoint_is_refused() -> None:
    with pytest.raises(UserError, match="checkpoint='bets': there is no such choice; give 'best' or 'last'"):
        daskcnn.load("run", checkpoint="bets")  # type: ignore[arg-type] # the point
