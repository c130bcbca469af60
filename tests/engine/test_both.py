"""Tests that both the real and the fake engine must pass; they compare numbers, not only shapes."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tinkex._wire.pass_parts import PassPart
from tinkex.engine import base_models
from tinkex.engine.base_models import TINY
from tinkex.engine.engine import TorchEngine
from tinkex.engine.fake import FakeEngine
from tinkex.engine.values import AdamStep, Array, Example, LoraSpec, PassJob, SampleJob
from tinkex.errors import InvalidInputError, NotFoundError

from ..running import finish

CONTEXT, V = 16, 264


@pytest.fixture(scope="module", params=[FakeEngine, TorchEngine])
def engine(request, device, tmp_path_factory):
    """An engine whose model has a short context."""
    spec = base_models.parse_spec(TINY)
    tiny = base_models.prepare(spec, tmp_path_factory.mktemp("models"))
    small = dataclasses.replace(tiny, context_length=CONTEXT)
    options = {"device": device} if request.param is TorchEngine else {}
    return request.param([small], detokenize=lambda _, ids: "".join(map(chr, ids)), **options)


# -- requests with different kinds of examples --------------------------------------------------------


def example(length, width=None, *, weights=True, seed=0):
    random = np.random.default_rng(seed)
    shape = (length,) if width is None else (length, width)
    inputs: dict[str, Array] = {
        "target_tokens": random.integers(0, V, shape),
        "logprobs": random.uniform(-6.5, -4.5, shape).astype(np.float32),
        "advantages": random.normal(size=shape).astype(np.float32),
    }
    if weights:
        inputs["weights"] = random.normal(size=shape).astype(np.float32)
    return Example(random.integers(0, V, length).astype(np.int32), inputs)


WIDTHS = [
    example(5, seed=1),
    example(4, 3, seed=2),
    example(7, 5, seed=3),
    example(3, 3, seed=4),
    example(9, seed=5),
]
WEIGHTS = [
    example(5, seed=6),
    example(4, weights=False, seed=7),
    example(6, seed=8),
    example(8, weights=False, seed=9),
]
BOTH = [*WIDTHS, *WEIGHTS, example(4, 5, weights=False, seed=10)]


def state(engine, model_id, directory: Path):
    """Weights and optimizer state of a model. After the first step, the first moment is a tenth of the gradient."""
    engine.save_state(model_id, directory, optimizer=True)
    files = ("adapter_model.safetensors", "optimizer.safetensors")
    return {
        (name, key): value for name in files for key, value in load_file(directory / name).items()
    }


@pytest.mark.parametrize(
    ("loss_fn", "examples"),
    [
        ("cross_entropy", WIDTHS),
        ("cross_entropy", WEIGHTS),
        ("ppo", WEIGHTS),
        ("cross_entropy", BOTH),
    ],
)
def test_mixed_request_equals_its_examples_one_by_one(engine, tmp_path, loss_fn, examples):
    for model_id in ("together", "apart"):
        engine.create_model(model_id, TINY, LoraSpec(2, seed=1))
    for step in range(2):  # in the first step A has no gradient, because B is zero
        whole = finish(engine.run_pass("together", PassJob(examples, loss_fn)))
        parts = [finish(engine.run_pass("apart", PassJob([one], loss_fn))) for one in examples]
        for ours, part, one in zip(whole.logprobs, parts, examples, strict=True):
            assert ours.shape == one.inputs["target_tokens"].shape
            np.testing.assert_allclose(ours, part.logprobs[0], atol=1e-4)
        for name, total in whole.metrics.items():
            assert total == pytest.approx(sum(part.metrics[name] for part in parts), rel=1e-4)
        norms = [
            # With an epsilon of one, the step depends on the gradient's size and not only on its sign.
            engine.optim_step(model_id, AdamStep(learning_rate=0.1, eps=1.0))["grad_norm"]
            for model_id in ("together", "apart")
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
        ours, theirs = (
            state(engine, model_id, tmp_path / f"{model_id}{step}")
            for model_id in ("together", "apart")
        )
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            scale = max(1.0, float(np.abs(theirs[key]).max()))
            np.testing.assert_allclose(value, theirs[key], rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("examples", [WEIGHTS, BOTH])
def test_without_weights_each_position_counts_once(engine, examples):
    engine.create_model("m", TINY, LoraSpec(2, seed=1))
    weighted = [
        Example(
            one.tokens_T,
            {"weights": np.ones(one.inputs["target_tokens"].shape, np.float32), **one.inputs},
        )
        for one in examples
    ]
    losses = [
        finish(engine.run_pass("m", PassJob(given_, "cross_entropy"))).metrics["loss:sum"]
        for given_ in (examples, weighted)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_unused_inputs_may_have_any_value(engine):
    engine.create_model("m", TINY, LoraSpec(2))
    odd = [
        Example(one.tokens_T, {**one.inputs, "logprobs": np.zeros(shape), "extra": np.zeros(shape)})
        for one, shape in zip(WIDTHS, [(), (1,), (2, 3), (7,), (0,)], strict=True)
    ]
    plain, strange = (
        finish(engine.run_pass("m", PassJob(examples, "cross_entropy", backward=False)))
        for examples in (WIDTHS, odd)
    )
    assert strange.metrics == plain.metrics


@pytest.mark.parametrize(
    ("loss_fn", "name", "values", "message"),
    [
        ("cross_entropy", "weights", [1, np.nan, 1, np.nan], "has nan at position 1"),
        ("ppo", "advantages", [0, 0, 0, np.inf], "has inf at position 3"),
        ("dro", "logprobs", [-np.inf, 0, 0, 0], "has -inf at position 0"),
        ("cross_entropy", "weights", [[1, 2]] * 3 + [[3, np.nan]], r"has nan at position \[3, 1\]"),
    ],
)
def test_non_finite_inputs_are_refused_with_their_position(engine, loss_fn, name, values, message):
    engine.create_model("m", TINY, LoraSpec(2))
    given_ = np.array(values, np.float32)
    bad = example(4, *given_.shape[1:])
    bad = Example(bad.tokens_T, {**bad.inputs, name: given_})
    with pytest.raises(InvalidInputError, match=message) as caught:
        finish(engine.run_pass("m", PassJob([example(4), bad], loss_fn)))
    assert caught.value.field == f"data.1.{name}"
    if loss_fn != "cross_entropy":  # cross_entropy does not read it
        finish(engine.run_pass("m", PassJob([bad], "cross_entropy")))


@pytest.mark.parametrize("trained", ["train_attn", "train_mlp", "train_unembed"])
def test_each_part_of_a_model_can_be_trained_alone(engine, trained):
    parts = {"train_attn": False, "train_mlp": False, "train_unembed": False, trained: True}
    engine.create_model("m", TINY, LoraSpec(2, **parts))
    losses = []
    for _ in range(5):
        done = finish(engine.run_pass("m", PassJob([WEIGHTS[1]], "cross_entropy")))
        losses.append(done.metrics["loss:sum"])
        engine.optim_step("m", AdamStep(learning_rate=1e-2))
    assert losses[-1] < losses[0]


# -- snapshots and restoring --------------------------------------------------------------------------


def steps(engine, model_id, count, first=0):
    """Train and return all results of each step, bit for bit."""
    results = []
    for number in range(first, first + count):
        loss_fn = "ppo" if number % 3 == 2 else "cross_entropy"
        data = WEIGHTS if loss_fn == "ppo" else BOTH
        done = finish(engine.run_pass(model_id, PassJob(data, loss_fn)))
        options = AdamStep(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
        metrics = engine.optim_step(model_id, options)
        results.append((done.metrics, metrics, [logprobs.tobytes() for logprobs in done.logprobs]))
    return results


@pytest.mark.parametrize("seed", [None, 7])
def test_snapshot_holds_the_state_at_the_time_of_the_call(engine, tmp_path, seed):
    engine.create_model("m", TINY, LoraSpec(8, seed=seed))
    steps(engine, "m", 4)
    write = engine.snapshot("m", tmp_path / "snapshot")
    engine.save_state("m", tmp_path / "state", optimizer=True)
    assert not (tmp_path / "snapshot").exists()
    undisturbed = steps(engine, "m", 5, first=4)
    with ThreadPoolExecutor(1) as pool:  # writes while training continues
        writing = pool.submit(write)
        steps(engine, "m", 1)
    size = writing.result()
    assert size == sum(file.stat().st_size for file in (tmp_path / "snapshot").iterdir())
    for file in (tmp_path / "state").iterdir():
        assert (tmp_path / "snapshot" / file.name).read_bytes() == file.read_bytes()
    engine.unload_model("m")
    engine.restore_model("n", TINY, tmp_path / "snapshot", optimizer=True)
    assert steps(engine, "n", 5, first=4) == undisturbed


@pytest.mark.parametrize("trained", [{}, {"train_mlp": False, "train_unembed": False}])
def test_snapshot_holds_accumulated_gradients(engine, tmp_path, trained):
    engine.create_model("m", TINY, LoraSpec(8, seed=3, **trained))
    steps(engine, "m", 2)
    for _ in range(3):
        finish(engine.run_pass("m", PassJob(BOTH, "cross_entropy")))
    engine.snapshot("m", tmp_path / "snapshot")()
    undisturbed = []
    for name in ("m", "n", "without"):
        finish(engine.run_pass(name, PassJob(WEIGHTS, "ppo")))
        undisturbed.append((engine.optim_step(name, AdamStep(1e-2)), steps(engine, name, 2)))
        if name == "m":
            engine.restore_snapshot("n", TINY, tmp_path / "snapshot")
            engine.restore_model("without", TINY, tmp_path / "snapshot", optimizer=True)
    assert undisturbed[0] == undisturbed[1]
    assert undisturbed[0] != undisturbed[2]


def test_damaged_gradients_file_is_refused_by_name(engine, tmp_path):
    engine.create_model("m", TINY, LoraSpec(8))
    finish(engine.run_pass("m", PassJob(BOTH, "cross_entropy")))
    engine.snapshot("m", tmp_path / "a")()
    file = tmp_path / "a" / "gradients.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InvalidInputError, match=r"gradients\.safetensors is damaged"):
        engine.restore_snapshot("n", TINY, tmp_path / "a")


def test_snapshot_of_an_unknown_model_is_refused_at_the_call(engine, tmp_path):
    with pytest.raises(NotFoundError, match="no model"):
        engine.snapshot("nobody", tmp_path / "a")


def test_snapshot_can_be_written_after_its_model_is_unloaded(engine, tmp_path):
    engine.create_model("m", TINY, LoraSpec(8))
    write = engine.snapshot("m", tmp_path / "a")
    expected = steps(engine, "m", 2)
    engine.unload_model("m")
    write()
    engine.restore_model("n", TINY, tmp_path / "a", optimizer=True)
    assert steps(engine, "n", 2) == expected


def test_norms_after_a_restore_are_equal_to_the_last_bit(engine, tmp_path):
    """A norm is a sum over all tensors, and a file may store the tensors in another order."""
    engine.create_model("m", TINY, LoraSpec(8, seed=3))
    steps(engine, "m", 2)
    engine.save_state("m", tmp_path / "a", optimizer=True)
    engine.restore_model("n", TINY, tmp_path / "a", optimizer=True)
    norms = [
        [metrics["grad_norm"] for _, metrics, _ in steps(engine, model_id, 6)]
        for model_id in ("m", "n")
    ]
    assert norms[0] == norms[1]


@pytest.mark.parametrize(("seed", "same"), [(2**64 + 5, 5), (-1, 2**64 - 1), (-(2**70), 0)])
def test_seeds_outside_64_bits_wrap_around(engine, tmp_path, seed, same):
    states = []
    for number, chosen in enumerate((seed, same)):
        engine.create_model("m", TINY, LoraSpec(2, seed=chosen))
        steps(engine, "m", 2)
        states.append(state(engine, "m", tmp_path / str(number)))
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][key])


# -- accepted jobs always finish ----------------------------------------------------------------------

CHANCES = st.one_of(
    st.floats(0, 1), st.sampled_from([0.0, 5e-324, 1e-40, 1e-7, 1 - 1e-16, 0.999999, 1.0])
)
TEMPERATURES = st.one_of(
    st.floats(0, 5),
    st.sampled_from([0.0, 5e-324, 1e-46, 1e-40, 1e-38, 1e-30, 1e-4, 1e4, 1e38, 1e39, 1e308]),
)
SEEDS = st.one_of(
    st.none(), st.integers(), st.sampled_from([0, -1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)])
)


@pytest.fixture(scope="module")
def samplers(engine):
    """The engine with a sampler of the base model and one of a trained model."""
    engine.create_model("m", TINY, LoraSpec(2))
    engine.open_sampler("base", TINY)
    engine.open_sampler("trained", TINY, model_id="m")
    return engine


@st.composite
def jobs(draw):
    """Jobs that the protocol allows, including some that the engine must refuse."""
    length = draw(st.sampled_from([0, 1, 2, 5, CONTEXT - 2, CONTEXT - 1, CONTEXT, CONTEXT + 1]))
    tokens = st.integers(0, V - 1) if draw(st.booleans()) else st.just(7)
    prompt = draw(st.lists(tokens, min_size=length, max_size=length))
    targets = None
    if draw(st.booleans()):
        width = draw(st.integers(0, 3))
        flat = st.lists(st.integers(-1, V - 1), min_size=width * length, max_size=width * length)
        targets = np.array(draw(flat), np.int64).reshape(length, width)[1:]
    topk = st.sampled_from([0, 1, 5, V - 1, V, V + 1])
    tokens_or_more = st.lists(st.sampled_from([-1, 0, 7, V - 1, V, 2**40]), max_size=3).map(tuple)
    return SampleJob(
        "s",
        np.array(prompt, np.int32),
        num_samples=draw(st.integers(1, 3)),
        max_tokens=draw(st.sampled_from([None, 0, 1, 3, CONTEXT, 10**12])),
        temperature=draw(TEMPERATURES),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, V - 1, V, V + 1, 2**70])),
        top_p=draw(CHANCES),
        seed=draw(SEEDS),
        stop_tokens=draw(st.none() | tokens_or_more),
        stop_texts=draw(st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple)),
        prompt_logprobs=draw(st.booleans()),
        prompt_logprobs_last_n=draw(st.sampled_from([None, 0, 1, length, length + 1, 10**12])),
        topk_prompt_logprobs=draw(topk),
        topk_sample_logprobs=draw(topk),
        target_prompt_tokens=targets,
        stream=draw(st.booleans()),
    )


@settings(max_examples=150)
@given(wanted=st.lists(jobs(), min_size=1, max_size=4), trained=st.tuples(*[st.booleans()] * 4))
def test_accepted_job_always_finishes(samplers, wanted, trained):
    accepted, results = {}, {}
    streamed: dict[str, int] = {}
    refused: list[str | None] = []
    for number, job in enumerate(wanted):
        chosen = dataclasses.replace(job, sampler_id="trained" if trained[number] else "base")
        try:
            samplers.add_sample(str(number), chosen)
        except InvalidInputError as error:
            refused.append(error.field)
        else:
            accepted[str(number)] = chosen
    while samplers.sampling:
        for event in samplers.sample_step():
            if event.result is None:
                streamed[event.job_id] = streamed.get(event.job_id, 0) + 1
            else:
                assert event.job_id not in results
                results[event.job_id] = event.result
    assert results.keys() == accepted.keys()
    assert {"prompt", "topk_prompt_logprobs", "topk_sample_logprobs"}.issuperset(refused)
    for job_id, job in accepted.items():
        check_result(job, results[job_id])
        expected = sum(map(len, results[job_id].tokens)) if job.stream else 0
        assert streamed.get(job_id, 0) == expected


def check_result(job, result):
    """Check the parts of a result that do not depend on the model's weights."""
    length = len(job.prompt_T)
    room = CONTEXT - length
    limit = room if job.max_tokens is None else min(room, job.max_tokens)
    assert len(result.tokens) == len(result.logprobs) == len(result.stop_reasons) == job.num_samples
    for tokens, logprobs, reason in zip(
        result.tokens, result.logprobs, result.stop_reasons, strict=True
    ):
        assert len(tokens) == len(logprobs)
        assert len(tokens) == limit if reason == "length" else 0 < len(tokens) <= limit
        assert ((tokens >= 0) & (tokens < V)).all()
        assert np.isfinite(logprobs).all()
        assert (logprobs <= 1e-5).all()
    for alternatives, tokens in zip(result.topk_sampled or [], result.tokens, strict=False):
        for array in alternatives:
            assert array.shape == (len(tokens), job.topk_sample_logprobs)
            assert np.isfinite(array).all()
    assert (result.topk_sampled is not None) == (job.topk_sample_logprobs > 0)
    if job.prompt_logprobs:
        scored = length - 1 if job.prompt_logprobs_last_n is None else job.prompt_logprobs_last_n
        known = np.isfinite(result.prompt_logprobs_T)
        assert known.tolist() == [place >= max(1, length - scored) for place in range(length)]
    if job.topk_prompt_logprobs:
        assert result.topk_prompt[0].shape == (length, job.topk_prompt_logprobs)
    if job.target_prompt_tokens is not None:
        assert result.target_prompt_logprobs.shape == job.target_prompt_tokens.shape
        assert (result.target_prompt_logprobs[job.target_prompt_tokens < 0] == 0).all()


@pytest.mark.parametrize("last_n", [0, 1, 2, 99])
def test_targets_are_scored_at_all_positions_for_any_last_n(samplers, last_n):
    def scored(**options):
        job = SampleJob("base", np.array([1, 2, 3, 4], np.int32), max_tokens=1, **options)
        samplers.add_sample("scored", job)
        results = []
        while samplers.sampling:
            results += [event.result for event in samplers.sample_step()]
        return results[-1]

    targets = np.array([[2], [3], [4]])
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": last_n}
    both = scored(target_prompt_tokens=targets, **asked)
    whole, part = scored(prompt_logprobs=True), scored(**asked)
    np.testing.assert_allclose(
        both.target_prompt_logprobs[:, 0], whole.prompt_logprobs_T[1:], rtol=1e-6
    )
    # The last bit depends on the number of rows in one matrix product.
    np.testing.assert_allclose(both.prompt_logprobs_T, part.prompt_logprobs_T, rtol=1e-6)
    for with_targets, without in zip(both.topk_prompt, part.topk_prompt, strict=True):
        np.testing.assert_allclose(with_targets, without, rtol=1e-6)


# -- a pass split into several requests ---------------------------------------------------------------

BAD = Example(np.array([V + 1], np.int32), {"target_tokens": np.array([1])})


def passed(engine, model_id, examples, part=None, *, backward=True):
    request = PassJob(examples, "cross_entropy", backward=backward, part=part)
    return finish(engine.run_pass(model_id, request))


def grad_norm(engine, model_id):
    return engine.optim_step(model_id, AdamStep(learning_rate=0.1))["grad_norm"]


def parts(count, pass_id="p"):
    return [PassPart(pass_id, index, count) for index in range(count)]


@pytest.mark.parametrize("before", [[], [WEIGHTS[0]]])
def test_split_pass_equals_separate_passes(engine, tmp_path, before):
    for model_id in ("parts", "apart"):
        engine.create_model(model_id, TINY, LoraSpec(2, seed=1))
        for one in before:
            passed(engine, model_id, [one])
    for part, one in zip(parts(len(WIDTHS)), WIDTHS, strict=True):
        passed(engine, "parts", [one], part)
        passed(engine, "apart", [one])
    norms = [grad_norm(engine, model_id) for model_id in ("parts", "apart")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    ours, theirs = (state(engine, each, tmp_path / each) for each in ("parts", "apart"))
    for key, value in ours.items():
        np.testing.assert_allclose(value, theirs[key], rtol=0, atol=1e-4)


def test_failed_part_drops_the_gradients_of_the_other_parts(engine):
    engine.create_model("m", TINY, LoraSpec(2, seed=1))
    first, second, third = parts(3)
    passed(engine, "m", WIDTHS, first)
    with pytest.raises(InvalidInputError, match="outside the vocabulary"):
        passed(engine, "m", [BAD], second)
    with pytest.raises(InvalidInputError, match="no gradient of the pass is kept"):
        passed(engine, "m", WIDTHS, third)
    assert grad_norm(engine, "m") == 0.0


def test_failed_split_pass_keeps_previously_accumulated_gradients(engine):
    for model_id in ("m", "plain"):
        engine.create_model(model_id, TINY, LoraSpec(2, seed=1))
        passed(engine, model_id, WEIGHTS)
    first, second = parts(2)
    passed(engine, "m", WIDTHS, first)
    with pytest.raises(InvalidInputError):
        passed(engine, "m", [BAD], second)
    assert grad_norm(engine, "m") == grad_norm(engine, "plain")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_pass_with_a_missing_part_adds_no_gradient(engine, missing):
    engine.create_model("m", TINY, LoraSpec(2, seed=1))
    for index, part in enumerate(parts(3)):
        if index != missing:
            with contextlib.suppress(InvalidInputError):
                passed(engine, "m", WIDTHS, part)
    assert grad_norm(engine, "m") == 0.0


@pytest.mark.parametrize("other", [None, PassPart("q", 0, 2), PassPart("p", 0, 2)])
def test_new_backward_pass_drops_an_incomplete_one(engine, other):
    engine.create_model("m", TINY, LoraSpec(2, seed=1))
    engine.create_model("plain", TINY, LoraSpec(2, seed=1))
    passed(engine, "m", WIDTHS, parts(2)[0])
    passed(engine, "m", WEIGHTS, other)
    if other is not None:
        passed(engine, "m", WEIGHTS, PassPart(other.pass_id, 1, 2))
        passed(engine, "plain", WEIGHTS)
    passed(engine, "plain", WEIGHTS)
    assert grad_norm(engine, "m") == pytest.approx(grad_norm(engine, "plain"), rel=1e-5)


def test_forward_pass_does_not_drop_an_incomplete_pass(engine):
    engine.create_model("m", TINY, LoraSpec(2, seed=1))
    first, second = parts(2)
    passed(engine, "m", WIDTHS, first)
    passed(engine, "m", WEIGHTS, backward=False)
    passed(engine, "m", WIDTHS, second)
    assert grad_norm(engine, "m") > 0
