"""Downloads are resumed, verified, and never mistaken for whole; against a server of our own."""

from __future__ import annotations

import fcntl
import hashlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from daskcnn.errors import DataError
from daskcnn.store.datasets.archive import Download
from tests.special_files import SPECIAL, special

CONTENT = random.Random(1).randbytes(700_000)


@dataclass
class Behaviour:
    """How the server answers, and what it was asked."""

    content: bytes = CONTENT
    ranges: bool = True
    stop_after: int | None = None
    status: int | None = None
    asked: list[str | None] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    behaviour: Behaviour

    def do_GET(self) -> None:
        b = self.behaviour
        wanted = self.headers.get("Range")
        b.asked.append(wanted)
        if b.status is not None:
            self.send_error(b.status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and b.ranges else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(b.content) - 1}/{len(b.content)}")
        self.send_header("Content-Length", str(len(b.content) - start))
        self.end_headers()
        self.wfile.write(b.content[start : b.stop_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[Behaviour, Download]]:
    """A server, its behaviour, and the download of its one file."""
    behaviour = Behaviour()
    handler = type("OurHandler", (Handler,), {"behaviour": behaviour})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        url = f"http://127.0.0.1:{http.server_port}/files/set.tar.gz"
        yield behaviour, Download(url, len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
        http.shutdown()
        thread.join()


def nothing(done: int, total: int) -> None:
    pass


def test_downloads_once_with_progress(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    behaviour, download = server
    seen = []
    path = download.fetch(tmp_path / "data", lambda *at: seen.append(at))
    assert path == tmp_path / "data" / "set.tar.gz"
    assert path.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert download.fetch(tmp_path / "data", nothing) == path
    assert len(behaviour.asked) == 1
    assert [p.name for p in path.parent.iterdir()] == ["set.tar.gz"]


@pytest.mark.parametrize("ranges", [True, False])
def test_goes_on_where_it_stopped(server: tuple[Behaviour, Download], tmp_path: Path, ranges: bool) -> None:
    behaviour, download = server
    behaviour.stop_after = 300_000
    with pytest.raises(DataError, match="stopped after 300000 of 700000 bytes"):
        download.fetch(tmp_path, nothing)
    assert [p.name for p in tmp_path.iterdir()] == ["set.tar.gz.part"]
    behaviour.stop_after, behaviour.ranges = None, ranges
    assert download.fetch(tmp_path, nothing).read_bytes() == CONTENT
    assert behaviour.asked == [None, "bytes=300000-"]


def test_a_part_that_is_whole_is_only_verified(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    behaviour, download = server
    (tmp_path / "set.tar.gz.part").write_bytes(CONTENT)
    assert download.fetch(tmp_path, nothing).read_bytes() == CONTENT
    assert behaviour.asked == []


@pytest.mark.parametrize("part", [CONTENT[:1000][::-1], bytes(700_000)])
def test_a_wrong_beginning_is_dropped(server: tuple[Behaviour, Download], tmp_path: Path, part: bytes) -> None:
    _, download = server
    (tmp_path / "set.tar.gz.part").write_bytes(part)
    with pytest.raises(DataError, match=r"what came has SHA-256 .*try again"):
        download.fetch(tmp_path, nothing)
    assert list(tmp_path.iterdir()) == []
    assert download.fetch(tmp_path, nothing).read_bytes() == CONTENT


def test_a_part_that_is_too_long_starts_again(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    _, download = server
    (tmp_path / "set.tar.gz.part").write_bytes(bytes(700_001))
    assert download.fetch(tmp_path, nothing).read_bytes() == CONTENT


def test_more_than_promised_is_refused(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    behaviour, download = server
    behaviour.content = CONTENT + b"!"
    with pytest.raises(DataError, match="more than 700000 bytes"):
        download.fetch(tmp_path, nothing)


def test_a_server_that_refuses(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    behaviour, download = server
    behaviour.status = 404
    with pytest.raises(DataError, match=r"answered 404 .*give --archive"):
        download.fetch(tmp_path, nothing)


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("end", ["", ".part"])
def test_what_is_no_regular_file_is_not_opened(
    server: tuple[Behaviour, Download], tmp_path: Path, kind: str, end: str
) -> None:
    _, download = server
    place = special(tmp_path / (download.url.rsplit("/", 1)[1] + end), kind)
    with pytest.raises(DataError, match=f"{place}: a {SPECIAL[kind]}, not a regular file"):
        download.fetch(tmp_path, nothing)


def test_no_server(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        port = http.server_port
    with pytest.raises(DataError, match="stopped after 0 of 10 bytes"):
        Download(f"http://127.0.0.1:{port}/set.tar.gz", 10, "0" * 64).fetch(tmp_path, nothing)


def test_a_file_that_is_there_is_verified(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    _, download = server
    (tmp_path / "set.tar.gz").write_bytes(b"something else")
    with pytest.raises(DataError, match="remove it to download it again"):
        download.fetch(tmp_path, nothing)


def test_two_downloads_of_one_file(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    _, download = server
    with (tmp_path / "set.tar.gz.part").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is downloading it"):
            download.fetch(tmp_path, nothing)
    assert download.fetch(tmp_path, nothing).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written(server: tuple[Behaviour, Download], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        replace(server[1], size=1).fetch(tmp_path / "file" / "data", nothing)
