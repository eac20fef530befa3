"""Two jobs at once on one scheduler: workers are shared by none, and samples are presented as often as they should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from daskcnn.cluster.link.leases import Hold, holding, leases_on
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.shell.shell import Heard
from daskcnn.errors import ClusterError
from daskcnn.events import RoundEnded
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Workers
from daskcnn.store import Dataset
from daskcnn.training.coordinator.facts import PiecesCollected, ServerReady, StepDone
from tests.cluster.in_process import LocalWorker, train_here
from tests.cluster.run_here import RunHere
from tests.cluster.test_leases import there
from tests.cluster.test_runs_here import EPOCHS, LAYERS, SAMPLES
from tests.fake_client import fake_client
from tests.toy_data import toy_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), train=SAMPLES + 30, size=8)


class JobHere:
    """A job of two workers, which it takes when it begins. presented : samples so far; workers : those that it has."""

    def __init__(self, client: Any, strategy: str, dataset: Dataset) -> None:
        self._client, self._strategy, self._dataset = client, strategy, dataset
        self.presented, self.workers = 0, list[str]()

    @contextmanager
    def admitted(self) -> Iterator[Hold]:
        with holding(self._client, self._strategy) as hold:
            found = wait_for_members(self._client, Workers(cpu=2), 0.0, hold=hold)
            self.workers = [member.name for member in found.workers]
            yield hold

    def train(self, in_between: Callable[[], None] = lambda: None) -> None:
        """To the end. in_between : is done once training has begun, while no task is under way."""
        waiting = [in_between]

        def heard(fact: Any, _: Any) -> None:
            if isinstance(fact, ServerReady | PiecesCollected) and waiting:
                waiting.pop()()
            self.presented += fact.score.samples if isinstance(fact, StepDone) else 0

        with self.admitted():
            (self._layer if self._strategy == "layer" else self._data_parallel)(heard)
        assert not waiting, "it has been trained meanwhile"

    def _data_parallel(self, heard: Heard) -> None:
        run = RunHere(resolve(self._tables()), self._dataset, self.workers, heard=heard)
        run.train()
        assert {event.worker for event in run.of(RoundEnded)} == {*self.workers}
        self.presented = sum(event.samples for event in run.of(RoundEnded))

    def _layer(self, heard: Heard) -> None:
        trained = train_here(self._tables(), [LocalWorker(), LocalWorker()], heard=heard, names=self.workers)
        assert {task.worker for task in trained.ran} >= {*self.workers}

    def _tables(self) -> dict[str, Any]:
        train: dict[str, Any] = {"strategy": self._strategy, "epochs": EPOCHS, "batch_size": 10, "lr": 0.01}
        train |= {"kernel_shares": "speeds"} if self._strategy == "layer" else {"partition": "udpa"}
        return {
            "data": {"path": self._dataset.path, "validation": 30},
            "model": {"layers": LAYERS},
            "train": train,
            "run": {"checkpoint_every": 0.5},
        }


@pytest.mark.parametrize(
    ("first", "second"),
    [("sgwu", "sgwu"), ("bsp", "bsp"), ("sgwu", "layer"), ("layer", "sgwu"), ("layer", "layer")],
)
def test_both_end_and_no_worker_is_shared(first: str, second: str, dataset: Dataset) -> None:
    """The second is trained while the first has its workers; a third finds none."""
    with fake_client(there("d1", "d2", "d3", "d4", s={"PS": 1.0})) as client:
        one, two, three = (JobHere(client, strategy, dataset) for strategy in (first, second, "bsp"))

        def others() -> None:
            two.train(lambda: no_worker_is_left(three))

        one.train(others)
        assert (one.workers, two.workers) == (["d1", "d2"], ["d3", "d4"])
        assert one.presented == two.presented == EPOCHS * SAMPLES
        assert leases_on(client.dask_scheduler) == ()


def no_worker_is_left(job: JobHere) -> None:
    with pytest.raises(ClusterError, match="0 cpu, 0 gpu, 1 ps workers are free"), job.admitted():
        pass
