"""The kinds of augmentation steps: crops, shifts, mirror images, colours, squares cut out, mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, field_validator

from daskcnn import compiled
from daskcnn.store.augmentation.step import Array, Border, Chance, Mixture, Moves, MovingStep, Pictures, Step, shifted
from daskcnn.store.dataset import Described


class Crop(MovingStep):
    """Pad an image with zeros on all sides, and cut one of its own size out of that (He et al. 2016, §4.2).

    Zero is the mean. Theano-MPI, Alg. 1, crops sub-images out of larger images instead.
    """

    name: ClassVar[str] = "crop"
    draws: ClassVar[int] = 2
    pixels: int = Field(4, ge=1, description="Pixels that are padded on each side.")

    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return shifts by up to `pixels` each way, zeros moving in."""
        return shifted(chance, self.pixels, "zeros")

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse crops that may have nothing of the image."""
        if self.pixels >= (side := min(images.shape[:2])):
            yield f"pixels = {self.pixels}: nothing of an image of {side} pixels may be left; use at most {side - 1}"


class Cutout(Step):
    """Set a square around any pixel of each image, as far as it reaches, to 0, the mean (DeVries and Taylor 2017)."""

    name: ClassVar[str] = "cutout"
    draws: ClassVar[int] = 2
    size: int = Field(ge=1, description="Pixels of the square's side.")

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Cut the squares out in place."""
        sides = np.array(pictures.x.shape[:2])
        first = (chance.numbers.T * sides).astype(np.int64) - self.size // 2
        boxes = np.concatenate([first.clip(0), (first + self.size).clip(max=sides)], axis=1)
        compiled.minibatch.erase(pictures.x, np.ascontiguousarray(boxes))
        return pictures

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse squares that may cover the whole image."""
        if self.size > (side := min(images.shape[:2])):
            yield f"size = {self.size}: the square is larger than images of {side} pixels; use at most {side}"


class Jitter(Step):
    """Change brightness, contrast and saturation, in this order, each by a factor between 1 - a and 1 + a.

    Brightness multiplies the pixels as they are stored. Contrast multiplies their distance from the mean of the image's
    channel, saturation that from the pixel's grey (0.299 R + 0.587 G + 0.114 B). Whole numbers stay in the range of
    their type.
    """

    name: ClassVar[str] = "jitter"
    draws: ClassVar[int] = 3
    brightness: float = Field(0.0, ge=0, le=1, description="a of the factor on brightness.")
    contrast: float = Field(0.0, ge=0, le=1, description="a of the factor on contrast.")
    saturation: float = Field(0.0, ge=0, le=1, description="a of the factor on saturation. For three channels only.")

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Change the colours in place."""
        x, images = pictures.x, pictures.images
        most = np.array([self.brightness, self.contrast, self.saturation])
        factors = 1 + most * (2 * chance.numbers.T.astype(np.float64) - 1)
        whole = np.iinfo(images.dtype) if images.dtype.kind in "iu" else None
        limits = np.array([whole.min, whole.max] if whole else [-np.inf, np.inf], np.float64)
        lines = np.empty((2, *x.shape[2:]))
        mean, deviation = np.array(images.mean), np.array(images.deviation)  # which may be views that cannot be written
        compiled.minibatch.recolour(x, np.ascontiguousarray(factors), mean, deviation, limits, lines)
        return pictures

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse saturation where a pixel has no colour."""
        if self.saturation and images.shape[2] != 3:
            channels = f"{images.shape[2]} channel{'s' * (images.shape[2] != 1)}"
            yield f"saturation = {self.saturation:g}: colours have three channels, these images {channels}; remove it"


class Mirror(MovingStep):
    """Mirror half of the images, left to right."""

    name: ClassVar[str] = "mirror"
    draws: ClassVar[int] = 1
    alternate: bool = Field(
        False,
        description="Whether each sample is mirrored in every second pass, in even or odd ones by a hash of its number "
        "(airbench94, Jordan 2024). Otherwise chance decides in each pass.",
    )

    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return columns from right to left for the images that are mirrored."""
        mirrored = chance.turns() if self.alternate else chance.numbers[0] >= 0.5
        return Moves(columns=mirrored * (shape[1] - 1), ways=1 - 2 * mirrored)


class Mixup(Step):
    """Mix each image with the next one of its minibatch, and their labels alike (Zhang et al. 2018).

    The sample's own share is the larger of λ and 1 - λ, where λ is Beta(alpha, alpha). It counts as the right answer.
    """

    name: ClassVar[str] = "mixup"
    draws: ClassVar[int] = 1
    alpha: float = Field(0.2, ge=0.01, le=100, description="Of the shares' distribution: they are more even if higher.")

    def mixture(self, chance: Chance) -> Mixture:
        """Return who is mixed with whom."""
        from scipy.special import betaincinv

        shares = betaincinv(self.alpha, self.alpha, chance.numbers[0].astype(np.float64))
        return Mixture(np.roll(np.arange(len(shares)), -1), np.maximum(shares, 1 - shares))

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Mix the images."""
        mixture, y = self.mixture(chance), np.empty_like(pictures.x)
        compiled.minibatch.mix(pictures.x, mixture.partners, mixture.shares.astype(y.dtype), y)
        return replace(pictures, x=y, mixture=mixture)


def _as_pair(value: Any) -> Any:
    """Take a list for a tuple, as TOML and JSON have no other, and whole numbers for fractions."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(float(each) if type(each) is int else each for each in value)


Part = Annotated[float, Field(gt=0, le=1)]
Ratio = Annotated[float, Field(ge=0.01, le=100)]


class ResizedCrop(Step):
    """Cut out a rectangle of random area, shape and place, and enlarge it to the image (Szegedy et al. 2015, §6).

    Sides longer than the image's are cut to it. Pixels in between are bilinear.
    """

    name: ClassVar[str] = "resized-crop"
    draws: ClassVar[int] = 4
    scale: Annotated[tuple[Part, Part], BeforeValidator(_as_pair)] = Field(
        (0.25, 1.0), description="Smallest and largest area, as parts of the image's."
    )
    ratio: Annotated[tuple[Ratio, Ratio], BeforeValidator(_as_pair)] = Field(
        (0.75, 1.333), description="Smallest and largest width ÷ height, drawn evenly by its logarithm."
    )

    @field_validator("scale", "ratio")
    @classmethod
    def _in_order(cls, pair: tuple[float, float]) -> tuple[float, float]:
        if pair[0] > pair[1]:
            raise ValueError("the smallest comes first; swap the two")
        return pair

    def boxes(self, chance: Chance, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
        """Return the rectangles (N, 4): first row, first column, height and width, in pixels."""
        area, ratio, row, column = chance.numbers.astype(np.float64)
        area = self.scale[0] + area * (self.scale[1] - self.scale[0])
        low, high = np.log(self.ratio)
        H, W = shape
        side, stretch = np.sqrt(area * H * W), np.exp((low + ratio * (high - low)) / 2)
        height, width = np.minimum(H, side / stretch), np.minimum(W, side * stretch)
        return np.stack([row * (H - height), column * (W - width), height, width], axis=1)

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Enlarge the rectangles."""
        H, W = pictures.x.shape[:2]
        row, column, height, width = self.boxes(chance, (H, W)).T
        y = np.empty_like(pictures.x)
        rows, columns = between(H, row, height, y.dtype), between(W, column, width, y.dtype)
        compiled.minibatch.resample(pictures.x, *rows, *columns, y)
        return replace(pictures, x=y)

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse rectangles of less than a pixel."""
        H, W = images.shape[:2]
        if self.scale[0] * H * W < 1:
            yield f"scale = {list(self.scale)}: may leave less than a pixel of {H}x{W}; raise its first number"


def between(
    size: int, first: npt.NDArray[np.float64], length: npt.NDArray[np.float64], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return where the centres of `size` pixels lie in a stretch of an axis of as many.

    Two arrays (size, N): the pixel before each, and the part of the way to the next one.
    """
    at = (first + (np.arange(size)[:, None] + 0.5) * (length / size) - 0.5).clip(0, size - 1)
    before = at.astype(np.int64)
    return before, (at - before).astype(dtype)


class Translate(MovingStep):
    """Shift an image by up to `pixels` in both directions, by whole pixels."""

    name: ClassVar[str] = "translate"
    draws: ClassVar[int] = 2
    pixels: int = Field(2, ge=1, description="Pixels of the largest shift, each way.")
    border: Border = Field(
        "reflect",
        description="What moves in: `reflect`, the image mirrored at its outermost pixels, or `zeros`, the mean.",
    )

    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return shifts by up to `pixels` each way."""
        return shifted(chance, self.pixels, self.border)

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse shifts by more than there is to mirror, or to be seen."""
        if self.pixels >= (side := min(images.shape[:2])):
            yield f"pixels = {self.pixels}: an image of {side} pixels has no more to show; use at most {side - 1}"
