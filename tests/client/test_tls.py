"""Services behind TLS, with a test certificate authority."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tinkex
from tinkex.errors import APIConnectionError

from ..scripted import Answer, Raw, ScriptedServer

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs openssl to make certificates")
Service = Callable[..., tinkex.ServiceClient]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate authority and a certificate for 127.0.0.1 signed by it."""
    where = tmp_path_factory.mktemp("certificates")
    (where / "names").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")

    def openssl(*arguments: str) -> None:
        subprocess.run([str(OPENSSL), *arguments], cwd=where, check=True, capture_output=True)

    fresh = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *fresh, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test CA")
    openssl("req", *fresh, "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=127.0.0.1")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "request.pem", *signing, "-out", "cert.pem")
    return where


@pytest.fixture
def secure(server: ScriptedServer, certificates: Path) -> Iterator[str]:
    """The address of the scripted server behind TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")

    port, ready, done = 0, threading.Event(), threading.Event()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def main() -> None:
        nonlocal port
        front = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
        port = front.sockets[0].getsockname()[1]
        ready.set()
        await asyncio.to_thread(done.wait)
        front.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(10)
    yield f"https://127.0.0.1:{port}"
    done.set()
    thread.join()


def test_tls_service_can_be_called(server, secure, service, certificates, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    server.on("GET /api/v1/healthz", Answer({}, 503), Raw(b""), Answer({"status": "ok"}))
    client = service(base_url=secure)
    assert client.health().status == "ok"
    counts = [
        request.headers["x-stainless-retry-count"]
        for request in server.asked("GET /api/v1/healthz")
    ]
    assert counts == ["0", "1", "2"]


def test_tls_stream_is_read_to_its_end(server, secure, service, certificates, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "ca.pem"))
    server.on("GET /x", Answer(b"data: 1\n\ndata: 2\n\n", content_type="text/event-stream"))

    async def work() -> list[int]:
        async with service(base_url=secure).http.with_streaming_response("GET", "/x") as response:
            return [event async for event in response.iter_events()]

    assert asyncio.run(work()) == [1, 2]


def test_untrusted_certificate_is_refused(server, secure, service, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(APIConnectionError, match=r"certificate .* is not trusted: .*SSL_CERT_FILE"):
        service(base_url=secure, max_retries=0).http.get("/x").result(10)
    assert server.requests == []


def test_https_to_plain_http_service_is_connection_error(service):
    with socket.create_server(("127.0.0.1", 0)) as plain:

        def serve() -> None:
            connection, _ = plain.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"https://127.0.0.1:{plain.getsockname()[1]}"
        with pytest.raises(APIConnectionError):
            service(base_url=url, max_retries=0).http.get("/x").result(10)
        thread.join()
