"""The chunks of arrays that are used in place, as a source of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.store.array_index import ArrayChanged
from daskcnn.store.cache import CACHE, Block
from daskcnn.store.chunk_source import Indices
from daskcnn.store.foreign.array import ImageArray
from daskcnn.store.manifest import sha256

_GATHERED_BYTES = 16 << 20


@dataclass(frozen=True)
class InPlaceChunks:
    """The samples of a part: in whole chunks first, scattered over all chunks from some place on.

    Scattered samples are gathered in blocks, which the cache spares: a chunk is read once for what it has of them, and
    not again with every evaluation.

    Attributes
    ----------
    codes : labels of all stored samples
    checksums : SHA-256 of each stored chunk; None: they are not known
    order : stored samples, as they are numbered here
    scattered : the first of them that is scattered
    """

    array: ImageArray
    codes: npt.NDArray[Any]
    checksums: tuple[str, ...] | None
    order: Indices
    scattered: int
    name: str
    fingerprint: str

    @cached_property
    def cuts(self) -> Indices:
        """The samples with which another chunk or block begins."""
        chunks, _ = self.places(np.arange(len(self.order)))
        return np.flatnonzero(np.diff(chunks, prepend=chunks[:1])).astype(np.int64)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the images of a chunk."""
        return self.array.chunk * self.array.sample_bytes

    @property
    def arrays(self) -> Sequence[str]:
        """Names of the arrays that there are."""
        return ("images", "labels")

    def like(self, array: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and number type of one sample of this array."""
        if array == "images":
            return self.array.shape, self.array.dtype
        return self.codes.shape[1:], self.codes.dtype

    def places(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the chunk of each of these samples, and its place in it. Blocks have numbers below zero."""
        stored = self.order[indices]
        chunks, places = stored // self.array.chunk, stored % self.array.chunk
        beyond = indices - self.scattered
        blocks, within = -1 - beyond // self._block, beyond % self._block
        return np.where(beyond >= 0, blocks, chunks), np.where(beyond >= 0, within, places)

    def held(self, array: str, index: int) -> Block:
        """Return a chunk or block, from the cache if it is there. Raises ArrayChanged where the array has changed."""
        if array == "labels":
            return self.codes[self._stored(index)]
        key = (self.array.path, self.fingerprint, self.name, index)
        if index < 0:
            return CACHE.get(key, lambda: self._gathered(index), spare=True)
        key = (self.array.path, self.fingerprint, "stored", index)
        return CACHE.get(key, lambda: self.load(index))

    def load(self, index: int) -> Block:
        """Return a chunk of images, not from the cache. Raises ArrayChanged where it is not what its index says."""
        data = self.array.read(index)
        if self.checksums is not None and sha256(data) != self.checksums[index]:
            lo = index * self.array.chunk
            raise ArrayChanged(
                self.array.path,
                f"samples {lo} to {lo + len(data) - 1} (chunk {index}) have changed since the array was read for its "
                "index",
                "restore the array and resume the run, or start a new run, which reads it again",
            )
        return self.array.as_images(data)

    def _stored(self, index: int) -> slice | Indices:
        """Stored samples of a chunk or block."""
        if index >= 0:
            return slice(index * self.array.chunk, (index + 1) * self.array.chunk)
        lo = self.scattered + (-1 - index) * self._block
        return self.order[lo : lo + self._block]

    def _gathered(self, index: int) -> Block:
        stored = self.order[self.scattered + (-1 - index) * self._block :][: self._block]
        images = np.empty((len(stored), *self.array.shape), self.array.dtype)
        chunks = stored // self.array.chunk
        for chunk in np.unique(chunks).tolist():
            here = chunks == chunk
            images[here] = self.held("images", chunk)[stored[here] - chunk * self.array.chunk]
        return images

    @property
    def _block(self) -> int:
        return max(1, _GATHERED_BYTES // self.array.sample_bytes)
