"""The plan of a folder as a data set, its parts, their order and chunks; and the work on a chunk that workers do.

The place of an image follows from its path and the seed. An image that is left out changes neither the order of the
others nor, but for rounding, their parts: a data set without its unreadable images is the one that a folder without
them would give.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import ChunkFacts, Images, chunk_facts, class_counts
from daskcnn.store.chunk_source import Indices
from daskcnn.store.files import Files
from daskcnn.store.making.folder import Listing
from daskcnn.store.making.images import Fit, decode, is_deep, read_file
from daskcnn.store.making.prepare import chunk_for
from daskcnn.store.making.writer import Draft
from daskcnn.store.manifest import PARTS, Manifest, Order, PartManifest, ValueRange, chunks, draft_of
from daskcnn.store.split import shuffled_order, stratified


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The images that become one chunk of a part, by their numbers in the listing, (n,), and their classes, (n,)."""

    part: str
    index: int
    samples: Indices
    labels: Indices

    def __str__(self) -> str:
        return f"chunk {self.index} of the {self.part} part"


@dataclass(frozen=True)
class Plan:
    """The images of each part, by their numbers in the listing, in the order in which they are stored."""

    listing: Listing
    parts: Mapping[str, Indices]
    chunk: int

    def pieces(self) -> Iterator[ChunkFiles]:
        """Yield the images of each chunk, part by part and in order."""
        for part, samples in self.parts.items():
            for index, (lo, hi) in enumerate(chunks(len(samples), self.chunk)):
                yield ChunkFiles(part, index, samples[lo:hi], self.listing.labels[samples[lo:hi]])

    def common(self, **settings: Any) -> dict[str, Any]:
        """Return the fields of the manifest that are known before the images are."""
        return {"classes": self.listing.classes, "chunk": self.chunk, "dtype": "uint8", "labels": "classes", **settings}

    def draft(self, common: Mapping[str, Any]) -> Manifest:
        """Return the manifest as far as it is known: right in shapes and counts, without checksums and statistics."""
        parts = {}
        for name, samples in self.parts.items():
            counts = class_counts(self.listing.labels[samples], len(self.listing.classes))
            parts[name] = PartManifest(samples=len(samples), class_counts=counts, images=(), labels=())
        return draft_of({**common, "sources": {}}, parts)

    def positions(self) -> tuple[npt.NDArray[np.bool_], Indices]:
        """Return a mask of the listing's images in the test part, and each image's row in its part."""
        test, rows = np.zeros(len(self.listing.files), bool), np.zeros(len(self.listing.files), np.int64)
        for name, samples in self.parts.items():
            test[samples], rows[samples] = name == PARTS[1], np.arange(len(samples))
        return test, rows


def plan_folder(listing: Listing, *, test: float, order: Order, seed: int, sample_bytes: int) -> Plan:
    """Split the images into parts, and put each part in order.

    `test` is the share of each class that becomes the test part, where the folder has no parts. Raises DataError where
    nothing is left for it.
    """
    digests = (hashlib.blake2b(os.fsencode(file), digest_size=8).digest() for file in listing.files)
    keys = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)  # a number of each image's own
    count = max(1, round(test * len(listing.files)))
    mask = stratified(listing.labels, count, seed, keys=keys) if listing.test is None else listing.test
    if not mask.any():
        raise DataError(listing.root, "no class has two images: nothing is left to test with", "give more images")
    parts = {name: np.flatnonzero(mask == (name == PARTS[1])) for name in PARTS}
    if order == "shuffled":
        for salt, (name, samples) in enumerate(parts.items()):
            parts[name] = samples[shuffled_order(keys[samples], seed, salt)]
    return Plan(listing, parts, chunk_for(len(parts["train"]), sample_bytes))


def digest_of(files: Sequence[str], digests: npt.NDArray[np.uint8]) -> str:
    """Return the SHA-256 of all paths and of the SHA-256 of each file's content, (N, 32), in the listing's order."""
    total = hashlib.sha256()
    for file, digest in zip(files, digests, strict=True):
        total.update(os.fsencode(file) + b"\0" + digest.tobytes())
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Appearance:
    """Size (H, W), colours and numbers of the images in a data set, as in `images.decode`."""

    size: tuple[int, int]
    fit: Fit = "crop"
    grey: bool = False
    value_range: ValueRange | None = None

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
    """The facts of a chunk that is written, with the SHA-256 of each file's content, (n, 32).

    `bad` has the reason why an image cannot be used, by its number in the chunk. `deep` is the number of images of 16
    bits without a stated range, `brightest` the largest pixel that has become of them.
    """

    facts: ChunkFacts
    digests: npt.NDArray[np.uint8]
    bad: dict[int, str]
    deep: int = 0
    brightest: int = 0


def decode_piece(job: PieceWork, *, root: Path, look: Appearance, draft: Draft) -> Decoded:
    """Decode the images of a chunk and write it. Images that cannot be used are black in it.

    Raises DataError where the folder cannot be seen from here, OSError where the chunk cannot be written.
    """
    if not os.path.isdir(root):  # its images are not to blame
        raise DataError(root, "no such folder on this machine", "give one on storage that every worker reaches")
    images = np.zeros((len(job.files), *look.shape), np.uint8)
    digests, bad, deep = np.zeros((len(job.files), 32), np.uint8), dict[int, str](), list[int]()
    as_looked_at: Any = {"size": look.size, "fit": look.fit, "grey": look.grey, "value_range": look.value_range}
    for index, file in enumerate(job.files):
        try:
            content = read_file(root / file)
            digests[index] = np.frombuffer(hashlib.sha256(content).digest(), np.uint8)
            images[index] = decode(content, name=file, **as_looked_at)
            if look.value_range is None and is_deep(content, name=file):
                deep.append(int(images[index].max()))
        except DataError as error:
            bad[index] = error.reason
    return Decoded(_write(draft, job.piece, images), digests, bad, len(deep), max(deep, default=0))


def _write(draft: Draft, piece: ChunkFiles, images: Images) -> ChunkFacts:
    manifest = draft.manifest
    labels = piece.labels.astype(manifest.label_dtype)
    draft.write_chunk(piece.part, piece.index, {"images": images, "labels": labels})
    return chunk_facts(images, labels, classes=len(manifest.classes), where=f"{manifest.name}: {piece.part}")


@dataclass(frozen=True, slots=True)
class Repacked:
    """A piece, and the place of its images in another draft: a mask of those in the test part, and rows, (n,) each."""

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
