"""What a template may make in one rendering: the size of each value, and the work of all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MappingView, Sized
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_SIZE = 10_000_000  # characters of the prompt, and of any string made on the way
MAX_ITEMS = 200_000  # of a list, and of everything that hangs on a value
_MAX_BITS = 4096  # of an integer
# Of work: a character costs 1. About a second of it is left to the largest of conversations.
_UNITS = 256_000_000
ITERATION, CALL = 256, 2048  # of a loop; of a macro, function or method
_ITEM = 16  # of a list
FILTERED, SLOWLY_FILTERED = 8, 256  # a character that a filter reads


_CONTAINERS = (list, tuple, Mapping, MappingView, Namespace)  # whose text is that of what they hold


class Budget:
    """One rendering's."""

    def __init__(self) -> None:
        self._left = _UNITS

    def charge(self, units: int) -> None:
        """Pay for work before it is done.

        Raises:
            SecurityError: the rendering has used up what it may.
        """
        self._left -= units
        if self._left < 0:
            raise SecurityError(
                f"it takes too much work: more than {_UNITS} characters, {_UNITS // _ITEM} items or "
                f"{_UNITS // ITERATION} loop iterations"
            )

    def iterated(self, items: Iterable[Any], literal: int) -> Iterable[Any]:
        """Charge a loop's items, at once where they can be counted, and the text that each round writes."""
        units = ITERATION + max(0, literal)  # a template that calls this filter itself gains nothing
        if isinstance(items, Sized):
            self.charge(len(items) * units)
            return items
        return self._charging(items, units)

    def _charging(self, items: Iterable[Any], units: int) -> Iterator[Any]:
        for item in items:
            self.charge(units)
            yield item

    def listed(self, items: Iterable[Any]) -> list[Any]:
        """The items of something that may have any number of them."""
        found = []
        for item in items:
            found.append(item)
            if len(found) > MAX_ITEMS:
                raise SecurityError(f"a list of more than {MAX_ITEMS} items")
        self.charge(_ITEM * len(found))
        return found

    def made(self, value: Any) -> Any:
        """Charge a value that was made, and return it."""
        if isinstance(value, str):
            self.expect(len(value))
        elif isinstance(value, list | tuple | dict | set | frozenset):
            if len(value) > MAX_ITEMS:
                raise SecurityError(f"a list of more than {MAX_ITEMS} items")
            self.charge(_ITEM * len(value))
        elif isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise SecurityError(f"an integer of more than {_MAX_BITS} bits")
        elif isinstance(value, bytes | bytearray | memoryview):
            raise SecurityError("bytes are not for templates")
        return value

    def expect(self, size: float) -> None:
        """Charge a string before it is made."""
        if size > MAX_SIZE:
            raise SecurityError(f"a text of more than {MAX_SIZE} characters")
        self.charge(int(size))

    def weigh(self, value: Any) -> int:
        """Characters that everything which hangs on a value takes as text, however often it hangs there.

        A list may hold the same list twice, and so on: its text can be longer than what was made by far.
        """
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, _CONTAINERS):
            return 32
        weight = nodes = 0
        held: list[Any] = [value]
        while held:
            one = held.pop()
            nodes += 1
            if nodes > MAX_ITEMS or weight > MAX_SIZE:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items or {MAX_SIZE} characters")
            if isinstance(one, str):
                weight += len(one) + 4
            elif isinstance(one, Mapping):
                weight += 2
                held += one.keys()
                held += one.values()
            elif isinstance(one, Namespace):
                held += one._Namespace__attrs.values()  # noqa: SLF001 -- it shows them, but gives no list
            elif isinstance(one, _CONTAINERS):
                weight += 2
                held.extend(one)  # type: ignore[arg-type]  # a view is iterable
            else:
                weight += 32
            if len(held) > MAX_ITEMS:
                raise SecurityError(f"a value of more than {MAX_ITEMS} items")
        self.charge(_ITEM * nodes)
        return weight
