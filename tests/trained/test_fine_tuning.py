"""Runs that start from trained weights: which layers get them, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from daskcnn.errors import DataError, JobError, UserError
from daskcnn.export.model_file import write_model
from daskcnn.job.prepared import Prepared
from daskcnn.job.resolve import apply_settings, resolve
from daskcnn.job.tables import Job
from daskcnn.launch import training as runner
from daskcnn.launch.dry_run import dry_run
from daskcnn.launch.prepared_job import fitted
from daskcnn.launch.recorder import Recorder
from daskcnn.launch.resume import EarlierRun, begins, check_same_data, job_to_run
from daskcnn.nn.score import Score
from daskcnn.runs.checkpoint import latest
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.runs.state import check_of, to_state
from daskcnn.store import open_dataset
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from daskcnn.trained.evaluate import evaluate
from daskcnn.trained.place import find_network
from tests.tiny_runs import CLASSES, LAYERS, random_state, tiny_data, tiny_job, tiny_run

HEAD: dict[str, Any] = {"layer": "dense", "units": 10}


def data_of(folder: Path, classes: tuple[str, ...], shape: tuple[int, int, int] = (8, 8, 3)) -> str:
    """A store of random images of these classes."""
    rng, path = np.random.default_rng(5), str(folder / f"{len(classes)}-{shape[0]}-{shape[2]}.zarr")

    def part(count: int) -> tuple[Any, Any]:
        labels = (np.arange(count) % len(classes)).astype(np.uint8)
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8), labels

    source = Source("synthetic", classes, part(60), part(30), {})
    write(source, describe(source, chunk=50, order="shuffled", seed=0), path, lambda _: None)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(tmp_path: Path, store: str) -> Path:
    """A trained run of two checkpoints, the first of them the better one, which it hands back."""
    job = resolve(tiny_job(store))
    good, bad = Score(1.0, 15, 20), Score(2.0, 5, 20)
    states = random_state(job, seed=1, step=5, validation=good), random_state(job, seed=2, step=9, validation=bad)
    return tiny_run(tmp_path / "trained", tiny_job(store, train={"restore_best": True}), *states)


def arrays(run: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / f"step-{step:09d}" / "arrays.safetensors")


def job_from(place: Path, data: str, **model: Any) -> Job:
    tables = tiny_job(data)
    return resolve(tables | {"model": {"from": str(place), **model}})


def prepared_from(place: Path, data: str, **model: Any) -> Prepared:
    return fitted(job_from(place, data, **model), open_dataset(data))


def weights_of(prepared: Prepared) -> dict[str, np.ndarray]:
    """By path, such as "conv1/w"."""
    assert prepared.start is not None
    layout, found = prepared.layout, dict[str, np.ndarray]()
    for tree in layout.views(prepared.start.weights):
        for layer, own in tree.items():
            found |= {f"{layer}/{name}": leaf for name, leaf in own.items()}
    return found


# --- which weights ---


def test_the_network_and_all_weights_of_the_best_checkpoint(run: Path, store: str) -> None:
    """Running statistics too."""
    prepared = prepared_from(run, store)
    assert prepared.job.model.layers == LAYERS
    trained = arrays(run, 5)
    for name, own in weights_of(prepared).items():
        np.testing.assert_array_equal(own, trained[name])
    assert "batchnorm1/mean" in weights_of(prepared)
    assert prepared.start is not None
    assert prepared.start.new == {}
    assert str(prepared.start).startswith("conv1, batchnorm1, dense1 from ")


def test_an_exported_model(tmp_path: Path, run: Path, store: str) -> None:
    file = tmp_path / "model.safetensors"
    write_model(find_network(str(run), "best", lambda _: None).classifier, "trained", file)
    of_run, of_file = (prepared_from(place, store).start for place in (run, file))
    assert of_run is not None
    assert of_file is not None
    assert of_file.loaded == of_run.loaded
    np.testing.assert_array_equal(of_file.weights, of_run.weights)


@pytest.mark.parametrize("inside", ["", "arrays.safetensors", "state.json"])
def test_one_checkpoint(run: Path, store: str, inside: str) -> None:
    prepared = prepared_from(run / "checkpoints" / "step-000000009" / inside, store)
    np.testing.assert_array_equal(weights_of(prepared)["conv1/w"], arrays(run, 9)["conv1/w"])


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        (("cat", "dog", "ship"), "dense1 is new: 3 classes instead of 10"),
        (tuple(f"class {c}" for c in CLASSES), "dense1 is new: the classes have other names"),
    ],
)
def test_the_last_layer_is_new_where_the_classes_differ(
    tmp_path: Path, run: Path, classes: tuple[str, ...], reason: str
) -> None:
    prepared = prepared_from(run, data_of(tmp_path, classes))
    found, trained = weights_of(prepared), arrays(run, 5)
    assert prepared.job.model.layers == [*LAYERS[:-1], {"layer": "dense", "units": len(classes)}]
    assert str(prepared.start).endswith(reason)
    np.testing.assert_array_equal(found["conv1/w"], trained["conv1/w"])
    assert found["dense1/w"].shape[-1] == len(classes)
    assert not found["dense1/b"].any(), "initial weights"
    assert len(json.loads(json.dumps(prepared.job.model_dump(mode="json")))["model"]["layers"]) == len(LAYERS)


def test_a_network_by_name_ends_in_the_new_classes(tmp_path: Path, store: str) -> None:
    raw = tiny_job(store) | {"model": {"name": "4:6", "relu": False}}
    run = tiny_run(tmp_path / "named", raw, random_state(resolve(raw)))
    prepared = prepared_from(run, data_of(tmp_path, ("a", "b")))
    assert (prepared.job.model.name, prepared.job.model.relu) == ("4:6", False)
    assert prepared.start is not None
    assert prepared.start.loaded == ("conv1", "conv2")


@pytest.mark.parametrize(
    ("classes", "reason"),
    [(("a", "b"), "2 classes instead of 10"), (CLASSES[::-1], "the classes have other names"), (CLASSES, "")],
)
def test_the_last_layers_of_heads_are_new_too(
    tmp_path: Path, store: str, classes: tuple[str, ...], reason: str
) -> None:
    """A head has a head of its own here, and the network ends in one."""

    def layers(count: int) -> list[dict[str, Any]]:
        scores = {"layer": "dense", "units": count}
        inner = {"layer": "auxiliary", "path": [{"layer": "dense", "units": 5}, scores]}
        outer = {"layer": "auxiliary", "path": [{"layer": "dense", "units": 6}, inner, scores]}
        return [{"layer": "conv", "kernels": 4, "size": 3}, outer, scores, {"layer": "auxiliary", "path": [scores]}]

    raw = tiny_job(store) | {"model": {"layers": layers(10)}}
    run, data = tiny_run(tmp_path / "headed", raw, random_state(resolve(raw))), data_of(tmp_path, classes)
    prepared = prepared_from(run, data)
    assert prepared.job.model.layers == layers(len(classes))
    named = prepared_from(run, data, layers=layers(len(classes)))
    ends = ["auxiliary1/path/auxiliary1/path/dense2", "auxiliary1/path/dense2", "auxiliary2/path/dense1", "dense1"]
    for start in (prepared.start, named.start):
        assert start is not None
        assert start.new == (dict.fromkeys(ends, reason) if reason else {})
        assert {"conv1", "auxiliary1/path/dense1"} <= {*start.loaded}


def test_layers_of_the_jobs_own_network_are_matched_by_name(run: Path, store: str) -> None:
    """Those that the run does not have are new, and named."""
    layers = [*LAYERS[:-1], {"layer": "conv", "kernels": 5, "size": 1}, HEAD]
    with pytest.raises(JobError, match=r"layer dense1 of .* does not fit: dense1/w is \(2, 2, 4, 10\), the job's"):
        prepared_from(run, store, layers=layers)
    fits = [*LAYERS[:-1], {"layer": "conv", "kernels": 4, "size": 1}, HEAD]
    prepared = prepared_from(run, store, layers=fits)
    assert prepared.start is not None
    assert prepared.start.new == {"conv2": "there is none of this name"}
    np.testing.assert_array_equal(weights_of(prepared)["dense1/w"], arrays(run, 5)["dense1/w"])


def test_weights_are_rounded_to_the_jobs_dtype(run: Path, store: str) -> None:
    prepared = prepared_from(run, store, dtype="float64")
    found = weights_of(prepared)["conv1/w"]
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, arrays(run, 5)["conv1/w"].astype(np.float64))


# --- what is refused ---


def test_images_of_another_shape_are_refused_where_layers_do_not_fit(tmp_path: Path, run: Path) -> None:
    grey = data_of(tmp_path, CLASSES, (8, 8, 1))
    with pytest.raises(JobError, match=r"layer conv1 .*trained on images of 8x8x3, these are 8x8x1\); give images"):
        prepared_from(run, grey)
    larger = data_of(tmp_path, CLASSES, (16, 16, 3))
    with pytest.raises(JobError, match=r"layer dense1 .*trained on images of 8x8x3, these are 16x16x3"):
        prepared_from(run, larger)


def test_larger_images_fit_where_the_last_layer_is_new(tmp_path: Path, run: Path) -> None:
    prepared = prepared_from(run, data_of(tmp_path, ("a", "b"), (16, 16, 3)))
    assert prepared.start is not None
    assert prepared.start.loaded == ("conv1", "batchnorm1")


def test_no_layer_in_common_is_refused(tmp_path: Path, store: str) -> None:
    dense: dict[str, Any] = {"layers": [{"layer": "dense", "units": 7}, HEAD]}
    raw = tiny_job(store) | {"model": dense}
    run = tiny_run(tmp_path / "dense", raw, random_state(resolve(raw)))
    layers = [{"layer": "conv", "kernels": 10, "size": 8}, {"layer": "flatten"}]
    with pytest.raises(JobError, match=r"no layer of .* has the name of a layer of the job's network"):
        prepared_from(run, store, layers=layers)


def test_places_without_a_trained_network_are_refused(tmp_path: Path, run: Path, store: str) -> None:
    for place in (tmp_path / "nowhere", tmp_path, run / "checkpoints"):
        with pytest.raises(DataError, match=r"no trained network there; give a run directory"):
            prepared_from(place, store)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(DataError, match="no checkpoint yet"):
        prepared_from(run, store)


def test_a_damaged_checkpoint_is_refused(run: Path, store: str) -> None:
    file = run / "checkpoints" / "step-000000005" / "arrays.safetensors"
    file.write_bytes(file.read_bytes()[:-3] + b"xyz")
    assert find_network(run, "best", lambda _: None).source.name == "step-000000009", "the next best"
    with pytest.raises(UserError, match="SHA-256"):
        prepared_from(file.parent, store)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, store: str) -> None:
    job = resolve(tiny_job(store))
    state = random_state(job)
    state.weights[5] = np.inf
    run = tiny_run(tmp_path / "infinite", tiny_job(store), state)
    with pytest.raises(DataError, match="conv1/w holds NaN or infinity"):
        prepared_from(run, store)


def test_patterns_of_layers_are_checked_with_the_job(run: Path, store: str) -> None:
    with pytest.raises(JobError, match=r"model.freeze = 'cnv\*': matches no layer with weights; there are conv1, b"):
        prepared_from(run, store, freeze=["cnv*"])
    with pytest.raises(JobError, match=r"model.freeze = \['\*'\]: leaves no layer to train"):
        prepared_from(run, store, freeze=["*"])
    rates = {"conv*": 0.1, "dens": 2.0, "bn": 3.0}
    job = resolve(tiny_job(store, model={"freeze": ["cnv*"]}, train={"rates": rates}))
    with pytest.raises(JobError) as caught:
        fitted(job, open_dataset(store))
    assert [problem.partition("; ")[0] for problem in caught.value.problems] == [
        "train.rates: 'dens' matches no layer with weights",
        "train.rates: 'bn' matches no layer with weights",
        "model.freeze = 'cnv*': matches no layer with weights",
    ]
    with pytest.raises(JobError, match=r"model\.freeze = 'conv1': input should be a valid list"):
        resolve({"model": {"freeze": "conv1"}})


# --- the job ---


def test_from_is_a_key_like_any_other(run: Path, store: str) -> None:
    raw: dict[str, Any] = {}
    apply_settings(raw, [f"model.from={run}", 'model.freeze=["conv*"]'])
    job = resolve(raw)
    assert job.model.from_ == str(run)
    assert (job.model.name, job.model.layers) == (None, None)
    dumped = job.model_dump(mode="json")
    assert dumped["model"]["from"] == str(run)
    assert resolve(dumped) == job
    with pytest.raises(JobError, match=r"model\.form: unknown key; did you mean 'from'"):
        resolve({"model": {"form": "x"}})
    with pytest.raises(JobError, match=r"model\.from = 3: input should be a valid string"):
        resolve({"model": {"from": 3}})


def test_a_relative_place_is_made_absolute(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    assert resolve({"model": {"from": run.name}}).model.from_ == str(run)


def test_the_plan_says_what_starts_from_where_and_what_is_frozen(tmp_path: Path, run: Path) -> None:
    data = data_of(tmp_path, ("a", "b"))
    tables = tiny_job(data) | {"model": {"from": str(run), "freeze": ["conv*", "batch*"]}}
    job, plan = dry_run(tables, resume=None)
    assert job["model"]["layers"][-1] == {"layer": "dense", "units": 2}
    assert (
        f"weights   conv1, batchnorm1 from {run}/checkpoints/step-000000005 (best, epoch 1.5); dense1 is new: 2 classes"
        in plan
    )
    assert "frozen    conv1, batchnorm1: 128 of 162 weights and statistics" in plan


# --- a run that starts from another, and goes on without it ---


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_a_run_keeps_its_start_and_goes_on_without_the_other_run(
    tmp_path: Path, run: Path, store: str, strategy: str
) -> None:
    raw = tiny_job(store, train={"strategy": strategy}) | {"model": {"from": str(run), "freeze": ["conv1"]}}
    prepared = fitted(resolve(raw), open_dataset(store))
    own = tiny_run(tmp_path / "tuned", prepared.job.model_dump(mode="json"))
    assert begins(EarlierRun.at(own))
    with RunDirectory.open(own, writable=True) as directory:
        state = runner._started(Recorder(directory, runner.Silent(), prepared))
    assert not begins(EarlierRun.at(own))
    assert state is not None
    shutil.rmtree(run)

    job, earlier = job_to_run({}, str(own))
    again = fitted(job, open_dataset(store), begins=begins(earlier))
    assert again.start is None
    checkpoint = latest(own / "checkpoints", warn=pytest.fail, check=check_of(job))
    assert checkpoint is not None
    check_same_data(checkpoint, again)
    resumed = to_state(checkpoint, job)
    np.testing.assert_array_equal(resumed.weights, state.weights)
    assert (resumed.step, resumed.epoch, dict(resumed.book)) == (0, 0.0, {})
    assert set(resumed.optimizers) == ({"layer"} if strategy == "layer" else set())
    assert evaluate(str(own), checkpoint="last", path=None, say=pytest.fail)["samples"] == 60
    with pytest.raises(DataError, match="no trained network there"):
        fitted(kept_job(RunDirectory.open(own)), open_dataset(store))


def test_another_run_given_on_resuming_is_said_to_be_ignored(
    tmp_path: Path, run: Path, store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tiny_run(tmp_path / "tuned", tiny_job(store), random_state(resolve(tiny_job(store))))
    tables = tiny_job(store) | {"model": {"layers": LAYERS, "from": str(run)}}
    tables["run"] = {"dir": str(own.parent), "name": own.name}
    job_to_run(tables, "auto")
    assert f"warning: model.from = {run}: ignored" in capsys.readouterr().err


def test_an_array_with_another_name_is_no_weight_of_the_network(run: Path, store: str) -> None:
    """A checkpoint that lacks one is not taken for its run's."""
    file = run / "checkpoints" / "step-000000009" / "arrays.safetensors"
    without = {name: array for name, array in load_file(file).items() if name != "conv1/w"}
    save_file(without, file)
    with pytest.raises(DataError):
        prepared_from(file.parent, store)
