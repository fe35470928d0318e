"""The pages of a PDF file as pictures, drawn by PDFium (https://pdfium.googlesource.com/pdfium/).

PDFium runs no scripts and fetches nothing, but it is C++ code in this process.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

import numpy as np

from ...errors import MissingExtraError, RequestError
from .opening import MOST_PIXELS, Pixels, read_picture

DPI = 150  # an A4 page has 1240 x 1754 pixels
MOST_PAGES = 64  # of a file that is read whole
_MARK, _MARK_WITHIN = b"%PDF-", 1024  # readers accept it within the first bytes
# Pixels of a point, 1/72 inch. PDFium rounds sizes up, so the error of a product must not add a pixel.
_SCALE = DPI / 72 * (1 - 1e-7)
_lock = threading.Lock()  # PDFium is not thread-safe


class PdfPages(Sequence[Pixels]):
    """The pages of a PDF file, each drawn when it is asked for, uint8 [height, width, 3].

    Args:
        data: the content of the file.
        page: a page, counted from 1; None for all.

    Raises:
        RequestError: the file is damaged or encrypted, has no such page, or too many.
        MissingExtraError: pypdfium2 is not installed.
    """

    def __init__(self, data: bytes, page: int | None = None) -> None:
        self._data = data
        with _opened(data) as document:
            count = len(document)
        if page is not None and not 1 <= page <= count:
            raise RequestError(f"a PDF file has {count} pages; there is no page {page}")
        if page is None and not 1 <= count <= MOST_PAGES:
            raise RequestError(
                f"a PDF file has {count} pages; the limit is {MOST_PAGES}: take one page, or split the file"
            )
        self._pages = range(count) if page is None else range(page - 1, page)

    def __len__(self) -> int:
        return len(self._pages)

    @overload
    def __getitem__(self, index: int) -> Pixels: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Pixels]: ...
    def __getitem__(self, index: int | slice) -> Pixels | Sequence[Pixels]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        number = self._pages[index]
        with _opened(self._data) as document:
            page = document[number]
            width, height = (math.ceil(size * _SCALE) for size in page.get_size())
            if width * height > MOST_PIXELS:
                raise RequestError(
                    f"page {number + 1} of a PDF file has {width} x {height} pixels at {DPI} dpi, which "
                    f"exceeds the limit of {MOST_PIXELS}"
                )
            drawn = page.render(scale=_SCALE, rev_byteorder=True, force_bitmap_format=_rgb())
            return np.array(drawn.to_numpy(), np.uint8)


def pictures_of(source: Any, page: int | None = None) -> Sequence[Any]:
    """Return the pages of a PDF file, which is known by its content, or the source of another picture alone.

    Args:
        source: as for ``open_picture``.
        page: a page of a PDF file, counted from 1; None for all.

    Raises:
        RequestError: see ``PdfPages``; or a page is asked for of another file.
        MissingExtraError: see ``PdfPages``.
    """
    data: Any = source
    if isinstance(source, str | os.PathLike):
        data = read_picture(Path(source))
    if isinstance(data, bytes | bytearray | memoryview):
        if _MARK in bytes(data[:_MARK_WITHIN]):
            return PdfPages(bytes(data), page)
        source = data
    if page is not None:
        raise RequestError(f"page {page} is asked for of a picture that is no PDF file")
    return [source]


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    try:
        import pypdfium2
    except ImportError as error:
        raise MissingExtraError("PDF files", "pypdfium2", "documents") from error
    with _lock:
        document = None
        try:
            document = pypdfium2.PdfDocument(data)
            yield document
        except pypdfium2.PdfiumError as error:
            raise RequestError(
                f"a PDF file cannot be read: {error}; it may be damaged or encrypted"
            ) from error
        finally:
            if document is not None:
                document.close()


def _rgb() -> int:
    import pypdfium2.raw

    return int(pypdfium2.raw.FPDFBitmap_BGR)
