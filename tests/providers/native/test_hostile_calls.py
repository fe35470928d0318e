"""Calls of the operators with wrong attributes, shapes and tables: an error or numbers, never a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from operator_calls import MAKERS, experts_attributes
from operator_host import Call, OperatorHost, RefusedError, build_host
from quantized_experts_reference import random_experts

from carryall.providers.native.build import build_library
from carryall.providers.native.compiler import find_compiler

_ADDRESS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
_LIMITS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 255, 256, 257]
_NUMBERS = st.sampled_from([*_LIMITS, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**62, 2**63 - 1])


@pytest.fixture(scope="module", params=["plain", pytest.param("sanitized", marks=pytest.mark.slow)])
def host(
    request: pytest.FixtureRequest, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorHost]:
    """Return the host of the operators; sanitized ones stop at the first access outside of a tensor."""
    if sys.platform == "win32":
        pytest.skip("the host loads libraries as POSIX does")
    folder, flags = tmp_path_factory.mktemp("host"), []
    if request.param == "sanitized":
        flags, library = _ADDRESS, build_library(folder / "kernels.so", extra=_ADDRESS)
    try:
        built = build_host(find_compiler() or [], folder / "host", *flags)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the compiler has no such sanitizer: {error.stderr.splitlines()[-1]}")
    with OperatorHost([str(built), str(library)], {"ASAN_OPTIONS": "detect_leaks=0"}) as opened:
        yield opened


def mutated(data: st.DataObject, call: Call) -> Call:
    """Return a call with one wrong attribute or input."""
    attributes, inputs = dict(call.attributes), list(call.inputs)
    if attributes and data.draw(st.integers(0, 2)) == 0:
        name = data.draw(st.sampled_from(sorted(attributes)))
        if data.draw(st.integers(0, 5)) == 0:
            del attributes[name]
        elif isinstance(attributes[name], float):
            attributes[name] = data.draw(st.floats(width=32))
        else:
            attributes[name] = data.draw(_NUMBERS)
    else:
        place = data.draw(st.integers(0, len(inputs) - 1))
        inputs[place] = mutated_input(data, inputs[place])
    return dataclasses.replace(call, attributes=attributes, inputs=inputs)


def mutated_input(data: st.DataObject, array: Any) -> Any:
    """Return an input of another shape, or with other integers, or none."""
    if array is None:
        return np.zeros(data.draw(st.lists(st.integers(0, 4), max_size=4)), np.float32)
    kind = data.draw(st.sampled_from(["absent", "shape", "flat", "cut", "integers", "integers", "integers"]))
    if kind == "absent":
        return None
    if kind == "flat":
        return array.reshape(data.draw(st.sampled_from([(-1,), (1, -1), (*array.shape, 1)])))
    if kind == "integers" and array.dtype.kind == "i" and array.size:
        changed = array.copy()
        limit = np.iinfo(array.dtype)
        near = st.one_of(st.integers(-2, 12), st.integers(limit.min, limit.max))
        changed.flat[data.draw(st.integers(0, array.size - 1))] = data.draw(near)
        return changed
    if kind == "cut" and array.ndim:
        axis = data.draw(st.integers(0, array.ndim - 1))
        return np.take(array, range(data.draw(st.integers(0, array.shape[axis]))), axis)
    shape = data.draw(st.lists(st.integers(0, 20), max_size=5))
    return np.zeros(shape, array.dtype)


def fuzz(host: OperatorHost, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(MAKERS)))
    known = MAKERS[kind](np.random.default_rng(data.draw(st.integers(0, 30))), threads=2)
    call = known.call
    for _ in range(data.draw(st.integers(1, 3))):
        call = mutated(data, call)
    with contextlib.suppress(RefusedError):
        host.run(call)
    known.check(host.outputs(known.call))  # the process lives on, and its kernels are right


SUPPRESSED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.long
@settings(max_examples=80, deadline=None, suppress_health_check=SUPPRESSED)
@given(st.data())
def test_wrong_calls_are_refused_or_computed(host: OperatorHost, data: st.DataObject) -> None:
    fuzz(host, data)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, suppress_health_check=SUPPRESSED, phases=[Phase.generate])
@given(st.data())
def test_many_wrong_calls_are_refused_or_computed(host: OperatorHost, data: st.DataObject) -> None:
    fuzz(host, data)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (7, -1, "has block -1; the cache has"),
        (7, 10**6, "has block 1000000; the cache has"),
        (6, -5, "has -5 past tokens"),
        (5, 10**6, "ends? at"),
    ],
)
def test_wrong_tables_are_clear_errors(host: OperatorHost, place: int, value: int, message: str) -> None:
    call = MAKERS["attention"](np.random.default_rng(1)).call
    inputs = list(call.inputs)
    changed = np.array(inputs[place])
    changed.flat[-1 if place == 5 else 0] = value
    inputs[place] = changed
    with pytest.raises(RefusedError, match=message):
        host.run(dataclasses.replace(call, inputs=inputs))


@pytest.mark.parametrize("wrong", [-1, 5, 2**62])
def test_a_chosen_expert_that_does_not_exist_is_refused(host: OperatorHost, wrong: int) -> None:
    mixture = random_experts(np.random.default_rng(1), experts=5, hidden=32, width=16)
    chosen = np.array([[0, 4], [3, wrong]])
    inputs = [np.ones((2, 32), np.float32), np.ones((2, 2), np.float32), *mixture.tiles(), None, None, chosen]
    with pytest.raises(RefusedError, match=r"a chosen expert is not in \[0, num_experts\)"):
        host.run(Call("QuantizedExperts", experts_attributes(mixture), inputs))


def test_a_block_that_two_rows_write_is_refused(host: OperatorHost) -> None:
    rng = np.random.default_rng(1)
    call = MAKERS["attention"](rng).call
    while len(np.asarray(call.inputs[7])) < 2:
        call = MAKERS["attention"](rng).call
    inputs = list(call.inputs)
    table = np.array(inputs[7])
    table[1, 0] = table[0, 0]
    inputs[7] = table
    with pytest.raises(RefusedError, match=r"row 1 writes block \d+, which is written already"):
        host.run(dataclasses.replace(call, inputs=inputs))
