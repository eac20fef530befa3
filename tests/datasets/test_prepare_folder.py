"""A folder of images becomes a data set: what is in it, what is refused, and what is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from distributed import Client
from PIL import Image

import daskcnn
from daskcnn.cli import main
from daskcnn.cluster.run import admission
from daskcnn.datasets.prepare_folder import Request, prepare, prepare_folder
from daskcnn.errors import ClusterError, DataError, UserError
from daskcnn.job.resolve import resolve
from daskcnn.store import open_dataset, verify
from daskcnn.store.dataset import Dataset
from daskcnn.store.files import Files
from daskcnn.store.image_facts import Facts
from daskcnn.store.making import folder_plan
from daskcnn.store.making.folder_plan import Appearance
from daskcnn.store.making.images import decode, read_file
from daskcnn.trained.place import find_network
from daskcnn.trained.predict import pixels, predict
from tests.special_files import special
from tests.tiny_runs import random_state, tiny_job, tiny_run

SIZE = (6, 4)
BAD = {
    "text": b"not an image",
    "empty": b"",
    "bomb": b"BM" + (54).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little") + (40).to_bytes(4, "little")
    + (60_000).to_bytes(4, "little") * 2 + b"\1\0\x18\0" + bytes(24),
}  # fmt: skip


def picture(path: Path, seed: int, kind: str = "RGB", **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (9, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(kind).save(path, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty images of three classes: of several formats, modes and orientations."""
    turned = Image.Exif()
    turned[0x0112] = 6
    for i in range(20):
        picture(tmp_path / f"in/rose/{i}.jpg", i, exif=turned if i % 3 == 0 else b"")
        picture(tmp_path / f"in/daisy/{i}.png", 100 + i, ("RGB", "L", "RGBA", "P")[i % 4])
        picture(tmp_path / f"in/tulip/deep/{i}.webp", 200 + i, lossless=True)
    return tmp_path / "in"


def everything(dataset: Dataset) -> list[tuple[npt.NDArray[Any], int]]:
    parts = [split.gather(np.arange(len(split))) for split in (dataset.train, dataset.test)]
    return [(image, int(label)) for images, labels in parts for image, label in zip(images, labels, strict=True)]


def left_behind(place: Path) -> list[str]:
    return sorted(set(os.listdir(place)) - {"in"})


# --- what is in it ---


@pytest.mark.parametrize("grey", [False, True])
def test_every_image_is_there_as_it_is_looked_at(folder: Path, tmp_path: Path, grey: bool) -> None:
    dataset = prepare_folder(folder, tmp_path / "out.zarr", size=SIZE, grey=grey, fit="pad")
    verify(dataset)
    assert (dataset.name, dataset.classes) == ("out", ("daisy", "rose", "tulip"))
    assert dataset.shape == (6, 4, 1 if grey else 3)
    assert Facts.from_dict(Facts.of(dataset).to_dict()).fit == dataset.fit == "pad"
    assert (dataset.manifest.train.class_counts, dataset.manifest.test.class_counts) == ((16,) * 3, (4,) * 3)
    found = sorted((image.tobytes(), label) for image, label in everything(dataset))
    expected = [
        (decode(read_file(file), name="x", size=SIZE, fit="pad", grey=grey).tobytes(), label)
        for label, name in enumerate(dataset.classes)
        for file in (folder / name).rglob("*.*")
    ]
    assert found == sorted(expected)
    assert left_behind(tmp_path) == ["out.zarr"]


def test_the_same_folder_gives_the_same_data_set(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy" / "in")
    stores = [tmp_path / "a" / "x.zarr", tmp_path / "b" / "x.zarr", tmp_path / "c" / "x.zarr"]
    sources, seeds = (folder, tmp_path / "copy" / "in", folder), (0, 0, 1)
    prints = [
        prepare_folder(source, store, size=SIZE, seed=seed).fingerprint
        for source, store, seed in zip(sources, stores, seeds, strict=True)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_numbers_of_numpy_are_numbers_here_too(folder: Path, tmp_path: Path) -> None:
    size, seed = tuple(np.array(SIZE)), np.int64(7)
    found = prepare_folder(folder, tmp_path / "a" / "x.zarr", size=size, seed=seed)  # type: ignore[arg-type]
    assert found.manifest == prepare_folder(folder, tmp_path / "b" / "x.zarr", size=SIZE, seed=7).manifest
    assert prepare_folder(folder, tmp_path / "c" / "x.zarr", size=4).shape[:2] == (4, 4)


def test_another_file_of_the_same_pixels_is_another_origin(folder: Path, tmp_path: Path) -> None:
    before = prepare_folder(folder, tmp_path / "a.zarr", size=SIZE, name="x")
    with open(folder / "daisy" / "0.png", "ab") as file:
        file.write(b"more")
    after = prepare_folder(folder, tmp_path / "b.zarr", size=SIZE, name="x")
    assert before.manifest.content() == after.manifest.content()
    assert before.manifest.sources.keys() == after.manifest.sources.keys() == {"images"}
    assert before.fingerprint != after.fingerprint


def test_train_and_test_of_the_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "both" / "train")
    shutil.copytree(folder / "rose", tmp_path / "both" / "test" / "rose")
    dataset = prepare_folder(tmp_path / "both", tmp_path / "out.zarr", size=SIZE)
    assert dataset.manifest.train.class_counts == (20, 20, 20)
    assert dataset.manifest.test.class_counts == (0, 20, 0)
    with pytest.raises(DataError, match=r"test=0\.5: .* has train/ and test/ of its own; leave it out"):
        prepare_folder(tmp_path / "both", tmp_path / "other.zarr", size=SIZE, test=0.5)


def test_a_store_at_a_url(folder: Path, tmp_path: Path) -> None:
    local = prepare_folder(folder, tmp_path / "x.zarr", size=SIZE)
    remote = prepare_folder(folder, "memory://folder/x.zarr", size=SIZE)
    assert remote.fingerprint == local.fingerprint


def deep_images(folder: Path, top: float, dtype: str, **step: float) -> Path:
    """Ten grey images of each of two classes, whose largest numbers differ."""
    for i in range(20):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        values = np.linspace(0, top + step.get("step", 0) * i, 24).reshape(SIZE).astype(dtype)
        Image.fromarray(values).save(folder / "ab"[i % 2] / f"{i:02}.tif")
    return folder


@pytest.mark.parametrize(("dtype", "top", "step"), [("float32", 0.9, 0.02), ("int32", 100_000, 1000)])
def test_numbers_of_a_folder_have_one_meaning_or_are_refused(
    tmp_path: Path, dtype: str, top: float, step: float
) -> None:
    place, high = deep_images(tmp_path / "in", top, dtype, step=step), 2 * top
    with pytest.raises(DataError, match=r"20 of 20 images cannot be used(?s:.*)a/00.tif: .* from 0 to .*--value-range"):
        prepare_folder(place, tmp_path / "out.zarr", size=SIZE, grey=True)
    dataset = prepare_folder(place, tmp_path / "out.zarr", size=SIZE, grey=True, value_range=(0, high), order="stored")
    largest = sorted(int(image.max()) for image, _ in everything(dataset))
    assert largest == pytest.approx([(top + step * i) / high * 255 for i in range(20)], abs=0.51)
    facts = Facts.from_dict(Facts.of(open_dataset(str(tmp_path / "out.zarr"))).to_dict())
    assert facts.value_range == (0, high)
    assert pixels(str(place / "b/19.tif"), facts, print).max() == largest[-1]
    with pytest.raises(DataError, match=r"no --value-range LOW,HIGH .*; prepare the images to train on with one"):
        pixels(str(place / "b/19.tif"), replace(facts, value_range=None), print)


def test_twelve_bits_in_sixteen_are_told_of(tmp_path: Path) -> None:
    place, told = deep_images(tmp_path / "in", 4095, "uint16"), list[str]()
    dark = prepare_folder(place, tmp_path / "dark.zarr", size=SIZE, grey=True, warn=told.append)
    assert max(int(image.max()) for image, _ in everything(dark)) == 16
    assert "20 images of 16 bits use levels 0 to 16 of 255, as 65,535 would be white; state" in told[0]
    whole = prepare_folder(place, tmp_path / "w.zarr", size=SIZE, grey=True, warn=pytest.fail, value_range=(0, 4095))
    assert max(int(image.max()) for image, _ in everything(whole)) == 255


@pytest.mark.parametrize("given", [(1, 0), (0, 0), (0, float("nan")), (0, 1, 2), "01"])
def test_a_range_that_is_none_is_refused(folder: Path, tmp_path: Path, given: Any) -> None:
    with pytest.raises(DataError, match=r"value range .*: two numbers are needed, the lower one first"):
        prepare_folder(folder, tmp_path / "out.zarr", size=SIZE, value_range=given)


def test_predict_looks_at_an_image_as_training_did(folder: Path, tmp_path: Path) -> None:
    file = folder / "rose" / "0.jpg"
    data = prepare_folder(folder, tmp_path / "x.zarr", size=(8, 8), fit="crop", name="synthetic")
    raw = tiny_job(data.path, model={"layers": [{"layer": "dense", "units": 3}]}, data={"validation": 5})
    run = tiny_run(tmp_path, raw, random_state(resolve(raw)))
    told = predict(str(run), [str(file)], checkpoint="last", top=3, say=lambda _: None)
    network = find_network(str(run), "last", lambda _: None).classifier
    seen = decode(read_file(file), name="x", size=(8, 8), fit="crop")
    expected = network.predict(seen[None])
    chances = {entry["class"]: entry["probability"] for entry in told[0]["classes"]}
    assert [chances[name] for name in data.classes] == pytest.approx(expected[0].tolist())


# --- bad images ---


@pytest.fixture
def spoilt(folder: Path, tmp_path: Path) -> Path:
    """The folder with bad images of each kind between the good ones."""
    shutil.copytree(folder, tmp_path / "in" / ".." / "spoilt")
    place = tmp_path / "spoilt"
    for index, (kind, content) in enumerate(BAD.items()):
        (place / "rose" / f"{index}0-{kind}.png").write_bytes(content)
    whole = (place / "daisy" / "1.png").read_bytes()
    (place / "daisy" / "10-cut.png").write_bytes(whole[: len(whole) // 2])
    (place / "daisy" / "gone.png").symlink_to("nowhere")
    (place / "daisy" / "circle.png").symlink_to("circle.png")
    for kind in ("pipe", "socket", "device"):
        special(place / "tulip" / f"{kind}.png", kind)
    (place / "tulip" / "folder.png").mkdir()
    os.close(os.open(os.fsencode(place) + b"/tulip/b\xe4d\x1b[2J.jpg", os.O_CREAT))
    (place / "rose" / "Thumbs.db").write_bytes(b"x")
    (place / "rose" / "notes.txt").write_bytes(b"x")
    return place


def test_bad_images_are_listed_and_refused(spoilt: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepare_folder(spoilt, tmp_path / "out.zarr", size=SIZE)
    head, *lines = str(caught.value).splitlines()
    remedy = "mend or remove them, or leave them out with --skip-bad (skip_bad=True)"
    assert head == f"{spoilt}: 10 of 70 images cannot be used; {remedy}:"
    reasons = dict(line.strip().split(": ", 1) for line in lines)
    assert reasons.keys() == {
        *(f"rose/{index}0-{kind}.png" for index, kind in enumerate(BAD)),
        "daisy/10-cut.png", "daisy/gone.png", "daisy/circle.png", "tulip/pipe.png", "tulip/socket.png",
        "tulip/device.png",
        "tulip/b\\udce4d\\x1b[2J.jpg",
    }  # fmt: skip
    assert reasons["tulip/pipe.png"] == "a named pipe, not a regular file"
    assert "too large for an image to look at" in reasons["rose/20-bomb.png"]
    assert reasons["daisy/gone.png"] == "a link to a file that is not there"
    assert left_behind(tmp_path) == ["spoilt"]


@pytest.mark.parametrize("order", ["shuffled", "stored"])
@pytest.mark.parametrize("kind", ["local", "url"])
def test_without_its_bad_images_it_is_the_folder_without_them(
    folder: Path, spoilt: Path, tmp_path: Path, order: Any, kind: str
) -> None:
    good = prepare_folder(folder, tmp_path / "good" / "x.zarr", size=SIZE, order=order)
    out = str(tmp_path / "skipped" / "x.zarr") if kind == "local" else f"memory://{order}/x.zarr"
    skipped = prepare_folder(spoilt, out, size=SIZE, order=order, skip_bad=True)
    verify(skipped)
    assert skipped.manifest == good.manifest
    if kind == "local":
        assert os.listdir(tmp_path / "skipped") == ["x.zarr"]


def test_what_is_left_out_is_told(spoilt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From Python too: by a function of the user's, or else on stderr."""
    told: list[str] = []
    prepare_folder(spoilt, tmp_path / "a.zarr", size=SIZE, skip_bad=True, warn=told.append)
    assert capsys.readouterr().err == ""
    assert any("10 of 70 images cannot be used and are left out:" in warning for warning in told)
    prepare_folder(spoilt, tmp_path / "b.zarr", size=SIZE, skip_bad=True)
    assert capsys.readouterr().err.count("warning: ") == len(told)


def test_of_very_many_bad_images_fifty_are_shown(folder: Path, tmp_path: Path) -> None:
    for i in range(120):
        (folder / "rose" / f"bad-{i:03}.jpg").touch()
    with pytest.raises(DataError) as caught:
        prepare_folder(folder, tmp_path / "out.zarr", size=SIZE)
    lines = str(caught.value).splitlines()
    assert "120 of 180 images" in lines[0]
    assert len(lines) == 52
    assert lines[-1] == "  … and 70 more"


def test_a_class_of_bad_images_only_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "rose").iterdir():
        file.write_bytes(b"x")
    with pytest.raises(DataError, match="class 'rose': none of its images can be read"):
        prepare_folder(folder, tmp_path / "out.zarr", size=SIZE, skip_bad=True)
    assert left_behind(tmp_path) == []


def test_images_that_are_all_the_same_are_refused(tmp_path: Path) -> None:
    for name in ("a/1", "a/2", "b/1", "b/2"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "in" / f"{name}.png")
    with pytest.raises(DataError, match="every training image is the same plain colour"):
        prepare_folder(tmp_path / "in", tmp_path / "out.zarr", size=SIZE)
    assert left_behind(tmp_path) == []


# --- wrong requests, and what is left behind ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": (0, 4)}, "size 0x4: an image has 1 to"),
        ({"size": (1 << 20, 1 << 20)}, "size 1048576x1048576: an image has 1 to"),
        ({"size": "64x64"}, "size='64x64': whole numbers of pixels are needed; give (height, width), or one number"),
        ({"size": (4.0, 4)}, "size=(4.0, 4): whole numbers of pixels are needed"),
        ({"test": 1.0}, "test=1.0: a share between 0 and 1 is needed"),
        ({"test": "0.2"}, "test='0.2': a share between 0 and 1 is needed"),
        ({"seed": 1.5}, "seed=1.5: a whole number of 0 or more is needed"),
        ({"seed": "a"}, "seed='a': a whole number of 0 or more is needed"),
        ({"seed": -1}, "seed=-1: a whole number of 0 or more is needed"),
        ({"name": "a\nb"}, "name='a\\nb': a name has one printable character"),
    ],
)
def test_wrong_requests(folder: Path, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        prepare_folder(folder, tmp_path / "out.zarr", **{"size": SIZE, **options})
    assert words in str(caught.value)


def test_an_output_that_is_taken_is_refused_before_anything_is_read(tmp_path: Path, folder: Path) -> None:
    store = tmp_path / "out.zarr"
    prepare_folder(folder, store, size=SIZE)
    with pytest.raises(DataError, match="already holds a data set"):
        prepare_folder(tmp_path / "nowhere", store, size=SIZE)


def test_an_output_that_is_taken_meanwhile_stays(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, decoded = tmp_path / "out.zarr", folder_plan.decode_piece

    def other(job: Any, **options: Any) -> Any:
        store.mkdir(exist_ok=True)
        (store / "mine").touch()
        return decoded(job, **options)

    monkeypatch.setattr("daskcnn.store.making.folder_plan.decode_piece", other)
    with pytest.raises(DataError, match="is not empty, and holds no whole data set"):
        prepare_folder(folder, store, size=SIZE)
    assert left_behind(tmp_path) == ["out.zarr"]
    assert os.listdir(store) == ["mine"]


@pytest.mark.parametrize("kind", ["local", "url"])
def test_a_signal_leaves_nothing_behind(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    decoded = folder_plan.decode_piece

    def interrupted(job: Any, **options: Any) -> Any:
        if job.piece.index == 3:
            signal.raise_signal(signal.SIGINT)
        return decoded(job, **options)

    monkeypatch.setattr("daskcnn.store.making.folder_plan.decode_piece", interrupted)
    out = str(tmp_path / "out.zarr") if kind == "local" else "memory://interrupted/x.zarr"
    with pytest.raises(UserError, match=r"interrupted by Ctrl-C \(SIGINT\); nothing was written") as caught:
        prepare(Request(str(folder), out, Appearance(SIZE)), say=print, warn=print, quiet=True, handle_signals=True)
    assert caught.value.exit_code == 130
    assert left_behind(tmp_path) == []
    assert kind == "local" or Files.at(out).is_empty()


def test_a_full_disk_is_told(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("daskcnn.store.making.folder_plan.decode_piece", full)
    with pytest.raises(DataError, match=r"out\.zarr: cannot be written \(No space left on device\); choose another"):
        prepare_folder(folder, tmp_path / "out.zarr", size=SIZE)
    assert left_behind(tmp_path) == []


# --- on workers ---


def test_workers_make_the_same_data_set(folder: Path, spoilt: Path, tmp_path: Path, client: Client) -> None:
    here = prepare_folder(folder, tmp_path / "a" / "x.zarr", size=SIZE, client=None)
    there = prepare_folder(spoilt, tmp_path / "b" / "x.zarr", size=SIZE, client=client, skip_bad=True)
    assert there.manifest == here.manifest


def test_a_worker_that_cannot_read_the_folder_is_named(
    folder: Path, tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(source: Path, target: str) -> Any:
        return admission.unseen(Path("/nowhere"), target)

    monkeypatch.setattr(admission, "partial", lambda _, *arguments: lambda: unseen(*arguments))
    with pytest.raises(ClusterError, match=r"worker cpu-\d \(.*\): cannot read /nowhere .*; give a folder on storage"):
        prepare_folder(folder, tmp_path / "out.zarr", size=SIZE, client=client)
    assert left_behind(tmp_path) == []


def test_what_a_worker_does_not_see(tmp_path: Path) -> None:
    assert admission.unseen(tmp_path, str(tmp_path)) is None
    assert admission.unseen(tmp_path, "s3://bucket/x") is None
    reason, remedy = admission.unseen(tmp_path / "nowhere", str(tmp_path)) or ("", "")
    assert "cannot read" in reason
    assert remedy == admission.READ
    assert (admission.unseen(tmp_path, str(tmp_path / "nowhere")) or ("", ""))[1] == admission.WRITE


def test_a_folder_that_goes_is_not_taken_for_bad_images(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isdir = os.path.isdir
    monkeypatch.setattr(os.path, "isdir", lambda path: path != folder and isdir(path))
    with pytest.raises(DataError, match="no such folder on this machine"):
        prepare_folder(folder, tmp_path / "out.zarr", size=SIZE, skip_bad=True)


# --- as a command ---


def daskcnn_(*args: object) -> Any:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = daskcnn_("data", "prepare", "folder", "in", "--size", "6x4", "--grey", "--fit", "stretch", "--test", "0.5")
    assert result.exit_code == 0, result.output
    assert "wrote data/in.zarr: in, 30 training and 30 test images of 6x4x1, 3 classes" in result.stdout
    assert "decode images: 100 %" in result.stderr
    assert open_dataset("data/in.zarr").shape == (6, 4, 1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Missing option '--size'"),
        (["--size", "big"], "'big': give height and width, such as 64x64"),
        (["--size", "0x5"], "'0x5': give height and width"),
        (["--size", "5x5x5"], "give height and width"),
        (["--size", "8", "--fit", "squeeze"], "squeeze"),
        (["--size", "8", "--test", "2"], "test=2.0: a share between 0 and 1"),
        (["--size", "8", "--workers", "cpu=none"], "cluster.workers"),
        (["--size", "8", "--wait", "soon"], "cluster.wait"),
        (["--size", "8", "--scheduler", "nothing://x", "--wait", "0"], "scheduler nothing://x: not an address"),
    ],
)
def test_wrong_commands(folder: Path, tmp_path: Path, args: list[str], words: str) -> None:
    result = daskcnn_("data", "prepare", "folder", folder, "--out", tmp_path / "out.zarr", *args)
    assert result.exit_code in (2, 3)
    assert words in result.stderr
    assert "internal error" not in result.stderr
    assert left_behind(tmp_path) == []


def test_from_python_it_is_found_under_its_name() -> None:
    assert daskcnn.prepare_folder is prepare_folder
    assert "prepare_folder" in daskcnn.__all__


@pytest.mark.cluster
@pytest.mark.slow
def test_a_local_cluster_prepares_and_ctrl_c_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from daskcnn.cli import main; main()", "data", "prepare", "folder", str(folder)]
    command += ["--size", "6x4", "--workers", "cpu=2", "--out"]
    done = subprocess.run(
        [*command, str(tmp_path / "a.zarr")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "48 training and 12 test images" in done.stdout
    with subprocess.Popen(
        [*command, str(tmp_path / "b.zarr")], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while left_behind(tmp_path) == ["a.zarr"]:  # until there is a draft: the cluster is being started
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted by Ctrl-C (SIGINT); nothing was written" in told
    assert "Traceback" not in told
    assert left_behind(tmp_path) == ["a.zarr"]
