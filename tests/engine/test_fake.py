"""The fake engine: it learns, samples and saves, and its results and errors match those of the real engine."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinkex.engine import base_models, checks, fake
from tinkex.engine.base_models import PreparedModel
from tinkex.engine.calls import SharedPasses
from tinkex.engine.fake import FakeEngine
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, SampleJob
from tinkex.errors import InvalidInputError, NotFoundError, TinkerError

from ..running import finish

V, END = 23, 22
SMALL = PreparedModel("fake/small", Path("nowhere"), 32, V, "bigram", False, (END,))
LARGE = PreparedModel("fake/large", Path("nowhere"), 4096, 49152, "bigram", False, (2,))
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)
TWIN = "tinkex/twin"  # another name for the tiny model
CLIPPED = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES: list[tuple[str, dict[str, float | str]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {**CLIPPED}),
    ("cispo", {}),
    ("cispo", {**CLIPPED}),
    ("dro", {}),
    ("dro", {"beta": 2.0}),
    ("gspo", {}),
    ("gspo", {**CLIPPED}),
]


@pytest.fixture
def engine():
    engine = FakeEngine([SMALL, LARGE], detokenize=lambda _, ids: "".join(chr(97 + i) for i in ids))
    engine.create_model("m", SMALL.name, LoraSpec(4))
    return engine


def examples(lengths=(5, 9, 3), seed=0, size=V):
    random = np.random.default_rng(seed)
    return [
        Example(
            random.integers(0, size, length).astype(np.int32),
            {
                "target_tokens": random.integers(0, size, length),
                "weights": random.choice([0.0, 0.5, 1.0, -0.7], length).astype(np.float32),
                "logprobs": random.uniform(-3.6, -2.7, length).astype(np.float32),
                "advantages": random.normal(size=length).astype(np.float32),
                "sequence_ratio_mask": (random.random(length) < 0.7).astype(np.float32),
            },
        )
        for length in lengths
    ]


def text():
    tokens = np.array([0, 1, 2, 3, 4, 5, 6, 7, END], np.int32)
    return [Example(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64)})]


def run(engine, data, loss_fn="cross_entropy", config=None, *, model="m", backward=True):
    return finish(engine.run_pass(model, PassJob(data, loss_fn, config or {}, backward)))


def train(engine, steps, model="m", **options):
    """Train and return the loss before each step."""
    losses = []
    for _ in range(steps):
        losses.append(run(engine, text(), model=model).metrics["loss:sum"])
        engine.optim_step(model, AdamStep(**{"learning_rate": 1e-2, **options}))
    return losses


def sample(engine, **options):
    """Run one job on an open sampler; return its result and the streamed tokens."""
    job = {"sampler_id": "s", "prompt_T": PROMPT, "max_tokens": 8, "stop_tokens": (), **options}
    engine.add_sample("job", SampleJob(**job))
    result, streamed = None, []
    while engine.sampling:
        for event in engine.sample_step():
            if event.result is None:
                streamed.append(event)
            else:
                result = event.result
    return result, streamed


# -- cost --------------------------------------------------------------------------------------------


def test_fake_engine_imports_no_model_library():
    program = """if True:
        import pathlib, sys, tempfile
        from tinkex.engine.base_models import PreparedModel
        from tinkex.engine.fake import FakeEngine
        from tinkex.engine.values import LoraSpec
        engine = FakeEngine([PreparedModel("x", pathlib.Path("."), 8, 9, "bigram", False, ())])
        engine.create_model("m", "x", LoraSpec(1))
        with tempfile.TemporaryDirectory() as directory:
            engine.save_state("m", pathlib.Path(directory, "a"), optimizer=True)
            engine.restore_model("n", "x", pathlib.Path(directory, "a"), optimizer=True)
        print(sorted({"torch", "transformers", "peft"} & set(sys.modules)))
    """
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_large_vocabulary_stores_only_trained_rows(engine):
    engine.create_model("large", LARGE.name, LoraSpec(4))
    data = [Example(PROMPT[:-1], {"target_tokens": PROMPT[1:].astype(np.int64)})]
    assert run(engine, data, model="large").logprobs[0] == pytest.approx([-10.9] * 4, abs=2)
    engine.optim_step("large", AdamStep())
    assert set(engine._models["large"].table.rows) == set(PROMPT[:-1].tolist())


# -- training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_gradients_equal_finite_differences(engine, name, config):
    engine.create_model("m", SMALL.name, LoraSpec(4, alpha=1.0))
    train(engine, 3, learning_rate=0.1)
    model, data = engine._models["m"], examples()
    run(engine, data, name, config)
    frozen = [held_constant(name, config, example, engine) for example in data]

    def loss():
        return sum(
            run(engine, [example], surrogate, settings, backward=False).metrics["loss:sum"]
            for surrogate, settings, example in frozen
        )

    for previous in {int(token) for example in data for token in example.tokens_T}:
        row = model.table.rows.get(previous, np.zeros(V, np.float32))
        for token in range(0, V, 5):
            sides = []
            for shift in (1e-2, -1e-2):
                model.table.rows[previous] = row + np.eye(V, dtype=np.float32)[token] * shift
                sides.append(loss())
            model.table.rows[previous] = row
            numeric = (sides[0] - sides[1]) / 2e-2
            exact = model.gradients.get(previous, np.zeros(V))[token]
            assert exact == pytest.approx(numeric, rel=2e-3, abs=1e-4)


def held_constant(name, config, example, engine):
    """An equivalent loss for finite differences: parts that `name` excludes from its gradient are constants."""
    inputs = dict(example.inputs)
    if name not in {"cispo", "gspo"}:
        return name, config, example
    logp = run(engine, [example], backward=False).logprobs[0]
    distance = logp - inputs["logprobs"]
    if name == "cispo":
        low, high = config.get("clip_low_threshold", 0), config.get("clip_high_threshold", 4)
        inputs["weights"] = (
            inputs["weights"] * inputs["advantages"] * np.exp(distance).clip(low, high)
        )
        return "cross_entropy", {}, Example(example.tokens_T, inputs)
    mask = inputs["sequence_ratio_mask"]
    inputs["logprobs"] = logp - (distance * mask).sum() / max(1, mask.sum())
    settings = config or {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    return "ppo", settings, Example(example.tokens_T, inputs)


@pytest.mark.parametrize(("name", "config"), LOSSES)
def test_losses_and_gradients_equal_those_of_the_real_engine(engine, name, config):
    import torch

    from tinkex.engine import losses

    train(engine, 3, learning_rate=1e-3)
    model, data = engine._models["m"], examples()
    result = run(engine, data, name, config)
    deltas = torch.zeros(V, V, dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for example in data:
        rows = np.stack([model.table.logprobs(int(token)) for token in example.tokens_T])
        logits = torch.tensor(rows) + 32.0 * deltas[torch.tensor(example.tokens_T.astype(np.int64))]
        targets = torch.tensor(example.inputs["target_tokens"])
        logp = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        inputs = {key: torch.tensor(value) for key, value in example.inputs.items()}
        inputs["example"] = torch.zeros(example.length)
        loss, settings = checks.check_loss(name, config)
        total = total + losses.loss_sum(loss, logp, inputs, settings)
    total.backward()
    assert deltas.grad is not None
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-6)
    ours = np.zeros((V, V))
    for token, row in model.gradients.items():
        ours[token] = row
    np.testing.assert_allclose(ours, deltas.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_adam_equals_torch_adamw(engine):
    import torch

    train(engine, 2)
    model = engine._models["m"]
    parameter = torch.zeros(V, V, requires_grad=True)
    with torch.no_grad():
        for token, row in model.table.rows.items():
            parameter[token] = torch.tensor(row)
    model.moments.clear()
    model.steps = 0
    theirs = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    for seed in range(5):
        run(engine, examples(seed=seed))
        parameter.grad = torch.zeros(V, V)
        for token, row in model.gradients.items():
            parameter.grad[token] = torch.tensor(row)
        norm = torch.nn.utils.clip_grad_norm_([parameter], 2.0)
        theirs.step()
        options = AdamStep(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=2.0)
        assert engine.optim_step("m", options)["grad_norm"] == pytest.approx(norm.item())
    for token in range(V):
        row = model.table.rows.get(token, np.zeros(V))
        np.testing.assert_allclose(row, parameter[token].detach().numpy(), atol=1e-6)


def test_training_loop_reduces_the_loss(engine):
    losses = train(engine, 60)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.05 * losses[0]
    engine.open_sampler("s", SMALL.name, model_id="m")
    result, _ = sample(engine, prompt_T=np.array([0]), temperature=0.0, stop_tokens=None)
    assert result.tokens[0].tolist() == text()[0].inputs["target_tokens"].tolist()
    assert result.stop_reasons == ["stop"]


def test_soft_targets_sum_over_their_alternatives(engine):
    targets = np.array([[1, 2], [3, 3]])
    weights = np.array([[0.25, 0.75], [1.0, -0.5]], np.float32)
    soft = Example(PROMPT[:2], {"target_tokens": targets, "weights": weights})
    result = run(engine, [soft])
    gradients = dict(engine._models["m"].gradients)
    assert result.logprobs[0].shape == (2, 2)
    assert result.metrics["loss:sum"] == pytest.approx(-(result.logprobs[0] * weights).sum())
    engine.optim_step("m", AdamStep(learning_rate=0.0))
    for column in range(2):
        hard = {"target_tokens": targets[:, column], "weights": weights[:, column]}
        run(engine, [Example(PROMPT[:2], hard)])
    for token, row in engine._models["m"].gradients.items():
        np.testing.assert_allclose(row, gradients[token], atol=1e-5)


def test_zero_weight_masks_an_infinite_ratio(engine):
    example = examples((4,))[0]
    inputs = {
        **example.inputs,
        "logprobs": np.array([-1e9, -5, -5, -5], np.float32),
        "weights": np.array([0, 1, 1, 1], np.float32),
    }
    result = run(engine, [Example(example.tokens_T, inputs)], "ppo")
    assert np.isfinite(result.metrics["loss:sum"])
    assert np.isfinite(engine.optim_step("m", AdamStep())["grad_norm"])


def test_passes_accumulate_until_the_step_and_forward_adds_no_gradient(engine):
    engine.create_model("apart", SMALL.name, LoraSpec(4))
    data = examples()
    run(engine, data)
    for example in data:
        run(engine, [example], model="apart")
        run(engine, data, model="apart", backward=False)
    assert engine.optim_step("apart", AdamStep()) == engine.optim_step("m", AdamStep())
    assert run(engine, data, model="apart").metrics == run(engine, data).metrics


def test_abandoned_pass_adds_no_gradient(engine):
    work = engine.run_pass("m", PassJob(examples(), "cross_entropy"))
    next(work)
    work.close()
    assert engine.optim_step("m", AdamStep()) == {"grad_norm": 0.0, "learning_rate": 1e-4}


# -- checkpoints -------------------------------------------------------------------------------------


def test_training_resumed_from_a_checkpoint_is_bit_identical(engine, tmp_path):
    train(engine, 5)
    size = engine.save_state("m", tmp_path / "state", optimizer=True)
    assert size == sum(file.stat().st_size for file in (tmp_path / "state").iterdir())
    engine.restore_model("resumed", SMALL.name, tmp_path / "state", optimizer=True)
    engine.restore_model("fresh", SMALL.name, tmp_path / "state", optimizer=False)
    undisturbed = train(engine, 5)
    assert train(engine, 5, "resumed") == undisturbed
    assert train(engine, 5, "fresh") != undisturbed


def test_untrained_model_can_be_saved_and_restored(engine, tmp_path):
    engine.save_state("m", tmp_path / "a", optimizer=True)
    engine.restore_model("n", SMALL.name, tmp_path / "a", optimizer=True)
    assert train(engine, 2, "n") == train(engine, 2)


def test_failed_save_keeps_the_old_checkpoint(engine, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    engine.save_state("m", tmp_path / "a", optimizer=True)
    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match="space"):
        engine.save_state("m", tmp_path / "a", optimizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    engine.restore_model("n", SMALL.name, tmp_path / "a", optimizer=True)


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"]
)
def test_damaged_file_is_refused_by_name(engine, tmp_path, name):
    train(engine, 1)
    engine.save_state("m", tmp_path / "a", optimizer=True)
    content = bytearray((tmp_path / "a" / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match=name):
        engine.open_sampler("s", SMALL.name, directory=tmp_path / "a")


def test_checkpoint_that_does_not_fit_is_refused(engine, tmp_path):
    train(engine, 1)
    engine.save_state("m", tmp_path / "a", optimizer=False)
    with pytest.raises(InvalidInputError, match="does not fit"):
        engine.restore_model("n", LARGE.name, tmp_path / "a", optimizer=False)
    (tmp_path / "a" / "tinkex.json").unlink()
    with pytest.raises(InvalidInputError, match="without tinkex"):
        engine.restore_model("n", SMALL.name, tmp_path / "a", optimizer=False)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(InvalidInputError, match=r"adapter_model\.safetensors is missing, damaged"):
        engine.restore_model("n", SMALL.name, tmp_path / "a", optimizer=False)


# -- sampling ----------------------------------------------------------------------------------------


def test_training_does_not_change_an_open_sampler(engine, tmp_path):
    train(engine, 3)
    engine.save_state("m", tmp_path / "a", optimizer=False)
    engine.open_sampler("s", SMALL.name, model_id="m")
    before = sample(engine, seed=1, prompt_logprobs=True)[0]
    train(engine, 20)
    after = sample(engine, seed=1, prompt_logprobs=True)[0]
    engine.open_sampler("s", SMALL.name, directory=tmp_path / "a")
    saved = sample(engine, seed=1, prompt_logprobs=True)[0]
    engine.open_sampler("s", SMALL.name, model_id="m")
    trained = sample(engine, seed=1, prompt_logprobs=True)[0]
    for other in (after, saved):
        np.testing.assert_array_equal(other.logprobs, before.logprobs)
        np.testing.assert_array_equal(other.prompt_logprobs_T, before.prompt_logprobs_T)
    assert not np.array_equal(trained.prompt_logprobs_T, before.prompt_logprobs_T)


def test_sampled_and_prompt_logprobs_equal_those_of_training(engine):
    train(engine, 5)
    engine.open_sampler("s", SMALL.name, model_id="m")
    result, _ = sample(engine, seed=3, prompt_logprobs=True)
    whole = np.concatenate([PROMPT, result.tokens[0]])
    example = Example(whole[:-1], {"target_tokens": whole[1:].astype(np.int64)})
    logprobs = run(engine, [example], backward=False).logprobs[0]
    np.testing.assert_array_equal(result.logprobs[0], logprobs[len(PROMPT) - 1 :])
    np.testing.assert_array_equal(result.prompt_logprobs_T[1:], logprobs[: len(PROMPT) - 1])
    assert np.isnan(result.prompt_logprobs_T[0])


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 + 1])
def test_seed_repeats_the_samples_and_samples_of_one_job_differ(engine, seed):
    engine.open_sampler("s", SMALL.name)
    first, again, next_seed = (
        [tuple(tokens) for tokens in sample(engine, seed=chosen, num_samples=3)[0].tokens]
        for chosen in (seed, seed, seed + 1)
    )
    assert again == first
    assert next_seed != first
    assert len(set(first)) == 3


def test_jobs_without_seed_differ_but_repeat_in_a_new_engine():
    runs = []
    for _ in range(2):
        engine = FakeEngine([SMALL])
        engine.open_sampler("s", SMALL.name)
        runs.append([tuple(sample(engine)[0].tokens[0]) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def distribution(engine, **options):
    ids, values = sample(engine, max_tokens=1, topk_sample_logprobs=V, **options)[0].topk_sampled[0]
    logp = np.empty(V)
    logp[ids[0]] = values[0]
    return logp


def test_draws_follow_the_temperature_scaled_distribution(engine):
    engine.open_sampler("s", SMALL.name)
    plain, hot = distribution(engine), distribution(engine, temperature=2.0)
    np.testing.assert_allclose(hot, plain / 2 - np.log(np.exp(plain / 2).sum()), atol=1e-5)
    many, _ = sample(engine, seed=5, max_tokens=1, num_samples=2000, temperature=2.0)
    counts = np.bincount([int(tokens[0]) for tokens in many.tokens], minlength=V)
    # The total variation of 2000 fair draws over 23 values stays well below this limit.
    assert 0.5 * np.abs(counts / 2000 - np.exp(hot)).sum() < 0.1
    assert many.logprobs[0][0] == pytest.approx(hot[many.tokens[0][0]], abs=1e-5)


def test_top_k_and_top_p_keep_the_most_likely_tokens(engine):
    engine.open_sampler("s", SMALL.name)
    order = np.argsort(-distribution(engine))
    chances = np.exp(distribution(engine))[order]
    for options, kept in (
        ({"top_k": 1}, 1),
        ({"top_k": 4}, 4),
        ({"top_p": 1e-6}, 1),
        ({"top_p": float(chances[:5].sum()) - 1e-3}, 5),
        ({"top_k": 10, "top_p": float(chances[:6].sum() / chances[:10].sum()) - 1e-3}, 6),
    ):
        result, _ = sample(engine, seed=2, max_tokens=1, num_samples=500, **options)
        assert {int(tokens[0]) for tokens in result.tokens} == set(order[:kept].tolist())
    greedy, _ = sample(engine, max_tokens=1, temperature=0.0)
    assert greedy.tokens[0].tolist() == [order[0]]


def test_stop_token_or_string_ends_a_sample_and_is_included(engine):
    engine.open_sampler("s", SMALL.name)
    free, _ = sample(engine, seed=4, max_tokens=None)
    tokens = free.tokens[0].tolist()
    assert free.stop_reasons == ["length"]
    assert len(tokens) == SMALL.context_length - len(PROMPT)
    cut = tokens.index(tokens[6]) + 1
    stopped, _ = sample(engine, seed=4, max_tokens=None, stop_tokens=(tokens[6],))
    assert (stopped.tokens[0].tolist(), stopped.stop_reasons) == (tokens[:cut], ["stop"])
    stop_text = "".join(chr(97 + token) for token in tokens[4:7])
    worded, _ = sample(engine, seed=4, max_tokens=None, stop_texts=(stop_text, "never"))
    assert (worded.tokens[0].tolist(), worded.stop_reasons) == (tokens[:7], ["stop"])
    ends, _ = sample(engine, seed=4, num_samples=40, max_tokens=None, stop_tokens=None)
    assert set(ends.stop_reasons) == {"stop", "length"}
    assert all(
        (found[-1] == END) == (reason == "stop")
        for found, reason in zip(ends.tokens, ends.stop_reasons, strict=True)
    )


def test_prompt_logprobs_can_be_limited_to_the_last_tokens_and_given_for_targets(engine):
    engine.open_sampler("s", SMALL.name)
    targets = np.tile(np.arange(3), (len(PROMPT) - 1, 1))
    targets[0, 0] = -1
    whole, _ = sample(
        engine, prompt_logprobs=True, topk_prompt_logprobs=V, target_prompt_tokens=targets
    )
    ids, values = whole.topk_prompt
    for position in range(1, len(PROMPT)):
        found = dict(zip(ids[position].tolist(), values[position].tolist(), strict=True))
        assert found[PROMPT[position]] == whole.prompt_logprobs_T[position]
        assert values[position].tolist() == sorted(values[position], reverse=True)
        expected = [found[token] if token >= 0 else 0.0 for token in targets[position - 1]]
        assert whole.target_prompt_logprobs[position - 1].tolist() == expected
    end, _ = sample(engine, prompt_logprobs=True, prompt_logprobs_last_n=2, topk_prompt_logprobs=2)
    assert np.isnan(end.prompt_logprobs_T).tolist() == [True, True, True, False, False]
    np.testing.assert_array_equal(end.prompt_logprobs_T[-2:], whole.prompt_logprobs_T[-2:])
    assert (end.topk_prompt[1] == -99999.0).all(-1).tolist() == [True, True, True, False, False]


def test_stream_yields_every_token_of_the_result(engine):
    engine.open_sampler("s", SMALL.name)
    result, streamed = sample(engine, seed=1, num_samples=2, stream=True)
    for index in range(2):
        mine = [event for event in streamed if event.index == index]
        assert [event.token for event in mine] == result.tokens[index].tolist()
        assert [event.logprob for event in mine] == result.logprobs[index].tolist()


def test_cancelled_job_does_not_affect_others(engine):
    engine.open_sampler("s", SMALL.name)
    alone, _ = sample(engine, seed=6)
    engine.add_sample("gone", SampleJob("s", PROMPT, stream=True))
    engine.add_sample("stays", SampleJob("s", PROMPT, max_tokens=8, seed=6, stop_tokens=()))
    engine.sample_step()
    engine.cancel_sample("gone")
    engine.close_sampler("s")  # running jobs continue
    events = [event for _ in range(7) for event in engine.sample_step()]
    assert [event.job_id for event in events] == ["stays"]
    assert not engine.sampling
    assert events[0].result.tokens[0].tolist() == alone.tokens[0].tolist()


# -- same behaviour as the real engine ---------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A fake and a real engine for the same model."""
    from tinkex.engine.engine import TorchEngine

    spec = base_models.parse_spec(base_models.TINY)
    tiny = base_models.prepare(spec, tmp_path_factory.mktemp("models"))
    models = [tiny, dataclasses.replace(tiny, name=TWIN)]
    return FakeEngine(models), TorchEngine(models)


def test_both_engines_have_the_same_methods_and_losses(both):
    from tinkex.engine import losses

    ours, theirs = (
        {
            name: inspect.signature(method)
            for name, method in vars(type(engine)).items()
            if not name.startswith("_") and not isinstance(method, property)
        }
        for engine in both
    )
    # The fake computes every pass alone, so it has no part in a pass of several engines.
    shared = {name for name in vars(SharedPasses) if not name.startswith("_")}
    assert ours == {name: each for name, each in theirs.items() if name not in shared}
    assert shared <= theirs.keys()
    assert isinstance(FakeEngine.sampling, property)
    assert list(fake._TERMS) == list(losses.TERMS) == list(checks.LOSSES)


def shape(value: Any) -> Any:
    """Types and shapes of a value, without its content."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape
    if dataclasses.is_dataclass(value):
        return {
            field.name: shape(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shape(item) for item in value]
    return type(value)


def soft():
    inputs = {"target_tokens": np.array([[1, 2, 3]] * 5), "weights": np.ones((5, 3), np.float32)}
    return [Example(PROMPT, inputs)]


def trained(engine):
    run(engine, examples())
    return engine.optim_step("m", AdamStep(grad_clip_norm=1.0))


def saved(engine, directory, optimizer):
    trained(engine)
    size = engine.save_state("m", directory, optimizer=optimizer)
    engine.restore_model("n", base_models.TINY, directory, optimizer=optimizer)
    engine.open_sampler("saved", base_models.TINY, directory=directory)
    texts = {file.name: json.loads(file.read_text()) for file in directory.glob("*.json")}
    texts["adapter_config.json"].pop("target_modules")
    return size, sorted(file.name for file in directory.iterdir()), texts


def sampled(**options):
    def scenario(engine, _):
        engine.open_sampler("s", base_models.TINY, model_id="m")
        return sample(engine, **options)

    return scenario


ANSWERS = {
    **{
        name: lambda e, _, name=name: run(e, examples(), name)
        for name, config in LOSSES
        if not config
    },
    "soft targets": lambda e, _: run(e, soft()),
    "mixed targets": lambda e, _: run(e, soft() + text()),
    "forward": lambda e, _: run(e, examples(), backward=False),
    "step": lambda e, _: trained(e),
    "empty step": lambda e, _: e.optim_step("m", AdamStep()),
    "weights": lambda e, d: saved(e, d / "a", False),
    "state": lambda e, d: saved(e, d / "a", True),
    "sample": sampled(num_samples=2),
    "greedy": sampled(temperature=0.0, top_k=5, top_p=0.5),
    "stream": sampled(num_samples=2, stream=True),
    "no room": sampled(max_tokens=0, prompt_logprobs=True),
    "no room for alternatives": sampled(max_tokens=0, topk_sample_logprobs=2, num_samples=2),
    "prompt": sampled(prompt_logprobs=True, prompt_logprobs_last_n=2, topk_prompt_logprobs=3),
    "one token": sampled(prompt_T=PROMPT[:1], prompt_logprobs=True, topk_prompt_logprobs=3),
    "targets": sampled(target_prompt_tokens=np.zeros((4, 2), np.int64)),
    "alternatives": sampled(topk_sample_logprobs=4, num_samples=2),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_both_engines_return_values_of_the_same_shape(both, tmp_path, name):
    shapes = []
    for engine in both:
        engine.create_model("m", base_models.TINY, LoraSpec(2))
        directory = tmp_path / type(engine).__name__
        shapes.append(shape(ANSWERS[name](engine, directory)))
    assert shapes[0] == shapes[1]


def without(name, loss_fn="ppo"):
    def scenario(engine, _):
        example = examples((4,))[0]
        inputs = {key: value for key, value in example.inputs.items() if key != name}
        run(engine, [Example(example.tokens_T, inputs)], loss_fn)

    return scenario


def given(loss_fn="ppo", tokens=None, **inputs):
    def scenario(engine, _):
        good, bad = examples((4, 4))
        bad = Example(bad.tokens_T if tokens is None else tokens, {**bad.inputs, **inputs})
        run(engine, [good, bad], loss_fn)

    return scenario


def from_state(engine, directory):
    engine.save_state("m", directory, optimizer=False)
    engine.restore_model("n", base_models.TINY, directory, optimizer=True)


def damaged(name):
    def scenario(engine, directory):
        engine.save_state("m", directory, optimizer=True)
        (directory / name).write_text("{")
        engine.open_sampler("s", base_models.TINY, directory=directory)

    return scenario


def torn(name, content=b"torn"):
    """A checkpoint with an invalid file whose checksum matches."""

    def scenario(engine, directory):
        engine.save_state("m", directory, optimizer=True)
        (directory / name).write_bytes(content)
        manifest = directory / "tinkex.json"
        if name != manifest.name:
            facts = json.loads(manifest.read_text())
            manifest.write_text(json.dumps({**facts, "sha256": {}}))
        engine.restore_model("n", base_models.TINY, directory, optimizer=True)

    return scenario


NOT_TRAINED = LoraSpec(2, train_attn=False, train_mlp=False, train_unembed=False)
OUTSIDE = np.array([1, 9999, 2, 3])
MISTAKES = {
    "base model": lambda e, _: e.create_model("n", "other/model", LoraSpec(2)),
    "base model of state": lambda e, d: e.restore_model("n", "other/model", d, optimizer=False),
    "base model of sampler": lambda e, _: e.open_sampler("s", "other/model"),
    "other base model": lambda e, _: e.open_sampler("s", TWIN, model_id="m"),
    "other base model, unknown": lambda e, _: e.open_sampler("s", "other", model_id="m"),
    "nothing to train": lambda e, _: e.create_model("n", base_models.TINY, NOT_TRAINED),
    "model of pass": lambda e, _: e.run_pass("nobody", PassJob([], "ppo")),
    "model of step": lambda e, _: e.optim_step("nobody", AdamStep()),
    "model of save": lambda e, d: e.save_state("nobody", d, optimizer=False),
    "model of sampler": lambda e, _: e.open_sampler("s", base_models.TINY, model_id="nobody"),
    "sampler": lambda e, _: e.add_sample("job", SampleJob("nobody", PROMPT)),
    "loss": lambda e, _: run(e, examples(), "mystery"),
    "setting": lambda e, _: run(e, examples(), "dro", {"clip_low_threshold": 1.0}),
    "setting of none": lambda e, _: run(e, examples(), "cross_entropy", {"beta": 1.0}),
    "setting's type": lambda e, _: run(e, examples(), "dro", {"beta": "much"}),
    "no data": lambda e, _: run(e, []),
    "no tokens": given(tokens=np.zeros(0, np.int32)),
    "too many tokens": given(tokens=np.zeros(3000, np.int32)),
    "token outside": given(tokens=OUTSIDE),
    "negative token": given(tokens=np.array([-1, 0, 0, 0])),
    "target outside": given(target_tokens=OUTSIDE),
    "targets' length": given(target_tokens=np.zeros(3, np.int64)),
    "targets' type": given("cross_entropy", target_tokens=np.zeros(4, np.float32)),
    "targets without width": given("cross_entropy", target_tokens=np.zeros((4, 0), np.int64)),
    "targets' rank": given("cross_entropy", target_tokens=np.zeros((4, 1, 1), np.int64)),
    "soft targets": given(target_tokens=np.zeros((4, 2), np.int64)),
    "weights' length": given(weights=np.zeros(3, np.float32)),
    "advantages' length": given(advantages=np.zeros(5, np.float32)),
    "weights not finite": given(weights=np.array([1, 0, np.nan, 0], np.float32)),
    "soft weights not finite": given(
        "cross_entropy", target_tokens=np.zeros((4, 2), np.int64), weights=np.full((4, 2), np.inf)
    ),
    "advantages not finite": given(advantages=np.array([0, np.inf, 0, 0], np.float32)),
    "logprobs not finite": given("gspo", logprobs=np.array([0, 0, 0, -np.inf], np.float32)),
    "mask not finite": given("gspo", sequence_ratio_mask=np.full(4, np.nan, np.float32)),
    "no targets": without("target_tokens"),
    "no logprobs": without("logprobs"),
    "no advantages": without("advantages"),
    "no mask": without("sequence_ratio_mask", "gspo"),
    "empty prompt": sampled(prompt_T=PROMPT[:0]),
    "prompt outside": sampled(prompt_T=OUTSIDE),
    "full prompt": sampled(prompt_T=np.zeros(2048, np.int32)),
    "alternatives to prompt": sampled(topk_prompt_logprobs=9999),
    "alternatives to sample": sampled(topk_sample_logprobs=9999),
    "prompt target outside": sampled(target_prompt_tokens=np.full((4, 1), 9999)),
    "prompt targets' type": sampled(target_prompt_tokens=np.full((4, 1), np.nan)),
    "prompt targets' rank": sampled(target_prompt_tokens=np.zeros(4, np.int64)),
    "prompt targets' length": sampled(target_prompt_tokens=np.zeros((5, 1), np.int64)),
    "no tokenizer": sampled(stop_texts=("stop",)),
    "no checkpoint": lambda e, d: e.restore_model("n", base_models.TINY, d, optimizer=False),
    "no checkpoint to sample": lambda e, d: e.open_sampler("s", base_models.TINY, directory=d),
    "no optimizer": from_state,
    "damaged weights": damaged("adapter_model.safetensors"),
    "damaged optimizer": damaged("optimizer.safetensors"),
    "damaged manifest": damaged("tinkex.json"),
    "torn weights": torn("adapter_model.safetensors"),
    "torn optimizer": torn("optimizer.safetensors"),
    "foreign manifest": torn("tinkex.json", b"[1]"),
    "empty manifest": torn("tinkex.json", b"{}"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_both_engines_raise_the_same_errors(both, tmp_path, name):
    refusals = []
    for engine in both:
        engine.create_model("m", base_models.TINY, LoraSpec(2))
        with pytest.raises(TinkerError) as caught:
            MISTAKES[name](engine, tmp_path / type(engine).__name__)
        assert not engine.sampling
        refusals.append((type(caught.value), str(caught.value)))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] in {InvalidInputError, NotFoundError}


def test_engines_refuse_each_others_checkpoints(both, tmp_path):
    for writer, reader in (both, reversed(both)):
        writer.create_model("m", base_models.TINY, LoraSpec(2))
        directory = tmp_path / type(writer).__name__
        writer.save_state("m", directory, optimizer=True)
        with pytest.raises(InvalidInputError) as caught:
            reader.restore_model("n", base_models.TINY, directory, optimizer=True)
        assert caught.value.field == "path"
