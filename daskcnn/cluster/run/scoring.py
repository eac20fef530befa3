"""Judges weights on the workers of a run, each a part of the samples by its speed."""

from __future__ import annotations

from collections.abc import Mapping

from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.link.lost import ServerLost, WorkersLost
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.dispatch import Dispatch
from daskcnn.cluster.run.results import Results
from daskcnn.cluster.worker.tasks import score_weights
from daskcnn.nn.score import Score
from daskcnn.partition.proportional import proportional
from daskcnn.training.coordinator.settings import PATIENCE


class Scoring:
    """Has weights judged by the workers that are calibrated.

    Parameters
    ----------
    run : the run's name, by which workers know their session.
    limit : seconds that judging may take beyond what calibration lets expect.
    calibrations : what the workers have measured, by name; others may come later.
    """

    def __init__(
        self, run: str, dispatch: Dispatch, results: Results, limit: float, calibrations: Mapping[str, Calibration]
    ) -> None:
        self._run, self._dispatch, self._results = run, dispatch, results
        self._limit, self._calibrations = limit, calibrations

    def score(self, weights: Array, split: str, lo: int, hi: int) -> Score:
        """Judge weights on samples lo…hi of a split, and again where a worker is lost meanwhile."""
        workers = self._dispatch.workers
        while True:
            try:
                return self._score(weights, split, lo, hi)
            except WorkersLost as lost:
                for name in lost.names:
                    workers.lose(name, "connection lost")
            except ServerLost:
                workers.needs_server = False  # scoring does not need it; a later call to it finds out

    def _score(self, weights: Array, split: str, lo: int, hi: int) -> Score:
        futures = self.submit(weights, split, lo, hi)
        parts, seconds = self.parts(lo, hi), self._calibrations
        slowest = max(((end - begin) * seconds[name].seconds_per_sample for name, begin, end in parts), default=0.0)
        found = self._results.gather(futures, within=self._limit + PATIENCE * slowest)
        return sum(found.values(), Score(0.0, 0, 0))

    def submit(self, weights: Array, split: str, lo: int, hi: int) -> dict[str, Future]:
        """Let every worker judge its part. Returns the scores to come, by worker."""
        vector = self._dispatch.send(weights)
        return {
            name: self._dispatch.submit("score", score_weights, self._run, vector, split, begin, end, worker=name)
            for name, begin, end in self.parts(lo, hi)
        }

    def parts(self, lo: int, hi: int) -> list[tuple[str, int, int]]:
        """lo…hi cut over the workers in proportion to their calibrated speed."""
        names = [name for name in self._dispatch.workers.alive if name in self._calibrations]
        speeds = [1 / self._calibrations[name].seconds_per_sample for name in names]
        cut, begin = [], lo
        for name, size in zip(names, proportional(hi - lo, speeds), strict=True):
            if size:
                cut.append((name, begin, begin + size))
            begin += size
        return cut
