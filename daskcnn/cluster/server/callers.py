"""Those who wait for answers of the parameter server."""

from __future__ import annotations

from typing import Any

from daskcnn import ps
from daskcnn.cluster.server.stream import Tell
from daskcnn.ps.messages import Objection, failure

Key = tuple[str, int, int]


class Callers:
    """Those who wait for the answer to a request.

    lost: why no answer will come any more: a part of the server is gone, or it cannot merge. heard: the time of each
    worker's last request, or of the answer to it.
    """

    def __init__(self) -> None:
        self.waiting: dict[Key, list[Tell]] = {}
        self.heard: dict[str, float] = {}
        self.lost: ConnectionError | Objection | None = None

    def expect(self, request: ps.Request, tell: Tell) -> None:
        """Note who waits: a repeated request gets the answer to the first."""
        self.waiting.setdefault(_key(request), []).append(tell)
        self.heard[request.worker] = request.at

    def taken(self, instruction: ps.Instruction, at: float) -> list[Tell]:
        """Return those who are to be told what the instruction stands for; they do not wait any longer."""
        self.heard[instruction.worker] = at
        return self.waiting.pop(_key(instruction), [])

    def lose(self, error: Exception) -> None:
        """Tell all that no answer will come, now or later: a part of the server is gone, or it cannot merge."""
        gone = isinstance(error, ConnectionError)
        self.lost = why = self.lost or (ConnectionError(str(error)) if gone else failure(error))
        for key in [*self.waiting]:
            answer = why if isinstance(why, ConnectionError) else ps.Refuse(*key, why.code, why.reason)
            for tell in self.waiting.pop(key, []):
                if (later := tell(answer)) is not None:
                    later()


def _key(message: Any) -> Key:
    return message.worker, message.session, message.seq
