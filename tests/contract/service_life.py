"""Runs one training run from start to end and prints its results.

    python service_life.py MODULE BASE_URL MODEL [CHAPTER…]

MODULE is an official release or our package; its own interpreter runs this script. So the script uses features that all
releases have, and checks for any other feature before using it. It asserts nothing: each chapter prints its results, why
it was skipped, or how it failed. `test_service_life.py` checks the results.
"""

import importlib
import importlib.util
import io
import json
import math
import multiprocessing
import os
import sys
import tarfile
import traceback
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from typing import Any

TEXT = list(range(40, 104))  # consecutive bytes: easy to learn and to recognise
PROMPT = TEXT[:8]
CHUNK = 1024  # the most items that clients put into one request
SEED = 7


class LeftOut(Exception):
    """The chapter needs a feature that this client does not have."""


class Life:
    """State that later chapters need from earlier ones."""

    def __init__(self, module: str, base_url: str, model: str) -> None:
        os.environ |= {
            "TINKER_BASE_URL": base_url,
            "TINKER_API_KEY": "tml-contract",
            "TINKER_PROJECT_ID": "contract",
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
        self.tinker = importlib.import_module(module)
        self.types = importlib.import_module(f"{module}.types")
        self.base_url, self.model = base_url, model
        self.service = self.tinker.ServiceClient()
        self.rest = (
            self.tinker.RestClient()
            if hasattr(self.tinker, "RestClient")
            else self.service.create_rest_client()
        )
        self.run: Any = self.service.create_lora_training_client(
            base_model=model, rank=8, seed=SEED, user_metadata={"purpose": "contract"}
        )
        self.state = ""

    # -- values ------------------------------------------------------------------------------

    def input(self, tokens: list[int]) -> Any:
        return self.types.ModelInput.from_ints(tokens)

    def datum(self, tokens: list[int], weight: float = 1.0, **tensors: list[float]) -> Any:
        inputs = tensors or {"weights": [weight] * (len(tokens) - 1)}
        return self.types.Datum(
            model_input=self.input(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
        )

    def batch(self) -> list[Any]:
        return [self.datum(TEXT), self.datum(TEXT[::-1]), self.datum(TEXT[20:37])]

    def adam(self, learning_rate: float = 1e-2) -> Any:
        return self.types.AdamParams(learning_rate=learning_rate)

    def params(self, max_tokens: int = 12, temperature: float = 0.0, **others: Any) -> Any:
        return self.types.SamplingParams(max_tokens=max_tokens, temperature=temperature, **others)

    # -- actions -----------------------------------------------------------------------------

    def step(self, client: Any, data: list[Any] | None = None) -> Any:
        """Run forward_backward and optim_step together; returns the result of the first."""
        passed = client.forward_backward(data or self.batch(), "cross_entropy")
        stepped = client.optim_step(self.adam())
        result = passed.result()
        stepped.result()
        return result

    def logprobs(self, client: Any) -> list[float]:
        result = client.forward(self.batch(), "cross_entropy").result()
        return [value for output in result.loss_fn_outputs for value in output["logprobs"].data]

    def gradient(self, client: Any) -> float:
        """The norm of the accumulated gradient. A step with learning rate 0 clears it."""
        result = client.optim_step(self.adam(0.0)).result()
        return float(result.metrics["grad_norm"])

    def greedy(self, sampler: Any, **params: Any) -> dict[str, Any]:
        sampled = sampler.sample(
            prompt=self.input(PROMPT), num_samples=1, sampling_params=self.params(**params)
        ).result()
        return told(sampled.sequences[0])

    def needs(self, owner: Any, method: str) -> Any:
        if not hasattr(owner, method):
            raise LeftOut(f"this release has no {method}")
        return getattr(owner, method)


def told(sequence: Any) -> dict[str, Any]:
    return {
        "tokens": [int(token) for token in sequence.tokens],
        "logprobs": [float(logprob) for logprob in sequence.logprobs],
        "stop_reason": str(sequence.stop_reason),
    }


def refusal(attempt: Any) -> dict[str, str] | None:
    """The error of an attempt; None if it succeeded."""
    try:
        attempt()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return None


def difference(ours: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, others, strict=True))


def fetched(url: str) -> bytes:
    """Download without a key, as any HTTP client can."""
    with urllib.request.urlopen(url) as response:
        content: bytes = response.read()
    return content


def tensor_names(safetensors: bytes) -> list[str]:
    length = int.from_bytes(safetensors[:8], "little")
    return sorted(set(json.loads(safetensors[8 : 8 + length])) - {"__metadata__"})


# -- chapters --------------------------------------------------------------------------------------


def capabilities(life: Life) -> dict[str, Any]:
    answer = life.service.get_server_capabilities()
    return {"models": [model.model_name for model in answer.supported_models]}


def info(life: Life) -> dict[str, Any]:
    answer = life.run.get_info()
    return {
        "model_id": answer.model_id,
        "run_id": life.run.model_id,
        "model_name": answer.model_data.model_name,
        "is_lora": answer.is_lora,
        "lora_rank": answer.lora_rank,
    }


def tokenizer(life: Life) -> dict[str, Any]:
    if not importlib.util.find_spec("transformers"):
        raise LeftOut("transformers is not installed beside this client")
    loaded = life.run.get_tokenizer()
    tokens = loaded.encode("Añb", add_special_tokens=False)
    return {"tokens": tokens, "text": loaded.decode(tokens)}


def seeds(life: Life) -> dict[str, Any]:
    """The first gradient of an adapter depends on its seed and on no other random state."""

    def first_gradient(seed: int) -> float:
        client = life.service.create_lora_training_client(
            base_model=life.model, rank=4, seed=seed, train_mlp=False, train_unembed=False
        )
        client.forward_backward(life.batch(), "cross_entropy")
        return life.gradient(client)

    return {"same": [first_gradient(SEED), first_gradient(SEED)], "other": first_gradient(8)}


def training(life: Life) -> dict[str, Any]:
    """Ten steps, all submitted before the first result is read."""
    passes, steps = [], []
    for _ in range(10):
        passes.append(life.run.forward_backward(life.batch(), "cross_entropy"))
        steps.append(life.run.optim_step(life.adam()))
    results = [promised.result() for promised in passes]
    first = results[0]
    return {
        "losses": [result.metrics["loss:sum"] for result in results],
        "first_logprob_sum": sum(sum(output["logprobs"].data) for output in first.loss_fn_outputs),
        "lengths": [len(output["logprobs"].data) for output in first.loss_fn_outputs],
        "optim_metrics": [dict(promised.result().metrics or {}) for promised in steps],
    }


def gradients(life: Life) -> dict[str, Any]:
    run, batch = life.run, life.batch()

    def accumulated(*batches: list[Any], forward: bool = False) -> float:
        promised = [run.forward_backward(data, "cross_entropy") for data in batches]
        if forward:
            promised.append(run.forward(batch, "cross_entropy"))
        for one in promised:
            one.result()
        return life.gradient(run)

    return {
        "whole": accumulated(batch),
        "in_parts": accumulated(*([datum] for datum in batch)),
        "with_a_forward": accumulated(batch, forward=True),
        "forward_alone": accumulated(forward=True),
        "twice": accumulated(batch, batch),
    }


def chunks(life: Life) -> dict[str, Any]:
    """More items than one request holds, compared with fewer items of higher weight."""
    run, repeats = life.run, 12
    texts = [TEXT[start : start + 4 + start % 3] for start in range(50)] * 2
    many = [life.datum(text) for _ in range(repeats) for text in texts]
    few = [life.datum(text, weight=float(repeats)) for text in texts]
    split = run.forward_backward(many, "cross_entropy").result()
    split_gradient = life.gradient(run)
    whole = run.forward_backward(few, "cross_entropy").result()
    whole_gradient = life.gradient(run)

    def rows(result: Any) -> list[list[float]]:
        return [list(output["logprobs"].data) for output in result.loss_fn_outputs]

    return {
        "is_split": len(many) > CHUNK,
        "losses": [split.metrics["loss:sum"], whole.metrics["loss:sum"]],
        "gradients": [split_gradient, whole_gradient],
        "lengths": [[len(row) for row in rows(split)], [len(row) for row in rows(whole)] * repeats],
        "difference": max(
            difference(one, other)
            for one, other in zip(rows(split), rows(whole) * repeats, strict=True)
        ),
    }


def soft_targets(life: Life) -> dict[str, Any]:
    """Two alternatives at each position; the second has weight 0."""
    types, targets, length = life.types, TEXT[1:], len(TEXT) - 1
    pairs = [token for target in targets for token in (target, target - 1)]
    shape = [length, 2]
    soft = types.Datum(
        model_input=life.input(TEXT[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=pairs, dtype="int64", shape=shape),
            "weights": types.TensorData(data=[1.0, 0.0] * length, dtype="float32", shape=shape),
        },
    )
    found = life.run.forward_backward([soft], "cross_entropy").result()
    soft_gradient = life.gradient(life.run)
    expected = life.run.forward_backward([life.datum(TEXT)], "cross_entropy").result()
    logprobs = found.loss_fn_outputs[0]["logprobs"]
    return {
        "shape": list(logprobs.shape),
        "losses": [found.metrics["loss:sum"], expected.metrics["loss:sum"]],
        "gradients": [soft_gradient, life.gradient(life.run)],
        "difference": difference(
            list(logprobs.data)[::2], list(expected.loss_fn_outputs[0]["logprobs"].data)
        ),
    }


def policy_losses(life: Life) -> dict[str, Any]:
    """Each loss on data sampled from a policy whose token probabilities were lower by a factor e^½."""
    answer = life.run.forward([life.datum(TEXT)], "cross_entropy").result()
    now = [float(value) for value in answer.loss_fn_outputs[0]["logprobs"].data]
    advantages = [0.5 + index % 3 for index in range(len(now))]
    datum = life.datum(TEXT, logprobs=[value - 0.5 for value in now], advantages=advantages)
    ratio = math.exp(0.5)
    total, weighted = sum(advantages), sum(p * a for p, a in zip(now, advantages, strict=True))
    cases: dict[str, tuple[str, dict[str, float] | None, float]] = {
        "importance_sampling": ("importance_sampling", None, -ratio * total),
        "ppo": ("ppo", None, -1.2 * total),
        "ppo with a bound": ("ppo", {"clip_high_threshold": 1.5}, -1.5 * total),
        "cispo": ("cispo", None, -ratio * weighted),
        "dro": ("dro", {"beta": 0.1}, -(weighted - 0.5 * 0.1 * 0.25 * len(now))),
    }
    told_of = {}
    for name, (loss_fn, config, expected) in cases.items():
        result = life.run.forward_backward([datum], loss_fn, config).result()
        logprobs = list(result.loss_fn_outputs[0]["logprobs"].data)
        told_of[name] = {
            "loss": result.metrics["loss:sum"],
            "expected": expected,
            "difference": difference(logprobs, now),
            "gradient": life.gradient(life.run),
        }
    return told_of


def custom_loss(life: Life) -> dict[str, Any]:
    """The negative sum of logprobs is the cross entropy, so both gradients must be equal."""
    if not importlib.util.find_spec("torch"):
        raise LeftOut("torch is not installed beside this client")

    def negative_sum(_: Any, logprobs: list[Any]) -> Any:
        loss = -sum(values.sum() for values in logprobs)
        return loss, {"custom": float(loss.detach())}

    result = life.run.forward_backward_custom(life.batch(), negative_sum).result()
    custom_gradient = life.gradient(life.run)
    expected = life.run.forward_backward(life.batch(), "cross_entropy").result()
    return {
        "metric": result.metrics["custom"],
        "loss": expected.metrics["loss:sum"],
        "gradients": [custom_gradient, life.gradient(life.run)],
        "outputs": len(result.loss_fn_outputs),
    }


def resuming(life: Life) -> dict[str, Any]:
    """One more step after a checkpoint, in the run itself and in runs resumed from the checkpoint."""
    life.state = life.run.save_state("half").result().path
    saved = life.logprobs(life.run)

    def after_a_step(client: Any) -> list[float]:
        life.step(client)
        return life.logprobs(client)

    went_on = after_a_step(life.run)
    exact = life.service.create_training_client_from_state_with_optimizer(life.state)
    fresh = life.service.create_training_client_from_state(life.state)
    facts: dict[str, Any] = {
        "path": life.state,
        "run_id": life.run.model_id,
        "new_run_id": exact.model_id,
        "new_rank": exact.get_info().lora_rank,
        "moved": difference(went_on, saved),
        "exact": difference(after_a_step(exact), went_on),
        "fresh_before": difference(life.logprobs(fresh), saved),
        "fresh_after": difference(after_a_step(fresh), went_on),
        "taken_name": refusal(lambda: life.run.save_state("half").result()),
    }
    life.run.load_state(life.state).result()
    facts["loaded"] = difference(life.logprobs(life.run), saved)
    life.run.load_state_with_optimizer(life.state).result()
    facts["loaded_exact"] = difference(after_a_step(life.run), went_on)
    return facts


def samplers(life: Life) -> dict[str, Any]:
    """Unnamed and named samplers are snapshots: further training does not change them."""
    frozen = life.run.save_weights_and_get_sampling_client()
    path = life.run.save_weights_for_sampler("named").result().path
    before = life.greedy(frozen)
    backwards = [life.datum(TEXT[::-1])] * 3
    for _ in range(5):
        life.step(life.run, backwards)
    named = life.service.create_sampling_client(model_path=path)
    facts = {
        "before": before,
        "frozen": life.greedy(frozen),
        "named": life.greedy(named),
        "path": path,
        "current": life.greedy(life.run.save_weights_and_get_sampling_client()),
    }
    if hasattr(frozen, "get_base_model"):
        facts["base_model"] = frozen.get_base_model()
    life.run.load_state(life.state).result()
    return facts


def sampling(life: Life) -> dict[str, Any]:
    sampler = life.run.save_weights_and_get_sampling_client()

    def drawn(count: int, **params: Any) -> list[list[int]]:
        sampled = sampler.sample(
            prompt=life.input(PROMPT),
            num_samples=count,
            sampling_params=life.params(temperature=1.5, **params),
        ).result()
        return [told(sequence)["tokens"] for sequence in sampled.sequences]

    at_once = [
        sampler.sample(
            prompt=life.input([*PROMPT, index]),
            num_samples=1,
            sampling_params=life.params(max_tokens=4, temperature=1.5),
        )
        for index in range(64)
    ]
    plain = told(
        sampler.sample(
            prompt=life.input(PROMPT),
            num_samples=1,
            sampling_params=life.params(temperature=1.0, seed=SEED),
        )
        .result()
        .sequences[0]
    )
    recomputed = sampler.compute_logprobs(life.input(PROMPT + plain["tokens"])).result()
    return {
        "seeded": [drawn(4, seed=11), drawn(4, seed=11)],
        "other_seed": drawn(4, seed=12),
        "greedy": [life.greedy(sampler), life.greedy(sampler)],
        "stop_token": life.greedy(sampler, stop=[TEXT[12]]),
        "stop_text": life.greedy(sampler, stop=[chr(TEXT[12]) + chr(TEXT[13])]),
        "at_once": [told(one.result().sequences[0])["tokens"] for one in at_once],
        "to_recomputed": difference(plain["logprobs"], list(recomputed)[len(PROMPT) :]),
        "bad_prompt": refusal(
            lambda: sampler.sample(
                prompt=life.input([10**6]), num_samples=1, sampling_params=life.params()
            ).result()
        ),
    }


def prompt_logprobs(life: Life) -> dict[str, Any]:
    """The sampler and the trainer score the same text with the same weights."""
    sampler = life.run.save_weights_and_get_sampling_client()
    computed = list(sampler.compute_logprobs(life.input(TEXT)).result())
    trained = life.run.forward([life.datum(TEXT)], "cross_entropy").result()
    asked = sampler.sample(
        prompt=life.input(TEXT),
        num_samples=1,
        sampling_params=life.params(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    included, topk = list(asked.prompt_logprobs), list(asked.topk_prompt_logprobs)
    return {
        "length": len(computed),
        "first": [computed[0], included[0], topk[0]],
        "to_trainer": difference(computed[1:], list(trained.loss_fn_outputs[0]["logprobs"].data)),
        "to_included": difference(computed[1:], included[1:]),
        "logprobs": [float(value) for value in computed[1:]],
        "topk": [[[int(token), float(logprob)] for token, logprob in row] for row in topk[1:]],
    }


def base_sampler(life: Life) -> dict[str, Any]:
    """Samples the base model, without the trained adapter."""
    sampler = life.service.create_sampling_client(base_model=life.model)
    values = sampler.compute_logprobs(life.input(TEXT)).result()
    untrained = life.service.create_lora_training_client(base_model=life.model, rank=2)
    answer = untrained.forward([life.datum(TEXT)], "cross_entropy").result()
    return {"difference": difference(values[1:], list(answer.loss_fn_outputs[0]["logprobs"].data))}


def pickled(life: Life) -> dict[str, Any]:
    """A sampling client in another process, while the original stays in use."""
    if life.tinker.SamplingClient.__reduce__ is object.__reduce__:
        raise LeftOut("sampling clients of this release cannot be pickled")
    sampler = life.run.save_weights_and_get_sampling_client()
    here = {"process": os.getpid(), **life.greedy(sampler)}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        there = pool.submit(_sampled_elsewhere, sampler, life.input(PROMPT), life.params()).result()
    return {"here": here, "there": there, "after": life.greedy(sampler)}


def _sampled_elsewhere(sampler: Any, prompt: Any, params: Any) -> dict[str, Any]:
    sampled = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result()
    return {"process": os.getpid(), **told(sampled.sequences[0])}


def bad_input(life: Life) -> dict[str, Any]:
    """Invalid requests are refused, and the run continues unchanged."""
    before = life.logprobs(life.run)
    too_short = life.types.Datum(
        model_input=life.input(TEXT[:-1]),
        loss_fn_inputs={"target_tokens": TEXT[1:9], "weights": [1.0] * 8},
    )

    def passed(datum: Any) -> Any:
        return lambda: life.run.forward_backward([datum], "cross_entropy").result()

    return {
        "token": refusal(passed(life.datum([1, 2, 10**6, 3]))),
        "lengths": refusal(passed(too_short)),
        "model": refusal(
            lambda: life.service.create_lora_training_client(base_model="no/such", rank=8)
        ),
        "sampler": refusal(
            lambda: life.service.create_sampling_client(
                model_path=life.state.replace("/weights/half", "/sampler_weights/none")
            )
        ),
        "difference": difference(life.logprobs(life.run), before),
        "gradient": life.gradient(life.run),
    }


def runs(life: Life) -> dict[str, Any]:
    run_id = life.run.model_id
    session_id = run_id.partition(":train:")[0]
    found = life.rest.get_training_run(run_id).result()
    by_path = life.rest.get_training_run_by_tinker_path(life.state).result()
    weights = life.rest.get_weights_info_by_tinker_path(life.state).result()
    listed = life.rest.list_training_runs(limit=100).result()
    return {
        "run_id": run_id,
        "ids": [found.training_run_id, by_path.training_run_id],
        "base_models": [found.base_model, weights.base_model],
        "ranks": [found.lora_rank, weights.lora_rank],
        "user_metadata": found.user_metadata,
        "last_checkpoint": found.last_checkpoint.tinker_path,
        "listed": [one.training_run_id for one in listed.training_runs],
        "total": listed.cursor.total_count,
        "session_id": session_id,
        "sessions": list(life.rest.list_sessions(limit=100).result().sessions),
        "session_runs": list(life.rest.get_session(session_id).result().training_run_ids),
    }


def _listed(life: Life, path: str) -> Any:
    answer = life.rest.list_checkpoints(life.run.model_id).result()
    return next((one for one in answer.checkpoints if one.tinker_path == path), None)


def checkpoints(life: Life) -> dict[str, Any]:
    path = life.run.save_weights_for_sampler("passing").result().path
    mine = life.rest.list_user_checkpoints(limit=100).result()
    seen = _listed(life, path)
    facts: dict[str, Any] = {
        "path": path,
        "kind": seen.checkpoint_type,
        "id": seen.checkpoint_id,
        "size": seen.size_bytes,
        "mine": [one.tinker_path for one in mine.checkpoints],
        "public": [seen.public],
    }
    life.rest.publish_checkpoint_from_tinker_path(path).result()
    facts["public"].append(_listed(life, path).public)
    life.rest.unpublish_checkpoint_from_tinker_path(path).result()
    facts["public"].append(_listed(life, path).public)
    life.rest.delete_checkpoint_from_tinker_path(path).result()
    facts["deleted"] = _listed(life, path) is None
    facts["after"] = refusal(lambda: life.service.create_sampling_client(model_path=path))
    facts["twice"] = refusal(lambda: life.rest.delete_checkpoint_from_tinker_path(path).result())
    return facts


def time_to_live(life: Life) -> dict[str, Any]:
    set_ttl = life.needs(life.rest, "set_checkpoint_ttl_from_tinker_path")
    path = life.run.save_state("short", ttl_seconds=7200).result().path

    def seconds() -> float | None:
        seen = _listed(life, path)
        return None if seen.expires_at is None else (seen.expires_at - seen.time).total_seconds()

    lifetimes = [seconds()]
    for ttl in (86_400, None):
        set_ttl(path, ttl).result()
        lifetimes.append(seconds())
    return {
        "lifetimes": lifetimes,
        "too_short": refusal(lambda: set_ttl(path, 60).result()),
        "too_short_to_save": refusal(
            lambda: life.run.save_state("shorter", ttl_seconds=60).result()
        ),
        "after": seconds(),
    }


def archive(life: Life) -> dict[str, Any]:
    address = life.needs(life.rest, "get_checkpoint_archive_url_from_tinker_path")
    client = life.service.create_lora_training_client(
        base_model=life.model, rank=4, train_mlp=False, train_unembed=False
    )
    life.step(client)
    path = client.save_weights_for_sampler("out").result().path
    answer = address(path).result()
    with tarfile.open(fileobj=io.BytesIO(fetched(answer.url))) as tar:
        files = {
            member.name.removeprefix("./"): tar.extractfile(member).read()  # type: ignore[union-attr]
            for member in tar
            if member.isfile()
        }
    return _adapter(files)


def external(life: Life) -> dict[str, Any]:
    life.needs(life.run, "save_weights_external")
    client = life.service.create_lora_training_client(
        base_model=life.model, rank=4, train_mlp=False, train_unembed=False
    )
    life.step(client)
    path = client.save_weights_external("out").result().path
    answer = life.rest.get_external_weights_urls(path).result()
    files = {name: fetched(url) for name, url in answer.urls.items()}
    listed = life.rest.list_checkpoints(client.model_id).result().checkpoints
    return {
        "path": path,
        "kinds": [one.checkpoint_type for one in listed],
        "aware": answer.expires.tzinfo is not None,
        **_adapter(files),
    }


def _adapter(files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "files": sorted(files),
        "config": json.loads(files["adapter_config.json"]),
        "tensors": tensor_names(files["adapter_model.safetensors"]),
    }


def copying(life: Life) -> dict[str, Any]:
    copy_weights = life.needs(life.service, "copy_weights")
    path = copy_weights(life.state).result()
    copied = life.service.create_training_client_from_state_with_optimizer(path)
    original = life.service.create_training_client_from_state_with_optimizer(life.state)
    return {
        "from": life.state,
        "to": path,
        "difference": difference(life.logprobs(copied), life.logprobs(original)),
    }


def closing(life: Life) -> dict[str, Any]:
    close = life.needs(life.service, "close")
    session_id = life.run.model_id.partition(":train:")[0]
    close("success").result()
    facts: dict[str, Any] = {
        "after": refusal(lambda: life.run.forward(life.batch(), "cross_entropy").result()),
        "sessions": list(life.rest.list_sessions(limit=100).result().sessions),
        "session_id": session_id,
        "checkpoint": _listed(life, life.state) is not None,
    }
    search = life.needs(life.rest, "search_sessions")
    found = search(life.types.SessionSearchRequest(session_id=session_id)).result()
    facts["status"] = [
        (one.status.type, one.status.reason.type, one.session_id) for one in found.sessions
    ]
    return facts


CHAPTERS = (
    capabilities,
    info,
    tokenizer,
    seeds,
    training,
    gradients,
    chunks,
    soft_targets,
    policy_losses,
    custom_loss,
    resuming,
    samplers,
    sampling,
    prompt_logprobs,
    base_sampler,
    pickled,
    bad_input,
    runs,
    checkpoints,
    time_to_live,
    archive,
    external,
    copying,
    closing,
)


def main() -> None:
    # Prints of the package must not mix with the results.
    facts, sys.stdout = sys.stdout, sys.stderr
    life = Life(*sys.argv[1:4])
    found: dict[str, Any] = {"version": life.tinker.__version__}
    wanted = sys.argv[4:] or [chapter.__name__ for chapter in CHAPTERS]
    for chapter in CHAPTERS:
        if chapter.__name__ not in wanted:
            continue
        try:
            found[chapter.__name__] = chapter(life)
        except LeftOut as reason:
            found[chapter.__name__] = {"left_out": str(reason)}
        except Exception:
            found[chapter.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(found), file=facts, flush=True)


if __name__ == "__main__":
    main()
