"""`carryall.v1` keeps buf's rules and stays compatible with the saved baseline."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from own_environment import python_with
from proto_rules import breaking, compiled, lint

PROTO = Path(__file__).resolve().parents[2] / "proto"
GOOD = """
syntax = "proto3";
package own.v1;
// A service.
service TextService {
  // Counts.
  rpc Count(CountRequest) returns (CountResponse);
}
// What to count.
message CountRequest {
  // The text.
  string text = 1;
  // Its kind.
  CountKind kind = 2;
}
// The result.
message CountResponse {}
// What is counted.
enum CountKind {
  // Not said.
  COUNT_KIND_UNSPECIFIED = 0;
  // Words.
  COUNT_KIND_WORDS = 1;
}
"""


def own(folder: Path) -> FileDescriptorSet:
    sources = [path.relative_to(PROTO).as_posix() for path in PROTO.rglob("carryall/**/*.proto")]
    for source in sources:
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        (folder / source).write_text((PROTO / source).read_text())
    return compiled(folder, sorted(sources))


def from_text(folder: Path, text: str) -> FileDescriptorSet:
    (folder / "own/v1").mkdir(parents=True, exist_ok=True)
    (folder / "own/v1/text.proto").write_text(text)
    return compiled(folder, ["own/v1/text.proto"])


def test_our_contract_keeps_the_rules(tmp_path: Path) -> None:
    assert lint(own(tmp_path)) == []


def test_our_contract_is_compatible_with_the_baseline(tmp_path: Path) -> None:
    before = FileDescriptorSet.FromString((PROTO / "baseline.binpb").read_bytes())
    assert sum(len(file.message_type) for file in before.file) > 30
    assert breaking(before, own(tmp_path)) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("package own.v1;", "package own;", "does not end in a version"),
        ("TextService {", "Text {", "suffix Service"),
        ("// Counts.", "", "Count has no comment"),
        ("// The text.", "", "CountRequest.text has no comment"),
        ("// Words.", "", "COUNT_KIND_WORDS has no comment"),
        ("returns (CountResponse)", "returns (CountRequest)", "CountRequest belongs to 2 methods"),
        ("Count(CountRequest)", "Add(CountRequest)", "instead of AddRequest"),
        ("string text", "string theText", "not lower_snake_case"),
        ("COUNT_KIND_WORDS", "WORDS", "does not begin with COUNT_KIND_"),
        ("COUNT_KIND_UNSPECIFIED", "COUNT_KIND_NONE", "the value 0"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, old: str, new: str, fault: str) -> None:
    assert lint(from_text(tmp_path, GOOD)) == []
    faults = lint(from_text(tmp_path, GOOD.replace(old, new)))
    assert any(fault in each for each in faults), faults


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("string text = 1;", "reserved 1;", "text = 1 was removed"),
        ("string text = 1;", "string text = 3;", "text = 1 was removed or renumbered"),
        ("string text = 1;", "string words = 1;", "was text and is words"),
        ("string text = 1;", "uint32 text = 1;", "type of text changed"),
        ("string text = 1;", "repeated string text = 1;", "a list"),
        ("string text = 1;", "oneof it { string text = 1; }", "oneof"),
        ("COUNT_KIND_WORDS = 1", "COUNT_KIND_WORDS = 2", "COUNT_KIND_WORDS = 1 was removed"),
        ("returns (CountResponse)", "returns (stream CountResponse)", "Count was removed, or"),
        ("message CountResponse {}", "message Other {}", "CountResponse was removed"),
    ],
)
def test_a_breaking_change_is_named(tmp_path: Path, old: str, new: str, fault: str) -> None:
    before = from_text(tmp_path, GOOD)
    changed = GOOD.replace(old, new)
    changed = changed.replace("(CountResponse)", "(Other)") if "message Other" in new else changed
    faults = breaking(before, from_text(tmp_path, changed))
    assert any(fault in each for each in faults), faults


def test_additions_are_compatible(tmp_path: Path) -> None:
    before = from_text(tmp_path, GOOD)
    more = "optional uint32 most = 3;\n  oneof more { string note = 4; }\n}\n// The result."
    after = from_text(tmp_path, GOOD.replace("}\n// The result.", more, 1))
    assert len(after.file[0].message_type[0].field) == 4
    assert after.file[0].message_type[0].field[2].type == FieldDescriptorProto.TYPE_UINT32
    assert breaking(before, after) == []


@pytest.mark.slow
def test_buf_itself_finds_nothing() -> None:
    buf = python_with("buf-bin==1.75.0").parent / "buf"
    against = ["--against", str(PROTO / "baseline.binpb")]
    for command in (["lint", str(PROTO)], ["breaking", str(PROTO), *against]):
        done = subprocess.run([buf, *command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
