"""Training one LoRA model: its operations reach the service in the order of the calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from tinkex._wire.operations import Operation, operation
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    InvalidInputError,
    TinkerError,
)
from tinkex.telemetry.bus import emit, wants
from tinkex.telemetry.calls import ClientCall, add_metadata
from tinkex.telemetry.lazy_events import event_types
from tinkex.telemetry.reporter import Reporter
from tinkex.types import (
    AdamParams,
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LogEntry,
    LoggedSample,
    LogResponse,
    LossFnType,
    ModelID,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    RegularizerSpec,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types._base import RequestModel
from tinkex.types.paths import CONSOLE, CheckpointType, ParsedCheckpointTinkerPath, with_kind

from . import chunking, custom_loss, traced_loss
from ._generated import TrainingClientMethods
from .budget import Lease
from .checks import check_data, check_loss, check_name, check_retry_config
from .custom_loss import CustomLossFn
from .loss_sums import divides_by_weights, with_loss_sum
from .notices import logger
from .passes import Parts, TrainingWire
from .queue_state import Observer, QueueLogger, observer_of
from .run_log import RunLog, number
from .runtime import APIFuture
from .session import Session
from .tokenizer_files import loadable_tokenizer
from .tokenizers import decode, encode, load_tokenizer
from .traced_loss import LossHandle
from .transport import RawResponse
from .turns import DispatchTurn, Turns

if TYPE_CHECKING:
    from tinkex.regularizers.pipeline import Pipeline

    from .retry import RetryConfig
    from .sampling import SamplingClient

__all__ = ["TrainingClient"]

T = TypeVar("T")

#: Requests above this size (bytes) are encoded on a thread, so that they do not block the event loop.
_ENCODE_ASIDE = 1 << 20


#: The client whose custom loss runs in this context. It holds its turn, so a call of that client would wait for ever.
_computing_loss_of: ContextVar[TrainingClient | None] = ContextVar(
    "computing_loss_of", default=None
)


# The blocking `x` and the coroutine `x_async` of a method `_x` are generated: scripts/generate_async.py.
class TrainingClient(TrainingClientMethods):
    """A model being trained.

    Training operations return an `APIFuture` at once. They reach the service in the order of the calls, from any
    thread or task, and several may be in flight: submit `forward_backward` and `optim_step`, then wait for both.
    `timeout` limits the whole operation, in seconds; without it the client waits as long as the service answers
    its polls.
    """

    def __init__(self, holder: Session, model_seq_id: int, model_id: ModelID) -> None:
        self._session = holder
        self._model_seq_id = model_seq_id
        self.model_id = model_id
        self._turns = Turns()
        self._queue_logger = QueueLogger("Training", model_id, holder.clock.monotonic)
        self._observers: tuple[Observer, ...] = (self._queue_logger,)
        self._after_step: tuple[Callable[[], object], ...] = ()
        self._tokenizer_id: str | None = None
        self._warned_of_division = False
        self._sampler_names: set[str] = set()  # sampler checkpoints saved by this client
        self._run_log = RunLog(holder, model_id)

    def __repr__(self) -> str:
        return f"TrainingClient(model_id={self.model_id!r})"

    @property
    def holder(self) -> Session:
        return self._session

    def observe_queue_state(self, observer: Observer) -> None:
        """Call `observer` when the service pauses or resumes requests of this model, with the reason."""
        self._observers = (*self._observers, observer_of(observer))

    def observe_steps(self, observer: Callable[[], object]) -> Callable[[], None]:
        """Call `observer()` after every call of `optim_step`; the function returned removes the observer.

        Operations that the observer calls are dispatched right after the step, before the step has finished. An
        exception of the observer is only logged: the step is already submitted and its future must reach the caller.
        """
        self._after_step = (*self._after_step, observer)

        def end() -> None:
            self._after_step = tuple(each for each in self._after_step if each is not observer)

        return end

    # -- training ----------------------------------------------------------------------------

    def forward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and its outputs; gradients stay unchanged."""
        return self._pass("forward", data, loss_fn, loss_fn_config, timeout)

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Compute the loss and add its gradient to the gradients accumulated since the last `optim_step`.

        Losses are plain sums over tokens and data. A large batch is sent in several requests; their results are
        combined into one.
        """
        return self._pass("forward_backward", data, loss_fn, loss_fn_config, timeout)

    def forward_backward_custom(
        self,
        data: list[Datum],
        loss_fn: CustomLossFn | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[RegularizerSpec | Mapping[str, Any]] = (),
        track_grad_norms: bool = False,
        max_concurrency: int | None = None,
        loss_timeout: float | None = 600.0,
        timeout: float | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """Train on any differentiable function of the logprobs, computed here in PyTorch.

        `loss_fn(data, logprobs)` gets one tensor of logprobs per datum and returns `(loss, metrics)`. Each regularizer
        is multiplied by its weight and added; at most `max_concurrency` of them run at a time. The result's
        `custom_loss` has the value of each and, with `track_grad_norms`, the norm of its gradient. The loss and each
        regularizer may take `loss_timeout` seconds. If one fails, `CustomLossError` is raised and the model is
        unchanged.

        The call takes two passes at the service; operations called later run after both. `loss_fn` may also be a
        `LossHandle` of `create_custom_loss`: if the service runs it, one pass is enough.
        """
        if loss_type_input not in {None, "logprobs"}:
            raise InvalidInputError(
                f"must be 'logprobs', not {loss_type_input!r}", field="loss_type_input"
            )
        if isinstance(loss_fn, LossHandle):
            if loss_fn.session_id != self._session.session_id:
                raise InvalidInputError(
                    f"{loss_fn.name!r:.80} is of session {loss_fn.session_id}, not of this one",
                    field="loss_fn",
                )
            traced_loss.check_inputs(loss_fn, data)
            if loss_fn.loss_id is not None and not regularizers:
                config = {"loss_id": loss_fn.loss_id}
                return self.forward_backward(data, "custom", config, timeout=timeout)
            loss_fn = traced_loss.local_loss(loss_fn)
        from tinkex.regularizers.pipeline import Pipeline
        from tinkex.regularizers.protocol import check_loss_fn

        check_loss_fn(loss_fn)
        pipeline = Pipeline(
            regularizers,
            track_grad_norms=track_grad_norms,
            timeout=loss_timeout,
            max_concurrency=max_concurrency,
        )
        check_data(data)
        first_pass = custom_loss.forward_data(data)
        data = list(data)  # copied: it is sent later, when the caller may have changed the list
        work = (self._custom, data, first_pass, loss_fn, pipeline)
        report = partial(_report_pass, data, 2)
        return self._ordered("forward_backward_custom", timeout, *work, report=report)

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        timeout: float | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """Update the weights with the accumulated gradients, then clear the gradients."""
        if optim_params is not None and adam_params is not None:
            raise InvalidInputError(
                "give optim_params or adam_params, not both", field="adam_params"
            )
        params = optim_params or adam_params or AdamParams()
        stepped = self._simple(
            "optim_step",
            OptimStepRequest(optim_params=params, model_id=self.model_id, seq_id=0),
            timeout,
            report=_report_step,
        )
        for observer in self._after_step:
            try:
                observer()
            except Exception:
                logger.exception("Step observer failed: %r", observer)
        return stepped

    def log(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        samples: Sequence[LoggedSample | Mapping[str, Any]] | None = None,
    ) -> APIFuture[LogResponse]:
        """Report metrics and samples of a step, for the dashboard of the service.

        Returns at once: reports are sent in the background, several together, and never delay or fail training. The
        result of the future says how many metrics and samples the service accepted: none if it keeps no metrics.
        Closing the client waits until everything logged so far is sent.
        """
        given = [
            each if isinstance(each, LoggedSample) else LoggedSample(**each)
            for each in samples or ()
        ]
        checked = {
            name: number(value, f"metrics.{name}") for name, value in (metrics or {}).items()
        }
        entry = LogEntry(step=step, time=time.time(), metrics=checked, samples=given)
        if checked and wants(event_types.MetricsLogged):
            whose = {**self._session.metadata, **self._event_metadata()}
            emit(event_types.MetricsLogged(step, checked, metadata=whose))
        return self._session.submit(self._run_log.send(entry))

    # -- weights -----------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state under `name`, to continue training from later."""
        check_name(name)
        return self._simple(
            "save_weights",
            SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                seq_id=0,
                ttl_seconds=ttl_seconds,
                overwrite=overwrite,
                user_metadata=user_metadata,
            ),
            timeout,
            then=_normalised,
        )

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save the weights under `name` for sampling."""
        check_name(name)
        saving = self._simple(
            "save_weights_for_sampler",
            SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                seq_id=0,
                ttl_seconds=ttl_seconds,
                user_metadata=user_metadata,
            ),
            timeout,
            then=lambda saved: SaveWeightsForSamplerResponse(path=_path_of(saved)),
        )
        return self._remember_name(name, saving)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Write the adapter files for use outside the service; with recipients, encrypted for them (age)."""
        check_name(name)
        return self._simple(
            "save_weights_external",
            SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                seq_id=0,
                ttl_seconds=ttl_seconds,
                age_encryption_recipients=age_encryption_recipients,
            ),
            timeout,
            then=lambda saved: SaveWeightsExternalResponse(path=_path_of(saved, "external")),
        )

    def load_state(
        self,
        path: str,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights into this model and reset its optimizer."""
        return self._load(path, weights_access_token, timeout, optimizer=False)

    def load_state_with_optimizer(
        self,
        path: str,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[LoadWeightsResponse]:
        """Load weights and optimizer state into this model."""
        return self._load(path, weights_access_token, timeout, optimizer=True)

    def _load(
        self, path: str, token: str | None, timeout: float | None, *, optimizer: bool
    ) -> APIFuture[LoadWeightsResponse]:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        return self._simple(
            "load_weights",
            LoadWeightsRequest(
                model_id=self.model_id,
                path=path,
                seq_id=0,
                optimizer=optimizer,
                weights_access_token=token,
            ),
            timeout,
        )

    # Aliases: the names of the protocol.
    save_weights = save_state
    load_weights = load_state
    load_weights_with_optimizer = load_state_with_optimizer

    # -- sampling ----------------------------------------------------------------------------

    save_weights_and_get_sampling_client_sync = (
        TrainingClientMethods.save_weights_and_get_sampling_client
    )

    def _save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        ttl_seconds: int | None = None,
        timeout: float | None = None,
    ) -> APIFuture[SamplingClient]:
        """Create a sampler of the current weights; later training does not change it.

        With a `name` the weights are saved as a checkpoint of that name. Without one the sampler lives as long as the
        session and is not listed as a checkpoint. The service deletes the saved weights after `ttl_seconds`.

        If the name is already used, its checkpoint keeps the earlier weights. The new sampler has the current weights
        and is not listed.
        """
        from .sampling import SamplingClient, open_sampling_session

        if name is not None:
            check_name(name)
        retry_config = check_retry_config(retry_config)
        session = self._session
        if name is not None and name in self._sampler_names:
            logger.warning(
                "%s already has a sampler checkpoint %r; the new sampler is not listed as a checkpoint.",
                self.model_id,
                name,
            )
            name = None
        unnamed = None if name is not None else session.next_sampling_seq()

        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id,
            path=name,
            sampling_session_seq_id=unnamed,
            seq_id=0,
            ttl_seconds=ttl_seconds,
        )

        async def sampler(saved: SaveWeightsForSamplerResponseInternal) -> SamplingClient:
            if saved.sampling_session_id is not None:
                sampling_session_id = saved.sampling_session_id
            else:
                sampling_session_id = await open_sampling_session(
                    session, model_path=_path_of(saved), base_model=None, deadline=None
                )
            sampler = SamplingClient(
                session,
                sampling_session_id=sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
            sampler._model_id = self.model_id
            return sampler

        saving = self._simple("save_weights_for_sampler", request, timeout, then=sampler)
        return self._remember_name(name, saving)

    def _remember_name(self, name: str | None, saving: APIFuture[T]) -> APIFuture[T]:
        """Mark `name` as used, unless saving is cancelled or fails through no fault of the caller."""

        def forget(saved: Any) -> None:
            error = None if saved.cancelled() else saved.exception()
            if saved.cancelled() or (error is not None and not getattr(error, "user_error", True)):
                self._sampler_names.discard(cast("str", name))

        if name is not None:
            self._sampler_names.add(name)
            saving.add_done_callback(forget)
        return saving

    def save_weights_and_get_sampling_client_submit(
        self, retry_config: RetryConfig | None = None
    ) -> APIFuture[SamplingClient]:
        """`save_weights_and_get_sampling_client` without blocking; the name is that of releases up to 0.19."""
        return self._save_weights_and_get_sampling_client(retry_config=retry_config)

    def _create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SamplingClient]:
        """Create a sampler of a saved checkpoint, in the same session."""
        from .sampling import SamplingClient

        return SamplingClient.create(
            self._session,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            timeout=timeout,
        )

    # -- the model ---------------------------------------------------------------------------

    def _get_info(self, *, timeout: float | None = None) -> APIFuture[GetInfoResponse]:
        """The service's description of this model."""
        request = GetInfoRequest(model_id=self.model_id)
        return self._session.start_call("get_info", request, timeout=timeout)

    def unload_model(self, *, timeout: float | None = None) -> APIFuture[UnloadModelResponse]:
        """Unload the model at the service; its checkpoints are kept."""
        request = UnloadModelRequest(model_id=self.model_id)
        return self._simple("unload_model", request, timeout, numbered=False)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it."""
        if self._tokenizer_id is None:
            data = self.get_info().model_data
            if data.model_name is None and data.tokenizer_id is None:
                raise InvalidInputError(
                    "the service states neither the model's name nor its tokenizer",
                    field="model_data",
                )
            self._tokenizer_id = loadable_tokenizer(
                self._session, data.model_name or "", data.tokenizer_id, data.tokenizer_sha256
            )
        return load_tokenizer(self._tokenizer_id)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without a chat template."""
        return encode(text, self.get_tokenizer())

    encode_text = encode  # the name of the Elixir SDK

    def decode(self, token_ids: list[int]) -> str:
        return decode(token_ids, self.get_tokenizer())

    def _guaranteed_model_id(self) -> ModelID:
        """The model's id. Scripts use this private name of the official client."""
        return self.model_id

    def get_console_url(self) -> str:
        return f"{CONSOLE}/training_runs/{self.model_id}"

    def get_telemetry(self) -> Reporter:
        """The session's telemetry reporter. With telemetry off it is falsy and drops every event."""
        return self._session.reporter

    # -- how operations run ------------------------------------------------------------------

    def _pass(
        self,
        name: Literal["forward", "forward_backward"],
        data: list[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
        timeout: float | None,
    ) -> APIFuture[ForwardBackwardOutput]:
        check_data(data)
        checked = check_loss(loss_fn, config)
        data = list(data)  # copied: it is sent later, when the caller may have changed the list
        work = (self._run_pass, name, data, loss_fn, checked)
        return self._ordered(name, timeout, *work, report=partial(_report_pass, data, 1))

    def _simple(
        self,
        name: str,
        request: RequestModel,
        timeout: float | None,
        then: Callable[[Any], Any] | None = None,
        *,
        numbered: bool = True,
        report: Callable[[ClientCall, Any, float], object] | None = None,
    ) -> APIFuture[Any]:
        """Send one request when its turn comes, and only then number it. `then` turns its answer into the result."""
        work = (self._run_simple, operation(name), request, then, numbered)
        return self._ordered(name, timeout, *work, report=report)

    def _ordered(
        self,
        name: str,
        timeout: float | None,
        work: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        report: Callable[[ClientCall, T, float], object] | None = None,
    ) -> APIFuture[T]:
        """Run `work(turn, deadline, *args)` once all earlier operations are dispatched."""
        if self is _computing_loss_of.get():
            raise InvalidInputError(
                "a custom loss cannot call its own training client: the call would wait for the loss",
                field="loss_fn",
            )
        deadline = self._session.deadline(timeout)
        turn = self._turns.ticket()
        begin = partial(work, turn, deadline, *args)
        return self._session.start(name, begin, self._event_metadata, report, timeout=timeout)

    def _event_metadata(self) -> Mapping[str, Any]:
        """Metadata of the events of this model's operations."""
        base_model = self._session.base_models.get(self.model_id)
        return {
            "model_id": self.model_id,
            "model_seq_id": self._model_seq_id,
            "base_model": base_model,
        }

    async def _run_simple(
        self,
        turn: DispatchTurn,
        deadline: float | None,
        row: Operation[object],
        request: RequestModel,
        then: Callable[[Any], Any] | None,
        numbered: bool,
    ) -> Any:
        async with turn:
            await self._session.opened()
            self._check_may_start(row, deadline)
            seq_id = turn.next_seq() if numbered else 0
            if numbered:
                request = request.model_copy(update={"seq_id": seq_id})
            if wants(event_types.Event):
                add_metadata(seq_id=seq_id)
            promised, seconds = await self._session.promise(row, request, deadline=deadline)
        result = await self._outcome(row, promised, seconds, deadline)
        if then is None:
            return result
        made = then(result)
        return await made if isinstance(made, Awaitable) else made

    async def _run_pass(
        self,
        turn: DispatchTurn,
        deadline: float | None,
        name: Literal["forward", "forward_backward"],
        data: list[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
    ) -> ForwardBackwardOutput:
        async with turn:
            sent = await self._dispatch(turn, name, data, loss_fn, config, deadline)
        return with_loss_sum(await self._combined(name, *sent, deadline), data, loss_fn)

    async def _custom(
        self,
        turn: DispatchTurn,
        deadline: float | None,
        data: list[Datum],
        first_pass: list[Datum],
        loss_fn: CustomLossFn,
        pipeline: Pipeline,
    ) -> ForwardBackwardOutput:
        async with turn:
            sent = await self._dispatch(
                turn, "forward", first_pass, "cross_entropy", None, deadline
            )
            forward = await self._combined("forward", *sent, deadline)
            if divides_by_weights(forward) and not self._warned_of_division:
                self._warned_of_division = True
                logger.warning(
                    "The service divides the loss of each datum by the sum of its weights, as SkyRL's JAX backend "
                    "does. With such a service the gradient of a custom loss is wrong."
                )
            _computing_loss_of.set(self)  # visible to this task and to the loss's thread only
            evaluate = partial(custom_loss.surrogate, data, forward, loss_fn, pipeline)
            surrogate = await self._in_time(deadline, evaluate)
            sent = await self._dispatch(
                turn, "forward_backward", surrogate.data, "cross_entropy", None, deadline
            )
        result = await self._combined("forward_backward", *sent, deadline)
        return custom_loss.merged(result, surrogate)

    async def _in_time(self, deadline: float | None, work: Callable[[], T]) -> T:
        """Run `work` on a thread. At the deadline this raises and the thread is abandoned: it cannot be stopped."""
        from tinkex.regularizers.executor import start

        left = None if deadline is None else deadline - self._session.clock.monotonic()
        try:
            async with asyncio.timeout(left) as limit:
                return await asyncio.wrap_future(start(work))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise APITimeoutError(
                message="The operation's timeout expired while its loss was being computed."
            ) from error

    async def _dispatch(
        self,
        turn: DispatchTurn,
        name: Literal["forward", "forward_backward"],
        data: list[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
        deadline: float | None,
    ) -> tuple[Parts, list[tuple[Any, float]]]:
        """Post all chunks of one pass. In parallel, the first is sent last: the service starts none before it has all."""
        await self._session.opened()
        self._check_may_start(operation(name), deadline)
        flags = self._session.flags
        chunks = list(
            chunking.split(
                data,
                max_items=flags.fwdbwd_max_chunk_len,
                max_bytes=flags.fwdbwd_max_chunk_bytes_count,
            )
        )
        requests = [
            _pass_request(
                name, ForwardBackwardInput(chunk, loss_fn, config), self.model_id, turn.next_seq()
            )
            for chunk in chunks
        ]
        parts = Parts([len(chunk) for chunk in chunks], backward=name == "forward_backward")
        if len(requests) == 1:
            return parts, [await self._post_part(parts, 0, requests[0], deadline)]
        posts = [
            partial(self._post_part, parts, index, request, deadline)
            for index, request in enumerate(requests)
        ]
        if not flags.parallel_fwdbwd_chunks:
            return parts, [await self._post_alone(parts, *post) for post in enumerate(posts)]
        return parts, await self._post_first_last(parts, posts)

    @staticmethod
    async def _post_alone(parts: Parts, index: int, post: _Post) -> tuple[Any, float]:
        try:
            return await post()
        except TinkerError as error:
            parts.explain(error, index)
            raise

    async def _post_first_last(
        self, parts: Parts, posts: Sequence[_Post]
    ) -> list[tuple[Any, float]]:
        """Post all chunks even if one is refused: the service runs later seq_ids only after missing ones arrive.

        If the service cannot be reached, the first chunk is not sent.
        """
        later = await asyncio.gather(*(post() for post in posts[1:]), return_exceptions=True)
        refused = [
            (index, outcome)
            for index, outcome in enumerate(later, 1)
            if isinstance(outcome, BaseException)
        ]
        if not any(isinstance(error, APIConnectionError) for _, error in refused):
            first = await self._post_alone(parts, 0, posts[0])
        for index, error in refused:
            if isinstance(error, TinkerError):
                parts.explain(error, index)
            raise error
        return [first, *(outcome for outcome in later if not isinstance(outcome, BaseException))]

    def _check_may_start(self, row: Operation[object], deadline: float | None) -> None:
        """Raise before a seq_id is assigned: the service would wait for an assigned seq_id that never arrives."""
        if deadline is not None and self._session.clock.monotonic() >= deadline:
            raise APITimeoutError(
                message="The operation's timeout expired before it could be sent."
            )
        self._session.transport.admit(row.pool)

    async def _post_part(
        self,
        parts: Parts,
        index: int,
        request: ForwardBackwardRequest | ForwardRequest,
        deadline: float | None,
    ) -> tuple[Any, float]:
        """Post one request of a pass. Returns its promise, or already its result, and the seconds it took."""
        if wants(event_types.Event):
            add_metadata(seq_id=request.seq_id)
        weight = sum(map(chunking.datum_bytes, _input_of(request).data))
        session, wire, tag = self._session, self._session.training_wire, parts.headers(index)
        started = session.clock.monotonic()
        with Lease() as lease:
            await lease.take(session.service.training_room, weight)
            try:
                row, response = await self._send(wire, request, weight, tag, deadline)
                wire.confirmed = True
            except TinkerError as error:
                if not wire.may_fall_back(error):
                    raise
                plain = TrainingWire(protobuf=False)
                try:
                    row, response = await self._send(plain, request, weight, tag, deadline)
                except TinkerError:
                    if error.status_code == 415:
                        raise
                    raise error from None  # JSON is refused too: the content is at fault
                wire.protobuf = False
                logger.info(
                    "The service does not accept protobuf; passes are now sent as JSON: %s", error
                )
        parts.note(response.headers)
        promised = session.transport.read_promise(row, response)
        return promised, session.clock.monotonic() - started

    async def _send(
        self,
        wire: TrainingWire,
        request: ForwardBackwardRequest | ForwardRequest,
        weight: int,
        tag: Mapping[str, str],
        deadline: float | None,
    ) -> tuple[Operation[object], RawResponse]:
        zstd = self._session.flags.proto_compress_fwdbwd
        if weight > _ENCODE_ASIDE:
            row, body, headers = await asyncio.to_thread(wire.encode, request, zstd=zstd)
        else:
            row, body, headers = wire.encode(request, zstd=zstd)
        response = await self._session.transport.send(
            row, body, headers={**headers, **tag}, deadline=deadline
        )
        return row, response

    async def _combined(
        self,
        name: str,
        parts: Parts,
        promises: Sequence[tuple[Any, float]],
        deadline: float | None,
    ) -> ForwardBackwardOutput:
        row = operation(name)
        if len(promises) == 1:
            result: ForwardBackwardOutput = await self._outcome(row, *promises[0], deadline)
            return result
        outcomes = [
            self._outcome(row, promised, seconds, deadline) for promised, seconds in promises
        ]
        return chunking.combine(await _all(outcomes, parts))

    def _outcome(
        self, row: Operation[object], promised: Any, seconds: float, deadline: float | None
    ) -> Coroutine[Any, Any, Any]:
        return self._session.outcome(
            row, promised, seconds, observers=self._observers, deadline=deadline
        )


_Post: TypeAlias = Callable[[], Coroutine[Any, Any, tuple[Any, float]]]


async def _all(work: Sequence[Coroutine[Any, Any, T]], parts: Parts) -> list[T]:
    """All results in order; a failure cancels the rest.

    A failed part makes later parts fail, so of several failures the one of the earliest part is raised.
    """
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [index for index, task in enumerate(tasks) if task.done() and task.exception()]
        for index, task in enumerate(tasks[: failed[0] + 1] if failed else tasks):
            try:
                await task
            except TinkerError as error:
                parts.explain(error, index)
                raise
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def _report_pass(
    data: Sequence[Datum],
    passes: int,
    call: ClientCall,
    result: ForwardBackwardOutput,
    seconds: float,
) -> None:
    if wants(event_types.TrainingPass):
        tokens = passes * sum(chunking.known_tokens(datum.model_input) for datum in data)
        facts = (call.id, call.operation, seconds, len(data), tokens, result.loss, result.metrics)
        emit(event_types.TrainingPass(*facts, metadata=call.metadata))


def _report_step(call: ClientCall, result: OptimStepResponse, seconds: float) -> None:
    if wants(event_types.TrainingStep):
        metrics = result.metrics or {}
        emit(
            event_types.TrainingStep(
                call.id, call.operation, seconds, metrics, metadata=call.metadata
            )
        )


def _path_of(saved: Any, kind: CheckpointType = "sampler") -> str:
    if saved.path is None:
        raise APIResponseValidationError(
            message="The service saved the weights but returned no path."
        )
    return with_kind(saved.path, kind)


def _normalised(saved: SaveWeightsResponse) -> SaveWeightsResponse:
    path = with_kind(saved.path, "training")
    return saved if path == saved.path else saved.model_copy(update={"path": path})


def _pass_request(
    name: str, inputs: ForwardBackwardInput, model_id: str, seq_id: int
) -> ForwardBackwardRequest | ForwardRequest:
    if name == "forward":
        return ForwardRequest(inputs, model_id, seq_id)
    return ForwardBackwardRequest(inputs, model_id, seq_id)


def _input_of(request: ForwardBackwardRequest | ForwardRequest) -> ForwardBackwardInput:
    if isinstance(request, ForwardRequest):
        return request.forward_input
    return request.forward_backward_input
