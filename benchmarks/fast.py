"""airbench94's recipe, `examples/fast.toml`, against the same recipe in PyTorch: seconds a step, and accuracy.

    python -m benchmarks.fast --data data/cifar10.zarr [--json FILE]                steps, in turns
    python -m benchmarks.fast --data data/cifar10.zarr --ours [--seeds 0 1 2]       whole runs of the example
    python -m benchmarks.fast --data data/cifar10.zarr --pytorch [--seeds 0]        whole trainings of PyTorch's network

A step is one of 1,024 samples on two threads, and one of 512 samples on one thread: what each of the example's two
workers does. Network, first weights, samples, augmentation, loss and rates are the same, and the losses of the first
steps must agree. PyTorch makes its steps in one process with two threads; batches come from our loader, whose seconds
count for neither side. It looks ahead and averages six views as the example does.
Exit 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.common import NO_TORCH, Budget, Results, in_fresh_process, take_turns
from benchmarks.step_vs_torch import OURS, WARM_UPS, check_losses, compare, twin
from daskcnn.arrays import Device, keep_freed_memory, single_threaded_blas
from daskcnn.datasets.job_dataset import find_dataset
from daskcnn.events import RunEnded, RunStarted
from daskcnn.job.network import whitened
from daskcnn.job.resolve import read_job_file, resolve
from daskcnn.job.tables import Job
from daskcnn.nn import SGD, StepPace
from daskcnn.nn.network import weighted_views
from daskcnn.nn.optimizers import Lookahead
from daskcnn.runs.log import read_events
from daskcnn.store import Batch, BatchPlan, Dataset, batches
from daskcnn.training.replica import EVALUATION_BATCH, Replica
from daskcnn.training.worker_calibration import tune_convolutions

try:
    import torch
    from torch import nn
except ModuleNotFoundError as missing:
    raise SystemExit(NO_TORCH) from missing

EXAMPLE = Path(__file__).parent.parent / "examples" / "fast.toml"
WORKERS = 2
MODES = ("eager", "channels_last")
MINUTES, OF_TORCH, ACCURACY = 30.0, 0.75, 0.925
"""The bars: minutes of a whole training, seconds of a step as a share of PyTorch's, and accuracy."""


@dataclass(frozen=True)
class Setting:
    """Samples of a step and threads that make it."""

    batch: int
    threads: int


SETTINGS = (Setting(512, 1), Setting(1024, 2))


def job_of(data: str, setting: Setting, seed: int) -> Job:
    """The example's job for one replica that makes whole steps."""
    raw = read_job_file(EXAMPLE)
    raw["data"]["path"] = data
    raw["train"] |= {"batch_size": setting.batch, "seed": seed, "threads": setting.threads}
    return resolve(raw)


def replica_of(job: Job, dataset: Dataset) -> Replica:
    """Our side with a run's first weights, its convolutions planned. The process keeps freed memory as a worker's."""
    keep_freed_memory()
    threads, weights = job.train.threads, whitened(job, dataset)
    assert threads is not None, "given"
    assert weights is not None, "its first layer whitens"
    replica = Replica(job, dataset, Device.of("cpu", threads=threads), clock=time.perf_counter)
    replica.adopt(weights)
    tune_convolutions(replica)
    return replica


def loaded(job: Job, dataset: Dataset, samples: int, presentation: int) -> Iterator[Batch]:
    """The minibatches of an epoch, augmented."""
    plan = BatchPlan(
        ((0, samples),), job.train.batch_size, job.train.seed, presentation, augment=job.data.augment or "none"
    )
    with batches(dataset, dataset.train, plan, job.model.dtype) as ready:
        yield from ready


def training_samples_of(job: Job, dataset: Dataset) -> int:
    """All but those of validation."""
    return len(dataset.train) - int(job.data.validation)


# --- PyTorch's side ---


class TorchSide:
    """The network's twin and its optimizer. layout: the order of its maps in memory."""

    def __init__(self, replica: Replica, mode: str) -> None:
        torch.set_num_threads(replica.device.pool.threads)
        self.layout = torch.channels_last if mode == "channels_last" else torch.contiguous_format
        self.train = replica.job.train
        self.model = twin(replica).to(memory_format=self.layout)
        conv1 = next(module for module in self.model if isinstance(module, nn.Conv2d))
        conv1.requires_grad_(False)
        self.sgd, self.factors = self._optimizer()
        self.loss = nn.CrossEntropyLoss(label_smoothing=self.train.label_smoothing)
        self.slow = [tensor.detach().clone() for tensor in self.model.parameters()]
        self.count = 0

    def _optimizer(self) -> tuple[torch.optim.SGD, list[float]]:
        """SGD by the example's rates: shifts of normalising learn faster and do not decay."""
        train, factor = self.train, dict(self.train.rates)["batchnorm*"]
        norms = [m.bias for m in self.model.modules() if isinstance(m, nn.BatchNorm2d)]
        own = {id(p) for p in norms}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in own]
        groups = [{"params": others}, {"params": norms, "weight_decay": 0.0}]
        sgd = torch.optim.SGD(groups, 0.0, train.momentum, 0, train.weight_decay, train.nesterov, fused=True)
        return sgd, [1.0, factor]

    def images(self, x: np.ndarray) -> torch.Tensor:
        """Images (N, C, H, W) of a batch (H, W, N, C)."""
        return torch.from_numpy(x.transpose(2, 3, 0, 1)).contiguous(memory_format=self.layout)

    def step(self, batch: Batch, pace: StepPace) -> float:
        """Train on the batch at this pace; the loss before."""
        return self._descend(self.images(batch.x), torch.from_numpy(batch.labels.astype(np.int64)), pace)

    def _descend(self, x: torch.Tensor, labels: torch.Tensor, pace: StepPace) -> float:
        for group, factor in zip(self.sgd.param_groups, self.factors, strict=True):
            group["lr"] = pace.lr * factor
        self.model.train()
        self.sgd.zero_grad(set_to_none=True)
        loss = self.loss(self.model(x), labels)
        loss.backward()
        self.sgd.step()
        self._look_ahead(pace.progress)
        return loss.item()

    @torch.no_grad()
    def _look_ahead(self, progress: float) -> None:
        self.count += 1
        ahead = self.train.lookahead
        if ahead is None or self.count % ahead.steps:
            return
        kept = Lookahead(SGD(), ahead.steps, ahead.alpha, ahead.last).kept(progress)
        for slow, tensor in zip(self.slow, self.model.parameters(), strict=True):
            slow.lerp_(tensor, kept)
            tensor.copy_(slow)

    @torch.inference_mode()
    def accuracy(self, dataset: Dataset, job: Job) -> float:
        """On the test part, by the mean scores of the job's views."""
        self.model.eval()
        right = 0
        plan = BatchPlan(((0, len(dataset.test)),), EVALUATION_BATCH, seed=0, shuffle=False)
        with batches(dataset, dataset.test, plan, job.model.dtype) as ready:
            for batch in ready:
                scores = sum(self.model(self.images(x)) * part for x, part in weighted_views(batch.x, job.data.views))
                right += int((scores.argmax(1).numpy() == batch.labels).sum())
        return right / len(dataset.test)


def train_torch(data: str, seed: int) -> dict[str, Any]:
    """A whole training of PyTorch's network with two threads: accuracy, and seconds of steps and evaluation."""
    job = job_of(data, SETTINGS[-1], seed)
    with single_threaded_blas():
        dataset = find_dataset(job, progress=lambda *_: None, warn=print)
        replica = replica_of(job, dataset)
        side, samples = TorchSide(replica, "channels_last"), training_samples_of(job, dataset)
        spent, done = 0.0, 0
        for epoch in range(int(job.train.epochs)):
            losses = []
            with closing(loaded(job, dataset, samples, epoch)) as ready:
                for batch in ready:
                    pace = replica.pace_at(done / (job.train.epochs * samples), WORKERS)
                    begun = time.perf_counter()
                    losses.append(side.step(batch, pace))
                    spent += time.perf_counter() - begun
                    done += len(batch.labels)
            print(f"epoch {epoch + 1}: loss {mean(losses):.4f}, {spent / 60:.1f} min of steps", flush=True)
        begun = time.perf_counter()
        accuracy = side.accuracy(dataset, job)
        evaluation = time.perf_counter() - begun
    return {"accuracy": accuracy, "steps_s": spent, "evaluation_s": evaluation}


# --- ours ---


def our_run(data: str, seed: int) -> dict[str, Any]:
    """The command that the example shows, and what its log says: accuracy, and seconds from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "daskcnn.run", str(EXAMPLE), "--data", data, "--seed", str(seed), "--json"]
        begun = time.perf_counter()
        subprocess.run([*command, "--set", f"run.dir={folder}"], check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - begun
        events = list(read_events(Path(folder) / "fast" / "events.jsonl"))
    first = next(e for e in events if isinstance(e, RunStarted))
    last = next(e for e in events if isinstance(e, RunEnded))
    return {"accuracy": last.test.accuracy, "command_s": whole, "run_s": last.at - first.at}


# --- steps ---


def measure(data: str, setting: Setting, budget: Budget) -> dict[str, Any]:
    """Median seconds of a step of ours and of PyTorch's modes, which take turns."""
    losses: dict[str, list[float]] = defaultdict(list)
    job = job_of(data, setting, 0)

    def noting(name: str, step: Callable[[Batch, StepPace], float], batch: Batch) -> Callable[[], None]:
        return lambda: losses[name].append(step(batch, StepPace(1e-4)))

    with single_threaded_blas():
        dataset = find_dataset(job, progress=lambda *_: None, warn=print)
        replica = replica_of(job, dataset)
        with closing(loaded(job, dataset, setting.batch, 0)) as ready:
            batch = next(ready)
        sides = {mode: TorchSide(replica, mode).step for mode in MODES}
        steps = {OURS: lambda batch, pace: replica.step(batch, pace)[0], **sides}
        works = {name: noting(name, step, batch) for name, step in steps.items()}
        for _ in range(WARM_UPS):
            for work in works.values():
                work()
        taken = take_turns(works, budget)
    check_losses(losses)
    seconds = {name: median(turns) for name, turns in taken.items()}
    return {"rounds": len(taken[OURS]), "seconds": seconds, "losses": losses[OURS][:3]} | compare(taken)


def verdict(figures: dict[str, Any]) -> str:
    """A line of the table of steps."""
    ours = figures["seconds"][OURS]
    times = ", ".join(f"{name} {s:.3f} s" for name, s in figures["seconds"].items())
    return f"{times}: ours takes {ours / figures['seconds'][figures['best']]:.2f} of {figures['best']}, bar {OF_TORCH}"


def arguments() -> argparse.Namespace:
    """The command line."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--ours", action="store_true", help="whole runs of the example")
    options.add_argument("--pytorch", action="store_true", help="whole trainings of PyTorch's network")
    options.add_argument("--seeds", nargs="+", type=int, default=[0], help="of whole trainings; default: 0")
    options.add_argument("--seconds", type=float, default=60.0, help="to measure steps; default %(default)g")
    options.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    return options.parse_args()


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = arguments()
    results, missed = Results(options.json), False
    for seed in options.seeds if options.ours else ():
        figures = our_run(options.data, seed)
        results.add({"what": "ours", "seed": seed}, figures)
        print(f"ours, seed {seed}: {figures['accuracy']:.2%} in {figures['command_s'] / 60:.1f} min", flush=True)
        missed |= figures["command_s"] > 60 * MINUTES or figures["accuracy"] < ACCURACY
    for seed in options.seeds if options.pytorch else ():
        figures = in_fresh_process(train_torch, options.data, seed)
        results.add({"what": "pytorch", "seed": seed}, figures)
        print(f"PyTorch, seed {seed}: {figures['accuracy']:.2%}, steps {figures['steps_s'] / 60:.1f} min", flush=True)
    for setting in () if options.ours or options.pytorch else SETTINGS:
        figures = in_fresh_process(measure, options.data, setting, Budget(None, options.seconds))
        results.add({"what": "step", "batch": setting.batch, "threads": setting.threads}, figures)
        print(f"{setting.batch} samples, threads {setting.threads}: {verdict(figures)}", flush=True)
        missed |= figures["ratio"] * OF_TORCH < 1
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
