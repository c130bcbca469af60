"""The documentation is correct: its code runs, its commands exist, and every public name is in it.

Python blocks run page by page, in order, in one namespace, against a real service; guides begin where
`docs/guides/index.md` leaves off, as they tell their readers. A block that cannot run here has
`<!-- not run: why -->` on the line before it. Blocks of any other language, or of none, are output.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

import tinkex
from tinkex import errors
from tinkex.cli.main import cli
from tinkex.config import settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BEGINNING = DOCS / "guides" / "index.md"

#: Names that a page needs besides those from the beginning of the guides.
GIVEN = {
    "docs/guides/observability.md": """
        client, batches = service, [data]
        def train(): ...
    """,
    "docs/guides/moving.md": """
        kept = training.save_weights_for_sampler("final").result()
    """,
}

_BLOCK = re.compile(
    r"(?P<reason><!-- not run: .+ -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str
    runs: bool

    def run(self, namespace: dict[str, Any]) -> None:
        padded = "\n" * self.line + self.code  # so that a traceback names the line of the page
        exec(compile(padded, str(self.page), "exec"), namespace)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Block(page, line, found["language"], found["code"], found["reason"] is None)


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


def to_run(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python" and block.runs]


# -- code ------------------------------------------------------------------------------------------


@pytest.fixture
def namespace(tinkex_tiny, monkeypatch, tmp_path) -> Iterator[dict[str, Any]]:
    """The namespace of a page, with a service for `base_url="local"`; the process is restored afterwards."""
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tinkex_tiny.data_dir))
    monkeypatch.setenv("TINKER_BASE_URL", tinkex_tiny.url)
    monkeypatch.setenv("TINKER_API_KEY", tinkex_tiny.api_key)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])  # for pages that install_as_tinker
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "docs"}
    yield names
    for client in {id(each): each for each in names.values()}.values():
        if isinstance(client, tinkex.ServiceClient | tinkex.RestClient):
            client.close().result(10)
    tinkex.reset_defaults()
    for module in [name for name in sys.modules if name.partition(".")[0] == "tinker"]:
        del sys.modules[module]


RUNNABLE = [pytest.param(page, id=name_of(page)) for page in WITH_PYTHON]


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_python_of_a_page_runs(page, namespace):
    if page.parent == BEGINNING.parent and page != BEGINNING:
        for block in to_run(BEGINNING):
            block.run(namespace)
    exec(_undented(GIVEN.get(name_of(page), "")), namespace)
    for block in to_run(page):
        block.run(namespace)


def _undented(code: str) -> str:
    return "\n".join(line.strip() for line in code.splitlines())


COMMANDS = [
    pytest.param(line, id=f"{name_of(page)}: {line[:60]}")
    for page in PAGES
    for block in blocks(page)
    if block.language != "python"
    for line in block.code.replace("\\\n", " ").splitlines()
    if line.startswith(("tinkex ", "make "))
]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(line):
    program, *arguments = shlex.split(line, comments=True)
    if program == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
    else:
        _parse(cli, _context(), arguments)


def _context() -> click.Context:
    # With the command's own settings: click makes the help option once, with the names of its first context.
    return click.Context(cli, info_name="tinkex", **cli.context_settings)


def _parse(command: click.Command, context: click.Context, arguments: list[str]) -> None:
    """Parse without checking values: files named in a page need not exist."""
    _, left, _ = command.make_parser(context).parse_args(list(arguments))
    if isinstance(command, click.Group):
        found = command.get_command(context, left[0])
        assert found is not None, f"no command {left[0]}"
        _parse(found, click.Context(found, parent=context, info_name=left[0]), left[1:])


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_named_in_pages_exist(page):
    for named in re.findall(r"\b(?:examples|benchmarks|scripts)/\w+\.py", page.read_text()):
        assert (ROOT / named).exists(), named


def test_python_names_for_elixir_names_exist():
    page = (DOCS / "guides" / "migrating-from-elixir.md").read_text()
    named = set(re.findall(r"`(tinkex(?:\.\w+)+)", page))
    assert len(named) > 15
    for dotted in named:
        _resolve(dotted)
    methods = set(re.findall(r"`service\.(\w+)", page))
    assert methods - {"http", "api"} <= set(dir(tinkex.ServiceClient))


GUIDES = [page for page in PAGES if page.parent == BEGINNING.parent and page != BEGINNING]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_guide_starts_with_what_the_reader_wants(page):
    _, opening, *_ = page.read_text().split("\n\n")
    assert re.search(r"\byou\b", opening, re.IGNORECASE), opening


def rows(page: Path) -> dict[str, list[str]]:
    """The tables of a page: first cell of each row → other cells."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: others for first, *others in cells}


def test_figures_of_the_readme_match_the_measurements():
    measured, shown = rows(DOCS / "performance.md"), rows(ROOT / "README.md")
    both = measured.keys() & shown.keys()
    assert len(both) >= 3
    for name in both:
        assert [shown[name][0], shown[name][-1]] == measured[name][:2], name


def test_links_of_the_readme_have_targets():
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text())
    assert not [
        link
        for link in links
        if not link.startswith("http") and not (ROOT / link).exists() and "demo.svg" not in link
    ]


# -- completeness ---------------------------------------------------------------------------

#: Modules that users import. Names that begin with `_` and the internals of the service are not public.
PUBLIC = [
    *(f"tinkex.{name}" for name in tinkex._MODULES),
    "tinkex.telemetry.events",
    "tinkex.testing",
]


def documented() -> dict[int, Any]:
    """The objects on the reference pages, by identity: one object may have several names."""
    found: dict[int, Any] = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for dotted in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            value = _resolve(dotted)
            found[id(value)] = value
            if isinstance(value, ModuleType):
                found |= {id(getattr(value, name)): getattr(value, name) for name in listed(value)}
    return found


def listed(module: ModuleType) -> list[str]:
    """The names of `__all__` if it is a plain list; griffe does not run code and reads no other form."""
    for statement in ast.parse(Path(module.__file__ or "").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [ast.literal_eval(each) for each in getattr(statement.value, "elts", [])]
    return []


def _resolve(dotted: str) -> Any:
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        home, _, name = dotted.rpartition(".")
        return getattr(_resolve(home), name)


@pytest.mark.parametrize("module", ["tinkex", *PUBLIC])
def test_every_public_name_is_in_the_reference(module):
    home, shown = importlib.import_module(module), documented()
    names = {name: getattr(home, name) for name in home.__all__ if not name.startswith("__")}
    missing = [name for name, value in names.items() if id(value) not in shown]
    assert not [name for name in missing if f"{module}.{name}" not in PUBLIC]


def test_every_setting_is_documented():
    reference = (DOCS / "configuration.md").read_text()
    guide = (DOCS / "guides" / "configuration.md").read_text()
    for row in settings():
        assert f"`{row.name or row.env}`" in reference
        assert f"`{row.name or row.env}`" in guide, f"{row.name or row.env}: what is it for?"


def typed_errors() -> list[str]:
    """The errors that clients raise; errors of the service reach them as one of these."""
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            getattr(module, name)  # some modules load on first use

    def below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    kinds = {*below(errors.TinkerError), errors.ExperimentalWarning}
    homes = {kind: kind.__module__.split(".") for kind in kinds}
    ours = [kind for kind, home in homes.items() if home[0] == "tinkex" and "server" not in home]
    return sorted(kind.__name__ for kind in ours)


def test_every_typed_error_has_a_troubleshooting_entry():
    page = (DOCS / "guides" / "troubleshooting.md").read_text()
    entries = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)
    assert sorted(entries) == typed_errors()


def modules_in_table(page: Path) -> set[str]:
    """Modules and packages (`name/`) of the first column; a folder holds for the names after it in the cell."""
    found = set()
    for cell in rows(page):
        folder = ""
        for name in re.findall(r"`([^`]+)`", cell):
            parent, _, last = name.removesuffix("/").rpartition("/")
            folder = f"{parent}/" if parent else folder
            found.add(name if name.endswith("/") else folder + last)
    return found


def test_every_module_is_in_the_architecture_table():
    home, listed = ROOT / "src" / "tinkex", modules_in_table(DOCS / "architecture.md")
    packages = tuple(name for name in listed if name.endswith("/"))
    files = {file.relative_to(home).with_suffix("").as_posix() for file in home.rglob("*.py")}
    modules = {name for name in files if not name.endswith("__")}
    assert {name for name in modules if not name.startswith(packages)} - listed == set()
    assert {name for name in listed if not (home / name).is_dir()} - modules == set()


def test_every_decision_is_listed():
    index = (DOCS / "decisions" / "index.md").read_text()
    for page in (DOCS / "decisions").glob("0*.md"):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert f"[{title}]({page.name})" in index


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    yield context.command_path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, click.Context(child, parent=context, info_name=name))


def test_every_command_and_option_is_documented():
    page = (DOCS / "reference" / "cli.md").read_text()
    for path, command in commands(cli, _context()):
        assert path in page
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in page, f"{path} {option.opts[0]}"
