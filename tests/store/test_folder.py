"""Files of a folder become samples: their classes, and their places in the data set."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.errors import DataError
from daskcnn.store.making.folder import Listing, list_folder
from daskcnn.store.making.folder_plan import Plan, plan_folder
from daskcnn.store.manifest import PARTS, Order
from tests.special_files import SPECIAL, special


def touch(root: Path, *files: str) -> Path:
    """Empty files: a listing opens none."""
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


def listed(root: Path) -> dict[str, list[str]]:
    found = list_folder(root)
    assert len(found.files) == len(found.labels)
    return {
        name: [file for file, label in zip(found.files, found.labels, strict=True) if label == index]
        for index, name in enumerate(found.classes)
    }


def refused(root: Path) -> str:
    with pytest.raises(DataError) as caught:
        list_folder(root)
    assert caught.value.remedy
    return str(caught.value)


# --- listing ---


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    touch(tmp_path, "rose/b.jpg", "rose/a.PNG", "daisy/c.jpeg", "10/x.webp", "9/x.tif")
    found = listed(tmp_path)
    assert found == {
        "10": ["10/x.webp"],
        "9": ["9/x.tif"],
        "daisy": ["daisy/c.jpeg"],
        "rose": ["rose/a.PNG", "rose/b.jpg"],
    }
    assert list(found) == ["10", "9", "daisy", "rose"]
    assert list_folder(tmp_path).notes == ()


def test_train_and_test_are_the_parts(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.png", "train/b/2.png", "train/b/3.png", "test/b/4.png", "valid/a/5.png", "loose.png")
    found = list_folder(tmp_path)
    assert found.files == ("train/a/1.png", "train/b/2.png", "train/b/3.png", "test/b/4.png")
    assert found.test is not None
    assert found.test.tolist() == [False, False, False, True]
    assert found.notes == (
        "only train/ and test/ are used, not valid",
        "left out, in no folder of a class: 1 file (loose.png)",
    )


def test_train_and_test_may_be_classes(tmp_path: Path) -> None:
    assert list(listed(touch(tmp_path, "train/1.png", "test/2.png", "bus/3.png"))) == ["bus", "test", "train"]


@pytest.mark.parametrize("other", ["test/1.png", "val/a/1.png"])
def test_parts_without_classes_to_test_with_are_refused(tmp_path: Path, other: str) -> None:
    words = refused(touch(tmp_path, "train/a/1.png", "train/b/1.png", other))
    assert "train/ has folders of its own, and there is no test/" in words
    assert f"give {tmp_path / 'train'}" in words


def test_what_is_no_image_is_left_out_and_named(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/1.png", "a/.hidden.png", "a/.DS_Store", "b/Thumbs.db", "b/desktop.ini", ".git/x.png")
    touch(tmp_path, "a/notes.txt", "b/labels.csv", "readme.md", "cover.jpg", "__MACOSX/._1.png")
    (tmp_path / "empty").mkdir()
    found = list_folder(tmp_path)
    assert found.files == ("a/1.png", "b/1.png")
    assert set(found.notes) == {
        "__MACOSX/ has no images and is left out",
        "empty/ has no images and is left out",
        "left out, not the name of an image: 2 files (a/notes.txt, b/labels.csv)",
        "left out, in no folder of a class: 1 file (cover.jpg)",
    }


def test_of_many_other_files_some_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/1.png", *(f"a/{i}.txt" for i in range(1000)))
    (note,) = list_folder(tmp_path).notes
    assert note.startswith("left out, not the name of an image: 1,000 files (a/0.txt, a/1.txt, ")
    assert len(note) < 200


def test_images_in_folders_of_a_class_are_of_the_class(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "a/2020/may/2.png", "b/x/1.png")
    assert listed(tmp_path) == {"a": ["a/1.png", "a/2020/may/2.png"], "b": ["b/x/1.png"]}


def test_a_link_that_leads_above_its_class_is_left_out(tmp_path: Path) -> None:
    touch(tmp_path / "data", *(f"{part}/{name}/1.png" for part in ("train", "test") for name in "ab"))
    (tmp_path / "data/train/a/up").symlink_to(tmp_path / "data/train")
    (tmp_path / "data/train/b/root").symlink_to("../..")
    found = list_folder(tmp_path / "data")
    assert found.files == ("train/a/1.png", "test/a/1.png", "train/b/1.png", "test/b/1.png")
    assert "left out, a link to a folder that its class lies in: 2 files (train/a/up, train/b/root)" in found.notes


def test_links_are_followed_and_circles_end(tmp_path: Path) -> None:
    touch(tmp_path / "else", "1.png", "deep/2.png")
    touch(tmp_path / "data", "a/1.png")
    (tmp_path / "data/b").symlink_to(tmp_path / "else")
    (tmp_path / "data/a/link.png").symlink_to(tmp_path / "else/1.png")
    (tmp_path / "else/deep/back").symlink_to(tmp_path / "else")
    (tmp_path / "data/a/self").symlink_to(tmp_path / "data/a")
    assert listed(tmp_path / "data") == {"a": ["a/1.png", "a/link.png"], "b": ["b/1.png", "b/deep/2.png"]}


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_special_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    touch(tmp_path, "a/1.png", "b/1.png")
    special(tmp_path / "a" / "2.png", kind)
    assert listed(tmp_path)["a"] == ["a/1.png", "a/2.png"]  # refused when it is to be decoded


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    os.close(os.open(folder + b"/bild\xfc.png", os.O_CREAT))
    touch(tmp_path, "b/1.png", "c\x1b[31m/1.png")
    found = list_folder(tmp_path)
    assert found.classes == ("b", "c\\x1b[31m", "caf\\udce9")
    assert os.fsencode(found.files[-1]) == b"caf\xe9/bild\xfc.png"
    assert sorted(found.notes) == [
        "the folder b'c\\x1b[31m' becomes class 'c\\\\x1b[31m'; rename it for another name",
        "the folder b'caf\\xe9' becomes class 'caf\\\\udce9'; rename it for another name",
    ]
    touch(tmp_path, "caf\\udce9/1.png")
    assert "are both class" in refused(tmp_path)


def test_thousands_of_files_are_listed_in_order(tmp_path: Path) -> None:
    for c in range(2):
        (tmp_path / f"{c}").mkdir()
        for i in range(1_500):
            os.close(os.open(tmp_path / f"{c}/{i:05}.jpg", os.O_CREAT))
    found = list_folder(tmp_path)
    assert found.files == tuple(f"{c}/{i:05}.jpg" for c in range(2) for i in range(1_500))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "no images in it (names that end in .png, "),
        (["Train/a/1.png", "Test/a/2.png"], "its folders Test, Train are parts, not classes; name them train and test"),
        (["training/a/1.png", "val/a/2.png"], "its folders training, val are parts, not classes"),
        (["a/1.txt"], ".tiff), but 1 file (a/1.txt); convert them"),
        (["a/1.heic", "b/2.heic"], ".tiff), but 2 files (a/1.heic, b/2.heic); convert them, to JPEG for example"),
        (
            ["a/1.txt", "2.png"],
            "images lie in it beside each other, 1 file (2.png), and none in a folder of its class; move them into",
        ),
        (["a/1.png", "a/2.png"], "one class only ('a'); give a folder with a sub-folder of images for each class"),
        (["data/a/1.png", "data/b/2.png"], "one class only ('data')"),
        (["train/a/1.png", "test/a/1.png"], "one class only ('a')"),
        (
            ["train/a/1.png", "train/b/1.png", "test/a/1.png", "test/c/1.png"],
            "class 'c' has no images in train/; add some",
        ),
    ],
)
def test_folders_that_nothing_can_be_learnt_from(tmp_path: Path, files: list[str], words: str) -> None:
    assert words in refused(touch(tmp_path, *files))


def test_the_folder_that_holds_the_classes_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'data'} may be one" in refused(touch(tmp_path, "data/a/1.png", "data/b/2.png"))


def test_what_is_no_folder(tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory); check the path" in refused(tmp_path / "nowhere")
    assert "is a file, not a folder; unpack it" in refused(touch(tmp_path, "a.zip") / "a.zip")
    with pytest.raises(DataError, match="copy them to one that every worker reaches"):
        list_folder("s3://bucket/images")


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a/1.png", "b/1.png")
    scandir = os.scandir

    def refusing(path: Path) -> Any:  # root, as whom tests may run, reads everything
        if path == tmp_path / "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert f"{tmp_path / 'b'}: cannot be read (Permission denied)" in refused(tmp_path)


# --- plan ---


def listing(labels: Iterable[int], test: Iterable[bool] | None = None) -> Listing:
    names, found = np.unique(np.sort(list(labels)), return_inverse=True)
    files = tuple(f"class-{label}/{i}.png" for i, label in enumerate(found))
    mask = None if test is None else np.array(list(test))
    return Listing(Path("x"), tuple(f"class-{c}" for c in range(len(names))), files, found, mask)


def planned(found: Listing, *, test: float = 0.2, order: Order = "shuffled", seed: int = 0) -> Plan:
    return plan_folder(found, test=test, order=order, seed=seed, sample_bytes=12)


LABELS = st.lists(st.integers(0, 3), min_size=2, max_size=150).map(lambda found: [0, 0, 1, *found])
ORDERS = st.sampled_from(("shuffled", "stored"))


@given(labels=LABELS, test=st.floats(0.01, 0.99), order=ORDERS, seed=st.integers(0, 5))
def test_every_image_goes_to_one_place(labels: list[int], test: float, order: Order, seed: int) -> None:
    found = listing(labels)
    plan = planned(found, test=test, order=order, seed=seed)
    pieces = list(plan.pieces())
    assert sorted(i for piece in pieces for i in piece.samples.tolist()) == list(range(len(labels)))
    for part in PARTS:
        mine = [piece for piece in pieces if piece.part == part]
        assert mine
        assert [piece.index for piece in mine] == list(range(len(mine)))
        assert {len(piece.samples) for piece in mine[:-1]} <= {plan.chunk}
        assert len(mine[-1].samples) <= plan.chunk
    for piece in pieces:
        assert piece.labels.tolist() == found.labels[piece.samples].tolist()


@given(labels=LABELS, test=st.floats(0.01, 0.99), seed=st.integers(0, 5))
def test_every_class_is_split_alike(labels: list[int], test: float, seed: int) -> None:
    found = listing(labels)
    tested = found.labels[planned(found, test=test, seed=seed).parts["test"]]
    count = max(1, round(test * len(labels)))
    for c in np.unique(found.labels):
        of_class = int((found.labels == c).sum())
        taken, quota = int((tested == c).sum()), of_class * count / len(labels)
        assert taken < of_class
        assert quota - 1 < taken < quota + 1 or taken == of_class - 1


@given(labels=LABELS, seed=st.integers(0, 5), data=st.data())
def test_images_that_are_left_out_move_no_others(labels: list[int], seed: int, data: st.DataObject) -> None:
    found = listing(labels)
    bad = data.draw(st.sets(st.integers(3, len(labels) - 1), max_size=5))
    bad = {i for i in bad if (found.labels == found.labels[i]).sum() > len(bad)}  # every class keeps one
    left = found.without(sorted(bad))
    assert [file for i, file in enumerate(found.files) if i not in bad] == list(left.files)
    before, after = planned(found, seed=seed), planned(left, seed=seed)
    for part in PARTS:
        names, others = ([p.listing.files[i] for i in p.parts[part]] for p in (before, after))
        both = set(names) & set(others)
        assert [name for name in names if name in both] == [name for name in others if name in both]


def test_the_seed_decides() -> None:
    found = listing(np.arange(400) % 4)
    plans = [planned(found, seed=seed) for seed in (0, 0, 1)]
    texts = [b"".join(plan.parts[part].tobytes() for part in PARTS) for plan in plans]
    assert texts[0] == texts[1] != texts[2]
    assert set(plans[0].parts["test"].tolist()) != set(plans[2].parts["test"].tolist())


def test_shuffled_parts_are_mixed_and_stored_ones_sorted() -> None:
    found = listing(np.arange(4000) % 4)
    train = planned(found).parts["train"]
    for lo in range(0, 3200, 400):  # about 100 of each class in any 400
        assert np.bincount(found.labels[train[lo : lo + 400]]).min() > 60
    for samples in planned(found, order="stored").parts.values():
        assert (np.diff(samples) > 0).all()


def test_the_folders_own_parts_are_kept() -> None:
    found = listing([0] * 30 + [1] * 30, [i % 3 == 0 for i in range(60)])
    plan = planned(found, test=0.9)
    assert sorted(plan.parts["test"]) == list(range(0, 60, 3))


def test_the_draft_has_the_right_counts() -> None:
    found = listing([0] * 30 + [1] * 60)
    plan = planned(found)
    draft = plan.draft(plan.common(name="x", shape=(2, 2, 3), order="shuffled", seed=0))
    assert (draft.train.samples, draft.test.samples) == (72, 18)
    assert (draft.train.class_counts, draft.test.class_counts) == ((24, 48), (6, 12))
    assert draft.chunk == 3


def test_positions_are_the_places_in_the_chunks() -> None:
    plan = planned(listing(np.arange(100) % 2))
    test, rows = plan.positions()
    for piece in plan.pieces():
        assert set(test[piece.samples]) == {piece.part == "test"}
        assert rows[piece.samples].tolist() == list(
            range(piece.index * plan.chunk, piece.index * plan.chunk + len(piece.samples))
        )


def test_nothing_to_test_with() -> None:
    with pytest.raises(DataError, match="no class has two images"):
        planned(listing([0, 1, 2]))


def test_a_class_without_a_good_image_is_refused() -> None:
    found = listing([0] * 3 + [1] * 3)
    with pytest.raises(DataError, match="class 'class-1': none of its images can be read; mend them"):
        found.without([3, 4, 5])
    parts = replace(found, test=np.array([False, True, False, False, True, True]))
    with pytest.raises(DataError, match="class 'class-1' has no images in train/"):
        parts.without([3])
