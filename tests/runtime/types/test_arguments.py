"""Arguments are checked by the types of their annotations."""

from __future__ import annotations

from typing import TypeVar

import pytest

from carryall.runtime.types.arguments import fits

T = TypeVar("T")


def test_a_named_type_is_the_type_that_it_names() -> None:
    """NumPy's NDArray is one since Python 3.12."""
    extensions = pytest.importorskip("typing_extensions")
    whole = extensions.TypeAliasType("whole", list[int])
    listed = extensions.TypeAliasType("listed", list[T], type_params=(T,))  # type: ignore[valid-type]
    for hint in (whole, listed[int]):
        assert fits([1], hint)
        assert not fits(["a"], hint)
        assert not fits(1, hint)
