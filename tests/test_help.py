"""What the command line says of itself: defaults, every key, the nearest command, what lies where a data set should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daskcnn.cli import main as daskcnn
from daskcnn.job.reference import default_of, tables
from daskcnn.job.tables import Job, keys_of
from daskcnn.launch import jobs
from daskcnn.ps import RULES
from daskcnn.run import main as run
from daskcnn.show.renderers.network_text import readable_keys


def invoke(*args: object) -> Result:
    return CliRunner().invoke(daskcnn, [str(arg) for arg in args])


def test_the_help_of_run_shows_defaults() -> None:
    text = " ".join(invoke("run", "--help").stdout.split())
    for flag, default in {
        "--epochs N": "10",
        "--lr RATE": "0.01",
        "--wait SECONDS": "60.0",
        "--run-dir PATH": "runs",
    }.items():
        assert f"default: {default}]" in text.partition(flag)[2].partition(" --")[0], flag


def test_every_key_is_listed_with_type_default_and_meaning() -> None:
    text = " ".join(invoke("run", "--help-keys").stdout.split())
    for section, field in Job.model_fields.items():
        for key, described in keys_of(field.annotation).items() if section != "rule" else ():  # type: ignore[arg-type]
            default = f" = {default_of(f'{section}.{key}')}" if default_of(f"{section}.{key}") else ""
            assert f"{section}.{key}{default} (" in text
            assert " ".join((described.description or "").replace("`", "").split()) in text
    assert "train.epochs = 10 (whole number, ≥ 1) Presentations of every sample, on average." in text
    assert "train.schedule.power = 1.0 (number, > 0)" in text
    assert all(f"[rule] of strategy {name}" in text for name in RULES)


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_list_of_keys_fits(width: int) -> None:
    longest = max(len(word) for word in readable_keys(tables()).split())
    assert max(map(len, readable_keys(tables(), width).splitlines())) <= max(min(width, 110), longest + 6)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["trian"], "no such command 'trian'; did you mean 'run'?"),
        (["rnu"], "no such command 'rnu'; did you mean 'run'?"),
        (["reprot", "x"], "no such command 'reprot'; did you mean 'report'?"),
        (["data", "verfy"], "no such command 'verfy'; did you mean 'verify'?"),
        (["zzz"], "no such command 'zzz'; known: cancel, compare, "),
        (["a\x1b[2J"], r"no such command 'a\x1b[2J'"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(args: list[str], words: str) -> None:
    found = invoke(*args)
    assert found.exit_code == 2
    assert words in " ".join(found.stderr.split())


def test_quiet_leaves_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def note(*_: object, quiet: bool, **__: object) -> dict[str, object]:
        asked.append(quiet)
        return {}

    monkeypatch.setattr(jobs, "run", note)
    monkeypatch.setattr("daskcnn.cli.run.format_summary", lambda *_: "summary", raising=False)
    for args in ([], ["--quiet"]):
        CliRunner().invoke(run, args)
    assert asked == [False, True]


# --- data sets by name, and what lies at a path ---


def test_every_known_data_set_is_taken_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(run, ["--dataset", "cifar100", "--data", "nowhere.zarr"]).stderr
    assert "daskcnn data prepare cifar100 --out" in told
    assert "did you mean" not in told


CIFAR = ("batches.meta.txt", "data_batch_1.bin")
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte.gz", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


@pytest.mark.parametrize(
    ("name", "files", "archive"),
    [
        ("cifar10", CIFAR, ""),
        ("cifar10", [f"cifar-10-batches-bin/{file}" for file in CIFAR], "/cifar-10-batches-bin"),
        ("cifar10", ["cifar-10-binary.tar.gz"], "/cifar-10-binary.tar.gz"),
        ("cifar100", ["cifar-100-binary.tar.gz"], "/cifar-100-binary.tar.gz"),
        ("mnist", IDX, ""),
        ("fashion-mnist", IDX, ""),
    ],
)
def test_files_as_they_are_published_are_answered_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: list[str], archive: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in files:
        path = tmp_path / "raw" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    told = CliRunner().invoke(run, ["--data", "raw", "--dataset", name]).stderr
    assert f"the files of {name} as they are published, not a prepared data set" in told
    assert f"prepare them with `daskcnn data prepare {name} --archive {tmp_path}/raw{archive}`" in told
    if name not in ("mnist", "fashion-mnist"):  # which have files of the same names
        assert f"daskcnn data prepare {name} " in CliRunner().invoke(run, ["--data", "raw"]).stderr


def test_a_folder_of_something_else_stays_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    told = CliRunner().invoke(run, ["--data", str(tmp_path), "--dataset", "cifar10"]).stderr
    assert re.search("something else than a zarr group", told)


def test_a_reader_that_has_enough_is_no_bug(tmp_path: Path) -> None:
    """`daskcnn … | head` closes the pipe."""
    command = [sys.executable, "-m", "daskcnn.run", "--help-keys"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        writer.stdout.close()
        assert writer.stderr.read() == ""
        assert writer.wait(timeout=60) == 1


@pytest.mark.parametrize(
    ("home", "heavy"),
    [
        ("runs", ("dask", "distributed", "zarr", "numba", "scipy", "matplotlib")),
        ("model", ("dask", "distributed", "numba", "scipy", "matplotlib", "pyarrow")),
    ],
)
def test_commands_on_runs_and_networks_start_without_what_training_needs(home: str, heavy: tuple[str, ...]) -> None:
    code = f"import sys, daskcnn.cli, daskcnn.cli.{home}; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--learning-rate", "--lr"), ("--num_workers", "--workers"), ("--patience", "--set train.early_stopping=…")],
)
def test_words_of_other_programs_are_answered_with_the_flag(flag: str, meant: str) -> None:
    refused = CliRunner().invoke(daskcnn, ["run", flag, "1"])
    assert refused.exit_code == 2
    assert f"No such option '{flag}'. Did you mean '{meant}'?" in refused.stderr
