"""Whole runs on CIFAR-10: two one-thread workers against PyTorch's DistributedDataParallel (DDP), in turns.

    python -m benchmarks.ddp --data data/cifar10.zarr [--models quick] [--samples 10000] [--json FILE]

Ours is the command `python -m daskcnn.run` with a local cluster: two workers, and a process for the parameter server.
PyTorch has two ranks of one thread each, which average gradients over gloo; maps are channels_last, its fastest eager
mode. Both train the same network from the same weights on the same samples, by SGD with Nesterov momentum and weight
decay, in minibatches of --batch on each worker, without augmentation. Ranks read their images from memory.

Both evaluate the same samples. At the end of each epoch these are the validation samples, the last of the training
part; each rank scores half of them. At the end of the run it is the test part. `sgwu` judges all validation samples on
each worker besides, which weighs its pushes; that counts as a part of the rule.

What counts is images of training a second: epochs × samples, divided by the seconds from the first training step to the
end of the last evaluation. Our log says when samples are given out, just before workers join and take their first step,
and when the run has ended; its last checkpoint is written in between. A rank looks at its clock behind a barrier before
its first step, and again when the scores of the test part have been added up. Starting processes, compiling loops,
planning convolutions, calibration, reading the images into PyTorch's memory, and PyTorch's first steps, whose effect is
undone, do not count. The file has seconds of whole commands too: ours from its start to its end, PyTorch's from
spawning its ranks until both have ended.

All sides take turns, and every turn begins with another side. The ratio is the median of the turns' ratios. Before them
a short run of `bsp` meets one of DDP that takes the same steps: the losses of their epochs must agree.
Exit 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import NO_TORCH, Configuration, Results
from benchmarks.step_vs_torch import WARM_UPS, sgd_of, twin, verdict
from daskcnn.arrays import Device, keep_freed_memory
from daskcnn.cluster.link.connect import MEMORY
from daskcnn.events import EpochEnded, RunEnded, SamplesAllocated
from daskcnn.job.network import rate_of
from daskcnn.job.tables import Train
from daskcnn.runs.log import read_events
from daskcnn.store import BatchPlan, batches, open_dataset
from daskcnn.store.augmentation import Augment
from daskcnn.store.loader import batch_edges, presentation_order
from daskcnn.training.replica import EVALUATION_BATCH, Replica

try:
    import torch
    from torch import distributed, multiprocessing, nn
    from torch.nn.parallel import DistributedDataParallel
except ModuleNotFoundError as missing:
    raise SystemExit(NO_TORCH) from missing

WORKERS = 2
DDP = "ddp"
BARS = {("quick", "bsp"): 2.0, ("quick", "sgwu"): 2.0, ("50:500", "sgwu"): 5.0}
"""How many times as fast as DDP a run should be, by network and strategy."""
MODELS = tuple(dict.fromkeys(model for model, _ in BARS))
PART = 5
"""Training samples for each validation sample: as many as CIFAR-10 has for each test sample."""
LR = 0.01
"""The learning rate at the start, of a worker's own steps; steps of both workers are twice as large."""
STEPS = 4
"""Steps of an epoch in the short run that compares losses."""
ALIKE = 1e-2
"""How far the losses of an epoch may be apart there, relatively."""


@dataclass(frozen=True)
class Whole:
    """A run that both sides make. batch: samples of a minibatch on each worker. keys: more of our job.

    lr: of a step of both ranks. slow: factor by which the second rank takes longer than its machine would.
    """

    model: str
    data: str
    samples: int
    validation: int
    epochs: int
    batch: int
    keys: tuple[str, ...] = ()
    lr: float = WORKERS * LR
    seed: int = 0
    augment: Augment = "none"
    slow: float = 1.0

    @property
    def name(self) -> dict[str, Any]:
        """What tells its results from others."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "data"}
        return {name: value for name, value in told.items() if value != getattr(Whole, name, None)}

    @property
    def limit(self) -> int:
        """Samples of each part, training and test, that are used."""
        return self.samples + self.validation

    @property
    def short(self) -> Whole:
        """A run of a few steps."""
        samples = min(self.samples, STEPS * WORKERS * self.batch)
        return replace(self, samples=samples, validation=min(self.validation, samples), epochs=2)

    def settings(self, strategy: str) -> dict[str, Any]:
        """The keys of our job. With `bsp` its minibatch and rate are those of a step of both workers."""
        both = WORKERS if strategy == "bsp" else 1
        return {
            "data.path": self.data,
            "data.limit": self.limit,
            "data.validation": self.validation,
            "data.augment": self.augment,
            "model.name": self.model,
            "train.strategy": strategy,
            "train.partition": "udpa",  # equal parts, as ranks have them
            "train.epochs": self.epochs,
            "train.batch_size": both * self.batch,
            "train.lr": both * self.lr / WORKERS,
            "train.seed": self.seed,
            "cluster.workers": f"cpu={WORKERS}",
            "run.checkpoint_every": 1000.0,
        }


@dataclass(frozen=True)
class Turn:
    """What came of a run. seconds: those that count; command: of the whole command.

    losses: mean training loss of each epoch. validation: accuracy at the end of each. test: accuracy. looks: seconds at
    which each was judged.
    """

    images_per_second: float
    seconds: float
    command: float
    losses: list[float]
    validation: list[float]
    test: float
    looks: list[float]


# --- ours ---


def our_run(whole: Whole, strategy: str) -> Turn:
    """The command a user would type, and what its log says. Raises RuntimeError where it has not done its work."""
    with tempfile.TemporaryDirectory() as folder:
        settings = whole.settings(strategy) | {"run.dir": folder, "run.name": "run"}
        given = [f"{key}={value}" for key, value in settings.items()] + [*whole.keys]
        flags = [text for key in given for text in ("--set", key)]
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "daskcnn.run", *flags, "--json"], capture_output=True, text=True, check=False
        )
        command = time.perf_counter() - begun
        if done.returncode:
            raise RuntimeError(f"{strategy}: our command ended with exit code {done.returncode}:\n{done.stderr}")
        events = read_events(Path(folder) / "run" / "events.jsonl")
    first = next(event for event in events if isinstance(event, SamplesAllocated))
    last = next(event for event in events if isinstance(event, RunEnded))
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    if len(epochs) != whole.epochs:
        raise RuntimeError(f"{strategy}: {len(epochs)} evaluations in {whole.epochs} epochs: not the same work")
    seconds = last.at - first.at
    return Turn(
        whole.epochs * whole.samples / seconds,
        seconds,
        command,
        [event.loss for event in epochs],
        [event.validation.accuracy for event in epochs],
        last.test.accuracy,
        [event.at - first.at for event in epochs],
    )


# --- PyTorch's ---


@dataclass(frozen=True)
class Part:
    """Images (N, H, W, C) of bytes and their labels (N,), in memory that both ranks share."""

    images: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def of(cls, images: np.ndarray, labels: np.ndarray) -> Part:
        """A shared copy."""
        return cls(torch.from_numpy(images).share_memory_(), torch.from_numpy(labels).share_memory_())


@dataclass(frozen=True)
class Task:
    """What a rank is given.

    Attributes
    ----------
    network : with its first weights; the ranks share their memory.
    mean, factor : of every channel, (C, 1, 1): images are normalised by (x - mean) · factor.
    plans : the samples of each epoch and the minibatches that each rank takes of them, by epoch and rank.
    meeting : a file by which the ranks find each other.
    """

    whole: Whole
    train: Train
    network: nn.Module
    training: Part
    test: Part
    mean: torch.Tensor
    factor: torch.Tensor
    plans: list[list[BatchPlan]]
    meeting: str


class Rank:
    """One rank: a replica behind DistributedDataParallel, and its optimizer."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.slow = task.whole.slow if rank else 1.0
        self.dataset = open_dataset(task.whole.data, limit=task.whole.limit)
        network = copy.deepcopy(task.network).to(memory_format=torch.channels_last)
        self.model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        self.sgd = sgd_of(self.model, task.train, 0.0)
        self._rate = rate_of(task.train.schedule)

    def warm_up(self) -> None:
        """Take a few steps and score a batch, so that libraries have what they need, and undo their effect."""
        kept = copy.deepcopy(self.model.module.state_dict())
        with closing(self.minibatches(0)) as ready:
            for x, labels in islice(ready, WARM_UPS):
                self.step(x, labels, 0.0)
        self.score(self.task.test, 0, min(len(self.task.test.labels), WORKERS * EVALUATION_BATCH))
        self.model.module.load_state_dict(kept)
        self.sgd = sgd_of(self.model, self.task.train, 0.0)

    def batch(self, part: Part, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (n, C, H, W), channels last and normalised, and their labels (n,)."""
        x = part.images[samples].permute(0, 3, 1, 2).to(torch.float32)
        return x.sub_(self.task.mean).mul_(self.task.factor), part.labels[samples]

    def minibatches(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the minibatches of an epoch. Augmented ones come from our loader's thread."""
        plan, dataset = self.task.plans[number][self.rank], self.dataset
        if plan.augment == "none":
            order = presentation_order(dataset, dataset.train, plan)
            for lo, hi in batch_edges(plan, len(order)):
                yield self.batch(self.task.training, torch.from_numpy(order[lo:hi]))
            return
        with batches(dataset, dataset.train, plan) as ready:
            for batch in ready:
                x = torch.from_numpy(batch.x).permute(2, 3, 0, 1).contiguous(memory_format=torch.channels_last)
                yield x, torch.from_numpy(batch.labels)

    def step(self, x: torch.Tensor, labels: torch.Tensor, progress: float) -> float:
        """Train on these samples at this part (0…1) of the run; the sum of their losses before the step."""
        begun = time.thread_time()
        train = self.task.train
        self.sgd.param_groups[0]["lr"] = self._rate.rate(train.lr, progress, progress * train.epochs)
        self.sgd.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(x), labels)
        loss.backward()
        self.sgd.step()
        if self.slow > 1:  # by what it computed: the seconds in which it waited for the other rank are no work
            time.sleep((self.slow - 1) * (time.thread_time() - begun))
        return loss.item() * len(labels)

    def epoch(self, number: int) -> float:
        """Train on the own samples once; the mean loss of both ranks."""
        epochs, own = self.task.whole.epochs, self.task.whole.samples // WORKERS
        self.model.train()
        total, done = 0.0, 0
        for x, labels in self.minibatches(number):
            total, done = total + self.step(x, labels, (number + done / own) / epochs), done + len(labels)
        return float(added_up(total)[0]) / self.task.whole.samples

    @torch.inference_mode()
    def score(self, part: Part, lo: int, hi: int) -> float:
        """The accuracy on samples lo…hi; each rank scores its part of them."""
        self.model.eval()
        network, own = self.model.module, [lo + (hi - lo) * rank // WORKERS for rank in (self.rank, self.rank + 1)]
        total, right = 0.0, 0
        for first, end in pairwise([*range(own[0], own[1], EVALUATION_BATCH), own[1]]):
            x, labels = self.batch(part, torch.arange(first, end))
            scores = network(x)
            total += nn.functional.cross_entropy(scores, labels).item() * len(labels)
            right += int((scores.argmax(1) == labels).sum())
        return float(added_up(total, right)[1]) / (hi - lo)

    def run(self) -> Turn:
        """All epochs with their evaluations."""
        whole, test = self.task.whole, self.task.test
        losses, validation, looks = [], [], []
        distributed.barrier()
        begun = time.perf_counter()
        for number in range(whole.epochs):
            losses.append(self.epoch(number))
            validation.append(self.score(self.task.training, whole.samples, whole.limit))
            looks.append(time.perf_counter() - begun)
        accuracy = self.score(test, 0, len(test.labels))
        seconds = time.perf_counter() - begun
        return Turn(whole.epochs * whole.samples / seconds, seconds, 0.0, losses, validation, accuracy, looks)


def added_up(*numbers: float) -> torch.Tensor:
    """The sums of both ranks' numbers."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    distributed.all_reduce(sums)
    return sums


def rank_main(rank: int, task: Task, answers: Any) -> None:
    """A rank from its start to its end. It keeps freed memory, as a worker does. The first one answers."""
    torch.set_num_threads(1)
    keep_freed_memory()
    distributed.init_process_group("gloo", init_method=f"file://{task.meeting}", rank=rank, world_size=WORKERS)
    member = Rank(task, rank)
    member.warm_up()
    turn = member.run()
    if rank == 0:
        answers.put(asdict(turn))
    distributed.barrier()
    distributed.destroy_process_group()


def task_of(whole: Whole, meeting: str) -> Task:
    """All that ranks need: samples in the order of our own workers' `bsp`, whose two ranges are halves."""
    dataset, job = open_dataset(whole.data, limit=whole.limit), Configuration(whole.model, whole.batch, 1).job
    train = job.train.model_copy(update={"epochs": whole.epochs, "lr": whole.lr, "seed": whole.seed})
    half = whole.samples // WORKERS
    steps = -(-half // whole.batch)
    ranges = [((rank * half, (rank + 1) * half),) for rank in range(WORKERS)]
    plans = [
        [BatchPlan(own, whole.batch, whole.seed, n, augment=whole.augment, steps=steps) for own in ranges]
        for n in range(whole.epochs)
    ]
    job = job.model_copy(update={"train": train})
    replica = Replica(job, dataset, Device.of("cpu", threads=1), clock=time.perf_counter)
    mean, factor = (
        torch.tensor(numbers, dtype=torch.float32)[:, None, None] for numbers in (dataset.mean, 1 / dataset.deviation)
    )
    return Task(
        whole,
        train,
        twin(replica),
        Part.of(*dataset.train.read(0, whole.limit)),
        Part.of(*dataset.test.read(0, len(dataset.test))),
        mean,
        factor,
        plans,
        meeting,
    )


def torch_run(whole: Whole) -> Turn:
    """A run of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        task = task_of(whole, str(Path(folder) / "meeting"))
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        begun = time.perf_counter()
        multiprocessing.spawn(rank_main, (task, answers), nprocs=WORKERS)
        command = time.perf_counter() - begun
    return replace(Turn(**answers.get()), command=command)


# --- turns ---


def run(whole: Whole, side: str) -> Turn:
    """A run of a strategy of ours, or of PyTorch's."""
    return torch_run(whole) if side == DDP else our_run(whole, side)


def check_losses(whole: Whole) -> dict[str, list[float]]:
    """Losses of a short run of both. Raises RuntimeError where they differ: it would not be the same computation."""
    losses = {side: run(whole.short, side).losses for side in ("bsp", DDP)}
    ours, theirs = (np.array(each) for each in losses.values())
    if np.any(np.abs(theirs - ours) > ALIKE * ours):
        raise RuntimeError(f"{whole.model}: losses {theirs.tolist()}, ours {ours.tolist()}: not the same computation")
    return losses


def take_turns(whole: Whole, strategies: Sequence[str], turns: int, results: Results) -> dict[str, Any]:
    """Figures of each strategy, kept after every turn."""
    losses = check_losses(whole)
    for strategy in set(strategies) - {"bsp"}:
        run(whole.short, strategy)  # compiles and plans what has not been
    sides, taken = [*strategies, DDP], {side: [] for side in (*strategies, DDP)}
    figures: dict[str, Any] = {}
    for number in range(turns):
        first = number % len(sides)
        for side in (*sides[first:], *sides[:first]):
            taken[side].append(run(whole, side))
            print(f"{whole.model} {side}: {shown(taken[side][-1])}", file=sys.stderr, flush=True)
        for strategy in strategies:
            figures[strategy] = figures_of(taken[strategy], taken[DDP]) | {"short_run_losses": losses}
            results.add(whole.name | {"strategy": strategy}, figures[strategy])
    return figures


def shown(turn: Turn) -> str:
    """A turn in a few words."""
    losses = " ".join(f"{loss:.3f}" for loss in turn.losses)
    speed = f"{turn.images_per_second:.0f} images/s, {turn.seconds:.1f} s, command {turn.command:.1f} s"
    return f"{speed}, losses {losses}, test {turn.test:.1%}"


def figures_of(ours: Sequence[Turn], theirs: Sequence[Turn]) -> dict[str, Any]:
    """All turns, and what they come to."""
    ratios = [a.images_per_second / b.images_per_second for a, b in zip(ours, theirs, strict=True)]
    both = {"ours": ours, DDP: theirs}
    return {
        "ratio": median(ratios),
        "ratios": ratios,
        "images_per_second": {side: median(turn.images_per_second for turn in turns) for side, turns in both.items()},
        "command_seconds": {side: median(turn.command for turn in turns) for side, turns in both.items()},
        "turns": {side: [asdict(turn) for turn in turns] for side, turns in both.items()},
    }


HEAD = (
    f"{'network':10}{'strategy':10}{'ours, images/s':>14}{'DDP':>7}   ratio, bar     "
    "ours / DDP: last loss, test accuracy, seconds of commands"
)


def row(model: str, strategy: str, figures: Mapping[str, Any]) -> str:
    """A line of the table; losses and accuracies are the last turn's."""
    ours, theirs = figures["images_per_second"].values()
    last = [turns[-1] for turns in figures["turns"].values()]
    losses = " / ".join(f"{turn['losses'][-1]:.3f}" for turn in last)
    tests = " / ".join(f"{turn['test']:.1%}" for turn in last)
    commands = " / ".join(f"{seconds:.0f}" for seconds in figures["command_seconds"].values())
    ratio = verdict(figures["ratio"], BARS.get((model, strategy)))
    return f"{model:10}{strategy:10}{ours:14.0f}{theirs:7.0f}   {ratio}   {losses}   {tests}   {commands}"


def arguments() -> argparse.Namespace:
    """The command line."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", required=True, metavar="STORE", help="CIFAR-10, prepared")
    options.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL", help="default: " + " ".join(MODELS))
    options.add_argument("--strategies", nargs="+", metavar="NAME", help="default: those that have a bar")
    options.add_argument("--samples", type=int, default=40_000, help="to train on, an even number; default %(default)s")
    options.add_argument(
        "--validation", type=int, help=f"samples to score after each epoch; default: one to {PART} of --samples"
    )
    options.add_argument("--epochs", type=int, default=2, help="default %(default)s")
    options.add_argument(
        "--batch", type=int, default=64, help="samples of a minibatch on a worker; default %(default)s"
    )
    options.add_argument("--turns", type=int, default=3, help="default %(default)s")
    options.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of our job, such as rule.exchange=asa"
    )
    options.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    given = options.parse_args()
    if given.samples % WORKERS:
        options.error(f"--samples {given.samples}: the workers' parts would be unequal; give an even number")
    if given.validation is None:
        given.validation = given.samples // PART
    return given


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = arguments()
    results, rows, missed = Results(options.json), [HEAD], False
    os.environ.update(MEMORY)  # of our workers, and of PyTorch's ranks too
    for model in options.models:
        whole = Whole(
            model, options.data, options.samples, options.validation, options.epochs, options.batch, (*options.set,)
        )
        strategies = options.strategies or [strategy for name, strategy in BARS if name == model]
        for strategy, figures in take_turns(whole, strategies, options.turns, results).items():
            rows.append(row(model, strategy, figures))
            missed |= figures["ratio"] < BARS.get((model, strategy), 0)
    print(*rows, sep="\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
