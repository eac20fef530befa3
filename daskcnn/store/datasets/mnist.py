"""MNIST, handwritten digits, from its four IDX files, gzip or not; and what has its layout.

Fashion-MNIST: 70,000 grey photographs of clothing, in the files of MNIST (Xiao, Rasul, Vollgraf 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import Images
from daskcnn.store.datasets.archive import Download, file_sha256, read_gzip_or_plain
from daskcnn.store.manifest import Progress, Source, Warn, sha256

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_NAMES = [name for pair in FILES.values() for name in pair]
_SIDE = 28
_MOST = 16 + 60_000 * _SIDE * _SIDE


@dataclass(frozen=True)
class IdxFiles:
    """A data set in the files of MNIST: 28×28 grey pixels, ten classes, 60,000 to train, 10,000 to test.

    `official` has the publisher's files, packed by gzip; none where no official address is left.
    """

    name: str
    title: str
    class_names: tuple[str, ...]
    official: tuple[Download, ...] = ()

    takes_archive: ClassVar[bool] = True
    augment: ClassVar[Literal["none", "crop-mirror"]] = "none"
    shape: ClassVar[tuple[int, int, int]] = (_SIDE, _SIDE, 1)
    training_samples: ClassVar[int] = 60_000
    test_samples: ClassVar[int] = 10_000
    classes: ClassVar[int] = 10

    def to_fetch(self, folder: Path) -> Sequence[Download]:
        """Return the official files that the folder does not hold yet. Raises DataError without an official address."""
        if not self.official:
            remedy = f"give --archive FOLDER holding {', '.join(_NAMES)} (.gz or not)"
            raise DataError(reason=f"{self.name} is not downloaded", remedy=remedy)
        return [each for each in self.official if not each.target(folder / self.name).exists()]

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Return the folder of the official files, downloaded as far as it does not hold them yet.

        Raises DataError where there is no official address, and where a download fails.
        """
        self.to_fetch(folder)
        for each in self.official:
            each.fetch(folder / self.name, lambda done, total: progress("download", done, total))
        return folder / self.name

    def archive_at(self, path: Path) -> Path | None:
        """The path, if it is the folder of the four files, packed or not."""
        return path if all((path / name).is_file() or (path / f"{name}.gz").is_file() for name in _NAMES) else None

    def load(self, archive: Path | None, progress: Progress, warn: Warn) -> Source:
        """Read the four files of a folder, with a warning for a packed one that is not the official one."""
        assert archive is not None
        sources: dict[str, str] = {}
        parts = {}
        for i, (part, (images, labels)) in enumerate(FILES.items()):
            progress("read", i, len(FILES))
            parts[part] = _pair(_content(archive, images, sources), _content(archive, labels, sources))
        for each in self.official:  # files of another data set have the same names
            path = archive / each.url.rpartition("/")[2]
            if path.exists() and (found := file_sha256(path)) != each.sha256:
                other = f"SHA-256 {found} instead of {each.sha256}"
                warn(f"{path} is not the official file of {self.title}: {other}; its content is used as it is")
        return Source(self.name, self.class_names, parts["train"], parts["test"], sources)


MNIST = IdxFiles("mnist", "MNIST", tuple("0123456789"))


def _content(folder: Path, name: str, sources: dict[str, str]) -> tuple[Path, bytes]:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            content = read_gzip_or_plain(path, _MOST)
            sources[name] = sha256(content)
            return path, content
    raise DataError(folder, f"{name} or {name}.gz missing", "give the folder that holds the four IDX files")


def _pair(images: tuple[Path, bytes], labels: tuple[Path, bytes]) -> tuple[Images, Images]:
    """Return images (N, 28, 28, 1) and labels (N,); counts are equal, labels at most 9."""
    x, y = _idx(*images, (_SIDE, _SIDE)), _idx(*labels, ())
    if len(x) != len(y):
        raise DataError(labels[0], f"{len(y)} labels for {len(x)} images", "get both files again")
    if (bad := np.flatnonzero(y > 9)).size:
        raise DataError(f"{labels[0]}, record {bad[0]}", f"label {y[bad[0]]}, labels are 0 to 9", "get the file again")
    return x[..., None], y


def _idx(path: Path, content: bytes, item: tuple[int, ...]) -> Images:
    """The array of an IDX file: magic 0, 0, type 8 (uint8), dimensions; their sizes as big-endian uint32; the data."""
    dimensions = 1 + len(item)
    magic = bytes((0, 0, 8, dimensions))
    if content[:4] != magic:
        reason = f"starts with {content[:4].hex()} instead of {magic.hex()}"
        raise DataError(path, reason, "not the IDX file it should be")
    head = 4 + 4 * dimensions
    if len(content) < head:
        raise DataError(path, f"{len(content)} bytes, less than its header's {head}, truncated", "get it again")
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, head, 4)]
    if tuple(sizes[1:]) != item:
        raise DataError(path, f"images of {sizes[1:]} instead of {list(item)} pixels", "not the IDX file it should be")
    expected = head + sizes[0] * int(np.prod(item))
    if len(content) != expected or not sizes[0]:
        raise DataError(path, f"{len(content)} bytes instead of {expected}, truncated or empty", "get it again")
    return np.frombuffer(content, np.uint8, offset=head).reshape(sizes[0], *item)


_PLACE = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"


def _file(name: str, size: int, sha256: str) -> Download:
    return Download(f"{_PLACE}{name}.gz", size, sha256)


OFFICIAL = (
    _file("train-images-idx3-ubyte", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    _file("train-labels-idx1-ubyte", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    _file("t10k-images-idx3-ubyte", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    _file("t10k-labels-idx1-ubyte", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)

FASHION_MNIST = IdxFiles(
    name="fashion-mnist",
    title="Fashion-MNIST",
    class_names=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    official=OFFICIAL,
)
