"""What every provider and runner must do; runs on each provider that is available here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from device_stand_ins import STAND_INS
from tiny_models import write_tiny

from carryall.exporter.export import export_package
from carryall.exporter.package import Package
from carryall.exporter.save import save_model
from carryall.graph_opt.pipeline import run
from carryall.providers import get_provider, provider_names
from carryall.providers.base import MovableRunner, Provider, Row, Runner, RunnerConfig
from carryall.runtime.errors import CarryallError, ProviderRuntimeError, UsageError

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
SLOTS, CONTEXT, LOWERED, VOCAB = 4, 64, 160, 260


@pytest.fixture(params=[*provider_names(), *STAND_INS])
def provider(request: pytest.FixtureRequest) -> Provider:
    stand_in = STAND_INS.get(request.param)
    provider = stand_in() if stand_in is not None else get_provider(request.param)
    reason = provider.available()
    if reason is not None:
        pytest.skip(reason)
    return provider


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("contract")
    return export_package(write_tiny("llama", folder / "checkpoint"), folder / "package")


@pytest.fixture
def model(provider: Provider, package: Package, tmp_path: Path) -> Path:
    """A portable model, lowered as the provider wants it."""
    lowered, _ = run(package.load(), provider.passes(RunnerConfig(context_length=LOWERED)))
    save_model(lowered, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def open_runner(
    provider: Provider, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Runner]]:
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))
    runners: list[Runner] = []

    def opener(**changes: object) -> Runner:
        config = {"max_slots": SLOTS, "context_length": CONTEXT, "num_threads": 1, **changes}
        runners.append(provider.runner(model, RunnerConfig(**config)))  # type: ignore[arg-type]
        return runners[-1]

    yield opener
    for runner in runners:
        runner.close()


def sequence(length: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


def whole(runner: Runner, tokens: Tokens, slot: int = 0) -> Logits:
    """Logits of every position from one undisturbed run."""
    (logits,) = runner.forward([Row(slot, tokens, 0, num_logits=len(tokens))])
    kept = logits.copy()
    runner.release(slot)
    return kept


def close_to(got: Logits, expected: Logits) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_info_describes_the_model(open_runner: Callable[..., Runner]) -> None:
    info = open_runner().info
    assert (info.vocab_size, info.context_length, info.max_slots) == (VOCAB, CONTEXT, SLOTS)
    assert info.kv_bytes_per_token > 0


def test_kv_takes_memory_until_it_is_released(open_runner: Callable[..., Runner]) -> None:
    runner = open_runner()
    empty = runner.kv_bytes
    runner.forward([Row(0, sequence(9, 0), 0)])
    held = runner.kv_bytes
    assert held >= 9 * runner.info.kv_bytes_per_token
    runner.forward([Row(1, sequence(5, 1), 0)])
    assert runner.kv_bytes >= held
    runner.release(0)
    runner.release(1)
    assert runner.kv_bytes == empty


def test_chunked_equals_whole(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(13, 0)
    expected = whole(runner, tokens)
    runner.forward([Row(1, tokens[:5], 0, num_logits=0)])
    close_to(runner.forward([Row(1, tokens[5:12], 5, num_logits=7)])[0], expected[5:12])
    close_to(runner.forward([Row(1, tokens[12:], 12)])[0], expected[12:])


def test_batched_equals_single(open_runner: Callable[..., Runner]) -> None:
    runner = open_runner()
    texts = [sequence(length, length) for length in (4, 9, 2, 20)]
    expected = [whole(runner, text) for text in texts]
    runner.forward([Row(slot, text[:-1], 0) for slot, text in enumerate(texts)])
    rows = [Row(slot, text[-1:], len(text) - 1) for slot, text in enumerate(texts)]
    for logits, alone in zip(runner.forward(rows), expected, strict=True):
        close_to(logits, alone[-1:])


def test_prompts_and_decode_share_a_step(open_runner: Callable[..., Runner]) -> None:
    runner, text, prompt = open_runner(), sequence(8, 1), sequence(11, 2)
    expected, prompted = whole(runner, text), whole(runner, prompt)
    runner.forward([Row(3, text[:-1], 0)])
    late, early = runner.forward([Row(3, text[-1:], 7), Row(0, prompt, 0)])
    close_to(late, expected[-1:])
    close_to(early, prompted[-1:])


def test_rows_of_several_tokens_on_caches_give_all_their_logits_and_can_be_taken_back(
    open_runner: Callable[..., Runner],
) -> None:
    runner, texts = open_runner(), [sequence(9, 10), sequence(6, 11), sequence(7, 12)]
    expected = [whole(runner, text) for text in texts]
    runner.forward([Row(slot, text[:3], 0, num_logits=0) for slot, text in enumerate(texts)])
    wrong = [np.concatenate([text[3:5], (text[5:] + 1) % VOCAB]) for text in texts]
    wanted = (6, 3, 0)
    rows = [Row(slot, tail, 3, n) for slot, (tail, n) in enumerate(zip(wrong, wanted, strict=True))]
    taken = runner.forward(rows)
    assert [logits.shape for logits in taken] == [(n, VOCAB) for n in wanted]
    close_to(taken[0][:2], expected[0][3:5])
    close_to(taken[1][0], expected[1][3])
    rows = [Row(slot, text[5:], 5, num_logits=len(text) - 5) for slot, text in enumerate(texts)]
    for logits, alone in zip(runner.forward(rows), expected, strict=True):
        close_to(logits, alone[5:])


def test_a_prefix_can_be_copied(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(10, 3)
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens, 0)])
    runner.copy_prefix(0, 2, 6)
    close_to(runner.forward([Row(2, tokens[6:], 6, num_logits=4)])[0], expected[6:])


def test_kv_can_leave_and_come_back(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(context_length=160), np.resize(sequence(CONTEXT, 3), 150)
    if not runner.info.kv_layout:
        pytest.skip("this provider's KV cannot leave its device")
    runner = cast(MovableRunner, runner)
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens[:140], 0)])
    pieces = [(start, length, runner.read_kv(0, start, length)) for start, length in ((0, 64), (64, 70))]
    kept = [(start, length, [part.copy() for part in parts]) for start, length, parts in pieces]
    with pytest.raises(ProviderRuntimeError):
        runner.read_kv(0, 128, 13)
    runner.release(0)
    for start, length, parts in kept:
        runner.write_kv(2, start, length, parts)
    close_to(runner.forward([Row(2, tokens[134:], 134, num_logits=16)])[0], expected[134:])
    with pytest.raises(ProviderRuntimeError):
        runner.write_kv(3, 64, 70, kept[1][2])


def test_the_context_can_be_filled(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(CONTEXT, 4)
    expected = whole(runner, tokens)
    runner.forward([Row(0, tokens[:-1], 0)])
    close_to(runner.forward([Row(0, tokens[-1:], CONTEXT - 1)])[0], expected[-1:])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row(0, sequence(1, 0), 1), "nothing lies before it"),
        (Row(0, sequence(CONTEXT + 1, 0), 0), "longer than the context"),
        (Row(0, sequence(0, 0), 0), "no tokens"),
        (Row(SLOTS, sequence(2, 0), 0), "no such slot"),
        (Row(0, np.array([1, VOCAB]), 0), "no such token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failing_row_harms_no_other(open_runner: Callable[..., Runner], row: Row, why: str) -> None:
    """The faulty step computes nothing; repeated without the faulty row it gives what it should."""
    runner, tokens = open_runner(), sequence(6, 5)
    expected = whole(runner, tokens)
    runner.forward([Row(1, tokens[:-1], 0)])
    with pytest.raises(ProviderRuntimeError):
        runner.forward([Row(1, tokens[-1:], 5), row])
    close_to(runner.forward([Row(1, tokens[-1:], 5)])[0], expected[-1:])


def test_released_slots_are_empty(open_runner: Callable[..., Runner]) -> None:
    runner, tokens = open_runner(), sequence(6, 6)
    runner.forward([Row(1, tokens, 0)])
    runner.release(1)
    runner.release(1)
    with pytest.raises(ProviderRuntimeError):
        runner.forward([Row(1, tokens[:1], 6)])


def test_unknown_options_are_refused(open_runner: Callable[..., Runner]) -> None:
    with pytest.raises(UsageError, match="speed"):
        open_runner(options={"speed": 11})


def test_a_corrupt_model_is_a_typed_error(provider: Provider, tmp_path: Path) -> None:
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"\x08\x0a broken")
    with pytest.raises(CarryallError):
        provider.session(path)


def test_closing_twice_is_fine(open_runner: Callable[..., Runner]) -> None:
    runner = open_runner()
    runner.close()
    runner.close()
