"""A pod that ends leaves behind what was trained, and one that does nothing ends at once."""

from __future__ import annotations

import time
from typing import Any

import psutil
import yaml

from tests.deploy.manifests import DEPLOY, Pod, build, command_line, environment, pods
from tests.first_process import first_process, terminate


def beside_the_base(name: str) -> Pod:
    """The pod of a file that is applied by itself."""
    (pod,) = pods(list(yaml.safe_load_all((DEPLOY / "k8s" / f"{name}.yaml").read_text(encoding="utf-8"))))
    return pod


def mounted(pod: Pod) -> dict[str, dict[str, Any]]:
    """The volumes of a pod's only container by path."""
    volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in pod.spec["containers"][0]["volumeMounts"]}


def test_a_network_without_room_among_the_runs_outlives_its_pod() -> None:
    """Exit 6: nothing is copied out of a pod that has ended. The pod `claims` has the folder that the log names."""
    base = build("k8s/base")
    drivers = [pod for name in ("k8s/base", "operator") for pod in pods(build(name)) if pod.component == "train"]
    drivers.append(beside_the_base("serve"))
    claims = mounted(beside_the_base("claims"))
    assert len(drivers) == 3
    for pod in drivers:
        place = environment(pod.spec["containers"][0], base, "10.1.2.3", "pod-1")["TMPDIR"]
        rescued = mounted(pod)[place]["persistentVolumeClaim"]
        assert rescued == claims[place]["persistentVolumeClaim"], pod.name
        assert rescued != mounted(pod)["/runs"]["persistentVolumeClaim"], "a disk of its own"
        assert not rescued.get("readOnly")


def test_commands_in_the_pod_of_claims_keep_what_they_compile() -> None:
    """`kubectl exec claims -- daskcnn evaluate`, or `doctor --warm`: the root file system cannot be written."""
    pod = beside_the_base("claims")
    folder = environment(pod.spec["containers"][0], [], "10.1.2.3", "pod-1")["DASKCNN_CACHE_DIR"]
    assert "emptyDir" in mounted(pod)[folder.removesuffix("/daskcnn")]


def test_the_pod_of_claims_ends_as_soon_as_it_is_asked_to() -> None:
    """It holds the claims until then: others that are ReadWriteOnce wait for it."""
    (container,) = beside_the_base("claims").spec["containers"]
    with first_process(*command_line(container)) as started:
        outside = psutil.Process(started.pid)
        while "sleep" not in [inside.name() for inside in outside.children(recursive=True)]:  # behind the handler
            assert started.poll() is None
            time.sleep(0.01)  # nothing tells when a process has begun
        terminate(started)
        started.wait(10)
