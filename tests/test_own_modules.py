"""Modules of users' own: found, kept in the job, refused by name, and never imported for a file of unknown origin."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from click.testing import CliRunner, Result
from distributed.protocol.pickle import dumps, loads

import daskcnn
from daskcnn.arrays import Device
from daskcnn.cli import main
from daskcnn.cluster.link.sent import Sent, call_with_values, try_with_values
from daskcnn.errors import DataError, JobError
from daskcnn.job.own_members import INTERACTIVE
from daskcnn.job.resolve import resolve
from daskcnn.modules import OwnModule, import_modules, import_plugins, own_modules, take_in
from daskcnn.nn import Context, leaves
from daskcnn.nn.layers import LAYERS
from daskcnn.nn.layers.activations import ReLU
from daskcnn.ps import RULES, Push
from daskcnn.ps.sgwu import SGWU
from daskcnn.store import DATASETS
from tests.docs.pages import blocks
from tests.nn.test_nn_layer_laws import numeric_gradient
from tests.own_module import NAME, SOURCE, forgotten, write_module
from tests.tiny_runs import LAYERS as TINY
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run

MODEL = {"layers": [{"layer": "slope"} if layer["layer"] == "relu" else layer for layer in TINY]}
DOCS = Path(__file__).parents[1] / "docs"
TRAIN = {"strategy": "median"}


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    with forgotten():
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which has the module."""
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(*arguments: object) -> Result:
    """What a command answers in a process that has not seen the module."""
    with forgotten():
        return CliRunner().invoke(main, list(map(str, arguments)))


def merged(rule: object) -> list[float]:
    pushes = [Push(0, str(i), 0, 1, 0, np.full(1, float(i)), n_samples=1, accuracy=0.5) for i in (1, 2, 9)]
    found: list[float] = rule.merge(np.zeros(1), {}, pushes, None).center.tolist()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("imports", [[NAME], NAME])
def test_module_in_the_working_folder_is_imported_before_the_jobs_names_are_looked_up(
    here: Path, imports: object
) -> None:
    job = resolve({"train": TRAIN, "run": {"imports": imports}})
    assert (type(job.rule).__name__, job.run.imports) == ("Median", [NAME])


def test_module_beside_the_job_file_is_found_from_any_folder(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f'[train]\nstrategy = "median"\n[data]\npath = "{tiny_data(here)}"\n[run]\nimports = ["{NAME}"]\n'
    (here / "job.toml").write_text(text)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    done = asked("run", here / "job.toml", "--dry-run")
    assert (done.exit_code, done.stderr) == (0, "data: check\n")
    assert "median with idpa" in done.stdout


def test_flag_adds_to_the_modules_of_the_job_file(here: Path) -> None:
    write_module(here, "", "my_other_module")
    (here / "job.toml").write_text(f'[run]\nimports = ["my_other_module"]\n[data]\npath = "{tiny_data(here)}"\n')
    done = asked("run", "job.toml", "--import", NAME, "--strategy", "median", "--dry-run")
    assert json.loads(done.stdout.partition("\n\n")[0])["run"]["imports"] == ["my_other_module", NAME]


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (None, "no_such_module", "there is no such module; start in the folder that has no_such_module.py"),
        ("import no_such_part", NAME, "it imports no_such_part, which is missing; install that, or name it too"),
        ("def", NAME, r"it cannot be imported \(SyntaxError: .*\); mend it"),
        ("raise KeyError(1)", NAME, r"it cannot be imported \(KeyError: 1\); mend it"),
        ("raise SystemExit(3)", NAME, r"it cannot be imported \(SystemExit: 3\); mend it"),
        (None, "my_module.py", "write a module's name as `import` has it, such as my_module for my_module.py"),
        (None, "folder/my_module", "write a module's name"),
    ],
)
def test_module_that_cannot_be_imported_is_refused_by_name_with_the_remedy(
    here: Path, source: str | None, name: str, reason: str
) -> None:
    if source is not None:
        write_module(here, source)
    with pytest.raises(JobError, match=rf"run\.imports = .*'{name}'.*: {reason}"):
        resolve({"run": {"imports": [name]}})
    done = asked("run", "--import", name)
    assert done.exit_code == 2
    assert name in done.stderr
    assert not (here / "runs").exists()
    if "." not in name:
        done = asked("model", "quick", "--import", name)
        assert done.exit_code == 2
        assert f"--import {name}" in done.stderr or f"run.imports = '{name}'" in done.stderr


def test_modules_that_were_imported_in_python_are_kept_in_the_job(here: Path) -> None:
    import_modules([NAME])
    job = resolve({"train": TRAIN | {"partition": "gentle"}, "model": MODEL})
    assert job.run.imports == [NAME]
    assert resolve({}).run.imports is None, "a job that names none of its members does without"


def test_run_with_a_layer_of_ones_own_is_loaded_evaluated_exported_and_gone_on_with(here: Path) -> None:
    data = tiny_data(here)
    raw = tiny_job(data, model=MODEL, train=TRAIN, run={"imports": [NAME]})
    with forgotten():
        run = tiny_run(here, raw, random_state(resolve(raw)))
    with forgotten():
        slope = daskcnn.load(run).weights["slope1"]["slope"]
        assert slope.shape == (4,)
    for command in (
        ["evaluate", run],
        ["export", run, "--to", "safetensors", "--out", here / "model.safetensors"],
        ["run", "--resume", run, "--dry-run"],
        ["run", "--resume", run, "--import", NAME, "--dry-run"],
    ):
        done = asked(*command)
        assert done.exit_code == 0, (command, done.stderr)
    (here / "cluster.toml").write_text('[[worker]]\nname = "a"\nimages_per_second = 100\ncount = 2\n')
    for command in (["simulate", run], ["plan", run, "--add", "cpu=1"]):
        done = asked(*command, "--cluster", here / "cluster.toml")
        assert done.exit_code == 0, (command, done.stderr)


def test_run_whose_module_is_gone_names_it(here: Path) -> None:
    raw = tiny_job(tiny_data(here), model=MODEL, train=TRAIN, run={"imports": [NAME]})
    with forgotten():
        run = tiny_run(here, raw, random_state(resolve(raw)))
    (here / f"{NAME}.py").unlink()
    for command in (["evaluate", run], ["run", "--resume", run]):
        done = asked(*command)
        assert done.exit_code == 2
        assert f"run.imports = '{NAME}': there is no such module; start in the folder that has {NAME}.py" in done.stderr


def test_predictions_of_a_dask_array_pass_a_process_that_lacks_the_module_unread(here: Path) -> None:
    raw = tiny_job(tiny_data(here), model=MODEL, run={"imports": [NAME]})
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    with forgotten():
        model = daskcnn.load(tiny_run(here, raw, random_state(resolve(raw))))
        expected = model.predict(images)
        message = dumps(model.predict(da.from_array(images, chunks=3)))
    (here / f"{NAME}.py").unlink()
    with forgotten():
        lazy = loads(message)
        assert NAME not in sys.modules
        np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), expected, rtol=1e-6)


def test_model_file_imports_nothing_by_itself(here: Path) -> None:
    raw, file = tiny_job(tiny_data(here), model=MODEL, run={"imports": [NAME]}), here / "model.safetensors"
    with forgotten():
        run = tiny_run(here, raw, random_state(resolve(raw)))
        assert asked("export", run, "--to", "safetensors", "--out", file).exit_code == 0
    again = ["export", file, "--to", "safetensors", "--out", here / "again.safetensors"]
    with forgotten():
        refused = asked(*again)
        assert refused.exit_code == 2
        assert "layer 'slope': there is none of this name" in refused.stderr
        assert f"import the module that adds it, if you trust it: --import {NAME}" in refused.stderr
        assert NAME not in sys.modules
    assert asked(*again, "--import", NAME).exit_code == 0
    import_modules([NAME])
    assert daskcnn.load(here / "again.safetensors").weights.keys() >= {"slope1"}


def test_value_of_ones_own_passes_a_process_that_lacks_the_module_unread(here: Path) -> None:
    with forgotten():
        job = resolve({"train": TRAIN, "run": {"imports": [NAME]}})
        message = dumps(Sent(job.rule, [NAME]))
    (here / f"{NAME}.py").unlink()
    with forgotten():
        passed_on = dumps(loads(message))
        assert NAME not in sys.modules, "a scheduler reads tasks, and passes them on"
        rule = loads(passed_on).value
        assert merged(rule) == [2.0]
        assert RULES["median"] is type(rule)
        assert call_with_values(merged, loads(passed_on)) == [2.0]
        assert call_with_values(merged, rule=loads(passed_on)) == [2.0], "options too"


def test_value_that_a_process_has_read_goes_on_with_its_modules(here: Path) -> None:
    """One of Dask's workers hands it to the next."""
    with forgotten():
        message = dumps(Sent(resolve({"train": TRAIN, "run": {"imports": [NAME]}}).rule, [NAME]))
    (here / f"{NAME}.py").unlink()
    with forgotten():
        opened = loads(message)
        assert merged(opened.value) == [2.0]
        handed_on = dumps(opened)
    with forgotten():
        assert merged(loads(handed_on).value) == [2.0]


class ReadSlowly:
    """A value that takes a while to read. `times` counts how often it was read."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_slowly, ()


def _read_slowly() -> ReadSlowly:
    ReadSlowly.times += 1
    time.sleep(0.05)  # long enough for the other thread to come
    return ReadSlowly()


def test_threads_of_a_worker_share_one_value() -> None:
    opened = loads(dumps(Sent(ReadSlowly())))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: opened.value, range(4)))
    assert ReadSlowly.times == 1
    assert len({id(each) for each in found}) == 1


def test_worker_without_an_installed_module_refuses_the_task(here: Path) -> None:
    message = dumps(Sent(1))
    content = dumps(((OwnModule("no_such_package"),), b""))
    message = dumps(loads(message))
    sent = loads(message)
    sent._content = content
    refusal = try_with_values(merged, sent)
    assert "no_such_package" in str(refusal.error)
    assert "install it there, the same version as here" in str(refusal.error)


def test_sources_that_are_sent_replace_those_of_an_earlier_job(here: Path) -> None:
    import_modules([NAME])
    take_in(own_modules([NAME]))
    kept = sys.modules[NAME]
    take_in(own_modules([NAME]))
    assert sys.modules[NAME] is kept, "the same sources are not imported again"
    take_in([OwnModule(NAME, {f"{NAME}.py": SOURCE.replace("np.median", "np.mean").encode()})])
    assert merged(RULES["median"]()) == [4.0]


def test_packages_are_sent_whole_and_installed_modules_by_name_only(here: Path) -> None:
    (here / "my_package" / "inner").mkdir(parents=True)
    for path in ("__init__.py", "inner/__init__.py", "inner/part.py"):
        (here / "my_package" / path).write_text("")
    import_modules(["my_package.inner.part"])
    inner, numpy = own_modules(["my_package.inner.part", "numpy"])
    assert set(inner.files) == {f"my_package/{path}" for path in ("__init__.py", "inner/__init__.py", "inner/part.py")}
    assert numpy == OwnModule("numpy")
    (here / "my_package" / "inner" / "part.py").write_bytes(b"#" * (9 << 20))
    with pytest.raises(DataError, match=r"my_package: more than 8 MiB of sources, .*; install it here and there"):
        own_modules(["my_package"])
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


def test_members_of_a_notebook_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rule = type("Mine", (ReLU,), {}), type("Own", (SGWU,), {"__module__": INTERACTIVE})
    layer.__module__ = INTERACTIVE
    LAYERS["mine"] = layer
    message = dumps(Sent(rule()))
    del LAYERS["mine"]
    value = loads(message).value
    assert type(value).__name__ == "Own"
    assert LAYERS["mine"].__name__ == "Mine"


def test_entry_points_of_installed_packages_are_imported_with_the_first_job(
    here: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(here)
    info = here / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[daskcnn]\nmembers = {NAME}\nbroken = my_broken_plugin\n")
    import_plugins.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "daskcnn"):
            assert type(resolve({"train": TRAIN}).rule).__name__ == "Median"
        assert resolve({"train": TRAIN}).run.imports == [NAME], "its absence on a worker is named"
    finally:
        import_plugins.cache_clear()
    (warning,) = caplog.messages
    assert "plugin my_broken_plugin cannot be imported and is left out" in warning


@pytest.mark.parametrize(("page", "kind"), [("own-code", "slope"), ("architecture", "offset")])
@pytest.mark.parametrize("in_shape", [(3, 2, 4), (5,)], ids=str)
def test_layers_of_the_documentation_have_learnt_parameters_and_right_gradients(
    here: Path, page: str, kind: str, in_shape: tuple[int, ...]
) -> None:
    (block,) = [block for block in blocks(DOCS / f"{page}.md") if f'LAYERS["{kind}"]' in block.text]
    write_module(here, block.text)
    import_modules([NAME])
    layer, rng = LAYERS[kind](), np.random.default_rng(0)
    params, state, _ = layer.init(rng, in_shape)
    assert sum(array.size for _, array in leaves(params)) == layer.numbers(in_shape) > 0
    x, dy = (rng.standard_normal((*in_shape[:-1], 2, in_shape[-1])) for _ in range(2))
    ctx = Context(Device(), training=True)

    def value() -> float:
        return float((layer.forward(params, state, x, ctx)[0] * dy).sum())

    dx, grads = layer.backward(params, layer.forward(params, state, x, ctx)[2], dy, ctx)
    np.testing.assert_allclose(dx, numeric_gradient(value, x), rtol=1e-6, atol=1e-8)
    for (_, found), (_, parameter) in zip(leaves(grads), leaves(params), strict=True):
        np.testing.assert_allclose(found, numeric_gradient(value, parameter), rtol=1e-6, atol=1e-8)


def test_data_set_of_ones_own_is_prepared_by_its_name(here: Path) -> None:
    source = """
from daskcnn.store import DATASETS
from daskcnn.store.datasets.synthetic import Synthetic

class Mine(Synthetic):
    pass

DATASETS["mine"] = Mine()
"""
    write_module(here, source)
    try:
        assert asked("data", "prepare", "mine", "--import", NAME, "--out", here / "mine.zarr").exit_code == 0
    finally:
        DATASETS.pop("mine", None)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model": {"layers": [{"layer": "slope"}]}}, "did you mean 'scale'? One of your own needs its module in"),
        ({"train": {"strategy": "mine"}}, "; one of your own needs its module in run.imports (--import)"),
    ],
)
def test_the_error_about_an_unknown_name_says_how_to_bring_ones_own(table: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=re.escape(words)):
        resolve(table)
