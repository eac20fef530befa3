"""What the benchmarks against PyTorch share: networks, machine, fresh processes, turns, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import conv_gemm
from daskcnn.arrays import Device, device_profile, keep_freed_memory
from daskcnn.job.tables import Job, Model, Train
from daskcnn.nn.models import MODELS as MODELS_BY_NAME
from daskcnn.nn.models import model_spec
from daskcnn.store import Batch
from daskcnn.training.replica import Replica
from daskcnn.training.worker_calibration import tune_convolutions

K = TypeVar("K")
T = TypeVar("T")
Work = Callable[[], Any]

LR = 1e-5
IMAGE, CLASSES = (32, 32, 3), 10
MODELS = ("50:500", "150:800", "300:1000", "500:1500", "quick", "lenet5")
VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")
PLAIN20 = (16, *6 * (16,), -32, *5 * (32,), -64, *5 * (64,))
PHOTOGRAPHS = ("alexnet", "googlenet")
TWO_CONVOLUTIONS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 16, "size": 5, "pad": 2},
    {"layer": "maxpool", "size": 2},
    {"layer": "relu"},
    {"layer": "conv", "kernels": 32, "size": 5, "pad": 2},
    {"layer": "relu"},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": CLASSES},
]
ONE_CONVOLUTION: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 16, "size": 5, "pad": 2, "stride": 2},
    {"layer": "relu"},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": CLASSES},
]
RULES_NETWORK, SMALLEST_NETWORK = "rules", "smallest"
"""The names here of the network of the rules' study, and of the one that hundreds of runs can have."""
LAYERS = {RULES_NETWORK: TWO_CONVOLUTIONS, SMALLEST_NETWORK: ONE_CONVOLUTION}
CHAINS = {"vgg11": VGG11, "plain20": PLAIN20}
"""3×3 convolutions with batch normalising, by their kernels; a negative number has a stride of 2. VGG-11's (Simonyan &
Zisserman, table 1, A), and ResNet-20's without its shortcuts (He et al., section 4.2)."""
PAUSE = 0.02
"""Seconds between turns: OpenMP's threads go on spinning for 8–12 ms after their work, on the next one's cores.
OMP_WAIT_POLICY=PASSIVE would spare the wait, and make PyTorch's small networks two to three times slower."""
DECISIVE = ("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_")
"""Variables that decide how fast libraries are: OPENBLAS_CORETYPE alone may halve ours."""
TURN = 0.2
"""Least seconds of a turn."""
NO_TORCH = "this compares with PyTorch, which is missing: pip install 'daskcnn[bench]'"
SLOW = 20.0
"""Seconds of a turn from which one measured round is enough."""


def chain(name: str) -> list[dict[str, Any]]:
    """The layers of a chain of 3×3 convolutions."""
    layers: list[dict[str, Any]] = []
    for kernels in CHAINS[name]:
        if kernels == "pool":
            layers.append({"layer": "maxpool", "size": 2})
            continue
        layers.append(
            {"layer": "conv", "kernels": abs(kernels), "size": 3, "pad": 1, "stride": 2 if kernels < 0 else 1}
        )
        layers += [{"layer": "batchnorm"}, {"layer": "relu"}]
    last = [] if name == "vgg11" else [{"layer": "averagepool", "size": 8}]
    return [*layers, *last, {"layer": "dense", "units": CLASSES}]


@dataclass(frozen=True)
class Configuration:
    """What is measured: a network, with or without its normalising layers, a batch, and threads."""

    model: str
    batch: int
    threads: int
    lrn: bool = True

    def __str__(self) -> str:
        return f"{self.model + ('' if self.lrn else ' no LRN'):15} {self.batch:5} {self.threads:7}"

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The network's layers as a job declares them."""
        if self.model in CHAINS:
            return chain(self.model)
        if self.model == RULES_NETWORK:
            return TWO_CONVOLUTIONS
        layers = model_spec(self.model, self.images.shape, len(self.images.classes))
        return _without_chance([s for s in layers if self.lrn or s["layer"] != "lrn"])

    @property
    def images(self) -> Images:
        """What it is trained on: images of 32×32, or photographs for networks that take no others."""
        if self.model in PHOTOGRAPHS:
            return Images(MODELS_BY_NAME[self.model].image, tuple(map(str, range(1000))))
        return Images()

    @property
    def job(self) -> Job:
        """A job that trains it; momentum, Nesterov and weight decay are the defaults."""
        return Job(model=Model(layers=self.layers), train=Train(batch_size=self.batch, threads=self.threads))


def _without_chance(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers with dropout that drops nothing: losses are compared."""
    return [
        {key: 0.0 if (entry["layer"], key) == ("dropout", "rate") else _inner(value) for key, value in entry.items()}
        for entry in layers
    ]


def _inner(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return _without_chance(value) if value and isinstance(value[0], dict) else [_inner(each) for each in value]


class Samples(Sequence[int]):
    """Stands for the samples of a data set. Nothing is read."""

    def __len__(self) -> int:
        return 50_000

    def __getitem__(self, index: Any) -> Any:
        return range(len(self))[index]

    def weights(self, indices: Any) -> None:
        """No sample has a weight of its own."""


@dataclass(frozen=True)
class Images:
    """Stands for a data set where only shapes matter."""

    shape: tuple[int, ...] = IMAGE
    classes: tuple[str, ...] = tuple("0123456789")
    train: Samples = field(default_factory=Samples)
    labels: str = "classes"


@dataclass(frozen=True)
class Budget:
    """How many rounds to measure after the warm-up: so many, or what fits into so many seconds, two at least."""

    rounds: int | None
    seconds: float

    def spent(self, taken: Mapping[Any, list[float]], elapsed: float) -> bool:
        """Whether the rounds so far are enough; a list of seconds for each work."""
        rounds = [sum(turns) for turns in zip(*taken.values(), strict=True)]
        if self.rounds is not None:
            return len(rounds) >= self.rounds
        slow = any(turns and turns[0] > SLOW for turns in taken.values())
        return len(rounds) >= (1 if slow else 2) and elapsed + rounds[-1] > self.seconds


def seconds(work: Work) -> float:
    """Wall time of a call, the mean of a turn. Each call finds in caches what the one before left there.

    Steps of a training follow each other so, with threads that are awake.
    """
    begun, calls = time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < TURN:
        work()
        calls += 1
    return taken / calls


def take_turns(works: Mapping[K, Work], budget: Budget) -> dict[K, list[float]]:
    """Seconds of every round of each work, all taking turns. The caller has run each once, as a warm-up."""
    taken: dict[K, list[float]] = {name: [] for name in works}
    begun = time.perf_counter()
    while not budget.spent(taken, time.perf_counter() - begun):
        for name, work in works.items():
            time.sleep(PAUSE)
            taken[name].append(seconds(work))
    return taken


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a call in a process of its own, which holds nothing of earlier ones."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def start(c: Configuration) -> tuple[Replica, Batch]:
    """Our side of a configuration, its convolutions planned as for a run, and a batch of noise.

    The process keeps freed memory as a worker's does, PyTorch's too.
    """
    keep_freed_memory()
    replica = Replica(c.job, c.images, Device.of("cpu", threads=c.threads), clock=time.perf_counter)
    tune_convolutions(replica)
    rng = np.random.default_rng(0)
    H, W, C = c.images.shape
    x = rng.standard_normal((H, W, c.batch, C), dtype=np.float32)
    return replica, Batch(x, rng.integers(0, len(c.images.classes), c.batch), np.arange(c.batch, dtype=np.uint64))


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        **conv_gemm.machine(),
        "memory_GiB": round(device_profile("cpu", 1).memory / 2**30),
        "torch": version("torch") if find_spec("torch") else None,
        "compiler": _compiler(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(DECISIVE)},
    }


def _compiler() -> str:
    """The C++ compiler that torch.compile calls."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return "none"
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.partition("\n")[0]


class Results:
    """The figures of all configurations, kept in a file, if any, so that an aborted run leaves what it has.

    Raises SystemExit where the file was written on another machine.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._machine = path, machine()
        self._entries: list[dict[str, Any]] = []
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["machine"] != self._machine:
                raise SystemExit(f"{path}: its figures are of another machine, {kept['machine']}; give another file")
            self._entries = kept["results"]

    def add(self, identity: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Put figures in place of older ones of the same names and identity."""
        entry = next((e for e in self._entries if identity.items() <= e.items()), None)
        if entry is None:
            entry = dict(identity)
            self._entries.append(entry)
        entry.update(figures)
        if self._path is not None:
            text = json.dumps({"machine": self._machine, "results": self._entries}, indent=1, ensure_ascii=False)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(self._path)


def parser(doc: str, *, seconds: float, what: str) -> argparse.ArgumentParser:
    """The options of both benchmarks; so many seconds are to measure `what`, by default."""
    head, _, more = doc.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL", help="default: " + " ".join(MODELS))
    options.add_argument("--batches", nargs="+", type=int, default=[64, 256], metavar="N", help="default: 64 256")
    options.add_argument("--threads", nargs="+", type=int, default=[1, 2], metavar="N", help="default: 1 2")
    options.add_argument("--rounds", type=int, help="measured rounds, after a warm-up; default: by --seconds")
    options.add_argument("--seconds", type=float, default=seconds, help=f"to measure {what}; default %(default)g")
    options.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    return options


def configurations(options: argparse.Namespace, *, no_lrn: bool = False) -> Iterator[Configuration]:
    """All that the options ask for, in the order given."""
    for model, batch, threads in product(options.models, options.batches, options.threads):
        yield Configuration(model, batch, threads)
        if no_lrn and ":" in model:
            yield Configuration(model, batch, threads, lrn=False)
