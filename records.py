"""Data classes of the standard library, whose methods are not compiled when the class is made.

``dataclasses`` compiles up to six functions from text for each class: 0.8 ms of processor time, in all a
fifth of what a command took before its first token. Here the methods that are alike in all classes are
shared, and ``__init__`` is compiled when it is first looked up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from reprlib import recursive_repr
from types import FunctionType
from typing import TYPE_CHECKING, Any

_MISSING, _PARAMS = dataclasses.MISSING, "__dataclass_params__"
_set = object.__setattr__  # also of frozen objects


def _data_class(
    cls: type[Any] | None = None,
    /,
    *,
    eq: bool = True,
    frozen: bool = False,
    kw_only: bool = False,
    slots: bool = False,
) -> Any:
    """Make a data class of these options of ``dataclasses.dataclass``; the others have its defaults."""

    def make(cls: type[Any]) -> type[Any]:
        own = {name for name, value in vars(cls).items() if name != "__hash__" or value is not None}
        with _thawed(cls) if frozen else contextlib.nullcontext():
            bare = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, slots=slots)(cls)
        vars(bare)[_PARAMS].frozen = frozen  # what a class derived from it must be
        methods: dict[str, Any] = {"__repr__": _shown, "__init__": _LateInit(bare, frozen=frozen)}
        if eq:
            methods["__eq__"], hashed = _comparisons(bare)
            methods["__hash__"] = hashed if frozen else None
        if frozen:
            methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
        if frozen and slots:  # without them, copies and pickles would set attributes
            methods |= {"__getstate__": _state, "__setstate__": _set_state}
        for name, method in methods.items():
            if name not in own:
                setattr(bare, name, method)
        return bare

    return make if cls is None else make(cls)


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _data_class


@contextlib.contextmanager
def _thawed(cls: type[Any]) -> Iterator[None]:
    """Let the frozen bases of a class pass for others: its own methods, not ``dataclasses``, make it frozen.

    Raises:
        TypeError: a base is not frozen.
    """
    bases = [vars(base)[_PARAMS] for base in cls.__mro__[1:] if _PARAMS in vars(base)]
    if not all(params.frozen for params in bases):
        raise TypeError("cannot inherit frozen dataclass from a non-frozen one")
    for params in bases:
        params.frozen = False
    try:
        yield
    finally:
        for params in bases:
            params.frozen = True


@recursive_repr()
def _shown(self: Any) -> str:
    names = (each.name for each in dataclasses.fields(self) if each.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _comparisons(cls: type[Any]) -> tuple[Callable[..., Any], Callable[..., int]]:
    """Return ``__eq__`` and ``__hash__``, by the fields that take part in comparisons."""
    fields = dataclasses.fields(cls)
    compared = _values([each.name for each in fields if each.compare])
    hashed = _values([each.name for each in fields if (each.compare if each.hash is None else each.hash)])

    def equal(self: Any, other: object) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def hash_of(self: Any) -> int:
        return hash(hashed(self))

    return equal, hash_of


def _values(names: Sequence[str]) -> Callable[[Any], Any]:
    return attrgetter(*names) if names else lambda _: ()


def _is_fixed(self: Any, name: str) -> bool:
    """Whether an attribute belongs to a frozen class; a class derived from it may have others."""
    return "__dataclass_fields__" in vars(type(self)) or name in self.__dataclass_fields__


def _refuse_to_set(self: Any, name: str, value: object) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    _set(self, name, value)


def _refuse_to_delete(self: Any, name: str) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: Any, state: Sequence[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        _set(self, each.name, value)


class _LateInit:
    """An ``__init__`` that is compiled when it is first looked up, and takes the place of this object."""

    def __init__(self, cls: type[Any], *, frozen: bool) -> None:
        self._cls, self._frozen = cls, frozen

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Callable[..., None]:
        compiled = _init(self._cls, frozen=self._frozen)
        if vars(self._cls)["__init__"] is self:
            type.__setattr__(self._cls, "__init__", compiled)
        bound: Callable[..., None] = compiled.__get__(instance, owner)
        return bound


class _Factory:
    """The default of an argument whose field has a factory."""

    def __repr__(self) -> str:
        return "<factory>"


def _init(cls: type[Any], *, frozen: bool) -> FunctionType:
    """Compile the ``__init__`` of a class."""
    names: dict[str, Any] = {"_set": _set, "_missing": _Factory(), "__name__": cls.__module__}
    places, named, body = list[str](), list[str](), list[str]()
    for each in dataclasses.fields(cls):
        made = each.default_factory is not _MISSING
        stated = f"_of_{each.name}" if made or each.default is not _MISSING else ""
        names[stated] = each.default_factory if made else each.default
        value = each.name
        if not each.init:
            value = f"{stated}()" if made else stated
        elif made:
            value = f"{stated}() if {each.name} is _missing else {each.name}"
        if each.init:
            default = "=_missing" if made else f"={stated}" if stated else ""
            (named if each.kw_only else places).append(f"{each.name}{default}")
        if value:
            body.append(f"_set(self, {each.name!r}, {value})" if frozen else f"self.{each.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = ", ".join(["self", *places, *(["*", *named] if named else [])])
    exec(f"def __init__({arguments}):\n " + "\n ".join(body or ["pass"]), names)  # noqa: S102
    init: FunctionType = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in dataclasses.fields(cls) if each.init}
    init.__annotations__["return"] = None
    return init
