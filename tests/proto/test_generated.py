"""The committed code is what the sources generate, and serves both protobuf runtimes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from carryall.proto import carryall_pb2, carryall_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]


def compiled(folder: Path) -> descriptor_pb2.FileDescriptorProto:
    """The source as the installed protoc of any version understands it."""
    target = folder / "set.pb"
    arguments = [
        f"-Icarryall/proto={ROOT / 'proto'}",
        f"--descriptor_set_out={target}",
        "carryall/proto/carryall.proto",
    ]
    assert protoc.main(["protoc", *arguments]) == 0
    return descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file[0]


def test_committed_messages_equal_the_source(tmp_path: Path) -> None:
    committed = descriptor_pb2.FileDescriptorProto()
    carryall_pb2.DESCRIPTOR.CopyToProto(committed)
    expected = compiled(tmp_path)
    for message in (*expected.message_type, *committed.message_type):
        for part in (message, *message.nested_type):  # maps are nested messages
            for field in part.field:
                field.ClearField("json_name")  # protoc writes them only into descriptor sets
    assert committed == expected


def test_the_servicer_has_every_method(tmp_path: Path) -> None:
    methods = [method.name for method in compiled(tmp_path).service[0].method]
    assert methods == [name for name in vars(carryall_pb2_grpc.LLMServicer) if not name.startswith("_")]


def test_enums_start_unspecified() -> None:
    for enum in carryall_pb2.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_generated_code_serves_protobuf_6() -> None:
    major = re.search(r"Protobuf Python Version: (\d+)\.", (ROOT / "proto/carryall_pb2.py").read_text())
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
