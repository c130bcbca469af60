"""Calls through a proxy."""

from __future__ import annotations

import json
import logging
import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from tinkex._client.downloads import fetch
from tinkex.config import Config, Proxy
from tinkex.errors import APIConnectionError, TinkerError

from ..scripted import Answer, ScriptedServer

HEALTH = "GET /api/v1/healthz"
SERVICE = "http://service.invalid"  # does not resolve: only a proxy can answer for it
CREDENTIALS = f"Basic {b64encode(b'me:p@ss').decode()}"
Service = Callable[..., tinkex.ServiceClient]


@pytest.fixture
def proxy(server: ScriptedServer) -> ScriptedServer:
    """The scripted server, used as a proxy that answers for the service."""
    server.on(HEALTH, Answer({"status": "ok"}))
    return server


def through(proxy: ScriptedServer, userinfo: str = "") -> str:
    return proxy.url.replace("http://", f"http://{userinfo}")


def test_proxy_receives_every_request(proxy, service):
    assert service(base_url=SERVICE, proxy=proxy.url).health().status == "ok"
    assert [request.headers["host"] for request in proxy.requests] == ["service.invalid"] * 2
    (request,) = proxy.asked(HEALTH)
    assert request.headers["x-api-key"] == "tml-test"
    assert "proxy-authorization" not in request.headers


def test_service_is_called_directly_without_proxy(proxy, service):
    service(proxy="").health()
    assert proxy.asked(HEALTH)[0].headers["host"] == proxy.url.removeprefix("http://")


def test_proxy_can_be_given_as_parts(proxy, service):
    given = ("http", "127.0.0.1", proxy.port, {"headers": [("x-proxy", "1")]})
    service(base_url=SERVICE, proxy=given).health()
    assert proxy.asked(HEALTH)[0].headers["x-proxy"] == "1"


def test_credentials_of_a_proxy_become_its_authorization(proxy, service):
    service(base_url=SERVICE, proxy=through(proxy, "me:p%40ss@")).health()
    assert proxy.asked(HEALTH)[0].headers["proxy-authorization"] == CREDENTIALS


def test_proxy_headers_override_credentials_in_proxy_url(proxy, service):
    service(
        base_url=SERVICE,
        proxy=through(proxy, "me:p%40ss@"),
        proxy_headers={"proxy-authorization": "Bearer t"},
    ).health()
    assert proxy.asked(HEALTH)[0].headers["proxy-authorization"] == "Bearer t"


def test_answers_through_a_proxy_fail_and_are_retried_like_others(proxy, service, clock):
    proxy.on(HEALTH, Answer(b"<html>bad gateway", 502), Answer({"status": "ok"}))
    assert service(base_url=SERVICE, proxy=proxy.url).health().status == "ok"
    assert clock.slept == [0.5]


def test_credentials_of_a_proxy_are_never_shown(proxy, service, caplog):
    caplog.set_level(logging.DEBUG)
    address = through(proxy, "me:p%40ss@")
    client = service(base_url=SERVICE, proxy=address, dump_headers=True, max_retries=4)
    client.health()
    proxy.on(HEALTH, Answer({"detail": "no"}, 404))
    with pytest.raises(TinkerError) as raised:
        client.health()
    shown = " ".join([caplog.text, repr(client), repr(client.config), str(raised.value)])
    assert "healthz" in caplog.text
    assert_hidden(shown)


def assert_hidden(text: str) -> None:
    for secret in ("p@ss", "p%40ss", CREDENTIALS, CREDENTIALS.removeprefix("Basic ")):
        assert secret not in text


def test_a_download_goes_through_the_proxy(proxy, tmp_path):
    proxy.on("GET /file", Answer({"the": "file"}))
    headers = (("proxy-authorization", CREDENTIALS), ("x-proxy", "1"))
    given = Proxy("http", "127.0.0.1", proxy.port, headers)
    fetch(f"{SERVICE}/file", tmp_path / "file", proxy=given)
    assert json.loads((tmp_path / "file").read_text()) == {"the": "file"}
    (request,) = proxy.asked("GET /file")
    assert request.headers["host"] == "service.invalid"
    assert request.headers["proxy-authorization"] == CREDENTIALS
    assert request.headers["x-proxy"] == "1"


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that refuses every connection, and the requests that it received."""
    heads: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # closed at the end of the test
            with connection:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    head += connection.recv(4096)
                heads.append(head)
                connection.sendall(b"HTTP/1.1 407 Who are you\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        yield f"http://me:p%40ss@127.0.0.1:{listening.getsockname()[1]}", heads
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_https_download_uses_tunnel(refusing, tmp_path):
    proxy, heads = refusing
    config = Config(
        api_key="tml-test",
        proxy=proxy,
        proxy_headers={"proxy-authorization": CREDENTIALS, "x-proxy": "1"},
    )
    waits: list[float] = []
    with pytest.raises(APIConnectionError):
        fetch("https://service.invalid/x", tmp_path / "x", proxy=config.proxy, sleep=waits.append)
    assert heads[0].startswith(b"CONNECT service.invalid:443 ")
    assert f"Proxy-Authorization: {CREDENTIALS}".encode() in heads[0]


def test_https_service_is_reached_through_tunnel(refusing, service):
    proxy, heads = refusing
    client = service(base_url="https://service.invalid", proxy=proxy, max_retries=0)
    with pytest.raises(APIConnectionError) as raised:
        client.http.get("/x").result(10)
    assert heads[0].startswith(b"CONNECT service.invalid:443 HTTP/1.1\r\n")
    assert f"proxy-authorization: {CREDENTIALS}".encode() in heads[0]
    assert b"x-api-key" not in heads[0]
    assert_hidden(str(raised.value))


def test_unreachable_proxy_is_connection_error(service):
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"http://me:p%40ss@127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(APIConnectionError) as raised:
            service(base_url=SERVICE, proxy=address, max_retries=0).http.get("/x").result(10)
    assert_hidden(str(raised.value))


def test_proxy_can_be_set_in_environment(proxy):
    config = Config.from_environ(
        {"TINKEX_PROXY": through(proxy, "me:p%40ss@"), "TINKER_API_KEY": "tml-test"},
        base_url=SERVICE,
    )
    client: Any = tinkex.ServiceClient(config=config)
    client.health()
    client.close().result(10)
    assert proxy.asked(HEALTH)[0].headers["proxy-authorization"] == CREDENTIALS
