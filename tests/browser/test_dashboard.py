"""The dashboard as a person uses it, in a real browser against a real service."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading

import pytest
from click.testing import CliRunner

import tinkex
from tests.contract.conftest import environment
from tinkex import types
from tinkex.cli.main import cli
from tinkex.server.auth import Keys

from .conftest import (
    BASE,
    HIDE,
    logged,
    more_steps,
    run_url,
    steps_shown,
    sync_api,
    trained,
)

expect = sync_api.expect
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"


# -- watching ------------------------------------------------------------------------------------------


def test_the_loss_curve_grows_while_a_client_trains(served, client, page):
    training = trained(client, "growing", steps=2)
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("2")
    figure = page.get_by_role("figure", name="loss,")
    before = figure.get_attribute("aria-label")
    more_steps(training, 10)
    expect(steps_shown(page)).to_have_text("12")
    expect(figure).not_to_have_attribute("aria-label", before)
    assert "lowest" in figure.get_attribute("aria-label")
    # Nothing was loaded again: the same document is there.
    assert page.evaluate("performance.getEntriesByType('navigation').length") == 1


OFFICIAL = """
import sys, tinker
from tinker import types
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local")
training = service.create_lora_training_client("tinkex/tiny", rank=4)
tokens = list(b"abcabcabc")
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 8},
)
for _ in range(6):
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
print("done")
"""


def test_a_run_of_the_official_client_appears_by_itself(served, page):
    python = environment("0.36.0")
    page.goto(served.url)
    page.get_by_text("Nothing has been trained yet").wait_for()
    done = subprocess.run(
        [python, "-c", OFFICIAL, served.url], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "done", done.stderr
    row = page.get_by_role("row").filter(has_text=":train:")
    expect(row.locator(".steps")).to_have_text("6")
    expect(row.locator(".spark path")).to_have_count(1)


def test_two_runs_are_compared_with_the_settings_that_differ(served, client, page):
    trained(client, "slow", rate=0.01)
    trained(client, "fast", rate=0.2)
    page.goto(served.url)
    page.get_by_label("Compare slow").check()
    page.get_by_label("Compare fast").check()
    page.get_by_role("button", name="Compare 2").click()
    page.get_by_role("heading", name="Settings that differ").wait_for()
    figure = page.get_by_role("figure", name="loss,")
    figure.wait_for()
    expect(figure).to_have_attribute("aria-label", re.compile("slow: .*fast: "))
    row = page.get_by_role("row", name="optimizer.learning_rate")
    assert {"0.01", "0.2"} <= set(row.inner_text().split())
    assert page.get_by_role("row", name="lora.rank").count() == 0


def test_search_filter_and_sorting_narrow_the_list(served, page):
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local", tags=["night"]) as client:
        trained(client, "apple", steps=3)
        trained(client, "banana", steps=1)
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local") as client:
        trained(client, "cherry", steps=2)
        page.goto(served.url)
        names = page.locator("td.name a")
        expect(names).to_have_count(3)
        page.get_by_label("Search runs").fill("ana")
        expect(names).to_have_text(["banana"])
        page.get_by_label("Search runs").fill("")
        page.get_by_label("Tag").select_option("night")
        expect(names).to_have_count(2)
        page.get_by_label("Tag").select_option("")
        page.get_by_role("button", name="Steps").click()
        expect(names).to_have_text(["apple", "cherry", "banana"])
        page.get_by_label("State").select_option("failed")
        page.get_by_text("No run fits").wait_for()


def test_plots_zoom_by_keyboard_and_show_log_scale_and_smoothing(served, client, page):
    training = trained(client, "zoomed", steps=40)
    page.goto(run_url(served, training))
    plot = page.get_by_role("application", name="loss:")
    plot.focus()
    all_button = page.get_by_role("button", name="Show all")
    expect(all_button).to_be_disabled()
    with page.expect_request(re.compile("/metrics.*start=")):
        plot.press("+")
    expect(all_button).to_be_enabled()
    plot.press("ArrowRight")
    plot.press("0")
    expect(all_button).to_be_disabled()
    page.get_by_label("Log scale").check()
    page.get_by_label("Smooth").fill("0.9")
    with page.expect_request(re.compile("axis=tokens")):
        page.get_by_label("By").select_option("tokens")
    page.get_by_role("figure", name="loss,").wait_for()


def test_values_that_are_not_finite_are_named_beside_the_curve(served, client, page):
    training = trained(client, "odd", steps=1)
    for step, number in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        training.log(step, {"odd": number}).result()
    page.goto(run_url(served, training))
    figure = page.get_by_role("figure", name="odd,")
    expect(figure.locator(".odd")).to_have_text(["1 × NaN", "1 × ∞"])
    expect(figure).to_have_attribute("aria-label", re.compile("from 1 to 2"))


# -- samples -------------------------------------------------------------------------------------------


def test_samples_by_step_by_reward_and_by_group(served, client, page):
    training = trained(client, "rollouts", steps=1)
    for step in (1, 2):
        training.log(
            step,
            samples=[
                {"prompt": "2+2", "text": f"{step}: {number}", "reward": reward, "group": group}
                for number, reward, group in ((3, 0.0, "a"), (4, 1.0, "a"), (5, 0.5, "b"))
            ],
        ).result()
    page.goto(run_url(served, training, "/samples"))
    texts = page.get_by_label("Text")
    expect(texts).to_have_text(["2: 3", "2: 4", "2: 5"])
    page.get_by_role("button", name="Previous step").click()
    expect(texts).to_have_text(["1: 3", "1: 4", "1: 5"])
    page.get_by_label("Order").select_option("best")
    expect(texts).to_have_text(["1: 4", "1: 5", "1: 3"])
    page.get_by_label("Groups").check()
    expect(page.locator("section.group")).to_have_count(2)
    page.get_by_role("slider", name="Step").fill("1")
    expect(texts.first).to_have_text("2: 4")


def test_tokens_are_coloured_and_show_their_alternatives(served, client, page):
    training = trained(client, "tokens", steps=1)
    sample = {
        "tokens": list(b"abc"),
        "logprobs": [-0.01, -1.0, -9.0],
        "alternatives": [[(97, -0.01), (98, -4.0)], [(98, -1.0), (120, -0.5)], []],
    }
    training.log(1, samples=[sample]).result()
    page.goto(run_url(served, training, "/samples"))
    tokens = page.locator(".token")
    expect(tokens).to_have_text(["a", "b", "c"])
    assert [each.get_attribute("class") for each in tokens.all()] == [
        "token s0",
        "token s1",
        "token s5",
    ]
    tokens.nth(1).hover()
    shown = page.locator(".alternatives")
    expect(shown).to_contain_text("x")
    expect(shown).to_contain_text("60.7 %")


def test_a_long_sample_is_cut_and_can_be_downloaded_whole(served, client, page):
    training = trained(client, "long", steps=1)
    training.log(1, samples=[{"text": "y" * (10 << 20)}]).result()
    page.goto(run_url(served, training, "/samples"))
    expect(page.get_by_label("Text")).to_have_text("y" * 4000)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download it").click()
    assert download.value.path().stat().st_size > 10 << 20


# -- checkpoints ---------------------------------------------------------------------------------------


def test_a_run_is_deleted_after_a_confirmation_that_names_what_is_deleted(served, page):
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local") as open_client:
        training = trained(open_client, "to be deleted", steps=2)
        training.save_state("last").result()
        trained(open_client, "to be kept", steps=1)
        page.goto(run_url(served, training))
        page.get_by_role("button", name="Delete…").click()
        asked = page.get_by_role("dialog")
        expect(asked).to_contain_text("close its client first")
        asked.get_by_role("button", name="Keep it").click()
    # The end of a session is not a request of the run: the page gets it with the next `beat` event.
    expect(page.get_by_text("ended", exact=True)).to_be_visible(timeout=30_000)
    page.get_by_role("button", name="Delete…").click()
    expect(asked).to_contain_text(training.model_id)
    expect(asked).to_contain_text("its checkpoint")
    expect(asked).to_contain_text("last")
    asked.get_by_role("button", name="Delete to be deleted").click()
    expect(page.get_by_role("row", name="to be kept")).to_have_count(1)
    expect(page.get_by_role("row", name="to be deleted")).to_have_count(0)


def test_a_checkpoint_is_published_given_an_expiry_downloaded_and_deleted(served, client, page):
    training = trained(client, "saved", steps=1)
    training.save_state("keep").result()
    training.save_state("lose").result()
    page.goto(run_url(served, training, "/checkpoints"))
    row = page.get_by_role("row", name="keep")
    page.get_by_role("button", name="Publish keep").click()
    page.get_by_role("button", name="Publish", exact=True).click()
    expect(row).to_contain_text("public")
    page.get_by_role("button", name="Set when keep expires").click()
    page.get_by_label("Days from now").fill("3")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(row).to_contain_text("days")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download keep").click()
    assert download.value.suggested_filename == "keep.tar"
    page.get_by_role("button", name="Use keep in code").click()
    expect(page.get_by_role("dialog")).to_contain_text("create_training_client_from_state")
    command = page.get_by_label("Shell").inner_text()
    said = CliRunner().invoke(
        cli, [*shlex.split(command)[1:], "--base-url", served.url, "--api-key", "tml-local"]
    )
    assert said.exit_code == 0, said.output
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Delete lose").click()
    asked = page.get_by_role("dialog")
    expect(asked).to_contain_text(f"tinker://{training.model_id}/weights/lose")
    asked.get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("row", name="lose")).to_have_count(1)
    page.get_by_role("button", name="Delete lose").click()
    asked.get_by_role("button", name="Delete lose").click()
    expect(page.get_by_role("row", name="lose")).to_have_count(0)
    rest = client.create_rest_client()
    kept = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [(each.checkpoint_id, each.public) for each in kept] == [("weights/keep", True)]
    assert kept[0].expires_at is not None


# -- playground ----------------------------------------------------------------------------------------


def test_two_checkpoints_answer_side_by_side_as_the_api_does(served, client, page):
    training = trained(client, "player", steps=3)
    first = training.save_weights_for_sampler("early").result().path
    more_steps(training, 10, 0.5)
    second = training.save_weights_for_sampler("late").result().path
    page.goto(f"{served.url}/#/play?models={first},{second}")
    page.get_by_label("Plain prompt").check()
    page.get_by_label("Prompt", exact=True).fill("abcab")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Most tokens").fill("9")
    page.get_by_role("button", name="Run").click()
    answers = page.locator(".answer.done")
    expect(answers).to_have_count(2)
    params = types.SamplingParams(max_tokens=9, temperature=0.5, seed=7)
    for place, path in enumerate((first, second)):
        sampler = client.create_sampling_client(model_path=path)
        prompt = types.ModelInput.from_ints(sampler.get_tokenizer().encode("abcab"))
        drawn = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
        text = sampler.get_tokenizer().decode(drawn.sequences[0].tokens)
        assert answers.nth(place).locator("[data-text]").get_attribute("data-text") == text
    page.get_by_role("button", name="Copy as code").click()
    code = page.get_by_role("dialog").locator("code").inner_text()
    compile(code, "playground", "exec")
    assert first in code
    assert "seed=7" in code


def test_code_of_the_playground_runs(served, page):
    page.goto(f"{served.url}/#/play")
    page.get_by_label("Plain prompt").check()
    page.get_by_label("Prompt", exact=True).fill('say "hi"')
    page.get_by_label("Most tokens").fill("3")
    page.get_by_role("button", name="Copy as code").click()
    code = page.get_by_role("dialog").locator("code").inner_text()
    code = code.replace("ServiceClient(", 'ServiceClient(api_key="tml-local", ')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- bad days ------------------------------------------------------------------------------------------


@pytest.mark.failing_requests
def test_a_wrong_key_is_refused_and_a_right_one_stays_in_the_tab(start, browser, page, tmp_path):
    file = tmp_path / "keys"
    file.write_text("ann: tml-ann-key-1\nbob: tml-bob-key-1\n")
    served = start(keys=Keys.from_file(file))
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-ann-key-1") as client:
        training = trained(client, "of ann")
        page.goto(served.url)
        page.get_by_label("API key").fill("tml-wrong-key")
        page.get_by_role("button", name="Open").click()
        page.get_by_role("dialog").get_by_text("does not know the API key").wait_for()
        page.get_by_label("API key").fill("tml-ann-key-1")
        page.get_by_role("button", name="Open").click()
        page.get_by_role("link", name="of ann").wait_for()
        expect(page.locator(".connection")).to_have_text("Live")
        more_steps(training, 3)
        expect(page.get_by_role("row", name="of ann").locator(".steps")).to_have_text("8")
        assert page.context.cookies() == []
        assert page.evaluate("Object.values(localStorage).join()").find("tml-") == -1
        other = page.context.new_page()
        other.goto(served.url)
        other.get_by_label("API key").fill("tml-bob-key-1")
        other.get_by_role("button", name="Open").click()
        other.get_by_text("Nothing has been trained yet").wait_for()
        other.goto(f"{served.url}/#/run/{training.model_id}")
        other.get_by_text("There is no run").wait_for()


@pytest.mark.failing_requests
def test_the_page_comes_back_after_a_restart_and_loses_nothing(served, client, page):
    training = trained(client, "survivor", steps=3)
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("3")
    served.stop()
    expect(page.locator(".connection.offline")).to_have_count(1)
    served.start()
    expect(page.locator(".connection.live")).to_have_count(1)
    more_steps(training, 4)
    expect(steps_shown(page)).to_have_text("7")
    expect(page.get_by_role("figure", name="loss,")).to_be_visible()


def test_page_of_an_unknown_run_says_that_it_does_not_exist(served, page, request):
    request.node.add_marker(pytest.mark.failing_requests)
    page.goto(f"{served.url}/#/run/nobody:train:0")
    page.get_by_text("There is no run").wait_for()


def test_scripts_in_names_tags_and_samples_stay_text(served, page):
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local", tags=[SCRIPT]) as client:
        training = trained(client, SCRIPT, steps=1)
        training.log(
            1, {SCRIPT: 1.0}, [{"prompt": SCRIPT, "text": SCRIPT, "group": SCRIPT}]
        ).result()
        page.goto(served.url)
        page.get_by_role("link", name=SCRIPT).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(SCRIPT)
        expect(page.locator(".tag").first).to_have_text(SCRIPT)
        expect(page.locator("figure h3", has_text=SCRIPT)).to_have_count(1)
        page.get_by_role("link", name="Samples").click()
        expect(page.get_by_label("Text")).to_have_text(SCRIPT)
        page.get_by_role("link", name="Configuration").click()
        expect(page.get_by_role("row", name="run.name")).to_contain_text(SCRIPT)
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("main script").count() == 0


def test_everything_is_reached_by_keyboard(served, client, page):
    trained(client, "by keys")
    page.goto(served.url)
    page.get_by_role("link", name="by keys").wait_for()
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "by keys":
            break
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="by keys").wait_for()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.ariaLabel || document.activeElement.textContent || document.activeElement.type"
            )
        )
    assert {"Samples", "Checkpoints", "Configuration"} <= reached
    assert any(each.startswith("loss:") for each in reached)


def test_controls_have_names_and_both_colour_schemes_have_contrast(served, client, page):
    training = trained(client, "named")
    training.save_state("kept").result()
    parts = (
        "",
        f"run/{training.model_id}",
        f"run/{training.model_id}/checkpoints",
        "compare",
        "play",
        "service",
    )
    for part in parts:
        page.goto(f"{served.url}/#/{part}")
        page.locator("h1").first.wait_for()
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('button, a, input, select, textarea')].filter((each) =>
                each.offsetParent && !(each.ariaLabel || each.textContent.trim() || each.labels?.length || each.title || each.querySelector('img[alt]')))
                .map((each) => each.outerHTML)"""
        )
        assert unnamed == [], part
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        ratio = page.evaluate(
            """() => { const shade = (text) => { const [r, g, b] = text.match(/[0-9.]+/g).slice(0, 3).map((part) => { const c = part / 255;
                return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
              const soft = shade(getComputedStyle(document.querySelector('.soft')).color), back = shade(getComputedStyle(document.body).backgroundColor);
              return (Math.max(soft, back) + 0.05) / (Math.min(soft, back) + 0.05); }"""
        )
        assert ratio >= 4.5, scheme


def test_the_page_fits_a_phone(served, client, page):
    training = trained(client, "pocket")
    training.save_state("kept").result()
    page.set_viewport_size({"width": 390, "height": 844})
    for part in (
        "",
        f"run/{training.model_id}",
        f"run/{training.model_id}/checkpoints",
        "play",
        "service",
    ):
        page.goto(f"{served.url}/#/{part}")
        page.locator("h1").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, part


def test_the_service_page_draws_what_happens_and_lists_failures(served, client, page):
    training = trained(client, "busy")
    with pytest.raises(tinkex.RequestFailedError):
        training.load_state("tinker://nobody:train:0/weights/a").result()
    page.goto(f"{served.url}/#/service")
    page.get_by_role("figure", name="Training, trained").wait_for()
    expect(page.get_by_role("row", name="load_weights")).to_contain_text("nobody")
    assert BASE in page.locator("main").inner_text()
    engines = page.get_by_role("table", name="Engines")
    expect(engines.get_by_role("row").nth(1)).to_contain_text("up")


def test_a_run_in_the_queue_says_what_it_waits_for(served, page):
    from tests.server.api import Api

    with Api(served.url) as api:
        model = api.model()
        model.next_seq += 1
        model.send("optim_step", adam_params={})
        page.goto(f"{served.url}/#/run/{model.model_id}/configuration")
        expect(page.locator(".state")).to_have_text("waiting")
        page.get_by_text("for request 1 of its client").wait_for()
        expect(page.get_by_role("row", name="optim_step")).to_have_count(1)


def test_many_steps_a_second_keep_the_page_alive(served, client, page):
    training = trained(client, "rush", steps=1)
    page.goto(run_url(served, training))
    page.get_by_role("figure", name="loss,").wait_for()
    worker = threading.Thread(target=more_steps, args=(training, 150, 0.01))
    worker.start()
    worker.join()
    expect(steps_shown(page)).to_have_text("151")


# -- cost ----------------------------------------------------------------------------------------------

#: Counts how often canvases are cleared, which uPlot does once for each drawing.
COUNT_DRAWINGS = """
  window.drawings = 0;
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...where) { window.drawings += 1; return clear.apply(this, where); };
"""


def test_a_step_is_drawn_once_in_each_plot_without_reading_anything(served, client, page):
    training = trained(client, "frugal", steps=70)
    page.add_init_script(COUNT_DRAWINGS)
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("70")
    page.get_by_role("figure", name="loss,").locator("canvas").wait_for()
    plots = page.locator("figure canvas").count()
    before = page.evaluate("window.drawings")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("71")
    assert asked == []
    # Changes of the queue may be told apart from the step; only the step is drawn.
    assert page.evaluate("window.drawings") - before == plots


def test_points_that_were_told_while_curves_are_read_are_drawn_with_them(served, client, page):
    training = trained(client, "overtaken", steps=1)
    logged(training, 5.0, 1.0)
    held = []

    def hold(route):
        held.append((route, route.fetch()))

    page.route("**/metrics?*", hold)
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("1")
    logged(training, 6.0, first=3)
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("2")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    for route, answer in held:
        route.fulfill(response=answer)
    page.get_by_role("figure", name="mine, mine: from 5 to 6, lowest 1").wait_for()
    assert (len(held), asked) == (1, [])


def test_curves_with_missing_points_are_read_again(served, client, page):
    """As if an event was lost: the first answer lacks the second point, and no event tells of it."""
    training = trained(client, "gap", steps=1)
    logged(training, 5.0, 1.0)

    def shorten(route):
        answer = route.fetch()
        found = answer.json()
        curve = found["metrics"]["mine"]
        curve["x"], curve["y"], curve["points"] = curve["x"][:1], curve["y"][:1], 1
        route.fulfill(response=answer, json=found)

    page.route("**/metrics?*", shorten, times=1)
    page.goto(run_url(served, training))
    page.get_by_role("figure", name="mine, mine: from 5 to 5, lowest 5").wait_for()
    with page.expect_request(re.compile("/metrics")):
        logged(training, 6.0, first=3)
    page.get_by_role("figure", name="mine, mine: from 5 to 6, lowest 1").wait_for()


@pytest.mark.failing_requests
def test_curves_that_could_not_be_read_are_read_with_the_next_step(served, client, page):
    training = trained(client, "unlucky", steps=2)
    page.route("**/metrics?*", lambda route: route.fulfill(status=503, json={}), times=1)
    page.goto(run_url(served, training))
    page.get_by_text("The service answered 503.").wait_for()
    more_steps(training, 1)
    page.get_by_role("figure", name="loss,").wait_for()
    expect(page.get_by_text("The service answered 503.")).to_have_count(0)


def test_curves_follow_the_runs_that_are_compared_and_the_axis(served, client, page):
    low, high = trained(client, "low", steps=1), trained(client, "high", steps=1)
    logged(low, 1.0, 2.0)
    logged(high, 10.0, 20.0)
    page.goto(f"{served.url}/#/compare?runs={low.model_id},{high.model_id}")
    page.get_by_role("figure", name="low: from 1 to 2, lowest 1; high: from 10 to 20").wait_for()
    page.get_by_role("button", name="Remove low").click()
    page.get_by_role("figure", name="mine, high: from 10 to 20").wait_for()
    page.get_by_label("By").select_option("tokens")
    logged(low, 3.0, first=3)
    logged(high, 30.0, first=3)
    page.get_by_role("figure", name="mine, high: from 10 to 30, lowest 10").wait_for()


LONGER = """async ([curves, rows, asked]) => {
  const { longer } = await import("/static/curves.js");
  return longer(curves, rows, { axis: "step", width: 4, ...asked });
}"""


def row(step, number, value=1.5, name="a"):
    return {
        "step": step,
        "tokens": 10 * step,
        "time": 100 + step,
        "values": {name: [number, value]},
    }


def test_new_points_make_curves_longer_or_say_that_these_must_be_read(served, page):
    page.goto(served.url)
    known = {"x": [1, 2], "y": [0.5, 0.25], "odd": [], "points": 2}

    def longer(*rows, curve=known, **asked):
        return page.evaluate(LONGER, [{"a": curve}, rows, asked])

    assert longer(row(3, 2))["a"] == {"x": [1, 2, 3], "y": [0.5, 0.25, 1.5], "odd": [], "points": 3}
    assert longer(row(2, 1), row(3, 2))["a"]["x"] == [1, 2, 3]  # the first was read already
    assert longer(row(3, 2), row(4, 3))["a"]["x"] == [1, 2, 3, 4]
    assert longer(row(3, 2, "nan"))["a"]["odd"] == [[3, "NaN", 1]]
    assert longer(row(3, 2, "-inf"))["a"]["y"] == [0.5, 0.25, None]
    assert longer(row(9, 0, name="__proto__"), row(9, 0, name="b"))["b"]["x"] == [9]
    tokens = {"x": [10, 20], "y": [0.5, 0.25], "odd": [], "points": 2}
    assert longer(row(3, 2), curve=tokens, axis="tokens")["a"]["x"] == [10, 20, 30]
    # A gap, a step before the last one, more points than places, and points that stand for several steps.
    assert longer(row(4, 3)) is None
    assert longer(row(1, 2)) is None
    assert longer(row(3, 2), row(4, 3), row(5, 4)) is None
    assert longer(row(3, 2), curve={**known, "low": [0, 0], "high": [1, 1]}) is None
    # Outside of the part that is shown a point is only counted, and a gap is still seen.
    outside = longer(row(3, 2), start=0, end=2)["a"]
    assert (outside["x"], outside["points"]) == ([1, 2], 3)
    assert longer(row(4, 3), start=0, end=2) is None


def test_new_samples_are_shown_and_read_no_curves(served, client, page):
    training = trained(client, "talking", steps=1)
    training.log(1, samples=[{"text": "first"}]).result()
    page.goto(run_url(served, training, "/samples"))
    expect(page.get_by_label("Text")).to_have_text("first")
    training.log(2, samples=[{"text": "second"}]).result()
    expect(page.get_by_label("Text")).to_have_text("second")
    page.get_by_role("link", name="Metrics").click()
    page.get_by_role("figure", name="loss,").wait_for()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    training.log(3, samples=[{"text": "third"}]).result()
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("2")
    assert asked == []


def test_nothing_moves_on_a_page_of_a_run_that_trains(served, client, page):
    training = trained(client, "still", steps=3)
    page.goto(run_url(served, training))
    expect(page.locator(".title .state")).to_have_text("training")
    assert page.evaluate("document.getAnimations().length") == 0


def test_a_hidden_page_reads_and_draws_nothing_until_it_is_seen_again(served, client, page):
    training = trained(client, "hidden", steps=2)
    logged(training, 5.0, 1.0)
    page.add_init_script(COUNT_DRAWINGS)
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("2")
    page.get_by_role("figure", name="mine,").locator("canvas").wait_for()
    page.evaluate(HIDE, True)
    before = page.evaluate("window.drawings")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    with tinkex.ServiceClient(base_url=served.url, api_key="tml-local") as other:
        more_steps(training, 3)
        logged(training, 0.5, 6.0, first=3)
        last = trained(other, "later", steps=1)
        with page.context.new_page() as seen:
            seen.goto(run_url(served, last))
            expect(steps_shown(seen)).to_have_text("1")
    assert asked == []
    assert steps_shown(page).inner_text() == "2"
    assert page.evaluate("window.drawings") == before
    page.evaluate(HIDE, False)
    expect(steps_shown(page)).to_have_text("5")
    page.get_by_role("figure", name="mine, mine: from 5 to 6, lowest 0.5").wait_for()


def test_every_metric_of_a_run_has_a_plot(served, client, page):
    training = trained(client, "very many", steps=1)
    training.log(1, {f"metric {number:03}": 1.0 for number in range(120)}).result()
    page.goto(run_url(served, training))
    expect(page.get_by_role("figure", name="metric ")).to_have_count(120)


def test_metrics_may_be_called_like_what_every_object_has(served, client, page):
    odd, plain = trained(client, "odd", steps=1), trained(client, "plain", steps=1)
    odd.log(1, {"constructor": 1.0, "__proto__": 2.0}).result()
    page.goto(f"{served.url}/#/compare?runs={odd.model_id},{plain.model_id}")
    expect(page.get_by_role("figure", name="constructor, ")).to_be_visible()
    expect(page.get_by_role("figure", name="__proto__, ")).to_be_visible()


def test_curves_with_more_steps_than_places_are_read_at_a_calm_pace(served, client, page):
    training = trained(client, "long", steps=400)
    page.add_init_script("window.performance.now = () => 1e6 + (window.passed ?? 0)")
    page.goto(run_url(served, training))
    expect(steps_shown(page)).to_have_text("400")
    page.get_by_role("figure", name="loss,").locator("canvas").wait_for()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("401")
    assert asked == []  # the number is there, the curve moves by less than a pixel
    page.evaluate("window.passed = 2000")
    with page.expect_request(re.compile("/metrics")):
        more_steps(training, 1)
    expect(steps_shown(page)).to_have_text("402")


def test_plots_out_of_sight_are_drawn_when_scrolled_to(served, client, page):
    training = trained(client, "many", steps=1)
    for step in (1, 2):
        training.log(step, {f"metric {number:02}": float(step) for number in range(20)}).result()
    page.goto(run_url(served, training))
    page.get_by_role("figure", name="loss,").locator("canvas").wait_for()
    last = page.get_by_role("figure", name="metric 19,")
    expect(last).to_have_attribute("aria-label", re.compile("from 1 to 2"))
    expect(last.locator("canvas")).to_have_count(0)
    last.scroll_into_view_if_needed()
    expect(last.locator("canvas")).to_have_count(1)
