"""Draws from the largest logits by the library of kernels, and by NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from carryall.providers.native.best_draws import best_draws
from carryall.runtime.engine.sampling import sampler


@pytest.fixture(scope="module", params=["library", "numpy"])
def draws(request: pytest.FixtureRequest) -> Iterator[str]:
    """Draw by the library, or as if it were not built."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(sampler, "best_draws", lambda: None)
        elif best_draws() is None:
            pytest.skip("the library is not built")
        yield request.param
