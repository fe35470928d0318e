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
    return _test_of(hint)(value)


@functools.cache
def _test_of(hint: Any) -> Callable[[object], bool]:
    """Return the test of a type, made once: a sequence may hold a test's value 100,000 times."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return lambda value: True
    if hasattr(origin, "__value__"):  # a name for a type with parameters, such as NDArray since Python 3.12
        return _test_of(origin.__value__[args])
    if hasattr(hint, "__value__"):
        return _test_of(hint.__value__)
    if origin in (types.UnionType, typing.Union):
        tests = [_test_of(part) for part in args]
        return lambda value: any(test(value) for test in tests)
    if origin is Literal:
        return lambda value: any(type(value) is type(part) and value == part for part in args)
    if hint in (None, type(None)):
        return lambda value: value is None
    if hint in (int, float):
        kind = Integral if hint is int else Real
        return lambda value: isinstance(value, kind) and not isinstance(value, bool)
    if typing.is_protocol(hint) if hasattr(typing, "is_protocol") else getattr(hint, "_is_protocol", False):
        return callable if "__call__" in vars(hint) else lambda value: True
    if origin is None:
        return lambda value: isinstance(value, hint)
    return callable if origin in (Callable, type) else _container_test(origin, args)


def _container_test(origin: type, args: tuple[Any, ...]) -> Callable[[object], bool]:
    """Return the test of a container and of its elements."""
    tests = [_test_of(part) for part in args if part is not Ellipsis]
    is_tuple = origin is tuple and Ellipsis not in args
    is_mapping, is_iterable = issubclass(origin, Mapping), issubclass(origin, Iterable)

    def test(value: object) -> bool:
        if not isinstance(value, origin):
            return False
        if isinstance(value, tuple) and is_tuple:
            return len(value) == len(tests) and all(
                part(each) for part, each in zip(tests, value, strict=True)
            )
        if isinstance(value, Mapping) and is_mapping:
            return all(tests[0](key) and tests[1](each) for key, each in value.items())
        if is_iterable and isinstance(value, str | bytes):
            return False
        return not (isinstance(value, Sequence) and is_iterable) or all(map(tests[0], value))

    return test


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
