"""CIFAR-10 with `quick` on two one-thread workers, end to end: accuracy on the test samples and wall time.

    python -m benchmarks.cifar10 --data data/cifar10.zarr --strategy sgwu agwu layer --results benchmarks/results

Each strategy is the command line a user would type; its summary is kept with the command and the machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from daskcnn.arrays import cpu_count, device_profile

BARS = {"sgwu": 0.68, "agwu": 0.64, "layer": 0.73}


def command(strategy: str) -> list[str]:
    """The flags of a strategy's run."""
    partition = [] if strategy == "layer" else ["--partition", "idpa"]
    flags = ["--dataset", "cifar10", "--model", "quick", "--strategy", strategy, *partition, "--epochs", "10"]
    return ["python", "-m", "daskcnn.run", *flags, "--workers", "cpu=2"]


def record(strategy: str, seconds: float, summary: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    cpu = device_profile("cpu", cpu_count())
    kept = {key: value for key, value in summary.items() if key not in ("run", "checkpoint")}
    return {
        "command": shlex.join(command(strategy)),
        "machine": {"processor": cpu.name, "cores": cpu.threads, "memory_GiB": round(cpu.memory / 2**30)},
        "bar": BARS[strategy],
        "wall_seconds": round(seconds, 1),
        "summary": kept,
    }


def run(strategy: str, data: str) -> dict[str, Any]:
    """Run a strategy to its end; the run's folder is not kept."""
    with tempfile.TemporaryDirectory() as runs:
        started = time.monotonic()
        flags = [*command(strategy)[1:], "--data", data, "--run-dir", runs, "--json"]
        done = subprocess.run([sys.executable, *flags], stdout=subprocess.PIPE, text=True, check=True)
        return record(strategy, time.monotonic() - started, json.loads(done.stdout))


def main() -> None:
    """Run what is asked for and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    parser.add_argument("--strategy", nargs="+", choices=list(BARS), default=list(BARS))
    parser.add_argument("--results", type=Path, help="folder to write cifar10_quick_STRATEGY.json into")
    arguments = parser.parse_args()
    for strategy in arguments.strategy:
        result = run(strategy, arguments.data)
        if arguments.results:
            path = arguments.results / f"cifar10_quick_{strategy}.json"
            path.write_text(json.dumps(result, indent=2) + "\n")
        accuracy = result["summary"]["test"]["accuracy"]
        print(f"{strategy}: test accuracy {accuracy:.1%} (bar {BARS[strategy]:.0%}) in {result['wall_seconds']} s")


if __name__ == "__main__":
    main()
