"""The limits of one template rendering: the size of each value, and the total work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MappingView, Sized
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_SIZE = 10_000_000  # characters of the prompt, and of any intermediate string
MAX_ITEMS = 200_000  # of a list, and of all values nested in a value
_MAX_BITS = 4096  # of an integer
# Total work of a rendering in units; a character costs 1. The limit is about one second of work.
UNITS = 256_000_000
ITERATION, CALL = 256, 2048  # units of a loop iteration, and of a call of a macro, function or method
_ITEM = 16  # units of a list item
FILTERED, SLOWLY_FILTERED = 8, 256  # units of a character that a filter reads


_CONTAINERS = (list, tuple, Mapping, MappingView, Namespace)  # the text of these contains that of their items


class Budget:
    """The remaining work of one rendering."""

    def __init__(self) -> None:
        self._left = UNITS

    def charge(self, units: int) -> None:
        """Charge work before it is done.

        Raises:
            SecurityError: the rendering exceeds its budget.
        """
        self._left -= units
        if self._left < 0:
            raise SecurityError(
                f"it needs too much work: more than {UNITS} characters, {UNITS // _ITEM} items or "
                f"{UNITS // ITERATION} loop iterations"
            )

    def iterated(self, items: Iterable[Any], literal: int) -> Iterable[Any]:
        """Charge the iterations of a loop, in advance if they can be counted.

        Args:
            items: the items of the loop.
            literal: characters of literal text that each iteration writes.
        """
        units = ITERATION + max(0, literal)  # a template can call this filter, so it must not lower the cost
        if isinstance(items, Sized):
            self.charge(len(items) * units)
            return items
        return self._charging(items, units)

    def _charging(self, items: Iterable[Any], units: int) -> Iterator[Any]:
        for item in items:
            self.charge(units)
            yield item

    def listed(self, items: Iterable[Any]) -> list[Any]:
        """Return the items of an iterable of unknown length as a list, within ``MAX_ITEMS``."""
        elements = []
        for item in items:
            elements.append(item)
            if len(elements) > MAX_ITEMS:
                raise SecurityError(f"a list of more than {MAX_ITEMS} items")
        self.charge(_ITEM * len(elements))
        return elements

    def made(self, value: Any) -> Any:
        """Charge a new value, and return it."""
        if isinstance(value, str):
            self.expect(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            if len(value) > MAX_ITEMS:
                raise SecurityError(f"a list of more than {MAX_ITEMS} items")
            self.charge(_ITEM * len(value))
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise SecurityError(f"an integer of more than {_MAX_BITS} bits")
        elif isinstance(value, bytes | bytearray | memoryview):
            raise SecurityError("bytes are not allowed in templates")
        return value

    def expect(self, size: float) -> None:
        """Charge a string of ``size`` characters before it is made."""
        if size > MAX_SIZE:
            raise SecurityError(f"a text of more than {MAX_SIZE} characters")
        self.charge(int(size))

    def weigh(self, value: Any) -> int:
        """Return the number of characters of a value's text, including all nested values.

        Shared values count each time: nested lists that repeat an item can have a text of exponential size.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 32
        weight, nodes = _weight(value)
        self.charge(_ITEM * nodes)
        return weight


def _weight(value: Any) -> tuple[int, int]:
    """Return the characters and the number of nodes of a container's text.

    Each container is visited once, however often it is held, so a value that doubles with every level takes
    as many visits as it has levels. Containers are added up when all that they hold is known.

    Raises:
        SecurityError: it is too large, or holds itself.
    """
    known: dict[int, tuple[int, int]] = {}  # by id
    parts: dict[int, list[Any]] = {}  # by id; kept, because the pairs of a view live nowhere else
    seen, stack = 0, [value]
    while stack:
        container = stack[-1]
        if id(container) not in parts:
            elements = parts[id(container)] = _elements(container)
            seen += len(elements)
            if seen > MAX_ITEMS:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items")
            inner = [each for each in elements if isinstance(each, _CONTAINERS) and id(each) not in known]
            if any(id(each) in parts for each in inner):  # it is opened above, and not added up yet
                raise SecurityError(f"a value of more than {MAX_ITEMS} items, for it holds itself")
            if inner:
                stack += inner
                continue
        stack.pop()
        if id(container) in known:
            continue
        weight, nodes = 2, 1
        for element in parts[id(container)]:
            if isinstance(element, str):
                weight, nodes = weight + len(element) + 4, nodes + 1
            elif isinstance(element, _CONTAINERS):
                weight, nodes = weight + known[id(element)][0], nodes + known[id(element)][1]
            else:
                weight, nodes = weight + 32, nodes + 1
        if nodes > MAX_ITEMS or weight > MAX_SIZE:
            raise SecurityError(f"a value of more than {MAX_ITEMS} items or {MAX_SIZE} characters")
        known[id(container)] = (weight, nodes)
    return known[id(value)]


def _elements(container: Any) -> list[Any]:
    if isinstance(container, Mapping):
        return [*container.keys(), *container.values()]
    if isinstance(container, Namespace):
        return list(container._Namespace__attrs.values())  # noqa: SLF001 -- there is no public access
    return list(container)
