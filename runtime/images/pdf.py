"""The pages of a PDF file as pictures, drawn by PDFium (https://pdfium.googlesource.com/pdfium/).

PDFium runs no scripts and fetches nothing. It is C++ code whose calls nothing stops, so it runs in a process
of its own, with limits (``pdf_process``).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from ...errors import MissingExtraError, RequestError
from .opening import MOST_PIXELS, Pixels, read_picture
from .pdf_process import PROCESS, TooLargeError

DPI = 150  # an A4 page has 1240 x 1754 pixels
MOST_PAGES = 64  # of a file that is read whole
_MARK, _MARK_WITHIN = b"%PDF-", 1024  # readers accept it within the first bytes
# Pixels of a point, 1/72 inch. PDFium rounds sizes up, so the error of a product must not add a pixel.
_SCALE = DPI / 72 * (1 - 1e-7)
_FILE_SECONDS = 30.0  # of processor time for all pages of a file; a scanned page takes a tenth


class PdfPages(Sequence[Pixels]):
    """The pages of a PDF file, each drawn when it is asked for, uint8 [height, width, 3].

    Args:
        data: the content of the file.
        page: a page, counted from 1; None for all.

    Raises:
        RequestError: the file is damaged or encrypted, has no such page, or too many, or needs more time or
            memory than it may.
        MissingExtraError: pypdfium2 is not installed.
    """

    def __init__(self, data: bytes, page: int | None = None) -> None:
        _check_installed()
        self._data = data
        count, spent = PROCESS.count(data, _FILE_SECONDS)
        self._left = _FILE_SECONDS - spent
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
        try:
            drawn, width, height, spent = PROCESS.draw(
                self._data, number, scale=_SCALE, most_pixels=MOST_PIXELS, seconds=self._left
            )
        except TooLargeError as error:
            raise RequestError(
                f"page {number + 1} of a PDF file has {error.width} x {error.height} pixels at {DPI} dpi, "
                f"which exceeds the limit of {MOST_PIXELS}"
            ) from error
        self._left -= spent
        return np.frombuffer(drawn, np.uint8).reshape(height, width, 3)


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


def _check_installed() -> None:
    if importlib.util.find_spec("pypdfium2") is None:
        raise MissingExtraError("PDF files", "pypdfium2", "documents")
