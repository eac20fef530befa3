"""Modules of users' own: imported by their names, and sent with their sources to processes that lack them.

A module registers what it adds, such as `RULES["median"] = Median`, when it is imported. One that is installed is
imported on every process; the sources of any other are sent there.
"""

from __future__ import annotations

import importlib
import logging
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from daskcnn.errors import DataError
from daskcnn.temporary import OwnFolder

GROUP = "daskcnn"
"""The group of entry points whose modules are imported before a name is looked for in a registry."""
_MOST_BYTES = 8 << 20
_logger = logging.getLogger("daskcnn")
_folders: list[Path] = []  # of job files
_places: list[OwnFolder] = []  # of sources that were sent here; removed at the process's end
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class OwnModule:
    """A module that a job needs, on its way to another process.

    Attributes
    ----------
    files : sources of the module, or of the package that it is in, by path; none for one that is installed.
    """

    name: str
    files: Mapping[str, bytes] = field(default_factory=dict)


def look_in(folder: Path) -> None:
    """Find modules in this folder too, such as a job file's, from now on."""
    if folder not in _folders:
        _folders.append(folder)


def import_modules(names: Iterable[str]) -> None:
    """Import modules by name; those in the working folder or beside a job file are found too. Raises DataError."""
    for name in names:
        if name not in sys.modules:
            _let_find(_root(name))
            _imported(name, f"start in the folder that has {_root(name)}.py, set PYTHONPATH to it, or install it")


@cache
def import_plugins() -> None:
    """Import the modules of the entry points of the group `daskcnn`, once. One that fails is left out, with a warning.

    A plugin that cannot be imported must not keep jobs from starting that do not need it.
    """
    for point in entry_points(group=GROUP):
        try:
            importlib.import_module(point.module)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            _logger.warning("plugin %s cannot be imported and is left out: %s; update it", point.module, reason)


def own_modules(names: Iterable[str]) -> tuple[OwnModule, ...]:
    """Return modules, imported before, as other processes are sent them. Raises DataError for too large ones."""
    return tuple(OwnModule(name, dict(_sources(name))) for name in names)


def take_in(modules: Iterable[OwnModule]) -> None:
    """Import modules that were sent to this process. Sources replace what an earlier job has sent of the same name.

    Raises DataError naming a module that is missing here, or fails.
    """
    with _lock:
        import_plugins()
        new = {_root(each.name): each for each in modules if each.files and dict(_sources(each.name)) != each.files}
        for root, each in new.items():
            _places.append(OwnFolder(f"{root}-"))
            place = Path(_places[-1].name)
            for path, source in each.files.items():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (place / path).write_bytes(source)
            for known in [name for name in sys.modules if _root(name) == root]:
                del sys.modules[known]
            sys.path.insert(0, str(place))
        importlib.invalidate_caches()
        for each in modules:
            _imported(each.name, "install it there, the same version as here")


def _root(name: str) -> str:
    return name.partition(".")[0]


def _let_find(root: str) -> None:
    """Add to the search path the first folder that has the module, where nothing else has it."""
    if root in sys.modules or find_spec(root) is not None:
        return
    for folder in map(str, (*_folders, Path.cwd())):
        if PathFinder.find_spec(root, [folder]) is not None:
            sys.path.append(folder)
            importlib.invalidate_caches()
            return


def _imported(name: str, remedy: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise DataError(name, "there is no such module", remedy) from error
        remedy = f"install that, or name it too if it is your own: --import {error.name}"
        raise DataError(name, f"it imports {error.name}, which is missing", remedy) from error
    except (Exception, SystemExit) as error:
        raise DataError(name, f"it cannot be imported ({type(error).__name__}: {error})", "mend it") from error


def _sources(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield path and source of each file of a module, or of its package; none where it is missing or installed."""
    root, size = _root(name), 0
    spec = find_spec(root) if root not in sys.modules else sys.modules[root].__spec__
    if spec is None or not spec.has_location or spec.origin is None or _is_installed(spec.origin):
        return
    file = Path(spec.origin)
    top = file.parent.parent if spec.submodule_search_locations else file.parent
    for each in sorted(file.parent.rglob("*.py")) if spec.submodule_search_locations else [file]:
        source = each.read_bytes()
        if (size := size + len(source)) > _MOST_BYTES:
            reason = f"more than {_MOST_BYTES >> 20} MiB of sources, which are not sent to workers"
            raise DataError(root, reason, "install it here and there")
        yield each.relative_to(top).as_posix(), source


@cache
def _install_folders() -> tuple[str, ...]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    found = {*map(sysconfig.get_path, kinds), *site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in found)


def _is_installed(file: str) -> bool:
    return os.path.realpath(file).startswith(_install_folders())
