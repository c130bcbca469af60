"""Our client and the official one against the same stand-in service: python benchmarks/clients.py"""

import socket
import subprocess
import sys

from side_by_side import HERE, both, measure, table


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


if __name__ == "__main__":
    port = free_port()
    service = subprocess.Popen(
        [sys.executable, str(HERE / "stand_in.py"), port], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    assert service.stdout.readline().strip() == "ready"
    try:
        table(*both("measure_client.py", port))
        print("\nten times as many samples under way:")
        for name, value in measure(
            sys.executable, "measure_client.py", "tinkex", port, "growth"
        ).items():
            print(f"{name:34}{value:>12.2f}")
    finally:
        service.terminate()
        service.wait()
