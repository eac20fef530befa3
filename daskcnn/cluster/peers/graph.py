"""Meetings peer to peer as Dask graphs: who trains, cuts, adds up and adopts, each task pinned to its worker.

One meeting of k workers is k tasks of training, k·(k-1) that cut out what travels, and k that add up. The next
meeting's training begins with the adoption of the sums, so meetings chain through them and are submitted ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distributed import Future

from daskcnn.cluster.peers.tasks import Peers, RoundStart, add_up, adopt, cut, end_round, train
from daskcnn.cluster.run.dispatch import Dispatch


@dataclass(frozen=True)
class Meeting:
    """A meeting that was submitted: its tasks by worker, in the order of the names."""

    version: int
    steps: Mapping[str, Future]
    cuts: tuple[Future, ...]
    sums: Mapping[str, Future]

    def cancel(self) -> None:
        """Cancel all tasks of the meeting."""
        for future in (*self.steps.values(), *self.cuts, *self.sums.values()):
            future.cancel()


class PeerGraph:
    """Submits the meetings of one life of a run."""

    def __init__(self, dispatch: Dispatch, peers: Peers) -> None:
        self._submit, self.peers = dispatch.submit, peers

    def meet(self, version: int, starts: Mapping[str, RoundStart], before: Meeting | None) -> Meeting:
        """Train from the center of this version, adopted from the meeting before, and exchange what came of it.

        starts: by worker, where a round begins.
        """
        peers, submit, sums = self.peers, self._submit, _sums(before)
        steps = {
            name: submit("train", train, peers, version, starts.get(name), sums, worker=name) for name in peers.names
        }
        cuts = {
            (giver, taker): submit("cut", cut, peers, version, taker, steps[giver], worker=giver)
            for taker in peers.names
            for giver in peers.names
            if giver != taker
        }
        added = {}
        for taker in peers.names:
            pieces = [cuts[giver, taker] for giver in peers.names if giver != taker]
            added[taker] = submit("sum", add_up, peers, version, list(steps.values()), pieces, worker=taker)
        return Meeting(version, steps, tuple(cuts.values()), added)

    def adopt(self, last: Meeting) -> dict[str, Future]:
        """All workers take over what the meeting came to, and hold nothing that depends on its tasks."""
        submit, version = self._submit, last.version + 1
        return {w: submit("adopt", adopt, self.peers, version, _sums(last), worker=w) for w in self.peers.names}

    def end(self, last: Meeting) -> dict[str, Future]:
        """The same at the end of a round: reports."""
        submit, version = self._submit, last.version + 1
        return {w: submit("adopt", end_round, self.peers, version, _sums(last), worker=w) for w in self.peers.names}


def _sums(meeting: Meeting | None) -> list[Future]:
    return list(meeting.sums.values()) if meeting else []
