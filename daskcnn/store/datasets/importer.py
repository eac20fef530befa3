"""The interface of an importer."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from daskcnn.store.augmentation import AugmentName
from daskcnn.store.manifest import Progress, Source, Warn


class Importer(Protocol):
    """Turns one publisher's files into a `Source`. There is one file and one line in `DATASETS` for each."""

    @property
    def takes_archive(self) -> bool:
        """True if there are files to import; otherwise the data set is generated."""

    @property
    def augment(self) -> AugmentName:
        """The augmentation that suits the images, used if the job does not name one."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of an image."""

    @property
    def training_samples(self) -> int:
        """Images of the training part."""

    @property
    def classes(self) -> int:
        """Number of classes."""

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Download the archive into a folder and return its path. Raises DataError if that fails or is not offered."""

    def archive_at(self, path: Path) -> Path | None:
        """Return the archive, or the folder of its files, at this path or in it; None where there is none."""

    def load(self, archive: Path | None, progress: Progress, warn: Warn) -> Source:
        """Read and check everything. Raises DataError naming file, record and value."""
