"""Rules for `.proto` files, after buf's STANDARD and COMMENTS lint and its WIRE compatibility."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
_UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_REPEATED = FieldDescriptorProto.LABEL_REPEATED


def compiled(root: Path, sources: list[str]) -> FileDescriptorSet:
    """The sources, relative to ``root``, as the installed protoc understands them, with their comments."""
    target = root / "set.pb"
    options = [f"-I{root}", "--include_source_info", f"--descriptor_set_out={target}"]
    assert protoc.main(["protoc", *options, *sources]) == 0
    found = FileDescriptorSet.FromString(target.read_bytes())
    target.unlink()
    return found


def lint(files: FileDescriptorSet) -> list[str]:
    """What is wrong with the files, one line a fault."""
    used = Counter(
        name.rpartition(".")[2]
        for file in files.file
        for service in file.service
        for method in service.method
        for name in (method.input_type, method.output_type)
    )
    faults = [f"{name} belongs to {count} methods" for name, count in used.items() if count > 1]
    for file in files.file:
        faults += [f"{file.name}: {fault}" for fault in (*_package(file), *_comments(file))]
        for service in file.service:
            faults += [f"{file.name}: {fault}" for fault in _service(service)]
        for message in file.message_type:
            faults += [f"{file.name}: {fault}" for fault in _message(message)]
        for enum in file.enum_type:
            faults += [f"{file.name}: {fault}" for fault in _enum(enum)]
    return faults


def _package(file: FileDescriptorProto) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9_.]+\.v[1-9][0-9]*((alpha|beta)[1-9][0-9]*)?", file.package):
        yield f"package {file.package} does not end in a version"
    folder, _, name = file.name.rpartition("/")
    if folder != file.package.replace(".", "/"):
        yield f"package {file.package} lies in folder '{folder}'"
    if not _SNAKE.fullmatch(name.removesuffix(".proto")):
        yield "the file's name is not lower_snake_case"


def _service(service: ServiceDescriptorProto) -> Iterator[str]:
    if not (_PASCAL.fullmatch(service.name) and service.name.endswith("Service")):
        yield f"service {service.name} is not PascalCase with the suffix Service"
    for method in service.method:
        if not _PASCAL.fullmatch(method.name):
            yield f"method {method.name} is not PascalCase"
        for kind, name in (("Request", method.input_type), ("Response", method.output_type)):
            if name.rpartition(".")[2] != f"{method.name}{kind}":
                yield f"{method.name} uses {name} instead of {method.name}{kind}"


def _message(message: DescriptorProto) -> Iterator[str]:
    if not _PASCAL.fullmatch(message.name):
        yield f"message {message.name} is not PascalCase"
    for name in (*(field.name for field in message.field), *(one.name for one in message.oneof_decl)):
        if not _SNAKE.fullmatch(
            name.removeprefix("_")
        ):  # protoc's own oneof of an optional field begins with _
            yield f"{message.name}.{name} is not lower_snake_case"
    for nested in message.nested_type:
        yield from _message(nested)
    for enum in message.enum_type:
        yield from _enum(enum)


def _enum(enum: EnumDescriptorProto) -> Iterator[str]:
    prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
    if not _PASCAL.fullmatch(enum.name):
        yield f"enum {enum.name} is not PascalCase"
    for value in enum.value:
        if not (_UPPER.fullmatch(value.name) and value.name.startswith(prefix)):
            yield f"{value.name} does not begin with {prefix}"
        if (value.number == 0) != (value.name == f"{prefix}UNSPECIFIED"):
            yield f"{value.name} = {value.number}; the value 0, and no other, is {prefix}UNSPECIFIED"
    if enum.options.allow_alias:
        yield f"enum {enum.name} has aliases"


# Field numbers in descriptor.proto, which make the paths of source comments.
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6
_FIELD, _NESTED, _NESTED_ENUM, _ONEOF = 2, 3, 4, 8
_MEMBER = 2  # a service's methods, an enum's values


def _comments(file: FileDescriptorProto) -> Iterator[str]:
    """Yield what has no comment in front of it."""
    explained = {
        tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()
    }
    for path, name in _elements(file):
        if path not in explained:
            yield f"{name} has no comment"


def _elements(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    for i, message in enumerate(file.message_type):
        yield from _message_elements(message, (_MESSAGE, i))
    for i, enum in enumerate(file.enum_type):
        yield from _enum_elements(enum, (_ENUM, i))
    for i, service in enumerate(file.service):
        yield (_SERVICE, i), service.name
        for j, method in enumerate(service.method):
            yield (_SERVICE, i, _MEMBER, j), method.name


def _message_elements(
    message: DescriptorProto, path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], str]]:
    if message.options.map_entry:
        return
    yield path, message.name
    for i, field in enumerate(message.field):
        yield (*path, _FIELD, i), f"{message.name}.{field.name}"
    for i, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):
            yield (*path, _ONEOF, i), f"{message.name}.{oneof.name}"
    for i, nested in enumerate(message.nested_type):
        yield from _message_elements(nested, (*path, _NESTED, i))
    for i, enum in enumerate(message.enum_type):
        yield from _enum_elements(enum, (*path, _NESTED_ENUM, i))


def _enum_elements(enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
    yield path, enum.name
    for i, value in enumerate(enum.value):
        yield (*path, _MEMBER, i), value.name


def breaking(before: FileDescriptorSet, after: FileDescriptorSet) -> list[str]:
    """What a client built with ``before`` would misunderstand of ``after``, one line a fault."""
    faults = []
    messages, enums = _messages(after), _enums(after)
    for name, message in _messages(before).items():
        if name not in messages:
            faults.append(f"message {name} was removed")
        else:
            faults += [f"{name}: {fault}" for fault in _changed_message(message, messages[name])]
    for name, enum in _enums(before).items():
        if name not in enums:
            faults.append(f"enum {name} was removed")
        else:
            numbers = {value.number: value.name for value in enums[name].value}
            faults += [
                f"{name}: {value.name} = {value.number} was removed or renamed"
                for value in enum.value
                if numbers.get(value.number) != value.name
            ]
    methods = _methods(after)
    for name, form in _methods(before).items():
        if methods.get(name) != form:
            faults.append(f"method {name} was removed, or its messages or streams changed")
    return faults


def _changed_message(before: DescriptorProto, after: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in after.field}
    for field in before.field:
        now = fields.get(field.number)
        if now is None:
            yield f"field {field.name} = {field.number} was removed or renumbered"
            continue
        if now.name != field.name:
            yield f"field {field.number} was {field.name} and is {now.name}"
        if (now.type, now.type_name) != (field.type, field.type_name):
            yield f"the type of {field.name} changed"
        if (now.label == _REPEATED) != (field.label == _REPEATED):
            yield f"{field.name} was made, or is no longer, a list"
        if _oneof(before, field) != _oneof(after, now):
            yield f"{field.name} moved into or out of a oneof"


def _oneof(message: DescriptorProto, field: FieldDescriptorProto) -> str | None:
    """The oneof of a field; None for an optional field, whose own oneof is not seen on the wire."""
    shared = field.HasField("oneof_index") and not field.proto3_optional
    return message.oneof_decl[field.oneof_index].name if shared else None


def _messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    def walk(prefix: str, messages: list[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
        for message in messages:
            yield f"{prefix}.{message.name}", message
            yield from walk(f"{prefix}.{message.name}", list(message.nested_type))

    return {n: m for file in files.file for n, m in walk(file.package, list(file.message_type))}


def _enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    top = {f"{file.package}.{enum.name}": enum for file in files.file for enum in file.enum_type}
    nested = {f"{n}.{enum.name}": enum for n, m in _messages(files).items() for enum in m.enum_type}
    return top | nested


def _methods(files: FileDescriptorSet) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        f"{file.package}.{service.name}/{method.name}": (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for file in files.file
        for service in file.service
        for method in service.method
    }
