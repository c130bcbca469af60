"""The public API, compared with the official package: names, fields, parameters, import costs."""

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel

import tinkex
from tinkex import types
from tinkex.types.sampling import EXTENSIONS

OFFICIAL = json.loads((Path(__file__).parent / "data" / "official_api.json").read_text())
ROOT = Path(tinkex.__file__)

# -- names imported at their first use -----------------------------------------------------------

LAZY = {
    "tinkex": ("config", "errors", "objectives", "recovery", "regularizers", "telemetry", "types"),
    "tinkex.regularizers": (),
    "tinkex.telemetry": ("events",),
    "tinkex.types": (),
}
each_lazy_package = pytest.mark.parametrize("package", LAZY)


def homes(package: str) -> dict[str, str]:
    """The module of each name."""
    table: dict[str, str] = importlib.import_module(package)._NAMES
    return {name: home for home, names in table.items() for name in names.split()}


@each_lazy_package
def test_names_are_sorted_and_listed_once(package):
    names = importlib.import_module(package).__all__
    assert names == sorted(set(names))
    assert set(names) - {"__title__", "__version__"} == {*homes(package), *LAZY[package]}


@each_lazy_package
def test_every_name_can_be_imported(package):
    module = importlib.import_module(package)
    namespace: dict[str, Any] = {}
    exec(f"from {package} import *", namespace)
    assert set(module.__all__) <= set(namespace)
    assert dir(module) == module.__all__


@each_lazy_package
def test_other_names_are_attribute_errors(package):
    module = importlib.import_module(package)
    with pytest.raises(
        AttributeError, match=f"module '{package}' has no attribute 'ServiceKlient'"
    ):
        _ = module.ServiceKlient
    assert not hasattr(module, "import_module")


@each_lazy_package
def test_names_are_the_same_objects_as_in_their_modules(package):
    module = importlib.import_module(package)
    for name, home in homes(package).items():
        assert getattr(module, name) is getattr(importlib.import_module(home, package), name)


def imports_for_type_checkers(package: str) -> Iterator[tuple[str, str]]:
    """Name and home of everything imported under `if TYPE_CHECKING`."""
    for node in ast.parse(inspect.getsource(importlib.import_module(package))).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
                home = "." * statement.level + (statement.module or "")
                for alias in statement.names:
                    assert alias.asname == alias.name
                    yield alias.name, home


@each_lazy_package
def test_type_checkers_see_exactly_the_lazy_names(package):
    lazy = homes(package) | dict.fromkeys(LAZY[package], ".")
    assert sorted(imports_for_type_checkers(package)) == sorted(lazy.items())


def test_modules_of_types_are_attributes_without_being_imported_first():
    assert printed_by(
        "import tinkex; print(tinkex.types.sampling.SamplingParams().max_tokens)"
    ) == ["None"]


@pytest.mark.parametrize(
    "method", ["create_rest_client", "get_telemetry", "health", "telemetry_reporter"]
)
def test_annotations_of_names_imported_later_can_be_read(method):
    assert isinstance(get_type_hints(getattr(tinkex.ServiceClient, method))["return"], type)


# -- modules -------------------------------------------------------------------------------------

MODULES = [
    ".".join(path.relative_to(ROOT.parent.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.parent.rglob("*.py"))
    if not path.stem.endswith(("_pb2", "__main__"))
    # Importing the shim makes tinkex answer to the name `tinker`, which other tests would then find.
    and "_shim" not in path.parts
]


@pytest.mark.parametrize("name", MODULES)
def test_every_exported_name_exists_and_is_listed_once(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinkex"):
            raise
        pytest.skip(f"needs {error.name}, which is not installed")
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    assert [missing for missing in exported if not hasattr(module, missing)] == []


def test_every_type_is_exported_from_types():
    for module in pkgutil.iter_modules(types.__path__, "tinkex.types."):
        if not module.name.rpartition(".")[2].startswith("_"):
            exported = set(importlib.import_module(module.name).__all__)
            assert exported <= set(dir(types)), module.name


# -- import costs --------------------------------------------------------------------------------


def printed_by(script: str) -> list[str]:
    """The words that a fresh interpreter prints."""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return finished.stdout.split()


HEAVY = {"torch", "transformers", "fastapi", "starlette", "sqlalchemy", "rich", "numpy", "pydantic"}


def modules_after(statement: str) -> set[str]:
    """All modules in a fresh interpreter after `statement`."""
    return set(printed_by(f"{statement}\nimport sys\nprint(*sys.modules)"))


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `statement`."""
    return {name.partition(".")[0] for name in modules_after(statement)}


def test_importing_tinkex_loads_nothing_heavy():
    assert loaded_by("import tinkex; tinkex.__version__") & (HEAVY | {"pyqwest"}) == set()


def test_importing_errors_loads_nothing_heavy():
    assert loaded_by("from tinkex import BadRequestError") & (HEAVY | {"pyqwest"}) == set()


FIRST_USE = "import tinkex; tinkex.ServiceClient; tinkex.types.Datum"


def test_the_first_client_and_datum_load_neither_numpy_nor_protobuf():
    first_use = loaded_by(FIRST_USE)
    assert first_use & {"numpy", "google", "zstandard", "pyqwest", "torch"} == set()


def test_the_first_client_and_datum_load_only_the_types_of_a_datum():
    """The classes of the other types, the events, the codecs and the clients take half as long as all the rest."""
    ours = {name for name in modules_after(FIRST_USE) if name.startswith("tinkex.")}
    assert {name for name in ours if name.startswith("tinkex.types.")} == {
        *["tinkex.types._base", "tinkex.types.inputs", "tinkex.types.paths", "tinkex.types.tensors"]
    }
    needless = {"training", "sampling", "rest", "tokenizers", "custom_loss", "traced_loss"}
    assert ours & {f"tinkex._client.{name}" for name in needless} == set()
    assert ours & {"tinkex.telemetry.events", "tinkex._wire.json_codec"} == set()
    assert len(ours) <= 55


def test_no_validator_is_built_at_import():
    script = """
import tinkex
tinkex.ServiceClient
kinds = [getattr(tinkex.types, name) for name in dir(tinkex.types)]
print(*[kind for kind in kinds if getattr(kind, "__pydantic_complete__", False)])
"""
    assert printed_by(script) == []


def test_importing_types_loads_no_model_or_http_library():
    needless = {"torch", "transformers", "pyqwest", "fastapi", "starlette", "sqlalchemy", "rich"}
    assert loaded_by("import tinkex.types") & needless == set()


def test_importing_the_codecs_loads_no_model_or_http_library():
    needless = {"torch", "transformers", "pyqwest", "fastapi", "starlette", "sqlalchemy", "rich"}
    codecs = "import tinkex._wire.json_codec, tinkex._wire.proto_codec, tinkex._wire.operations"
    assert loaded_by(codecs) & needless == set()


# -- the official package's types ----------------------------------------------------------------

TYPES: dict[str, dict[str, Any]] = OFFICIAL["types"]

# Names that mean something else here, and why.
OTHER_KIND = {
    "OptimizerConfig": "a class here, the common base of the configs, which also holds unknown ones; "
    "officially the union of the same classes",
    "ModelID": "an alias of str in both; the official description shows the class behind it",
    "RequestID": "an alias of str in both; the official description shows the class behind it",
}
# Fields that the official package requires and tinkex does not, and why.
OPTIONAL_HERE = {
    "CreateSessionRequest.user_metadata": "None is what callers without metadata write",
    "LoadWeightsRequest.optimizer": "False is what load_state means",
    "LoraConfig.rank": "32 is what create_lora_training_client uses",
    "RequestFailedResponse.category": "older services leave it out, and it is then unknown",
    "HealthResponse.status": "there is one value",
    "TelemetryResponse.status": "there is one value",
    "SessionStartEvent.event": "there is one value",
    "SessionEndEvent.event": "there is one value",
    "UnhandledExceptionEvent.event": "there is one value",
    "SessionStartEvent.severity": "INFO unless said otherwise",
    "SessionEndEvent.severity": "INFO unless said otherwise",
    "UnhandledExceptionEvent.severity": "ERROR unless said otherwise",
    "SessionEndEvent.duration": "a session that was found dead has none",
    "TelemetryBatch.process_uuid": "clients before 0.24 do not send it",
    "TelemetrySendRequest.process_uuid": "clients before 0.24 do not send it",
}
# Fields that only tinkex has, and why.
ADDED_HERE = {
    "ClientConfigResponse.proto_write_fwdbwd": "read by clients 0.19 to 0.24",
    "ClientConfigResponse.sample_extensions": "our service says that it knows these extensions",
    **dict.fromkeys(
        [f"SamplingParams.{name}" for name in EXTENSIONS], "an extension, absent unless set"
    ),
    "GetSamplerResponse.tokenizer_id": "our service says where the tokenizer is",
    "GetSamplerResponse.tokenizer_sha256": "our service offers the tokenizer's files",
    "HealthResponse.engine": "our service says how its engine is",
    "HealthResponse.engines": "our service lists its engines if it has several",
    "ModelData.tokenizer_sha256": "our service offers the tokenizer's files",
    "SupportedModel.model_id": "other services say it",
    "SupportedModel.arch": "other services say it",
}
# Methods that are missing, and why.
OTHER_METHODS = dict.fromkeys(
    [
        *["ImageChunk.serialize_data", "ImageChunk.validate_data"],
        *["DmelChunk.serialize_dmel", "DmelChunk.validate_dmel"],
    ],
    "called by pydantic only, which here finds them in the annotation",
)


def of_kind(*kinds: str) -> Any:
    found = [name for name, entry in TYPES.items() if entry["kind"] in kinds]
    return pytest.mark.parametrize("name", [name for name in found if name not in OTHER_KIND])


def test_every_official_type_exists():
    assert sorted(set(TYPES) - set(dir(types))) == []


@of_kind("pydantic")
def test_models_have_the_official_fields(name):
    ours = getattr(types, name)
    assert issubclass(ours, BaseModel)
    official = TYPES[name]["fields"].keys()
    assert official - ours.model_fields.keys() == set()
    added = ours.model_fields.keys() - official
    assert {f"{name}.{field}" for field in added} == {
        field for field in ADDED_HERE if field.startswith(f"{name}.")
    }
    assert not any(ours.model_fields[field].is_required() for field in added)


@of_kind("pydantic")
def test_models_have_the_official_required_fields(name):
    for field, default in TYPES[name]["fields"].items():
        required = default is None and f"{name}.{field}" not in OPTIONAL_HERE
        assert getattr(types, name).model_fields[field].is_required() == required, field


@of_kind("pydantic")
def test_models_have_the_official_defaults(name):
    for field, default in TYPES[name]["fields"].items():
        if default is not None:
            ours = getattr(types, name).model_fields[field]
            assert repr(ours.get_default(call_default_factory=True)) == default, field


#: The official package drops a misspelt parameter and samples with the default; tinkex refuses it.
STRICTER = {"SamplingParams"}


@of_kind("pydantic")
def test_models_treat_unknown_fields_like_the_official_ones(name):
    expected = "forbid" if name in STRICTER else TYPES[name]["extra"]
    assert getattr(types, name).model_config["extra"] == expected


@of_kind("dataclass")
def test_dataclasses_have_the_official_fields(name):
    ours = getattr(types, name)
    known = (
        {field.name for field in dataclasses.fields(ours)}
        if dataclasses.is_dataclass(ours)
        else set()
    )
    assert TYPES[name]["fields"].keys() - known - set(dir(ours)) == set()


@of_kind("enum")
def test_enums_have_the_official_members(name):
    ours = getattr(types, name)
    assert issubclass(ours, Enum)
    assert {member.name: member.value for member in ours} == TYPES[name]["members"]


@pytest.mark.parametrize("name", [name for name, entry in TYPES.items() if "choices" in entry])
def test_literals_have_the_official_choices(name):
    assert list(get_args(getattr(types, name))) == TYPES[name]["choices"]


@pytest.mark.parametrize("name", [name for name, entry in TYPES.items() if "properties" in entry])
def test_types_have_the_official_properties(name):
    assert [
        missing
        for missing in TYPES[name]["properties"]
        if not hasattr(getattr(types, name), missing)
    ] == []


# -- parameters ----------------------------------------------------------------------------------


def complaints(function: Any, official: dict[str, str | None]) -> list[str]:
    """Differences that break a caller who knows only the official signature."""
    ours = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in {"self", "cls"}
    ]
    by_name = {parameter.name: parameter for parameter in ours}
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours)
    positions = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = []
    for place, (name, default) in enumerate(official.items()):
        bare = name.lstrip("*")
        if name.startswith("**") or (bare not in by_name and takes_anything):
            continue
        if bare not in by_name:
            found.append(f"{bare} is missing")
        elif default is not None and by_name[bare].default is inspect.Parameter.empty:
            found.append(f"{bare} is required")
        elif not name.startswith("*") and positions[place : place + 1] != [bare]:
            found.append(f"{bare} is not at position {place}")
    known = {name.lstrip("*") for name in official}
    found += [
        f"{parameter.name} is an extra requirement"
        for parameter in ours
        if parameter.name not in known
        and parameter.default is inspect.Parameter.empty
        and parameter.kind in {parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY}
    ]
    return found


@of_kind("dataclass")
def test_dataclasses_take_the_official_arguments(name):
    assert complaints(getattr(types, name), TYPES[name]["parameters"]) == []


@pytest.mark.parametrize(
    ("name", "method"),
    [
        (name, method)
        for name, entry in TYPES.items()
        for method in entry.get("methods", ())
        if f"{name}.{method}" not in OTHER_METHODS
    ],
)
def test_types_have_the_official_methods(name, method):
    ours = getattr(getattr(types, name), method)
    assert complaints(ours, TYPES[name]["methods"][method]) == []


# -- the official package's other classes --------------------------------------------------------

CLASSES: dict[str, dict[str, Any]] = OFFICIAL["classes"]
# Names of `tinker` that `tinkex` may lack, and why. An entry is harmless once the name exists.
MAY_BE_MISSING = {
    **dict.fromkeys(
        ["LossHandle", "PerDatumLossFn", "RequestOptions", "Timeout", "auth"],
        "part of the client, which is being built on this foundation",
    ),
    "ServiceClient.create_custom_loss": "losses that run in the service are an official alpha",
}
EXCEPTIONS = [name for name, entry in CLASSES.items() if entry["kind"] == "exception"]
PRESENT = [name for name in CLASSES if name in dir(tinkex) and name not in EXCEPTIONS]
# Created by the clients, never by callers: only their methods are public.
NOT_CONSTRUCTED = {
    "TrainingClient",
    "SamplingClient",
    "APIFuture",
    "LossHandle",
    "QueueState",
}


def test_every_official_name_exists():
    missing = set(OFFICIAL["names"]) - set(dir(tinkex))
    assert missing - MAY_BE_MISSING.keys() == set()


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_are_official_ones(name):
    ours = getattr(tinkex, name)
    parents = [cls.__name__ for cls in ours.__mro__[1:]]
    assert [parent for parent in CLASSES[name]["parents"] if parent not in parents] == []
    if issubclass(ours, tinkex.TinkerError):
        assert complaints(ours.__init__, CLASSES[name]["parameters"]) == []


@pytest.mark.parametrize("name", PRESENT)
def test_classes_take_the_official_arguments(name):
    if name not in NOT_CONSTRUCTED:
        assert complaints(getattr(tinkex, name), CLASSES[name].get("parameters", {})) == []


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in PRESENT for method in CLASSES[name].get("methods", ())],
)
def test_classes_have_the_official_methods(name, method):
    ours = getattr(getattr(tinkex, name), method, None)
    if ours is None:
        assert f"{name}.{method}" in MAY_BE_MISSING
    elif not method.startswith("__"):  # Python itself calls those, by position
        assert complaints(ours, CLASSES[name]["methods"][method]) == []


@pytest.mark.parametrize("name", [name for name in PRESENT if "members" in CLASSES[name]])
def test_enums_have_the_official_values(name):
    assert {member.name: member.value for member in getattr(tinkex, name)} == CLASSES[name][
        "members"
    ]
