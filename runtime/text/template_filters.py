"""The filters and methods that templates may use, and bounds of the results of those that add text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.exceptions import SecurityError

from .template_budget import MAX_SIZE, Budget

# The results of these filters are no larger than their input, up to a few characters an item. Jinja's other
# filters, such as ``center``, ``format`` and ``pprint``, are removed: no chat template needs them.
_PLAIN = """
    abs attr capitalize count d default dictsort e escape filesizeformat first float forceescape groupby int
    items last length lower map max min random reject rejectattr reverse safe select selectattr sort string
    striptags title trim unique upper urlencode wordcount
"""
PLAIN_FILTERS = frozenset(_PLAIN.split())

# These filters process each character of a text, by a regular expression or as a list item.
_SLOW = (
    "batch dictsort groupby join list max min slice sort striptags title tojson unique urlencode wordcount"
)
SLOW_ON_TEXT = frozenset(_SLOW.split())

_OF_TEXTS = """
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier
    islower isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix
    rfind rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
# Methods whose results are no larger than their input.
PLAIN_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_OF_TEXTS.split()),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    range: frozenset(("count", "index")),
    int: frozenset(("bit_length",)),
    float: frozenset(("is_integer",)),
}

_MOST_COLUMNS = 10_000


def _number(value: Any, most: int) -> int:
    """Return a size that is at most ``most``; other types count as 0, the filter itself refuses them."""
    number = value if isinstance(value, int) else 0
    if abs(number) > most:
        raise SecurityError(f"the number {number if number.bit_length() < 64 else 'given'} is too large")
    return abs(number)


def _replace(budget: Budget, text: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    text, old, new = str(text), str(old), str(new)
    found = text.count(old) if old else len(text) + 1
    if isinstance(count, int) and count >= 0:
        found = min(found, count)
    budget.expect(len(text) + found * len(new))


def _indent(budget: Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    wide = len(width) if isinstance(width, str) else _number(width, _MOST_COLUMNS)
    text = str(text)
    budget.expect(len(text) + (len(text.splitlines()) + 1) * wide)


def _columns(budget: Budget, items: Any, count: Any = 1, *_: Any, **__: Any) -> None:
    budget.charge(16 * _number(count, _MOST_COLUMNS))


def _join(budget: Budget, items: Any, d: Any = "", *_: Any, **__: Any) -> None:
    count = len(items) if isinstance(items, list | tuple | dict | str) else 0  # others: see ``Budget.listed``
    budget.expect(budget.weigh(items) + count * len(str(d)))


def _rounded(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    _number(precision, 100)


def _truncated(budget: Budget, text: Any, length: Any = 255, *_: Any, **__: Any) -> None:
    _number(length, MAX_SIZE)


def _summed(budget: Budget, items: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, int | float):  # summing lists takes quadratic time
        raise SecurityError("the filter 'sum' takes numbers only")


def _listed(budget: Budget, items: Any) -> None:
    if isinstance(items, str):
        budget.listed(items)


# Called with the arguments of a filter before it runs; raises SecurityError if its result would be too large.
CHECKS: dict[str, Callable[..., None]] = {
    "batch": _columns,
    "indent": _indent,
    "join": _join,
    "list": _listed,
    "replace": _replace,
    "round": _rounded,
    "slice": _columns,
    "sum": _summed,
    "truncate": _truncated,
}


def _padded(budget: Budget, text: str, width: Any = 0, *_: Any) -> None:
    budget.expect(len(text) + (_number(width, MAX_SIZE)))


def _tabs_expanded(budget: Budget, text: str, tabsize: Any = 8) -> None:
    budget.expect(len(text) + text.count("\t") * _number(tabsize, MAX_SIZE))


def _joined(budget: Budget, separator: str, items: Iterable[Any] = ()) -> None:
    if not isinstance(items, list | tuple | dict | str):
        raise SecurityError("the method 'join' takes lists only; use the filter 'list' first")
    budget.expect(budget.weigh(items) + len(items) * len(separator))


def _formatted(budget: Budget, form: str, *values: Any, **named: Any) -> None:
    check_format(budget, form, "{", [*values, *named.values()])


CHECKED_METHODS: dict[str, Callable[..., None]] = {
    "center": _padded,
    "expandtabs": _tabs_expanded,
    "format": _formatted,
    "join": _joined,
    "ljust": _padded,
    "replace": _replace,
    "rjust": _padded,
    "zfill": _padded,
}

_MAX_WIDTH = 1000  # of a format specification, which may have three digits


def check_format(budget: Budget, form: str, mark: str, values: Iterable[Any]) -> None:
    """Charge an upper bound of a formatted text: each placeholder may hold the largest value."""
    largest = max((budget.weigh(value) for value in values), default=0)
    budget.expect(len(form) + form.count(mark) * (largest + _MAX_WIDTH))


def to_json(
    budget: Budget, value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any
) -> str:
    """Return a value as JSON without HTML escapes, as Hugging Face's ``tojson`` does."""
    budget.weigh(value)
    if isinstance(indent, int):
        _number(indent, 100)
    size, pieces = 0, []
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options)
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        size += len(piece)
        if size > MAX_SIZE:
            raise SecurityError(f"JSON of more than {MAX_SIZE} characters")
    budget.charge(size)
    return "".join(pieces)
