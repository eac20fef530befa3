"""The manifest of a data set: shape, types, counts, statistics, origin, and the SHA-256 of every chunk.

The manifest is kept in the attributes of the store's group, with a checksum of its own, and is written last: a store
without one is not a data set. Chunks are hashed as decoded bytes without padding, so a checksum describes the
samples and not how a storage layer packed them. Only the plain `bytes` codec is allowed, so nothing in a hostile chunk
is unpacked before it is checked.

Format 1 knew images and labels of uint8, one class a sample, and one deviation of all pixels. It is still read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError

from daskcnn.documents import first_problem, unknown_keys
from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import ChunkFacts, Images, Moments, chunk_facts
from daskcnn.store.chunk_facts import sha256 as sha256

FORMATS = (1, 2)
ATTRIBUTE = "daskcnn"
MAX_CHUNK_BYTES = 128 << 20
"""A chunk is read whole, and copied once."""
PARTS = ("train", "test")
REMEDY = "make it again with `daskcnn data prepare` or `daskcnn.prepare`"
"""Remedy for a data set that is not whole."""
_MOST_SOURCES = 10_000
_LATER = ("fit", "value_range")
"""Fields that are kept only where they are used, so that other data sets keep their fingerprints."""
MOST_CLASSES = 1 << 16
Order = Literal["shuffled", "stored"]
Labelling = Literal["classes", "several"]
"""A label is one class of each sample, or a row of 0 and 1, one for each of several labels."""
Fit = Literal["stretch", "crop", "pad"]
"""The way in which image files of other proportions became images of one size."""
Dtype = Literal["uint8", "uint16", "int16", "float16", "float32", "float64"]
_WIDENED = {"bool": "uint8", "int8": "int16"}
Size = Annotated[int, Field(ge=1, le=1 << 40)]
Level = Annotated[float, Field(ge=-1e30, le=1e30)]
"""A mean of pixels: float32 has room for it."""


def widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the number type in which a data set keeps numbers of this one: booleans and int8 are widened."""
    return np.dtype(_WIDENED.get(dtype.name, dtype))


def is_like(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Return True if images of one number type stand for those of another, which a network was trained on.

    The same scaled integers are float32 to one program and float64 to another.
    """
    return widened(dtype) == wanted or {dtype.name, wanted.name} == {"float32", "float64"}


def in_range(value: Any) -> Any:
    """Refuse the first entry of a list that is no deviation: an error for each takes too much memory."""
    entries = value if isinstance(value, list | tuple) else (value,)
    if any(type(entry) not in (int, float) or not 0 <= entry <= 1e30 for entry in entries):
        raise ValueError("deviations are numbers of 0 to 1e30")
    return tuple(value) if isinstance(value, list) else value


def ordered(value: Any) -> Any:
    """Refuse what is not a range of two numbers, the lower one first."""
    two = isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(each, int | float) for each in value)
    if not two or not -1e300 <= value[0] < value[1] <= 1e300:
        raise ValueError("two numbers are needed, the lower one first")
    return float(value[0]), float(value[1])


Deviations = Annotated[float | tuple[float, ...], BeforeValidator(in_range)]
"""One for each channel, 0 where all pixels are the same; format 1 has one of all pixels."""
ValueRange = Annotated[tuple[float, float], BeforeValidator(ordered)]
"""The numbers of image files of more than 8 bits that are black and white."""
Warn = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the amount done, and the total amount (0: not known)."""
Checksums = Annotated[tuple[str, ...], FailFast()]
"""The first wrong one is enough: an error takes a thousand times the memory of a digit."""


def silent(*_: Any) -> None:
    """Ignore warnings and progress."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class PartManifest(_Frozen):
    """One part, train or test: its samples, those of each class or label, and the SHA-256 of each chunk."""

    samples: Size
    class_counts: Annotated[tuple[int, ...], FailFast()]
    images: Checksums
    labels: Checksums
    weights: Checksums = ()


class Manifest(_Frozen):
    """Everything a data set is checked against.

    Attributes
    ----------
    shape, chunk : (H, W, C) of an image, and samples of one chunk
    nodata : the value that stands for no data, if there is one; then NaN does too
    fit : the way in which image files became images of this size; None where they are no image files
    value_range : the numbers that became black and white, of image files of more than 8 bits; None where none is stated
    mean, deviation : of each channel, over the training part; deviation is 0 for a channel that is the same everywhere
    """

    format: Literal[1, 2] = 2
    name: str = Field(min_length=1)
    classes: Annotated[tuple[str, ...], FailFast()]
    shape: tuple[int, int, int]
    chunk: Size
    dtype: Dtype = "uint8"
    labels: Labelling = "classes"
    nodata: float | None = None
    fit: Fit | None = None
    value_range: ValueRange | None = None
    mean: Annotated[tuple[Level, ...], FailFast()]
    deviation: Deviations
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
        return self.shape[0] * self.shape[1] * self.shape[2] * np.dtype(self.dtype).itemsize

    @property
    def label_dtype(self) -> str:
        """Number type of the labels at rest."""
        return "uint8" if self.labels == "several" or len(self.classes) <= 256 else "uint16"

    @property
    def weighted(self) -> bool:
        """True if the training samples have weights."""
        return bool(self.train.weights)

    def fingerprint(self) -> str:
        """SHA-256 of the manifest: equal for equal data of equal origin."""
        return sha256(_canonical(self._record()))

    def content(self) -> Manifest:
        """Return the manifest without sources and statistics: equal for equal data of any origin, in either format."""
        zeros = (0.0,) * self.shape[2]
        return self.model_copy(update={"sources": {}, "format": 2, "mean": zeros, "deviation": zeros})

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the store's group."""
        return {ATTRIBUTE: {"manifest": self._record(), "sha256": self.fingerprint()}}

    def _record(self) -> dict[str, Any]:
        """The manifest as it is kept: without what came later, if it is not used."""
        record = self.model_dump(mode="json", exclude={key for key in _LATER if getattr(self, key) is None})
        if self.format == 1:
            later = [(record, key) for key in ("dtype", "labels", "nodata")]
            for table, key in (*later, *((record[part], "weights") for part in PARTS)):
                del table[key]
        return record


@dataclass(frozen=True)
class Source:
    """The samples that an importer found: images (N, H, W, C) and labels, (N,) classes or (N, L) of 0 and 1.

    `sources` has the SHA-256 of each file by its name, `weights` (N,) are those of the training samples.
    """

    name: str
    classes: tuple[str, ...]
    train: tuple[Images, Images]
    test: tuple[Images, Images]
    sources: dict[str, str]
    weights: npt.NDArray[np.float32] | None = None

    @property
    def labels(self) -> Labelling:
        """The kind of the labels."""
        return "several" if self.train[1].ndim == 2 else "classes"


def chunks(samples: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Yield the sample ranges (lo, hi) of the chunks of a part."""
    return ((lo, min(lo + chunk, samples)) for lo in range(0, samples, chunk))


def describe(
    source: Source, *, chunk: int, order: Order, seed: int, nodata: float | None = None, warn: Warn = silent
) -> Manifest:
    """Return the manifest of a source in its final order. Raises DataError if nothing could be learnt from it."""
    images = source.train[0]
    common = {
        "name": source.name,
        "classes": source.classes,
        "shape": images.shape[1:],
        "chunk": chunk,
        "dtype": images.dtype.name,
        "labels": source.labels,
        "nodata": nodata,
        "order": order,
        "seed": seed,
        "sources": source.sources,
    }
    facts = {name: list(_facts(source, name, chunk, nodata)) for name in PARTS}
    return assemble(common, facts, warn=warn)


def _facts(source: Source, name: str, chunk: int, nodata: float | None) -> Iterator[ChunkFacts]:
    images, labels = source.train if name == "train" else source.test
    weights = source.weights if name == "train" else None
    label_dtype = "uint8" if labels.ndim == 2 or len(source.classes) <= 256 else "uint16"
    for lo, hi in chunks(len(labels), chunk):
        yield chunk_facts(
            images[lo:hi],
            labels[lo:hi].astype(label_dtype, copy=False),
            None if weights is None else weights[lo:hi],
            classes=len(source.classes),
            nodata=nodata,
            where=f"{source.name}: {name}",
            first=lo,
        )


def assemble(common: Mapping[str, Any], facts: Mapping[str, Sequence[ChunkFacts]], *, warn: Warn = silent) -> Manifest:
    """Return the manifest from the facts of each part's chunks. Raises DataError if there is nothing to learn."""
    moments = sum((chunk.moments for chunk in facts["train"]), Moments())
    mean, deviation = moments.mean, moments.deviation
    if not any(deviation):
        raise plain_colour(common["name"])
    if constant := [c for c, d in enumerate(deviation) if not d]:
        warn(f"{common['name']}: channel {', '.join(map(str, constant))} is the same in every training image")
    parts = {name: _part(found) for name, found in facts.items()}
    manifest = _of_fields({**common, "mean": mean, "deviation": deviation, **parts})
    for reason, remedy in _problems(manifest):
        raise DataError(manifest.name, reason, remedy)
    if unseen := unseen_classes(manifest):
        raise strangers(manifest.name, unseen)
    return manifest


def draft_of(common: Mapping[str, Any], parts: Mapping[str, PartManifest]) -> Manifest:
    """Return a manifest without statistics. Raises DataError for a wrong field, and for chunks that are too large."""
    nothing = (0.0,) * common["shape"][2]
    draft = _of_fields({**common, "mean": nothing, "deviation": nothing, **parts})
    for reason, remedy in _of_chunks(draft):
        raise DataError(draft.name, reason, remedy)
    return draft


def _of_fields(fields: Mapping[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(fields)
    except ValidationError as error:
        problem = first_problem(error)
        raise DataError(f"{problem.where} = {problem.value}", problem.reason) from error


def plain_colour(name: str) -> DataError:
    """Return the error for images that have nothing in them."""
    return DataError(name, "every training image is the same plain colour", "give the real data set")


def strangers(name: str, unseen: Sequence[str], remedy: str | None = None) -> DataError:
    """Return the error for classes of the test part that the training part does not have."""
    named = ", ".join(unseen[:10]) + (", …" if len(unseen) > 10 else "")
    reason = f"the test part has samples of {named}, the training part has none"
    return DataError(name, reason, remedy or "leave them out of the test part, or give training samples of them")


def _part(facts: Sequence[ChunkFacts]) -> PartManifest:
    return PartManifest(
        samples=sum(chunk.samples for chunk in facts),
        class_counts=tuple(map(sum, zip(*(chunk.class_counts for chunk in facts), strict=True))),
        images=tuple(chunk.images for chunk in facts),
        labels=tuple(chunk.labels for chunk in facts),
        weights=tuple(chunk.weights for chunk in facts if chunk.weights),
    )


def parse(attributes: Any, path: str) -> Manifest:
    """Return the manifest in a group's attributes. Raises DataError naming what is wrong with it, and the remedy.

    The checksum comes first: a damaged manifest needs no other check.
    """
    stored = attributes.get(ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(stored, dict) or not isinstance(stored.get("manifest"), dict):
        raise DataError(path, "a zarr group, but not a data set of daskcnn, or not written to its end", REMEDY)
    body = stored["manifest"]
    if body.get("format") not in FORMATS:
        raise DataError(path, f"format {body.get('format')!r:.80}, this version reads formats 1 and 2", REMEDY)
    try:
        text = _canonical(body)
    except RecursionError:
        raise DataError(path, "the manifest is nested too deeply", REMEDY) from None
    if stored.get("sha256") != sha256(text):
        raise DataError(path, f"the manifest does not match its checksum {stored.get('sha256')!r:.80}", REMEDY)
    _refuse_excess(body, path)
    del attributes, stored, body  # a manifest of many chunks is large, and now it is there as text
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise DataError(path, f"manifest, {first_problem(error)}", REMEDY) from None
    for reason, _ in _problems(manifest):
        raise DataError(path, reason, REMEDY)
    return manifest


def _refuse_excess(body: dict[str, Any], path: str) -> None:
    """Refuse tables that could have an error for each of a million entries."""
    known = [(body, Manifest.model_fields), *((body.get(name), PartManifest.model_fields) for name in PARTS)]
    for found, fields in known:
        if isinstance(found, dict) and (key := unknown_keys(found, fields)) is not None:
            raise DataError(path, f"manifest, {key!r:.80}: unknown key", REMEDY)
    sources = body.get("sources")
    if isinstance(sources, dict) and len(sources) > _MOST_SOURCES:
        raise DataError(path, f"manifest, {len(sources):,} sources: at most {_MOST_SOURCES:,}", REMEDY)


def _problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the contradictions in a manifest, each with what the maker of the data set can do about it."""
    classes, channels = len(manifest.classes), manifest.shape[2]
    least = 1 if manifest.labels == "several" else 2
    if not least <= classes <= MOST_CLASSES:
        reason = f"{classes} class names: between {least} and {MOST_CLASSES:,} are needed"
        yield reason, "give samples of other classes too" if classes < least else "join some of the classes"
    deviations = len(manifest.deviation) if isinstance(manifest.deviation, tuple) else channels
    if min(manifest.shape) < 1 or len(manifest.mean) != channels or deviations != channels:
        means = len(manifest.mean)
        yield f"images of shape {manifest.shape} with {means} channel means, {deviations} deviations", REMEDY
    yield from _of_chunks(manifest)
    for name in PARTS:
        yield from ((reason, REMEDY) for reason in _part_problems(name, manifest, classes))
    yield from ((reason, "give training samples that differ in their labels") for reason in unlearnable(manifest))


def _of_chunks(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.chunk * manifest.sample_bytes > MAX_CHUNK_BYTES:
        what = f"chunks of {manifest.chunk:,} samples of shape {manifest.shape}"
        yield f"{what} are larger than {MAX_CHUNK_BYTES:,} bytes", "give a smaller chunk"


def unlearnable(manifest: Manifest) -> Iterator[str]:
    """Yield the reasons why nothing can be learnt from the training part."""
    counts = manifest.train.class_counts
    if manifest.labels == "several":
        if not any(0 < count < manifest.train.samples for count in counts):
            yield f"train: every sample has the same labels (counts {list(counts)!r:.80}), nothing to learn"
    elif sum(count > 0 for count in counts) < 2:
        yield f"train: every sample is of one class (counts {list(counts)!r:.80}), nothing to learn"


def unseen_classes(manifest: Manifest) -> list[str]:
    """Return the classes of the test part that the training part has no sample of."""
    both = zip(manifest.classes, manifest.train.class_counts, manifest.test.class_counts, strict=True)
    return [name for name, learnt, asked in both if asked and not learnt]


def _part_problems(name: str, manifest: Manifest, classes: int) -> Iterator[str]:
    part, chunk = manifest.part(name), manifest.chunk
    expected = -(-part.samples // chunk)
    arrays = (("images", part.images), ("labels", part.labels), *((("weights", part.weights),) if part.weights else ()))
    for array, sums in arrays:
        if len(sums) != expected:
            yield f"{name}/{array}: {len(sums)} checksums for {part.samples} samples in chunks of {chunk}"
        if bad := next((s for s in sums if len(s) != 64), None):
            yield f"{name}/{array}: {bad!r:.80} is no SHA-256"
    counts, several = part.class_counts, manifest.labels == "several"
    wrong = any(count > part.samples for count in counts) if several else sum(counts) != part.samples
    if len(counts) != classes or min(counts) < 0 or wrong:
        yield f"{name}: class counts {counts!r:.80} do not add up to {part.samples} samples"


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
