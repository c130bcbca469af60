"""A first look: the page opens in a browser, lists a run and draws its loss."""

from __future__ import annotations

from urllib.parse import unquote

from .conftest import trained


def test_a_run_is_listed_and_its_loss_is_drawn(served, client, page):
    training = trained(client, "first look")
    page.goto(served.url)
    row = page.get_by_role("row", name="first look")
    row.wait_for()
    assert "tiny" in row.inner_text()
    page.get_by_role("link", name="first look").click()
    page.get_by_role("heading", name="first look").wait_for()
    page.get_by_role("figure", name="loss,").locator("canvas").wait_for()
    assert training.model_id in unquote(page.url)


def test_tabs_do_not_scroll_up_and_down(served, client, page):
    training = trained(client, "tabs")
    page.goto(f"{served.url}/#/run/{training.model_id}")
    tabs = page.get_by_role("navigation", name="Parts of the run")
    tabs.wait_for()
    assert tabs.evaluate("tabs => tabs.scrollHeight - tabs.clientHeight") == 0
