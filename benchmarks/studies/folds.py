"""Five-fold cross-validation of the update rules on simulated workers, each at its own best learning rate.

    python -m benchmarks.studies.folds --data data/cifar10.zarr [--sides agwu sgwu] [--workers 4] [--page FILE]

BPT-CNN's accuracies are means of five folds. Here each fold is a fifth of 10,000 samples of CIFAR-10 in its stored
order, which is random: it is judged on, and the other four are trained on. Arithmetic is real. Time is that of a
simulated cluster; half of its workers are three times slower. `rules_simulated` gives network, batch and epochs. The
rates are its best ones, found on a part of these samples with other seeds. Differences are between the same folds of
two rules. Runs are kept in --results when they have ended.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from benchmarks.network.simulated_workers import GIGABIT
from benchmarks.runs import load, markdown, show
from benchmarks.sooner import THE_FASTEST, Place, Run, ending, make
from benchmarks.studies import rules_simulated
from benchmarks.studies.rules_simulated import OTHERS, PAPERS, RATIO, TARGETS, at_best, named, settings
from daskcnn.store import open_dataset
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe

RESULTS = Path(__file__).parent / "results" / "folds.json"
FOLDS, SAMPLES = 5, 10_000
SIDES = (THE_FASTEST, *PAPERS, *OTHERS)


class Fold(Run):
    """A run that is judged on the fold of its seed's number."""

    def job(self, path: str) -> dict[str, Any]:
        """The tables of its job. path: of the folder with a data set for each fold."""
        found = super().job(f"{path}/{self.seed}.zarr")
        found["data"]["validation"] = SAMPLES // FOLDS
        return found


def write_folds(data: str, folder: str) -> None:
    """Write a data set for each fold, whose samples are the last: those are held out."""
    whole = open_dataset(data, limit=SAMPLES)
    images, labels = (np.asarray(each) for each in whole.train.read(0, SAMPLES))
    test = tuple(np.asarray(each) for each in whole.test.read(0, FOLDS))
    for fold in range(FOLDS):
        rolled = tuple(np.roll(each, -(fold + 1) * SAMPLES // FOLDS, axis=0) for each in (images, labels))
        source = Source("cifar10", whole.manifest.classes, rolled, test, {"fold": f"{fold:064d}"})
        write(
            source,
            describe(source, chunk=500, order=whole.manifest.order, seed=0),
            f"{folder}/{fold}.zarr",
            lambda name: None,
        )


def wanted(sides: Sequence[str], workers: int) -> Iterator[Fold]:
    """The runs, of each side with the rate that is its best in `rules_simulated`."""
    rates = {run: Run.of(found[0]).lr for run, found in at_best(load(rules_simulated.RESULTS)["parts"]).items()}
    for each in settings("rules"):
        if each.side in sides and each.place in (Place(), Place(workers, RATIO, GIGABIT)):
            for fold in range(FOLDS):
                yield Fold(each.network, each.side, each.place, each.batch, rates[each], fold, each.epochs, SAMPLES)


def page(results: Mapping[str, Any]) -> str:
    """The page: a table of accuracies by fold, and of differences to AGWU with IDPA."""
    kept: dict[Run, dict[int, Mapping[str, Any]]] = {}
    for found in results["parts"].values():
        run = Run.of(found)
        kept.setdefault(replace(run, seed=0), {})[run.seed] = found
    whole = {run: found for run, found in kept.items() if len(found) == FOLDS}
    first = next((found for run, found in whole.items() if run.side == PAPERS[0]), None)
    heading = ["workers", "side", "rate", *(f"fold {fold + 1}" for fold in range(FOLDS)), "mean", "AUC"]
    rows = []
    for run, found in sorted(whole.items(), key=lambda item: -mean(map(ending, item[1].values()))):
        each = [ending(found[fold]) for fold in range(FOLDS)]
        apart = "" if first is None else told([100 * (own - ending(first[fold])) for fold, own in enumerate(each)])
        auc = mean(own["looks"][-1][4] for own in found.values())
        cells = [str(run.place), f"`{named(run.side)}`", f"{run.lr:g}", *(f"{own:.1%}" for own in each)]
        rows.append([*cells, f"{told([100 * own for own in each])} %", f"{auc:.3f}", f"{apart} points"])
    return "\n\n".join(
        [
            "# Five folds",
            f"Real arithmetic, simulated time: `benchmarks/studies/folds.py`. {SAMPLES:,} samples of CIFAR-10 that "
            f"went through JPEG once, in {FOLDS} folds; {rules_simulated.EPOCHS} epochs in minibatches of "
            f"{rules_simulated.BATCH}, one convolution of 16 kernels. Accuracy at the end on the fold that was held "
            "out; means with their standard errors. The last column compares the same folds.",
            markdown([*heading, f"beside `{named(PAPERS[0])}`"], rows) + "\n",
        ]
    )


def told(values: Sequence[float]) -> str:
    """A mean and its standard error."""
    return f"{mean(values):.1f} ± {stdev(values) / len(values) ** 0.5:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs that are missing."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--results", type=Path, default=RESULTS)
    options.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--processes", type=int, default=2, help="runs at a time; default %(default)s")
    options.add_argument("--page", type=Path, help="write the table to this file, and train nothing")
    given = options.parse_args(words, argparse.Namespace(simulated=True, targets=TARGETS))
    given.tables = given.page is not None
    if not given.tables:
        with tempfile.TemporaryDirectory() as folder:
            given.cifar10 = folder
            write_folds(given.data, folder)
            make(wanted(given.sides, given.workers), given)
    show(page(load(given.results)), given.page)


if __name__ == "__main__":
    main()
