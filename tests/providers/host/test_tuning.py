"""What is measured once a machine, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carryall.errors import UsageError
from carryall.providers.host import autotune, tuning
from carryall.providers.host.tuning import Tuning, store_tuning, stored_tuning, tuned_kernels
from carryall.providers.native.library import ISA_VARIABLE
from carryall.providers.targets.cpu import CpuProvider
from carryall.storage.root import cache_root

FOUND = Tuning("avx2", 1, {"amx": [1.0, 1.0], "avx2": [1.5, 1.25]}, {2: [1.0, 1.0], 1: [1.25, 1.5]})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache."""
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({"a": [1, 1], "b": [1.2, 1.0]}, "b"),
        ({"a": [1, 1], "b": [1.02, 1.02]}, "a"),  # noise
        ({"a": [1, 1], "b": [2.0, 0.9]}, "a"),  # slower somewhere
        ({"a": [1, 1], "b": [1.2, 1.2], "c": [1.3, 1.2]}, "c"),
    ],
)
def test_a_default_is_replaced_by_what_is_faster_everywhere(gains: dict[str, list[float]], best: str) -> None:
    assert autotune.fastest(gains, "a") == best


def test_a_result_is_kept_for_this_machine_and_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stored_tuning() is None
    store_tuning(FOUND)
    assert stored_tuning() == FOUND
    assert CpuProvider().num_threads() == 1
    monkeypatch.setattr(tuning, "sources_key", lambda: "others")
    assert stored_tuning() is None


def damage(change: str | dict[str, object]) -> None:
    store_tuning(FOUND)
    (path,) = (cache_root() / "tuning").iterdir()
    path.write_text(
        change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    )


NO_COUNTS: list[object] = [-1, 0, 1.5, True, "2", float("inf"), 10**6, None]
NO_NAMES: list[object] = [None, 1, "\udcff", "a\0b"]
DAMAGES: list[str | dict[str, object]] = [
    *("", "[]", "{}", "\x00", "[" * 100_000),
    *({"threads": threads} for threads in NO_COUNTS),
    *({"isa": isa} for isa in NO_NAMES),
    {"isas": []},
    {"isas": {"avx2": 1}},
    {"isas": {"avx2": ["x"]}},
    {"isas": {"avx2": [float("nan")]}},
    {"thread_counts": {"x": [1.0]}},
    {"thread_counts": {"2": None}},
    {"thread_counts": {"2": [float("inf")]}},
]


@pytest.mark.parametrize("change", DAMAGES)
def test_a_damaged_file_means_the_defaults(change: str | dict[str, object]) -> None:
    expected = CpuProvider().num_threads()
    damage(change)
    assert stored_tuning() is None
    assert CpuProvider().num_threads() == expected


def test_a_cache_that_cannot_be_used_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CARRYALL_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be used: Not a directory"):
        store_tuning(FOUND)


def test_a_forced_instruction_set_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "avx2")
    with pytest.raises(UsageError, match="CARRYALL_KERNELS_ISA=avx2 forces an instruction set; unset it"):
        CpuProvider().autotune()


def test_kernels_use_what_was_measured(
    kernels_of_this_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    first, *others = tuned_kernels().supported
    try:
        for isa in [*others, first]:
            store_tuning(Tuning(isa, 1, {isa: [1.0, 1.0]}, {1: [1.0, 1.0]}))
            assert tuned_kernels().isa == isa
        store_tuning(Tuning("of another processor", 1, {}, {}))
        assert tuned_kernels().isa == first
    finally:
        store_tuning(Tuning(first, 1, {}, {}))
        tuned_kernels()


@pytest.mark.usefixtures("kernels_of_this_machine")
def test_measuring_keeps_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    for name, value in {"_ROUNDS": 1, "_WARM_UP": 0, "_LAYERS": 2, "ROWS": (1, 4)}.items():
        monkeypatch.setattr(autotune, name, value)
    found = CpuProvider().autotune()
    assert found.isa in found.isas
    assert found.threads in found.thread_counts
    assert next(iter(found.isas.values())) == [1.0, 1.0]  # the default, relative to itself
    assert stored_tuning() == found
    assert CpuProvider().num_threads() == found.threads
