"""Addresses that no scheduler can have are refused for what is wrong with them, and no others."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from distributed.comm import registry
from distributed.comm.addressing import get_address_host_port
from distributed.comm.tcp import TCPBackend
from hypothesis import example, given
from hypothesis import strategies as st

from daskcnn.cluster.link import connect as address_module
from daskcnn.cluster.link.connect import check_address, check_scheduler
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Cluster

POSSIBLE = (
    "tcp://127.0.0.1:8786",
    "tls://scheduler.example.org:1",
    "ws://host:8786",
    "wss://host:65535",
    "localhost:8786",
    "a_b-c:8786",
    "bücher:8786",
    "[::1]:8786",
    "tcp://[fe80::1%eth0]:8786",
    "inproc://192.168.1.5/4711/1",
)

IMPOSSIBLE = (
    ("notanaddress", "it has no port", "8786: notanaddress:8786"),
    ("tcp://127.0.0.1", "it has no port", "8786: tcp://127.0.0.1:8786"),
    ("tcp://[::1]", "it has no port", "8786: tcp://[::1]:8786"),
    ("tcp://host:", "it has no port", "copy"),
    ("tcp://", "it has no port", "copy"),
    ("tcp://127.0.0.1:99999", "port 99999 is not within 1 to 65535", "copy"),
    ("127.0.0.1:0", "port 0 is not within", "copy"),
    ("tcp://host:-1", "port -1 is not within", "copy"),
    ("tcp://host:" + "9" * 4000, "port 9{20} is not within", "copy"),
    ("tcp://host:" + "9" * 5000, "it is not HOST:PORT", "copy"),
    ("tcp://host:door", "its port 'door' is not a number", "copy"),
    ("tcp://host:1:2", "it is not HOST:PORT", "copy"),
    ("tcp://:8786", "it has no host", "copy"),
    ("tcp://127.0.0.1:8786/status", "it has a path", "leave out what follows the port"),
    ("tcp://127.0.0.1:8786/", "it has a path", "leave out what follows the port"),
    ("tcp://[::1", "its brackets do not match", "tcp://[::1]:8786"),
    ("tcp://::1]:8786", "its brackets do not match", "tcp://[::1]:8786"),
    ("tcp://::1:8786", "an IPv6 address needs brackets", "tcp://[::1]:8786"),
    ("::1", "an IPv6 address needs brackets", "tcp://[::1]:8786"),
    ("tcp://[::g]:8786", "'::g' is no host", "copy"),
    ("tcp://two words:8786", "'two words' is no host", "copy"),
    ("tcp://user@host:8786", "'user@host' is no host", "copy"),
    ("tcp://a..b:8786", "'a..b' is no host", "copy"),
    ("tcp://" + "a" * 64 + ":8786", "'a+ is no host", "copy"),
    ("tcp://\udcff:8786", "is no host", "copy"),
    ("http://localhost:8786", "http:// is the dashboard's", "begins with tcp://"),
    ("https://localhost:8786", "https:// is the dashboard's", "begins with tcp://"),
    ("foo://host:8786", "no protocol 'foo' here, but inproc, tcp, tls, ws, wss", "copy"),
    ("TPC://host:8786", "did you mean 'tcp'?", "copy"),
    ("tcp://a:1,tcp://b:1", "no protocol 'tcp://a:1,tcp'", "copy"),
)


@pytest.mark.parametrize("address", POSSIBLE)
def test_what_may_be_an_address_is_let_through(address: str) -> None:
    check_address(address)


@pytest.mark.parametrize(("address", "reason", "remedy"), IMPOSSIBLE)
def test_what_cannot_be_one_is_refused_for_what_is_wrong(address: str, reason: str, remedy: str) -> None:
    with pytest.raises(
        ClusterError, match=rf"^scheduler .*: not an address \(.*{reason}".replace("?", r"\?")
    ) as raised:
        check_address(address)
    assert remedy in raised.value.remedy
    assert len(str(raised.value)) < 500


@pytest.mark.skipif("distributed_ucxx" in sys.modules, reason="ucx is installed here")
def test_a_protocol_without_its_package_names_the_package() -> None:
    with pytest.raises(ClusterError, match=r"not an address \(ucx is not installed here\); install distributed-ucxx"):
        check_address("ucx://1.2.3.4:5")


class _Broken(TCPBackend):  # type: ignore[misc] # Dask has no types
    def get_connector(self) -> Any:
        raise ImportError("no library libfast")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two packages that bring protocols: fast lacks a library, own works."""
    monkeypatch.setattr(registry, "backends", {**registry.backends})
    monkeypatch.setattr(address_module, "backends", registry.backends)
    found = [("fast", f"{__name__}:_Broken"), ("own", "distributed.comm.tcp:TCPBackend")]
    entries = EntryPoints(EntryPoint(name, value, "distributed.comm.backends") for name, value in found)
    monkeypatch.setattr(registry, "_entry_points", entries.select)
    monkeypatch.setattr(address_module, "entry_points", entries.select)


@pytest.mark.usefixtures("packages")
def test_packages_may_bring_protocols() -> None:
    check_address("own://host:8786")
    with pytest.raises(ClusterError, match=r"'fast' cannot be used here: no library libfast"):
        check_address("fast://host:8786")
    with pytest.raises(ClusterError, match=r"no protocol 'foo' here, but fast, inproc, own, tcp"):
        check_address("foo://host:8786")


_PARTS = (
    "tcp",
    "tls",
    "ws",
    "://",
    ":",
    "/",
    "[",
    "]",
    "::1",
    "1.2.3.4",
    "host",
    "8786",
    "99999",
    " ",
    "%",
    "@",
    ".",
    "",
)


@given(st.one_of(st.text(), st.lists(st.sampled_from(_PARTS), max_size=8).map("".join)))
@example("tcp://[::1]:8786")
def test_any_text_is_refused_in_words_or_can_be_asked_for(text: str) -> None:
    """What is let through is what the system can be asked for, without another error."""
    if (told := _told(text)) is not None:
        assert told.reason.startswith("not an address (")
        assert told.remedy
        return
    host, port = get_address_host_port(text)
    assert host.encode("idna")
    assert 1 <= port <= 65535


def _told(address: str) -> ClusterError | None:
    try:
        check_address(address)
    except ClusterError as error:
        return error
    return None


@given(st.ip_addresses(), st.integers(1, 65535), st.sampled_from(("tcp://", "tls://", "ws://", "wss://", "")))
def test_every_number_of_a_host_may_be_one(host: Any, port: int, scheme: str) -> None:
    place = f"[{host}]" if host.version == 6 else str(host)
    check_address(f"{scheme}{place}:{port}")


def test_an_address_in_a_file_is_checked_as_soon_as_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    settings = Cluster(scheduler_file=str(file))
    check_scheduler(settings)  # a scheduler may yet write it
    file.write_text("{")
    check_scheduler(settings)
    file.write_text(json.dumps({"address": "tcp://127.0.0.1:8786"}))
    check_scheduler(settings)
    file.write_text(json.dumps({"address": "http://127.0.0.1:8786"}))
    words = rf"^scheduler file {re.escape(str(file))}: 'http://127\.0\.0\.1:8786' is not an address \(http:// is"
    with pytest.raises(ClusterError, match=words):
        check_scheduler(settings)


def test_a_local_cluster_has_no_address_to_check() -> None:
    check_scheduler(Cluster())
