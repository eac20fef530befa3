"""The strategy that `auto` chooses on ten clusters, beside every fixed one, in simulated time.

    python -m benchmarks.choices [--networks quick resnet20] [--clusters NAME …]
    python -m benchmarks.choices --train --data data/cifar10.zarr --networks quick [--limit 6000] [--epochs 4]

Two to eight workers of speeds 1 : 1 to 1 : 10, on links of 5 MB/s to 10 Gb/s to the server's host, which has such a
link too. Fixed are: the fastest worker alone; `bsp` on the fastest two, the fastest three, and so on to all of them;
`local-sgd` on the fastest two, the fastest four and all.

Without --train nothing is learnt. A run counts by the seconds to its last epoch: with one worker and with `bsp` the
steps of an epoch are those of one machine. Those of `local-sgd` are not, so `auto` is compared with the others alone;
where it takes `local-sgd` its seconds count as often as it expects to need more samples.

--train makes the arithmetic too, on a part of CIFAR-10: seconds to the accuracy on the validation samples that the
fastest worker alone has at the end, less --below, in proportion between two evaluations. A run that does not get there
takes for ever. One worker and `bsp` on any workers make the steps of one machine, so that one run of each network and
seed says how accurate all of them are after an epoch; only their seconds are simulated for each cluster. So the chance
that lies in an accuracy is the same for all of them. `local-sgd` is trained on each cluster, for as many times the
epochs as it is expected to need samples, up to the next epoch. Seconds are the means of all seeds: an evaluation is of
--limit / 10 samples, so few seeds say little about it.

Each run is kept in --results when it has ended: a study that was broken off goes on with the runs that are missing.
--tables prints what there is. Exit 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.common import RULES_NETWORK, TWO_CONVOLUTIONS
from benchmarks.runs import add_command, kept_of, load, machine, markdown, save, time_to
from daskcnn.errors import Diverged
from daskcnn.events import StrategyChosen
from daskcnn.job.resolve import resolve
from daskcnn.planning.compare_strategies import problem_of
from daskcnn.planning.simulate import Scenario, scenario_of, simulate
from daskcnn.sim.cluster import Costs, Server, SimulatedCluster, Worker
from daskcnn.store import DATASETS
from daskcnn.store.split import held_out
from daskcnn.training.strategy_prices import priced_set

RESULTS = Path(__file__).parent / "results"
SPEEDS = {"quick": 2400.0, "resnet20": 400.0, RULES_NETWORK: 2400.0, "lenet5": 6000.0}
"""Images a second of a cluster's fastest worker, by network."""
OF_BEST, OF_ALONE, TRUE_MEDIAN, TRUE_WORST = 1.15, 1.0, 1.05, 1.15
EXCHANGE = 0.0008  # seconds of a meeting besides its transfer: the bar of meeting.py
AUTO, ALONE, LOCAL = "auto", "alone", "local-sgd"
MACHINE = "one machine"


@dataclass(frozen=True)
class Room:
    """A cluster. speeds: of its workers, in parts of the fastest one's. link: bytes a second; latency: seconds."""

    speeds: tuple[float, ...]
    link: float
    latency: float

    def cluster(self, network: str, workers: int | None = None) -> SimulatedCluster:
        """The cluster, or the fastest of its workers."""
        speeds = sorted(self.speeds, reverse=True)[:workers]
        return SimulatedCluster(
            server=Server(bandwidth=self.link),
            costs=Costs(exchange=EXCHANGE),
            worker=[
                Worker(
                    name=f"w{i}",
                    images_per_second=SPEEDS[network] * speed,
                    bandwidth=self.link,
                    latency=self.latency,
                )
                for i, speed in enumerate(speeds)
            ],
        )


ROOMS = {
    "2, 1:1, 5 MB/s": Room((1, 1), 5e6, 1e-3),
    "2, 1:1, 1 Gb/s": Room((1, 1), 1.25e8, 3e-4),
    "2, 1:3, 1 Gb/s": Room((1, 1 / 3), 1.25e8, 3e-4),
    "2, 1:10, 1 Gb/s": Room((1, 0.1), 1.25e8, 3e-4),
    "3, 1:3:3, 100 Mb/s": Room((1, 1 / 3, 1 / 3), 1.25e7, 1e-3),
    "4, 1:1, 10 Gb/s": Room((1,) * 4, 1.25e9, 5e-5),
    "4, 1:2:4:10, 1 Gb/s": Room((1, 1 / 2, 1 / 4, 0.1), 1.25e8, 3e-4),
    "8, 1:1, 1 Gb/s": Room((1,) * 8, 1.25e8, 3e-4),
    "8, mixed, 10 Gb/s": Room((1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 0.1, 0.1), 1.25e9, 5e-5),
    "5, 1:10, 5 MB/s": Room((1, 0.1, 0.1, 0.1, 0.1), 5e6, 1e-3),
}
ONE = Room((1,), 1e9, 0.0)


@dataclass(frozen=True)
class Run:
    """A run. workers: the fastest that take part; None: all. limit: samples; None: all, without accuracy."""

    network: str
    room: str
    strategy: str
    workers: int | None
    seed: int
    epochs: int
    limit: int | None

    @property
    def side(self) -> str:
        """The strategy in words."""
        return self.strategy if self.workers is None else f"{self.strategy} {self.workers}"

    @property
    def name(self) -> str:
        """The key it is kept under."""
        part = "" if self.limit is None else f" limit={self.limit}"
        seed = f" seed={self.seed}" if self.learns or (self.strategy == AUTO and part) else ""
        longer = " as needed" if part and self.strategy in (AUTO, LOCAL) else ""
        return f"{self.network} {self.room} {self.side} epochs={self.epochs}{longer}{part}{seed}"

    @property
    def learns(self) -> bool:
        """True if its accuracy is not known from the steps of one machine."""
        return self.limit is not None and (self.strategy == LOCAL or self.room == MACHINE)

    @property
    def machine(self) -> Run:
        """The run of one machine whose steps it makes."""
        return replace(self, room=MACHINE, strategy=ALONE, workers=1)

    def job(self, path: str) -> dict[str, Any]:
        """The tables of its job."""
        samples = self.limit or DATASETS["cifar10"].training_samples
        strategy = "bsp" if self.strategy == ALONE else self.strategy
        train = {"strategy": strategy, "epochs": self.epochs, "batch_size": 64, "lr": 0.01, "optimizer": "sgd"}
        data: dict[str, Any] = {"name": "cifar10", "validation": held_out(samples)}
        learnt = {"path": path, "limit": self.limit} if self.limit else {}
        layers = self.network == RULES_NETWORK
        return {
            "data": data | learnt,
            "model": {"layers": TWO_CONVOLUTIONS} if layers else {"name": self.network},
            "train": train | {"schedule": "poly", "threads": 1, "seed": self.seed, "evaluation": "all"},
        }

    def longer(self, path: str, on: SimulatedCluster, needed: float) -> Scenario:
        """The run with as many times the epochs as samples are needed."""
        longer = replace(self, epochs=math.ceil(self.epochs * needed))
        return scenario_of(resolve(longer.job(path)), on, self.room)

    def made(self, path: str) -> dict[str, Any]:
        """Simulate it; its figures. What has local steps is trained too."""
        on = ROOMS.get(self.room, ONE).cluster(self.network, self.workers)
        scenario = scenario_of(resolve(self.job(path)), on, self.room)
        try:
            if self.learns and self.strategy == LOCAL:
                names = [member.name for member in on.members()]
                scenario = self.longer(path, on, priced_set(problem_of(scenario), names, LOCAL).needed)
            found = simulate(scenario, train=self.learns)
            chosen = next((event for event in found.events if isinstance(event, StrategyChosen)), None)
            if chosen is not None and chosen.candidates[0].strategy == LOCAL and self.limit is not None:
                found = simulate(self.longer(path, on, chosen.candidates[0].needed), train=True)
        except Diverged as error:
            return {"diverged": str(error)}
        kept = kept_of(found.report)
        own = {"seconds": kept["seconds"], **({} if self.limit is None else {"looks": kept["looks"]})}
        if self.strategy != AUTO or chosen is None:
            return own
        best = chosen.candidates[0]
        return own | {"chosen": best.strategy, "every": best.every, "needed": best.needed, "of": len(best.samples)}


def runs(given: argparse.Namespace) -> Iterator[Run]:
    """The runs that were asked for, a cluster after the other."""
    limit, seeds = (given.limit, given.seeds) if given.train else (None, 1)
    for seed in range(seeds):
        for network in given.networks:
            for room in given.clusters:
                size = len(ROOMS[room].speeds)
                apart = sorted({2, min(4, size), size}) if given.train else []
                shared = range(2, size + 1)
                sides = [(AUTO, None), (ALONE, 1), *(("bsp", k) for k in shared), *((LOCAL, k) for k in apart)]
                for strategy, workers in sides:
                    yield Run(network, room, strategy, workers, seed, given.epochs, limit)


# --- figures ---


def seen(found: Mapping[str, Any], machine: Mapping[str, Any]) -> Mapping[str, Any]:
    """The run's figures with the accuracy at each look: its own, or that of one machine after the same epochs."""
    if "diverged" in found or any(look[3] is not None for look in found["looks"]):
        return found
    known = [(0.0, 0.1), *((look[1], look[3]) for look in machine["looks"])]
    at = [float(accuracy) for accuracy in np.interp([look[1] for look in found["looks"]], *zip(*known, strict=True))]
    return {**found, "looks": [[*look[:3], own] for look, own in zip(found["looks"], at, strict=True)]}


def cost(found: Mapping[str, Any], target: float | None) -> float:
    """Seconds to this accuracy, infinite for never; None: to the end, times the samples that it expects to need."""
    if target is not None:
        return time_to([found], target)
    return math.inf if "diverged" in found else float(found["seconds"] * found.get("needed", 1.0))


@dataclass(frozen=True)
class Verdict:
    """A cluster's figures: seconds of `auto`, of the fastest worker alone, and of the best fixed side, by name."""

    network: str
    room: str
    chosen: str
    auto: float
    alone: float
    best: float
    side: str

    @property
    def of_best(self) -> float:
        """Seconds of those of the best fixed side."""
        return self.auto / self.best

    @property
    def of_alone(self) -> float:
        """Seconds of those of the fastest worker alone."""
        return self.auto / self.alone


def verdicts(asked: Sequence[Run], parts: Mapping[str, Any], below: float) -> Iterator[Verdict]:
    """Yield the figures of each cluster all of whose runs are there: means of the seeds."""
    for network, room in dict.fromkeys((each.network, each.room) for each in asked):
        own = [each for each in asked if (each.network, each.room) == (network, room)]
        learnt = own[0].limit is not None
        if any(each.name not in parts for each in [*own, *(each.machine for each in own if learnt)]):
            continue
        costs: dict[str, list[float]] = {}
        for seed in sorted({each.seed for each in own}):
            of_seed = {each.side: parts[each.name] for each in own if each.seed == seed}
            one = parts[replace(own[0], seed=seed).machine.name] if learnt else None
            target = None if one is None else one["looks"][-1][3] - below
            for side, found in of_seed.items():
                costs.setdefault(side, []).append(cost(found if one is None else seen(found, one), target))
        middle = {side: mean(each) for side, each in costs.items()}
        auto = middle.pop(AUTO)
        best = min(middle, key=middle.__getitem__)
        found = parts[own[0].name]
        meets = f", every {found['every']}" if found.get("every") else ""
        chosen = f"{found['chosen']} {found['of']}{meets}" if "chosen" in found else ALONE
        yield Verdict(network, room, chosen, auto, middle[f"{ALONE} 1"], middle[best], best)


def table(found: Sequence[Verdict]) -> str:
    """All clusters, in Markdown."""
    head = ("network", "workers and links", "chosen", "s", "alone, s", "best fixed", "s", "of best", "of alone")
    rows: list[tuple[str, ...]] = []
    for each in found:
        seconds = [f"{value:.1f}" for value in (each.auto, each.alone, each.best)]
        ratios = f"{each.of_best:.2f}", f"{each.of_alone:.2f}"
        rows.append((each.network, each.room, each.chosen, *seconds[:2], each.side, seconds[2], *ratios))
    return markdown(head, rows)


def bars(found: Sequence[Verdict], *, learnt: bool) -> Iterator[tuple[str, bool]]:
    """Each bar in words, and True where it is missed."""
    of_best, of_alone = [each.of_best for each in found], [each.of_alone for each in found]
    worst = TRUE_WORST if learnt else OF_BEST
    yield f"at most {max(of_best):.2f} of the best fixed choice (bar {worst})", max(of_best) > worst
    if learnt:
        yield f"median {median(of_best):.2f} of it (bar {TRUE_MEDIAN})", median(of_best) > TRUE_MEDIAN
    yield f"at most {max(of_alone):.2f} of the fastest alone (bar {OF_ALONE})", max(of_alone) > OF_ALONE + 5e-3


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 where a bar is missed."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--networks", nargs="+", default=["quick", "resnet20"], choices=SPEEDS, metavar="NAME")
    options.add_argument("--clusters", nargs="+", default=[*ROOMS], choices=ROOMS, metavar="NAME", help="default: all")
    options.add_argument("--train", action="store_true", help="with real arithmetic, on one thread")
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--limit", type=int, default=6000, help="training samples with --train; default %(default)s")
    options.add_argument("--epochs", type=int, default=4, help="default %(default)s")
    options.add_argument("--seeds", type=int, default=3, help="with --train; default %(default)s")
    options.add_argument("--below", type=float, default=0.02, help="of the accuracy of one alone; default %(default)s")
    options.add_argument("--results", type=Path, metavar="FILE", help="keeps the runs; default: in benchmarks/results")
    options.add_argument("--tables", action="store_true", help="print what there is, and simulate nothing")
    given = options.parse_args(words)
    file = given.results or RESULTS / ("choices_trained.json" if given.train else "choices.json")
    results, asked = load(file), [*runs(given)]
    every = dict.fromkeys([*(each.machine for each in asked if given.train), *asked])
    missing = [] if given.tables else [each for each in every if each.name not in results["parts"]]
    if missing:
        results["machine"] = machine()
        add_command(results)
    for each in missing:
        if each.name in results["parts"]:  # seeds do not change seconds
            continue
        results["parts"][each.name] = each.made(given.data)
        save(file, results)
        print(f"{each.name}: {results['parts'][each.name].get('seconds', math.inf):.1f} s", file=sys.stderr, flush=True)
    found = [*verdicts(asked, results["parts"], given.below)]
    if not found:
        return 0
    told = [*bars(found, learnt=given.train)]
    print(table(found), *(f"{'missed' if missed else 'met'}: {text}" for text, missed in told), sep="\n")
    return int(any(missed for _, missed in told))


if __name__ == "__main__":
    raise SystemExit(main())
