"""What each importer makes of good files, and what it says of bad ones."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import Images
from daskcnn.store.datasets import DATASETS
from daskcnn.store.datasets.archive import Download
from daskcnn.store.datasets.synthetic import gratings
from daskcnn.store.manifest import Source
from tests.store.conftest import BatchesOf, MakeCifarTar, MakeTar


def load(name: str, archive: Path | None) -> Source:
    return DATASETS[name].load(archive, lambda *_: None, lambda _: None)


# --- CIFAR-10 ---


@pytest.fixture(params=["archive", "folder", "folder around it"])
def cifar(
    request: pytest.FixtureRequest, tmp_path: Path, make_cifar_tar: MakeCifarTar
) -> Callable[[dict[str, bytes]], Path]:
    """Writes the files in one of the accepted forms, and gives the path to import."""

    def make(files: dict[str, bytes]) -> Path:
        if request.param == "archive":
            return make_cifar_tar(tmp_path / "c.tar.gz", files)
        folder = tmp_path / "cifar-10-batches-bin"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return folder if request.param == "folder" else tmp_path

    return make


def test_cifar10_records_become_images(cifar: Callable[[dict[str, bytes]], Path], batches_of: BatchesOf) -> None:
    files = batches_of(20)
    source = load("cifar10", cifar(files))
    assert source.train[0].shape == (100, 32, 32, 3)
    record = np.frombuffer(files["data_batch_2.bin"], np.uint8).reshape(20, 3073)[3]
    np.testing.assert_array_equal(source.train[0][23, 5, 7], record[[1 + 5 * 32 + 7 + 1024 * c for c in range(3)]])
    assert source.train[1][23] == record[0]
    assert source.classes[:2] == ("airplane", "automobile")
    assert set(source.sources) >= set(files)


def test_cifar10_the_official_archive_may_hold_a_readme(
    tmp_path: Path, batches_of: BatchesOf, make_cifar_tar: MakeCifarTar
) -> None:
    load("cifar10", make_cifar_tar(tmp_path / "c.tar.gz", batches_of(2) | {"readme.html": b"<html>"}))


def _with(
    name: str, change: Callable[[bytearray], bytes | bytearray]
) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    def edit(files: dict[str, bytes]) -> dict[str, bytes]:
        content = bytearray(files[name])
        return files | {name: bytes(change(content))}

    return edit


def _label(content: bytearray) -> bytearray:
    content[3 * 3073] = 10
    return content


BAD_CIFAR = {
    "truncated": (
        _with("data_batch_4.bin", lambda c: c[:-5]),
        "data_batch_4.bin, record 19: 3068 bytes instead of 3073",
    ),
    "empty": (_with("test_batch.bin", lambda c: b""), "test_batch.bin, record 0"),
    "label": (_with("data_batch_1.bin", _label), "data_batch_1.bin, record 3: label 10"),
    "classes": (_with("batches.meta.txt", lambda c: c[:20]), "names 2 classes"),
    "missing": (lambda f: {k: v for k, v in f.items() if k != "data_batch_3.bin"}, "data_batch_3.bin missing"),
    "too many": (_with("data_batch_5.bin", lambda c: bytes(10_001 * 3073)), "data_batch_5.bin"),
}


@pytest.mark.parametrize("kind", BAD_CIFAR)
def test_cifar10_bad_content_is_named(
    cifar: Callable[[dict[str, bytes]], Path], batches_of: BatchesOf, kind: str
) -> None:
    change, message = BAD_CIFAR[kind]
    with pytest.raises(DataError) as caught:
        load("cifar10", cifar(change(batches_of(20))))
    assert message in str(caught.value)


def test_cifar10_in_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing; give the official archive"):
        load("cifar10", tmp_path)


# --- CIFAR-100 ---

FINE, COARSE = "fine_label_names.txt", "coarse_label_names.txt"


@pytest.fixture
def cifar100_files() -> dict[str, bytes]:
    """An archive's files: 30 records to train, 10 to test; a record's fine label is its number times 3."""
    rng, files = np.random.default_rng(0), {}
    for name, count in (("train.bin", 30), ("test.bin", 10)):
        records = rng.integers(0, 256, (count, 3074), dtype=np.uint8)
        records[:, 0], records[:, 1] = np.arange(count) % 20, 3 * np.arange(count)
        files[name] = records.tobytes()
    names = {FINE: "\n".join(f"class_{i}" for i in range(100)), COARSE: "\n".join(f"group_{i}" for i in range(20))}
    return files | {name: text.encode() for name, text in names.items()}


def cifar100_folder(tmp_path: Path, files: dict[str, bytes]) -> Path:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_cifar100_has_its_fine_labels(
    tmp_path: Path, cifar100_files: dict[str, bytes], make_tar: MakeTar, packed: bool
) -> None:
    archive, said = tmp_path / "c.tar.gz", list[str]()
    if packed:
        make_tar(archive, [(f"cifar-100-binary/{name}", content) for name, content in cifar100_files.items()])
    else:
        archive = cifar100_folder(tmp_path, cifar100_files)
    source = DATASETS["cifar100"].load(archive, lambda *_: None, said.append)
    assert (source.train[0].shape, source.test[0].shape) == ((30, 32, 32, 3), (10, 32, 32, 3))
    np.testing.assert_array_equal(source.train[1], 3 * np.arange(30))
    record = np.frombuffer(cifar100_files["train.bin"], np.uint8).reshape(30, 3074)[7]
    np.testing.assert_array_equal(source.train[0][7, 5, 9], record[[2 + 5 * 32 + 9 + 1024 * c for c in range(3)]])
    assert (source.name, len(source.classes), source.classes[99]) == ("cifar100", 100, "class_99")
    assert ["not the official CIFAR-100 archive" in line for line in said] == ([True] if packed else [])


def _byte(place: int, value: int) -> Callable[[bytearray], bytearray]:
    def edit(content: bytearray) -> bytearray:
        content[4 * 3074 + place] = value
        return content

    return edit


BAD_CIFAR100 = {
    "truncated": (_with("train.bin", lambda c: c[:-5]), "train.bin, record 29: 3069 bytes instead of 3074"),
    "cifar10's records": (_with("test.bin", lambda c: c[: 10 * 3073]), "test.bin, record 9: 3064 bytes"),
    "empty": (_with("test.bin", lambda c: b""), "test.bin, record 0"),
    "fine label": (_with("train.bin", _byte(1, 100)), "train.bin, record 4: label 100, labels are 0 to 99"),
    "coarse label": (_with("train.bin", _byte(0, 20)), "train.bin, record 4: coarse label 20, coarse labels are 0 to"),
    "classes": (_with(FINE, lambda c: c[:20]), f"{FINE} names 3 classes instead of 100"),
    "names without end": (_with(FINE, lambda c: b"a " * 5000), FINE),
    "missing": (lambda f: {k: v for k, v in f.items() if k != "test.bin"}, "test.bin missing"),
    "too many": (_with("test.bin", lambda c: bytes(10_001 * 3074)), "test.bin"),
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", BAD_CIFAR100)
def test_cifar100_bad_content_is_named(
    tmp_path: Path, cifar100_files: dict[str, bytes], make_tar: MakeTar, kind: str, packed: bool
) -> None:
    change, message = BAD_CIFAR100[kind]
    files = change(cifar100_files)
    if packed:
        archive = make_tar(tmp_path / "c.tar.gz", [(f"cifar-100-binary/{n}", c) for n, c in files.items()])
    else:
        archive = cifar100_folder(tmp_path, files)
    with pytest.raises(DataError) as caught:
        load("cifar100", archive)
    assert message in str(caught.value)


def test_cifar10s_archive_is_not_cifar100s(tmp_path: Path, batches_of: BatchesOf, make_cifar_tar: MakeCifarTar) -> None:
    with pytest.raises(DataError, match="'cifar-10-batches-bin' is not a plain file"):
        load("cifar100", make_cifar_tar(tmp_path / "c.tar.gz", batches_of(2)))


# --- MNIST ---


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def digits(tmp_path: Path) -> tuple[Path, dict[str, Images]]:
    """A folder of four IDX files, and what is in them."""
    rng, arrays = np.random.default_rng(0), {}
    for name, count in (("train", 30), ("t10k", 10)):
        arrays[f"{name}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"{name}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        (tmp_path / name).write_bytes(idx(array))
    return tmp_path, arrays


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_files_gzip_or_not(digits: tuple[Path, dict[str, Images]], packed: bool) -> None:
    folder, arrays = digits
    for name in arrays if packed else ():
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    source = load("mnist", folder)
    np.testing.assert_array_equal(source.train[0][..., 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(source.test[1], arrays["t10k-labels-idx1-ubyte"])
    assert source.train[0].shape == (30, 28, 28, 1)


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
BAD_MNIST: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "magic": (IMAGES, lambda c: b"\x00\x00\x0d\x03" + c[4:], "starts with 00000d03 instead of 00000803"),
    "empty": (IMAGES, lambda c: b"", "starts with  instead of"),
    "header cut": (IMAGES, lambda c: c[:10], "10 bytes, less than its header's 16"),
    "labels' header cut": (LABELS, lambda c: c[:4], "4 bytes, less than its header's 8"),
    "truncated": (IMAGES, lambda c: c[:-1], "truncated"),
    "longer": (LABELS, lambda c: c + b"\x00", "39 bytes instead of 38"),
    "size": (IMAGES, lambda c: c[:8] + struct.pack(">II", 27, 29) + c[16:], "images of [27, 29] instead of [28, 28]"),
    "promises too much": (LABELS, lambda c: c[:4] + b"\xff" * 4 + c[8:], "38 bytes instead of 4294967303"),
    "none": (LABELS, lambda c: c[:4] + bytes(4), "truncated or empty"),
    "label": (LABELS, lambda c: c[:-1] + b"\x0b", "record 29: label 11"),
    "counts": (LABELS, lambda c: c[:4] + struct.pack(">I", 29) + c[8:-1], "29 labels for 30 images"),
    "bomb": (IMAGES, lambda c: gzip.compress(bytes(60 << 20)), "holds more than 47040016 bytes"),
    "damaged gzip": (IMAGES, lambda c: gzip.compress(c)[:-20], "cannot be read"),
    "no gzip": (IMAGES, lambda c: b"\x1f\x8bnothing", "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD_MNIST)
def test_mnist_bad_content_is_named(digits: tuple[Path, dict[str, Images]], kind: str) -> None:
    name, change, message = BAD_MNIST[kind]
    file = digits[0] / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError) as caught:
        load("mnist", digits[0])
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_mnist_missing_file(digits: tuple[Path, dict[str, Images]]) -> None:
    (digits[0] / LABELS).unlink()
    with pytest.raises(DataError, match=rf"{LABELS} or {LABELS}\.gz missing"):
        load("mnist", digits[0])


# --- Fashion-MNIST ---


def test_fashion_mnist_has_mnists_files_and_names_of_its_own(digits: tuple[Path, dict[str, Images]]) -> None:
    folder, arrays = digits
    source = load("fashion-mnist", folder)
    np.testing.assert_array_equal(source.train[0][..., 0], arrays["train-images-idx3-ubyte"])
    assert (source.name, source.classes[0], source.classes[9]) == ("fashion-mnist", "T-shirt/top", "Ankle boot")


def test_packed_files_that_are_not_fashion_mnists_are_said_to_be_others(
    digits: tuple[Path, dict[str, Images]],
) -> None:
    """MNIST's have the same names."""
    folder, said = digits[0], list[str]()
    (folder / f"{LABELS}.gz").write_bytes(gzip.compress((folder / LABELS).read_bytes()))
    (folder / LABELS).unlink()
    DATASETS["fashion-mnist"].load(folder, lambda *_: None, said.append)
    assert [line.partition(":")[0] for line in said] == [
        f"{folder / LABELS}.gz is not the official file of Fashion-MNIST"
    ]


@pytest.mark.parametrize("kind", ["promises too much", "bomb", "label", "counts"])
def test_fashion_mnist_bad_content_is_named(digits: tuple[Path, dict[str, Images]], kind: str) -> None:
    name, change, message = BAD_MNIST[kind]
    file = digits[0] / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError) as caught:
        load("fashion-mnist", digits[0])
    assert message in str(caught.value)


def test_fashion_mnists_files_are_downloaded_into_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr(Download, "fetch", lambda self, folder, progress: asked.append((self.url, folder)))
    assert DATASETS["fashion-mnist"].fetch(tmp_path, lambda *_: None) == tmp_path / "fashion-mnist"
    assert {folder for _, folder in asked} == {tmp_path / "fashion-mnist"}
    assert [url.rpartition("/")[2] for url, _ in asked] == [
        f"{name}.gz" for name in (IMAGES, LABELS, "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    ]
    assert all(url.startswith("https://") for url, _ in asked)
    with pytest.raises(DataError, match="mnist is not downloaded"):
        DATASETS["mnist"].fetch(tmp_path, lambda *_: None)


# --- synthetic ---


def test_gratings_are_the_same_on_every_machine() -> None:
    from daskcnn.store.manifest import sha256

    assert sha256(gratings(20, 3)[0])[:16] == "5170fb456b9107de"
    assert (gratings(20, 3)[0] == gratings(20, 3)[0]).all()
    assert (gratings(20, 3)[0] != gratings(20, 4)[0]).any()


@pytest.mark.slow
def test_a_linear_model_does_not_solve_it() -> None:
    """Softmax regression by gradient descent on all pixels: below 40 % where chance is 10 %.

    As an image and its inversion about the ground are equally likely, no weighing of pixels is right on both.
    """
    (train, labels), (test, truth) = gratings(4000, 10), gratings(1000, 11)
    x, z = (((a.reshape(len(a), -1) - 128.0) / 50).astype(np.float32) for a in (train, test))
    weights = np.zeros((x.shape[1], 10), np.float32)
    for _ in range(20):
        scores = np.exp(x @ weights - (x @ weights).max(1, keepdims=True))
        weights -= 1e-2 * x.T @ (scores / scores.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[labels]) / len(x)
    assert ((x @ weights).argmax(1) == labels).mean() > 0.4  # it learns what it can: the training set
    assert ((z @ weights).argmax(1) == truth).mean() < 0.4


def test_orientation_and_spacing_tell_the_classes_apart() -> None:
    """The strongest frequency of an image is its class's: nearest of ten, over 95 %."""
    images, labels = gratings(500, 12)
    spectrum = np.abs(np.fft.fft2(images.mean(-1) - images.mean((1, 2, 3))[:, None, None])) ** 2
    centres = np.stack([spectrum[:250][labels[:250] == k].mean(0) for k in range(10)]).reshape(10, -1)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    guess = (spectrum[250:].reshape(250, -1) @ centres.T).argmax(1)
    assert (guess == labels[250:]).mean() > 0.95
