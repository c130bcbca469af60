"""Cancels one of two samples in vLLM, or its stand-in: `python cancelling.py SOURCE MODEL`, in vLLM's own Python.

Prints how many requests vLLM has before and after, and the jobs that still get tokens.
"""

import sys
from pathlib import Path


def main(source: str, model: str) -> None:
    sys.path.insert(0, source)
    import numpy as np

    from tinkex.engine.base_models import parse_spec, prepare
    from tinkex.engine.values import SampleJob, VllmOptions
    from tinkex.engine.vllm_engine import VllmEngine

    prepared = prepare(parse_spec(f"small={model}"), Path(model).parent)
    engine = VllmEngine(prepared, "float32", VllmOptions(eager=True))
    engine.open_sampler("s", "small")
    for job_id, count in (("1", 2), ("2", 1)):
        job = SampleJob(
            "s", np.arange(5, 9), count, max_tokens=200, seed=1, stop_tokens=(), stream=True
        )
        engine.add_sample(job_id, job)
    while len({event.job_id for event in engine.sample_step()}) < 2:
        pass
    before = engine._engine.get_num_unfinished_requests()
    engine.cancel_sample("1")
    after = engine._engine.get_num_unfinished_requests()
    drawn = {event.job_id for _ in range(8) for event in engine.sample_step()}
    sys.stdout.write(f"{before} {after} {' '.join(sorted(drawn))}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
