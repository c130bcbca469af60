"""Sampling: thousands of small requests at a time, each submitted, retried and polled independently."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, cast

import orjson

from tinkex._retry import retrying
from tinkex._wire.operations import operation
from tinkex._wire.sse import SSEDecoder
from tinkex.config import Config
from tinkex.errors import (
    APIResponseValidationError,
    ClientClosedError,
    InvalidInputError,
    InvalidPathError,
    NotFoundError,
)
from tinkex.telemetry.bus import emit, tell, wants
from tinkex.telemetry.calls import (
    ClientCall,
    add_metadata,
    attempt_events,
)
from tinkex.telemetry.lazy_events import event_types
from tinkex.telemetry.reporter import Reporter
from tinkex.types import (
    CreateSamplingSessionRequest,
    ModelInput,
    QueueState,
    SampleRequest,
    SampleResponse,
    SampleStreamChunk,
    SamplingParams,
    TensorData,
)
from tinkex.types.paths import SCHEME, ParsedCheckpointTinkerPath

from ._generated import SamplingClientMethods
from .auth import config_for_handle
from .checks import check_count, check_extensions, check_retry_config, check_sampling_params
from .chunking import input_bytes, known_tokens
from .notices import logger
from .queue_state import Observer, QueueLogger, observer_of
from .retry import RetryConfig
from .runtime import (
    APIFuture,
    SampleFuture,
    begin_anew_in_forks,
    deliver_result,
    fail,
    leave_behind,
)
from .sample_answers import check_answered, lacks_alternatives, with_first_logprob
from .sample_stream import SampleEvents
from .samples import ASAMPLE, Sample, SampleNumbers, SamplerState
from .session import Session
from .tokenizer_files import loadable_tokenizer
from .tokenizers import load_tokenizer

if TYPE_CHECKING:
    from .service import ServiceClient

__all__ = ["SamplingClient", "open_sampling_session"]

_STREAM: Final = operation("stream_sample")


# The blocking `x` and the coroutine `x_async` of a method `_x` are generated: scripts/generate_async.py.
class SamplingClient(SamplingClientMethods):
    """A frozen set of weights to sample from.

    `sample` and `compute_logprobs` return futures at once; thousands may be in flight. The client can be
    pickled: a copy in another process uses the same sampling session with its own range of request numbers.
    """

    def __init__(
        self,
        holder: Session,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self._session = holder
        self._sampling_session_id = sampling_session_id
        self._retry_config = check_retry_config(retry_config)
        self._record_stability_info = record_stability_info
        self._queue_logger = QueueLogger("Sampling", sampling_session_id, holder.clock.monotonic)
        self._observers: tuple[Observer, ...] = (self._report_queue_state,)
        self._numbers = SampleNumbers(holder, sampling_session_id, shadow=shadow)
        self._state: SamplerState | None = None
        self._base_model: str | None = None
        self._model_id: str | None = None  # the training run whose weights are sampled
        self._metadata: Mapping[str, Any] | None = None
        self._tokenizer_id: str | None = None
        self._warned_of_alternatives = False
        begin_anew_in_forks(self)

    def _begin_anew(self) -> None:
        """In a forked child: behave like a pickled copy, with its own range of request numbers."""
        leave_behind(self._state, self._numbers)
        self._numbers = SampleNumbers(self._session, self._sampling_session_id, shadow=True)
        self._state = None

    def __repr__(self) -> str:
        return f"SamplingClient(sampling_session_id={self._sampling_session_id!r})"

    @property
    def holder(self) -> Session:
        return self._session

    # -- creation ----------------------------------------------------------------------------

    @staticmethod
    def create(
        holder: Session | ServiceClient,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        timeout: float | None = None,
    ) -> APIFuture[SamplingClient]:
        """Create a sampler of a checkpoint, of a base model, or of an existing sampling session.

        `holder` is a service client, or the `holder` of one.
        """
        session = holder if isinstance(holder, Session) else holder.holder
        if sampling_session_id is None and model_path is None and base_model is None:
            raise InvalidInputError("give model_path or base_model", field="model_path")
        retry_config = check_retry_config(retry_config)
        run = None if model_path is None else _run_of(model_path)
        deadline = session.deadline(timeout)

        async def made() -> SamplingClient:
            opened = sampling_session_id
            if opened is None:
                opened = await open_sampling_session(
                    session, model_path=model_path, base_model=base_model, deadline=deadline
                )
            client = SamplingClient(
                session,
                sampling_session_id=opened,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
            client._base_model, client._model_id = base_model, run
            return client

        facts = {"base_model": base_model, "model_id": run}
        return session.start("create_sampling_session", made, lambda: facts, timeout=timeout)

    create_async = create  # the future that it returns can be awaited

    # -- sampling ----------------------------------------------------------------------------

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
        include_prompt_logprobs: bool | None = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` continuations of `prompt`.

        Transient failures (a lost connection, an overloaded service, a lost result) are retried as the client's
        `RetryConfig` says. Cancelling the future cancels the sample.
        """
        if not isinstance(prompt, ModelInput):
            raise InvalidInputError(
                f"expected ModelInput, got {type(prompt).__name__}", field="prompt"
            )
        params = check_sampling_params(sampling_params)
        if target_prompt_logprobs is not None:
            _check_targets(target_prompt_logprobs)
        if prompt_logprobs_last_n is not None:
            check_count("prompt_logprobs_last_n", prompt_logprobs_last_n, 1)
            if not include_prompt_logprobs:
                raise InvalidInputError(
                    "needs include_prompt_logprobs=True",
                    field="prompt_logprobs_last_n",
                )
        fields: dict[str, Any] = {
            "type": "sample",
            "num_samples": check_count("num_samples", num_samples, 1),
            "prompt": prompt,
            "sampling_params": params,
            "sampling_session_id": self._sampling_session_id,
            "topk_prompt_logprobs": check_count("topk_prompt_logprobs", topk_prompt_logprobs, 0),
        }
        if include_prompt_logprobs is not None:  # None: the service's default applies
            fields["prompt_logprobs"] = bool(include_prompt_logprobs)
        if topk_sample_logprobs:
            fields["topk_sample_logprobs"] = check_count(
                "topk_sample_logprobs", topk_sample_logprobs, 0
            )
        if target_prompt_logprobs is not None:
            fields["target_prompt_logprobs"] = target_prompt_logprobs
        if prompt_alt_tokens_k:
            fields["prompt_alt_tokens_k"] = check_count(
                "prompt_alt_tokens_k", prompt_alt_tokens_k, 0
            )
        if prompt_logprobs_last_n is not None:
            fields["prompt_logprobs_last_n"] = prompt_logprobs_last_n
        if self._record_stability_info:
            fields["record_stability_info"] = True
        deadline = self._session.deadline(timeout)
        return self._session.start(
            "sample",
            partial(self._sample, fields, input_bytes(prompt), deadline),
            self._event_metadata,
            partial(_report_sample, prompt),
            SampleFuture(),
            timeout=timeout,
        )

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[list[float | None]]:
        """The logprob of each token of `prompt`; None for the first token."""
        sampled = self.sample(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            timeout=timeout,
        )
        return _mapped(sampled, _prompt_logprobs)

    async def sample_stream(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams | None = None,
        num_samples: int = 1,
    ) -> AsyncIterator[SampleStreamChunk]:
        """Yield tokens as the service draws them; if it cannot stream, all of them once the sample is complete.

        The last chunk of each sequence has a `finish_reason` and no token. A stream that ends early, or in which the
        service sends an error, raises.
        """
        request = SampleRequest(
            prompt=prompt,
            sampling_params=check_sampling_params(sampling_params),
            num_samples=num_samples,
            sampling_session_id=self._sampling_session_id,
        )
        queue: asyncio.Queue[SampleStreamChunk | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: SampleStreamChunk | BaseException | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        streaming = self._session.start(
            "stream_sample",
            lambda: self._stream(request, put),
            self._event_metadata,
            partial(_report_stream, request),
            SampleFuture(),
        )
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            streaming.cancel()

    # -- identity ----------------------------------------------------------------------------

    def _get_base_model(self, *, timeout: float | None = None) -> APIFuture[str]:
        """The name of the base model."""
        sampler = self._session.start_call(
            "get_sampler", path={"sampler_id": self._sampling_session_id}, timeout=timeout
        )
        return _mapped(sampler, lambda found: cast("str", found.base_model))

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model, as transformers loads it."""
        if self._tokenizer_id is None:
            path = {"sampler_id": self._sampling_session_id}
            found = self._session.start_call("get_sampler", path=path).result()
            self._tokenizer_id = loadable_tokenizer(
                self._session, found.base_model, found.tokenizer_id, found.tokenizer_sha256
            )
        return load_tokenizer(self._tokenizer_id)

    def get_telemetry(self) -> Reporter:
        """The session's telemetry reporter. With telemetry off it is falsy and drops every event."""
        return self._session.reporter

    def get_sampler_handle(self) -> str:
        """A text from which `from_sampler_handle` creates this client in another process. It contains no API key."""
        facts = {
            "base_url": self._session.config.base_url,
            "session_id": self._session.session_id,
            "sampling_session_id": self._sampling_session_id,
        }
        return base64.urlsafe_b64encode(orjson.dumps(facts)).decode("ascii")

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """Create a client from `get_sampler_handle`, in another process or on another host.

        A handle of a service other than the configured one needs an explicit `api_key`: the configured key is
        never sent to a host named by a handle.
        """
        try:
            facts = orjson.loads(base64.urlsafe_b64decode(handle))
            base_url, session_id = facts["base_url"], facts["session_id"]
            sampling_session_id = facts["sampling_session_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInputError("is not a sampler handle", field="handle") from error
        if not all(isinstance(fact, str) for fact in (base_url, session_id, sampling_session_id)):
            raise InvalidInputError("is not a sampler handle", field="handle")
        config = config_for_handle(base_url, api_key)
        session = Session(config, session_id=session_id)
        return SamplingClient(session, sampling_session_id=sampling_session_id, shadow=True)

    def __reduce__(self) -> tuple[Any, ...]:
        session = self._session
        # A sampler does not use the recovery policy, which may hold lambdas: these cannot be pickled.
        config = session.config.replace(recovery=None)
        return _revive, (
            config,
            session.session_id,
            self._sampling_session_id,
            self._retry_config,
            self._record_stability_info,
        )

    # -- queue state -------------------------------------------------------------------------

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None = None
    ) -> None:
        """Called when the service pauses or resumes requests. Logs at most once a minute; subclasses may override it."""
        self._queue_logger(queue_state, queue_state_reason)

    def observe_queue_state(self, observer: Observer) -> None:
        """Call `observer` when the service pauses or resumes requests, with the reason."""
        self._observers = (*self._observers, observer_of(observer))

    def clear_queue_state_debounce(self) -> None:
        self._queue_logger.clear()

    def _report_queue_state(self, state: QueueState, reason: str | None) -> None:
        self.on_queue_state_change(state, reason)

    def _event_metadata(self) -> Mapping[str, Any]:
        """Metadata of the events of this sampler's operations. Cached: there is one call per sample."""
        if self._metadata is None:
            known = self._session.base_models.get(self._model_id or "")
            self._metadata = {
                **self._session.metadata,
                "sampling_session_id": self._sampling_session_id,
                "model_id": self._model_id,
                "base_model": self._base_model or known,
            }
        return self._metadata

    # -- how a sample runs -------------------------------------------------------------------

    async def _sample(
        self, fields: dict[str, Any], weight: int, deadline: float | None
    ) -> SampleResponse:
        session = self._session
        await session.opened()
        check_extensions(fields["sampling_params"], session.flags)
        session.transport.admit(ASAMPLE.pool)
        state = self._state or self._create_state()
        sample = Sample(state, fields, weight, deadline, self._observers)
        with state.watching():
            result = await retrying(
                sample.attempt, sample, session.clock, sample.tell_waiting, deadline, attempt_events
            )
        state.progressed()
        check_answered(fields, result)
        if result.prompt_logprobs_np is not None:
            with_first_logprob(fields["prompt"], result)
        if fields.get("topk_sample_logprobs") and lacks_alternatives(result):
            self._warn_of_alternatives()
        return result

    def _warn_of_alternatives(self) -> None:
        if not self._warned_of_alternatives:
            self._warned_of_alternatives = True
            logger.warning(
                "The service ignores topk_sample_logprobs: its samples lack these logprobs."
            )

    def _create_state(self) -> SamplerState:
        self._state = SamplerState(self._session, self._numbers, self._retry_config)
        return self._state

    async def _stream(self, request: SampleRequest, put: Any) -> int:
        """Pass chunks to `put`, then None, or the error that ended the stream. Returns the number of tokens."""
        session = self._session
        try:
            await session.opened()
            check_extensions(request.sampling_params, session.flags)
            numbered = request.model_copy(
                update={"seq_id": next(self._numbers.counter or await self._numbers.join())}
            )
            try:
                async with session.transport.stream(
                    _STREAM, numbered, {"accept": "text/event-stream"}
                ) as response:
                    tokens = await self._read_stream(response, request.num_samples, put)
            except NotFoundError:
                tokens = await self._sample_instead(request, put)
        except asyncio.CancelledError:  # the reader stopped early, or the client was closed
            put(ClientClosedError("The client was closed before the stream ended."))
            raise
        except Exception as error:
            put(error)
            raise
        put(None)
        return tokens

    async def _read_stream(self, response: Any, num_samples: int, put: Any) -> int:
        if response.status >= 300:
            transport = self._session.transport
            refused = await transport.read_stream(response)
            raise transport.error(_STREAM, _STREAM.path, refused)
        decoder, events = SSEDecoder(), SampleEvents(num_samples)
        async for part in response.content:
            for event in decoder.feed(bytes(part)):
                if (chunk := events.read(event)) is not None:
                    put(chunk)
        for event in decoder.flush():
            if (chunk := events.read(event)) is not None:
                put(chunk)
        events.check_complete()
        return events.tokens

    async def _sample_instead(self, request: SampleRequest, put: Any) -> int:
        fields = {name: value for name, value in request.__dict__.items() if value is not None}
        result = await self._sample(fields, input_bytes(request.prompt), None)
        for index, sequence in enumerate(result.sequences):
            for token, logprob in zip_longest(sequence.tokens, sequence.logprobs or ()):
                put(SampleStreamChunk(token_id=token, logprob=logprob, index=index))
            put(
                SampleStreamChunk(
                    index=index,
                    finish_reason=sequence.stop_reason,
                    total_tokens=len(sequence.tokens),
                )
            )
        return sum(len(sequence.tokens) for sequence in result.sequences)


# Not a method: tools list the coroutine methods of the class and expect exactly the official ones.
async def open_sampling_session(
    session: Session,
    *,
    model_path: str | None,
    base_model: str | None,
    deadline: float | None,
) -> str:
    session_id = await session.opened()
    if wants(event_types.Event):
        add_metadata(session_id=session_id)
    created = await session.call(
        "create_sampling_session",
        CreateSamplingSessionRequest(
            session_id=session_id,
            sampling_session_seq_id=session.next_sampling_seq(),
            base_model=base_model,
            model_path=model_path,
        ),
        deadline=deadline,
    )
    return cast("str", created.sampling_session_id)


def _report_sample(
    prompt: ModelInput, call: ClientCall, result: SampleResponse, seconds: float
) -> None:
    if wants(event_types.SampleStop):
        drawn = 0
        for sequence in result.sequences:
            if sequence.tokens_np is not None:
                drawn += len(sequence.tokens_np)
        counts = (
            known_tokens(prompt),
            result.prompt_cache_hit_tokens,
            drawn,
            len(result.sequences),
        )
        tell(
            partial(
                event_types.SampleStop,
                call.id,
                call.operation,
                seconds,
                *counts,
                metadata=call.metadata,
            )
        )


def _report_stream(request: SampleRequest, call: ClientCall, tokens: int, seconds: float) -> None:
    if wants(event_types.SampleStop):
        counts = (known_tokens(request.prompt), 0, tokens, request.num_samples)
        emit(
            event_types.SampleStop(
                call.id, call.operation, seconds, *counts, metadata=call.metadata
            )
        )


def _run_of(model_path: str) -> str | None:
    """The training run in a checkpoint path; None if the path has a form that only the service knows."""
    try:
        return ParsedCheckpointTinkerPath.from_tinker_path(model_path).training_run_id
    except InvalidPathError:
        if isinstance(model_path, str) and model_path.startswith(SCHEME):
            return None
        raise


def _check_targets(targets: TensorData) -> None:
    """Refuse targets that the service would refuse: they must be int64 with one row per position."""
    field, expected = "target_prompt_logprobs", "must be int64 of shape [len(prompt) - 1, K]"
    if not isinstance(targets, TensorData):
        raise InvalidInputError(f"{expected}, not {type(targets).__name__}", field=field)
    if targets.dtype != "int64" or len(targets.shape or ()) != 2:
        problem = f"{expected}, not {targets.dtype} of shape {targets.shape}"
        raise InvalidInputError(problem, field=field)


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    if response.prompt_logprobs is None:
        raise APIResponseValidationError(message="The service returned no prompt logprobs.")
    return response.prompt_logprobs


def _mapped(source: APIFuture[Any], change: Any) -> APIFuture[Any]:
    """A future of `change(result)`; cancelling it cancels its source."""
    target: APIFuture[Any] = type(source)()

    def deliver(done: Any) -> None:
        if done.cancelled():
            target.cancel()
        elif (error := done.exception()) is not None:
            fail(target, error)
        else:
            try:
                deliver_result(target, change(done.result()))
            except Exception as raised:  # any error must reach the waiting caller
                fail(target, raised)

    source.add_done_callback(deliver)
    target.add_done_callback(lambda done: source.cancel() if done.cancelled() else None)
    return target


def _revive(
    config: Config,
    session_id: str | None,
    sampling_session_id: str,
    retry_config: RetryConfig | None,
    record_stability_info: bool,
) -> SamplingClient:
    return SamplingClient(
        Session(config, session_id=session_id),
        sampling_session_id=sampling_session_id,
        shadow=True,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )
