"""Paged attention of every instruction set against NumPy, bit by bit against each other, and its refusals.

AMX computes float32 as pairs of bfloat16, AVX-512 BF16 rounds queries and weights to it. Their results are
near those of the others; their own are equal for any cut.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_attention import Cache, filled, run
from native_kernels import isas
from paged_attention_reference import (
    BFLOAT16,
    BFLOAT16_CACHES,
    BFLOAT16_QUERIES,
    BYTE_QUERIES,
    FLOAT32,
    INT8,
    INT8_CACHES,
    INT8_TOLERANCE,
    Case,
    Floats,
    attention,
    random_case,
)

CASES = st.fixed_dictionaries(
    {
        "heads": st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 6), (8, 2), (9, 3), (50, 1)]),
        "size": st.sampled_from([2, 8, 16, 40, 64, 80, 128, 256, 288, 512, 576]),
        "rows": st.lists(
            st.tuples(st.sampled_from([0, 1, 1, 2, 7, 40]), st.sampled_from([0, 3, 63, 64, 100, 255, 300])),
            min_size=1,
            max_size=4,
        ).filter(lambda rows: sum(length for length, _ in rows)),
        "rotary": st.sampled_from([0, 0, 2, 8]),
        "sinks": st.booleans(),
        "slopes": st.booleans(),
        "ahead": st.booleans(),
        "window": st.sampled_from([0, 0, 1, 5, 64, 100]),
        "softcap": st.sampled_from([0.0, 0.0, 3.0, 50.0]),
        "interleaved": st.integers(0, 1),
        "cache": st.sampled_from([FLOAT32, FLOAT32, BFLOAT16, BFLOAT16_QUERIES, INT8, BYTE_QUERIES]),
        "block": st.sampled_from([16, 32, 48, 64]),
    }
)
# Sums of up to 512 products in float32; products of pairs leave out 2^-16 = 1.5e-5. Values are up to 4.
EXACT, PAIRS = 5e-6, 4.5e-5


def rounds(isa: str, case: Case) -> bool:
    """Whether the instruction set rounds queries and weights to bfloat16."""
    width = -(-case.size // 16) * 16
    fits = width <= 256 and case.block % 32 == 0
    if isa == "amx":
        return fits and case.cache == BFLOAT16_QUERIES
    return fits and width % 32 == 0 and isa == "avx512bf16" and case.cache in BFLOAT16_CACHES


def assert_rounded(found: Floats, case: Case) -> None:
    """Assert that results without rotary embedding are those of the same roundings in NumPy.

    A query or weight near a tie may be rounded the other way in float32, which changes the elements of one
    head of one token. That may happen to one in 20 of these, and two of few; to one in 4 with a cap of 50,
    at whose size scores are rounded.
    """
    error = np.abs(found - attention(case, rounded=True)).reshape(-1, case.size).max(axis=1)
    assert (error > EXACT + 2e-7 * case.softcap).sum() <= 2 + (0.05 + 0.004 * case.softcap) * len(error)
    assert error.max() <= 2e-2


def made(rng: np.random.Generator, rows: Any, rotary: int, size: int, **options: Any) -> Case:
    lengths, past = (list(each) for each in zip(*rows, strict=True))
    return random_case(rng, size=size, lengths=lengths, past=past, rotary=min(rotary, size), **options)


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), CASES, st.sampled_from([0, 1000]))
def test_every_instruction_set_gives_the_bits_of_the_reference(
    library: Path, seed: int, options: dict[str, Any], separate: int
) -> None:
    case = made(np.random.default_rng(seed), **options)
    reference = attention(case)
    expected = filled(library, "portable", case, np.random.default_rng(seed), separate=0)
    for isa in isas(library):
        found = filled(library, isa, case, np.random.default_rng(seed + 1), separate=separate)
        own = filled(library, isa, case, np.random.default_rng(seed), separate=0)
        alone = (isa == "amx" and case.cache not in INT8_CACHES) or rounds(isa, case)
        np.testing.assert_array_equal(found, own if alone else expected, isa)
        if rounds(isa, case) and not case.rotary:
            assert_rounded(found, case)
            continue
        near = INT8_TOLERANCE if case.cache in INT8_CACHES else PAIRS if isa == "amx" else EXACT
        # Rounding to int8 or bfloat16 may go the other way after a rotation in float32.
        turned = near if case.cache == FLOAT32 else 2e-2 if case.cache in BFLOAT16_CACHES else 4e-2
        tolerance = turned if case.rotary else near
        tolerance += 2e-7 * case.softcap  # scores are rounded at the size of the cap
        np.testing.assert_allclose(found, reference, rtol=tolerance, atol=tolerance, err_msg=isa)
        if case.cache in INT8_CACHES and not case.rotary:
            assert np.median(np.abs(found - reference)) < EXACT + 2e-7 * case.softcap


@pytest.mark.parametrize("cache", INT8_CACHES)
@pytest.mark.parametrize("size", [2, 40, 64, 80, 128, 288])
def test_an_int8_cache_gives_the_same_bits_everywhere(library: Path, size: int, cache: int) -> None:
    """Strips of rows that do not end with an item, parts that some queries see in part, few and many."""
    rng = np.random.default_rng(size + cache)
    for rows in ([(130, 0)], [(40, 300), (1, 255)], [(7, 63), (130, 100)]):
        for window, ahead in ((0, True), (5, False), (100, False)):
            options: dict[str, Any] = {"heads": (3, 1), "window": window, "ahead": ahead, "block": 48}
            case = made(rng, rows, 0, size, cache=cache, **options)
            expected = filled(library, "portable", case, np.random.default_rng(0))
            for isa in isas(library):
                found = filled(library, isa, case, np.random.default_rng(1))
                np.testing.assert_array_equal(found, expected, isa)


@pytest.mark.parametrize("cache", [FLOAT32, *BFLOAT16_CACHES, *INT8_CACHES])
@pytest.mark.parametrize("window", [0, 70])
def test_a_token_does_not_depend_on_pieces_and_rows_beside_it(library: Path, cache: int, window: int) -> None:
    """One prompt of 600 tokens, whole and in pieces beside another row, in other blocks: equal bits."""
    rng = np.random.default_rng(0)
    options: dict[str, Any] = {"heads": (6, 2), "size": 64, "cache": cache, "window": window, "block": 32}
    whole = random_case(rng, lengths=[600], past=[0], rotary=16, **options)
    for isa in isas(library)[:1]:
        expected = run(library, isa, whole, Cache(whole, rng))
        other = random_case(rng, lengths=[30], past=[0], rotary=16, **options)
        both = Cache(random_case(rng, lengths=[600, 400], past=[0, 0], **options), rng)
        found, start = [], 0
        for step, length in enumerate([1, 70, 300, 16, 212, 1]):
            piece = slice(start, start + length)
            case = Case(
                6,
                2,
                64,
                [length, 30],
                [start, 30 * step],
                [whole.keys[0][: piece.stop], np.tile(other.keys[0], (step + 1, 1, 1))],
                [whole.values[0][: piece.stop], np.tile(other.values[0], (step + 1, 1, 1))],
                query=np.concatenate([whole.query[piece], other.query]),
                positions=np.concatenate([whole.positions[piece], other.positions]),
                angles=whole.angles,
                scale=whole.scale,
                cache=cache,
                window=window,
                block=32,
            )
            found.append(run(library, isa, case, both, separate=100 * (step % 2))[:length])
            start += length
        np.testing.assert_array_equal(np.concatenate(found), expected, isa)


@pytest.mark.parametrize("cache", [FLOAT32, *BFLOAT16_CACHES, *INT8_CACHES])
@pytest.mark.parametrize(("size", "block"), [(16, 16), (64, 32)])
def test_scores_far_apart_and_values_that_are_not_finite(
    library: Path, size: int, block: int, cache: int
) -> None:
    """A NaN reaches its own sequence only; what fills unused memory, NaN too, reaches none."""
    rng = np.random.default_rng(1)
    options: dict[str, Any] = {"size": size, "block": block, "cache": cache}
    case = random_case(rng, heads=(2, 1), lengths=[20, 20], past=[50, 50], **options)
    case.query *= 1e3
    reference = attention(case)
    spoiled = dataclasses.replace(case, values=[case.values[0].copy(), case.values[1]])
    spoiled.values[0][5] = np.nan
    for isa in isas(library):
        clean = filled(library, isa, case, np.random.default_rng(2))
        # Scores of thousands, whose error becomes a factor of a weight.
        np.testing.assert_allclose(clean, reference, rtol=5e-2, atol=5e-2, err_msg=isa)
        found = filled(library, isa, spoiled, np.random.default_rng(3))
        assert np.isnan(found[:20]).all()
        np.testing.assert_array_equal(found[20:], clean[20:])


@pytest.mark.parametrize("cache", [FLOAT32, *BFLOAT16_CACHES])
def test_what_is_added_to_all_scores_of_a_query_changes_no_other(library: Path, cache: int) -> None:
    """Also if no float holds the exponentials of such scores, e^-200 or e^200."""
    options: dict[str, Any] = {"heads": (1, 1), "size": 64, "block": 32, "cache": cache}
    case = random_case(np.random.default_rng(8), lengths=[100], past=[300], **options)
    for keys in case.keys:
        keys[..., 0] = 8.0
    case.query[:, 0] = 0.0
    added = np.zeros(100, np.float32)
    added[[0, 31, 40, 41, 70, 99]] = [90.0, -90.0, 200.0, -200.0, 42.0, -42.0]
    shifted = dataclasses.replace(case, query=case.query.copy())
    shifted.query[:, 0] = added  # times 8, times 1 / 8, which is the scale
    for isa in isas(library):
        reference = attention(shifted, rounded=rounds(isa, case))
        found = filled(library, isa, shifted, np.random.default_rng(0))
        # A score of 200 is rounded to 2^-17, and leaves out 2^-16 where AMX splits floats.
        np.testing.assert_allclose(found, reference, rtol=0, atol=5e-3, err_msg=isa)
        plain = filled(library, isa, case, np.random.default_rng(0))
        np.testing.assert_array_equal(found[added == 0], plain[added == 0], isa)


def test_an_element_that_is_large_in_every_key_does_not_take_the_resolution_of_the_others(
    library: Path,
) -> None:
    """Large biases of keys, as Qwen2.5 has: the transform spreads them over the elements of an int8 key."""
    case = random_case(
        np.random.default_rng(6), heads=(4, 2), size=64, lengths=[8], past=[300], block=32, cache=INT8
    )
    for keys in case.keys:
        keys[..., 7] = 100.0
    case.query[:, 7::64] *= 0.01
    exact = attention(dataclasses.replace(case, cache=FLOAT32))
    for isa in isas(library):
        error = np.abs(filled(library, isa, case, np.random.default_rng(0)) - exact)
        assert error.max() < 0.03, isa  # 0.014; 0.085 without the transform


def test_amx_splits_floats_where_the_processor_has_it(library: Path) -> None:
    """Its results are not those of bfloat16 alone, whose error is 100 times as large."""
    if "amx" not in isas(library):
        pytest.skip("this processor has no AMX with bfloat16; its attention was not run")
    case = random_case(np.random.default_rng(4), heads=(9, 3), size=64, lengths=[70], past=[300], block=32)
    found = filled(library, "amx", case, np.random.default_rng(0))
    exact = filled(library, "portable", case, np.random.default_rng(0))
    assert (found != exact).any()
    np.testing.assert_allclose(found, exact, rtol=PAIRS, atol=PAIRS / 10)


def test_avx512_bf16_rounds_where_the_processor_has_it(library: Path) -> None:
    """One part and several, and positions that only some queries see."""
    if "avx512bf16" not in isas(library):
        pytest.skip("this processor has no AVX-512 BF16; its attention was not run")
    options: dict[str, Any] = {"heads": (9, 3), "block": 32, "cache": BFLOAT16}
    for size, past in [(64, [300, 0]), (32, [5, 600]), (256, [0, 255])]:
        case = random_case(np.random.default_rng(5), size=size, lengths=[70, 1], past=past, **options)
        found = filled(library, "avx512bf16", case, np.random.default_rng(0))
        assert rounds("avx512bf16", case)
        assert_rounded(found, case)
        assert np.median(np.abs(found - attention(case))) > 1e-5


@pytest.mark.long
@pytest.mark.parametrize("cache", [0, 1])
@pytest.mark.parametrize(
    ("heads", "size"), [((20, 1), 36), ((7, 1), 288), ((3, 1), 576), ((4, 2), 16), ((26, 1), 600)]
)
def test_one_cache_of_keys_that_are_the_values_too(
    library: Path, heads: tuple[int, int], size: int, cache: int
) -> None:
    """The same bits on every instruction set, in pieces and with rows beside a row."""
    rng = np.random.default_rng(size)
    lengths, past = [70, 1, 5], [0, 300, 17]
    case = random_case(rng, heads=heads, size=size, lengths=lengths, past=past, block=32, cache=cache)
    case.values = case.keys
    results = []
    for isa in isas(library):
        held = Cache(case, np.random.default_rng(1))
        held.values = held.keys
        before = random_case(rng, heads=heads, size=size, lengths=past, past=[0] * 3, block=32, cache=cache)
        before.keys = before.values = [part[:n] for part, n in zip(case.keys, past, strict=True)]
        run(library, isa, before, held)
        results.append(run(library, isa, case, held, separate=0))
    exact = attention(case)
    np.testing.assert_allclose(results[0], exact, rtol=0, atol=2e-5 * np.abs(exact).max())
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    pieces = Cache(case, np.random.default_rng(2))
    pieces.values = pieces.keys
    alone, found = [part[:70] for part in case.keys[:1]], []
    for begin, end in ((0, 33), (33, 34), (34, 70)):
        piece = random_case(rng, heads=heads, size=size, lengths=[end - begin], past=[begin], cache=cache)
        piece.block, piece.query = 32, case.query[begin:end]
        piece.keys = piece.values = [part[:end] for part in alone]
        pieces.table = pieces.table[:1]
        found.append(run(library, isas(library)[0], piece, pieces))
    np.testing.assert_array_equal(np.concatenate(found), results[0][:70])


def test_one_cache_of_int8_is_refused(library: Path) -> None:
    case = random_case(np.random.default_rng(0), heads=(2, 1), size=16, lengths=[3], past=[0], cache=2)
    held = Cache(case, np.random.default_rng(0))
    held.values = held.keys
    with pytest.raises(ValueError, match="one cache for keys and values holds no int8"):
        run(library, "portable", case, held)


def small() -> Case:
    return random_case(
        np.random.default_rng(0), heads=(2, 1), size=16, lengths=[3, 1], past=[20, 40], rotary=8
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 0}, "num_heads"),
        ({"heads": 3, "kv_heads": 2}, "num_heads is not a multiple"),
        ({"size": 641}, r"head_size is not in \[1, 640\]"),
        ({"block": 8}, "block_size is not a multiple of 16"),
        ({"window": -1}, "window"),
        ({"rotary": 7}, "rotary_dim is not an even number"),
        ({"rotary": 18}, "rotary_dim"),
        ({"interleaved": 2}, "interleaved"),
        ({"cache_type": 5}, "cache_type is not 0 to 4"),
        ({"scale": float("nan")}, "scale is not finite"),
        ({"softcap": -1.0}, "softcap"),
        ({"begins": np.array([0, 3, 5], np.int32)}, "the rows do not begin at 0 and end"),
        ({"begins": np.array([1, 3, 4], np.int32)}, "the rows do not begin at 0"),
        ({"begins": np.array([0, 5, 4], np.int32)}, "row 0 ends at token 5"),
        ({"begins": np.array([0, -1, 4], np.int32)}, "row 0 ends at token -1"),
        ({"past": np.array([-1, 40], np.int32)}, "row 0 has -1 past tokens"),
        ({"past": np.array([20, 2**31 - 1], np.int32)}, "row 1 has 2147483647 past tokens"),
        ({"past": np.array([20, 64], np.int32)}, "row 1 needs 5 blocks; its table has 4"),
        ({"table": np.array([[0, 99, 0, 0], [1, 2, 3, 0]], np.int32)}, "row 0 has block 99; the cache has 7"),
        ({"table": np.array([[0, 1, 0, 0], [1, 2, -1, 0]], np.int32)}, "row 1 has block -1"),
        (
            {"table": np.array([[0, 1, 0, 0], [2, 3, 1, 0]], np.int32)},
            "row 1 writes block 1, which",
        ),
        ({"positions": np.array([0, 1, 50, 2])}, "token 2 has position 50; the rotary tables have 50"),
        ({"positions": np.array([0, -1, 5, 2])}, "token 1 has position -1"),
        ({"ahead": np.array([0, 0, 0, 1], np.int32)}, "token 3 sees up to token 5: beyond its row"),
        ({"ahead": np.array([0, 0, 1, 0], np.int32)}, "token 2 sees up to token 4: beyond its row"),
        ({"ahead": np.array([-1, 0, 0, 0], np.int32)}, "token 0 sees up to token 0"),
        ({"ahead": np.array([2, 0, 0, 0], np.int32)}, "token 1 sees up to token 2: .* not as far as"),
        ({"ahead": np.zeros(4, np.int32), "slopes": np.ones(2, np.float32)}, "ahead and slopes"),
    ],
)
def test_wrong_sizes_and_tables_are_refused_before_memory_is_touched(
    library: Path, wrong: dict[str, Any], message: str
) -> None:
    case = small()
    cache = Cache(case, np.random.default_rng(0))
    before = cache.keys.copy()
    with pytest.raises(ValueError, match=message):
        run(library, "portable", case, cache, wrong=wrong)
    np.testing.assert_array_equal(cache.keys, before)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_tables_are_refused_or_computed(library: Path, data: st.DataObject) -> None:
    """Whatever block tables and lengths say, the result is an error or numbers, never a crash."""
    case = small()
    cache = Cache(case, np.random.default_rng(0))
    near = st.one_of(st.integers(-2, 8), st.integers(-(2**31), 2**31 - 1))
    wrong = {
        "table": np.array(data.draw(st.lists(near, min_size=8, max_size=8)), np.int32).reshape(2, 4),
        "past": np.array(data.draw(st.lists(near, min_size=2, max_size=2)), np.int32),
        "begins": np.array([0, data.draw(near), data.draw(st.sampled_from([4, 4, 3]))], np.int32),
        "positions": np.array(data.draw(st.lists(near, min_size=4, max_size=4)), np.int64),
    }
    with contextlib.suppress(ValueError):
        run(library, isas(library)[0], case, cache, wrong=wrong)
    expected = filled(library, "portable", case, np.random.default_rng(0))
    np.testing.assert_array_equal(filled(library, "portable", case, np.random.default_rng(1)), expected)


def test_an_unknown_instruction_set_is_refused(library: Path) -> None:
    case = small()
    with pytest.raises(ValueError, match="no such instruction set"):
        run(library, "sse", case, Cache(case, np.random.default_rng(0)))
