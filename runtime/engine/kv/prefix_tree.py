"""Which slots hold KV of which token sequences: a radix tree over token ids.

After RadixAttention (arXiv:2312.07104). There a node owns its piece of KV; here a sequence's KV lies whole in
one slot, so a node lists the slots whose sequences pass through it, and lives as long as there is one. Nodes
are split and merged token by token; a tree of n slots never has more than 2 n nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Node:
    """Tokens [start, stop) of every sequence through this node."""

    tokens: Tokens
    start: int = 0
    parent: _Node | None = None
    slots: set[int] = field(default_factory=set)
    ending: set[int] = field(default_factory=set)  # those of the slots whose sequence ends with this node
    children: dict[int, _Node] = field(default_factory=dict)  # by first token

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class _Entry:
    """One slot's sequence: the node at which it ends, its namespace, and how many tokens have KV."""

    end: _Node
    salt: str | None
    computed: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix of a sequence.

    Args:
        length: tokens whose KV is there.
        slots: those that hold it.
        known: tokens whose KV is there or being computed, as far as it will be of use.
    """

    length: int = 0
    slots: tuple[int, ...] = ()
    known: int = 0


class PrefixTree:
    """Sequences by slot, found by their prefixes.

    Sequences of different salts (one for each tenant, say) never match each other.
    """

    def __init__(self) -> None:
        self._roots: dict[str | None, _Node] = {}
        self._entries: dict[int, _Entry] = {}
        self.num_nodes = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self._entries

    def insert(self, slot: int, tokens: Tokens, computed: int, salt: str | None = None) -> None:
        """Add a slot, KV of the first ``computed`` of whose tokens is there."""
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
        """Forget a slot, and what no other slot holds."""
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

    def rename(self, source: int, target: int) -> None:
        """Note that a slot's KV now lies in another."""
        entry = self._entries[target] = self._entries.pop(source)
        entry.end.ending.remove(source)
        entry.end.ending.add(target)
        node: _Node | None = entry.end
        while node is not None and node.parent is not None:
            node.slots.remove(source)
            node.slots.add(target)
            node = node.parent

    def set_computed(self, slot: int, computed: int) -> None:
        """Note how many of a slot's tokens have KV."""
        self._entries[slot].computed = computed

    def match(
        self, tokens: Tokens, salt: str | None = None, shortest: Mapping[int, int] | None = None
    ) -> PrefixMatch:
        """The longest prefix of ``tokens`` that some slot holds.

        Args:
            tokens: looked up.
            salt: of whom.
            shortest: of slots that can serve long prefixes only, how long they must be.
        """
        root, least = self._roots.get(salt), shortest or {}
        path = _walk(root, tokens) if root is not None else []
        known, length, slots = 0, 0, dict[int, None]()
        for node, common in reversed(path):
            depth = node.start + common
            if depth <= length:  # nothing shallower can be longer
                break
            for slot in node.slots:
                if depth < least.get(slot, 0):
                    continue
                known = max(known, depth)
                usable = min(depth, self._entries[slot].computed)
                if usable > length:
                    length, slots = usable, {}
                if usable == length > 0:
                    slots[slot] = None
        return PrefixMatch(length, tuple(slots), known)

    def prefixes(self, slot: int) -> list[int]:
        """Other slots whose whole sequence is a prefix of this slot's, or equal to it."""
        found, node = list[int](), self._entries[slot].end
        while node.parent is not None:
            found += node.ending
            node = node.parent
        found.remove(slot)
        return found

    def length(self, slot: int) -> int:
        """Tokens of a slot's sequence."""
        return self._entries[slot].end.stop

    def computed(self, slot: int) -> int:
        """How many of a slot's tokens have KV."""
        return self._entries[slot].computed

    def check_integrity(self) -> None:
        """Check that nodes, slots and counts agree.

        Raises:
            RuntimeError: they do not; the message says how.
        """
        nodes = [node for root in self._roots.values() for node in _descendants(root)]
        if len(nodes) != self.num_nodes or len(nodes) > 2 * len(self._entries):
            raise RuntimeError(f"{len(nodes)} nodes for {len(self._entries)} slots, {self.num_nodes} counted")
        for node in nodes:
            ending = {slot for slot, entry in self._entries.items() if entry.end is node}
            through = [slot for child in node.children.values() for slot in child.slots]
            if not node.slots or ending != node.ending or sorted([*ending, *through]) != sorted(node.slots):
                raise RuntimeError(f"node at {node.start} lists {node.slots}, not {ending} and {through}")
            for first, child in node.children.items():
                if (child.parent, child.start, int(child.tokens[0])) != (node, node.stop, first):
                    raise RuntimeError(f"child {first} of the node at {node.start} is not its child")

    def _split(self, node: _Node, count: int) -> _Node:
        """Give a node's first ``count`` tokens to a new parent, which is returned."""
        parent = node.parent
        assert parent is not None  # noqa: S101 -- roots have no tokens to split
        upper = _Node(node.tokens[:count], node.start, parent, set(node.slots))
        parent.children[int(upper.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[count:], upper.stop, upper
        upper.children[int(node.tokens[0])] = node
        self.num_nodes += 1
        return upper

    def _merge_with_child(self, node: _Node) -> None:
        """Undo a split for which there is no more reason: no slot ends here, nothing branches here."""
        child = next(iter(node.children.values()))
        if node.ending or node.parent is None:
            return
        child.tokens, child.start = np.concatenate([node.tokens, child.tokens]), node.start
        child.parent = node.parent
        node.parent.children[int(node.tokens[0])] = child
        self.num_nodes -= 1


def _walk(root: _Node, tokens: Tokens) -> list[tuple[_Node, int]]:
    """The nodes along ``tokens``, each with how many of its tokens agree: all, except perhaps in the last."""
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
    found, left = list[_Node](), list(root.children.values())
    while left:
        node = left.pop()
        found.append(node)
        left.extend(node.children.values())
    return found
