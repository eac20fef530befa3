"""What is registered by one line in a dict goes through run, resume, report, simulate and plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from click.testing import CliRunner
from distributed import Client, Scheduler, SpecCluster, Worker
from pydantic import Field

from daskcnn.arrays import Array
from daskcnn.cli import main as daskcnn
from daskcnn.conv import ALGORITHMS, Convolution, Im2col
from daskcnn.conv.planner import forget_plans
from daskcnn.conv.spec import Work
from daskcnn.events import EpochEnded, RunResumed
from daskcnn.job.resolve import resolve
from daskcnn.launch.resume import EarlierRun
from daskcnn.launch.training import train_job
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State
from daskcnn.nn.layers import LAYERS
from daskcnn.partition import PARTITIONERS, Partitioner
from daskcnn.ps import RULES, Local, Merge, Push, RuleState, UpdateRule, Vector, View
from daskcnn.runs.log import read_events
from daskcnn.store import DATASETS
from daskcnn.store.datasets.synthetic import gratings
from daskcnn.store.manifest import Source

PRELOAD = ["daskcnn.cluster.preload"]
CALLS: list[str] = []
"""What was used."""


class LastOfAll(UpdateRule):
    """The center becomes what the last worker by name pushed, times a factor near 1."""

    barrier: ClassVar[bool] = True
    factor: float = Field(1.0, gt=0, description="Factor on what is pushed.")

    def payload(self, local: Local) -> Vector:
        return local.weights

    def merge(self, center: Vector, state: RuleState, pushes: Sequence[Push], view: View) -> Merge:
        CALLS.append("rule")
        return Merge(pushes[-1].payload * self.factor, state)


@dataclass(frozen=True)
class FirstTakesMost(Partitioner):
    """Shares that fall by half from one worker to the next."""

    laws: ClassVar[frozenset[str]] = frozenset({"complete"})

    def weights(self, seconds: Sequence[float]) -> list[float]:
        CALLS.append("partitioner")
        return [0.5**i for i in range(len(seconds))]


@dataclass(frozen=True)
class Negate(Layer):
    """y = -x."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        CALLS.append("layer")
        return -x, state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Any, Params]:
        return -dy, {}


class Counted(Im2col):
    """im2col under another name, which says that it costs next to nothing."""

    name = "counted"

    def work(self, *_: Any) -> tuple[Work, ...]:
        return (Work("all", 1, 0),)

    def bind(self, *arguments: Any) -> Convolution:
        CALLS.append("algorithm")
        return super().bind(*arguments)


class Stripes:
    """Four kinds of the built-in gratings, small."""

    takes_archive = False
    augment: Literal["none", "crop-mirror"] = "none"
    shape = (32, 32, 3)
    training_samples = 120
    classes = 4

    def fetch(self, folder: Path, progress: Any) -> Path:
        raise AssertionError("nothing to fetch")

    def archive_at(self, path: Path) -> Path | None:
        return None

    def load(self, archive: Path | None, progress: Any, warn: Any) -> Source:
        CALLS.append("data set")
        images, labels = gratings(self.training_samples, 1)
        test, answers = gratings(40, 2)
        return Source("stripes", tuple("abcd"), (images, labels % 4), (test, answers % 4), {})


def certain(probabilities: Array, labels: Array) -> Any:
    """The probability of the right class of each sample."""
    CALLS.append("metric")
    return probabilities[range(len(labels)), labels]


JOB: dict[str, Any] = {
    "data": {"name": "stripes", "validation": 20},
    "model": {
        "layers": [
            {"layer": "conv", "kernels": 2, "size": 3},
            {"layer": "negate"},
            {"layer": "maxpool", "size": 6},
            {"layer": "dense", "units": 4},
        ]
    },
    "train": {"strategy": "last-of-all", "partition": "first-takes-most", "epochs": 2, "batch_size": 25}
    | {"metrics": ["top3", f"{__name__}:certain"]},
    "rule": {"factor": 0.999},
    "cluster": {"settle": 0.0},
    "run": {"name": "it", "dir": "runs"},
}
CLUSTER = """
[[worker]]
name = "desk"
count = 2
images_per_second = 100
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A line each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(RULES, "last-of-all", LastOfAll)
    monkeypatch.setitem(PARTITIONERS, "first-takes-most", FirstTakesMost)
    monkeypatch.setitem(LAYERS, "negate", Negate)
    monkeypatch.setitem(ALGORITHMS, "counted", Counted())
    monkeypatch.setitem(DATASETS, "stripes", Stripes())
    CALLS.clear()
    forget_plans()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A cluster within this process, which knows what is registered here."""
    here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    options = {"nthreads": 2, "resources": {"CPU": 1}, "host": "127.0.0.1", "dashboard": False, "preload": PRELOAD}
    with (
        SpecCluster(
            workers={"cpu-0": {"cls": Worker, "options": options}}, scheduler={"cls": Scheduler, "options": here}
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def said(*arguments: str) -> str:
    result = CliRunner().invoke(daskcnn, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_new_members_are_trained_resumed_and_reported(client: Client, tmp_path: Path) -> None:
    trained = train_job(resolve(JOB), client=client)
    assert trained.summary["status"] == "done"
    assert {*CALLS} == {"rule", "partitioner", "layer", "algorithm", "data set", "metric"}
    epochs = [event for event in read_events(Path("runs/it/events.jsonl")) if isinstance(event, EpochEnded)]
    judged = [trained.summary["test"], trained.summary["validation"]]
    judged += [event.validation.model_dump() for event in epochs if event.validation]
    for found in judged:
        assert set(found["metrics"]) == {"top3", "certain"}
        assert 0 < found["metrics"]["certain"] < found["metrics"]["top3"] <= 1
    (tmp_path / "runs" / "it" / "summary.json").unlink()
    newest = max((tmp_path / "runs" / "it" / "checkpoints").iterdir())
    for file in newest.iterdir():  # as if it had been killed before the last checkpoint
        file.unlink()
    newest.rmdir()
    earlier = EarlierRun.at(Path("runs/it"))
    resumed = train_job(earlier.kept, client=client, resume=earlier)
    assert resumed.summary["status"] == "done"
    assert any(isinstance(event, RunResumed) for event in read_events(Path("runs/it/events.jsonl")))
    assert "last-of-all" in said("report", "runs/it")
    assert "factor=0.999" in said("report", "runs/it")
    assert "accuracy" in said("evaluate", "runs/it")
    evaluated = json.loads(said("evaluate", "runs/it", "--json"))["metrics"]
    assert evaluated == pytest.approx(resumed.summary["test"]["metrics"])
    assert f"certain {evaluated['certain']:.4g}" in said("evaluate", "runs/it")
    assert f"certain {evaluated['certain']:.4g}" in said("report", "runs/it")
    assert "last-of-all" in said("simulate", "runs/it")


def test_new_members_are_simulated_and_planned_for_without_data(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        '[data]\nname = "stripes"\nvalidation = 20\n'
        '[model]\nlayers = [{layer = "negate"}, {layer = "dense", units = 4}]\n'
        '[train]\nstrategy = "last-of-all"\npartition = "first-takes-most"\nepochs = 2\n'
    )
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    assert "last-of-all" in said("simulate", str(file), "--cluster", "cluster.toml")
    assert {*CALLS} >= {"rule", "partitioner"}
    assert "data set" not in CALLS
    assert "3" in said("plan", str(file), "--cluster", "cluster.toml", "--add", "cpu=1")
    assert "counted" in said("plan-conv", "quick", "--dataset", "stripes")
