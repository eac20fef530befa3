"""The simulated half of `layer_scaling.py`: the measured machine, more of it, over links of different speed.

    python -m benchmarks.studies.layer_scaling --simulate [--json benchmarks/studies/results/layer_scaling.json]

One thread of the machine at hand is the CPU. A GPU is so much faster as the papers' one was than their CPU (thesis,
table 5.3), a mobile GPU ten times slower than that, with a desktop GPU as home (5.5.1). The papers' own devices were
several hundred times slower than this thread: "as slow as the papers'" means 500 times, so that 5 MB/s weigh as they
did there.

What is simulated is kept beside the measured figures, and pictures go to `figures`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from benchmarks.common import IMAGE, Images, seconds
from benchmarks.conv_gemm import PAD2, SIDE, directions, sgemm
from benchmarks.runs import load, markdown, save
from benchmarks.sharded_steps import BATCHES, MODELS
from daskcnn.arrays import Device, device_profile, single_threaded_blas
from daskcnn.conv import ALGORITHMS, ConvSpec
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import Scenario, scenario_of
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Figure, stacked
from daskcnn.sim.cluster import Costs, SimulatedCluster, Unequal, Worker
from daskcnn.sim.papers_costs import Sharding, ceiling
from daskcnn.training.replica import Replica
from daskcnn.training.worker_calibration import conv_seconds, stage_seconds, step_seconds, tune_convolutions

ROOM = Path(__file__).parents[1]
OVER_LINKS = ROOM / "network" / "results" / "cluster_netns.json"
PASSES = ROOM / "results" / "conv_stages.json"


@dataclass(frozen=True)
class Way:
    """A link of every device's own, bytes a second each way; what numbers travel as; parts of a minibatch.

    slower: how many times slower than here all devices are.
    """

    link: float
    wire: Literal["float32", "float16"] = "float32"
    parts: int = 1
    slower: float = 1.0


PAPERS_SLOWER = 500
"""Of their first CPU, in round numbers. For batches of 64 on four CPUs the thesis gives communication's share of a step
and the speed-up: 47 % and 1.35 for 50:500, 30 % and 1.95 for 150:800, 19 % and 2.27 for 500:1500 (5.1.2). Communication
is what eq. 2 counts, in doubles over 5 MB/s: 21, 54 and 135 s, so that one CPU took 60, 350 and 1,600 s a step. One
thread here takes 0.2, 0.5 and 2.3 s: 300, 700 and 700 times less."""
LIKE_THEIRS = "5 MB/s, devices as slow as the papers'"
WAYS = {
    LIKE_THEIRS: Way(5e6, slower=PAPERS_SLOWER),
    "5 MB/s": Way(5e6),
    "100 Mb/s": Way(1.25e7),
    "1 Gb/s": Way(1.25e8),
    "1 Gb/s, float16, 4 parts": Way(1.25e8, "float16", 4),
    "10 Gb/s": Way(1.25e9),
    "10 Gb/s, float16, 4 parts": Way(1.25e9, "float16", 4),
    "unlimited": Way(math.inf),
}
LEFT_OUT = ("100 Mb/s", "10 Gb/s, float16, 4 parts")
"""Of the curves, which would be too many."""
DEVICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MOBILE = (1, 2, 4, 8, 16, 32, 64, 96, 128)
COUNTS = {"CPUs": DEVICES, "GPUs": DEVICES, "mobile GPUs": MOBILE}
SHOWN = (2, 3, 4, 8, 16, 32)
"""Devices in the tables."""
STAGES_AT = 64
"""The batch at which the parts of a step are measured; they are taken for those of all batches."""
PER_TASK = 2e-3
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
UNEQUAL = Unequal(lowest=1.0, highest=2.0)
"""Devices beside the first one, which is the slowest, as theirs was. The range is assumed: table 2 names processors."""
THEIRS = "where batches have 1,024"
ENDS = {"low to mid range": 500, "high end": 125}
"""Devices of their fig. 11 and 12, and the assumed factor by which one thread here is faster."""
SETTLED = 0.95
"""Of the best speed-up: from so many devices on, more bring next to nothing."""
COPIED = 1 << 26
"""Numbers of an array that is copied for the memory's roof."""
ROUNDS = 7
"""In which the first convolution is measured."""


# --- what was measured ---


def stage_parts(model: str) -> dict[str, Any]:
    """Seconds a sample on one thread of this machine: of a step, of its stages, of the convolutions in them."""
    job = resolve({"model": {"name": model}, "train": {"strategy": "layer", "batch_size": STAGES_AT, "threads": 1}})
    dataset: Any = Images()
    with single_threaded_blas():
        replica = Replica(job, dataset, Device.of("cpu", threads=1), clock=time.perf_counter)
        tune_convolutions(replica)
        whole, convs = step_seconds(replica), conv_seconds(replica)
        stages = stage_seconds(replica)
        parts = {"stages": dict(stages.whole), "fixed": dict(stages.fixed), "rest": stages.rest}
        return {"whole": whole, **parts, "convs": convs, "batch": STAGES_AT}


def roofs_and_first(models: Iterable[str]) -> dict[str, Any]:
    """Bytes a second that copying moves, and figures of each network's first convolution by im2col, as in
    `conv_stages.json`: there are those of the second one."""
    source = np.ones(COPIED, np.float32)
    target = np.empty_like(source)
    with single_threaded_blas():
        return {
            "copy": 2 * source.nbytes / _median(lambda: np.copyto(target, source)),
            "layers": dict(map(_first_conv, models)),
        }


def _first_conv(model: str) -> tuple[str, dict[str, Any]]:
    spec = ConvSpec(N=STAGES_AT, H=IMAGE[0], W=IMAGE[1], C=IMAGE[2], K=int(model.partition(":")[0]), **PAD2)
    works, im2col = directions(spec, Device()), ALGORITHMS["im2col"]
    found: dict[str, Any] = {"sgemm_gflops": 2 * SIDE**3 / _median(sgemm()) / 1e9}
    for direction, name in (("forward", "forward"), ("backward_filter", "backward")):
        taken, parts = _median(works[direction]), im2col.work(spec, direction)
        rates = {"gflops": sum(work.flops for work in parts), "GB_s": sum(work.bytes for work in parts)}
        found[name] = {"im2col": {key: count / taken / 1e9 for key, count in rates.items()}}
    return f"{model} conv1, batch {STAGES_AT}", found


def _median(work: Callable[[], Any]) -> float:
    work()
    return median(seconds(work) for _ in range(ROUNDS))


@dataclass(frozen=True, eq=False)
class Study:
    """Measured figures, as their files have them. scheduler: seconds of Dask's for a task.

    simulated: speed-ups that are known; others are added.
    """

    measured: Mapping[str, Any]
    stages: Mapping[str, Any]
    scheduler: float = PER_TASK
    simulated: dict[str, float] = field(default_factory=dict)

    def batches(self, model: str) -> list[int]:
        return [batch for batch in BATCHES if f"{model} {batch} float32" in self.measured]

    def rest(self, model: str, batch: int) -> float:
        """Seconds a step of what home did besides its shards, in the sharded steps themselves."""
        found = self.measured[f"{model} {batch} float32"]
        return max(0.0, found["busy"] - found["shards"])

    def cpu(self, model: str, batch: int) -> Worker:
        """One thread of the machine, at this batch: its stages share what a step took besides what home does alone."""
        seconds, parts = self.measured[f"{model} {batch} float32"]["one"] / batch, self.stages[model]
        rest = self.rest(model, batch) / batch
        scale = (seconds - rest) / sum(parts["stages"].values())
        apart = 1 - sum(parts["convs"].values()) / sum(parts["stages"].values())
        return Worker(
            name="cpu",
            images_per_second=1 / seconds,
            conv_seconds={name: scale * each for name, each in parts["stages"].items()},
            conv_fixed={name: scale * each for name, each in parts["fixed"].items()},
            rest_seconds=rest,
            spread_share=min(0.9, max(0.0, apart)),
        )

    def faster(self, model: str, batch: int, factor: float, name: str) -> Worker:
        """The same device, so many times as fast."""
        kind = "cpu" if name == "cpu" else "gpu"
        return self.cpu(model, batch).times_as_fast(factor).model_copy(update={"name": name, "kind": kind})

    def costs(self, model: str, batch: int) -> Costs:
        """Dask's own seconds: what a step of two took beyond its busiest worker, and for each task more."""
        tiny = next((found for key, found in self.measured.items() if key.startswith("8:8 ")), None)
        beyond = tiny["step"] - tiny["busy"] if tiny else 0.0
        two = scenario(model, batch, Way(math.inf)).sharding(
            SimulatedCluster(worker=[self.cpu(model, batch)]).of_size(2)
        )
        return Costs(dispatch=max(0.0, beyond - self.scheduler * two.plan.task_count), task=self.scheduler)


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
    return scenario_of(job, SimulatedCluster(worker=[Worker(name="none", images_per_second=1)]), "measured")


# --- what is simulated ---


def clusters(study: Study, kind: str, model: str, batch: int, devices: int, way: Way) -> SimulatedCluster:
    """So many devices of a kind, each behind such a link."""
    ratio = PAPER_RATIO[model] / way.slower
    cpu, gpu = study.faster(model, batch, 1 / way.slower, "cpu"), study.faster(model, batch, ratio, "gpu")
    mobile = study.faster(model, batch, ratio / MOBILE_SLOWER, "mobile")
    first = cpu if "CPU" in kind else gpu
    more = mobile if kind == "mobile GPUs" else first
    unequal = UNEQUAL if kind.startswith("unequal") else None
    workers = [first, *more.model_copy(update={"count": devices - 1, "unequal": unequal}).each()]
    own = None if way.link == math.inf else way.link
    named = [w.model_copy(update={"name": f"{w.name}-{i}", "bandwidth": own}) for i, w in enumerate(workers)]
    return SimulatedCluster(costs=study.costs(model, batch), worker=named)


def speedup(study: Study, kind: str, model: str, batch: int, devices: int, way: Way) -> float:
    """Against the fastest device alone, which needs no Dask."""
    if devices == 1:
        return 1.0
    name = f"{devices} {kind}, {model} {batch}, {way.link:g} {way.wire} {way.parts} {way.slower:g}"
    if name not in study.simulated:
        chosen = scenario(model, batch, way).sharding(clusters(study, kind, model, batch, devices, way))
        study.simulated[name] = round(chosen.speedup(), 6)
    return study.simulated[name]


def best(study: Study, kind: str, model: str, devices: int, way: Way) -> tuple[float, int]:
    """Over the batches, and at which."""
    return max((speedup(study, kind, model, batch, devices, way), batch) for batch in study.batches(model))


def as_papers(study: Study, kind: str, model: str, batch: int, devices: int) -> float:
    """Their scheme and count over their link, on devices as slow as theirs."""
    free = Way(math.inf, slower=PAPERS_SLOWER)
    star: Sharding = scenario(model, batch, free).star(clusters(study, kind, model, batch, devices, free))
    return replace(star, overhead=0.0).paper_speedup(WAYS[LIKE_THEIRS].link)


# --- pictures ---


def figures(study: Study) -> Iterator[Figure]:
    """The papers' figures 6 and 9 to 13, of this machine. Largest batches: of those that were measured."""
    yield from _measured_steps(study)
    smallest, largest = MODELS[0], MODELS[-1]
    if found := study.batches(smallest):
        yield from _simulated_steps(study, "unequal CPUs", smallest, found[0], "Marques et al. fig. 9 a")
    if found := study.batches(largest):
        batch = found[-1]
        yield from _simulated_steps(study, "unequal CPUs", largest, batch, f"Marques et al. fig. 9 b, {THEIRS}")
        yield from _simulated_steps(study, "unequal GPUs", largest, batch, f"Marques et al. fig. 10, {THEIRS}")
        for number, kind in ((11, "unequal CPUs"), (12, "unequal GPUs")):
            for letter, end in zip("ab", ENDS, strict=True):
                yield _by_link(study, kind, largest, batch, end, f"Marques et al. fig. {number} {letter}, {THEIRS}")
        like = {
            "CPUs": "Marques et al. fig. 11 and 12, which are of unequal devices",
            "mobile GPUs": f"Marques et al. fig. 13, {THEIRS}",
        }
        like["GPUs"] = like["CPUs"]
        for kind, counts in COUNTS.items():
            yield _speedups(study, kind, largest, batch, counts, like[kind])


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
        rest = study.rest(model, common[-1])
        bars[f"{model}\n2"] = (max(0.0, found["step"] - found["shards"] - rest), found["shards"], rest)
    title = f"A step's parts measured, batches of {common[-1]}"
    yield stacked(
        "layer-measured",
        title,
        f"thesis, fig. 5.{1 + BATCHES.index(common[-1])}",
        "network and workers of one thread",
        bars,
    )


def _simulated_steps(study: Study, kind: str, model: str, batch: int, like: str) -> Iterator[Figure]:
    """By the number of devices: as slow as the papers' over their link, and those of now over 10 Gb/s."""
    for short, name in (("papers", LIKE_THEIRS), ("now", "10 Gb/s")):
        bars = {}
        for devices in DEVICES:
            step = (
                scenario(model, batch, WAYS[name])
                .sharding(clusters(study, kind, model, batch, devices, WAYS[name]))
                .step()
            )
            bars[f"{devices}"] = (0.0 if devices == 1 else step.comm, step.conv, step.comp)
        file = f"layer-elapsed-{_plain(kind)}-{_plain(model)}-{short}"
        yield stacked(file, f"{model}, batches of {batch}, {name}", like, kind, bars)


def _speedups(study: Study, kind: str, model: str, batch: int, devices: Sequence[int], like: str) -> Figure:
    theirs = devices, [as_papers(study, kind, model, batch, n) for n in devices]
    curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {"5 MB/s, as slow, by the papers' scheme": theirs}
    curves |= {
        name: (devices, [speedup(study, kind, model, batch, n, way) for n in devices])
        for name, way in WAYS.items()
        if name not in LEFT_OUT
    }
    title = f"Speed-up of {model}, batches of {batch}"
    name = f"layer-speedup-{_plain(kind)}"
    return Figure(name, title, like, kind, "speed-up", curves, doubling=True)


def _by_link(study: Study, kind: str, model: str, batch: int, end: str, like: str) -> Figure:
    """Speed-ups of one kind of devices by our scheme, a curve a link."""
    ways = {name: Way(way.link, slower=ENDS[end]) for name, way in WAYS.items() if way == Way(way.link)}
    curves = {
        name: (DEVICES, [speedup(study, kind, model, batch, n, way) for n in DEVICES]) for name, way in ways.items()
    }
    name, title = f"layer-{_plain(kind)}-{_plain(end)}", f"Speed-up of {model}, batches of {batch}, {end}"
    return Figure(name, title, like, kind, "times as fast as the fastest of them alone", curves, doubling=True)


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name).lower()


# --- the roofline ---

AS_FAST = 0.15
"""The part by which sgemm may differ on what is the same machine: processors of one name are not all alike."""


def roofline(stages: Mapping[str, Any], copy: float) -> Figure:
    """Of the convolutions' passes on one thread: operations and bytes as the algorithm counts them, measured seconds.

    stages: `conv_stages.json`, and the first convolutions likewise. The roofs: sgemm's rate in the same rounds, and
    copy, the bytes a second that copying moves.
    """
    peak = max(layer["sgemm_gflops"] for layer in stages["layers"].values())
    ridge = 1e9 * peak / copy
    ends = [0.5, ridge, 1000.0]
    name = f"sgemm {peak:.0f} GFLOP/s, copying {copy / 1e9:.0f} GB/s"
    roof = {name: (ends, [min(peak, x * copy / 1e9) for x in ends])}
    points: dict[str, tuple[list[float], list[float]]] = {}
    for layer, _, stage, work in passes(stages):
        xs, ys = points.setdefault(f"{layer.split()[1].rstrip(',')}: {stage}", ([], []))
        xs.append(work["gflops"] / work["GB_s"])
        ys.append(work["gflops"])
    return Figure(
        "layer-roofline",
        "Roofline of the convolutions' passes, one thread",
        "thesis fig. 5.17 and 5.18, which are of GPUs",
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


def page(results: dict[str, Any]) -> str:
    """All tables, in Markdown. What has not been simulated is simulated now, and kept in the results."""
    study, (stages, copy) = study_of(results), roofline_of()
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
        "## Where it stops: the largest network and batch that were measured",
        "The best speed-up up to 32 devices (mobile GPUs: 128), and from how many on it is within 5 % of that. "
        "1/f is what the part that is not sharded allows by Amdahl's law.",
        _ends_table(study, models[-1]),
        "## Roofline of the convolutions' passes",
        f"One thread of {stages['machine']['processor']}; copying moves {copy / 1e9:.1f} GB/s there.",
        _roofline_table(stages, copy),
    ]
    return "\n\n".join(parts) + "\n"


def _measured_table(study: Study, models: Sequence[str]) -> str:
    head = ["network", "batch", "one, ms", "two, ms", "speed-up", "two at once", "simulated", "papers' 2", "MB a step"]
    rows = []
    for model in models:
        for batch in study.batches(model):
            f = study.measured[f"{model} {batch} float32"]
            times = [f"{1e3 * f[key]:.0f}" for key in ("one", "step")]
            simulated = speedup(study, "CPUs", model, batch, 2, WAYS["unlimited"])
            found = (f["speedup"], f["ceiling"], simulated, PAPER_CPUS[model][2])
            ratios = [f"{each:.2f}" for each in found]
            rows.append([model, str(batch), *times, *ratios, f"{f['bytes'] / 1e6:.1f}"])
    return markdown(head, rows, left=[0])


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
    return markdown(head, rows, left=[0])


def _mobile_table(study: Study, models: Sequence[str]) -> str:
    head = ["network, link", *(f"{devices} devices" for devices in (8, 32, 128))]
    rows = []
    for model in models:
        for name, way in WAYS.items():
            found = (best(study, "mobile GPUs", model, devices, way) for devices in (8, 32, 128))
            rows.append([f"{model}, {name}", *(f"{value:.2f} ({batch})" for value, batch in found)])
    return markdown(head, rows, left=[0])


def _ends_table(study: Study, model: str) -> str:
    """What the papers read off their figures 9 to 13, and what ours show."""
    batch = study.batches(model)[-1]
    head = [f"{model}, batches of {batch}", *(f"{kind}: best, from" for kind in COUNTS)]
    rows = [
        [
            name,
            *(
                _end([speedup(study, kind, model, batch, n, way) for n in counts], counts)
                for kind, counts in COUNTS.items()
            ),
        ]
        for name, way in WAYS.items()
    ]
    theirs = [
        _end([as_papers(study, kind, model, batch, n) for n in counts], counts) for kind, counts in COUNTS.items()
    ]
    rows.append(["5 MB/s, as slow, by the papers' scheme", *theirs])
    rows.append(
        ["the papers, simulated", "little gained from 8 on", "4.3 over an ideal link, 8", "some 100 equal one GPU"]
    )
    serial = [_serial(study, kind, model, batch) for kind in COUNTS]
    rows.append(["1/f here", *(f"{ceiling(f):,.0f} ({100 * f:.2g} %)" for f in serial)])
    rows.append(["1/f of the papers", "7.76 (13 %)", "", ""])
    return markdown(head, rows, left=[0])


def _end(speedups: Sequence[float], counts: Sequence[int]) -> str:
    best = max(speedups)
    enough = next(n for n, found in zip(counts, speedups, strict=True) if found >= SETTLED * best)
    return f"{best:.2f}, {enough}"


def _serial(study: Study, kind: str, model: str, batch: int) -> float:
    way = WAYS["unlimited"]
    return scenario(model, batch, way).sharding(clusters(study, kind, model, batch, 1, way)).serial


def _roofline_table(stages: Mapping[str, Any], copy: float) -> str:
    head = ["layer", "direction", "pass", "operations a byte", "GFLOP/s", "GB/s", "of its roof"]
    rows = []
    for layer, direction, stage, work in passes(stages):
        intensity = work["gflops"] / work["GB_s"]
        roof = min(stages["layers"][layer]["sgemm_gflops"], intensity * copy / 1e9)
        rates = [
            f"{intensity:.1f}",
            f"{work['gflops']:.0f}",
            f"{work['GB_s']:.1f}",
            f"{100 * work['gflops'] / roof:.0f} %",
        ]
        rows.append([layer, direction, stage, *rates])
    return markdown(head, rows, left=[0])


# --- all of it ---


def simulate(path: Path) -> None:
    """Measure what FILE lacks of a step's parts, simulate anew, keep that in FILE, and draw pictures beside it."""
    results = load(path)
    stages = results.setdefault("stages", {})
    for model in MODELS:
        if model not in stages and any(key.startswith(f"{model} ") for key in results["measured"]):
            stages[model] = stage_parts(model)
            save(path, results)
    _measure_roofs(stages)
    results["simulated"] = {}
    page(results)
    folder = path.with_name("figures")
    folder.mkdir(exist_ok=True)
    for figure in (*figures(study_of(results)), roofline(*roofline_of())):
        print(draw(figure, folder / f"{figure.name}.svg"), flush=True)
    save(path, results)


def study_of(results: dict[str, Any]) -> Study:
    """The measured figures, and what is simulated from them so far."""
    simulated = results.setdefault("simulated", {})
    return Study(results["measured"], results["stages"], _scheduler(OVER_LINKS), simulated)


def roofline_of() -> tuple[dict[str, Any], float]:
    """The passes of both convolutions, and the bytes a second of copying."""
    conv: dict[str, Any] = json.loads(PASSES.read_text(encoding="utf-8"))
    return {**conv, "layers": conv["layers"] | conv["roofs"]["layers"]}, conv["roofs"]["copy"]


def _measure_roofs(models: Iterable[str]) -> None:
    """Measure copying and the first convolutions beside the second ones.

    Raises SystemExit where this is another machine, or one that is not as fast today: processors of one name differ.
    """
    conv = json.loads(PASSES.read_text(encoding="utf-8"))
    if "roofs" in conv:
        return
    roofs = roofs_and_first(models)
    now, then = (median(layer["sgemm_gflops"] for layer in each["layers"].values()) for each in (roofs, conv))
    if conv["machine"]["processor"] != device_profile("cpu", 1).name or abs(now / then - 1) > AS_FAST:
        measured = f"its second convolutions had {then:.0f} GFLOP/s of sgemm on {conv['machine']['processor']}"
        raise SystemExit(f"{PASSES}: {measured}, {now:.0f} are made here now; run benchmarks.conv_stages here first")
    conv["roofs"] = roofs
    save(PASSES, conv)


def _scheduler(path: Path) -> float:
    """Seconds of the scheduler a task, as `cluster_netns.py` has measured them over the slowest and the fastest links.

    What it takes whether there are tasks or not goes with the time, of which there is more over slow links.
    """
    if not path.exists():
        return PER_TASK
    each = sorted(map(_a_task, (found["rows"] for found in json.loads(path.read_text())["measured"].values())))
    return each[len(each) // 2] if each else PER_TASK


def _a_task(rows: Mapping[str, Any]) -> float:
    """From one configuration's rows, by link."""
    by_time = sorted(rows.values(), key=lambda row: row["step"])
    fast, slow = by_time[0], by_time[-1]
    longer = slow["step"] - fast["step"]
    idle = max(0.0, slow["scheduler"] - fast["scheduler"]) / longer if longer else 0.0
    return float(max(0.0, fast["scheduler"] - idle * fast["step"]) / fast["tasks"])
