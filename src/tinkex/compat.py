"""tinkex in place of the official SDK.

After `install_as_tinker()`, `import tinker`, `from tinker import types`, `tinker.lib.public_interfaces…` and the
version of the distribution `tinker` come from tinkex. The modules are created on import from the table below;
nothing else in the process changes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import tinkex

from ._version import PARITY_VERSION

__all__ = ["SHIM", "install_as_tinker"]

#: On the import path of any Python process, this directory makes tinkex its `tinker`.
SHIM: Final = Path(__file__).parent / "_shim"

#: Official module → the tinkex modules that have its names, and the names that tinkex spells differently.
_ALIASES: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "_exceptions": (("tinkex.errors",), {}),
    "_models": (
        (),
        {
            "BaseModel": "tinkex.types._base:ResponseModel",
            "StrictBase": "tinkex.types._base:RequestModel",
        },
    ),
    "_response": (
        ("tinkex._client.http",),
        {"AsyncAPIResponse": "tinkex._client.http:APIResponse"},
    ),
    "_types": (
        ("tinkex._wire.transform",),
        {
            "RequestOptions": "tinkex._client.options:RequestOptions",
            "Timeout": "tinkex._client.options:Timeout",
        },
    ),
    "_version": ((), {"__version__": "tinkex._version:PARITY_VERSION"}),
    "auth": (("tinkex._client.auth",), {}),
    "lib": ((), {}),
    "lib.api_future_impl": (
        ("tinkex._client.runtime", "tinkex.types"),
        {"QueueStateObserver": "tinkex._client.queue_state:Observer"},
    ),
    "lib.base_url": (
        (),
        {
            "DEFAULT_BASE_URL": "tinkex.config:DEFAULT_BASE_URL",
            "resolve_base_url": "tinkex._client.official:resolve_base_url",
        },
    ),
    "lib.chunked_fwdbwd_helpers": (
        (),
        {"combine_fwd_bwd_output_results": "tinkex._client.chunking:combine"},
    ),
    "lib.experimental": ((), {"ExperimentalWarning": "tinkex.errors:ExperimentalWarning"}),
    "lib.internal_client_holder": (
        ("tinkex._client.session",),
        {
            "BytesSemaphore": "tinkex._client.official:BytesSemaphore",
            "InternalClientHolder": "tinkex._client.session:Session",
        },
    ),
    "lib.public_interfaces": (("tinkex", "tinkex._client.runtime"), {}),
    "lib.public_interfaces.admin_client": (("tinkex",), {}),
    "lib.public_interfaces.api_future": (("tinkex", "tinkex._client.runtime"), {}),
    "lib.public_interfaces.custom_loss": (("tinkex._client.traced_loss",), {}),
    "lib.public_interfaces.rest_client": (("tinkex",), {}),
    "lib.public_interfaces.sampling_client": (("tinkex",), {}),
    "lib.public_interfaces.service_client": (("tinkex",), {}),
    "lib.public_interfaces.training_client": (
        ("tinkex", "tinkex._client.custom_loss"),
        {"CustomLossFnV1": "tinkex._client.custom_loss:CustomLossFn"},
    ),
    "lib.retry_handler": (
        ("tinkex._client.retry",),
        {
            "RetryHandler": "tinkex._client.official:RetryHandler",
            "is_retryable_status_code": "tinkex._client.retry:retryable_status",
        },
    ),
    "lib.retryable_exception": ((), {"RetryableException": "tinkex.errors:GoneError"}),
    "lib.telemetry": (
        (),
        {
            "Telemetry": "tinkex.telemetry.reporter:Reporter",
            "capture_exceptions": "tinkex._client.official:capture_exceptions",
            "is_user_error": "tinkex._client.official:is_user_error",
        },
    ),
    "lib.telemetry_provider": (
        (),
        {"TelemetryProvider": "tinkex._client.official:TelemetryProvider"},
    ),
    "proto": ((), {}),
    "proto.request_conv": (
        (),
        {
            "forward_backward_request_to_proto": "tinkex._client.official:forward_backward_request_to_proto"
        },
    ),
    "proto.response_conv": (
        (),
        {
            "PROTO_SUPPORTED_TYPES": "tinkex._client.official:PROTO_SUPPORTED_TYPES",
            "deserialize_proto_response": "tinkex._client.official:deserialize_proto_response",
            "deserialize_forward_backward_output": "tinkex._wire.proto_codec:decode_forward_backward_output",
            "deserialize_sample_response": "tinkex._wire.proto_codec:decode_sample_response",
        },
    ),
    "proto.tinker_public_pb2": (("tinkex._wire.tinkex_pb2",), {}),
    "resources": ((), {}),
    "types": (("tinkex.types",), {}),
    "types.optimizer": (
        ("tinkex.types",),
        {"OptimizerConfigBase": "tinkex.types:OptimizerConfig"},
    ),
}

#: Names at the root of `tinker` that tinkex has elsewhere.
_ROOT: Final = {
    "AsyncAPIResponse": "tinkex._client.http:APIResponse",
    "RequestOptions": "tinkex._client.options:RequestOptions",
    "Timeout": "tinkex._client.options:Timeout",
}


def install_as_tinker() -> None:
    """Make `import tinker` import tinkex, in this process and in those it spawns.

    An installed official SDK stays installed but is no longer found. If it is imported already, later imports
    get tinkex.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if (
        str(SHIM) not in sys.path
    ):  # has the distribution's metadata; spawned children inherit the path
        sys.path.insert(0, str(SHIM))
    for name in [name for name in sys.modules if name == "tinker" or name.startswith("tinker.")]:
        if not isinstance(sys.modules[name], _Alias):
            del sys.modules[name]
    import_module("tinker")


class _Alias(ModuleType):
    """A module that looks up its names in other modules."""

    def __init__(self, name: str, homes: Sequence[str], renamed: dict[str, str]) -> None:
        super().__init__(name, f"{name}, provided by tinkex.")
        self._homes = tuple(homes)
        self._renamed = renamed
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = self._find(name)
        setattr(self, name, value)
        return value

    def _find(self, name: str) -> Any:
        if name in self._renamed:
            module, _, attribute = self._renamed[name].partition(":")
            return getattr(import_module(module), attribute)
        if name == "__all__":
            return sorted(self._exported())
        if not name.startswith("__"):
            child = f"{self.__name__}.{name}"
            if _knows(child):
                return import_module(child)
            for home in self._homes:
                try:
                    return getattr(import_module(home), name)
                except AttributeError:
                    continue
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def _exported(self) -> set[str]:
        homes = map(import_module, self._homes)
        listed = {name for home in homes for name in getattr(home, "__all__", dir(home))}
        return listed | self._renamed.keys()

    def __dir__(self) -> list[str]:
        return sorted(self._exported() | set(super().__dir__()))


class _Finder(MetaPathFinder, Loader):
    """Finds `tinker` and its submodules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _knows(name):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if spec.name == "tinker":
            root = _Alias("tinker", ("tinkex",), _ROOT)
            root.__version__ = PARITY_VERSION  # type: ignore[attr-defined]
            root.__title__ = "tinker"  # type: ignore[attr-defined]
            root.__all__ = _root_names()  # type: ignore[attr-defined]
            return root
        inner = spec.name.removeprefix("tinker.")
        return _Alias(spec.name, *_ALIASES.get(inner, _ALIASES["types"]))

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up on first use."""


def _root_names() -> list[str]:
    return sorted({*dir(tinkex), *_ROOT, "auth"} - {"config", "errors"})


def _knows(name: str) -> bool:
    if name == "tinker":
        return True
    inner = name.removeprefix("tinker.")
    if inner == name:
        return False
    return inner in _ALIASES or _is_module_of_types(inner)


def _is_module_of_types(inner: str) -> bool:
    """Whether it is one of the official one-type modules, such as `types.tensor_data` for TensorData."""
    package, _, module = inner.rpartition(".")
    if inner in {"types.shared", "types._pydantic_types"}:
        return True
    if package not in {"types", "types.shared", "types._pydantic_types"}:
        return False
    return module in _snake_names()


@cache
def _snake_names() -> frozenset[str]:
    types = [name for name in dir(tinkex.types) if name[0].isupper()]
    return frozenset({*map(_snake, types), *_GROUPED})


#: Official modules that are not named after one type.
_GROUPED: Final = (
    "billing_usage_request",
    "current_checkpoint_storage_usage_request",
)


def _snake(name: str) -> str:
    """`UntypedAPIFuture` → `untyped_api_future`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
