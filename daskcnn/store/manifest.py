"""The manifest of a data set: shape, counts, statistics, origin, and the SHA-256 of every chunk.

The manifest is kept in the attributes of the store's group, with a checksum of its own, and is written last: a store
without one is not a data set. Chunks are hashed as decoded bytes without padding, so a checksum describes the
samples and not how a storage layer packed them. Only the plain `bytes` codec is allowed, so nothing in a hostile chunk
is unpacked before it is checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from daskcnn.documents import unknown_keys
from daskcnn.errors import DataError

FORMAT = 1
ATTRIBUTE = "daskcnn"
MAX_CHUNK_BYTES = 128 << 20
"""A chunk is read whole, and copied once."""
PARTS = ("train", "test")
_MOST_SOURCES = 10_000

Order = Literal["shuffled", "stored"]
Images = npt.NDArray[np.uint8]
Size = Annotated[int, Field(ge=1, le=1 << 40)]
Level = Annotated[float, Field(ge=-1e30, le=1e30)]
"""A mean of pixels: float32 has room for it."""
Deviation = Annotated[float, Field(ge=1e-30, le=1e30)]
Checksums = Annotated[tuple[str, ...], FailFast()]
"""The first wrong one is enough: an error takes a thousand times the memory of a digit."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PartManifest(_Frozen):
    """One part, train or test.

    Attributes
    ----------
    samples : number of samples
    class_counts : samples of each class
    images, labels : SHA-256 of each chunk
    """

    samples: Size
    class_counts: Annotated[tuple[int, ...], FailFast()]
    images: Checksums
    labels: Checksums


class Manifest(_Frozen):
    """Everything a data set is checked against. `shape` is (H, W, C), `chunk` the samples of one chunk."""

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    classes: Annotated[tuple[str, ...], FailFast()]
    shape: tuple[int, int, int]
    chunk: Size
    mean: Annotated[tuple[Level, ...], FailFast()]
    deviation: Deviation
    order: Order
    seed: int
    sources: dict[str, str]
    train: PartManifest
    test: PartManifest

    def part(self, name: str) -> PartManifest:
        """Return the part called `train` or `test`."""
        return self.train if name == "train" else self.test

    @property
    def sample_bytes(self) -> int:
        """Bytes of one image."""
        return self.shape[0] * self.shape[1] * self.shape[2]

    def fingerprint(self) -> str:
        """SHA-256 of the manifest: equal for equal data of equal origin."""
        return sha256(_canonical(self.model_dump(mode="json")))

    def content(self) -> Manifest:
        """The manifest without its sources: equal for equal data of any origin."""
        return self.model_copy(update={"sources": {}})

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the store's group."""
        return {ATTRIBUTE: {"manifest": self.model_dump(mode="json"), "sha256": self.fingerprint()}}


@dataclass(frozen=True)
class Source:
    """What an importer found. Images (N, H, W, C) uint8, labels (N,) uint8; `sources`: file name → SHA-256."""

    name: str
    classes: tuple[str, ...]
    train: tuple[Images, Images]
    test: tuple[Images, Images]
    sources: dict[str, str]


def sha256(data: Any) -> str:
    """Return the hexadecimal SHA-256 of bytes or of a contiguous array."""
    return hashlib.sha256(data).hexdigest()


def chunks(samples: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the sample ranges (lo, hi) of the chunks of a part."""
    return ((lo, min(lo + chunk, samples)) for lo in range(0, samples, chunk))


def describe(source: Source, *, chunk: int, order: Order, seed: int) -> Manifest:
    """Return the manifest of a source in its final order. Raises DataError if nothing could be learnt from it."""
    images = source.train[0]
    mean, deviation = _statistics(images)
    if not deviation > 0:
        raise DataError(source.name, "every training image is the same plain colour", "give the real data set")
    manifest = Manifest(
        name=source.name,
        classes=source.classes,
        shape=images.shape[1:],
        chunk=chunk,
        mean=mean,
        deviation=deviation,
        order=order,
        seed=seed,
        sources=source.sources,
        train=_describe_part(source.train, chunk, len(source.classes)),
        test=_describe_part(source.test, chunk, len(source.classes)),
    )
    check(manifest, source.name)
    return manifest


def _describe_part(part: tuple[Images, Images], chunk: int, classes: int) -> PartManifest:
    images, labels = part
    ranges = list(chunks(len(labels), chunk))
    return PartManifest(
        samples=len(labels),
        class_counts=tuple(np.bincount(labels, minlength=classes).tolist()),
        images=tuple(sha256(images[lo:hi]) for lo, hi in ranges),
        labels=tuple(sha256(labels[lo:hi]) for lo, hi in ranges),
    )


def _statistics(images: Images) -> tuple[tuple[float, ...], float]:
    """Return the mean of every channel, and the standard deviation of all pixels after subtracting it.

    Sums are exact.
    """
    counts = np.stack([np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])])
    values = np.arange(256)
    pixels = int(counts[0].sum())
    sums, squares = counts @ values, counts @ values**2
    mean = tuple(int(s) / pixels for s in sums)
    variance = sum(int(q) * pixels - int(s) ** 2 for s, q in zip(sums, squares, strict=True)) / pixels**2 / len(counts)
    return mean, float(np.sqrt(variance))


def parse(attributes: Any, path: str) -> Manifest:
    """Return the manifest in a group's attributes. Raises DataError naming what is wrong with it, and the remedy.

    The checksum is looked at first: of a damaged manifest nothing else is worth a look.
    """
    stored = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(stored, dict) or not isinstance(stored.get("manifest"), dict):
        raise DataError(path, "a zarr group, but not a data set of daskcnn, or not written to its end", remedy())
    body = stored["manifest"]
    if body.get("format") != FORMAT:
        raise DataError(path, f"format {body.get('format')!r:.80}, this version reads format {FORMAT}", remedy())
    try:
        text = _canonical(body)
    except RecursionError:
        raise DataError(path, "the manifest is nested too deeply", remedy(body.get("name"))) from None
    if stored.get("sha256") != sha256(text):
        raise DataError(
            path, f"the manifest does not match its checksum {stored.get('sha256')!r:.80}", remedy(body.get("name"))
        )
    manifest = _validated(body, text, path)
    check(manifest, path)
    return manifest


def _validated(body: dict[str, Any], text: bytes, path: str) -> Manifest:
    """Return the manifest of this text. What could have an error for each of a million entries is refused before."""
    known = [(body, Manifest.model_fields), *((body.get(name), PartManifest.model_fields) for name in PARTS)]
    for found, fields in known:
        if isinstance(found, dict) and (key := unknown_keys(found, fields)) is not None:
            raise DataError(path, f"manifest, {key!r:.80}: unknown key", remedy(body.get("name")))
    sources = body.get("sources")
    if isinstance(sources, dict) and len(sources) > _MOST_SOURCES:
        reason = f"manifest, {len(sources):,} sources: at most {_MOST_SOURCES:,}"
        raise DataError(path, reason, remedy(body.get("name")))
    try:
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            path, f"manifest, {where:.80} = {first['input']!r:.80}: {first['msg']}", remedy(body.get("name"))
        ) from None


def check(manifest: Manifest, path: str) -> None:
    """Raise DataError if the manifest contradicts itself, declares too much, or describes nothing to learn."""
    for problem in _problems(manifest):
        raise DataError(path, problem, remedy(manifest.name))


def _problems(manifest: Manifest) -> Iterator[str]:
    classes = len(manifest.classes)
    if not 2 <= classes <= 256:
        yield f"{classes} class names: between 2 and 256 are needed"
    if min(manifest.shape) < 1 or len(manifest.mean) != manifest.shape[2]:
        yield f"images of shape {manifest.shape} with {len(manifest.mean)} channel means"
    if manifest.chunk * manifest.sample_bytes > MAX_CHUNK_BYTES:
        yield f"chunks of {manifest.chunk} samples of shape {manifest.shape} are larger than {MAX_CHUNK_BYTES} bytes"
    for name in PARTS:
        yield from _part_problems(name, manifest.part(name), manifest.chunk, classes)
    if sum(count > 0 for count in manifest.train.class_counts) < 2:
        yield f"train: every sample is of one class (counts {list(manifest.train.class_counts)}), nothing to learn"


def _part_problems(name: str, part: PartManifest, chunk: int, classes: int) -> Iterator[str]:
    expected = -(-part.samples // chunk)
    for array, sums in (("images", part.images), ("labels", part.labels)):
        if len(sums) != expected:
            yield f"{name}/{array}: {len(sums)} checksums for {part.samples} samples in chunks of {chunk}"
        if bad := next((s for s in sums if len(s) != 64), None):
            yield f"{name}/{array}: {bad!r:.80} is no SHA-256"
    if len(part.class_counts) != classes or sum(part.class_counts) != part.samples or min(part.class_counts) < 0:
        yield f"{name}: class counts {part.class_counts!r:.80} do not add up to {part.samples} samples"


def remedy(name: object = None) -> str:
    """Return how a user gets a data set that is whole."""
    known = isinstance(name, str) and len(name) <= 80
    return f"make it again with `daskcnn data prepare {name if known else 'NAME'} --out PATH`"


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
