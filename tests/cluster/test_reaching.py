"""A scheduler that nobody runs: the job says so in the system's own words, before it writes anything."""

from __future__ import annotations

import copy
import gc
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask
import pytest
from click.testing import CliRunner
from distributed import Client, LocalCluster

from daskcnn.cluster.link import connect as connect_module
from daskcnn.cluster.link.client import given_or_default
from daskcnn.cluster.link.connect import _Client, await_scheduler, connect
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Cluster, Workers
from daskcnn.run import main as run


@pytest.mark.parametrize("form", ["tcp://127.0.0.1:{}", "127.0.0.1:{}", "tls://127.0.0.1:{}"])
def test_a_refused_connection_is_called_so(silent_port: int, form: str) -> None:
    settings = Cluster(scheduler=form.format(silent_port), wait=0)
    with pytest.raises(ClusterError, match=r"cannot be reached \(connection refused for 0 s\)"):
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


def default_of_another_thread() -> Client | None:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(given_or_default, None).result()


def check_two_at_once(settings: list[Cluster]) -> None:
    """Two jobs have clusters, and the first one ends first: no other thread has them, or has other settings."""
    before, default = copy.deepcopy(dask.config.config), default_of_another_thread()
    jobs = [ExitStack(), ExitStack()]
    for own, each in zip(jobs, settings, strict=True):
        client = own.enter_context(connect(each, server=False))
        assert given_or_default(None) is client, "what the job's own thread computes goes there"
        assert default_of_another_thread() is default
        assert dask.config.config == before
    for own in jobs:
        own.close()
    assert dask.config.config == before
    assert default_of_another_thread() is default


def test_two_jobs_at_once_have_a_scheduler_each() -> None:
    how: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "silence_logs": "ERROR"}
    with LocalCluster(n_workers=0, protocol="tcp://", host="127.0.0.1", **how) as cluster:
        check_two_at_once([Cluster(scheduler=cluster.scheduler_address)] * 2)


@pytest.mark.cluster
def test_two_jobs_at_once_start_workers_each() -> None:
    check_two_at_once([Cluster(workers=Workers(cpu=1))] * 2)


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
    silent_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(run, ["--dataset", "synthetic", "--scheduler", f"localhost:{silent_port}", "--wait", "0"])
    assert done.exit_code == 3, done.output
    assert "connection refused" in done.stderr
    assert "no answer in time" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_no_data_set_is_written_for_an_address_that_cannot_be_one(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "scheduler.json"
    file.write_text('{"address": "tcp://[::1"}')
    for given, words in (["--scheduler", "host"], "scheduler host: not"), (["--scheduler-file", file.name], "not an"):
        done = CliRunner().invoke(run, ["--dataset", "synthetic", *given, *options])
        assert done.exit_code == 3, done.output
        assert words in done.stderr
        assert list(tmp_path.iterdir()) == [file]


def refused(address: str, words: str, *, wait: float = 0, say: Callable[[str], None] = lambda _: None) -> None:
    """No client connects, and what began to is closed: no thread stays, and nothing for the garbage collector."""
    before = set(threading.enumerate())
    with pytest.raises(ClusterError, match=words), connect(Cluster(scheduler=address, wait=wait), say=say):
        pass
    gc.collect()  # what a finalizer raises fails the test
    assert set(threading.enumerate()) <= before


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Something that listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_client_is_closed_before_another_try(silent_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect_module, "TRY", 0.1)
    waited: list[str] = []
    refused(f"tcp://127.0.0.1:{silent_port}", "connection refused", wait=0.5, say=waited.append)
    assert waited


def test_a_client_without_certificates_is_closed(silent: socket.socket) -> None:
    refused(f"tls://127.0.0.1:{silent.getsockname()[1]}", "ssl_context")


def test_a_client_that_hears_no_scheduler_is_closed(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask by itself would wait for its first word for ever."""
    monkeypatch.setattr(connect_module, "ANSWER", 0.5)
    words = r"cannot be reached \(it listens and does not answer for 0 s\); is it a scheduler"
    refused(f"tcp://127.0.0.1:{silent.getsockname()[1]}", words)


@pytest.fixture
def python_s_own_handler() -> Iterator[None]:
    """A package that was imported before may have set another one: dask-jobqueue does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_client_that_is_interrupted_while_it_connects_is_closed(
    silent: socket.socket, python_s_own_handler: None
) -> None:
    """Ctrl-C comes once it is connected to something that does not answer."""
    before = set(threading.enumerate())
    address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    with ThreadPoolExecutor(1) as other:

        def interrupt() -> None:
            with silent.accept()[0]:
                os.kill(os.getpid(), signal.SIGINT)

        interrupted = other.submit(interrupt)
        with pytest.raises(KeyboardInterrupt), connect(Cluster(scheduler=address, wait=60)):
            pass
        interrupted.result()
    gc.collect()
    assert set(threading.enumerate()) <= before


def test_a_client_of_which_a_signal_has_left_half_goes_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    half: Any = _Client.__new__(_Client)
    half.__dict__["_Client__loop"] = object()  # what Dask's constructor sets first
    del half
    gc.collect()
    assert not printed


def test_a_wrong_address_in_a_scheduler_s_file_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": "tcp://127.0.0.1:99999"}))
    settings = Cluster(scheduler_file=str(file), wait=3600)
    with pytest.raises(ClusterError, match="is not an address"):
        await_scheduler(settings)
    with pytest.raises(ClusterError, match="is not an address"), connect(settings):
        pass
