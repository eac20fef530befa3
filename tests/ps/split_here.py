"""A split server in this process, with orders that are under way to its ranges for any time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from daskcnn.nn.optimizers import CenterDescent
from daskcnn.ps import (
    Instruction,
    ParameterServer,
    Push,
    Reply,
    Request,
    RuleState,
    Sequencer,
    Snapshot,
    UpdateRule,
    Vector,
)
from daskcnn.ps.split import (
    MergeOrder,
    OrderedRange,
    RangeOrder,
    SplitCenter,
    StagedPayload,
    StoredVector,
    Vote,
    joined_snapshot,
    spans,
    split_snapshot,
)
from daskcnn.ps.vectors import cut_state


def ranges_of(
    rule: UpdateRule,
    snapshot: Snapshot,
    parts: int,
    ema: float | None = None,
    steps: CenterDescent | None = None,
    wire: str = "float32",
) -> list[OrderedRange]:
    cuts = spans(snapshot.center.size, parts)
    return [
        OrderedRange(rule, part.center, part.state, ema=ema, steps=steps and steps.part(*cut), wire=wire)
        for part, cut in zip(split_snapshot(snapshot, cuts), cuts, strict=True)
    ]


class SplitServer:
    """Sequencer and ranges. An order reaches a range by `deliver`, or before the votes on a merge.

    Orders reach a range in a random order, and some of them twice.
    """

    def __init__(
        self,
        rule: UpdateRule,
        snapshot: Snapshot,
        *,
        life: int = 0,
        parts: int = 2,
        seed: int = 0,
        ema: float | None = None,
        steps: CenterDescent | None = None,
        wire: str = "float32",
    ) -> None:
        self.ranges = ranges_of(rule, snapshot, parts, ema, steps, wire)
        self.under_way: list[list[RangeOrder]] = [[] for _ in self.ranges]
        self.random, self.tickets = random.Random(seed), count()
        self.cuts = spans(snapshot.center.size, parts)
        center = SplitCenter(rule, snapshot.center, snapshot.center.size, send=self._send, ask=self._ask)
        self.sequencer = Sequencer(rule, center, life=life, version=snapshot.version).resume(snapshot)

    def stage(self, push: Push) -> Push:
        """Each range its piece. Returns the push that the sequencer is told of."""
        ticket, pieces = f"ticket-{next(self.tickets)}", [push.payload[lo:hi] for lo, hi in self.cuts]
        found = [r.stage(replace(push, payload=p), ticket) for r, p in zip(self.ranges, pieces, strict=True)]
        staged: Any = StagedPayload(ticket, push.payload.shape, next((o for o in found if o), None))
        return replace(push, payload=staged)

    def handle(self, request: Request) -> list[Instruction]:
        """As of a whole server, but for the weights of replies, which are to be read."""
        return self.sequencer.handle(self.stage(request) if isinstance(request, Push) else request)

    def read(self, reply: Reply) -> Vector:
        """The weights of the reply. Orders that are under way to a range reach it first."""
        weights: Any = reply.weights
        if not isinstance(weights, StoredVector):
            return reply.weights
        for i, each in enumerate(self.ranges):
            if each.done <= weights.number:
                self.deliver(i)
        return np.concatenate([each.answer(reply.worker, weights.number) for each in self.ranges])

    def deliver(self, i: int, share: float = 1.0) -> None:
        """This share of the orders that are under way reaches the range, in any order; some of them will again."""
        orders = self.under_way[i]
        some = self.random.sample(orders, round(share * len(orders)))
        self.ranges[i].take(some)
        self.under_way[i] = [order for order in orders if order not in some or self.random.random() < 0.2]

    def snapshot(self) -> Snapshot:
        snapshot = self.sequencer.snapshot()
        center: Any = snapshot.center
        for i in range(len(self.ranges)):
            self.deliver(i)
        return joined_snapshot(snapshot, [each.kept(center.number) for each in self.ranges])

    def go_on_with(self, state: RuleState) -> None:
        """Each range with its part, behind all orders that are under way."""
        for i, (each, (lo, hi)) in enumerate(zip(self.ranges, self.cuts, strict=True)):
            self.deliver(i)
            each.go_on_with(cut_state(state, lo, hi))

    def validate(self) -> None:
        self.sequencer.validate()
        for each in self.ranges:
            each.validate()

    def kept_for(self, worker: str) -> set[tuple[int, int]]:
        """Pieces and answers that each range keeps for the worker, once it has all orders."""
        for i in range(len(self.ranges)):
            self.deliver(i)
        return {each.kept_for.get(worker, (0, 0)) for each in self.ranges}

    def _send(self, order: RangeOrder) -> None:
        for waiting in self.under_way:
            waiting.append(order)

    def _ask(self, order: MergeOrder) -> Sequence[Vote]:
        self._send(order)
        for i, each in enumerate(self.ranges):
            self.deliver(i)
            assert each.done > order.number
        return [each.vote(order.number) for each in self.ranges]


class WholeServer(ParameterServer):
    """A whole server with the split one's way to read weights."""

    def read(self, reply: Reply) -> Vector:
        return reply.weights


def server_of(kind: str, rule: UpdateRule, center: Vector) -> WholeServer | SplitServer:
    """A server of this kind, of life 0."""
    return WholeServer(rule, center) if kind == "whole" else SplitServer(rule, Snapshot(center))
