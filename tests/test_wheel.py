"""The wheel works outside of the repository: it has all that the package needs, and says so of its types."""

from __future__ import annotations

import os
import subprocess
import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    (found,) = folder.glob("daskcnn-*.whl")
    return found


def pip(*args: object) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        about = HeaderParser().parsestr(packed.read(metadata).decode())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "daskcnn").rglob("*") if path.is_file()}
    assert names == {file for file in files if "__pycache__" not in file}
    assert "daskcnn/py.typed" in names
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert about["Description-Content-Type"] == "text/markdown"
    assert about["License-Expression"] == "BSD-3-Clause"
    assert about.get_all("License-File") == ["LICENSE"]


def test_the_wheel_runs_elsewhere(wheel: Path, tmp_path: Path) -> None:
    """Nothing of the repository is on the path: not its folder, and not its tests."""
    pip("install", "--no-deps", "--target", tmp_path / "site", wheel)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def python(*args: str) -> str:
        command = [sys.executable, *args]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = python("-c", "import daskcnn; print(daskcnn.__file__)").strip()
    assert Path(where) == tmp_path / "site/daskcnn/__init__.py"
    job = ["--model=4:8", "--epochs=1", "--set=data.limit=500", "--set=data.validation=100", "--workers=cpu=1"]
    assert "status      done" in python("-m", "daskcnn.run", *job, "--quiet", "--name=it")
    assert "it " in python("-c", "from daskcnn.cli import main; main(['runs'])")
