"""Arrays of NumPy, Dask, Zarr and xarray become the same data set, shuffled exactly, or are refused with a reason."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import dask
import dask.array as da
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from distributed import Client, LocalCluster

from daskcnn.cluster.run import admission
from daskcnn.datasets import prepare_arrays
from daskcnn.datasets.array_sources import opened
from daskcnn.datasets.names import path_of
from daskcnn.datasets.prepare import prepare_array_files
from daskcnn.datasets.prepare_arrays import prepare
from daskcnn.errors import ClusterError, DataError, Interrupted
from daskcnn.store import Dataset, verify
from daskcnn.store.making import writer

RNG = np.random.default_rng(5)
IMAGES = RNG.integers(0, 4096, (230, 5, 6, 3), dtype=np.uint16)
LABELS = RNG.integers(0, 4, 230)
NAMES = ("field", "forest", "lake", "town")


def _memmap(folder: Path) -> Any:
    np.save(folder / "x.npy", IMAGES)
    return np.load(folder / "x.npy", mmap_mode="r")


def _xarray(folder: Path) -> Any:
    xarray = pytest.importorskip("xarray")
    return xarray.DataArray(IMAGES, dims=("tile", "y", "x", "band"))


def _xarray_of_dask(folder: Path) -> Any:
    return _xarray(folder).chunk({"tile": 50, "y": 2})


def _zarr(folder: Path, **options: Any) -> Any:
    return zarr.create_array(folder / "tiles.zarr", data=IMAGES, chunks=(77, 5, 6, 3), **options)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "numpy": lambda folder: IMAGES,
    "list": lambda folder: IMAGES.tolist() and list(IMAGES),
    "memmap": _memmap,
    "dask": lambda folder: da.from_array(IMAGES, chunks=(60, 2, 6, 2)),
    "dask of unknown length": lambda folder: da.from_array(IMAGES, chunks=(60, 5, 6, 3))[da.ones(230, chunks=60) > 0],
    "zarr": _zarr,
    "zarr in shards": lambda folder: zarr.create_array(
        folder / "s.zarr", data=IMAGES, chunks=(10, 5, 6, 3), shards=(80, 5, 6, 3)
    ),
    "zarr in memory": lambda folder: zarr.create_array({}, data=IMAGES, chunks=(77, 5, 3, 3)),
    "xarray": _xarray,
    "xarray of dask": _xarray_of_dask,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The arrays as a data set, from NumPy."""
    folder = tmp_path_factory.mktemp("reference")
    return prepare(IMAGES, LABELS, folder / "tiles.zarr", classes=NAMES, seed=3)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and buckets of a few samples, so that there are many of each."""
    monkeypatch.setattr("daskcnn.datasets.array_sources.BLOCK_BYTES", 20 * IMAGES[0].nbytes)
    monkeypatch.setattr(prepare_arrays, "BUCKET_BYTES", 25 * IMAGES[0].nbytes)


def test_channels_that_seem_to_come_first_are_told_of(tmp_path: Path) -> None:
    told: list[str] = []
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    prepare(images, np.arange(40) % 2, tmp_path / "a.zarr", warn=told.append)
    assert told == [
        "images of shape (40, 3, 8, 8): taken as 3 rows of 8 channels; if not, give layout='NCHW'",
    ]
    told.clear()
    prepare(images, np.arange(40) % 2, tmp_path / "b.zarr", layout="NCHW", warn=told.append)
    prepare(images.transpose(0, 2, 3, 1), np.arange(40) % 2, tmp_path / "c.zarr", warn=told.append)
    assert told == []


class Tensor:
    """An array of a library with number types of its own. As in PyTorch `values` is a method, of sparse ones."""

    def __init__(self, numbers: Any) -> None:
        self.numbers, self.shape, self.dtype = numbers, numbers.shape, "torch.float32"

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.numbers, dtype)

    def values(self) -> Any:
        raise RuntimeError("values expected sparse tensor layout but got Strided")


def test_tensors_of_other_libraries_are_arrays(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(size=(40, 8, 8, 3)).astype(np.float32)
    how: dict[str, Any] = {"order": "stored", "weights": Tensor(np.ones(40))}
    found = prepare(Tensor(images), Tensor(np.arange(40) % 2), tmp_path / "a.zarr", **how)
    assert (found.dtype, found.shape, found.classes) == (np.dtype("float32"), (8, 8, 3), ("0", "1"))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("source", SOURCES)
def test_whatever_the_images_are_in(tmp_path: Path, reference: Dataset, source: str) -> None:
    images = SOURCES[source](tmp_path)
    found = prepare(images, LABELS, tmp_path / "out.zarr", classes=NAMES, seed=3, name="tiles")
    verify(found)
    assert found.fingerprint == reference.fingerprint
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("source", ["dask", "zarr", "zarr in memory"])
def test_workers_write_the_same(tmp_path: Path, reference: Dataset, client: Client, source: str) -> None:
    labels = da.from_array(LABELS, chunks=100)
    images = SOURCES[source](tmp_path)
    found = prepare(images, labels, tmp_path / "out.zarr", classes=NAMES, seed=3, name="tiles", client=client)
    assert found.fingerprint == reference.fingerprint


def _fatal_once(images: Any, mark: Path, block_info: Any) -> Any:
    """The images; the process ends the first time that it is asked for the second chunk."""
    if block_info[0]["chunk-location"][0] == 1 and not mark.exists():
        mark.touch()
        os._exit(1)
    return images


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_a_worker_that_dies_loses_no_block(tmp_path: Path, reference: Dataset) -> None:
    """Chunks are larger than blocks: blocks wait for a task that was meant for the worker."""
    images = da.from_array(IMAGES, chunks=(60, 5, 6, 3))
    fatal = images.map_blocks(_fatal_once, tmp_path / "died", dtype=images.dtype, meta=images._meta)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        options: dict[str, Any] = {"classes": NAMES, "seed": 3, "name": "tiles", "client": client}
        found = prepare(fatal, LABELS, tmp_path / "out.zarr", **options)
    assert found.fingerprint == reference.fingerprint
    assert (tmp_path / "died").exists()


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Two processes, one of which runs in another folder."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(2)
        client.run(
            os.chdir, str(tmp_path_factory.mktemp("elsewhere")), workers=list(client.scheduler_info()["workers"])[:1]
        )
        yield client


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.usefixtures("small_pieces")
def test_workers_find_an_array_of_a_relative_path(
    tmp_path: Path, reference: Dataset, apart: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zarr takes an array that a process does not see for one of its fill value alone."""
    _zarr(tmp_path)
    monkeypatch.chdir(tmp_path)
    images = zarr.open_array("tiles.zarr", mode="r")
    found = prepare(images, LABELS, "out.zarr", classes=NAMES, seed=3, name="tiles", client=apart)
    assert found.fingerprint == reference.fingerprint


@pytest.mark.cluster
@pytest.mark.slow
def test_a_worker_that_does_not_see_an_array_is_named(tmp_path: Path, apart: Client) -> None:
    images = zarr.create_array("memory://tiles-of-this-process", data=IMAGES, chunks=(77, 5, 6, 3), overwrite=True)
    with pytest.raises(DataError, match=r"tiles-of-this-process: no array there, as worker .*tcp.* sees it; give"):
        prepare(images, LABELS, tmp_path / "out.zarr", client=apart)


def test_a_worker_that_cannot_write_is_named_before_an_image_is_read(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(source: Any, target: str) -> Any:
        return admission.unseen(source, "/nowhere")

    monkeypatch.setattr(admission, "partial", lambda _, *arguments: lambda: unseen(*arguments))
    images = da.from_array(IMAGES, chunks=60).map_blocks(_fail, dtype=IMAGES.dtype, meta=IMAGES[:0])
    words = r"worker cpu-\d \(.*\): cannot write beside the output \(/nowhere\); give an output on storage"
    with pytest.raises(ClusterError, match=words):
        prepare(images, LABELS, tmp_path / "x.zarr", client=client)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_pieces")
def test_a_task_that_ends_after_a_failure_leaves_nothing(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun, failed, ended = writer.write_block, Event(), Event(), Event()

    def late(folder: str, block: int, *arrays: Any) -> None:
        begun.wait(60)
        write(folder, block, *arrays)

    def first(folder: str, *arrays: Any) -> None:
        begun.set()
        failed.wait(60)
        try:
            write(folder, *arrays)
        finally:
            ended.set()

    monkeypatch.setattr(
        writer, "write_block", lambda folder, block, *rest: (late if block else first)(folder, block, *rest)
    )
    images = IMAGES.astype(np.float32)
    images[229] = np.nan
    array = zarr.create_array(tmp_path / "in" / "tiles.zarr", data=images, chunks=(20, 5, 6, 3))
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="sample 229"):
        prepare(array, LABELS, tmp_path / "out" / "x.zarr", client=client)
    failed.set()
    assert ended.wait(60)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    write = writer.write_block

    def interrupted(folder: str, block: int, *arrays: Any) -> None:
        if block == 3:
            signal.raise_signal(signum)
        write(folder, block, *arrays)

    monkeypatch.setattr(writer, "write_block", interrupted)
    (tmp_path / "out").mkdir()
    np.savez(tmp_path / "all.npz", x=IMAGES, y=LABELS)
    places = {"images": f"{tmp_path}/all.npz:x", "labels": f"{tmp_path}/all.npz:y"}
    files: dict[str, Any] = {**places, "weights": None, "classes": None}
    with pytest.raises(Interrupted, match="nothing was written") as caught:
        prepare_array_files(**files, out=str(tmp_path / "out" / "x.zarr"), name=None, say=print)
    assert caught.value.exit_code == 128 + signum
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_the_next_one_removes_what_a_killed_process_has_left(tmp_path: Path) -> None:
    arrays = "numpy.arange(480, dtype='u1').reshape(30, 4, 4, 1), chunks=5), numpy.arange(30) % 2"
    killed = "progress=lambda *_: os.kill(os.getpid(), 9)"
    code = f"import os, numpy, daskcnn, dask.array as da; daskcnn.prepare(da.from_array({arrays}, 'x.zarr', {killed})"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == -signal.SIGKILL
    left = sorted(path.suffix for path in tmp_path.iterdir())
    assert left == [".buckets", ".tmp"]
    prepare(da.from_array(IMAGES, chunks=60), LABELS, tmp_path / "other.zarr")
    assert len(list(tmp_path.iterdir())) == 3, "they are another store's"
    prepare(da.from_array(IMAGES, chunks=60), LABELS, tmp_path / "x.zarr")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.zarr", "x.zarr"]
    assert ".in-use" not in os.listdir(tmp_path / "x.zarr")


def test_what_another_one_is_writing_stays(tmp_path: Path) -> None:
    images, done = da.from_array(IMAGES, chunks=60), list[Dataset]()

    def other_one(stage: str, *_: int) -> None:
        if not done:
            done.append(prepare(images, LABELS, tmp_path / "x.zarr"))

    with pytest.raises(DataError, match="already holds a data set"):
        prepare(images, LABELS, tmp_path / "x.zarr", progress=other_one)
    verify(done[0])
    assert os.listdir(tmp_path) == ["x.zarr"]


def test_the_shuffle_is_exact_and_labels_and_weights_follow(tmp_path: Path) -> None:
    numbers = np.arange(230)
    images = np.broadcast_to(numbers.astype(np.int16)[:, None, None, None], (230, 2, 2, 1))
    weights = 1.0 + numbers
    found = prepare(images, LABELS, tmp_path / "x.zarr", test=50, weights=weights)
    seen = []
    for split in (found.train, found.test):
        pixels, labels = split.read(0, len(split))
        np.testing.assert_array_equal(labels, LABELS[pixels[:, 0, 0, 0]])
        seen += pixels[:, 0, 0, 0].tolist()
    assert sorted(seen) == numbers.tolist()
    assert len(found.test) == 50
    trained = np.array(seen[:180])
    assert trained.tolist() != sorted(trained)
    stored = found.train.weights(np.arange(180))
    assert stored is not None
    np.testing.assert_allclose(stored, weights[trained] / weights[trained].mean(), rtol=1e-6)


def test_numbers_of_numpy_are_numbers(tmp_path: Path, reference: Dataset) -> None:
    how: dict[str, Any] = {"seed": np.int64(3), "chunk": np.int16(reference.manifest.chunk), "test": np.float32(0.2)}
    found = prepare(IMAGES, LABELS, tmp_path / "x.zarr", classes=NAMES, name="tiles", **how)
    assert found.fingerprint == reference.fingerprint


def test_stored_keeps_the_order(tmp_path: Path) -> None:
    found = prepare(IMAGES, LABELS, tmp_path / "x.zarr", order="stored", test=30)
    at = [next(i for i, image in enumerate(IMAGES) if (image == kept).all()) for kept in found.train.read(0, 200)[0]]
    assert at == sorted(at)


def test_images_and_labels_of_their_own_for_testing(tmp_path: Path) -> None:
    tests = (da.from_array(IMAGES[200:], chunks=7), LABELS[200:])
    found = prepare(IMAGES[:200], LABELS[:200], tmp_path / "x.zarr", test=tests, order="stored", classes=NAMES)
    verify(found)
    np.testing.assert_array_equal(found.train.read(0, 200)[0], IMAGES[:200])
    np.testing.assert_array_equal(found.test.read(0, 30)[0], IMAGES[200:])


@pytest.mark.parametrize("dtype", [np.int64, np.float64, object])
def test_labels_for_testing_are_values_as_those_for_training_are(tmp_path: Path, dtype: type) -> None:
    labels: np.ndarray = (10 + LABELS).astype(dtype)
    found = prepare(IMAGES[:200], labels[:200], tmp_path / "x.zarr", test=(IMAGES[200:], labels[200:]), order="stored")
    assert found.classes == ("10", "11", "12", "13")
    np.testing.assert_array_equal(found.test.labels(), LABELS[200:])


def test_a_data_set_is_told_in_a_line(reference: Dataset) -> None:
    told = "184 training and 46 test images of 5x6x3 uint16, 4 classes"
    assert repr(reference) == f"<Dataset 'tiles' at {reference.path}: {told}>"


@pytest.mark.parametrize("source", ["numpy", "dask"])
def test_channels_first_and_grey(tmp_path: Path, reference: Dataset, source: str) -> None:
    first = np.moveaxis(IMAGES, -1, 1)
    images = da.from_array(first, chunks=(60, 2, 3, 6)) if source == "dask" else first
    found = prepare(images, LABELS, tmp_path / "x.zarr", layout="NCHW", classes=NAMES, seed=3, name="tiles")
    assert found.fingerprint == reference.fingerprint
    assert prepare(IMAGES[..., 0], LABELS, tmp_path / "grey.zarr").shape == (5, 6, 1)


@pytest.mark.parametrize(
    ("dtype", "kept"), [("bool", "uint8"), ("int8", "int16"), (">u2", "uint16"), (">f4", "float32")]
)
def test_types_that_fit_into_a_kept_one(tmp_path: Path, dtype: str, kept: str) -> None:
    images = (IMAGES % 2).astype(dtype)
    found = prepare(images, LABELS, tmp_path / "x.zarr", order="stored", test=30)
    assert found.dtype == kept
    assert found.train.read(0, 3)[0].max() == 1


def _with(value: float) -> npt.NDArray[np.float32]:
    images = IMAGES.astype(np.float32)
    images[41, 1, 2, 2] = value
    return images


def _other_than_said(what: str) -> Any:
    """A Dask array whose blocks have another shape, or another type, than it says."""
    change = {"shape": lambda block: block[:, :2], "type": lambda block: block / 3}[what]
    said = np.empty((0,) * 4, IMAGES.dtype)
    return da.from_array(IMAGES, chunks=(60, 5, 6, 3)).map_blocks(change, dtype=IMAGES.dtype, meta=said)


BAD: dict[str, tuple[Callable[[], tuple[Any, Any]], dict[str, Any], str]] = {
    "lengths": (lambda: (IMAGES, LABELS[:-1]), {}, "labels: 229 for 230 images; give one for each image"),
    "one class": (lambda: (IMAGES, LABELS * 0), {}, "labels: train: every sample is of one class .*; give training"),
    "one of two classes": (lambda: (IMAGES, LABELS * 0), {"classes": ["a", "b"]}, "every sample is of one class"),
    "only in test": (
        lambda: (IMAGES, LABELS % 2),
        {"test": (IMAGES, LABELS), "classes": NAMES},
        "the test part has samples of lake, town, the training part has none",
    ),
    "test of another shape": (lambda: (IMAGES, LABELS), {"test": (IMAGES[:, 1:], LABELS)}, "images of one kind"),
    "objects": (lambda: (np.array([1, "x"] * 115, object).reshape(-1, 1, 1, 1), LABELS), {}, "of type object"),
    "complex": (lambda: (IMAGES.astype(complex), LABELS), {}, "of type complex128; convert them to one of uint8"),
    "long integers": (lambda: (IMAGES.astype(np.int64), LABELS), {}, "of type int64; convert them"),
    "a table": (lambda: (IMAGES[:, 0, 0], LABELS), {}, r"an array of shape \(230, 3\)"),
    "empty": (lambda: (IMAGES[:0], LABELS[:0]), {}, r"an array of shape \(0, 5, 6, 3\)"),
    "NaN": (lambda: (_with(np.nan), LABELS), {}, r"images: sample 41, channel 2, pixel \(1, 2\) is nan; set nodata"),
    "NaN in Dask": (lambda: (da.from_array(_with(np.nan), chunks=30), LABELS), {}, "sample 41, channel 2"),
    "infinite": (lambda: (_with(np.inf), LABELS), {"nodata": 0.0}, "sample 41, channel 2, .* is inf; replace it"),
    "test share": (lambda: (IMAGES, LABELS), {"test": 1.5}, "test=1.5: no part of the samples"),
    "test count": (lambda: (IMAGES, LABELS), {"test": 230}, "test=230: no part of the samples"),
    "test of one sample in words": (lambda: (IMAGES, LABELS), {"test": "0.2"}, "test=0.2: no part of the samples"),
    "test of a truth value": (lambda: (IMAGES, LABELS), {"test": True}, "test=True: no part of the samples"),
    "test of three": (lambda: (IMAGES, LABELS), {"test": (IMAGES, LABELS, LABELS)}, r"test: 3 things; give a fraction"),
    "chunk": (lambda: (IMAGES, LABELS), {"chunk": -1}, "chunk=-1: a whole number of 1 or more is needed"),
    "large chunk": (lambda: (IMAGES, LABELS), {"chunk": 10**9}, "chunk=1000000000: a chunk has at most"),
    "order": (lambda: (IMAGES, LABELS), {"order": "random"}, "order='random': unknown; use one of shuffled, stored"),
    "seed": (lambda: (IMAGES, LABELS), {"seed": "x"}, "seed='x': a whole number"),
    "nodata": (lambda: (IMAGES, LABELS), {"nodata": float("nan")}, "nodata=nan: a finite number is needed; give one"),
    "name": (lambda: (IMAGES, LABELS), {"name": "a\x1b[1m"}, "name='a.*: a name has one printable character"),
    "lists of several lengths": (lambda: ([[1, 2], [3]], LABELS), {}, "images: no array"),
    "an array that is not what it says": (
        lambda: (_other_than_said("shape"), LABELS),
        {},
        "samples 0 to 59 are uint16",
    ),
    "an array of another type": (lambda: (_other_than_said("type"), LABELS), {}, "are float64 .* says uint16"),
    "layout": (lambda: (IMAGES, LABELS), {"layout": "CHWN"}, "layout='CHWN'"),
    "a missing name": (
        lambda: (IMAGES, np.array(["a", "b", "a", np.nan] + ["b"] * 226, object)),
        {},
        "labels: sample 3 has nan; give one integer or string for each image",
    ),
    "names and numbers": (lambda: (IMAGES, np.array(["a", 7] * 115, object)), {}, "labels: sample 1 has 7; give one"),
    "dates": (lambda: (IMAGES, LABELS.astype("M8[D]")), {}, r"labels: datetime64\[D\] such as \[datetime.date"),
    "weights' length": (lambda: (IMAGES, LABELS), {"weights": [1.0]}, "weights: 1 for 230 images"),
    "weights' shape": (
        lambda: (IMAGES, LABELS),
        {"weights": np.ones((230, 1))},
        r"weights: float64 of shape \(230, 1\)",
    ),
    "weights' type": (lambda: (IMAGES, LABELS), {"weights": ["x"] * 230}, "weights: <U1 of shape"),
    "weight": (lambda: (IMAGES, LABELS), {"weights": -np.arange(230)}, "weights: sample 1 has -1.0"),
    "plain": (lambda: (IMAGES * 0, LABELS), {}, "the same plain colour"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    make, options, words = BAD[case]
    images, labels = make()
    with pytest.raises(DataError, match=words):
        prepare(images, labels, tmp_path / "x.zarr", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_channel_that_is_the_same_everywhere_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    images = IMAGES * np.array([1, 0, 1], np.uint16)
    prepare(images, LABELS, tmp_path / "a.zarr", warn=told.append)
    assert told == ["a: channel 1 is the same in every training image"]
    prepare(images, LABELS, tmp_path / "b.zarr")
    assert capsys.readouterr().err == "warning: b: channel 1 is the same in every training image\n"


def test_labels_are_judged_before_an_image_is_read(tmp_path: Path) -> None:
    """A large array takes hours to write: what is wrong is told before that."""
    unreadable = da.from_array(IMAGES, chunks=60).map_blocks(_fail, dtype=IMAGES.dtype, meta=IMAGES[:0])
    with pytest.raises(DataError, match="every sample is of one class"):
        prepare(unreadable, LABELS * 0, tmp_path / "x.zarr")
    with pytest.raises(DataError, match="the test part has samples of 3, the training part has none"):
        prepare(unreadable, np.minimum(LABELS, 2), tmp_path / "x.zarr", test=(unreadable, LABELS), classes="0123")


@pytest.mark.parametrize("where", ["here", "workers"])
def test_an_error_of_the_images_storage_is_no_error_of_the_output(tmp_path: Path, client: Client, where: str) -> None:
    images = da.from_array(IMAGES, chunks=(60, 5, 6, 3)).map_blocks(_gone, dtype=IMAGES.dtype, meta=IMAGES[:0])
    words = r"images: samples 120 to 179 cannot be read \(.*No such file or directory: '/data/scene_17\.tif'\); see to"
    with pytest.raises(DataError, match=words):
        prepare(images, LABELS, tmp_path / "x.zarr", client=client if where == "workers" else None)
    assert list(tmp_path.iterdir()) == []


def _gone(block: Any, block_info: Any = None) -> Any:
    if block_info and block_info[None]["chunk-location"][0] == 2:
        raise FileNotFoundError(2, "No such file or directory", "/data/scene_17.tif")
    return block


def test_a_disk_that_is_full_of_blocks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsspec.open", full)
    words = r"\.x\.zarr\..*\.buckets: a block cannot be written \(No space left on device\); choose another place"
    with pytest.raises(DataError, match=words):
        prepare(da.from_array(IMAGES, chunks=60), LABELS, tmp_path / "x.zarr")
    assert list(tmp_path.iterdir()) == []


def _fail(block: Any) -> Any:
    raise AssertionError("an image was read")


@pytest.mark.parametrize("name", ["a/b", "../x", "..", ""])
def test_a_name_that_is_no_file_s_needs_an_output(name: str) -> None:
    assert path_of("tiles") == "data/tiles.zarr"
    with pytest.raises(DataError, match="the name of no file; say where"):
        path_of(name)


def test_an_empty_name_among_the_classes_is_a_slip(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    file = str(tmp_path / "x.npy")
    out = str(tmp_path / "o.zarr")
    with pytest.raises(DataError, match=r"--classes a,,b: a name is empty"):
        prepare_array_files(images=file, labels=file, weights=None, classes="a,,b", out=out, name=None, say=print)


@pytest.mark.parametrize("source", ["dask", "dask of unknown length"])
def test_dask_is_not_asked_for_a_cluster_that_is_gone(tmp_path: Path, source: str) -> None:
    images = SOURCES[source](tmp_path)
    with dask.config.set(scheduler="dask.distributed"):
        assert len(prepare(images, da.from_array(LABELS, chunks=50), tmp_path / "x.zarr").train) == 184


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    prepare(IMAGES, LABELS, tmp_path / "x.zarr")
    with pytest.raises(DataError, match="already holds a data set"):
        prepare(IMAGES, LABELS, tmp_path / "x.zarr")
    _zarr(tmp_path)
    with pytest.raises(
        DataError, match=r"holds no whole data set \(.*\); choose another place \(--out\), or remove it"
    ):
        prepare(IMAGES, LABELS, tmp_path / "tiles.zarr")


def test_a_path_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="File name too long; choose another place"):
        prepare(IMAGES, LABELS, tmp_path / ("x" * 300))


def test_a_url(reference: Dataset) -> None:
    found = prepare(
        da.from_array(IMAGES, chunks=60), LABELS, "memory://daskcnn-arrays/tiles.zarr", classes=NAMES, seed=3
    )
    assert found.fingerprint == reference.fingerprint


def test_array_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", IMAGES)
    np.savez_compressed(tmp_path / "both.npz", x=IMAGES, y=LABELS)
    with opened(str(tmp_path / "x.npy")) as images, opened(f"{tmp_path}/both.npz:x") as packed:
        assert isinstance(images, np.memmap)
        np.testing.assert_array_equal(images, packed)
    with pytest.raises(DataError, match=r"holds 2 arrays \('x', 'y'\); choose one, as"), opened(f"{tmp_path}/both.npz"):
        pass


def _lying_header() -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 4, 4, 3)})
    return file.getvalue() + b"x" * 48


HOSTILE: dict[str, bytes] = {
    "text.npy": b"hello",
    "empty.npy": b"",
    "huge.npy": _lying_header(),
    "objects.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (3,), }"
    + b" " * 60
    + b"\n",
    "text.npz": b"hello",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_array_files_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(HOSTILE[name])
    with pytest.raises(DataError, match=name), opened(str(file)):
        pass


def test_an_archive_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bomb.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"\0" * 1000)
    content = bytearray(file.read_bytes())
    entry = content.index(b"PK\x01\x02") + 24
    content[entry : entry + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"bomb\.npz"), opened(str(file)):
        pass


@pytest.mark.parametrize(
    ("dims", "layout", "remedy"),
    [
        (("time", "band", "y", "x"), "NHWC", "give layout='NCHW'"),
        (("time", "y", "x", "band"), "NCHW", "give layout='NHWC'"),
        (("time", "y", "channel", "x"), "NHWC", "give images.transpose('time', 'y', 'x', 'channel')"),
    ],
)
def test_names_of_axes_that_contradict_the_layout_are_refused(
    dims: tuple[str, ...], layout: Any, remedy: str, tmp_path: Path
) -> None:
    xarray = pytest.importorskip("xarray")
    images = xarray.DataArray(np.zeros((10, 4, 4, 4), np.uint8), dims=dims)
    with pytest.raises(DataError) as caught:
        prepare(images, np.arange(10) % 2, tmp_path / "out.zarr", layout=layout)
    assert str(caught.value).startswith(f"images of ({', '.join(dims)}): layout {layout} has the channels elsewhere")
    assert str(caught.value).endswith(remedy)
    assert not (tmp_path / "out.zarr").exists()


def test_masked_parts_of_float16_are_read_without_a_warning(tmp_path: Path) -> None:
    """Dask puts parts together with NumPy's usual fill value, 1e20."""
    stored = np.arange(80, dtype=np.float16).reshape(10, 2, 2, 2)
    images = da.from_array(np.ma.masked_array(stored, mask=stored % 7 == 0), chunks=(3, 1, 2, 2))
    prepare(images, np.arange(10) % 2, tmp_path / "x.zarr")
