"""The default batch and rate of each named model: three of each and three seeds, on one machine.

    python -m benchmarks.studies.named_models --cifar10 data/cifar10.zarr --mnist data/mnist.zarr
        [--models quick lenet5] [--batches 32 64 128] [--rates 0.005 0.01 0.02] [--seeds 3] [--epochs 4] [--limit N]
        [--processes 1] [--page benchmarks/studies/named_models.md]
    python -m benchmarks.studies.named_models --speeds [--models quick lenet5] [--batches 32 64 128]

A model is trained by one worker that meets nobody, by SGD with Nesterov momentum and a rate that falls linearly to 0,
on the published images that it is for: CIFAR-10 or MNIST, with their usual augmentation. Without --rates models that
normalise by batches are given rates four times as high. Models for photographs are left out, as their images are, and
so are those that reconstruct images.

What counts is the time until an accuracy on the validation samples is reached: the best median at the end of a run,
less two points. The epochs to it are trained. The seconds of an epoch are those of its steps by one thread, measured by
--speeds in seconds of the processor (few_samples.py), so that a busy machine changes little. The median of the seeds
decides, and a run that does not get there counts as one that takes for ever. Each run is kept in --results when it has
ended: a study that was broken off goes on with the runs that are missing. --tables prints what there is, and --page
writes it to a file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import Images
from benchmarks.few_samples import measure
from benchmarks.runs import kept_in, machine, markdown, save, show
from benchmarks.sooner import (
    BATCHES,
    RATES,
    THE_FASTEST,
    Median,
    Place,
    Run,
    add_options,
    best,
    by_setting,
    make,
    median_of,
    seconds_of,
)
from daskcnn.job.dataset import on_data
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Train
from daskcnn.nn.models import MODELS, model_spec
from daskcnn.store import DATASETS
from daskcnn.store.split import held_out

DATA = {DATASETS[name].shape: name for name in ("mnist", "cifar10")}
"""The data set of a model, by the shape of the images that it is for."""
STUDIED = [name for name, model in MODELS.items() if model.image in DATA and not model.reconstructs]
HIGHER = 4.0
"""Times the rates of the others that models with batch normalising are given."""
LESS = 0.02
"""The accuracy to be reached is that much less than the best at the end of a run."""
EPOCHS = 4
RESULTS = Path(__file__).parent / "results" / "named_models.json"
SECONDS = 20.0
"""Seconds of measuring a model's speeds."""


def normalises(model: str) -> bool:
    """True for a network with batch normalising."""
    known = MODELS[model]
    return '"batchnorm"' in json.dumps(model_spec(model, known.image, known.classes))


def runs(given: argparse.Namespace) -> Iterator[Run]:
    """The runs that were asked for: all settings of a model with one seed after the other."""
    for model, seed in product(given.models, range(given.seeds)):
        rates = given.rates or [rate * (HIGHER if normalises(model) else 1) for rate in RATES]
        for batch, lr in product(given.batches, rates):
            data = DATA[MODELS[model].image]
            yield Run(model, THE_FASTEST, Place(), batch, lr, seed, given.epochs or EPOCHS, given.limit, data)


def measure_speeds(given: argparse.Namespace) -> None:
    """Keep the images a second of one thread, by model and samples of a step."""
    results = kept_in(given.results, machine())
    for model in given.models:
        rows = measure(model, sorted(given.batches), SECONDS, Images(MODELS[model].image))["rows"]
        own = {str(row["samples"]): row["images_per_second"] for row in rows}
        results.setdefault("images_per_second", {}).setdefault(model, {}).update(own)
        save(given.results, results)
        print(model, own, flush=True)


def timed(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs whose speed is known, with seconds of the clock in place of simulated ones."""
    return [_timed(found, speed) for found in results["parts"].values() if (speed := _speed(results, found))]


def _speed(results: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    own = results.get("images_per_second", {}).get(found["run"]["network"], {})
    return own.get(str(found["run"]["batch"]))


def _timed(found: Mapping[str, Any], speed: float) -> dict[str, Any]:
    if "diverged" in found:
        return dict(found)
    each = Run.of(found)
    epoch = (each.samples - held_out(each.samples)) / speed
    looks = [[epochs * epoch, epochs, *others] for _, epochs, *others in found["looks"]]
    return {**found, "looks": looks, "seconds": looks[-1][0]}


# --- tables ---


@cache
def default(each: Run) -> Train:
    """The defaults of a job that names a model and a data set."""
    job = resolve({"data": {"name": each.data, "path": "unread"}, "model": {"name": each.network}})
    found = DATASETS[each.data]
    return on_data(job, each.data, found.shape, found.classes, found.training_samples).train


def target_of(parts: Sequence[Mapping[str, Any]]) -> float:
    """The accuracy that settings of one model are compared at."""
    seeds: dict[Run, list[Mapping[str, Any]]] = {}
    for found in parts:
        seeds.setdefault(replace(Run.of(found), seed=0), []).append(found)
    return max(median_of(kept, ()).end for kept in seeds.values()) - LESS


def sections(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A heading and a table for each model, in Markdown."""
    models: dict[Run, list[Mapping[str, Any]]] = {}
    for found in parts:
        models.setdefault(replace(Run.of(found), batch=None, lr=None, seed=0), []).append(found)
    for each, own in models.items():
        target = target_of(own)
        settings = by_setting(own, [target])
        ((_, medians),), (least,) = settings.items(), best(settings).values()
        usual = default(each)
        samples = "all samples" if each.limit is None else f"{each.limit:,} samples"
        yield (
            f"## `{each.network}`\n\nSeconds to {target:.1%} on {each.data}, and accuracy at the end of {each.epochs} "
            f"epochs of {samples}. Best: batch {least.batch}, rate {least.lr:g}. The default now: batch "
            f"{usual.batch_size}, rate {usual.lr:g}, {usual.optimizer.name}.\n\n{grid(medians, least)}"
        )


def grid(medians: Sequence[Median], least: Median) -> str:
    """A row a batch, a column a rate."""
    cells = {(each.batch, each.lr): each for each in medians}
    batches, rates = sorted({batch for batch, _ in cells}), sorted({lr for _, lr in cells})
    rows = [[str(batch), *(_cell(cells.get((batch, lr)), least) for lr in rates)] for batch in batches]
    return markdown(["batch", *(f"rate {lr:g}" for lr in rates)], rows)


def _cell(found: Median | None, least: Median) -> str:
    if found is None:
        return "–"
    text = f"{seconds_of(found.to[-1])}, {found.end:.1%}"
    few = "" if found.seeds == least.seeds else f" ({found.seeds} seeds)"
    return f"**{text}**{few}" if found is least else text + few


def page(results: Mapping[str, Any]) -> str:
    """All tables, in Markdown."""
    of = results["machine"]
    head = (
        "# Batch and rate of the named models\n\nMade by `benchmarks/studies/named_models.py` from "
        f"`results/named_models.json`, on {of['processor']}, {of['cores']} cores: one one-thread worker, "
        "medians of the seeds. The script says what is measured."
    )
    return "\n\n".join([head, *sections(timed(results))]) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    """Train what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, batches=BATCHES, rates=RATES)
    parser.set_defaults(rates=None, simulated=True, targets=(), results=RESULTS)
    for name in DATA.values():
        parser.add_argument(f"--{name}", default=f"data/{name}.zarr", help="the prepared data set")
    parser.add_argument("--models", nargs="+", choices=STUDIED, default=STUDIED, help=f"default: {' '.join(STUDIED)}")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; default %(default)s")
    parser.add_argument("--speeds", action="store_true", help="measure the seconds of steps, and train nothing")
    parser.add_argument("--page", type=Path, help="write the tables to this file, and train nothing")
    given = parser.parse_args(words)
    given.results = given.results or RESULTS
    if given.speeds:
        measure_speeds(given)
        return
    given.tables = given.tables or given.page is not None
    show(page(make(runs(given), given)), given.page)


if __name__ == "__main__":
    main()
