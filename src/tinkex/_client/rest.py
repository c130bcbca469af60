"""Runs, checkpoints, sessions and billing: operations that the service does not queue."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Literal
from urllib.parse import urljoin

from tinkex._retry import Every, NotYetError, retrying
from tinkex._version import PARITY_VERSION
from tinkex._wire.failures import lacks_route
from tinkex._wire.operations import Pool, operation
from tinkex.config import Config
from tinkex.errors import (
    APIResponseValidationError,
    APIStatusError,
    ExperimentalWarning,
    InvalidInputError,
    InvalidPathError,
    TinkerError,
)
from tinkex.telemetry.reporter import Reporter
from tinkex.types import (
    AccessScope,
    AssignSessionProjectRequest,
    AuditLogResponse,
    BillingUsageResponse,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CurrentCheckpointStorageUsageResponse,
    ExternalWeightsUrlsResponse,
    GetAuditLogRequest,
    GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest,
    GetSamplerResponse,
    GetSessionRequest,
    GetSessionResponse,
    ListCheckpointsRequest,
    ListSessionsRequest,
    ListSessionsResponse,
    ListTrainingRunsRequest,
    ModelID,
    SessionSearchRequest,
    SessionSearchResponse,
    SetCheckpointTtlRequest,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
    WhoamiResponse,
)
from tinkex.types.paths import ParsedCheckpointTinkerPath
from tinkex.types.training import check_ttl

from ._generated import AdminClientMethods, RestClientMethods
from .auth import config_with_login
from .checks import check_count
from .retry import ArchivePolicy
from .runtime import APIFuture
from .session import Session, refusing_bad_values
from .transport import RawResponse

__all__ = ["AdminClient", "RestClient"]

_ARCHIVE_VALID = timedelta(minutes=15)
_TRACE_WAIT = 5.0

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class _Sessionless:
    """A client with its own connections, or with those of a service client."""

    def __init__(
        self,
        _holder: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Config | None = None,
    ) -> None:
        if _holder is None:
            config = config or config_with_login(base_url=base_url, api_key=api_key)
            _holder = Session(config)
        elif (base_url, api_key, config) != (None, None, None):
            raise InvalidInputError(
                "already has a base_url, an api_key and a config; pass none of them",
                field="_holder",
            )
        self._session = _holder

    @property
    def holder(self) -> Session:
        return self._session

    def get_telemetry(self) -> Reporter:
        """The session's telemetry reporter. With telemetry off it is falsy and drops every event."""
        return self._session.reporter

    def close(self) -> APIFuture[None]:
        """Close the connections. A client created by a service client shares them, so that client is closed too."""
        return self._session.close()

    def _call(
        self,
        name: str,
        request: Any = None,
        path: Mapping[str, str] | None = None,
        timeout: float | None = None,
        *,
        method: str | None = None,
    ) -> APIFuture[Any]:
        """Start an operation; `method` is the name of the public method, if it differs from the operation's."""
        headers = _headers_of(method or name)
        return self._session.start_call(name, request, path=path, headers=headers, timeout=timeout)


class AdminClient(_Sessionless, AdminClientMethods):
    """Reports for the administrators of an organisation."""

    def get_audit_log(
        self,
        event_type: AuditEventType = "all",
        day: date | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[AuditLogResponse]:
        """Audit events of one day, or without `day` all of them."""
        with refusing_bad_values():
            request = GetAuditLogRequest(event_type=event_type, day=day)
        work = partial(self._audit_log, request)
        return self._session.start("get_audit_log", work, timeout=timeout)

    async def _audit_log(self, request: GetAuditLogRequest) -> AuditLogResponse:
        await self._session.configured()
        transport, row = self._session.transport, operation("get_audit_log")
        transport.admit(row.pool)
        response = await transport.send(row, request, headers=_headers_of("get_audit_log"))
        if response.status >= 300:  # a redirect: long logs are served from a signed URL
            location = response.headers.get("location")
            if not location:
                raise APIResponseValidationError(
                    message="The service redirected the audit log without a Location header."
                )
            response = await self._fetch(urljoin(transport.url(row.path), location))
            if response.status >= 300:
                raise transport.error(row, location, response)
        return transport.read(row, AuditLogResponse, response)

    async def _fetch(self, url: str) -> RawResponse:
        """Fetch a signed URL without the API key and without custom headers: only the service may see these."""
        transport, headers = self._session.transport, {"accept": "application/json"}
        async with (
            asyncio.timeout(transport.config.timeout),
            transport.open_stream(Pool.REST, "GET", url, headers) as response,
        ):
            return await transport.read_stream(response)

    def get_billing_usage(
        self,
        starting_on: datetime | str,
        ending_before: datetime | str,
        *,
        timeout: float | None = None,
    ) -> APIFuture[BillingUsageResponse]:
        """Hourly usage. Both times must be full UTC hours, at most 14 days apart."""
        request = GetBillingUsageRequest(
            starting_on=_moment("starting_on", starting_on),
            ending_before=_moment("ending_before", ending_before),
        )
        return self._call("get_billing_usage", request, timeout=timeout)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Size and cost of the checkpoints stored now."""
        request = GetCurrentCheckpointStorageUsageRequest(project_id=project_id)
        return self._call("get_current_checkpoint_storage_usage", request, timeout=timeout)


class RestClient(RestClientMethods, AdminClient):
    """Runs, checkpoints and sessions of an account. Opens no session."""

    # -- sessions ----------------------------------------------------------------------------

    def get_session(
        self,
        session_id: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[GetSessionResponse]:
        """The training runs and samplers of a session."""
        request = GetSessionRequest(access_scope=_scope(access_scope))
        return self._call("get_session", request, {"session_id": session_id}, timeout)

    def list_sessions(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[ListSessionsResponse]:
        request = ListSessionsRequest(
            limit=check_count("limit", limit),
            offset=check_count("offset", offset),
            access_scope=_scope(access_scope),
        )
        return self._call("list_sessions", request, timeout=timeout)

    def search_sessions(
        self, request: SessionSearchRequest, *, timeout: float | None = None
    ) -> APIFuture[SessionSearchResponse]:
        """Find sessions by name, metadata, owner and status, newest first. Experimental: this method may change."""
        warnings.warn(
            "search_sessions is experimental: any release may change or remove it",
            ExperimentalWarning,
            stacklevel=2,
        )
        return self._call("search_sessions", request, timeout=timeout)

    def assign_session_project(
        self, session_id: str, project_id: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        request = AssignSessionProjectRequest(project_id=project_id)
        return self._done("assign_session_project", request, {"session_id": session_id}, timeout)

    def export_session_trace(
        self, session_id: str, *, timeout: float | None = None
    ) -> APIFuture[str]:
        """Let the service build a trace of a session; the result is the URL of the file."""
        work = partial(self._trace, session_id)
        return self._session.start("export_session_trace", work, timeout=timeout)

    async def _trace(self, session_id: str) -> str:
        path, headers = {"session_id": session_id}, _headers_of("export_session_trace")

        async def once(_: int) -> str:
            export = await self._session.call("trace_export", path=path, headers=headers)
            if export.status == "ready" and export.url:
                return str(export.url)
            if export.status == "failed":
                raise TinkerError(
                    f"The trace could not be built: {export.error or 'no reason given'}"
                )
            raise NotYetError

        return await retrying(once, Every(_TRACE_WAIT), self._session.clock)

    # -- training runs -----------------------------------------------------------------------

    def get_training_run(
        self,
        training_run_id: ModelID,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingRun]:
        return self._training_run("get_training_run", training_run_id, access_scope, timeout)

    def get_training_run_by_tinker_path(
        self,
        tinker_path: str,
        access_scope: AccessScope = "owned",
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingRun]:
        """The run that a checkpoint belongs to."""
        run = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id
        return self._training_run("get_training_run_by_tinker_path", run, access_scope, timeout)

    def _training_run(
        self, method: str, run: ModelID, access_scope: AccessScope, timeout: float | None
    ) -> APIFuture[TrainingRun]:
        request = GetSessionRequest(access_scope=_scope(access_scope))
        path = {"training_run_id": run}
        return self._call("get_training_run", request, path, timeout, method=method)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        request = ListTrainingRunsRequest(
            limit=check_count("limit", limit),
            offset=check_count("offset", offset),
            access_scope=_scope(access_scope),
            project_id=project_id,
        )
        return self._call("list_training_runs", request, timeout=timeout)

    # -- checkpoints -------------------------------------------------------------------------

    def list_checkpoints(
        self, training_run_id: ModelID, *, timeout: float | None = None
    ) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of a run."""
        return self._call("list_checkpoints", None, {"training_run_id": training_run_id}, timeout)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0, *, timeout: float | None = None
    ) -> APIFuture[CheckpointsListResponse]:
        """All checkpoints of the account, newest first."""
        request = ListCheckpointsRequest(
            limit=check_count("limit", limit), offset=check_count("offset", offset)
        )
        return self._call("list_user_checkpoints", request, timeout=timeout)

    def delete_checkpoint(
        self,
        training_run_id: ModelID,
        checkpoint_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[None]:
        """Delete a checkpoint, named by run and id or by one `tinker://` path."""
        return self._done(
            "delete_checkpoint", None, _where(training_run_id, checkpoint_id), timeout
        )

    def delete_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        method = "delete_checkpoint_from_tinker_path"
        return self._done("delete_checkpoint", None, _where(tinker_path), timeout, method)

    def publish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Make a checkpoint readable for everybody."""
        method = "publish_checkpoint_from_tinker_path"
        return self._done("publish_checkpoint", None, _where(tinker_path), timeout, method)

    def unpublish_checkpoint_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[None]:
        method = "unpublish_checkpoint_from_tinker_path"
        return self._done("unpublish_checkpoint", None, _where(tinker_path), timeout, method)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None, *, timeout: float | None = None
    ) -> APIFuture[None]:
        """Let a checkpoint expire `ttl_seconds` from now; with None it never expires."""
        if ttl_seconds is not None:
            check_count("ttl_seconds", ttl_seconds)
        try:
            check_ttl(ttl_seconds)
        except ValueError as error:
            raise InvalidInputError(
                f"{error}, not {ttl_seconds}",
                field="ttl_seconds",
                advice="with None it never expires",
            ) from None
        request = SetCheckpointTtlRequest(ttl_seconds=ttl_seconds)
        method = "set_checkpoint_ttl_from_tinker_path"
        return self._done("set_checkpoint_ttl", request, _where(tinker_path), timeout, method)

    def get_checkpoint_archive_url(
        self,
        training_run_id: ModelID,
        checkpoint_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """The download URL of a checkpoint's archive; the checkpoint is given by run and id, or by one path.

        If the service must build the archive first, the call waits for it.
        """
        method = "get_checkpoint_archive_url"
        return self._archive(method, _where(training_run_id, checkpoint_id), timeout)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        method = "get_checkpoint_archive_url_from_tinker_path"
        return self._archive(method, _where(tinker_path), timeout)

    def _archive(
        self, method: str, where: Mapping[str, str], timeout: float | None
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        deadline = self._session.deadline(timeout)
        headers = {**_headers_of(method), "accept": "application/gzip"}
        work = partial(self._archive_url_of, where, headers, deadline)
        return self._session.start("get_checkpoint_archive_url", work, timeout=timeout)

    async def _archive_url_of(
        self, where: Mapping[str, str], headers: Mapping[str, str], deadline: float | None
    ) -> CheckpointArchiveUrlResponse:
        try:
            return await self._archive_url(where, headers, deadline)
        except APIStatusError as error:
            # SkyRL's route takes the name of a checkpoint without its type (`sampler_weights/x` is `x`).
            kind, _, name = where["checkpoint_id"].rpartition("/")
            if not kind or not lacks_route(error):
                raise
            return await self._archive_url({**where, "checkpoint_id": name}, headers, deadline)

    async def _archive_url(
        self, where: Mapping[str, str], headers: Mapping[str, str], deadline: float | None
    ) -> CheckpointArchiveUrlResponse:
        await self._session.configured()
        transport, row = self._session.transport, operation("get_checkpoint_archive_url")
        transport.admit(row.pool)
        policy = ArchivePolicy(transport.config.max_retries)
        response = await transport.send(
            row, path=where, headers=headers, deadline=deadline, policy=policy
        )
        if response.status < 300:
            return transport.read(row, CheckpointArchiveUrlResponse, response)
        location = response.headers.get("location")
        if not location:
            raise APIResponseValidationError(
                body=response.content[:2000], message="The service returned no URL for the archive."
            )
        return CheckpointArchiveUrlResponse(
            url=location,
            expires=_expires(response.headers.get("expires"), self._session.clock.wall()),
        )

    def get_external_weights_urls(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[ExternalWeightsUrlsResponse]:
        """The download URLs of the files written by `save_weights_external`."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        if parsed.checkpoint_type != "external":
            raise InvalidPathError(
                f"must be a path of external weights, got {tinker_path!r:.200}",
                field="tinker_path",
            )
        return self._call("get_external_weights_urls", None, _where(tinker_path), timeout)

    def get_weights_info_by_tinker_path(
        self, tinker_path: str, *, timeout: float | None = None
    ) -> APIFuture[WeightsInfoResponse]:
        """Base model, rank and trained parts of a checkpoint."""
        ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        request = WeightsInfoRequest(tinker_path=tinker_path)
        method = "get_weights_info_by_tinker_path"
        return self._call("weights_info", request, timeout=timeout, method=method)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
        timeout: float | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project; the result is the new path.

        `destination_project_id` defaults to the configured `project_id`. A private checkpoint of another account needs its
        `weights_access_token`.
        """
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        with refusing_bad_values():
            request = CopyWeightsRequest(
                source_path=path,
                destination_project_id=destination_project_id or self._session.config.project_id,
                ttl_seconds=ttl_seconds,
            )
        headers = _headers_of("copy_weights")
        if weights_access_token is not None:
            headers["x-tinker-weights-access-token"] = weights_access_token

        async def copied() -> str:
            response = await self._session.call("copy_weights", request, headers=headers)
            return str(response.tinker_path)

        return self._session.start("copy_weights", copied, timeout=timeout)

    # -- other -------------------------------------------------------------------------------

    def get_sampler(
        self, sampler_id: str, *, timeout: float | None = None
    ) -> APIFuture[GetSamplerResponse]:
        """The base model and the checkpoint of a sampler."""
        return self._call("get_sampler", None, {"sampler_id": sampler_id}, timeout)

    def whoami(self, *, timeout: float | None = None) -> APIFuture[WhoamiResponse]:
        """The owner of the API key. Only for services that exchange keys for tokens."""
        return self._session.start("whoami", self._whoami, timeout=timeout)

    async def _whoami(self) -> WhoamiResponse:
        await self._session.configured()
        claims = await self._session.transport.auth.claims()
        try:
            return WhoamiResponse(
                user_urn=claims["sub"],
                org_urn=f"tml:organization:{claims['org_id']}",
                email=claims.get("email"),
            )
        except KeyError as error:
            raise APIResponseValidationError(
                message=f"The token lacks the claim {error.args[0]!r}."
            ) from error

    def _done(
        self,
        name: str,
        request: Any,
        path: Mapping[str, str],
        timeout: float | None,
        method: str | None = None,
    ) -> APIFuture[None]:
        """An operation without a result."""
        headers = _headers_of(method or name)

        async def done() -> None:
            await self._session.call(
                name, request, path=path, headers=headers, deadline=self._session.deadline(timeout)
            )

        return self._session.start(name, done, timeout=timeout)

    # Aliases: names in other releases and in the Elixir SDK.
    delete_checkpoint_by_tinker_path = delete_checkpoint_from_tinker_path
    publish_checkpoint = publish_checkpoint_from_tinker_path
    publish_checkpoint_by_tinker_path = publish_checkpoint_from_tinker_path
    unpublish_checkpoint = unpublish_checkpoint_from_tinker_path
    unpublish_checkpoint_by_tinker_path = unpublish_checkpoint_from_tinker_path
    get_checkpoint_archive_url_by_tinker_path = get_checkpoint_archive_url_from_tinker_path


def _headers_of(method: str) -> dict[str, str]:
    """Headers with the release and the public method: services count which methods are still in use."""
    return {"x-sdk-version": PARITY_VERSION, "x-sdk-method": method}


def _where(training_run_id: str, checkpoint_id: str | None = None) -> dict[str, str]:
    """Run id and checkpoint id; a `tinker://` path given as `training_run_id` contains both."""
    if checkpoint_id is None:
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(training_run_id)
        training_run_id, checkpoint_id = parsed.training_run_id, parsed.checkpoint_id
    return {"training_run_id": training_run_id, "checkpoint_id": checkpoint_id}


def _scope(access_scope: AccessScope) -> AccessScope | None:
    """The value to send. The default is omitted: services before 0.15 do not know the field."""
    if access_scope not in {"owned", "accessible"}:
        raise InvalidInputError(
            f"must be owned or accessible, not {access_scope!r:.80}", field="access_scope"
        )
    return None if access_scope == "owned" else access_scope


def _moment(name: str, value: datetime | str) -> datetime:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError as error:
        raise InvalidInputError(f"{value!r:.80} is not a date and time", field=name) from error
    if not isinstance(moment, datetime):
        raise InvalidInputError(f"expected a datetime, got {value!r:.80}", field=name)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _expires(text: str | None, now: float) -> datetime | str:
    if text is None:
        return datetime.fromtimestamp(now, UTC) + _ARCHIVE_VALID
    try:
        return parsedate_to_datetime(text)
    except ValueError:
        return text
