"""Recurrent states by length: kept, shared, copied before a change; none is wrong after a failed run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import ProviderRuntimeError
from carryall.providers.base import Row
from carryall.providers.kv.state_memory import StateMemory

SLOTS, LENGTH = 3, 12
PRIME = 65_521  # sums below it are exact in float32


def row(slot: int, text: list[int], start: int, checkpoints: list[int] | None = None) -> Row:
    return Row(slot, np.array(text[start:], np.int64), start, checkpoints=checkpoints or [])


def run(memory: StateMemory, step: Row) -> None:
    """Let the state sum up the text: a polynomial of its tokens, different for every order."""
    place = memory.begin(step)
    for token in step.tokens.tolist():
        memory.arrays["s"][place] = (memory.arrays["s"][place] * 3 + token + 1) % PRIME
    memory.end(step, place)


def summed(text: list[int]) -> float:
    total = 0.0
    for token in text:
        total = (total * 3 + token + 1) % PRIME
    return total


def state(memory: StateMemory, slot: int, length: int) -> float:
    """What a run that continues the slot at ``length`` would start from."""
    probe = Row(slot, np.array([0]), length, checkpoints=[length])
    memory.check([probe])
    place = memory.begin(probe)
    value = float(memory.arrays["s"][place, 0])
    memory._pool.drop([place])
    return value


def test_a_kept_state_is_that_of_its_length_after_the_text_goes_on() -> None:
    memory = StateMemory({"s": (2,)}, 6, SLOTS)
    run(memory, row(0, [4, 2, 7], 0))
    run(memory, row(0, [4, 2, 7, 5], 3, [3]))
    assert memory.used == 2
    assert state(memory, 0, 3) == summed([4, 2, 7])


def test_a_shared_state_is_copied_before_it_changes() -> None:
    memory = StateMemory({"s": (2,)}, 6, SLOTS)
    run(memory, row(0, [1, 2], 0))
    memory.share(0, 1, 2)
    assert memory.used == 1
    run(memory, row(0, [1, 2, 3], 2))
    assert state(memory, 1, 2) == summed([1, 2])
    memory.release(0)
    memory.release(1)
    assert memory.used == 0


def test_a_copy_has_the_earlier_states_too() -> None:
    memory = StateMemory({"s": (2,)}, 6, SLOTS)
    run(memory, row(0, [4, 2, 7], 0))
    run(memory, row(0, [4, 2, 7, 5], 3, [3]))
    run(memory, row(0, [4, 2, 7, 5, 1], 4, [3, 4]))
    memory.share(0, 1, 4)
    memory.release(0)
    assert memory.used == 2
    assert [memory.read(1, length)[0][0] for length in (3, 4)] == [summed([4, 2, 7]), summed([4, 2, 7, 5])]


def test_a_failed_run_leaves_no_state_that_it_may_have_changed() -> None:
    memory = StateMemory({"s": (2,)}, 6, SLOTS)
    run(memory, row(0, [1, 2], 0))
    memory.begin(row(0, [1, 2, 3], 2))  # and never ends
    with pytest.raises(ProviderRuntimeError, match="slot 0 has no state after 2 tokens"):
        memory.check([row(0, [1, 2, 3], 2)])


def test_what_is_missing_is_refused() -> None:
    memory = StateMemory({"s": (2,)}, 2, SLOTS)
    with pytest.raises(ProviderRuntimeError, match="no state after 3"):
        memory.share(0, 1, 3)
    with pytest.raises(ProviderRuntimeError, match="3 more states are needed, 2 of 2 places are free"):
        memory.check([row(slot, [1], 0) for slot in range(3)])


@pytest.mark.long
@given(st.data())
def test_states_are_those_of_their_texts_after_any_calls(data: st.DataObject) -> None:
    memory = StateMemory({"s": (2,)}, 4 * SLOTS, SLOTS)
    texts: list[list[int]] = [[] for _ in range(SLOTS)]
    kept: list[set[int]] = [set() for _ in range(SLOTS)]
    for _ in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, SLOTS - 1))
        lengths = sorted(kept[slot] | {0})
        match data.draw(st.sampled_from(["run", "run", "share", "release"])):
            case "run":
                start = data.draw(st.sampled_from(lengths))
                added = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
                wanted = [n for n in data.draw(st.sets(st.sampled_from(lengths))) if 0 < n <= start]
                texts[slot] = texts[slot][:start] + added
                run(memory, row(slot, texts[slot], start, wanted))
                kept[slot] = {*wanted, len(texts[slot])}
            case "share":
                target = data.draw(st.integers(0, SLOTS - 1))
                length = data.draw(st.sampled_from(lengths))
                if target != slot:
                    memory.share(slot, target, length)
                    texts[target] = texts[slot][:length]
                    kept[target] = {n for n in kept[slot] if n <= length}
            case "release":
                memory.release(slot)
                texts[slot], kept[slot] = [], set()
        memory.check_integrity()
    for slot in range(SLOTS):
        assert {n: memory.arrays["s"][p, 0] for n, p in memory._kept[slot].items()} == {
            n: summed(texts[slot][:n]) for n in kept[slot]
        }
