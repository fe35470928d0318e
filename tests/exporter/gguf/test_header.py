"""Damaged GGUF files are refused with one line, whatever is damaged."""

from __future__ import annotations

import contextlib
import struct
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf

from carryall.errors import CarryallWarning, CheckpointError, UnsupportedModelError
from carryall.exporter.gguf.file import GgufFile
from carryall.exporter.gguf.header import ShortHeaderError, read_header
from carryall.exporter.gguf.tokenizer import gguf_tokenizer

PATH = Path("m.gguf")
PADDING = 32  # at most so many bytes after the last tensor
QUIET = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf("llama", path, types="Q8_0", hidden_size=64, intermediate_size=96)
    return path


@given(share=st.floats(0, 1, exclude_max=True))
@QUIET
def test_every_truncation_is_noticed(valid: Path, share: float) -> None:
    content = valid.read_bytes()
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        read_header(memoryview(content[: int((len(content) - PADDING) * share)]), PATH)


@given(share=st.floats(0, 1, exclude_max=True))
@QUIET
def test_the_first_bytes_of_a_file_suffice_if_they_hold_the_header(valid: Path, share: float) -> None:
    content = valid.read_bytes()
    whole = read_header(memoryview(content), PATH)
    end = min(tensor.begin for tensor in whole.tensors)
    length = max(4, int(len(content) * share))
    if length >= end:
        found = read_header(memoryview(content[:length]), PATH, len(content))
        tokens = "tokenizer.ggml.tokens"
        assert found.tensors == whole.tensors
        assert found.metadata.keys() == whole.metadata.keys()
        assert list(found.metadata[tokens]) == list(whole.metadata[tokens])
    elif length < end - PADDING:
        with pytest.raises(ShortHeaderError):
            read_header(memoryview(content[:length]), PATH, len(content))


def test_more_of_a_file_is_asked_for_before_strings_are_read_that_it_cannot_hold() -> None:
    content = bytearray(vocabulary([b"a" * 20] * 1000))
    first = content.index(b"a" * 20)
    content[first - 8 : first] = struct.pack("<Q", 1 << 62)  # would be refused if it was read
    with pytest.raises(ShortHeaderError):
        read_header(memoryview(content[:5000]), PATH, len(content))
    with pytest.raises(CheckpointError, match="the header needs"):
        read_header(memoryview(content), PATH)


def test_an_axis_of_size_zero_is_refused(valid: Path) -> None:
    content = valid.read_bytes().replace((96).to_bytes(8, "little"), bytes(8), 1)
    with pytest.raises(CheckpointError, match=r"m\.gguf.* has an axis of size 0"):
        read_header(memoryview(content), PATH)


def test_tensors_that_overlap_are_refused(valid: Path) -> None:
    content = bytearray(valid.read_bytes())
    name = b"blk.1.attn_k.weight"
    offset = content.index(name) + len(name) + 4 + 2 * 8 + 4  # after the dimensions and the type
    content[offset : offset + 8] = bytes(8)
    with pytest.raises(CheckpointError, match=r"m\.gguf is damaged: the tensors '.*' and '.*' overlap"):
        read_header(memoryview(content), PATH)


def check_changed_bytes(valid: Path, data: st.DataObject, folder: Path) -> None:
    """Read every tensor of a file with changed bytes; the only errors allowed are those of checkpoints."""
    content, header = bytearray(valid.read_bytes()), 6000
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, header))
        patch = data.draw(st.sampled_from([b"\xff" * 8, b"\x00" * 8, b"\xff", b"\x00", b"\x80", b"\x09"]))
        content[begin : begin + len(patch)] = patch
    path = folder / "changed.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError, UnsupportedModelError), warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryallWarning)  # such as of a name that is missing
        file = GgufFile(path)
        config = file.config
        gguf_tokenizer(file.metadata, config["vocab_size"])
        for tensor in file.tensors.values():
            assert tensor.read(lambda array: array).shape == tensor.shape


@given(data=st.data())
@QUIET
def test_changed_bytes_are_read_or_refused(
    valid: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_changed_bytes(valid, data, tmp_path_factory.getbasetemp())


@pytest.mark.slow
@given(data=st.data())
@settings(QUIET, max_examples=5_000)
def test_many_changed_bytes_are_read_or_refused(
    valid: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_changed_bytes(valid, data, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04" + b"\x00" * 64, "does not begin with 'GGUF'"),
        (b"GGUF\x00\x00\x00\x03" + b"\x00" * 64, "versions 2 and 3"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "damaged"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


def test_a_huge_array_is_refused_at_once() -> None:
    key = b"tokenizer.ggml.tokens"
    field = np.uint64(len(key)).tobytes() + key + np.uint32(9).tobytes() + np.uint32(8).tobytes()
    counts = np.array([0, 1], np.uint64).tobytes()
    content = b"GGUF\x03\x00\x00\x00" + counts + field + np.uint64(2**60).tobytes() + b"\x00" * 99
    with pytest.raises(CheckpointError, match="more than the file has room for"):
        read_header(memoryview(content), PATH)


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=3),
            st.text(max_size=3).map(str.encode),
            st.just("é".encode()[:1]),
            st.integers(254, 258).map(lambda length: b"x" * length),
            st.just(b"y" * 65_536),
        )
    )
)
def test_strings_are_read_as_they_are_and_bytes_of_no_character_replaced(strings: list[bytes]) -> None:
    found = strings_of(vocabulary(strings))
    expected = [string.decode(errors="replace") for string in strings]
    assert list(found) == expected
    assert [found[number] for number in range(len(found))] == expected
    assert found[1:] == expected[1:]


ODD = [b"", bytes(7), bytes(8), b"a" + bytes(9), bytes(20), b"x" * 256, b"y" * 300, b"z" * 65_536]


@pytest.mark.parametrize("share", [0, 0.001, 0.3])
def test_vocabularies_of_several_windows_are_read(share: float) -> None:
    rng = np.random.default_rng(0)
    strings = [
        ODD[rng.integers(len(ODD))]
        if rng.random() < share
        else bytes(rng.integers(32, 127, rng.integers(1, 20)))
        for _ in range(9_000)
    ]
    assert list(strings_of(vocabulary(strings))) == [string.decode() for string in strings]


@pytest.mark.parametrize("size", [1 << 20, 1 << 62, 1 << 63, (1 << 64) - 8])
@pytest.mark.parametrize("before", [0, 70, 9_000])
def test_a_string_behind_the_end_is_refused(before: int, size: int) -> None:
    content = vocabulary([b"token"] * before, struct.pack("<Q", size) + b"some")
    with pytest.raises(CheckpointError, match=f"the header needs {size} bytes at {len(content) - 4}"):
        strings_of(content)


def vocabulary(strings: list[bytes], end: bytes = b"") -> bytes:
    """Return a file without tensors of strings, the last of which may be given with its length."""
    name = b"tokenizer.ggml.tokens"
    texts = b"".join(struct.pack("<Q", len(string)) + string for string in strings) + end
    return (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack(f"<Q{len(name)}sIIQ", len(name), name, 9, 8, len(strings) + bool(end))
        + texts
    )


def strings_of(content: bytes) -> Sequence[str]:
    texts: Sequence[str] = read_header(memoryview(content), PATH).metadata["tokenizer.ggml.tokens"]
    return texts
