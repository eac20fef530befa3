"""The Grafana board and the alert rules: they name metrics of a run, and the rules alert when they should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from daskcnn.cluster.link.metrics_port import RUNS
from daskcnn.followers.prometheus_metrics import METRICS

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
NAMES = {RUNS, *(f"{metric.name}_total" if metric.kind == "counter" else metric.name for metric in METRICS)}
LABELS = {"run", "status", *(label for metric in METRICS for label in metric.labels)}


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    return found


def queries() -> list[str]:
    """Every query of the board and of the rules."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
    drawn = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]
    chosen = [variable["query"] for variable in board()["templating"]["list"] if variable["type"] == "query"]
    return [*drawn, *chosen, *(rule["expr"] for group in rules["groups"] for rule in group["rules"])]


def test_every_metric_that_is_named_exists() -> None:
    named = {name for query in queries() for name in re.findall(r"daskcnn_\w+", query)}
    assert named <= NAMES


def test_the_board_draws_every_metric() -> None:
    drawn = " ".join(target["expr"] for panel in board()["panels"] for target in panel["targets"])
    assert {name for name in NAMES if not re.search(rf"\b{name}\b", drawn)} == set()


def test_labels_that_are_grouped_by_exist() -> None:
    groups = [group for query in queries() for group in re.findall(r"\bby \(([^)]*)\)", query)]
    assert {label for group in groups for label in group.split(", ")} <= LABELS


def test_panels_have_numbers_and_places_of_their_own() -> None:
    panels = board()["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len({panel["id"] for panel in panels}) == len(places) == len(panels)


def test_alerts_are_played(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    for file in (MONITORING / "alerts.yaml", Path(__file__).with_name("alerts-played.yaml")):
        shutil.copy(file, tmp_path)
    played = subprocess.run(
        [promtool, "test", "rules", tmp_path / "alerts-played.yaml"], capture_output=True, text=True, check=False
    )
    assert played.returncode == 0, played.stdout + played.stderr
