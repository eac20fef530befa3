"""CIFAR-10 and CIFAR-100: 60,000 colour photographs of 32×32 pixels, 50,000 to train, 10,000 to test.

Their binary archives have a few files of records: one or two label bytes, then the pixels. A record of CIFAR-100 has a
byte for its class of twenty coarse ones, then one for its own of a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import Images
from daskcnn.store.datasets.archive import Download, file_sha256, file_size, read_gzip_or_plain, read_tar_gz
from daskcnn.store.manifest import Progress, Source, Warn, sha256

_PIXELS = 3 * 32 * 32
_NAMES_BYTES = 4096


@dataclass(frozen=True)
class Cifar:
    """A data set of 32×32 photographs by its official archive, or by the archive's folder.

    Attributes
    ----------
    train, test : files of records, with the most records that each may have.
    classes_file : names of the classes, a line each.
    labels : label bytes of a record, by their number of classes. The last one is the class; coarser ones come before.
    others : files of the archive that are not read, with the most bytes that each may have.
    """

    name: str
    title: str
    official: Download
    folder: str
    train: Mapping[str, int]
    test: Mapping[str, int]
    classes_file: str
    labels: tuple[int, ...]
    others: Mapping[str, int]
    training_samples: int

    takes_archive: ClassVar[bool] = True
    augment: ClassVar[Literal["none", "crop-mirror"]] = "crop-mirror"
    shape: ClassVar[tuple[int, int, int]] = (32, 32, 3)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.labels[-1]

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return len(self.labels) + _PIXELS

    @property
    def _needed(self) -> dict[str, int]:
        """Files that are read, and the most bytes that each may have."""
        records = {**self.train, **self.test}
        return {self.classes_file: _NAMES_BYTES, **{name: most * self.record for name, most in records.items()}}

    @property
    def test_samples(self) -> int:
        """Images of the test part."""
        return sum(self.test.values())

    def to_fetch(self, folder: Path) -> Sequence[Download]:
        """Return the official archive, if the folder does not hold it yet."""
        return () if self.official.target(folder).exists() else (self.official,)

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Return the official archive, downloaded if the folder does not hold it yet."""
        return self.official.fetch(folder, lambda done, total: progress("download", done, total))

    def archive_at(self, path: Path) -> Path | None:
        """The archive by its official name, or the folder that has its files; None where neither is there."""
        name = self.official.url.rpartition("/")[2]
        if path.is_file():
            return path if path.name == name else None
        folders = [folder for folder in (path, path / self.folder) if (folder / self.classes_file).is_file()]
        return next((found for found in (*folders, path / name) if found.exists()), None)

    def load(self, archive: Path | None, progress: Progress, warn: Warn) -> Source:
        """Read the `.tar.gz` or its folder, with a warning if the archive is not the official one. Raises DataError."""
        assert archive is not None
        sources: dict[str, str] = {}
        if archive.is_dir():
            inner, needed = archive / self.folder if (archive / self.folder).is_dir() else archive, self._needed.items()
            contents = {name: read_gzip_or_plain(inner / name, m) for name, m in needed if (inner / name).exists()}
        else:
            sources[archive.name] = self._archive_checksum(archive, progress, warn)
            expected = {**self._needed, **self.others}
            contents = read_tar_gz(archive, self.folder, expected, lambda done, total: progress("unpack", done, total))
        if missing := [name for name in self._needed if name not in contents]:
            remedy = f"give the official archive or its folder {self.folder}"
            raise DataError(archive, f"{', '.join(missing)} missing", remedy)
        return self._source(archive, contents, sources)

    def _archive_checksum(self, archive: Path, progress: Progress, warn: Warn) -> str:
        most_packed = sum(self._needed.values()) + sum(self.others.values()) + (16 << 20)  # packing may make it larger
        if (size := file_size(archive)) > most_packed:
            reason = f"{size:,} bytes, more than the {most_packed:,} allowed"
            raise DataError(archive, reason, "not the file it should be")
        found, official = file_sha256(archive, lambda done, total: progress("checksum", done, total)), self.official
        if found != official.sha256:
            other = f"SHA-256 {found}, {size} bytes, instead of {official.sha256}, {official.size} bytes"
            warn(f"{archive} is not the official {self.title} archive: {other}; its content is used as it is")
        return found

    def _source(self, archive: Path, contents: Mapping[str, bytes], sources: dict[str, str]) -> Source:
        names = tuple(contents[self.classes_file].decode("ascii", "replace").split())
        if len(names) != self.classes:
            reason = f"{self.classes_file} names {len(names)} classes instead of {self.classes}"
            raise DataError(archive, reason, "get the archive again")
        files = (*self.train, *self.test)
        records = {name: self._records(f"{archive}: {name}", contents[name]) for name in files}  # before any is copied
        sources |= {name: sha256(contents[name]) for name in self._needed}
        train, test = (self._part([records[name] for name in part]) for part in (self.train, self.test))
        return Source(self.name, names, train, test, sources)

    def _records(self, where: str, content: bytes) -> Images:
        """Return the records (N, bytes) of a file, not copied. Raises DataError for a part of one, or a wrong label.

        A record is its label bytes, then the planes red, green, blue, by rows.
        """
        count, rest = divmod(len(content), self.record)
        if rest or not count:
            reason = f"{rest} bytes instead of {self.record}, the file is truncated or empty"
            raise DataError(f"{where}, record {count}", reason, "get it again")
        records = np.frombuffer(content, np.uint8).reshape(count, self.record)
        for byte, classes in enumerate(self.labels):
            labels = records[:, byte]
            if (bad := np.flatnonzero(labels >= classes)).size:
                kind = "label" if byte == len(self.labels) - 1 else "coarse label"
                reason = f"{kind} {labels[bad[0]]}, {kind}s are 0 to {classes - 1}"
                raise DataError(f"{where}, record {bad[0]}", reason, "get the file again")
        return records

    def _part(self, files: list[Images]) -> tuple[Images, Images]:
        """Return images (N, 32, 32, 3) and labels (N,) of these files' records."""
        images = np.empty((sum(map(len, files)), *self.shape), np.uint8)
        start, at = 0, len(self.labels)
        for records in files:
            planes = records[:, at:].reshape(len(records), 3, 32, 32)
            images[start : start + len(records)] = planes.transpose(0, 2, 3, 1)
            start += len(records)
        return images, np.concatenate([records[:, at - 1] for records in files])


_PLACE = "https://www.cs.toronto.edu/~kriz/"
CIFAR10_ARCHIVE = Download(
    f"{_PLACE}cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
)
CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    official=CIFAR10_ARCHIVE,
    folder="cifar-10-batches-bin",
    train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
    test={"test_batch.bin": 10_000},
    classes_file="batches.meta.txt",
    labels=(10,),
    others={"readme.html": 4096},
    training_samples=50_000,
)

CIFAR100_ARCHIVE = Download(
    f"{_PLACE}cifar-100-binary.tar.gz", 168_513_733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
)
CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    official=CIFAR100_ARCHIVE,
    folder="cifar-100-binary",
    train={"train.bin": 50_000},
    test={"test.bin": 10_000},
    classes_file="fine_label_names.txt",
    labels=(20, 100),
    others={"coarse_label_names.txt": 4096},
    training_samples=50_000,
)
