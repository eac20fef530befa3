"""Replicas that are a worker each."""

from __future__ import annotations

from distributed import Future

from daskcnn.cluster.link.lost import WorkersLost
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.dispatch import Dispatch
from daskcnn.cluster.run.exchange import Watch
from daskcnn.cluster.run.work import PendingWork, TaskWork
from daskcnn.cluster.worker.tasks import join_run, train_round
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.reports import RoundReport


class WorkerReplicas:
    """A round is one long task of its worker."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._submit = dispatch.submit

    def form(self, order: orders.FormGroups) -> None:
        """Fail: replicas of one worker are in no groups."""
        raise AssertionError("replicas of one worker are in no groups")

    def join(self, order: RoundOrder) -> Future:
        """Let the worker join the server; ends when it holds the center."""
        return self._submit("join", join_run, order, worker=order.worker)

    def start(self, order: RoundOrder, watch: Watch) -> PendingWork:
        """Submit the worker's round as one task."""
        future = self._submit("round", train_round, order, worker=order.worker)
        future.add_done_callback(lambda done: watch(order.worker, done))

        def done(report: RoundReport | None, at: float) -> facts.RoundDone:
            if report is None:  # it was stopped: the worker is about to be found lost
                raise WorkersLost([order.worker])
            return facts.RoundDone(order.worker, order.epoch, order.session, report, at)

        return TaskWork(future, done)

    def stuck(self, replica: str) -> tuple[str, ...]:
        """The worker itself."""
        return (replica,)
