"""Theano-MPI's table 1 and figures 4 and 5 in small, and its grid of EASGD's α and τ, over simulated workers.

    python -m benchmarks.studies.theano_mpi --data data/cifar10.zarr [--part table easgd] [--figures FOLDER]
        [--results FILE]

The arithmetic is real, on a part of CIFAR-10, and time is that of a cluster of equal workers on gigabit links. `table`
has 1 to 8 workers, each with minibatches of its own, of 32 and of 8 samples, a quarter as in the paper (128 and 32).
They average weights by alltoall-sum-allgather (ASA) after each step, and the rate is multiplied by the number of
workers: the mean of weights with k times the rate is the sum of updates. Momentum 0.9; the rate falls as the paper's
note 13 has it. Each number of workers and batch has a rate of its own: rates double and halve, by one seed, until that
of least top-1 error at the end has a worse one on either side. Two more seeds follow at that rate. float16: weights
travel as float16 and are summed in float32, as the paper has it, at the rate of float32. A real run with
`rule.exchange = "asa16"` sends increments instead, which lose less. `easgd` has α by τ, eight workers, minibatches of
32, and the best rate of each cell, by one seed; two more follow where τ is 1.

Errors are those of validation samples, and the rate is chosen by the same ones. Runs that FILE has are not made again.
--tables, --page and --figures make none. Each part takes less than 40 minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import TWO_CONVOLUTIONS
from benchmarks.network.simulated_workers import GIGABIT
from benchmarks.runs import load, markdown, save, show
from daskcnn.errors import Diverged
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Figure
from daskcnn.sim.cluster import Costs, Server, SimulatedCluster, Worker

WORKERS, LARGE, SMALL = (1, 2, 4, 8), 32, 8
FIRST_RATE, FIRST_OF_EASGD = 0.0025, 0.01
"""Rates that are tried first. That of the table is multiplied by the number of workers."""
ALPHAS, TAUS = (0.1, 0.25, 0.5, 0.75, 0.9), (1, 4, 16)
RESULTS = Path(__file__).parent / "results" / "theano_mpi.json"
PAPERS = {
    (1, LARGE, "float32"): "1, batch 128: 0.01, 19.8 %, 1",
    (2, LARGE, "float32"): "2, batch 128: 0.01, 19.8 %, 1.7",
    (4, LARGE, "float32"): "4, batch 128: 0.01, 20.4 %, 3.4",
    (8, LARGE, "float32"): "8, batch 128: 0.005, 20.7 %, 6.7",
    (8, SMALL, "float32"): "8, batch 32: 0.005, 19.9 %, 4.9",
    (8, SMALL, "float16"): "8, batch 32, float16: 0.005, 20.3 %, 5.7",
}
"""Rows of table 1 by workers, batch and wire here: workers and batch there, rate, AlexNet's top-5 error, speed-up."""
SEEDS = 3
LIMIT, VALIDATION, EPOCHS = 6000, 1500, 10
IMAGES_PER_SECOND, EXCHANGE = 900.0, 0.0008
"""Of a simulated worker; seconds of a meeting besides its transfer (the bar of meeting.py)."""
PARTS = ("table", "easgd")


@dataclass(frozen=True)
class Setting:
    """A row of table 1, or a cell of the grid where α is given."""

    workers: int
    batch: int
    wire: str = "float32"
    alpha: float | None = None
    tau: int | None = None

    def __str__(self) -> str:
        half = ", float16" if self.wire == "float16" else ""
        elastic = "" if self.alpha is None else f", easgd α = {self.alpha:g} τ = {self.tau}"
        return f"{self.workers} worker{'s' if self.workers > 1 else ''}, batch {self.batch}{half}{elastic}"

    @property
    def tuned_as(self) -> Setting:
        """The setting whose best rate it takes."""
        return replace(self, wire="float32")

    @property
    def first_rate(self) -> float:
        """The rate that is tried first."""
        return FIRST_RATE if self.alpha is None else FIRST_OF_EASGD


@dataclass(frozen=True)
class Run:
    """One run."""

    setting: Setting
    lr: float
    seed: int = 0

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Run:
        """The run that figures are of."""
        return cls(**{**kept["run"], "setting": Setting(**kept["run"]["setting"])})

    def tunes(self, setting: Setting) -> bool:
        """True for a first seed of this setting."""
        return self.setting == setting and self.seed == 0

    @property
    def name(self) -> str:
        """The key it is kept under."""
        return f"{self.setting}, rate {self.lr:g}, seed {self.seed}"

    def job(self, data: str) -> dict[str, Any]:
        """The tables of its job. As the best weights count, every center is judged on all validation samples."""
        own = self.setting
        elastic = own.alpha is not None
        return {
            "data": {"name": "cifar10", "path": data, "limit": LIMIT, "validation": VALIDATION},
            "model": {"layers": TWO_CONVOLUTIONS},
            "train": {
                "strategy": "easgd" if elastic else "bsp",
                "partition": "udpa",
                "epochs": EPOCHS,
                "increments": 1,
                "batch_size": own.batch,
                "optimizer": "sgd",
                "lr": self.lr,
                "momentum": 0.9,
                "nesterov": False,
                "weight_decay": 5e-4,
                "schedule": {"name": "poly", "power": 0.5},
                "metrics": ["top5"],
                "seed": self.seed,
                "threads": 1,
                "restore_best": True,
                "on_divergence": "stop",
            },
            "rule": {"alpha": own.alpha, "tau": own.tau} if elastic else {"batch": "worker", "exchange": "asa"},
            "cluster": {"wire": own.wire, "workers": {"cpu": own.workers}},
        }


def cluster(workers: int) -> SimulatedCluster:
    """Equal workers on gigabit links, as the server's is."""
    own = Worker(name="worker", count=workers, images_per_second=IMAGES_PER_SECOND, bandwidth=GIGABIT, latency=0.0002)
    return SimulatedCluster(
        server=Server(bandwidth=GIGABIT, merge_rate=2e9), costs=Costs(dispatch=0.03, exchange=EXCHANGE), worker=[own]
    )


def trained(each: Run, data: str) -> dict[str, Any]:
    """What is kept of a run: simulated seconds, and top-1 and top-5 error by epoch; or why it diverged."""
    job = resolve(each.job(data))
    try:
        report = simulate(scenario_of(job, cluster(each.setting.workers), "this benchmark"), train=True).report
    except Diverged as error:
        return {"diverged": str(error)}
    looks = [look for look in report.looks if look.validation_accuracy is not None]
    return {
        "seconds": report.seconds,
        "epochs": [look.epoch for look in looks],
        "top1": [1 - look.validation_accuracy for look in looks],
        "top5": [1 - look.metrics["top5"] for look in looks],
    }


# --- which runs ---


def settings(parts: Sequence[str]) -> list[Setting]:
    """The rows and cells of these parts."""
    rows = [Setting(workers, batch) for batch in (LARGE, SMALL) for workers in WORKERS]
    halves = [Setting(WORKERS[-1], batch, "float16") for batch in (SMALL, LARGE)]
    grid = [Setting(WORKERS[-1], LARGE, alpha=alpha, tau=tau) for alpha, tau in product(ALPHAS, TAUS)]
    return [*((rows + halves) if "table" in parts else []), *(grid if "easgd" in parts else [])]


def error_of(kept: Mapping[str, Any]) -> float:
    """Top-1 error at the end; 1 for a run that diverged."""
    return float(kept["top1"][-1]) if "top1" in kept else 1.0


def best(results: Mapping[str, Any], setting: Setting) -> float | None:
    """The rate of least top-1 error at the end, of those that the first seed has; None without one."""
    found = {kept["run"]["lr"]: kept for kept in results["parts"].values() if Run.of(kept).tunes(setting)}
    return min(found, key=lambda lr: (error_of(found[lr]), lr), default=None)


def untried(results: Mapping[str, Any], setting: Setting) -> list[Run]:
    """The rates on either side of the best one that are still to be tried; none where it is known to be the best."""
    lr = best(results, setting)
    every = [Run(setting, each) for each in ([setting.first_rate] if lr is None else [lr / 2, 2 * lr])]
    return [each for each in every if each.name not in results["parts"]]


def wanted(results: Mapping[str, Any], parts: Sequence[str]) -> Iterator[Run]:
    """The runs of these parts: first the rates of all, then more seeds of the best. Results have to grow meanwhile."""
    every = settings(parts)
    for setting in (each for each in every if each.tuned_as == each):
        while missing := untried(results, setting):
            yield from missing
    more = [each for each in every if each.alpha is None or each.tau == TAUS[0]]
    for seed, setting in product(range(SEEDS), more):
        if (lr := best(results, setting.tuned_as)) is not None:
            yield Run(setting, lr, seed)


def kept_of(results: Mapping[str, Any], setting: Setting) -> list[Mapping[str, Any]]:
    """All seeds of a setting at its best rate that did not diverge; none while its rates are still tried."""
    if (lr := best(results, setting.tuned_as)) is None or untried(results, setting.tuned_as):
        return []
    found = (results["parts"].get(Run(setting, lr, seed).name, {}) for seed in range(SEEDS))
    return [kept for kept in found if "top1" in kept]


# --- output ---


def table(results: Mapping[str, Any]) -> str:
    """The rows of table 1, in Markdown: medians of the seeds, from the least to the greatest."""
    head = [
        "workers, batch of each",
        "rate",
        "seeds",
        "top-1 error",
        "top-5 error",
        "simulated s",
        "speed-up",
        "the paper's row",
    ]
    lines = []
    alone = {batch: kept_of(results, Setting(1, batch)) for batch in (LARGE, SMALL)}
    for setting in settings(["table"]):
        if kept := kept_of(results, setting):
            seconds = median(each["seconds"] for each in kept)
            one = alone[setting.batch]
            ratio = f"{median(each['seconds'] for each in one) / seconds:.1f}" if one else "–"
            errors = (_spread([each[name][-1] for each in kept]) for name in ("top1", "top5"))
            theirs = PAPERS.get((setting.workers, setting.batch, setting.wire), "")
            rate = f"{best(results, setting.tuned_as):g}"
            lines.append([str(setting), rate, str(len(kept)), *errors, f"{seconds:.1f}", ratio, theirs])
    return markdown(head, lines, left=[0, -1])


def grid(results: Mapping[str, Any]) -> str:
    """Top-1 and top-5 error of EASGD by α and τ, and the best rate."""
    lines = []
    for alpha in ALPHAS:
        cells = (Setting(WORKERS[-1], LARGE, alpha=alpha, tau=tau) for tau in TAUS)
        lines.append([f"{alpha:g}", *(_cell(results, cell) for cell in cells)])
    return markdown(["α", *(f"τ = {tau}" for tau in TAUS)], lines)


def _cell(results: Mapping[str, Any], setting: Setting) -> str:
    kept = kept_of(results, setting)
    if not kept:
        return "–"
    first, second = (_spread([each[name][-1] for each in kept]) for name in ("top1", "top5"))
    return f"{first}; {second}; rate {best(results, setting):g}"


def _spread(errors: Sequence[float]) -> str:
    middle = f"{median(errors):.1%}"
    return middle if len(errors) == 1 else f"{middle} ({100 * min(errors):.1f} to {100 * max(errors):.1f})"


def page(results: Mapping[str, Any]) -> str:
    """Both tables."""
    return "\n\n".join(
        [
            "# Theano-MPI's table 1 in small, and EASGD's grid of α and τ",
            f"Made by `benchmarks/studies/theano_mpi.py` from `results/theano_mpi.json`: {len(results['parts'])} runs "
            "with real arithmetic, in simulated time. CIFAR-10 that went through JPEG once: "
            f"{LIMIT - VALIDATION:,} samples for training, {VALIDATION:,} for validation; {EPOCHS} epochs, two "
            f"convolutions. Equal workers of {IMAGES_PER_SECOND:.0f} images a second on links of 1 Gb/s.",
            "Medians of the seeds, from the least to the greatest. The rate is the best one of each row, before it is "
            "multiplied by the number of workers. The paper's row: workers and batch of each, rate, top-5 error of "
            "AlexNet, speed-up.",
            table(results),
            f"EASGD, {WORKERS[-1]} workers, batches of {LARGE}: top-1 and top-5 error at the end, and the best rate. "
            f"{SEEDS} seeds where τ is {TAUS[0]}, one elsewhere.",
            f"{grid(results)}\n",
        ]
    )


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Errors by epoch, medians of the seeds: batches of 32 as in fig. 4, with 8 by 8; batches of 8 as in fig. 5."""
    of_four = [*(Setting(workers, LARGE) for workers in WORKERS), Setting(WORKERS[-1], SMALL)]
    of_five = [Setting(workers, SMALL) for workers in WORKERS]
    for (number, rows), top in product(((4, of_four), (5, of_five)), (1, 5)):
        curves = {}
        for setting in rows:
            if kept := kept_of(results, setting):
                errors = [100 * median(each) for each in zip(*(run[f"top{top}"] for run in kept), strict=True)]
                curves[str(setting)] = (kept[0]["epochs"], errors)
        if curves:
            title = f"top-{top} error on a part of CIFAR-10, %"
            like = f"Ma, Mao and Taylor, fig. {number}, in small"
            yield Figure(f"theano-mpi-fig-{number}-top{top}", title, like, "epoch", "validation error, %", curves)


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, then print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    options.add_argument("--tables", action="store_true", help="print what FILE holds")
    options.add_argument("--page", type=Path, metavar="PAGE", help="write what FILE holds to this page")
    options.add_argument("--figures", type=Path, metavar="FOLDER", help="draw what FILE holds")
    given = options.parse_args(words)
    results = load(given.results)
    for each in () if given.tables or given.page or given.figures else wanted(results, given.part):
        if each.name not in results["parts"]:
            kept = results["parts"][each.name] = {"run": asdict(each), **trained(each, given.data)}
            save(given.results, results)
            print(each.name, "diverged" if "diverged" in kept else f"top-1 error {kept['top1'][-1]:.1%}", flush=True)
    show(page(results), given.page)
    for figure in figures(results) if given.figures else ():
        print(draw(figure, given.figures / f"{figure.name}.svg"))


if __name__ == "__main__":
    main()
