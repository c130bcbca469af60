"""Fetch a checkpoint: its archive, streamed with progress, and unpacked.

python examples/checkpoint_download.py [--base-url local] [--base-model tinkex/tiny] [--path tinker://…] [--output DIR]

Without a path a checkpoint is made, without an output the files are only shown. `tinkex checkpoint download` does the
same and also resumes where a connection broke, and checks what arrived.
"""

from __future__ import annotations

import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import IO

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__, path="", output="")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        path = options.path
        if not path:
            training = service.create_lora_training_client(options.base_model, rank=8)
            path = training.save_weights_for_sampler("to-fetch").result().path
        rest = service.create_rest_client()
        # The service may have to pack it first; that is waited for. The address needs no key.
        archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        print(f"{path}, until {archive.expires}")
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(options.output or scratch)
            with tempfile.TemporaryFile() as file:
                fetch(archive.url, file)
                file.seek(0)
                with tarfile.open(fileobj=file) as packed:
                    packed.extractall(target, filter="data")  # nothing outside of the target
            files = {each.name: each.stat().st_size for each in target.rglob("*") if each.is_file()}
    for name, size in files.items():
        print(f"  {size:>10,}  {name}")
    assert any(name.endswith(".safetensors") for name in files), "no weights in the archive"


def fetch(url: str, file: IO[bytes]) -> None:
    with urllib.request.urlopen(url) as answer:
        total, done = answer.headers.get("content-length", "?"), 0
        while part := answer.read(1 << 20):
            file.write(part)
            done += len(part)
            print(f"{done} of {total} bytes", flush=True)


if __name__ == "__main__":
    main()
