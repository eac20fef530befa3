"""The interface of an importer.

A built-in data set: gratings in noise that differ only by orientation and spacing.

Phase, colours and contrast are random; orientation and spacing vary a little. Every pixel thus has the same mean in
every class, and a linear model, which weights single pixels, learns nothing. Mirror images belong to other
classes: train without augmentation. All arithmetic is on integers, so the bytes are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.store.augmentation import AugmentName
from daskcnn.store.chunk_facts import Images
from daskcnn.store.datasets.archive import Download
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
    def test_samples(self) -> int:
        """Images of the test part."""

    @property
    def classes(self) -> int:
        """Number of classes."""

    def to_fetch(self, folder: Path) -> Sequence[Download]:
        """Return the files that `fetch` would download into a folder. Raises DataError if that is not offered."""

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Download the archive into a folder and return its path. Raises DataError if that fails or is not offered."""

    def archive_at(self, path: Path) -> Path | None:
        """Return the archive, or the folder of its files, at this path or in it; None where there is none."""

    def load(self, archive: Path | None, progress: Progress, warn: Warn) -> Source:
        """Read and check everything. Raises DataError naming file, record and value."""


_SIDE = 32
_SEED = 10
_TURN = 256  # one period of the sine table
_SINE = np.array([round(127 * math.sin(2 * math.pi * i / _TURN)) for i in range(_TURN)], np.int16)
_WAVELENGTHS = (4.5, 9.0)  # pixels
_ANGLES = 5
_TURNED = 8  # degrees to either side, within a class
_STRETCHED = 0.15  # of the wavelength, likewise
_VARIANTS = 64
_NOISE = 40  # amplitude, of 127


def _step(kind: int, variant: int) -> tuple[int, int]:
    """Return a grating's steps along the sine table from row to row and from column to column, in 16ths of an entry."""
    turn, stretch = ((i / 3.5 - 1) for i in divmod(variant, 8))
    angle = math.pi * (kind % _ANGLES) / _ANGLES + math.radians(_TURNED) * turn
    length = _WAVELENGTHS[kind // _ANGLES] * (1 + _STRETCHED * stretch)
    return round(16 * _TURN * math.sin(angle) / length), round(16 * _TURN * math.cos(angle) / length)


_STEPS = np.array([[_step(kind, variant) for variant in range(_VARIANTS)] for kind in range(10)], np.int32)


class Synthetic:
    """10,000 generated colour images of 32×32 pixels in ten classes: 8,000 to train, 2,000 to test."""

    takes_archive = False
    augment: Literal["none", "crop-mirror"] = "none"
    shape = (_SIDE, _SIDE, 3)
    training_samples = 8_000
    test_samples = 2_000
    classes = 10

    def to_fetch(self, folder: Path) -> Sequence[Download]:
        """None."""
        return ()

    def fetch(self, folder: Path, progress: Progress) -> Path:
        """Raise DataError: the data set is built in."""
        raise DataError(reason="synthetic is built in", remedy="there is nothing to download")

    def archive_at(self, path: Path) -> Path | None:
        """None: there are no files of it."""
        return None

    def load(self, archive: Path | None, progress: Progress, warn: Warn) -> Source:
        """Generate the images; they are always the same."""
        classes = tuple(f"{180 * a // _ANGLES} degrees, {w} pixels" for w in _WAVELENGTHS for a in range(_ANGLES))
        train, test = gratings(self.training_samples, _SEED), gratings(self.test_samples, _SEED + 1)
        return Source("synthetic", classes, train, test, {})


def gratings(count: int, seed: int) -> tuple[Images, Images]:
    """Return images (count, 32, 32, 3) and labels (count,), classes in turn, from the bits of a PCG64 generator."""
    bits = np.random.PCG64(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    draw = _bytes(bits, count * 9).reshape(count, 9).astype(np.int32)
    contrast, tint, ground = 48 + draw[:, 2] * 13 // 16, 43 + draw[:, 3:6] // 3, 64 + draw[:, 6:9] // 2
    wave = _SINE[_phases(_STEPS[labels, draw[:, 0] % _VARIANTS], draw[:, 1])].astype(np.int32) * contrast[:, None, None]
    images = ground[:, None, None, :] + (wave[..., None] * tint[:, None, None, :] >> 15)  # at most 127 up or down
    noise = _bytes(bits, images.size).reshape(images.shape).astype(np.int32) - 128
    return np.clip(images + (noise * _NOISE >> 7), 0, 255).astype(np.uint8), labels


def _phases(steps: npt.NDArray[np.int32], start: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return each pixel's place in the sine table, (N, 32, 32): `start + fy·y + fx·x`, with steps (N, 2) in 16ths."""
    fy, fx = steps.T
    at = np.arange(_SIDE, dtype=np.int32)
    turned = fy[:, None, None] * at[:, None] + fx[:, None, None] * at + 16 * start[:, None, None]
    return (turned >> 4) % _TURN


def _bytes(bits: np.random.PCG64, count: int) -> Images:
    """Return uniform bytes. Raw bits are the one stream that NumPy promises not to change."""
    return np.ascontiguousarray(bits.random_raw(-(-count // 8))).astype("<u8").view(np.uint8)[:count]
