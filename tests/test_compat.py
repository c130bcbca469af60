"""Code written for the official SDK runs with tinkex in its place.

What replaces the official package in a process is tried in processes of its own, so that this one stays
as it is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest

import tinkex
from tinkex import as_tinker, compat
from tinkex._client.runtime import AwaitableConcurrentFuture, SampleFuture

from .scripted import Answer, promise

DATA = Path(__file__).parent / "data"
Python = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Run Python in a new directory, with the given files and environment variables."""

    def run(
        *arguments: str, files: Mapping[str, str] | None = None, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        for name, text in (files or {}).items():
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(dedent(text))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        finished = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == code, finished.stdout + finished.stderr
        return finished

    return run


def installed(script: str) -> tuple[str, str]:
    return "-c", "import tinkex; tinkex.install_as_tinker()\n" + dedent(script)


# -- import paths --------------------------------------------------------------------------------

PATHS = {
    "tinker.lib.public_interfaces": "APIFuture AwaitableConcurrentFuture ServiceClient",
    "tinker.lib.public_interfaces.admin_client": "AdminClient",
    "tinker.lib.public_interfaces.api_future": "APIFuture AwaitableConcurrentFuture",
    "tinker.lib.public_interfaces.rest_client": "RestClient",
    "tinker.lib.public_interfaces.sampling_client": "SamplingClient",
    "tinker.lib.public_interfaces.service_client": "ServiceClient RetryConfig",
    "tinker.lib.public_interfaces.custom_loss": "LossHandle PerDatumLossFn",
    "tinker.lib.public_interfaces.training_client": "CustomLossFnV1 TrainingClient",
    "tinker.lib.api_future_impl": "QueueState QueueStateObserver",
    "tinker.lib.base_url": "DEFAULT_BASE_URL resolve_base_url",
    "tinker.lib.chunked_fwdbwd_helpers": "combine_fwd_bwd_output_results",
    "tinker.lib.experimental": "ExperimentalWarning",
    "tinker.lib.internal_client_holder": "BytesSemaphore InternalClientHolder",
    "tinker.lib.retry_handler": "RetryConfig RetryHandler is_retryable_status_code",
    "tinker.lib.telemetry": "Telemetry capture_exceptions is_user_error",
    "tinker.lib.telemetry_provider": "TelemetryProvider",
    "tinker.lib.retryable_exception": "RetryableException",
    "tinker.types.optimizer": "AdamParams OptimizerConfigBase",
    "tinker.types.tensor_data": "TensorData",
    "tinker.types.image_chunk": "ImageChunk",
    "tinker.types.loss_fn_type": "LossFnType",
    "tinker._exceptions": "APIStatusError RequestFailedError",
    "tinker._models": "BaseModel StrictBase",
    "tinker._response": "APIResponse AsyncAPIResponse",
    "tinker._types": "NOT_GIVEN NotGiven RequestOptions Timeout",
    "tinker._version": "__version__",
    "tinker.auth": "get_tinker_token raise_if_tinker_not_accessible tinker_has_credentials",
    "tinker.proto.request_conv": "forward_backward_request_to_proto",
    "tinker.proto.response_conv": """
        PROTO_SUPPORTED_TYPES deserialize_forward_backward_output deserialize_proto_response
        deserialize_sample_response
    """,
    "tinker.proto.tinker_public_pb2": "DESCRIPTOR",
    "tinker.resources": "",
    "tinker": "AsyncAPIResponse APIResponse RequestOptions Timeout RestClient types auth resources lib",
}


def test_names_are_found_where_public_code_imports_them(python):
    lines = [
        f"from {module} import {', '.join(names.split())}" if names else f"import {module}"
        for module, names in PATHS.items()
    ]
    checks = """
    import tinker
    assert tinker.ServiceClient is tinkex.ServiceClient
    assert tinker.lib.public_interfaces.ServiceClient is tinkex.ServiceClient
    assert tinker.types.tensor_data.TensorData is tinkex.TensorData
    assert BaseModel is not StrictBase and issubclass(tinkex.AdamParams, StrictBase)
    """
    python(*installed("\n".join([*lines, dedent(checks)])))


def test_every_official_module_of_types_can_be_imported(python):
    modules = (DATA / "official_type_modules.txt").read_text().split()
    python(*installed("\n".join(f"import {module}" for module in modules)))


def test_the_root_looks_like_the_official_one(python):
    script = """
    import importlib.metadata, importlib.util, sys
    import tinker
    from tinker import types
    from tinker import *
    assert types is tinker.types is sys.modules["tinker.types"]
    assert types.tensor_data is sys.modules["tinker.types.tensor_data"]
    assert ServiceClient is tinkex.ServiceClient and TensorData is types.TensorData
    assert {"ServiceClient", "Timeout", "auth", "types"} <= set(tinker.__all__) <= set(dir(tinker))
    assert set(tinkex.types.__all__) == set(types.__all__)
    assert tinker.__title__ == "tinker"
    assert tinker.__version__ == importlib.metadata.version("tinker")
    assert tuple(map(int, tinker.__version__.split("."))) >= (0, 19, 0)
    assert importlib.util.find_spec("tinker") is tinker.__spec__
    assert importlib.util.find_spec("tinker.nothing") is None
    assert not hasattr(tinker, "nothing") and not hasattr(tinker, "__wrapped__")
    assert not hasattr(types, "nothing") and not hasattr(tinker.lib, "nothing")
    for name in ("tinker.nothing", "tinker.types.nothing", "tinker.lib.nothing"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            assert error.name == name, error
        else:
            raise AssertionError(name)
    namespace = {}
    exec("from tinker.types.tensor_data import *", namespace)
    assert namespace["TensorData"] is TensorData
    """
    python(*installed(script))


def test_names_can_be_patched_and_restored(python):
    script = """
    from unittest.mock import patch
    import tinker
    with patch("tinker.ServiceClient") as fake:
        assert tinker.ServiceClient is fake
    assert tinker.ServiceClient is tinkex.ServiceClient
    path = "tinker.lib.public_interfaces.training_client.TrainingClient.save_state"
    with patch(path) as fake:
        assert tinkex.TrainingClient.save_state is fake
    assert tinkex.TrainingClient.save_state is not fake
    """
    python(*installed(script))


def test_alias_names_are_found_without_installing():
    assert compat._snake("UntypedAPIFuture") == "untyped_api_future"
    assert compat._snake("ModelID") == "model_id"
    assert not compat._knows("tinkers")
    assert not compat._knows("tinker.types.dtype_of")
    assert "tinker" not in sys.modules


# -- installing ----------------------------------------------------------------------------------

OFFICIAL = {  # files of a fake installed official SDK
    "site/tinker/__init__.py": "from . import types\n__version__ = '0.7.0'\nclass ServiceClient: ...\n",
    "site/tinker/types/__init__.py": "from .tensor_data import TensorData\n",
    "site/tinker/types/tensor_data.py": "class TensorData: ...\n",
    "site/tinker/special.py": "",
    "site/tinker-0.7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinker\nVersion: 0.7.0\n",
}


def test_installing_twice_changes_nothing(python):
    script = """
    import sys
    import tinker
    before = (tinker, list(sys.path), list(sys.meta_path), set(sys.modules))
    tinkex.install_as_tinker()
    import tinker
    assert before == (tinker, list(sys.path), list(sys.meta_path), set(sys.modules))
    """
    python(*installed(script))


def test_installed_official_package_is_not_imported(python):
    script = """
    import importlib.metadata, importlib.util
    import tinker
    assert tinker.ServiceClient is tinkex.ServiceClient
    assert importlib.metadata.version("tinker") == tinker.__version__ == "0.36.0"
    assert importlib.util.find_spec("tinker.special") is None
    """
    python(*installed(script), files=OFFICIAL, PYTHONPATH="site")


def test_imported_official_package_is_replaced(python):
    script = """
    import importlib.metadata, sys
    import tinker as official
    from tinker.types.tensor_data import TensorData as OfficialTensor
    assert official.__version__ == importlib.metadata.version("tinker") == "0.7.0"

    import tinkex
    tinkex.install_as_tinker()

    import tinker
    from tinker.types.tensor_data import TensorData
    assert tinker is not official and tinker.ServiceClient is tinkex.ServiceClient
    assert TensorData is tinkex.TensorData
    assert importlib.metadata.version("tinker") == "0.36.0"
    assert "tinker.special" not in sys.modules
    assert official.types.TensorData is OfficialTensor  # existing references keep the official class
    """
    python("-c", dedent(script), files=OFFICIAL, PYTHONPATH="site")


# -- child processes -----------------------------------------------------------------------------

WORKER = """
    import importlib.metadata

    import tinker
    from tinker.types.tensor_data import TensorData


    def work(tensor):
        assert type(tensor) is TensorData
        return f"{tinker.TensorData.__module__} {importlib.metadata.version('tinker')}"
"""
POOL = """
    import multiprocessing
    import sys
    from concurrent.futures import ProcessPoolExecutor

    import tinker

    count = 0


    def work(tensor):
        return f"{__name__} {type(tensor) is tinker.TensorData} {tinker.TensorData.__module__} {count}"


    if __name__ == "__main__":
        count = 1  # spawned workers import this file again, and must not come here
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            print(pool.submit(work, tinker.TensorData([1], "int64")).result(), sys.argv[1:])
"""
POOL_PRINTS = "__mp_main__ True tinkex.types.tensors 0 ['a', '--b']\n"


@pytest.mark.heavy
def test_spawned_processes_import_tinkex_after_install(python):
    script = """
    import tinkex
    tinkex.install_as_tinker()
    import multiprocessing
    import tinker, worker
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(worker.work, [tinker.TensorData([1], "int64")]))
    """
    finished = python("main.py", files={"main.py": script, "worker.py": WORKER})
    assert finished.stdout == "tinkex.types.tensors 0.36.0\n"


def test_subprocesses_import_tinkex(python):
    main = """
    import os, subprocess, sys
    print(os.environ["PYTHONPATH"])
    script = "import tinker, inherited; print(tinker.TensorData.__module__)"
    subprocess.run([sys.executable, "-c", script], check=True)
    """
    files = {"main.py": main, "site/inherited.py": "", **OFFICIAL}
    again = ("-m", "tinkex.as_tinker") * 2  # one in the other is no different
    finished = python(*again, "main.py", files=files, PYTHONPATH="site")
    path, module = finished.stdout.split("\n", 1)
    assert path == os.pathsep.join([str(compat.SHIM), "site"])
    assert module == "tinkex.types.tensors\n"


# -- python -m tinkex.as_tinker ------------------------------------------------------------------


def test_script_with_a_guarded_process_pool_runs(python):
    finished = python(
        *("-m", "tinkex.as_tinker", "scripts/pool.py", "a", "--b"),
        files={"scripts/pool.py": POOL, **OFFICIAL},
        PYTHONPATH="site",
    )
    assert finished.stdout == POOL_PRINTS


@pytest.mark.heavy
def test_module_with_a_guarded_process_pool_runs(python):
    files = {"package/__init__.py": "", "package/pool.py": POOL, **OFFICIAL}
    module = ("-m", "package.pool", "a", "--b")
    finished = python("-m", "tinkex.as_tinker", *module, files=files, PYTHONPATH="site")
    assert finished.stdout == POOL_PRINTS


def test_script_sees_the_same_argv_and_path_as_under_python(python):
    shown = """
    import sys
    import beside
    print(__name__, sys.argv, sys.modules["__main__"].__dict__ is globals(), __file__)
    """
    files = {
        "scripts/shown.py": shown,
        "scripts/beside.py": "",
        "beside.py": "",
        "module.py": shown,
    }
    script = python("-m", "tinkex.as_tinker", "scripts/shown.py", "-m", "x", files=files)
    assert script.stdout == "__main__ ['scripts/shown.py', '-m', 'x'] True scripts/shown.py\n"
    module = python("-m", "tinkex.as_tinker", "-m", "module", "--flag", files=files)
    plain = python("-m", "module", "--flag", files=files)
    assert module.stdout == plain.stdout


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('broken')", 1, "ValueError: broken\n"),
    ],
)
def test_exit_code_of_the_script_is_returned(python, ending, code, said):
    finished = python("-m", "tinkex.as_tinker", "main.py", files={"main.py": ending}, code=code)
    assert finished.stderr.endswith(said)


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"], ["-m", "-x"]])
def test_wrong_usage_prints_usage_and_exits_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        as_tinker.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("usage: python -m tinkex.as_tinker script.py")
    assert said.out == ""
    assert "tinker" not in sys.modules


def test_script_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        as_tinker.main(["missing.py", "-x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "tinkex.as_tinker: there is no file missing.py\n"


def test_shim_directory_on_the_path_is_enough(python):
    script = "import tinker, tinkex; assert tinker.TensorData is tinkex.TensorData"
    path = os.pathsep.join([str(compat.SHIM), "site"])
    python("-c", script, files=OFFICIAL, PYTHONPATH=path)


# -- clients in mocks and tools -------------------------------------------------------------------


def test_methods_can_be_replaced_on_the_classes(monkeypatch, service):
    async def counted(self, *args, **kwargs):
        return "counted", self.model_id

    training = service().create_lora_training_client("some/model")
    monkeypatch.setattr(tinkex.TrainingClient, "optim_step_async", counted)
    assert asyncio.run(training.optim_step_async()) == ("counted", "s-1:train:0")


def done(value: Any) -> tinkex.APIFuture[Any]:
    future: tinkex.APIFuture[Any] = tinkex.APIFuture()
    future.set_result(value)
    return future


TWINS = [
    (cls, name)
    for cls in (tinkex.TrainingClient, tinkex.SamplingClient, tinkex.RestClient, tinkex.AdminClient)
    for name, _ in inspect.getmembers(cls, inspect.iscoroutinefunction)
    if not name.startswith("_")
    and "APIFuture" in str(inspect.signature(getattr(cls, name.removesuffix("_async"))))
]


@pytest.mark.parametrize(("cls", "name"), TWINS)
def test_async_methods_call_their_plain_twin(cls, name):
    client = MagicMock(spec=cls)
    plain = getattr(client, name.removesuffix("_async"))
    plain.return_value = done("result")
    required = [
        parameter.name
        for parameter in inspect.signature(getattr(cls, name)).parameters.values()
        if parameter.default is parameter.empty and parameter.name != "self"
    ]
    returned = asyncio.run(getattr(cls, name)(client, *required))
    handed_over = cls is tinkex.TrainingClient
    assert returned == (plain.return_value if handed_over else "result")
    assert plain.call_args.args[: len(required)] == tuple(required)


def test_client_classes_work_as_mock_specs():
    sampler = MagicMock(spec=tinkex.SamplingClient)
    assert isinstance(sampler, tinkex.SamplingClient)
    assert isinstance(sampler.sample_async, AsyncMock)
    assert not isinstance(sampler.sample, AsyncMock)
    with pytest.raises(AttributeError):
        _ = sampler.sample_all


def test_subclass_of_a_client_need_not_call_the_constructor():
    class Fake(tinkex.SamplingClient):
        def __init__(self, logprobs: list[float | None]) -> None:
            self.logprobs = logprobs

        async def compute_logprobs_async(  # type: ignore[override]
            self, prompt: tinkex.ModelInput
        ) -> list[float | None]:
            return self.logprobs

    prompt = tinkex.ModelInput.from_ints([1])
    assert asyncio.run(Fake([0.5]).compute_logprobs_async(prompt)) == [0.5]


def test_sampler_is_pickled_with_its_session_id(server, service, python):
    server.on("POST /api/v1/asample", promise("sample"))
    sequence = {"stop_reason": "stop", "tokens": [7], "logprobs": [-0.5]}
    server.on_future("sample", Answer({"sequences": [sequence]}))
    sampler = service().create_sampling_client(base_model="some/model")
    assert sampler._sampling_session_id == "s-1:sample:0"
    script = f"""
    import pickle, tinker
    client = pickle.loads({pickle.dumps(sampler)!r})
    prompt = tinker.ModelInput.from_ints([1])
    print(client.sample(prompt, 1, tinker.SamplingParams(max_tokens=1)).result(30).sequences[0].tokens)
    """
    assert python(*installed(script)).stdout == "[7]\n"
    sent = server.asked("POST /api/v1/asample")[0].json
    assert sent["sampling_session_id"] == "s-1:sample:0"


@pytest.mark.parametrize(
    "call",
    [
        lambda rest: rest.get_checkpoint_archive_url("run", "weights/1").result(10),
        lambda rest: rest.get_checkpoint_archive_url_from_tinker_path(
            "tinker://run/weights/1"
        ).result(10),
        lambda rest: asyncio.run(rest.get_checkpoint_archive_url_async("run", "weights/1")),
        lambda rest: asyncio.run(
            rest.get_checkpoint_archive_url_from_tinker_path_async("tinker://run/weights/1")
        ),
    ],
)
def test_old_archive_url_methods_still_work(server, service, call):
    route = "GET /api/v1/training_runs/run/checkpoints/weights/1/archive"
    server.on(route, Answer(b"", 302, {"location": "http://storage/1.tar"}))
    assert call(service().create_rest_client()).url == "http://storage/1.tar"


# -- futures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [tinkex.APIFuture, SampleFuture])
def test_futures_are_concurrent_futures(cls):
    future: Any = cls()
    called = threading.Event()
    future._future.add_done_callback(lambda _: called.set())
    assert future._future is future.future() is future
    future._future.set_result(1)
    assert called.is_set()
    assert future.result(0) == 1
    assert isinstance(future, concurrent.futures.Future)


def test_sample_returns_a_concurrent_future(server, service):
    server.on("POST /api/v1/asample", promise("sample"))
    server.on_future("sample", Answer({"sequences": []}))
    sampler = service().create_sampling_client(base_model="some/model")
    future = sampler.sample(tinkex.ModelInput.from_ints([1]), 1, tinkex.SamplingParams())
    finished, _ = concurrent.futures.wait([future], 10)
    assert [one.result().sequences for one in finished] == [[]]


class Immediate(tinkex.APIFuture[Any]):
    """Derives from the future class as public code derives from the official abstract class."""

    def __init__(self, value: Any) -> None:
        self._future = value
        self.value = value

    def result(self, timeout: float | None = None) -> Any:
        return self.value

    async def result_async(self, timeout: float | None = None) -> Any:
        return self.value


def test_user_classes_can_derive_from_the_future_class():
    async def awaited(future: tinkex.APIFuture[Any]) -> Any:
        return await future

    assert Immediate(3).result() == 3
    assert Immediate(3)._future == 3
    assert asyncio.run(awaited(Immediate(3))) == 3


def test_derived_future_can_use_inherited_waiting():
    class Doubled(AwaitableConcurrentFuture[int]):
        async def result_async(self, timeout: float | None = None) -> int:
            return 2 * await super().result_async(timeout)

    async def awaited() -> int:
        inner: concurrent.futures.Future[int] = concurrent.futures.Future()
        future = Doubled(inner)
        asyncio.get_running_loop().call_soon(inner.set_result, 2)
        return await future

    assert asyncio.run(awaited()) == 4


def test_any_concurrent_future_can_be_made_awaitable():
    async def both(future: tinkex.APIFuture[int]) -> tuple[int, int]:
        return await future, await future.result_async(1)

    inner: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = AwaitableConcurrentFuture(inner)
    assert future.future() is future._future is inner
    assert not future.done()
    inner.set_result(1)
    assert future.result(0) == 1
    assert asyncio.run(both(future)) == (1, 1)


def test_awaitable_future_fails_and_is_cancelled_with_its_wrapped_future():
    failed: concurrent.futures.Future[int] = concurrent.futures.Future()
    failed.set_exception(KeyError("x"))
    with pytest.raises(KeyError):
        AwaitableConcurrentFuture(failed).result(0)
    inner: concurrent.futures.Future[int] = concurrent.futures.Future()
    future = AwaitableConcurrentFuture(inner)
    inner.cancel()
    assert future.cancelled()
    other: concurrent.futures.Future[int] = concurrent.futures.Future()
    AwaitableConcurrentFuture(other).cancel()
    assert other.cancelled()
    late = AwaitableConcurrentFuture(running := concurrent.futures.Future[int]())
    running.set_running_or_notify_cancel()
    late.cancel()
    running.set_result(1)  # the outer future is cancelled already
    assert late.cancelled()


# -- errors and types made by hand ---------------------------------------------------------------


class ForeignResponse:
    """Like a response of an HTTP library without its request."""

    status_code = 400
    headers = {"x-request-id": "r-1"}

    @property
    def request(self):
        raise RuntimeError("there is no request")


def test_status_errors_can_be_constructed_by_hand():
    error = tinkex.BadRequestError("too long", response=ForeignResponse(), body={"detail": "x"})
    assert isinstance(error, tinkex.APIStatusError)
    assert (error.status_code, error.request_id, error.body) == (400, "r-1", {"detail": "x"})
    assert "too long" in str(error)
    assert error.message == "too long"
    assert tinkex.RateLimitError("slow", response=MagicMock(status_code=429), body=None).retryable


def test_status_errors_accept_httpx_responses():
    import httpx

    bare = httpx.Response(400, headers={"X-Request-Id": "r-2"})
    assert tinkex.BadRequestError("no", response=bare, body=None).request_id == "r-2"
    asked = httpx.Response(404, request=httpx.Request("GET", "http://service"))
    assert tinkex.NotFoundError("no", response=asked, body=None).request.method == "GET"


def test_tensors_by_keyword_and_by_conversion():
    torch = pytest.importorskip("torch")
    tensor = tinkex.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])
    assert tensor.tolist() == [[1, 2], [3, 4]]
    assert tensor.data == [1, 2, 3, 4]
    assert tinkex.TensorData(data=[0.5], dtype="float32").shape in ([1], None)
    assert tinkex.TensorData.from_numpy(np.ones((2, 1))).dtype == "float32"
    assert tinkex.TensorData.from_torch(torch.tensor([1.5])).tolist() == [1.5]


def test_sparse_tensors_with_a_pad_value():
    torch = pytest.importorskip("torch")
    padded = torch.full((3, 8), -1)
    padded[1, 2] = 5
    tensor = tinkex.TensorData.from_torch_sparse(padded, pad_value=-1)
    assert (tensor.sparse_crow_indices, tensor.sparse_col_indices) == ([0, 0, 1, 1], [2])
    assert tensor.data == [5]
    assert torch.equal(tensor.to_torch(pad_value=-1), padded)


@pytest.mark.parametrize(
    "rubbish",
    ["", "rubbish", "tinker://", "tinker://run", "tinker://run/what/x", "http://a/weights/1"],
)
def test_invalid_paths_raise_value_errors(rubbish):
    with pytest.raises(ValueError, match="tinker_path"):
        tinkex.ParsedCheckpointTinkerPath.from_tinker_path(rubbish)
