"""Benchmarks, studies and the network lab: they import, say how to use them, and decide by the right figures."""

from __future__ import annotations

import ast
import json
import math
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.nn import Context, Sequential
from daskcnn.nn.layers.activations import ReLU
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.vector import leaves, map_leaves
from daskcnn.store import open_dataset
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.stopwatch import Stopwatch
from tests.toy_data import toy_dataset

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))
STUDIES = FOLDER / "studies"
SCRIPTS = [file for file in FILES if "__main__" in file.read_text("utf-8")]


def name(file: Path) -> str:
    """The module, as `python -m` takes it."""
    return ".".join(file.relative_to(FOLDER.parent).with_suffix("").parts)


@pytest.mark.parametrize("file", FILES, ids=name)
def test_a_benchmark_imports_names_that_exist(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    missing = [
        f"{node.module}.{alias.name}"
        for node in imports
        if node.module is not None and node.module.partition(".")[0] == "daskcnn"
        for alias in node.names
        if not hasattr(import_module(node.module), alias.name) and not _is_module(node.module, alias.name)
    ]
    assert not missing


@pytest.mark.parametrize("file", [file for file in FILES if STUDIES not in file.parents], ids=name)
def test_no_benchmark_imports_a_study(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in imports if f"{node.module}.".startswith("benchmarks.studies.")]


@pytest.mark.parametrize("file", SCRIPTS, ids=name)
def test_a_script_says_how_to_use_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "SystemExit(NO_TORCH)" in file.read_text("utf-8") and find_spec("torch") is None:
        with pytest.raises(SystemExit, match="PyTorch, which is missing: pip install"):
            import_module(name(file))
        return
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(name(file)).main()
    assert not ended.value.code
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("file", sorted((STUDIES / "results" / "figures").glob("*.svg")), ids=lambda file: file.stem)
def test_a_figure_that_is_kept_has_marks(file: Path) -> None:
    """Lines and bars are clipped by the axes, as the grid is, which is gray."""
    clipped = re.findall(r'clip-path="url\([^)]*\)"(?: style="([^"]*)")?', file.read_text("utf-8"))
    assert [style for style in clipped if "#b0b0b0" not in style]


@pytest.mark.parametrize(
    ("figure", "label"),
    [
        ("layer-measured", "thesis, fig. 5.1"),  # batches of 64, where fig. 6 has 1,024
        ("layer-speedup-cpus", "Marques et al. fig. 11 and 12, which are of unequal devices"),
        ("layer-speedup-gpus", "Marques et al. fig. 11 and 12, which are of unequal devices"),
        ("layer-unequal-cpus-high-end", "Marques et al. fig. 11 b, where batches have 1,024"),
        ("layer-elapsed-unequal-gpus-500-1500-now", "Marques et al. fig. 10, where batches have 1,024"),
        ("layer-roofline", "thesis fig. 5.17 and 5.18, which are of GPUs"),
        ("simulated-layer-speedup-cpu", "Marques et al. fig. 11 to 13, which are of unequal devices"),
    ],
)
def test_a_figure_claims_no_more_of_a_paper_than_it_shows(figure: str, label: str) -> None:
    assert f">(as {label})</text>" in (STUDIES / "results" / "figures" / f"{figure}.svg").read_text("utf-8")


def test_the_networks_of_a_figure_are_named() -> None:
    figure = (STUDIES / "results" / "figures" / "simulated-time-by-networks.svg").read_text("utf-8")
    assert [f"case{number}" for number in range(1, 8) if f">case{number}</text>" not in figure] == []


def _is_module(package: str, name: str) -> bool:
    try:
        import_module(f"{package}.{name}")
    except ImportError:
        return False
    return True


@pytest.fixture
def sooner() -> Any:
    return import_module("benchmarks.sooner")


def run_of(sooner: Any, side: str, lr: float, seed: int, at: float | None) -> dict[str, Any]:
    """A kept run that is right in six of ten at this time and at the end; None: that diverged."""
    place = sooner.Place(1 if side == "alone" else 2)
    run = sooner.asdict(sooner.Run("quick", side, place, 64, lr, seed, 4))
    return {"run": run} | ({"diverged": ""} if at is None else {"looks": [[at, 1, 1, 0.6, None]], "seconds": at})


def test_each_side_is_taken_at_its_own_best_rate_by_the_median_of_its_seeds(sooner: Any) -> None:
    found = {
        ("alone", 0.01): (20, 22, 90),
        ("alone", 0.02): (10, 30, None),
        ("bsp", 0.02): (11, 12, None),
        ("bsp", 0.04): (5,),
    }
    kept = [run_of(sooner, side, lr, seed, at) for (side, lr), times in found.items() for seed, at in enumerate(times)]
    medians = {run.side: (run, best) for run, best in sooner.best(sooner.by_setting(kept, [0.6])).items()}
    alone, bsp = medians["alone"][1], medians["bsp"][1]
    assert (alone.lr, alone.to) == (0.01, (22,)), "0.02 takes 30 s"
    assert (bsp.to, bsp.seeds) == ((12,), 3), "nothing is decided by one seed"
    assert [(missed, "0.55" in told) for told, missed in sooner.verdict(dict(medians.values()))] == [(False, True)]


def test_a_side_of_which_most_seeds_do_not_get_there_never_does(sooner: Any) -> None:
    kept = [run_of(sooner, "bsp", 0.01, seed, at) for seed, at in enumerate((10, None, None))]
    (best,) = sooner.best(sooner.by_setting(kept, [0.6])).values()
    assert math.isinf(best.to[0])
    assert sooner.seconds_of(best.to[0]) == "never"


def test_the_fastest_worker_alone_makes_no_exchange_within_a_round(sooner: Any) -> None:
    job: Job = resolve(sooner.Run("quick", "alone", sooner.Place(), 64, 0.01, 0, 4).job("unread"))
    assert Settings.of(job, samples=48_000).may_be_alone
    assert job.cluster.workers.cpu == 1
    assert (job.train.increments, job.train.batch_size) == (1, 64), "a round is an epoch"


def test_a_pipeline_of_equal_layers_fills_and_empties_as_gpipe_does() -> None:
    pipeline: Any = import_module("benchmarks.studies.pipeline")
    layer, workers, micro = pipeline.Layer(1.0, 2.0, 0), 4, 8
    stages = [[layer]] * workers
    assert pipeline.step_seconds([[layer] * workers], micro, math.inf) == pytest.approx(3.0 * workers)
    assert pipeline.step_seconds(stages, micro, math.inf) == pytest.approx(3.0 * (micro + workers - 1) / micro)
    over_a_link = [[pipeline.Layer(1.0, 2.0, 1000)]] * 2
    assert pipeline.step_seconds(over_a_link, 1, 1000.0) == pytest.approx(2 * (3.0 + 1.0 + pipeline.MESSAGE))


@pytest.mark.parametrize(("dealt", "classes"), [(False, 3), (True, 10)])
def test_bins_sort_what_is_sorted_unless_they_are_dealt_out(dealt: bool, classes: int) -> None:
    shuffle: Any = import_module("benchmarks.studies.shuffle_bins")
    machines, samples = 4, 2000
    parts = [shuffle.sorted_part(i, machines, samples) for i in range(machines)]
    drawn = [shuffle.sample(part, i) for i, part in enumerate(parts)]
    ends = shuffle.cuts(drawn, machines * shuffle.BINS if dealt else machines)
    cut = [shuffle.pieces(part, ends, machines, i, dealt=dealt) for i, part in enumerate(parts)]
    held = [shuffle.received([own[i] for own in cut], i) for i in range(machines)]
    found = shuffle.spread_of(held, samples)  # raises where an image is missing or there twice
    least, most = found["classes"]
    assert (least == most == classes) if dealt else most <= classes + 1
    assert (found["largest_difference"] < 0.02) is dealt


def test_a_rate_is_the_best_once_its_double_and_its_half_are_worse() -> None:
    study: Any = import_module("benchmarks.studies.theano_mpi")
    errors = {0.00125: 0.6, 0.0025: 0.5, 0.005: 0.45, 0.01: None}
    results: dict[str, Any] = {"parts": {}}
    made = []
    for run in study.wanted(results, ["table"]):
        kept = {} if (error := errors[run.lr]) is None else {"top1": [error], "top5": [0.1], "seconds": 1.0}
        assert run.name not in results["parts"] or run.seed == 0
        made += [run.lr] * (run.name not in results["parts"] and run.setting == study.Setting(1, 32))
        results["parts"].setdefault(run.name, {"run": study.asdict(run), **kept})
    assert made == [0.0025, 0.00125, 0.005, 0.01, 0.005, 0.005], "two more seeds at the best rate"
    half = study.Setting(8, 8, "float16")
    assert [study.Run.of(kept).lr for kept in study.kept_of(results, half)] == [0.005] * study.SEEDS


@pytest.fixture
def tuned() -> Any:
    return import_module("benchmarks.studies.rules_simulated")


def learnt(tuned: Any, run: Any, at: float, accuracy: float) -> dict[str, dict[str, Any]]:
    """The kept run that is at chance at half this time, comes to this accuracy at this time, and stays there."""
    looks = [[at / 2, 0.5, 0.5, 0.1, 0.5], [at, 1.0, 1.0, accuracy, 0.5], [2 * at, 2.0, 2.0, accuracy, 0.5]]
    return {run.name: {"run": tuned.asdict(run), "looks": looks, "seconds": 2 * at}}


@pytest.mark.parametrize(
    ("accuracies", "rates"),
    [
        ([0.2, 0.3, 0.4, 0.3], []),  # the best lies between two others
        ([0.2, 0.3, 0.4, 0.5], [0.32]),
        ([0.5, 0.4, 0.3, 0.2], [0.001]),
        ([0.1, 0.15, 0.1, 0.1], [0.001]),  # by chance: none of them learns
        ([0.1, 0.2, 0.3, 0.4, 0.3], []),
    ],
)
def test_the_search_goes_on_until_the_best_rate_has_a_worse_one_on_both_sides(
    tuned: Any, accuracies: list[float], rates: list[float]
) -> None:
    setting = list(tuned.settings("rules"))[-1]
    first = tuned.missing([setting], {}, seeds=3)
    assert [(run.lr, run.seed) for run in first] == [(rate, 0) for rate in (0.0032, 0.01, 0.032, 0.1)]
    runs = [tuned._at(setting, halves) for halves in range(-5, -5 + len(accuracies))]
    parts: dict[str, Any] = {}
    for run, accuracy in zip(runs, accuracies, strict=True):
        parts |= learnt(tuned, run, 1.0, accuracy)
    best = runs[accuracies.index(max(accuracies))]
    expected = [(rate, 0) for rate in rates] or [(best.lr, 1), (best.lr, 2)]
    assert [(run.lr, run.seed) for run in tuned.missing([setting], parts, seeds=3)] == expected


def test_a_claim_counts_where_it_holds(tuned: Any) -> None:
    alone = next(tuned.settings("rules"))
    parts = learnt(tuned, tuned._at(alone, -4), 3.0, 0.42)
    for place, fastest in ((tuned.Place(4, 3.0, 1.25e8), 0), (tuned.Place(8, 3.0, 1.25e8), 2)):
        for i, side in enumerate(tuned.PAPERS):
            run = tuned._at(tuned.replace(alone, side=side, place=place), -4)
            parts |= learnt(tuned, run, 1.0 if i == fastest else 5.0, 0.42)
    sentence, table = tuned.claim(parts)
    assert sentence.startswith(
        "`agwu` with `idpa` is the fastest of the four in 2 of 4 comparisons: 4, 1 : 3, 1 Gb/s to 30%"
    )
    assert sentence.endswith("The fastest worker alone is sooner than all four in 0.")
    assert "| 40% | **1.0** | 4.8 | 4.8 | 4.8 | 2.9 |" in table


def test_an_accuracy_that_the_first_look_has_was_reached_at_any_time_before_it() -> None:
    runs: Any = import_module("benchmarks.runs")
    fast, slow = ({"looks": [[at, 1.0, 1.0, 0.5], [2 * at, 2.0, 2.0, 0.4], [3 * at, 3.0, 3.0, 0.6]]} for at in (2, 10))
    assert runs.reached(fast, 0.45) == 2
    assert runs.reached(fast, 0.55) == pytest.approx(5.5), "from the look before, which had 0.4"
    assert (runs.told_time([fast], 0.45), runs.told_time([fast], 0.55)) == ("≤ 2.0", "5.5")
    assert runs.told_time([fast, slow, {"diverged": "yes"}], 0.45) == "≤ 10.0"
    assert runs.told_time([fast, {"diverged": "yes"}, {"looks": []}], 0.55, never="–") == "–"


def test_the_bar_of_rules_is_a_ratio_within_each_seed() -> None:
    """Medians of both sides would be 30 / 50: the bar is missed all the same."""
    study: Any = import_module("benchmarks.studies.rules")
    parts = {}
    for strategy, partition, seconds in (("agwu", "idpa", (30.0, 35.0, 28.0)), ("sgwu", "udpa", (45.0, 50.0, 57.0))):
        for seed, at in enumerate(seconds):
            looks = [[at - 1, 1.0, 1.0, 0.5, 0.9], [at, 2.0, 2.0, 0.6, 0.9]]
            parts[study.Part(strategy, partition, seed).name] = {"looks": looks}
    assert [*study.verdict({"parts": parts})] == [
        "agwu idpa: 30 s to 60%, median of 3 seeds",
        "sgwu udpa: 50 s to 60%, median of 3 seeds",
        "agwu idpa / sgwu udpa by seed: 0.49, 0.67, 0.70; median 0.67 (bar 0.6)",
    ]


def test_predictions_go_by_the_fastest_link_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    netns: Any = import_module("benchmarks.network.cluster_netns")
    model = SimpleNamespace(step=lambda: SimpleNamespace(seconds=1.0, up=(1.0,)), plan=SimpleNamespace(task_count=1))
    monkeypatch.setattr(netns, "simulated", lambda *_: model)
    row = {"least": 1.0, "most": 1.0, "up": {"a": 1}, "link": {"a": 1}}
    rows = {"5 MB/s": {"step": 4.0, **row}, "1 Gb/s": {"step": 1.5, **row}}
    netns.compare(None, "x", {"rows": rows, "calibration": {}})
    assert [rows[link]["predicted"] for link in rows] == [1.5, 1.5], "0.5 more than simulated, over 1 Gb/s"


@pytest.mark.parametrize("page", [page for page in STUDIES.glob("*.md") if page.stem != "README"], ids=lambda p: p.stem)
def test_the_page_of_a_study_is_made_from_its_results(page: Path) -> None:
    study: Any = import_module(f"benchmarks.studies.{page.stem}")
    assert page.read_text("utf-8") == study.page(json.loads(study.RESULTS.read_text("utf-8")))


@pytest.mark.parametrize("file", [file for file in SCRIPTS if file.parent == STUDIES], ids=lambda f: f.stem)
def test_a_study_has_a_page_or_its_tables_stand_on_the_page_of_all(file: Path) -> None:
    study: Any = import_module(f"benchmarks.studies.{file.stem}")
    tables = study.tables() if hasattr(study, "tables") else ()
    page = (STUDIES / "README.md").read_text("utf-8")
    assert [table for table in tables if table not in page] == []
    assert tables or file.with_suffix(".md").exists()


def test_each_sample_is_held_out_in_one_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study: Any = import_module("benchmarks.studies.folds")
    monkeypatch.setattr(study, "SAMPLES", 50)
    images, _ = toy_dataset(tmp_path, train=60).train.read(0, 50)
    study.write_folds(str(tmp_path / "toy.zarr"), str(tmp_path))
    folds = [open_dataset(str(tmp_path / f"{fold}.zarr")).train.read(0, 50)[0] for fold in range(study.FOLDS)]
    held = 50 // study.FOLDS
    np.testing.assert_array_equal(np.concatenate([fold[-held:] for fold in folds]), images)
    for fold in folds:
        assert sorted(map(bytes, fold)) == sorted(map(bytes, images))


def test_a_study_goes_on_from_a_file_of_this_machine_alone(tmp_path: Path) -> None:
    runs: Any = import_module("benchmarks.runs")
    assert runs.kept_in(tmp_path / "none.json", {"cores": 2}) == {"machine": {"cores": 2}}
    runs.save(tmp_path / "kept.json", {"machine": {"cores": 2}, "measured": {"a": 1}})
    assert runs.kept_in(tmp_path / "kept.json", {"cores": 2, "memory": 1})["measured"] == {"a": 1}
    with pytest.raises(SystemExit, match="another machine"):
        runs.kept_in(tmp_path / "kept.json", {"cores": 4})


def test_every_evaluation_of_the_tuned_rules_has_an_auc(tuned: Any) -> None:
    kept = tuned.load(tuned.RESULTS)
    assert all(look[4] is not None for found in kept["parts"].values() for look in found.get("looks", ()))


@pytest.mark.parametrize("back", [False, True], ids=["forth", "both ways"])
def test_a_star_computes_what_its_master_would_alone(back: bool) -> None:
    star: Any = import_module("benchmarks.star_steps")
    ctx, watch = Context(Device(), training=True), Stopwatch(lambda: 0.0, lambda: None, 1.0, None)
    model = Sequential((("conv1", Conv(4, 3, pad=1)), ("relu", ReLU()), ("conv2", Conv(5, 3))))
    rng = np.random.default_rng(1)
    params = map_leaves(np.float32, model.init(rng, (6, 6, 2))[0])
    x, dy = (rng.standard_normal(shape, dtype=np.float32) for shape in ((6, 6, 3, 2), (4, 4, 3, 5)))
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(2) as slaves, ExitStack() as ends:
        far = [star.Link(socket.create_connection(listening.getsockname())) for _ in range(2)]
        near = [star.Link(listening.accept()[0]) for _ in far]
        for link in (*near, *far):
            ends.callback(link.close)
        # as in processes, each has a device of its own: scratch memory is for one thread
        there = [(link, model, replace(ctx, device=Device()), watch) for link in far]
        working = [slaves.submit(star.convolve, *each) for each in there]
        hub = star.Star(near, {"conv1": (2, 1, 1), "conv2": (1, 3, 1)}, watch, back)
        passes = []
        for network in (model, star.shared_out(model, hub)):
            y, _, residual = network.forward(params, {}, x, ctx)
            dx, grads = network.backward(params, residual, dy, ctx)
            passes.append(dict(leaves({"y": y, "dx": dx, **grads})))
        for link, own in zip(near, working, strict=True):
            link.send(star.OVER)
            own.result(10)
    alone, together = passes
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
