"""The recipe for a few hundred photographs (docs/own-images.md) on four workers of unequal speed.

    python -m benchmarks.photos [--seeds 3] [--epochs 100] [--json benchmarks/results/photos.json]

300 images of circles, squares and triangles of any colour, size and place, with noise, become a data set of 32×32 as a
folder of files does: 216 to train on, 24 for validation, 60 to test with. Four one-thread workers train on it, of which
three take 1.5, 2.5 and 4 times as long as the machine would (DASKCNN_THROTTLE). The network is tested on the 60, and on
405 fresh images. Images are the same every time; seeds are of weights, order and augmentation.
Exit 1 where the median of the seeds is below 90 % of the 60, or 90 % of the 405.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from distributed import Client
from PIL import Image, ImageDraw

import daskcnn
from benchmarks.runs import machine, save, throttle
from daskcnn.cluster.link.connect import connect
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.launch.training import train_job
from daskcnn.runs.log import read_events
from daskcnn.show.report_tables import tables
from daskcnn.store import Dataset

CLASSES = ("circle", "square", "triangle")
IMAGES, FRESH = 300, 405
HEIGHT, WIDTH, FINER = 72, 96, 4  # pixels of a photograph; drawn this many times as fine
THROTTLES = (1.0, 1.5, 2.5, 4.0)
BAR = 0.9


@dataclass(frozen=True)
class Trained:
    """A run: accuracy on the 60 test images and on fresh ones, seconds of training, images a second by worker."""

    seed: int
    test: float
    fresh: float
    seconds: float
    images_per_second: dict[str, float | None]


# --- images ---


def draw(folder: Path, images: int, seed: int) -> Path:
    """Write this number of photographs of each class into the class's folder."""
    rng = np.random.default_rng(seed)
    for number in range(images):
        own = folder / CLASSES[number % len(CLASSES)]
        own.mkdir(parents=True, exist_ok=True)
        photograph(rng, own.name).save(own / f"{number:03}.jpg", quality=90)
    return folder


def photograph(rng: np.random.Generator, shape: str) -> Image.Image:
    """One shape before a ground that is lighter on one side, with noise."""
    ground, ink = colours(rng)
    size = WIDTH * FINER, HEIGHT * FINER
    mask = Image.new("L", size)
    r = rng.uniform(HEIGHT / 7, HEIGHT / 3) * FINER
    x, y = (rng.uniform(r, side - r) for side in size)
    pencil = ImageDraw.Draw(mask)
    if shape == "circle":
        pencil.ellipse((x - r, y - r, x + r, y + r), fill=255)
    elif shape == "square":
        half = 0.89 * r
        pencil.rectangle((x - half, y - half, x + half, y + half), fill=255)
    else:
        pencil.polygon([(x, y - r), (x - r, y + 0.73 * r), (x + r, y + 0.73 * r)], fill=255)
    inside = np.asarray(mask.resize((WIDTH, HEIGHT), Image.Resampling.BOX), np.float64)[..., None] / 255
    light = rng.uniform(-20, 20) * np.linspace(-1, 1, WIDTH)[None, :, None]
    pixels = ground + (ink - ground) * inside + light + rng.normal(0, 10, (HEIGHT, WIDTH, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Any two colours that can be told apart."""
    while True:
        ground, ink = rng.uniform(0, 255, (2, 3))
        if np.linalg.norm(ground - ink) > 100:
            return ground, ink


def read(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """The images of the training part and their labels."""
    return dataset.train.read(0, len(dataset.train))


# --- training ---


def trained(client: Client, path: Path, fresh: Dataset, seed: int, epochs: int) -> Trained:
    """Train by the recipe, and test."""
    job = {
        "data": {"path": str(path), "augment": "crop-mirror"},
        "model": {"name": "compact"},
        "train": {"epochs": epochs, "seed": seed},
        "cluster": {"workers": {"cpu": len(THROTTLES)}},
        "run": {"dir": str(path.parent), "name": f"seed-{seed}"},
    }
    result = train_job(resolve(job), client=client)
    report = tables(read_events(result.run / "events.jsonl"))
    images, labels = read(fresh)
    right = np.mean(result.model.predict(images).argmax(1) == labels)
    speeds = {worker.name: worker.images_per_second for worker in report.workers}
    return Trained(seed, result.summary["test"]["accuracy"], float(right), report.seconds, speeds)


def study(seeds: int, epochs: int, folder: Path) -> list[Trained]:
    """Prepare the images, and train with each seed on the same workers."""
    found = []
    with connect(Cluster(workers=Workers(cpu=len(THROTTLES)))) as client:
        client.wait_for_workers(len(THROTTLES) + 1, timeout=60)
        for number, factor in enumerate(THROTTLES):
            throttle(client, factor, f"cpu-{number}")
        how = {"size": (32, 32), "client": client}
        daskcnn.prepare_folder(draw(folder / "photos", IMAGES, 0), folder / "photos.zarr", **how)
        # fresh ones need no test part, and a data set has one
        share = len(CLASSES) / (FRESH + len(CLASSES))
        drawn = draw(folder / "fresh", FRESH + len(CLASSES), 1)
        fresh = daskcnn.prepare_folder(drawn, folder / "fresh.zarr", test=share, **how)
        for seed in range(seeds):
            found.append(trained(client, folder / "photos.zarr", fresh, seed, epochs))
            print(
                f"seed {seed}: {found[-1].test:.1%} of 60, {found[-1].fresh:.1%} of {len(fresh.train)} fresh",
                flush=True,
            )
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 where the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--epochs", type=int, default=100, help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    given = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        found = study(given.seeds, given.epochs, Path(folder))
    test, fresh = (median(getattr(each, part) for each in found) for part in ("test", "fresh"))
    print(f"median of {len(found)}: {test:.1%} of 60 test images, {fresh:.1%} of {FRESH} fresh ones (bar {BAR:.0%})")
    if given.json is not None:
        how = f"python -m benchmarks.photos --seeds {given.seeds} --epochs {given.epochs}"
        save(given.json, {"machine": machine(), "command": how, "runs": [asdict(each) for each in found]})
    return int(min(test, fresh) < BAR)


if __name__ == "__main__":
    raise SystemExit(main())
