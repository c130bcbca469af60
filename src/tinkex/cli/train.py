"""`tinkex train`: supervised fine-tuning from a file of conversations."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from tinkex.errors import InvalidInputError

from .addresses import found_here
from .connection import Connection, connected, formatted
from .human import clock
from .output import Output, say
from .prices import priced
from .run_file import FILE, RunSettings, RunState, SavedStep, fingerprint

if TYPE_CHECKING:
    from tinkex import ServiceClient, TrainingClient
    from tinkex.telemetry import Prices

    from .lessons import Lesson
    from .training_loop import Trainer

__all__ = ["command"]

_DEFAULTS: Final = RunSettings("", "")
_DIRECTORY: Final = "tinkex-train"
_NAME: Final = "train"
_CURVE: Final = "loss.svg"
_STOPPED: Final = 130  # the exit code that shells expect after Ctrl-C


def _setting(name: str, help: str, **options: Any) -> Callable[..., Any]:
    """An option for one of the `RunSettings`, with its default."""
    default = getattr(_DEFAULTS, name)
    flag = "--" + name.replace("_", "-")
    if isinstance(default, bool):
        flag += f"/--no-{flag[2:]}"
    return click.option(
        flag, default=default, show_default=default is not None, help=help, **options
    )


_POSITIVE: Final = click.IntRange(min=1)


@click.command("train")
@click.argument("data", required=False)
@click.option("--base-model", help="The model to fine-tune.")
@_setting("rank", "Rank of the LoRA.", type=_POSITIVE)
@_setting("learning_rate", "Peak learning rate.", type=click.FloatRange(min=0, min_open=True))
@_setting(
    "schedule",
    "How the learning rate decreases.",
    type=click.Choice(["cosine", "linear", "constant"]),
)
@_setting(
    "warmup",
    "Steps in which the learning rate first rises to its peak.",
    type=click.IntRange(min=0),
)
@_setting("weight_decay", "Weight decay of AdamW.", type=click.FloatRange(min=0))
@_setting(
    "grad_clip", "Largest norm of the gradient; 0 means no limit.", type=click.FloatRange(min=0)
)
@_setting("epochs", "Passes over all examples.", type=_POSITIVE)
@_setting("steps", "Total number of steps; replaces --epochs.", type=_POSITIVE)
@_setting("batch_size", "Examples per step.", type=_POSITIVE)
@_setting(
    "packing",
    "Fill each step with as many examples as fit into --batch-tokens. Examples stay separate sequences, so "
    "that none can attend to another.",
)
@_setting(
    "batch_tokens",
    "Tokens per step with --packing.  [default: batch size times mean length]",
    type=_POSITIVE,
)
@_setting(
    "max_length",
    "Longest example in tokens.  [default: context length]",
    type=click.IntRange(min=2),
)
@_setting(
    "too_long",
    "What to do with longer examples.",
    type=click.Choice(["refuse", "truncate", "skip"]),
)
@_setting("chat_template", "Use the chat template; without it, pairs are plain text.")
@_setting("system", "A system message for conversations that have none.")
@_setting(
    "eval_fraction",
    'Share of the examples to hold out, if the data have no "split".',
    type=click.FloatRange(0, 1, max_open=True),
)
@_setting("seed", "Seed of the adapter, the order and the held-out examples.", type=int)
@_setting("train_mlp", "Adapt the feed-forward layers.")
@_setting("train_attn", "Adapt the attention layers.")
@_setting("train_unembed", "Adapt the unembedding.")
@click.option(
    "--eval-every",
    type=click.IntRange(min=0),
    default=0,
    help="Steps between evaluations; the start and the end are always evaluated.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Steps between checkpoints; the end is always saved.",
)
@click.option(
    "--name",
    help=f"Name of the checkpoints, and of the run in the dashboard.  [default: {_NAME}, and the name of DATA]",
)
@click.option(
    "--output",
    "-o",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Directory for {FILE} and the loss curve.  [default: {_DIRECTORY}]",
)
@click.option("--overwrite", is_flag=True, help="Start a new run even if the directory holds one.")
@click.option(
    "--resume",
    metavar="DIR|PATH|auto",
    help="Resume a run: that of a directory; that of --output from one of its checkpoints (tinker://…); or, with auto, "
    "that of --output if it exists. Settings, order and optimizer are kept.",
)
@click.option("--dry-run", is_flag=True, help="Only show the tokens and their cost.")
@priced
@connected
@formatted
def command(
    data: str | None,
    directory: Path | None,
    overwrite: bool,
    resume: str | None,
    name: str | None,
    save_every: int,
    eval_every: int,
    dry_run: bool,
    prices: Prices,
    connection: Connection,
    output: Output,
    **settings: Any,
) -> None:
    """Fine-tune a model on DATA, a file with one JSON object per line.

    A line is a conversation, {"messages": [{"role": …, "content": …}, …]}, or a pair, {"prompt": …,
    "completion": …}. Both use the model's chat template, and the assistant's messages are learned. Of a
    line {"text": …} the whole text is learned, without a template. A line with "split": "test" is held out
    for evaluation. DATA tolmery comes with the package.

    Ctrl-C saves a checkpoint and prints the command that resumes. With --dry-run nothing is trained or
    written: the output shows the tokens, and with --prices or --price the cost.
    """
    if settings["batch_tokens"] is not None and not settings["packing"]:
        raise click.UsageError("--batch-tokens goes with --packing")
    ctx = click.get_current_context()
    chosen = {
        one: value
        for one, value in settings.items()
        if ctx.get_parameter_source(one) is ParameterSource.COMMANDLINE
    }
    try:
        start = _resumed(resume, directory, data, chosen)
        if start is None:
            place = directory or Path(_DIRECTORY)
            overwrite |= dry_run
            start = _fresh(place, data, settings, name or _NAME, overwrite=overwrite)
        if dry_run:
            expected = _expected(start, connection, eval_every, prices)
            output.record(_expected_facts(expected), expected)
            return
        if start.run.status != "finished":
            _train(start, connection, save_every, eval_every, prices)
    except KeyboardInterrupt:
        say("Stopped.")
        raise SystemExit(_STOPPED) from None
    summary = start.run.summary or {}
    output.record(_facts(summary, connection.base_url), summary)
    if start.run.status == "interrupted":
        raise SystemExit(_STOPPED)


# -- new or resumed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Start:
    """A run, the directory of its record, and the checkpoint it resumes from, if any."""

    run: RunState
    directory: Path
    data: Path
    saved: SavedStep | None = None


def _fresh(
    directory: Path, data: str | None, settings: dict[str, Any], name: str, *, overwrite: bool
) -> _Start:
    if data is None:
        raise click.UsageError("give DATA, a file with one JSON object per line, or --resume")
    if settings["base_model"] is None:
        raise click.UsageError(
            "give --base-model, the model to fine-tune, such as HuggingFaceTB/SmolLM2-135M-Instruct; "
            "`tinkex model list` shows those of a service"
        )
    if (directory / FILE).exists() and not overwrite:
        raise InvalidInputError(
            f"{directory} holds a run: --resume auto resumes it, --overwrite replaces it",
            field="output",
        )
    path, known_as = _found(data)
    run = RunState(RunSettings(data=known_as, **settings), fingerprint(path), name)
    return _Start(run, directory, path)


def _resumed(
    resume: str | None, directory: Path | None, data: str | None, chosen: dict[str, Any]
) -> _Start | None:
    """The run to resume; None if a new one starts."""
    if resume is None:
        return None
    place, wanted = directory or Path(_DIRECTORY), None
    if resume.startswith("tinker://"):
        wanted = resume
    elif resume != "auto":
        place = Path(resume).parent if resume.endswith(".json") else Path(resume)
    elif not (place / FILE).exists():
        say(f"{place} holds no run; a new one starts.")
        return None
    run = RunState.read(place / FILE)
    if differing := run.differences(chosen):
        raise InvalidInputError(
            f"a resumed run keeps its settings: {'; '.join(differing)}", field="resume"
        )
    path, _ = _found(data or run.settings.data)
    if fingerprint(path) != run.data_sha256:
        raise InvalidInputError(f"{path} has changed since the run started", field="data")
    saved = run.last
    if wanted is not None:
        saved = next((one for one in run.checkpoints if one.path == wanted), None)
        if saved is None:
            raise InvalidInputError(
                f"{wanted} is not a checkpoint of the run in {place}", field="resume"
            )
    if run.status != "finished" or wanted is not None:
        run.back_to(saved)
    else:
        say("This run has finished; nothing is left to do.")
    return _Start(run, directory or place, path, saved)


def _found(data: str) -> tuple[Path, str]:
    """A data file, and its name in the record: its full path, unless it is bundled."""
    from .lessons import find_data

    path = find_data(data)
    return path, str(path.resolve()) if Path(data).exists() else data


# -- training ---------------------------------------------------------------------------------------


def _train(
    start: _Start, connection: Connection, save_every: int, eval_every: int, prices: Prices
) -> None:
    from tinkex.telemetry.usage import Tokens, Usage

    from .lessons import read_records
    from .progress import step_bar
    from .training_loop import Trainer

    run, directory = start.run, start.directory
    records = read_records(start.data)
    again = _again(start, connection)
    used_before, usage = Tokens(**run.used), Usage(prices)

    def keep() -> None:
        run.used = asdict(used_before + usage.summary(run.model_id).tokens)
        run.write(directory)

    with connection.service() as service, usage:
        client = _client(service, start)
        run.model_id = client.model_id
        train, held_out, notes = _lessons(service, client.get_tokenizer(), records, run.settings)
        for note in notes:
            say(f"{start.data.name}: {note}.")
        plan = _plan(train, run.settings)
        _announce(run, train, held_out, len(plan))
        if watched := found_here(connection.config().base_url, run.model_id):
            say(f"Watch it in a browser: {watched.dashboard}")
        directory.mkdir(parents=True, exist_ok=True)
        with step_bar(len(plan), run.step) as show, _asked_to_stop() as stopped:
            trainer = Trainer(
                client,
                run,
                train,
                held_out,
                plan,
                save_every=save_every,
                eval_every=eval_every,
                keep=keep,
                show=show,
                stopped=stopped,
            )
            try:
                ended = trainer.train()
            except BaseException as error:
                run.status = "failed" if isinstance(error, Exception) else "interrupted"
                keep()
                say(again())
                raise
        run.status = "finished" if ended else "interrupted"
        run.summary = _summary(start, train, held_out, notes, trainer, prices)
        _draw(run, directory)
        run.write(directory)
        if not ended:
            say(again())


def _client(service: ServiceClient, start: _Start) -> TrainingClient:
    settings = start.run.settings
    if start.saved is None:
        say(f"Starting with {settings.base_model} …")
        return service.create_lora_training_client(
            settings.base_model,
            rank=settings.rank,
            seed=settings.seed,
            train_mlp=settings.train_mlp,
            train_attn=settings.train_attn,
            train_unembed=settings.train_unembed,
            user_metadata=_named(start),
        )
    say(f"Resuming after step {start.saved.step} from {start.saved.path} …")
    return service.create_training_client_from_state_with_optimizer(
        start.saved.path, user_metadata=_named(start)
    )


def _named(start: _Start) -> dict[str, str]:
    """The name of the run in the dashboard: that of its checkpoints if the user chose one, else that of the data."""
    name = start.run.name if start.run.name != _NAME else start.data.stem
    return {"name": name.encode(errors="replace").decode()}  # a file's name may not be UTF-8


def _lessons(
    service: ServiceClient, tokenizer: Any, records: list[Any], settings: RunSettings
) -> tuple[list[Lesson], list[Lesson], list[str]]:
    """The lessons to train on, those held out, and notes on examples that are too long."""
    from .lessons import lessons_of, plain_lessons, within
    from .training_plan import held_out

    templated = [settings.chat_template and record.form != "text" for record in records]
    if any(templated) and not getattr(tokenizer, "chat_template", None):
        raise InvalidInputError(
            f"{settings.base_model} has no chat template; --no-chat-template trains on pairs of plain text",
            field="base_model",
        )
    if any(record.split for record in records):
        aside = {index for index, record in enumerate(records) if record.split == "eval"}
    else:
        aside = held_out(len(records), settings.eval_fraction, settings.seed)
    limits = [settings.max_length, _context(service, settings.base_model)]
    limit = min((one for one in limits if one is not None), default=None)
    parts: tuple[list[Lesson], list[Lesson]] = ([], [])
    for index, record in enumerate(records):
        parts[index in aside].extend(
            lessons_of(record, tokenizer, settings.system)
            if templated[index]
            else plain_lessons(record, tokenizer)
        )
    kept, note = within([*parts[0], *parts[1]], limit, settings.too_long)
    lines = {records[index].line for index in aside}
    train = [lesson for lesson in kept if lesson.line not in lines]
    if not train:
        raise InvalidInputError("no example is left to train on", field="data")
    held = [lesson for lesson in kept if lesson.line in lines]
    return train, held, [] if note is None else [note]


def _context(service: ServiceClient, base_model: str) -> int | None:
    for model in service.get_server_capabilities().supported_models:
        if model.model_name == base_model:
            return model.max_context_length
    return None


def _plan(train: list[Lesson], settings: RunSettings) -> list[list[int]]:
    from .training_plan import batches

    lengths = [lesson.length for lesson in train]
    budget = None
    if settings.packing:
        budget = settings.batch_tokens or settings.batch_size * -(-sum(lengths) // len(lengths))
    return batches(
        lengths,
        seed=settings.seed,
        batch_size=settings.batch_size,
        token_budget=budget,
        epochs=settings.epochs,
        steps=settings.steps,
    )


# -- dry run ---------------------------------------------------------------------------------------


def _expected(
    start: _Start, connection: Connection, eval_every: int, prices: Prices
) -> dict[str, Any]:
    """The expected use of the rest of a run, in the form of `_summary`."""
    from tinkex.telemetry.usage import Tokens

    from .lessons import read_records
    from .training_plan import evaluations

    run, settings = start.run, start.run.settings
    records = read_records(start.data)
    with connection.service(patient=False) as service:
        tokenizer = service.create_sampling_client(base_model=settings.base_model).get_tokenizer()
        train, held_out, notes = _lessons(service, tokenizer, records, settings)
    plan = _plan(train, settings)
    trained = sum(train[index].length - 1 for batch in plan[run.step :] for index in batch)
    rounds = evaluations(run.step, len(plan), eval_every) if run.step < len(plan) else 0
    used = Tokens(training=trained + rounds * sum(lesson.length - 1 for lesson in held_out))
    return {
        "status": "dry run",
        "base_model": settings.base_model,
        "steps": run.step,
        "steps_planned": len(plan),
        "examples": {"train": len(train), "held_out": len(held_out)},
        "notes": notes,
        "tokens": trained,
        "usage": asdict(used),
        "cost": prices.cost(settings.base_model, used),
    }


def _expected_facts(expected: dict[str, Any]) -> dict[str, Any]:
    from tinkex.telemetry.usage import dollars

    cost = expected["cost"]
    examples, steps = expected["examples"], expected["steps_planned"] - expected["steps"]
    used = expected["usage"]["training"]
    return {
        "Model": expected["base_model"],
        "Run": f"{steps} steps on {examples['train']} examples, {examples['held_out']} held out",
        "Tokens": f"{used:,}, of which {used - expected['tokens']:,} to evaluate",
        "Cost": f"{dollars(cost)}; see --prices" if cost is None else dollars(cost),
        **({"Note": "; ".join(expected["notes"])} if expected["notes"] else {}),
    }


# -- messages ---------------------------------------------------------------------------------------


def _announce(run: RunState, train: list[Lesson], held_out: list[Lesson], steps: int) -> None:
    aside = f", {len(held_out)} held out" if held_out else ""
    say(f"{len(train)} examples{aside}; {steps} steps with a LoRA of rank {run.settings.rank}.")


def _again(start: _Start, connection: Connection) -> Callable[[], str]:
    """A function that returns the message on how to resume."""
    where = [] if connection.base_url is None else ["--base-url", connection.base_url]
    words = shlex.join(["tinkex", "train", "--resume", str(start.directory), *where])

    def told() -> str:
        if start.run.last is None:
            return "No checkpoint was saved."
        return f"Saved after step {start.run.last.step}. Resume with: {words}"

    return told


def _summary(
    start: _Start,
    train: list[Lesson],
    held_out: list[Lesson],
    notes: list[str],
    trainer: Trainer,
    prices: Prices,
) -> dict[str, Any]:
    from tinkex.telemetry.usage import Tokens

    run = start.run
    before = run.evaluations[0][1] if run.evaluations else None
    now = [loss for step, loss in run.evaluations if step == run.step]
    return {
        "status": run.status,
        "base_model": run.settings.base_model,
        "model_id": run.model_id,
        "steps": run.step,
        "steps_planned": trainer.steps,
        "examples": {"train": len(train), "held_out": len(held_out)},
        "notes": notes,
        "tokens": trainer.tokens(0, run.step),
        "usage": run.used,
        "cost": prices.cost(run.settings.base_model, Tokens(**run.used)),
        "seconds": round(run.seconds, 3),
        "loss": {
            "first": run.losses[0] if run.losses else None,
            "last": run.losses[-1] if run.losses else None,
        },
        "held_out_loss": {"before": before, "after": now[-1] if now else None},
        "evaluations": [{"step": step, "loss": loss} for step, loss in run.evaluations],
        "checkpoints": [asdict(saved) for saved in run.checkpoints],
        "training_path": run.last.path if run.last else None,
        "sampler_path": run.sampler_path,
        "resumed_from": run.resumed_from,
        "loss_curve": str(start.directory / _CURVE),
        "run_file": str(start.directory / FILE),
        "settings": asdict(run.settings),
    }


def _facts(summary: dict[str, Any], base_url: str | None) -> dict[str, Any]:
    """The summary for people."""
    from tinkex.telemetry.usage import dollars

    talk = summary["sampler_path"]
    if talk and base_url:
        talk = f"{talk} --base-url {base_url}"
    loss, held_out = summary["loss"], summary["held_out_loss"]
    facts = {
        "Run": f"{summary['status']}, {summary['steps']} of {summary['steps_planned']} steps, "
        f"{summary['tokens']:,} tokens in {clock(summary['seconds'])} min",
        "Loss": f"{_number(loss['first'])} at first, {_number(loss['last'])} at the end",
        "Held out": f"{_number(held_out['before'])} before, {_number(held_out['after'])} after",
        "Used": f"{summary['usage']['training']:,} tokens with evaluations",
        "Cost": None if summary["cost"] is None else dollars(summary["cost"]),
        "Checkpoint": summary["training_path"],
        "For sampling": summary["sampler_path"],
        "Talk to it": talk and f"tinkex chat {talk}",
        "Loss curve": summary["loss_curve"],
    }
    if held_out["before"] is None:
        del facts["Held out"]
    return {name: fact for name, fact in facts.items() if fact is not None}


def _draw(run: RunState, directory: Path) -> None:
    from .curves import loss_curve

    title = f"{run.settings.base_model}, {run.settings.learning_rate:g} {run.settings.schedule}"
    (directory / _CURVE).write_text(loss_curve(run.losses, title=title))


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed. The first press stops after the current step; the second stops at once."""
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(OSError):  # not through sys.stderr: a handler must not reenter its buffer
            os.write(2, b"\nStopping after this step; press Ctrl-C again to stop at once.\n")

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
