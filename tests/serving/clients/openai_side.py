"""Run by the openai package's own environment: everything that its users do."""

import json
import sys

import openai

url, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="tml-local", max_retries=0)
hi = [{"role": "user", "content": "Hi"}]

assert model in [each.id for each in client.models.list()]
assert client.models.retrieve(model).id == model

answer = client.chat.completions.create(
    model=model, messages=hi, max_tokens=8, seed=1, logprobs=True, top_logprobs=2
)
assert answer.choices[0].message.role == "assistant"
assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
assert answer.usage.prompt_tokens_details.cached_tokens >= 0

stream = client.chat.completions.create(
    model=model,
    messages=hi,
    max_tokens=8,
    seed=1,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == answer.choices[0].message.content, (text, answer)
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
formed = client.chat.completions.create(
    model=model,
    messages=hi,
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": schema, "strict": True},
    },
)
assert json.loads(formed.choices[0].message.content).keys() == {"name", "age"}

tool = {
    "type": "function",
    "function": {"name": "greet", "description": "Greets.", "parameters": schema},
}
called = client.chat.completions.create(
    model=model, messages=hi, tools=[tool], tool_choice="required", parallel_tool_calls=False
)
(call,) = called.choices[0].message.tool_calls
assert call.function.name == "greet"
assert json.loads(call.function.arguments).keys() == {"name", "age"}
reply = [
    *hi,
    called.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "done"},
]
assert (
    client.chat.completions.create(
        model=model, messages=reply, tools=[tool], max_tokens=4
    ).usage.completion_tokens
    <= 4
)

completed = client.completions.create(
    model=model, prompt="Once upon", max_tokens=6, logprobs=1, echo=True
)
assert completed.choices[0].text.startswith("Once upon")
assert completed.choices[0].logprobs.token_logprobs[0] is None
streamed = client.completions.create(model=model, prompt="Once", max_tokens=6, stream=True)
assert sum(1 for _ in streamed) >= 2

try:
    client.chat.completions.create(model="none", messages=hi)
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
else:
    raise AssertionError("an unknown model was answered")
try:
    client.chat.completions.create(model=model, messages=hi, extra_body={"frobnicate": 1})
except openai.BadRequestError as error:
    assert error.param == "frobnicate"
else:
    raise AssertionError("an unknown parameter was ignored")
print("ok")
