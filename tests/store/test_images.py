"""Images of every mode and orientation come out as they are looked at; what is none is refused."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from daskcnn.errors import DataError
from daskcnn.store.making import images
from daskcnn.store.making.images import Fit, decode, dimensions, is_deep, read_file
from tests.special_files import SPECIAL, special

H, W = 6, 4


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def look(image: Image.Image, kind: str = "PNG", *, grey: bool = False, **options: Any) -> npt.NDArray[np.uint8]:
    value_range = options.pop("value_range", None)
    data = encoded(image, kind, **options)
    found = decode(data, name="x", size=image.size[::-1], grey=grey, value_range=value_range)
    assert found.dtype == np.uint8
    assert found.shape == (*image.size[::-1], 1 if grey else 3)
    assert found.flags.writeable
    return found


def colours(seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (H, W, 3), dtype=np.uint8)


# --- modes ---


def test_colours_come_out_as_they_are() -> None:
    np.testing.assert_array_equal(look(Image.fromarray(colours())), colours())


def test_grey_is_grey_in_each_channel_or_in_one() -> None:
    grey = colours()[:, :, 0]
    np.testing.assert_array_equal(look(Image.fromarray(grey)), np.repeat(grey[:, :, None], 3, axis=2))
    np.testing.assert_array_equal(look(Image.fromarray(grey), grey=True), grey[:, :, None])


def test_colours_become_grey_as_they_are_seen() -> None:
    found = look(Image.fromarray(colours()), grey=True)
    np.testing.assert_allclose(found[:, :, 0], colours() @ [0.299, 0.587, 0.114], atol=1)


def test_black_and_white() -> None:
    bits = colours()[:, :, 0] > 127
    np.testing.assert_array_equal(look(Image.fromarray(bits), grey=True)[:, :, 0], np.where(bits, 255, 0))


@pytest.mark.parametrize(("kind", "values"), [("PNG", np.uint16), ("TIFF", np.uint16)])
def test_sixteen_bits_are_scaled_and_white_stays_white(kind: str, values: type) -> None:
    deep: npt.NDArray[Any] = np.array([[0, 257, 32768], [65535, 65278, 128]], values)
    found = look(Image.fromarray(deep), kind, grey=True)
    assert found[:, :, 0].tolist() == [[0, 1, 128], [255, 254, 0]]


def test_sixteen_bits_of_the_other_byte_order() -> None:
    deep = np.array([[0, 257], [65535, 32768]], ">u2")
    found = look(Image.frombytes("I;16B", (2, 2), deep.tobytes()), "TIFF", grey=True)
    assert found[:, :, 0].tolist() == [[0, 1], [255, 128]]


@pytest.mark.parametrize("values", [np.float32, np.int32, np.int16, np.uint16])
def test_a_stated_range_is_black_to_white(values: type) -> None:
    deep: npt.NDArray[Any] = np.array([[100, 1100, 2100], [90, 3000, 500]], values)
    found = look(Image.fromarray(deep), "TIFF", grey=True, value_range=(100, 2100))
    assert found[:, :, 0].tolist() == [[0, 128, 255], [0, 255, 51]]


def test_numbers_that_nobody_can_know_the_meaning_of_are_refused_without_a_range() -> None:
    for deep, told in (
        (
            np.array([[0.5, np.nan, 1.02]], np.float32),
            "x: real numbers from 0.5 to 1.02, and no --value-range LOW,HIGH",
        ),
        (np.array([[-3, 7]], np.int32), "x: integers of 32 bits from -3 to 7, and no --value-range"),
    ):
        with pytest.raises(DataError, match=told):
            look(Image.fromarray(deep), "TIFF", grey=True)


def sixteen_bits(colour_type: int, values: npt.NDArray[Any]) -> bytes:
    """A PNG image of 16 bits, which Pillow reads and does not write."""
    H, W, _ = values.shape
    head = struct.pack(">IIBBBBB", W, H, 16, colour_type, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in values))
    parts = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    packed = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(("colour_type", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_a_range_of_16_bits_with_colours_is_refused(colour_type: int, channels: int) -> None:
    data = sixteen_bits(colour_type, np.full((2, 3, channels), 0xFF10))
    assert is_deep(data, name="x")
    assert decode(data, name="x", size=(2, 3))[0, 0, 0] in (254, 255)
    with pytest.raises(DataError, match=r"transparency of 16 bits, whose white is always 65,535; leave --value"):
        decode(data, name="x", size=(2, 3), value_range=(0, 4095))
    grey = sixteen_bits(0, np.full((2, 3, 1), 4095))
    assert decode(grey, name="x", size=(2, 3), value_range=(0, 4095)).min() == 255
    assert not is_deep(encoded(Image.new("RGB", (3, 2))), name="x")


def test_infinite_numbers_are_white_and_black_and_those_that_are_none_black() -> None:
    odd = np.array([[np.inf, -np.inf, np.nan, 1e35]], np.float32)
    found = look(Image.fromarray(odd), "TIFF", grey=True, value_range=(-1, 1))
    assert found.ravel().tolist() == [255, 0, 0, 255]


def test_a_palette() -> None:
    image = Image.fromarray((np.arange(H * W) % 3).astype(np.uint8).reshape(H, W), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    found = look(image)
    np.testing.assert_array_equal(found.reshape(-1, 3)[:3], np.diag([255] * 3))


@pytest.mark.parametrize("transparency", [1, bytes([255, 0, 128])])
def test_what_is_transparent_in_a_palette_shows_black(transparency: Any) -> None:
    image = Image.fromarray((np.arange(H * W) % 3).astype(np.uint8).reshape(H, W), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    found = look(image, transparency=transparency).reshape(-1, 3)
    half = 255 if isinstance(transparency, int) else 128
    assert found[:3].tolist() == [[255, 0, 0], [0, 0, 0], [0, 0, half]]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_shows_black(mode: str) -> None:
    image = Image.new("RGBA", (3, 1), (200, 200, 200, 255))
    image.putpixel((1, 0), (200, 200, 200, 0))
    image.putpixel((2, 0), (200, 200, 200, 128))
    found = look(image.convert(mode))
    assert found[0, 0].tolist() == [200] * 3
    assert found[0, 1].tolist() == [0] * 3
    np.testing.assert_allclose(found[0, 2], [100] * 3, atol=1)


def test_a_transparent_colour_shows_black() -> None:
    image = Image.new("RGB", (2, 1), (10, 20, 30))
    image.putpixel((1, 0), (200, 100, 50))
    assert look(image, transparency=(10, 20, 30)).tolist() == [[[0, 0, 0], [200, 100, 50]]]


MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "TIFF": ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B", "I", "F"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("1", "L", "P"),
    "BMP": ("1", "L", "P", "RGB"),
}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
@pytest.mark.parametrize("grey", [True, False])
def test_every_mode_has_a_picture(kind: str, mode: str, grey: bool) -> None:
    light = np.full((8, 8), 255, np.uint8)
    light[:, :4] = 0
    image = Image.fromarray(light)
    if mode in ("I;16", "I"):
        image = Image.fromarray(light.astype("u2" if mode == "I;16" else "i4") * 257)
    elif mode == "I;16B":
        image = Image.frombytes(mode, (8, 8), (light.astype(">u2") * 257).tobytes())
    elif mode == "PA":
        image = image.convert("P").convert("PA")
    else:
        image = image.convert(mode) if mode in ("1", "L", "LA", "P", "F") else image.convert("RGB").convert(mode)
    value_range = (0, 65535 if mode == "I" else 255) if mode in ("I", "F") else None
    found = decode(encoded(image, kind), name="x", size=(8, 8), grey=grey, value_range=value_range)
    assert found[:, :3].max() < 30
    assert found[:, 5:].min() > 225


# --- orientation and fit ---


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_an_image_is_turned_as_it_is_looked_at(kind: str, orientation: int) -> None:
    right = np.zeros((24, 16, 3), np.uint8)  # an L: no orientation looks like another
    right[:, :8] = right[16:, :] = 255
    turns: dict[int, Any] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.transpose(1, 0, 2),
        6: lambda a: np.rot90(a, 1),
        7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
        8: lambda a: np.rot90(a, -1),
    }
    stored = Image.fromarray(np.ascontiguousarray(turns[orientation](right)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    assert dimensions(data, name="x") == (24, 16)
    found = decode(data, name="x", size=(24, 16))
    assert np.abs(found.astype(int) - right).mean() < 3


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_is_none_turns_nothing(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(look(Image.fromarray(colours()), exif=exif), colours())


@pytest.mark.parametrize("exif", [b"II*\0\xff\xff\xff\xff", b"nonsense", b"MM\0*\0\0\0\x08\xff\xff"])
def test_damaged_exif_data_turn_nothing(exif: bytes) -> None:
    data = encoded(Image.fromarray(np.full((8, 8, 3), 7, np.uint8)), "JPEG", exif=b"Exif\0\0" + exif)
    assert np.abs(decode(data, name="x", size=(8, 8)).astype(int) - 7).max() < 3


@pytest.mark.parametrize(
    ("fit", "left", "middle"), [("stretch", [255, 0, 0], None), ("crop", [0, 255, 0], None), ("pad", None, [0, 255, 0])]
)
def test_other_proportions(fit: Fit, left: list[int] | None, middle: list[int] | None) -> None:
    wide = np.zeros((4, 12, 3), np.uint8)
    wide[:, :4, 0] = wide[:, 4:8, 1] = wide[:, 8:, 2] = 255
    found = decode(encoded(Image.fromarray(wide)), name="x", size=(4, 4), fit=fit)
    if left is not None:
        np.testing.assert_allclose(found[2, 0], left, atol=60)
    if middle is not None:
        assert found[0].max() == found[-1].max() == 0  # black above and below
        np.testing.assert_allclose(found[1:3].max(axis=(0, 1)), [255] * 3, atol=90)


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from(["stretch", "crop", "pad"]), st.booleans())
def test_any_size_fits(height: int, width: int, fit: Fit, grey: bool) -> None:
    data = encoded(Image.new("RGBA", (width, height), (9, 9, 9, 255)))
    assert decode(data, name="x", size=(5, 7), fit=fit, grey=grey).shape == (5, 7, 1 if grey else 3)


# --- what is refused ---


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("1", (30, 20)))
    monkeypatch.setattr(images, "MAX_PIXELS", 599)
    for function in (lambda: decode(data, name="x", size=(8, 8)), lambda: dimensions(data, name="x")):
        with pytest.raises(DataError, match=r"x: too large for an image to look at .30x20 pixels, more than the 599"):
            function()


def test_too_many_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.png").write_bytes(encoded(Image.fromarray(colours())))
    monkeypatch.setattr(images, "MAX_BYTES", 20)
    with pytest.raises(DataError, match=r"x\.png: .* bytes, more than the 20 allowed; scale it down first"):
        read_file(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x: 21 bytes, more than the 20 allowed"):
        decode(bytes(21), name="x", size=(8, 8))


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    with pytest.raises(DataError, match=f"x.png: a {SPECIAL[kind]}, not a regular file; give a regular file"):
        read_file(special(tmp_path / "x.png", kind))


@settings(max_examples=150)
@given(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"]), st.data())
def test_damaged_files_are_refused_or_decoded(kind: str, draw: st.DataObject) -> None:
    data = bytearray(encoded(Image.fromarray(colours()), kind))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(data)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of Pillow's comes out
        with suppress(DataError):
            assert decode(bytes(data[:cut]), name="x", size=(8, 8)).shape == (8, 8, 3)


# --- JPEG images that are much larger than what is wanted ---


def photograph(size: tuple[int, int], seed: int = 0) -> Image.Image:
    """Smooth colours with grain."""
    rng = np.random.default_rng(seed)
    colours = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    smooth = np.asarray(colours.resize(size, Image.Resampling.BICUBIC), np.float32)
    return Image.fromarray(np.clip(smooth + rng.normal(0, 9, smooth.shape), 0, 255).astype(np.uint8))


@pytest.mark.parametrize("grey", [False, True])
@pytest.mark.parametrize("fit", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("size", [(256, 256), (500, 333), (1000, 250), (259, 641)])
def test_a_large_jpeg_is_decoded_small_and_looks_the_same(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], fit: Fit, grey: bool
) -> None:
    data = encoded(photograph(size), "JPEG", quality=90)
    small = decode(data, name="x", size=(32, 24), fit=fit, grey=grey).astype(float)
    monkeypatch.setattr(JpegImageFile, "draft", lambda *_: None)  # decode all of it
    whole = decode(data, name="x", size=(32, 24), fit=fit, grey=grey)
    assert np.sqrt(np.mean((small - whole) ** 2)) < 1.5
    assert np.abs(small - whole).max() < 20


@pytest.mark.parametrize(("frame", "decoded"), [((64, 16), (128, 32)), ((16, 64), (512, 128)), ((8, 2), (64, 16))])
def test_how_small_depends_on_the_image_as_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, frame: tuple[int, int], decoded: tuple[int, int]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(photograph((512, 128)), "JPEG", exif=exif)
    sizes, resizable = [], images._resizable

    def noted(image: Image.Image, *how: Any) -> Image.Image:
        sizes.append(image.size)
        return resizable(image, *how)

    monkeypatch.setattr(images, "_resizable", noted)
    assert decode(data, name="x", size=frame).shape == (*frame, 3)
    assert sizes == [decoded]
