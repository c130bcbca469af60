from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from safetensors.numpy import load_file, save_file

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
#: A token of the tiny model that no text has.
UNUSED = 263


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The directory of `tinkex/tiny`, to make copies of."""
    root = tmp_path_factory.mktemp("models")
    return base_models.prepare(base_models.parse_spec(base_models.TINY), root).directory


@pytest.fixture(scope="session")
def thinker(tiny) -> Path:
    """A copy of `tinkex/tiny` with a chat template that knows tools and reasoning."""
    return copied(tiny, "thinker", tokenizer_config={"chat_template": TEMPLATE})


@pytest.fixture(scope="session")
def endless(tiny) -> Path:
    """A copy of `tinkex/tiny` that draws for minutes: its end token has no chance if sampling is greedy."""
    copy = copied(
        tiny,
        "endless",
        config={"max_position_embeddings": 200_000},
        tokenizer_config={"model_max_length": 200_000},
        generation_config={"eos_token_id": [UNUSED]},
    )
    weights = load_file(copy / "model.safetensors")
    # All logits of a step would have to be negative for this one to be the largest.
    weights["lm_head.weight"][UNUSED] = 0
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def copied(model: Path, name: str, **changes: dict[str, Any]) -> Path:
    """A copy of a model's directory beside it, with other values in some of its JSON files."""
    copy = model.parent / name
    shutil.copytree(model, copy)
    for file, changed in changes.items():
        path = copy / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
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
