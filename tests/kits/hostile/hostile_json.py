"""Invalid values and random changes of JSON documents, for fuzzing by structure."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from(
    [
        0,
        1,
        2,
        3,
        -1,
        -3,
        7,
        64,
        10**4,
        10**9,
        2**31,
        2**63,
        10**40,
        0.5,
        -0.0,
        1e-300,
        1e300,
        1e999,
        float("nan"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.integers(-5, 300) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def places(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values of a document, including nested ones."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(document, dict):
        inner = list(document.items())
    elif isinstance(document, list):
        inner = list(enumerate(document))
    own = [prefix] if prefix else []
    return own + [place for key, value in inner for place in places(value, (*prefix, key))]


@st.composite
def changed(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of ``document`` with one to three values replaced, deleted or swapped."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        known = places(result)
        if not known:
            break
        *outer, last = draw(st.sampled_from(known))
        holder = result
        for key in outer:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "delete", "borrow"]))
        if how == "delete":
            del holder[last]
        elif how == "borrow":
            place = draw(st.sampled_from(known))
            value: Any = result
            for key in place:
                value = value[key]
            holder[last] = copy.deepcopy(value)
        else:
            holder[last] = draw(VALUES)
    return result
