"""What telemetry adds to a sample: python benchmarks/telemetry.py [SAMPLES ROUNDS]"""

import subprocess
import sys

from clients import free_port
from side_by_side import HERE, measure

if __name__ == "__main__":
    port = free_port()
    service = subprocess.Popen(
        [sys.executable, str(HERE / "stand_in.py"), port], stdout=subprocess.PIPE, text=True
    )
    assert service.stdout is not None
    assert service.stdout.readline().strip() == "ready"
    try:
        figures = measure(sys.executable, "measure_telemetry.py", port, *sys.argv[1:])
        print(f"{'listening':34}{'CPU µs/sample':>14}{'more':>9}")
        for name, value in figures.items():
            print(f"{name:34}{value:>14.1f}{value / figures['nobody'] - 1:>9.1%}")
    finally:
        service.terminate()
        service.wait()
