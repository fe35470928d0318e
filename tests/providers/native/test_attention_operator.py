"""PagedAttention in onnxruntime: results, threads, and refusals of wrong tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from graph_asserts import graph
from native_attention import Cache
from paged_attention_reference import Case, attention, random_case

from carryall.errors import GraphError
from carryall.providers.base import RunnerConfig
from carryall.providers.ort import ort
from carryall.providers.targets.cpu import CpuProvider

ATTRIBUTES = {
    "layout": "2",
    "num_heads": "6",
    "kv_num_heads": "2",
    "head_size": "16",
    "block_size": "16",
    "window": "0",
    "rotary_dim": "8",
    "interleaved": "0",
    "cache_type": "0",
    "scale": "0.25",
    "softcap": "0.0",
    "reads_only": "0",
}
TEXT = """g (float[T, Q] q, float[T, K] k, float[T, K] v, uint8[B, 2, 16, R] keys, uint8[B, 2, 16, R] values,
    int32[N1] begins, int32[N] past, int32[N, M] table, float[P, H] cos, float[P, H] sin, int64[T] at,
    float[S] sinks, float[L] slopes, int32[U] ahead)
    => (float[T, 96] y) { y = carryall.PagedAttention <FACTS> (OPERANDS) }"""
OPERANDS = "q, k, v, keys, values, begins, past, table, cos, sin, at, sinks, slopes"
AHEAD = OPERANDS.replace(" slopes", ", ahead")


@pytest.fixture(autouse=True)
def _library(kernels_of_this_machine: Path) -> None:
    """Every test of this module needs the library."""


def session(path: Path, operands: str = OPERANDS, threads: int = 1, **changed: Any) -> Any:
    facts = ", ".join(f"{name} = {value}" for name, value in (ATTRIBUTES | changed).items())
    made = graph(TEXT.replace("FACTS", facts).replace("OPERANDS", operands))
    made.graph.opset_imports["carryall"] = 1
    ir.save(made, path / "model.onnx")
    config = RunnerConfig(num_threads=threads, options={"kernels": "carryall"})
    return CpuProvider().session(path / "model.onnx", config)


def made(lengths: list[int], *, ahead: bool = False) -> tuple[Case, dict[str, Any]]:
    case = random_case(
        np.random.default_rng(0),
        heads=(6, 2),
        size=16,
        lengths=lengths,
        past=[0] * len(lengths),
        rotary=8,
        sinks=True,
        slopes=True,
        ahead=ahead,
    )
    cache = Cache(case, np.random.default_rng(1))
    assert case.angles is not None
    return case, {
        "q": case.query,
        "k": case.new_rows(case.keys),
        "v": case.new_rows(case.values),
        "keys": cache.keys,
        "values": cache.values,
        "begins": case.begins,
        "past": np.array(case.past, np.int32),
        "table": cache.table,
        "cos": case.angles[0],
        "sin": case.angles[1],
        "at": case.positions,
        "sinks": case.sinks,
        "slopes": np.zeros(6, np.float32) if ahead else case.slopes,
        "ahead": case.ahead if ahead else np.zeros(sum(lengths), np.int32),
    }


def test_the_reference_any_number_of_threads_and_packed_operands(tmp_path: Path) -> None:
    case, feeds = made([400, 30, 1])
    (found,) = session(tmp_path).run(None, feeds)
    np.testing.assert_allclose(found, attention(case), rtol=3e-6, atol=3e-6)
    np.testing.assert_array_equal(session(tmp_path, threads=2).run(None, feeds)[0], found)
    packed = session(tmp_path, OPERANDS.replace("q, k, v", "q, , "))
    feeds["q"] = np.concatenate([feeds["q"], feeds.pop("k"), feeds.pop("v")], axis=1)
    unused = {"k": np.zeros((431, 32), np.float32), "v": np.zeros((431, 32), np.float32)}
    np.testing.assert_array_equal(packed.run(None, feeds | unused)[0], found)


def test_a_node_that_reads_only_attends_to_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    feeds = made([40, 30, 1])[1]
    (expected,) = session(tmp_path).run(None, feeds)
    written = {name: feeds[name].copy() for name in ("keys", "values")}
    reader = session(tmp_path, OPERANDS.replace("q, k, v", "q, , "), reads_only="1")
    np.testing.assert_array_equal(reader.run(None, feeds)[0], expected)
    for name, array in written.items():
        np.testing.assert_array_equal(feeds[name], array)
    with pytest.raises(ort.runtime_errors(), match="has no keys and values"):
        session(tmp_path, reads_only="1").run(None, feeds)


def test_another_layout_is_refused_with_its_version(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="KV cache has layout version 1; these kernels read version 2"):
        session(tmp_path, layout="1")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_num_heads": "4"}, "num_heads is not a multiple"),
        ({"cache_type": "5"}, "cache_type is not 0 to 4"),
    ],
)
def test_wrong_attributes_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        session(tmp_path, **changed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": (4, 95)}, "last axis of the query is not that of all heads"),
        ({"k": (3, 32)}, "key or value does not have all KV heads"),
        ({"v": (4, 16)}, "key or value does not have all KV heads"),
        ({"keys": (4, 2, 16, 63)}, "a KV cache does not have the shape"),
        ({"values": (5, 2, 16, 64)}, "a KV cache does not have the shape"),
        ({"begins": (4,)}, "begins is not one longer than past"),
        ({"past": (1,)}, "begins is not one longer than past"),
        ({"table": (1, 4)}, "table does not have one row per row"),
        ({"table": (2, 0)}, "row 0 needs 1 blocks; its table has 0"),
        ({"cos": (50, 3)}, "cosines and sines do not have the shape"),
        ({"sin": (49, 4)}, "cosines and sines do not have the shape"),
        ({"at": (3,)}, "there is not one position per token"),
        ({"sinks": (5,)}, "sinks does not have one value per head"),
        ({"slopes": (7,)}, "slopes does not have one value per head"),
    ],
    ids=str,
)
def test_wrong_shapes_are_refused(tmp_path: Path, wrong: dict[str, tuple[int, ...]], message: str) -> None:
    _, feeds = made([3, 1])
    for name, shape in wrong.items():
        feeds[name] = np.zeros(shape, feeds[name].dtype)
    with pytest.raises(ort.runtime_errors(), match=message):
        session(tmp_path).run(None, feeds)


def test_tokens_of_a_picture_see_what_is_ahead(tmp_path: Path) -> None:
    case, feeds = made([400, 30, 1], ahead=True)
    reader = session(tmp_path, AHEAD)
    (found,) = reader.run(None, feeds)
    np.testing.assert_allclose(found, attention(case), rtol=3e-6, atol=3e-6)
    np.testing.assert_array_equal(session(tmp_path, AHEAD, threads=2).run(None, feeds)[0], found)
    with pytest.raises(ort.runtime_errors(), match="ahead does not have one number per token"):
        reader.run(None, feeds | {"ahead": np.zeros(3, np.int32)})
    with pytest.raises(ort.runtime_errors(), match="ahead and slopes exclude each other"):
        session(tmp_path, f"{OPERANDS}, ahead").run(None, feeds)


def test_no_tokens_give_no_rows(tmp_path: Path) -> None:
    _, feeds = made([3, 1])
    feeds |= {name: feeds[name][:0] for name in ("q", "k", "v", "at", "past", "table", "ahead")}
    feeds["begins"] = np.zeros(1, np.int32)
    assert session(tmp_path).run(None, feeds)[0].shape == (0, 96)
