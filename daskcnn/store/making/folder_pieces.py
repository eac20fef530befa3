"""What workers do to prepare a folder: they decode the images of a chunk, or put chunks together from decoded ones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import ChunkFacts, Images, chunk_facts
from daskcnn.store.files import Files
from daskcnn.store.making.folder_plan import ChunkFiles, Indices
from daskcnn.store.making.images import Fit, decode, read_file
from daskcnn.store.making.writer import Draft


@dataclass(frozen=True, slots=True)
class Appearance:
    """How images are looked at.

    Attributes
    ----------
    size : (H, W)
    fit : what is done about other proportions, as `images.decode` has it
    grey : whether the result has one channel
    """

    size: tuple[int, int]
    fit: Fit = "crop"
    grey: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) of the result."""
        return (*self.size, 1 if self.grey else 3)


@dataclass(frozen=True, slots=True)
class PieceWork:
    """A piece and the names of its files."""

    piece: ChunkFiles
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.piece}, {self.files[0]} to {self.files[-1]}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """What is known of a chunk once it is written.

    Attributes
    ----------
    digests : SHA-256 of each file's content, (n, 32)
    bad : what is wrong with each image that cannot be used, by its number in the chunk
    """

    facts: ChunkFacts
    digests: npt.NDArray[np.uint8]
    bad: dict[int, str]


def decode_piece(job: PieceWork, *, root: Path, look: Appearance, draft: Draft) -> Decoded:
    """Decode the images of a chunk and write it. Images that cannot be used are black in it.

    Raises
    ------
    DataError : where the folder cannot be seen from here
    OSError : where the chunk cannot be written
    """
    if not os.path.isdir(root):  # its images are not to blame
        raise DataError(root, "no such folder on this machine", "give one on storage that every worker reaches")
    images = np.zeros((len(job.files), *look.shape), np.uint8)
    digests, bad = np.zeros((len(job.files), 32), np.uint8), dict[int, str]()
    for index, file in enumerate(job.files):
        try:
            content = read_file(root / file)
            digests[index] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
            images[index] = decode(content, name=file, size=look.size, fit=look.fit, grey=look.grey)
        except DataError as error:
            bad[index] = error.reason
    return Decoded(_write(draft, job.piece, images), digests, bad)


def _write(draft: Draft, piece: ChunkFiles, images: Images) -> ChunkFacts:
    manifest = draft.manifest
    labels = piece.labels.astype(manifest.label_dtype)
    draft.write_chunk(piece.part, piece.index, {"images": images, "labels": labels})
    return chunk_facts(images, labels, classes=len(manifest.classes), where=f"{manifest.name}: {piece.part}")


@dataclass(frozen=True, slots=True)
class Repacked:
    """A piece, and where its images are in another draft: whether in the test part, and in which row, (n,) each."""

    piece: ChunkFiles
    test: npt.NDArray[np.bool_]
    rows: Indices

    def __str__(self) -> str:
        return str(self.piece)


def repack_piece(job: Repacked, *, source: Draft, target: Draft) -> ChunkFacts:
    """Write a chunk of images that are decoded already, one chunk of the other draft in memory at a time."""
    images = np.zeros((len(job.rows), *target.manifest.shape), np.uint8)
    store = Files.at(source.path).store
    for part, here in (("train", ~job.test), ("test", job.test)):
        array, chunk = zarr.open_array(store, path=f"{part}/images", mode="r", zarr_format=3), source.manifest.chunk
        for index in np.unique(job.rows[here] // chunk):
            wanted = here & (job.rows // chunk == index)
            decoded = np.asarray(array[index * chunk : (index + 1) * chunk])
            images[wanted] = decoded[job.rows[wanted] - index * chunk]
    return _write(target, job.piece, images)


def jobs(pieces: Sequence[ChunkFiles], files: Sequence[str]) -> list[PieceWork]:
    """Return the pieces with the names of their files."""
    return [PieceWork(piece, tuple(files[i] for i in piece.samples)) for piece in pieces]
