"""Hosts of our own: network namespaces, joined by a bridge, each behind a link of its own speed (`tc qdisc … tbf`).

Needs root, `ip` and `tc`. Names begin with `dk` and the number of the process that made them, so that what a broken run
has left behind is known, and removed by the next one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from shutil import which
from typing import IO, Any

from distributed import Client

FRAMING = 1448 / 1514
"""Of what a link carries, what is TCP's payload: packets of 1,500 bytes, Ethernet's head before them."""
BURST = 0.004
"""Seconds of its rate that a link may be ahead; more would be a gift to every message after a pause."""
LEAST_BURST = 32_768
QUEUED = 131_072
"""Bytes that a connection may have waiting for its link: a card's driver would not take more, a token bucket takes all,
and TCP, which has seen no such delay before, would send them again.
"""
PATIENCE = 15.0
"""Seconds for a process to end by itself."""
OURS = re.compile(r"dk(\d+)(-\d+|o\d+)?")


@dataclass(frozen=True)
class Host:
    """A namespace and its address."""

    space: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The same command, in there."""
        return ["ip", "netns", "exec", self.space, *command]


@dataclass
class Network:
    """A bridge, this machine at its address .1, and hosts on it. scratch: a folder that ends with it."""

    bridge: str
    subnet: str
    scratch: Path
    stack: ExitStack
    _numbers: Any = field(default_factory=lambda: count(10))

    @property
    def gateway(self) -> str:
        return f"{self.subnet}.1"

    def host(self, rate: float | None = None) -> Host:
        """Another host; rate: bytes a second of its link each way, headers included, None for no limit."""
        number = next(self._numbers)
        host = Host(f"{self.bridge}-{number}", f"{self.subnet}.{number}")
        outer = f"{self.bridge}o{number}"
        run("ip", "netns", "add", host.space)
        self.stack.callback(_remove_space, host.space)
        run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", host.space)
        self.stack.callback(_remove_link, outer)  # what connections have still to send keeps a removed namespace alive
        run("ip", "link", "set", outer, "master", self.bridge, "up")
        run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
        run(*host.command("ip", "link", "set", "eth0", "up"))
        run(*host.command("ip", "link", "set", "lo", "up"))
        run(*host.command("sh", "-c", f"echo {QUEUED} > /proc/sys/net/ipv4/tcp_limit_output_bytes"))
        self.limit(host, rate)
        return host

    def cut(self, host: Host) -> None:
        """Drop every packet of the host, both ways. Its connections are not told."""
        run("ip", "link", "set", self._outer(host), "nomaster")

    def mend(self, host: Host) -> None:
        """Undo `cut`."""
        run("ip", "link", "set", self._outer(host), "master", self.bridge)

    def _outer(self, host: Host) -> str:
        return f"{self.bridge}o{host.address.rpartition('.')[2]}"

    def limit(self, host: Host, rate: float | None) -> None:
        """Give its link this speed from now on."""
        for there, device in (((), self._outer(host)), (host.command(), "eth0")):
            with suppress(subprocess.CalledProcessError):  # there is no limit yet
                run(*there, "tc", "qdisc", "del", "dev", device, "root")
            if rate is not None:
                run(*there, "tc", "qdisc", "add", "dev", device, *_bucket(rate))

    def start(self, host: Host | None, *command: str) -> subprocess.Popen[bytes]:
        """A process on a host, or at the bridge; it is ended with the network. Its output goes to a file of scratch."""
        whole = host.command(*command) if host else list(command)
        process = subprocess.Popen(whole, stdout=self._log(), stderr=subprocess.STDOUT)
        self.stack.callback(_end, process)
        return process

    def talk(self, host: Host, *command: str) -> subprocess.Popen[str]:
        """The same with lines going in and coming out; only what it complains of goes to a file."""
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log(), "text": True}
        process = self.stack.enter_context(subprocess.Popen(host.command(*command), **pipes))
        self.stack.callback(_end, process)
        return process

    def _log(self) -> IO[bytes]:
        return self.stack.enter_context((self.scratch / f"log-{next(self._numbers)}").open("wb"))

    def scheduler(self, host: Host | None = None, port: int = 8799) -> str:
        """Start Dask's; its address."""
        address = host.address if host else self.gateway
        self.start(host, *DASK, "scheduler", "--host", address, "--port", str(port), "--no-dashboard")
        return f"tcp://{address}:{port}"

    def worker(self, host: Host, scheduler: str, name: str, resource: str = "CPU") -> None:
        """Start one of Dask's workers, as a user would by hand."""
        options = ["--nthreads", "1", "--resources", f"{resource}=1", "--name", name, "--no-dashboard", "--no-nanny"]
        where = ["--host", host.address, "--local-directory", str(self.scratch)]
        self.start(host, *DASK, "worker", scheduler, *options, *where)

    def logs(self) -> str:
        """The ends of what its processes have said."""
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in sorted(self.scratch.glob("log-*")))


DASK = (sys.executable, "-m", "dask")


def _bucket(rate: float) -> tuple[str, ...]:
    """`tc` calls bytes a second bps."""
    burst = max(LEAST_BURST, round(BURST * rate))
    return ("root", "tbf", "rate", f"{round(rate)}bps", "burst", str(burst), "latency", "400ms")


@contextmanager
def network() -> Iterator[Network]:
    """A bridge for hosts. All of it is gone afterwards, after a signal too, and what broken runs have left."""
    if os.geteuid() != 0 or not (which("ip") and which("tc")):
        raise SystemExit("network namespaces need root, and the commands ip and tc (package iproute2)")
    remove_leftovers()
    with ExitStack() as stack:
        stack.enter_context(signals_end_it())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="netns-")))
        bridge, subnet = f"dk{os.getpid()}", f"10.77.{os.getpid() % 250 + 1}"
        try:
            run("ip", "link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"network namespaces are not allowed here: {error.stderr.decode().strip()}") from None
        stack.callback(run, "ip", "link", "del", bridge)
        run("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        yield Network(bridge, subnet, scratch, stack)


@contextmanager
def linked_cluster(workers: int, rate: float) -> Iterator[Client]:
    """Give workers of one thread in namespaces of their own, behind links of this rate each.

    Scheduler and this process are at the bridge; the server has a link like a worker's.
    """
    with network() as net:
        scheduler = net.scheduler()
        for i in range(workers):
            net.worker(net.host(rate), scheduler, f"cpu-{i}")
        net.worker(net.host(rate), scheduler, "ps-0", "PS")
        with Client(scheduler, timeout=60) as client:
            client.wait_for_workers(workers + 1, timeout=60)
            yield client


@contextmanager
def signals_end_it() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end it by an exception, so that everything is cleaned up on the way out."""

    def ended(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    before = {each: signal.signal(each, ended) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def remove_leftovers() -> None:
    """Namespaces, their processes, and links of runs that are no longer there."""
    for name in leftovers(output("ip", "netns", "list").splitlines()):
        _remove_space(name)
    for name in leftovers(os.listdir("/sys/class/net")):
        _remove_link(name)


def leftovers(lines: Sequence[str]) -> list[str]:
    """The names at the beginning of these lines that a run of ours has given which has ended."""
    names = [line.split()[0] for line in lines if line.strip()]
    found = [(name, OURS.fullmatch(name)) for name in names]
    return [name for name, match in found if match and not Path(f"/proc/{match[1]}").exists()]


def _remove_space(name: str) -> None:
    """A namespace and whatever still runs in it."""
    for pid in output("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    run("ip", "netns", "del", name)


def _remove_link(name: str) -> None:
    """A link that is there; a veth goes with its other end."""
    with suppress(subprocess.CalledProcessError):
        run("ip", "link", "del", name)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
