"""Messages of the server: requests to it, instructions to its host, snapshots. Plain frozen data.

`at` is in seconds, by the clock of the server's host.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Final, TypeAlias

import numpy.typing as npt

from daskcnn.frozen import frozen
from daskcnn.ps.gradient_noise import NoiseScale

Vector: TypeAlias = npt.NDArray[Any]
"""One-dimensional, on the host, in the center's dtype."""
RuleState: TypeAlias = dict[str, Vector]
"""A rule's vectors on the server between merges, by name (an Adagrad server's sums of squares). Most keep none.

A vector is as long as the center or its parameters. One whose name ends in `COUNT` has one number, of the whole center.
One whose name begins with `PAST` is an earlier center, of that version: it is of no use once workers have joined anew,
and not in snapshots.
"""
COUNT: Final = ".steps"
PAST: Final = "center@"
Pace: TypeAlias = tuple[float, float]
"""The learning rate of a step, and the part (0…1) of the run that was made before it."""


@dataclass(frozen=True, slots=True)
class Join:
    """A worker begins a session, numbered higher than its earlier ones, and asks for the center."""

    life: int
    worker: str
    session: int
    seq: int = 0
    at: float = 0.0


@frozen
class Pull:
    """A worker asks for the center; it trains from that version next.

    averaged: it asks for the average of the center instead (the center, if none is kept), which it does not train from.
    """

    life: int
    worker: str
    session: int
    seq: int = 0
    at: float = 0.0
    averaged: bool = False


@frozen
class Push:
    """A worker's gain since `base_version`. (life, worker, session, seq) is its key; seq counts from 1.

    payload: what the rule says is pushed. n_samples: trained on for it. accuracy: Q, in [0, 1]; it is 1 / (1 + loss)
    where the loss has no accuracy. pace: of a step by the payload, if that is a gradient; the server makes the step.
    step: of the round, where all workers make each step together; 0 where they do not. ticket: of the parts that went
    ahead of it, another one for each payload; 0: none did. last: the round ends with this meeting, where peers meet.
    """

    life: int
    worker: str
    session: int
    seq: int
    base_version: int
    payload: Vector = field(compare=False, repr=False)
    n_samples: int
    accuracy: float
    at: float = 0.0
    pace: Pace | None = None
    step: int = 0
    ticket: int = 0
    last: bool = False


@frozen
class PushPart:
    """The numbers lo…hi of a push whose numbers in front of them are still to come.

    Parts come from the vector's end on, without gaps. push: as it will be, but for its accuracy; its payload is these
    numbers alone. What follows from it may be given to all before the rest is there.
    """

    push: Push
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker is gone, or done. Leaving twice, or for an earlier session, changes nothing.

    last: the seq of the last push, which counts if it waits; no answer to it is told. 0: none that waits counts.
    """

    worker: str
    session: int
    at: float = 0.0
    last: int = 0


Request: TypeAlias = Join | Pull | Push | Leave


class Code(StrEnum):
    """The reason of a refusal. The server counts refusals by their codes.

    FAILED, MEMORY: the fault is not the request's. The rule has raised an error, or the server's host has no memory.
    """

    LIFE = "life"
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
    FAILED = "failed"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Objection:
    """Why a request cannot be granted. reason: value, reason and remedy in words."""

    code: Code
    reason: str = field(compare=False)


def failure(error: Exception) -> Objection:
    """Why nothing can be merged any more, after an error that no request is to blame for."""
    if isinstance(error, MergeFailed):
        return error.objection
    if isinstance(error, MemoryError):
        return Objection(Code.MEMORY, str(error) or "no more is given")
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return Objection(Code.FAILED, f"{type(error).__name__}: {error}{place}")


class MergeFailed(Exception):
    """A merge was not made, by no fault of a push. objection: why."""

    def __init__(self, objection: Objection) -> None:
        super().__init__(objection)  # as it is pickled
        self.objection = objection


@frozen
class Reply:
    """The answer to the join, pull or push with this (worker, session, seq).

    weights: what the rule's `adopt` takes, mostly the center. Read-only, and never written again. Where the ranges of
    the center lie elsewhere, a `StoredVector` stands for it until its pieces are read. version: the center's, after the
    merge. staleness: versions between the push's base and the center that it was merged into. gamma: the rule's
    attenuation γ of the push; 1 where the rule has none. waited: seconds between the push and its merge. more, since:
    samples that the worker's minibatches have more from this step of its round on; 0 where nothing changes. ahead: the
    weights from this number on were given by `CenterPart`s that hold; None: none of them. noise: of the gradients that
    were merged so far, once it is known. last: the round of all peers ends with this meeting. parts: of the next push
    may go ahead of it.
    """

    life: int
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
    more: int = 0
    since: int = 0
    ahead: int | None = None
    noise: NoiseScale | None = None
    last: bool = False
    parts: bool = False


@frozen
class CenterPart:
    """Numbers of the new center, from `lo` on, for the sender of a push of which a part is still on its way.

    They hold if the reply to that push says so.
    """

    worker: str
    session: int
    seq: int
    lo: int
    values: Vector = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request with this (worker, session, seq) changed nothing. reason: value, reason and remedy in words."""

    worker: str
    session: int
    seq: int
    code: Code
    reason: str = field(compare=False)


Instruction: TypeAlias = Reply | Refuse


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a new server needs to go on. The arrays are never written again.

    state: the rule's (None: as before the first merge), and the center's average where one is kept (`average`).
    merged, repeated: pushes so far, repeats answered. refused: how many for each reason. noise: what is known of the
    gradients' noise (`gradient_noise`).
    """

    center: Vector = field(compare=False, repr=False)
    version: int = 0
    life: int = 0
    state: RuleState | None = field(default=None, compare=False, repr=False)
    merged: int = 0
    repeated: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    noise: tuple[float, ...] = ()
