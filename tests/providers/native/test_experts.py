"""Mixtures of experts by carryall's kernels: NumPy, instruction sets, batches, and models lowered to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from family_cases import CASES, normalised
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import isas
from operator_calls import experts_attributes, random_mixture
from operator_host import Call, OperatorHost, build_host
from quantized_experts_reference import quantized_experts, random_experts, stored_experts
from tiny_models import write_tiny

from carryall.graph_opt.lower.products.quantized_experts import QuantizedExpertsPass
from carryall.providers.base import Row
from carryall.providers.native.compiler import find_compiler
from carryall.providers.targets import cpu
from carryall.runtime.models.loading import load_model

OWN = {"kernels": "carryall"}
PROMPT = np.arange(5, 45)


def configured(case: str) -> dict[str, Any]:
    """The keys of config.json that a case changes."""
    return {key: value for key, value in CASES[case][1].items() if key != "seed"}


@pytest.fixture(scope="module")
def hosts(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, OperatorHost]]:
    """Return a process for each instruction set."""
    built = str(build_host(find_compiler() or [], tmp_path_factory.mktemp("host") / "host"))
    opened = {
        isa: OperatorHost([built, str(library)], {"CARRYALL_KERNELS_ISA": isa}) for isa in isas(library)
    }
    yield opened
    for host in opened.values():
        host.end()


@pytest.mark.long
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3]))
def test_every_instruction_set_gives_the_bits_of_the_reference(
    hosts: dict[str, OperatorHost], seed: int, threads: int
) -> None:
    known = random_mixture(np.random.default_rng(seed), threads=threads)
    expected = hosts["portable"].run(known.call)
    for isa, host in hosts.items():
        np.testing.assert_array_equal(host.run(known.call), expected, isa)
    known.check([expected])
    # Few values between the products lie so near to a half that they are rounded the other way.
    assert np.median(np.abs(expected - known.expected)) < 1e-6 * np.abs(known.expected).max()


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q4_0", "Q4_1"), ("Q8_0", "Q4_K")])
def test_experts_of_gguf_files_have_a_form_into_them_and_one_out_of_them(
    hosts: dict[str, OperatorHost], library: Path, kinds: tuple[str, str]
) -> None:
    mixture = stored_experts(library, kinds, 512, 256, 3)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((21, 512)).astype(np.float32)
    scores = rng.standard_normal((21, 5)).astype(np.float32)
    inputs = [x, scores, *mixture.tiles(), None, None]
    call = Call("QuantizedExperts", experts_attributes(mixture), inputs, 2)
    result, expected = hosts["portable"].run(call), quantized_experts(x, scores, mixture)
    for isa, host in hosts.items():
        np.testing.assert_array_equal(host.run(call), result, isa)
    # Few values between the products lie so near to a half that they are rounded the other way.
    assert np.median(np.abs(result - expected)) < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_experts_of_16_bits_multiply_floats(
    hosts: dict[str, OperatorHost], kind: ir.DataType, gated: bool
) -> None:
    rng = np.random.default_rng(4)
    mixture = random_experts(rng, experts=5, hidden=70, width=41, half=kind, gated=gated, biased=True)
    x, scores = (rng.standard_normal((23, size)).astype(np.float32) for size in (70, 5))
    inputs = [x, scores, *mixture.tiles(), *mixture.stacked_biases(), None]
    call = Call("QuantizedExperts", experts_attributes(mixture), inputs, 2)
    result = hosts["portable"].run(call)
    for isa, host in hosts.items():
        np.testing.assert_array_equal(host.run(call), result, isa)
    np.testing.assert_allclose(result, quantized_experts(x, scores, mixture), atol=2e-6, rtol=0)


@pytest.mark.parametrize("half", [None, ir.DataType.BFLOAT16])
def test_a_token_does_not_depend_on_the_tokens_beside_it(
    hosts: dict[str, OperatorHost], half: ir.DataType | None
) -> None:
    """Also if so many tokens choose an expert that its rows are cut into pieces."""
    rng = np.random.default_rng(1)
    mixture = random_experts(rng, experts=4, hidden=1024, width=48, per_token=2, half=half)
    x = rng.standard_normal((900, 1024)).astype(np.float32)
    scores = rng.standard_normal((900, 4)).astype(np.float32)
    scores[:700, 1] = 5

    def result(part: slice, threads: int) -> np.ndarray:
        inputs = [x[part], scores[part], *mixture.tiles(), None, None]
        call = Call("QuantizedExperts", experts_attributes(mixture), inputs, threads)
        return next(iter(hosts.values())).run(call)

    whole = result(slice(None), 2)
    for part in (slice(0, 1), slice(3, 20), slice(600, 900)):
        for threads in (1, 3):
            np.testing.assert_array_equal(result(part, threads), whole[part])


def test_chosen_experts_do_not_depend_on_the_tokens_beside_them(hosts: dict[str, OperatorHost]) -> None:
    rng = np.random.default_rng(2)
    mixture = random_experts(rng, experts=6, hidden=128, width=64, per_token=3, activation="gelu")
    x, shares = (rng.standard_normal((300, size)).astype(np.float32) for size in (128, 3))
    chosen = rng.integers(0, 6, (300, 3))

    def result(part: slice, threads: int) -> np.ndarray:
        inputs = [x[part], shares[part], *mixture.tiles(), None, None, chosen[part]]
        call = Call("QuantizedExperts", experts_attributes(mixture), inputs, threads)
        return next(iter(hosts.values())).run(call)

    whole = result(slice(None), 2)
    for part in (slice(0, 1), slice(3, 20), slice(100, 300)):
        for threads in (1, 3):
            np.testing.assert_array_equal(result(part, threads), whole[part])


SIZES = {
    "nemotron_h-latent": {"moe_latent_size": 16},
    **{case: {"intermediate_size": 32} for case in ("phimoe", "phimoe-long", "phimoe-published")},
}
MIXTURES = [case for case in CASES if any(normalised(CASES[case][0], **configured(case)).experts)]


@pytest.mark.long
@pytest.mark.parametrize("case", MIXTURES)
def test_the_experts_of_every_family_are_one_operator_of_equal_logits(
    kernels_of_this_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Whatever chooses them. Expert by expert, the same products are summed and gated by onnxruntime."""
    family, changes = CASES[case]
    checkpoint = write_tiny(family, tmp_path / "checkpoint", **changes | SIZES.get(case, {}))
    sparse = sum(experts is not None for experts in normalised(family, **configured(case)).experts)
    found = {}
    for method in ("int8-fast", "int4-fast", None):  # the checkpoints are bfloat16
        for fused in (True, False):
            monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / f"{method}-{fused}"))
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "splits_floats", lambda: False)  # the operator multiplies floats
                if not fused:
                    patch.setattr(QuantizedExpertsPass, "rewrite", lambda *_: None)
                loaded = load_model(
                    checkpoint, quantize=method, max_slots=2, provider_options={**OWN, "kv_cache": "float32"}
                )
            found[fused] = loaded.runner.forward([Row(0, PROMPT, 0, num_logits=8)])[0].copy()
            if fused:  # in pieces, beside another row
                loaded.runner.forward([Row(1, PROMPT[:35], 0)])
                rows = [Row(0, PROMPT[:3], 40), Row(1, PROMPT[35:], 35, num_logits=5)]
                np.testing.assert_array_equal(loaded.runner.forward(rows)[1], found[fused][3:])
            loaded.close()
            (path,) = (tmp_path / f"{method}-{fused}" / "lowered").glob("*/model.onnx")
            assert [node.op_type for node in ir.load(path).graph].count("QuantizedExperts") == sparse * fused
        np.testing.assert_allclose(found[True], found[False], rtol=0, atol=1e-5 * float(found[False].std()))


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_mixture_is_near_the_one_of_onnxruntimes_kernels(
    kernels_of_this_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    changes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    checkpoint, found = write_tiny(family, tmp_path / family, **changes), {}
    for kernels in ("carryall", "onnxruntime"):
        options = {"kernels": kernels, "kv_cache": "float32"}
        loaded = load_model(checkpoint, quantize="int8-fast", max_slots=2, provider_options=options)
        found[kernels] = loaded.runner.forward([Row(0, PROMPT, 0, num_logits=8)])[0].copy()
        loaded.close()
    error = np.linalg.norm(found["carryall"] - found["onnxruntime"])
    assert 0 < error < 0.02 * np.linalg.norm(found["onnxruntime"])
