"""Runs in simulated time against the runs themselves: every rule, on the cluster that the run has measured.

    python -m benchmarks.replay --data data/cifar10.zarr [--workers 1 2]     # trains two epochs with every rule first
    python -m benchmarks.replay --runs FOLDER                                # takes runs that there are already

Exit 1 where the simulated time of a run is more than 10 % off the measured one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import TWO_CONVOLUTIONS
from benchmarks.runs import BY_SGD, TUNED, machine
from daskcnn.cluster.link.connect import connect
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.launch.training import train_job
from daskcnn.planning.simulate import scenario, simulate
from daskcnn.ps import RULES
from daskcnn.runs.log import read_events
from daskcnn.show.report_tables import tables

BAR = 0.10


def replayed(run: Path) -> dict[str, Any]:
    """Seconds of the run, and of its simulation."""
    measured = tables(read_events(run / "events.jsonl")).seconds
    simulated = simulate(scenario(str(run), None, ())).report.seconds
    assert measured is not None
    assert simulated is not None
    return {"measured": measured, "simulated": simulated, "ratio": simulated / measured}


def trained(data: str, workers: int, folder: str, rules: list[str]) -> Iterator[tuple[str, Path]]:
    """A short run of every rule that so many workers can make, of the study's network."""
    with connect(Cluster(workers=Workers(cpu=workers))) as client:
        client.wait_for_workers(workers + 1, timeout=60)
        for strategy, rule in RULES.items():
            if workers < rule.fewest or strategy not in rules:
                continue
            job = {
                "data": {"name": "cifar10", "path": data},
                "model": {"layers": TWO_CONVOLUTIONS},
                "train": {"strategy": strategy, "epochs": 2, **BY_SGD},
                "rule": TUNED.get(strategy, {}) | ({"rounds": 2} if strategy == "parallel-sgd" else {}),
                "cluster": {"workers": {"cpu": workers}},
                "run": {"dir": folder, "name": f"{strategy}-{workers}"},
            }
            yield f"{strategy}, {workers} workers", train_job(resolve(job), client=client).run


def finished(folder: Path) -> Iterator[tuple[str, Path]]:
    """The runs of a folder that came to their end."""
    for run in sorted(folder.iterdir()):
        if (run / "summary.json").exists():
            yield run.name, run


def main() -> int:
    """Exit code 1 where a simulation is too far off."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE")
    options.add_argument("--runs", type=Path, metavar="FOLDER", help="replay these, and train nothing")
    options.add_argument("--results", type=Path, default=Path("benchmarks/results/replay.json"))
    given = options.parse_args()
    kept = json.loads(given.results.read_text()) if given.results.exists() else {"runs": {}}
    with tempfile.TemporaryDirectory() as own:
        fresh = (trained(given.data, n, own, given.rules) for n in given.workers)
        sources = [finished(given.runs)] if given.runs else fresh
        for name, run in (each for source in sources for each in source):
            found = kept["runs"][name] = replayed(run)
            print(f"{name:60} {found['measured']:6.1f} s, simulated {found['simulated']:6.1f} s: {found['ratio']:.3f}")
            given.results.write_text(json.dumps({"machine": machine(), **kept}, indent=1) + "\n")
    off = [name for name, found in kept["runs"].items() if abs(found["ratio"] - 1) > BAR]
    print(f"more than {BAR:.0%} off: {', '.join(off) or 'none'}")
    return int(bool(off))


if __name__ == "__main__":
    raise SystemExit(main())
