"""The local service follows the protocol with our client and with official clients of every dialect.

Each client runs `service_life.py` in its own interpreter against one service; the tests check what it printed. A release
whose environment cannot be created is reported as skipped, and so are features that a release does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.contract.conftest import RELEASES, environment

pytestmark = pytest.mark.contract

MODEL = "tinkex/tiny"
SCRIPT = Path(__file__).with_name("service_life.py")
SERVE = "from tinkex.cli.main import main; main()"
#: Timeout in seconds, far more than a run needs: a client that hangs fails its own tests, not the whole suite.
PATIENCE = 300

#: Our client again, with a service of two engines. `--engines N` runs all clients with N engines.
ON_POOL = "tinkex with 2 engines"

#: Chapters that each client cannot run. Skipping any other chapter fails a test.
LEFT_OUT = {
    "tinkex": set(),
    "0.7.0": {"pickled", "time_to_live", "external", "copying", "closing"},
    "0.18.2": {"custom_loss", "external", "copying", "closing"},
    "0.25.0": {"custom_loss", "external", "copying", "closing"},
    "0.36.0": {"custom_loss", "archive"},
}
COUNTING = list(range(48, 60))  # the continuation of the learned text after the prompt


@dataclass(frozen=True)
class Life:
    """The printed results of one client."""

    client: str
    facts: dict[str, Any]

    def chapter(self, name: str) -> dict[str, Any]:
        facts: dict[str, Any] = self.facts[name]
        if "error" in facts:
            pytest.fail(f"{self.client}, {name}:\n{facts['error']}", pytrace=False)
        if "left_out" in facts:
            pytest.skip(f"{self.client}: {facts['left_out']}")
        return facts


@pytest.fixture(scope="module")
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    engines = request.config.getoption("--engines")
    with serving(tmp_path_factory.mktemp("service"), "--engines", engines) as url:
        yield url


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("pool"), "--engines", "2") as url:
        yield url


@contextmanager
def serving(home: Path, *options: str) -> Iterator[str]:
    """The address of a service in a process of its own."""
    command = [sys.executable, "-c", SERVE, "serve", "--port", "0", "--base-model", MODEL, *options]
    with (
        (home / "log").open("w+") as log,
        subprocess.Popen(
            [*command, "--data-dir", home / "data"],
            # The model is so small that a second thread only costs time: idle threads spin.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        announced = process.stdout.readline().split()
        if not announced:
            log.seek(0)
            pytest.fail(f"the service did not start:\n{log.read()}", pytrace=False)
        yield announced[-1]
        process.terminate()


@pytest.fixture(scope="module", params=["tinkex", *RELEASES, ON_POOL])
def life(request: pytest.FixtureRequest) -> Life:
    on_pool = request.param == ON_POOL
    service: str = request.getfixturevalue("pool" if on_pool else "service")
    return lived("tinkex" if on_pool else request.param, service)


def lived(client: str, service: str, *chapters: str) -> Life:
    """The life of a client with a service: all chapters, or these."""
    ours = client == "tinkex"
    python = sys.executable if ours else environment(client)
    finished = subprocess.run(
        [python, SCRIPT, "tinkex" if ours else "tinker", service, MODEL, *chapters],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if finished.returncode:
        pytest.fail(f"the life of {client} ended early:\n{finished.stderr}", pytrace=False)
    return Life(client, json.loads(finished.stdout))


def close(value: float, relative: float = 1e-4) -> Any:
    return pytest.approx(value, rel=relative, abs=1e-6)


def same_sequence(sequence: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(
        sequence["tokens"] == other["tokens"]
        and sequence["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)
    )


def test_client_has_requested_version(life: Life) -> None:
    assert life.client in {"tinkex", life.facts["version"]}


def test_only_unsupported_chapters_are_skipped(life: Life) -> None:
    left_out = {name for name, facts in life.facts.items() if "left_out" in facts}
    assert left_out == LEFT_OUT[life.client]


# -- training ------------------------------------------------------------------------------------------


def test_capabilities_name_the_model(life: Life) -> None:
    assert life.chapter("capabilities")["models"] == [MODEL]


def test_info_describes_the_run(life: Life) -> None:
    info = life.chapter("info")
    assert info["model_id"] == info["run_id"]
    assert info["run_id"].endswith(":train:0")
    assert info["model_name"] == MODEL
    assert info["is_lora"] is True
    assert info["lora_rank"] == 8


def test_the_tokenizer_loads_without_a_network(life: Life) -> None:
    tokenizer = life.chapter("tokenizer")
    assert tokenizer["tokens"] == list("Añb".encode())
    assert tokenizer["text"] == "Añb"


def test_seed_determines_initial_adapter(life: Life) -> None:
    seeds = life.chapter("seeds")
    first, second = seeds["same"]
    assert first == second
    assert seeds["other"] != close(first, 1e-3)


def test_pipelined_steps_lower_the_loss(life: Life) -> None:
    training = life.chapter("training")
    losses = training["losses"]
    assert len(losses) == 10
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < losses[0] / 4


def test_a_loss_is_the_sum_over_all_tokens(life: Life) -> None:
    training = life.chapter("training")
    assert training["losses"][0] == close(-training["first_logprob_sum"])
    assert training["lengths"] == [63, 63, 16]


def test_a_step_reports_its_gradient(life: Life) -> None:
    metrics = life.chapter("training")["optim_metrics"]
    assert all(step["grad_norm"] > 0 for step in metrics)


def test_gradients_add_up(life: Life) -> None:
    gradients = life.chapter("gradients")
    assert gradients["whole"] > 0
    assert gradients["in_parts"] == close(gradients["whole"])
    assert gradients["twice"] == close(2 * gradients["whole"])


def test_forward_pass_does_not_change_gradients(life: Life) -> None:
    gradients = life.chapter("gradients")
    assert gradients["with_a_forward"] == close(gradients["whole"])
    assert gradients["forward_alone"] == 0


def test_batch_split_into_requests_counts_as_one(life: Life) -> None:
    chunks = life.chapter("chunks")
    assert chunks["is_split"]
    split, whole = chunks["lengths"]
    assert split == whole
    assert chunks["difference"] < 1e-4
    assert chunks["losses"][0] == close(chunks["losses"][1])
    assert chunks["gradients"][0] == close(chunks["gradients"][1], 1e-3)


def test_targets_may_have_alternatives(life: Life) -> None:
    soft = life.chapter("soft_targets")
    assert soft["shape"] == [63, 2]
    assert soft["losses"][0] == close(soft["losses"][1])
    assert soft["gradients"][0] == close(soft["gradients"][1])
    assert soft["difference"] < 1e-4


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "ppo with a bound", "cispo", "dro"])
def test_policy_losses_have_expected_values(life: Life, name: str) -> None:
    told = life.chapter("policy_losses")[name]
    assert told["loss"] == close(told["expected"])
    assert told["difference"] < 1e-4
    if name.startswith("ppo"):  # every ratio is outside the clipping bound, where the loss is flat
        assert told["gradient"] == 0
    else:
        assert told["gradient"] > 0


def test_a_custom_loss_has_its_own_gradient(life: Life) -> None:
    custom = life.chapter("custom_loss")
    assert custom["metric"] == close(custom["loss"])
    assert custom["gradients"][0] == close(custom["gradients"][1])
    assert custom["outputs"] == 3


# -- resuming --------------------------------------------------------------------------------------------


def test_a_run_resumes_exactly_where_it_was_saved(life: Life) -> None:
    resuming = life.chapter("resuming")
    assert resuming["path"] == f"tinker://{resuming['run_id']}/weights/half"
    assert resuming["new_run_id"] != resuming["run_id"]
    assert resuming["new_rank"] == 8
    assert resuming["moved"] > 1e-2
    assert resuming["exact"] == 0


def test_run_without_optimizer_state_diverges(life: Life) -> None:
    resuming = life.chapter("resuming")
    assert resuming["fresh_before"] == 0
    assert resuming["fresh_after"] > 1e-2


def test_run_can_load_earlier_checkpoint(life: Life) -> None:
    resuming = life.chapter("resuming")
    assert resuming["loaded"] == 0
    assert resuming["loaded_exact"] == 0


def test_checkpoint_name_already_in_use_is_refused(life: Life) -> None:
    assert (
        "already has a training checkpoint called 'half'"
        in life.chapter("resuming")["taken_name"]["text"]
    )


# -- sampling --------------------------------------------------------------------------------------------


def test_unnamed_sampler_is_a_snapshot(life: Life) -> None:
    samplers = life.chapter("samplers")
    assert samplers["before"]["tokens"] == COUNTING
    assert same_sequence(samplers["frozen"], samplers["before"])
    assert not same_sequence(samplers["current"], samplers["before"])


def test_named_sampler_is_a_snapshot(life: Life) -> None:
    samplers = life.chapter("samplers")
    assert samplers["path"].endswith(":train:0/sampler_weights/named")
    assert same_sequence(samplers["named"], samplers["before"])
    assert samplers.get("base_model", MODEL) == MODEL


def test_seed_reproduces_samples_that_otherwise_differ(life: Life) -> None:
    sampling = life.chapter("sampling")
    first, again = sampling["seeded"]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 4
    assert sampling["other_seed"] != first


def test_temperature_zero_samples_likeliest_tokens(life: Life) -> None:
    first, again = life.chapter("sampling")["greedy"]
    assert first["tokens"] == again["tokens"] == COUNTING
    assert first["stop_reason"] == "length"


def test_sample_includes_stop_sequence(life: Life) -> None:
    sampling = life.chapter("sampling")
    assert sampling["stop_token"]["tokens"] == COUNTING[:5]
    assert sampling["stop_token"]["stop_reason"] == "stop"
    assert sampling["stop_text"]["tokens"] == COUNTING[:6]
    assert sampling["stop_text"]["stop_reason"] == "stop"


def test_many_samples_at_once_all_arrive(life: Life) -> None:
    drawn = life.chapter("sampling")["at_once"]
    assert len(drawn) == 64
    assert all(1 <= len(tokens) <= 4 for tokens in drawn)


def test_sampled_logprobs_match_the_model(life: Life) -> None:
    assert life.chapter("sampling")["to_recomputed"] < 1e-3


def test_prompt_logprobs_match_the_trainer(life: Life) -> None:
    prompt = life.chapter("prompt_logprobs")
    assert prompt["length"] == 64
    assert prompt["first"] == [None, None, None]
    assert prompt["to_trainer"] < 1e-3
    assert prompt["to_included"] < 1e-3


def test_topk_prompt_tokens_are_sorted(life: Life) -> None:
    prompt = life.chapter("prompt_logprobs")
    for row, actual in zip(prompt["topk"], prompt["logprobs"], strict=True):
        logprobs = [logprob for _, logprob in row]
        assert len(row) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        assert actual <= logprobs[0] + 1e-3


def test_a_base_model_samples_untrained(life: Life) -> None:
    assert life.chapter("base_sampler")["difference"] < 1e-3


def test_a_sampling_client_works_in_another_process(life: Life) -> None:
    pickled = life.chapter("pickled")
    assert pickled["there"]["process"] != pickled["here"]["process"]
    assert same_sequence(pickled["there"], pickled["here"])
    assert same_sequence(pickled["after"], pickled["here"])


# -- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("token", "token 1000000 is outside the vocabulary"),
        ("lengths", "for an input of 63 tokens"),
        ("model", "no/such"),
        ("sampler", "sampler_weights/none"),
    ],
)
def test_invalid_input_is_refused_with_reason(life: Life, what: str, said: str) -> None:
    refusal = life.chapter("bad_input")[what]
    assert refusal is not None
    assert said in refusal["text"]


def test_a_prompt_outside_the_vocabulary_is_refused(life: Life) -> None:
    assert "outside the vocabulary" in life.chapter("sampling")["bad_prompt"]["text"]


def test_refused_request_does_not_change_run(life: Life) -> None:
    told = life.chapter("bad_input")
    assert told["difference"] == 0
    assert told["gradient"] == 0


# -- runs and checkpoints --------------------------------------------------------------------------------


def test_a_run_is_found_by_its_id_and_by_its_checkpoints(life: Life) -> None:
    runs = life.chapter("runs")
    assert runs["ids"] == [runs["run_id"]] * 2
    assert runs["base_models"] == [MODEL] * 2
    assert runs["ranks"] == [8, 8]
    assert runs["user_metadata"] == {"purpose": "contract"}
    assert runs["last_checkpoint"] == f"tinker://{runs['run_id']}/weights/half"


def test_runs_and_sessions_are_listed(life: Life) -> None:
    runs = life.chapter("runs")
    assert runs["run_id"] in runs["listed"]
    assert runs["total"] == len(runs["listed"])
    assert runs["session_id"] in runs["sessions"]
    assert runs["run_id"] in runs["session_runs"]


def test_checkpoints_are_listed(life: Life) -> None:
    checkpoints = life.chapter("checkpoints")
    assert checkpoints["kind"] == "sampler"
    assert checkpoints["id"] == "sampler_weights/passing"
    assert checkpoints["size"] > 0
    assert checkpoints["mine"][0] == checkpoints["path"]


def test_checkpoints_can_be_published_and_unpublished(life: Life) -> None:
    assert life.chapter("checkpoints")["public"] == [False, True, False]


def test_a_deleted_checkpoint_is_gone(life: Life) -> None:
    checkpoints = life.chapter("checkpoints")
    assert checkpoints["deleted"]
    assert checkpoints["after"]["type"] == "NotFoundError"
    assert checkpoints["twice"]["type"] == "NotFoundError"


def test_checkpoint_expires_after_its_ttl(life: Life) -> None:
    told = life.chapter("time_to_live")
    saved, longer, for_good = told["lifetimes"]
    assert saved == pytest.approx(7200, abs=1)
    # The TTL counts from when it was set, not from the save.
    assert 86_400 <= longer < 86_400 + PATIENCE
    assert for_good is None


def test_ttl_of_one_minute_is_refused(life: Life) -> None:
    told = life.chapter("time_to_live")
    assert "3600" in told["too_short"]["text"]
    assert "3600" in told["too_short_to_save"]["text"]
    assert told["after"] is None


@pytest.mark.parametrize("chapter", ["archive", "external"])
def test_weights_can_be_downloaded_as_adapter_files(life: Life, chapter: str) -> None:
    told = life.chapter(chapter)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(told["files"])
    assert told["config"]["r"] == 4
    assert told["config"]["lora_alpha"] > 0
    assert told["tensors"]
    # The run was created with train_mlp=False and train_unembed=False.
    assert all(".self_attn." in name for name in told["tensors"])


def test_external_weights_are_separate_checkpoint_type(life: Life) -> None:
    external = life.chapter("external")
    assert external["path"].endswith("/external_weights/out")
    assert external["kinds"] == ["external"]
    assert external["aware"]


def test_weights_can_be_copied(life: Life) -> None:
    copying = life.chapter("copying")
    assert copying["to"] != copying["from"]
    assert "/weights/" in copying["to"]
    assert copying["difference"] == 0


def test_closing_ends_session_and_keeps_checkpoints(life: Life) -> None:
    closing = life.chapter("closing")
    assert "closed" in closing["after"]["text"]
    assert closing["session_id"] in closing["sessions"]
    assert closing["checkpoint"]
    assert closing["status"] == [["client_finished", "success", closing["session_id"]]]
