"""The committed code is what the sources generate, and serves both protobuf runtimes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]


PROTO = ROOT / "proto"
SOURCES = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))


def compiled(folder: Path) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    """The sources as the installed protoc of any version understands them."""
    target = folder / "set.pb"
    assert protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={target}", *SOURCES]) == 0
    files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    return {file.name: file for file in files}


def module(source: str, suffix: str = "_pb2") -> Any:
    return importlib.import_module(f"carryall.proto.{Path(source).stem}{suffix}")


@pytest.mark.parametrize("source", SOURCES)
def test_committed_messages_equal_the_source(tmp_path: Path, source: str) -> None:
    committed = descriptor_pb2.FileDescriptorProto()
    module(source).DESCRIPTOR.CopyToProto(committed)
    expected = compiled(tmp_path)[source]
    for message in _all_messages([*expected.message_type, *committed.message_type]):
        for field in message.field:
            field.ClearField("json_name")  # protoc writes them only into descriptor sets
    assert committed == expected


def _all_messages(messages: Iterable[Any]) -> Iterator[Any]:
    for message in messages:
        yield message
        yield from _all_messages(message.nested_type)


def test_servicers_have_every_method(tmp_path: Path) -> None:
    for source, file in compiled(tmp_path).items():
        for service in file.service:
            servicer = getattr(module(source, "_pb2_grpc"), f"{service.name}Servicer")
            methods = [method.name for method in service.method]
            assert methods == [name for name in vars(servicer) if not name.startswith("_")]


def test_generated_code_serves_protobuf_6() -> None:
    major = re.search(r"Protobuf Python Version: (\d+)\.", (PROTO / "service_pb2.py").read_text())
    assert major is not None
    assert major[1] == "6"  # a runtime refuses newer code and takes the code of one major version before


def test_regenerating_changes_nothing() -> None:
    spec = importlib.util.spec_from_file_location("generate_proto", ROOT / "tools/generate_proto.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    installed = importlib.metadata.version("grpcio-tools")
    if installed != tool.PINNED:
        pytest.skip(f"needs grpcio-tools {tool.PINNED}, {installed} is installed")
    assert tool.stale() == []
