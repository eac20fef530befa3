"""The base of a step of augmentation: a frozen table of parameters that is applied to a minibatch of images.

Random choices are drawn from keys of sample and pass, so a sample looks the same on any worker, in any minibatch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from daskcnn.arrays import derive, uniform
from daskcnn.store.dataset import Described

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
"""(N, 3): the row and the column of each image that come first, and 1, or -1 where columns go from right to left."""
Line: TypeAlias = npt.NDArray[np.int64] | int
Border = Literal["zeros", "reflect"]
_FIRST_SALT = (1 << 32) + 1
"""Layers draw with salts of 32 bits."""


@dataclass(frozen=True, slots=True)
class ShownSamples:
    """The samples of a minibatch by their numbers (N,), and keys (N,) of sample and pass, made of the seed."""

    keys: Keys
    indices: npt.NDArray[np.int64]
    seed: int
    presentation: int


@dataclass(frozen=True, slots=True)
class Chance:
    """The random numbers of a step, (draws, N) in [0, 1), and the salt of the first, which no other step has."""

    numbers: npt.NDArray[np.float32]
    samples: ShownSamples
    salt: int

    def turns(self) -> npt.NDArray[np.bool_]:
        """Return (N,): true in every second pass, in even or odd ones by a hash of the sample."""
        of, samples = derive(np, self.samples.indices.astype(np.uint64), self.samples.seed), self.samples
        return (derive(np, of, self.salt) >> np.uint64(63)) != np.uint64(samples.presentation % 2)


def chances(draws: Sequence[int], samples: ShownSamples) -> list[Chance]:
    """Return the chances of steps that draw this many numbers each."""
    numbers = uniform(np, derive(np, samples.keys, _salts(sum(draws))))
    edges = pairwise(accumulate(draws, initial=0))
    return [Chance(numbers[begin:end], samples, _FIRST_SALT + begin) for begin, end in edges]


@cache
def _salts(count: int) -> Keys:
    return np.arange(_FIRST_SALT, _FIRST_SALT + count, dtype=np.uint64)[:, None]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The partner of each image of a minibatch, and the sample's own part of its image and label; (N,) each."""

    partners: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pictures:
    """A minibatch x (H, W, N, C), normalised, on its way through the steps, which may write to it."""

    x: Array
    images: Described
    mixture: Mixture | None = None


class Step(BaseModel, ABC):
    """A step of augmentation; its fields are its parameters, unknown ones are refused.

    name: the value of the key `step`. draws: random numbers of a sample that it takes from its `Chance`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    name: ClassVar[str]
    draws: ClassVar[int]

    @abstractmethod
    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Return the pictures after this step."""

    def problems(self, images: Described) -> Iterator[str]:
        """Yield the parameters that do not fit these images, a line each: `key = value: reason; remedy`."""
        return iter(())

    @model_serializer(mode="wrap")
    def _named(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"step": self.name, **fields(self)}

    def __str__(self) -> str:
        given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self)
        return f"{self.name} ({given})" if given else self.name


# --- steps that move pixels by whole places ---


@dataclass(frozen=True, slots=True)
class Moves:
    """The places that the pixels of each image come from, as in `Places`, (N,) each or one number for all.

    They lie at most `reach` pixels beyond the image's edges. `border` is what is there: 0, or the image's mirror image
    without its outermost pixels again.
    """

    rows: Line = 0
    columns: Line = 0
    ways: Line = 1
    reach: int = 0
    border: Border = "zeros"

    def places(self, count: int) -> Places:
        """Return the same in one array, (count, 3)."""
        places = np.empty((count, 3), np.int64)
        places[:, 0], places[:, 1], places[:, 2] = self.rows, self.columns, self.ways
        return places

    @property
    def still(self) -> bool:
        """True if every image stays where it is, as far as can be told at once."""
        return not self.reach and isinstance(self.ways, int)

    def then(self, other: Moves) -> Moves | None:
        """Return both moves in one; None where both reach beyond the edges, so that it takes two."""
        if self.reach and other.reach:
            return None
        columns = self.columns + self.ways * other.columns
        border = other.border if other.reach else self.border
        return Moves(self.rows + other.rows, columns, self.ways * other.ways, self.reach + other.reach, border)


class MovingStep(Step):
    """Base of steps that move pixels by whole places: the first ones are made as the loader reads the images."""

    @abstractmethod
    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return the move of images of this height and width."""

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Move the pixels."""
        h, w = pictures.x.shape[:2]
        return replace(pictures, x=moved(pictures.x, self.move(chance, (h, w))))


def moved(x: Array, move: Moves) -> Array:
    """Return x (H, W, N, C) with every image moved."""
    h, w, n, c = x.shape
    beyond = move.reach
    mode: Literal["reflect", "constant"] = "reflect" if move.border == "reflect" else "constant"
    padded = np.pad(x, ((beyond, beyond), (beyond, beyond), (0, 0), (0, 0)), mode)
    rows = beyond + move.rows + np.arange(h)[:, None]
    columns = beyond + move.columns + move.ways * np.arange(w)[:, None]
    pixels = rows[:, None, :] * ((w + 2 * beyond) * n) + (columns * n + np.arange(n))
    return padded.reshape(-1, c).take(pixels, axis=0)


def shifted(chance: Chance, pixels: int, border: Border) -> Moves:
    """Return shifts by at most this number of pixels each way; all whole numbers are equally likely."""
    rows, columns = (chance.numbers * (2 * pixels + 1)).astype(np.int64) - pixels
    return Moves(rows, columns, reach=pixels, border=border)
