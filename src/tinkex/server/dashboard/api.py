"""The read API of the dashboard, under `/local/`: one function per call, and the table that routes and documents them.

Keys work as on all other routes: a key sees only its own runs, and gets "not found" for a run of another key. Calls that
change something are not here, because the page uses the operations of the protocol for that. The only exception is
deleting a run, for which the protocol has no operation.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from tinkex._version import __version__
from tinkex._wire import json_codec
from tinkex.engine.base_models import built_in
from tinkex.errors import APIStatusError, InvalidInputError, NotFoundError
from tinkex.types._base import RequestModel

from ..checkpoints import tinker_path
from ..decoding import checked_json
from ..event_streams import EventStream
from ..local_operations import PLAY_PROMPT
from ..memory_use import engine_memory
from ..serving.vocabulary import Vocabulary
from ..threads import InTurn
from .deletion import delete_run
from .live import Live
from .playground import PlaygroundRequest, play
from .run_view import RunViews, series, short
from .samples import Order, SampleLog
from .thinning import Axis

if TYPE_CHECKING:
    from ..service import Service

__all__ = ["CALLS", "Dashboard", "LocalCall"]

#: Curves in one answer.
_MAX_CURVES: Final = 50
#: Largest number of checkpoints that the playground lists.
_MAX_CHOICES: Final = 1_000


class Page(RequestModel):
    limit: Annotated[int, Field(ge=1, le=1000)] = 200
    offset: Annotated[int, Field(ge=0, lt=1 << 53)] = 0


class Plot(RequestModel):
    """A part of some metrics: `names` are joined by newlines, `width` is how many points a plot has room for.

    An answer has the curves of at most 50 metrics, from number `offset` on, and the names of all.
    """

    names: str | None = None
    offset: Annotated[int, Field(ge=0, lt=1 << 53)] = 0
    axis: Axis = "step"
    start: float | None = None
    end: float | None = None
    width: Annotated[int, Field(ge=2, le=4000)] = 500


class SamplesOf(RequestModel):
    """Samples of one step; by default of the last that has some."""

    step: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    order: Order = "logged"
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    offset: Annotated[int, Field(ge=0, lt=1 << 53)] = 0


class Since(RequestModel):
    """Rates after this time, so that a page that has read the others need not read them again."""

    since: float = 0.0


class DeletedRun(RequestModel):
    """Whether a deleted run keeps its checkpoints; then only metrics and samples are deleted."""

    keep_checkpoints: bool = False


class Dashboard:
    """What the calls share."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.views = RunViews(service)
        self.live = Live()
        service.promises.on_accept.append(self.live.request_changed)
        service.promises.on_finish.append(self.live.request_changed)
        service.run_metrics.on_written.append(self.live.metrics_written)
        service.run_metrics.on_samples.append(self.live.samples_written)

    def samples(self, owner: str, run_id: str) -> SampleLog:
        return SampleLog(self.service.run_metrics.directory(owner, run_id))


@dataclass(frozen=True)
class DashboardRequest:
    """One request to the dashboard."""

    dashboard: Dashboard
    owner: str
    http: Request
    query: Any

    @property
    def service(self) -> Service:
        return self.dashboard.service

    @property
    def in_turn(self) -> InTurn:
        """Runs a read in a thread, after the earlier reads of this key."""
        return self.service.reading.of(self.owner)

    @property
    def run_id(self) -> str:
        return str(self.http.path_params["run_id"])


Handler = Callable[[DashboardRequest], Awaitable[Any]]


@dataclass(frozen=True)
class LocalCall:
    """A call of the dashboard; `answer` describes the response."""

    name: str
    method: str
    path: str
    summary: str
    answer: str
    handler: Handler
    query: type[RequestModel] | None = None
    body: type[RequestModel] | None = None
    media: str = "application/json"

    async def __call__(self, dashboard: Dashboard, owner: str, request: Request) -> Response:
        query = None
        if self.query is not None:
            query = json_codec.from_object(dict(request.query_params), self.query)
        elif self.body is not None:
            query = json_codec.from_object(
                await self._content(dashboard, owner, request), self.body
            )
        answer = await self.handler(DashboardRequest(dashboard, owner, request, query))
        if isinstance(answer, Response):
            return answer
        return _json(answer)

    async def _content(self, dashboard: Dashboard, owner: str, request: Request) -> Any:
        bodies = dashboard.service.bodies
        hold = bodies.budget.hold(owner)
        try:
            received = await bodies.receive(PLAY_PROMPT, request, hold)
            size = len(received.body)
            return await bodies.off_loop(owner, size, checked_json, PLAY_PROMPT, received.body)
        finally:
            hold.release()


def _json(value: Any) -> Response:
    payload = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(payload, media_type="application/json", headers={"cache-control": "no-store"})


# -- runs ----------------------------------------------------------------------------------------------


async def list_runs(asked: DashboardRequest) -> dict[str, Any]:
    return await asked.dashboard.views.page(asked.owner, asked.query.limit, asked.query.offset)


async def get_run(asked: DashboardRequest) -> dict[str, Any]:
    return await asked.dashboard.views.whole(asked.owner, asked.run_id)


async def remove_run(asked: DashboardRequest) -> dict[str, Any]:
    run = await asked.dashboard.views.owned(asked.owner, asked.run_id)
    keep: bool = asked.query.keep_checkpoints
    gone = await delete_run(asked.service, run, keep_checkpoints=keep)
    asked.dashboard.views.forget(run.run_id)
    asked.dashboard.live.curves_replaced(asked.owner, run.run_id)
    asked.dashboard.live.samples_written(asked.owner, run.run_id)
    return gone


async def get_run_metrics(asked: DashboardRequest) -> Response:
    await asked.dashboard.views.owned(asked.owner, asked.run_id)
    await asked.service.run_metrics.flush()
    return await asked.in_turn(_plots, asked)


def _plots(asked: DashboardRequest) -> Response:
    plot: Plot = asked.query
    metrics = asked.service.run_metrics.run(asked.owner, asked.run_id)
    names = metrics.names if plot.names is None else plot.names.split("\n")
    found = {}
    for name in names[plot.offset : plot.offset + _MAX_CURVES]:
        read = metrics.read(name, plot.axis, plot.start, plot.end, plot.width)
        if read is not None:
            buckets, points = read
            found[name] = _curve(buckets, plot.axis) | {"points": points}
    return _json({"axis": plot.axis, "metrics": found, "names": metrics.names})


def _curve(buckets: Any, axis: Axis) -> dict[str, Any]:
    """The lists of one curve; `odd` has the positions of values that are not finite."""
    drawn = series(buckets, axis)
    x = drawn["x"]
    exact = bool(np.all(buckets["finite"] <= 1))
    odd = [
        [float(x[place]), word, int(buckets[name][place])]
        for name, word in (("nan", "NaN"), ("above", "∞"), ("below", "−∞"))
        for place in np.flatnonzero(buckets[name])[:200].tolist()
    ]
    heights = {name: short(drawn[name]) for name in (("y",) if exact else ("y", "low", "high"))}
    return {"x": np.ascontiguousarray(x), **heights, "odd": odd}


async def list_run_checkpoints(asked: DashboardRequest) -> dict[str, Any]:
    return {"checkpoints": await asked.dashboard.views.checkpoints(asked.owner, asked.run_id)}


# -- samples -------------------------------------------------------------------------------------------


async def list_sample_steps(asked: DashboardRequest) -> dict[str, Any]:
    await asked.dashboard.views.owned(asked.owner, asked.run_id)
    await asked.service.captured.flush()
    log = asked.dashboard.samples(asked.owner, asked.run_id)
    return {"steps": await asked.in_turn(log.steps)}


async def list_samples(asked: DashboardRequest) -> Response:
    run = await asked.dashboard.views.owned(asked.owner, asked.run_id)
    await asked.service.captured.flush()
    log = asked.dashboard.samples(asked.owner, asked.run_id)
    models = asked.service.served_models
    vocabulary = models.known_vocabulary(run.base_model)
    page = await asked.in_turn(_page, log, asked.query, vocabulary)
    if page is None:  # only now: it may have to load the base model
        with suppress(InvalidInputError, NotFoundError):  # the service no longer offers it
            vocabulary = await models.vocabulary(run.base_model)
        # Read again: pages that wait for their turn must not wait in memory.
        page = await asked.in_turn(partial(_page, log, asked.query, vocabulary, bare=True))
        assert page is not None
    return page


def _page(
    log: SampleLog, wanted: SamplesOf, vocabulary: Vocabulary | None, *, bare: bool = False
) -> Response | None:
    """The answer; without a vocabulary None if there are tokens, unless these may be `bare` of texts."""
    step = wanted.step
    if step is None:
        steps = log.steps()
        if not steps:
            return _json({"step": None, "samples": [], "total": 0})
        step = steps[-1]["step"]
    samples, total = log.at(step, wanted.order, wanted.offset, wanted.limit)
    if vocabulary is not None:
        _add_texts(vocabulary, samples)
    elif not bare and any(each.get("tokens") or each.get("prompt_tokens") for each in samples):
        return None
    return _json({"step": step, "samples": samples, "total": total})


def _add_texts(vocabulary: Vocabulary, samples: list[dict[str, Any]]) -> None:
    """Look up the texts of tokens, and the whole text where the client gave only tokens."""
    for sample in samples:
        tokens = sample.get("tokens")
        if tokens:
            sample["token_texts"] = list(map(vocabulary.token_text, tokens))
            sample.setdefault("text", vocabulary.text(tokens))
        if sample.get("prompt_tokens"):
            sample.setdefault("prompt", vocabulary.text(sample["prompt_tokens"], special=True))
        if sample.get("alternatives"):
            sample["alternatives"] = [
                [[vocabulary.token_text(token), logprob] for token, logprob in row]
                for row in sample["alternatives"]
            ]


async def get_sample(asked: DashboardRequest) -> Response:
    """One whole sample, as a file: the browser must not show what may be ten megabytes on one line."""
    await asked.dashboard.views.owned(asked.owner, asked.run_id)
    number = asked.http.path_params["number"]
    log = asked.dashboard.samples(asked.owner, asked.run_id)
    whole = await asked.in_turn(log.whole, number)
    headers = {
        "content-disposition": f'attachment; filename="sample-{number}.json"',
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }
    return Response(whole, media_type="application/json", headers=headers)


# -- service -------------------------------------------------------------------------------------------


def _now(service: Service) -> dict[str, Any]:
    return {"version": __version__, "time": service.promises.clock(), "started": service.started_at}


async def get_events(asked: DashboardRequest) -> Response:
    views, service, owner = asked.dashboard.views, asked.service, asked.owner
    keys = service.settings.keys
    key = keys.digest(owner)
    events, leave = asked.dashboard.live.listen(
        owner,
        lambda run_ids: views.some(owner, run_ids),
        lambda: _now(service),
        lambda: service.stopping.is_set() or keys.digest(owner) != key,  # the key may be revoked
        [model.model_id for model in service.models if model.owner == owner],
    )
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStream(events, headers, leave)


async def get_service(asked: DashboardRequest) -> dict[str, Any]:
    service, owner = asked.service, asked.owner
    waiting: dict[str, int] = {}
    for model in service.models:
        mine = "this key" if model.owner == owner else "other keys"
        waiting[mine] = waiting.get(mine, 0) + len(model.line)
    database = service.database
    sessions, runs, checkpoints = await database(database.store.counts)
    disk = await asked.in_turn(shutil.disk_usage, service.settings.data_dir)
    try:
        state, trouble = str(service.engine.check_health()), ""
    except APIStatusError as error:  # the page is wanted most when no engine can serve
        state, trouble = "cannot serve", error.message
    return {
        **_now(service),
        "owner": owner,
        "engine": {
            "kind": service.settings.engine,
            "device": service.settings.device,
            "dtype": service.settings.dtype,
            "state": state,
            "trouble": trouble,
            "cores": os.cpu_count(),
            "engines": [
                {
                    "name": each.name,
                    "up": each.up,
                    "trouble": each.trouble,
                    "node": each.node,
                    "device": each.device,
                    "memory_bytes": engine_memory(each),
                    "models": each.models,
                    "samples": each.samples,
                    "starts": each.starts,
                    "busy_seconds": each.busy_seconds,
                }
                for each in service.engine.status()
            ],
        },
        "models": [
            {"name": model.name, "context_length": model.context_length, "arch": model.arch}
            for model in service.engine.catalog.models
        ],
        "counts": {
            "sessions": sessions,
            "runs": runs,
            "checkpoints": checkpoints,
            "live_models": service.models.count,
        },
        "queue": waiting,
        "sampling": service.samplers.under_way,
        "disk": {
            "free": disk.free,
            "total": disk.total,
            "journal": service.journal.size,
            "checkpoints": service.quotas.checkpoint_bytes.used(owner),
            "metrics": service.quotas.metric_bytes.used(owner),
        },
        "usage": dict(service.usage.totals),
        "history": service.history.rates(asked.query.since),
        "failures": [asdict(each) for each in service.history.failures_of(owner)[:100]],
    }


# -- playground ----------------------------------------------------------------------------------------


async def list_choices(asked: DashboardRequest) -> dict[str, Any]:
    """What the playground can sample from."""
    service = asked.service
    database = service.database
    loaded = [model.name for model in service.engine.catalog.models]
    offered = built_in() if service.settings.on_demand else ()
    rows, total = await database(
        database.store.checkpoints, asked.owner, limit=_MAX_CHOICES, offset=0, external=False
    )
    return {
        "models": list(dict.fromkeys((*loaded, *offered))),
        "checkpoints": [
            {"path": tinker_path(row), "run": row.run_id, "name": row.name, "kind": row.kind}
            for row in rows
        ],
        "total": total,
    }


async def play_prompt(asked: DashboardRequest) -> Response:
    events, stop = await play(asked.service, asked.owner, asked.query)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return EventStream(events, headers, stop)


_EVENTS: Final = "text/event-stream"

CALLS: Final[tuple[LocalCall, ...]] = (
    LocalCall(
        "list_runs",
        "GET",
        "/local/runs",
        "List the runs with their state, progress and a sparkline of the loss",
        "`runs`, most recently used first, and their `total`.",
        list_runs,
        Page,
    ),
    LocalCall(
        "get_run",
        "GET",
        "/local/runs/{run_id}",
        "Read a run: its state, configuration, queue and the names of its metrics",
        "The run.",
        get_run,
    ),
    LocalCall(
        "delete_run",
        "DELETE",
        "/local/runs/{run_id}",
        "Delete a run whose session has ended, with its metrics, samples and checkpoints",
        "What was deleted: `metric_bytes`, and the number of `checkpoints`.",
        remove_run,
        DeletedRun,
    ),
    LocalCall(
        "get_run_metrics",
        "GET",
        "/local/runs/{run_id}/metrics",
        "Read metrics of a run, reduced to the width of a plot",
        "`metrics` by name: `x`, the mean `y`, and `low` and `high` where a point stands for several steps; `odd` has "
        "the positions of values that are not finite, and `points` is how many values the whole metric has.",
        get_run_metrics,
        Plot,
    ),
    LocalCall(
        "list_run_checkpoints",
        "GET",
        "/local/runs/{run_id}/checkpoints",
        "List the checkpoints of a run",
        "`checkpoints`, newest first.",
        list_run_checkpoints,
    ),
    LocalCall(
        "list_sample_steps",
        "GET",
        "/local/runs/{run_id}/sample_steps",
        "List the steps of a run that have samples",
        "`steps`, each with its number of samples and their mean reward.",
        list_sample_steps,
    ),
    LocalCall(
        "list_samples",
        "GET",
        "/local/runs/{run_id}/samples",
        "Read samples of a step; long ones are cut",
        "`samples`, and the `total` of the step. A sample with `cut` has more than is shown. There are fewer than `limit` if "
        "they are long.",
        list_samples,
        SamplesOf,
    ),
    LocalCall(
        "get_sample",
        "GET",
        "/local/runs/{run_id}/samples/{number:int}",
        "Download one sample as a whole",
        "The sample as its client sent it.",
        get_sample,
    ),
    LocalCall(
        "get_events",
        "GET",
        "/local/events",
        "Listen to changes of the runs",
        "Server-sent events: first `hello`, then `runs` with the runs that changed, `gone` with the ids of deleted ones, "
        "and a regular `beat`. A run's `changed` says what changed: its `state`, `metrics` or `samples`. With `metrics` it "
        "has its new `points`: `step`, `tokens`, `time`, and `values` by name, each as its number within its metric, "
        "from 0, and the value. A number above those that the reader has tells that some are missing; `points` is null if "
        "there are too many for an event. Then `get_run_metrics` has them.",
        get_events,
        media=_EVENTS,
    ),
    LocalCall(
        "get_service",
        "GET",
        "/local/service",
        "Read the state of the service and its last hour",
        "Engine, queue, disk, rates by time, and the failed requests of this key.",
        get_service,
        Since,
    ),
    LocalCall(
        "list_choices",
        "GET",
        "/local/choices",
        "List the base models and checkpoints that can be sampled",
        "`models`, and the newest `checkpoints` of the key.",
        list_choices,
    ),
    LocalCall(
        "play_prompt",
        "POST",
        "/local/playground",
        "Answer a prompt token by token",
        "Server-sent events: `token` with text and logprob, then `done` with the alternatives of every token, or `error`.",
        play_prompt,
        body=PlaygroundRequest,
        media=_EVENTS,
    ),
)
