"""Pages of PDF files: drawn as they are, counted, and refused by name."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from recorded_pictures import picture

from carryall.errors import RequestError
from carryall.runtime.images.pdf import DPI, MOST_PAGES, pictures_of

pytest.importorskip("pypdfium2")
COLOURS = [(200, 30, 60), (20, 160, 90), (0, 40, 250)]


def pdf(*pages: Image.Image, resolution: float = DPI) -> bytes:
    content = io.BytesIO()
    pages[0].save(content, "PDF", save_all=True, append_images=pages[1:], resolution=resolution, quality=100)
    return content.getvalue()


def coloured(width: int = 60, height: int = 90) -> bytes:
    return pdf(*(Image.new("RGB", (width, height), colour) for colour in COLOURS))


def test_pages_have_the_size_and_the_colours_of_what_is_on_them() -> None:
    """Red and blue in their places, height and width too."""
    pages = pictures_of(coloured())
    assert len(pages) == 3
    for page, colour in zip(pages, COLOURS, strict=True):
        assert page.shape == (90, 60, 3)
        assert page.dtype == np.uint8
        assert np.abs(page.astype(int) - colour).max() <= 4  # of JPEG


def test_a_page_looks_like_the_picture_on_it() -> None:
    y, x = np.mgrid[0:120, 0:200]
    expected = np.stack([x, 255 - x, 2 * y], axis=-1).astype(np.uint8)
    (page,) = pictures_of(pdf(Image.fromarray(expected)))
    assert page.shape == expected.shape
    assert np.abs(page.astype(int) - expected).max() < 12


def test_one_page_of_a_path_and_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "scan.bin"  # known by its content
    path.write_bytes(coloured())
    for source in (path, str(path), path.read_bytes(), memoryview(path.read_bytes())):
        (page,) = pictures_of(source, 2)
        np.testing.assert_array_equal(page, pictures_of(source)[1])
    np.testing.assert_array_equal(pictures_of(path)[-1], pictures_of(path, 3)[0])


def test_other_pictures_are_alone(tmp_path: Path) -> None:
    pixels = picture(10, 20)
    assert pictures_of(pixels)[0] is pixels
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert len(pictures_of(tmp_path / "a.png")) == 1
    with pytest.raises(RequestError, match="page 2 is asked for of a picture that is no PDF file"):
        pictures_of(tmp_path / "a.png", 2)


@pytest.mark.parametrize("page", [0, -1, 4])
def test_a_page_that_is_not_there_is_refused(page: int) -> None:
    with pytest.raises(RequestError, match=f"has 3 pages; there is no page {page}"):
        pictures_of(coloured(), page)


def test_too_many_pages_are_refused_unless_one_is_chosen() -> None:
    many = pdf(*(Image.new("L", (4, 4), 9) for _ in range(MOST_PAGES + 1)))
    with pytest.raises(RequestError, match=f"has {MOST_PAGES + 1} pages; the limit is {MOST_PAGES}"):
        pictures_of(many)
    assert len(pictures_of(many, MOST_PAGES + 1)) == 1


@pytest.mark.parametrize("cut", [9, 200, -400])
def test_damaged_files_are_refused_or_read(cut: int) -> None:
    """PDFium repairs a missing table; what it draws then are pages."""
    with contextlib.suppress(RequestError):
        assert all(page.ndim == 3 for page in pictures_of(coloured()[:cut]))
    with pytest.raises(RequestError, match=r"cannot be read.*damaged or encrypted"):
        pictures_of(b"%PDF-1.7\nno such file")


def test_a_page_of_a_wall_is_refused_before_it_is_drawn() -> None:
    wall = pdf(Image.new("L", (8, 8), 3), resolution=0.05)
    with pytest.raises(RequestError, match=r"has \d+ x \d+ pixels at 150 dpi, which exceeds the limit"):
        _ = pictures_of(wall)[0]


def test_threads_draw_pages_of_one_file() -> None:
    """PDFium itself must not be called by two threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    data = coloured(300, 200)
    expected = list(pictures_of(data))
    with ThreadPoolExecutor(4) as pool:
        for drawn in pool.map(lambda _: list(pictures_of(data)), range(8)):
            for page, wanted in zip(drawn, expected, strict=True):
                np.testing.assert_array_equal(page, wanted)
