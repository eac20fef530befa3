"""Connect to the scheduler a job names, or start a local cluster of processes."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing import process, resource_tracker
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, Security, SpecCluster
from distributed.comm.addressing import get_address_host_port, normalize_address
from distributed.utils import LoopRunner
from tornado.ioloop import IOLoop

from daskcnn.arrays import cpu_count
from daskcnn.cluster.link.address import check_address
from daskcnn.cluster.link.calls import Unanswered, answer_to
from daskcnn.cluster.link.client import quiet_lost_connections
from daskcnn.cluster.link.members import Patience
from daskcnn.errors import ClusterError, DataError
from daskcnn.files import read_regular
from daskcnn.job.tables import Cluster

TRY = 2.0  # seconds of one attempt to connect
ANSWER = 10.0  # seconds until a scheduler that listens has let a client in
SILENT = "it listens and does not answer"
_MOST_BYTES = 1 << 20  # of a scheduler's file, which lists its workers


@contextlib.contextmanager
def connect(
    settings: Cluster,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
    *,
    server: bool = True,
) -> Iterator[Client]:
    """A client of the job's cluster; closed (and a local cluster stopped) on leaving.

    `check` is called now and then while it waits, and may raise; `say` is told what it waits for. `server` says whether
    a local cluster has a process for the parameter server.
    Raises ClusterError where there is no scheduler at the address within `settings.wait` seconds, and at once where
    waiting would not help: an address that is none, certificates that are refused.
    """
    quiet_lost_connections()
    if settings.scheduler or settings.scheduler_file:
        with _remote(settings, Patience(settings.wait, check, say)) as client:
            yield client
    else:
        with _local(settings, server) as client:
            if find_spec("bokeh"):
                say(f"dashboard: {client.dashboard_link}")
            yield client


def check_scheduler(settings: Cluster) -> None:
    """Raise ClusterError where the scheduler's address cannot be one, or that in its file where there is such a file.

    It is for the time before anything is written. Nothing is connected or waited for.
    """
    if settings.scheduler:
        check_address(settings.scheduler)
    elif settings.scheduler_file:
        with contextlib.suppress(_NotYet):
            _address_in(settings.scheduler_file)


def await_scheduler(
    settings: Cluster, check: Callable[[], None] = lambda: None, say: Callable[[str], None] = lambda _: None
) -> None:
    """Wait until something listens at the scheduler's address; return at once where the cluster is a local one.

    It is for work that is worth doing only then. Raises ClusterError as `connect`.
    """
    if not (settings.scheduler or settings.scheduler_file):
        return
    patience = Patience(settings.wait, check, say)
    where = _address_of(settings, patience)
    while (reason := _unheard(where)) is not None:
        patience.check()
        if patience.over:
            raise _unreachable(where, f"{reason}, {patience.seconds:g} s long")
        patience.wait_for(f"scheduler {where} ({reason})")


class _Client(Client):  # type: ignore[misc] # Dask has no types
    """A client that connects or is closed, in limited time. `check` is called meanwhile, and may raise.

    Dask itself leaves a client that did not connect to the garbage collector. At the end of the process that waits 4 s
    for an event loop that ended before, and prints a traceback. Dask waits without a limit for the first word of what
    listens at the address.
    """

    def __init__(self, address: str, check: Callable[[], None]) -> None:
        self._check = check
        # one that cannot connect would stay the default, and all that is computed later would wait for it
        super().__init__(address, timeout=TRY, set_as_default=False)

    def start(self, **kwargs: Any) -> None:
        """Connect. Raises what Dask does, Unanswered, and what `check` or a signal's handler raises."""
        try:
            self._loop_runner.start()
            answer_to(self, self._start(**kwargs), within=ANSWER, check=self._check)
        except BaseException as error:
            self._give_up()
            if isinstance(error, Unanswered):
                raise Unanswered(SILENT) from None
            raise

    def _give_up(self) -> None:
        """Close what has been opened, and end the event loop."""
        with contextlib.suppress(TimeoutError):
            self.close(timeout=TRY)
        self.status = "closed"  # in any case: the garbage collector looks at it
        with contextlib.suppress(TimeoutError):
            self._loop_runner.stop(timeout=TRY)  # `close` does so only where Dask has not closed it before


@contextlib.contextmanager
def _remote(settings: Cluster, patience: Patience) -> Iterator[Client]:
    where = _address_of(settings, patience)
    while True:
        patience.check()
        try:
            client = _Client(where, patience.check)
            break
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            reason = _refusal(where) or _unheard(where) or _reason(error)
            hopeless = not isinstance(error, OSError) or isinstance(error, FileNotFoundError) or _of_tls(reason)
            if hopeless or patience.over:
                raise _unreachable(where, reason if hopeless else f"{reason}, {patience.seconds:g} s long") from error
            patience.wait_for(f"scheduler {where} ({reason})")
    with client, client.as_current():
        yield client


def _unreachable(where: str, reason: str) -> ClusterError:
    remedy = next(
        (remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, reason)),
        "correct the address, start one with `dask scheduler`, or give none for a local cluster",
    )
    return ClusterError(f"scheduler {where}", f"cannot be reached ({reason})", remedy)


_SETTINGS = "distributed.comm.tls in the file that the environment variable DASK_CONFIG names"
REMEDIES = {
    "(?i)certificate_?.?(has )?expired": "renew that certificate, here or on the scheduler's machine, whichever is old",
    "not yet valid": "set this machine's clock, or wait until the certificate holds",
    "(?i)unknown_?.?ca|self-signed|local issuer|CERTIFICATE_VERIFY_FAILED": (
        f"use certificates of the cluster's own authority (CA): ca-file and client of {_SETTINGS}"
    ),
    "(?i)certificate_required|handshake_failure": f"give a client's certificate: client of {_SETTINGS}",
    "KEY_VALUES_MISMATCH": f"certificate and key do not belong together: correct {_SETTINGS}",
    "ssl_context": f"an address tls:// needs certificates: set {_SETTINGS}",
    "encryption required": "require-encryption is set here: give an address that begins with tls://, or unset it",
    SILENT: "is it a scheduler, and does its process run? Correct the address otherwise",
    "WRONG_VERSION_NUMBER": "the scheduler does not use TLS: start it with certificates, or write tcp://",
    "No such file|Permission denied": f"correct the paths of {_SETTINGS}",
    "in violation of protocol": "is its certificate, or this machine's, of another authority (CA) or expired?",
    "(?i)reset by peer|stream is closed|EOF": (
        "is it a scheduler? If it uses TLS, write tls:// and give certificates; correct the address otherwise"
    ),
}
"""What to do about a reason: of OpenSSL's and Dask's words for it the first that are found."""


def _of_tls(reason: str) -> bool:
    """Whether one side has refused the other: it will not think better of it."""
    return re.search("(?i)certificate|SSL|X509", reason) is not None and "EOF" not in reason


def _refusal(where: str) -> str | None:
    """Why a scheduler refuses our certificate, None where it does not or nobody can tell.

    It says so to who listens. Dask writes first, and may find the connection closed before it has read why.
    """
    try:
        context = Security().get_connection_args("client").get("ssl_context")
        address = normalize_address(where)
        if context is None or not address.startswith("tls"):
            return None
        with (
            socket.create_connection(get_address_host_port(address), TRY) as plain,
            context.wrap_socket(plain, server_hostname=None) as stream,
        ):
            stream.recv(1)
    except OSError as error:
        return _reason(error) if _of_tls(str(error)) else None
    except (ValueError, RuntimeError):
        return None
    return None


def _unheard(where: str) -> str | None:
    """Why no connection comes about; None where one does, or where that cannot be tried without Dask.

    Dask tries again as long as it may, and then says that the time was over.
    """
    try:
        address = normalize_address(where)
        if not address.startswith(("tcp://", "tls://", "ws://", "wss://")):
            return None
        socket.create_connection(get_address_host_port(address), TRY).close()
    except TimeoutError:
        return "no answer in time"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError:
        return None
    return None


class _NotYet(Exception):
    """A fault of a scheduler's file that the scheduler may mend when it writes the file."""


def _address_of(settings: Cluster, patience: Patience) -> str:
    """The scheduler's address, which its file is waited for. Raises ClusterError where none comes, or a wrong one."""
    if settings.scheduler:
        check_address(settings.scheduler)
        return settings.scheduler
    path = str(settings.scheduler_file)
    while True:
        try:
            return _address_in(path)
        except _NotYet as reason:
            if patience.over:
                remedy = f"start `dask scheduler --scheduler-file {path}` on a path that both can see"
                raise ClusterError(f"scheduler file {path}", reason, remedy) from reason
            patience.wait_for(f"scheduler file {path} ({reason})")


def _address_in(path: str) -> str:
    """The address that a scheduler wrote to its file. Raises ClusterError for a file that cannot become one."""
    source = f"scheduler file {path}"
    try:
        address = str(json.loads(read_regular(path, _MOST_BYTES))["address"])
    except FileNotFoundError as error:
        raise _NotYet("there is no such file") from error
    except DataError as error:
        raise ClusterError(source, error.reason, "give the file that the scheduler wrote") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _NotYet(f"it is not a scheduler's file ({type(error).__name__})") from error
    check_address(address, source)
    return address


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words: Dask wraps refused connections and bad certificates several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or "no answer in time"


MEMORY = {"MALLOC_ARENA_MAX": "1"}
"""Environment of a worker: one pool of memory for all of its threads. glibc gives each thread pools of 64 MiB, which go
back to the system whenever they are empty, whatever `keep_freed_memory` says: a step's maps would be fresh memory.

It has to be there before the process starts: what a nanny's `env` says is too late for the C library.
"""


_GUARD = 'if this is a script, put what it does under `if __name__ == "__main__":`'


@contextlib.contextmanager
def _local(settings: Cluster, server: bool) -> Iterator[Client]:
    if getattr(process.current_process(), "_inheriting", False):  # as multiprocessing asks before it starts a process
        raise ClusterError("this script", "it starts workers, and each worker imports it", _GUARD)
    wanted = settings.workers.given or {"cpu": cpu_count()}
    # a worker that dies is replaced by the nanny; the job itself must never be sent a second time for it
    config = {
        "distributed.scheduler.allowed-failures": 0,
        "distributed.admin.tick.limit": "30s",
        # of every process, however idle: fifty looks a second at its event loop, ten at its memory, by default. On two
        # cores that is a twentieth of all there is
        "distributed.admin.tick.interval": "1s",
        "distributed.worker.memory.monitor-interval": "500ms",
        "distributed.admin.system-monitor.interval": "5s",
        # a hundred looks a second at what every thread does, a thousand seconds of which are kept
        "distributed.worker.profile.enabled": False,
        "distributed.nanny.pre-spawn-environ": {**dask.config.get("distributed.nanny.pre-spawn-environ"), **MEMORY},
    }
    with tempfile.TemporaryDirectory(prefix="daskcnn-") as scratch, dask.config.set(config), _own_loop() as loop:
        try:
            cluster = SpecCluster(
                loop=loop,
                workers=dict(_local_workers(wanted, scratch, server)),
                scheduler={"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}},
                name="daskcnn",
                silence_logs="ERROR",
            )
        except RuntimeError as error:
            raise ClusterError("local workers", f"they did not start ({_reason(error)})", _GUARD) from error
        with cluster, Client(cluster) as client:
            yield client


@contextlib.contextmanager
def _own_loop() -> Iterator[IOLoop]:
    """An event loop whose thread, and the workers' processes that it starts, leave signals to the driver's main thread.

    A worker inherits the mask. Before it is set up, when it ignores signals by itself, Ctrl-C would end it.
    """
    runner = LoopRunner(asynchronous=False)
    resource_tracker.ensure_running()  # where it is started with a worker, it lets that worker's thread have signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield runner.loop
    finally:
        runner.stop()


def _local_workers(wanted: dict[str, int], scratch: str, server: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """One single-threaded process a worker, and one more for the parameter server where there is one."""
    names = [(f"{kind}-{i}", kind) for kind, count in wanted.items() for i in range(count)]
    for name, kind in [*names, ("ps", "ps")] if server else names:
        yield (
            name,
            {
                "cls": Nanny,
                "options": {
                    "nthreads": 1,
                    "resources": {kind.upper(): 1},
                    "local_directory": scratch,
                    "host": "127.0.0.1",
                    "dashboard": False,
                    "preload": ["daskcnn.cluster.preload"],
                    "silence_logs": logging.ERROR,
                    "memory_limit": "auto",
                },
            },
        )
