"""The scheduler's address, checked before anything starts: one that cannot be an address is not worth waiting for.

Connect to the scheduler a job names, or start a local cluster of processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import socket
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from ipaddress import IPv6Address
from multiprocessing import process, resource_tracker
from typing import Any

import dask
from distributed import Client, Nanny, Scheduler, Security, SpecCluster
from distributed.comm.addressing import get_address_host_port, normalize_address, parse_address
from distributed.comm.registry import Backend, backends, get_backend
from distributed.utils import LoopRunner
from tornado.ioloop import IOLoop

from daskcnn.arrays import cpu_count
from daskcnn.cluster.link.calls import Check, Unanswered, answer_to, no_check
from daskcnn.cluster.link.client import bound_to, made_with, quiet_lost_connections
from daskcnn.cluster.link.kept_open import kept_open
from daskcnn.cluster.link.lease_table import named_by
from daskcnn.cluster.link.members import Patience, Say
from daskcnn.cluster.link.signals import HEEDED
from daskcnn.errors import ClusterError, DataError, similar
from daskcnn.files import read_regular
from daskcnn.job.cluster_table import Cluster
from daskcnn.temporary import OwnFolder

PRINTED = "copy the address that `dask scheduler` prints, such as tcp://192.168.1.5:8786"


class _Fault(Exception):
    """The reason why an address is none, and the remedy."""


def check_address(address: str, source: str = "") -> None:
    """Raise ClusterError for an address that no scheduler can have: its protocol, host or port is wrong.

    The protocol has to be one that Dask has here, by itself or by a package. Nothing is connected.
    source: the file that the address is in, if any, in words.
    """
    scheme, location = parse_address(address)
    try:
        _check(_backend(scheme), address, location)
    except _Fault as fault:
        reason, remedy = fault.args
        if source:
            raise ClusterError(source, f"{address!r:.200} is not an address ({reason})", remedy) from None
        raise ClusterError(f"scheduler {address:.200}", f"not an address ({reason})", remedy) from None


def _backend(scheme: str) -> Backend:
    """Return Dask's implementation of a protocol."""
    if scheme.lower() in ("http", "https"):
        raise _Fault(f"{scheme}:// is the dashboard's", f"the scheduler's begins with tcp:// or tls://; {PRINTED}")
    try:
        backend = get_backend(scheme)
        backend.get_connector()  # Dask lists ucx without the package that it needs
    except ValueError:
        known = sorted({*backends, *entry_points(group="distributed.comm.backends").names} - {"ucx"})
        hint = similar(scheme.lower(), known)
        raise _Fault(f"Dask has no protocol {scheme!r:.60} here, but {', '.join(known)}{hint}", PRINTED) from None
    except Exception as error:  # whatever a package needs and lacks
        if scheme == "ucx":
            remedy = "install distributed-ucxx-cu12 or -cu13 on every machine, or write tcp://"
            raise _Fault("ucx is not installed here", remedy) from error
        remedy = "install what it needs, or write tcp://"
        raise _Fault(f"the protocol {scheme!r} cannot be used here: {error}", remedy) from error
    return backend


def _check(backend: Backend, address: str, location: str) -> None:
    """Raise the fault of a location that is not HOST:PORT."""
    try:
        host, port = backend.get_address_host_port(location)
    except NotImplementedError:  # of this process (inproc), or of a package that has a form of its own
        return
    except ValueError:
        raise _misformed(address, location) from None
    if not host:
        raise _Fault("it has no host", PRINTED)
    try:
        asked_for = host.encode("idna")  # of the system
        possible = _is_ipv6(host) if ":" in host else not re.search(rb"[\s/?#@\[\]\0]", asked_for)
    except UnicodeError:
        possible = False
    if not possible:
        raise _Fault(f"{host!r:.60} is no host's name or number", PRINTED)
    if not 1 <= port <= 65535:
        raise _Fault(f"port {port!s:.20} is not within 1 to 65535", PRINTED)


def _misformed(address: str, location: str) -> _Fault:
    """Return the fault of a location that Dask cannot take apart."""
    host, _, port = location.rpartition(":")
    if re.search("[/?#]", location):
        return _Fault("it has a path", f"leave out what follows the port; {PRINTED}")
    if _is_ipv6(location) or _is_ipv6(host):
        return _Fault("an IPv6 address needs brackets", "write it as in tcp://[::1]:8786")
    if location.count("[") != location.count("]"):
        return _Fault("its brackets do not match", "write an IPv6 address as in tcp://[::1]:8786")
    if re.fullmatch(r"[^\[\]:]+|\[[^\[\]]+\]", location):
        return _Fault("it has no port", f"add the scheduler's, by default 8786: {address:.200}:8786")
    if not port:
        return _Fault("it has no port", PRINTED)
    return _Fault("it is not HOST:PORT" if port.isdecimal() else f"its port {port!r:.60} is not a number", PRINTED)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


TRY = 2.0  # seconds of one attempt to connect
ANSWER = 10.0  # seconds until a scheduler that listens has let a client in
SILENT = "it listens and does not answer"
_MOST_BYTES = 1 << 20  # of a scheduler's file, which lists its workers


@contextlib.contextmanager
def connect(
    settings: Cluster, check: Check = no_check, say: Say = lambda _: None, *, server: bool = True
) -> Iterator[Client]:
    """Give a client of the job's cluster; close it on leaving, and stop a local cluster.

    Raises ClusterError where there is no scheduler at the address within `settings.wait` seconds; at once where waiting
    would not help: for a wrong address, and for refused certificates.

    Parameters
    ----------
    check, say : see `Patience`
    server : start a process for the parameter server in a local cluster
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
    """Raise ClusterError if the scheduler's address, or that in its file, cannot be one. Connects to nothing."""
    if settings.scheduler:
        check_address(settings.scheduler)
    elif settings.scheduler_file:
        with contextlib.suppress(_NotYet):
            _address_in(settings.scheduler_file)


def await_scheduler(settings: Cluster, check: Check = no_check, say: Say = lambda _: None) -> None:
    """Wait until something listens at the scheduler's address; return at once for a local cluster.

    Use it before work that needs the scheduler. Raises ClusterError as `connect`.
    """
    if not (settings.scheduler or settings.scheduler_file):
        return
    patience = Patience(settings.wait, check, say)
    where = _address_of(settings, patience)
    while (reason := _unheard(where)) is not None:
        patience.check()
        if patience.over:
            raise _unreachable(where, f"{reason} for {patience.seconds:g} s")
        patience.wait_for(f"scheduler {where} ({reason})")


class _Client(Client):  # type: ignore[misc] # Dask has no types
    """A client that connects or is closed within limited time. `check` is called meanwhile, and may raise.

    Dask waits without a limit for the first message of what listens at the address. It leaves a client that did not
    connect to the garbage collector, which waits 4 s for an ended event loop and prints a traceback.
    """

    def __init__(self, address: str, check: Check) -> None:
        self._check = check
        # a client that cannot connect would stay the default, and later computations would wait for it
        super().__init__(address, timeout=TRY, set_as_default=False)

    def start(self, **kwargs: Any) -> None:
        """Connect. Raises errors of Dask, of `check` and of a signal's handler, and Unanswered."""
        try:
            self._loop_runner.start()
            answer_to(self, self._start(**kwargs), within=ANSWER, check=self._check)
        except BaseException as error:
            with contextlib.suppress(TimeoutError):
                self.close(timeout=TRY)
            self.status = "closed"  # in any case: the garbage collector reads it
            with contextlib.suppress(TimeoutError):
                self._loop_runner.stop(timeout=TRY)  # `close` does so only where Dask has not closed it before
            if isinstance(error, Unanswered):
                raise Unanswered(SILENT) from None
            raise

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # Dask closes it, also where a signal came while it was made
            super().__del__()


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
                raise _unreachable(where, reason if hopeless else f"{reason} for {patience.seconds:g} s") from error
            patience.wait_for(f"scheduler {where} ({reason})")
    with client, bound_to(client), kept_open(client):
        yield client


def _unreachable(where: str, reason: str) -> ClusterError:
    otherwise = "correct the address, start one with `dask scheduler`, or give none for a local cluster"
    remedy = next((remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, reason)), otherwise)
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
"""Remedies by a pattern of OpenSSL's or Dask's message. The first match counts."""


def _of_tls(reason: str) -> bool:
    """Return True if one side has refused the other: to try again is of no use."""
    return re.search("(?i)certificate|SSL|X509", reason) is not None and "EOF" not in reason


def _refusal(where: str) -> str | None:
    """Return the reason why a scheduler refuses our certificate; None where it does not, or gives none.

    Dask writes before it reads the reason, and may find the connection closed by then.
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
        pass
    return None


def _unheard(where: str) -> str | None:
    """Return the reason why no connection comes about, which Dask does not tell; None where only Dask can try."""
    try:
        address = normalize_address(where)
        if address.startswith(("tcp://", "tls://", "ws://", "wss://")):
            socket.create_connection(get_address_host_port(address), TRY).close()
    except TimeoutError:
        return "no answer in time"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ValueError:
        pass
    return None


class _NotYet(Exception):
    """A fault of a scheduler's file that may end when the scheduler writes the file."""


def _address_of(settings: Cluster, patience: Patience) -> str:
    """Return the scheduler's address; wait for its file. Raises ClusterError for none in time, or a wrong one."""
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
    """Return the address in a scheduler's file. Raises _NotYet, or ClusterError for a file that cannot become one."""
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
    """Return the innermost cause in a few words: Dask wraps refused connections and bad certificates several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or "no answer in time"


MEMORY = {"MALLOC_ARENA_MAX": "1"}
"""Environment of a worker: one pool of memory for all of its threads.

By default glibc gives each thread pools of 64 MiB and returns empty ones to the system, whatever `keep_freed_memory`
sets: a step's maps would be fresh memory. A nanny's `env` is too late for the C library.
"""
_GUARD = 'if this is a script, put what it does under `if __name__ == "__main__":`'


@contextlib.contextmanager
def _local(settings: Cluster, server: bool) -> Iterator[Client]:
    if getattr(process.current_process(), "_inheriting", False):  # as multiprocessing asks before it starts a process
        raise ClusterError("this script", "it starts workers, and each worker imports it", _GUARD)
    if process.current_process().daemon:
        reason = "this process, of a Dask worker or of a pool, may start no others"
        raise ClusterError("local workers", reason, "give a client, or call it outside of the task or pool")
    least, most = settings.workers.given, settings.workers.most
    wanted = least or {"cpu": cpu_count()}
    if "cpu" in wanted and not settings.adapt:  # of a range as many as there are cores
        wanted["cpu"] = max(wanted["cpu"], min(most.get("cpu", 0), cpu_count()))
    names = [f"{kind}-{i}" for kind, count in wanted.items() for i in range(count)]
    if settings.only and not any(named_by(settings.only, name) for name in names):
        reason = f"no worker of a local cluster has such a name, but {names[0]} to {names[-1]}"
        remedy = "give the scheduler whose workers they are (--scheduler), or leave it out"
        raise ClusterError(f"cluster.only = {', '.join(settings.only)}", reason, remedy)
    with OwnFolder() as scratch, _own_loop() as loop:
        try:
            cluster = SpecCluster(
                loop=loop,
                workers=dict(_local_workers(wanted, scratch, server)),
                worker=_local_worker(next(iter(wanted)), scratch),  # more of them
                scheduler={"cls": _scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}},
                name="daskcnn",
                silence_logs="ERROR",
            )
        except RuntimeError as error:
            raise ClusterError("local workers", f"they did not start ({_reason(error)})", _GUARD) from error
        with cluster, Client(cluster, set_as_default=False) as client, bound_to(client):
            yield client


@contextlib.contextmanager
def _own_loop() -> Iterator[IOLoop]:
    """Give an event loop whose thread and worker processes leave signals to the driver's main thread.

    A worker inherits the mask. Without it Ctrl-C would end a worker that does not yet ignore signals by itself.
    """
    runner = LoopRunner(asynchronous=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        # it has the mask too, but for SIGINT and SIGTERM, which it ignores and lets this thread have again
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield runner.loop
    finally:
        runner.stop()


_LOCAL = {
    # a worker that dies is replaced by the nanny; the job itself must never be sent a second time for it
    "distributed.scheduler.allowed-failures": 0,
    "distributed.admin.tick.limit": "30s",
    # by default every process checks its event loop fifty times a second and its memory ten times, even when idle:
    # on two cores a twentieth of the time
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.memory.monitor-interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    # samples every thread a hundred times a second, and keeps a thousand seconds of samples
    "distributed.worker.profile.enabled": False,
    **{f"distributed.nanny.pre-spawn-environ.{name}": value for name, value in MEMORY.items()},
}
"""Dask's settings of a local cluster. Its servers read them as they are made, and nannies hand them on."""


def _scheduler(**options: Any) -> Scheduler:
    with made_with(_LOCAL):
        return Scheduler(**options)


def _nanny(scheduler: str, **options: Any) -> Nanny:
    with made_with(_LOCAL):
        # a copy of all settings, for its worker: Dask would hand on those that there are when the worker starts
        return Nanny(scheduler, config=dask.config.merge(dask.config.config), **options)


def _local_workers(wanted: dict[str, int], scratch: str, server: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield one single-threaded process for each worker, and one more for the parameter server if there is one."""
    names = [(f"{kind}-{i}", kind) for kind, count in wanted.items() for i in range(count)]
    for name, kind in [*names, ("ps", "ps")] if server else names:
        yield name, _local_worker(kind, scratch)


def _local_worker(kind: str, scratch: str) -> dict[str, object]:
    options: dict[str, object] = {"local_directory": scratch, "host": "127.0.0.1", "dashboard": False, "nthreads": 1}
    options |= {"memory_limit": "auto", "preload": ["daskcnn.cluster.preload"], "silence_logs": logging.ERROR}
    return {"cls": _nanny, "options": {**options, "resources": {kind.upper(): 1}}}
