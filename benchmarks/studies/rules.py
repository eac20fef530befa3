"""Every update rule with both partitions on CIFAR-10, over a fast and a slow worker.

    python -m benchmarks.studies.rules --data data/cifar10.zarr [--quick] [--only agwu] [--ratios] [--results FILE]

The slower worker computes and then sleeps for 1.3 times as long (DASKCNN_THROTTLE=2.3). Where its caches are cold after
every sleep it trains at a third of the other's speed, otherwise a little faster; the page gives the measured ratio.
Beside both, the fast worker trains alone and meets nobody. Each part is a run of its own, kept in FILE when it has
ended: a study that was broken off goes on with the parts that are missing.
`--ratios` trains some of them on two equal workers, and with one that takes ten times as long as the other.
`--tables` prints what FILE holds and trains nothing, `--page FILE` writes it to a page, `--plots FOLDER` draws it as
well (`pip install 'daskcnn[plot]'`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import TWO_CONVOLUTIONS
from benchmarks.runs import (
    BY_SGD,
    THROTTLED,
    TUNED,
    kept_in,
    load,
    machine,
    markdown,
    run,
    save,
    show,
    throttle,
    time_to,
    told_time,
)
from daskcnn.cluster.link.connect import connect
from daskcnn.job.tables import Cluster, Workers
from daskcnn.ps import RULES
from daskcnn.show.renderers.drawing import draw
from daskcnn.show.run_figures import Curve, Figure

RESULTS = Path(__file__).parent / "results" / "rules.json"
TARGETS = (0.4, 0.5, 0.55, 0.6)
OF_TABLE_1 = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75)


@dataclass(frozen=True)
class Part:
    """One run of the study."""

    strategy: str
    partition: str
    seed: int = 0
    rule: Mapping[str, Any] = field(default_factory=dict)
    wire: str = "float32"
    epochs: int = 8
    increments: int | None = None
    workers: int = 2
    slower: float = THROTTLED

    @property
    def name(self) -> str:
        """The key it is kept under."""
        if self.workers == 1:
            return f"fast worker alone seed={self.seed} {self.wire} epochs={self.epochs}"
        more = {**self.rule, **({} if self.increments is None else {"increments": self.increments})}
        more |= {} if self.slower == THROTTLED else {"slower": f"{self.slower:g}"}
        rule = "".join(f" {key}={value}" for key, value in more.items())
        return f"{self.strategy} {self.partition} seed={self.seed}{rule} {self.wire} epochs={self.epochs}"

    @property
    def folder(self) -> str:
        """Its name as a run directory."""
        return "".join(c if c.isalnum() or c in ".-" else "-" for c in self.name)

    def job(self, data: str) -> dict[str, Any]:
        """The tables of its job."""
        train = {
            "strategy": self.strategy,
            "partition": self.partition,
            "epochs": self.epochs,
            "seed": self.seed,
            "increments": self.increments,
            "restore_best": True,  # every center is judged on all validation samples
            **BY_SGD,
        }
        return {
            "data": {"name": "cifar10", "path": data},
            "model": {"layers": TWO_CONVOLUTIONS},
            "train": train,
            "rule": dict(self.rule),
            "cluster": {"wire": self.wire, "workers": {"cpu": self.workers}},
            "run": {"name": self.folder, "checkpoint_every": 1000.0, "keep": 1},
        }


def parts(quick: bool) -> list[Part]:
    """The study; those of three seeds come first: the fast worker alone, and the four that the verdict names."""
    if quick:
        return [replace(ALONE, epochs=2), *(Part(s, "idpa", rule=TUNED.get(s, {}), epochs=2) for s in RULES)]
    key = [part for seed in range(3) for part in (replace(ALONE, seed=seed), *(Part(s, p, seed) for s, p in KEY))]
    others = [Part(s, p, rule=TUNED.get(s, {})) for p in ("idpa", "udpa") for s in RULES]
    staleness = [Part("agwu", "idpa", seed, {"attenuation": "staleness"}) for seed in range(3)]
    floor = [Part("agwu", "idpa", 0, {"accuracy_floor": 1.0})]
    increments = [Part("agwu", "idpa", seed, increments=2) for seed in range(3)]
    half = [Part("agwu", "idpa", seed, {}, "float16") for seed in range(3)]
    every = [*key, *others[: len(RULES)], *staleness, *floor, *half, *increments, *others]
    return list({part.name: part for part in every}.values())


def ratios() -> list[Part]:
    """The study's parts on workers of other ratios; equal parts for one of ten times would take its time.

    Three seeds where workers are equal, and a second one could bring most.
    """
    by_speed = [Part(s, "idpa", rule=TUNED.get(s, {})) for s in ("agwu", "sgwu", "local-sgd")]
    equal = [ALONE, *(replace(side, slower=1.0) for side in by_speed)]
    once = [
        Part("bsp", "idpa", rule=TUNED["bsp"], slower=1.0),
        *(Part(s, "udpa", slower=1.0) for s in ("agwu", "sgwu")),
    ]
    unequal = [replace(side, slower=10.0) for side in by_speed]
    return [*(replace(side, seed=seed) for seed in range(3) for side in equal), *unequal, *once]


KEY = (("agwu", "idpa"), ("sgwu", "udpa"), ("sgwu", "idpa"), ("agwu", "udpa"))
ALONE = Part("bsp", "udpa", workers=1)
"""One worker meets nobody: it hands its weights in at the end of each epoch, to be judged and kept."""


# --- tables ---


def row(part: str, kept: Mapping[str, Any], targets: Sequence[float] = TARGETS) -> list[str]:
    """A part's line of the table."""
    if "diverged" in kept:
        return [part, "diverged", *["–"] * (len(targets) + 8)]
    return [
        part,
        _percent(kept["test"]),
        _number(max((look[4] for look in kept["looks"] if look[4] is not None), default=None), 3),
        f"{kept['seconds']:.0f}",
        *(told_time([kept], target, digits=0, never="–") for target in targets),
        told_time([kept], targets[-1], 2, never="–"),
        _number(kept["waited"]),
        _number(kept["communication"], 1),
        _number(kept["balance_from_increment_3"] or kept["balance"], 2),
        f"{kept['bytes'] / 1e6:,.0f}",
        f"{kept['pushes']}",
    ]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def table(results: Mapping[str, Any], targets: Sequence[float] = TARGETS) -> str:
    """All parts, in Markdown; those that differ in their seeds alone in one line."""
    seconds = (f"s to {target:.0%}" for target in targets)
    heading = ["run", "test", "AUC", "s", *seconds, "rounds", "waited s", "comm. s", "balance", "MB", "pushes"]
    rows = []
    for name, runs in by_setting(results).items():
        cells = zip(*(row(name, kept, targets)[1:] for kept in runs), strict=True)
        rows.append([f"`{_short(name)}`", *(", ".join(each if len(set(each)) > 1 else each[:1]) for each in cells)])
    return markdown(heading, rows)


def by_setting(results: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The runs of all seeds, by the name of the first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for kept in results["parts"].values():
        found.setdefault(replace(Part(**kept["part"]), seed=0).name, []).append(kept)
    return found


def _short(name: str) -> str:
    return name.replace(" seed=0", "").replace(" float32", "").replace(" epochs=8", "")


def table_1(results: Mapping[str, Any]) -> str:
    """BPT-CNN's table 1: epochs / seconds to each accuracy, medians of the seeds; –: most of them never get there."""
    heading = ["run", "seeds", *(f"{target:.2f}" for target in OF_TABLE_1)]
    rows = []
    for name, runs in by_setting(results).items():
        if name.endswith(" float32 epochs=8"):
            cells = (" / ".join(told_time(runs, t, c, c, "–") for c in (1, 0)) for t in OF_TABLE_1)
            rows.append([f"`{_short(name)}`", str(len(runs)), *cells])
    return markdown(heading, rows)


def verdict(results: Mapping[str, Any]) -> Iterator[str]:
    """The medians of the four to the last target, and the bar: the ratios of each seed, and their median."""
    to: dict[tuple[str, str], dict[int, float]] = {}
    for strategy, partition in KEY:
        plain = Part(strategy, partition)
        seeds = {seed: results["parts"].get(replace(plain, seed=seed).name) for seed in range(3)}
        runs = {seed: kept for seed, kept in seeds.items() if kept is not None}
        to[strategy, partition] = {seed: time_to([kept], TARGETS[-1]) for seed, kept in runs.items()}
        if runs:
            told = told_time([*runs.values()], TARGETS[-1], digits=0)
            yield f"{strategy} {partition}: {told} s to {TARGETS[-1]:.0%}, median of {len(runs)} seeds"
    first, second = (to[key] for key in KEY[:2])
    if pairs := [first[seed] / second[seed] for seed in first.keys() & second.keys() if math.isfinite(second[seed])]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in sorted(pairs))
        yield f"agwu idpa / sgwu udpa by seed: {ratios}; median {median(pairs):.2f} (bar 0.6)"


def slowness(results: Mapping[str, Any]) -> float:
    """The slow worker's part of the fast one's images a second, the median of the runs in which both trained."""
    pairs = [[*kept["images_per_second"].values()] for kept in results["parts"].values() if "diverged" not in kept]
    return median(min(pair) / max(pair) for pair in pairs if len(pair) > 1 and all(pair))


def page(results: Mapping[str, Any]) -> str:
    """The tables, the bar, and BPT-CNN's table 1."""
    of = results["machine"]
    parts = "\n\n".join(
        [
            "# Every rule on a fast and a slow worker",
            f"Made by `benchmarks/studies/rules.py` from `results/rules.json`: {len(results['parts'])} runs on "
            f"{of['processor']}, {of['cores']} cores. CIFAR-10 that went through JPEG once; two convolutions, eight "
            "epochs unless a run says otherwise. Several figures in a cell are those of several seeds. `s to` is to "
            "this accuracy on the validation samples, in proportion between two evaluations, and `rounds` is to the "
            "last of them; ≤: the first evaluation has it, and nothing is known before; –: never. AUC is the highest "
            "on the validation samples. Balance is from the third increment on. "
            f"The slow worker trained at {slowness(results):.2f} of the other's speed (median of the runs).",
            table(results),
            "\n".join(f"- {line}" for line in verdict(results)),
            "## BPT-CNN's table 1",
            "Epochs / seconds to an accuracy on the validation samples, medians of the seeds; –: most of them never "
            "get there. The paper's own columns are 0.65 to 0.80, on ImageNet.",
            table_1(results),
            *_ratios_of(results),
        ]
    )
    return f"{parts}\n"


def _ratios_of(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paragraphs of what `--ratios` has found."""
    if (found := results.get("ratios")) is None:
        return
    yield "## Two equal workers, and two of 1 : 10"
    yield (
        f"{found['machine']['processor']}, {found['machine']['cores']} cores, on another day than the first table: its "
        "seconds compare with one another alone. `slower=1`: both are as fast; `slower=10`: the second one sleeps for "
        "nine times as long as it computes."
    )
    yield table(found)


# --- pictures ---


def plots(results: Mapping[str, Any]) -> Iterator[Figure]:
    """Accuracy by epoch and AUC of every rule (BPT-CNN fig. 11), and accuracy by time of its four strategies.

    Its fig. 14 has the time of a whole run by strategy instead. Without a value of its axis a figure is left out.
    """
    return (figure for figure in _all_plots(results) if any(x for x, _ in figure.curves.values()))


def _all_plots(results: Mapping[str, Any]) -> Iterator[Figure]:
    rules = {f"{s} + idpa": _kept(results, Part(s, "idpa", rule=TUNED.get(s, {}))) for s in RULES}
    key = {f"{s} + {p}": _kept(results, Part(s, p)) for s, p in KEY}
    title = "Every rule on CIFAR-10, a fast and a slow worker"
    accuracy = "validation accuracy, %"
    like = "BPT-CNN fig. 11"
    yield Figure("rules-accuracy-by-epoch", title, like, "epoch", accuracy, _curves(rules, 1, 3, 100))
    yield Figure("rules-auc-by-epoch", title, like, "epoch", "AUC of the validation samples", _curves(rules, 1, 4, 1))
    yield Figure("rules-accuracy-by-time", title, f"{like}, over time", "seconds", accuracy, _curves(rules, 0, 3, 100))
    title = "SGWU and AGWU on CIFAR-10, a fast and a slow worker"
    yield Figure("partitions-accuracy-by-time", title, "", "seconds", accuracy, _curves(key, 0, 3, 100))


def _kept(results: Mapping[str, Any], part: Part) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = results["parts"].get(part.name)
    return found


def _curves(runs: Mapping[str, Mapping[str, Any] | None], x: int, y: int, factor: float) -> dict[str, Curve]:
    """Two columns of the looks at the center, of the runs that there are."""
    looks = {name: [look for look in kept["looks"] if look[y] is not None] for name, kept in runs.items() if kept}
    return {name: ([look[x] for look in own], [factor * look[y] for look in own]) for name, own in looks.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--runs", type=Path, help="folder that keeps the run directories, for `daskcnn report` and others"
    )
    parser.add_argument("--ratios", action="store_true", help="other workers: equal ones, and one ten times slower")
    parser.add_argument("--quick", action="store_true", help="two epochs of every rule with idpa")
    parser.add_argument("--only", nargs="+", default=[""], help="parts whose names contain one of these")
    parser.add_argument("--tables", action="store_true", help="print what there is")
    parser.add_argument("--page", type=Path, help="write the tables to this file, and train nothing")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw what there is, as SVG")
    given = parser.parse_args(arguments)
    reads = bool(given.tables or given.page or given.plots)
    results = {"parts": {}, **(load(given.results) if reads else kept_in(given.results, machine()))}
    into = results.setdefault("ratios", {"machine": machine(), "parts": {}}) if given.ratios else results
    wanted = [p for p in (ratios() if given.ratios else parts(given.quick)) if any(t in p.name for t in given.only)]
    missing = [] if reads else [p for p in wanted if p.name not in into["parts"]]
    if missing:
        with connect(Cluster(workers=Workers(cpu=2))) as client:
            client.wait_for_workers(3, timeout=60)
            for part in missing:
                throttle(client, 1.0 if part.workers == 1 else part.slower)
                kept = {"part": asdict(part), **run(part.job(given.data), client, given.runs)}
                into["parts"][part.name] = kept
                save(given.results, results)
                print(" | ".join(row(part.name, kept)), flush=True)
    show(page(results), given.page)
    for figure in plots(results) if given.plots else ():
        print(draw(figure, given.plots / f"{figure.name}.svg"))


if __name__ == "__main__":
    main()
