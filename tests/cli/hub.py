"""A stand-in for the Hugging Face hub: one user, repositories as dictionaries, the calls an upload makes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_good"
COMMIT = "a" * 40


class Hub:
    """The content of the hub: files by repository, branch and name."""

    def __init__(self) -> None:
        self.url = ""
        self.private: dict[str, bool] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commits: list[dict[str, Any]] = []
        self.proposals: list[str] = []
        self.stored: dict[str, bytes] = {}

    def answer(self, path: str, body: bytes, token: str) -> tuple[int, Any, dict[str, str]]:
        path, _, query = path.partition("?")
        if path == "/api/whoami-v2":
            if token != f"Bearer {TOKEN}":
                return 401, {"error": "Invalid credentials"}, {}
            return 200, {"name": "ada", "type": "user", "orgs": []}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            self.files.setdefault((found[1], found[2]), dict(self.files[found[1], "main"]))
            return 200, {}, {}
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(*found.groups())
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", path):
            files = json.loads(body)["files"]
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in files
            ]
            return 200, {"files": modes}, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, self._batch(json.loads(body)), {}
        if found := re.fullmatch(r"/store/(\w+)", path):
            self.stored[found[1]] = body
            return 200, {}, {}
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path):
            return 200, self._commit(found[1], found[2], body, query), {}
        return 404, {"error": "not part of this stand-in"}, {}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        repo = f"{asked.get('organization') or 'ada'}/{asked['name']}"
        url = {"url": f"{self.url}/{repo}"}
        if repo in self.private:
            return 409, {"error": "You already created this repo", **url}, {}
        self.private[repo] = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.files[repo, "main"] = {}
        return 200, url, {}

    def _resolve(self, repo: str, revision: str, name: str) -> tuple[int, Any, dict[str, str]]:
        files = self.files.get((repo, revision))
        if files is None:
            return 404, {"error": "Revision Not Found"}, {"x-error-code": "RevisionNotFound"}
        if name not in files:
            headers = {"x-error-code": "EntryNotFound", "x-repo-commit": COMMIT}
            return 404, {"error": "Entry not found"}, headers
        return 200, files[name], {"etag": '"e"', "x-repo-commit": COMMIT}

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {
            "transfer": "basic",
            "objects": [
                {
                    **one,
                    "actions": {"upload": {"href": f"{self.url}/store/{one['oid']}", "header": {}}},
                }
                for one in asked["objects"]
            ],
        }

    def _commit(self, repo: str, revision: str, body: bytes, query: str) -> dict[str, Any]:
        lines = [json.loads(line) for line in body.splitlines() if line]
        proposed = "create_pr=1" in query
        files = {} if proposed else self.files[repo, revision]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value)
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
        answer = {
            "success": True,
            "commitOid": COMMIT,
            "commitUrl": f"{self.url}/{repo}/commit/{COMMIT}",
        }
        if proposed:
            self.proposals.append(repo)
            answer["pullRequestUrl"] = f"{self.url}/{repo}/discussions/1"
        return answer


@contextmanager
def hub() -> Iterator[Hub]:
    standing_in = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            token = self.headers.get("authorization", "")
            status, content, headers = standing_in.answer(self.path, body, token)
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = answer

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    standing_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield standing_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
