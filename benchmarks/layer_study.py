"""The simulated half of `layer_scaling.py`: the measured machine, more of it, over links of different speed.

    python benchmarks/layer_scaling.py --simulate [--json benchmarks/results/layer_scaling.json]

One thread of the machine at hand is the CPU. A GPU is so much faster as the papers' one was than their CPU (thesis,
table 5.3), a mobile GPU ten times slower than that, with a desktop GPU as home (5.5.1). Tables go to a Markdown file
beside the measured figures, pictures into `figures`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from common import Images

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.launch.figures import Figure, stacked
from daskcnn.launch.pictures import draw
from daskcnn.launch.resolve import resolve
from daskcnn.launch.simulating import Scenario, scenario_of
from daskcnn.replica import Replica
from daskcnn.sharded import stage_seconds
from daskcnn.sim.cluster import Cluster, Costs, Worker
from daskcnn.sim.layers import Sharding

MODELS = ("50:500", "150:800", "300:1000", "500:1500")
BATCHES = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Way:
    """A link of every device's own, bytes a second each way; what numbers travel as; parts of a minibatch."""

    link: float
    wire: Literal["float32", "float16"] = "float32"
    parts: int = 1


WAYS = {
    "5 MB/s": Way(5e6),
    "100 Mb/s": Way(1.25e7),
    "1 Gb/s": Way(1.25e8),
    "1 Gb/s, float16, 4 parts": Way(1.25e8, "float16", 4),
    "10 Gb/s": Way(1.25e9),
    "10 Gb/s, float16, 4 parts": Way(1.25e9, "float16", 4),
    "unlimited": Way(math.inf),
}
LEFT_OUT = "10 Gb/s, float16, 4 parts"
"""Of the curves, which would be too many."""
DEVICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOBILE = (1, 2, 4, 8, 16, 32, 64, 96, 128)
SHOWN = (2, 3, 4, 8, 16, 32)
"""Devices in the tables."""
STAGES_AT = 64
"""The batch at which the parts of a step are measured; they are taken for those of all batches."""
PER_TASK = 1e-3
"""Seconds of Dask's scheduler for a task, where `cluster_netns.json` has not measured them."""
PAPER_CPUS = {
    "50:500": {2: 1.40, 3: 1.51, 4: 1.56},
    "150:800": {2: 1.68, 3: 1.93, 4: 2.10},
    "300:1000": {2: 1.69, 3: 2.15, 4: 2.33},
    "500:1500": {2: 1.98, 3: 2.74, 4: 3.28},
}
"""Best speed-ups of Marques et al., table 4, over batches of 64 to 1024; their first device was their slowest."""
PAPER_GPUS = {
    "50:500": {2: 1.96, 3: 2.45},
    "150:800": {2: 1.89, 3: 2.23},
    "300:1000": {2: 1.78, 3: 2.09},
    "500:1500": {2: 1.66, 3: 2.00},
}
"""Table 5."""
PAPER_RATIO = {"50:500": 1.22, "150:800": 1.94, "300:1000": 2.35, "500:1500": 2.96}
"""How much faster one GPU was than one CPU (thesis, table 5.3)."""
MOBILE_SLOWER = 10
COPY = 34e9
"""Bytes a second that a copy of large arrays moves on one thread (`daskcnn.conv.cost`)."""


# --- what was measured ---


def stage_parts(model: str) -> dict[str, Any]:
    """Seconds a sample on one thread of this machine: of a step, of its stages, of the convolutions in them."""
    job = resolve({"model": {"name": model}, "train": {"strategy": "layer", "batch_size": STAGES_AT, "threads": 1}})
    dataset: Any = Images()
    with single_threaded_blas():
        replica = Replica(job, dataset, Device.of("cpu", threads=1), clock=time.perf_counter)
        replica.tune()
        whole, convs = replica.calibrate()
        return {"whole": whole, "stages": stage_seconds(replica), "convs": convs, "batch": STAGES_AT}


@dataclass(frozen=True)
class Study:
    """Measured figures, as their files have them. scheduler: seconds of Dask's for a task."""

    measured: Mapping[str, Any]
    stages: Mapping[str, Any]
    scheduler: float = PER_TASK

    def batches(self, model: str) -> list[int]:
        return [batch for batch in BATCHES if f"{model} {batch} float32" in self.measured]

    def cpu(self, model: str, batch: int) -> Worker:
        """One thread of the machine, at this batch."""
        seconds, parts = self.measured[f"{model} {batch} float32"]["one"] / batch, self.stages[model]
        scale = seconds / max(parts["whole"], sum(parts["stages"].values()))
        apart = 1 - sum(parts["convs"].values()) / sum(parts["stages"].values())
        return Worker(
            name="cpu",
            images_per_second=1 / seconds,
            conv_seconds={name: scale * each for name, each in parts["stages"].items()},
            spread_share=min(0.9, max(0.0, apart)),
        )

    def faster(self, model: str, batch: int, factor: float, name: str) -> Worker:
        """The same device, so many times as fast."""
        cpu = self.cpu(model, batch)
        conv = {layer: each / factor for layer, each in (cpu.conv_seconds or {}).items()}
        update = {"name": name, "kind": "gpu", "images_per_second": factor * cpu.images_per_second}
        return cpu.model_copy(update={**update, "conv_seconds": conv})

    def costs(self, model: str, batch: int) -> Costs:
        """Dask's own seconds: what a step of two took beyond its busiest worker, and for each task more."""
        tiny = next((found for key, found in self.measured.items() if key.startswith("8:8 ")), None)
        beyond = tiny["step"] - tiny["busy"] if tiny else 0.0
        two = scenario(model, batch, Way(math.inf)).sharding(Cluster(worker=[self.cpu(model, batch)]).of_size(2))
        return Costs(dispatch=max(0.0, beyond - self.scheduler * two.tasks), task=self.scheduler)


@cache
def scenario(model: str, batch: int, way: Way) -> Scenario:
    """A job of this network, on no cluster yet."""
    first = _first(model)
    train = first.job.train.model_copy(update={"batch_size": batch, "sub_batches": way.parts})
    cluster = first.job.cluster.model_copy(update={"wire": way.wire})
    return replace(first, job=first.job.model_copy(update={"train": train, "cluster": cluster}))


@cache
def _first(model: str) -> Scenario:
    job = resolve({"data": {"name": "cifar10"}, "model": {"name": model}, "train": {"strategy": "layer"}})
    return scenario_of(job, Cluster(worker=[Worker(name="none", images_per_second=1)]), "measured")


# --- what is simulated ---


def clusters(study: Study, kind: str, model: str, batch: int, devices: int, way: Way) -> Cluster:
    """So many devices of a kind, each behind such a link."""
    ratio = PAPER_RATIO[model]
    cpu, gpu = study.cpu(model, batch), study.faster(model, batch, ratio, "gpu")
    mobile = study.faster(model, batch, ratio / MOBILE_SLOWER, "mobile")
    workers = {"CPUs": [cpu] * devices, "GPUs": [gpu] * devices, "mobile GPUs": [gpu] + [mobile] * (devices - 1)}[kind]
    own = None if way.link == math.inf else way.link
    named = [w.model_copy(update={"name": f"{w.name}-{i}", "bandwidth": own}) for i, w in enumerate(workers)]
    return Cluster(costs=study.costs(model, batch), worker=named)


def speedup(study: Study, kind: str, model: str, batch: int, devices: int, way: Way) -> float:
    """Against the first device alone, which needs no Dask."""
    if devices == 1:
        return 1.0
    return scenario(model, batch, way).sharding(clusters(study, kind, model, batch, devices, way)).speedup()


def best(study: Study, kind: str, model: str, devices: int, way: Way) -> tuple[float, int]:
    """Over the batches, and at which."""
    return max((speedup(study, kind, model, batch, devices, way), batch) for batch in study.batches(model))


def as_papers(study: Study, kind: str, model: str, batch: int, devices: int) -> float:
    """Their scheme and count over 5 MB/s, on the same devices."""
    free = Way(math.inf)
    star: Sharding = scenario(model, batch, free).star(clusters(study, kind, model, batch, devices, free))
    return replace(star, overhead=0.0).paper_speedup(WAYS["5 MB/s"].link)


# --- pictures ---


def figures(study: Study) -> Iterator[Figure]:
    """The papers' figures 6 and 9 to 13, and the thesis's rooflines, of this machine."""
    yield from _measured_steps(study)
    for model, batch in ((MODELS[0], BATCHES[0]), (MODELS[-1], BATCHES[-1])):
        if batch in study.batches(model):
            yield from _simulated_steps(study, model, batch)
    model = MODELS[-1]
    if study.batches(model):
        batch = study.batches(model)[-1]
        like = {"CPUs": "Marques et al. fig. 11", "GPUs": "fig. 12", "mobile GPUs": "fig. 13"}
        for kind, number in like.items():
            yield _speedups(study, kind, model, batch, MOBILE if kind == "mobile GPUs" else DEVICES, number)


def _measured_steps(study: Study) -> Iterator[Figure]:
    """One and two workers, network by network, at the largest batch that was measured of all."""
    common = [batch for batch in BATCHES if all(batch in study.batches(model) for model in MODELS)]
    if not common:
        return
    bars: dict[str, tuple[float, float, float]] = {}
    for model in MODELS:
        found, cpu = study.measured[f"{model} {common[-1]} float32"], study.cpu(model, common[-1])
        conv = common[-1] * sum((cpu.conv_seconds or {}).values())
        bars[f"{model}\n1"] = (0.0, conv, found["one"] - conv)
        rest = max(0.0, found["busy"] - found["shards"])
        bars[f"{model}\n2"] = (max(0.0, found["step"] - found["shards"] - rest), found["shards"], rest)
    title = f"A step's parts measured, batches of {common[-1]}"
    yield stacked("layer-measured", title, "Marques et al. fig. 6", "network and workers of one thread", bars)


def _simulated_steps(study: Study, model: str, batch: int) -> Iterator[Figure]:
    """By the number of CPUs, over the papers' link and over a gigabit."""
    for name in ("5 MB/s", "1 Gb/s"):
        bars = {}
        for devices in DEVICES:
            cluster = clusters(study, "CPUs", model, batch, devices, WAYS[name])
            step = scenario(model, batch, WAYS[name]).sharding(cluster).by_speed().step()
            comm = 0.0 if devices == 1 else step.comm
            bars[f"{devices}"] = (comm, step.conv, step.comp)
        file = f"layer-elapsed-{_plain(model)}-{batch}-{_plain(name)}"
        title = f"{model}, batches of {batch}, over {name}, kernels by eq. 1"
        yield stacked(file, title, "Marques et al. fig. 9", "CPUs of one thread", bars)


def _speedups(study: Study, kind: str, model: str, batch: int, devices: Sequence[int], like: str) -> Figure:
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        name: (devices, [speedup(study, kind, model, batch, n, way) for n in devices])
        for name, way in WAYS.items()
        if name != LEFT_OUT
    }
    curves["the papers' scheme, 5 MB/s"] = devices, [as_papers(study, kind, model, batch, n) for n in devices]
    title = f"Speed-up of {model}, batches of {batch}"
    name = f"layer-speedup-{_plain(kind)}"
    return Figure(name, title, like, kind, "speed-up", curves, doubling=True)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).lower()


# --- the roofline ---


def roofline(stages: Mapping[str, Any]) -> Figure:
    """Of conv2's passes on one thread: operations and bytes as the algorithm counts them, seconds as measured.

    stages: `conv_stages.json`. The roofs: sgemm's rate in the same rounds, and a copy's bytes a second.
    """
    peak = max(layer["sgemm_gflops"] for layer in stages["layers"].values())
    ridge = 1e9 * peak / COPY
    ends = [0.5, ridge, 1000.0]
    roof = {
        f"sgemm {peak:.0f} GFLOP/s, copying {COPY / 1e9:.0f} GB/s": (ends, [min(peak, x * COPY / 1e9) for x in ends])
    }
    points: dict[str, tuple[list[float], list[float]]] = {}
    for _, _, stage, work in passes(stages):
        xs, ys = points.setdefault(stage, ([], []))
        xs.append(work["gflops"] / work["GB_s"])
        ys.append(work["gflops"])
    return Figure(
        "layer-roofline",
        "Roofline of the convolutions' passes, one thread",
        "thesis fig. 5.17 and 5.18",
        "operations a byte",
        "GFLOP/s",
        roof,
        rates=True,
        points=points,
    )


def passes(stages: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, float]]]:
    """Layer, direction, pass and its figures."""
    for layer, found in stages["layers"].items():
        for direction in ("forward", "backward"):
            for stage, work in found[direction].items():
                if "gflops" in work:
                    yield layer, direction, stage, work


# --- tables ---


def tables(study: Study, stages: Mapping[str, Any]) -> str:
    """All of them, in Markdown."""
    models = [model for model in MODELS if study.batches(model)]
    parts = [
        "# Layer sharding: measured, and simulated from that",
        __doc__.split("\n\n")[2].replace("\n", " "),
        f"Dask's scheduler needs {1e3 * study.scheduler:.2g} ms a task. Kernels are shared out with transfers counted: "
        "a device that is not worth its transfers gets none, and a step then takes what the first one takes, and Dask.",
        "## Measured: one and two workers of one thread",
        _measured_table(study, models),
        "## CPUs, best over the batches",
        _simulated_table(study, "CPUs", models, PAPER_CPUS),
        "## GPUs, best over the batches",
        _simulated_table(study, "GPUs", models, PAPER_GPUS),
        "## Mobile GPUs behind a desktop GPU, best over the batches",
        _mobile_table(study, models),
        "## Roofline of conv2's passes",
        _roofline_table(stages),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _measured_table(study: Study, models: Sequence[str]) -> str:
    head = ["network", "batch", "one, ms", "two, ms", "speed-up", "two at once", "papers' 2", "MB a step"]
    rows = []
    for model in models:
        for batch in study.batches(model):
            f = study.measured[f"{model} {batch} float32"]
            times = [f"{1e3 * f[key]:.0f}" for key in ("one", "step")]
            ratios = [f"{f['speedup']:.2f}", f"{f['ceiling']:.2f}", f"{PAPER_CPUS[model][2]:.2f}"]
            rows.append([model, str(batch), *times, *ratios, f"{f['bytes'] / 1e6:.1f}"])
    return _table(head, rows)


def _simulated_table(study: Study, kind: str, models: Sequence[str], papers: Mapping[str, Mapping[int, float]]) -> str:
    """Ours over every link, the papers' measured beside."""
    head = ["network, link", *(f"{devices} {kind}" for devices in SHOWN)]
    rows = []
    for model in models:
        for name, way in WAYS.items():
            found = (best(study, kind, model, devices, way) for devices in SHOWN)
            rows.append([f"{model}, {name}", *(f"{value:.2f} ({batch})" for value, batch in found)])
        measured = (papers[model].get(devices) for devices in SHOWN)
        rows.append([f"{model}, the papers, measured", *(f"{each:.2f}" if each else "" for each in measured)])
    return _table(head, rows)


def _mobile_table(study: Study, models: Sequence[str]) -> str:
    head = ["network, link", *(f"{devices} devices" for devices in (8, 32, 128))]
    rows = []
    for model in models:
        for name, way in WAYS.items():
            found = (best(study, "mobile GPUs", model, devices, way) for devices in (8, 32, 128))
            rows.append([f"{model}, {name}", *(f"{value:.2f} ({batch})" for value, batch in found)])
    return _table(head, rows)


def _roofline_table(stages: Mapping[str, Any]) -> str:
    head = ["layer", "direction", "pass", "operations a byte", "GFLOP/s", "GB/s", "of its roof"]
    rows = []
    for layer, direction, stage, work in passes(stages):
        intensity = work["gflops"] / work["GB_s"]
        roof = min(stages["layers"][layer]["sgemm_gflops"], intensity * COPY / 1e9)
        rates = [
            f"{intensity:.1f}",
            f"{work['gflops']:.0f}",
            f"{work['GB_s']:.1f}",
            f"{100 * work['gflops'] / roof:.0f} %",
        ]
        rows.append([layer, direction, stage, *rates])
    return _table(head, rows)


# --- all of it ---


def simulate(path: Path) -> None:
    """Read the measured figures, measure what they lack of a step's parts, write tables and pictures beside them."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    stages = kept.setdefault("stages", {})
    for model in MODELS:
        if model not in stages and any(key.startswith(f"{model} ") for key in kept["measured"]):
            stages[model] = stage_parts(model)
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    study = Study(kept["measured"], stages, _scheduler(path.with_name("cluster_netns.json")))
    passes_file = path.with_name("conv_stages.json")
    conv = json.loads(passes_file.read_text(encoding="utf-8"))
    path.with_suffix(".md").write_text(tables(study, conv), encoding="utf-8")
    folder = path.with_name("figures")
    folder.mkdir(exist_ok=True)
    for figure in (*figures(study), roofline(conv)):
        print(draw(figure, folder / f"{figure.name}.svg"), flush=True)


def _scheduler(path: Path) -> float:
    """Seconds of the scheduler a task, as `cluster_netns.py` has measured them without a limit."""
    if not path.exists():
        return PER_TASK
    found = [rows["unlimited"] for rows in json.loads(path.read_text())["measured"].values() if "unlimited" in rows]
    each = sorted(row["scheduler"] / row["tasks"] for row in found)
    return each[len(each) // 2] if each else PER_TASK
