"""The workers that a run may have, by their names: patterns, and a list in a file that may change in mid-run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from daskcnn.cluster.link.lease_table import named_by
from daskcnn.errors import ClusterError, DataError
from daskcnn.files import read_regular
from daskcnn.job.cluster_table import Cluster

_LIMIT = 1 << 20  # bytes


class AllowedWorkers:
    """Workers that match one of the patterns, if there are any, and that the file names, if there is one.

    The file has a name a line. Put another in its place in one step: what is half written counts as well. Raises
    ClusterError for a file that cannot be read; one that cannot be read later counts as unchanged.
    """

    def __init__(self, patterns: Sequence[str] = (), file: str | None = None) -> None:
        self._patterns, self._file = tuple(patterns), None if file is None else Path(file)
        self._read: tuple[int, int, int] | None = None  # the state of the file that was read last
        self.listed: frozenset[str] | None = None
        try:
            self._look()
        except (OSError, DataError) as error:
            reason, remedy = getattr(error, "strerror", None) or error, "write names of workers there, one a line"
            raise ClusterError(self.text, reason, remedy) from error

    @classmethod
    def of(cls, cluster: Cluster) -> AllowedWorkers:
        """Return the workers that a job may have."""
        return cls(cluster.only or (), cluster.only_from)

    def _look(self) -> None:
        if self._file is None:
            return
        found = os.stat(self._file)
        if self._read != (state := (found.st_ino, found.st_mtime_ns, found.st_size)):
            lines = read_regular(self._file, _LIMIT).decode(errors="replace").splitlines()
            self._read, self.listed = state, frozenset(filter(None, map(str.strip, lines)))

    def look(self) -> None:
        """Read the file again if it has changed."""
        with suppress(OSError, DataError):
            self._look()

    @property
    def changes(self) -> bool:
        """True if the workers may be others in mid-run."""
        return self._file is not None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, those of the file's names first."""
        return (*sorted(self.listed or ()), *self._patterns)

    @property
    def text(self) -> str:
        """The key of the job that says so, and its value."""
        return f"cluster.only_from = {self._file}" if self._file else f"cluster.only = {', '.join(self._patterns)}"

    def __contains__(self, name: str) -> bool:
        return named_by(self._patterns, name) and (self.listed is None or name in self.listed)
