"""The command line, called from a program: a prompt, a prompt file with JSON output, two checkpoints deleted at once.

python examples/command_line.py [--base-url local] [--base-model tinkex/tiny]

`tinkex.cli.main.run` takes the arguments of `tinkex` and returns its exit code. It starts no process.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tinkex
from _shared import parsed
from tinkex.cli.main import run


def main() -> None:
    options = parsed(__doc__)
    where = ["--base-url", options.base_url]
    sample = ["sample", *where, "--base-model", options.base_model, "--max-tokens", "8"]
    # While this client is open, commands with `local` use its service instead of starting another one.
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=4)
        saved = [training.save_state(name) for name in ("first", "second")]
        paths = [each.result().path for each in saved]

        tinkex_command(*sample, "--prompt", "The cat sat on ", "--seed", "1")

        with tempfile.TemporaryDirectory() as scratch:
            prompt, output = Path(scratch, "prompt.txt"), Path(scratch, "samples.json")
            prompt.write_text("The cat sat on ")
            tinkex_command(
                *sample, "--prompt-file", str(prompt), "--num-samples", "2", "--json",
                "--output", str(output),
            )  # fmt: skip
            written = json.loads(output.read_text())
        print(f"samples.json holds {sorted(written)}")

        tinkex_command("checkpoint", "delete", *paths, "--yes", *where)
        left = service.create_rest_client().list_checkpoints(training.model_id).result()
    assert written
    assert not left.checkpoints, "the checkpoints are still there"
    print("Both checkpoints are deleted.")


def tinkex_command(*arguments: str) -> None:
    print(f"\n$ tinkex {' '.join(arguments)}", flush=True)
    code = run(arguments)
    assert code == 0, f"exit code {code}"


if __name__ == "__main__":
    main()
