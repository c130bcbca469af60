"""Reduce a description of the official package to the parts that tests compare: names and defaults.

python scripts/compact_official_api.py path/to/official_api.json

Everywhere a name maps to its default as text, or to null where a value is required. Parameters that
can only be given by keyword start with `*`, the two kinds of "whatever else" with `**`.
"""

from __future__ import annotations

import argparse
import json
from ast import literal_eval
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "tests" / "data" / "official_api.json"
# Classes that are described in addition to the two namespaces.
ELSEWHERE = {
    "RetryConfig": "tinker.lib.retry_handler.RetryConfig",
    "QueueState": "tinker.lib.api_future_impl.QueueState",
}
MARK = {"keyword_only": "*", "var_keyword": "**", "var_positional": "**"}


def parameters(signature: dict[str, Any] | None) -> dict[str, str | None]:
    written = {}
    for parameter in (signature or {}).get("params", ()):
        name = MARK.get(parameter["kind"], "") + parameter["name"]
        if not parameter["name"].startswith("_") and name not in {"self", "cls"}:
            written[name] = None if parameter["required"] else parameter["default"]
    return written


def fields(described: dict[str, Any]) -> dict[str, str | None]:
    return {
        name: None if field["required"] else field["default"]
        for name, field in described.items()
        if not name.startswith("_")
    }


def compact(described: dict[str, Any]) -> dict[str, Any]:
    kind = described["kind"]
    written: dict[str, Any] = {"kind": kind}
    if kind == "exception":
        written["parents"] = [name for name in described["mro"][1:] if name != "Exception"]
    for key in ("extra", "members"):
        if key in described:
            written[key] = described[key]
    if described.get("value", "").startswith("typing.Literal["):
        written["choices"] = list(literal_eval(described["value"].removeprefix("typing.Literal")))
    if "fields" in described:
        written["fields"] = fields(described["fields"])
    if "init" in described:
        written["parameters"] = parameters(described["init"])
    if methods := described.get("methods"):
        written["methods"] = {
            name: parameters(method["signature"]) for name, method in methods.items()
        }
    if properties := described.get("properties"):
        written["properties"] = sorted(properties)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("description", type=Path, help="the full description, as JSON")
    described = json.loads(parser.parse_args().description.read_text())
    classes = {
        name: compact(entry)
        for name, entry in described["tinker"].items()
        if entry["kind"] in {"class", "exception", "dataclass"}
        and name not in described["tinker.types"]
    }
    classes |= {name: compact(described[key]) for name, key in ELSEWHERE.items()}
    written = {
        "version": described["version"],
        "names": described["tinker.__all__"],
        "types": {name: compact(entry) for name, entry in described["tinker.types"].items()},
        "classes": classes,
    }
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
