"""The place on each worker where the others' pieces of one range are added up, meeting after meeting.

To the others it is a server of that range, behind a barrier: they push their pieces over streams and are answered with
the sum. A piece may come before the worker that it is for has trained as far, and again where a stream breaks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daskcnn.cluster.server.stream import Answer, Give, Tell
from daskcnn.ps import Code, Pull, Push, PushPart, Refuse, Reply, Vector
from daskcnn.ps.bsp import ASA
from daskcnn.ps.messages import failure
from daskcnn.ps.vectors import all_finite


@dataclass(frozen=True)
class _Expected:
    """A meeting that the own worker has come to. base: of the range; names: of all who come, in order."""

    version: int
    names: Sequence[str]
    base: Vector


class SumDesk:
    """Adds up one range for those who meet in one life of a run. size: of the whole vector, which no piece exceeds.

    A push's seq is the version that is trained from.
    """

    def __init__(self, asa: ASA, life: int, size: int) -> None:
        self._asa, self._life = asa, life
        self.lengths, self.wire = range(size + 1), asa.wire
        self._turn = threading.Lock()
        self._pushed: dict[str, tuple[Push, Tell]] = {}
        self._expected: _Expected | None = None
        self._summed = -1
        self._answers: dict[str, Answer] = {}  # of the meeting that was summed last

    def meet(self, own: Push, names: Sequence[str], base: Vector, tell: Tell) -> None:
        """Come to the next meeting of these workers with the own piece. base: the last center's range, as computed."""
        with self._turn:
            self._expected = _Expected(own.seq, names, base)
        self.serve(own, tell)

    def serve(self, request: Push | Pull, tell: Tell) -> None:
        """Take a piece, on any thread. All whose sum is there now are told it."""
        request = replace(request, at=time.monotonic())
        with self._turn:
            told = self._taken(request, tell)
        for later in [each(answer) for each, answer in told]:
            if later is not None:
                later()

    def serve_part(self, part: PushPart, give: Give) -> None:
        """Nothing is added up before all of a piece is there."""

    def _taken(self, request: Push | Pull, tell: Tell) -> list[tuple[Tell, Answer]]:
        """Take a request. Returns those who are to be told something now."""
        if isinstance(request, Pull) or request.life != self._life:
            return [(tell, _refused(request, Code.LIFE, f"life={request.life}: pieces of {self._life} are summed"))]
        if request.seq > self._summed:
            self._pushed[request.worker] = request, tell
            return self._sums()
        if request.seq == self._summed and request.worker in self._answers:
            return [(tell, self._answers[request.worker])]
        return [(tell, _refused(request, Code.SEQ, f"seq={request.seq}: {self._summed} is summed already"))]

    def _sums(self) -> list[tuple[Tell, Answer]]:
        """Return the answers of a meeting to which all have come."""
        if (expected := self._expected) is None:
            return []
        there = [self._pushed[name] for name in expected.names if name in self._pushed]
        if sum(push.seq == expected.version for push, _ in there) < len(expected.names):
            return []
        pushes = [push for push, _ in there]
        answers = self._added_up(expected, pushes)
        self._summed, self._expected, self._pushed = expected.version, None, {}
        self._answers = {push.worker: answer for push, answer in zip(pushes, answers, strict=True)}
        return [(tell, answer) for (_, tell), answer in zip(there, answers, strict=True)]

    def _added_up(self, expected: _Expected, pushes: Sequence[Push]) -> list[Answer]:
        """Return the answer to each push."""
        if any(len(push.payload) != len(expected.base) for push in pushes):
            return [_refused(push, Code.LENGTH, f"pieces of a range of {len(expected.base)}") for push in pushes]
        pieces, samples = [push.payload for push in pushes], [push.n_samples for push in pushes]
        try:
            merged = self._asa.add_up(expected.base, pieces, samples)
        except Exception as error:  # a user's rule may raise any
            why = failure(error)
            return [_refused(push, why.code, why.reason) for push in pushes]
        if not all_finite(merged):
            return [_refused(push, Code.FINITE, "NaN or infinity is in the sum") for push in pushes]
        now = time.monotonic()
        return [
            Reply(
                self._life,
                push.worker,
                push.session,
                push.seq,
                merged,
                expected.version + 1,
                expected.version,
                n_samples=push.n_samples,
                accuracy=push.accuracy,
                waited=now - push.at,
                last=any(each.last for each in pushes),
            )
            for push in pushes
        ]


def _refused(request: Push | Pull, code: Code, reason: str) -> Refuse:
    return Refuse(request.worker, request.session, request.seq, code, reason)
