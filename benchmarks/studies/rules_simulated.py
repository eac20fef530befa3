"""Every update rule at its own best learning rate over 4 to 32 simulated workers, half of them three times slower.

    python -m benchmarks.studies.rules_simulated --data data/cifar10.zarr [--parts rules] [--only agwu] [--seeds 1]
        [--tables]

The arithmetic is real, on 5,000 samples of CIFAR-10 and a network of one convolution; time is that of the simulated
cluster. Rates are half powers of ten. Four are tried with one seed; where the best of them is the lowest or the
highest, the search goes on beyond it; where none of them learns, below the lowest. The best is that of the least
seconds to the last of the accuracies, or of the highest accuracy at the end where it is not reached; it is then given
the other seeds. SGWU and AGWU weigh by the training accuracy of a round, as in BPT-CNN. `bsp` shares each step, so its
steps are those of the fastest worker alone: its accuracies are taken from there, and only its time is simulated.

Parts: `rules`, all rules with `idpa`, SGWU and AGWU with `udpa` too, and the fastest worker alone; `two`, SGWU and AGWU
on two workers, with the attenuation capped and as printed; `ratios`, both on 8 workers of 1 : 1 and of 1 : 10;
`variants`, of a rule's formula or of its meetings. Runs are kept in --results when they have ended: a study that was
broken off goes on with those that are missing. --page writes the tables, and --plots draws the curves.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import SMALLEST_NETWORK
from benchmarks.network.simulated_workers import GIGABIT, cluster
from benchmarks.runs import at_first_look, load, markdown, save, show, time_to, told_time
from benchmarks.sooner import EXCHANGE, FAST, THE_FASTEST, Median, Place, Run, best, by_setting, make, seconds_of
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Curve, Figure
from daskcnn.store.split import held_out

RESULTS = Path(__file__).parent / "results" / "rules_simulated.json"
WORKERS, RATIO = (4, 8, 16, 32), 3.0
RATES = (-5, -4, -3, -2)
"""Halves of the power of ten that is the rate."""
MOST_RATES, LEARNS = 7, 0.2
"""Rates of the longest search. While the best ends below twice the accuracy of chance, it goes on with lower rates."""
TARGETS = (0.3, 0.35, 0.4, 0.45)
BATCH, EPOCHS, LIMIT = 32, 8, 5000
PAPERS = tuple(f"{rule} {partition} accuracy_on=train" for rule in ("agwu", "sgwu") for partition in ("idpa", "udpa"))
OTHERS = ("bsp every=10", "easgd", "downpour", "dc-asgd", "admm", "parallel-sgd", "local-sgd")
UNCAPPED = tuple(f"agwu {partition} accuracy_on=train attenuation=paper-uncapped" for partition in ("idpa", "udpa"))
VARIANTS = (
    "agwu idpa accuracy_on=train attenuation=staleness",
    "agwu idpa accuracy_on=train accuracy_floor=1.0",
    "parallel-sgd rounds=4 weigh=equal",
    "downpour n_push=1 n_fetch=1",
    "dc-asgd every=1",
)


PARTS: Mapping[str, Sequence[tuple[Sequence[str], int, float]]] = {
    "rules": [((THE_FASTEST,), 1, 1.0), *(((*PAPERS, *OTHERS), workers, RATIO) for workers in WORKERS)],
    "two": [((*PAPERS, *UNCAPPED), 2, RATIO)],
    "ratios": [(PAPERS, 8, ratio) for ratio in (1.0, 10.0)],
    "variants": [(VARIANTS, 8, RATIO)],
}
"""Sides, workers, and how many times slower half of these are."""


def rate(halves: int) -> float:
    """The rate, to two digits."""
    return float(f"{10 ** (halves / 2):.2g}")


def settings(part: str) -> Iterator[Run]:
    """The sides, workers and ratios of a part of the study; each has a rate of its own."""
    one = Run(SMALLEST_NETWORK, THE_FASTEST, Place(), BATCH, None, 0, EPOCHS, LIMIT)
    for sides, workers, ratio in PARTS[part]:
        place = Place(workers, ratio, GIGABIT) if workers > 1 else Place()
        yield from (replace(one, side=side, place=place) for side in sides)


def missing(wanted: Sequence[Run], parts: Mapping[str, Any], seeds: int) -> list[Run]:
    """The runs that the search needs next, of what is to have a rate."""
    return [run for each in wanted for run in _next(each, parts, seeds) if run.name not in parts]


def _next(each: Run, parts: Mapping[str, Any], seeds: int) -> Iterator[Run]:
    tried = {halves: parts.get(_at(each, halves).name) for halves in range(min(RATES) - MOST_RATES, MOST_RATES)}
    known = {halves: found for halves, found in tried.items() if found is not None}
    if not known.keys() >= set(RATES):
        yield from (_at(each, halves) for halves in RATES)
        return
    first = min(known, key=lambda halves: _median([known[halves]]).order)
    lower = first == min(known) or _ending([known[first]], 3) < LEARNS
    if (lower or first == max(known)) and len(known) < MOST_RATES:
        yield _at(each, min(known) - 1 if lower else first + 1)
        return
    yield from (replace(_at(each, first), seed=seed) for seed in range(1, seeds))


def _at(each: Run, halves: int) -> Run:
    return replace(each, lr=rate(halves))


def _median(parts: Sequence[Mapping[str, Any]]) -> Median:
    (found,) = (medians for medians in by_setting(parts, TARGETS).values())
    return found[0]


def shared_steps(given: argparse.Namespace) -> None:
    """Keep the runs of `bsp` that have the accuracies of one machine, on all numbers of workers."""
    results = load(given.results)
    one = next(settings("rules"))
    for found in at_best(results["parts"]).get(one, ()):
        for workers in WORKERS:
            place = Place(workers, RATIO, GIGABIT)
            each = replace(Run.of(found), side="bsp", place=place)
            job = each.job(given.cifar10)
            job["train"]["partition"] = "udpa"  # a round is an epoch
            own = cluster(workers, FAST, FAST / RATIO, GIGABIT, EXCHANGE)
            report = simulate(scenario_of(resolve(job), own, str(place))).report
            timed = zip(report.looks, found["looks"], strict=True)
            looks = [[look.at, look.epoch, look.rounds, *learnt] for look, (_, _, _, *learnt) in timed]
            results["parts"][each.name] = {"run": asdict(each), "seconds": report.seconds, "looks": looks}
    save(given.results, results)


# --- what it found ---


def at_best(parts: Mapping[str, Any]) -> dict[Run, list[Mapping[str, Any]]]:
    """The runs of each setting at its own best rate."""
    rates = {setting: found.lr for setting, found in best(by_setting(parts.values(), TARGETS)).items()}
    kept: dict[Run, list[Mapping[str, Any]]] = {}
    for found in parts.values():
        run = Run.of(found)
        setting = replace(run, batch=BATCH, lr=None, seed=0)
        if run.lr == rates[replace(setting, batch=None)]:
            kept.setdefault(setting, []).append(found)
    return kept


def _ending(kept: Sequence[Mapping[str, Any]], column: int) -> float:
    """The median of the accuracy (3) or the AUC (4) at the end; 0 where a run diverged."""
    return median(each["looks"][-1][column] if each.get("looks") else 0.0 for each in kept)


def claim(parts: Mapping[str, Any]) -> Iterator[str]:
    """Seconds of BPT-CNN's four strategies to the first accuracy and to the last that one reaches, and what follows.

    Accuracies that a run has at its first look are left out: when it reached them is not known.
    """
    kept = at_best(parts)
    places = sorted({run.place for run in kept if run.side in PAPERS}, key=lambda place: place.order)
    alone, rows, first, sooner = kept[next(settings("rules"))], list[list[str]](), list[str](), 0
    for place in places:
        own = {run.side: found for run, found in kept.items() if run.place == place and run.side in PAPERS}
        runs = [*alone, *(each for found in own.values() for each in found)]
        known = [t for t in TARGETS if not any(at_first_look(each, t) for each in runs)]
        reachable = [t for t in known if any(time_to(found, t) < math.inf for found in own.values())]
        for target in dict.fromkeys([*reachable[:1], *reachable[-1:]]) if len(own) == len(PAPERS) else ():
            seconds = {side: time_to(own[side], target) for side in PAPERS}
            fastest = min(seconds, key=seconds.__getitem__)
            first += [f"{place} to {target:.0%}"] if fastest == PAPERS[0] else []
            sooner += time_to(alone, target) < seconds[fastest]
            told = [f"**{seconds_of(at)}**" if side == fastest else seconds_of(at) for side, at in seconds.items()]
            rows.append([str(place), f"{target:.0%}", *told, seconds_of(time_to(alone, target))])
    yield (
        f"`agwu` with `idpa` is the fastest of the four in {len(first)} of {len(rows)} comparisons"
        f"{': ' + '; '.join(first) if first else ''}. The fastest worker alone is sooner than all four in {sooner}."
    )
    yield markdown(["workers", "s to", *(f"`{named(side)}`" for side in PAPERS), "alone"], rows)


def named(side: str) -> str:
    """A side without what all sides of its rule have."""
    return side.replace(" accuracy_on=train", "").replace(" rounds=4", "")


def every_rule(parts: Mapping[str, Any]) -> str:
    """Every side at its best, by the number of workers."""
    heading = ["workers", "side", "rate", "seeds", *(f"s to {t:.0%}" for t in TARGETS)]
    heading += [*(f"epochs to {t:.0%}" for t in TARGETS), "accuracy", "AUC", "s in all"]
    rows = []
    for run, found in sorted(at_best(parts).items(), key=lambda item: item[0].place.order):
        lasted = median(each.get("seconds", math.inf) for each in found)
        rows.append(
            [
                str(run.place),
                f"`{named(run.side)}`",
                f"{Run.of(found[0]).lr:g}",
                str(len(found)),
                *(told_time(found, target, column) for column in (0, 1) for target in TARGETS),
                f"{_ending(found, 3):.1%}",
                f"{_ending(found, 4):.3f}",
                seconds_of(lasted),
            ]
        )
    return markdown(heading, rows)


def page(results: Mapping[str, Any]) -> str:
    """The page: tables, and a sentence on the claim."""
    parts = results["parts"]
    return "\n\n".join(
        [
            "# Every rule at its own best rate, over simulated workers",
            f"Real arithmetic, simulated time: `benchmarks/studies/rules_simulated.py`, {len(parts)} runs. CIFAR-10 "
            f"that went through JPEG once: {LIMIT - held_out(LIMIT):,} samples for training, {held_out(LIMIT)} for "
            f"validation; {EPOCHS} epochs in minibatches of {BATCH}, one convolution of 16 kernels. A fast worker "
            f"makes {FAST:,.0f} images a second, and half of the workers are slower, as `workers` says. Medians of "
            "seeds; `never`: most of them do not get there; `≤`: the first evaluation has it, and nothing is known "
            "before. Rules that meet within a round do so every ten steps, "
            "`bsp` at every step, `parallel-sgd` four times, `local-sgd` as its link allows.",
            "## Is AGWU with IDPA the fastest?",
            *claim(parts),
            "## Every rule",
            every_rule(parts) + "\n",
        ]
    )


def plots(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Accuracy and AUC by epoch (axes of BPT-CNN fig. 11), and accuracy by time, of all rules at their best rates."""
    for workers in (WORKERS[0], WORKERS[-1]):
        place = Place(workers, RATIO, GIGABIT)
        kept = {named(run.side): found for run, found in at_best(results["parts"]).items() if run.place == place}
        title = f"Every rule at its own rate, {workers} simulated workers, half of them three times slower"
        like = "BPT-CNN fig. 11, on a part of CIFAR-10"
        for name, of, x, y, columns, factor in (
            ("accuracy-by-epoch", like, "epoch", "validation accuracy, %", (1, 3), 100.0),
            ("auc-by-epoch", like, "epoch", "AUC of the validation samples", (1, 4), 1.0),
            ("accuracy-by-time", "", "simulated seconds", "validation accuracy, %", (0, 3), 100.0),
        ):
            curves = {side: curve for side, found in kept.items() if (curve := mean_curve(found, *columns, factor))}
            yield Figure(f"rules-simulated-{workers}-{name}", title, of, x, y, curves, doubling=not of)


def mean_curve(kept: Sequence[Mapping[str, Any]], x: int, y: int, factor: float) -> Curve | None:
    """The mean of the seeds that did not diverge, at the places of the first of them; None if all did."""
    looks = [each["looks"] for each in kept if each.get("looks")]
    if not looks:
        return None
    places = [look[x] for look in looks[0]]
    curves = [np.interp(places, [look[x] for look in own], [factor * look[y] for look in own]) for own in looks]
    return places, np.mean(curves, axis=0).tolist()


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, as long as the search asks for more."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", dest="cifar10", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all of them, in turn")
    options.add_argument("--seeds", type=int, default=3, help="of the best rate; default %(default)s")
    options.add_argument("--only", nargs="+", default=[""], help="sides whose names contain one of these")
    options.add_argument("--processes", type=int, default=2, help="runs at a time; default %(default)s")
    options.add_argument("--tables", action="store_true", help="print what there is, and train nothing")
    options.add_argument("--page", type=Path, help="write the tables to this file, and train nothing")
    options.add_argument("--plots", type=Path, metavar="FOLDER", help="draw what there is, as SVG, and train nothing")
    given = options.parse_args(words, argparse.Namespace(simulated=True, targets=TARGETS))
    given.tables = given.tables or given.page is not None or given.plots is not None
    for part in () if given.tables else given.parts:
        wanted = [each for each in settings(part) if any(text in each.side for text in given.only)]
        while more := missing(wanted, load(given.results)["parts"], given.seeds):
            make(more, given)
    if not given.tables and "rules" in given.parts:
        shared_steps(given)
    results = load(given.results)
    for figure in plots(results) if given.plots else ():
        print(draw(figure, given.plots / f"{figure.name}.svg"))
    show(page(results), given.page)


if __name__ == "__main__":
    main()
