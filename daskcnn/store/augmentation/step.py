"""What a step of augmentation is: a frozen table of parameters, and what it makes of a minibatch of images.

Random choices are drawn from keys of sample and pass, so a sample looks the same on any worker, in any minibatch.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from daskcnn.arrays import derive, uniform
from daskcnn.store.dataset import Described

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
"""(N, 3): the row and the column of each image that come first, and 1, or -1 where columns go from right to left."""
Border = Literal["zeros", "reflect"]

_FIRST_SALT = (1 << 32) + 1
"""Layers draw with salts of 32 bits."""


@dataclass(frozen=True, slots=True)
class Chance:
    """What the random choices of a step are drawn from.

    Attributes
    ----------
    keys : (N,), of sample and pass
    samples : (N,), of the sample alone
    presentation : number of the pass
    salt : of the step's first number
    """

    keys: Keys
    samples: Keys
    presentation: int
    salt: int = _FIRST_SALT

    def numbers(self, count: int) -> npt.NDArray[np.float32]:
        """Return (count, N) numbers in [0, 1)."""
        salts = np.arange(self.salt, self.salt + count, dtype=np.uint64)[:, None]
        return uniform(np, derive(np, self.keys, salts))

    def turns(self) -> npt.NDArray[np.bool_]:
        """Return (N,): true in every second pass, in even or odd ones by a hash of the sample."""
        return (derive(np, self.samples, self.salt) >> np.uint64(63)) != np.uint64(self.presentation % 2)


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the images of a minibatch are mixed of.

    Attributes
    ----------
    partners : (N,), the place in the minibatch of each sample's partner
    shares : (N,), the sample's own part of its image and label; the rest is the partner's
    """

    partners: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pictures:
    """A minibatch on its way through the steps.

    Attributes
    ----------
    x : (H, W, N, C), normalised, of the steps' own: they may write to it
    images : the data set's description
    mixture : once the images are mixed
    """

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
        """Parameters that do not fit these images, a line each: `key = value: reason; remedy`."""
        return iter(())

    @model_serializer(mode="wrap")
    def _named(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"step": self.name, **fields(self)}

    def __str__(self) -> str:
        given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in self)
        return f"{self.name} ({given})" if given else self.name


# --- steps that move pixels by whole places ---


@dataclass(frozen=True, slots=True)
class Move:
    """Where the pixels of each image come from.

    Attributes
    ----------
    places : (N, 3)
    reach : pixels that they lie beyond the image's edges at most
    border : what is beyond the edges: 0, or the image's mirror image without its outermost pixels again
    """

    places: Places
    reach: int = 0
    border: Border = "zeros"

    @classmethod
    def none(cls, count: int) -> Move:
        """Leave every image where it is."""
        return cls(np.repeat(np.array([[0, 0, 1]]), count, axis=0))

    def then(self, other: Move) -> Move | None:
        """Return both moves in one; None where both reach beyond the edges, so that it takes two."""
        if self.reach and other.reach:
            return None
        row, column, way = self.places.T
        rows, columns, ways = other.places.T
        places = np.stack([row + rows, column + way * columns, way * ways], axis=1)
        return Move(places, self.reach + other.reach, other.border if other.reach else self.border)


class MovingStep(Step):
    """Base of steps that move pixels by whole places: the first ones are made as the loader reads the images."""

    @abstractmethod
    def move(self, chance: Chance, shape: tuple[int, int]) -> Move:
        """Return the move of images of this height and width."""

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Move the pixels."""
        h, w = pictures.x.shape[:2]
        return replace(pictures, x=moved(pictures.x, self.move(chance, (h, w))))


def moved(x: Array, move: Move) -> Array:
    """Return x (H, W, N, C) with every image moved."""
    h, w, n, c = x.shape
    beyond, places = move.reach, move.places
    mode: Literal["reflect", "constant"] = "reflect" if move.border == "reflect" else "constant"
    padded = np.pad(x, ((beyond, beyond), (beyond, beyond), (0, 0), (0, 0)), mode)
    rows = beyond + places[:, 0] + np.arange(h)[:, None]
    columns = beyond + places[:, 1] + places[:, 2] * np.arange(w)[:, None]
    pixels = rows[:, None, :] * ((w + 2 * beyond) * n) + (columns * n + np.arange(n))
    return padded.reshape(-1, c).take(pixels, axis=0)


def shifted(chance: Chance, pixels: int, border: Border) -> Move:
    """Return shifts by up to so many pixels each way, whole numbers that are equally likely."""
    rows, columns = (chance.numbers(2) * (2 * pixels + 1)).astype(np.int64) - pixels
    return Move(np.stack([rows, columns, np.ones_like(rows)], axis=1), pixels, border)
