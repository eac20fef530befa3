"""The steps of a replica's round, as the update rule has them."""

from __future__ import annotations

from collections.abc import Callable, Generator

from daskcnn.arrays import Array
from daskcnn.partition.rounds import Round
from daskcnn.ps import Local, UpdateRule
from daskcnn.training.replica import Replica, Trained


def steps_of_round(
    replica: Replica,
    rule: UpdateRule,
    round_: Round,
    local: Local,
    *,
    scale: float = 1.0,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[Trained, None, None]:
    """Train the round a step at a time; call `close()` if you stop iterating early.

    Parameters
    ----------
    local:
        The replica's weights, with what the rule's `local_step` goes by.
    scale:
        Factor of the learning rate.
    stop:
        Asked before each step.

    Yields
    ------
    What the round has come to after each step.

    Raises
    ------
    Stopped
        When `stop` says so.
    Diverged
        When a loss is not finite.
    """

    replica.restart_optimizer()

    def adjust(grads: Array) -> Array:
        return rule.local_step(grads, local)

    return replica.training(
        round_.ranges,
        round_.samples,
        presentation=round_.number * rule.passes(replica.job.train.epochs),
        progress=round_.progress,
        steps=round_.steps,
        stop=stop,
        adjust=adjust,
        scale=scale,
    )
