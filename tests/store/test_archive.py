"""Archives that are not what they should be are refused, and nothing is ever written or kept of them."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from daskcnn.errors import DataError
from daskcnn.store.datasets.archive import file_sha256, read_gzip_or_plain, read_tar_gz
from tests.special_files import SPECIAL, special
from tests.store.conftest import MakeTar, Member

EXPECTED = {"a.bin": 100, "b.bin": 100}


def read(path: Path) -> dict[str, bytes]:
    return read_tar_gz(path, "set", EXPECTED, lambda done, total: None)


def member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_expected_members_are_read(tmp_path: Path, make_tar: MakeTar) -> None:
    seen = []
    path = make_tar(tmp_path / "x.tar.gz", [("set/a.bin", b"one"), ("./set/b.bin", b"two")])
    assert read_tar_gz(path, "set", EXPECTED, lambda *at: seen.append(at)) == {"a.bin": b"one", "b.bin": b"two"}
    assert seen[-1] == (path.stat().st_size,) * 2


HOSTILE: dict[str, tuple[Member, str]] = {
    "dots": (("set/../../etc/passwd", b"x"), "leads out of the archive"),
    "absolute": (("/etc/passwd", b"x"), "leads out of the archive"),
    "symbolic link": ((member("set/a.bin", tarfile.SYMTYPE, "/etc/passwd"), b""), "is a link to '/etc/passwd'"),
    "hard link": ((member("set/a.bin", tarfile.LNKTYPE, "set/b.bin"), b""), "is a link"),
    "link as folder": ((member("set", tarfile.SYMTYPE, "/tmp"), b""), "is a link to '/tmp'"),
    "device": ((member("set/a.bin", tarfile.CHRTYPE), b""), "not a plain file"),
    "pipe": ((member("set/a.bin", tarfile.FIFOTYPE), b""), "not a plain file"),
    "folder": ((member("set/deeper", tarfile.DIRTYPE), b""), "not a plain file"),
    "unexpected": (("set/setup.py", b"x"), "is not expected: only set/ with a.bin, b.bin"),
    "elsewhere": (("other/a.bin", b"x"), "is not expected"),
    "at the top": (("a.bin", b"x"), "is not expected"),
    "too large": (("set/a.bin", bytes(101)), "has 101 bytes, at most 100"),
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("behind", [False, True])
def test_hostile_members_are_refused(tmp_path: Path, make_tar: MakeTar, kind: str, behind: bool) -> None:
    bad, message = HOSTILE[kind]
    members = [("set/b.bin", b"good"), bad] if behind else [bad]
    path = make_tar(tmp_path / "x.tar.gz", members)
    with pytest.raises(DataError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["x.tar.gz"]


def test_a_member_twice_is_refused(tmp_path: Path, make_tar: MakeTar) -> None:
    with pytest.raises(DataError, match="comes twice"):
        read(make_tar(tmp_path / "x.tar.gz", [("set/a.bin", b"1"), ("set/a.bin", b"2")]))


def test_a_header_that_promises_much_is_not_believed(tmp_path: Path) -> None:
    """A PAX header is passed over: its size is the archive's word, bounded by us."""
    info = tarfile.TarInfo("set/a.bin")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    with gzip.open(tmp_path / "x.tar.gz", "wb", compresslevel=1) as file:
        file.write(info.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(8):
            file.write(bytes(1 << 20))
    with pytest.raises(DataError, match="unpacks to more than"):
        read(tmp_path / "x.tar.gz")


def test_small_pax_headers_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("set/a.bin")
        info.size, info.mtime, info.pax_headers = 3, 0.5, {"comment": "ö" * 700}
        tar.addfile(info, io.BytesIO(b"one"))
    content = gzip.decompress(path.read_bytes())
    assert content.startswith(b"././@PaxHeader")
    assert read(path) == {"a.bin": b"one"}


def test_a_size_that_only_a_pax_header_gives_is_not_believed(tmp_path: Path) -> None:
    """The next header is then looked for where the file's own header says that it ends."""
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb") as file:
        record = b"19 size=1000000000\n"
        head = tarfile.TarInfo("x")
        head.type, head.size = tarfile.XHDTYPE, len(record)
        member = tarfile.TarInfo("set/a.bin")
        member.size = 3
        file.write(head.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0"))
        file.write(member.tobuf(tarfile.USTAR_FORMAT) + b"one".ljust(512, b"\0") + bytes(1024))
    assert read(path) == {"a.bin": b"one"}


def test_too_many_headers_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) * 1001))
    with pytest.raises(DataError, match="more than 1000 headers"):
        read(tmp_path / "x.tar.gz")


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path / "x.tar.gz", kind)
    for function in (read, file_sha256, lambda path: read_gzip_or_plain(path, 1)):
        with pytest.raises(DataError, match=f"x.tar.gz: a {SPECIAL[kind]}, not a regular file; give a regular file"):
            function(path)


def test_a_long_chain_of_headers_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1
    with gzip.open(tmp_path / "x.tar.gz", "wb", compresslevel=1) as file:
        file.write((info.tobuf(tarfile.GNU_FORMAT) + bytes(512)) * 900)
    with pytest.raises(DataError):
        read(tmp_path / "x.tar.gz")


@pytest.mark.parametrize(
    "content", [b"", b"not an archive", gzip.compress(b"not a tar", mtime=0), gzip.compress(b"x" * 99999)]
)
def test_what_is_no_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"damaged or not a \.tar\.gz"):
        read(tmp_path / "x.tar.gz")


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_truncated_archives(tmp_path: Path, make_tar: MakeTar, keep: float) -> None:
    import random

    path = make_tar(tmp_path / "x.tar.gz", [("set/a.bin", random.Random(0).randbytes(100))])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(DataError, match="damaged"):
        read(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for function in (read, file_sha256, lambda path: read_gzip_or_plain(path, 1)):
        with pytest.raises(DataError, match="No such file"):
            function(tmp_path / "nothing")
    with pytest.raises(DataError, match="Is a directory"):
        file_sha256(tmp_path)


def test_gzip_or_plain_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(gzip.compress(bytes(11)))
    (tmp_path / "y").write_bytes(bytes(11))
    assert read_gzip_or_plain(tmp_path / "x", 11) == read_gzip_or_plain(tmp_path / "y", 11) == bytes(11)
    for name in "xy":
        with pytest.raises(DataError, match="more than 10 bytes"):
            read_gzip_or_plain(tmp_path / name, 10)


def test_the_stream_is_never_asked_for_more_than_a_block() -> None:
    from daskcnn.store.datasets.archive import _BLOCK, _Bounded

    with gzip.open(io.BytesIO(gzip.compress(bytes(3 * _BLOCK)))) as unpacked:
        assert len(_Bounded(unpacked, 10 * _BLOCK).read(1 << 40)) <= _BLOCK
