"""What commands write to stderr in a process of their own: what is meant, and nothing of how the process ends."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from daskcnn.job.resolve import resolve
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run

PYTHON = (sys.executable, "-W", "default")
"""Warnings are shown, also of what is not closed: a user would not see all of them, a developer does."""
RUN = ("-m", "daskcnn.run")
DASKCNN = ("-c", "from daskcnn.cli import main; main(prog_name='daskcnn')")
FROM_PYTHON = """
import sys, daskcnn
data, cluster = {"path": "synthetic.zarr", "validation": 20}, {"scheduler": sys.argv[1], "wait": 0}
try:
    daskcnn.train(job={"data": data, "cluster": cluster})
except daskcnn.errors.UserError as error:
    sys.exit(f"error: {error}")
"""
PLACE = ("--data", "synthetic.zarr", "--set", "data.validation=20", "--wait", "0", "--scheduler")
TO_WRITE = ("--set", "data.limit=600", "--set", "data.validation=100", "--wait", "0", "--scheduler")

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "run": (*RUN, *PLACE),
    "run, data to write": (*RUN, *TO_WRITE),
    "run --dry-run": (*RUN, "--dry-run", *TO_WRITE),
    "doctor": (*DASKCNN, "doctor", "--wait", "0", "--scheduler"),
    "predict": (*DASKCNN, "predict", "run", "images/a/0.png", "--out", "p.csv", "--wait", "0", "--scheduler"),
    "prepare folder": (*DASKCNN, "data", "prepare", "folder", "images", "--size", "8", "--wait", "0", "--scheduler"),
    "train": ("-c", FROM_PYTHON),
}
"""Whatever is given the scheduler's address, which comes last."""

NO_ADDRESS = {
    "notanaddress": "it has no port",
    "http://localhost:8786": "http:// is the dashboard's",
    "ucx://1.2.3.4:5": "ucx is not installed here",
    "tcp://[::1": "its brackets do not match",
    "tcp://127.0.0.1:99999": "port 99999 is not within 1 to 65535",
}
"""What cannot be an address, and why."""
NOBODY = ("tcp://127.0.0.1:{port}", "tls://127.0.0.1:{port}")
"""Addresses at which nobody listens."""

QUICK = {
    ("run", "tls://127.0.0.1:{port}"),
    ("run, data to write", "http://localhost:8786"),
    ("predict", "tcp://127.0.0.1:{port}"),
    ("train", "tls://127.0.0.1:{port}"),
}
"""Cases that are not left to `make test-all`: the others show the same once more."""
USAGE = r"Usage: daskcnn .*\nTry 'daskcnn .*\n\nError: "

MISTAKES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "compare": (("compare", "nope", "neither"), "error: nope: not a run directory"),
    "data prepare": (("data", "prepare", "nope"), "error: data set 'nope' is unknown"),
    "data prepare mnist": (("data", "prepare", "mnist", "--archive", "nope"), "data: read 0 %\nerror: nope: "),
    "data prepare folder": (("data", "prepare", "folder", "nope", "--size", "8"), "error: .*nope"),
    "data show": (("data", "show", "nope.zarr"), "error: nope.zarr"),
    "data verify": (("data", "verify", "nope.zarr"), "error: nope.zarr"),
    "doctor": (("doctor", "--wait", "-1"), USAGE + "Invalid value for '--wait'"),
    "evaluate": (("evaluate", "nope"), "error: nope"),
    "evaluate --data": (("evaluate", "run", "--data", "nope.zarr"), "error: nope.zarr"),
    "export": (("export", "nope", "--to", "onnx"), "error: nope"),
    "logs": (("logs", "nope"), "error: nope"),
    "model": (("model", "quikc"), "error: .*quikc.*did you mean 'quick'"),
    "models": (("models", "--jsno"), USAGE + "No such option '--jsno'"),
    "no command": (("tarin",), USAGE + "no such command 'tarin'; did you mean 'run'?"),
    "plan": (("plan", "nope.toml", "--add", "cpu=1"), "error: the job has a problem:\n  nope.toml: No such file"),
    "plan-conv": (("plan-conv", "quikc"), "error: .*quikc"),
    "plot": (("plot", "nope", "--out", "p.svg"), "error: nope"),
    "predict": (("predict", "nope", "images/a/0.png"), "error: nope"),
    "predict data": (("predict", "run", "nope.png"), "error: nope.png"),
    "report": (("report", "nope"), "error: nope"),
    "run": (("run", "nope.toml"), "error: the job has a problem:\n  nope.toml: No such file"),
    "run --resume": (("run", "--resume", "nope"), "error: nope: no run there"),
    "run --set": (("run", "--set", "train.epohcs=3"), "error: the job has a problem:\n  train.epohcs: unknown key"),
    "runs": (("runs", "nope"), "error: nope"),
    "simulate": (("simulate", "nope.toml"), "error: the job has a problem:\n  nope.toml: No such file"),
}
"""Mistakes that users make with each command, and what the message begins with."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a prepared data set, images, and a trained run."""
    path = tiny_data(tmp_path)
    job = tiny_job(path)
    tiny_run(tmp_path, job, random_state(resolve(job)), status="done")
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "images" / name / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(*command: str, code: int = 3) -> tuple[str, str]:
    """What a command writes to stdout and to stderr. It ends with this code, and the folder is as it was."""
    before = sorted(Path().rglob("*"))
    done = subprocess.run([*PYTHON, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert sorted(Path().rglob("*")) == before
    return done.stdout, done.stderr


def each(addresses: tuple[str, ...]) -> list[Any]:
    """Every command with every address; what is not quick is slow."""
    pairs = [(command, address) for command in COMMANDS for address in addresses]
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in pairs]


def refused(command: str, address: str, reason: str) -> None:
    """The command says this of the address in one line: on stderr, or as a finding on stdout."""
    stdout, stderr = told(*COMMANDS[command], address, code=1 if command == "train" else 3)
    if command == "doctor":
        assert re.search(rf"^NO  scheduler +scheduler {re.escape(address)}: {reason}", stdout, re.MULTILINE)
        assert stderr == ""
    else:
        assert stdout == ""
        assert re.fullmatch(
            rf"(data: check\n|weights: .*\n)?error: scheduler {re.escape(address)}: {reason}; .*\n", stderr
        ), stderr


@pytest.mark.parametrize(("command", "address"), each((*NO_ADDRESS,)))
def test_what_cannot_be_an_address_is_refused_in_one_line(command: str, address: str) -> None:
    refused(command, address, rf"not an address \({re.escape(NO_ADDRESS[address])}\)")


@pytest.mark.parametrize(("command", "address"), [case for case in each(NOBODY) if "--dry-run" not in case.values[0]])
def test_where_nobody_listens_is_said_in_one_line(command: str, address: str, silent_port: int) -> None:
    refused(command, address.format(port=silent_port), r"cannot be reached \(connection refused( for 0 s)?\)")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("doctor", ""),
        pytest.param("run", "error: interrupted by Ctrl-C (SIGINT) before training began\n", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_it_connects_ends_it_without_a_traceback(command: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        given = [*PYTHON, *COMMANDS[command], f"tcp://127.0.0.1:{silent.getsockname()[1]}"]
        quiet = subprocess.DEVNULL
        with (
            subprocess.Popen(given, stdout=quiet, stderr=subprocess.PIPE, text=True) as process,
            silent.accept()[0],
        ):
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.removeprefix("data: check\n") == words


@pytest.mark.parametrize(
    "mistake", [pytest.param(m, marks=() if m in ("run --set", "report") else pytest.mark.slow) for m in MISTAKES]
)
def test_a_mistake_is_answered_with_the_message_alone(mistake: str) -> None:
    arguments, words = MISTAKES[mistake]
    stdout, stderr = told(*DASKCNN, *arguments, code=2)
    assert stdout == ""
    assert re.match(words, stderr), stderr
    after = re.sub(words, "", stderr, count=1).splitlines()
    assert len(after) <= 1, stderr  # the end of the line
