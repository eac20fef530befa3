"""`make test`, `make test-all` and `.ci/run` run all of their parts, whichever fails: stand-ins note what they get."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNIT, CLUSTER = "-m not cluster and not slow", "-m cluster and not slow"
SLOW = ["test-s3", "test-mlflow", "test-optuna", "-m slow and not cluster", "-m slow and cluster"]
OUTER = {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
"""What a make hands on that runs these tests."""
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def make(folder: Path, *targets: str, codes: dict[str, int] | None = None) -> tuple[list[str], int, str]:
    """What Python was told, make's exit code and what it printed. Python ends with the code of the words in `codes`."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    cases = "".join(f'  *"{words}"*) exit {code} ;;\n' for words, code in (codes or {}).items())
    python.write_text(f'#!/bin/sh\necho "$*" >> "$(dirname "$0")/told"\ncase "$*" in\n{cases}esac\n')
    python.chmod(0o755)
    for done in (".installed", ".warm", ".tools"):
        (folder / done).touch()
    command = ["make", "-C", str(ROOT), f"VENV={folder}", *targets]
    environment = {name: value for name, value in os.environ.items() if name not in OUTER}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return (folder / "bin" / "told").read_text().splitlines(), made.returncode, made.stdout + made.stderr


@pytest.mark.parametrize(
    ("codes", "worst"),
    [({}, 0), ({UNIT: 1}, 1), ({CLUSTER: 1}, 1), ({UNIT: 1, CLUSTER: 3}, 3), ({UNIT: 3, CLUSTER: 1}, 3)],
)
def test_both_halves_run_and_the_worse_code_stays(codes: dict[str, int], worst: int, tmp_path: Path) -> None:
    told, code, said = make(tmp_path, "test", codes=codes)
    assert [sum(half in line for line in told) for half in (UNIT, CLUSTER)] == [1, 1]  # at once, in either order
    assert len(told) == 2
    assert (code, f"Error {worst}" in said) == ((2, True) if worst else (0, False))


@pytest.mark.parametrize("failing", [UNIT, *SLOW, None])
def test_all_parts_of_test_all_run(failing: str | None, tmp_path: Path) -> None:
    told, code, _ = make(tmp_path, "test-all", codes={failing: 1} if failing else {})
    assert [sum(part in line for line in told[:2]) for part in (UNIT, CLUSTER)] == [1, 1]  # at once, in either order
    assert [part in line for part, line in zip(SLOW, told[2:], strict=True)] == [True] * len(SLOW)
    assert code == (2 if failing else 0)


def test_chosen_tests_are_all_that_run(tmp_path: Path) -> None:
    told, code, _ = make(tmp_path, "test", "ARGS=tests/conv -k spec", codes={"spec": 1})
    assert (told, code) == (["-m pytest tests/conv -k spec"], 2)


@pytest.mark.parametrize(
    ("codes", "code"), [({}, 0), ({"check": 2}, 2), ({"test": 1}, 1), ({"check": 2, "test": 1}, 1)]
)
def test_all_that_must_pass_runs_once_all_is_installed(codes: dict[str, int], code: int, tmp_path: Path) -> None:
    cases = "".join(f"  {target}) exit {ends} ;;\n" for target, ends in codes.items())
    stub = tmp_path / "make"
    stub.write_text(f'#!/bin/sh\necho "$*" >> "{tmp_path}/told"\ncase "$*" in\n{cases}esac\n')
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run([ROOT / ".ci/run"], env=environment, capture_output=True, timeout=60, check=False)
    first, *others = (tmp_path / "told").read_text().splitlines()
    assert first == "-j2 tools site"
    assert sorted(others) == ["check", "test"]  # at once, in either order
    assert ran.returncode == code
