"""The tutorials do what they say: every block runs, and what is shown as output is printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.manifests import DEPLOY, build, of_kind, pods
from tests.docs.pages import Block, blocks, name, told
from tests.docs.tutorials import OUTPUT, TUTORIALS, Reader, missing_line, steps

KUBERNETES = next(page for page in TUTORIALS if page.stem == "kubernetes")
RUNNING = [page for page in TUTORIALS if page is not KUBERNETES]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    if page.stem == "optuna":
        pytest.importorskip("optuna_integration", reason="the group test-optuna is not installed")
    with Reader(tmp_path) as reader:
        for step in steps(page):
            where = f"{name(page)}, block at line {step.block.line}"
            code, printed = reader.run(step.block)
            assert code == 0, f"{where}: exit {code}\n{printed}"
            assert told(step.block) in printed, f"{where}:\n{printed}"
            missing = missing_line(step.shown.text, printed) if step.shown else None
            assert missing is None, f"{where}: not printed: {missing}\n{printed}"


@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_what_does_not_run_says_why(page: Path) -> None:
    """Every block of commands is run by the test above, or the page says why it is not."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for block in blocks(page):
        if block.language in ("sh", "python", "text", "") and not block.marks & {"run", OUTPUT}:
            before = lines[block.line - 2]
            assert re.fullmatch(r"<!-- not run: \S.* -->", before), f"{name(page)}, block at line {block.line}"


@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_output_is_shown_behind_what_prints_it(page: Path) -> None:
    shown = [block for block in blocks(page) if OUTPUT in block.marks]
    assert shown
    assert shown == [step.shown for step in steps(page) if step.shown]
    assert all(block.text.strip() for block in shown)


@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_no_command_waits_for_processes_that_stay(page: Path) -> None:
    """In a reader's terminal `wait` alone waits for scheduler and workers too, for ever."""
    bare = [block.line for block in blocks(page) if re.search(r"^\s*wait\s*(#.*)?$", block.text, re.MULTILINE)]
    assert not [line for line in bare if any("&" in block.text for block in blocks(page) if block.language == "sh")]


def test_commands_run_in_one_terminal(tmp_path: Path) -> None:
    def sh(text: str) -> Block:
        return Block("sh", frozenset(), text, 1)

    with Reader(tmp_path) as reader:
        assert reader.run(sh("name=here\nsleep 60 &\n: & wait $!")) == (0, "")
        assert reader.run(sh("echo $name $(jobs -r | wc -l)")) == (0, "here 1\n")
        assert reader.run(sh("false\necho more")) == (1, "")


def test_lines_are_found_whatever_their_numbers() -> None:
    printed = "epoch 1/3  loss 2.3\nworker cpu-0: 3 s\n  best  0.5 *\nend"
    assert missing_line("epoch 1/3 loss 9.1\n…\n  best  0.7\n", printed) is None
    assert missing_line("worker …\nend", printed) is None
    assert missing_line("end\nepoch 1/3 loss 9.1", printed) == "epoch 1/3 loss 9.1"
    assert missing_line("nothing of it", printed) == "nothing of it"


def test_accuracies_and_traffic_of_a_page_are_about_what_is_printed() -> None:
    printed = "test        accuracy 36.0 %, loss 2.29\ntraffic     149.8 MB up, 149.8 MB down\n"
    assert (
        missing_line("test        accuracy 61.2 %, loss 0.30\ntraffic     140.0 MB up, 150.0 MB down", printed) is None
    )
    for stale in ("test        accuracy 72.0 %, loss 0.30", "traffic     70.1 MB up, 70.1 MB down"):
        assert missing_line(stale, printed) == stale


def test_the_kustomization_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(KUBERNETES) if block.language == "yaml")
    own = block.text.replace("../daskcnn/deploy/", f"{os.path.relpath(DEPLOY, tmp_path.resolve())}/")
    assert own != block.text
    (tmp_path / "kustomization.yaml").write_text(own)
    manifests = build(tmp_path)
    assert of_kind(manifests, "ConfigMap")["run"]["data"]["WORKERS"] == "cpu=6"
    assert of_kind(manifests, "Deployment")["cpu-worker"]["spec"]["replicas"] == 6
    images = {c["image"] for pod in pods(manifests) for c in pod.containers}
    assert images == {"example/daskcnn-cpu:0.1.0"}


def test_the_tutorial_names_what_the_manifests_have() -> None:
    text = KUBERNETES.read_text(encoding="utf-8")
    manifests = build("k8s/overlays/kind")
    jobs = of_kind(manifests, "Job")
    components = {pod.component for pod in pods(manifests)}
    assert set(re.findall(r"job/([\w-]+)", text)) <= set(jobs)
    assert set(re.findall(r"app\.kubernetes\.io/component=([\w-]+)", text)) <= components
    claims = yaml.safe_load((DEPLOY / "k8s/claims.yaml").read_text())
    assert claims["metadata"]["name"] == "claims"
    run = of_kind(manifests, "ConfigMap")["run"]["data"]["RUN"]
    assert f"/runs/{run}" in text
