"""Memory of client and service during the download of a large checkpoint over a breaking connection.

    python benchmarks/download.py [--megabytes 1024] [--cuts 2]

A real service, with the fake engine, holds a checkpoint of that size. A client in a process of its own downloads it
through a proxy that resets the connection on its way. Figures are the growth of resident memory from before the
download to its peak, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cutting import CuttingProxy

TINY = "tinkex/tiny"
WEIGHTS = "adapter_model.safetensors"
MB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--cuts", type=int, default=2)
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        download(*options.client)
        return
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        command = [sys.executable, "-m", "tinkex", "serve", "--engine=fake", "--port=0"]
        service = subprocess.Popen(
            [*command, f"--base-model={TINY}", f"--data-dir={place / 'data'}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert service.stdout is not None
            url = re.search(r"http://\S+", service.stdout.readline())
            assert url is not None
            path = large_checkpoint(url[0], place / "data", options.megabytes)
            measure(service.pid, url[0], path, place / "out", options.megabytes, options.cuts)
        finally:
            service.terminate()
            service.wait()


def large_checkpoint(url: str, data_dir: Path, megabytes: int) -> str:
    """Save a checkpoint and enlarge its weights to those of a large model."""
    import tinkex

    with tinkex.ServiceClient(base_url=url, api_key="tml-benchmark") as client:
        saved = client.create_lora_training_client(TINY).save_state("large").result().path
    (place,) = (data_dir / "checkpoints").glob("*/training/large")
    digest = hashlib.sha256()
    with (place / WEIGHTS).open("wb") as file:
        for _ in range(megabytes):
            part = os.urandom(MB)
            digest.update(part)
            file.write(part)
    manifest = json.loads((place / "tinkex.json").read_text())
    manifest["sha256"][WEIGHTS] = digest.hexdigest()
    (place / "tinkex.json").write_text(json.dumps(manifest))
    return str(saved)


def measure(pid: int, url: str, path: str, out: Path, megabytes: int, cuts: int) -> None:
    # Each connection transfers an equal part and is then reset.
    each = megabytes * MB // (cuts + 1)
    with CuttingProxy(url, [each] * cuts) as proxy:
        before = reset_peak(pid)
        command = [sys.executable, __file__, "--client", proxy.url, path, str(out)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(done.stdout)
        figures["service_growth_mb"] = round((memory(pid, "VmHWM") - before) / MB, 1)
        figures["connections_cut"] = proxy.cut
    (place,) = out.iterdir()
    figures["megabytes_on_disk"] = sum(file.stat().st_size for file in place.iterdir()) // MB
    assert proxy.cut == cuts
    print(json.dumps(figures, indent=1))


def download(url: str, path: str, out: str) -> None:
    """What the client's process does."""
    import tinkex
    from tinkex._client.downloads import download_checkpoint

    with tinkex.ServiceClient(base_url=url, api_key="tml-benchmark") as client:
        rest = client.create_rest_client()
        rest.get_weights_info_by_tinker_path(path).result()  # connected, and everything imported
        before, started = reset_peak(os.getpid()), time.perf_counter()
        download_checkpoint(rest, path, Path(out))
        seconds = time.perf_counter() - started
        growth = memory(os.getpid(), "VmHWM") - before
    figures = {"client_growth_mb": round(growth / MB, 1), "seconds": round(seconds, 2)}
    print(json.dumps(figures))


def reset_peak(pid: int) -> int:
    """Reset the kernel's memory peak of a process; returns its current memory in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory(pid, "VmRSS")


def memory(pid: int, name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
