"""Run the examples one after another and print their times; stop at the first failure.

python examples/run_all.py [--base-url local] [--base-model tinkex/tiny] [NAME …]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: In the order of the README: from the first sample to rarely needed features.
EXAMPLES = [
    "sampling_basic",
    "training_loop",
    "save_weights_and_sample",
    "sft",
    "dpo",
    "rl_verifiable_reward",
    "distillation",
    "multi_adapter",
    "custom_loss",
    "structured_regularizers",
    "regularizers_all",
    "regularizers_tour",
    "adam_and_chunking",
    "forward_inference",
    "capabilities_and_logprobs",
    "tokenizer_overrides",
    "multimodal_and_resume",
    "training_persistence",
    "checkpoints_management",
    "weights_inspection",
    "checkpoint_download",
    "recovery",
    "async_client_creation",
    "worker_processes",
    "queue_states",
    "retry_and_capture",
    "metrics_live",
    "telemetry_reporter",
    "observability",
    "sessions_management",
    "model_info_and_unload",
    "heartbeat_probe",
    "file_upload",
    "command_line",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="local")
    parser.add_argument("--base-model", "--model")
    parser.add_argument("names", nargs="*", default=EXAMPLES, metavar="NAME")
    options = parser.parse_args()
    arguments = ["--base-url", options.base_url]
    if options.base_model:
        arguments += ["--base-model", options.base_model]
    began = time.monotonic()
    for number, name in enumerate(options.names, 1):
        print(f"[{datetime.now():%H:%M:%S}] {number}/{len(options.names)} {name}", flush=True)
        started = time.monotonic()
        code = subprocess.run(
            [sys.executable, HERE / f"{name}.py", *arguments], check=False
        ).returncode
        if code != 0:
            raise SystemExit(f"{name} failed with exit code {code}.")
        print(
            f"[{datetime.now():%H:%M:%S}] done in {time.monotonic() - started:.1f} s\n", flush=True
        )
    print(f"All {len(options.names)} done in {time.monotonic() - began:.1f} s.")


if __name__ == "__main__":
    main()
