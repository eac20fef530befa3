"""TLS: every process shows the certificate of its own role, and takes no connection without one."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tests.deploy.manifests import DEPLOY, Manifest, build, of_kind, pods

OVERLAY = "k8s/overlays/tls"
ROLES = {
    "scheduler": "scheduler",
    "cpu-worker": "worker",
    "gpu-worker": "worker",
    "parameter-server": "worker",
    "train": "client",
}


def settings(manifests: list[Manifest]) -> dict[str, Any]:
    comm: dict[str, Any] = yaml.safe_load(of_kind(manifests, "ConfigMap")["dask"]["data"]["tls.yaml"])
    return comm["distributed"]["comm"]


def test_nothing_is_spoken_but_tls() -> None:
    comm = settings(build(OVERLAY))
    assert comm["require-encryption"] is True
    assert comm["default-scheme"] == "tls"
    assert comm["tls"]["min-version"] >= 1.2


def test_the_plain_settings_stay() -> None:
    plain, encrypted = (of_kind(build(k), "ConfigMap")["dask"]["data"] for k in ("k8s/base", OVERLAY))
    assert encrypted["dask.yaml"] == plain["dask.yaml"]
    assert encrypted.keys() - plain.keys() == {"tls.yaml"}


def test_no_command_names_another_scheme() -> None:
    for pod in pods(build(OVERLAY)):
        assert "tcp://" not in str(pod.spec)


def test_every_pod_has_its_own_role_s_certificate() -> None:
    manifests = build(OVERLAY)
    tls, certificates = settings(manifests)["tls"], of_kind(manifests, "Certificate")
    for pod in pods(manifests):
        secrets = [v["secret"] for v in pod.spec["volumes"] if "secret" in v]
        if pod.component == "prepare-data":  # it talks to no Dask
            assert not secrets
            continue
        (secret,) = secrets
        assert secret["secretName"] == certificates[ROLES[pod.component]]["spec"]["secretName"]
        assert secret["defaultMode"] == 0o440, "for the pod's group, which fsGroup makes the image's"
        (mount,) = (m for m in pod.spec["containers"][0]["volumeMounts"] if m["name"] == "certs")
        paths = [tls["ca-file"], *tls[ROLES[pod.component]].values()]
        assert {str(PurePosixPath(p).parent) for p in paths} == {mount["mountPath"]}
        assert {PurePosixPath(p).name for p in paths} == {"ca.crt", "tls.crt", "tls.key"}, "cert-manager's names"


def test_certificates_come_from_one_authority_and_suit_their_roles() -> None:
    manifests = build(OVERLAY)
    issuers = {m["metadata"]["name"]: m["spec"] for m in of_kind(manifests, "Issuer").values()}
    certificates = {name: m["spec"] for name, m in of_kind(manifests, "Certificate").items()}
    authority = certificates.pop("ca")
    assert authority["isCA"] is True
    assert "selfSigned" in issuers[authority["issuerRef"]["name"]]
    for role, certificate in certificates.items():
        assert issuers[certificate["issuerRef"]["name"]] == {"ca": {"secretName": authority["secretName"]}}
        listens = role != "client"  # scheduler and workers call each other too
        assert ("server auth" in certificate["usages"], "client auth" in certificate["usages"]) == (listens, True)
        assert _hours(certificate["renewBefore"]) < _hours(certificate["duration"]) <= _hours(authority["renewBefore"])
    assert certificates.keys() == set(ROLES.values())


def _hours(duration: str) -> int:
    return int(duration.removesuffix("h"))


def test_the_gpu_s_worker_is_encrypted_too(tmp_path: Path) -> None:
    """The components together, as the README tells it."""
    k8s = DEPLOY / "k8s"
    base, gpu, tls = (os.path.relpath(k8s / part, tmp_path) for part in ("base", "components/gpu", "components/tls"))
    own = {"kind": "Kustomization", "resources": [base], "components": [gpu, tls]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
    (pod,) = (pod for pod in pods(build(tmp_path)) if pod.component == "gpu-worker")
    assert [v["secret"]["secretName"] for v in pod.spec["volumes"] if "secret" in v] == ["worker-tls"]
