"""The service: creates its parts from settings, starts and stops them."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, Literal
from weakref import WeakValueDictionary

from tinkex._wire.operations import ServicePart
from tinkex.config import read_env
from tinkex.engine.base_models import default_cache_dir
from tinkex.engine.files import make_directory
from tinkex.engine.process import Setup
from tinkex.engine.values import MAX_RANK, LossLimits, VllmOptions
from tinkex.errors import ConfigError
from tinkex.types import CopyWeightsRequest, CreateSessionRequest, FinishSessionRequest

from . import identity
from .auth import Keys
from .bodies import Bodies
from .checkpoints import Checkpoints, now_utc, tinker_path
from .clock import ServiceClock
from .damage import Lost
from .dashboard.captured import Capture
from .dashboard.history import History, Reading
from .dashboard.recorder import Recorder
from .dashboard.store import MetricStore
from .database import Database
from .engines import make_engines
from .file_threads import FileThreads
from .futures import Promise, Promises
from .grammar_trials import GrammarTrials
from .inputs import SampleLimits, check_ttl
from .journal import Journal, Kind, Record
from .large_answers import LargeAnswers
from .losses import Losses
from .memory_use import memory_of
from .model_work import ModelWork
from .models import Models
from .private import close_to_others
from .quotas import KeyLimits, Quotas
from .ray_cluster import RayOptions
from .reports import Reports
from .retention import Retention
from .samplers import UNNAMED_LIMIT, Samplers
from .serving.aliases import Aliases
from .serving.models import ServedModels
from .sessions import Sessions
from .set_aside import SetAside
from .signing import Signer
from .snapshots import Snapshots
from .store import Store
from .threads import KeyThreads
from .usage import UsageMeter

__all__ = [
    "DEFAULT_MODEL",
    "Service",
    "Settings",
    "default_cache_dir",
    "default_data_dir",
    "read_setting",
]

logger = logging.getLogger("tinkex.server")

DEFAULT_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"

#: Far more than one service can feed; a larger number is a slip.
MAX_ENGINES: Final = 1024


def default_data_dir() -> Path:
    """The default data directory."""
    named = read_env("TINKEX_DATA_DIR")
    return Path(named).expanduser() if named else Path.home() / ".tinkex"


@dataclass(frozen=True)
class Settings:
    """The settings of a service. Times are in seconds, sizes in bytes."""

    data_dir: Path
    base_models: tuple[str, ...] = (DEFAULT_MODEL,)
    engine: Literal["torch", "fake"] = "torch"
    engine_in_process: bool = False
    #: Engine processes; `auto` is one per GPU, and one on a machine without.
    engines: int | Literal["auto"] = 1
    #: What samples: the engines, or vLLM in a process of its own, run by the interpreter `sampler_python`.
    sampler: Literal["own", "vllm"] = "own"
    sampler_python: Path | None = None
    #: A Ray cluster for the engines: `HOST:PORT`, `auto` for the one this machine belongs to, `local` for a new one.
    ray: str | None = None
    #: What each engine gets of the cluster: one processor, and one GPU if the cluster has any.
    engine_cpus: float | None = None
    engine_gpus: float | None = None
    #: A directory that every node of the cluster sees under the same path.
    shared_dir: Path | None = None
    #: Settings of vLLM; see `VllmOptions`.
    vllm_max_loras: int = VllmOptions.max_loras
    vllm_kept_loras: int = VllmOptions.kept_loras
    vllm_max_rank: int = VllmOptions.max_rank
    vllm_memory_share: float = VllmOptions.memory_share
    vllm_cpu_cache_gb: int = VllmOptions.cpu_cache_gb
    vllm_eager: bool = VllmOptions.eager
    #: Whether a base model is downloaded when a client first asks for it; for services of one user.
    on_demand: bool = False
    device: str = "auto"
    dtype: str = "auto"
    #: Seconds that one step of the engine's work may take: a micro-batch, a sampling step, a save. After that the
    #: engine is killed, and the request that it was working on fails. While it starts: the seconds in which it does nothing.
    engine_deadline: float = 600.0
    database_url: str | None = None
    cache_dir: Path = field(default_factory=default_cache_dir)
    keys: Keys = field(default_factory=Keys.open)
    #: Host names besides loopback that a service without keys accepts in the `Host` header.
    allowed_hosts: tuple[str, ...] = ()
    #: Seconds of work on a model between two snapshots; after a crash, about as much work is repeated.
    snapshot_every: float = 30.0
    #: A session without a request or heartbeat for this long has ended.
    session_expiry: float = 6 * 3600
    #: What each key may use at a time.
    limits: KeyLimits = field(default_factory=KeyLimits)
    #: How long a result can be fetched, while its key has at most `kept_results`.
    result_retention: float = 6 * 3600
    #: If a key has more results than this (about 100 MB of memory), those that were fetched `told_retention` seconds
    #: ago are evicted: a client that lost a response asks again within a minute and a half.
    kept_results: int = 100_000
    told_retention: float = 120.0
    #: If a key is at its limit of results, those that were not fetched for this long are evicted. Clients poll all the
    #: time, so the client of such a result is gone.
    abandoned_after: float = 600.0
    telemetry_retention: float = 30 * 86_400
    #: How long a poll is held open; clients give up after 45.
    hold: float = 30.0
    housekeeping_interval: float = 60.0
    url_lifetime: float = 3600.0
    #: Upper limits of any body, as received and decompressed. Each operation has lower limits (`Operation.limits`);
    #: `body_limits` replaces them by name.
    max_body_bytes: int = 64 << 20
    max_decoded_bytes: int = 64 << 20
    body_limits: Mapping[str, int] = field(default_factory=dict)
    #: Bytes of request bodies that are being read or checked, as received and decompressed; as many again of answers
    #: that are being sent.
    max_inflight_bytes_per_key: int = 256 << 20
    max_inflight_bytes: int = 1 << 30
    #: Examples in one training request; clients send at most 1,024.
    max_examples: int = 2048
    #: Open connections (fewer if the process may open fewer files), and bytes of the head of a request.
    max_connections: int = 10_000
    max_head_bytes: int = 64 << 10
    #: Time limits of a peer: for the head of a request, for each 16 KiB of its body, for reading each 64 KiB of a response.
    head_timeout: float = 20.0
    body_timeout: float = 30.0
    send_timeout: float = 60.0
    #: Limits of one sampling request; see `SampleLimits`.
    max_samples: int = SampleLimits.max_samples
    max_stop_strings: int = SampleLimits.max_stop_strings
    max_stop_bytes: int = SampleLimits.max_stop_bytes
    max_stop_tokens: int = SampleLimits.max_stop_tokens
    max_topk: int = SampleLimits.max_topk
    max_alternatives: int = SampleLimits.max_alternatives
    max_grammar_bytes: int = SampleLimits.max_grammar_bytes
    max_grammar_seconds: float = SampleLimits.max_grammar_seconds
    max_biases: int = SampleLimits.max_biases
    #: Unnamed samplers that a session keeps; beyond this number, the least recently used are deleted.
    max_unnamed_samplers: int = UNNAMED_LIMIT
    #: Limits of a traced loss; see `LossLimits`.
    max_loss_bytes: int = LossLimits.max_loss_bytes
    max_loss_work: int = LossLimits.max_loss_work
    use_retrieve_futures: bool = False
    #: Whether a proxy on this machine forwards requests of other machines: then no request counts as local.
    behind_proxy: bool = False
    #: The wall clock and a monotonic clock. Something expires when both say that its time is over.
    now: Callable[[], datetime] = now_utc
    monotonic: Callable[[], float] = time.monotonic

    @property
    def sample_limits(self) -> SampleLimits:
        return SampleLimits(
            **{each.name: getattr(self, each.name) for each in fields(SampleLimits)}
        )

    @property
    def vllm_options(self) -> VllmOptions:
        return VllmOptions(
            max_loras=self.vllm_max_loras,
            kept_loras=self.vllm_kept_loras,
            max_rank=self.vllm_max_rank,
            max_logprobs=max(self.max_topk, 1),
            memory_share=self.vllm_memory_share,
            cpu_cache_gb=self.vllm_cpu_cache_gb,
            eager=self.vllm_eager,
        )

    @property
    def ray_options(self) -> RayOptions | None:
        if self.ray is None:
            return None
        cpus = 1.0 if self.engine_cpus is None else self.engine_cpus
        return RayOptions(self.ray, cpus, self.engine_gpus, self.shared_dir)

    @property
    def loss_limits(self) -> LossLimits:
        return LossLimits(self.max_loss_bytes, self.max_loss_work)

    def __post_init__(self) -> None:
        if self.engines != "auto" and not 1 <= self.engines <= MAX_ENGINES:
            raise ConfigError(f"must be between 1 and {MAX_ENGINES:,}, or auto", field="engines")
        if self.sampler_python is not None and not os.access(self.sampler_python, os.X_OK):
            raise ConfigError(
                f"{self.sampler_python} is not an executable file", field="sampler_python"
            )
        if self.sampler_python is not None and self.sampler != "vllm":
            raise ConfigError("is for vLLM; give --sampler vllm too", field="sampler_python")
        self._check_ray()
        if not 1 <= self.vllm_max_rank <= MAX_RANK:
            raise ConfigError(f"must be between 1 and {MAX_RANK}", field="vllm_max_rank")
        for name in ("vllm_max_loras", "vllm_kept_loras", "vllm_cpu_cache_gb"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name)
        if not 0 < self.vllm_memory_share <= 1:
            raise ConfigError("must be more than 0 and at most 1", field="vllm_memory_share")
        if not self.engine_deadline > 0:
            raise ConfigError("must be more than 0 seconds", field="engine_deadline")
        if self.on_demand and self.keys.needed:
            # A base model can be a directory: several users must not choose what the service opens.
            raise ConfigError(
                "is for a service of one user; with keys, list the base models instead",
                field="on_demand",
            )

    def _check_ray(self) -> None:
        if self.ray is None:
            for name in ("engine_cpus", "engine_gpus", "shared_dir"):
                if getattr(self, name) is not None:
                    raise ConfigError("is for engines on a Ray cluster; give --ray", field=name)
            return
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("needs Ray: pip install 'tinkex[local,ray]'", field="ray")
        for name in ("engine_cpus", "engine_gpus"):
            amount = getattr(self, name)
            if amount is not None and not (0 <= amount <= 1 or amount == int(amount) > 0):
                raise ConfigError("must be a whole number, or between 0 and 1", field=name)
        if self.engine_cpus == 0 and not self.engine_gpus:
            raise ConfigError("an engine needs a CPU or a GPU", field="engine_cpus")
        if self.shared_dir is not None and not self.shared_dir.is_dir():
            raise ConfigError(f"there is no directory {self.shared_dir}", field="shared_dir")


def read_setting(text: str) -> tuple[str, Any]:
    """Parse NAME=NUMBER: a numeric field of `Settings`."""
    kinds = {each.name: type(each.default) for each in fields(Settings)}
    own_option = {"engines", "engine_cpus", "engine_gpus"}
    known = [
        name for name, kind in kinds.items() if kind in {int, float} and name not in own_option
    ]
    name, _, value = text.partition("=")
    if name in own_option:
        option = f"--{name.replace('_', '-')} {value}".strip()
        raise ConfigError(f"is not a setting of --set; give {option:.60}", field=name)
    if name not in known:
        raise ConfigError(f"is not a setting of --set; choose from {', '.join(known)}", field=name)
    whole = kinds[name] is int
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = -1
    if not 0 <= number < math.inf:
        what = "a whole number" if whole else "a number"
        raise ConfigError(f"must be {what} that is not negative, got {value!r:.60}", field=name)
    return name, number


class Service:
    """One service, from `start` to `stop`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        data = settings.data_dir
        self._lock = _Lock(data / "lock")
        url = settings.database_url or f"sqlite:///{data / 'tinkex.db'}"
        self.database = Database(Store(url))
        self.files = FileThreads()
        self.bodies = Bodies(
            max_body_bytes=settings.max_body_bytes,
            max_decoded_bytes=settings.max_decoded_bytes,
            body_limits=settings.body_limits,
            max_inflight_bytes_per_key=settings.max_inflight_bytes_per_key,
            max_inflight_bytes=settings.max_inflight_bytes,
        )
        self.large_answers = LargeAnswers(
            settings.max_inflight_bytes_per_key, settings.max_inflight_bytes
        )
        self.grammar_trials = GrammarTrials(settings.max_grammar_seconds)
        set_aside = SetAside(data, settings.now)
        self._clock = clock = ServiceClock(settings.now, settings.monotonic)
        self.journal = Journal(data / "journal", set_aside=set_aside.copy)
        self.quotas = quotas = Quotas.of(settings.limits)
        self.promises = Promises(
            self.journal,
            quotas=quotas,
            clock=clock.steady,
        )
        self.engine = make_engines(
            Setup(
                settings.base_models,
                settings.cache_dir,
                settings.engine,
                settings.device,
                settings.dtype,
                settings.loss_limits,
                vllm=settings.vllm_options,
            ),
            vllm=settings.sampler == "vllm",
            vllm_python=settings.sampler_python,
            ray=settings.ray_options,
            count=settings.engines,
            in_process=settings.engine_in_process,
            deadline=settings.engine_deadline,
            on_demand=settings.on_demand,
        )
        self.usage = UsageMeter(self.database, settings.now)
        self.sessions = Sessions(
            self.database, quotas.sessions, expiry=settings.session_expiry, now=settings.now
        )
        self.checkpoints = Checkpoints(
            data / "checkpoints",
            self.database,
            self.files,
            quotas.checkpoint_bytes,
            settings.now,
            clock.expiry,
        )
        self.aliases = Aliases(
            self.database,
            self.checkpoints,
            lambda: [model.name for model in self.engine.catalog.models],
            settings.now,
        )
        self.reports = Reports(self.database, quotas.telemetry_bytes)
        self.samplers = Samplers(
            data / "samplers",
            self.database,
            self.files,
            self.sessions,
            self.checkpoints,
            self.promises,
            self.engine,
            self.usage,
            quotas.samplers,
            limits=settings.sample_limits,
            # The fake engine follows no constraints.
            trials=None if settings.engine == "fake" else self.grammar_trials,
            now=settings.now,
            expiry=clock.expiry,
            unnamed_limit=settings.max_unnamed_samplers,
        )
        self.losses = Losses(
            data / "losses",
            self.files,
            self.sessions,
            self.promises,
            self.engine,
            quotas.losses,
        )
        #: For what pages of the dashboard read.
        self.reading = KeyThreads(2, "tinkex-reading")
        self.run_metrics = MetricStore(data / "metrics", quotas.metric_bytes)
        self.served_models = ServedModels(self)
        self.recorder = Recorder(self.run_metrics, self.promises.clock)
        self.history = History(self.promises.clock)
        self.captured = Capture(self)
        self.promises.on_value += [
            self.recorder.finished,
            self.history.valued,
            self.captured.finished,
        ]
        self.promises.on_finish.append(self.history.finished)
        self.snapshots = Snapshots(data / "snapshots")
        work = ModelWork(
            self.database,
            self.files,
            self.checkpoints,
            self.samplers,
            self.promises,
            self.engine,
            self.usage,
            self.losses,
            self.snapshots,
            settings.now,
        )
        self.models = Models(
            self.database,
            self.files,
            self.sessions,
            self.promises,
            self.engine,
            work,
            quotas.models,
            snapshots=self.snapshots,
            set_aside=set_aside,
            snapshot_every=settings.snapshot_every,
            now=settings.now,
        )
        self.retention = Retention(
            self.promises,
            self.journal,
            self.models.needs,
            quotas,
            result_retention=settings.result_retention,
            kept_results=settings.kept_results,
            told_retention=settings.told_retention,
            abandoned_after=settings.abandoned_after,
        )
        #: By key: held while one of its adapters is imported.
        self.import_turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.signer: Signer | None = None
        self.started_at = 0.0
        self.stopping = asyncio.Event()
        self._housekeeping: list[asyncio.Task[None]] = []

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open everything, wait for the engine, and continue the requests accepted before a restart."""
        data = self.settings.data_dir
        make_directory(data, 0o700)
        self._lock.take()
        try:
            close_to_others(data)
            self.signer = Signer.from_file(data / "secret")
            await self.database(self.database.store.open)
            await self._take_database()
            await self.database(identity.join, data, self.database.store)
            self.checkpoints.clear_scratch()
            self.snapshots.clear_scratch()
            self.samplers.clear_scratch()
            records = await self.files(lambda: list(self.journal.open()))
            await self.engine.start()
            await self.sessions.restore()
            await self.samplers.restore()
            await self.losses.restore()
            await self.checkpoints.restore()
            await self.reports.restore()
            await self.run_metrics.restore()
            await self._restore(records)
        except BaseException:
            await self.stop()
            raise
        self.started_at = time.time()
        # Compaction has its own task: under load it takes longer than the other chores can wait.
        for chore in (self.keep_house, self._compact):
            self._housekeeping.append(asyncio.create_task(self._repeat(chore)))
        self._housekeeping.append(asyncio.create_task(self.history.watch(self._reading)))

    def _reading(self) -> Reading:
        """The state of the service now, for the history of the last hour."""
        totals, engines = self.usage.totals, self.engine.status()
        memory = dict(memory_of(engines))
        return Reading(
            time=self.promises.clock(),
            trained_total=totals["training"],
            prefilled_total=totals["sampling_prefill"],
            sampled_total=totals["sampling_sample"],
            samples_total=self.history.samples,
            steps_total=self.history.steps,
            cached_total=self.history.cached,
            failed_total=self.history.failed,
            waiting=self.models.waiting,
            sampling=self.samplers.under_way,
            service_bytes=memory.get("service", 0),
            engine_bytes=memory.get("engine", 0),
            busy_total=sum(engine.busy_seconds for engine in engines),
        )

    async def _take_database(self) -> None:
        """Refuse a database that another service is using: each would end the sessions of the other."""
        if not await self.database(self.database.store.take_lease):
            raise ConfigError(
                "another service is using this database; stop that one, or give each service a database "
                "and a data directory of its own",
                field="database_url",
            )

    async def stop(self) -> None:
        """Stop all parts. Accepted requests that did not run stay in the journal and run after the next start."""
        self.stopping.set()
        self.engine.stopping = True
        for task in self._housekeeping:
            task.cancel()
        await asyncio.gather(*self._housekeeping, return_exceptions=True)
        await self.models.stop()
        await self.samplers.stop()
        await self.losses.stop()
        await self.checkpoints.stop()
        await self.engine.stop()
        if self.database.store.is_open:
            try:
                await self.models.write_times()
                await self.usage.write()
            except (
                Exception
            ) as error:  # disk full, or database gone: the other parts must still be stopped
                logger.warning("The last usage could not be written: %s", error)
        await self.captured.flush()
        await self.run_metrics.stop()
        await self.grammar_trials.close()
        self.bodies.close()
        self.reading.close()
        self.files.close()
        self.database.close()
        self.journal.close()
        self._lock.release()

    async def finish_session(
        self, session_id: str, owner: str, request: FinishSessionRequest
    ) -> None:
        """End a session; unload its models and close its samplers."""
        if await self.sessions.finish(session_id, owner, request):
            await self._close_session(session_id)

    async def _close_session(self, session_id: str) -> None:
        await self.models.close_session(session_id)
        await self.samplers.close_session(session_id)
        await self.losses.close_session(session_id)

    async def copy_weights(
        self,
        owner: str,
        request: CopyWeightsRequest,
        idempotency_key: str | None,
        reader: str | None = None,
    ) -> str:
        """Copy a checkpoint that the owner or `reader` may read into a new run of the owner."""
        source, _ = await self.checkpoints.readable(reader or owner, request.source_path)
        check_ttl(request.ttl_seconds)
        self.checkpoints.check_room(owner, source.size_bytes)
        if request.session_id is not None:
            await self.sessions.check_active(request.session_id, owner)
            session_id = request.session_id
        else:
            copying = CreateSessionRequest(
                tags=["copy"], sdk_version="", project_id=request.destination_project_id
            )
            session_id = await self.sessions.create(owner, copying, idempotency_key)
        run_id = f"{session_id}:train:{request.model_seq_id or 0}"
        store = self.database.store
        done = await self.database(store.checkpoint, run_id, source.kind, source.name)
        if done is not None:
            return tinker_path(done)  # a retry of the same request
        run = await self.checkpoints.run_of(source)
        metadata = run.user_metadata if run.owner == owner else None
        copied = replace(
            run,
            run_id=run_id,
            session_id=session_id,
            owner=owner,
            user_metadata=metadata,
            corrupted=False,  # the run is corrupted, its checkpoints are not
        )
        await self.database(store.add_run, copied)
        return tinker_path(await self.checkpoints.copy(source, run_id, owner, request.ttl_seconds))

    # -- restart -------------------------------------------------------------------------------

    async def _restore(self, records: list[Record]) -> None:
        training: list[Promise] = []
        others: list[Promise] = []
        lost = Lost(self.journal.damage)
        for record in sorted([*records, *lost.requests], key=lambda record: record.number):
            promise = self.promises.restore(record)
            if promise is not None and record.kind is Kind.REQUEST:
                ordered = promise.operation.runner is ServicePart.MODELS
                (training if ordered else others).append(promise)
        undone = self.promises.fail_lost(lost)
        await self.models.restore(training, lost, undone)
        if self.journal.damage:
            # The damaged models are now marked as corrupted, so the next start need not find the damage again.
            await self.journal.mend()
        for promise in others:
            if promise.done:
                continue
            if promise.operation.runner is ServicePart.SAMPLERS:
                await self.samplers.resume(promise)
            else:
                self.losses.resume(promise)
        self.retention.restore()

    # -- housekeeping ----------------------------------------------------------------------------

    async def _repeat(self, chore: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self.settings.housekeeping_interval)
            await chore()

    async def keep_house(self) -> None:
        """Delete what has expired, evict old results, write counters to the database.

        Steps that free disk space come before those that need some, and a failed step does not stop the others.
        Without the lease of the database nothing is done: what looks expired may belong to another service.
        """
        if not await self._has_database():
            return
        for step in (
            self.checkpoints.delete_expired,
            self.samplers.delete_expired,
            self._forget_results,
            self._end_silent_sessions,
            self._forget_old_reports,
            self.models.write_times,
            self.usage.write,
        ):
            await _attempt(step)

    async def _has_database(self) -> bool:
        try:
            has = await self.database(self.database.store.take_lease)
        except Exception as error:
            logger.warning("The database does not respond; housekeeping is skipped: %s", error)
            return False
        if not has:
            logger.error("Another service is using the database of this one; stop one of them.")
        return has

    async def _compact(self) -> None:
        await _attempt(self.retention.compact)

    async def _end_silent_sessions(self) -> None:
        async for session_id in self.sessions.expire():
            await self._close_session(session_id)

    async def _forget_old_reports(self) -> None:
        kept = timedelta(seconds=self.settings.telemetry_retention)
        await self.reports.forget(self._clock.expiry() - kept)

    async def _forget_results(self) -> None:
        self.retention.forget()
        self.samplers.trim_feeds()


async def _attempt(step: Callable[[], Awaitable[object]]) -> None:
    try:
        await step()
    except Exception:
        logger.exception("%s failed; the next attempt is in a minute.", step.__qualname__)


@dataclass
class _Lock:
    """Lets only one service use a data directory; the lock ends with the process, even after a crash."""

    path: Path
    _descriptor: int | None = None

    def take(self) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        # A process that only checks whether the directory is in use holds the lock for a moment.
        for _ in range(20):
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._descriptor = descriptor
                with suppress(OSError):  # disk full: the number is only for the message below
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return
            time.sleep(0.01)
        pid = os.pread(descriptor, 20, 0).decode("ascii", "replace")
        os.close(descriptor)
        raise ConfigError(
            f"{self.path.parent} is in use by another service"
            + (f", process {pid}; stop that one, or choose another directory" if pid else ""),
            field="data_dir",
        )

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
