"""How many functions a reader follows from the command to the first round, and from a push to the adopted center.

    python -m benchmarks.call_path [--strategies sgwu agwu] [--functions] [--json FILE]

A small job runs by `daskcnn run` on a scheduler, a worker and a server in this process, and a profile function
(`sys.setprofile`, `threading.setprofile`) hears every call. Three counts of distinct functions of this package:

stack
    On the stack at the last moment: where the task of the first round is submitted, where the rule adopts the answer.
way
    What a reader must follow, and what the bar is for. These are the functions that are on a stack when a part of what
    is handed on is made or goes over to the cluster. For the first round: the connection, the members of the run, the
    server's address, the round, the order to start it, what its task is given, and the submission. For a push: the
    gain, the push, every call of the server's actor, where the server takes the push in, the merge, the reply, the
    answer's way back, and the adoption.
entered
    Every function that is entered in between, helpers and checks too: on the driver's thread for the first round, on
    the threads of worker and server for the push.

`way with earlier tasks` adds, for the first round, the stacks where orders and facts are made and tasks submitted
before it: calibration, the start of the server, joining.

A function is a module with a qualified name. A comprehension, a generator expression and a lambda belong to the
function that they stand in; a named inner function, a property and a generator count as one each. What has no text to
read does not count: `__init__` of a dataclass, models' validation by pydantic, bodies of modules and classes.
Exit code 1 where a way is longer than its bar.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import platform
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from distributed import Scheduler, SpecCluster, Worker

import daskcnn
from daskcnn.cli.run import run as command
from daskcnn.store.datasets.synthetic import gratings
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from daskcnn.training.coordinator import facts, orders

BAR = 30
PACKAGE = str(Path(daskcnn.__file__).parent)
WITHIN = re.compile(r"\.<locals>\.<\w+>")
"""Comprehensions, generator expressions and lambdas in a qualified name."""
MADE_OF = ("Members", "ServerAt", "Round", "StartRound")
"""What is handed on to the task of a round; the last that is made of each is that of the first round."""
PUSHED = ("Gain", "Push", "Merge", "Reply")
"""What is handed on from a push to its answer."""
ON_THE_WAY = {name for each in (facts, orders) for name, kind in vars(each).items() if isinstance(kind, type)}
TAKEN_IN, GIVEN_OUT = "Sequencer._on_push", "_Caller.tell"
"""Where the server takes a push in, and gives the answer out: nothing is made there."""
ACTOR_CALL, ACTOR_ANSWER = "Actor.__getattr__.<locals>.func", "ActorFuture.result"

Function = tuple[str, str]
"""Module and qualified name."""
Stack = tuple[Function, ...]
COMMAND: Function = ("cli.run", "run")


class Functions:
    """Finds the function of this package that a code object belongs to."""

    def __init__(self) -> None:
        self._known: dict[CodeType, Function | None] = {}

    def of(self, code: CodeType) -> Function | None:
        """None: it is none of ours, or the body of a module or a class."""
        if code not in self._known:
            self._known[code] = self._find(code)
        return self._known[code]

    @staticmethod
    def _find(code: CodeType) -> Function | None:
        if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return None
        module = Path(code.co_filename).relative_to(PACKAGE).with_suffix("")
        return ".".join(module.parts), WITHIN.sub("", code.co_qualname)

    def stack(self, frame: FrameType | None) -> Stack:
        """Functions of this package that are on the stack, the outermost first; on the driver from the command's on."""
        found: list[Function] = []
        while frame is not None and COMMAND not in found:
            function = self.of(frame.f_code)
            if function is not None and function not in found:
                found.append(function)
            frame = frame.f_back
        return tuple(reversed(found))


@dataclass
class Way:
    """What is counted of one way."""

    stack: Stack = ()
    way: dict[Function, None] = field(default_factory=dict)
    entered: dict[Function, None] = field(default_factory=dict)
    earlier: dict[Function, None] = field(default_factory=dict)

    def add(self, stack: Stack) -> None:
        """These functions are on the way."""
        self.way |= dict.fromkeys(stack)

    def counts(self) -> dict[str, int]:
        """How many distinct functions there are of each kind."""
        found = {"stack": len(self.stack), "way": len(self.way), "entered": len({**self.way, **self.entered})}
        return found | ({"way with earlier tasks": len({**self.way, **self.earlier})} if self.earlier else {})


class Recorder:
    """The profile function of every thread. Hears the first round's submission, then the first push and its answer."""

    def __init__(self) -> None:
        self._functions = Functions()
        self._made: dict[str, Stack] = {}
        self._orders: list[Stack] = []  # made since the first round was ordered
        self._driver = threading.current_thread()
        self._adopting: FrameType | None = None
        self.round, self.push = Way(), Way()
        self.state = "before the round"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.state == "over":
            return
        if event == "call":
            self._called(frame)
        elif event == "return" and frame is self._adopting:
            self.state = "over"

    def _called(self, frame: FrameType) -> None:
        function = self._functions.of(frame.f_code)
        on_driver = threading.current_thread() is self._driver
        if function is not None:
            self._entered(function, frame, on_driver)
        elif (made := _made(frame)) is not None:
            self._part_made(made, frame, on_driver)
        elif frame.f_back is not None and self._functions.of(frame.f_back.f_code) is not None:
            self._outside(frame, on_driver)

    def _entered(self, function: Function, frame: FrameType, on_driver: bool) -> None:
        if self.state == "before the round" and on_driver:
            self.round.entered[function] = None
        elif self.state == "pushing" and not on_driver:
            self.push.entered[function] = None
            module, name = function
            if name in (TAKEN_IN, GIVEN_OUT):
                self._hand_on(self.push, frame)
            if module.startswith("ps.") and name.endswith(".adopt") and "local" in frame.f_locals:
                self.push.stack = self._functions.stack(frame)
                self.push.add(self.push.stack)
                self._adopting = frame

    def _part_made(self, made: str, frame: FrameType, on_driver: bool) -> None:
        """A part of what is handed on comes into being."""
        if self.state == "before the round" and on_driver:
            stack = self._functions.stack(frame)
            if made in MADE_OF:
                self._made[made] = stack
            if made == "StartRound":
                self._orders.clear()
            if made == "RoundOrder":
                self._orders.append(stack)
            if made in ON_THE_WAY - {"Log"}:
                self.round.earlier |= dict.fromkeys(stack)
        elif self.state == "before the push" and made == "Gain":
            self.state = "pushing"
        if self.state == "pushing" and made in PUSHED and not on_driver:
            self._hand_on(self.push, frame)

    def _outside(self, frame: FrameType, on_driver: bool) -> None:
        """One of our functions calls one of others'."""
        name = frame.f_code.co_qualname
        if self.state == "before the round" and on_driver:
            if name == "Client.__init__":
                self._hand_on(self.round, frame)
            elif name == "Client.submit":
                self._submitted(frame)
        elif self.state == "pushing" and not on_driver and name in (ACTOR_CALL, ACTOR_ANSWER):
            self._hand_on(self.push, frame)

    def _submitted(self, frame: FrameType) -> None:
        stack = self._functions.stack(frame)
        if getattr(frame.f_locals["func"], "__name__", "") != "train_round":
            self.round.earlier |= dict.fromkeys(stack)
            return
        for part in (*(self._made[name] for name in MADE_OF), *self._orders, stack):
            self.round.add(part)
        self.round.stack, self.state = stack, "before the push"

    def _hand_on(self, way: Way, frame: FrameType) -> None:
        way.add(self._functions.stack(frame))


def _made(frame: FrameType) -> str | None:
    """The name of the class whose generated constructor this is: a dataclass's, or a named tuple's."""
    code = frame.f_code
    if code.co_filename != "<string>":
        return None
    known = frame.f_locals
    if code.co_name == "__init__":
        return type(known["self"]).__name__
    return known["_cls"].__name__ if "_cls" in known else None


@contextmanager
def cluster() -> Iterator[str]:
    """The address of a scheduler with one worker and one for the server, in threads of this process."""
    workers = {kind: {"cls": Worker, "options": {"nthreads": 1, "resources": {kind: 1}}} for kind in ("CPU", "PS")}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}}
    logging.getLogger("distributed").setLevel(logging.ERROR)
    with SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.ERROR) as started:
        yield started.scheduler_address


def data_set(folder: Path) -> str:
    """A few images, as a store on disk."""
    source = Source("synthetic", tuple("abcdefghij"), gratings(230, 0), gratings(40, 1), {})
    path = str(folder / "synthetic.zarr")
    write(source, describe(source, chunk=50, order="shuffled", seed=0), path, lambda name: None)
    return path


def measure(strategy: str) -> Recorder:
    """Run the command once, until it ends; what was heard of it."""
    said, recorder = StringIO(), Recorder()
    threading.setprofile(recorder)  # of threads that start from here on, the event loop's too
    with tempfile.TemporaryDirectory() as folder, cluster() as address:
        flags = {"scheduler": address, "workers": "cpu=1", "data": data_set(Path(folder)), "run-dir": f"{folder}/runs"}
        flags |= {"dataset": "synthetic", "model": "3:4", "strategy": strategy, "epochs": "1", "batch-size": "32"}
        arguments = [text for flag, value in flags.items() for text in (f"--{flag}", value)]
        sys.setprofile(recorder)
        try:
            with redirect_stdout(said), redirect_stderr(said):
                code = command.main([*arguments, "--set", "data.validation=20"], standalone_mode=False)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if code or recorder.state != "over":
        raise SystemExit(f"the job ended with {code}, heard until {recorder.state!r}:\n{said.getvalue()}")
    return recorder


def show(title: str, way: Way, *, functions: bool) -> None:
    """The counts, by module, and the functions if they are asked for."""
    counts = way.counts()
    print(f"\n{title}: " + ", ".join(f"{name} {count}" for name, count in counts.items()) + f"; bar {BAR}")
    columns = [Counter(module for module, _ in part) for part in (way.stack, way.way, {**way.way, **way.entered})]
    print(f"  {'module':45}{'stack':>7}{'way':>7}{'entered':>9}")
    for module in sorted(columns[-1], key=lambda name: (-columns[1][name], -columns[2][name], name)):
        stack, on_way, entered = (column[module] for column in columns)
        print(f"  {module:45}{stack or '':>7}{on_way or '':>7}{entered:>9}")
    if functions:
        print("  on the way:")
        for module, name in way.way:
            print(f"    {module}: {name}")


def main() -> int:
    """Exit code 1 where a way is longer than its bar."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--strategies", nargs="+", default=["sgwu", "agwu"], metavar="NAME", help="default: sgwu agwu")
    options.add_argument("--functions", action="store_true", help="name the functions on the way")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the counts to this file")
    given = options.parse_args()
    results = []
    for strategy in given.strategies:
        recorder = measure(strategy)
        ways = {"command to first round": recorder.round, "push to adopted": recorder.push}
        for name, way in ways.items():
            show(f"{strategy}, {name}", way, functions=given.functions)
            names = [f"{module}:{function}" for module, function in way.way]
            results.append({"strategy": strategy, "way": name, **way.counts(), "functions": names})
    if given.json:
        where = {"machine": platform.machine(), "python": platform.python_version(), "dask": version("dask")}
        text = json.dumps({"machine": where, "bar": BAR, "results": results}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")
    return int(any(len(each["functions"]) > BAR for each in results))


if __name__ == "__main__":
    sys.exit(main())
