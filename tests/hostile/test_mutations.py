"""A run or a store with one wrong value, and right checksums, is refused in words, or works: it is no bug of ours."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import load as decode
from safetensors.numpy import save as encode

from daskcnn.cli import main
from daskcnn.errors import ClusterError, UserError
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.launch import training as runner
from daskcnn.launch.prepared_job import prepare_job
from daskcnn.launch.resume import check_same_data
from daskcnn.nn.score import Score
from daskcnn.partition import PARTITIONERS
from daskcnn.partition.rounds import Rounds
from daskcnn.runs.checkpoint import Checkpoint, latest
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.runs.state import check_of, to_state
from daskcnn.store import open_dataset, verify
from daskcnn.trained.evaluate import evaluate
from daskcnn.trained.predict import predict
from tests.hostile.hostile_files import canonical
from tests.hostile.mutations import Document, mutations
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with a picture beside it; whoever starts a cluster is told that there is none."""
    monkeypatch.chdir(tmp_path)

    def connect(*_: Any, **__: Any) -> None:
        raise ClusterError("no cluster here")

    monkeypatch.setattr(runner, "connect", connect)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("x.png")
    raw = tiny_job(tiny_data(tmp_path))
    return tiny_run(tmp_path, raw, random_state(resolve(raw), validation=Score(12.5, 11, 20)), status="done")


Mutated: TypeAlias = Callable[[Document], Iterator[tuple[str, Document]]]
FEW = 4
"""Each place is tried with one wrong value in this many; `make test-all` tries all of them."""


@pytest.fixture(params=[pytest.param(FEW, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)])
def mutated(request: pytest.FixtureRequest) -> Mutated:
    """The documents that a test tries, each with a name."""
    return partial(mutations, one_in=request.param)


def quiet(_: str) -> None:
    return None


def unforeseen(tries: Iterator[tuple[str, Callable[[], object]]]) -> list[str]:
    """The tries that end in anything but success or an error that a user can mend."""
    found = []
    for name, run in tries:
        try:
            run()
        except UserError as error:
            if not (error.remedy or "\n" in str(error)) or "\x1b" in str(error):
                found.append(f"{name}: {error}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def checkpoint_of(run: Path) -> Path:
    (found,) = (run / "checkpoints").iterdir()
    return found


def signed(document: Document) -> str:
    body = {key: value for key, value in document.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest})


def last_of(run: Path) -> tuple[Job, Checkpoint]:
    """The run's job and its last checkpoint."""
    directory = RunDirectory.open(run)
    job = kept_job(directory)
    found = latest(directory.checkpoints, warn=quiet, check=check_of(job))
    assert found is not None
    return job, found


def resumed(run: Path) -> None:
    """What a driver does with a checkpoint before the cluster comes in."""
    job, checkpoint = last_of(run)
    prepared = prepare_job(job, progress=lambda *_: None, warn=quiet)
    check_same_data(checkpoint, prepared)
    state = to_state(checkpoint, job)
    if not state.book:
        return
    rounds = Rounds(
        PARTITIONERS["idpa"](), prepared.samples, {"w0": 0.1, "w2": 0.1}, epochs=2, barrier=True, passes=4, swaps=False
    )
    rounds.restore(state.book["rounds"], ("w0", "w2"))
    assert math.isfinite(float(state.book.get("best", 0)))
    assert int(state.book.get("worse", 0)) >= 0
    assert int(state.book.get("server_epoch", 0)) >= 0


def test_a_checkpoint_with_one_wrong_value(run: Path, mutated: Mutated) -> None:
    file = checkpoint_of(run) / "state.json"
    resumed(run)

    def tries() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, document in mutated(json.loads(file.read_text())):
            file.write_text(signed(document))
            yield f"predict {name}", lambda: predict(str(run), ["x.png"], checkpoint="last", top=3, say=quiet)
            yield f"resume {name}", lambda: resumed(run)

    assert "\n".join(unforeseen(tries())) == ""


def test_means_of_another_number_than_the_channels_are_refused(run: Path) -> None:
    file = checkpoint_of(run) / "state.json"
    document = json.loads(file.read_text())
    for mean in ([1.0], [1.0, 2.0], [1.0] * 6):
        document["state"]["images"]["mean"] = mean
        file.write_text(signed(document))
        with pytest.raises(UserError, match=f"{len(mean)} channel means for 3 channels"):
            predict(str(run), ["x.png"], checkpoint="last", top=3, say=quiet)


def test_a_checkpoint_with_one_wrong_array(run: Path) -> None:
    folder = checkpoint_of(run)
    document = json.loads((folder / "state.json").read_text())
    arrays = decode((folder / "arrays.safetensors").read_bytes())

    def changed() -> Iterator[tuple[str, dict[str, Any]]]:
        for name, array in arrays.items():
            yield f"without {name}", {n: a for n, a in arrays.items() if n != name}
            for other in (array[:-1], array[None], array.astype(np.int64), array.astype(np.float64), array * np.nan):
                yield f"{name} as {other.dtype}{other.shape}", arrays | {name: np.ascontiguousarray(other)}
        for name in ("more", "rule:squares", "velocity:", "\x1b[2J"):
            yield f"with {name!r}", arrays | {name: np.zeros(3, np.float32)}
        yield "none", {}

    def tries() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, found in changed():
            data = encode(found)
            (folder / "arrays.safetensors").write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            (folder / "state.json").write_text(signed(document | {"arrays": {"bytes": len(data), "sha256": digest}}))
            yield f"predict {name}", lambda: predict(str(run), ["x.png"], checkpoint="last", top=3, say=quiet)
            yield f"resume {name}", lambda: resumed(run)

    assert "\n".join(unforeseen(tries())) == ""


def test_a_header_of_arrays_with_one_wrong_value(run: Path, mutated: Mutated) -> None:
    folder = checkpoint_of(run)
    document = json.loads((folder / "state.json").read_text())
    data = (folder / "arrays.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    few = {name: header[name] for name in list(header)[:2]}

    def tries() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, found in mutated(few):
            text = json.dumps({**header, **found}).encode()
            content = len(text).to_bytes(8, "little") + text + data[8 + length :]
            (folder / "arrays.safetensors").write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            (folder / "state.json").write_text(signed(document | {"arrays": {"bytes": len(content), "sha256": digest}}))
            yield name, lambda: last_of(run)

    assert "\n".join(unforeseen(tries())) == ""


def test_a_job_with_one_wrong_value(run: Path, mutated: Mutated) -> None:
    file = run / "job.json"

    def tries() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, document in mutated(json.loads(file.read_text())):
            file.write_text(json.dumps(document))
            yield f"predict {name}", lambda: predict(str(run), ["x.png"], checkpoint="last", top=3, say=quiet)

    assert "\n".join(unforeseen(tries())) == ""


def test_a_summary_with_one_wrong_value(run: Path, mutated: Mutated) -> None:
    file = run / "summary.json"
    codes = {}
    for name, document in mutated(json.loads(file.read_text())):
        file.write_text(json.dumps(document))
        result = CliRunner().invoke(main, ["run", "--resume", str(run)])
        codes[name] = result.exit_code
        assert "\x1b" not in result.output
    assert {name: code for name, code in codes.items() if code not in (0, 2, 3)} == {}
    assert {0, 2} <= set(codes.values())


def test_a_store_with_one_wrong_value(run: Path, tmp_path: Path, mutated: Mutated) -> None:
    path = tmp_path / "synthetic.zarr"
    file = path / "zarr.json"
    group = json.loads(file.read_text())

    def tries() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, manifest in mutated(group["attributes"]["daskcnn"]["manifest"]):
            attributes = {"daskcnn": {"manifest": manifest, "sha256": hashlib.sha256(canonical(manifest)).hexdigest()}}
            file.write_text(json.dumps(group | {"attributes": attributes}))
            yield name, lambda: verify(open_dataset(str(path)))
        for name, other in mutated(group):
            file.write_text(json.dumps(other))
            yield name, lambda: verify(open_dataset(str(path)))

    assert "\n".join(unforeseen(tries())) == ""


@pytest.mark.parametrize("array", ["train/images", "test/labels"])
def test_an_array_with_one_wrong_value(run: Path, tmp_path: Path, array: str, mutated: Mutated) -> None:
    path = tmp_path / "synthetic.zarr"
    file = path / array / "zarr.json"

    def tries() -> Iterator[tuple[str, Callable[[], object]]]:
        for name, document in mutated(json.loads(file.read_text())):
            file.write_text(json.dumps(document))
            yield name, lambda: verify(open_dataset(str(path)))

    assert "\n".join(unforeseen(tries())) == ""


def test_a_network_far_too_wide_is_refused_by_each_command(run: Path) -> None:
    bound, machine = "numbers of at most", "more than this machine has; choose a smaller network"
    for units, by_command, by_job in ((2_000_000_000, "the job's network has", machine), (10**30, bound, bound)):
        file = run / "job.json"
        job = json.loads(file.read_text())
        job["model"]["layers"] = [{"layer": "dense", "units": units}, {"layer": "dense", "units": 10}]
        file.write_text(json.dumps(job))
        with pytest.raises(UserError, match=by_command):
            predict(str(run), ["x.png"], checkpoint="last", top=3, say=quiet)
        with pytest.raises(UserError, match=by_command):
            evaluate(str(run), checkpoint="last", path=None, say=quiet)
        with pytest.raises(UserError, match=by_job):
            prepare_job(resolve(job), progress=lambda *_: None, warn=quiet)
