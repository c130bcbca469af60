"""What each endpoint does: from a read request to a whole answer or a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tinkex.engine.values import SampledResult
from tinkex.errors import InvalidInputError, NotFoundError
from tinkex.server.grammar_trials import Schema

from . import anthropic_requests as anthropic
from . import openai_requests as openai
from .anthropic_answers import AnthropicAnswer
from .chat import ChatPrompt, Conversation, chat_prompt
from .constraints import Format, constraint, format_of_response
from .generation import Finished, Generation, TokenCounts, drawn, finished, streamed, written_size
from .models import ServedModel, ServedModels
from .openai_answers import OpenAIAnswer
from .tools import ToolUse, tool_use

if TYPE_CHECKING:
    from tinkex.server.service import Service

__all__ = ["ENDPOINTS", "Asked", "Endpoint", "Stream"]

#: Fields of chat requests by the fields of `SamplingParams`, where they differ.
_CHAT_FIELDS: Final = {
    "prompt": "messages",
    "json_schema": "response_format",
    "regex": "response_format",
    "grammar": "response_format",
    "num_samples": "n",
    "topk_sample_logprobs": "top_logprobs",
}
_COMPLETION_FIELDS: Final = _CHAT_FIELDS | {
    "prompt": "prompt",
    "topk_sample_logprobs": "logprobs",
    "topk_prompt_logprobs": "logprobs",
}
_MESSAGES_FIELDS: Final = _CHAT_FIELDS | {
    "json_schema": "output_config.format",
    "grammar": "tools",
    "stop": "stop_sequences",
}


@dataclass(frozen=True)
class Asked:
    """One request to an endpoint."""

    service: Service
    models: ServedModels
    owner: str
    request: Any
    #: The last segment of the path, such as the name of a model, for endpoints that have one.
    name: str = ""
    #: Whether the client speaks Anthropic's API where both have the same path.
    anthropic: bool = False


@dataclass(frozen=True)
class Stream:
    """The events of a stream that has been accepted."""

    events: AsyncIterator[bytes]


#: The value of an endpoint is an answer to be written as JSON, one that is written, or a stream.
Endpoint = Callable[[Asked], Awaitable[dict[str, Any] | bytes | Stream]]
ENDPOINTS: Final[dict[str, Endpoint]] = {}


def _serves(endpoint: Endpoint) -> Endpoint:
    ENDPOINTS[endpoint.__name__] = endpoint
    return endpoint


async def _tried(asked: Asked, schemas: Sequence[Schema]) -> None:
    """Refuse schemas that cannot be followed."""
    service = asked.service
    await service.grammar_trials.check_schemas(asked.owner, schemas, service.bodies.in_thread)


async def _tried_form(asked: Asked, form: Format, field: str) -> Format:
    if "json_schema" in form:
        await _tried(asked, [Schema(f"{field}.json_schema.schema", form["json_schema"])])
    return form


async def _conversation(
    asked: Asked, request: Conversation
) -> tuple[ServedModel, ToolUse, ChatPrompt]:
    """The model of a request, its tools, and its messages as a prompt."""
    model = await asked.models.find(asked.owner, request.model)
    template = asked.models.template(model)
    choice, only = request.choice
    offered = request.offered_tools
    await _tried(asked, [Schema(tool.field, tool.schema) for tool in offered])
    tools = tool_use(
        offered,
        template,
        choice,
        only,
        parallel=request.parallel,
        field="tool_choice",
    )
    variables = request.template_variables
    prompt = await chat_prompt(model, template, request.conversation, tools, variables)
    return model, tools, prompt


# -- OpenAI ---------------------------------------------------------------------------------------


@_serves
async def chat_completions(asked: Asked) -> bytes | Stream:
    request: openai.ChatRequest = asked.request
    model, tools, prompt = await _conversation(asked, request)
    wanted = await _tried_form(
        asked, format_of_response(request.response_format), "response_format"
    )
    form = constraint(wanted, tools, prompt.thinking)
    generation = Generation(
        model,
        [prompt.tokens],
        request.params(request.length, **form),
        count=request.n,
        stops=request.stops,
        topk=request.topk,
        tools=tools,
        thinking=prompt.thinking,
        fields=_CHAT_FIELDS,
    )
    return await _openai(asked, request, generation, chat=True)


@_serves
async def completions(asked: Asked) -> bytes | Stream:
    request: openai.CompletionRequest = asked.request
    request.check()
    most = asked.service.settings.max_samples
    if len(request.prompts) * request.n > most:
        raise InvalidInputError(
            f"asks for {len(request.prompts)} × {request.n} answers; the limit is {most}, the service's setting "
            "max_samples. Send several requests",
            field="prompt",
        )
    model = await asked.models.find(asked.owner, request.model)
    form = await _tried_form(asked, format_of_response(request.response_format), "response_format")
    generation = Generation(
        model,
        [await _prompt_tokens(model, prompt) for prompt in request.prompts],
        request.params(request.max_tokens, **form),
        count=request.n,
        stops=request.stops,
        topk=request.logprobs,
        echo=request.echo,
        fields=_COMPLETION_FIELDS,
    )
    return await _openai(asked, request, generation, chat=False)


async def _prompt_tokens(model: ServedModel, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return await model.vocabulary.encode(prompt, model.in_turn, special=True, field="prompt")
    if any(not 0 <= token < model.vocabulary.vocab_size for token in prompt):
        raise InvalidInputError(
            f"has a token outside the vocabulary of {model.vocabulary.vocab_size}", field="prompt"
        )
    return prompt


async def _openai(
    asked: Asked,
    request: openai.ChatRequest | openai.CompletionRequest,
    generation: Generation,
    *,
    chat: bool,
) -> bytes | Stream:
    answer = OpenAIAnswer(
        generation,
        chat,
        int(time.time()),
        include_usage=request.includes_usage,
        return_token_ids=request.return_token_ids,
    )
    samplers = asked.service.samplers
    if not request.stream:
        return await _written(asked, generation, answer.whole)
    usage, echoes = TokenCounts(), _no_echoes()
    if generation.echo:  # scores come with a whole result, so prompts are read before the stream
        alone = generation.prompts_alone()
        scored = await drawn(samplers, asked.owner, alone)
        cached = sum(each.cached_tokens for each in scored)
        usage = TokenCounts(cached_tokens=cached, counts_cache=False)
        echoes = _echoes(asked, answer, alone, scored)
    updates = await streamed(samplers, asked.owner, generation.answers_alone(), usage)
    return Stream(_with_end(echoes, answer.chunks(updates, usage)))


async def _written(
    asked: Asked, generation: Generation, write: Callable[[Iterable[Finished]], bytes]
) -> bytes:
    """The whole answer to a request; a large one is made in the thread of its key."""
    results = await drawn(asked.service.samplers, asked.owner, generation)
    size = written_size(generation, results)
    bodies = asked.service.bodies
    return await bodies.off_loop(asked.owner, size, lambda: write(finished(generation, results)))


async def _no_echoes() -> AsyncIterator[bytes]:
    return
    yield b""


async def _echoes(
    asked: Asked, answer: OpenAIAnswer, alone: Generation, scored: Sequence[SampledResult]
) -> AsyncIterator[bytes]:
    """The prompts of a stream; large ones are written in the thread of their key."""
    written = answer.echoes(finished(alone, scored))
    size = written_size(alone, scored) // len(scored)
    bodies = asked.service.bodies
    while (event := await bodies.off_loop(asked.owner, size, next, written, None)) is not None:
        yield event


async def _with_end(
    echoes: AsyncIterator[bytes], chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    # Waiting for the first token starts `chunks`, so that closing this stream stops what it draws.
    first = await anext(chunks)
    async for echo in echoes:
        yield echo
    yield first
    async for chunk in chunks:
        yield chunk
    yield b"data: [DONE]\n\n"


# -- Anthropic ------------------------------------------------------------------------------------


@_serves
async def messages(asked: Asked) -> bytes | Stream:
    request: anthropic.MessagesRequest = asked.request
    generation = await _anthropic_generation(asked, request)
    answer = AnthropicAnswer(generation, request.return_token_ids)
    if not request.stream:
        return await _written(asked, generation, lambda parts: answer.whole(*parts))
    usage = TokenCounts()
    updates = await streamed(asked.service.samplers, asked.owner, generation, usage)
    return Stream(answer.events(updates, usage))


async def _anthropic_generation(asked: Asked, request: anthropic.MessagesRequest) -> Generation:
    model, tools, prompt = await _conversation(asked, request)
    wanted = await _tried_form(asked, request.format, "output_config.format")
    form = constraint(wanted, tools, prompt.thinking, "output_config.format")
    return Generation(
        model,
        [prompt.tokens],
        request.params(**form),
        stops=request.stops,
        tools=tools,
        thinking=prompt.thinking,
        fields=_MESSAGES_FIELDS,
    )


@_serves
async def count_tokens(asked: Asked) -> dict[str, Any]:
    _, _, prompt = await _conversation(asked, asked.request)
    return {"input_tokens": len(prompt.tokens)}


# -- models ---------------------------------------------------------------------------------------


@_serves
async def list_models(asked: Asked) -> dict[str, Any]:
    listed = await asked.models.listed(asked.owner)
    if not asked.anthropic:
        return {"object": "list", "data": [_openai_model(model) for model in listed]}
    data = [_anthropic_model(model) for model in listed]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": False, "first_id": first, "last_id": last}


@_serves
async def get_model(asked: Asked) -> dict[str, Any]:
    form = _anthropic_model if asked.anthropic else _openai_model
    for model in await asked.models.listed(asked.owner):
        if model["id"] == asked.name:
            return form(model)
    found = await asked.models.find(asked.owner, asked.name)
    if found.model_path is None:
        raise NotFoundError(f"There is no model {asked.name!r:.200}.")
    return form({"id": found.name, "created": 0, "root": found.model_path, "parent": None})


def _openai_model(model: Any) -> dict[str, Any]:
    return {"object": "model", "owned_by": "tinkex", **model}


def _anthropic_model(model: Any) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model["created"]))
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}
