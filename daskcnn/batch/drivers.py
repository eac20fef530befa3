"""Drivers of jobs: a process of each, in a session of its own, that outlives the service and is found again by a lock.

A driver inherits the lock of a file in the job's folder, which the service takes before it starts one. The system frees
it when the driver's last process has ended. So a job has one driver at most, whatever is killed at whatever moment.

A shell keeps the driver's exit code: the service may be gone when it ends, or another than the one that started it.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from daskcnn.errors import DataError
from daskcnn.files import open_regular, read_regular, replace_file

KEEPER = """
trap : HUP INT TERM
folder=$1
shift
"$@" &
driver=$!
echo $driver >"$folder/driver"
while :; do
    wait $driver
    code=$?
    kill -0 $driver 2>/dev/null || break
done
printf '%-4d' $code 1<>"$folder/exit"
"""
"""Waits for a driver; writes its number, and its exit code to space that the file has already, for a full disk."""
OUTPUT, LOCK, PROCESS, EXIT, WORKERS = "output.log", "lock", "driver", "exit", "workers"
SUBMITTED, JOB = "submitted", "job.toml"
"""Folder of the job's file and its modules, which a driver finds beside it. They may have names as the files above."""
DRIVER = (sys.executable, "-m", "daskcnn.run")
RESUME = ("--resume", "auto")
_TAIL, _WORDS = 16 << 10, 500
_MOST = 1 << 20  # bytes of a list of workers
_SECRET = re.compile(r"(://)[^/@\s]+@|\b((?:password|passwd|token|secret|key)=)[^&\s]+", re.IGNORECASE)


class Drivers:
    """Starts the drivers of a spool's jobs, and looks after them.

    command : of a driver, in front of the job's file. place : the folder that drivers work in.
    """

    def __init__(self, spool: Path, command: Sequence[str] = DRIVER, place: Path | None = None) -> None:
        self._jobs, self._command, self._place = spool / "jobs", tuple(command), place or Path.cwd()
        self._children: list[int] = []  # that this process has to wait for

    def folder(self, number: int) -> Path:
        """Return the folder of a job."""
        return self._jobs / str(number)

    @contextmanager
    def lock(self, number: int) -> Iterator[int]:
        """Give the lock that a driver of the job is started with. Raises BlockingIOError if the job has a driver."""
        self.folder(number).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder(number) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield descriptor
        finally:
            os.close(descriptor)

    def prepare(self, number: int, tables: Mapping[str, Any], modules: Sequence[tuple[str, str]]) -> None:
        """Write what a driver reads: the job, and the sources of its modules. Raises OSError for a full disk."""
        folder = self.folder(number)
        (folder / PROCESS).unlink(missing_ok=True)
        (folder / EXIT).write_bytes(b" " * 4)
        submitted = folder / SUBMITTED
        submitted.mkdir(exist_ok=True)
        (submitted / JOB).write_text(tomli_w.dumps(tables), encoding="utf-8")
        for path, source in modules:
            (submitted / path).parent.mkdir(parents=True, exist_ok=True)
            (submitted / path).write_text(source, encoding="utf-8")

    def list_of(self, number: int) -> Path:
        """Return the file of the workers that the job's driver may have."""
        return self.folder(number) / WORKERS

    def allow(self, number: int, workers: Iterable[str] | None) -> None:
        """Say which workers the job's driver may have: it gives up others. None: its workers cannot change.

        Raises OSError for a full disk.
        """
        if workers is None:
            self.list_of(number).unlink(missing_ok=True)
        else:
            replace_file(self.list_of(number), "".join(f"{name}\n" for name in workers).encode())

    def allowed(self, number: int) -> tuple[str, ...] | None:
        """Return the workers that the job's driver may have; None for one whose workers cannot change."""
        try:
            return tuple(read_regular(self.list_of(number), _MOST).decode().split("\n")[:-1])
        except (OSError, DataError):
            return None

    def start(self, number: int, lock: int) -> None:
        """Start a driver, which inherits the lock. Raises OSError if the system has no room for it."""
        self._reap()
        folder = self.folder(number)
        own = {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(self._search_path(folder / SUBMITTED))}
        with open(folder / OUTPUT, "ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", KEEPER, "daskcnn-keeper", folder, *self._command, folder / SUBMITTED / JOB, *RESUME],
                cwd=self._place,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[lock],
                start_new_session=True,
            )
        child.returncode = 0  # it outlives this object; `_reap` waits for it
        self._children.append(child.pid)

    def _search_path(self, submitted: Path) -> Iterator[str]:
        """Yield the folders that a driver looks for modules in: those that were sent before any of the same name."""
        yield str(submitted)
        if not sys.flags.safe_path:  # as `python -m` has it first
            yield str(self._place)
        yield from filter(None, [os.environ.get("PYTHONPATH")])

    def lives(self, number: int) -> bool:
        """Return True if the job has a driver."""
        self._reap()
        try:
            with self.lock(number):
                return False
        except BlockingIOError:
            return True

    def _reap(self) -> None:
        """Let the system forget those that have ended."""
        ended = {child for child in self._children if os.waitpid(child, os.WNOHANG)[0] == child}
        self._children = [child for child in self._children if child not in ended]

    def process(self, number: int) -> int | None:
        """Return the process of the job's driver; None if none was started, or it is about to be."""
        return _number_in(self.folder(number) / PROCESS)

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of the job's last driver; None if there is none, as after a crash of the machine."""
        return _number_in(self.folder(number) / EXIT)

    def tell_to_end(self, number: int) -> bool:
        """Send the job's driver SIGTERM. Returns False if its process is not known yet."""
        process = self.process(number)
        if process is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        return True

    def output(self, number: int, offset: int, most: int) -> tuple[str, int]:
        """Return what the job's drivers have printed from an offset on, without secrets, and the offset behind it.

        Only whole lines are returned, if there are any.
        """
        try:
            with open_regular(self.folder(number) / OUTPUT) as file:
                file.seek(offset)
                found = file.read(most)
        except OSError:
            return "", offset
        found = found[: found.rfind(b"\n") + 1] or found
        return without_secrets(found.decode(errors="replace")), offset + len(found)

    def last_words(self, number: int) -> str:
        """Return the error that the job's last driver has printed, in one line; empty if it has printed nothing."""
        path = self.folder(number) / OUTPUT
        with suppress(OSError, DataError):
            text, _ = self.output(number, max(0, path.stat().st_size - _TAIL), _TAIL)
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            errors = [i for i, line in enumerate(lines) if "error:" in line]
            return "; ".join(lines[errors[-1] if errors else -1 :])[:_WORDS].removeprefix("error: ")
        return ""


def without_secrets(text: str) -> str:
    """Return a text without the passwords of addresses in it, and without values of keys that name secrets."""
    return _SECRET.sub(lambda found: f"{found[1]}…@" if found[1] else f"{found[2]}…", text)


def _number_in(path: Path) -> int | None:
    try:
        return int(read_regular(path, 64))
    except (OSError, DataError, ValueError):
        return None


def boot() -> str:
    """Return a mark of this machine's last start, or of the container's."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
