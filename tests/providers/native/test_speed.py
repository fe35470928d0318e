"""Measured products: every form of tiles can be measured, and more rows take longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from carryall.errors import ProviderRuntimeError
from carryall.graph_opt.lower.products.stored_tiles import FORMS
from carryall.graph_opt.lower.products.tiles import MIDDLE, ZERO_POINTS
from carryall.providers.native.speed import ProductForm, seconds_per_byte

STORED = [ProductForm(512, form.bits, form.block, form.group, form.offsets) for form in FORMS.values()]
OWN = [
    ProductForm(576, 4, 32, 64, ZERO_POINTS),
    ProductForm(576, 8, 64, 0, MIDDLE),
    ProductForm(577, 16, 1, 0, 6),
]


@pytest.mark.parametrize("form", [*OWN, *STORED], ids=str)
def test_every_form_is_measured(library: Path, form: ProductForm) -> None:
    found = seconds_per_byte(library, form, 1, 1, seconds=0.01)
    assert 1e-12 < found < 1e-6


def test_many_rows_take_longer_and_results_are_kept(library: Path) -> None:
    one, many = (seconds_per_byte(library, OWN[0], rows, 1, seconds=0.01) for rows in (1, 64))
    assert many > 2 * one
    assert seconds_per_byte(library, OWN[0], 64, 1, seconds=0.01) == many


def test_a_form_without_kernels_is_an_error(library: Path) -> None:
    with pytest.raises(ProviderRuntimeError, match="bits is not 4 or 8"):
        seconds_per_byte(library, ProductForm(64, 2, 32, 0, MIDDLE), 1, 1)
