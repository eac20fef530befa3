"""Draw `run.svg` from the event logs of two runs: `python docs/pictures/draw.py`. Needs matplotlib.

The logs beside this file are those of two real runs on one machine with two cores, whose workers were throttled
(`DASKCNN_THROTTLE`) to speeds of 4, 2 and 1. Other programs ran on the machine at times, so seconds of the two runs
cannot be compared; the shares of waiting can. The commands, with data set and run directory left at their defaults:

    dask worker tcp://127.0.0.1:8786 --name fast --nthreads 1 --resources CPU=1
    DASKCNN_THROTTLE=2 dask worker tcp://127.0.0.1:8786 --name middle --nthreads 1 --resources CPU=1
    DASKCNN_THROTTLE=4 dask worker tcp://127.0.0.1:8786 --name slow --nthreads 1 --resources CPU=1
    dask worker tcp://127.0.0.1:8786 --name server --nthreads 1 --resources PS=1
    python -m daskcnn.run --scheduler tcp://127.0.0.1:8786 --workers cpu=3 --partition udpa --name picture-udpa
    python -m daskcnn.run --scheduler tcp://127.0.0.1:8786 --workers cpu=3 --partition idpa --name picture-idpa
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from daskcnn.show.renderers.drawing import COLOURS
from daskcnn.show.run_figures import COLOUR_OF

HERE = Path(__file__).parent
RUNS = {"udpa": "equal parts (udpa)", "idpa": "parts in proportion to speed (idpa)"}
WORKERS = {"cpu-0": "fast", "cpu-1": "middle", "cpu-2": "slow"}
TRAINS, JUDGES, WAITS = (COLOURS[COLOUR_OF[part]] for part in ("compute", "evaluation", "wait"))
LINES = {"udpa": WAITS, "idpa": TRAINS}


def main() -> None:
    """Write `run.svg`."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "daskcnn", "svg.fonttype": "path"})
    runs = {name: read(HERE / f"run-{name}.jsonl") for name in RUNS}
    end = max(seconds(events, events[-1]) for events in runs.values())
    figure, axes = plt.subplots(3, 1, figsize=(8.6, 4.8), sharex=True, height_ratios=[3, 3, 3.2], layout="constrained")
    for (name, title), ax in zip(RUNS.items(), axes, strict=False):
        lanes(ax, runs[name])
        ax.set_title(
            f"{title}: a worker waits up to {longest_wait(runs[name]):.0%} of its time", loc="left", fontsize=9.5
        )
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (TRAINS, JUDGES, WAITS)]
    names = ["trains", "is judged, exchanges", "waits"]
    axes[1].legend(handles, names, loc="center right", frameon=False)
    accuracy(axes[2], runs)
    axes[2].set_xlim(0, end * 1.01)
    axes[2].set_xlabel("seconds since calibration")
    figure.savefig(HERE / "run.svg", facecolor="white", metadata={"Date": None})
    print(f"{HERE / 'run.svg'}")


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a log, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def seconds(events: list[dict[str, Any]], event: dict[str, Any]) -> float:
    """Seconds from the end of calibration to an event."""
    (begin,) = (e["at"] for e in events if e["event"] == "calibration")
    return (datetime.fromisoformat(event["at"]) - datetime.fromisoformat(begin)).total_seconds()


def longest_wait(events: list[dict[str, Any]]) -> float:
    """The largest share of its time that a worker waits."""
    rounds = {worker: [e for e in events if e["event"] == "round" and e["worker"] == worker] for worker in WORKERS}
    parts = ("busy", "wait", "evaluation", "communication")
    return max(sum(e["wait"] for e in own) / sum(e[part] for e in own for part in parts) for own in rounds.values())


def lanes(ax: plt.Axes, events: list[dict[str, Any]]) -> None:
    """One lane for each worker: what it did in each round, back from the round's end."""
    for event in events:
        if event["event"] == "round":
            lane, at = list(WORKERS).index(event["worker"]), seconds(events, event)
            parts = (
                (event["wait"], WAITS),
                (event["evaluation"] + event["communication"], JUDGES),
                (event["busy"], TRAINS),
            )
            for taken, colour in parts:
                ax.barh(lane, taken, left=at - taken, height=0.72, color=colour, linewidth=0)
                at -= taken
            ax.plot([at, at], [lane - 0.36, lane + 0.36], color="white", linewidth=0.8)
    samples = [sum(e["samples"] for e in events if e["event"] == "round" and e["worker"] == w) for w in WORKERS]
    labels = [f"{name}: {number:,} samples" for name, number in zip(WORKERS.values(), samples, strict=True)]
    ax.set_yticks(range(len(WORKERS)), labels)
    ax.invert_yaxis()
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def accuracy(ax: plt.Axes, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Validation accuracy of the center over time."""
    for name, events in runs.items():
        found = [e for e in events if e["event"] == "epoch"]
        at = [seconds(events, e) for e in found]
        ax.plot(at, [100 * e["validation"]["accuracy"] for e in found], "o-", ms=3, color=LINES[name], label=name)
    ax.set_ylabel("validation\naccuracy, %")
    ax.set_ylim(0, 103)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="lower right")


if __name__ == "__main__":
    main()
