"""Compile `tinkex.proto`, in a separate environment, because the compiler pins protobuf.

python scripts/generate_proto.py [--check]

The compiler is old on purpose: its output runs on every protobuf release from 6.31 on.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIRE = ROOT / "src" / "tinkex" / "_wire"
COMPILER = "grpcio-tools==1.74.0"
OUTPUTS = ("tinkex_pb2.py", "tinkex_pb2.pyi")


def compiler() -> Path:
    environment = ROOT / ".scratch" / "protoc"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", COMPILER], check=True)
    return python


def generate(target: Path) -> None:
    flags = [f"--python_out={target}", f"--pyi_out={target}", f"--proto_path={WIRE}"]
    subprocess.run([compiler(), "-m", "grpc_tools.protoc", *flags, "tinkex.proto"], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the output is out of date")
    if not parser.parse_args().check:
        generate(WIRE)
        return 0
    with tempfile.TemporaryDirectory() as fresh:
        generate(Path(fresh))
        stale = [
            name
            for name in OUTPUTS
            if (Path(fresh) / name).read_text() != (WIRE / name).read_text()
        ]
    for name in stale:
        print(f"{name} is out of date: run scripts/generate_proto.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
