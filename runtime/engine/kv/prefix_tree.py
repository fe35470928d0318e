"""A radix tree over token ids, which finds the slots that hold KV of a prefix.

Based on RadixAttention (arXiv:2312.07104), where a node owns the KV of its tokens. Here one slot holds all KV
of a sequence. A node lists the slots whose sequences pass through it, and is removed when there are none.
Nodes split and merge at any token; a tree of n slots has at most 2 n nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import numpy as np
import numpy.typing as npt

from ....records import dataclass
from ..requests.chunk import KVSalt

Tokens = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens [start, stop) of every sequence through this node."""

    tokens: Tokens
    start: int = 0
    parent: _Node | None = None
    slots: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)  # the slots whose sequence ends with this node
    children: dict[int, _Node] = field(default_factory=dict)  # by first token

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class _Entry:
    """A slot's sequence: the node at which it ends, its salt, and how many of its tokens have KV."""

    end: _Node
    salt: KVSalt
    computed: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix of a sequence.

    Args:
        length: number of tokens whose KV is computed.
        slots: the slots that hold this KV.
        known: number of tokens whose KV is computed or being computed.
        shared: number of tokens that are computed in some slot, even if nothing can be resumed there.
    """

    length: int = 0
    slots: tuple[int, ...] = ()
    known: int = 0
    shared: int = 0


class PrefixTree:
    """The token sequences of all slots, found by prefix.

    Sequences with different salts never match each other.
    """

    def __init__(self) -> None:
        self._roots: dict[KVSalt, _Node] = {}
        self._entries: dict[int, _Entry] = {}
        self.num_nodes = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def insert(self, slot: int, tokens: Tokens, computed: int, salt: KVSalt = None) -> None:
        """Add a slot with its ``tokens`` [n], of which the first ``computed`` have KV."""
        node = self._roots.setdefault(salt, _Node(tokens[:0]))
        for child, common in _walk(node, tokens):
            node = child if common == len(child.tokens) else self._split(child, common)
            node.slots.add(slot)
        if node.stop < len(tokens):
            leaf = _Node(tokens[node.stop :].copy(), node.stop, node, {slot})
            node.children[int(leaf.tokens[0])] = leaf
            self.num_nodes += 1
            node = leaf
        node.ending.add(slot)
        self._entries[slot] = _Entry(node, salt, computed)

    def remove(self, slot: int) -> None:
        """Remove a slot, and the nodes that no other slot uses."""
        entry = self._entries.pop(slot)
        node = entry.end
        node.ending.remove(slot)
        while node.parent is not None:
            node.slots.remove(slot)
            if not node.slots:
                del node.parent.children[int(node.tokens[0])]
                self.num_nodes -= 1
            elif len(node.children) == 1:
                self._merge_with_child(node)
            node = node.parent
        if not node.children and not node.ending:
            del self._roots[entry.salt]

    def set_computed(self, slot: int, computed: int) -> None:
        """Set how many of a slot's tokens have KV."""
        self._entries[slot].computed = computed

    def match(
        self, tokens: Tokens, salt: KVSalt = None, resume: Callable[[int, int, int], int] | None = None
    ) -> PrefixMatch:
        """Return the longest prefix of ``tokens`` whose KV some slot holds.

        Args:
            tokens: [n], the sequence to look up.
            salt: only sequences with the same salt match.
            resume: returns the longest prefix that a slot can serve, given the slot, the tokens in common,
                and how many tokens it has computed; by default all of these.
        """
        root, point = self._roots.get(salt), resume or _whole
        path = _walk(root, tokens) if root is not None else []
        known, length, shared, slots = 0, 0, 0, dict[int, None]()
        for node, common in reversed(path):
            depth = node.start + common
            if depth <= length:  # nodes closer to the root match fewer tokens
                break
            for slot in node.slots:
                entry = self._entries[slot]
                shared = max(shared, min(depth, entry.computed))
                known = max(known, point(slot, depth, entry.end.stop))
                usable = point(slot, depth, entry.computed)
                if usable > length:
                    length, slots = usable, {}
                if usable == length > 0:
                    slots[slot] = None
        return PrefixMatch(length, tuple(slots), known, shared)

    def prefixes(self, slot: int) -> list[int]:
        """Return other slots whose whole sequence is a prefix of this slot's sequence, or equal to it."""
        lengths, node = list[int](), self._entries[slot].end
        while node.parent is not None:
            lengths += node.ending
            node = node.parent
        lengths.remove(slot)
        return lengths

    def length(self, slot: int) -> int:
        """Return the number of tokens of a slot's sequence."""
        return self._entries[slot].end.stop

    def computed(self, slot: int) -> int:
        """Return how many of a slot's tokens have KV."""
        return self._entries[slot].computed

    def check_integrity(self) -> None:
        """Check that nodes, slots and counts are consistent.

        Raises:
            RuntimeError: they are not; the message shows the difference.
        """
        nodes = [node for root in self._roots.values() for node in _descendants(root)]
        if len(nodes) != self.num_nodes or len(nodes) > 2 * len(self._entries):
            raise RuntimeError(f"{len(nodes)} nodes for {len(self._entries)} slots, {self.num_nodes} counted")
        for node in nodes:
            ending = {slot for slot, entry in self._entries.items() if entry.end is node}
            through = [slot for child in node.children.values() for slot in child.slots]
            if not node.slots or ending != node.ending or sorted([*ending, *through]) != sorted(node.slots):
                raise RuntimeError(
                    f"node at {node.start} lists slots {node.slots}, not {ending} and {through}"
                )
            for first, child in node.children.items():
                if (child.parent, child.start, int(child.tokens[0])) != (node, node.stop, first):
                    raise RuntimeError(
                        f"child {first} of the node at {node.start} has another parent or start"
                    )

    def _split(self, node: _Node, count: int) -> _Node:
        """Split a node after ``count`` tokens; return the new parent, which holds these tokens."""
        parent = node.parent
        assert parent is not None  # noqa: S101 -- roots have no tokens to split
        upper = _Node(node.tokens[:count], node.start, parent, set(node.slots))
        parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[count:], upper.stop, upper
        upper.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        return upper

    def _merge_with_child(self, node: _Node) -> None:
        """Merge a node with its only child, unless a slot's sequence ends at the node."""
        child = next(iter(node.children.values()))
        if node.ending or node.parent is None:
            return
        child.tokens, child.start = np.concatenate([node.tokens, child.tokens]), node.start
        child.parent = node.parent
        node.parent.children[int(node.tokens[0])] = child
        self.num_nodes -= 1


def _whole(slot: int, length: int, computed: int) -> int:
    """Return the prefix that a slot serves if it keeps all of its tokens."""
    return min(length, computed)


def _walk(root: _Node, tokens: Tokens) -> list[tuple[_Node, int]]:
    """Return the nodes along ``tokens`` with their matching tokens; only the last may match partly."""
    path: list[tuple[_Node, int]] = []
    node, at = root, 0
    while at < len(tokens):
        child = node.children.get(int(tokens[at]))
        if child is None:
            break
        size = min(len(child.tokens), len(tokens) - at)
        differ = child.tokens[:size] != tokens[at : at + size]
        common = int(differ.argmax()) if differ.any() else size
        path.append((child, common))
        if common < len(child.tokens):
            break
        node, at = child, at + common
    return path


def _descendants(root: _Node) -> list[_Node]:
    nodes, left = list[_Node](), list(root.children.values())
    while left:
        node = left.pop()
        nodes.append(node)
        left.extend(node.children.values())
    return nodes
