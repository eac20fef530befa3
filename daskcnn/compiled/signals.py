"""Calls from thread to thread without the interpreter: numbers in memory, which one thread adds to and others watch.

A thread that watches keeps its core, unless another needs it: one that was woken on the same core would not begin. A
thread that sleeps takes 60 µs to wake on a virtual machine: small tasks take less.
"""

from __future__ import annotations

from daskcnn.compiled.loop import add_shared, inner_as_written, int64, intp, loop, read_shared, rest, wait_for_turn


@inner_as_written
def _watched(number: int, seen: int, turns: int) -> bool:
    for turn in range(turns):
        if read_shared(number) != seen:
            return True
        rest(turn)
    return False


@loop(lambda T: (intp, int64, int64))
def watch(number: int, seen: int, turns: int) -> bool:
    """Watch the number at an address for this number of turns. Return True if it is another than the one seen."""
    return _watched(number, seen, turns)


@loop(lambda T: (intp, intp, int64, int64))
def end_and_watch(mine: int, number: int, seen: int, turns: int) -> bool:
    """Add 1 to my number, for those who wait for me. Then `watch` the other one."""
    add_shared(mine, 1)
    return _watched(number, seen, turns)


@loop(lambda T: (intp, int64))
def call(number: int, turns: int) -> None:
    """Add 1 to the number. Then leave the interpreter to a thread that watches it, which takes a moment to come."""
    add_shared(number, 1)
    wait_for_turn(turns)
