"""File uploads."""

from __future__ import annotations

import io
import os
from email.message import Message
from email.parser import BytesParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex._client.multipart import encode_multipart
from tinkex.errors import InvalidInputError

from ..scripted import Answer, Raw

X = "/api/v1/upload"


def parse(body: bytes, content_type: str) -> list[Message]:
    """The parts, read by an independent parser."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = BytesParser().parsebytes(head + body)
    assert message.is_multipart()
    assert not message.defects
    parts = message.get_payload()
    assert isinstance(parts, list)
    return parts  # type: ignore[return-value]


def fields(body: dict[str, Any]) -> list[tuple[str, str]]:
    parts = parse(*encode_multipart(body, {"f": b""}))[:-1]
    return [(name_of(part), content(part).decode()) for part in parts]


def name_of(part: Message) -> str:
    return str(part.get_param("name", header="content-disposition"))


def content(part: Message) -> bytes:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload


def file_of(file: Any) -> Message:
    (part,) = parse(*encode_multipart({}, {"f": file}))
    return part


# -- fields ---------------------------------------------------------------------------------------


def test_nested_data_become_flat_fields():
    body = {
        "name": "x",
        "meta": {"a": 1, "b": {"c": True}},
        "tags": ["red", "blue"],
        "docs": [{"type": "a"}, {"type": "b"}],
        "none": None,
        "float": 1.5,
    }
    assert fields(body) == [
        ("name", "x"),
        ("meta[a]", "1"),
        ("meta[b][c]", "true"),
        ("tags[]", "red"),
        ("tags[]", "blue"),
        ("docs[][type]", "a"),
        ("docs[][type]", "b"),
        ("none", ""),
        ("float", "1.5"),
    ]


def test_empty_containers_leave_no_field():
    assert fields({"a": [], "b": {}}) == []


@pytest.mark.parametrize("body", ["text", b"bytes", [("a", 1)], 5])
def test_a_body_beside_files_must_be_a_mapping(body):
    with pytest.raises(InvalidInputError, match="body"):
        encode_multipart(body, {"f": b"x"})


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "filename", "expected"),
    [
        (b"bytes", "upload", b"bytes"),
        ("text ☃", "upload", "text ☃".encode()),
        (io.BytesIO(b"stream"), "upload", b"stream"),
        (("a.txt", b"x"), "a.txt", b"x"),
        (("a.txt", "x"), "a.txt", b"x"),
        (("a.txt", io.BytesIO(b"x")), "a.txt", b"x"),
        (("a.txt", memoryview(b"x")), "a.txt", b"x"),
    ],
)
def test_a_file_is_content_with_or_without_a_name(file, filename, expected):
    part = file_of(file)
    assert name_of(part) == "f"
    assert part.get_filename() == filename
    assert part.get_content_type() == "application/octet-stream"
    assert content(part) == expected


def test_a_file_may_have_a_type_and_headers():
    part = file_of(("a.txt", b"x", "text/csv", {"X-One": "1"}))
    assert part.get_content_type() == "text/csv"
    assert part["X-One"] == "1"
    part = file_of(("a.txt", b"x", None, [("X-One", "1"), ("X-Two", "2")]))
    assert (part.get_content_type(), part["X-Two"]) == ("application/octet-stream", "2")


def test_a_file_without_a_name_has_none():
    assert file_of((None, b"x")).get_filename() is None


def test_a_path_is_read_and_a_string_never_is(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"on disk")
    assert content(file_of(path)) == b"on disk"
    assert file_of(path).get_filename() == "data.bin"
    assert content(file_of(("other", path))) == b"on disk"
    assert content(file_of(str(path))) == str(path).encode()
    with os.scandir(tmp_path) as entries:
        entry = next(entries)  # a path-like object that is not a `Path`
    assert (file_of(entry).get_filename(), content(file_of(entry))) == ("data.bin", b"on disk")


def test_an_open_file_is_named_after_itself(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"on disk")
    with path.open("rb") as opened:
        part = file_of(opened)
    assert (part.get_filename(), content(part)) == ("data.bin", b"on disk")


@pytest.mark.parametrize("file", [5, None, object(), (), ("a",), ("a", b"", "b", {}, "c")])
def test_invalid_file_is_refused_with_field_name(file):
    with pytest.raises(InvalidInputError, match=r"files\.f"):
        encode_multipart({}, {"f": file})


def test_a_directory_or_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InvalidInputError, match=r"files\.f: cannot be read"):
            encode_multipart({}, {"f": path})


def test_a_name_may_carry_several_files():
    parts = parse(*encode_multipart({}, [("f", ("1", b"one")), ("f", ("2", b"two"))]))
    assert [(name_of(part), part.get_filename(), content(part)) for part in parts] == [
        ("f", "1", b"one"),
        ("f", "2", b"two"),
    ]


def test_names_cannot_inject_header_lines():
    body, _ = encode_multipart({'a"\r\nX: 1': "x"}, {'f"\n': ('n"\r\nX: 1', b"")})
    assert b"\r\nX: 1" not in body
    assert b'name="f%22%0A"; filename="n%22%0D%0AX: 1"' in body


@pytest.mark.parametrize(
    "file", [("n", b"", "text/x\r\nX: 1"), ("n", b"", None, {"Y": "1\nX: 1"}), ("n", b"", "a\rb")]
)
def test_file_header_with_line_break_is_refused(file):
    with pytest.raises(InvalidInputError, match="line break"):
        encode_multipart({}, {"f": file})


# -- complete body --------------------------------------------------------------------------------


def test_the_body_is_laid_out_as_the_standard_says():
    body, content_type = encode_multipart(
        {"a": 1}, {"f": ("n", b"x")}, "multipart/form-data; boundary=B"
    )
    assert content_type == "multipart/form-data; boundary=B"
    assert body == (
        b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'
        b'--B\r\nContent-Disposition: form-data; name="f"; filename="n"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\nx\r\n"
        b"--B--\r\n"
    )


@pytest.mark.parametrize(
    "given",
    [
        "multipart/form-data; boundary=mine",
        'multipart/form-data; boundary="mine"',
        'Multipart/Form-Data; charset=utf-8; BOUNDARY="with space"; x=y',
    ],
)
def test_boundary_of_caller_is_kept(given):
    body, content_type = encode_multipart({}, {"f": b"x"}, given)
    assert content_type == given
    assert content(parse(body, content_type)[0]) == b"x"


def test_boundary_is_generated_if_none_is_given():
    _, first = encode_multipart({}, {"f": b"x"}, "multipart/form-data")
    _, second = encode_multipart({}, {"f": b"x"})
    boundaries = {text.partition("boundary=")[2] for text in (first, second)}
    assert len(boundaries) == 2
    assert all(len(boundary) == 32 and int(boundary, 16) >= 0 for boundary in boundaries)


@given(st.binary(max_size=200), st.text(st.characters(codec="ascii", categories=["L", "N"])))
def test_any_content_survives_encoding(data, value):
    parts = parse(*encode_multipart({"value": value}, {"f": data}))
    assert content(parts[0]) == value.encode()
    body, _ = encode_multipart({"value": value}, {"f": data}, "multipart/form-data; boundary=B")
    assert b"\r\n\r\n" + data + b"\r\n--B--\r\n" in body


# -- over HTTP ------------------------------------------------------------------------------------


def test_files_make_a_call_multipart(server, service):
    server.on(f"POST {X}", Answer({}))
    service().http.post(X, {"a": {"b": 1}}, files={"f": ("n.txt", b"x", "text/plain")}).result(10)
    (request,) = server.requests
    parts = parse(request.body, request.headers["content-type"])
    assert [(name_of(part), content(part)) for part in parts] == [("a[b]", b"1"), ("f", b"x")]


def test_without_files_a_body_is_json(server, service):
    server.on(f"POST {X}", Answer({}))
    nothing: tuple[Any, ...] = (None, {}, [])
    for files in nothing:
        service().http.post(X, {"a": {"b": 1}}, files=files).result(10)
    assert [request.headers["content-type"] for request in server.requests] == (
        ["application/json"] * 3
    )
    assert server.requests[0].json == {"a": {"b": 1}}


@pytest.mark.parametrize("kind", ["multipart/form-data", "Multipart/Form-Data"])
def test_a_multipart_content_type_makes_a_call_multipart(server, service, kind):
    server.on(f"POST {X}", Answer({}))
    own = {"Content-Type": f"{kind}; boundary=mine"}
    service().http.post(X, {"a": 1}, headers=own).result(10)
    (request,) = server.requests
    assert request.headers["content-type"] == own["Content-Type"]
    assert request.body.startswith(b"--mine\r\n")


def test_retried_upload_sends_identical_bytes(server, service):
    server.on(f"PUT {X}", Answer({}, 503), Raw(b"HTTP/1.1 2"), Answer({}))
    stream = io.BytesIO(b"can be read only once")
    service().http.put(X, {"a": 1}, files={"f": stream}).result(10)
    bodies = {(request.headers["content-type"], request.body) for request in server.requests}
    assert len(server.requests) == 3
    assert len(bodies) == 1
    assert b"can be read only once" in server.requests[2].body


def test_unreadable_upload_is_refused_before_sending(server, service, tmp_path):
    with pytest.raises(InvalidInputError, match=r"files\.f"):
        service().http.post(X, files={"f": tmp_path / "absent"}).result(10)
    assert server.requests == []
