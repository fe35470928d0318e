"""The radix tree against a linear search in a list of sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from carryall.runtime.engine.kv.prefix_tree import PrefixMatch, PrefixTree

SLOTS = st.integers(0, 7)
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=12)
SALTS = st.sampled_from([None, "a", "b"])


def array(tokens: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class TreeMachine(RuleBasedStateMachine):
    """Random operations on the tree and on a plain table of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.table: dict[int, tuple[list[int], str | None, int]] = {}

    @rule(slot=SLOTS, tokens=SEQUENCES, salt=SALTS, share=st.floats(0, 1))
    def insert(self, slot: int, tokens: list[int], salt: str | None, share: float) -> None:
        if slot in self.table:
            return
        computed = round(share * len(tokens))
        self.tree.insert(slot, array(tokens), computed, salt)
        self.table[slot] = tokens, salt, computed

    @rule(slot=SLOTS)
    def remove(self, slot: int) -> None:
        if self.table.pop(slot, None):
            self.tree.remove(slot)

    @rule(slot=SLOTS)
    def compute(self, slot: int) -> None:
        if slot in self.table:
            tokens, salt, _ = self.table[slot]
            self.table[slot] = tokens, salt, len(tokens)
            self.tree.set_computed(slot, len(tokens))

    @rule(tokens=SEQUENCES, salt=SALTS, shares=st.dictionaries(SLOTS, st.floats(0, 1)))
    def match(self, tokens: list[int], salt: str | None, shares: dict[int, float]) -> None:
        same = {s: (t, c) for s, (t, its_salt, c) in self.table.items() if its_salt == salt}
        shortest = {s: round(shares[s] * c) for s, (_, c) in same.items() if s in shares}
        shared = {s: common(tokens, t) for s, (t, _) in same.items()}
        serving = {s: depth for s, depth in shared.items() if depth >= shortest.get(s, 0)}
        usable = {s: min(depth, same[s][1]) for s, depth in serving.items()}
        longest = max(usable.values(), default=0)

        def resume(slot: int, length: int, computed: int) -> int:
            return min(length, computed) if length >= shortest.get(slot, 0) else 0

        found = self.tree.match(array(tokens), salt, resume)
        assert found.length == longest
        assert found.known == max(serving.values(), default=0)
        assert bool(found.slots) == (longest > 0)
        assert all(usable[slot] == longest for slot in found.slots)

    @rule(slot=SLOTS)
    def prefixes(self, slot: int) -> None:
        if slot in self.table:
            whole, salt, _ = self.table[slot]
            expected = [
                other
                for other, (tokens, its_salt, _) in self.table.items()
                if other != slot and salt == its_salt and whole[: len(tokens)] == tokens
            ]
            assert sorted(self.tree.prefixes(slot)) == sorted(expected)

    @invariant()
    def holds_what_the_table_holds(self) -> None:
        self.tree.check_integrity()
        for slot in range(8):
            assert (slot in self.tree) == (slot in self.table)
        for slot, (tokens, _, computed) in self.table.items():
            assert (self.tree.length(slot), self.tree.computed(slot)) == (len(tokens), computed)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(SEQUENCES, min_size=1, max_size=8))
def test_nothing_is_left_when_all_slots_are_gone(sequences: list[list[int]]) -> None:
    tree = PrefixTree()
    for slot, tokens in enumerate(sequences):
        tree.insert(slot, array(tokens), len(tokens))
    for slot in range(len(sequences)):
        tree.remove(slot)
    assert tree.num_nodes == 0
    assert tree.match(array(sequences[0])) == PrefixMatch()
    tree.check_integrity()


def test_a_prefix_in_computation_is_known_but_not_usable() -> None:
    tree = PrefixTree()
    tree.insert(0, array([1, 2, 3, 4]), 2)
    assert tree.match(array([1, 2, 3, 9])) == PrefixMatch(length=2, slots=(0,), known=3, shared=2)
    tree.set_computed(0, 4)
    assert tree.match(array([1, 2, 3, 9])) == PrefixMatch(length=3, slots=(0,), known=3, shared=3)


def test_a_shorter_prefix_that_is_there_beats_a_longer_one_that_is_not() -> None:
    tree = PrefixTree()
    tree.insert(0, array([1, 2, 3, 4]), 0)
    tree.insert(1, array([1, 2, 5]), 3)
    assert tree.match(array([1, 2, 3, 4])) == PrefixMatch(length=2, slots=(1,), known=4, shared=2)


def test_the_tokens_given_may_change_afterwards() -> None:
    tree, tokens = PrefixTree(), array([1, 2, 3])
    tree.insert(0, tokens, 3)
    tokens[:] = 9
    assert tree.match(array([1, 2, 3])).length == 3


@pytest.mark.parametrize("damage", ["num_nodes", "slots", "start"])
def test_integrity_check_sees_damage(damage: str) -> None:
    tree = PrefixTree()
    tree.insert(0, array([1, 2, 3]), 3)
    tree.insert(1, array([1, 2, 4]), 3)
    node = tree._entries[0].end
    if damage == "num_nodes":
        tree.num_nodes += 1
    elif damage == "slots":
        node.slots.add(1)
    else:
        node.start += 1
    with pytest.raises(RuntimeError, match=r"nodes for|lists|has another parent"):
        tree.check_integrity()


def test_a_split_is_undone_when_nothing_branches_there_any_more() -> None:
    tree = PrefixTree()
    tree.insert(0, np.array([1, 2, 3, 4]), 4)
    tree.insert(1, np.array([1, 2, 5, 6]), 4)
    assert tree.num_nodes == 3
    tree.remove(1)
    assert tree.num_nodes == 1
    tree.check_integrity()
