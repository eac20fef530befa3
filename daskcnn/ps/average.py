"""The exponential average of the center: one more of the vectors that a server keeps beside the center.

The average stands for the network. So in checkpoints it has the place of the weights, and the center is beside it.
"""

from __future__ import annotations

from daskcnn.ps.messages import RuleState, Vector
from daskcnn.ps.vectors import toward

AVERAGE, TRAINED = "center.average", "center.trained"
"""Names among a rule's vectors: on the server, and in checkpoints. No rule may have them for its own."""
_OTHER = {AVERAGE: TRAINED, TRAINED: AVERAGE}


def following(average: Vector, center: Vector, ema: float, merges: int) -> Vector:
    """The average, new, after this number of merges, the last of which made this center.

    It keeps the part min(ema, (1 + t) / (10 + t)) of itself at merge t, as `nn.optimizers.Averaged` does at step t.
    """
    return toward(average, center, 1 - min(ema, (1 + merges) / (10 + merges)))


def exchanged(weights: Vector, state: RuleState) -> tuple[Vector, RuleState]:
    """Weights and a rule's vectors after average and trained center have changed places, if there is an average."""
    here = next((name for name in _OTHER if name in state), None)
    if here is None:
        return weights, dict(state)
    return state[here], {name: v for name, v in state.items() if name != here} | {_OTHER[here]: weights}
