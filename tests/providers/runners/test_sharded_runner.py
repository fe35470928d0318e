"""A model cut over processes: the logits of the whole model, a share of its KV, and ranks that end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from family_cases import CASES, write_case
from tiny_models import write_tiny

from carryall.errors import ProviderRuntimeError, UsageError
from carryall.providers import get_provider
from carryall.providers.base import Row, Runner, RunnerConfig
from carryall.providers.native.library import find_library
from carryall.providers.runners.sharded_runner import ShardedRunner
from carryall.runtime.models.lowering import lowered_model, with_context
from carryall.runtime.models.model_source import resolve_model
from carryall.runtime.models.sharded import sharded_runner

pytestmark = [
    pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built"),
    pytest.mark.skipif(sys.platform == "win32", reason="ranks need POSIX"),
    # Heads of some tiny checkpoints have sizes that the kernels lack.
    pytest.mark.filterwarnings("ignore:sequences run one by one"),
]

# Tied heads, latent attention and experts, sinks, states, norms of all heads.
FORMS = ["qwen2", "deepseek_v2", "gpt_oss", "granitemoehybrid", "olmo2"]
SHARES = {"falcon": 1}  # its only head of keys is read by both ranks
# 2 heads of keys, which only attention without sinks can share; 2 heads of a state.
INDIVISIBLE = {"gpt_oss", "granite_swa", "kimi_linear"}
# onnxruntime computes a product, a state or a function of few values of these: its last bits depend on the
# columns or heads of a rank.
OTHER_KERNELS = {
    *("bloom", "falcon_h1", "granitemoehybrid", "granitemoeshared"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}


def opened(folder: Path, count: int, quantize: str | None = None) -> tuple[Runner, ShardedRunner]:
    """Open a checkpoint whole, and over some ranks."""
    provider, source = get_provider("cpu"), resolve_model(str(folder), quantize=quantize)
    given = RunnerConfig(max_slots=4, num_threads=1, options={"kv_cache": "float32"})
    config = provider.resolve_options(with_context(given, source))
    whole = provider.runner(lowered_model(source, provider, config), config)
    ranks, _ = sharded_runner(source, provider, config, count)
    assert isinstance(ranks, ShardedRunner)
    return whole, ranks


def processes(runner: ShardedRunner) -> list[int]:
    return [rank.pid for rank in runner.ranks]


def steps(runner: Runner) -> npt.NDArray[np.float32]:
    """Return the logits of prompts, of a prompt on a cache, and of decoding, of two slots."""
    first, second = np.random.default_rng(0).integers(0, 250, (2, 14))
    found = []
    for rows in (
        [Row(0, first[:8], 0), Row(1, second[:5], 0, num_logits=3)],
        [Row(0, first[8:12], 8), Row(1, second[5:6], 5)],
        [Row(0, first[12:13], 12), Row(1, second[6:7], 6)],
    ):
        found += [logits.copy() for logits in runner.forward(rows)]
    return np.concatenate(found)


def check(
    folder: Path, count: int, share: int | None, quantize: str | None = None, *, bits: bool = False
) -> None:
    """Compare the logits, to the bit or within 1e-5 of the largest, their tokens, and the bytes of KV."""
    whole, ranks = opened(folder, count, quantize)
    try:
        expected, found = steps(whole), steps(ranks)
        close = 0 if bits else 1e-5 * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(found, expected, rtol=0, atol=close)
        assert np.array_equal(found.argmax(-1), expected.argmax(-1))
        assert ranks.info.vocab_size == whole.info.vocab_size
        if share is not None:
            assert [rank.kv_bytes for rank in ranks.ranks] == [whole.kv_bytes // share] * count
            assert whole.kv_bytes % share == 0
    finally:
        whole.close()
        ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("quantize", [None, "int4-fast"])
@pytest.mark.parametrize("case", FORMS)
def test_two_ranks_give_the_logits_of_the_whole_and_hold_half_of_the_kv(
    case: str, quantize: str | None, tmp_path: Path
) -> None:
    check(write_case(case, tmp_path / case), 2, 2, quantize, bits=quantize is not None)


@pytest.mark.long
@pytest.mark.parametrize("quantize", [None, "int4-fast"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_four_ranks_hold_a_quarter_of_the_kv(family: str, quantize: str | None, tmp_path: Path) -> None:
    folder = write_tiny(family, tmp_path / family, num_key_value_heads=4)
    check(folder, 4, 4, quantize, bits=quantize is not None)


@pytest.mark.long
def test_ranks_that_share_a_head_of_keys_hold_it_each(tmp_path: Path) -> None:
    check(write_case("llama", tmp_path / "llama"), 4, 2)  # 2 heads of keys


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("quantize", [None, "int4-fast"])
@pytest.mark.parametrize("case", [case for case in CASES if "-" not in case])
def test_every_family_runs_over_ranks(case: str, quantize: str | None, count: int, tmp_path: Path) -> None:
    folder = write_case(case, tmp_path / case)
    if count == 4 and case in INDIVISIBLE:
        with pytest.raises(UsageError, match="cannot share equally"):
            check(folder, count, None, quantize)
    else:
        bits = quantize is not None and case not in OTHER_KERNELS  # also if a group of int8 levels is cut
        check(folder, count, None if count == 4 else SHARES.get(case, 2), quantize, bits=bits)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[ShardedRunner]:
    whole, runner = opened(write_case("llama", tmp_path / "llama"), 2)
    whole.close()
    yield runner
    runner.close()


@pytest.mark.long
def test_a_killed_rank_ends_the_step_and_the_next_one_starts_all_again(ranks: ShardedRunner) -> None:
    tokens = np.arange(6)
    expected = ranks.forward([Row(0, tokens, 0)])[0].copy()
    before = processes(ranks)
    os.kill(before[1], signal.SIGSTOP)  # the first rank waits for the second when that is killed
    threading.Timer(0.5, os.kill, (before[1], signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(ProviderRuntimeError, match=r"rank 1 of 2: .* exit code -9"):
        ranks.forward([Row(0, np.array([7]), 6)])
    assert time.monotonic() - begun < 30
    with pytest.raises(ProviderRuntimeError, match="KV of slot 0 was lost"):
        ranks.forward([Row(0, np.array([7]), 6)])
    assert ranks.take_lost() == {0}
    assert ranks.take_lost() == set()
    assert np.array_equal(ranks.forward([Row(0, tokens, 0)])[0], expected)
    assert not set(before) & set(processes(ranks))
    ranks.release(3)  # what holds nothing needs no call


@pytest.mark.long
def test_an_invalid_row_is_an_error_that_ends_no_rank(ranks: ShardedRunner) -> None:
    ranks.forward([Row(0, np.arange(3), 0)])
    before = processes(ranks)
    with pytest.raises(ProviderRuntimeError, match="rank 0 of 2"):
        ranks.forward([Row(0, np.arange(2), 9)])
    ranks.forward([Row(0, np.arange(2), 3)])
    assert processes(ranks) == before


@pytest.mark.long
def test_kv_of_all_ranks_can_be_taken_out_and_put_back(tmp_path: Path) -> None:
    whole, runner = opened(write_tiny("llama", tmp_path / "llama", max_position_embeddings=256), 2)
    whole.close()
    try:
        prompt = np.arange(70)
        runner.forward([Row(0, prompt, 0)])
        parts = [part.copy() for part in runner.read_kv(0, 0, 64)]
        expected = runner.forward([Row(0, prompt[64:65], 64)])[0].copy()
        runner.write_kv(1, 0, 64, parts)
        assert np.array_equal(runner.forward([Row(1, prompt[64:65], 64)])[0], expected)
        with pytest.raises(ProviderRuntimeError, match="another layout"):
            runner.write_kv(1, 0, 64, parts[1:])
    finally:
        runner.close()


@pytest.mark.long
def test_states_of_all_ranks_can_be_taken_out_and_put_back(tmp_path: Path) -> None:
    whole, runner = opened(write_case("granitemoehybrid", tmp_path / "hybrid"), 2)
    whole.close()
    try:
        prompt = np.arange(70)
        runner.forward([Row(0, prompt, 0, checkpoints=[64])])
        parts = [part.copy() for part in runner.read_kv(0, 0, 64)]
        state = [part.copy() for part in runner.read_state(0, 64)]
        expected = runner.forward([Row(0, prompt[64:65], 64, checkpoints=[64])])[0].copy()
        runner.write_kv(1, 0, 64, parts)
        with pytest.raises(ProviderRuntimeError, match="no state after 64 tokens"):
            runner.forward([Row(1, prompt[64:65], 64)])
        with pytest.raises(ProviderRuntimeError, match="another layout"):
            runner.write_state(1, 64, state[1:])
        runner.write_state(1, 64, state)
        assert np.array_equal(runner.forward([Row(1, prompt[64:65], 64)])[0], expected)
    finally:
        runner.close()


@pytest.mark.long
def test_ranks_of_different_models_are_refused(tmp_path: Path) -> None:
    graphs = []
    for size in (256, 512):
        whole, runner = opened(write_tiny("llama", tmp_path / str(size), vocab_size=size), 2)
        graphs.append(runner._models)
        configs = runner._configs
        whole.close()
        runner.close()
    with pytest.raises(
        ProviderRuntimeError, match="the ranks are of different models: num_tokens is 256, 512"
    ):
        ShardedRunner("cpu", [graphs[0][0], graphs[1][1]], configs)
