"""Run by the anthropic package's own environment: everything that its users do."""

import sys

import anthropic

url, model = sys.argv[1:]
hi = [{"role": "user", "content": "Hi"}]
for base in (url, f"{url}/anthropic/api"):
    client = anthropic.Anthropic(base_url=base, api_key="tml-local", max_retries=0)
    assert model in [each.id for each in client.models.list()]
    answer = client.messages.create(model=model, messages=hi, max_tokens=8, extra_body={"seed": 1})
    assert answer.role == "assistant"
    with client.messages.stream(
        model=model, messages=hi, max_tokens=8, extra_body={"seed": 1}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in answer.content)
    assert final.usage.output_tokens == answer.usage.output_tokens
    counted = client.messages.count_tokens(model=model, messages=hi)
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens

schema = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
tools = [{"name": "weather", "description": "Tells the weather.", "input_schema": schema}]
choice = {"type": "any", "disable_parallel_tool_use": True}
called = client.messages.create(
    model=model, messages=hi, max_tokens=300, tools=tools, tool_choice=choice
)
assert called.stop_reason == "tool_use"
(block,) = [block for block in called.content if block.type == "tool_use"]
assert block.input.keys() == {"city"}
result = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}],
}
said = [
    *hi,
    {"role": "assistant", "content": [each.model_dump() for each in called.content]},
    result,
]
for message in said:
    if isinstance(message["content"], list):
        message["content"] = [
            {key: value for key, value in each.items() if value is not None}
            for each in message["content"]
        ]
client.messages.create(model=model, messages=said, max_tokens=4, tools=tools)
try:
    client.messages.create(model="none", messages=hi, max_tokens=4)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("an unknown model was answered")
print("ok")
