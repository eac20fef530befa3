"""Layer sharding measured: a step of two one-thread workers against one, for the papers' networks and batches.

    python -m benchmarks.studies.layer_scaling --data data/cifar10.zarr [--models 50:500 …] [--batches 64 256]
        [--json FILE]

Shares are settled first, by what some steps take, as a run does behind its first snapshot.
In each round one worker makes whole steps by itself, then both do at the same time (the machine's own ceiling), then
they make sharded steps together. Medians count. Figures go to FILE as each configuration is done; those that FILE has
are not measured again. Exit 1 where a network misses its bar in its best batch. --simulate goes on from the figures in
FILE to more devices and other links, without measuring anew (`layer_study`), and --page writes the tables of FILE.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.runs import kept_in, load, machine, markdown, save, show
from benchmarks.sharded_steps import BATCHES, MODELS, Sharded, alone_on, opened
from benchmarks.star_steps import star_on
from benchmarks.studies.layer_study import PAPER_CPUS, page, simulate
from daskcnn.cluster.link.connect import connect
from daskcnn.job.tables import Cluster, Workers

BARS = {"50:500": 1.45, "150:800": 1.65, "300:1000": 1.75, "500:1500": 1.85}
OF_CEILING = 0.92
"""The part of the machine's own ceiling that is asked for where that is less than the bar."""
TINY = "8:8"
"""A network that computes next to nothing: what a step takes is Dask's."""
RESULTS = Path(__file__).parent / "results" / "layer_scaling.json"


def measure(
    client: Client,
    data: str,
    model: str,
    batch: int,
    *,
    rounds: int,
    seconds: float,
    wire: str,
    star: bool = False,
    **more: Any,
) -> Any:
    """One configuration: seconds of a step, and what they are made of. more: as of `opened`.

    star: steps as the papers send them too, with the way back on the master alone and on all.
    """
    with opened(client, data, model, batch, wire, **more) as context:
        workers, sharded = sorted(context.workers.alive), Sharded(context)
        sharded.settle(seconds)
        one, last, both, together, busy, conv, moved = [], [], [], [], [], [], []
        stars: dict[str, list[tuple[float, float]]] = {"star": [], "star, both ways": []} if star else {}
        for _ in range(rounds):
            one.append(alone_on(context, workers[:1], seconds)[0])
            last.append(alone_on(context, workers[-1:], seconds)[0])
            both.append(sum(alone_on(context, workers, seconds)))
            steps, counters, count = sharded.seconds(seconds)
            together.append(median(steps))
            busy.append(max(c.busy for c in counters.values()) / count)
            conv.append(max(sum(c.conv_seconds.values()) for c in counters.values()) / count)
            moved.append(sum(c.bytes_up for c in counters.values()) / count)
            for name, own in stars.items():
                own.append(star_on(context, seconds, back="both" in name))
        cut = sharded.shares.event()
        found: dict[str, Any] = {
            "one": 1 / median(one),
            "last": 1 / median(last),
            "ceiling": median(both) / median(one),
            "step": median(together),
            "busy": median(busy),
            "shards": median(conv),
            "bytes": median(moved),
            "kernels": cut.kernels,
            "divided": next(iter(cut.divided.values())),
        }
        for name, own in stars.items():
            found |= {name: median(step for step, _ in own), f"{name}, bytes": own[0][1]}
    return {**found, "speedup": found["one"] / found["step"]}


def bar(model: str, found: dict[str, Any]) -> float:
    """The speed-up that is asked for."""
    return min(BARS.get(model, 0.0), OF_CEILING * found["ceiling"])


def line(model: str, batch: int, found: dict[str, Any]) -> str:
    """The figures of a configuration."""
    return (
        f"{model:9} batch {batch:5}: one {1e3 * found['one']:7.0f} ms, two {1e3 * found['step']:7.0f} ms = "
        f"{found['speedup']:.2f} (ceiling {found['ceiling']:.2f}, bar {bar(model, found):.2f}); busiest "
        f"{1e3 * found['busy']:.0f} ms, the rest {1e3 * (found['step'] - found['busy']):.0f} ms, "
        f"{found['bytes'] / 1e6:.1f} MB"
    )


def tables() -> Iterator[str]:
    """Yield that of the kept results in float32, undivided."""
    head = ["network", "batch", "one, ms", "two, ms", "times faster", "ceiling", "bar", "papers'"]
    head += ["busiest worker, ms", "all else, ms", "sent, MB"]
    measured, rows = load(RESULTS)["measured"], []
    for model, batch in product([*MODELS, TINY], BATCHES):
        if found := measured.get(f"{model} {batch} float32"):
            seconds = found["one"], found["step"], found["busy"], found["step"] - found["busy"]
            one, two, busy, other = (f"{1e3 * each:,.0f}" for each in seconds)
            least, papers = bar(model, found), PAPER_CPUS.get(model, {}).get(2)
            times = f"**{found['speedup']:.2f}**" if found["speedup"] >= least else f"{found['speedup']:.2f}"
            ratios = [times, f"{found['ceiling']:.2f}", f"{least:.2f}", f"{papers:.2f}"] if papers else ["–"] * 4
            rows.append([f"`{model}`", str(batch), one, two, *ratios, busy, other, f"{found['bytes'] / 1e6:.0f}"])
    yield markdown(head, rows, left=[0])


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--models", nargs="+", default=[*MODELS, TINY])
    options.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=10.0, help="of each part of a round; four steps at least")
    options.add_argument("--wire", choices=("float32", "float16"), default="float32")
    options.add_argument("--sub-batches", type=int, default=1, help="parts of a minibatch (train.sub_batches)")
    options.add_argument("--first-conv", choices=("auto", "kernels", "samples"), default="auto")
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--page", type=Path, metavar="PAGE", help="write the tables of what FILE has to this page")
    options.add_argument("--simulate", action="store_true", help="tables and pictures from what FILE has")
    given = options.parse_args()
    if given.simulate or given.page:
        file = given.json or RESULTS
        if given.simulate:
            simulate(file)
        show(page(load(file)), given.page)
        return 0
    kept = kept_in(given.json, machine())
    measured = kept.setdefault("measured", {})
    with connect(Cluster(workers=Workers(cpu=2))) as client:
        for model in given.models:
            for batch in given.batches:
                parts = f" in {given.sub_batches}" if given.sub_batches > 1 else ""
                by = f" by {given.first_conv}" if given.first_conv != "auto" else ""
                name = f"{model} {batch} {given.wire}{parts}{by}"
                if name not in measured:
                    args = client, given.data, model, batch
                    how = {"rounds": given.rounds, "seconds": given.seconds, "wire": given.wire}
                    measured[name] = measure(*args, **how, parts=given.sub_batches, first=given.first_conv)
                    if given.json:
                        save(given.json, kept)
                print(line(model, batch, measured[name]), flush=True)
    best = {m: max((measured[k] for k in measured if k.split()[0] == m), key=_by_bar(m)) for m in given.models}
    missed = [m for m, found in best.items() if m in BARS and found["speedup"] < bar(m, found)]
    print("missed: " + ", ".join(missed) if missed else "every bar is met")
    return int(bool(missed))


def _by_bar(model: str) -> Any:
    return lambda found: found["speedup"] - bar(model, found)


if __name__ == "__main__":
    raise SystemExit(main())
