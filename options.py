"""Options declared as dataclass fields: checked, and available as flags, variables and file keys.

The annotation gives type and choices, ``option`` gives range and unit, and the ``Args`` section of the class
docstring gives the help. Models, engines and providers declare their options this way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import UsageError
from .records import dataclass

T = TypeVar("T")

_METADATA = "carryall"
_LARGEST = 2**63 - 1  # the maximum of int64, the largest integer that the libraries accept
_BYTES = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kKMGTP]?)(i?)B?")
_POWERS = " kMGTP"
_TOKENS = re.compile(r"(\d{1,9})\s*([kKmM])")
TOKENS = {"": 1, "k": 1 << 10, "m": 1 << 20}  # as context lengths are called: 32k is 32,768
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_WORDS = {bool: "true or false", str: "a string", Path: "a path", Mapping: "a mapping"}


def option(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    unit: str = "",
    choices: Iterable[str | int] = (),
    flags: tuple[str, ...] = (),
    section: str = "",
) -> Any:
    """Return a dataclass field with a range, unit, choices or flags.

    Args:
        default: the default value; without it the field is required.
        least: the smallest number allowed.
        above: allowed numbers are larger than this.
        most: the largest number allowed; for integers by default the maximum of int64.
        unit: the unit of the number, which strings may end with; with ``bytes``, such as ``8GB``, and with
            ``tokens``, such as ``32k``.
        choices: allowed strings or integers, if the annotation cannot list them.
        flags: flags on the command line, if not ``--the-field``; ``--yes/--no`` for both values of a bool.
        section: the section of the command line's help; only if a dataclass has several.
    """
    facts: dict[str, Any] = {"least": least, "above": above, "most": most, "unit": unit}
    facts |= {"choices": tuple(choices), "flags": flags, "section": section}
    metadata = {_METADATA: facts}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a dataclass.

    Args:
        name: the name of the field.
        default: the default value; ``dataclasses.MISSING`` if the field is required.
        help: the text in the class docstring, in one line.
        kinds: types of its values: bool, int, float, str, Path, Mapping or a protocol. A string for a
            protocol is ``module:name``, an object, or a class that is created without arguments.
        choices: allowed strings or integers, beside values of ``kinds``.
        optional: whether it may be None.
        repeated: whether it is a tuple of values of ``kinds``.
        least: the smallest number allowed.
        above: allowed numbers are larger than this.
        most: the largest number allowed.
        unit: the unit of the number.
        flags: flags on the command line; empty means ``--the-field``.
        section: the section of the command line's help.
    """

    name: str
    default: Any
    help: str
    kinds: tuple[Any, ...]
    choices: tuple[str | int, ...] = ()
    optional: bool = False
    repeated: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    unit: str = ""
    flags: tuple[str, ...] = ()
    section: str = ""

    def check(self, value: Any, owner: str = "") -> Any:
        """Return a value, converted to the option's type (an int to float, a string to a path).

        Args:
            value: the value from the caller.
            owner: the owner of the option, for the message.

        Raises:
            UsageError: the value has a wrong type or is out of range.
        """
        if value is None and self.optional:
            return None
        if self.repeated and isinstance(value, tuple | list):
            return tuple(self._one(each, owner) for each in value)
        if self.repeated:
            raise self._wrong(value, owner)
        return self._one(value, owner)

    def parse(self, text: str, owner: str = "") -> Any:
        """Return the value of a string from the command line or an environment variable.

        Raises:
            UsageError: the string is not a valid value.
        """
        if self.optional and text.lower() == "none":
            return None
        for choice in self.choices:
            if text == str(choice):
                return choice
        for kind in self.kinds:
            with contextlib.suppress(ValueError, ImportError, AttributeError, TypeError):
                return self._one(_READERS.get(kind, _imported)(self, text), owner)
        raise self._wrong(text, owner)

    @property
    def described(self) -> str:
        """A description of valid values: ``an integer of at least 1``."""
        parts = [self._kind_in_words(kind) for kind in self.kinds]
        if self.choices:
            names = ", ".join(map(str, self.choices))
            parts.append(f"one of {names}" if len(self.choices) > 1 else names)
        if self.optional:
            parts.append("None")
        return ", or ".join(parts)

    def _one(self, value: Any, owner: str) -> Any:
        if isinstance(value, str | int) and not isinstance(value, bool) and value in self.choices:
            return value
        for kind in self.kinds:
            fitting = _fitting(kind, value)
            if fitting is not None and self._in_range(fitting):
                return fitting
        raise self._wrong(value, owner)

    def _in_range(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        most = _LARGEST if self.most is None and isinstance(value, int) else self.most
        if self.above is not None and value <= self.above:
            return False
        return (self.least is None or value >= self.least) and (most is None or value <= most)

    def _kind_in_words(self, kind: Any) -> str:
        if kind not in (int, float):
            return _WORDS.get(kind) or f"a {kind.__name__} (as a string: module:name)"
        words = f"a number of {self.unit}" if self.unit else "an integer" if kind is int else "a number"
        bounds = {"at least": self.least, "more than": self.above, "at most": self.most}
        limits = [
            f"{side} {bound if isinstance(bound, int) else f'{bound:g}'}"
            for side, bound in bounds.items()
            if bound not in (None, math.inf)
        ]
        return f"{words}{',' if self.unit else ' of'} {' and '.join(limits)}" if limits else words

    def _wrong(self, value: Any, owner: str) -> UsageError:
        of = f" of {owner}" if owner else ""
        large = isinstance(value, int) and value > _LARGEST and self.most is None
        hint = " (the largest is 2**63 - 1)" if large else ""
        return UsageError(f"{self.name}{of} must be {self.described}, not {shown(value)}{hint}")


class Checked:
    """A base for dataclasses of options: values are checked, and normalised, when they are given."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, declaration in declared(type(self)).items():
            object.__setattr__(self, name, declaration.check(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class NoOptions(Checked):
    """The options of a provider without options."""


def declared(owner: type[Any]) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by name."""
    return _declared(typing.cast("Hashable", owner))


@functools.cache
def _declared(owner: Any) -> Mapping[str, Option]:
    hints, helps = typing.get_type_hints(owner), _helps(owner)
    found = {}
    for field in dataclasses.fields(owner):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        facts = {**_annotated(hints[field.name]), **field.metadata.get(_METADATA, {})}
        facts["choices"] = facts["choices"] or _choices(hints[field.name])
        if facts["choices"]:
            listed = set(map(type, facts["choices"]))
            facts["kinds"] = tuple(kind for kind in facts["kinds"] if kind not in listed)
        found[field.name] = Option(name=field.name, default=default, help=helps.get(field.name, ""), **facts)
    return found


def checked(owner: type[T], given: Mapping[str, Any], name: str) -> T:
    """Return an instance of a dataclass with the given options, and defaults of the others.

    Args:
        owner: the dataclass.
        given: options by name.
        name: the owner of the options, for the message.

    Raises:
        UsageError: an option is unknown, has a wrong type, or is out of range.
    """
    known = declared(owner)
    check_names(given, known, name)
    return owner(**{key: known[key].check(value, name) for key, value in given.items()})


def check_names(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """Check that all names are known.

    Raises:
        UsageError: a name is unknown; the message has the nearest known name, or all known names.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has: {', '.join(names) or 'none'}"
            raise UsageError(f"{owner} has no option '{name}'; {hint}")


def shown(value: Any, most: int = 60) -> str:
    """Return the repr of a value, shortened to ``most`` characters, for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python does not format integers of more than 4,300 digits
        return f"a value of type {type(value).__name__} with thousands of digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _parts(hint: Any) -> tuple[Any, ...]:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return typing.get_args(hint) if union else (hint,)


def _choices(hint: Any) -> tuple[str | int, ...]:
    """Return the values that the ``Literal`` parts of an annotation allow."""
    literals = [typing.get_args(part) for part in _parts(hint) if typing.get_origin(part) is Literal]
    return tuple(choice for choices in literals for choice in choices)


def _annotated(hint: Any) -> dict[str, Any]:
    """Return the kinds of an annotation, and whether it allows None or several values."""
    parts = [part for part in _parts(hint) if typing.get_origin(part) is not Literal]
    kinds = [
        typing.get_args(part)[0] if typing.get_origin(part) is tuple else typing.get_origin(part) or part
        for part in parts
        if part is not type(None)
    ]
    return {
        "kinds": tuple(kinds),
        "choices": (),
        "optional": type(None) in parts,
        "repeated": any(typing.get_origin(part) is tuple for part in parts),
    }


def _helps(owner: type[Any]) -> dict[str, str]:
    """Return the texts of the ``Args`` sections of a class and its bases, by name."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        doc = inspect.cleandoc(base.__doc__ or "")
        _, _, section = doc.partition("Args:\n")
        section = re.split(r"\n\S", section)[0]
        for entry in re.split(r"\n(?= {4}\w+:)", "\n" + section):
            name, colon, text = entry.strip().partition(":")
            if colon:
                found[name] = " ".join(text.split())
    return found


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def _path(value: Any) -> Path | None:
    return Path(value) if isinstance(value, str | Path) and str(value) else None


def _fitting(kind: Any, value: Any) -> Any:
    """Return a value converted to a kind; None if it is not of that kind."""
    if kind in _FITTING:
        return _FITTING[kind](value)
    return value if isinstance(value, kind) else None


_FITTING: dict[Any, Callable[[Any], Any]] = {int: _integer, float: _number, Path: _path}


def _read_bool(_: Option, text: str) -> bool:
    if text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    raise ValueError(text)


def _read_integer(declaration: Option, text: str) -> int:
    tokens = _TOKENS.fullmatch(text.strip()) if declaration.unit == "tokens" else None
    if tokens is not None:
        return int(tokens[1]) * TOKENS[tokens[2].lower()]
    found = _BYTES.fullmatch(text.strip()) if declaration.unit == "bytes" else None
    if found is None or text.strip().isdecimal():
        return int(text)
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** _POWERS.index(found[2].replace("K", "k") or " "))


# Parsers of strings by kind; they raise ValueError for invalid strings.
_READERS: dict[Any, Callable[[Option, str], Any]] = {
    bool: _read_bool,
    int: _read_integer,
    float: lambda declaration, text: float(text.removesuffix(declaration.unit)),
    str: lambda _, text: text,
    Path: lambda _, text: Path(text),
}


def _imported(declaration: Option, text: str) -> Any:
    if Mapping in declaration.kinds:
        raise ValueError(text)
    found = pkgutil.resolve_name(text)
    return found() if isinstance(found, type) else found
