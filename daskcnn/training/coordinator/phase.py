"""Phases of a run."""

from __future__ import annotations

from enum import Enum, auto


class Phase(Enum):
    """Phases of a run, in the order in which they may come."""

    CALIBRATING = auto()
    STARTING = auto()  # the server
    TRAINING = auto()
    RESCUING = auto()  # peers: the last center is looked for
    JUDGING = auto()  # the last center
    STOPPING = auto()  # the last state is kept after a signal
    CLOSING = auto()  # the last state is kept at the end
    ENDED = auto()


class LayerPhase(Enum):
    """Phases of a layer-sharded run."""

    CALIBRATING = auto()
    MEASURING = auto()  # links
    STEPPING = auto()
    COLLECTING = auto()  # the pieces, behind a segment
    JUDGING = auto()  # the snapshot at an epoch's end
    COUNTING = auto()  # what the epoch cost the workers
    ENDED = auto()
