"""What the server wants done. Plain frozen data; whoever hosts the server carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from daskcnn.ps.events import Vector


class Code(StrEnum):
    """Why an event was refused; the server counts them."""

    EPOCH = "epoch"
    WORKER = "worker"
    SESSION = "session"
    SEQ = "seq"
    BASE = "base_version"
    LENGTH = "length"
    DTYPE = "dtype"
    FINITE = "finite"
    ACCURACY = "accuracy"
    SAMPLES = "n_samples"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the join, pull or push with this (worker, session, seq).

    weights: what the rule's `adopt` takes, mostly the center; read-only, and never written again. version: the
    center's. The rest is for the record of a push: staleness in versions, seconds waited for the others, and the
    attenuation γ (1 where the rule has none); a join's or pull's are the defaults.
    """

    epoch: int
    worker: str
    session: int
    seq: int
    weights: Vector = field(compare=False, repr=False)
    version: int
    base_version: int
    staleness: int = 0
    gamma: float = 1.0
    accuracy: float = 0.0
    n_samples: int = 0
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """The event with this (worker, session, seq) changed nothing. reason: value, reason and remedy in words."""

    worker: str
    session: int
    seq: int
    code: Code
    reason: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Evict:
    """The worker was silent for too long and is no longer part of the run; it may join again as a new session."""

    worker: str
    session: int


Instruction: TypeAlias = Reply | Refuse | Evict
