"""`daskcnn report` and `daskcnn compare` as a user meets them."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from daskcnn.cli import main as daskcnn
from daskcnn.errors import installing
from daskcnn.show.history import ROUND_COLUMNS

CALIBRATION = {"event": "calibration", "workers": [{"name": "w0", "device": "cpu"}]}


def round_of(number: int) -> dict[str, Any]:
    seconds = {"busy": 2.0, "load": 0.5, "wait": 0.25, "communication": 0.125, "evaluation": 1.0}
    moved = {"bytes_up": 40, "bytes_down": 40, "pushes": 1, "version": number + 1, "base_version": number}
    return {"event": "round", "worker": "w0", "round": number, "epoch": number + 1.0, "samples": 9, **seconds, **moved}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two rounds, not ended, in the folder `runs/mine`."""
    monkeypatch.chdir(tmp_path)
    return make_run("mine", start_of("mine"), CALIBRATION, round_of(0), round_of(1))


def start_of(name: str) -> dict[str, Any]:
    return {"event": "start", "run": f"elsewhere/{name}", "strategy": "sgwu", "epochs": 2, "samples": 9}


def make_run(name: str, *events: dict[str, Any]) -> Path:
    path = Path("runs") / name
    path.mkdir(parents=True)
    (path / "job.json").write_text("{}")
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(daskcnn, [str(a) for a in args])
    assert "Traceback" not in result.output
    return result


def told(*args: object) -> str:
    """Why it is refused."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr


def test_report_shows_a_run_that_goes_on_by_the_folder_it_is_in_now(run: Path) -> None:
    result = invoke("report", run)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "runs/mine" in result.stdout
    assert "elsewhere" not in result.stdout
    assert "not ended" in result.stdout
    assert invoke("report", run / "events.jsonl").stdout.count("w0") == result.stdout.count("w0")


def test_report_as_json_has_every_round(run: Path) -> None:
    found = json.loads(invoke("report", run, "--json").stdout)
    assert [row["number"] for row in found["rounds"]] == [1, 2]
    assert found["total"]["busy"] == 4.0
    assert found["start"]["run"] == str(run)


def test_rounds_as_csv_go_to_a_file_or_to_stdout(run: Path) -> None:
    printed = invoke("report", run, "--csv", "-").stdout
    assert invoke("report", run, "--csv", "rounds.csv").stdout == ""
    assert Path("rounds.csv").read_text() == printed
    first, second = csv.DictReader(io.StringIO(printed))
    assert tuple(first) == ROUND_COLUMNS
    assert {"worker", "life", "samples", "staleness", "lr"} <= first.keys()
    assert (second["number"], second["busy"], second["gamma"]) == ("2", "2.0", "")


def test_rounds_are_printed_where_they_are_asked_for(run: Path) -> None:
    assert "\nrounds\n" in invoke("report", run, "--rounds").stdout
    assert "\nrounds\n" not in invoke("report", run).stdout


def test_what_is_no_run_is_refused_with_a_remedy(run: Path) -> None:
    assert "nowhere: not a run directory" in told("report", "nowhere")
    assert "runs: not a run directory" in told("compare", run, "runs")
    (run / "events.jsonl").unlink()
    assert "events.jsonl: no such file; the run was stopped before it began: start it anew" in told("report", run)
    (run / "events.jsonl").touch()
    assert "events.jsonl: no events" in told("report", run)


def test_a_damaged_log_is_named_with_the_line(run: Path) -> None:
    log = run / "events.jsonl"
    whole = log.read_text()
    log.write_text(whole.replace('"busy": 2.0', '"busy": "two"', 1))
    assert f"{log}: line 3 (round): busy = 'two': input should be a valid number" in told("report", run)
    log.write_text(whole.replace('"event": "calibration"', "", 1))
    assert f"{log}: line 2 is no JSON object" in told("report", run)
    log.write_text(whole[:-20])
    assert json.loads(invoke("report", run, "--json").stdout)["total"]["rounds"] == 1


def test_forms_that_exclude_each_other_and_files_that_cannot_be_written(run: Path) -> None:
    assert "--json and --csv" in told("report", run, "--json", "--csv", "x")
    assert "runs: Is a directory; give a file that may be written" in told("report", run, "--csv", "runs")


def test_compare_sets_runs_side_by_side(run: Path) -> None:
    other = make_run("other", start_of("other"), CALIBRATION, round_of(0), {"event": "end", "status": "done"})
    assert invoke("compare", run, other).stdout.splitlines()[0].split() == ["mine", "other"]
    found = json.loads(invoke("compare", run, other, "--targets", "0.25", "--json").stdout)
    assert found["runs"] == [str(run), str(other)]
    assert "time to 25 %" in [line["label"] for line in found["lines"]]


def test_compare_tells_the_runs_of_a_sweep_apart_by_their_keys(run: Path) -> None:
    """In text, JSON and the page; what concerns only the place of a run is no difference."""
    other = make_run("other", start_of("other"), CALIBRATION, round_of(0))
    for path, lr in ((run, 0.1), (other, 0.01)):
        (path / "job.json").write_text(json.dumps({"train": {"lr": lr}, "run": {"name": path.name}}))
    assert invoke("compare", run, other).stdout.splitlines()[1].split() == ["train.lr", "0.1", "0.01"]
    (line,) = json.loads(invoke("compare", run, other, "--json").stdout)["keys"]
    assert (line["label"], line["values"]) == ("train.lr", [0.1, 0.01])
    alone = invoke("compare", run, other, run / "events.jsonl")
    assert alone.stdout.splitlines()[1].split() == ["train.lr", "0.1", "0.01", "-"]
    pytest.importorskip("matplotlib")
    invoke("compare", run, other, "--html", "two.html")
    page = Path("two.html").read_text()
    assert "mine (lr=0.1)" in page
    assert ">train.lr</th><td>0.1</td><td>0.01</td>" in page
    assert invoke("plot", run, other, "--out", "two.svg").exit_code == 0
    assert "other (lr=0.01)" in Path("two.svg").read_text()


def test_compare_wants_two_runs_and_targets_that_are_accuracies(run: Path) -> None:
    assert "compare: 1 run, which has nothing beside it; give two or more" in told("compare", run)
    for targets in ("0", "50", "half", "nan"):
        assert "write accuracies above 0 and up to 1, such as 0.5,0.6" in told(
            "compare", run, run, "--targets", targets
        )


# --- pages and pictures ---


def evaluated(**changes: Any) -> dict[str, Any]:
    """What `daskcnn evaluate --keep` keeps of a network that tells two classes."""
    figures = {"samples": 5, "precision": 0.5, "recall": 0.5, "auc": None}
    found = {"checkpoint": "c", "data": "d", "samples": 10, "auc_samples": 10, "labels": "classes", "top5": None}
    found |= {"accuracy": 0.5, "loss": 1.0, "auc": 0.5, "confusion": [[3, 2], [1, 4]], "run": "r"}
    return {**found, "classes": [{"class": name, **figures} for name in "ab"], **changes}


def test_a_page_is_written_where_it_is_asked_for(run: Path) -> None:
    pytest.importorskip("matplotlib")
    assert invoke("report", run, "--html", "mine.html").stdout == "page mine.html\n"
    assert "<h1>mine</h1>" in Path("mine.html").read_text()
    other = make_run("other", start_of("other"), CALIBRATION, round_of(0))
    assert invoke("compare", run, other, "--html", "two.html").stdout == "page two.html\n"
    assert "2 runs side by side" in Path("two.html").read_text()


def test_what_was_kept_of_an_evaluation_is_in_the_page(run: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = run / "evaluation.json"
    kept.write_text(json.dumps(evaluated()))
    invoke("report", run, "--html", "mine.html")
    assert "Confusion matrix" in Path("mine.html").read_text()
    kept.write_text(json.dumps(evaluated(confusion=[[1, 2]])))
    assert "evaluation.json: fields: confusion has not 2 rows of 2 numbers; remove it" in told(
        "report", run, "--html", "mine.html"
    )
    kept.write_text(json.dumps(evaluated(accuracy="good")))
    assert "evaluation.json: accuracy = 'good': input should be a valid number" in told(
        "report", run, "--html", "mine.html"
    )
    kept.write_text("[" * 100_000)
    assert "evaluation.json: 100,000 lists and tables, more than" in told("report", run, "--html", "mine.html")


def test_a_page_that_cannot_be_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--json and --html: each is a form of its own" in told("report", run, "--json", "--html", "x")
    assert "--json and --html: each is a form of its own" in told("compare", run, run, "--json", "--html", "x")
    assert "--csv and --html" in told("report", run, "--csv", "x", "--html", "x")
    assert "runs: Is a directory; give a file that may be written" in told("report", run, "--html", "runs")
    assert "compare: 1 run, which has nothing beside it" in told("compare", run, "--html", "x")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["report", run], ["compare", run, run]):
        assert f"matplotlib is not installed; {installing('plot')}" in told(*command, "--html", "x.html")
    assert not Path("x.html").exists()


def test_any_run_is_drawn(run: Path) -> None:
    pytest.importorskip("matplotlib")
    assert invoke("plot", run, run, "--out", "runs.svg").stdout == "picture runs.svg\n"
    text = "".join(ElementTree.fromstring(Path("runs.svg").read_bytes()).itertext())
    assert "Where the time of each worker went" in text
    assert "Samples that each worker trained on" in text
    invoke("plot", run, "--figure", "samples-by-worker", "--out", "one.svg")
    text = "".join(ElementTree.fromstring(Path("one.svg").read_bytes()).itertext())
    assert "Samples that each worker trained on" in text
    assert "Where the time" not in text


def test_a_figure_without_numbers_is_refused_with_those_that_there_are(run: Path) -> None:
    pytest.importorskip("matplotlib")
    assert "auc-by-epoch: these logs have no numbers for it; choose from: time-by-worker, samples-by-worker" in told(
        "plot", run, "--figure", "auc-by-epoch"
    )
    assert "this log has no epoch of sharded layers" in told("plot", run, "--figure", "breakdown")
    begun = make_run("begun", start_of("begun"))
    assert "no round has ended yet" in told("plot", begun)
