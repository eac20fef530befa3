"""The whole parameter server: a sequencer with one range, which holds all of the center beside it."""

from __future__ import annotations

from collections.abc import Sequence

from daskcnn.ps.center import CenterRange
from daskcnn.ps.requests import Vector
from daskcnn.ps.rule import RuleState, UpdateRule
from daskcnn.ps.sequencer import Sequencer
from daskcnn.ps.snapshot import Snapshot


class ParameterServer(Sequencer):
    """Holds the center and merges what is pushed, by the rule. `sequencer` says how it decides.

    Parameters
    ----------
    center
        Finite 1-D float vector. It is copied.
    epoch
        The number of this server in its run.
    version
        The merges that the center has behind it.
    state
        The rule's state, copied. None: as before the first merge.
    kept
        Places in the center that no merge changes.

    Raises
    ------
    ValueError
        For a center that is not a finite 1-D float vector.
    """

    def __init__(
        self,
        rule: UpdateRule,
        center: Vector,
        *,
        epoch: int = 0,
        version: int = 0,
        state: RuleState | None = None,
        kept: Sequence[slice] = (),
    ) -> None:
        copied = {name: vector.copy() for name, vector in (state or {}).items()}
        super().__init__(rule, CenterRange(rule, center.copy(), copied, kept), epoch=epoch, version=version)

    @classmethod
    def restore(
        cls, rule: UpdateRule, snapshot: Snapshot, *, epoch: int | None = None, kept: Sequence[slice] = ()
    ) -> ParameterServer:
        """A server that goes on from the snapshot, by default as the next epoch.

        It refuses what was meant for its predecessor. Workers join it anew. Pushes that waited at the snapshot are not
        part of it.
        """
        epoch = snapshot.epoch + 1 if epoch is None else epoch
        server = cls(rule, snapshot.center, epoch=epoch, version=snapshot.version, state=snapshot.state, kept=kept)
        return server.resume(snapshot)
