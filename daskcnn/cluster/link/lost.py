"""Exceptions that a call to the cluster raises in place of its result."""

from __future__ import annotations

from collections.abc import Iterable


class WorkersLost(Exception):
    """Workers of the run are gone.

    Attributes
    ----------
    names : the workers.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        super().__init__(", ".join(self.names))


class ServerLost(Exception):
    """The worker that held the parameter server is gone."""


class NotYet(Exception):
    """A result has not come so far."""
