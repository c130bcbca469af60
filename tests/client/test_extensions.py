"""Extensions of `SamplingParams`: sent only to a service that knows them."""

import asyncio

import pytest

from tinkex import SamplingParams
from tinkex.errors import InvalidInputError

from .helpers import PROMPT, SAMPLE, STREAM, answer_samples, flags, new_sampler


def test_extension_is_refused_where_the_service_does_not_know_it(server, service):
    sampler = new_sampler(service())
    asked = sampler.sample(PROMPT, 1, SamplingParams(min_p=0.1, regex="a"))
    with pytest.raises(InvalidInputError, match="leave out min_p, regex") as refused:
        asked.result()
    assert refused.value.field == "sampling_params.min_p"
    assert server.asked(SAMPLE) == []


async def read(stream):
    return [chunk async for chunk in stream]


def test_stream_refuses_an_extension_that_the_service_does_not_know(server, service):
    sampler = new_sampler(service())
    with pytest.raises(InvalidInputError, match="kept_mass"):
        asyncio.run(read(sampler.sample_stream(PROMPT, SamplingParams(kept_mass=True))))
    assert server.asked(STREAM) == []


def test_extensions_are_sent_to_a_service_that_knows_them(server, service):
    flags(server, sample_extensions=True)
    answer_samples(server)
    sampler = new_sampler(service())
    sampler.sample(PROMPT, 1, SamplingParams(min_p=0.1, logit_bias={3: 1.0})).result()
    (sent,) = server.asked(SAMPLE)
    assert sent.json["sampling_params"]["min_p"] == 0.1
    assert sent.json["sampling_params"]["logit_bias"] == {"3": 1.0}
    assert "regex" not in sent.json["sampling_params"]
