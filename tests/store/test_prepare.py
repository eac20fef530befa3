"""A path holds a whole data set or nothing, whoever writes there, and however often."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.errors import DataError
from daskcnn.store import open_dataset, prepare, verify
from daskcnn.store.files import Files
from daskcnn.store.making import writer
from daskcnn.store.making.writer import Occupied, write
from daskcnn.store.manifest import Order, Source, describe
from tests.store.conftest import BatchesOf, MakeCifarTar


@pytest.fixture
def archive(tmp_path: Path, batches_of: BatchesOf, make_cifar_tar: MakeCifarTar) -> Path:
    return make_cifar_tar(tmp_path / "a.tar.gz", batches_of(20))


def test_shuffled_is_a_permutation_set_by_the_seed(archive: Path, tmp_path: Path) -> None:
    def labelled(order: Order, seed: int) -> list[tuple[bytes, int]]:
        out = tmp_path / f"{order}{seed}.zarr"
        prepare("cifar10", archive=archive, out=out, order=order, seed=seed)
        data = open_dataset(str(out))
        verify(data)
        assert (data.order, data.seed) == (order, seed)
        return [(x.tobytes(), y) for x, y in zip(*data.train.read(0, len(data.train)), strict=True)]

    stored, first, second = labelled("stored", 0), labelled("shuffled", 0), labelled("shuffled", 1)
    assert sorted(stored) == sorted(first) == sorted(second)
    assert len({tuple(stored), tuple(first), tuple(second)}) == 3


def test_the_same_again_is_left_as_it_is(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "d" / "x.zarr"
    assert prepare("cifar10", archive=archive, out=out).startswith(f"wrote {out}")
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert "already holds it" in prepare("cifar10", archive=archive, out=out)
    assert "already holds it" in prepare("cifar10", out=out)  # nothing is downloaded for it either
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert [p.name for p in out.parent.iterdir()] == ["x.zarr"]


def test_the_same_from_folder_and_archive_is_the_same(archive: Path, tmp_path: Path, batches_of: BatchesOf) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, content in batches_of(20).items():
        (folder / name).write_bytes(content)
    prepare("cifar10", archive=archive, out=tmp_path / "x.zarr")
    assert "already holds it" in prepare("cifar10", archive=folder, out=tmp_path / "x.zarr")


@pytest.mark.parametrize("changed", [{"seed": 1}, {"order": "stored"}, {"archive": "other"}])
def test_something_else_is_never_overwritten(
    archive: Path, tmp_path: Path, batches_of: BatchesOf, make_cifar_tar: MakeCifarTar, changed: dict[str, Any]
) -> None:
    out = tmp_path / "x.zarr"
    prepare("cifar10", archive=archive, out=out)
    if "archive" in changed:
        changed = {"archive": make_cifar_tar(tmp_path / "b.tar.gz", batches_of(21))}
    with pytest.raises(DataError, match="already holds a data set"):
        prepare("cifar10", **({"archive": archive, "out": out} | changed))
    verify(open_dataset(str(out)))


def test_a_damaged_one_is_not_called_the_same(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.zarr"
    prepare("cifar10", archive=archive, out=out)
    (out / "test" / "labels" / "c" / "0").write_bytes(b"")
    with pytest.raises(DataError, match=r"test/labels, chunk 0 .* 0 bytes"):
        prepare("cifar10", archive=archive, out=out)


def test_files_and_foreign_folders_are_left_alone(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "notes").write_text("mine")
    with pytest.raises(DataError, match="is a file"):
        prepare("cifar10", archive=archive, out=tmp_path / "f")
    with pytest.raises(DataError, match="is not empty, and holds no whole data set"):
        prepare("cifar10", archive=archive, out=tmp_path / "g")
    assert (tmp_path / "g" / "notes").read_text() == "mine"


def test_an_empty_folder_is_used(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zarr").mkdir()
    assert prepare("cifar10", archive=archive, out=tmp_path / "x.zarr").startswith("wrote")


def test_failing_midway_leaves_nothing(source: Source, tmp_path: Path) -> None:
    def fail_at_test(part: str) -> None:
        if part == "test":
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write(source, describe(source, chunk=50, order="stored", seed=0), str(tmp_path / "x"), fail_at_test)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written .*choose another place \(--out\)"):
        prepare("cifar10", archive=archive, out=archive / "x.zarr")


def test_the_slower_writer_gives_way(source: Source, tmp_path: Path) -> None:
    manifest, out = describe(source, chunk=50, order="stored", seed=0), str(tmp_path / "x")

    def overtake(part: str) -> None:
        if part == "test":
            write(source, manifest, out, lambda part: None)

    with pytest.raises(Occupied):
        write(source, manifest, out, overtake)
    verify(open_dataset(out))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_two_processes_at_once(archive: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from daskcnn.store import prepare; print(prepare('cifar10', archive=sys.argv[1], out=sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(archive), str(tmp_path / "x.zarr")]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert any(s.startswith("wrote") for s in said)
    verify(open_dataset(str(tmp_path / "x.zarr")))
    assert {p.name for p in tmp_path.iterdir()} == {"a.tar.gz", "x.zarr"}


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(source: Source, tmp_path: Path, there: bool) -> None:
    link, folder = tmp_path / "link.zarr", tmp_path / "disk" / "x"
    link.symlink_to(folder)
    if there:
        folder.mkdir(parents=True)
    write(source, describe(source, chunk=50, order="stored", seed=0), str(link), lambda part: None)
    verify(open_dataset(str(link)))
    assert link.is_symlink()
    assert [p.name for p in folder.parent.iterdir()] == ["x"]


def test_by_the_url_of_a_folder(source: Source, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/new/x.zarr"
    write(source, describe(source, chunk=50, order="stored", seed=0), url, lambda part: None)
    verify(open_dataset(url))


def stop(part: str) -> None:
    if part == "test":
        raise RuntimeError


def test_by_url_what_fails_leaves_nothing(source: Source) -> None:
    url = "memory://daskcnn-tests/failed.zarr"
    with pytest.raises(RuntimeError):
        write(source, describe(source, chunk=50, order="stored", seed=0), url, stop)
    assert Files.at(url).is_empty()


@pytest.mark.parametrize("finished", [True, False])
def test_by_url_the_slower_writer_touches_nothing(source: Source, finished: bool) -> None:
    manifest, url = describe(source, chunk=50, order="stored", seed=0), f"memory://daskcnn-tests/two-{finished}.zarr"

    def overtaken(part: str) -> None:
        with pytest.raises(Occupied):
            write(source, manifest, url, stop)

    write(source, manifest, url, lambda part: None if finished else overtaken(part))
    if finished:
        overtaken("train")
    verify(open_dataset(url))
    assert Files.at(url).names(9) == ["test", "train", "zarr.json"]


def test_by_url_the_manifest_comes_last(source: Source, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://daskcnn-tests/half.zarr"
    monkeypatch.setattr(writer, "_clear", lambda out: None)  # a process that is killed clears nothing
    with pytest.raises(RuntimeError):
        write(source, describe(source, chunk=50, order="stored", seed=0), url, stop)
    with pytest.raises(DataError, match="not written to its end"):
        open_dataset(url)
    with pytest.raises(DataError, match="holds no whole data set"):
        prepare("cifar10", archive=archive, out=url)


@pytest.mark.parametrize(
    "url", ["file:///proc/nothing", "simplecache::file://{folder}/x", "zip://{folder}/x.zip", "http://127.0.0.1:9/x"]
)
def test_a_url_that_cannot_be_written(tmp_path: Path, source: Source, url: str) -> None:
    out = url.format(folder=tmp_path)
    with pytest.raises(DataError, match=r".*; .*"):
        write(source, describe(source, chunk=50, order="stored", seed=0), out, lambda part: None)


def test_by_url(archive: Path) -> None:
    url = "memory://daskcnn-tests/whole.zarr"
    assert prepare("cifar10", archive=archive, out=url).startswith("wrote")
    assert "already holds it" in prepare("cifar10", archive=archive, out=url)
    with pytest.raises(DataError, match="give --archive"):
        prepare("cifar10", out="memory://daskcnn-tests/new.zarr")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "imagenet"}, "'imagenet' is unknown; one of: cifar10, cifar100, fashion-mnist, mnist, synthetic"),
        ({"name": "synthetic", "archive": "x.tar.gz"}, "takes no archive"),
        ({"name": "mnist"}, "give --archive FOLDER"),
        ({"name": "mnist", "order": "sorted"}, "order='sorted'"),
        ({"name": "cifar10", "archive": "nowhere.tar.gz"}, "nowhere.tar.gz: No such file"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(**({"out": tmp_path / "x.zarr"} | arguments))
    assert list(tmp_path.iterdir()) == []


def test_one_class_or_plain_images_are_refused_at_import(source: Source) -> None:
    images, labels = source.train
    from dataclasses import replace

    with pytest.raises(DataError, match="every sample is of one class"):
        describe(replace(source, train=(images, labels * 0)), chunk=50, order="stored", seed=0)
    with pytest.raises(DataError, match="same plain colour"):
        describe(replace(source, train=(np.full_like(images, 7), labels)), chunk=50, order="stored", seed=0)


def test_progress_and_warnings_are_passed_on(archive: Path, tmp_path: Path) -> None:
    stages, warnings, out = list[str](), list[str](), tmp_path / "x.zarr"
    prepare(
        "cifar10",
        archive=archive,
        out=out,
        progress=lambda stage, done, total: stages.append(stage),
        warn=warnings.append,
    )
    written = [f"write {part} to {out}" for part in ("train", "test")]
    assert list(dict.fromkeys(stages)) == ["checksum", "unpack", *written]
    (warning,) = warnings
    assert "not the official CIFAR-10 archive: SHA-256" in warning
