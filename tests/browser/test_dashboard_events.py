"""What an open page of the dashboard misses, reads again and leaves alone, in a real browser against a real service."""

from __future__ import annotations

import re

import httpx
import pytest

import tinkex

from .conftest import HIDE, logged, more_steps, run_url, steps_shown, sync_api, trained

expect = sync_api.expect
EVENTS, METRICS = "**/local/events", "**/metrics?*"


def mine(page, said):
    return page.get_by_role("figure", name=f"mine, {said}")


def requests_of(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    return asked


def long_run(client, name):
    """A run with more steps than a plot has room for."""
    training = trained(client, name, steps=1)
    for step in range(1, 400):
        training.log(step, {"mine": 1.0})
    logged(training, 1.0, first=400)
    return training


# -- what comes before the first event -----------------------------------------------------------------


@pytest.mark.failing_requests
def test_points_are_drawn_that_came_while_events_were_refused(served, client, page):
    training = trained(client, "refused", steps=1)
    logged(training, 5.0, 1.0)
    page.route(EVENTS, lambda route: route.fulfill(status=429, json={"error": "too many pages"}))
    page.goto(run_url(served, training))
    mine(page, "mine: from 5 to 1").wait_for()
    logged(training, 6.0, first=3)
    page.unroute(EVENTS)
    mine(page, "mine: from 5 to 6").wait_for()


def test_points_are_drawn_that_came_before_slow_events(served, client, page):
    training = trained(client, "slow", steps=1)
    logged(training, 5.0, 1.0)
    held = []
    page.route(EVENTS, lambda route: held.append(route))
    page.goto(run_url(served, training))
    mine(page, "mine: from 5 to 1").wait_for()
    logged(training, 6.0, first=3)
    held[0].continue_()
    mine(page, "mine: from 5 to 6").wait_for()


def test_a_page_reads_everything_once(served, client, page):
    training = trained(client, "once", steps=1)
    logged(training, 5.0)
    asked = requests_of(page)
    page.goto(run_url(served, training))
    mine(page, "mine: from 5 to 5").wait_for()
    logged(training, 6.0, first=2)
    mine(page, "mine: from 5 to 6").wait_for()
    local = [url for url in asked if "/local/" in url]
    assert len(local) == len(set(local)) == 4  # the list, the run, its curves, and the events


# -- readings that fail --------------------------------------------------------------------------------


def test_curves_are_read_again_if_an_answer_never_comes(served, client, page):
    training = trained(client, "stuck", steps=1)
    logged(training, 5.0)
    page.clock.install()
    held: list[object] = []
    page.route(METRICS, lambda route: route.continue_() if held else held.append(route))
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("1")
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("2")
    assert len(held) == 1
    page.clock.fast_forward(15_000)
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("3")
    page.clock.fast_forward(15_000)
    mine(page, "mine: from 5 to 5").wait_for()


FOLLOWED = """async ([steps, asked]) => {
  const { Followed } = await import("/static/curves.js");
  const run = new Followed({ axis: "step", width: 4, ...asked });
  const told = [];
  for (const [step, ...given] of steps) told.push(run[step](...given) ?? null);
  return [told, run.curves?.a?.x ?? null, run.error];
}"""


def point(step, number):
    return {"step": step, "tokens": 0, "time": 0, "values": {"a": [number, 0.5]}}


def curves(*x, points=None):
    y = [0.5] * len(x)
    return {"a": {"x": list(x), "y": y, "odd": [], "points": points or len(x)}}


def test_when_the_curves_of_a_run_must_be_read(served, page):
    page.goto(served.url)

    def followed(*steps):
        return page.evaluate(FOLLOWED, [steps, {}])

    read = ("began", 0), ("answered", 1, curves(1, 2))
    left = ("left", 100)
    # At first, and not while they are being read, or after they were.
    assert followed(left)[0] == [0]
    assert followed(read[0], left)[0] == [1, None]
    assert followed(*read, left) == [[1, None, None], [1, 2], None]
    # A point that continues them is drawn; after others they are read again.
    assert followed(*read, ("told", [point(3, 2)]), left)[0:2] == [[1, None, None, None], [1, 2, 3]]
    assert followed(*read, ("told", [point(4, 3)]), left)[0][-1] == 0
    assert followed(*read, ("told", None), left)[0][-1] == 0
    # Points that come while they are read are added to the answer; too many are not kept.
    came = ("told", [point(3, 2)])
    assert followed(read[0], came, read[1], left)[0:2] == [[1, None, None, None], [1, 2, 3]]
    many = [("told", [point(3 + number, 2 + number)]) for number in range(501)]
    assert followed(read[0], *many, read[1], left)[0][-1] == 0
    # Those with more points than places are read every two seconds.
    crowded = ("began", 0), ("answered", 1, curves(1, 2, points=5)), ("told", [point(9, 5)])
    assert followed(*crowded[:2], ("told", [point(9, 6)]), left)[0][-1] == 1900
    # An answer that comes after a later reading began is not taken.
    assert followed(("began", 0), ("began", 0), read[1], left)[1] is None
    # No answer is asked for again, a refusal only after a change.
    late, refused = ("failed", 1, {"status": 0}), ("failed", 1, {"status": 404})
    assert followed(read[0], late, left)[0][-1] == 1900
    assert followed(read[0], refused, left)[0][-1] is None
    assert followed(read[0], refused, ("told", [point(1, 0)]), left)[0][-1] == 1900


@pytest.mark.failing_requests
def test_a_run_that_could_not_be_read_is_read_again(served, client, page):
    training = trained(client, "unlucky", steps=2)
    page.clock.install()
    page.route(
        re.compile("/local/runs/[^/]+$"),
        lambda route: route.fulfill(status=503, json={"error": "It is busy."}),
        times=1,
    )
    page.goto(run_url(served, training))
    page.get_by_text("It is busy. Trying again…").wait_for()
    page.clock.fast_forward(4_000)
    expect(steps_shown(page)).to_have_text("2")
    expect(page.get_by_text("Trying again")).to_have_count(0)


# -- long runs, and several ----------------------------------------------------------------------------


def test_steps_that_a_long_run_makes_once_more_are_drawn(served, client, page):
    """As after a crash, when it goes on from a checkpoint."""
    training = long_run(client, "restored")
    page.goto(run_url(served, training))
    mine(page, "mine: from 1 to 1, lowest 1").wait_for()
    logged(training, -5.0, first=200)
    mine(page, "mine: from 1 to 1, lowest").and_(
        page.locator('[aria-label*="lowest -"]')
    ).wait_for()


STILL = "window.performance.now = () => 1e6 + (window.passed ?? 0)"


def test_of_compared_runs_only_the_long_one_is_read_again_and_at_a_calm_pace(served, client, page):
    long, short = long_run(client, "long"), trained(client, "short", steps=2)
    logged(short, 5.0)
    page.add_init_script(STILL)
    page.goto(f"{served.url}/#/compare?runs={long.model_id},{short.model_id}")
    mine(page, "long: from 1 to 1, lowest 1; short: from 5 to 5").wait_for()
    asked = requests_of(page)
    logged(long, 1.0, first=401)
    logged(short, 6.0, first=2)
    mine(page, "long: from 1 to 1, lowest 1; short: from 5 to 6").wait_for()
    assert asked == []
    page.evaluate("window.passed = 2000")
    with page.expect_request(METRICS):
        logged(long, 1.0, first=402)
    assert [url for url in asked if "metrics" in url and short.model_id in url] == []


@pytest.mark.failing_requests
def test_curves_of_the_other_runs_are_drawn_if_one_was_deleted(served, client, page):
    kept = trained(client, "kept", steps=1)
    logged(kept, 1.0)
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local") as other:
        lost = trained(other, "lost", steps=1)
        logged(lost, 9.0)
    page.goto(f"{served.url}/#/compare?runs={kept.model_id},{lost.model_id}")
    mine(page, "kept: from 1 to 1, lowest 1; lost: from 9 to 9").wait_for()
    delete(served, lost)
    page.get_by_label("By").select_option("tokens")
    page.get_by_text("There is no training run").wait_for()
    logged(kept, 2.0, first=2)
    mine(page, "kept: from 1 to 2, lowest 1").wait_for()


def delete(served, training):
    """As soon as its session has ended."""
    while httpx.delete(f"{served.url}/local/runs/{training.model_id}").status_code == 409:
        pass


def test_an_answer_that_is_older_than_an_event_brings_no_deleted_run_back(served, client, page):
    kept = trained(client, "kept", steps=1)
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local") as other:
        lost = trained(other, "lost", steps=1)
    held = []
    page.route("**/local/runs?*", lambda route: held.append((route, route.fetch())))
    with page.expect_request("**/local/runs?*"):
        page.goto(served.url)
    page.evaluate("""async () => {
      const { on } = await import("/static/api.js");
      on("news", ({ runs, gone }) => { document.body.dataset.heard = [...gone.map(() => "gone"), ...runs.map((run) => run.steps)]; });
    }""")
    delete(served, lost)
    expect(page.locator("body")).to_have_attribute("data-heard", re.compile("gone"))
    more_steps(kept, 1)
    expect(page.locator("body")).to_have_attribute("data-heard", "2")
    route, answer = held[0]
    route.fulfill(response=answer)
    expect(page.get_by_role("row", name="kept").locator(".steps")).to_have_text("2")
    expect(page.get_by_role("row", name="lost")).to_have_count(0)


def test_a_small_curve_of_huge_values_is_drawn(served, client, page):
    training = trained(client, "huge", steps=1)
    for step, value in enumerate((1e308, -1e308, 1e308), 2):
        training.log(step, {"loss": value}).result()
    page.goto(served.url)
    drawn = page.get_by_role("row", name="huge").locator(".spark path")
    expect(drawn).to_have_count(1)
    assert re.fullmatch(r"[ML0-9. ]+", drawn.get_attribute("d"))


# -- pages that nobody sees ----------------------------------------------------------------------------


def test_a_page_that_was_hidden_for_long_gives_its_connection_back(served, client, page):
    training = trained(client, "left", steps=1)
    logged(training, 5.0)
    page.clock.install()
    page.goto(run_url(served, training))
    mine(page, "mine: from 5 to 5").wait_for()
    with page.expect_event("requestfailed", lambda request: "/local/events" in request.url):
        page.evaluate(HIDE, True)
        page.clock.fast_forward(30_000)
    asked = requests_of(page)
    logged(training, 6.0, first=2)
    page.clock.fast_forward(60_000)
    assert asked == []
    page.evaluate(HIDE, False)
    mine(page, "mine: from 5 to 6").wait_for()
    expect(page.locator(".connection")).to_have_text("Live")


def test_a_page_that_is_hidden_for_a_moment_keeps_its_connection(served, client, page):
    training = trained(client, "glance", steps=1)
    page.clock.install()
    page.goto(run_url(served, training))
    page.get_by_role("figure", name="loss,").wait_for()
    asked = requests_of(page)
    page.evaluate(HIDE, True)
    page.clock.fast_forward(15_000)
    page.evaluate(HIDE, False)
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("2")
    page.clock.fast_forward(16_000)
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("3")
    assert asked == []


def test_a_hidden_page_reads_no_curves_that_were_due_later(served, client, page):
    training = long_run(client, "due")
    page.clock.install()
    page.goto(run_url(served, training))
    mine(page, "mine: from 1 to 1").wait_for()
    logged(training, 1.0, first=401)
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("2")
    page.evaluate(HIDE, True)
    asked = requests_of(page)
    page.clock.fast_forward(5_000)
    assert page.evaluate("fetch('/static/icon.svg').then((answer) => answer.status)") == 200
    assert [url for url in asked if "metrics" in url] == []
    with page.expect_request(METRICS):
        page.evaluate(HIDE, False)


NEWS = """async ([followed, ...told]) => {
  const { News } = await import("/static/news.js");
  const news = new News((id) => followed.includes(id));
  for (const each of told) news.add(each);
  const taken = news.take();
  return [taken.runs.map((run) => [run.id, run.changed, run.points]), taken.gone, taken.again, news.take()];
}"""


def changed(run_id, *points):
    return {"id": run_id, "changed": ["metrics"], "points": [*points]}


def test_points_are_kept_only_of_runs_whose_curves_are_open_and_not_too_many(served, page):
    page.goto(served.url)

    def kept(*told):
        runs, gone, again, left = page.evaluate(NEWS, [["a", "b"], *told])
        assert left is None
        return {name: points for name, _, points in runs}, gone, again

    first, second = point(1, 0), point(2, 1)
    many = {"runs": [changed("a", *[first] * 6_000)]}
    state = {"runs": [{"id": "a", "changed": ["state"]}]}
    assert kept({"runs": [changed("a", first)]}, state, {"runs": [changed("a", second)]}) == (
        {"a": [first, second]},
        [],
        False,
    )
    assert kept({"runs": [changed("other", first)]})[0] == {"other": None}
    assert kept(many, {"runs": [changed("b", *[first] * 6_000)]})[0]["b"] is None
    assert kept(many, many)[0] == {"a": None}
    assert kept(many, many, {"runs": [changed("a", first)]})[0] == {"a": None}
    again = kept(many, {"gone": ["a"]}, {"runs": [changed("b", *[first] * 6_000)]}, {"again": True})
    assert (list(again[0]), len(again[0]["b"]), *again[1:]) == (["b"], 6_000, ["a"], True)
