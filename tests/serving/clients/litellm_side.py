"""Run by litellm's own environment."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

url, model = sys.argv[1:]
hi = [{"role": "user", "content": "Hi"}]
options = {"api_base": f"{url}/v1", "api_key": "tml-local", "num_retries": 0}
answer = litellm.completion(model=f"openai/{model}", messages=hi, max_tokens=8, seed=1, **options)
parts = litellm.completion(
    model=f"openai/{model}", messages=hi, max_tokens=8, seed=1, stream=True, **options
)
text = "".join(part.choices[0].delta.content or "" for part in parts)
assert text == answer.choices[0].message.content
schema = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
called = litellm.completion(
    model=f"openai/{model}",
    messages=hi,
    tools=[tool],
    tool_choice="required",
    parallel_tool_calls=False,
    **options,
)
assert json.loads(called.choices[0].message.tool_calls[0].function.arguments).keys() == {"x"}
message = litellm.completion(
    model=f"anthropic/{model}",
    messages=hi,
    max_tokens=8,
    api_base=url,
    api_key="tml-local",
    num_retries=0,
)
assert message.usage.completion_tokens <= 8
print("ok")
