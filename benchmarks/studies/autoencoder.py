"""The stacked autoencoder of Marques' thesis (appendix A: 784-500-250-10 on MNIST): its error, energy and limits.

    python -m benchmarks.studies.autoencoder --data data/mnist.zarr [--parts error energy largest workers] [--watts 65]

error: autoencoders of one hidden layer, with tied weights, are trained greedily, each on what the one before makes of
the images. Then the layers are trained together: under ten classes, and as one network that reconstructs (`sae`), some
images of which are drawn to --picture. Table I is the machine.
energy: seconds and energy of an epoch of both, as in table II. Energy is what the machine measures (RAPL of an x86
processor, NVML of a GPU), or seconds times --watts; idle power is not subtracted.
largest: the most units of a first hidden layer whose training fits into --memory, and its epoch, as in table III.
workers: images a second of `daskcnn run --model sae` with one and with two one-thread workers, and what that gains.
The rate and the batch are the appendix's; it trains for 1,500 epochs and has a test error of 1.47 %.

Parts that FILE has are not measured again.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import conv_gemm
from benchmarks.runs import kept_in, load, markdown, save
from daskcnn.arrays import Device, cpu_count, device_profile, keep_freed_memory, single_threaded_blas
from daskcnn.events import RunEnded, SamplesAllocated
from daskcnn.nn import (
    LOSSES,
    SGD,
    Context,
    Layout,
    Params,
    StepPace,
    init_network,
    loss_and_gradients,
    predict,
    sequential_from_spec,
)
from daskcnn.nn.models import model_spec
from daskcnn.nn.optimizers import Descent
from daskcnn.runs.log import read_events
from daskcnn.store import open_dataset

RESULTS = Path(__file__).parent / "results" / "autoencoder.json"
PARTS = ("error", "energy", "largest", "workers")
SIZES = (784, 500, 250, 10)
RATE, BATCH = 0.45, 64
"""The appendix's rate and batch. Its loss is half of the sum of squared differences."""
CLASSIFIER_RATE = 0.05
"""For fine-tuning with momentum, by cross-entropy."""
VALIDATION = 10_000
PICTURES = 10
RAPL = Path("/sys/class/powercap")
TURNS = 3

Vectors = np.ndarray
"""Images or what layers make of them, (1, 1, N, C)."""


@dataclass
class Trainer:
    """A network that is trained by itself, on this process's threads. loss: what it is compared by."""

    spec: list[dict[str, Any]]
    loss: str
    in_shape: tuple[int, ...]
    device: Device
    momentum: float = 0.0

    def __post_init__(self) -> None:
        self.model = sequential_from_spec(self.spec)
        params, state = init_network(self.model, 0, self.in_shape, "float32")
        self.layout = Layout.of(params, state)
        self.weights = self.layout.flatten(params, state)
        self.params, self.state = self.layout.views(self.weights)
        self.descent = Descent(SGD(momentum=self.momentum))
        self.kept = self.descent.optimizer.init(self.weights)
        self.spans = self.descent.spans(self.layout)

    def adopt(self, layers: Params) -> None:
        """Begin with the weights of trained layers, by name."""
        for name, own in layers.items():
            for key, values in own.items():
                self.params[name][key][...] = values

    def epoch(self, x: Vectors, labels: np.ndarray, lr: float, rng: np.random.Generator) -> float:
        """Train on all samples once; the mean loss."""
        order, total = rng.permutation(x.shape[2]), 0.0
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            total += len(some) * self.step(np.ascontiguousarray(x[:, :, some]), labels[some], lr)
        return total / len(order)

    def step(self, x: Vectors, labels: np.ndarray, lr: float) -> float:
        """Train on a minibatch; the loss before."""
        ctx, loss = Context(self.device), LOSSES[self.loss]
        value, _, grads, _ = loss_and_gradients(self.model, self.params, self.state, x, labels, loss, ctx)
        flat = self.layout.flatten(grads, {}, device=self.device)
        self.kept = self.descent.step(self.weights, flat, self.kept, self.spans, StepPace(lr), self.device)
        return float(value)

    def outputs(self, x: Vectors) -> np.ndarray:
        """What the network makes of some samples, (N, units)."""
        parts = [
            predict(
                self.model, self.params, self.state, np.ascontiguousarray(x[:, :, i : i + 1000]), Context(self.device)
            )
            for i in range(0, x.shape[2], 1000)
        ]
        return np.concatenate(parts)


def dense(units: int, **more: Any) -> dict[str, Any]:
    """A fully connected layer."""
    return {"layer": "dense", "units": units, **more}


def shallow(visible: int, hidden: int) -> list[dict[str, Any]]:
    """An autoencoder of one hidden layer, whose way back uses the same weights, transposed."""
    return [dense(hidden), {"layer": "sigmoid"}, dense(visible, tied="dense1"), {"layer": "sigmoid"}]


def classifier(first: int = SIZES[1]) -> list[dict[str, Any]]:
    """The layers under ten classes."""
    there = [layer for units in (first, SIZES[2]) for layer in (dense(units), {"layer": "sigmoid"})]
    return [*there, dense(SIZES[3])]


def rate_of(visible: int) -> float:
    """The appendix's rate for our loss: the mean of squared differences of an image's `visible` numbers."""
    return RATE * visible / 2


# --- error ---


@dataclass(frozen=True)
class Digits:
    """Images of pixels between 0 and 1 (1, 1, N, 784) and labels (N,), of each part."""

    train: tuple[Vectors, np.ndarray]
    test: tuple[Vectors, np.ndarray]

    @classmethod
    def of(cls, path: str) -> Digits:
        """50,000 images to train with, as in the appendix, which leaves 10,000 for validation; and the test part."""
        dataset = open_dataset(path)
        parts = (dataset.train.read(0, len(dataset.train) - VALIDATION), dataset.test.read(0, len(dataset.test)))
        return cls(*((x.reshape(1, 1, len(x), -1).astype(np.float32) / 255, y.astype(np.int64)) for x, y in parts))


def pretrained(x: Vectors, epochs: int, device: Device) -> list[Params]:
    """Weights of every hidden layer, trained greedily: each reconstructs what the one before makes of the images."""
    found = []
    for i, (visible, hidden) in enumerate(pairwise(SIZES), 1):
        trainer = Trainer(shallow(visible, hidden), "reconstruction", (1, 1, visible), device)
        rng = np.random.default_rng(i)
        losses = [trainer.epoch(x, np.zeros(x.shape[2]), rate_of(visible), rng) for _ in range(epochs)]
        print(f"autoencoder {visible}-{hidden}: loss {losses[0]:.5f} to {losses[-1]:.5f}", flush=True)
        encoder = Trainer(shallow(visible, hidden)[:2], "reconstruction", (1, 1, visible), device)
        encoder.adopt({"dense1": trainer.params["dense1"]})
        found.append(trainer.params["dense1"])
        x = encoder.outputs(x)[None, None]
    return found


def classified(digits: Digits, layers: Sequence[Params], epochs: int, device: Device) -> Iterator[dict[str, Any]]:
    """Fine-tune under ten classes; the test error after each epoch."""
    trainer = Trainer(classifier(), "softmax", (1, 1, SIZES[0]), device, momentum=0.9)
    trainer.adopt({f"dense{i}": own for i, own in enumerate(layers[:2], 1)})
    rng = np.random.default_rng(9)
    for epoch in range(epochs):
        lr = CLASSIFIER_RATE * 0.5 * (1 + np.cos(np.pi * epoch / epochs))
        loss = trainer.epoch(*digits.train, lr, rng)
        wrong = float((trainer.outputs(digits.test[0]).argmax(1) != digits.test[1]).mean())
        yield {"epoch": epoch + 1, "loss": loss, "error": wrong}


def reconstructed(
    digits: Digits, layers: Sequence[Params], epochs: int, device: Device
) -> tuple[list[float], np.ndarray]:
    """Train all layers as one autoencoder; the losses of its epochs, and what it makes of ten images."""
    spec = model_spec("sae", (28, 28, 1), 10)
    trainer = Trainer(spec, "reconstruction", (1, 1, SIZES[0]), device, momentum=0.9)
    trainer.adopt({f"dense{i}": own for i, own in enumerate(layers, 1)})
    rng = np.random.default_rng(8)
    x = digits.train[0]
    losses = [trainer.epoch(x, np.zeros(x.shape[2]), rate_of(SIZES[0]) / 10, rng) for _ in range(epochs)]
    return losses, trainer.outputs(digits.test[0][:, :, :PICTURES])


def draw(originals: np.ndarray, images: np.ndarray, file: Path) -> None:
    """Images above, what the network makes of them below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PICTURES * 0.8, 1.8), layout="constrained")
    axes = figure.subplots(2, PICTURES)
    for row, name, some in zip(axes, ("given", "reconstructed"), (originals, images), strict=True):
        for axis, image in zip(row, some, strict=True):
            axis.imshow(image.reshape(28, 28), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def error(options: argparse.Namespace) -> dict[str, Any]:
    """Train all of it; what came of that."""
    device, digits = Device.of("cpu", threads=options.threads), Digits.of(options.data)
    layers = pretrained(digits.train[0], options.pretrain, device)
    epochs = list(classified(digits, layers, options.epochs, device))
    print(
        f"classification error {epochs[-1]['error']:.2%} after {options.epochs} epochs (appendix: 1.47 % after 1,500)"
    )
    losses, images = reconstructed(digits, layers, options.pretrain, device)
    print(f"reconstruction 784-500-250-10: loss {losses[0]:.5f} to {losses[-1]:.5f}")
    draw(digits.test[0][0, 0, :PICTURES], images, options.picture)
    return {"pretrain": options.pretrain, "epochs": epochs, "reconstruction": losses}


# --- energy ---


class Meter:
    """Joules of a call: measured, or given watts times seconds, or None where neither is to be had."""

    def __init__(self, watts: float | None) -> None:
        self._watts, self._rapl = watts, [p for p in sorted(RAPL.glob("intel-rapl:?/energy_uj")) if _readable(p)]

    @property
    def source(self) -> str:
        """Where power comes from."""
        if self._watts is not None:
            return f"given: {self._watts:g} W"
        if self._rapl:
            return "RAPL"
        return "NVML" if _nvml() is not None else "unknown: give --watts"

    def of(self, call: Callable[[], Any]) -> tuple[float, float | None]:
        """Seconds and joules."""
        before, begun = self._joules(), time.perf_counter()
        call()
        seconds, after = time.perf_counter() - begun, self._joules()
        if self._watts is not None:
            return seconds, self._watts * seconds
        if before is None or after is None:
            return seconds, None
        return seconds, sum((b - a) % most for (a, most), (b, _) in zip(before, after, strict=True))

    def _joules(self) -> list[tuple[float, float]] | None:
        """The counters, and where each begins anew."""
        if self._rapl:
            return [(_micro(p), _micro(p.with_name("max_energy_range_uj"))) for p in self._rapl]
        return _nvml()


def _readable(path: Path) -> bool:
    try:
        path.read_text(encoding="ascii")
    except OSError:
        return False
    return True


def _micro(path: Path) -> float:
    return int(path.read_text(encoding="ascii")) * 1e-6


def _nvml() -> list[tuple[float, float]] | None:
    """Joules of all GPUs since the driver began; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [(pynvml.nvmlDeviceGetTotalEnergyConsumption(h) * 1e-3, float("inf")) for h in handles]
    except Exception:  # no library, driver or counter: all the same to the caller
        return None


def energy(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and watt hours of an epoch, as in table II: all layers greedily, and fine-tuned."""
    meter, digits, device = Meter(options.watts), Digits.of(options.data), Device.of("cpu", threads=options.threads)
    layers = pretrained(digits.train[0], 1, device)  # loops are compiled
    works = {
        "greedy": lambda: pretrained(digits.train[0], 1, device),
        "fine-tuning": lambda: list(classified(digits, layers, 1, device)),
    }
    found = {}
    for name, work in works.items():
        seconds, joules = meter.of(work)
        hours = None if joules is None else joules / 3600
        shown = "unknown" if hours is None else f"{joules / seconds:.1f} W, {hours:.4f} Wh"
        print(f"an epoch, {name}: {seconds:.1f} s, {shown} (power: {meter.source})", flush=True)
        found[name] = {"seconds": seconds, "joules": joules}
    return {"power": meter.source, "threads": options.threads, **found}


# --- the largest first layer ---


def step_seconds(first: int, memory: int) -> float | None:
    """Seconds of a step with `first` units in the first layer; None if it takes more than `memory` bytes.

    The limit counts from what the process holds before: libraries and loops.
    """
    device, rng = Device.of("cpu", threads=1), np.random.default_rng(0)
    x = rng.random((1, 1, BATCH, SIZES[0]), np.float32)
    _steps(Trainer(classifier(8), "softmax", x.shape[::3], device), x, 1)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory,) * 2)
    try:
        greedy = _steps(Trainer(shallow(SIZES[0], first), "reconstruction", (1, 1, SIZES[0]), device), x, 2)
        return greedy + _steps(Trainer(classifier(first), "softmax", (1, 1, SIZES[0]), device, 0.9), x, 2)
    except MemoryError:
        return None


def _steps(trainer: Trainer, x: Vectors, count: int) -> float:
    """Seconds of a step, after the first."""
    labels = np.zeros(BATCH, np.int64)
    trainer.step(x, labels, 1e-6)
    begun = time.perf_counter()
    for _ in range(count):
        trainer.step(x, labels, 1e-6)
    return (time.perf_counter() - begun) / count


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_quietly, function, *arguments).result()


def _quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    keep_freed_memory()
    with single_threaded_blas():
        return function(*arguments)


def weights_of(first: int) -> int:
    """Weights and biases of 784-first-250-10, as table III counts them."""
    return (SIZES[0] + 1) * first + (first + 1) * SIZES[2] + (SIZES[2] + 1) * SIZES[3]


def largest(options: argparse.Namespace) -> dict[str, Any]:
    """Double the layer until it does not fit, then halve the interval to 2 %."""
    memory, low, high = int(options.memory * 2**30), 0, 1000
    seconds: float | None = None
    while (found := alone(step_seconds, high, memory)) is not None:
        low, high, seconds = high, 2 * high, found
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        found = alone(step_seconds, middle, memory)
        low, high, seconds = (middle, high, found) if found is not None else (low, middle, seconds)
    if seconds is None:
        raise SystemExit(f"--memory {options.memory:g}: no network fits; give more")
    epoch = seconds * -(-(60_000 - VALIDATION) // BATCH)
    print(f"{options.memory:g} GiB: at most {low:,} units, {weights_of(low):,} weights, {epoch / 60:.0f} min an epoch")
    return {"memory_GiB": options.memory, "units": low, "weights": weights_of(low), "epoch_s": epoch}


# --- workers ---


def run_rate(data: str, workers: int) -> float:
    """Images a second of an epoch of the command, from the first step to the end of the last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dataset", "mnist", "--data", data, "--model", "sae", "--workers", f"cpu={workers}", "--name", "run"]
        keys = {
            "run.dir": folder,
            "train.loss": "reconstruction",
            "train.strategy": "bsp",
            "rule.batch": "worker",
            "train.epochs": 2,
            "train.batch_size": BATCH,
            "train.lr": 1.0,
            "data.validation": VALIDATION,
            "data.augment": "none",
            "data.scale": "{mean=[0], deviation=[255]}",
        }
        settings = [text for key, value in keys.items() for text in ("--set", f"{key}={value}")]
        done = subprocess.run([sys.executable, "-m", "daskcnn.run", *flags, *settings, "--json"], capture_output=True)
        if done.returncode:
            raise SystemExit(done.stderr.decode())
        events = list(read_events(Path(folder) / "run" / "events.jsonl"))
    begun = next(e for e in events if isinstance(e, SamplesAllocated)).at
    ended = next(e for e in events if isinstance(e, RunEnded)).at
    return 2 * (60_000 - VALIDATION) / (ended - begun)


def workers(options: argparse.Namespace) -> dict[str, Any]:
    """Runs of one and of two workers, in turns; medians."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(TURNS):
        for count, taken in rates.items():
            taken.append(run_rate(options.data, count))
    one, two = (median(taken) for taken in rates.values())
    print(f"one worker {one:,.0f} images/s, two {two:,.0f}: {two / one:.2f} times as fast")
    return {"images_per_second": {"1": one, "2": two}, "speedup": two / one}


# --- output ---

THESIS = {
    "error": "1.47 % after 1,500 epochs",
    "greedy": "54 s and 3.7 Wh on a desktop GPU, 11 to 13 minutes and 0.03 to 0.06 Wh on phones",
}
"""Appendix A."""


def tables() -> Iterator[str]:
    """Yield that of the kept results, beside the appendix."""
    kept = load(RESULTS)
    training, epoch, limit, run = (kept[part] for part in PARTS)
    epochs, least = training["epochs"], min(training["epochs"], key=lambda each: each["error"])
    asked = f"{training['pretrain']} epochs of greedy training a layer, {len(epochs)} under ten classes"
    found = f"{100 * epochs[-1]['error']:.2f} %, at best {100 * least['error']:.2f} % after {least['epoch']} epochs"
    rows = [[f"error, {asked}", found, THESIS["error"]]]
    for what, name in (("all three autoencoders", "greedy"), ("ten classes", "fine-tuning")):
        seconds, hours = epoch[name]["seconds"], epoch[name]["joules"] / 3600
        taken = f"{seconds:.1f} s, {hours:.3f} Wh; power {epoch['power']}"
        rows.append([f"an epoch under {what}, {epoch['threads']} threads", taken, THESIS.get(name, "")])
    units, weights, minutes = limit["units"], limit["weights"] / 1e6, limit["epoch_s"] / 60
    most = f"{units:,} units, {weights:.0f} million weights, {minutes:.0f} minutes an epoch"
    rows.append([f"largest first layer in {limit['memory_GiB']:g} GiB", most, ""])
    one, two = (run["images_per_second"][count] for count in ("1", "2"))
    pace = f"{one:,.0f} images/s with one one-thread worker, {two:,.0f} with two: {run['speedup']:.2f} times as fast"
    rows.append(["`daskcnn run --model sae`, `bsp`, batches of 64 a worker", pace, ""])
    yield markdown(["what", "here", "the thesis, appendix A"], rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default="data/mnist.zarr", help="the prepared data set")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure; default: all")
    options.add_argument("--pretrain", type=int, default=15, help="epochs of each autoencoder; default %(default)s")
    options.add_argument("--epochs", type=int, default=60, help="epochs under ten classes; default %(default)s")
    options.add_argument("--threads", type=int, default=cpu_count(), help="default: %(default)s")
    options.add_argument("--watts", type=float, help="power of the machine; default: what it measures itself")
    options.add_argument("--memory", type=float, default=2.0, metavar="GIB", help="of `largest`; default %(default)g")
    options.add_argument("--picture", type=Path, default=Path("benchmarks/studies/results/figures/autoencoder.png"))
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    return options.parse_args()


def main() -> None:
    """Measure the parts asked for, one after the other."""
    options = arguments()
    profile = device_profile("cpu", options.threads)
    print(f"{profile.name}, {options.threads} threads, {profile.memory / 2**30:.0f} GiB")
    keep_freed_memory()
    found = kept_in(options.json, conv_gemm.machine())
    with single_threaded_blas():
        for part in (part for part in options.parts if part not in found):
            found[part] = {"error": error, "energy": energy, "largest": largest, "workers": workers}[part](options)
            if options.json:
                save(options.json, found)


if __name__ == "__main__":
    main()
