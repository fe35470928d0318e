"""Models of self-tests: every pair of family and form once, and each family and each form early."""

from __future__ import annotations

import pytest

from carryall.contract import is_past, is_past_state
from carryall.runtime.tasks.selftest_models import FAMILIES, FORMS, cases, decoder


def test_each_pair_occurs_once_and_the_first_ones_cover_all() -> None:
    pairs = list(cases())
    assert len(pairs) == len(set(pairs)) == len(FAMILIES) * len(FORMS)
    early = pairs[: len(FAMILIES)]
    assert {family for family, _ in early} == FAMILIES.keys()
    assert {form for _, form in early} == set(FORMS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_a_decoder(family: str) -> None:
    graph = decoder(family, "float").graph
    states = sum(is_past_state(str(value.name)) for value in graph.inputs)
    assert states == (family == "lfm2")
    assert sum(is_past(str(value.name)) for value in graph.inputs) == 4 - 2 * states
    assert graph.outputs[0].shape is not None
    assert graph.outputs[0].shape[-1] == 512
