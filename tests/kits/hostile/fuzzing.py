"""Fuzzing: a few examples in every run, minutes of them in the slow tests, and what was found is kept.

A finding goes as a small file into ``tests/corpora/KIND``; every run tries these files first. The slow tests
take ``CARRYALL_FUZZ_SECONDS`` (600) together, divided by ``SLOW_TESTS``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CORPORA = Path(__file__).resolve().parents[2] / "corpora"
SLOW_TESTS = 5
_PIECE = 100  # examples between two looks at the clock
TEXTS = st.text(max_size=12) | st.sampled_from(["", "a", "\0", "é中", "\u202e", "x" * 5000])
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1.0, 0.5, -1.0, 1e30])


def seeds(kind: str) -> list[Path]:
    """The kept files of a kind, never none."""
    found = sorted(path for path in (CORPORA / kind).iterdir() if path.is_file())
    assert found, kind
    return found


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int | None) -> None:
    """Try ``examples`` of a strategy, always the same; or others, for a share of the slow tests' time."""
    share = float(os.environ.get("CARRYALL_FUZZ_SECONDS", "600")) / SLOW_TESTS
    end = time.monotonic() + share

    @settings(
        max_examples=examples or _PIECE,
        deadline=None,
        derandomize=examples is not None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(value: Any) -> None:
        check(value)

    run()
    while examples is None and time.monotonic() < end:
        run()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes with a few places changed, cut out, doubled or moved, or cut at the end."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        if not content:
            break
        start = draw(st.integers(0, len(content) - 1))
        end = min(len(content), start + draw(st.integers(1, 16)))
        way = draw(st.sampled_from(["change", "flip", "cut", "double", "end", "insert"]))
        if way == "change":
            content[start:end] = draw(st.binary(min_size=end - start, max_size=end - start))
        elif way == "flip":
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif way == "cut":
            del content[start:end]
        elif way == "double":
            content[start:start] = content[start:end]
        elif way == "insert":
            content[start:start] = draw(st.binary(min_size=1, max_size=8))
        else:
            del content[start:]
    return bytes(content)


def messages(descriptor: Descriptor, depth: int = 3) -> st.SearchStrategy[Message]:
    """Messages of a type, any fields set to anything, as its descriptor allows."""
    fields = [one for one in descriptor.fields if depth or one.message_type is None]

    @st.composite
    def build(draw: st.DrawFn) -> Message:
        message = GetMessageClass(descriptor)()
        chosen = draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)) if fields else []
        for field in chosen:
            _set(draw, message, field, depth)
        return message

    return build()


def _set(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if value.message_type is None:
            for _ in range(draw(st.integers(0, 2))):
                getattr(message, field.name)[draw(_scalar(key))] = draw(_scalar(value))
    elif field.message_type is not None:
        inner = messages(field.message_type, depth - 1)
        if field.is_repeated:
            for one in draw(st.lists(inner, max_size=3)):
                getattr(message, field.name).add().CopyFrom(one)
        else:
            getattr(message, field.name).CopyFrom(draw(inner))
    elif field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(_scalar(field), max_size=4)))
    else:
        setattr(message, field.name, draw(_scalar(field)))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    bits = {
        FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    }
    bits |= {FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1)}
    bits |= {FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1)}
    kind = field.cpp_type
    if kind in bits:
        least, most = bits[kind]
        return st.integers(least, most) | st.sampled_from([max(least, -1), 0, 1, 2, 5, most])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return FLOATS
    return st.binary(max_size=8) if field.type == FieldDescriptor.TYPE_BYTES else TEXTS
