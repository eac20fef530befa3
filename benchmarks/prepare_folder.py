"""How fast a folder of JPEG files becomes a data set, on one worker and on two, and how much memory that takes.

    python -m benchmarks.prepare_folder [--folder PATH] [--rounds 3] [--json FILE]
    python -m benchmarks.prepare_folder --broken [--images 100000 --side 32]

The folder (20,000 files of 256x256 in 20 sub-folders, about 400 MB) is made first where it is not there. One and two
workers are measured in turns; the ratio is that of the medians. Exit 1 where two workers are not 1.6 times as fast as
one, or a process takes 500 MB.

With `--broken` one more file is no image. Measured on two workers: all files good; the broken one left out by
`--skip-bad`; and the folder refused for it, without. Exit 1 where a process takes 500 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image

from daskcnn.arrays import cpu_count, device_profile

CLASSES, IMAGES, SIDE = 20, 20_000, 256
RATIO, MEMORY = 1.6, 500e6
COMMAND = "import sys; from daskcnn.cli import main; main(prog_name='daskcnn')"


def make(folder: Path, images: int, classes: int, side: int) -> None:
    """Write the files; each follows from its number alone."""
    folder.mkdir(parents=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(make_class, *zip(*((folder, c, images // classes, side) for c in range(classes)), strict=True)))


def make_class(folder: Path, number: int, images: int, side: int) -> None:
    """Write the images of a class: smooth colours of the class, with grain like that of a photograph."""
    rng = np.random.default_rng(number)
    place = folder / f"class-{number:02}"
    place.mkdir()
    grain = rng.normal(0, 9, (2 * side, 2 * side, 3)).astype(np.float32)
    for index in range(images):
        colours = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        smooth = np.asarray(colours.resize((side, side), Image.Resampling.BICUBIC), np.float32)
        y, x = rng.integers(0, side, 2)
        pixels = np.clip(smooth + grain[y : y + side, x : x + side], 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{index:05}.jpg", quality=85)


def prepare(folder: Path, workers: int, *options: str, refused: str | None = None) -> dict[str, Any]:
    """Prepare the folder once, in processes of its own. Returns seconds, images a second, and what each process took.

    The rate is that of the decoding, from when the cluster is there: the mean of all workers. refused: what is said
    where the folder is to be refused.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", COMMAND, "data", "prepare", "folder", str(folder), "--size", "64x64"]
        command += ["--out", f"{out}/out.zarr", "--workers", f"cpu={workers}", *options]
        with open(f"{out}/log", "w+") as log:
            begun = time.perf_counter()
            process = subprocess.Popen(command, stderr=log, stdout=subprocess.DEVNULL)
            taken = watch(process)
            seconds = time.perf_counter() - begun
            log.seek(0)
            told = log.read()
    expected = 0 if refused is None else 2
    if process.returncode != expected or (refused is not None and refused not in told):
        raise SystemExit(told)
    rate = re.findall(r"decode images: 100 %, ([\d,]+) a second", told)
    return {"seconds": seconds, "images_per_second": int(rate[0].replace(",", "")), **taken}


def watch(process: subprocess.Popen[bytes]) -> dict[str, list[float]]:
    """Wait for a process. Returns peaks of memory (MB) and processor time (s), of it first, then of its workers.

    Processes of less than 50 MB, Python's own helpers, are left out.
    """
    peaks, seconds = dict[int, float](), dict[int, float]()
    while process.poll() is None:
        try:
            parent = psutil.Process(process.pid)
            for each in [parent, *parent.children(recursive=True)]:
                status = Path(f"/proc/{each.pid}/status").read_text()
                if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                    peaks[each.pid] = max(peaks.get(each.pid, 0.0), int(found[1]) * 1024 / 1e6)
                    seconds[each.pid] = sum(each.cpu_times()[:2])
        except (psutil.Error, OSError):
            pass
        time.sleep(0.1)
    kept = sorted(pid for pid, peak in peaks.items() if peak > 50)
    return {"peak_mb": [round(peaks[pid], 1) for pid in kept], "cpu_seconds": [round(seconds[pid], 1) for pid in kept]}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """One and two workers in turns."""
    taken: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for turn in range(rounds):
        for workers in (1, 2) if turn % 2 == 0 else (2, 1):
            taken[workers].append(prepare(folder, workers))
            print(workers, taken[workers][-1], flush=True)
    rates = {workers: median(t["images_per_second"] for t in turns) for workers, turns in taken.items()}
    return {
        "rounds": taken,
        "images_per_second": rates,
        "ratio": round(rates[2] / rates[1], 2),
        "peak_mb": peak(taken.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the files are, or are made  [default: a temporary folder]")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--side", type=int, default=SIDE, help="pixels a side of the files that are made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--broken", action="store_true", help="measure one broken file among all instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    temporary = None if args.folder else Path(tempfile.mkdtemp(prefix="daskcnn-jpegs-"))
    folder = args.folder or temporary / "jpegs"
    try:
        if not folder.exists():
            make(folder, args.images, CLASSES, args.side)
        found = measure_broken(folder, args.rounds) if args.broken else measure(folder, args.rounds)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary)
    about = {
        "processor": device_profile("cpu", cpu_count()).name,
        "cores": cpu_count(),
        "images": args.images,
        "side": args.side,
    }
    text = json.dumps({**about, "load_after": round(os.getloadavg()[0], 2), **found}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(f"{text}\n")
    if (not args.broken and found["ratio"] < RATIO) or found["peak_mb"] * 1e6 >= MEMORY:
        raise SystemExit(1)


def measure_broken(folder: Path, rounds: int) -> dict[str, Any]:
    """All files good, one broken that is left out, and one broken that is refused, in turns.

    The seconds are those of the whole command.
    """
    taken: dict[str, list[dict[str, Any]]] = {"good": [], "broken": [], "refused": []}
    broken = folder / "class-07" / "broken.jpg"
    for turn in range(rounds):
        for kind in taken if turn % 2 == 0 else reversed(taken):
            if kind != "good":
                broken.write_bytes(b"no image")
            try:
                if kind == "refused":
                    taken[kind].append(prepare(folder, 2, refused=f"class-07/{broken.name}: "))
                else:
                    taken[kind].append(prepare(folder, 2, "--skip-bad"))
            finally:
                broken.unlink(missing_ok=True)
            print(kind, taken[kind][-1], flush=True)
    seconds = {kind: median(t["seconds"] for t in turns) for kind, turns in taken.items()}
    ratio = round(seconds["broken"] / seconds["good"], 2)
    return {"rounds": taken, "seconds": seconds, "ratio": ratio, "peak_mb": peak(taken.values())}


def peak(rounds: Iterable[Sequence[dict[str, Any]]]) -> float:
    """The most memory (MB) that a process took."""
    return max(max(turn["peak_mb"]) for turns in rounds for turn in turns)


if __name__ == "__main__":
    main()
