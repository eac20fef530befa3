"""`daskcnn.train`, `daskcnn.load` and what a notebook shows, on a cluster in this process."""

from __future__ import annotations

import asyncio
import doctest
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster, default_client

import daskcnn
from daskcnn.cluster.link.client import bound_to, given_or_default
from daskcnn.cluster.run import admission
from daskcnn.errors import ClusterError, DataError, JobError, UserError
from daskcnn.events import CheckpointWritten, EpochEnded, Event, RunEnded, RunResumed, RunStarted
from daskcnn.launch.training import Result
from daskcnn.runs.directory import RunDirectory
from daskcnn.show.worker_plan import WorkerPlan
from daskcnn.store import open_dataset
from daskcnn.trained.evaluate import evaluate
from tests.rounding_of_networks import of_probabilities
from tests.tiny_runs import tiny_data, tiny_job


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "resources": {"CPU": 1}}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    """The tables of a job of two epochs."""
    run = {"dir": str(tmp_path / "runs"), "name": "it"}
    return tiny_job(tiny_data(tmp_path), train={"batch_size": 20, "epochs": 2}, cluster={"settle": 0.0}, run=run)


@pytest.fixture(scope="module")
def trained(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("trained")
    run = {"dir": str(folder / "runs")}
    return daskcnn.train(client, tiny_job(tiny_data(folder), cluster={"settle": 0.0}, run=run))


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3), dtype=np.uint8)


# --- events ---


def test_the_function_is_told_every_event_that_is_logged(client: Client, job: dict[str, Any]) -> None:
    told: list[Event] = []
    result = daskcnn.train(client, job, on_event=told.append)
    assert [type(event) for event in told] == [type(event) for event in RunDirectory.open(result.run).events()]
    assert isinstance(told[0], RunStarted)
    assert isinstance(told[-1], RunEnded)


def stop_after(epochs: float, error: Exception) -> Any:
    def look(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch >= epochs:
            raise error

    return look


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "layer"])
def test_stop_keeps_the_state_and_returns_the_result(client: Client, job: dict[str, Any], strategy: str) -> None:
    job["train"] |= {"strategy": strategy, "epochs": 400}
    told: list[Event] = []

    def look(event: Event) -> None:
        told.append(event)
        stop_after(1, daskcnn.Stop())(event)

    result = daskcnn.train(client, job, on_event=look)
    assert result.summary["status"] == "stopped"
    assert 1 <= result.summary["epochs"] < 400
    assert result.summary["test"]["accuracy"] is not None
    assert isinstance(told[-1], RunEnded)
    assert told[-1].status == "stopped"
    kept = daskcnn.load(result.run)
    np.testing.assert_array_equal(kept.vector, result.model.vector)


def test_a_stopped_run_goes_on(client: Client, job: dict[str, Any]) -> None:
    job["train"] |= {"epochs": 6}
    stopped = daskcnn.train(client, job, on_event=stop_after(2, daskcnn.Stop()))
    assert stopped.summary["status"] == "stopped"
    told: list[Event] = []
    result = daskcnn.train(client, resume=stopped.run, on_event=told.append)
    assert (result.run, result.summary["status"], result.summary["epochs"]) == (stopped.run, "done", 6)
    assert [event.epoch for event in told if isinstance(event, RunResumed)] == [stopped.summary["epochs"]]


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_a_run_that_stops_early_hands_back_its_best_weights(client: Client, tmp_path: Path, strategy: str) -> None:
    """The last two evaluations were no better, of random images: the last weights are not the best."""
    data, run = tiny_data(tmp_path), {"dir": str(tmp_path / "runs")}
    train = {"batch_size": 20, "epochs": 40, "early_stopping": 2, "strategy": strategy, "lr": 0.3}
    job = tiny_job(data, train=train, data={"validation": 60}, cluster={"settle": 0.0}, run=run)
    result = daskcnn.train(client, job)
    best, last = (daskcnn.load(result.run, checkpoint=choice) for choice in ("best", "last"))
    assert (best.vector != last.vector).any()
    for model in (result.model, daskcnn.load(result.run)):
        np.testing.assert_array_equal(model.vector, best.vector)
    found = [epoch["validation"]["accuracy"] for epoch in result.history]
    assert result.summary["validation"]["accuracy"] == max(found) > found[-1]
    judged = evaluate(str(result.run), checkpoint=None, path=None, say=pytest.fail)
    assert (judged["choice"], judged["epoch"]) == ("best", result.summary["weights_epoch"])
    assert judged["accuracy"] == result.summary["test"]["accuracy"]


def test_stop_at_the_first_event_leaves_a_run_that_can_be_resumed(client: Client, job: dict[str, Any]) -> None:
    def look(event: Event) -> None:
        raise daskcnn.Stop

    result = daskcnn.train(client, job, on_event=look)
    assert (result.summary["status"], result.summary["epochs"]) == ("stopped", 0)
    assert daskcnn.train(client, resume=result.run).summary["status"] == "done"


def by_signal(event: Event) -> None:
    if isinstance(event, EpochEnded):
        signal.raise_signal(signal.SIGINT)


def by_itself(event: Event) -> None:
    if isinstance(event, EpochEnded):
        raise KeyboardInterrupt


def test_ctrl_c_keeps_the_run_as_the_command_does(client: Client, job: dict[str, Any]) -> None:
    """Also where nothing is due to be kept, as a notebook's button has it."""
    job["train"] |= {"epochs": 400}
    job["run"] |= {"checkpoint_every": 1000}
    with pytest.raises(KeyboardInterrupt, match=r"(?s)interrupted by Ctrl-C \(SIGINT\).*--resume"):
        daskcnn.train(client, job, on_event=by_signal)
    run = RunDirectory.open(Path(job["run"]["dir"]) / "it")
    summary = run.summary()
    assert summary is not None
    assert (summary["status"], summary["epochs"] > 0) == ("interrupted", True)
    assert isinstance([*run.events()][-1], RunEnded)
    assert daskcnn.train(client, resume=run.path, on_event=stop_after(2, daskcnn.Stop())).summary["epochs"] >= 2


def test_a_run_that_is_interrupted_before_it_trains_has_an_end(
    client: Client, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("daskcnn.launch.training.FollowedRun", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            daskcnn.train(client, job)
    run = RunDirectory.open(Path(job["run"]["dir"]) / "it")
    assert (run.summary() or {})["status"] == "interrupted"
    assert isinstance([*run.events()][-1], RunEnded)


def test_a_function_that_raises_it_ends_the_run_as_ctrl_c_does_on_any_thread(
    client: Client, job: dict[str, Any]
) -> None:
    """On other threads than the first one Python lets nobody handle signals."""
    job["train"] |= {"epochs": 400}
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt, match=r"Ctrl-C \(SIGINT\)"):
        pool.submit(daskcnn.train, client, job, on_event=by_itself).result()
    summary = RunDirectory.open(Path(job["run"]["dir"]) / "it").summary()
    assert summary is not None
    assert summary["status"] == "interrupted"


def test_an_error_of_the_function_ends_the_run_resumably(client: Client, job: dict[str, Any]) -> None:
    job["train"] |= {"epochs": 400}
    with pytest.raises(ZeroDivisionError) as caught:
        daskcnn.train(client, job, on_event=stop_after(1, ZeroDivisionError("mine")))
    run = Path(job["run"]["dir"]) / "it"
    assert str(run) in caught.value.__notes__[0]
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert 1 <= daskcnn.train(client, resume=run, on_event=stop_after(2, daskcnn.Stop())).summary["epochs"] < 400


def test_an_error_at_the_last_event_is_raised_too(client: Client, job: dict[str, Any]) -> None:
    def look(event: Event) -> None:
        if isinstance(event, RunEnded | CheckpointWritten):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        daskcnn.train(client, job, on_event=look)


def test_a_run_that_is_done_is_returned(client: Client, trained: Result) -> None:
    again = daskcnn.train(client, resume=trained.run)
    assert (again.run, again.summary, again.history) == (trained.run, trained.summary, trained.history)
    np.testing.assert_array_equal(again.model.vector, trained.model.vector)


def test_init_is_the_job_s_model_from(client: Client, job: dict[str, Any], trained: Result) -> None:
    with pytest.raises(UserError, match=r"no-run-here|model\.from"):
        daskcnn.train(client, job, init="no-run-here")
    with pytest.raises(JobError, match="not both"):
        daskcnn.train(client, init=trained.run, resume=trained.run)


# --- models ---


def test_a_run_a_checkpoint_and_its_file_are_loaded(trained: Result, images: np.ndarray) -> None:
    (newest,) = sorted((trained.run / "checkpoints").glob("step-*"))[-1:]
    wanted = trained.model.predict(images)
    for source in (trained.run, str(trained.run), newest, newest / "arrays.safetensors"):
        np.testing.assert_array_equal(daskcnn.load(source).predict(images), wanted)


def test_a_model_kept_as_a_run_is_loaded(trained: Result, tmp_path: Path) -> None:
    kept = daskcnn.load(trained.model.kept_in(tmp_path))
    np.testing.assert_array_equal(kept.vector, trained.model.vector)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        daskcnn.load(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"no model")
    with pytest.raises(DataError):
        daskcnn.load(tmp_path / "x.safetensors")


def test_predictions_of_a_dask_array_are_lazy(trained: Result, images: np.ndarray) -> None:
    lazy = trained.model.predict(da.from_array(images, chunks=(3, 8, 4, 3)))
    assert isinstance(lazy, da.Array)
    assert lazy.chunks == ((3, 3, 1), (10,))
    with_here = lazy.compute(scheduler="synchronous")
    allowed = of_probabilities(trained.model.classifier, images)
    np.testing.assert_allclose(with_here, trained.model.predict(images), rtol=allowed)
    assert lazy.dtype == with_here.dtype


def test_arrays_of_xarray_are_predicted_as_what_is_in_them(trained: Result, images: np.ndarray) -> None:
    xarray = pytest.importorskip("xarray")
    array = xarray.DataArray(images, dims=("sample", "y", "x", "band"))
    found = trained.model.predict(images)
    np.testing.assert_array_equal(trained.model.predict(array), found)
    lazy = trained.model.predict(array.chunk({"sample": 3}))
    assert isinstance(lazy.data, da.Array)
    allowed = of_probabilities(trained.model.classifier, images)
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), found, rtol=allowed)


def test_home_is_found(trained: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(trained.run.parent))
    np.testing.assert_array_equal(daskcnn.load(f"~/{trained.run.name}").vector, trained.model.vector)
    with pytest.raises(UserError, match="~nobody-has-this-name/run"):
        daskcnn.load("~nobody-has-this-name/run")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": {"epochs": 1}}, r"a job in place of the client: .*give the job second, or by name: train\(job=…\)"),
        ("job.toml", "a job in place of the client"),
        ("tcp://host:8786", r"client='tcp://host:8786': not a client of Dask; give a distributed\.Client"),
        (3, "client=3: not a client of Dask"),
    ],
)
def test_what_is_no_client_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        daskcnn.train(given)


def test_an_asynchronous_client_is_refused_also_as_the_default_one(job: dict[str, Any]) -> None:
    """The job would wait, on the thread of the event loop, for what that loop is to do."""

    async def train() -> None:
        settings: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "silence_logs": "ERROR"}
        async with (
            LocalCluster(n_workers=0, asynchronous=True, **settings) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            with pytest.raises(ClusterError, match=r"client: it is asynchronous, .*; give one that is not"):
                daskcnn.train(client, job)
            with pytest.raises(ClusterError, match=r"the default client: it is asynchronous, .*; give one that is not"):
                daskcnn.train(job=job | {"cluster": {"scheduler": "tcp://127.0.0.1:9", "wait": 0}})

    asyncio.run(train())


@pytest.mark.parametrize(
    ("address", "words"), [("tcp://127.0.0.1:9", "cannot be reached"), ("nothing://x", "not an address")]
)
def test_a_scheduler_that_is_not_there_is_not_dask_s_default(job: dict[str, Any], address: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        daskcnn.train(job=job | {"cluster": {"scheduler": address, "wait": 0}})
    with pytest.raises(ValueError, match="No clients found"):
        default_client()
    assert da.ones(3, chunks=2).sum().compute() == 3


@pytest.mark.cluster
def test_a_script_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
from daskcnn.cluster.link.connect import connect
from daskcnn.job.tables import Cluster
with connect(Cluster.model_validate({"workers": {"cpu": 1}}), server=False):
    pass
"""
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    told = "this script: it starts workers, and each worker imports it; if this is a script, put what it does under"
    assert told in found.stderr
    assert found.stderr.splitlines()[-1].startswith("daskcnn.errors.ClusterError: local workers: they did not start")


def test_a_wrong_array_is_refused_at_once(trained: Result, images: np.ndarray) -> None:
    for wrong, remedy in (
        (images.astype(float), "give the numbers that it was trained on, in the same type and scale"),
        (images[..., :1], "give the 3 channels that it was trained on, in their order"),
        (images[0], r"give several, images\[None\]"),
        (images.transpose(0, 3, 1, 2), "put the channels last, numpy.moveaxis"),
        (images[:, :4], "give images of the size that it was trained on"),
    ):
        for made in (np.asarray, da.from_array):
            with pytest.raises(daskcnn.errors.DataError, match=f"the network wants uint8 .*; {remedy}"):
                trained.model.predict(made(wrong))


def test_several_arrays_are_refused_by_name(trained: Result, images: np.ndarray) -> None:
    xarray = pytest.importorskip("xarray")
    axes = ["sample", "y", "x", "band"]
    both = xarray.Dataset({"tiles": (axes, images), "mask": (axes[:1], np.zeros(len(images)))})
    with pytest.raises(daskcnn.errors.DataError, match=r"several arrays \(tiles, mask\); give one of them.*'tiles'"):
        trained.model.predict(both)


def test_a_zarr_array_is_predicted_lazily(trained: Result, images: np.ndarray, tmp_path: Path) -> None:
    stored = zarr.create_array(tmp_path / "images", data=images, chunks=(3, 8, 8, 3))
    lazy = trained.model.predict(stored)
    assert isinstance(lazy, da.Array)
    allowed = of_probabilities(trained.model.classifier, images)
    np.testing.assert_allclose(lazy.compute(scheduler="sync"), trained.model.predict(images), rtol=allowed)


def test_layers_and_weights_have_names(trained: Result) -> None:
    model = trained.model
    assert list(model.layers) == ["conv1", "batchnorm1", "relu1", "maxpool1", "dense1"]
    assert model.weights.keys() == {"conv1", "batchnorm1", "dense1"}
    assert model.weights["conv1"]["w"].shape == (3, 3, 3, 4)
    total = sum(array.size for layer in model.weights.values() for array in layer.values())
    assert total == model.vector.size
    with pytest.raises(ValueError, match="read-only"):
        model.weights["conv1"]["w"][...] = 0


# --- what a notebook shows ---


def test_plan_job_result_and_model_are_shown_in_a_notebook(trained: Result, job: dict[str, Any]) -> None:
    plan = daskcnn.dry_run(job)
    for shown, word in (
        (plan, "to train on"),
        (plan.job, "train.epochs"),
        (trained, "accuracy"),
        (trained.model, "conv1"),
        (open_dataset(job["data"]["path"]), "60"),
        (WorkerPlan((), ()), "speed-up"),
    ):
        assert word in shown._repr_html_()
    assert "to train on" in repr(plan)
    assert "accuracy" in repr(trained)
    assert max(map(len, repr(trained).splitlines())) < 300, "no dump of all epochs"


def test_names_are_escaped_in_a_notebook() -> None:
    shown = daskcnn.Job.model_validate({"data": {"path": "<script>\x1b"}})._repr_html_()
    assert "&lt;script&gt;\\x1b" in shown


def test_help_has_an_example_that_runs(
    client: Client, trained: Result, job: dict[str, Any], images: np.ndarray
) -> None:
    names = {"client": client, "job": job, "run": trained.run, "images": images[:2], "daskcnn": daskcnn}
    runner = doctest.DocTestRunner(verbose=False)
    for name in ("train", "dry_run", "load", "TrainedModel"):
        (found,) = doctest.DocTestFinder(recurse=False).find(getattr(daskcnn, name), name, globs=dict(names))
        assert found.examples, name
        assert not runner.run(found).failed, name


def test_dir_lists_what_there_is_and_imports_nothing() -> None:
    code = "import sys, daskcnn; print(*dir(daskcnn)); print('dask' in sys.modules, 'zarr' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert set(daskcnn.__all__) <= set(told[0].split())
    assert told[1] == "False False"
    assert all(getattr(daskcnn, name) is not None for name in daskcnn.__all__)
    told_of = [line.split("  ")[0] for line in str(daskcnn.__doc__).splitlines()]
    listed = {name for line in told_of for name in line.replace(",", " ").split()}
    assert set(daskcnn.__all__) <= listed, "each is in the package's own description"
    with pytest.raises(AttributeError, match="nothing"):
        _ = daskcnn.nothing


# --- data of one's own ---


@pytest.fixture
def labels() -> np.ndarray:
    return np.array(["cat", "dog"])[np.arange(60) % 2]


@pytest.fixture
def own() -> np.ndarray:
    """Images of three channels of 16 bits, the dogs brighter."""
    rng = np.random.default_rng(0)
    return (rng.integers(0, 2000, (60, 8, 8, 3)) + 1500 * (np.arange(60) % 2)[:, None, None, None]).astype(np.uint16)


@pytest.mark.parametrize("made", [np.asarray, lambda X: da.from_array(X, chunks=(25, 8, 8, 3))], ids=["numpy", "dask"])
def test_arrays_are_trained_on_in_place_of_a_data_set(
    client: Client, job: dict[str, Any], own: np.ndarray, labels: np.ndarray, made: Any
) -> None:
    del job["data"]
    result = daskcnn.train(
        client, job | {"model": {"layers": [{"layer": "dense", "units": 2}]}}, data=(made(own), labels)
    )
    model = result.model
    assert (model.classes, model.dtype.name) == (("cat", "dog"), "uint16")
    assert (model.predict(own).argmax(axis=1) == np.arange(60) % 2).mean() > 0.9
    assert not Path(model.job.data.path or "").exists(), "it was a temporary one"


@pytest.mark.slow
def test_arrays_are_kept_where_the_job_says(
    client: Client, job: dict[str, Any], own: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    job |= {"data": {"path": str(tmp_path / "own.zarr"), "validation": 5}, "train": {"epochs": 30}}
    job["model"] = {"layers": [{"layer": "dense", "units": 2}]}
    stopped = daskcnn.train(client, job, data=(own, labels), on_event=stop_after(1, daskcnn.Stop()))
    assert stopped.summary["status"] == "stopped"
    assert stopped.model.job.data.validation == 5
    assert daskcnn.train(client, resume=stopped.run).summary["status"] == "done"


def test_a_run_on_arrays_goes_on_where_they_are_given_again(
    client: Client, job: dict[str, Any], own: np.ndarray, labels: np.ndarray
) -> None:
    job |= {"data": {}, "train": {"epochs": 30}, "model": {"layers": [{"layer": "dense", "units": 2}]}}
    stopped = daskcnn.train(client, job, data=(own, labels), on_event=stop_after(1, daskcnn.Stop()))
    assert daskcnn.train(client, resume=stopped.run, data=(own, labels)).summary["status"] == "done"


def test_the_order_of_the_arrays_may_be_kept(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    small["data"] = {"path": str(tmp_path / "own.zarr"), "order": "stored"}
    assert daskcnn.train(client, small, data=(own, labels)).summary["status"] == "done"
    found = open_dataset(str(tmp_path / "own.zarr"))
    assert found.order == "stored"
    assert np.isin(found.train.read(0, 1)[0], own[:5]).all()


def test_auto_goes_on_with_the_data_set_that_is_at_its_path(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    small |= {"data": {"path": str(tmp_path / "own.zarr")}, "train": {"epochs": 30}}
    stopped = daskcnn.train(client, small, data=(own, labels), resume="auto", on_event=stop_after(1, daskcnn.Stop()))
    assert stopped.summary["status"] == "stopped"
    done = daskcnn.train(client, small, data=(own, labels), resume="auto")
    assert (done.run, done.summary["status"]) == (stopped.run, "done")
    longer = daskcnn.train(client, {"train": {"epochs": 31}}, resume=done.run, data=(own, labels))
    assert longer.model.job.data.path == str(tmp_path / "own.zarr"), "not written to a temporary folder"


@pytest.mark.parametrize("test", [0.5, 20, "pair"])
def test_a_run_that_goes_on_reads_the_arrays_as_at_first(
    client: Client, small: dict[str, Any], clouded: tuple[np.ndarray, np.ndarray], tmp_path: Path, test: Any
) -> None:
    first, again = tmp_path / "first.zarr", tmp_path / "again.zarr"
    tests = {"test": clouded if test == "pair" else test}
    small["data"] = {"path": str(first), "name": "tiles", "layout": "NCHW", "nodata": -9999, "order": "stored"} | tests
    small["train"] = {"epochs": 30, "seed": 7}
    stopped = daskcnn.train(client, small, data=clouded, on_event=stop_after(1, daskcnn.Stop()))
    wanted = open_dataset(str(first)).fingerprint
    shutil.rmtree(first)
    place = {"data": {"path": str(again)} | (tests if test == "pair" else {})}
    assert daskcnn.train(client, place, resume=stopped.run, data=clouded).summary["status"] == "done"
    assert open_dataset(str(again)).fingerprint == wanted


@pytest.fixture
def clouded() -> tuple[np.ndarray, np.ndarray]:
    """Tiles (N, C, H, W) of real numbers, one pixel of which is NaN, and labels; those of class 1 are brighter."""
    labels = np.arange(60) % 2
    tiles = np.random.default_rng(0).normal(size=(60, 3, 8, 8)).astype("float32") + 3 * labels[:, None, None, None]
    tiles[7, 1, 2, 2] = np.nan
    return tiles.astype("float32"), labels


def test_how_arrays_are_read_stands_in_the_job(
    client: Client, job: dict[str, Any], clouded: tuple[np.ndarray, np.ndarray]
) -> None:
    job |= {"data": {"layout": "NCHW"}, "model": {"layers": [{"layer": "dense", "units": 2}]}}
    with pytest.raises(daskcnn.errors.DataError, match=r"sample 7, channel 1, pixel \(2, 2\) is nan; set nodata"):
        daskcnn.train(client, job, data=clouded)
    job["data"] |= {"nodata": -9999, "test": 0.5}
    result = daskcnn.train(client, job, data=clouded)
    assert result.model.shape == (8, 8, 3)
    assert result.model.classifier.facts.nodata == -9999
    probabilities = result.model.predict(clouded[0].transpose(0, 2, 3, 1))
    assert np.isfinite(probabilities).all(), "NaN stands for no data"


def test_images_with_nan_are_told_of_where_the_network_knows_no_value_without_data(
    client: Client, job: dict[str, Any], clouded: tuple[np.ndarray, np.ndarray]
) -> None:
    tiles, labels = clouded[0].transpose(0, 2, 3, 1), clouded[1]
    whole = np.nan_to_num(tiles)
    job |= {"data": {}, "model": {"layers": [{"layer": "dense", "units": 2}]}}
    model = daskcnn.train(client, job, data=(whole, labels)).model
    with pytest.warns(UserWarning, match=r"^1 of 60 images have NaN or infinities, and so have their predictions"):
        found = model.predict(tiles)
    assert np.flatnonzero(np.isnan(found).any(axis=1)).tolist() == [7]
    assert model.predict(tiles[:0]).shape == (0, 2)
    assert np.isfinite(np.delete(found, 7, 0)).all()


@pytest.fixture
def small(job: dict[str, Any]) -> dict[str, Any]:
    """A job of a small network on arrays."""
    return job | {"data": {}, "model": {"layers": [{"layer": "dense", "units": 2}]}}


def test_a_refused_resume_leaves_the_run_as_it_was(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray
) -> None:
    run = daskcnn.train(client, small, data=(own, labels)).run
    before = {file: (run / file).read_bytes() for file in ("summary.json", "job.json", "events.jsonl")}
    longer = {"train": {"epochs": 5}}
    with pytest.raises(daskcnn.errors.DataError, match="give its data"):
        daskcnn.train(client, longer, resume=run, data=(own[:40], labels[:40]))
    with pytest.raises(daskcnn.errors.DataError, match=r"another mean or deviation than .*; give its data"):
        daskcnn.train(client, longer, resume=run, data=(own // 2, labels))
    with pytest.raises(
        daskcnn.errors.DataError, match=r"kept only while it went on; give data=\(images, labels\) again"
    ):
        daskcnn.train(client, longer, resume=run)
    assert {file: (run / file).read_bytes() for file in before} == before
    assert daskcnn.train(client, longer, resume=run, data=(own, labels)).summary["epochs"] == 5


def test_auto_starts_goes_on_and_trains_longer(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray
) -> None:
    small["run"] = {**small.get("run", {}), "name": "auto"}
    small["data"] = {"validation": 7}
    first = daskcnn.train(client, small, data=(own, labels), resume="auto")
    assert first.model.job.data.validation == 7
    again = daskcnn.train(client, small, data=(own, labels), resume="auto")
    assert (again.run, again.summary["epochs"]) == (first.run, 2)
    small["train"] = {**small["train"], "epochs": 4}
    longer = daskcnn.train(client, small, data=(own, labels), resume="auto")
    assert (longer.run, longer.summary["epochs"]) == (first.run, 4)


def test_why_a_run_stopped_stands_in_its_summary(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray
) -> None:
    small["train"] = {**small["train"], "epochs": 30}
    stopped = daskcnn.train(client, small, data=(own, labels), on_event=stop_after(1, daskcnn.Stop("good enough")))
    assert (stopped.summary["status"], stopped.summary["reason"]) == ("stopped", "good enough")
    small["train"] |= {"early_stopping": 2, "lr": 1e-30, "epochs": 60}
    small["run"] = {**small["run"], "name": "early"}
    early = daskcnn.train(client, small, data=(own, labels))
    assert early.summary["status"] == "done"
    assert early.summary["epochs"] < 60
    reason = "no better on the validation samples in the last 2 evaluations (train.early_stopping)"
    assert early.summary["reason"] == reason


@pytest.mark.parametrize("first", [{"layer": "relu"}, {"layer": "batchnorm", "scale": False, "shift": False}])
def test_a_network_that_has_nothing_to_train_is_refused(job: dict[str, Any], first: dict[str, Any]) -> None:
    job["model"] = {"layers": [first, {"layer": "pad", "channels": 7}, {"layer": "globalpool"}]}
    with pytest.raises(JobError, match="model: no layer has parameters, so nothing can be trained; add one that has"):
        daskcnn.dry_run(job)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on_event": "x"}, "on_event = 'x': give a function of one argument, the event"),
        ({"job": {"data": {"name": "cifar10"}}}, "data.name = 'cifar10': is a data set of its own"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    client: Client, own: np.ndarray, labels: np.ndarray, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(daskcnn.errors.JobError, match=words):
        daskcnn.train(client, data=(own, labels), **given)


def test_a_layer_that_starts_anew_is_told_of(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [{"layer": "conv", "kernels": 2, "size": 3}, {"layer": "relu"}, {"layer": "globalpool"}]
    small["model"] = {"layers": [*layers, {"layer": "dense", "units": 2}]}
    first = daskcnn.train(client, small, data=(own, labels))
    small["run"] = {**small["run"], "name": "tuned"}
    three = np.array(["a", "b", "c"])[np.arange(60) % 3]
    tuned = daskcnn.train(client, {**small, "model": {}}, data=(own, three), init=first.run)
    said = "; dense1 is new: 3 classes instead of 2"
    assert said in capsys.readouterr().err
    assert any(said in getattr(event, "text", "") for event in RunDirectory.open(tuned.run).events())


def test_a_closed_client_is_refused(small: dict[str, Any], own: np.ndarray, labels: np.ndarray) -> None:
    with LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster:
        closed = Client(cluster, set_as_default=False)
        closed.close()
        with pytest.raises(daskcnn.errors.ClusterError, match="client: it is closed"):
            daskcnn.train(closed, small, data=(own, labels))


def test_a_default_client_that_was_closed_is_none() -> None:
    with (
        dask.config.set(scheduler=None),  # Dask leaves its own where a client is closed within its context
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as closed,
    ):
        closed.close()
        assert given_or_default(None) is None


def test_a_closed_client_is_not_bound_again_by_what_began_in_its_time() -> None:
    first, second = (SimpleNamespace(status="running") for _ in range(2))
    bindings = [bound_to(cast("Client", client)) for client in (first, second)]
    for binding in bindings:
        binding.__enter__()
    first.status = "closed"
    bindings[0].__exit__(None, None, None)
    assert cast("Any", Client.current()) is second
    bindings[1].__exit__(None, None, None)
    with pytest.raises(ValueError, match="as_current"):
        Client.current(allow_global=False)


def test_an_async_function_is_no_listener(client: Client, small: dict[str, Any]) -> None:
    async def look(event: Event) -> None: ...

    with pytest.raises(daskcnn.errors.JobError, match="never awaited"):
        daskcnn.train(client, small, on_event=look)


def test_numbers_of_numpy_are_numbers(
    client: Client, small: dict[str, Any], own: np.ndarray, labels: np.ndarray
) -> None:
    small["train"] = {**small["train"], "epochs": np.int64(1), "lr": np.float32(0.5)}
    assert daskcnn.train(client, small, data=(own, labels)).model.job.train.lr == 0.5


def test_paths_of_python_are_paths(own: np.ndarray, labels: np.ndarray, tmp_path: Path) -> None:
    tables = {"run": {"dir": tmp_path / "runs"}, "data": {"path": tmp_path / "own.zarr"}}
    found = daskcnn.dry_run(tables, data=(own, labels)).job
    assert (found.run.dir, found.data.path) == (f"{tmp_path}/runs", f"{tmp_path}/own.zarr")


def test_no_image_has_no_prediction(trained: Result, images: np.ndarray) -> None:
    assert trained.model.predict(images[:0]).shape == (0, 10)


def test_the_plan_of_a_job_on_arrays(
    small: dict[str, Any], own: np.ndarray, labels: np.ndarray, tmp_path: Path
) -> None:
    planned: Any = str(daskcnn.dry_run(small, data=(own, labels)))
    assert "43 to train on, 5 for validation, 12 to test" in planned
    assert "dense1" in planned
    small["data"] = {**small.get("data", {}), "path": str(tmp_path / "kept.zarr")}
    planned = daskcnn.dry_run(small, data=(own, labels))
    assert f"arrays at {tmp_path}/kept.zarr: 43 to train on" in str(planned)
    assert planned.job.data.path == str(tmp_path / "kept.zarr")
    assert not (tmp_path / "kept.zarr").exists()
    with pytest.raises(daskcnn.errors.DataError, match=r"give \(images, labels\)"):
        daskcnn.dry_run(small, data=own)  # type: ignore[arg-type] # no pair


def test_the_old_name_of_a_dry_run_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"use daskcnn\.dry_run"):
        old = daskcnn.plan
    assert old is daskcnn.dry_run
    assert "plan" not in dir(daskcnn)


def test_a_wrong_job_is_told_before_an_image_is_read(client: Client, own: np.ndarray, labels: np.ndarray) -> None:
    unreadable = da.from_array(own, chunks=20).map_blocks(_fail, dtype=own.dtype, meta=own[:0])
    with pytest.raises(daskcnn.errors.JobError, match=r"train\.epoch: unknown key"):
        daskcnn.train(client, {"train": {"epoch": 3}}, data=(unreadable, labels))


def test_classes_are_named_by_their_numbers(own: np.ndarray) -> None:
    tables = {"train": {"class_weights": {1: 50.0, np.int64(0): 2}}}
    found = daskcnn.dry_run(tables, data=(own, np.arange(len(own)) % 2)).job
    assert found.train.class_weights == {"1": 50.0, "0": 2}


def test_a_cluster_of_one_process_is_not_joined_by_others(client: Client, job: dict[str, Any]) -> None:
    job["cluster"] |= {"workers": {"cpu": 2}, "wait": 0}
    with pytest.raises(ClusterError, match=r"1 more with CPU=1; this cluster is one process's own: start it with more"):
        daskcnn.train(client, job)


def lacking(*_: Any) -> None:
    raise ModuleNotFoundError("No module named 'my_rules'")


def test_the_error_says_why_no_worker_is_usable(
    client: Client, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admission, "calibrate", lacking)
    with pytest.raises(
        ClusterError, match=r"(?s)no worker is usable:.*lacks the module 'my_rules'.* run.imports \(--import\)"
    ):
        daskcnn.train(client, job)
    assert "left out: it or the scheduler lacks the module 'my_rules'" in capsys.readouterr().err


def test_a_worker_that_lacks_a_module_is_named(
    client: Client, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "check_dataset", lacking)
    with pytest.raises(ClusterError, match=r"worker cpu-0 \(inproc://.* lacks the module 'my_rules'.* run.imports"):
        daskcnn.train(client, job)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_client_of_the_parent_is_refused_in_a_forked_process(client: Client, job: dict[str, Any]) -> None:
    """None of the threads that serve it are there: whatever asked it would wait for ever."""

    def train() -> None:
        with pytest.raises(ClusterError, match=r"belongs to the process .* forked from; connect one here"):
            daskcnn.train(client, job)

    forked = get_context("fork").Process(target=train)
    forked.start()
    forked.join(60)
    forked.kill()
    assert forked.exitcode == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_may_start_no_others_starts_no_cluster(job: dict[str, Any]) -> None:
    """As the workers of `multiprocessing.Pool`, and those of Dask, whose tasks may call it."""

    def train() -> None:
        with pytest.raises(ClusterError, match=r"may start no others; give a client, or call it outside of the task"):
            daskcnn.train(job=job)

    forked = get_context("fork").Process(target=train, daemon=True)
    forked.start()
    forked.join(60)
    forked.kill()
    assert forked.exitcode == 0


def _fail(block: Any) -> Any:
    raise AssertionError("an image was read")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"job": 3}, "job = 3: no job; give its tables"),
        ({"job": {"data": 3}, "data": ([], [])}, "data = 3"),
        ({"job": {"model": 3}, "init": "x"}, "model = 3"),
        ({"job": {"train": {"seed": "a"}}, "data": ([], [])}, r"train\.seed = 'a'"),
        ({"data": np.zeros((3, 4, 4, 1))}, r"data: ndarray instead of a pair; give \(images, labels\)"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_arguments_that_are_something_else(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(daskcnn.errors.UserError, match=told):
        daskcnn.train(**arguments)
