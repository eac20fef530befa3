"""The parameter server in simulated time: its state machine behind links, and the agenda of simulated events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Protocol

import numpy as np

from daskcnn.errors import Diverged
from daskcnn.ps import Code, Instruction, Join, Leave, ParameterServer, Pull, Push, Reply, Request, Vector
from daskcnn.ps.wire import CODED, Wire
from daskcnn.sim.cluster import Costs, Server
from daskcnn.sim.speeds import Line, Link
from daskcnn.training.exchange_orders import Gain


class Agenda:
    """Calls actions in the order of their times, those of one time in the order of their entry. Starts at 0 s."""

    __slots__ = ("_heap", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = count()

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Enter an action for this time, which is not in the past."""
        assert when >= self.now, f"{action}: {when} is before now, {self.now}"
        heappush(self._heap, (when, next(self._serial), action, args))

    def forget(self, owner: object) -> None:
        """Drop the actions that are methods of this object."""
        self.keep(lambda action, *args: getattr(action, "__self__", None) is not owner)

    def keep(self, wanted: Callable[..., bool]) -> None:
        """Drop the actions that are not wanted; it is asked with each action and its arguments."""
        self._heap[:] = [entry for entry in self._heap if wanted(entry[2], *entry[3])]
        heapify(self._heap)

    def clear(self) -> None:
        """Drop all actions."""
        self._heap.clear()

    def run(self) -> None:
        """Call all actions, until none is left."""
        heap = self._heap
        while heap:
            self.now, _, action, args = heappop(heap)
            action(*args)


LIFE = 0


class Caller(Protocol):
    """A replica that talks to the server. sent, received: bytes of the round so far."""

    name: str
    session: int
    link: Link
    sent: int
    received: int

    def answered(self, reply: Reply) -> None:
        """Take the reply to its join, push or pull."""


class Host:
    """Carries requests to the server and replies back.

    A request reaches the server when its last byte has passed the worker's link and the shared one. Requests are
    handled in that order. Replies leave once the merges before them are done. nbytes: of the whole vector; a simulation
    of timing alone has a vector of length 1 instead. numbers: of the whole one. way: of vectors to the server and back.
    """

    def __init__(
        self, server: ParameterServer, agenda: Agenda, spec: Server, costs: Costs, *, way: Wire, numbers: int
    ) -> None:
        self.server, self._agenda, self._exchange = server, agenda, costs.exchange
        self._wire, self._nbytes = np.dtype(way.whole), way.pushed_length(numbers) * way.pushed.itemsize
        self._answered, self._whole = way.answer_bytes(numbers), way.whole_bytes(numbers)
        self._rounds = server.snapshot().center.dtype != self._wire
        self._up, self._down = Line(spec.bandwidth or math.inf), Line(spec.bandwidth or math.inf)
        self._seconds_a_push = self._nbytes / spec.merge_rate if spec.merge_rate else 0.0
        self._free = 0.0
        self._callers: dict[str, Caller] = {}
        self._gone: set[str] = set()

    together = False
    """True if workers that are to end their rounds early end them with the same meeting."""

    def join(self, caller: Caller) -> None:
        """Begin a session and ask for the center."""
        self._callers[caller.name] = caller
        self._gone.discard(caller.name)
        at = self._reaches(caller, 0)
        self._agenda.at(at, self._handle, Join(LIFE, caller.name, caller.session, at=at))

    def pull(self, caller: Caller, *, averaged: bool = False) -> None:
        """Ask for the center, or its average."""
        at = self._reaches(caller, 0)
        self._agenda.at(at, self._handle, Pull(LIFE, caller.name, caller.session, at=at, averaged=averaged))

    def push(self, caller: Caller, gain: Gain) -> float:
        """Push what a replica has gained. Returns the time when it arrives."""
        at, (seq, base, payload, samples, quality, pace, step) = self._pushed(caller), gain
        gained = seq, base, self.travelled(payload), samples, quality
        event = Push(LIFE, caller.name, caller.session, *gained, at, pace, step)
        self._agenda.at(at, self._handle, event)
        return at

    def leave(self, caller: Caller) -> None:
        """Let this worker sit out, as the driver says."""
        self._handle(Leave(caller.name, caller.session, self._agenda.now))

    def part(self, caller: Caller, last: int, *, pulls: bool) -> None:
        """Let this worker go behind its last push, which counts. pulls: it may have asked for the center too."""
        if pulls:

            def wanted(action: Callable[..., None], *args: Any) -> bool:
                return action != self._handle or not isinstance(args[0], Pull) or args[0].worker != caller.name

            self._agenda.keep(wanted)
        self._handle(Leave(caller.name, caller.session, self._agenda.now, last))

    def lose(self, caller: Caller) -> None:
        """Forget a worker that is lost, and what it has sent that has not come."""
        self._gone.add(caller.name)
        self._agenda.forget(caller)
        self._agenda.keep(lambda action, *args: action != self._handle or args[0].worker != caller.name)
        self.leave(caller)

    def travelled(self, vector: Vector) -> Vector:
        """Return the vector as it comes out of the wire."""
        rounds = self._rounds and vector.dtype != CODED
        return vector.astype(self._wire).astype(vector.dtype) if rounds else vector

    def _reaches(self, caller: Caller, nbytes: int) -> float:
        """Return the time when bytes that are sent now reach the server."""
        return caller.link.arrival(self._agenda.now + self._exchange, nbytes, self._up)

    def _pushed(self, caller: Caller) -> float:
        """Return the time when a push reaches the server."""
        caller.sent += self._nbytes
        return self._reaches(caller, self._nbytes)

    def _delivered(self, caller: Caller, ready: float, reply: Reply) -> float:
        """Return the time when a reply that is ready at this time reaches the caller."""
        nbytes = (self._answered if reply.seq else self._whole) if reply.weights.size else 0
        caller.received += nbytes
        return caller.link.arrival(ready, nbytes, self._down)

    def _handle(self, event: Request) -> None:
        instructions = self.server.handle(event)
        if instructions:
            ready = self._merged(instructions) if self._seconds_a_push else self._agenda.now
            for each in instructions:
                self._carry_out(each, ready)

    def _merged(self, instructions: Sequence[Instruction]) -> float:
        """Return the time when all pushes of now are merged. Each reply to a push stands for a merged one."""
        pushes = sum(1 for each in instructions if isinstance(each, Reply) and each.seq)
        self._free = max(self._free, self._agenda.now) + pushes * self._seconds_a_push
        return self._free

    def _carry_out(self, instruction: Instruction, ready: float) -> None:
        if self._gone and instruction.worker in self._gone:
            return
        if isinstance(instruction, Reply):
            caller = self._callers[instruction.worker]
            self._agenda.at(self._delivered(caller, ready, instruction), caller.answered, instruction)
        elif instruction.code == Code.FINITE:
            raise Diverged(f"push of {instruction.worker}: {instruction.reason}")
        elif instruction.code != Code.LEFT:  # of a worker that waits for no answer
            raise AssertionError(f"the server is not to say {instruction}")


class PeerToPeer(Host):
    """Each worker sums a part of the vector and sends it to the others (ASA, Theano-MPI §3.2); the server only decides.

    All parts go to the workers that sum them at once, and back once they are summed: (k - 1)/k of the vector each way,
    twice, over the slowest worker's link. Joining and scoring go through the server.
    """

    together = True
    peers: Sequence[Caller] = ()
    """The workers of the round under way."""

    def travelled(self, vector: Vector) -> Vector:
        """Return the vector as it comes out of the wire; that of a worker by itself does not travel."""
        return vector if len(self.peers) == 1 else super().travelled(vector)

    def _pushed(self, caller: Caller) -> float:
        caller.sent += self._moved
        return self._agenda.now + (self._exchange if self._moved else 0.0)

    def _delivered(self, caller: Caller, ready: float, reply: Reply) -> float:
        if not reply.seq:
            return super()._delivered(caller, ready, reply)
        caller.received += self._moved
        slowest = max(peer.link.latency + self._moved / 2 / peer.link.bandwidth for peer in self.peers)
        return ready + (2 * slowest if self._moved else 0.0)

    def _merged(self, instructions: Sequence[Instruction]) -> float:
        return self._agenda.now

    @property
    def _moved(self) -> int:
        """Bytes that each worker sends in a meeting."""
        k = len(self.peers)
        return round(2 * self._nbytes * (k - 1) / k)
