"""Defaults of training, on eight kinds of images that nobody has tuned for: beside SGD and AdamW at three rates each.

    python -m benchmarks.studies.defaults --cifar10 data/cifar10.zarr --mnist data/mnist.zarr [--seeds 5]
        [--processes 2] [--only shapes tiles] [--rules] [--page benchmarks/studies/defaults.md]

Accuracies are those on samples held out, after eight epochs. `estimator` and `run` are all defaults, of `CNNClassifier`
and of `daskcnn run --data`. The others are the estimator with another optimizer and rate, of fewer seeds. --rules
trains three of the data sets with every strategy on two simulated workers of speeds 1 : 3. The arithmetic is real;
`layer` computes what one worker does. Parts that FILE holds are not done again. --page writes the tables alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import daskcnn
from benchmarks.conv_gemm import machine
from benchmarks.runs import markdown
from daskcnn.cluster.link.own_process import SHARED
from daskcnn.errors import Diverged
from daskcnn.events import EpochEnded, Event, Warned
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import LAYER
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.ps import RULES
from daskcnn.sim.cluster import Server, SimulatedCluster, Worker
from daskcnn.store import open_dataset

EPOCHS = 8
RATES = {"sgd": (0.02, 0.005, 0.001), "adamw": (0.003, 0.001, 0.0003)}
TUNED = {f"{name} {rate:g}": {"optimizer": name, "lr": rate} for name, rates in RATES.items() for rate in rates}
TUNED["sgd 0.02 at once"] = {"optimizer": "sgd", "lr": 0.02, "batch_size": 32, "schedule": "poly"}
"""Without a warm-up, in minibatches of 32 whatever the number of samples: the defaults before these."""
DEFAULTS = ("estimator", "run")
OF_RULES = ("digits", "shapes", "spectra")
"""Data sets that every strategy is tried on."""
TUNED_OF_RULES = ("sgd 0.02",)
FEWER = 3
"""Seeds of what is not the default."""
RESULTS = Path(__file__).parent / "results" / "defaults.json"
Samples = tuple[Any, Any, Any, Any]
"""Images and labels to train on, images and labels held out."""


# --- the images ---


def _split(images: Any, labels: Any, held_out: int) -> Samples:
    return images[:-held_out], labels[:-held_out], images[-held_out:], labels[-held_out:]


def digits(places: Places) -> Samples:
    """scikit-learn's handwritten digits, 8×8, in a fixed random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    return _split(found.images[order].astype(np.uint8), found.target[order], 500)


def _of_store(path: str, train: int, held_out: int) -> Samples:
    dataset = open_dataset(path)
    (x, y), (tx, ty) = (part.read(0, n) for part, n in ((dataset.train, train), (dataset.test, held_out)))
    return x, y, tx, ty


def shapes(places: Places) -> Samples:
    """A bright square, disc or triangle of any size and place before a dark colour, with noise: 64×64×3."""
    rng = np.random.default_rng(1)
    return _split(*_drawn(rng, 1600, 64), 1000)


def _drawn(rng: np.random.Generator, samples: int, side: int) -> tuple[Any, Any]:
    rows, columns = np.mgrid[:side, :side]
    images, labels = np.empty((samples, side, side, 3), np.uint8), rng.integers(0, 3, samples)
    for image, label in zip(images, labels, strict=True):
        r = rng.uniform(side / 7, side / 4)
        y, x = rng.uniform(r, side - r, 2)
        inside = (
            np.maximum(abs(rows - y), abs(columns - x)) < 0.89 * r,
            np.hypot(rows - y, columns - x) < r,
            (rows - y < 0.67 * r) & (2 * abs(columns - x) < rows - y + 1.33 * r),
        )[label]
        ground, ink = rng.uniform(0, 90, 3), rng.uniform(160, 255, 3)
        image[...] = np.clip(np.where(inside[..., None], ink, ground) + rng.normal(0, 10, image.shape), 0, 255)
    return images, labels


def tiles(places: Places) -> Samples:
    """Twelve channels of 16 bits, 64×64; a class is a brighter channel."""
    rng = np.random.default_rng(2)
    labels = rng.integers(0, 3, 1500)
    images = rng.normal(3000, 400, (1500, 64, 64, 12))
    images[np.arange(1500), ..., 4 * labels] += 800
    return _split(images.clip(0, 65535).astype(np.uint16), labels, 600)


def photos(places: Places) -> Samples:
    """Three classes of CIFAR-10, enlarged to 128×128×3."""
    from PIL import Image

    x, y, tx, ty = _of_store(places.cifar10, 6000, 4000)
    found = []
    for images, labels, most in ((x, y, 400), (tx, ty, 500)):
        chosen = np.flatnonzero(np.isin(labels, (0, 1, 6)))[:most]
        large = [np.asarray(Image.fromarray(images[i]).resize((128, 128), Image.Resampling.BICUBIC)) for i in chosen]
        found += [np.stack(large), np.unique(labels[chosen], return_inverse=True)[1]]
    return found[0], found[1], found[2], found[3]


def spectra(places: Places) -> Samples:
    """1×200 with noise: two lines near places of their class."""
    rng = np.random.default_rng(3)
    labels, at = rng.integers(0, 4, 1200), np.arange(200)
    places_of = np.stack([50 + 10 * (labels % 2), 120 + 10 * (labels // 2)])
    centers = places_of + rng.normal(0, 3, places_of.shape)
    lines = sum(np.exp(-((at - center[:, None]) ** 2) / 18) for center in centers)
    return _split((lines + rng.normal(0, 0.2, (1200, 200))).astype(np.float32)[:, None], labels, 600)


def fields(places: Places) -> Samples:
    """One channel of real numbers far from 0, 32×32: heights, smooth over 1, 2 or 4 pixels by class."""
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, 1200)
    smooth = [gaussian_filter(rng.normal(0, 1, (32, 32)), 2.0**label) * 2.0**label for label in labels]
    return _split((1500 + 300 * np.stack(smooth)).astype(np.float32), labels, 600)


KINDS: Mapping[str, Callable[[Places], Samples]] = {
    "digits": digits,
    "cifar10": lambda places: _of_store(places.cifar10, 4000, 2000),
    "shapes": shapes,
    "tiles": tiles,
    "photos": photos,
    "spectra": spectra,
    "grey": lambda places: _of_store(places.mnist, 2000, 2000),
    "fields": fields,
}


@dataclass(frozen=True)
class Places:
    """Paths of the prepared data sets that some images are of."""

    cifar10: str
    mnist: str


@cache
def samples_of(kind: str, places: Places) -> Samples:
    """The images of this kind: always the same ones."""
    return KINDS[kind](places)


# --- one training ---


def trained(name: str, places: Places) -> dict[str, Any]:
    """Train what this part's name says. Returns the accuracy held out, or why it diverged."""
    way, kind, seed = name.rsplit(maxsplit=2)
    images = samples_of(kind, places)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if way.startswith("rule "):
                accuracy, events = _by_rule(way.split()[1], " ".join(way.split()[2:]), images, int(seed))
            elif way == "run":
                accuracy, events = _by_run(images, int(seed))
            else:
                accuracy, events = _by_estimator(TUNED.get(way, {}), images, int(seed))
        except Diverged as error:
            return {"diverged": str(error).splitlines()[0]}
    return {"accuracy": accuracy} | ({"lowered": 1} if any("diverged; back to" in text for text in events) else {})


def _by_estimator(train: Mapping[str, Any], images: Samples, seed: int) -> tuple[float, list[str]]:
    x, y, tx, ty = images
    told: list[str] = []
    own = daskcnn.CNNClassifier(epochs=EPOCHS, random_state=seed, on_event=partial(_heed, told))
    job = {"train": {**train, "threads": 1} | ({"on_divergence": "stop"} if train else {})}
    own.set_params(job=job).fit(x, y)
    return float(own.score(tx, ty)), told


def _heed(told: list[str], event: Event) -> None:
    if isinstance(event, Warned):
        told.append(event.message)


def _stored(folder: str, images: Samples) -> str:
    x, y, tx, ty = images
    path = f"{folder}/samples.zarr"
    daskcnn.prepare(x, y, path, test=(tx, ty), order="stored", name="samples")
    return path


def _by_run(images: Samples, seed: int, train: Mapping[str, Any] | None = None) -> tuple[float, list[str]]:
    told: list[str] = []
    with tempfile.TemporaryDirectory() as folder, SHARED.client() as client:
        job = {"data": {"path": _stored(folder, images), "order": "stored"}}
        job |= {"train": {"epochs": EPOCHS, "seed": seed, "threads": 1, **(train or {})}}
        run = {"run": {"dir": folder}, "cluster": {"settle": 0.0}}
        result = daskcnn.train(client, job | run, on_event=partial(_heed, told))
    return float(result.summary["test"]["accuracy"]), told


def _by_rule(strategy: str, way: str, images: Samples, seed: int) -> tuple[float, list[str]]:
    """On two simulated workers; `layer` on one. The validation samples are those held out: nothing goes by them."""
    train = TUNED.get(way, {})
    if strategy == LAYER:
        return _by_run(images, seed, {**train, "strategy": LAYER})
    with tempfile.TemporaryDirectory() as folder:
        x, y, tx, ty = images[0], images[1], images[2][:500], images[3][:500]
        stored = _stored(folder, (np.concatenate([x, tx]), np.concatenate([y, ty]), x[:8], y[:8]))
        train = {"strategy": strategy, "epochs": EPOCHS, "seed": seed, "threads": 1, **train}
        job = resolve({"data": {"path": stored, "order": "stored", "validation": len(ty)}, "train": train})
        found = simulate(scenario_of(job, _two_workers(), "two workers"), train=True)
        told = [event.message for event in found.events if isinstance(event, Warned)]
        last = [event for event in found.events if isinstance(event, EpochEnded)][-1]
        assert last.validation is not None, "judged in every epoch"
        assert last.validation.accuracy is not None, "classes have an accuracy"
        return last.validation.accuracy, told


def _two_workers() -> SimulatedCluster:
    link = {"bandwidth": 1e9, "latency": 1e-4}
    fast, slow = (Worker(name=n, count=1, images_per_second=s, **link) for n, s in (("fast", 900.0), ("slow", 300.0)))
    return SimulatedCluster(server=Server(bandwidth=1e9, merge_rate=2e9), worker=[fast, slow])


# --- all of them ---


def names(given: argparse.Namespace) -> Iterator[str]:
    """The parts that were asked for, one for each way, kind of images and seed."""
    kinds = [kind for kind in KINDS if not given.only or kind in given.only]
    ways = [*DEFAULTS, *TUNED]
    if given.rules:
        kinds = [kind for kind in kinds if kind in OF_RULES]
        ways = [f"rule {rule} {way}" for rule in (*RULES, LAYER) for way in ("default", *TUNED_OF_RULES)]
    ways = [way for way in ways if not given.ways or any(part in way for part in given.ways)]
    parts = ((way, kind, seed) for seed in range(given.seeds) for kind in kinds for way in ways)
    return (f"{way} {kind} {seed}" for way, kind, seed in parts if seed < FEWER or way in DEFAULTS)


def page(results: Mapping[str, Any]) -> str:
    """The tables, in Markdown."""
    found = _by_way(results["parts"])
    ways = [way for way in (*DEFAULTS, *TUNED) if way in found]
    of_rules = [rule for rule in (*RULES, LAYER) if f"rule {rule} default" in found]
    head = __doc__.partition("\n")[0] if __doc__ else ""
    parts = [
        f"# Defaults\n\n{head}\n\nMade by `benchmarks/studies/defaults.py` from `results/defaults.json`: {EPOCHS} "
        f"epochs, five seeds of the defaults and three of the others, on {_machine(results)}. Minibatches and warm-up "
        "are the defaults' throughout. The script says what each kind of images is.\n\n"
        "Accuracy on samples held out, percent: the mean of the seeds, with the lowest in brackets. *k* NaN: this many "
        "of them diverged, and count as 0. *k* lowered: they went back once, with a third of the rate. The last rows "
        "are the defaults less the best of the others. Below, each strategy's default beside SGD at 0.02, two seeds "
        "each.",
        _table(found, list(KINDS), ways),
    ]
    for kind in OF_RULES if of_rules else ():
        ways = ["default", *TUNED_OF_RULES]
        rows = [[rule, *(_cell(found.get(f"rule {rule} {way}", {}).get(kind)) for way in ways)] for rule in of_rules]
        parts.append(f"## {kind}, two workers 1 : 3\n\n{markdown(['strategy', *ways], rows)}")
    return "\n\n".join(parts) + "\n"


def _machine(results: Mapping[str, Any]) -> str:
    kernels = ", ".join(each["architecture"] for each in results["machine"]["blas"])
    return f"{results['machine']['processor']}, {results['machine']['cores']} cores, OpenBLAS's kernels {kernels}"


def _by_way(parts: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    for name, part in sorted(parts.items()):
        way, kind, _ = name.rsplit(maxsplit=2)
        found.setdefault(way, {}).setdefault(kind, []).append(part)
    return found


def _table(found: Mapping[str, Any], kinds: Sequence[str], ways: Sequence[str]) -> str:
    rows = [[way, *(_cell(found[way].get(kind)) for kind in kinds)] for way in ways]
    others = [way for way in ways if way not in DEFAULTS]
    for own in DEFAULTS:
        best = (max((_mean(found[way].get(kind)) for way in others), default=0.0) for kind in kinds)
        less = [_mean(found.get(own, {}).get(kind)) - most for kind, most in zip(kinds, best, strict=True)]
        rows.append([f"{own} less best", *(f"{100 * each:+.1f}" for each in less)])
    return markdown(["", *kinds], rows)


def _mean(parts: Sequence[Mapping[str, Any]] | None) -> float:
    return sum(part.get("accuracy", 0.0) for part in parts) / len(parts) if parts else 0.0


def _cell(parts: Sequence[Mapping[str, Any]] | None) -> str:
    if not parts:
        return "–"
    text = f"{100 * _mean(parts):.1f} ({100 * min(part.get('accuracy', 0.0) for part in parts):.1f})"
    lost, lowered = sum("diverged" in part for part in parts), sum("lowered" in part for part in parts)
    return text + (f", {lost} NaN" if lost else "") + (f", {lowered} lowered" if lowered else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the parts that are missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", default="data/cifar10.zarr", help="the prepared data set")
    parser.add_argument("--mnist", default="data/mnist.zarr", help="the prepared data set")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=KINDS, help="kinds of images")
    parser.add_argument("--ways", nargs="+", help="ways whose names contain one of these")
    parser.add_argument("--rules", action="store_true", help="every strategy on two workers")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, help="write the tables to this file, and train nothing")
    given = parser.parse_args(arguments)
    results = json.loads(given.json.read_text()) if given.json.exists() else {"machine": machine(), "parts": {}}
    if given.page is None:
        _train(list(names(given)), given, results)
    else:
        given.page.write_text(page(results), encoding="utf-8")


def _train(wanted: Sequence[str], given: argparse.Namespace, results: dict[str, Any]) -> None:
    places, left = Places(given.cifar10, given.mnist), [name for name in wanted if name not in results["parts"]]
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        futures = {pool.submit(trained, name, places): name for name in left}
        for future in as_completed(futures):
            results["parts"][futures[future]] = found = future.result()
            given.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            print(f"{futures[future]}: {found}", flush=True)


if __name__ == "__main__":
    main()
