"""Take the pictures of the dashboard for the README and the guide, from a real run.

python scripts/screenshots.py [--model NAME] [--engine fake|torch] [--to DIRECTORY] [--all]

Needs `playwright` and a Chromium browser (Debian: apt-get install chromium).
"""

from __future__ import annotations

import argparse
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

import tinkex
from tinkex import types
from tinkex.testing import service

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
QUESTIONS = {
    "What is 2 + 3?": " 5",
    "What is 4 + 4?": " 8",
    "What is 1 + 6?": " 7",
    "What is 5 + 4?": " 9",
}
RUNS = (
    ("arithmetic, rank 8", 8, 1e-3, ["sft", "baseline"]),
    ("arithmetic, rank 32", 32, 1e-3, ["sft"]),
    ("arithmetic, low rate", 8, 1e-4, ["sft", "sweep"]),
)


#: Those of the README and the guide.
PICTURES = {"runs-light", "run-light", "run-dark", "samples-light", "playground-light"}


def datum(tokenizer: Any, question: str, answer: str) -> types.Datum:
    prompt = tokenizer.encode(question)
    tokens = prompt + tokenizer.encode(answer)
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def samples(client: tinkex.TrainingClient, tokenizer: Any) -> list[types.LoggedSample]:
    """A few answers of the model as it is now, with a reward for the right ones."""
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, temperature=0.9, seed=1)
    logged = []
    for question, answer in list(QUESTIONS.items())[:2]:
        prompt = types.ModelInput.from_ints(tokenizer.encode(question))
        result = sampler.sample(
            prompt, num_samples=3, sampling_params=params, topk_sample_logprobs=4
        ).result()
        for sequence in result.sequences:
            text = tokenizer.decode(sequence.tokens)
            logged.append(
                types.LoggedSample(
                    prompt=question,
                    text=text,
                    tokens=sequence.tokens,
                    logprobs=sequence.logprobs,
                    alternatives=[list(row or ()) for row in sequence.topk_logprobs or ()],
                    stop_reason=sequence.stop_reason,
                    reward=float(answer.strip() in text),
                    group=question,
                )
            )
    return logged


def train(url: str, model: str, steps: int, pace: float, stack: ExitStack) -> list[str]:
    """Train all runs; their clients stay open, so that the last is shown at work."""
    ids = []
    for name, rank, rate, tags in RUNS:
        client = stack.enter_context(
            tinkex.ServiceClient(base_url=url, api_key="tml-local", tags=tags)
        )
        training = client.create_lora_training_client(
            model, rank=rank, seed=1, user_metadata={"name": name}
        )
        tokenizer = training.get_tokenizer()
        data = [datum(tokenizer, *pair) for pair in QUESTIONS.items()]
        for step in range(1, steps + 1):
            training.forward_backward(data, "cross_entropy")
            warm = min(1.0, step / 10) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
            training.optim_step(types.AdamParams(learning_rate=rate * pace * warm)).result()
            if step == 1 or step % (steps // 3) == 0:
                shown = samples(training, tokenizer)
                reward = sum(each.reward or 0.0 for each in shown) / len(shown)
                training.log(step, {"eval/reward": reward}, shown).result()
        training.save_weights_for_sampler("final").result()
        training.save_state("step-last", ttl_seconds=7 * 86400).result()
        ids.append(training.model_id)
    return ids


def take(browser: Browser, url: str, ids: list[str], to: Path, *, everything: bool) -> None:
    sizes = {
        "light": (1280, 860, "light"),
        "dark": (1280, 860, "dark"),
        "phone": (390, 844, "light"),
    }
    parts = {
        "runs": "#/",
        "run": f"#/run/{ids[0]}",
        "samples": f"#/run/{ids[0]}/samples",
        "checkpoints": f"#/run/{ids[0]}/checkpoints",
        "compare": f"#/compare?runs={','.join(ids)}",
        "playground": "#/play",
        "service": "#/service",
    }
    for kind, (width, height, scheme) in sizes.items():
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=1.5,
        )
        for name, address in parts.items():
            page.goto(f"{url}/{address}")
            page.wait_for_selector("h1")
            if name == "playground":
                page.get_by_role("button", name="Add a model").click()
                page.get_by_label("Message 1").fill("Why is the sky blue? Answer in one sentence.")
                page.get_by_label("Seed").fill("1")
                page.get_by_label("Most tokens").fill("48")
                page.get_by_role("button", name="Run").click()
                page.wait_for_selector(".answer.done >> nth=1")
            page.wait_for_timeout(900)  # plots are drawn
            if everything or f"{name}-{kind}" in PICTURES:
                page.screenshot(path=to / f"dashboard-{name}-{kind}.png")
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tinkex/tiny")
    parser.add_argument("--engine", choices=["fake", "torch"], default="torch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--all", action="store_true", help="every part, dark and on a phone too")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with (
        service(options.engine, [options.model]) as running,
        ExitStack() as stack,
        sync_playwright() as playwright,
    ):
        pace = 30 if options.engine == "fake" else 1  # a table of bigrams learns in larger steps
        ids = train(running.url, options.model, options.steps, pace, stack)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(FLAGS))
        take(browser, running.url, ids, options.to, everything=options.all)
        browser.close()


if __name__ == "__main__":
    main()
