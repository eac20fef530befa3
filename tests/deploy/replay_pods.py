"""Pods played as processes on loopback, with the very commands, arguments, environment and files of their manifests.

Only four things differ: a pod's address is one of 127/8, names of services are replaced by such addresses, paths at
which volumes are mounted lie under a temporary folder, and no pod measures convolutions or compiles loops that are
compiled already: several pods on one machine would take minutes.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.manifests import Manifest, command_line, environment, expanded, of_kind

STARTED = 60.0  # seconds in which a start-up probe must succeed here


@dataclass
class Stage:
    """Where pods run: a folder for their volumes, and a network of loopback addresses. `secrets`: folders by name."""

    manifests: list[Manifest]
    root: Path
    secrets: Mapping[str, Path] = field(default_factory=dict)
    network: str = field(default_factory=lambda: f"127.{random.randrange(1, 255)}.{random.randrange(255)}")
    _pods: int = 0
    _hosts: dict[str, str] = field(default_factory=dict)

    def config(self, name: str) -> dict[str, str]:
        """The data of a ConfigMap."""
        return dict(of_kind(self.manifests, "ConfigMap")[name]["data"])

    @contextmanager
    def pod(self, kind: str, name: str) -> Iterator[Pod]:
        """A pod of a Deployment or Job; whatever it runs is killed on leaving. Init containers have run before."""
        self._pods += 1
        template = of_kind(self.manifests, kind)[name]["spec"]["template"]
        address = f"{self.network}.{self._pods}"
        if name in of_kind(self.manifests, "Service"):
            self._hosts[name] = address
        pod = Pod(self, template["spec"], f"{name}-{self._pods}", address, dict(self._hosts))
        try:
            for container in template["spec"].get("initContainers", []):
                pod.process = pod.start(container)
                assert pod.wait(120) == 0, pod.said()
            yield pod
        finally:
            pod.kill()


@dataclass
class Pod:
    """One pod: its address, its folders, and the process of its only container once started."""

    stage: Stage
    spec: dict[str, Any]
    name: str
    address: str
    hosts: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def container(self) -> dict[str, Any]:
        (only,) = self.spec["containers"]
        return dict(only)

    @property
    def home(self) -> Path:
        return self.stage.root / "pods" / self.name

    def run(self) -> Pod:
        """Start the container, and wait for its start-up probe if it has one."""
        return self.launch().started()

    def launch(self) -> Pod:
        """Start the container."""
        self.process = self.start(self.container)
        return self

    def started(self) -> Pod:
        """Wait for its start-up probe if it has one."""
        if probe := self.container.get("startupProbe"):
            self._wait_until_started(probe["httpGet"])
        return self

    def start(self, container: dict[str, Any]) -> subprocess.Popen[bytes]:
        mounts = {m["mountPath"]: self._volume(m["name"]) for m in container["volumeMounts"]}
        self._fill(mounts)
        env = environment(container, self.stage.manifests, self.address, self.name)
        command = expanded(command_line(container), env)
        here = {name: self._moved(value, mounts) for name, value in env.items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        tests = {name: value for name, value in os.environ.items() if name in ("DASKCNN_TUNE", "NUMBA_CACHE_DIR")}
        with open(self.home / "log", "ab") as log:
            return subprocess.Popen(
                [self._moved(part, mounts) for part in command],
                env=tests | {"PATH": path, "HOME": str(self.home), "TMPDIR": str(mounts["/tmp"])} | here,
                cwd=self.home,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _volume(self, name: str) -> Path:
        (volume,) = [v for v in self.spec["volumes"] if v["name"] == name]
        if claim := volume.get("persistentVolumeClaim"):
            folder = self.stage.root / "claims" / claim["claimName"]
        elif secret := volume.get("secret"):
            return self.stage.secrets[secret["secretName"]]
        else:
            folder = self.home / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _fill(self, mounts: Mapping[str, Path]) -> None:
        """Write the files of config maps, their paths and hosts moved too."""
        for volume in self.spec["volumes"]:
            if config := volume.get("configMap"):
                for file, text in self.stage.config(config["name"]).items():
                    target = self._volume(volume["name"]) / file
                    target.write_text(self._moved(text, mounts), encoding="utf-8")

    def _moved(self, text: str, mounts: Mapping[str, Path]) -> str:
        """Text with its paths and hosts as they are here, all in one go: what is put in is not looked at again."""
        here = {mount: str(folder) for mount, folder in mounts.items()} | self.hosts
        paths, hosts = "|".join(map(re.escape, mounts)), "|".join(map(re.escape, self.hosts)) or "(?!)"
        pattern = rf"(?<![\w./-])(?:({paths})(?![\w.-])|({hosts})(?=:\d))"
        return re.sub(pattern, lambda match: here[match[0]], text)

    def _wait_until_started(self, probe: dict[str, Any]) -> None:
        ports = {p["name"]: p["containerPort"] for p in self.container["ports"]}
        url, deadline = f"http://{self.address}:{ports[probe['port']]}{probe['path']}", time.monotonic() + STARTED
        while True:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
                return
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def wait(self, within: float) -> int:
        """The exit code of its process."""
        assert self.process is not None
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} has not ended within {within:g} s\n{self.said()}") from None

    def terminate(self) -> None:
        """What Kubernetes sends first: SIGTERM to the container's first process."""
        assert self.process is not None
        self.process.terminate()

    def kill(self) -> None:
        """SIGKILL to all processes of the container."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def said(self) -> str:
        """All its output."""
        return (self.home / "log").read_text(encoding="utf-8", errors="replace")
