"""The form of ``carryall demo``: the picture as text, and what the embedded reader reads of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carryall import LLM
from carryall.cli.demo_form import FORM, WRITTEN, dots, read_form
from carryall.runtime.images.opening import open_picture


def drawn(lines: list[str]) -> np.ndarray:
    """The dots of braille patterns as pixels, by the order of dots in Unicode: 1237, then 4568 of a cell."""
    cells = np.array([[ord(character) - 0x2800 for character in line] for line in lines])
    pixels = np.zeros((4 * cells.shape[0], 2 * cells.shape[1]), bool)
    for dot, (row, column) in enumerate([(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)]):
        pixels[row::4, column::2] = cells >> dot & 1
    return pixels


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_dots_are_the_ink_of_a_picture_that_fits(height: int, width: int, seed: int) -> None:
    ink = np.random.default_rng(seed).random((height, width)) < 0.3
    ink[0, :] = ink[:, 0] = ink[-1, -1] = True  # so that no row of dots is empty, nor an edge
    pixels = np.full((height + 40, width + 40), 250, np.uint8)  # most of a page is paper
    pixels[3 : 3 + height, 5 : 5 + width][ink] = 20
    found = drawn(dots(pixels, 15))
    assert np.array_equal(found[:height, :width], ink)
    assert found.sum() == ink.sum()


def test_a_wide_picture_is_reduced() -> None:
    pixels = np.full((64, 400), 240, np.uint8)
    pixels[8:16, 10:390] = 10
    (line, *rest) = dots(pixels, 50)
    assert rest == []
    assert len(line) == 48  # 380 columns, reduced by 4: two of them a character


def test_a_picture_without_ink_is_no_line() -> None:
    assert dots(np.full((20, 20), 200, np.uint8), 80) == []


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_form_fits_a_terminal(columns: int) -> None:
    lines = dots(open_picture(FORM).min(-1), columns)
    assert 8 <= len(lines) <= 32
    assert max(map(len, lines)) <= columns


@pytest.mark.long
def test_the_reader_reads_the_form() -> None:
    with LLM("reader", provider="cpu") as llm:
        form = read_form(llm)
    assert form["written"] == json.loads(WRITTEN.read_text(encoding="utf-8"))
    assert [*form["read"]] == [*form["written"]]
    right = sum(form["read"][name] == value for name, value in form["written"].items())
    assert right >= 3
