"""Seconds to an accuracy on unequal workers, beside the fastest worker alone, each side at its own best batch and rate.

    python -m benchmarks.sooner --data data/cifar10.zarr [--networks quick rules] [--ratios 1 3]
        [--strategies bsp default sgwu ddp] [--batches 32 64 128] [--rates 0.005 0.01 0.02] [--seeds 3] [--epochs E]
        [--limit N] [--targets 0.55 0.6 0.65] [--links 5e6]
    python -m benchmarks.sooner --simulated --data data/cifar10.zarr [--processes 2]
        [--workers 2 4 8 16] [--ratios 1 3 10] [--links 5e6 1.25e8 1.25e9]

Nobody adds machines to present more images a second: they want the accuracy sooner. So what counts is the time at which
the accuracy on the validation samples is reached, in proportion between two evaluations, evaluations included; it
begins when samples are given out. CIFAR-10, Nesterov 0.9, a rate that falls linearly to 0, the usual augmentation.

`alone` is one worker at full speed that meets nobody within an epoch: the fastest of the workers without the others.
The others are a strategy on all workers (`bsp`, `sgwu`, …), `default`, a job that leaves strategy, batch, rate and
optimizer to us, and `ddp`, PyTorch's DistributedDataParallel (gloo) with two one-thread ranks in equal parts. --batches
are samples of a step: of all workers together under `bsp` and `ddp`, of a worker's own step under rules with local
steps. `bsp-auto` is `bsp` whose steps begin with them and grow with the gradient noise scale. With --every `sgwu` and
`agwu` also push after that many steps, beside a side that pushes once a round as in the paper. Each side is given every
batch, rate and seed; that of the least median time to the last of --targets is its best. A run that does not get there
counts as one that takes for ever.

Real: two one-thread workers. For 1 : R the second one sleeps after each of its steps (DASKCNN_THROTTLE; 2.3 times as
long makes three times slower, as its caches are cold after a sleep), and so does the second rank. Sides take turns.
With --links (root, `ip` and `tc`) the two workers and the server are hosts of their own. --links gives the bytes
a second of each link. `alone` has no link. With --slowed all workers sleep, the one alone too, so that two of them,
the server and the driver do not contend for two cores; links of F times fewer bytes a second keep the proportions.
--simulated: the arithmetic is real, on one thread, and time is that of a cluster: half of its workers make 2,400 images
a second, half of them R times fewer, on links of --links bytes a second to the server's host, which has such a link
too. A sample takes a worker the same time in a step of any size. By default one of workers, ratio and link changes at a
time, from two workers, 1 : 3, 1 Gb/s; --grid takes all of them together.

Each run is kept in --results when it has ended: a study that was broken off goes on with the runs that are missing.
--tables prints what there is. Exit 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from distributed import Client

from benchmarks.common import LAYERS, RULES_NETWORK
from benchmarks.network.netns import linked_cluster
from benchmarks.network.simulated_workers import GIGABIT, cluster, simulated
from benchmarks.runs import TUNED, add_command, load, machine, markdown, run, save, throttle, time_to
from daskcnn.cluster.link.connect import MEMORY, connect
from daskcnn.errors import Diverged
from daskcnn.job.dataset import usual_augment
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.planning.simulate import scenario_of
from daskcnn.ps import RULES
from daskcnn.store import DATASETS
from daskcnn.store.split import held_out

THE_FASTEST, DEFAULT, DDP, GROWING = "alone", "default", "ddp", "bsp-auto"
EVERY = " every="
"""Between a rule of the papers and the steps after which it pushes. A side may also have a partition and parameters."""
WIRE = "wire"
"""The word of a side that is the number type of vectors on the network, in place of one of its rule's."""
SIDES = (*RULES, GROWING, DEFAULT, DDP)
AS_GIVEN = ("bsp", "local-sgd")
"""Rules with their own defaults: the others meet as often as in rules.py."""
PAPERS = ("sgwu", "agwu")
BATCHES, RATES, TARGETS = (32, 64, 128), (0.005, 0.01, 0.02), (0.55, 0.6, 0.65)
RESULTS = Path(__file__).parent / "results"
EPOCHS = {"quick": 4, RULES_NETWORK: 6}
FAST = 2400.0  # images a second of a simulated worker
EXCHANGE = 0.0008  # seconds of a meeting besides its transfer: the bar of meeting.py
LINKS = {5e6: "5 MB/s", 1.25e7: "100 Mb/s", GIGABIT: "1 Gb/s", 10 * GIGABIT: "10 Gb/s"}
WORKERS = (2, 4, 8, 16)
SIMULATED_RATIOS = (1.0, 3.0, 10.0)
MAIN: Mapping[str, Any] = {"workers": 2, "ratio": 3.0, "link": GIGABIT}
"""The simulated cluster of which one property changes at a time."""
BARS = {("quick", 3.0): 0.85, (RULES_NETWORK, 3.0): 0.95, ("quick", 1.0): 0.6, (RULES_NETWORK, 1.0): 0.6}
"""Most seconds of our default and of `bsp`, of those of the fastest worker alone, by network and ratio."""
OF_DDP = 0.5
"""Most seconds of ours, of those of DDP at 1 : 3."""


@dataclass(frozen=True)
class Place:
    """Workers, half of them `ratio` times slower. link: bytes a second of each; None: real ones without limit.

    slowed: real ones all take this many times as long.
    """

    workers: int = 1
    ratio: float = 1.0
    link: float | None = None
    slowed: float = 1.0

    def __str__(self) -> str:
        link = "" if self.link is None else f", {LINKS.get(self.link, f'{self.link:g} B/s')}"
        slowed = "" if self.slowed == 1 else f", {self.slowed:g} times slower"
        return ("1" if self.workers == 1 else f"{self.workers}, 1 : {self.ratio:g}{link}") + slowed

    @property
    def order(self) -> tuple[float, ...]:
        """Its place among others: by workers, then ratio, then link."""
        return self.workers, self.ratio, self.link or 0.0


@dataclass(frozen=True)
class Run:
    """One run. side: as `agwu udpa every=10 wire=int8`. batch, lr: None for the defaults. data: the data set's name."""

    network: str
    side: str
    place: Place
    batch: int | None
    lr: float | None
    seed: int
    epochs: int
    limit: int | None = None
    data: str = "cifar10"

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Run:
        """The run that figures are of."""
        return cls(**{**kept["run"], "place": Place(**kept["run"]["place"])})

    @property
    def name(self) -> str:
        """The key it is kept under."""
        how = "" if self.batch is None else f" batch={self.batch} lr={self.lr:g}"
        limit = "" if self.limit is None else f" limit={self.limit}"
        return f"{self.network} {self.side} {self.place}{how} epochs={self.epochs}{limit} seed={self.seed}"

    @property
    def samples(self) -> int:
        """Those of the training part that are used, validation included."""
        return min(self.limit or sys.maxsize, DATASETS[self.data].training_samples)

    def job(self, path: str) -> dict[str, Any]:
        """The tables of its job. The fastest worker alone makes one exchange an epoch, to be judged.

        As the best weights count, every center is judged on all validation samples.
        """
        train: dict[str, Any] = {"epochs": self.epochs, "seed": self.seed, "threads": 1, "restore_best": True}
        rule: Mapping[str, Any] = {}
        cluster: dict[str, Any] = {"workers": {"cpu": self.place.workers}}
        if self.side == THE_FASTEST:
            train |= {"strategy": "bsp", "partition": "udpa"}
        elif self.side != DEFAULT:
            strategy, *words = self.side.split()
            train["strategy"] = "bsp" if self.side == GROWING else strategy
            train |= {"largest_batch": "memory"} if self.side == GROWING else {}
            given = [word.partition("=")[::2] for word in words if "=" in word]
            train |= {} if len(given) == len(words) else {"partition": words[0]}
            cluster |= {key: text for key, text in given if key == WIRE}
            given = [(key, text) for key, text in given if key != WIRE]
            usual = {} if strategy in AS_GIVEN else TUNED.get(strategy, {})
            rule = {key: _value(text) for key, text in given} or usual
        if self.batch is not None:
            train |= {"batch_size": self.batch, "lr": self.lr, "optimizer": "sgd", "schedule": "poly"}
            train["on_divergence"] = "stop"
        return {
            "data": {"name": self.data, "path": path, "validation": held_out(self.samples)}
            | ({} if self.limit is None else {"limit": self.limit}),
            "model": {"layers": LAYERS[self.network]} if self.network in LAYERS else {"name": self.network},
            "train": train,
            "rule": dict(rule),
            "cluster": cluster,
            "run": {"checkpoint_every": 1000.0, "keep": 1},
        }


def _value(text: str) -> Any:
    """A rule's parameter: a number, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- one run ---


def throttled(ratio: float) -> float:
    """The factor of a throttle that makes a worker this many times slower: 2.3 for 3 (rules.py)."""
    return 1.0 + 0.65 * (ratio - 1.0)


def real(each: Run, client: Client | None, path: str) -> dict[str, Any]:
    """Train on real workers, or ranks; the figures, or why it diverged."""
    if each.side == DDP:
        return of_ddp(each, path)
    assert client is not None
    slowed = each.place.slowed
    throttle(client, throttled(slowed), "cpu-0")
    throttle(client, throttled(slowed * each.place.ratio))
    try:
        found = run(each.job(path), client)
    except Diverged as error:
        return {"diverged": str(error)}
    begun = found.pop("begun")
    looks = [[at - begun, *look] for at, *look in found["looks"]]
    return {**found, "looks": looks, "seconds": found["seconds"] - begun}


def of_ddp(each: Run, path: str) -> dict[str, Any]:
    """Train by two ranks of PyTorch's."""
    from benchmarks.ddp import WORKERS as RANKS
    from benchmarks.ddp import Whole, torch_run

    assert each.batch is not None
    assert each.lr is not None
    validation = held_out(each.samples)
    whole = Whole(
        each.network,
        path,
        (each.samples - validation) // RANKS * RANKS,
        validation,
        each.epochs,
        each.batch // RANKS,
        lr=each.lr,
        seed=each.seed,
        augment=usual_augment(each.data),
        slow=throttled(each.place.ratio),
    )
    turn = torch_run(whole)
    if not all(map(math.isfinite, turn.losses)):
        return {"diverged": f"losses {turn.losses}"}
    looks = [[at, n, n, right, None] for n, (at, right) in enumerate(zip(turn.looks, turn.validation, strict=True), 1)]
    return {
        "test": turn.test,
        "seconds": turn.seconds,
        "looks": looks,
        "images_per_second": {"both": turn.images_per_second},
    }


def in_simulated_time(each: Run, path: str) -> dict[str, Any]:
    """Train on a simulated cluster. A worker alone meets nobody, whatever its link."""
    place, job = each.place, resolve(each.job(path))
    own = cluster(place.workers, FAST, FAST / place.ratio, place.link or 10 * GIGABIT, EXCHANGE)
    return simulated(scenario_of(job, own, str(place)))


# --- all of them ---


def runs(given: argparse.Namespace) -> Iterator[Run]:
    """The runs that were asked for, seed by seed. Sides take turns, each time with another one first."""
    for seed, network in product(range(given.seeds), given.networks):
        epochs = given.epochs or EPOCHS.get(network, EPOCHS["quick"])
        one = Run(network, THE_FASTEST, Place(slowed=given.slowed), None, None, seed, epochs, given.limit)
        apart = [f"{side}{EVERY}{every}" for side in given.strategies if side in PAPERS for every in given.every]
        others = [*given.strategies, *apart]
        sides = [one, *(replace(one, side=side, place=at) for at in places(given) for side in others)]
        yield from (each for each in sides if each.side == DEFAULT)
        sides = [each for each in sides if each.side != DEFAULT]
        for turn, (batch, lr) in enumerate(product(given.batches, given.rates)):
            first = (turn + seed) % len(sides)
            yield from (replace(each, batch=batch, lr=lr) for each in (*sides[first:], *sides[:first]))


def places(given: argparse.Namespace) -> list[Place]:
    """The workers that were asked for, apart from the fastest one alone."""
    ratios = given.ratios or (SIMULATED_RATIOS if given.simulated else (1.0, 3.0))
    if not given.simulated:
        return [Place(2, *each, slowed=given.slowed) for each in product(ratios, given.links or [None])]
    values = {"workers": given.workers, "ratio": ratios, "link": given.links or [*LINKS]}
    if given.grid:
        return [Place(*each) for each in product(*values.values())]
    lines = [Place(**{**MAIN, key: value}) for key, own in values.items() for value in own]
    return list(dict.fromkeys(lines))


def train(missing: Sequence[Run], given: argparse.Namespace, keep: Callable[[Run, Mapping[str, Any]], None]) -> None:
    """Make these runs, each kept when it has ended. A data set's path is the option of its name."""
    if given.simulated:
        with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
            futures = {pool.submit(in_simulated_time, each, getattr(given, each.data)): each for each in missing}
            for future in as_completed(futures):
                keep(futures[future], future.result())
        return
    os.environ.update(MEMORY)  # of PyTorch's ranks: our workers have it anyway
    with ExitStack() as stack:
        clients: dict[float | None, Client] = {}
        for each in missing:
            link = each.place.link
            if link not in clients and each.side != DDP:
                own = connect(Cluster(workers=Workers(cpu=2))) if link is None else linked_cluster(2, link)
                clients[link] = stack.enter_context(own)
                clients[link].wait_for_workers(3, timeout=60)
            keep(each, real(each, clients.get(link), getattr(given, each.data)))


def make(wanted: Iterable[Run], given: argparse.Namespace) -> dict[str, Any]:
    """The results with the runs of these that were missing. Raises SystemExit for results of another machine."""
    results = load(given.results)
    missing = [] if given.tables else [each for each in wanted if each.name not in results["parts"]]
    if missing and results["machine"] != machine():
        raise SystemExit(f"{given.results}: its figures are of {results['machine']}; give another file (--results)")
    if missing:
        add_command(results)

    def keep(each: Run, found: Mapping[str, Any]) -> None:
        results["parts"][each.name] = {"run": asdict(each), **found}
        save(given.results, results)
        print(f"{each.name}: {shown(found, given.targets)}", file=sys.stderr, flush=True)

    train(missing, given, keep)
    return results


def shown(found: Mapping[str, Any], targets: Sequence[float]) -> str:
    """A run in a few words."""
    if "diverged" in found:
        return "diverged"
    to = "".join(f", {target:.0%} {seconds_of(time_to([found], target))}" for target in targets)
    return f"{found['seconds']:.1f} s{to}, at the end {ending(found):.1%}"


def seconds_of(value: float) -> str:
    """Seconds for people."""
    return "never" if math.isinf(value) else f"{value:.1f}"


def ending(found: Mapping[str, Any]) -> float:
    """The accuracy on the validation samples at the end; 0 where it diverged."""
    return found["looks"][-1][3] if found.get("looks") else 0.0


# --- medians ---


@dataclass(frozen=True)
class Median:
    """Figures of the seeds of one side with one batch and rate. to: seconds to each target, infinite for never."""

    batch: int | None
    lr: float | None
    seeds: int
    to: tuple[float, ...]
    end: float
    seconds: float

    @property
    def order(self) -> tuple[float, ...]:
        """What the best of a side has the least of: seconds to the last target, to those before it, errors at last."""
        return (*reversed(self.to), -self.end)


def median_of(kept: Sequence[Mapping[str, Any]], targets: Sequence[float]) -> Median:
    """The medians of runs that differ in their seeds alone."""
    one = Run.of(kept[0])
    to = tuple(time_to(kept, target) for target in targets)
    lasted = median(found.get("seconds", math.inf) for found in kept)
    return Median(one.batch, one.lr, len(kept), to, median(map(ending, kept)), lasted)


def by_setting(parts: Iterable[Mapping[str, Any]], targets: Sequence[float]) -> dict[Run, list[Median]]:
    """Medians of all batches and rates by what else a run is: network, side, place, epochs, samples."""
    seeds: dict[Run, list[Mapping[str, Any]]] = {}
    for found in parts:
        seeds.setdefault(replace(Run.of(found), seed=0), []).append(found)
    settings: dict[Run, list[Median]] = {}
    for each, kept in seeds.items():
        settings.setdefault(replace(each, batch=None, lr=None), []).append(median_of(kept, targets))
    return settings


def best(settings: Mapping[Run, Sequence[Median]]) -> dict[Run, Median]:
    """Each side at its own best batch and rate, of those that have the most seeds so far."""
    most = {each: max(found.seeds for found in medians) for each, medians in settings.items()}
    return {
        each: min((found for found in medians if found.seeds == most[each]), key=lambda found: found.order)
        for each, medians in settings.items()
    }


# --- tables ---


def bar_of(each: Run) -> float | None:
    """Most seconds of this side, of those of the fastest worker alone; None without a bar, as on a part of the data."""
    ours = each.side in (DEFAULT, "bsp") and each.place.link is None and each.limit is None
    return BARS.get((each.network, each.place.ratio)) if ours else None


def alone(each: Run) -> Run:
    """The fastest of its workers without the others."""
    return replace(each, side=THE_FASTEST, place=Place(slowed=each.place.slowed))


def of(one: Median, other: Median | None) -> float | None:
    """Seconds to the last target, of the other's; None where the other does not get there."""
    return None if other is None or math.isinf(other.to[-1]) else one.to[-1] / other.to[-1]


def table(found: Mapping[Run, Median], targets: Sequence[float]) -> str:
    """Every side at its best, in Markdown."""
    heading = ["network", "workers", "side", "batch", "rate", "seeds"]
    heading += [*(f"s to {target:.0%}" for target in targets), "end", "after s", "of alone", "bar"]
    rows: list[list[str]] = []
    for each, own in sorted(found.items(), key=lambda item: (item[0].network, item[0].limit or 0, item[0].place.order)):
        ratio, bar = of(own, found.get(alone(each))), bar_of(each)
        usual = own.batch is None or own.lr is None
        rows.append(
            [
                each.network + (f", {each.limit:,} samples" if each.limit else ""),
                str(each.place),
                each.side,
                *(("–", "–") if usual else (str(own.batch), f"{own.lr:g}")),
                str(own.seeds),
                *map(seconds_of, own.to),
                f"{own.end:.1%}",
                f"{own.seconds:.0f}",
                "–" if ratio is None else "never" if math.isinf(ratio) else f"{ratio:.2f}",
                "–" if bar is None else f"{bar:g}",
            ]
        )
    return markdown(heading, rows)


def verdict(found: Mapping[Run, Median]) -> Iterator[tuple[str, bool]]:
    """Each bar in words, and True where it is missed."""
    for each, own in found.items():
        bars = [(alone(each), bar_of(each))]
        if bars[0][1] is not None and each.place.ratio == 3:
            bars.append((replace(each, side=DDP), OF_DDP))
        for other, bar in bars:
            ratio = of(own, found.get(other))
            if ratio is not None and bar is not None:
                beside = f"{each.network}, {each.place}: {each.side} takes {ratio:.2f} of the seconds of {other.side}"
                yield f"{beside} (bar {bar:g})", ratio > bar


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(options, batches=BATCHES, rates=RATES)
    options.add_argument("--data", dest="cifar10", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--networks", nargs="+", default=list(EPOCHS), metavar="NAME", help="default: quick rules")
    options.add_argument(
        "--strategies",
        nargs="*",
        type=side,
        default=["bsp", DEFAULT],
        metavar="NAME",
        help=f"sides beside `alone`, of {', '.join(SIDES)}; with parameters: 'local-sgd every=6'; default: bsp default",
    )
    options.add_argument("--every", nargs="*", type=int, default=(), metavar="H", help="steps; default: none")
    options.add_argument("--ratios", nargs="+", type=float, metavar="R", help="default: 1 3, or simulated 1 3 10")
    options.add_argument("--targets", nargs="+", type=float, default=TARGETS, help="default: 0.55 0.6 0.65")
    options.add_argument("--simulated", action="store_true", help="in simulated time, with real arithmetic")
    options.add_argument("--workers", nargs="+", type=int, default=WORKERS, help="simulated; default: 2 4 8 16")
    options.add_argument("--links", nargs="+", type=float, help="bytes a second; default: none, or simulated four")
    options.add_argument("--slowed", type=float, default=1.0, metavar="F", help="real: how many times slower all are")
    options.add_argument("--grid", action="store_true", help="simulated: workers × ratios × links")
    options.add_argument("--processes", type=int, default=2, help="simulated: runs at a time; default %(default)s")
    given = options.parse_args(words)
    if given.simulated and DDP in given.strategies:
        options.error("--strategies ddp: PyTorch is not simulated; leave --simulated or ddp out")
    if given.links and not given.simulated and DDP in given.strategies:
        options.error("--links: PyTorch's ranks have no links of their own; leave --links or ddp out")
    if given.slowed != 1 and (given.simulated or DDP in given.strategies):
        options.error("--slowed is for real workers of ours; leave it, --simulated or ddp out")
    if any(batch % 2 for batch in given.batches) and DDP in given.strategies:
        options.error("--batches: two ranks share a step of ddp; give even numbers")
    name = "sooner_simulated.json" if given.simulated else "sooner.json"
    given.results = given.results or RESULTS / name
    return given


def side(text: str) -> str:
    """A side that was asked for."""
    if text.partition(" ")[0] in SIDES:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} does not begin with one of {', '.join(SIDES)}")


def add_options(options: argparse.ArgumentParser, *, batches: Sequence[int], rates: Sequence[float]) -> None:
    """Add what studies of batches and rates share."""
    told = [" ".join(f"{each:g}" for each in all_of) for all_of in (batches, rates)]
    options.add_argument("--batches", nargs="+", type=int, default=batches, metavar="N", help=f"default: {told[0]}")
    options.add_argument("--rates", nargs="+", type=float, default=rates, metavar="LR", help=f"default: {told[1]}")
    options.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    options.add_argument("--epochs", type=int, help="default: by the network")
    options.add_argument("--limit", type=int, help="training samples that are used; default: all")
    options.add_argument("--results", type=Path, metavar="FILE", help="keeps the runs; default: in benchmarks/results")
    options.add_argument("--tables", action="store_true", help="print what there is, and train nothing")


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 where a bar is missed."""
    given = arguments(words)
    results = make(runs(given), given)
    found = best(by_setting(results["parts"].values(), given.targets))
    told = list(verdict(found))
    print(table(found, given.targets), *(f"{'missed' if missed else 'met'}: {text}" for text, missed in told), sep="\n")
    return int(any(missed for _, missed in told))


if __name__ == "__main__":
    raise SystemExit(main())
