"""Upload files: a multipart body with fields and a file, with the client's headers, retries and errors.

python examples/file_upload.py [--base-url URL --endpoint /api/v1/files] [--file FILE]

The Tinker API has no file upload today. Without `--endpoint`, a small server in this program receives and shows them.
"""

from __future__ import annotations

import tempfile
import threading
from email.message import Message
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import tinkex
from _shared import parsed

FIELDS = {"purpose": "notes", "tags": ["a", "b"], "about": {"author": "me"}}


class Receiver(BaseHTTPRequestHandler):
    """Receives a POST and answers with the names of its parts."""

    received: list[tuple[str, str]]

    def do_POST(self) -> None:
        head = f"Content-Type: {self.headers['content-type']}\r\n\r\n".encode()
        body = BytesParser().parsebytes(head + self.rfile.read(int(self.headers["content-length"])))
        parts: Any = body.get_payload()
        Receiver.received = [(name_of(part), str(part.get_payload())) for part in parts]
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


def name_of(part: Message) -> str:
    return str(part.get_param("name", header="content-disposition"))


def main() -> None:
    options = parsed(__doc__, endpoint="", file="")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(options.file or Path(scratch, "notes.txt"))
        if not options.file:
            file.write_text("read me")
        files = {"attachment": file, "raw": ("raw.bin", b"\x00\x01", "application/x-raw")}
        if options.endpoint:
            with tinkex.ServiceClient(base_url=options.base_url) as service:
                print(service.http.post(options.endpoint, FIELDS, files=files).result())
            return
        with HTTPServer(("127.0.0.1", 0), Receiver) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            here = f"http://127.0.0.1:{server.server_port}"
            with tinkex.ServiceClient(
                base_url=here, api_key="tml-none", telemetry_enabled=False
            ) as service:
                service.http.post("/files", FIELDS, files=files).result()
            server.shutdown()
        expected = file.read_text()
    for name, content in Receiver.received:
        print(f"{name:16}{content!r}")
    assert ("attachment", expected) in Receiver.received
    assert ("about[author]", "me") in Receiver.received


if __name__ == "__main__":
    main()
