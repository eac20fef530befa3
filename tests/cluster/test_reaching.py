"""A scheduler that nobody runs: the job says so in the system's own words, before it writes anything."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from daskcnn.cluster.connect import await_scheduler
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Cluster
from daskcnn.run import main as run


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine that is taken, and that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("form", ["tcp://127.0.0.1:{}", "127.0.0.1:{}", "tls://127.0.0.1:{}"])
def test_a_refused_connection_is_called_so(port: int, form: str) -> None:
    settings = Cluster(scheduler=form.format(port), wait=0)
    with pytest.raises(ClusterError, match=r"cannot be reached \(connection refused, 0 s long\)"):
        await_scheduler(settings)


def test_a_name_that_is_none_is_called_so() -> None:
    with pytest.raises(ClusterError, match=r"cannot be reached \(.*(name|resolution)"):
        await_scheduler(Cluster(scheduler="tcp://no-such-host.invalid:8786", wait=0))


def test_whoever_listens_will_do_for_a_start(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        file.write_text(json.dumps({"address": address}))
        await_scheduler(Cluster(scheduler=address, wait=0))
        await_scheduler(Cluster(scheduler_file=str(file), wait=0))
    await_scheduler(Cluster())


def test_what_is_waited_for_is_said_and_may_come() -> None:
    said: list[str] = []
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))

        def say(message: str) -> None:
            said.append(message)
            server.listen()

        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        await_scheduler(Cluster(scheduler=address, wait=60), say=say)
    (line,) = said
    assert line.startswith(f"waiting for scheduler {address} (connection refused)")


def test_no_data_set_is_written_for_a_cluster_that_is_not_there(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(run, ["--dataset", "synthetic", "--scheduler", f"localhost:{port}", "--wait", "0"])
    assert done.exit_code == 3, done.output
    assert "connection refused" in done.stderr
    assert "no answer in time" not in done.stderr
    assert list(tmp_path.iterdir()) == []
