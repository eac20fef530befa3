"""Instructions of the server: plain frozen data. The host of the server carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from daskcnn.frozen import frozen
from daskcnn.ps.requests import Vector


class Code(StrEnum):
    """The reason of a refusal. The server counts refusals by their codes."""

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
class Objection:
    """Why a request cannot be granted. reason: value, reason and remedy in words."""

    code: Code
    reason: str = field(compare=False)


@frozen
class Reply:
    """The answer to the join, pull or push with this (worker, session, seq).

    Attributes
    ----------
    weights
        What the rule's `adopt` takes, mostly the center. Read-only, and never written again. Where the ranges of the
        center lie elsewhere, a `StoredVector` stands for it until its pieces are read.
    version
        The center's version after the merge.
    staleness
        Versions between the push's base and the center that it was merged into; 0 for a join or pull.
    gamma
        The rule's attenuation γ of the push; 1 where the rule has none.
    waited
        Seconds between the push and its merge.
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
    """The request with this (worker, session, seq) changed nothing. reason: value, reason and remedy in words."""

    worker: str
    session: int
    seq: int
    code: Code
    reason: str = field(compare=False)


Instruction: TypeAlias = Reply | Refuse
