"""PDF files that would take all time or memory are ended, and others are read behind them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from carryall.errors import RequestError
from carryall.runtime.images.pdf import PdfPages
from carryall.runtime.images.pdf_process import PROCESS, PdfProcess, TooLargeError

pytest.importorskip("pypdfium2")
POSIX = pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")


def coloured() -> bytes:
    """Three pages of 60 x 90 points."""
    first, *others = (Image.new("RGB", (60, 90), colour) for colour in ("red", "green", "blue"))
    content = io.BytesIO()
    first.save(content, "PDF", save_all=True, append_images=others)
    return content.getvalue()


def nested(depth: int, times: int) -> bytes:
    """Return a page of forms in forms: each draws the next one so many times."""
    box = b"[0 0 99 99]"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox %s /Contents 4 0 R"
        b" /Resources << /XObject << /X 5 0 R >> >> >>" % box,
    ]
    draws = b"/X Do " * times
    objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(draws), draws))
    for number in range(depth):
        further = b"/Resources << /XObject << /X %d 0 R >> >>" % (6 + number)
        body, further = (b"0 0 1 1 re f", b"") if number == depth - 1 else (draws, further)
        head = b"<< /Type /XObject /Subtype /Form /BBox %s %s /Length %d >>" % (box, further, len(body))
        objects.append(b"%s\nstream\n%s\nendstream" % (head, body))
    content, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    table += b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, len(content))
    return content + table + end


BOMB = nested(5, 20)


def drawn(process: PdfProcess, data: bytes, seconds: float = 20.0) -> tuple[int, int]:
    _, width, height, _ = process.draw(data, 0, scale=1.0, most_pixels=10_000, seconds=seconds)
    return width, height


@POSIX
@pytest.mark.long
@pytest.mark.parametrize(
    ("memory", "seconds", "why"),
    [(400 << 20, 20.0, "more than 400 MiB of memory"), (64 << 30, 0.1, "more than 0 s of processor time")],
)
def test_a_file_that_needs_too_much_is_ended_and_the_next_one_is_read(
    memory: int, seconds: float, why: str
) -> None:
    assert len(BOMB) < 2000
    process = PdfProcess(memory)
    try:
        assert drawn(process, nested(2, 2)) == (99, 99)
        before = os.times().children_user
        with pytest.raises(RequestError, match=rf"a PDF file needs {why}.*send its pages as pictures"):
            drawn(process, BOMB, seconds)
        assert os.times().children_user - before < 8
        assert drawn(process, nested(2, 2)) == (99, 99)
    finally:
        process.close()


def test_pages_of_a_file_share_its_time() -> None:
    pages = PdfPages(coloured())
    left = [pages._left]
    for number in range(3):
        _ = pages[number]
        left.append(pages._left)
    assert left == sorted(left, reverse=True)
    assert left[0] <= 30


@POSIX
def test_a_child_that_died_is_started_again() -> None:
    pages = PdfPages(coloured())
    expected = pages[1]
    assert PROCESS._child is not None
    os.kill(PROCESS._child.pid, signal.SIGKILL)
    PROCESS._child.wait()
    np.testing.assert_array_equal(pages[1], expected)


@POSIX
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_process_that_forked_has_a_child_of_its_own() -> None:
    pages = PdfPages(coloured())
    expected = pages[0]
    assert PROCESS._child is not None
    usual, child = PROCESS._child.pid, os.fork()
    if not child:
        same = bool((pages[0] == expected).all()) and PROCESS._child.pid != usual
        PROCESS.close()
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(pages[0], expected)
    assert PROCESS._child.pid == usual


def test_the_size_of_a_page_is_checked_before_it_is_drawn() -> None:
    with pytest.raises(TooLargeError) as caught:
        PROCESS.draw(coloured(), 0, scale=10.0, most_pixels=1000, seconds=5.0)
    assert (caught.value.width, caught.value.height) == (600, 900)


@POSIX
def test_the_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(coloured())
    code = (
        "import sys; from carryall.runtime.images import pdf, pdf_process; pdf.pictures_of(sys.argv[1]);"
        "print(pdf_process.PROCESS._child.pid)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, tmp_path / "a.pdf"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
