"""A step of sharded layers on processors, on a GPU, and on both; PyTorch's beside it.

    python -m benchmarks.studies.gpu [--data data/cifar10.zarr] [--models 50:500 …] [--batches 64 256] [--cpus 3]
        [--json FILE]

Networks are the papers' and those of other papers that people use. Without --data they have random images of 32×32, for
what images show changes no time. The ones for photographs always have random images, of their size, in batches of 32.
Workers are as in `--workers cpu=3,gpu=1`: one thread for each processor, one process for the GPU, kernels shared out as
a run does it, with the links measured. Each configuration has a cluster of its own, on which the three ways follow one
another, then PyTorch has the machine, on as many threads as there are processors and on the GPU (float32 throughout,
without TF32; eager, and the faster of its two layouts). Medians count. Figures go to FILE as each configuration is
done; those that FILE has are left out, so that a run may be broken off and taken up again.

Exit 2 where there is no GPU. --stand-in tries the code without one: the GPU is NumPy behind the interface that the
tests check device arrays with, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from distributed import Client

import daskcnn
from benchmarks.common import PHOTOGRAPHS, Budget, Configuration, in_fresh_process, start, take_turns
from benchmarks.runs import kept_in, load, markdown, save
from benchmarks.sharded_steps import BATCHES, MODELS, Sharded, alone_on, opened
from daskcnn.arrays import backend, cpu_count, device_profile
from daskcnn.cluster.layers.measurements import fastest, measure_links
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.members import advertised, present
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Cluster, Workers

RESULTS = [Path(__file__).parent / "results" / name for name in ("gpu.json", "gpu_large.json")]
WAYS = ("processors", "GPU", "both")
LAYOUTS = ("eager", "channels_last")
"""PyTorch's, of which the faster one counts."""
WARM = 3
"""Steps that are not counted."""
CPUS = 3
NAMED = ("quick", "resnet20", "resnet18", "vgg11-bn", *PHOTOGRAPHS)
"""Networks that are measured besides the papers' four."""
OF_PHOTOGRAPHS, PICTURES, LEFT_OUT = 32, {True: 1100, False: 4200}, 64
"""A batch of photographs; how many random images there are, photographs or not; how many of them are not trained on."""


# --- the GPU ---


def no_gpu() -> str | None:
    """Why no worker on this machine could use one; None where it could."""
    return in_fresh_process(_problem)


def _problem() -> str | None:
    try:
        backend("gpu")
    except ClusterError as error:
        return str(error)
    return None


def described() -> dict[str, Any]:
    """The GPU and what drives it. In a process of its own: to ask takes hold of the GPU."""
    import cupy  # type: ignore[import-not-found,unused-ignore]

    profile, runtime = device_profile("gpu", 1), cupy.cuda.runtime.runtimeGetVersion()
    return {"gpu": profile.name, "gpu_GiB": round(profile.memory / 2**30), "cupy": cupy.__version__, "cuda": runtime}


def stand_in_for_a_gpu() -> None:
    """On a worker: its GPU is the strict stand-in that tests use."""
    from daskcnn import arrays
    from daskcnn.cluster.worker import tasks as worker
    from tests.standin import STANDIN

    arrays.BACKENDS["gpu"] = lambda: STANDIN
    vars(worker)["device_profile"] = lambda kind, threads: arrays.DeviceProfile(kind, "stand-in", 1, 1 << 30)


def _give_stand_ins(client: Client) -> None:
    addresses = [member.address for member in advertised(present(client)) if member.kind == "gpu"]
    client.run(stand_in_for_a_gpu, workers=addresses)


# --- ours ---


def random_images(model: str, folder: str) -> str:
    """The path of random images of the size and with the classes that the network takes."""
    images, count = Configuration(model, 1, 1).images, PICTURES[model in PHOTOGRAPHS]
    path, rng = f"{folder}/random.zarr", np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, *images.shape), dtype=np.uint8)
    labels = np.arange(count) % len(images.classes)
    daskcnn.prepare(pixels, labels, path, test=(pixels[:LEFT_OUT], labels[:LEFT_OUT]), warn=print)
    return path


def measure(given: argparse.Namespace, model: str, batch: int) -> dict[str, Any]:
    """One configuration on a cluster of its own: each way's figures, and the GPU's step by itself, without Dask."""
    if given.data and model not in PHOTOGRAPHS:
        return _measure(given, model, batch, given.data)
    with tempfile.TemporaryDirectory() as folder:
        return _measure(given, model, batch, random_images(model, folder), validation=LEFT_OUT)


def _measure(given: argparse.Namespace, model: str, batch: int, data: str, **keys: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    counts = {"processors": (given.cpus, 0), "GPU": (0, 1), "both": (given.cpus, 1)}
    with connect(Cluster(workers=Workers(cpu=given.cpus, gpu=1))) as client:
        client.wait_for_workers(given.cpus + 2, timeout=60)
        if given.stand_in:
            _give_stand_ins(client)
        for way, (cpus, gpus) in counts.items():
            with opened(client, data, model, batch, given.wire, workers=cpus, gpus=gpus, **keys) as context:
                _check_devices(context.calibrations, gpus)
                _say(f"{model} {batch}: {way}, calibrated")
                if way == "GPU":
                    found["GPU alone"] = alone_on(context, ["gpu-0"], given.seconds)[0]
                if len(context.workers.alive) > 1:
                    context.links = measure_links(context, fastest(context), context.workers.alive)
                sharded = Sharded(context)
                sharded.settle(given.seconds)
                found[way] = _step(sharded, given.seconds)
                _say(f"{model} {batch}: {way}, {1e3 * found[way]['step']:.1f} ms a step")
    return {**found, "GPU alone": 1 / found["GPU alone"]}


def _say(words: str) -> None:
    """Progress: a configuration takes a minute, most of it for calibrations."""
    print(time.strftime("%T"), words, file=sys.stderr, flush=True)


def _check_devices(calibrations: Mapping[str, Any], gpus: int) -> None:
    """Raise SystemExit where a run would go on without its GPU."""
    if gpus and "gpu-0" not in calibrations:
        raise SystemExit("worker gpu-0 cannot use its GPU; `daskcnn doctor` on that machine says why")


def _step(sharded: Sharded, seconds: float) -> dict[str, Any]:
    """Seconds of a step and each worker's of computing in it; bytes that travel; kernels by worker and layer."""
    steps, counters, count = sharded.seconds(seconds, warm=WARM)
    sharded.context.results.gather(sharded.graph.pieces())  # the last step's way back ends after its score
    return {
        "step": median(steps),
        "busy": {name: own.busy / count for name, own in counters.items()},
        "bytes": sum(own.bytes_up for own in counters.values()) / count,
        "home": sharded.graph.home,
        "kernels": sharded.shares.by_worker(),
    }


# --- PyTorch's ---


def torch_seconds(model: str, batch: int, threads: int, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a step in each layout, by device: of those that PyTorch has."""
    import torch

    from benchmarks.step_vs_torch import WARM_UPS, torch_step

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    devices = {"PyTorch, processors": "cpu"} | ({"PyTorch, GPU": "cuda"} if torch.cuda.is_available() else {})
    found, (replica, images) = {}, start(Configuration(model, batch, threads))
    for name, device in devices.items():
        steps = {layout: torch_step(layout, replica, images, device) for layout in LAYOUTS}
        for step in list(steps.values()) * WARM_UPS:
            step()
        found[name] = {layout: median(taken) for layout, taken in take_turns(steps, Budget(None, seconds)).items()}
    return found


def beside(given: argparse.Namespace, model: str, batch: int) -> dict[str, Any]:
    """PyTorch's, where it is installed, on the processors and on the GPU."""
    if given.no_torch or find_spec("torch") is None:
        return {}
    found = in_fresh_process(torch_seconds, model, batch, given.cpus, given.seconds)
    return {name: {"step": min(each.values()), **each} for name, each in found.items()}


# --- output ---

COLUMNS = (*WAYS, "GPU alone", "PyTorch, processors", "PyTorch, GPU")


def head() -> str:
    """The first line of the table: milliseconds a step."""
    return (
        f"{'ms a step':9} {'batch':>5}"
        + "".join(f"{name:>{_width(name)}}" for name in COLUMNS)
        + "  MB  kernels of both"
    )


def row(model: str, batch: int, found: Mapping[str, Any]) -> str:
    """A line of it."""
    cells = (f"{_digits(s):>{_width(n)}}" for n, s in zip(COLUMNS, _seconds(found), strict=True))
    both = found["both"]
    shares = ", ".join(f"{worker} {'/'.join(map(str, own.values()))}" for worker, own in both["kernels"].items())
    return f"{model:9} {batch:5}{''.join(cells)}  {both['bytes'] / 1e6:.1f}  {shares}"


def tables() -> Iterator[str]:
    """Yield that of the kept results, of the smaller networks and of the larger ones."""
    measured = {key: found for file in RESULTS for key, found in load(file)["measured"].items()}
    rows = [[f"`{key.split()[0]}`", *(_digits(step) for step in _seconds(found))] for key, found in measured.items()]
    yield markdown(["network", *COLUMNS], rows, left=[0])


def _digits(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:,.1f}"


def _seconds(found: Mapping[str, Any]) -> Iterator[float | None]:
    for name in COLUMNS:
        each = found.get(name)
        yield each["step"] if isinstance(each, Mapping) else each


def _width(name: str) -> int:
    return max(12, len(name) + 2)


def arguments() -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", help="the prepared data set; default: random images")
    options.add_argument("--models", nargs="+", default=[*MODELS, *NAMED])
    options.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    options.add_argument("--cpus", type=int, default=max(1, min(CPUS, cpu_count() - 1)), help="default: %(default)s")
    options.add_argument("--seconds", type=float, default=5.0, help="of each way; three steps at least")
    options.add_argument("--wire", choices=("float32", "float16"), default="float32")
    options.add_argument("--no-torch", action="store_true", help="ours only")
    options.add_argument("--stand-in", action="store_true", help="try the code without a GPU")
    options.add_argument("--json", type=Path, metavar="FILE")
    return options.parse_args()


def main() -> int:
    """Exit code 2 where there is no GPU."""
    given = arguments()
    if not given.stand_in and (missing := no_gpu()):
        print(f"nothing to measure: {missing}; --stand-in tries the code without one", file=sys.stderr)
        return 2
    device = {"gpu": "stand-in"} if given.stand_in else in_fresh_process(described)
    machine = {"processor": device_profile("cpu", cpu_count()).name, "cores": cpu_count(), "cpus": given.cpus, **device}
    kept = kept_in(given.json, machine)
    measured = kept.setdefault("measured", {})
    print(", ".join(f"{name} {value}" for name, value in machine.items()), head(), sep="\n", flush=True)
    for model in given.models:
        for batch in [OF_PHOTOGRAPHS] if model in PHOTOGRAPHS else given.batches:
            key = f"{model} {batch} {given.wire}"
            if key not in measured:
                measured[key] = measure(given, model, batch) | beside(given, model, batch)
            print(row(model, batch, measured[key]), flush=True)
            if given.json:
                save(given.json, kept)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
