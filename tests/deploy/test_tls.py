"""Who is not of a cluster's authority is refused by it, and told why and what to do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dask
import pytest
import yaml
from click.testing import CliRunner

from daskcnn.cli import main
from tests.deploy.manifests import of_kind
from tests.deploy.replay_authority import Authority
from tests.deploy.replay_manifests import merged
from tests.deploy.replay_pods import Pod, Stage

pytestmark = pytest.mark.cluster

WAIT = 1  # seconds that a job is told to wait
CERTIFICATES = {c["spec"]["secretName"]: c["spec"] for c in of_kind(merged("k8s/overlays/tls"), "Certificate").values()}


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, Authority]]:
    """The scheduler's pod of the overlay for TLS, and its authority."""
    root, authority = tmp_path_factory.mktemp("tls"), Authority()
    secrets = {"scheduler-tls": root / "secrets"}
    authority.write(secrets["scheduler-tls"], CERTIFICATES["scheduler-tls"])
    with Stage(merged("k8s/base", "k8s/components/tls"), root, secrets).pod("Deployment", "scheduler") as pod:
        yield pod.run(), authority


def config(folder: Path, ca: Authority, issuer: Authority, until: timedelta = timedelta(days=1)) -> str:
    """Dask's settings of the overlay with a client's certificate of one authority, which trusts another."""
    issuer.write(folder, CERTIFICATES["client-tls"], until=until)
    ca.write(folder / "trusted", CERTIFICATES["client-tls"])
    text = of_kind(merged("k8s/overlays/tls"), "ConfigMap")["dask"]["data"]["tls.yaml"]
    settings: dict[str, Any] = yaml.safe_load(text.replace("/certs/", f"{folder}/"))
    settings["distributed"]["comm"]["tls"]["ca-file"] = str(folder / "trusted" / "ca.crt")
    (folder / "dask.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(folder / "dask.yaml")


CLIENTS = {
    "plain": ("tcp", "Connection reset", "If it uses TLS, write tls://"),
    "no certificate": ("tls", "ssl_context", "needs certificates: set distributed.comm.tls"),
    "other authority": ("tls", "CERTIFICATE_VERIFY_FAILED", "certificates of the cluster's own authority (CA)"),
    "other issuer": ("tls", "(?i)unknown.ca", "certificates of the cluster's own authority (CA)"),
    "expired": ("tls", "(?i)certificate.expired", "renew that certificate"),
    "encrypted, but not the address": ("tcp", "encryption required", "give an address that begins with tls://"),
}


def settings_of(client: str, own: Authority, folder: Path) -> str:
    other = Authority()
    match client:
        case "plain" | "no certificate":
            return ""
        case "other authority":
            return config(folder, other, other)
        case "other issuer":
            return config(folder, own, other)
        case "expired":
            return config(folder, own, own, until=timedelta(days=-1))
    return config(folder, own, own)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_refused_and_told_why(client: str, scheduler: tuple[Pod, Authority], tmp_path: Path) -> None:
    """It connects as a job does, from this process: `DASK_CONFIG` is read where Dask is imported."""
    (pod, authority), (scheme, reason, remedy) = scheduler, CLIENTS[client]
    look = ["doctor", "--scheduler", f"{scheme}://{pod.address}:8786", "--wait", str(WAIT)]
    file = settings_of(client, authority, tmp_path)
    settings = yaml.safe_load(Path(file).read_text(encoding="utf-8")) if file else {}
    with dask.config.set(dask.config.merge(dask.config.config, settings)):
        result = CliRunner().invoke(main, look)
    assert result.exit_code == 3, result.output
    line = next(line for line in result.output.splitlines() if "cannot be reached" in line)
    assert re.search(reason, line), line
    assert remedy in result.output
    assert "Traceback" not in result.output


def test_a_client_of_the_authority_is_let_in(scheduler: tuple[Pod, Authority], tmp_path: Path) -> None:
    pod, authority = scheduler
    command = [sys.executable, "-m", "dask", "cnn", "doctor", "--scheduler", f"tls://{pod.address}:8786", "--wait", "1"]
    environment = {**os.environ, "DASK_CONFIG": config(tmp_path, authority, authority)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert f"tls://{pod.address}:8786, encrypted, 0 workers" in done.stdout


@pytest.mark.slow
def test_a_worker_of_another_authority_does_not_join(
    scheduler: tuple[Pod, Authority], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod, authority = scheduler
    monkeypatch.setenv("DASK_CONFIG", config(tmp_path, authority, Authority()))
    command = [sys.executable, "-m", "dask", "worker", f"tls://{pod.address}:8786", "--host", pod.address, "--no-nanny"]
    command += ["--death-timeout", "10", "--no-dashboard", "--local-directory", str(tmp_path)]
    before = len(pod.said())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    told = pod.said()[before:]
    assert done.returncode != 0
    assert "Waiting to connect to" in done.stderr, done.stderr
    assert re.search("CERTIFICATE_VERIFY_FAILED.*unable to get local issuer", told), told
    assert "Register worker" not in told
