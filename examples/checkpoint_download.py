"""Download a checkpoint: streamed with progress, resumed after a broken connection, checked and unpacked.

python examples/checkpoint_download.py [--base-url local] [--base-model tinkex/tiny] [--path tinker://…] [--output DIR]

Without `--path` a new checkpoint is created; without `--output` the files are only listed. `tinkex checkpoint download`
does the same in a terminal.
"""

from __future__ import annotations

import tempfile

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__, path="", output="")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        path = options.path
        if not path:
            training = service.create_lora_training_client(options.base_model, rank=8)
            path = training.save_weights_for_sampler("to-fetch").result().path
        with tempfile.TemporaryDirectory() as scratch:
            directory = tinkex.download_checkpoint(
                service.create_rest_client(),
                path,
                options.output or scratch,
                progress=lambda done, total: print(f"{done} of {total or '?'} bytes", flush=True),
            )
            files = {file.name: file.stat().st_size for file in directory.iterdir()}
    print(path)
    for name, size in files.items():
        print(f"  {size:>10,}  {name}")
    assert any(name.endswith(".safetensors") for name in files), "no weights in the archive"


if __name__ == "__main__":
    main()
