"""The two values that a data-parallel run is composed of: its replicas, and the way that merges travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from distributed import Future

from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.work import PendingWork
from daskcnn.nn import OptimizerState
from daskcnn.ps import Snapshot
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import orders

Watch: TypeAlias = Callable[[str, Future], None]
"""Tells the shell when a task of this replica has ended."""
OptimizerStates: TypeAlias = Mapping[str, OptimizerState]
"""By replica."""


class Exchange(Protocol):
    """How merges travel: through a server, or from peer to peer."""

    def start(self, order: orders.StartServer, state: TrainingState) -> str:
        """Start a server from this state; returns its host. Raises ServerLost, WorkersLost."""
        ...

    def join(self, order: orders.Join, state: TrainingState, optimizers: OptimizerStates) -> PendingWork:
        """Let a replica begin a session."""
        ...

    def rounds(self, started: Sequence[orders.StartRound]) -> Mapping[str, PendingWork]:
        """Start these rounds, which were ordered together; what is under way, by replica."""
        ...

    def leave(self, order: orders.Leave) -> None:
        """Free a replica's place. Raises ServerLost."""
        ...

    def waiting(self, overdue: Sequence[str]) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
        """Replicas that wait for others, and the workers that an overdue replica waits for. Raises ServerLost."""
        ...

    def snapshot(self) -> Snapshot:
        """Center and rule state as they are now. Raises ServerLost, WorkersLost."""
        ...

    def rescue(self, optimizers: dict[str, OptimizerState]) -> int | None:
        """Go on from the last center that a worker has: its version. Updates `optimizers`. Raises WorkersLost."""
        ...

    def close(self) -> None:
        """End the server."""
        ...


class Replicas(Protocol):
    """Replicas of one kind: a worker each, or a group of workers each."""

    def form(self, order: orders.FormGroups) -> None:
        """Make groups. Raises WorkersLost."""
        ...

    def join(self, order: RoundOrder) -> Future:
        """Join the server; ends when the replica holds the center."""
        ...

    def start(self, order: RoundOrder, watch: Watch) -> PendingWork:
        """Train a round and exchange what comes of it."""
        ...

    def stuck(self, replica: str) -> tuple[str, ...]:
        """The workers of the replica that have something to do; all of them where none has."""
        ...
