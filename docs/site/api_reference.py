"""Writes a page of Markdown for each contract in protos/laps_sd/v1, from its declarations and their comments."""

from __future__ import annotations

import tempfile
import textwrap
from collections.abc import Iterator, Sequence
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

ROOT = Path(__file__).parents[2]
FOLDER = "laps_sd/v1"

# Numbers of the fields of descriptor.proto, of which the paths of comments consist.
PACKAGE, MESSAGES, ENUMS, SERVICES = 2, 4, 5, 6
FIELDS, NESTED, NESTED_ENUMS = 2, 3, 4
METHODS = VALUES = 2

Location = tuple[int, ...]
Field = FieldDescriptorProto


def reference_pages() -> dict[str, str]:
    """Return the Markdown of each contract by the name of its file, without folder and suffix."""
    names = sorted(f"{FOLDER}/{path.name}" for path in (ROOT / "protos" / FOLDER).glob("*.proto"))
    with tempfile.NamedTemporaryFile() as made:
        arguments = [
            "protoc",
            f"-I{ROOT / 'protos'}",
            "--include_source_info",
            f"--descriptor_set_out={made.name}",
        ]
        if protoc.main([*arguments, *names]) != 0:
            raise ValueError("protos/ does not compile")
        files = FileDescriptorSet.FromString(Path(made.name).read_bytes()).file
    return {Path(file.name).stem: _Page(file).text() for file in files}


class _Page:
    """The reference of one file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments: dict[Location, str] = {
            tuple(location.path): _plain(location.leading_comments or location.trailing_comments)
            for location in file.source_code_info.location
        }

    def text(self) -> str:
        """Return the whole page."""
        path = f"protos/{self._file.name}"
        lines = [
            f"# {Path(path).stem}.proto",
            "",
            f"Package `{self._file.package}`. Written from the comments of `{path}`.",
            "",
            _with_lists(self._comments.get((PACKAGE,), "")),
        ]
        for number, service in enumerate(self._file.service):
            lines += self._service(service, (SERVICES, number))
        for number, message in enumerate(self._file.message_type):
            lines += self._message(message, (MESSAGES, number), "")
        for number, enum in enumerate(self._file.enum_type):
            lines += self._enum(enum, (ENUMS, number), "")
        return "\n".join(lines) + "\n"

    def _service(self, service: ServiceDescriptorProto, at: Location) -> Iterator[str]:
        yield from ("", f"## Service {service.name}", "", self._comments.get(at, ""), "")
        yield from ("| call | request | response | |", "|---|---|---|---|")
        for number, method in enumerate(service.method):
            request = self._type(method.input_type, stream=method.client_streaming)
            response = self._type(method.output_type, stream=method.server_streaming)
            meaning = _cell(self._comments.get((*at, METHODS, number), ""))
            yield f"| `{method.name}` | {request} | {response} | {meaning} |"

    def _message(self, message: DescriptorProto, at: Location, scope: str) -> Iterator[str]:
        name = f"{scope}{message.name}"
        yield from ("", f"## {name}", "", self._comments.get(at, ""), "")
        entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
        if message.field:
            yield from ("| | field | type | meaning |", "|---|---|---|---|")
        else:
            yield "No fields."
        for number, field in enumerate(message.field):
            type_name = self._field_type(field, entries)
            if field.HasField("oneof_index") and not field.proto3_optional:
                type_name += f"<br>one of `{message.oneof_decl[field.oneof_index].name}`"
            meaning = _cell(self._comments.get((*at, FIELDS, number), ""))
            yield f"| {field.number} | `{field.name}` | {type_name} | {meaning} |"
        for number, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*at, NESTED, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*at, NESTED_ENUMS, number), f"{name}.")

    def _enum(self, enum: EnumDescriptorProto, at: Location, scope: str) -> Iterator[str]:
        yield from ("", f"## {scope}{enum.name}", "", self._comments.get(at, ""), "")
        yield from ("| | value | meaning |", "|---|---|---|")
        for number, value in enumerate(enum.value):
            meaning = _cell(self._comments.get((*at, VALUES, number), ""))
            yield f"| {value.number} | `{value.name}` | {meaning} |"

    def _field_type(self, field: Field, entries: dict[str, DescriptorProto]) -> str:
        entry = entries.get(field.type_name.rpartition(".")[2])
        if entry is not None:
            key, value = entry.field
            return f"map of {self._field_type(key, {})} to {self._field_type(value, {})}"
        single = self._type(field.type_name) if field.type_name else Field.Type.Name(field.type)[5:].lower()
        if field.label == Field.LABEL_REPEATED:
            return f"repeated {single}"
        return f"optional {single}" if field.proto3_optional else single

    def _type(self, full_name: str, *, stream: bool = False) -> str:
        """Return a link to the section of a type, if it is of this file."""
        name = full_name.removeprefix(f".{self._file.package}.")
        outer = name.split(".")[0]
        known = any(outer == message.name for message in self._file.message_type)
        known = known or any(outer == enum.name for enum in self._file.enum_type)
        anchor = name.lower().replace(".", "")
        shown = f"[{name}](#{anchor})" if known else f"`{name.lstrip('.')}`"
        return f"stream of {shown}" if stream else shown


def _plain(comment: str) -> str:
    """Return a comment without the indentation after its slashes."""
    return textwrap.dedent(comment).strip().replace("<", "&lt;")


def _with_lists(comment: str) -> str:
    """Return a comment with the blank line that Markdown needs before a list."""
    lines: Sequence[str] = comment.splitlines()
    begins = next((at for at, line in enumerate(lines) if line.lstrip().startswith("* ")), len(lines))
    return "\n".join([*lines[:begins], "", *(textwrap.dedent("\n".join(lines[begins:])).splitlines())])


def _cell(comment: str) -> str:
    """Return a comment as one line of a table."""
    return " ".join(comment.split()).replace("|", "\\|")
