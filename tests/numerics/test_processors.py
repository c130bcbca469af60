"""Penalties, biases and filters, compared with the logits processors of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tinkex.engine import drawing
from tinkex.engine.grammars import Grammars, allowed_tokens
from tinkex.engine.processors import shaping_of
from tinkex.engine.values import Constraint, SampleJob
from tinkex.errors import InvalidInputError, RequestErrorCategory, RequestFailedError

from .test_drawing import Given
from .test_sampling import PROMPT, job, run, sampler_of

V = 264
NO_IDS: Any = None  # these warpers look at scores only


def logits_of(seed: int) -> torch.Tensor:
    return 4 * torch.randn(V, generator=torch.Generator().manual_seed(seed))


def adjusted(logits_V, drawn=(), **options: Any):
    shaping = shaping_of(job(**options), V, (), None)
    assert shaping is not None
    for token in drawn:
        shaping.take(token)
    result = logits_V.clone()
    shaping.adjust(result)
    return result


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
@pytest.mark.parametrize("drawn", [(), (3, 3, 200, 65)])
def test_repetition_penalty_equals_that_of_transformers(penalty, drawn):
    logits_V = logits_of(1)
    seen = torch.tensor([[*PROMPT.tolist(), *drawn]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits_V[None].clone())[0]
    found = adjusted(logits_V, drawn, repetition_penalty=penalty)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_logit_bias_equals_the_sequence_bias_of_transformers():
    bias = {7: 2.5, 100: -3.0, 263: 40.0}
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    logits_V = logits_of(2)
    expected = processor(torch.tensor([[1, 2]]), logits_V[None].clone())[0]
    found = adjusted(logits_V, logit_bias=tuple(bias.items()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_presence_and_frequency_penalties_count_drawn_tokens():
    drawn = (5, 9, 5, 5)
    logits_V = logits_of(3)
    expected = logits_V.clone()
    expected[5] -= 3 * 0.5 + 1.2
    expected[9] -= 1 * 0.5 + 1.2
    found = adjusted(logits_V, drawn, frequency_penalty=0.5, presence_penalty=1.2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.05},
        {"min_p": 0.3, "temperature": 1.7},
        {"min_p": 0.02, "top_k": 20},
        {"min_p": 0.02, "top_p": 0.9, "temperature": 0.6},
        {"top_k": 9},
        {"top_p": 0.4},
    ],
)
def test_filters_keep_what_the_warpers_of_transformers_keep(options):
    """Draw with evenly spaced numbers: the frequencies are the filtered probabilities."""
    logits_V, count = logits_of(4), 4000
    scores = TemperatureLogitsWarper(options.get("temperature", 1.0))(
        NO_IDS, logits_V[None].clone()
    )
    if "top_k" in options:
        scores = TopKLogitsWarper(options["top_k"])(NO_IDS, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(NO_IDS, scores)
    if "min_p" in options:
        scores = MinPLogitsWarper(options["min_p"])(NO_IDS, scores)
    expected_V = scores.softmax(-1)[0]
    grid: list[Any] = [np.random.default_rng(seed) for seed in range(count)]
    jobs = [job(kept_mass=True, **options)] * count
    drawn = drawing.choose(logits_V.expand(count, -1).clone(), jobs, grid)
    assert set(drawn.tokens) <= set(expected_V.nonzero()[:, 0].tolist())
    # The probability with which a token was drawn, from its logprob and the kept mass.
    found = np.exp(drawn.logprobs) / np.array(drawn.kept_mass)
    np.testing.assert_allclose(found, expected_V[drawn.tokens].numpy(), atol=1e-6)


def test_kept_mass_of_a_greedy_draw_is_its_probability():
    drawn = drawing.choose(
        logits_of(5)[None].clone(),
        [job(temperature=0.0, kept_mass=True)],
        [np.random.default_rng()],
    )
    assert drawn.kept_mass[0] == pytest.approx(np.exp(drawn.logprobs[0]))


# -- constraints --------------------------------------------------------------------------------------


@pytest.fixture
def constrained(language_model, tiny):
    return sampler_of(language_model, grammars=Grammars(tiny.directory, V, tiny.eos_token_ids))


def text_of(tokens) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def test_samples_match_their_regular_expression(constrained):
    phone = Constraint("regex", r"[0-9]{3}-[0-9]{4}")
    wanted = job(constraint=phone, num_samples=8, max_tokens=20, seed=1, kept_mass=True)
    result = run(constrained, {"a": wanted})["a"]
    for tokens, kept, reason in zip(
        result.tokens, result.kept_mass, result.stop_reasons, strict=True
    ):
        text = text_of(tokens)
        assert len(text) == 8
        assert text[3] == "-"
        assert text.replace("-", "").isdigit()
        assert reason == "stop"
        assert len(kept) == 8
        assert all(0 < mass < 1 for mass in kept)


def test_constraint_that_allows_every_likely_token_changes_nothing(constrained):
    """Tokens that are no ASCII text are made impossible by a bias, so that the expression allows all others."""
    bias = tuple((token, -200.0) for token in range(128, V))
    shared = {"logit_bias": bias, "num_samples": 4, "max_tokens": 40, "seed": 3}
    free = run(constrained, {"a": job(**shared)})["a"]
    everything = Constraint("regex", r"(.|\n)*")
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 50}):
        free = run(constrained, {"a": job(**shared, **options)})["a"]
        bound = run(constrained, {"a": job(**shared, **options, constraint=everything)})["a"]
        for one, other in zip(free.tokens, bound.tokens, strict=True):
            assert one.tolist() == other.tolist()
        for one, other in zip(free.logprobs, bound.logprobs, strict=True):
            assert one.tolist() == other.tolist()


def test_constrained_draws_have_the_probabilities_of_the_allowed_tokens(tiny):
    """Drawn with evenly spaced numbers, so that frequencies are probabilities; half of the mass is not allowed."""
    letters = Constraint("regex", "[a-t]")
    grammars, wanted = Grammars(tiny.directory, V, tiny.eos_token_ids), job(constraint=letters)
    logits_V, count = logits_of(4) / 4, 8_000
    allowed = list(range(ord("a"), ord("t") + 1))
    logits_V[allowed] += 2.5
    chances_V = logits_V.softmax(-1).numpy()
    assert 0.2 < chances_V[allowed].sum() < 0.8
    shapings = [shaping_of(wanted, V, (257,), grammars.matcher) for _ in range(count)]
    grid: list[Any] = [Given((number + 0.5) / count) for number in range(count)]
    drawn = drawing.choose(logits_V.expand(count, -1).clone(), [wanted] * count, grid, shapings)
    found = np.bincount(drawn.tokens, minlength=V) / count
    assert found.sum() == pytest.approx(found[allowed].sum())
    expected = chances_V[allowed] / chances_V[allowed].sum()
    np.testing.assert_allclose(found[allowed], expected, atol=0.01)
    np.testing.assert_allclose(drawn.logprobs, np.log(chances_V[drawn.tokens]), atol=1e-5)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", r"[a-c]{2,5}(é|€)?"),
        Constraint("json_schema", '{"type":"array","items":{"type":"string","maxLength":3}}'),
        Constraint("json_schema", '{"type":"object"}'),
        Constraint("grammar", 'start: "x"* /[0-9]+/ | "y"'),
        Constraint("grammar", '%llguidance {}\nstart: few "!"\nfew[max_tokens=3]: /[ab]*/'),
    ],
)
def test_token_is_accepted_where_the_mask_allows_it(tiny, constraint):
    grammars, random = Grammars(tiny.directory, V, tiny.eos_token_ids), np.random.default_rng(1)
    for ends in ((257,), (65, 257), ()):
        matcher = grammars.matcher(constraint, ends)
        for _ in range(30):
            (tokens,) = allowed_tokens([matcher])
            accepted = [token for token in range(V) if matcher.accepts(token)]
            assert accepted == tokens.tolist() or not accepted
            if matcher.take(int(random.choice(tokens))):
                break


def test_constrained_and_free_rows_of_one_batch_do_not_change_each_other(constrained):
    free, bound = job(seed=5), job(seed=6, constraint=Constraint("regex", "[a-z]{12}"))
    alone = {name: run(constrained, {name: one})[name] for name, one in (("f", free), ("b", bound))}
    together = run(constrained, {"f": free, "b": bound})
    for name, result in together.items():
        assert result.tokens[0].tolist() == alone[name].tokens[0].tolist()


def test_end_token_is_drawn_only_where_the_text_may_end(constrained):
    digits = Constraint("regex", r"[0-9]+")
    wanted = job(
        constraint=digits, num_samples=16, seed=2, max_tokens=200, stop_tokens=(65, 257)
    )  # 65 is "A", which the expression does not allow
    result = run(constrained, {"a": wanted})["a"]
    for tokens, reason in zip(result.tokens, result.stop_reasons, strict=True):
        *body, end = tokens.tolist()
        assert text_of(body).isdigit()
        assert (end in {65, 257}) == (reason == "stop")


@pytest.mark.parametrize(
    ("constraint", "complaint"),
    [
        (Constraint("regex", "("), "unclosed group"),
        (Constraint("json_schema", '{"type":"nonsense"}'), "nonsense"),
        (Constraint("json_schema", "false"), "must be an object"),
        (
            Constraint("json_schema", '{"minLength": 5, "maxLength": 2, "type": "string"}'),
            "minLength",
        ),
        (Constraint("json_schema", '{"properties": 3}'), "must be an object"),
        (Constraint("grammar", "start: /[^\\s\\S]/"), "no text matches"),
        (Constraint("grammar", 'begin: "a"'), "start"),
    ],
)
def test_constraint_that_cannot_be_followed_is_refused(constrained, constraint, complaint):
    with pytest.raises(InvalidInputError, match=complaint) as refused:
        constrained.add("a", job(constraint=constraint), None)
    assert refused.value.field == f"sampling_params.{constraint.kind}"
    assert not constrained.busy


def test_constraint_needs_a_tokenizer(language_model):
    with pytest.raises(InvalidInputError, match="tokenizer"):
        sampler_of(language_model).add("a", job(constraint=Constraint("regex", "a")), None)


@pytest.mark.parametrize("token", [V, -1, 2**70])
def test_bias_outside_the_vocabulary_is_refused(language_model, token):
    with pytest.raises(InvalidInputError, match=f"token {token} is outside") as refused:
        sampler_of(language_model).add("a", job(logit_bias=((3, 1.0), (token, 1.0))), None)
    assert refused.value.field == "sampling_params.logit_bias"


@pytest.mark.parametrize(
    ("extreme", "names"),
    [
        (
            {"logit_bias": ((3, 3e38), (4, 3e38)), "temperature": 1e-30},
            ["logit_bias", "temperature"],
        ),
        ({"repetition_penalty": 3e-39, "temperature": 1.0}, ["repetition_penalty"]),
    ],
)
def test_parameters_that_make_logits_infinite_are_named_instead_of_the_model(
    language_model, extreme, names
):
    sampler = sampler_of(language_model)
    sampler.add("a", job(**extreme), None)
    sampler.add("b", job(seed=1), None)
    found: dict[str, Any] = {}
    while sampler.busy:
        found |= {event.job_id: event.error or event.result for event in sampler.step()}
    failed = found["a"]
    assert isinstance(failed, RequestFailedError)
    assert failed.category is RequestErrorCategory.User
    for name in names:
        assert f"sampling_params.{name}" in failed.message
    assert "weights" not in failed.message
    assert len(found["b"].tokens[0]) > 0


def test_job_without_extensions_has_no_shaping():
    assert shaping_of(SampleJob("s", PROMPT, temperature=0.5, top_p=0.9), V, (), None) is None


def test_constraint_may_allow_only_tokens_of_vanishing_probability(constrained):
    """The probability of every allowed token is below the smallest float."""
    letters = Constraint("regex", "[a-z]{6}")
    bias = tuple((token, -400.0) for token in range(ord("a"), ord("z") + 1))
    wanted = job(constraint=letters, logit_bias=bias, num_samples=4, seed=1, kept_mass=True)
    result = run(constrained, {"a": wanted})["a"]
    for tokens, logprobs in zip(result.tokens, result.logprobs, strict=True):
        assert text_of(tokens).isalpha()
        assert all(-420 < logprob < -380 for logprob in logprobs)
    assert len({text_of(tokens) for tokens in result.tokens}) == 4
