"""Check the arguments of public functions against their annotations."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from ...errors import UsageError
from ...options import shown

P = ParamSpec("P")
R = TypeVar("R")

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WORDS = {str: "a text", Path: "a path", bool: "true or false", int: "an integer", float: "a number"}


def checked_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that raises UsageError for arguments that are not of the annotated types.

    An integer is valid where a float is expected; a bool is not a number. Elements of sequences and mappings
    are checked, elements of iterators are not.
    """
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        return typing.get_type_hints(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = _bound(signature, function, args, kwargs)
        for name, value in given.arguments.items():
            hint = hints().get(name, Any)
            if signature.parameters[name].kind not in _VARIADIC and not fits(value, hint):
                owner = function.__qualname__.removesuffix(".__init__")
                raise UsageError(f"{name} of {owner} must be {described(hint)}, not {shown(value)}")
        return function(*args, **kwargs)

    return checked


def fits(value: object, hint: Any) -> bool:
    """Return whether a value is of an annotated type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, part) for part in args)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in args)
    if hint in (None, type(None)):
        return value is None
    if hint in (int, float):
        kind = Integral if hint is int else Real
        return isinstance(value, kind) and not isinstance(value, bool)
    if typing.is_protocol(hint) if hasattr(typing, "is_protocol") else getattr(hint, "_is_protocol", False):
        return callable(value) if "__call__" in vars(hint) else True
    return _container_fits(value, origin, args) if origin is not None else isinstance(value, hint)


def _container_fits(value: object, origin: Any, args: tuple[Any, ...]) -> bool:
    if origin is Callable or origin is type:
        return callable(value)
    if not isinstance(value, origin):
        return False
    if isinstance(value, tuple) and origin is tuple and Ellipsis not in args:
        return len(value) == len(args) and all(map(fits, value, args))
    if isinstance(value, Mapping) and issubclass(origin, Mapping):
        return all(fits(key, args[0]) and fits(one, args[1]) for key, one in value.items())
    if issubclass(origin, Iterable) and isinstance(value, str | bytes):
        return False
    if isinstance(value, Sequence) and issubclass(origin, Iterable):
        return all(fits(one, args[0]) for one in value)
    return True


def described(hint: Any) -> str:
    """Return an annotated type in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(described(part) for part in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if hint is type(None):
        return "None"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None and issubclass(origin, Iterable) and args:
        return f"a sequence of ({described(args[0])})"
    return _WORDS.get(hint) or f"a {getattr(origin or hint, '__name__', hint)}"


def _bound(
    signature: inspect.Signature,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> inspect.BoundArguments:
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        function(*args, **kwargs)  # raises Python's own message about missing and unknown arguments
        raise
