"""Values of classes of a user's own on their way to workers. A scheduler passes them on unread.

A value travels as bytes behind the modules that its classes are from. A worker imports these, then reads the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import Any, TypeVar

from distributed import Client
from distributed.protocol import pickle

from daskcnn.cluster.link.calls import Check, ask_workers, no_check, returns_refusals
from daskcnn.errors import ClusterError, DataError
from daskcnn.job.own_members import interactive_members, register
from daskcnn.job.tables import Job
from daskcnn.modules import OwnModule, own_modules, take_in

T = TypeVar("T")
IMPORTING = 60.0  # seconds within which a worker imports modules


class Sent:
    """A value that is pickled as bytes, with the modules of these names.

    Raises DataError, once it is pickled, for modules that are too large.
    """

    def __init__(self, value: Any, imports: Iterable[str] = ()) -> None:
        self._imports, self._value, self._content = tuple(imports), value, b""
        self._opening = Lock()

    @property
    def value(self) -> Any:
        """The value, the same for all threads. Raises DataError where this process cannot import its modules."""
        with self._opening:
            if self._content:
                modules, inner = pickle.loads(self._content)
                take_in(modules)
                members, self._value = pickle.loads(inner)
                register(members)
                self._imports = tuple(each.name for each in modules)  # a worker hands it on to others
                self._content = b""
        return self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._content or self._packed(),)

    def _packed(self) -> bytes:
        inner = pickle.dumps((interactive_members(), self._value))
        content: bytes = pickle.dumps((own_modules(self._imports), inner))
        return content


def _arrived(content: bytes) -> Sent:
    sent = Sent(None)
    sent._content = content
    return sent


def sent(value: T, job: Job) -> T | Sent:
    """Return a value of this job, wrapped if it may be of classes that other processes do not know."""
    return Sent(value, job.run.imports or ()) if job.run.imports or interactive_members() else value


def sent_function(function: Callable[..., Any], job: Job) -> Callable[..., Any]:
    """Return the function, or one that carries it: what it holds may be of classes that others do not know."""
    wrapped = sent(function, job)
    return partial(_called, wrapped) if isinstance(wrapped, Sent) else wrapped


def call_with_values(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the function with the values in place of those arguments that were sent."""
    return function(*map(_opened, args), **{name: _opened(value) for name, value in options.items()})


try_with_values = returns_refusals(call_with_values)
"""The same for a task whose result goes to the driver, which is told of a module that is missing."""


def _opened(value: Any) -> Any:
    return value.value if isinstance(value, Sent) else value


def _called(sent: Sent, *args: Any, **options: Any) -> Any:
    return sent.value(*args, **options)


def require_modules(
    client: Client, names: dict[str, str], imports: Iterable[str] | None, check: Check = no_check
) -> None:
    """Import the job's own modules on these workers; those that do not answer are passed over.

    Raises ClusterError naming a worker where one cannot be imported. names: of the workers by address, for people.
    """
    if not imports:
        return
    modules = own_modules(imports)
    answers = ask_workers(client, _problem, names, modules, within=IMPORTING, check=check)
    for address, problem in answers.given.items():
        if problem is not None:
            module, reason, remedy = problem
            raise ClusterError(f"{names[address]}: module {module}", reason, remedy)


def _problem(modules: tuple[OwnModule, ...]) -> tuple[str, str, str] | None:
    """Import the modules in this process. Returns value, reason and remedy where one cannot be imported."""
    try:
        take_in(modules)
    except DataError as error:
        return error.value, error.reason, error.remedy
    return None
