"""Alltoall-sum-allgather: how the replicas of BSP meet without a server (Theano-MPI §3.1). No I/O.

Each of k replicas is in charge of one k-th of the vector. It is given that piece of what all others have to say, merges
them as the server would, with the rule's own `merge`, and hands the result to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskcnn.ps.bases import Bases
from daskcnn.ps.bsp import BSP
from daskcnn.ps.events import Push, Vector
from daskcnn.ps.half import cast
from daskcnn.ps.rule import Local, View

SCALE = 256.0
"""Increments are multiplied by this in float16: those of 1e-6, as they come late in training, would lose most of their
digits. What adds more than 255 to a weight at once is infinite, and counts as diverged."""


@dataclass(frozen=True)
class ASA:
    """One way to exchange. Over the wire go what the rule pushes and its merge, or, in float16, increments.

    In float16 the weights themselves would lose most of what a step adds to them; an increment loses a part in 2,000.
    """

    rule: BSP
    wire: np.dtype[np.floating]

    @property
    def half(self) -> bool:
        """Whether increments travel, in float16."""
        return self.wire == np.float16

    def contribution(self, local: Local) -> Vector:
        """What is cut into pieces, in the wire's dtype (where the replica computes). May be the weights themselves."""
        if not self.half:
            whole: Vector = cast(self.rule.payload(local), self.wire)
            return whole
        gained = np.subtract(local.weights, local.base)
        gained *= SCALE
        scaled: Vector = cast(gained, self.wire)
        return scaled

    def add_up(self, base: Vector, pieces: Sequence[Vector], samples: Sequence[int]) -> Vector:
        """The merge of one range, from the base's and the replicas' pieces, in the wire's dtype.

        samples: what each replica trained on for its piece. Replicas have to be in the same order everywhere.
        """
        center = np.zeros_like(base) if self.half else base
        pushes = [
            Push(0, str(i), 0, 1, 0, cast(piece, base.dtype), n, 1.0)
            for i, (piece, n) in enumerate(zip(pieces, samples, strict=True))
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            merge = self.rule.merge(center, {}, pushes, View(0, len(pushes), Bases()))
        merged: Vector = cast(merge.center, self.wire)  # of scaled increments it is as much scaled
        return merged

    def center(self, local: Local, merged: Vector) -> Vector:
        """The new center, from the merges of all ranges, joined (where the replica computes). A new array."""
        center: Vector = cast(merged, local.weights.dtype)
        if self.half:
            center *= 1 / SCALE
            center += local.base
        return center
