"""BPT-CNN's fig. 12, 14 and 15 in simulated time: its strategies by samples, workers, networks and threads.

    python -m benchmarks.studies.bpt_times [--plots FOLDER] [--page FILE]

Speeds of the networks of its table 2 are measured, one thread each, at batches of 128 of 32×32 images. Every second
worker is three times slower. --plots measures what --results lacks, simulates, keeps what it finds there, and draws it
(`pip install 'daskcnn[plot]'`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import Images
from benchmarks.few_samples import measure
from benchmarks.network.simulated_workers import GIGABIT, cluster
from benchmarks.runs import add_command, kept_in, load, machine, markdown, save, show
from benchmarks.sooner import EXCHANGE
from daskcnn.job.resolve import resolve
from daskcnn.planning.paper_figures import by_workers, reports_of_strategies, time_by_samples, time_by_threads
from daskcnn.planning.simulate import Scenario, scenario_of
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Figure

RESULTS = Path(__file__).parent / "results" / "bpt_times.json"
NETWORKS = tuple(f"case{number}" for number in range(1, 8))
"""BPT-CNN, table 2."""
USUAL, WORKERS, RATIO, SAMPLES, EPOCHS, BATCH = "case3", 30, 3.0, 400_000, 100, 128
SECONDS = 10.0
"""Seconds of measuring a network's speed."""
TABLES = {
    "time-by-samples": ("Fig. 12 a, 14: seconds by samples", 0),
    "time-by-workers": ("Fig. 12 b, 14: seconds by workers", 0),
    "time-by-networks": ("Fig. 14 a: seconds by networks", 0),
    "time-by-threads": ("Fig. 14: seconds by threads of a worker, by Amdahl's law (a tenth of a step is serial)", 0),
    "communication-by-workers": ("Fig. 15 a: MB by workers", 0),
    "balance-by-workers": ("Fig. 15 b: balance by workers", 2),
}
"""Headings and digits of the figures that are tables of the page."""


def scenario(network: str, speed: float) -> Scenario:
    """The study's job for a network. speed: images a second that a fast worker trains."""
    job = {
        "data": {"name": "cifar10"},
        "model": {"name": network},
        "train": {"strategy": "agwu", "epochs": EPOCHS, "batch_size": BATCH},
    }
    workers = cluster(2, speed, speed / RATIO, GIGABIT, EXCHANGE).of_size(WORKERS)  # fast and slow ones in turn
    return replace(scenario_of(resolve(job), workers, "bpt_times"), samples=SAMPLES)


def figures(speeds: Mapping[str, float]) -> Iterator[Figure]:
    """Yield time, traffic and balance of the usual network, and time by the networks."""
    usual = scenario(USUAL, speeds[USUAL])
    yield from (time_by_samples(usual, 0), *by_workers(usual, 0), time_by_threads(usual, 0))
    cases = [scenario(network, speeds[network]) for network in NETWORKS]
    numbers = range(1, 1 + len(NETWORKS))
    curves = {name: (numbers, [r.seconds for r in found]) for name, found in reports_of_strategies(0, cases)}
    title = "Time by the network, case1 to case7"
    yield Figure("time-by-networks", title, "BPT-CNN fig. 14", "network", "seconds", curves, ticks=NETWORKS)


def page(results: Mapping[str, Any]) -> str:
    """The page: a table for each figure."""
    of, speeds = results["machine"], results["images_per_second"]
    parts = [
        "# BPT-CNN's strategies by samples, workers, networks and threads",
        "Simulated: `benchmarks/studies/bpt_times.py`. No arithmetic is trained, so an epoch is worth as much to all "
        f"strategies. {EPOCHS} epochs in minibatches of {BATCH}; `{USUAL}`, {WORKERS} workers and {SAMPLES:,} samples "
        "where an axis does not say otherwise. Every second worker is three times slower, links have 1 Gb/s. The "
        "paper's nodes are of one kind, its figures have no numbers but those that its text names, and it does not say "
        "which network they are of.",
        "Speeds of a fast worker are measured, one thread each: "
        + ", ".join(f"`{network}` {speeds[network]:,}" for network in NETWORKS)
        + f" images a second ({of['processor']}).",
    ]
    for name, (heading, digits) in TABLES.items():
        curves = results["figures"][name]
        axis = next(iter(curves.values()))[0]
        head = ["", *(NETWORKS if name == "time-by-networks" else (f"{each:,}" for each in axis))]
        rows = [[f"`{side}`", *(f"{y:,.{digits}f}" for y in ys)] for side, (_, ys) in curves.items()]
        parts += [f"## {heading}", markdown(head, rows)]
    return "\n\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Measure the speeds that are missing, simulate and draw if asked to, and write the page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--plots", type=Path, metavar="FOLDER", help="measure what is missing, simulate and draw")
    options.add_argument("--page", type=Path, metavar="FILE", help="write the tables to this page")
    given = options.parse_args(words)
    if given.plots is not None:
        results = kept_in(given.results, machine())
        add_command(results)
        speeds = results.setdefault("images_per_second", {})
        for network in NETWORKS:
            if network not in speeds:
                *_, row = measure(network, [BATCH // 2, BATCH], SECONDS, Images((32, 32, 3)))["rows"]
                speeds[network] = row["images_per_second"]
                save(given.results, results)
        for figure in figures(speeds):
            curves = {name: [[*xs], [*ys]] for name, (xs, ys) in figure.curves.items()}
            results.setdefault("figures", {})[figure.name] = curves
            print(draw(figure, given.plots / f"simulated-{figure.name}.svg"), flush=True)
        save(given.results, results)
    show(page(load(given.results)), given.page)


if __name__ == "__main__":
    main()
