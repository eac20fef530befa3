"""Small data sets in the formats that the importers read and the store writes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest

from daskcnn.store.chunk_facts import Images
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BatchesOf: TypeAlias = Callable[[int], dict[str, bytes]]
Member: TypeAlias = tuple[tarfile.TarInfo | str, bytes]
MakeTar: TypeAlias = Callable[[Path, Sequence[Member]], Path]
MakeCifarTar: TypeAlias = Callable[[Path, dict[str, bytes]], Path]

NAMES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    CACHE.clear()
    yield
    CACHE.clear()


def random_part(
    rng: np.random.Generator, count: int, shape: tuple[int, int, int] = (32, 32, 3)
) -> tuple[Images, Images]:
    labels = rng.permutation(np.arange(count) % 10).astype(np.uint8)
    return rng.integers(0, 256, (count, *shape), dtype=np.uint8), labels


@pytest.fixture
def source() -> Source:
    """230 training and 60 test images; with chunks of 50 the last training chunk is a partial one."""
    rng = np.random.default_rng(0)
    return Source("toy", tuple(CLASSES), random_part(rng, 230), random_part(rng, 60), {"toy.bin": "0" * 64})


@pytest.fixture
def toy(source: Source, tmp_path: Path) -> str:
    """The path of `source`, written in chunks of 50."""
    path = str(tmp_path / "toy.zarr")
    write(source, describe(source, chunk=50, order="stored", seed=0), path, lambda part: None)
    return path


@pytest.fixture
def batches_of() -> BatchesOf:
    """The files of a CIFAR-10 archive with so many records a batch."""

    def make(count: int) -> dict[str, bytes]:
        rng = np.random.default_rng(count)
        files = {}
        for name in NAMES:
            records = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
            records[:, 0] = np.arange(count) % 10
            files[name] = records.tobytes()
        return files | {"batches.meta.txt": ("\n".join(CLASSES) + "\n\n").encode()}

    return make


def tar_gz(path: Path, members: Sequence[Member]) -> Path:
    """An archive with these members; a name alone is a plain file."""
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            if isinstance(member, str) or info.isreg():
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def cifar_tar(path: Path, files: dict[str, bytes]) -> Path:
    """The official layout: a folder entry, then its files."""
    folder = tarfile.TarInfo("cifar-10-batches-bin")
    folder.type = tarfile.DIRTYPE
    return tar_gz(path, [(folder, b""), *((f"cifar-10-batches-bin/{n}", c) for n, c in files.items())])


@pytest.fixture
def make_tar() -> MakeTar:
    return tar_gz


@pytest.fixture
def make_cifar_tar() -> MakeCifarTar:
    return cifar_tar
