"""Any mode, orientation and format opens to the pixels a person sees; bad files are refused by name."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carryall.errors import RequestError
from carryall.runtime.images.opening import MOST_PIXELS, open_picture


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def colours(height: int = 24, width: int = 40) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 6, y * 10, (x + y) % 256], -1).astype(np.uint8))


def header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 10))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_a_file_without_loss_has_its_pixels(kind: str) -> None:
    np.testing.assert_array_equal(open_picture(saved(colours(), kind)), np.asarray(colours()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations_of_a_file_give_one_picture(orientation: int) -> None:
    upright = np.asarray(colours())
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(stored[orientation])), "PNG", exif=exif)
    np.testing.assert_array_equal(open_picture(data), upright)


def test_transparent_pixels_are_white_in_every_mode() -> None:
    palette = Image.new("P", (4, 4))
    palette.putpalette([255, 0, 0, 0, 255, 0] + [0] * 750)
    for data in (
        saved(palette, "PNG", transparency=0),
        saved(Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "PNG"),
        saved(Image.new("LA", (4, 4), (0, 0)), "PNG"),
    ):
        assert (open_picture(data) == 255).all()


def test_deep_grey_keeps_256_levels() -> None:
    ramp = (np.arange(256 * 64, dtype=np.uint32) * 4).astype(np.uint16).reshape(64, 256)
    pixels = open_picture(saved(Image.fromarray(ramp), "PNG"))
    np.testing.assert_array_equal(pixels[..., 0], ramp >> 8)
    assert len(np.unique(pixels)) == 256


def test_floats_of_one_and_of_255_are_levels() -> None:
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    levels = np.arange(256).reshape(16, 16)
    for values in (ramp, ramp * 255):
        pixels = open_picture(saved(Image.fromarray(values), "TIFF"))
        np.testing.assert_array_equal(pixels[..., 1], levels)
    with pytest.raises(RequestError, match="float values"):
        open_picture(Image.fromarray(ramp * 1000))


def test_levels_of_8_bits_in_32_stay() -> None:
    levels = np.arange(256, dtype=np.int32).reshape(16, 16)
    for source in (Image.fromarray(levels), saved(Image.fromarray(levels), "TIFF")):
        np.testing.assert_array_equal(open_picture(source)[..., 2], levels)
    np.testing.assert_array_equal(open_picture(Image.fromarray(levels << 8))[..., 0], levels)
    dark = Image.fromarray(levels.astype(np.uint16))
    assert not open_picture(dark).any()  # 16 bits state their range


def test_other_modes_have_their_colours() -> None:
    assert (open_picture(saved(Image.new("1", (8, 8), 1), "PNG")) == 255).all()
    assert (open_picture(saved(Image.new("L", (8, 8), 77), "PNG")) == 77).all()
    cyan = open_picture(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert cyan[8, 8, 0] > 250
    assert cyan[8, 8, 1:].max() < 5


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP"])
def test_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (200, 0, 100)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert open_picture(data)[4, 4].tolist() == [200, 0, 0]


def test_arrays_images_and_paths_are_pictures_too(tmp_path: Path) -> None:
    pixels = np.asarray(colours())
    (tmp_path / "a.png").write_bytes(saved(colours(), "PNG"))
    for source in (pixels, colours(), tmp_path / "a.png", str(tmp_path / "a.png")):
        np.testing.assert_array_equal(open_picture(source), pixels)
    grey = pixels[..., 0]
    np.testing.assert_array_equal(open_picture(grey[..., None]), np.stack([grey] * 3, -1))


@pytest.mark.parametrize("size", [(9000, 9000), (20000, 20000), (65535, 65535)])
def test_a_header_that_claims_too_much_is_refused_before_decoding(size: tuple[int, int]) -> None:
    begin = time.thread_time()
    with pytest.raises(RequestError, match=f"{MOST_PIXELS}.*smaller"):
        open_picture(header(*size))
    assert time.thread_time() - begin < 0.5


def test_a_large_header_is_an_error_alone_without_a_warning_of_pillow() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(RequestError, match="smaller"):
            open_picture(header(12000, 12000))
    assert not seen


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
def test_a_header_that_claims_too_much_takes_no_memory() -> None:
    """In a process of its own, since the most memory of a process never falls."""
    code = """
import resource, sys
from PIL import Image
from carryall.errors import RequestError
from carryall.runtime.images.opening import open_picture
open_picture(sys.stdin.buffer.read(int(sys.argv[1])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    open_picture(sys.stdin.buffer.read())
except RequestError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    small = saved(Image.new("RGB", (64, 64)), "PNG")
    done = subprocess.run(
        [sys.executable, "-c", code, str(len(small))],
        input=small + header(9000, 9000),
        capture_output=True,
        check=True,
    )
    assert int(done.stdout) < 10_000  # KiB


def scanned(edge: int, copies: int) -> bytes:
    """A progressive JPEG file whose last scan comes again and again."""
    data = saved(Image.new("RGB", (edge, edge), (128, 128, 128)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * copies + data[-2:]


def test_a_file_that_goes_over_its_pixels_again_and_again_is_refused_before_decoding() -> None:
    """14 bytes are a scan of all pixels: a file of 1 MB would take minutes."""
    for edge, copies in ((64, 100), (4000, 80), (2000, 70_000)):
        begin = time.thread_time()
        with pytest.raises(RequestError, match="scans, which take too long"):
            open_picture(scanned(edge, copies))
        assert time.thread_time() - begin < 1.5
    assert open_picture(scanned(500, 80)).shape == (500, 500, 3)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (b"", "0 bytes"),
        (b"hello", "no supported format"),
        (b"%PDF-1.7 and more", "no supported format"),
        (saved(colours(), "PNG")[:-40], "damaged or cut off"),
        (saved(colours(200, 300), "JPEG")[:2000], "damaged or cut off"),
        (header(30000, 10), "longer than 200 times"),
        *(
            (saved(colours(), name), "no supported format")
            for name in ("PPM", "EPS", "TGA", "PCX", "ICO", "SGI", "DDS", "JPEG2000")
        ),
        (b"8BPS\0\1" + bytes(40), "no supported format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no supported format"),
        (np.zeros((0, 4, 3), np.uint8), "no pixels"),
        (np.zeros((4, 4, 3), np.float32), "must be uint8"),
        (np.zeros((4, 4, 5), np.uint8), "must be uint8"),
        (17, "must be a path"),
        ("/no/such/file.png", "cannot be read"),
    ],
)
def test_a_bad_picture_is_refused_by_name(source: Any, what: str) -> None:
    with pytest.raises(RequestError, match=what):
        open_picture(source)


@given(st.data())
def test_no_damage_to_a_file_raises_another_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP"]))
    content = bytearray(saved(colours(), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        pixels = open_picture(bytes(content[: data.draw(st.integers(0, len(content)))]))
    except RequestError:
        return
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
