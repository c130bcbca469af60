"""Usage reports the prompt tokens that the engine's prefix cache held."""

from __future__ import annotations

from .test_openai import CHAT, TINY

LONG = [{"role": "user", "content": "A long question. " * 40}]


def test_second_turn_reports_cached_tokens(http):
    asked = {"model": TINY, "max_tokens": 4, "seed": 1}
    http.told(CHAT, messages=LONG, **asked)
    turn = [*LONG, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "And?"}]
    usage = http.told(CHAT, messages=turn, **asked)["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 600 < cached < usage["prompt_tokens"]
    message = http.told("/v1/messages", messages=turn, **asked)["usage"]
    assert message["cache_read_input_tokens"] >= cached
    assert message["input_tokens"] + message["cache_read_input_tokens"] == usage["prompt_tokens"]
