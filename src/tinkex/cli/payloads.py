"""The JSON that each command prints with `--format json`, defined once.

The type checker checks commands against these types, `scripts/docs.py` generates `docs/reference/cli-output.json` from
them, and tests validate the output of commands against that. Fields are never removed; new ones may be added.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NotRequired

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict

from tinkex.types import (
    BillingUsageResponse,
    Checkpoint,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    EngineHealth,
    GetSessionResponse,
    SaveWeightsForSamplerResponse,
    SupportedModel,
    TrainingRun,
    WeightsInfoResponse,
    WhoamiResponse,
)
from tinkex.types._aliases import AliasList

__all__ = ["PAYLOADS", "json_schema"]


# -- checkpoints -------------------------------------------------------------------------------------


class CheckpointList(TypedDict):
    checkpoints: list[Checkpoint]
    total: int | None
    shown: int
    size_bytes: int
    run_id: NotRequired[str]


class CheckpointInfo(Checkpoint, WeightsInfoResponse):
    """A checkpoint, and the facts about its weights."""


class CheckpointSave(TypedDict):
    base_model: str
    model_id: str
    weights_path: str
    saved_at: str
    response: SaveWeightsForSamplerResponse


class CheckpointPublish(TypedDict):
    checkpoint_path: str
    public: bool


class CheckpointTTL(TypedDict):
    checkpoint_path: str
    ttl_seconds: int | None


class DeleteFailure(TypedDict):
    path: str
    error: str


class CheckpointDelete(TypedDict):
    """`paths` are the chosen checkpoints; `size_bytes` is their total size, null if they were named by path."""

    paths: list[str]
    size_bytes: int | None
    deleted: int
    failed: int
    failures: list[DeleteFailure]
    cancelled: bool
    dry_run: bool


class CheckpointDownload(TypedDict):
    checkpoint_path: str
    destination: str


class CheckpointExport(TypedDict):
    checkpoint_path: str
    destination: str
    merged: bool
    base_model: str
    size_bytes: int
    files: list[str]


class CheckpointImport(TypedDict):
    run_id: str
    base_model: str
    lora_rank: int
    checkpoints: list[Checkpoint]


class CheckpointPush(TypedDict):
    checkpoint_path: str
    repo_id: str
    revision: str
    public: bool
    url: str
    files: list[str]


# -- runs, sessions, models --------------------------------------------------------------------------


class RunList(TypedDict):
    runs: list[TrainingRun]
    total: int | None
    shown: int


class SessionList(TypedDict):
    sessions: list[str]
    shown: int


class SessionInfo(GetSessionResponse):
    session_id: str


class SessionTrace(TypedDict):
    """`destination` is null if the trace was not downloaded."""

    session_id: str
    url: str
    destination: str | None


class ModelList(TypedDict):
    models: list[SupportedModel]


class Status(TypedDict):
    """`running` is false for a local service that is not started; then models, runs and checkpoints are unknown.

    `trouble` says why the service cannot train or cannot sample now.
    """

    base_url: str
    running: bool
    local_url: str | None
    data_dir: str
    models: list[str]
    engines: list[EngineHealth]
    trouble: str | None
    runs: int | None
    checkpoints: int | None
    last_runs: list[TrainingRun]


# -- sampling and training ---------------------------------------------------------------------------


class SequenceOutput(TypedDict):
    stop_reason: str
    tokens: list[int]
    logprobs: list[float] | None
    text: str | None


class SampleOutput(TypedDict):
    """`text` is null if the prompt was token ids: then no tokenizer is loaded."""

    type: Literal["sample"]
    sequences: list[SequenceOutput]
    prompt_logprobs: list[float | None] | None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None


class ChatAnswer(TypedDict):
    model: str
    text: str
    tokens: int
    stop_reason: str | None


class ChatLine(TypedDict):
    """One line of the output; each question has one."""

    question: str
    answers: list[ChatAnswer]


class TrainExamples(TypedDict):
    train: int
    held_out: int


class TrainLoss(TypedDict):
    first: float | None
    last: float | None


class TrainHeldOut(TypedDict):
    before: float | None
    after: float | None


class TrainEvaluation(TypedDict):
    step: int
    loss: float


class TrainCheckpoint(TypedDict):
    step: int
    path: str


class TrainUsage(TypedDict):
    """Tokens by kind, including evaluations and repeated steps."""

    training: int
    prefill: int
    cached_prefill: int
    sampled: int


class _TrainPlan(TypedDict):
    base_model: str
    steps: int
    steps_planned: int
    examples: TrainExamples
    notes: list[str]
    tokens: int
    usage: TrainUsage
    cost: float | None


class TrainDryRun(_TrainPlan):
    """The expected use of the rest of a run; `cost` is in dollars, null without a price."""

    status: Literal["dry run"]


class Train(_TrainPlan):
    status: Literal["finished", "interrupted"]
    model_id: str
    seconds: float
    loss: TrainLoss
    held_out_loss: TrainHeldOut
    evaluations: list[TrainEvaluation]
    checkpoints: list[TrainCheckpoint]
    training_path: str | None
    sampler_path: str | None
    resumed_from: str | None
    loss_curve: str
    run_file: str
    settings: dict[str, Any]


# -- everything else ---------------------------------------------------------------------------------


class AuthLogin(TypedDict):
    key_id: int
    name: str
    email: str
    organization: str


class AuthLogout(TypedDict):
    forgotten: bool
    revoked: bool


class AuthStatus(TypedDict):
    """`source` is where the key comes from: argument, environment, command, stored or none."""

    source: str
    base_url: str
    accepted: bool
    error: str | None


class DoctorFinding(TypedDict):
    name: str
    ok: bool
    found: str
    advice: str


class Doctor(TypedDict):
    findings: list[DoctorFinding]


class UsageReportRow(TypedDict):
    group: str
    kind: str
    count: int | float
    unit: str
    cost: float | None


class UsageReport(TypedDict):
    """Costs are in dollars, null without a price; only tokens have prices."""

    usage: list[UsageReportRow]
    cost: float | None
    storage: list[CurrentCheckpointStorageUsageItem]


class Version(TypedDict):
    """`commit` is null unless tinkex was installed from a repository."""

    version: str
    commit: str | None
    api_version: str


#: The output type of each command that has `--format json`.
PAYLOADS: Final[dict[str, Any]] = {
    "alias": AliasList,
    "auth login": AuthLogin,
    "auth logout": AuthLogout,
    "auth status": AuthStatus,
    "auth whoami": WhoamiResponse,
    "billing checkpoint-storage": CurrentCheckpointStorageUsageResponse,
    "billing usage": BillingUsageResponse,
    "chat": ChatLine,
    "checkpoint delete": CheckpointDelete,
    "checkpoint download": CheckpointDownload,
    "checkpoint export": CheckpointExport,
    "checkpoint import": CheckpointImport,
    "checkpoint info": CheckpointInfo,
    "checkpoint list": CheckpointList,
    "checkpoint publish": CheckpointPublish,
    "checkpoint push-hf": CheckpointPush,
    "checkpoint save": CheckpointSave,
    "checkpoint set-ttl": CheckpointTTL,
    "checkpoint unpublish": CheckpointPublish,
    "doctor": Doctor,
    "model list": ModelList,
    "run info": TrainingRun,
    "run list": RunList,
    "run sample": SampleOutput,
    "sample": SampleOutput,
    "session export-trace": SessionTrace,
    "session info": SessionInfo,
    "session list": SessionList,
    "status": Status,
    "train": Train | TrainDryRun,
    "usage": UsageReport,
    "version": Version,
}


class _Complete(GenerateJsonSchema):
    """Schemas of output: every field of a protocol message is required, as defaults are printed too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        if field["type"] == "typed-dict-field":
            return super().field_is_required(field, total)
        return True

    def field_title_should_be_set(self, _: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: Any) -> dict[str, Any]:
        # The last, general kind is for unknown kinds; it matches the others too, so `oneOf` would fail.
        found = super().tagged_union_schema(schema)
        return {"anyOf": found.pop("oneOf"), **found}


def json_schema() -> dict[str, Any]:
    """One document: a command's schema is at `#/$defs/` and its name, e.g. `#/$defs/checkpoint list`."""
    found, shared = TypeAdapter.json_schemas(
        [(name, "serialization", TypeAdapter(kind)) for name, kind in PAYLOADS.items()],
        schema_generator=_Complete,
    )
    commands = {name: found[name, "serialization"] for name in PAYLOADS}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Output of tinkex commands with --format json",
        "$defs": {**commands, **shared["$defs"]},
    }
