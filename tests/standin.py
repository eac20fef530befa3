"""A strict stand-in for CuPy over NumPy: shows mixed-up host and device arrays where there is no GPU.

It refuses what CuPy refuses: host arrays as operands, arguments, indexes or values, and turning a device array into
a host one without saying so. Where CuPy is lenient (NumPy's own functions on its arrays) it refuses as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Backend, Device, Workspace
from daskcnn.errors import ClusterError


def _opened(value: Any) -> Any:
    """What NumPy is to work on; TypeError for a host array."""
    if isinstance(value, DeviceArray):
        return value._host
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}: a host array of shape {value.shape} on the device")
    if isinstance(value, tuple | list):
        return type(value)(_opened(v) for v in value)
    return value


def _closed(value: Any) -> Any:
    """NumPy's result as the device gives it: arrays only, of no dimension where NumPy has scalars."""
    if isinstance(value, np.ndarray | np.generic):
        return DeviceArray(np.asarray(value))
    if isinstance(value, tuple | list):
        return type(value)(_closed(v) for v in value)
    return value


class _Function:
    """A function, ufunc or method of NumPy that takes and gives device arrays."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        opened = {name: _opened(value) for name, value in kwargs.items()}
        result = self._function(*(_opened(a) for a in args), **opened)
        return _closed(result) if out is None else out

    def __getattr__(self, name: str) -> _Function:
        return _Function(getattr(self._function, name))  # ufunc methods: add.reduce, add.at


class DeviceArray:
    """An array that stays on the device until it is fetched."""

    __array_ufunc__ = None  # NumPy's operators leave the decision to ours
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, host: np.ndarray) -> None:
        self._host = host

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed; use backend.to_host")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in {"data", "ctypes"}:  # NumPy's ways to the memory
            raise AttributeError(f"a device array has no {name}")
        value = getattr(self._host, name)
        return _Function(value) if callable(value) else _closed(value)

    def __getitem__(self, index: Any) -> DeviceArray:
        return _closed(self._host[_opened(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._host[_opened(index)] = _opened(value)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Any:
        return (_closed(row) for row in self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __index__(self) -> int:
        return operator.index(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)

    def __repr__(self) -> str:
        return f"DeviceArray({self._host!r})"

    def get(self) -> np.ndarray:
        """A host copy, as CuPy's arrays give it."""
        return self._host.copy()

    def item(self, *index: int) -> Any:
        """A Python number; waits for the device."""
        return self._host.item(*index)

    def tolist(self) -> Any:
        """Python numbers; waits for the device."""
        return self._host.tolist()


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: DeviceArray, *others: Any) -> Any:
        method = getattr(self._host, name)
        result = method(*(_opened(o) for o in others))
        if result is NotImplemented:
            return NotImplemented
        return self if result is self._host else _closed(result)

    apply.__name__ = name
    return apply


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in (
    *(prefix + name for name in _BINARY for prefix in ("", "r", "i")),
    *("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert", "divmod", "rdivmod"),
):
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))


class Namespace:
    """NumPy's namespace on device arrays; types, constants and numbers are NumPy's own, as CuPy has them."""

    ndarray = DeviceArray

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, ModuleType):
            return Namespace(value)
        return _Function(value) if callable(value) and not isinstance(value, type) else value


class _Root(Namespace):
    """The two functions that take host arrays: the way onto the device."""

    def asarray(self, value: Any, dtype: Any = None) -> DeviceArray:
        if isinstance(value, DeviceArray):
            return value if dtype is None else value.astype(dtype, copy=False)
        return DeviceArray(np.array(value, dtype=dtype))

    def array(self, value: Any, dtype: Any = None) -> DeviceArray:
        return DeviceArray(np.array(value._host if isinstance(value, DeviceArray) else value, dtype=dtype))


def _from_host(array: np.ndarray) -> Any:
    return xp.asarray(array)


def _to_host(array: Any) -> np.ndarray:
    return array.get() if isinstance(array, DeviceArray) else np.asarray(array)


xp = _Root(np)
STANDIN = Backend("standin", xp, _from_host, _to_host, lambda: None)
DEVICES = ("numpy", "standin", "cupy") if find_spec("cupy") else ("numpy", "standin")
"""Without CuPy there are no tests on a GPU: a thousand that are skipped take seconds of every change's."""

elsewhere = pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
"""For tests that compare a device with NumPy."""


def device_of(name: str) -> Device:
    """A one-threaded Device of a backend in DEVICES; skips the test where there is no GPU for cupy."""
    if name == "numpy":
        return Device()
    if name == "standin":
        return Device(STANDIN, workspace=Workspace(xp))
    try:
        return Device.of("gpu")
    except ClusterError as reason:
        pytest.skip(str(reason))
