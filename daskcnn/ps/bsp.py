"""Bulk synchronous parallel SGD (Theano-MPI §3.1, §4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from daskcnn.ps.requests import Push, Vector
from daskcnn.ps.rule import Local, Merge, RuleState, UpdateRule, View
from daskcnn.ps.vectors import sample_weights, weighted_sum


class BSP(UpdateRule):
    """All replicas step from the same weights, and meet after every `every` steps (0: at the round's end).

    combine: "average" takes the mean of the weights after descent, with the learning rate multiplied by the number of
    replicas; "sum" adds up the updates, which carry momentum and weight decay. The two agree for `every = 1`. A
    replica counts by the samples it trained on, so that unequal minibatches make the gradient of all samples.
    exchange: how they meet. "allreduce" goes through the server. With "asa" each worker sums one part of the vector and
    hands it to the others, peer to peer; "asa16" sends float16 and sums in float32.
    """

    barrier: ClassVar[bool] = True
    combine: Literal["average", "sum"] = Field(
        "average", description="What is merged: the mean of the weights, or the sum of their updates."
    )
    every: int = Field(
        1,
        ge=0,
        description="Steps between two meetings; 0 is the round's end.",
        json_schema_extra={"because": "it counts the steps between two meetings; 0 is the round's end"},
    )
    exchange: Literal["allreduce", "asa", "asa16"] = Field(
        "allreduce",
        description="How replicas meet: through the server, or peer to peer in the wire's number type or in float16.",
    )

    @property
    def period(self) -> int | None:
        """Steps from one push to the next."""
        return self.every or None

    @property
    def takes_means(self) -> bool:
        """Whether means of weights are what is merged, not the sum of updates."""
        return self.combine == "average"

    def rate(self, replicas: int) -> float:
        """The number of replicas, where a mean would divide the step by it."""
        return float(replicas) if self.combine == "average" else 1.0

    @property
    def serverless(self) -> bool:
        """Whether they meet peer to peer."""
        return self.exchange != "allreduce"

    def wire(self, asked: str) -> str:
        """float16 with "asa16"."""
        return "float16" if self.exchange == "asa16" else asked

    def problems_with_groups(self, size: int) -> Iterator[str]:
        """Groups have no way to meet peer to peer."""
        if self.serverless:
            yield (
                f"rule.exchange = {self.exchange!r}: groups of workers (train.replica_size = {size}) meet through the "
                "server; use allreduce, or a replica_size of 1"
            )

    def problems_with_split_server(self, shards: int) -> Iterator[str]:
        """Without a server there is none to split."""
        if self.serverless:
            yield (
                f"cluster.ps_shards = {shards}: rule.exchange = {self.exchange!r} has no server to split; remove it, "
                "or use allreduce"
            )

    def payload(self, local: Local) -> Vector:
        """The local weights, or what was added to the center's."""
        return local.weights if self.combine == "average" else local.weights - local.base

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        """The mean of the pushes by their samples, or the center plus their sum."""
        weights, payloads = sample_weights(pushes), [push.payload for push in pushes]
        if self.combine == "sum":
            weights, payloads = [1.0, *(len(pushes) * w for w in weights)], [center, *payloads]
        merged, finite = weighted_sum(payloads, weights)
        return Merge(merged, state, finite=finite)
