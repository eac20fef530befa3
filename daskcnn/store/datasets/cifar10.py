"""CIFAR-10 from its official binary archive, or from the archive's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from daskcnn.errors import DataError
from daskcnn.store.archive import check_size, file_sha256, file_size, read_gzip_or_plain, read_tar_gz
from daskcnn.store.chunk_facts import Images
from daskcnn.store.datasets.importer import Progress, Warn
from daskcnn.store.download import Download
from daskcnn.store.manifest import Source, sha256

FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = "test_batch.bin"
CLASSES_FILE = "batches.meta.txt"
RECORD = 1 + 3 * 32 * 32
_BATCH = 10_000 * RECORD
EXPECTED = {CLASSES_FILE: 4096, **dict.fromkeys((*TRAIN, TEST), _BATCH), "readme.html": 4096}
_NEEDED = (CLASSES_FILE, *TRAIN, TEST)
_MOST_PACKED = sum(EXPECTED.values()) + (16 << 20)
"""Bytes of an archive: packing may make it larger, but not by much."""

OFFICIAL = Download(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


class Cifar10:
    """60,000 colour photographs of 32×32 pixels in ten classes: 50,000 to train, 10,000 to test."""

    takes_archive = True
    augment: Literal["none", "crop-mirror"] = "crop-mirror"
    shape = (32, 32, 3)
    training_samples = 50_000
    classes = 10

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Return the official archive, downloaded if the folder does not hold it yet."""
        return OFFICIAL.fetch(folder, lambda done, total: progress("download", done, total))

    def load(self, archive: Path | None, progress: Progress, warn: Warn) -> Source:
        """Read the `.tar.gz` or its folder, with a warning if the archive is not the official one. Raises DataError."""
        assert archive is not None
        sources: dict[str, str] = {}
        if archive.is_dir():
            contents = _read_folder(archive)
        else:
            sources[archive.name] = _archive_checksum(archive, progress, warn)
            contents = read_tar_gz(archive, FOLDER, EXPECTED, lambda done, total: progress("unpack", done, total))
        if missing := [name for name in _NEEDED if name not in contents]:
            raise DataError(
                archive, f"{', '.join(missing)} missing", f"give the official archive or its folder {FOLDER}"
            )
        return _source(archive, contents, sources)


def _archive_checksum(archive: Path, progress: Progress, warn: Warn) -> str:
    check_size(archive, _MOST_PACKED)
    found = file_sha256(archive, lambda done, total: progress("checksum", done, total))
    if found != OFFICIAL.sha256:
        warn(
            f"{archive} is not the official CIFAR-10 archive: SHA-256 {found}, {file_size(archive)} bytes, instead of "
            f"{OFFICIAL.sha256}, {OFFICIAL.size} bytes; its content is used as it is"
        )
    return found


def _read_folder(folder: Path) -> dict[str, bytes]:
    inner = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    return {name: read_gzip_or_plain(inner / name, EXPECTED[name]) for name in _NEEDED if (inner / name).exists()}


def _source(archive: Path, contents: Mapping[str, bytes], sources: dict[str, str]) -> Source:
    classes = _classes(archive, contents[CLASSES_FILE])
    records = {name: _records(f"{archive}: {name}", contents[name]) for name in (*TRAIN, TEST)}  # before any is copied
    sources |= {name: sha256(contents[name]) for name in _NEEDED}
    train = [_split(records[name]) for name in TRAIN]
    images, labels = (np.concatenate(part) for part in zip(*train, strict=True))
    return Source("cifar10", classes, (images, labels), _split(records[TEST]), sources)


def _classes(archive: Path, content: bytes) -> tuple[str, ...]:
    names = tuple(content.decode("ascii", "replace").split())
    if len(names) != 10:
        raise DataError(archive, f"{CLASSES_FILE} names {len(names)} classes instead of 10", "get the archive again")
    return names


def _records(where: str, content: bytes) -> Images:
    """Return the records (N, 3073) of a file, not copied. Raises DataError if it has no whole ones, or a wrong label.

    A record is a label byte, then the planes red, green, blue, by rows.
    """
    count, rest = divmod(len(content), RECORD)
    if rest or not count:
        raise DataError(
            f"{where}, record {count}",
            f"{rest} bytes instead of {RECORD}, the file is truncated or empty",
            "get it again",
        )
    records = np.frombuffer(content, np.uint8).reshape(count, RECORD)
    labels = records[:, 0]
    if (bad := np.flatnonzero(labels > 9)).size:
        raise DataError(f"{where}, record {bad[0]}", f"label {labels[bad[0]]}, labels are 0 to 9", "get the file again")
    return records


def _split(records: Images) -> tuple[Images, Images]:
    """Return images (N, 32, 32, 3) and labels (N,)."""
    planes = records[:, 1:].reshape(len(records), 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].copy()
