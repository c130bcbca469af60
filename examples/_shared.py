"""Shared code of the examples: command-line options, and an HTTP client that simulates failures."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Options that can also be set in the environment, with the variable names that examples of other SDKs use.
VARIABLES = {
    "base_url": "TINKER_BASE_URL",
    "base_model": "TINKER_BASE_MODEL",
    "prompt": "TINKER_PROMPT",
    "text": "TINKER_PROMPT",
    "num_samples": "TINKER_NUM_SAMPLES",
    "max_tokens": "TINKER_MAX_TOKENS",
    "temperature": "TINKER_TEMPERATURE",
    "timeout": "TINKER_SAMPLE_TIMEOUT",
    "items": "TINKER_CHUNK_COUNT",
    "path": "TINKER_CHECKPOINT_PATH",
    "checkpoint_paths": "TINKER_CHECKPOINT_PATHS",
    "output": "TINKER_OUTPUT_DIR",
    "file": "TINKER_UPLOAD_FILE",
    "endpoint": "TINKER_UPLOAD_ENDPOINT",
    "image": "TINKER_IMAGE_PATH",
    "expected_tokens": "TINKER_IMAGE_EXPECTED_TOKENS",
}


def parsed(doc: str | None, **more: str | float) -> argparse.Namespace:
    """The options of an example: service, model, and `more` options with their defaults.

    An option that is not on the command line comes from the environment, or else from the default.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--base-url",
        default=_from_environment("base_url", "local"),
        help="URL of a service, with its key in TINKER_API_KEY; or local, for a service on this machine (default: %(default)s)",
    )
    model = _from_environment("base_model", "tinkex/tiny")
    parser.add_argument("--base-model", "--model", default=model, help="(default: %(default)s)")
    for name, default in more.items():
        option = f"--{name.replace('_', '-')}"
        found = _from_environment(name, default)  # argparse converts text to the type
        parser.add_argument(
            option, type=type(default), default=found, help="(default: %(default)s)"
        )
    return parser.parse_args()


def _from_environment(name: str, default: str | float) -> str | float:
    return os.environ.get(VARIABLES.get(name, ""), "").strip() or default


@dataclass(frozen=True)
class Answer:
    """The answer of an HTTP client."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=lambda: {"content-type": "application/json"})

    @property
    def content(self) -> bytes:
        return json.dumps(self.body).encode()


class Between:
    """An HTTP client that answers some requests itself and forwards the others to the service.

    `ServiceClient(http_client=Between(answer))`: `answer(url)` returns an `Answer`, or None to forward the request.
    With it an example can simulate failures of the service.
    """

    def __init__(self, answer: Callable[[str], Answer | None]) -> None:
        import pyqwest  # tinkex itself uses it for TLS

        self._answer = answer
        self._service = pyqwest.Client(pyqwest.HTTPTransport(follow_redirects=False))

    async def post(self, url: str, headers: Any, content: bytes | None = None) -> Any:
        return self._answer(url) or await self._service.post(url, headers=headers, content=content)

    async def get(self, url: str, headers: Any) -> Any:
        return self._answer(url) or await self._service.get(url, headers=headers)

    async def delete(self, url: str, headers: Any) -> Any:
        return self._answer(url) or await self._service.delete(url, headers=headers)
