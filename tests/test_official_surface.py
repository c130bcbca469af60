"""Every public name of the official package exists here, with the same parameters.

`test_public_api` compares the types; here are the clients and what comes with them. Ours may take more
arguments, by keyword, and may give a default where the official signature has none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex import compat

OFFICIAL = json.loads((Path(__file__).parent / "data" / "official_api.json").read_text())
CLASSES: dict[str, dict[str, Any]] = OFFICIAL["classes"]

#: Names that are missing, and why. An entry that is no longer needed fails.
#: Defaults that differ, and why.
OTHER_DEFAULT = {
    "RetryConfig.retryable_exceptions": "the official ones include classes of its HTTP library",
    **dict.fromkeys(
        [f"Timeout.{name}" for name in ("timeout", "connect", "read", "write", "pool")],
        "the official one is a class of its HTTP library",
    ),
}
#: Positional parameters that only tinkex has, and why.
ALSO_BY_POSITION = {"APITimeoutError.message": "where its parent, APIConnectionError, has it"}
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
EXCEPTIONS = [name for name, entry in CLASSES.items() if entry["kind"] == "exception"]
PRESENT = list(CLASSES)


def ours(name: str) -> Any:
    if name in compat._ROOT:
        module, _, attribute = compat._ROOT[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    return getattr(tinkex, name)


def differences(
    where: str, function: Callable[..., Any], official: Mapping[str, str | None]
) -> list[str]:
    """Differences that break a caller who knows only the official signature."""
    parameters = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in {"self", "cls"} and not parameter.name.startswith("_")
    ]
    by_name = {parameter.name: parameter for parameter in parameters}
    in_order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    found = []
    for place, (written, default) in enumerate(official.items()):
        name = written.lstrip("*")
        parameter = by_name.get(name)
        if parameter is None:
            found.append(f"{name} is missing")
        elif written.startswith("**"):
            if parameter.kind not in {parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL}:
                found.append(f"{name} does not take whatever else there is")
        elif not written.startswith("*") and in_order[place : place + 1] != [name]:
            found.append(f"{name} cannot be given at position {place}")
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            found.append(f"{name} cannot be given by keyword")
        elif (
            default is not None
            and repr(parameter.default) != default
            and f"{where}.{name}" not in OTHER_DEFAULT
        ):
            found.append(f"{name} is {parameter.default!r} unless given, officially {default}")
    for parameter in parameters:
        if parameter.name in {name.lstrip("*") for name in official}:
            continue
        by_position = parameter.kind is not parameter.KEYWORD_ONLY
        if by_position and f"{where}.{parameter.name}" not in ALSO_BY_POSITION:
            found.append(f"{parameter.name} is ours and can be given by position")
        elif parameter.default is parameter.empty:
            found.append(f"{parameter.name} is ours and required")
    return found


def test_root_names():
    missing = set(OFFICIAL["names"]) - set(compat._root_names())
    assert sorted(missing) == []


@pytest.mark.parametrize("name", PRESENT)
def test_constructors(name):
    if name in EXCEPTIONS and not CLASSES[name]["parameters"]:
        return  # an exception without its own constructor takes any arguments
    if name in {"APIFuture", "QueueState", "RequestOptions"}:
        return  # a mapping, never constructed by callers
    assert differences(name, ours(name), CLASSES[name]["parameters"]) == []


METHODS = [(name, method) for name in PRESENT for method in CLASSES[name].get("methods", ())]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_methods(name, method):
    function = getattr(ours(name), method)
    if not method.startswith("__"):  # Python itself calls those, by position
        official = CLASSES[name]["methods"][method]
        assert differences(f"{name}.{method}", function, official) == []
    assert inspect.iscoroutinefunction(function) == method.endswith("_async")


@pytest.mark.parametrize("name", [name for name in PRESENT if "properties" in CLASSES[name]])
def test_properties(name):
    for attribute in CLASSES[name]["properties"]:
        assert isinstance(inspect.getattr_static(ours(name), attribute), property)


@pytest.mark.parametrize("name", [name for name in PRESENT if "fields" in CLASSES[name]])
def test_fields(name):
    present = [field.name for field in dataclasses.fields(ours(name))]
    official = list(CLASSES[name]["fields"])
    assert present[: len(official)] == official


@pytest.mark.parametrize("name", [name for name in PRESENT if "members" in CLASSES[name]])
def test_members(name):
    assert {member.name: member.value for member in ours(name)} == CLASSES[name]["members"]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_have_the_official_base_classes(name):
    parents = [cls.__name__ for cls in ours(name).__mro__[1:]]
    kept = [parent for parent in parents if parent in CLASSES[name]["parents"]]
    assert kept == CLASSES[name]["parents"]


@pytest.mark.parametrize("name", ["TrainingClient", "SamplingClient"])
def test_clients_have_only_the_official_coroutine_methods(name):
    listed = inspect.getmembers(ours(name), inspect.iscoroutinefunction)
    public = {method for method, _ in listed if not method.startswith("_")}
    assert public == {method for method in CLASSES[name]["methods"] if method.endswith("_async")}


@pytest.mark.parametrize("name", CLIENTS)
def test_async_methods_have_the_parameters_of_their_twins(name):
    cls = ours(name)
    for method, function in inspect.getmembers(cls, inspect.iscoroutinefunction):
        plain = getattr(cls, method.removesuffix("_async"), None)
        if plain is not None and plain is not function:
            taken = inspect.signature(function).parameters.values()
            assert [str(p).partition(":")[0] for p in taken] == [
                str(p).partition(":")[0] for p in inspect.signature(plain).parameters.values()
            ]
