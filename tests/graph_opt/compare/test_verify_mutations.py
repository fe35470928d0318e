"""``verify`` with its defaults finds every mutation that changes a result by more than the limit.

The effect of a mutation is measured without ``verify``: both graphs run on many other inputs in onnxruntime
without its optimizations, and the differences are compared with the documented limits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from forests import FEATURES, forest
from mutations import mutate
from small_graphs import POSITIONS, VOCABULARY, binary_head, cnn, encoder
from tiny_gguf import write_gguf
from tiny_models import write_tiny

from carryall.errors import CarryallError
from carryall.exporter.export import export_model, export_package
from carryall.graph_opt.compare.verify import verify
from carryall.graph_opt.graph.load import load_model
from carryall.graph_opt.lower.pipelines.slots import SlotOptions, slot_passes
from carryall.graph_opt.pipeline.pipeline import run
from carryall.graph_opt.pipeline.pipelines import portable_passes

ort = pytest.importorskip("onnxruntime")
Array = npt.NDArray[Any]
Runner = Callable[[Path], list[list[Array]]]
MARGIN = 1.25  # errors are relative to the range of values, and that of verify's inputs may be wider
MAX_ERROR, MAX_KL = 1e-3, 1e-4  # the limits of `carryall verify --help` for float32
CONTEXT = 48
MUTATIONS = 240  # number of mutations over all graphs


@dataclass(frozen=True)
class Case:
    """A graph, its optimized graph, and how its results are measured."""

    original: Callable[[Path], ir.Model]
    lowered: bool
    outputs: Runner
    is_decoder: bool = False

    def optimized(self, folder: Path) -> ir.Model:
        model, _ = run(self.original(folder), portable_passes())
        if self.lowered:
            run(model, slot_passes(SlotOptions(context_length=CONTEXT)))
        return model


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def on_texts(path: Path) -> list[list[Array]]:
    """Return batches of token ids of many lengths, padded on either side."""
    opened, rng = session(path), np.random.default_rng(1234)
    found = []
    for number in range(16):
        batch, length = int(rng.integers(1, 5)), int(rng.integers(1, POSITIONS + 1))
        ids = rng.integers(0, VOCABULARY, (batch, length))
        lengths = rng.integers(1, length + 1, (batch, 1)) if number % 3 else np.full((batch, 1), length)
        mask = np.arange(length) < lengths
        feed = {
            "input_ids": ids,
            "attention_mask": (mask if number % 2 else mask[:, ::-1]).astype(np.int64),
            "token_type_ids": np.sort(rng.integers(0, 2, (batch, length))),
        }
        names = {value.name for value in opened.get_inputs()}
        found.append(opened.run(None, {name: feed[name] for name in names}))
    return found


def on_images(path: Path) -> list[list[Array]]:
    """Return images of many sizes and ranges."""
    opened, rng = session(path), np.random.default_rng(1234)
    scales = (0.1, 1.0, 3.0)
    shapes = ((int(rng.integers(1, 4)), 3, *(8 * rng.integers(2, 12, 2)).tolist()) for _ in range(12))
    images = (rng.standard_normal(shape, np.float32) * np.float32(rng.choice(scales)) for shape in shapes)
    return [opened.run(None, {"pixel_values": image}) for image in images]


def on_rows(path: Path) -> list[list[Array]]:
    """Return rows of features, near and far from the thresholds of trees."""
    opened, rng = session(path), np.random.default_rng(1234)
    rows = [rng.standard_normal((4096, FEATURES), np.float32) * np.float32(scale) for scale in (0.3, 1, 3)]
    return [opened.run(None, {"x": row}) for row in rows]


def on_tokens(path: Path) -> list[list[Array]]:
    """Run prompts of many lengths in two pieces, then token by token, for either contract of a decoder."""
    opened, rng = session(path), np.random.default_rng(1234)
    return [_logits(opened, rng.integers(0, 260, length)) for length in (1, 5, 14, 23, 31, 44)]


def on_tokens_in_floats(path: Path) -> list[list[Array]]:
    """``on_tokens`` with products in float32: the rounding of activations hides most mutations."""
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    exact = path.with_suffix(".exact.onnx")
    onnx.save(model, exact)
    found = on_tokens(exact)
    exact.unlink()
    return found


def _logits(opened: Any, tokens: Array) -> list[Array]:
    inputs = {value.name: value for value in opened.get_inputs()}
    slots = "seqlens_k" in inputs
    caches = {name: value for name, value in inputs.items() if name.startswith("past_key_values")}
    past = {
        name: np.zeros((1, value.shape[1], CONTEXT if slots else 0, value.shape[3]), np.float32)
        for name, value in caches.items()
    }
    found = []
    cuts = [0, *(cut for cut in (len(tokens) // 2, len(tokens) - 2) if cut > 0), len(tokens)]
    for start, end in itertools.pairwise(cuts):
        if end <= start:
            continue
        feed = {
            "input_ids": tokens[None, start:end],
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(start, end)[None],
            "seqlens_k": np.array([end - 1], np.int32),
            "total_sequence_length": np.array(end, np.int32),
            "logits_positions": np.arange(end - start)[None],
        }
        results = opened.run(None, {name: array for name, array in feed.items() if name in inputs} | past)
        named = dict(zip([value.name for value in opened.get_outputs()], results, strict=True))
        past = {name: named[name.replace("past_key_values", "present")] for name in caches}
        found.append(named["logits"][0])
    return [np.concatenate(found)]


def decoder(family: str, folder: Path, **overrides: Any) -> ir.Model:
    checkpoint = write_tiny(family, folder / family, max_position_embeddings=CONTEXT, **overrides)
    return export_model(checkpoint)


def blocked_decoder(folder: Path) -> ir.Model:
    """Return a decoder in Q4_1, whose products the CPU computes with rounded activations."""
    file, package = folder / "model.gguf", folder / "package"
    if not package.exists():
        sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
        sizes["max_position_embeddings"] = CONTEXT
        write_gguf("llama", file, types="Q4_1", **sizes)
        export_package(file, package)
    return ir.external_data.load_to_model(load_model(package / "model.onnx"))


CASES = {
    "encoder": Case(lambda _: encoder(), False, on_texts),
    "binary head": Case(lambda _: binary_head(), False, on_texts),
    "cnn": Case(lambda _: cnn(), False, on_images),
    "trees": Case(lambda _: forest(), False, on_rows),
    "decoder": Case(lambda folder: decoder("mistral", folder), False, on_tokens, True),
    "lowered decoder": Case(lambda folder: decoder("llama", folder, head_dim=16), True, on_tokens, True),
    "rounded decoder": Case(blocked_decoder, True, on_tokens_in_floats, True),
}


def effect(case: Case, expected: list[list[Array]], found: list[list[Array]]) -> float:
    """Return the largest effect of a mutation over all inputs and outputs, as a multiple of the limit."""
    if case.is_decoder:
        pairs = [(a[0], b[0]) for a, b in zip(expected, found, strict=True)]
        return max(divergence(a, b) for a, b in pairs) / MAX_KL
    worst = 0.0
    for left, right in zip(zip(*expected, strict=True), zip(*found, strict=True), strict=True):
        low, high = min(float(a.min()) for a in left), max(float(a.max()) for a in left)
        for a, b in zip(left, right, strict=True):
            if a.shape != b.shape or not np.isfinite(b).all():
                return float("inf")
            worst = max(worst, float(np.abs(a - b).max()) / (high - low))
    return worst / MAX_ERROR


def divergence(left: Array, right: Array) -> float:
    if left.shape != right.shape or not np.isfinite(right).all():
        return float("inf")
    p, q = (x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
            for x in (left.astype(np.float64), right.astype(np.float64)))  # fmt: skip
    return float((np.exp(p) * (p - q)).sum(-1).max())


@dataclass(frozen=True)
class Verdict:
    what: str
    effect: float
    passed: bool


def names(model: ir.Model, case: Case) -> list[str]:
    """Return the names of inputs and outputs in order.

    Decoders are called by name, in any order, and a lowering may add outputs, such as last_hidden_state.
    """
    found = [str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)]
    return sorted(name for name in found if "hidden" not in name) if case.is_decoder else found


def verdicts(name: str, seeds: Iterator[int], count: int, folder: Path) -> list[Verdict]:
    """Mutate the optimized graph ``count`` times; skip mutations that onnxruntime refuses."""
    case = CASES[name]
    original = folder / "original.onnx"
    ir.save(case.original(folder), original)
    expected = case.outputs(original)
    optimized = ir.to_proto(case.optimized(folder))
    found: list[Verdict] = []
    for seed in seeds:
        model = ir.from_proto(optimized)
        what = mutate(model, seed)
        if what is None:
            continue
        path = folder / f"{seed}.onnx"
        try:
            ir.save(model, path)
            changed = (
                effect(case, expected, case.outputs(path))
                if names(model, case) == names(ir.from_proto(optimized), case)
                else float("inf")
            )
        except Exception:  # noqa: BLE001, S112 -- of many kinds: no graph that can be run
            continue
        try:
            passed = verify(original, path).passed
        except CarryallError:
            passed = False
        found.append(Verdict(f"seed {seed}: {what}", changed, passed))
        path.unlink()
        if len(found) == count:
            break
    return found


def check(name: str, count: int, folder: Path) -> None:
    found = verdicts(name, iter(range(100 * count)), count, folder)
    survivors = [one for one in found if one.passed and one.effect > MARGIN]
    assert survivors == []
    assert len(found) == count
    assert sum(one.effect > 1 for one in found) > count // 3  # many mutations must have an effect


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_mutations_are_found(name: str, tmp_path: Path) -> None:
    check(name, 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_mutations_are_found(name: str, tmp_path: Path) -> None:
    check(name, MUTATIONS // len(CASES), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_optimized_graphs_pass(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    original = tmp_path / "original.onnx"
    ir.save(case.original(tmp_path), original)
    verify(original, case.optimized(tmp_path)).check()
