"""The entry point: a session with a service, and the clients created from it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from tinkex import types
from tinkex._lazy import Lazy
from tinkex._retry import Clock
from tinkex._wire.operations import operation
from tinkex.config import CircuitBreaker, Config, PollBackoffOption
from tinkex.errors import APIConnectionError, InvalidInputError
from tinkex.telemetry.bus import wants
from tinkex.telemetry.calls import add_metadata
from tinkex.telemetry.exceptions import concerns_tinkex
from tinkex.telemetry.lazy_events import event_types
from tinkex.telemetry.reporter import Reporter
from tinkex.types.paths import CONSOLE, ParsedCheckpointTinkerPath

from ._generated import ServiceClientMethods
from .auth import config_with_login
from .breaker import Circuits
from .http import HTTPClient
from .lora_options import RANK, TRAINED
from .lora_options import lora_config as chosen_lora_config
from .notices import logger
from .operations import OperationsClient
from .queue_state import Observer, QueueLogger, observer_of
from .retry import RetryConfig
from .runtime import APIFuture
from .session import FinishReason, Session, refusing_bad_values

if TYPE_CHECKING:
    from tinkex.types import (
        CustomLossInputRank,
        GetServerCapabilitiesResponse,
        LoraConfig,
        OptimizerConfig,
    )

    from . import rest, sampling, traced_loss, training
    from .sampling import SamplingClient
    from .traced_loss import LossHandle, PerDatumLossFn
    from .training import TrainingClient
else:  # a program imports only the clients that it makes
    rest = Lazy("tinkex._client.rest")
    sampling = Lazy("tinkex._client.sampling")
    traced_loss = Lazy("tinkex._client.traced_loss")
    training = Lazy("tinkex._client.training")

__all__ = ["ServiceClient"]

_CONFIG_FIELDS = frozenset(Config.__dataclass_fields__)


# The blocking `x` and the coroutine `x_async` of a method `_x` are generated: scripts/generate_async.py.
class ServiceClient(ServiceClientMethods):
    """A client of one Tinker service.

    Nothing is sent before the first call that needs the service. Settings come from the arguments, else from
    `tinkex.set_defaults`, else from the environment; `config` replaces the last two. `clock` is for tests: it
    replaces the time source. Use the client in a `with` block, or call `close()`, to end the session at the
    service. A script that does neither still exits.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: Config | None = None,
        clock: Clock | None = None,
        **kwargs: Any,
    ) -> None:
        ignored = {name for name, value in kwargs.items() if not _is_setting(name, value)}
        if ignored:
            warnings.warn(
                f"ServiceClient ignores {', '.join(sorted(ignored))}", FutureWarning, stacklevel=2
            )
        given = {"base_url": base_url, "api_key": api_key, **kwargs}
        options = {
            name: value
            for name, value in given.items()
            if value is not None and name not in ignored
        }
        if config is None:
            config = config_with_login(**options)
        elif options:
            config = config.replace(**options)
        if default_headers_overrides:
            headers = {**config.default_headers, **default_headers_overrides}
            config = config.replace(default_headers=headers)
        self._session = Session(
            config,
            user_metadata=user_metadata,
            project_id=project_id,
            display_name=display_name,
            clock=clock,
        )
        self._project_id = project_id
        self._loss_seq = itertools.count()

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._session.config.shown_base_url!r})"

    @property
    def holder(self) -> Session:
        return self._session

    @property
    def config(self) -> Config:
        return self._session.config

    @property
    def http(self) -> HTTPClient:
        """HTTP calls by path, for endpoints without a method here: raw and streamed responses, file uploads."""
        return HTTPClient(self._session)

    @property
    def api(self) -> OperationsClient:
        """Every operation of the protocol by name: typed, as a promise, or raw."""
        return OperationsClient(self._session)

    @property
    def circuits(self) -> Circuits:
        """The circuit breakers: their state, and closing one by hand. Without the setting `circuit_breaker` all are closed."""
        session = self._session
        found = session.transport.circuits if session.config.circuit_breaker else None
        return found or Circuits(CircuitBreaker(), session.clock)

    # -- training ----------------------------------------------------------------------------

    def _create_lora_training_client(
        self,
        base_model: str,
        rank: int = RANK,
        seed: int | None = None,
        train_mlp: bool = TRAINED,
        train_attn: bool = TRAINED,
        train_unembed: bool = TRAINED,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        lora_config: LoraConfig | None = None,
        timeout: float | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a LoRA adapter on `base_model`, ready to train.

        `lora_config` holds the same settings as the five options from `rank` to `train_unembed`. An option given here
        overrides it.
        """
        if not isinstance(base_model, str) or not base_model.strip():
            raise InvalidInputError(
                f"must be a non-empty string, got {base_model!r:.80}", field="base_model"
            )
        config = chosen_lora_config(
            lora_config,
            rank=rank,
            seed=seed,
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
        )
        deadline = self._session.deadline(timeout)
        return self._session.start(
            "create_model",
            lambda: self._create_model(base_model, config, user_metadata, optimizer, deadline),
            lambda: {"base_model": base_model},
            timeout=timeout,
        )

    async def _create_model(
        self,
        base_model: str,
        lora_config: LoraConfig,
        user_metadata: Mapping[str, Any] | None,
        optimizer: OptimizerConfig | None,
        deadline: float | None,
    ) -> TrainingClient:
        session = self._session
        session_id = await session.opened()
        model_seq_id = session.next_model_seq()
        if wants(event_types.Event):
            add_metadata(session_id=session_id, model_seq_id=model_seq_id)
        if user_metadata is None:
            user_metadata = session.config.user_metadata
        created = await session.run(
            "create_model",
            types.CreateModelRequest(
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model=base_model,
                user_metadata=None if user_metadata is None else dict(user_metadata),
                lora_config=lora_config,
                optimizer_config=cast("Any", optimizer or types.AdamOptimizerConfig()),
            ),
            observers=(QueueLogger("Training", base_model, session.clock.monotonic),),
            deadline=deadline,
        )
        logger.info("Training client for %s is ready: %s", base_model, created.model_id)
        session.base_models[created.model_id] = base_model
        return training.TrainingClient(session, model_seq_id, created.model_id)

    def _create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        load_optimizer: bool = False,
        timeout: float | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a model from the weights of a checkpoint. Its optimizer is fresh unless `load_optimizer` is set."""
        token = weights_access_token
        return self._from_state(
            path, base_model, user_metadata, token, optimizer, timeout, load_optimizer
        )

    def _create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a model from the weights and the optimizer state of a checkpoint: training continues where it was saved."""
        return self._from_state(
            path, base_model, user_metadata, weights_access_token, None, timeout, True
        )

    def _from_state(
        self,
        path: str,
        base_model: str | Mapping[str, str] | None,
        user_metadata: Mapping[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
        timeout: float | None,
        load_optimizer: bool,
    ) -> APIFuture[TrainingClient]:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        if isinstance(base_model, Mapping):  # user_metadata was second up to release 0.24.0
            base_model, user_metadata = None, base_model
        deadline = self._session.deadline(timeout)
        asked = (path, base_model, user_metadata, token, optimizer, load_optimizer, deadline)
        return self._session.start("load_weights", partial(self._restore, *asked), timeout=timeout)

    async def _restore(
        self,
        path: str,
        base_model: str | None,
        user_metadata: Mapping[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
        load_optimizer: bool,
        deadline: float | None,
    ) -> TrainingClient:
        session = self._session
        session_id = await session.opened()
        if user_metadata is None:
            user_metadata = session.config.user_metadata
        if session.flags.create_model_via_load_weights:
            model_seq_id = session.next_model_seq()
            if wants(event_types.Event):
                add_metadata(session_id=session_id, model_seq_id=model_seq_id)
            loaded = await session.run(
                "load_weights",
                types.LoadWeightsRequest(
                    session_id=session_id,
                    model_seq_id=model_seq_id,
                    base_model=base_model,
                    user_metadata=None if user_metadata is None else dict(user_metadata),
                    path=path,
                    optimizer=load_optimizer,
                    optimizer_config=cast("Any", optimizer),
                    weights_access_token=token,
                ),
                observers=(QueueLogger("Training", path, session.clock.monotonic),),
                deadline=deadline,
            )
            model_id = loaded.model_id or f"{session_id}:train:{model_seq_id}"
            if base_model is not None:
                session.base_models[model_id] = base_model
            return training.TrainingClient(session, model_seq_id, model_id)
        # weights_info has no token field. For a checkpoint of another account, that account's token is the key.
        headers = None if token is None else {"x-api-key": token}
        info = await session.call(
            "weights_info",
            types.WeightsInfoRequest(tinker_path=path),
            headers=headers,
            deadline=deadline,
        )
        if not info.is_lora:
            raise InvalidInputError("the checkpoint is not a LoRA adapter", field="path")
        chosen = optimizer or info.optimizer_config
        with refusing_bad_values():
            lora_config = info.lora_config()
        client = await self._create_model(
            base_model or info.base_model, lora_config, user_metadata, chosen, deadline
        )
        load = client.load_state_with_optimizer if load_optimizer else client.load_state
        try:
            await load(path, token)
        except BaseException:  # the caller never gets this model, so unload it here
            client.unload_model()
            raise
        return client

    def create_custom_loss(
        self,
        fn: PerDatumLossFn,
        input_ranks: Mapping[str, CustomLossInputRank],
        *,
        timeout: float | None = None,
    ) -> APIFuture[LossHandle]:
        """Trace a loss function of one datum, for `forward_backward_custom`.

        `fn(logprobs, *inputs)` is called once with `torch.fx` proxies to record its operations. `input_ranks` is the
        number of dimensions of each input. If the service supports traced losses, the loss runs there in one pass.
        """
        handle = traced_loss.traced(fn, input_ranks, "")
        self._session.deadline(timeout)
        return self._session.submit(self._create_custom_loss(handle, timeout), timeout=timeout)

    async def _create_custom_loss(self, handle: LossHandle, timeout: float | None) -> LossHandle:
        session = self._session
        handle = replace(handle, session_id=await session.opened())
        if not session.flags.custom_loss_server_side:
            return handle
        request = types.CreateCustomLossRequest(
            session_id=handle.session_id,
            custom_loss_seq_id=next(self._loss_seq),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=traced_loss.encoded(handle),
        )
        deadline = session.deadline(timeout)
        created = await session.run("create_custom_loss", request, deadline=deadline)
        return replace(handle, loss_id=created.loss_id)

    def poll(
        self,
        request_id: str | Mapping[str, Any],
        *,
        request_type: str | None = None,
        poll_backoff: PollBackoffOption | None = None,
        queue_state_observer: Observer | None = None,
        timeout: float | None = None,
    ) -> APIFuture[dict[str, Any]]:
        """Wait for a request that was sent with `http.post`, and return its result as JSON.

        `request_id` is the id from the response of `http.post`, or that whole response. `poll_backoff` overrides the
        configured wait between failed polls. `queue_state_observer` is called with the state and the reason each time
        the service pauses or resumes the request.
        """
        promise = {"request_id": request_id} if isinstance(request_id, str) else request_id
        with refusing_bad_values():
            promised = types.UntypedAPIFuture.model_validate(promise)
        row = replace(operation("retrieve_future"), result_kind=dict, request_type=request_type)
        session, deadline = self._session, self._session.deadline(timeout)
        observers = () if queue_state_observer is None else (observer_of(queue_state_observer),)

        async def polled() -> dict[str, Any]:
            await session.configured()
            result: dict[str, Any] = await session.outcome(
                row,
                promised,
                None,
                observers=observers,
                deadline=deadline,
                poll_backoff=poll_backoff,
            )
            return result

        return session.start("retrieve_future", polled, timeout=timeout)

    # -- sampling and service info -----------------------------------------------------------

    def _create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> APIFuture[SamplingClient]:
        """Create a sampler of a checkpoint or of a base model."""
        return sampling.SamplingClient.create(
            self._session,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
            timeout=timeout,
        )

    def create_rest_client(self) -> rest.RestClient:
        """Create a client for runs, checkpoints and sessions that shares this client's connections."""
        return rest.RestClient(self._session)

    def _get_server_capabilities(
        self, *, timeout: float | None = None
    ) -> APIFuture[GetServerCapabilitiesResponse]:
        """The models that the service offers."""
        return self._session.start_call("get_server_capabilities", timeout=timeout)

    def health(self, *, timeout: float | None = None) -> types.HealthResponse:
        """Raise unless the service reports that it is healthy."""
        checked: types.HealthResponse = self._session.start_call(
            "healthz", timeout=timeout
        ).result()
        return checked

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project; the result is the new path."""
        return rest.RestClient(self._session).copy_weights(
            path,
            self._project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
            timeout=timeout,
        )

    def get_console_url(self) -> str:
        """The page of this session in the hosted console; before the session is open, the list of all sessions."""
        session_id = self._session.session_id
        return f"{CONSOLE}/sessions" if session_id is None else f"{CONSOLE}/sessions/{session_id}"

    def get_telemetry(self) -> Reporter:
        """The session's telemetry reporter. With telemetry off it is falsy and drops every event."""
        return self._session.reporter

    telemetry_reporter = get_telemetry

    # -- closing -----------------------------------------------------------------------------

    def close(self, status: FinishReason = "success", detail: str | None = None) -> APIFuture[None]:
        """End the session; work in flight fails with ClientClosedError. Wait for the future to be sure it has ended."""
        if status not in {"success", "errored", "interrupted"}:
            raise InvalidInputError(
                f"must be success, errored or interrupted, not {status!r:.80}", field="status"
            )
        return self._session.close(status, detail)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Connection errors are not reported: the report goes to the service that cannot be reached.
        if (
            isinstance(error, Exception)
            and not isinstance(error, APIConnectionError)
            and concerns_tinkex(error)
        ):
            self._session.reporter.log_exception(error)
        if kind is None:
            status: FinishReason = "success"
        else:  # `sys.exit` counts as an interruption, whatever its exit code
            status = "errored" if issubclass(kind, Exception) else "interrupted"
        self.close(status, None if error is None else f"{type(error).__name__}: {error}").result()


def _is_setting(name: str, value: Any) -> bool:
    """Whether a keyword is a setting. A timeout object of an HTTP library (`httpx.Timeout`) is not one."""
    return name in _CONFIG_FIELDS and not (name == "timeout" and hasattr(value, "connect"))
