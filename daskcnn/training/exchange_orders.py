"""The orders of a replica's exchanges (`replica_exchange`), and the answers to what is sent. Plain frozen data."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from daskcnn.ps import Pace, Reply, Vector
from daskcnn.training.cadence import TrainSteps
from daskcnn.training.judging import JudgedPart


class Gain(NamedTuple):
    """A push without its sender.

    payload: where the replica computes; it is not written to any more, or is `Local.weights` or `Local.gradients`
    itself, which rest until the reply is there. pace: of gradients. step: of the round, where minibatches may change;
    else 0.
    """

    seq: int
    base_version: int
    payload: Vector
    samples: int
    accuracy: float
    pace: Pace | None = None
    step: int = 0


class Send(NamedTuple):
    """Push, then pull, as far as either is asked for, each once the one before is answered.

    meanwhile: the steps to make during the calls; None: wait for the replies.
    """

    push: Gain | None
    pull: bool
    meanwhile: TrainSteps | None


class Await(NamedTuple):
    """Wait for the replies of the exchange that is under way."""


class PullCenter(NamedTuple):
    """Pull the center, or its average, to judge it."""

    averaged: bool


class JudgeLocal(NamedTuple):
    """Judge the replica's own weights on these validation samples."""

    part: JudgedPart


class JudgeCenter(NamedTuple):
    """Judge these weights on these validation samples."""

    part: JudgedPart
    weights: Vector


class Report(NamedTuple):
    """The round has ended: ask for its report."""


Meet: TypeAlias = JudgeLocal | Send | Await
"""Orders within a round, around an exchange."""
Order: TypeAlias = TrainSteps | Meet | PullCenter | JudgeCenter | Report
Answer: TypeAlias = tuple[Reply, Vector]
"""A reply, and the vector that it brings, where the replica computes."""
