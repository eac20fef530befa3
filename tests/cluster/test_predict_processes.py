"""`daskcnn predict --out` on real processes."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from daskcnn.job.resolve import resolve
from daskcnn.store import open_dataset
from daskcnn.trained.place import find_network
from tests.rounding_of_networks import of_probabilities
from tests.tiny_runs import CLASSES, random_state, tiny_data, tiny_job, tiny_run

pytestmark = pytest.mark.cluster

SAMPLES, SIDE = 12_000, 32
"""A data set that takes seconds to predict, in a dozen parts."""


def made(folder: Path, samples: int, side: int = 8) -> tuple[Path, str]:
    """A run and its data set."""
    path = tiny_data(folder, train=samples, shape=(side, side, 3))
    raw = tiny_job(path)
    return tiny_run(folder, raw, random_state(resolve(raw))), path


def started(folder: Path, run: Path, path: str) -> subprocess.Popen[str]:
    """The command, in a process group of its own."""
    arguments = ["predict", run, path, "--part", "train", "--out", "p.csv", "--workers", "cpu=2"]
    return subprocess.Popen(
        [sys.executable, "-c", "from daskcnn.cli import main; main()", *map(str, arguments)],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def check(folder: Path, run: Path, path: str, samples: int) -> None:
    """The table is whole, and says what the network says here."""
    with open(folder / "p.csv", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [int(row["sample"]) for row in found] == list(range(samples))
    images, _ = open_dataset(path).train.read(0, samples)
    network = find_network(str(run), "last", pytest.fail).classifier
    expected, allowed = network.predict(images), of_probabilities(network, images[:100])
    numbers = np.array([[float(row[f"p_{name}"]) for name in CLASSES] for row in found])
    np.testing.assert_allclose(numbers, expected, rtol=allowed, atol=1e-7)


def parts_done(folder: Path) -> int:
    return len(list((folder / "p.csv.parts").glob("part-*")))


def wait_for_parts(process: subprocess.Popen[str], folder: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while parts_done(folder) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_workers_predict_a_data_set(tmp_path: Path) -> None:
    run, path = made(tmp_path, 600)
    process = started(tmp_path, run, path)
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert told.startswith("p.csv: 600 samples")
    check(tmp_path, run, path, 600)


@pytest.mark.slow
def test_a_driver_that_is_killed_goes_on_and_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    run, path = made(tmp_path, SAMPLES, SIDE)
    process = started(tmp_path, run, path)
    wait_for_parts(process, tmp_path, 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = parts_done(tmp_path)
    assert 0 < before < SAMPLES * SIDE * SIDE * 3 // (4 << 20)
    process = started(tmp_path, run, path)
    wait_for_parts(process, tmp_path, before + 1)
    workers = [c for c in psutil.Process(process.pid).children(recursive=True) if "spawn_main" in " ".join(c.cmdline())]
    workers[-1].kill()
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "samples are predicted already" in errors
    assert "is lost" in errors
    check(tmp_path, run, path, SAMPLES)


@pytest.mark.slow
def test_an_interrupt_says_how_to_go_on(tmp_path: Path) -> None:
    run, path = made(tmp_path, SAMPLES, SIDE)
    process = started(tmp_path, run, path)
    wait_for_parts(process, tmp_path, 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "the same command goes on with it" in errors
    assert "Traceback" not in errors
    assert parts_done(tmp_path) >= 1
