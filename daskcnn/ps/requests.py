"""Requests that the server handles: plain frozen data. `at` is in seconds, by the clock of the server's host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy.typing as npt

from daskcnn.frozen import frozen

Vector: TypeAlias = npt.NDArray[Any]
"""One-dimensional, on the host, in the center's dtype."""


@dataclass(frozen=True, slots=True)
class Join:
    """A worker begins a life (`session`, higher than its earlier ones) and asks for the center."""

    epoch: int
    worker: str
    session: int
    seq: int = 0
    at: float = 0.0


@frozen
class Pull:
    """A worker asks for the center; it trains from that version next."""

    epoch: int
    worker: str
    session: int
    seq: int = 0
    at: float = 0.0


@frozen
class Push:
    """What a worker gained since `base_version`. (epoch, worker, session, seq) is its key; seq counts from 1.

    payload: what the rule says is pushed. n_samples: trained on for it. accuracy: Q, in [0, 1]; it is 1 / (1 + loss)
    where the loss has no accuracy.
    """

    epoch: int
    worker: str
    session: int
    seq: int
    base_version: int
    payload: Vector = field(compare=False, repr=False)
    n_samples: int
    accuracy: float
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker is gone, or done. Leaving twice, or for an earlier session, changes nothing."""

    worker: str
    session: int
    at: float = 0.0


Request: TypeAlias = Join | Pull | Push | Leave
