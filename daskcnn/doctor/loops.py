"""The compiled loops of this machine: whether they are there, and compiling them ahead of the first run."""

from __future__ import annotations

from collections.abc import Callable

from daskcnn.arrays import cpu_count
from daskcnn.doctor.findings import Finding


def compiled_loops() -> Finding:
    """Tell whether they are in the cache. A worker without them compiles them before it is calibrated."""
    from daskcnn.compiled.loop import UNCACHED, cache_path
    from daskcnn.compiled.warm import is_ready

    if UNCACHED:
        remedy = "set DASKCNN_CACHE_DIR to a folder that can be written, or every worker spends a minute on them"
        return Finding("compiled loops", True, f"they cannot be kept in {cache_path()}", remedy)
    if not is_ready("float32"):
        remedy = "the first worker here takes a minute for it; to do it now: daskcnn doctor --warm"
        return Finding("compiled loops", True, "not compiled on this machine yet", remedy)
    return Finding("compiled loops", True, f"ready, in {cache_path()}")


def compile_loops(say: Callable[[str], None]) -> None:
    """Compile them for float32, which most networks have; `say` is told how far it is."""
    from daskcnn.compiled.warm import warm_in_processes

    new = warm_in_processes("float32", lambda done, of: say(f"compiled loop {done} of {of}"), cpu_count())
    say(f"compiled {new} loops anew" if new else "all loops were compiled before")
