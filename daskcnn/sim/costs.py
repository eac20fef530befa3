"""Costs of parallel SGD, ADMM and Downpour (Hegde & Usmani §5): their formulas with the constants of a job.

The paper gives orders of growth. Here the terms that it adds up are evaluated as they stand, with the sums over rounds
of pairwise messages that it writes out: k - 1 messages gather, or spread, a vector among k workers in log2 k turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EPSILON = 1e-2
"""The error to be reached where none is given: it only sets how many iterations, ln(1/ε), the formulas count."""


@dataclass(frozen=True)
class Constants:
    """A job on a cluster, in the paper's letters.

    k: workers; p: numbers in the vector; D: samples; q: threads of a worker; epsilon: ε; theta: θ, updates in the run;
    T: seconds between two pushes of a worker; tau: τ, seconds from one push to the next that the server can take
    (receiving one while it merges another); add: seconds to add two numbers; B: bytes a second of a link; L: seconds a
    message; itemsize, sample_bytes: bytes of a number, of a sample.
    """

    k: int
    p: int
    D: int
    q: int
    theta: int
    T: float
    tau: float
    add: float
    B: float
    L: float
    itemsize: int
    sample_bytes: int
    epsilon: float = EPSILON

    @property
    def iterations(self) -> float:
        """ln(1/ε)."""
        return math.log(1 / self.epsilon)

    @property
    def turns(self) -> float:
        """log2 k."""
        return math.log2(self.k)

    @property
    def saturation(self) -> float | None:
        """Workers from which on the server is what Downpour waits for: T/τ; None where τ is not known."""
        return self.T / self.tau if self.tau else None


@dataclass(frozen=True)
class Cost:
    """One line of the table. unit: "s" or "B"."""

    rule: str
    what: str
    formula: str
    value: float
    unit: str


def costs(c: Constants) -> list[Cost]:
    """All of the paper's, for these constants."""
    vector = c.p * c.itemsize
    meeting = 2 * vector * (c.k - 1)
    meeting_time = 2 * c.turns * (c.L + vector / c.B)
    summing = c.turns * c.p * c.add
    descent = c.iterations * c.T
    return [
        Cost("parallel-sgd", "computation", "(p/q)·log k + p·log 1/ε", summing / c.q + descent, "s"),
        Cost("parallel-sgd", "shuffle", "N·k", c.D * c.sample_bytes, "B"),
        Cost("parallel-sgd", "communication", "p·k", meeting, "B"),
        Cost("parallel-sgd", "communication time", "p·log k", meeting_time, "s"),
        Cost("admm", "computation", "p·log k·log 1/ε + p·log 1/ε", c.iterations * summing + descent, "s"),
        Cost("admm", "communication", "k·p·log 1/ε", c.iterations * meeting, "B"),
        Cost("admm", "communication time", "p·log 1/ε·log k", c.iterations * meeting_time, "s"),
        Cost("downpour", "one update", "T + τ", c.T + c.tau, "s"),
        Cost("downpour", "communication", "θ·p", c.theta * vector, "B"),
        Cost("downpour", "all updates", "θ·max((T + τ)/k, τ)", c.theta * max((c.T + c.tau) / c.k, c.tau), "s"),
    ]
