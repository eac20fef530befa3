"""Bulk synchronous parallel SGD (Theano-MPI §3.1, §4), with a server or by alltoall-sum-allgather (§3.2). No I/O.

In the latter each of k replicas gets the pieces of one k-th of the vector from all others, merges them as the server
would, with the rule's own `merge`, and sends the result to all. Conversions go block by block, so that no temporary is
as long as the vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from daskcnn.ps.messages import Pace, Push, RuleState, Vector
from daskcnn.ps.rule import Local, Merge, UpdateRule, View, parameter
from daskcnn.ps.split import Span
from daskcnn.ps.vectors import cast, sample_weights, weighted_sum
from daskcnn.ps.versions import Bases


class BSP(UpdateRule):
    """All replicas step from the same weights, and meet after every `every` steps (0: at the round's end).

    combine: "gradients" makes one step of the optimizer by the gradient of all samples, as one machine would, with
    whatever optimizer; "average" takes the mean of the weights after descent; "sum" adds up the updates, which carry
    momentum and weight decay. A replica counts by the samples it trained on, so that unequal minibatches make the
    gradient of all samples. batch: with "step" the replicas share the samples of a step by their speed. With "worker"
    each has as many on average, as in Theano-MPI, and the learning rate is multiplied by the number of replicas.
    exchange: how they meet. "allreduce" goes through the server. With "asa" each worker sums one part of the vector and
    hands it to the others, peer to peer; "asa16" sends float16 and sums in float32.
    """

    barrier: ClassVar[bool] = True
    combine: Literal["gradients", "average", "sum"] | None = Field(
        None,
        description="What is merged: gradients, for one step of the optimizer; the mean of the weights; or the sum of "
        "their updates. Default: gradients where workers meet after every step through the server, else the mean.",
    )
    every: int = parameter(
        1,
        "Steps between two meetings; 0 is the round's end.",
        "it counts the steps between two meetings; 0 is the round's end",
        ge=0,
    )
    batch: Literal["step", "worker"] | None = Field(
        None,
        description='What `train.batch_size` counts: the samples of a "step" of all workers, shared by speed, or of '
        'each "worker" on average, with the learning rate times the number of workers. Default: of a step where '
        "workers meet after every one, else of a worker.",
    )
    exchange: Literal["allreduce", "asa", "asa16"] = Field(
        "allreduce",
        description="How replicas meet: through the server, or peer to peer in the wire's number type or in float16.",
    )

    @property
    def period(self) -> int | None:
        return self.every or None

    @property
    def _merged(self) -> str:
        return self.combine or ("gradients" if self.every == 1 and not self.serverless else "average")

    @property
    def merges_gradients(self) -> bool:
        return self._merged == "gradients"

    @property
    def takes_means(self) -> bool:
        return self._merged == "average"

    @property
    def overshoots(self) -> bool:
        return self._merged == "sum"

    @property
    def shares_steps(self) -> bool:
        return (self.batch or ("step" if self.every == 1 else "worker")) == "step"

    def rate(self, replicas: int, power: float = 1.0) -> float:
        """The number of replicas, where each has a minibatch of its own and a mean would divide the step by it."""
        return 1.0 if self.shares_steps or self._merged == "sum" else float(replicas) ** power

    def problems(self, epochs: int) -> Iterator[str]:
        if self.batch == "step" and self.every != 1:
            yield (
                f'rule.batch = "step": workers meet after {self.every or "all"} steps of a round (rule.every = '
                f"{self.every}), and each has minibatches of its own; remove it, or use rule.every = 1"
            )
        if self.combine == "gradients" and (self.every != 1 or self.serverless):
            why = f"rule.every = {self.every}" if self.every != 1 else f"rule.exchange = {self.exchange!r}"
            yield (
                f'rule.combine = "gradients": the server steps by the gradients of single steps, and {why}; use '
                '"average", or rule.every = 1 and rule.exchange = "allreduce"'
            )

    def times(self, replicas: int) -> int:
        """Return by how many times the sum of these replicas' updates is larger than their mean."""
        return 1 if self.shares_steps else replicas

    def for_groups(self) -> Self:
        """A group's gradients lie with its shards: the mean of the weights, unless something else is asked for."""
        return self if self.combine or not self.merges_gradients else self.model_copy(update={"combine": "average"})

    @property
    def serverless(self) -> bool:
        return self.exchange != "allreduce"

    def wire(self, asked: str) -> str:
        """float16 with "asa16"."""
        return "float16" if self.exchange == "asa16" else asked

    def problems_with_groups(self, size: int) -> Iterator[str]:
        if self.combine == "gradients":
            yield (
                f'rule.combine = "gradients": groups of workers (train.replica_size = {size}) keep their gradients '
                'with their shards; use "average", or a replica_size of 1'
            )
        if self.serverless:
            yield (
                f"rule.exchange = {self.exchange!r}: groups of workers (train.replica_size = {size}) meet through the "
                "server; use allreduce, or a replica_size of 1"
            )

    def problems_with_split_server(self, shards: int) -> Iterator[str]:
        if self.serverless:
            yield (
                f"cluster.ps_shards = {shards}: rule.exchange = {self.exchange!r} has no server to split; remove it, "
                "or use allreduce"
            )

    def pushes_weights(self, pace: Pace | None) -> bool:
        return pace is None and self.combine != "sum"

    def payload(self, local: Local) -> Vector:
        if local.gradients is not None:
            return local.gradients
        return local.weights - local.base if self.combine == "sum" else local.weights

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The mean of the pushes by their samples, or the center plus their sum; of gradients, what to step by.

        A worker that is alone makes its steps itself, and pushes weights.
        """
        weights, payloads = sample_weights(pushes), [push.payload for push in pushes]
        if self.combine == "sum":
            times = self.times(len(pushes))
            weights, payloads = [1.0, *(times * w for w in weights)], [center, *payloads]
        merged, finite = weighted_sum(payloads, weights)
        paces = [push.pace for push in pushes if push.pace is not None]
        if not paces:
            return Merge(merged, state, finite=finite)
        lr, progress = (sum(w * p for w, p in zip(weights, each, strict=True)) for each in zip(*paces, strict=True))
        return Merge(merged, state, pace=(lr, progress))


SCALE = 256.0
"""Increments are multiplied by this in float16: those of 1e-6, as they come late in training, would lose most of their
digits. What adds more than 255 to a weight at once is infinite, and counts as diverged."""
_BLOCK = 1 << 17  # elements


@dataclass(frozen=True)
class ASA:
    """One way to exchange. Over the wire go what the rule pushes and its merge, or, in float16, increments.

    In float16 the weights themselves would lose most of what a step adds to them; an increment loses a part in 2,000.
    """

    rule: BSP
    wire: np.dtype[np.floating]

    @classmethod
    def of(cls, rule: UpdateRule | None, asked: str) -> ASA:
        """The exchange of this rule, which has to be serverless. asked: the job's dtype on the wire."""
        assert isinstance(rule, BSP), "no other rule is serverless"
        return cls(rule, np.dtype(rule.wire(asked)))

    @property
    def half(self) -> bool:
        """True if increments travel, in float16."""
        return self.wire == np.float16

    @property
    def looks_back(self) -> bool:
        """True if an exchange needs the base. A mean of weights does not, which saves a copy of every center."""
        return self.half or self.rule.combine == "sum"

    def contribution(self, local: Local) -> Vector:
        """The vector to cut into pieces, in the wire's dtype, on the replica's device. May be the weights."""
        if not self.half:
            whole: Vector = cast(self.rule.payload(local), self.wire)
            return whole
        result: Vector = np.empty_like(local.weights, dtype=self.wire)
        for block in _blocks(len(result)):
            gained = np.subtract(local.weights[block], local.base[block])
            gained *= SCALE
            result[block] = cast(gained, self.wire)
        return result

    def add_up(self, base: Vector, pieces: Sequence[Vector], samples: Sequence[int]) -> Vector:
        """The merge of one range, from the base's and the replicas' pieces, in the wire's dtype.

        samples: what each replica trained on for its piece. Replicas have to be in the same order everywhere.
        """
        result, view = np.empty(len(base), self.wire), View(0, len(pieces), Bases())
        for block in _blocks(len(base)):
            center = np.zeros_like(base[block]) if self.half else base[block]
            pushes = [
                Push(0, str(i), 0, 1, 0, cast(piece[block], base.dtype), n, 1.0)
                for i, (piece, n) in enumerate(zip(pieces, samples, strict=True))
            ]
            result[block] = cast(self.rule.merge(center, {}, pushes, view).center, self.wire)
        return result

    def adopt(self, local: Local, span: Span, merged: Vector) -> None:
        """Go on from the merge of one range, in the weights, and in the base where that is needed; both written to."""
        base, weights = local.base[slice(*span)], local.weights[slice(*span)]
        if not self.looks_back:
            weights[...] = cast(merged, weights.dtype)
            return
        for block in _blocks(len(base)):
            center = cast(merged[block], base.dtype)
            if self.half:
                center *= 1 / SCALE
                center += base[block]
            base[block] = weights[block] = center


def _blocks(size: int) -> Iterator[slice]:
    return (slice(lo, min(lo + _BLOCK, size)) for lo in range(0, size, _BLOCK))
