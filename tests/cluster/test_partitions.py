"""All packets of a host are dropped, both ways, for half a minute: it heals or is replaced, and nobody hangs.

Each process is on a host of its own, a network namespace. Needs root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.netns import Network, network

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
CUT, STALL = 30.0, 90.0  # on a busy machine calibrations take long
LONGEST = 240.0
"""Seconds after which a run counts as one that hangs: far above the stall timeout, for machines that are busy."""
NAMES = ("w-0", "w-1", "w-2", "ps-0", "driver")


@pytest.fixture
def net() -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(network())
        except SystemExit as error:
            pytest.skip(str(error))
        yield found


class Run:
    """A run that goes on until it is ended, on three workers, a host for the server, and one for its driver."""

    def __init__(self, net: Network, folder: Path, data: str, strategy: str, stall: float = STALL) -> None:
        self.net, scheduler = net, net.scheduler()
        self.hosts = {name: net.host() for name in NAMES}
        for name in NAMES[:-1]:
            net.worker(self.hosts[name], scheduler, name, "PS" if name.startswith("ps") else "CPU")
        self._log, self._said = folder / "runs" / "cut-off" / "events.jsonl", folder / "said"
        self._command = [
            *(sys.executable, "-m", "daskcnn.run", "--scheduler", scheduler, "--run-dir", str(folder / "runs")),
            *("--data", data, "--model", "4:8", "--strategy", strategy, "--epochs", "100000", "--workers", "cpu=2..3"),
            *("--wait", "120", "--set", f"cluster.stall_timeout={stall:g}", "--set", "run.snapshot_every=5"),
            *("--name", "cut-off", "--resume", "auto"),
        ]
        self.start()

    def start(self) -> None:
        """Start the driver."""
        with self._said.open("ab") as said:
            command = self.hosts["driver"].command(*self._command)
            self.driver = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        self.net.stack.callback(self.driver.kill)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the run's events of these kinds."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] in kinds]

    @property
    def said(self) -> str:
        """All that drivers have said."""
        return self._said.read_text()

    def goes_on(self) -> None:
        """Wait until two more rounds, or groups of steps, have ended."""
        begun, deadline = len(self.events("round", "steps")), time.monotonic() + LONGEST
        while len(self.events("round", "steps")) < begun + 2:
            assert self.driver.poll() is None, self.said
            assert time.monotonic() < deadline, f"hangs: {self.said}"
            time.sleep(0.5)

    def cut_off(self, name: str) -> set[str]:
        """Drop all packets of this host for half a minute. Returns the workers whose rounds have ended meanwhile."""
        self.net.cut(self.hosts[name])
        before = len(self.events("round"))
        time.sleep(CUT)
        ended = {event["worker"] for event in self.events("round")[before:]}
        self.net.mend(self.hosts[name])
        return ended

    def ends(self) -> None:
        """End the run, which saves what was trained."""
        self.driver.send_signal(signal.SIGTERM)
        assert self.driver.wait(LONGEST) == 128 + signal.SIGTERM, self.said
        assert "go on with" in self.said


@pytest.mark.parametrize("strategy", ["bsp", "agwu", "layer"])
def test_a_worker_that_is_cut_off_keeps_no_other_from_going_on(
    net: Network, tmp_path: Path, synthetic: str, strategy: str
) -> None:
    run = Run(net, tmp_path, synthetic, strategy)
    run.goes_on()
    meanwhile = run.cut_off("w-1")
    run.goes_on()
    run.ends()
    assert {event["worker"] for event in run.events("worker-lost")} <= {"w-1"}
    assert strategy != "agwu" or meanwhile >= {"w-0", "w-2"}, "nobody waits for it"


def test_a_worker_that_is_cut_off_for_longer_than_the_stall_timeout_is_given_up(
    net: Network, tmp_path: Path, synthetic: str
) -> None:
    """Behind a barrier the others go on then, and it may come back."""
    run = Run(net, tmp_path, synthetic, "bsp", stall=CUT / 2)
    run.goes_on()
    meanwhile = run.cut_off("w-1")
    run.goes_on()
    run.ends()
    lost = run.events("worker-lost")
    assert {event["worker"] for event in lost} == {"w-1"}
    assert "no report for" in lost[0]["reason"], "nor does it wait until Dask has dropped the connection"
    assert meanwhile >= {"w-0", "w-2"}


def test_a_server_that_is_cut_off_heals_or_is_replaced(net: Network, tmp_path: Path, synthetic: str) -> None:
    run = Run(net, tmp_path, synthetic, "bsp")
    run.goes_on()
    run.cut_off("ps-0")
    run.goes_on()
    run.ends()
    assert not run.events("worker-lost")


def test_a_driver_that_is_cut_off_ends_resumably_and_its_workers_are_free_again(
    net: Network, tmp_path: Path, synthetic: str
) -> None:
    run = Run(net, tmp_path, synthetic, "bsp")
    run.goes_on()
    run.cut_off("driver")
    assert run.driver.wait(LONGEST) == 5, run.said
    assert "go on with" in run.said
    run.start()
    run.goes_on()
    run.ends()
