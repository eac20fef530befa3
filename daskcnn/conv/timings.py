"""Times of convolutions: predicted from an algorithm's work, and measured on this machine."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from threadpoolctl import threadpool_info

from daskcnn.arrays import Backend, DeviceKind, cpu_count, device_profile
from daskcnn.conv.spec import ConvAlgorithm, ConvSpec, Work
from daskcnn.documents import first_problem
from daskcnn.errors import DataError
from daskcnn.files import cache_folder, read_regular, replace_file


class Seconds(NamedTuple):
    """Seconds of the directions of one problem; `forward` includes the transform of the kernels."""

    forward: float
    backward: float
    backward_filter: float

    def way_back(self, need_dx: bool) -> float:
        """Return the seconds of the backward pass, with or without the gradient of the input."""
        return self.backward if need_dx else self.backward_filter

    def step(self, need_dx: bool) -> float:
        """Return the seconds of a training step, forward and backward."""
        return self.forward + self.way_back(need_dx)


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of one thread of a device, in float32. gemm_flops: operations of a large GEMM a second.

    half: (m, k, n); a GEMM that is this short along one axis alone has half the rate. memory_threads: this many threads
    together use the memory's whole bandwidth. stage: seconds to start one.
    """

    gemm_flops: float
    bytes_per_second: float
    half: tuple[float, float, float]
    memory_threads: float
    stage: float


CPU = Rates(105e9, 9e9, (8, 6, 16), 4, 20e-6)
"""Fitted on one core of a two-core x86 virtual machine with AVX-512 and OpenBLAS 0.3.31.

GEMM: 137 shapes of 3 to 32,000 numbers a side, root mean square error 20 %. Memory: what the stages of im2col and
spectral that are memory-bound reach, which is less than a copy of large arrays (34e9). For 14 layers the algorithm
predicted as the best was at most 9 % slower than the best measured one. `memory_threads` is a guess.
"""
GPU = Rates(15e12, 500e9, (64, 16, 64), 1, 30e-6)
"""A graphics card of the middle range by its data sheet; never fitted."""
RATES: Mapping[str, Rates] = {"cupy": GPU}
"""Rates by the backend's name; CPU for all others."""


def predict(algorithm: ConvAlgorithm, spec: ConvSpec, rates: Rates, threads: int) -> Seconds:
    """Return the seconds that the algorithm takes at these rates."""
    forward, backward, backward_filter = (
        total_seconds(algorithm.work(spec, direction), rates, threads, spec.itemsize)
        for direction in ("forward", "backward", "backward_filter")
    )
    return Seconds(forward, backward, backward_filter)


def total_seconds(works: Iterable[Work], rates: Rates, threads: int, itemsize: int) -> float:
    """Return the seconds of stages in turn, each the longer of its arithmetic and its traffic (a roofline model)."""
    memory = rates.bytes_per_second * min(threads, rates.memory_threads)
    return sum(
        rates.stage + max(arithmetic_seconds(work, rates, itemsize) / threads, work.bytes / memory) for work in works
    )


def arithmetic_seconds(work: Work, rates: Rates, itemsize: int) -> float:
    """Return one thread's seconds at the GEMM rate, which falls with every short axis and with the numbers' size."""
    seconds = work.flops / rates.gemm_flops * itemsize / 4
    for size, half in zip(work.gemm or (), rates.half, strict=False):
        seconds *= 1 + half / size
    return seconds


FORMAT: Literal[1] = 1
"""Raise it to ignore older files."""
PATIENCE = 5.0
"""Seconds that a writer waits for the lock before it gives up."""
KINDS: Mapping[str, DeviceKind] = {"cupy": "gpu"}
"""Devices of the backends that do not compute on the processor."""

Warn = Callable[[str], None]
_MOST_BYTES = 16 << 20
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_logger = logging.getLogger("daskcnn")


class Entry(BaseModel):
    """One problem: seconds (forward, backward, backward_filter) of the algorithms that were run.

    `versions` names all algorithms that support the problem. If one is added or has a new version, the problem is
    measured again.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    versions: dict[str, int]
    seconds: Mapping[str, tuple[_Positive, _Positive, _Positive]]


class _Kept(BaseModel):
    """The file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    format: Literal[1]
    machine: dict[str, str]
    entries: dict[str, Entry]


def key(spec: ConvSpec, threads: int, workspace_limit: int) -> str:
    """Return an entry's name. Limits (bytes) within a power of two share one: blocks change little between them."""
    s, more = spec, ""
    limit = 1 << max(0, workspace_limit.bit_length() - 1)
    shape = f"N{s.N} H{s.H} W{s.W} C{s.C} K{s.K} R{s.R} S{s.S} stride {s.stride[0]},{s.stride[1]}"
    for name, usual in (("dilation", (1, 1)), ("groups", 1), ("pad_end", (0, 0))):
        if (value := getattr(s, name)) != usual:  # times from before there were such problems keep their names
            more += f" {name} {value}"
    return f"{shape} pad {s.pad[0]},{s.pad[1]}{more} {s.dtype}, {threads} threads, {limit} bytes"


class Memory:
    """The entries of one machine. `warn` is called once for a file that is not as it should be."""

    def __init__(
        self, path: Path, machine: Mapping[str, str], *, warn: Warn = _logger.warning, patience: float = PATIENCE
    ) -> None:
        self.path, self.machine, self._warn, self._patience = path, dict(machine), warn, patience
        self._warned = False
        self.entries: dict[str, Entry] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what other processes have written since."""
        self.entries = {**self.entries, **self._read()}

    def near(self, name: str) -> Mapping[int, Entry]:
        """Return the entries of the problem of this name and of those that differ in the samples alone, by samples."""
        _, rest = name.split(" ", 1)
        alike = (entry.partition(" ") for entry in self.entries)
        return {int(first[1:]): self.entries[f"{first} {other}"] for first, _, other in alike if other == rest}

    def remember(self, entries: Mapping[str, Entry], *, anew: bool = False) -> None:
        """Add these entries, on disk too if possible. What another process kept before counts, unless `anew`."""
        self.entries = {**self.entries, **entries}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=self._patience):
                kept = self._read()
                known = {k: e for k, e in kept.items() if k in entries and e.versions == entries[k].versions}
                self.entries = {**self.entries, **kept, **entries, **({} if anew else known)}
                file = _Kept(format=FORMAT, machine=self.machine, entries=self.entries)
                replace_file(self.path, file.model_dump_json(indent=1).encode())  # the lock's holder alone writes it
        except OSError as error:
            held = f"another process has held its lock for {self._patience:g} s"
            reason = held if isinstance(error, Timeout) else error
            self._warn_once(f"{self.path}: measured times cannot be kept ({reason}); set DASKCNN_CACHE_DIR")

    def _read(self) -> dict[str, Entry]:
        try:
            kept = _Kept.model_validate_json(read_regular(self.path, _MOST_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, DataError, ValidationError) as error:
            found = first_problem(error) if isinstance(error, ValidationError) else error
            reason = found.strerror if isinstance(found, OSError) else found.reason
            self._warn_once(f"{self.path}: ignored, not a file of measured times ({reason}); it is written anew")
            return {}
        if kept.machine != self.machine:
            self._warn_once(f"{self.path}: ignored, measured on another machine; it is written anew")
            return {}
        return kept.entries

    def _warn_once(self, message: str) -> None:
        if not self._warned:
            self._warn(message)
        self._warned = True


def believed() -> bool:
    """Return True if plans follow measurements. With DASKCNN_TUNE=0 the model alone decides, so results repeat."""
    return os.environ.get("DASKCNN_TUNE") != "0"


def machine_of(backend: Backend) -> dict[str, str]:
    """Return the conditions of speed: the device, its cores, and the libraries that compute on it."""
    found = [info for info in threadpool_info() if info["user_api"] == "blas"]
    blas = {f"{i['internal_api']} {i.get('version')} {i.get('architecture', '')}".strip() for i in found}
    return {
        "backend": f"{backend.name} {backend.xp.__version__}",
        "device": device_profile(KINDS.get(backend.name, "cpu"), 1).name,
        "architecture": platform.machine(),
        "cores": str(cpu_count()),
        "blas": ", ".join(sorted(blas)),
    }


@cache
def memory_of(backend: Backend) -> Memory:
    """Return this machine's memory for a backend, read on first use."""
    machine = machine_of(backend)
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return Memory(cache_folder() / f"conv-{FORMAT}-{backend.name}-{digest[:16]}.json", machine)
