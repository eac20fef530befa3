"""Play a Dockerfile's steps into a clean folder, where there is no Docker, and run a small job on what they installed.

    python deploy/replay_image.py [--target cpu|gpu] [--root FOLDER] [-- ARGUMENTS OF THE ENTRYPOINT]

Commands, paths, environment and user are read from `deploy/Dockerfile`; its absolute paths lie under the folder here.
Not played: `apt-get` (this machine's own Python stands for the image's), and that the file system is another.
Exit code: that of the first step that fails, or of the job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILE = REPOSITORY / "deploy" / "Dockerfile"
SMALL = ["--model=4:8", "--epochs=1", "--set=data.limit=1000", "--set=data.validation=200", "--workers=cpu=1"]
JOB = ["cnn", "run", *SMALL, "--json"]
OURS = re.compile(r"(?<![\w./])/(opt|src|data|runs|scratch|cache)(?![\w.-])")
"""Absolute paths that belong to the image, at the start of a word or after `=`, `:` or a quote."""


@dataclass(frozen=True)
class Stage:
    """One `FROM … AS name` and the instructions under it, each its word and the rest of the line."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, word: str) -> str | None:
        """What the last instruction of this word says: the one that counts."""
        return next((text for step, text in reversed(self.steps) if step == word), None)


def read_stages(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name. Raises ValueError for one without a name."""
    stages: dict[str, Stage] = {}
    stage = None
    for word, rest in _instructions(text):
        if word == "FROM":
            base, given, name = rest.partition(" AS ")
            if not given:
                raise ValueError(f"FROM {rest}: give the stage a name (AS …)")
            stage = stages[name.strip()] = Stage(name.strip(), base.strip())
        elif stage is not None:
            stage.steps.append((word, rest))
    return stages


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Instructions, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        yield word.upper(), " ".join(rest.split())


def needed(stages: dict[str, Stage], target: str) -> list[Stage]:
    """The stages that make the target, in the order in which they are built."""
    stage = stages[target]
    copied = [m[1] for word, text in stage.steps if word == "COPY" and (m := re.match(r"--from=(\S+)", text))]
    before = [s for name in (stage.base, *copied) if name in stages for s in needed(stages, name)]
    return list({s.name: s for s in (*before, stage)}.values())


def environment_of(stage: Stage) -> dict[str, str]:
    """What its ENV instructions set."""
    pairs = (pair for word, text in stage.steps if word == "ENV" for pair in text.split())
    return dict(pair.split("=", 1) for pair in pairs)


def sent_to_build(path: str, ignored: str) -> bool:
    """Whether a path of the repository gets past a .dockerignore that names what it lets through."""
    allowed = [line[1:].strip() for line in ignored.splitlines() if line.startswith("!")]
    return "*" in ignored.split() and any(path == a or path.startswith(f"{a}/") for a in allowed)


class Replay:
    """The image's file system under `root`, with this machine's Python under the name of the image's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root
        tools = root / "tools"
        tools.mkdir(parents=True)
        python = tools / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        self.environment = {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin", "HOME": str(root / "tmp")}
        self.environment |= {"PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.environment |= {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_"))}

    def here(self, text: str) -> str:
        """The same text with the image's paths as they are here."""
        return OURS.sub(lambda match: f"{self.root}{match[0]}", text)

    def play(self, stage: Stage) -> None:
        """Every step of a stage. Raises CalledProcessError or ValueError at the first that fails."""
        for word, text in stage.steps:
            if word in ("RUN", "COPY", "WORKDIR"):
                print(f"{stage.name}: {word} {text}", flush=True)
                getattr(self, word.lower())(text)

    def workdir(self, text: str) -> None:
        self.folder = Path(self.root) if text == "/" else Path(self.here(text))
        self.folder.mkdir(parents=True, exist_ok=True)

    def copy(self, text: str) -> None:
        *sources, target = [word for word in text.split() if not word.startswith("--")]
        if text.startswith("--from="):  # one folder stands for all stages
            if sources != [target] or not Path(self.here(target)).exists():
                raise ValueError(f"COPY {text}: the stage before did not make it under that very path")
            return
        ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text()
        for source in sources:
            if not sent_to_build(source, ignored):
                raise ValueError(f"COPY {source}: Dockerfile.dockerignore keeps it from the build")
            self._copy_one(REPOSITORY / source, target, many=target.endswith("/"))

    def _copy_one(self, source: Path, target: str, *, many: bool) -> None:
        there = self.folder / self.here(target)
        there = there / source.name if many else there
        if source.is_dir():
            shutil.copytree(source, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, there)

    def run(self, text: str) -> None:
        if "apt-get" in text:
            print("  not played: system packages are this machine's own")
            return
        subprocess.run(["sh", "-ec", self.here(text)], cwd=self.folder, env=self.environment, check=True)

    def start(self, stage: Stage, arguments: list[str]) -> int:
        """Run the entry point as the image's user, with its environment. Returns the exit code."""
        (self.root / "tmp").mkdir(mode=0o1777, exist_ok=True)
        entry = [self.here(word) for word in json.loads(stage.last("ENTRYPOINT") or "[]")]
        environment = {name: self.here(value) for name, value in environment_of(stage).items()}
        environment["HOME"] = str(self.root / environment.get("HOME", "/tmp").lstrip("/"))
        user = self._user(stage, environment["PATH"])
        entry[0] = shutil.which(entry[0], path=environment["PATH"]) or entry[0]
        print(f"{stage.name}: {' '.join([*entry, *arguments])}", flush=True)
        return subprocess.run([*entry, *arguments], cwd=self.root, env=environment, check=False, **user).returncode

    def _user(self, stage: Stage, path: str) -> dict[str, Any]:
        """The image's user and group, where we may become them and they may run this machine's Python."""
        uid, gid = map(int, (stage.last("USER") or "0:0").split(":"))
        user: dict[str, Any] = {"user": uid, "group": gid}
        python = shutil.which("python", path=path)
        try:
            subprocess.run([str(python), "-c", ""], cwd=self.root, check=True, capture_output=True, **user)
        except (OSError, subprocess.CalledProcessError):
            print(f"  not played: user {uid}:{gid} cannot run this machine's Python")
            return {}
        return user


def replay(target: str, root: Path, arguments: list[str]) -> int:
    """Play what makes the target into `root`, check it, and run its entry point. Returns an exit code."""
    stages = read_stages(DOCKERFILE.read_text())
    played = Replay(root)
    for stage in needed(stages, target):
        played.folder = played.root
        played.play(stage)
    tools = [name for name in ("pip", "hatchling", "gcc") if (root / "opt/daskcnn/bin" / name).exists()]
    if tools:
        print(f"the image would hold build tools: {', '.join(tools)}")
        return 1
    return played.start(stages[target], arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cpu", help="stage to replay (cpu); gpu downloads CUDA's libraries")
    parser.add_argument("--root", type=Path, help="new folder to play into; none: a temporary one, removed afterwards")
    parser.add_argument("arguments", nargs="*", help=f"for the entry point ({' '.join(JOB)})")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="daskcnn-image-") as temporary:
        Path(temporary).chmod(0o755)
        try:
            return replay(given.target, (given.root or Path(temporary) / "root").resolve(), given.arguments or JOB)
        except subprocess.CalledProcessError as error:
            return error.returncode


if __name__ == "__main__":
    sys.exit(main())
