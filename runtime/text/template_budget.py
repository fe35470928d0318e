"""The limits of one template rendering: the size of each value, and the total work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MappingView, Sized
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_SIZE = 10_000_000  # characters of the prompt, and of any intermediate string
MAX_ITEMS = 200_000  # of a list, and of all values nested in a value
_MAX_BITS = 4096  # of an integer
# Total work in units; a character costs 1. The limit is about one second of work.
_UNITS = 256_000_000
ITERATION, CALL = 256, 2048  # units of a loop iteration, and of a call of a macro, function or method
_ITEM = 16  # units of a list item
FILTERED, SLOWLY_FILTERED = 8, 256  # units of a character that a filter reads


_CONTAINERS = (list, tuple, Mapping, MappingView, Namespace)  # the text of these contains that of their items


class Budget:
    """The remaining work of one rendering."""

    def __init__(self) -> None:
        self._left = _UNITS

    def charge(self, units: int) -> None:
        """Charge work before it is done.

        Raises:
            SecurityError: the rendering exceeds its budget.
        """
        self._left -= units
        if self._left < 0:
            raise SecurityError(
                f"it needs too much work: more than {_UNITS} characters, {_UNITS // _ITEM} items or "
                f"{_UNITS // ITERATION} loop iterations"
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
        weight = nodes = 0
        held: list[Any] = [value]
        while held:
            element = held.pop()
            nodes += 1
            if nodes > MAX_ITEMS or weight > MAX_SIZE:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items or {MAX_SIZE} characters")
            if isinstance(element, str):
                weight += len(element) + 4
            elif isinstance(element, Mapping):
                weight += 2
                held += element.keys()
                held += element.values()
            elif isinstance(element, Namespace):
                held += element._Namespace__attrs.values()  # noqa: SLF001 -- there is no public access
            elif isinstance(element, _CONTAINERS):
                weight += 2
                held.extend(element)  # type: ignore[arg-type]  # a view is iterable
            else:
                weight += 32
            if len(held) > MAX_ITEMS:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items")
        self.charge(_ITEM * nodes)
        return weight
