"""Rounds of every rule as an earlier version simulated them: a change of structure changes no time and no count.

`python tests/sim/test_recorded_rounds.py` writes the file anew, where times are meant to change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daskcnn.events import RoundEnded
from daskcnn.ps import RULES
from tests.sim.sim_cases import WITHIN, cluster, of, run, workload

RECORDED = Path(__file__).with_name("recorded_rounds.json")
NAMES = [name for name, rule in RULES.items() if not rule.chooses_workers]  # that one makes steps of bsp
KEYS = [
    *("at", "worker", "round", "samples", "busy", "wait", "communication", "evaluation"),
    *("bytes_up", "bytes_down", "pushes", "version", "base_version", "staleness"),
]


def rounds_of(name: str, overlap: bool) -> list[list[Any]]:
    """The numbers of each round of three unequal workers with slow links, who meet within rounds where they can."""
    on = cluster(10, 25, 40, latency=0.4, bandwidth=3000.0, server={"merge_rate": 5000.0})
    work = workload(name, rule=WITHIN.get(name), samples=97, epochs=2, overlap=overlap)
    return [[getattr(event, key) for key in KEYS] for event in of(RoundEnded, run(work, on)[1])]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rounds_are_those_recorded(name: str, overlap: bool) -> None:
    recorded = json.loads(RECORDED.read_text())[name][str(overlap)]
    for found, known in zip(rounds_of(name, overlap), recorded, strict=True):
        assert found == [pytest.approx(value, rel=1e-12) if isinstance(value, float) else value for value in known]


if __name__ == "__main__":
    found = {name: {str(overlap): rounds_of(name, overlap) for overlap in (True, False)} for name in NAMES}
    RECORDED.write_text(json.dumps(found) + "\n")
