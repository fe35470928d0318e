"""Declared options: annotations, ``option`` and docstrings become types, ranges, choices and help."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryall.errors import UsageError
from carryall.options import Checked, NoOptions, checked, declared, option, shown
from carryall.providers import get_provider, provider_names


@runtime_checkable
class Speaker(Protocol):
    def speak(self) -> str: ...


class Parrot:
    def speak(self) -> str:
        return "hello"


@dataclass(frozen=True, kw_only=True)
class Base(Checked):
    """A base.

    Args:
        count: how many.
            In two lines.
    """

    count: int = option(3, least=1, most=10)


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Some options.

    Args:
        share: part of all: between two colons.
        part: of something.
        size: bytes.
        length: tokens.

    Raises:
        UsageError: never mind.
    """

    share: float = option(0.5, least=0)
    part: float = option(0.5, above=0, most=1)
    size: int | None = option(None, least=1, unit="bytes")
    length: int | None = option(None, least=1, unit="tokens")
    mode: Literal["fast", "slow"] = "fast"
    group: int | Literal["auto"] = "auto"
    path: Path | None = None
    flag: bool = False
    speakers: tuple[Speaker, ...] = ()
    facts: Mapping[str, Any] = option({})
    word: str = ""


def test_declarations_are_read_from_the_class() -> None:
    found = declared(Options)
    assert list(found) == [
        "count",
        "share",
        "part",
        "size",
        "length",
        "mode",
        "group",
        "path",
        "flag",
        "speakers",
        "facts",
        "word",
    ]
    assert found["count"].help == "how many. In two lines."
    assert found["share"].help == "part of all: between two colons."
    assert found["size"].help == "bytes."
    assert (found["mode"].choices, found["mode"].default) == (("fast", "slow"), "fast")
    assert found["size"].optional
    assert not found["count"].optional
    assert declared(NoOptions) == {}


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"count": np.int64(4)}, {"count": 4}),
        ({"share": 1}, {"share": 1.0}),
        ({"share": math.inf}, {"share": math.inf}),
        ({"size": 2**40, "path": "a/b"}, {"size": 2**40, "path": Path("a/b")}),
        ({"group": 7}, {"group": 7}),
        ({"group": "auto", "mode": "slow"}, {"group": "auto", "mode": "slow"}),
    ],
)
def test_values_become_their_type(given: dict[str, Any], kept: dict[str, Any]) -> None:
    found = Options(**given)
    for name, value in kept.items():
        assert getattr(found, name) == value
        assert type(getattr(found, name)) is type(value) or isinstance(value, Path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": True}, "count must be an integer of at least 1 and at most 10, not True"),
        ({"count": "3"}, "not '3'"),
        ({"count": 3.0}, r"not 3\.0"),
        ({"count": 0}, "not 0"),
        ({"count": 11}, "not 11"),
        ({"count": None}, "not None"),
        ({"share": math.nan}, "share must be a number of at least 0, not nan"),
        ({"share": -0.1}, r"not -0\.1"),
        ({"share": True}, "not True"),
        ({"part": 0}, "part must be a number of more than 0 and at most 1, not 0"),
        ({"share": 10**400}, "share must be a number"),
        (
            {"size": 2**63},
            "size must be a number of bytes, at least 1, or None, not 9223372036854775808 .the largest",
        ),
        ({"size": 10**5000}, "not a value of type int with thousands of digits"),
        ({"mode": "odd"}, "mode must be one of fast, slow, not 'odd'"),
        ({"group": "odd"}, "group must be an integer, or auto, not 'odd'"),
        ({"path": 3}, "path must be a path, or None, not 3"),
        ({"path": ""}, "path must be a path"),
        ({"flag": 1}, "flag must be true or false, not 1"),
        ({"speakers": Parrot()}, r"speakers must be a Speaker"),
        ({"speakers": (3,)}, r"speakers must be a Speaker \(as a string: module:name\), not 3"),
        ({"facts": 3}, "facts must be a mapping, not 3"),
        ({"word": b"x"}, "word must be a string, not b'x'"),
    ],
)
def test_other_values_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**given)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "4", 4),
        ("share", "inf", math.inf),
        ("size", "none", None),
        ("size", "1.5GB", 1_500_000_000),
        ("size", "2 GiB", 2**31),
        ("size", "12k", 12_000),
        ("length", "12k", 12 * 1024),
        ("length", "1M", 1 << 20),
        ("size", "123456789012345678", 123456789012345678),
        ("group", "auto", "auto"),
        ("group", "16", 16),
        ("flag", "On", True),
        ("flag", "no", False),
        ("path", "x", Path("x")),
    ],
)
def test_texts_are_read(name: str, text: str, value: Any) -> None:
    assert declared(Options)[name].parse(text) == value


def test_objects_are_imported() -> None:
    speakers = declared(Options)["speakers"]
    assert isinstance(speakers.parse(f"{__name__}:Parrot"), Parrot)  # a class is made an object
    for text in ("no_such_module:x", f"{__name__}:nothing", "builtins:len", ""):
        with pytest.raises(UsageError, match="speakers must be a Speaker"):
            speakers.parse(text)


@given(st.sampled_from(sorted(declared(Options))), st.text(max_size=12))
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    declaration = declared(Options)[name]
    with contextlib.suppress(UsageError):
        value = declaration.parse(text)
        options: dict[str, Any] = {name: (value,) if declaration.repeated else value}
        assert getattr(Options(**options), name) == options[name]


def test_the_owner_and_the_nearest_name_are_told() -> None:
    assert checked(Options, {"count": 4}, "provider 'x'") == Options(count=4)
    with pytest.raises(UsageError, match="count of provider 'x' must be"):
        checked(Options, {"count": 0}, "provider 'x'")
    with pytest.raises(UsageError, match="provider 'x' has no option 'cuont'; did you mean 'count'"):
        checked(Options, {"cuont": 4}, "provider 'x'")
    with pytest.raises(UsageError, match="provider 'x' has no option 'zzz'; it has: none"):
        checked(NoOptions, {"zzz": 4}, "provider 'x'")


def test_long_values_are_cut_in_messages() -> None:
    assert shown("x" * 1000) == "'" + "x" * 56 + "..."


@pytest.mark.parametrize("name", provider_names())
def test_every_option_of_a_provider_is_explained_and_checked(name: str) -> None:
    provider = get_provider(name)
    for declaration in declared(provider.options).values():
        assert declaration.help
        with pytest.raises(UsageError, match=f"{declaration.name} of provider '{name}' must be "):
            provider.checked_options({declaration.name: object()})
    with pytest.raises(UsageError, match=f"provider '{name}' has no option 'zzz'; "):
        provider.checked_options({"zzz": 1})
