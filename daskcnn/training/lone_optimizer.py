"""The place of the optimizer's state where the server steps by merged gradients: there, or with a worker that is alone.

A worker that is alone makes its steps itself. So the state goes to it with its first such round, and back to the server
when others train with it again. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from daskcnn.nn import OptimizerState
from daskcnn.nn.optimizers import CenterDescent
from daskcnn.ps import RuleState, Snapshot
from daskcnn.training.coordinator.facts import RoundDone
from daskcnn.training.coordinator.orders import StartRound


class LoneOptimizer:
    """The optimizer's state as the worker that is alone was given it, or has reported it last.

    steps: the server's; None: the rule merges no gradients, and replicas keep their own states.
    """

    def __init__(self, steps: CenterDescent | None) -> None:
        self._steps = steps
        self._state: OptimizerState | None = None  # None: the server has it
        self._with = "", 0  # the worker that has it, and the session

    def starting(
        self, order: StartRound, on_server: Callable[[], Snapshot], to_server: Callable[[RuleState], None]
    ) -> OptimizerState | None:
        """Let the state be where the steps of a round that starts are made.

        on_server: returns the server's snapshot. to_server: lets the server go on with these vectors. Returns the state
        that the round's worker begins with; None: it goes on with its own, if it makes the steps.
        """
        if self._steps is None:
            return None
        worker, before = (order.round.worker, order.session), self._state
        if not order.round.alone:
            if before is not None:
                to_server(self._steps.kept(before))
            self._state = None
            return None
        if before is not None and worker == self._with:
            return None
        if before is None:
            snapshot = on_server()
            before = self._steps.state_of(snapshot.state or {}, snapshot.center.dtype)
        self._state, self._with = before, worker
        return before

    def reported(self, done: RoundDone) -> bool:
        """Take the state that the worker which is alone reports. Returns False if replicas keep their own."""
        if self._state is not None and (done.replica, done.session) == self._with:
            self._state = done.report.optimizer or self._state
        return self._steps is not None

    def added_to(self, kept: RuleState) -> RuleState:
        """Return what the server keeps, with the optimizer's vectors as they are, wherever they lie."""
        return kept if self._steps is None or self._state is None else kept | self._steps.kept(self._state)
