"""`daskcnn data show`: the facts of a data set, and contact sheets to look at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from daskcnn.cli import main as daskcnn
from daskcnn.show.renderers.drawing import SheetRow, contact_sheet
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from tests.tiny_runs import tiny_data


def show(*args: object) -> Result:
    return CliRunner().invoke(daskcnn, ["data", "show", *map(str, args)])


def stored(folder: Path, classes: list[str], shape: tuple[int, int, int] = (8, 8, 3), **more: Any) -> str:
    """A store of 3 training samples of each class."""
    rng, path, count = np.random.default_rng(0), str(folder / "own.zarr"), 3 * len(classes)
    images = rng.integers(0, 255, (count, *shape)).astype(more.pop("dtype", "uint8"))
    part = images, (np.arange(count) % len(classes)).astype(np.uint8)
    source = Source(more.pop("name", "own"), tuple(classes), part, part, {"a": "0" * 64}, **more)
    write(source, describe(source, chunk=20, order="stored", seed=0), path, lambda _: None)
    return path


def test_the_facts_as_json(tmp_path: Path) -> None:
    path = tiny_data(tmp_path, name="ships")
    found = json.loads(show(path, "--json").stdout)
    assert (found["name"], found["shape"], found["dtype"], found["labels"]) == ("ships", [8, 8, 3], "uint8", "classes")
    assert (found["train"], found["test"]) == ({"samples": 120, "chunks": 3}, {"samples": 60, "chunks": 2})
    assert (found["order"], found["seed"], found["sources"], found["chunk"]) == ("shuffled", 0, 0, 50)
    assert found["classes"][3] == {"class": "d", "train": 12, "test": 6}
    assert found["mean"] == pytest.approx([127.5] * 3, abs=3)
    assert found["deviation"] == pytest.approx([73.9] * 3, abs=2)
    assert (found["weights"], found["pictures"]) == (None, [])
    assert sorted(os.listdir(tmp_path)) == ["ships.zarr"], "no picture without being asked"


def test_the_facts_for_people(tmp_path: Path) -> None:
    weights = np.linspace(0.5, 1.5, 6, dtype=np.float32)
    names = ["cat", "\x1b[2Jdog"]
    text = show(stored(tmp_path, names, (8, 8, 20), dtype="uint16", name="til\x07es", weights=weights)).stdout
    for words in (
        "data      til\\x07es at ",
        "images    8x8x20 uint16, ",
        "samples   6 to train, 6 to test",
        "chunks    1 + 1 of 20 samples",
        "order     stored; 1 source file",
        ", ... (20 channels)",
        "weights   one for each training sample: least 0.500, mean 1.000, most 1.500",
        "\\x1b[2Jdog      3     3",
    ):
        assert words in text
    assert "\x1b" not in text


def test_a_contact_sheet_of_each_class(tmp_path: Path) -> None:
    """Three samples of 8 by 8 pixels in a row, enlarged twelve times."""
    path = stored(tmp_path, ["cat", "dog"])
    file = tmp_path / "sheet.png"
    found = json.loads(show(path, "--picture", file, "--json").stdout)
    assert found["pictures"] == [str(file)]
    from daskcnn.store import open_dataset

    images, _ = open_dataset(path).train.read(0, 6)
    with Image.open(file) as sheet:
        assert sheet.format == "PNG"
        pixels = np.asarray(sheet)
    for index in range(6):
        whole = images[index].repeat(12, axis=0).repeat(12, axis=1)
        row, column = index % 2, index // 2
        y, x = 44 + 100 * row, 220 + 100 * column
        np.testing.assert_array_equal(pixels[y : y + 96, x : x + 96], whole)


def test_more_than_twenty_classes_go_on_on_further_sheets(tmp_path: Path) -> None:
    path = stored(tmp_path, [f"class {i}" for i in range(45)])
    found = json.loads(show(path, "--picture", tmp_path / "s.png", "--json").stdout)
    assert [Path(file).name for file in found["pictures"]] == ["s.png", "s-2.png", "s-3.png"]
    heights = []
    for file in found["pictures"]:
        with Image.open(file) as sheet:
            heights.append(sheet.height)
    assert heights[0] == heights[1] > heights[2]


def test_the_first_hundred_of_very_many_classes(tmp_path: Path) -> None:
    path = stored(tmp_path, [f"class {i}" for i in range(230)], (4, 4, 1))
    assert len(json.loads(show(path, "--picture", tmp_path / "s.png", "--json").stdout)["pictures"]) == 5


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("sheet.jpg", "contact sheets are PNG files; give a name that ends in .png"),
        ("folder.png", "Is a directory; give a file that may be written"),
        ("pipe.png", "a named pipe, not a regular file; give a file that may be written"),
        ("nowhere/sheet.png", "No such file or directory; give a file that may be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    result = show(tiny_data(tmp_path), "--picture", tmp_path / file)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_store_that_is_none_is_refused(tmp_path: Path) -> None:
    result = show(tmp_path / "none.zarr")
    assert result.exit_code == 2
    assert "no data set here" in result.stderr


# --- the sheet itself ---


def _ink(png: bytes, folder: Path) -> np.ndarray:
    file = folder / "x.png"
    file.write_bytes(png)
    with Image.open(file) as sheet:
        return np.asarray(sheet)


@pytest.mark.parametrize("name", ["Köln", "森林", "\x1b[31m", "", "x" * 100_000, "\u202egnp", "a\nb"])
def test_any_name_can_be_written(tmp_path: Path, name: str) -> None:
    """In its own place, left of the samples."""
    sample = np.full((96, 96, 3), 7, np.uint8)
    pixels = _ink(contact_sheet(["title"], [SheetRow(name, "3 to train", [sample])], 2), tmp_path)
    assert (pixels[26:120, 217:220] == 255).all()
    assert (pixels[26:42, :217] < 255).any() == bool(name)


def test_names_in_other_letters_differ(tmp_path: Path) -> None:
    names = ["森林", "森森", "köln", "koln"]
    drawn = [_ink(contact_sheet([], [SheetRow(name, "", [])], 1), tmp_path).tobytes() for name in names]
    assert drawn[0] != drawn[1]
    assert drawn[2] == drawn[3], "accents are left out"


def test_a_class_without_samples_has_a_line(tmp_path: Path) -> None:
    sample = np.zeros((3, 5, 3), np.uint8)
    pixels = _ink(
        contact_sheet(["t"], [SheetRow("none", "0 to train", []), SheetRow("one", "1", [sample])], 8), tmp_path
    )
    assert (pixels[:, 220:] < 255).any()
