"""Data classes of ``carryall.records`` behave as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import threading
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from carryall.records import dataclass

CASES = [
    pytest.param({"frozen": frozen, "slots": slots, "kw_only": kw_only, "eq": eq}, id=f"{number}")
    for number, (frozen, slots, kw_only, eq) in enumerate(
        (bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8)) for bits in range(16)
    )
]


def made(decorate: Callable[..., Any], options: dict[str, bool]) -> tuple[type[Any], type[Any]]:
    """Return a class with a field of each kind, and one derived from it."""

    @decorate(**options)
    class Base:
        first: int
        second: str = "two"
        unseen: float = field(default=0.5, repr=False, compare=False)
        names: list[str] = field(default_factory=list, hash=False)
        late: int = field(init=False, default=7)
        filled: dict[str, int] = field(init=False, default_factory=dict, hash=False)
        only: int | None = field(default=None, kw_only=True)

        def __post_init__(self) -> None:
            self.filled["first"] = self.first

    @decorate(**options)
    class Derived(Base):
        second: str = "another"
        third: tuple[int, ...] = ()

    return Base, Derived


def texts(object_: object) -> str:
    return repr(object_).replace("made.<locals>.", "")


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("which", [0, 1])
def test_objects_are_as_those_of_the_standard_library(options: dict[str, bool], which: int) -> None:
    ours, theirs = made(dataclass, options)[which], made(dataclasses.dataclass, options)[which]
    for named in ({"first": 1}, {"first": 1, "names": ["x"], "unseen": 2.0, "only": 3, "second": "2"}):
        one, same, peer = ours(**named), ours(**named), theirs(**named)
        assert texts(one) == texts(peer)
        assert dataclasses.asdict(one) == dataclasses.asdict(peer)
        assert (one == same) == (peer == theirs(**named)) == options["eq"]
        assert one != peer
        assert hasattr(one, "__dict__") == hasattr(peer, "__dict__")
        assert ours.__match_args__ == theirs.__match_args__
        changed = dataclasses.replace(one, first=2), dataclasses.replace(peer, first=2)
        assert texts(changed[0]) == texts(changed[1])
        assert (ours.__hash__ is None) == (theirs.__hash__ is None)
        assert inspect.signature(ours.__init__).parameters.keys() == inspect.signature(
            theirs
        ).parameters.keys() | {"self"}
        assert texts(copy.deepcopy(one)) == texts(one)
    assert dataclasses.replace(ours(first=1), unseen=3.0) == ours(first=1) or not options["eq"]


@pytest.mark.parametrize("options", CASES)
def test_wrong_arguments_are_refused(options: dict[str, bool]) -> None:
    for cls in made(dataclass, options):
        for values, named in (((), {}), ((), {"first": 1, "late": 2}), ((), {"first": 1, "unknown": 2})):
            with pytest.raises(TypeError, match="__init__"):
                cls(*values, **named)
        if options["kw_only"]:
            with pytest.raises(TypeError, match="positional"):
                cls(1)
        else:
            assert cls(1).first == 1


@pytest.mark.parametrize("slots", [False, True])
def test_a_frozen_object_keeps_its_fields(slots: bool) -> None:
    cls, _ = made(dataclass, {"frozen": True, "slots": slots})
    frozen = cls(1)
    for name in ("first", "other"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(frozen, name, 2)
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(frozen, name)
    assert frozen.first == 1


@dataclass(frozen=True)
class Fixed:
    """A frozen class with a hash of two of three fields."""

    key: str
    number: int = 0
    ignored: int = field(default=0, compare=False)


@dataclass
class Loose:
    """Is not frozen."""


class Extended(Fixed):
    """May have attributes of its own."""

    extra = 0


@dataclass(frozen=True, slots=True)
class Slotted:
    """Is pickled by its name."""

    key: str
    parts: tuple[Fixed, ...] = ()


def test_a_derived_plain_class_may_have_other_attributes() -> None:
    one = Extended("a")
    one.extra = 3
    assert one.extra == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.key = "b"  # type: ignore[misc]
    del one.extra
    assert one.extra == 0


@pytest.mark.parametrize(
    ("base", "derived"), [(dataclass, dataclasses.dataclass), (dataclasses.dataclass, dataclass)]
)
def test_a_class_of_either_kind_derives_from_one_of_the_other(base: Any, derived: Any) -> None:
    @base(frozen=True)
    class Lower:
        """The base."""

        key: int

    @derived(frozen=True)
    class Upper(Lower):
        """Another field."""

        other: int = 2

    upper: Any = Upper
    assert (upper(1).key, upper(1), hash(upper(1))) == (1, upper(1, 2), hash(upper(1, 2)))
    for wrong, lower in ((False, Lower), (True, Loose)):
        with pytest.raises(TypeError, match="cannot inherit"):

            @derived(frozen=wrong)
            class _Mixed(lower):  # type: ignore[valid-type,misc]
                """Is neither."""


def test_the_signature_is_known_before_the_first_object() -> None:
    for ours, theirs in zip(made(dataclass, {"frozen": True}), made(dataclasses.dataclass, {}), strict=True):
        assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
        assert vars(ours)["__init__"].__module__ == __name__


def test_equal_objects_have_equal_hashes() -> None:
    assert {Fixed("a", 1, 2): "first"}[Fixed("a", 1, 3)] == "first"
    assert Fixed("a") not in {Fixed("b")}
    assert Fixed("a") != Extended("a")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(protocol: int) -> None:
    one = Slotted("k", (Fixed("a", 3),))
    assert pickle.loads(pickle.dumps(one, protocol)) == one  # noqa: S301 -- of this line


def test_methods_of_the_class_stay() -> None:
    @dataclass(frozen=True, slots=True)
    class Own:
        """Has each method."""

        key: int

        def __init__(self, text: str) -> None:
            object.__setattr__(self, "key", int(text))

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

    assert (Own("3").key, repr(Own("3")), hash(Own("3")), Own("3") == 3) == (3, "own", 5, True)


def test_an_object_that_holds_itself_is_shown() -> None:
    @dataclass
    class Ring:
        """Holds another."""

        next: Any = None

    ring = Ring()
    ring.next = ring
    assert repr(ring).endswith("Ring(next=...)")


def test_the_first_objects_of_several_threads_are_whole() -> None:
    for _ in range(20):

        @dataclass(slots=True)
        class Late:
            """A new class for each round."""

            value: int

        start, seen = threading.Barrier(4), list[int]()

        def make(number: int, cls: type[Late] = Late, start: threading.Barrier = start) -> None:
            start.wait()
            seen.append(cls(number).value)  # noqa: B023 -- joined in the loop

        threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(seen) == [0, 1, 2, 3]


def test_classes_of_the_standard_library_derive_from_records_as_from_their_own() -> None:
    @dataclass(frozen=True, slots=True)
    class Base:
        first: int

    @dataclasses.dataclass(frozen=True)
    class Derived(Base):
        second: int = 2

    assert Derived(1) == Derived(1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Derived(1).first = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        dataclasses.dataclass(type("Open", (Base,), {}))
    with pytest.raises(TypeError, match="cannot inherit non-frozen"):
        dataclass(type("Open", (Base,), {}))
