"""Run by inspect-ai's own environment: a small task with a tool-free and a generated answer."""

import os
import sys
import tempfile

url, model = sys.argv[1:]
os.environ["TINKEX_API_KEY"] = "tml-local"
os.environ["TINKEX_BASE_URL"] = f"{url}/v1"
from inspect_ai import Task
from inspect_ai import eval as run
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

task = Task(
    dataset=[Sample(input="Hi", target="zzz"), Sample(input="Say a", target="a")],
    solver=generate(),
    scorer=includes(),
)
with tempfile.TemporaryDirectory() as logs:
    (log,) = run(
        task, model=f"openai-api/tinkex/{model}", max_tokens=8, seed=1, log_dir=logs, display="none"
    )
    assert log.status == "success", log.error
    assert len(log.samples) == 2
    assert all(sample.output.usage.output_tokens <= 8 for sample in log.samples)
print("ok")
