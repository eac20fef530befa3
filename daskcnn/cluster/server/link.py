"""A worker's connection to the parameter server, whole or split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np

from daskcnn.cluster.server.ranges import TRIES, RangeAt
from daskcnn.ps import Push, Reply, Request, Vector
from daskcnn.ps.half import cast
from daskcnn.ps.split import StagedPayload, StoredVector
from daskcnn.training.replica import Stopped

TURN = 0.5  # seconds


@dataclass(frozen=True)
class NoAnswer:
    """The answer to a call that could not be made."""

    cause: Exception

    def result(self, timeout: float) -> Any:
        """Raise ConnectionError at once."""
        raise ConnectionError("the parameter server's worker is gone") from self.cause


class ServerLink:
    """Sends one request at a time to the server, and counts the bytes of both directions.

    Where the server is split, vectors do not travel through its sequencer: pieces of a push are staged in the ranges
    before the sequencer is told of it, and pieces of an answer are read from the ranges after the sequencer's reply.

    Parameters
    ----------
    actor
        Gives a handle of the server.
    ranges
        The ranges of a split server, in the vector's order; none of a whole one.
    stopped
        Whether the driver has given up the task that waits.
    """

    def __init__(
        self, actor: Callable[[], Any], ranges: Sequence[RangeAt] = (), *, wire: str, stopped: Callable[[], bool]
    ) -> None:
        self._actor, self._ranges, self._wire, self._stopped = actor, ranges, np.dtype(wire), stopped
        self.bytes_up = 0
        self.bytes_down = 0

    def call(self, request: Request) -> Reply:
        """Send the request, wait for the reply. After a broken connection again: the server knows repeats.

        Raises PushRefused, Stopped when the run was stopped meanwhile, or OSError where the server is gone.
        """
        if isinstance(request, Push):
            request = replace(request, payload=cast(request.payload, self._wire))
            self.bytes_up += request.payload.nbytes
        reply: Reply
        (reply,) = self._ask([lambda: self._actor().handle(self._staged(request))])
        weights: Any = reply.weights
        if isinstance(weights, StoredVector):
            reply = replace(reply, weights=self._read(reply.worker, weights.number))
        self.bytes_down += reply.weights.nbytes
        return reply

    def _staged(self, request: Request) -> Request:
        """The request as the server's actor takes it: without the payload, where there are ranges that have it."""
        if not self._ranges or not isinstance(request, Push):
            return request
        ticket, payload = uuid4().hex, request.payload
        pieces = [replace(request, payload=payload[each.lo : each.hi]) for each in self._ranges]
        found = self._ask([partial(_stage, *each, ticket) for each in zip(self._ranges, pieces, strict=True)])
        objection = next((objection for objection in found if objection is not None), None)
        instead: Any = StagedPayload(ticket, payload.shape, objection)
        return replace(request, payload=instead)

    def _read(self, worker: str, number: int) -> Vector:
        return np.concatenate(self._ask([partial(_read, each, worker, number) for each in self._ranges]))

    def _ask(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The answers to calls of actors, which are all under way at the same time."""
        begun = [self._begun(call) for call in calls]
        return [self._answer(call, answer) for call, answer in zip(calls, begun, strict=True)]

    def _begun(self, call: Callable[[], Any]) -> Any:
        """The answer to come."""
        try:
            return call()
        except (OSError, RuntimeError) as error:  # Dask raises the latter where it knows that the actor is gone
            return NoAnswer(error)

    def _answer(self, call: Callable[[], Any], begun: Any) -> Any:
        """Raises the last try's OSError where all have failed."""
        for _ in range(TRIES - 1):
            with suppress(OSError):
                return self._wait(begun)
            begun = self._begun(call)
        return self._wait(begun)

    def _wait(self, answer: Any) -> Any:
        """The answer, waited for in short turns until the driver says stop: it judges how long that takes.

        Dask does not wake who waits on an actor that is gone.
        """
        while True:
            try:
                return answer.result(timeout=TURN)
            except TimeoutError:
                if self._stopped():
                    raise Stopped from None


def _stage(at: RangeAt, push: Push, ticket: str) -> Any:
    return at.actor().stage(push, ticket)


def _read(at: RangeAt, worker: str, number: int) -> Any:
    return at.actor().read(worker, number)
