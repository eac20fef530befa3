"""The scheduler's address, checked before anything starts: one that cannot be an address is not worth waiting for."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from ipaddress import IPv6Address

from distributed.comm.addressing import parse_address
from distributed.comm.registry import Backend, backends, get_backend

from daskcnn.errors import ClusterError, similar

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
        named = f"{address!r:.200} is " if source else ""
        where = source or f"scheduler {address:.200}"
        raise ClusterError(where, f"{named}not an address ({reason})", remedy) from None


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
