from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tinkex.engine import base_models
from tinkex.testing import RunningService, service

#: A template like Qwen's: tools, calls and reasoning in tags.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write calls in <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture(scope="session")
def thinker(tmp_path_factory) -> Path:
    """A copy of `tinkex/tiny` with a chat template that knows tools and reasoning."""
    root = tmp_path_factory.mktemp("models")
    tiny = base_models.prepare(base_models.parse_spec(base_models.TINY), root)
    copy: Path = root / "thinker"
    shutil.copytree(tiny.directory, copy)
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    return copy


@pytest.fixture(scope="session")
def served(thinker) -> Iterator[RunningService]:
    """A service that samples from `tinkex/tiny` and from its copy with the other template."""
    with service("torch", ("tinkex/tiny", f"thinker={thinker}")) as running:
        yield running


class Http:
    """Sends requests to a service, and reads its streams."""

    def __init__(self, url: str, **headers: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=60, trust_env=False, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def told(self, path: str, **body: Any) -> Any:
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return response.json()

    def refused(self, path: str, status: int, **body: Any) -> Any:
        response = self.post(path, **body)
        assert response.status_code == status, response.text
        return response.json()["error"]

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of all events; `[DONE]` is a string."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        data = [line.removeprefix("data: ") for line in lines]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


@pytest.fixture(scope="session")
def http(served) -> Iterator[Http]:
    with Http(served.url) as made:
        yield made
