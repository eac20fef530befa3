"""Files that were made to hurt: each builder writes one and returns the command that reads it.

Checksums are right wherever they can be, so that they protect from nothing.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, PngImagePlugin

from daskcnn.job.resolve import resolve
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run

Args = list[object]
Builder = Callable[[Path], Args]

MIB = 1 << 20


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


# --- stores ---


def store(folder: Path, change: Callable[[dict[str, Any]], None], *, signed: bool = True) -> Args:
    """A tiny store whose manifest was changed, with a new checksum if it is signed."""
    path = Path(tiny_data(folder))
    group = json.loads((path / "zarr.json").read_text())
    stored = group["attributes"]["daskcnn"]
    change(stored["manifest"])
    if signed:
        stored["sha256"] = hashlib.sha256(canonical(stored["manifest"])).hexdigest()
    (path / "zarr.json").write_text(json.dumps(group))
    return ["data", "verify", path]


def manifest_of_numbers(count: int, *, signed: bool) -> Builder:
    """Checksums that are numbers: an error for each."""
    return lambda folder: store(folder, lambda m: m["train"].update(images=[1] * count), signed=signed)


def largest_manifest(folder: Path) -> Args:
    """As many checksums as there may be, as zarr writes them. Only its last one is wrong."""
    samples = 410_000

    def change(manifest: dict[str, Any]) -> None:
        counts = [samples // 10] * 10
        sums = [f"{i:064x}" for i in range(samples)]
        wrong = [*sums[:-1], "x"]
        manifest.update(chunk=1)
        manifest["train"].update(samples=samples, class_counts=counts, images=sums, labels=wrong)

    args = store(folder, change)
    file = Path(str(args[-1]), "zarr.json")
    text = json.dumps(json.loads(file.read_text()), indent=2)
    assert 60 * MIB < len(text) < 64 * MIB
    file.write_text(text)
    return args


def manifest_of_keys(folder: Path) -> Args:
    return store(folder, lambda m: m.update({f"k{i}": 0 for i in range(600_000)}))


def manifest_of_sources(folder: Path) -> Args:
    return store(folder, lambda m: m.update(sources={f"k{i}": 0 for i in range(600_000)}))


def manifest_of_classes(folder: Path) -> Args:
    return store(folder, lambda m: m.update(classes=["c"] * 900_000))


def raw_store(text: Callable[[], bytes]) -> Builder:
    """A store whose zarr.json has this text."""

    def build(folder: Path) -> Args:
        path = Path(tiny_data(folder))
        (path / "zarr.json").write_bytes(text())
        return ["data", "verify", path]

    return build


def array_metadata(text: Callable[[], bytes]) -> Builder:
    def build(folder: Path) -> Args:
        path = Path(tiny_data(folder))
        (path / "train/images/zarr.json").write_bytes(text())
        return ["data", "verify", path]

    return build


def large_chunk(folder: Path) -> Args:
    """Chunks of 500 MB of zeros that take no room on the disk."""
    samples, sample = 2, 500 * 10**6
    args = store(folder, lambda m: m.update(shape=[5000, 100_000, 1], chunk=1, mean=[0.5]))
    path = Path(str(args[-1]))
    group = json.loads((path / "zarr.json").read_text())
    stored = group["attributes"]["daskcnn"]
    for name in ("train", "test"):
        counts = [1, 1] + [0] * 8
        stored["manifest"][name].update(
            samples=samples, class_counts=counts, images=["0" * 64] * samples, labels=["0" * 64] * samples
        )
    stored["sha256"] = hashlib.sha256(canonical(stored["manifest"])).hexdigest()
    (path / "zarr.json").write_text(json.dumps(group))
    for name in ("train", "test"):
        for array, shape in (("images", [5000, 100_000, 1]), ("labels", [])):
            file = path / name / array / "zarr.json"
            found = json.loads(file.read_text())
            found["shape"] = [samples, *shape]
            found["chunk_grid"]["configuration"]["chunk_shape"] = [1, *shape]
            file.write_text(json.dumps(found))
            for i in range(samples):
                chunk = path / name / array / "c" / "/".join([str(i), *"0" * len(shape)])
                chunk.parent.mkdir(parents=True, exist_ok=True)
                if chunk.is_dir():
                    continue
                with open(chunk, "wb") as out:
                    out.truncate(sample if shape else 1)
    return ["data", "verify", path]


# --- archives ---


def pax_archive(records: int, each: int = 1) -> Builder:
    """A tar whose headers hold many records: `tarfile` makes a dict of them."""

    def build(folder: Path) -> Args:
        path = folder / "x.tar.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for i in range(each):
                body = b"".join(b"%d k%08d=v\n" % (15, i * records + n) for n in range(records))
                info = tarfile.TarInfo("x")
                info.type, info.size = tarfile.XGLTYPE, len(body)
                file.write(info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % 512))
        return ["data", "prepare", "cifar10", "--archive", path, "--out", folder / "c.zarr"]

    return build


def sparse_archive(folder: Path) -> Args:
    """A sparse file whose map has millions of entries."""
    path = folder / "x.tar.gz"
    records = b"".join(
        b"%d %s\n" % (len(r) + 4, r) for r in (b"GNU.sparse.major=1", b"GNU.sparse.minor=0", b"GNU.sparse.name=x")
    )
    numbers = b"10000000\n" + b"1\n" * 20_000_000
    with gzip.open(path, "wb", compresslevel=1) as file:
        head = tarfile.TarInfo("x")
        head.type, head.size = tarfile.XHDTYPE, len(records)
        file.write(head.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512))
        info = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        info.size = len(numbers)
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + numbers + bytes(-len(numbers) % 512))
    return ["data", "prepare", "cifar10", "--archive", path, "--out", folder / "c.zarr"]


def wrong_at_the_end(folder: Path) -> Args:
    """An archive of full size whose very last label is wrong."""
    path = folder / "x.tar.gz"
    batch = bytes(30_730_000)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name in names:
            content = batch if name != names[-1] else batch[:-3073] + b"\xff" + batch[-3072:]
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo("cifar-10-batches-bin/batches.meta.txt")
        info.size = 20
        tar.addfile(info, io.BytesIO(b"a b c d e f g h i j "))
    return ["data", "prepare", "cifar10", "--archive", path, "--out", folder / "c.zarr"]


def endless_archive(folder: Path) -> Args:
    """An archive of 1 TB that takes no room on the disk."""
    path = folder / "x.tar.gz"
    with open(path, "wb") as file:
        file.truncate(10**12)
    return ["data", "prepare", "cifar10", "--archive", path, "--out", folder / "c.zarr"]


# --- runs ---


def run_of(folder: Path) -> Path:
    job = resolve(tiny_job(tiny_data(folder)))
    return tiny_run(folder, tiny_job(str(job.data.path)), random_state(job))


def picture(folder: Path) -> Path:
    path = folder / "good.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    return path


def job_file(text: Callable[[], bytes]) -> Builder:
    """A run whose job.json has this text."""

    def build(folder: Path) -> Args:
        run = run_of(folder)
        (run / "job.json").write_bytes(text())
        return ["predict", run, picture(folder)]

    return build


def job_with(**sections: Any) -> Builder:
    def build(folder: Path) -> Args:
        run = run_of(folder)
        job = json.loads((run / "job.json").read_text())
        for name, keys in sections.items():
            job[name] = job[name] | keys
        (run / "job.json").write_text(json.dumps(job))
        return ["predict", run, picture(folder)]

    return build


def toml_job(text: Callable[[], str]) -> Builder:
    def build(folder: Path) -> Args:
        (folder / "job.toml").write_text(text())
        return ["run", folder / "job.toml", "--dry-run"]

    return build


def summary_file(text: Callable[[], bytes]) -> Builder:
    def build(folder: Path) -> Args:
        run = run_of(folder)
        (run / "summary.json").write_bytes(text())
        return ["run", "--resume", run]

    return build


def log_file(text: Callable[[], bytes]) -> Builder:
    def build(folder: Path) -> Args:
        run = run_of(folder)
        (run / "events.jsonl").write_bytes(text())
        return ["report", run]

    return build


def signed_state(folder: Path, change: Callable[[dict[str, Any]], None], arrays: bytes | None = None) -> Args:
    """A run whose checkpoint has a changed state.json, and other arrays if given, with right checksums."""
    run = run_of(folder)
    (checkpoint,) = (run / "checkpoints").iterdir()
    document = json.loads((checkpoint / "state.json").read_text())
    document.pop("sha256")
    if arrays is not None:
        (checkpoint / "arrays.safetensors").write_bytes(arrays)
        document["arrays"] = {"bytes": len(arrays), "sha256": hashlib.sha256(arrays).hexdigest()}
    change(document)
    document["sha256"] = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(document))
    return ["predict", run, picture(folder)]


def state_with(change: Callable[[dict[str, Any]], None]) -> Builder:
    return lambda folder: signed_state(folder, change)


def state_text(text: Callable[[], bytes]) -> Builder:
    """A checkpoint whose state.json has this text."""

    def build(folder: Path) -> Args:
        run = run_of(folder)
        (checkpoint,) = (run / "checkpoints").iterdir()
        (checkpoint / "state.json").write_bytes(text())
        return ["predict", run, picture(folder)]

    return build


def safetensors(header: bytes, data: bytes = b"") -> Builder:
    return lambda folder: signed_state(folder, lambda _: None, struct.pack("<Q", len(header)) + header + data)


def empty_arrays(count: int) -> bytes:
    return json.dumps({f"a{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}).encode()


def sparse_arrays(folder: Path) -> Args:
    """Arrays of 10 GB that take no room on the disk; whoever reads all of them first has lost."""
    args = signed_state(folder, lambda d: d["arrays"].update(bytes=10**10))
    (checkpoint,) = (Path(str(args[1])) / "checkpoints").iterdir()
    with open(checkpoint / "arrays.safetensors", "r+b") as file:
        file.truncate(10**10)
    return args


def valid_large_arrays(folder: Path) -> Args:
    """A checkpoint that is right in itself but holds 1 GB that its network has no use for."""
    size = 10**9
    header = json.dumps({"velocity:x": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    digest, block = hashlib.sha256(struct.pack("<Q", len(header)) + header), bytes(MIB)
    for at in range(0, size, MIB):
        digest.update(block[: min(MIB, size - at)])
    total = 8 + len(header) + size
    args = signed_state(folder, lambda d: d.update(arrays={"bytes": total, "sha256": digest.hexdigest()}))
    (checkpoint,) = (Path(str(args[1])) / "checkpoints").iterdir()
    with open(checkpoint / "arrays.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(total)
    return args


# --- images ---


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, rows: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", head),
            *chunks,
            png_chunk(b"IDAT", zlib.compress(rows, 1)),
            png_chunk(b"IEND", b""),
        ]
    )


def large(bits: int, colour: int) -> bytes:
    """A PNG of 6000 by 4000 pixels, turned on its side by its EXIF data. Its last row is missing."""
    head = struct.pack(">IIBBBBB", 6000, 4000, bits, colour, 0, 0, 0)
    exif = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    row = 1 + 6000 * (bits // 8) * (4 if colour == 6 else 1)
    parts = (b"IHDR", head), (b"eXIf", exif), (b"IDAT", zlib.compress(bytes(row * 3999), 1)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in parts)


def image(name: str, content: Callable[[], bytes]) -> Builder:
    def build(folder: Path) -> Args:
        (folder / name).write_bytes(content())
        return ["predict", run_of(folder), folder / name]

    return build


def zipped(size: int) -> bytes:
    """zlib data of so many zeros, made a block at a time."""
    packer, block = zlib.compressobj(9), bytes(MIB)
    return b"".join([*(packer.compress(block) for _ in range(size // MIB)), packer.flush()])


def text_bomb() -> bytes:
    """A hundred compressed text chunks of 60 MiB each."""
    chunk = png_chunk(b"zTXt", b"k\0\0" + zipped(60 * MIB))
    return png(8, 8, *[chunk] * 100, rows=bytes(8 * 25))


def profile_bomb() -> bytes:
    return png(8, 8, png_chunk(b"iCCP", b"k\0\0" + zipped(2000 * MIB)), rows=bytes(8 * 25))


def many_frames() -> bytes:
    """A GIF of 2,000,000 frames."""
    out = io.BytesIO()
    Image.new("P", (8, 8)).save(out, "GIF")
    head, frame = out.getvalue()[:-1].split(b",", 1)  # its palette is black
    return head + (b"," + frame) * 2_000_000 + b";"


def wide_gif() -> bytes:
    return (
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<HHHHB", 0, 0, 65535, 65535, 0)
    )


def exif_bomb() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add(b"eXIf", b"MM\0*\0\0\0\x08" + struct.pack(">H", 65535) + b"\x01\x12\0\x07\x7f\xff\xff\xff\0\0\0\0" * 65535)
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG", pnginfo=info)
    return out.getvalue()


def endless_image(folder: Path) -> Args:
    with open(folder / "x.png", "wb") as file:
        file.write(png(8, 8, rows=bytes(8 * 25)))
        file.truncate(10**12)
    (folder / "y.png").symlink_to("x.png")
    with open(folder / "z.png", "wb") as file:
        file.truncate(10**12)
    return ["predict", run_of(folder), folder / "z.png"]


def npy(header: str, data: bytes = b"") -> Callable[[], bytes]:
    def content() -> bytes:
        text = header.encode()
        return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + data

    return content


DEEP = 10**6

FILES: dict[str, Builder] = {
    "manifest of 3 MB of numbers": manifest_of_numbers(1_000_000, signed=False),
    "manifest of 3 MB of numbers, signed": manifest_of_numbers(1_000_000, signed=True),
    "manifest of 60 MB of numbers": manifest_of_numbers(20_000_000, signed=True),
    "manifest of keys": manifest_of_keys,
    "manifest of sources": manifest_of_sources,
    "manifest of 500,000 keys": lambda f: store(f, lambda m: m.update({f"k{i}": 0 for i in range(500_000)})),
    "manifest of 500,000 keys in a part": lambda f: store(
        f, lambda m: m["train"].update({f"k{i}": 0 for i in range(500_000)})
    ),
    "manifest of 500,000 sources": lambda f: store(f, lambda m: m.update(sources={f"k{i}": 0 for i in range(500_000)})),
    "manifest of 400,000 chunks": largest_manifest,
    "manifest of classes": manifest_of_classes,
    "manifest of a wide name": lambda f: store(f, lambda m: m.update(name="😀" + "a" * (7 * MIB), extra=1)),
    "store of 60 MB of lists": raw_store(lambda: b"[" + b"[]," * (20 * MIB) + b"0]"),
    "store of 60 MB of tables": raw_store(lambda: b'{"a":[' + b'{"":0},' * (8 * MIB) + b"0]}"),
    "store of one wide string": raw_store(lambda: b'{"a":"' + b"a" * (60 * MIB) + rb"\ud83d\ude00" + b'"}'),
    "store of one wide character": raw_store(lambda: b'{"a":"' + b"a" * (60 * MIB) + "😀".encode() + b'"}'),
    "store nested deeply": raw_store(lambda: b"[" * DEEP + b"]" * DEEP),
    "store of tables nested deeply": raw_store(lambda: b'{"a":' * DEEP + b"0" + b"}" * DEEP),
    "store of 2 GB": raw_store(lambda: b" " * (2 << 30)),
    "array of 60 MB of lists": array_metadata(lambda: b"[" + b"[]," * (20 * MIB) + b"0]"),
    "chunks of 500 MB": large_chunk,
    "archive of PAX headers": pax_archive(10**7),
    "archive of many PAX headers": pax_archive(1000, 9000),
    "archive of a sparse file": sparse_archive,
    "archive wrong at its end": wrong_at_the_end,
    "archive of 1 TB": endless_archive,
    "job of 60 MB of lists": job_file(lambda: b"[" + b"[]," * (20 * MIB) + b"0]"),
    "job of keys": job_file(lambda: json.dumps({f"k{i}": 0 for i in range(500_000)}).encode()),
    "job of keys in a table": job_file(lambda: json.dumps({"train": {f"k{i}": 0 for i in range(500_000)}}).encode()),
    "job of 9,900 keys": job_with(train={f"k{i}": 0 for i in range(9_900)}),
    "job of 9,000 layers": job_with(model={"layers": [{"layer": "relu"}] * 9_000}),
    "job of 2,000 convolutions": job_with(
        model={"layers": [{"layer": "conv", "kernels": 100, "size": 1}] * 2_000 + [{"layer": "dense", "units": 10}]}
    ),
    "job of layers": job_file(lambda: json.dumps({"model": {"layers": [{"layer": "relu"}] * 500_000}}).encode()),
    "job of 1,000,000 units": job_with(
        model={"layers": [{"layer": "dense", "units": 1_000_000}, {"layer": "dense", "units": 10}]}
    ),
    "job of 10**30 units": job_with(
        model={"layers": [{"layer": "dense", "units": 10**30}, {"layer": "dense", "units": 10}]}
    ),
    "job of a wide border": job_with(
        model={"layers": [{"layer": "conv", "kernels": 4, "size": 3, "pad": 10**6}, {"layer": "dense", "units": 10}]}
    ),
    "job file of dotted keys": toml_job(lambda: "a." * 500_000 + "b = 1"),
    "job file of lists": toml_job(lambda: "a = [" + "[]," * 5_000_000 + "]"),
    "job file of 60,000 dots": toml_job(lambda: "a." * 60_000 + "b = 1"),
    "job file of 9,000 keys": toml_job(lambda: "".join(f"k{i} = 0\n" for i in range(9_000))),
    "job file of 9,000 keys in a table": toml_job(lambda: "[train]\n" + "".join(f"k{i} = 0\n" for i in range(9_000))),
    "job file of 15,000 lists": toml_job(lambda: "[model]\nlayers = [" + "[]," * 15_000 + "]"),
    "job file of keys": toml_job(lambda: "".join(f"k{i} = 0\n" for i in range(500_000))),
    "job file nested deeply": toml_job(lambda: "a = " + "[" * DEEP),
    "summary of 60 MB of lists": summary_file(lambda: b"[" + b"[]," * (20 * MIB) + b"0]"),
    "log of 60 MB of lists": log_file(lambda: b'{"event":"x","a":[' + b"[]," * (20 * MIB) + b"0]}\n"),
    "log of 60 MB of numbers": log_file(lambda: b'{"event":"epoch","workers":[' + b"1," * (30 * MIB) + b"0]}\n"),
    "log of 90,000 numbers": log_file(
        lambda: b'{"event":"epoch","epoch":1,"step":1,"workers":[' + b"1," * 90_000 + b"0]}\n"
    ),
    "log of 900,000 empty lines": log_file(lambda: b"{}\n" * 900_000),
    "log of 900,000 unknown events": log_file(lambda: b'{"event":"x"}\n' * 900_000 + b"x\n{}\n"),
    "log of 2 GB": log_file(lambda: b"x" * (2 << 30)),
    "summary of 250,000 workers": summary_file(lambda: b'{"status":"done","workers":[' + b"1," * 250_000 + b"1]}"),
    "state of 300,000 workers": state_with(
        lambda d: d["state"]["book"]["rounds"].update(seconds={f"w{i}": "" for i in range(300_000)})
    ),
    "state of 99,000 workers": state_with(
        lambda d: d["state"]["book"]["rounds"].update(seconds={f"w{i}": "" for i in range(99_000)})
    ),
    "state of 60 MB of lists": state_text(lambda: b"[" + b"[]," * (20 * MIB) + b"0]"),
    "state of keys": state_with(lambda d: d.update({f"k{i}": 0 for i in range(500_000)})),
    "state of lists": state_with(lambda d: d["state"].update(book=[[]] * 5_000_000)),
    "state of many classes": state_with(lambda d: d["state"]["images"].update(classes=["c"] * 900_000)),
    "state of large images": state_with(lambda d: d["state"]["images"].update(shape=[10**6, 10**6, 3])),
    "arrays by the hundred thousand": lambda folder: safetensors(empty_arrays(150_000))(folder),
    "arrays with a header of numbers": safetensors(b'{"a":[' + b"1," * (7 * MIB) + b"1]}"),
    "arrays with a header nested deeply": safetensors(b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "arrays of 10 GB": sparse_arrays,
    "arrays of 1 GB, signed": valid_large_arrays,
    "image of 60,000 by 60,000": image("x.png", lambda: png(60_000, 60_000)),
    "image of 13,000 by 13,000": image("x.png", lambda: png(13_000, 13_000, rows=bytes(13_000 * 39_001))),
    "image of 9,400 by 9,400": image("x.png", lambda: png(9_400, 9_400, rows=bytes(9_400 * 28_201))),
    "image of 24 million pixels of 16 bits, cut off": image("x.png", lambda: large(16, 0)),
    "image of 24 million transparent pixels, cut off": image("x.png", lambda: large(8, 6)),
    "image with texts": image("x.png", text_bomb),
    "image with a profile": image("x.png", profile_bomb),
    "image with entries": image("x.png", exif_bomb),
    "GIF of 2,000,000 frames": image("x.gif", many_frames),
    "GIF of 65,535 by 65,535": image("x.gif", wide_gif),
    "image of 1 TB": endless_image,
    "array file with a long header": image("x.npy", npy("[" * 10**6)),
    "array file of 10**12": image(
        "x.npy", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1000000, 1000000, 3), }\n")
    ),
    "array file of objects": image("x.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (8, 8, 3), }\n")),
}
