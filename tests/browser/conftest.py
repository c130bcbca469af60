"""A real browser and a real service. `make browser` runs everything here; other runs only take a look."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex.server.serve import ServiceThread
from tinkex.server.service import Settings

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
BASE = "tinkex/tiny"
#: Milliseconds in which a busy machine draws anything.
PATIENCE = 60_000
sync_api.expect.set_options(timeout=PATIENCE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--browser"):
        return
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="needs --browser, as `make browser` gives")
    for item in items:
        if item.path.is_relative_to(here) and item.path.name != "test_look.py":
            item.add_marker(skip)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed at the end of the file: while it is open, playwright's event loop runs in this thread, and no other can."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
    if found is None:
        pytest.skip(
            "there is no Chromium browser on this machine (Debian: apt-get install chromium)"
        )
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield launched
        launched.close()


class Service:
    """A service that can be stopped and started again at the same address."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self._settings = Settings(
            data_dir=directory,
            base_models=(BASE,),
            engine="fake",
            engine_in_process=True,
            **settings,
        )
        self._port = 0
        self.start()

    def start(self) -> None:
        self._thread = ServiceThread(self._settings, self._port)
        self.url = self._thread.start()
        self._port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self._thread.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    running: list[Service] = []

    def begin(**settings: Any) -> Service:
        running.append(Service(tmp_path / "data", **settings))
        return running[-1]

    yield begin
    for service in running:
        service.stop()


@pytest.fixture
def served(start: Callable[..., Service]) -> Service:
    return start()


@pytest.fixture
def client(served: Service) -> Iterator[tinkex.ServiceClient]:
    with tinkex.ServiceClient(
        base_url=served.url, api_key="tml-local", telemetry_enabled=False
    ) as made:
        yield made


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A page that must ask no other host for anything and may print no error."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    asked: list[str] = []
    errors: list[str] = []
    opened.on("request", lambda sent: asked.append(sent.url))
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    opened.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}"))
    yield opened
    context.close()
    assert [url for url in asked if "//127.0.0.1:" not in url and not url.startswith("data:")] == []
    # A service that is gone or refuses a key is reported by the browser itself.
    allowed = request.node.get_closest_marker("failing_requests") is not None
    serious = [text for text in errors if not (allowed and "Failed to load resource" in text)]
    assert serious == []


def datum(*tokens: int) -> types.Datum:
    return types.Datum(
        types.ModelInput.from_ints(list(tokens[:-1])),
        {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )


def trained(client: tinkex.ServiceClient, name: str, steps: int = 5, rate: float = 0.1) -> Any:
    """A run with a few steps on the text "abcabc"."""
    training = client.create_lora_training_client(BASE, rank=4, user_metadata={"name": name})
    more_steps(training, steps, rate)
    return training


def more_steps(training: Any, steps: int, rate: float = 0.1) -> None:
    for _ in range(steps):
        training.forward_backward([datum(*b"abcabcabc")], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=rate)).result()


def logged(training: Any, *values: float, first: int = 1) -> None:
    """Log a metric of the user's own."""
    for step, value in enumerate(values, first):
        training.log(step, {"mine": value}).result()


def run_url(served: Service, training: Any, part: str = "") -> str:
    return f"{served.url}/#/run/{training.model_id}{part}"


def steps_shown(page: Any) -> Any:
    return page.locator(".facts div", has_text="Steps").locator("dd")


#: Makes a page believe that it is hidden, or seen again.
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
