"""vLLM as a sampler, with a stand-in for vLLM: every sample is of its own adapter, and errors are clear."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest

from tinkex.engine.base_models import parse_spec, prepare
from tinkex.engine.group_memory import GroupMemory, shared_files
from tinkex.engine.values import SampledResult, SampleJob
from tinkex.engine.vllm_engine import can_draw
from tinkex.errors import ConfigError
from tinkex.server.drift import Drift, checking_job
from tinkex.server.other_python import _OLD, check_python
from tinkex.server.service import Settings
from tinkex.server.worker import _ELSEWHERE
from tinkex.testing import service

from ..cancelling import cancelled_in
from ..processes import children, command
from .api import Api, Sampler

STAND_IN = Path(__file__).parent.parent / "data" / "vllm_stand_in"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter in whose environment the stand-in is installed."""
    script = tmp_path_factory.mktemp("bin") / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture
def running(python, tmp_path):
    with service(
        "fake",
        data_dir=tmp_path,
        sampler="vllm",
        sampler_python=python,
        device="cpu",
        dtype="float32",
        vllm_max_rank=16,
    ) as made:
        yield made


def expected(data_dir: Path, checkpoint: str, prompt, seed, count):
    """What the stand-in draws from the weights of a checkpoint."""
    name = checkpoint.rpartition("/")[2]
    (directory,) = data_dir.glob(f"checkpoints/*/*/{name}")
    return drawn_by_stand_in(directory, prompt, seed, count)


def drawn_by_stand_in(directory: Path, prompt, seed, count) -> list[int]:
    weights = hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()
    drawn = []
    for position in range(count):
        text = f"{weights} {list(prompt)} {seed} {position}"
        drawn.append(int(hashlib.sha256(text.encode()).hexdigest(), 16) % 250)
    return drawn


def test_samples_of_many_adapters_are_each_of_its_own(running):
    with Api(running.url) as api:
        model = api.model()
        samplers, paths = [], []
        for number in range(12):
            model.step()
            paths.append(model.save(f"w{number}", "save_weights_for_sampler"))
            samplers.append(api.sampler(model.session_id, 10 + number, model_path=paths[-1]))
        asked = [
            (number % 12, number, samplers[number % 12].send([5, 6], seed=number, max_tokens=4))
            for number in range(100)
        ]
        for which, seed, promise in asked:
            (sequence,) = api.retrieve(promise)["sequences"]
            assert sequence["tokens"] == expected(running.data_dir, paths[which], [5, 6], seed, 4)
            assert sequence["stop_reason"] == "length"


def test_adapter_that_two_samplers_share_outlives_the_first(running):
    """VLLM reads an adapter again that it has evicted, from the files that it was opened with."""
    with Api(running.url) as api:
        model = api.model()
        model.step()
        path = model.save("shared", "save_weights_for_sampler")
        first, second = (api.sampler(model_path=path) for _ in range(2))
        own = expected(running.data_dir, path, [5, 6], 1, 4)
        for sampler in (first, second):
            assert sampler.tokens([5, 6], seed=1, max_tokens=4) == [own]
        end_session(api, first)
        assert second.tokens([5, 6], seed=1, max_tokens=4) == [own]
        end_session(api, second)
        assert list((running.data_dir / "samplers").iterdir()) == []


def end_session(api: Api, sampler: Sampler) -> None:
    session_id = sampler.sampler_id.partition(":")[0]
    api.told(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})


def test_several_samples_top_logprobs_and_prompt_logprobs(running):
    with Api(running.url) as api:
        sampler = api.sampler()
        fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 0}
        result = sampler.sample([5, 6, 7], 3, fields, max_tokens=2, seed=1)
        assert len({tuple(each["tokens"]) for each in result["sequences"]}) == 3
        assert result["prompt_logprobs"] == [None, -0.5, -0.5]


def test_killed_vllm_is_started_again_and_samples_are_repeated(running):
    with Api(running.url) as api:
        sampler = api.sampler()
        before = sampler.tokens([5, 6], seed=3)
        (pid,) = vllm_pids()
        os.kill(pid, signal.SIGKILL)
        assert sampler.tokens([5, 6], seed=3) == before
        restarts = {each["name"]: each["restarts"] for each in api.got("healthz")["engines"]}
        assert restarts == {"engine-0": 0, "vllm": 1}


def test_vllm_is_started_again_when_only_its_core_has_died(running):
    """VLLM itself lives on then, and fails every request or waits for ever."""
    with Api(running.url) as api:
        sampler = api.sampler()
        before = sampler.tokens([5, 6], seed=3)
        (leader,) = vllm_pids()
        (core,) = [pid for pid in group(leader) if b"spawn_main" in command(pid)]
        with open_pidfd(leader) as ended:
            os.kill(core, signal.SIGKILL)
            assert select.select([ended], [], [], 60)[0]
        assert sampler.tokens([5, 6], seed=3) == before
        restarts = {each["name"]: each["restarts"] for each in api.got("healthz")["engines"]}
        assert restarts == {"engine-0": 0, "vllm": 1}


def test_cancelled_sample_leaves_vllm(python, tmp_path):
    tiny = prepare(parse_spec("tinkex/tiny"), tmp_path / "cache").directory
    assert cancelled_in(python, tiny) == "3 1 2"


def test_invalid_prompt_and_broken_adapter_fail_their_own_request(running):
    with Api(running.url) as api:
        answer = api.sampler().sample([5, 10**6])
        assert "outside the vocabulary" in answer["error"]
        assert answer["category"] == "user"
        model = api.model()
        model.forward_backward()
        api.retrieve(model.optim_step(learning_rate=1e300))
        path = model.save("broken", "save_weights_for_sampler")
        answer = api.sampler(model_path=path).sample([5, 6])
        assert "does not give finite logits" in answer["error"]
        assert answer["category"] == "user"


def test_processes_that_vllm_starts_end_with_it(running):
    (first,) = vllm_pids()
    started = group(first)
    assert len(started) > 1
    with contextlib.ExitStack() as opened:
        ended = [opened.enter_context(open_pidfd(pid)) for pid in started]
        os.kill(first, signal.SIGKILL)
        with Api(running.url) as api:
            assert api.sampler().tokens([5, 6])  # vLLM has been started again
        for each in ended:
            assert select.select([each], [], [], 60)[0]


def test_shared_memory_of_a_killed_vllm_is_removed(running):
    (first,) = vllm_pids()
    (file,) = shared_files(first)
    os.kill(first, signal.SIGKILL)
    with Api(running.url) as api:
        assert api.sampler().tokens([5, 6])  # vLLM has been started again
    assert not file.exists()
    (second,) = vllm_pids()
    (other,) = shared_files(second)
    assert other.exists()


@pytest.mark.heavy
def test_shared_memory_of_vllm_is_removed_when_its_service_is_killed(python, tmp_path):
    script = (
        "import sys, pathlib; from tinkex.testing import service\n"
        f"with service('fake', data_dir={str(tmp_path)!r}, sampler='vllm', device='cpu', dtype='float32',"
        f" sampler_python=pathlib.Path({str(python)!r})):\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with killed:
        assert killed.stdout is not None
        killed.stdout.readline()
        (leader,) = vllm_pids(killed.pid)
        (file,) = shared_files(leader)
        with open_pidfd(leader) as ended:
            killed.kill()
            assert select.select([ended], [], [], 60)[0]
    assert not file.exists()


@contextlib.contextmanager
def open_pidfd(pid: int):
    """A descriptor that is readable when the process has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_file_that_has_taken_the_name_of_an_older_one_is_not_removed():
    memory = GroupMemory(os.getpgrp())
    shared = SharedMemory(create=True, size=64)
    memory.look()
    shared.unlink()
    second = SharedMemory(shared.name, create=True, size=64)
    memory.remove()
    second.unlink()  # raises if it is gone
    for each in (shared, second):
        each.close()


def group(leader: int) -> list[int]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state != "Z":
                found.append(int(stat.parent.name))
    return found


def vllm_pids(parent: int | None = None) -> list[int]:
    return [pid for pid in children(parent) if _ELSEWHERE.encode() in command(pid)]


def test_adapter_that_vllm_cannot_hold_is_an_error_not_the_base_model(running):
    with Api(running.url) as api:
        model = api.model(lora_config={"rank": 32, "seed": 1})
        model.step()
        path = model.save("large", "save_weights_for_sampler")
        sampler = api.sampler(model.session_id, 9, model_path=path)
        answer = sampler.sample([5, 6])
        assert "rank 32" in answer["error"]
        assert "vllm_max_rank" in answer["error"]
        assert answer["category"] == "user"


def test_metrics_say_how_far_samples_are_from_the_trainer(running):
    with Api(running.url) as api:
        text = api.http.get("/metrics").text
        assert 'tinkex_sampler_drift_tokens_total{engine="vllm"} 0.0' in text
        assert 'kind="vllm"' in text


@pytest.mark.heavy
def test_environment_without_vllm_is_refused_and_says_what_to_install(tmp_path):
    python = Path(sys.executable)
    with (
        pytest.raises(ConfigError, match="pip install vllm"),
        service("fake", data_dir=tmp_path, sampler="vllm", sampler_python=python, device="cpu"),
    ):
        pass


def test_sampler_python_that_is_no_python_is_named_in_the_refusal(tmp_path):
    python = Path("/bin/true")
    with (
        pytest.raises(ConfigError, match="/bin/true is no Python; give the Python") as refused,
        service("fake", data_dir=tmp_path, sampler="vllm", sampler_python=python, device="cpu"),
    ):
        pass
    assert refused.value.field == "sampler_python"


@pytest.mark.parametrize(
    ("text", "seconds", "reason"),
    [
        ("no program", 60.0, "cannot be run (Exec format error); give the Python"),
        ("#!/bin/sh\nsleep 1000", 0.2, "did not answer within 0.2 s; give the Python"),
        (f"#!/bin/sh\nexit {_OLD}", 60.0, "is older than Python 3.11"),
    ],
)
def test_file_that_is_no_python_of_use_is_refused_with_the_reason(tmp_path, text, seconds, reason):
    file = tmp_path / "python"
    file.write_text(text)
    file.chmod(0o755)
    with pytest.raises(ConfigError) as refused:
        check_python(file, seconds)
    assert reason in str(refused.value)


def test_this_python_is_of_use():
    check_python(Path(sys.executable))


def test_start_fails_with_the_reason_if_vllm_cannot_load_the_architecture(python, tmp_path):
    known = prepare(parse_spec("tinkex/tiny"), tmp_path / "cache").directory
    odd = shutil.copytree(known, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"architectures": ["OddForCausalLM"]}))
    with (
        pytest.raises(ConfigError, match=r"vLLM cannot serve odd: .*OddForCausalLM") as refused,
        service(
            "fake",
            (f"odd={odd}",),
            data_dir=tmp_path / "data",
            sampler="vllm",
            sampler_python=python,
            device="cpu",
            dtype="float32",
        ),
    ):
        pass
    assert refused.value.field == "sampler"


def test_vllm_serves_one_base_model(python, tmp_path):
    two = ("tinkex/tiny", "other=tinkex/tiny")
    with (
        pytest.raises(ConfigError, match="one base model"),
        service(
            "fake", two, data_dir=tmp_path, sampler="vllm", sampler_python=python, device="cpu"
        ),
    ):
        pass


def test_settings_of_vllm_are_checked(tmp_path):
    for wrong, field in (
        ({"sampler_python": tmp_path / "nothing"}, "sampler_python"),
        ({"sampler_python": Path(sys.executable)}, "sampler_python"),  # without vLLM
        ({"vllm_max_rank": 0}, "vllm_max_rank"),
        ({"vllm_memory_share": 1.5}, "vllm_memory_share"),
        ({"vllm_max_loras": 0}, "vllm_max_loras"),
        ({"vllm_kept_loras": 0}, "vllm_kept_loras"),
        ({"vllm_cpu_cache_gb": 0}, "vllm_cpu_cache_gb"),
    ):
        with pytest.raises(ConfigError) as refused:
            Settings(tmp_path, **wrong)
        assert refused.value.field == field


@pytest.mark.parametrize(
    "options",
    [
        {"kept_mass": True},
        {"logit_bias": ((1, 2.0),)},
        {"presence_penalty": 0.5},
        {"topk_prompt_logprobs": 2},
        {"target_prompt_tokens": np.zeros((2, 1))},
    ],
)
def test_jobs_that_vllm_would_sample_differently_go_to_the_torch_engine(options):
    assert can_draw(SampleJob("s", np.arange(2), prompt_logprobs=True, top_k=3, min_p=0.1))
    assert not can_draw(SampleJob("s", np.arange(2), **options))


def test_drift_is_the_difference_on_a_share_of_plain_requests():
    drift = Drift(chance=lambda: 0.0)
    job = SampleJob("s", np.array([1, 2]), num_samples=2)
    result = SampledResult([np.array([7, 8])] * 2, [np.array([-1.0, -2.0])] * 2, ["stop"] * 2)
    assert drift.wants(job, result)
    assert not drift.wants(SampleJob("s", np.array([1]), temperature=0.5), result)
    assert not Drift(chance=lambda: 0.9).wants(job, result)
    asked = checking_job(job, result)
    assert asked.prompt_T.tolist() == [1, 2, 7, 8]
    assert asked.first_scored == 2
    drift.add(result.logprobs[0], np.array([-1.5, -2.25]))
    assert (drift.tokens, drift.total, drift.worst) == (2, 0.75, 0.5)
