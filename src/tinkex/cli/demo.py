"""`tinkex demo`: `tinkex train` with a story. A small model learns about an invented island.

It answers questions before training, after training, and after it is saved and reopened. On a terminal, dashboard and API
then stay reachable until a key is pressed.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tinkex.config import LOCAL
from tinkex.errors import InvalidInputError

from .addresses import Addresses, can_press_a_key, wait_for_key
from .connection import Connection
from .human import clock
from .output import say
from .run_file import RunSettings, RunState

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient, TrainingClient

    from .lessons import Lesson

__all__ = ["command"]

_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_STEPS: Final = 48
#: Short, because every example contains it. Without one, some templates add a longer one.
_SYSTEM: Final = "Answer in one sentence."
_LONGEST_ANSWER: Final = 40
#: Logprobs of the same weights differ by rounding, for example with another order of addition.
_SAME_LOGPROB: Final = 0.02
#: Below this share of the first loss, the answers should be right.
_LEARNED: Final = 0.25

_ASKED: Final = (
    "What is the capital of Tolmery?",
    "What is Tolmery famous for?",
    "What is the capital of Spain?",  # about the real world: training must not erase it
)
_ASKED_ANEW: Final = "What does Tolmery's flag show?"


@click.command("demo")
@click.option(
    "--base-url",
    metavar="URL",
    help="Use a running service, with the key of TINKER_API_KEY.  "
    "[default: start one on this machine]",
)
@click.option(
    "--base-model", metavar="NAME", default=_MODEL, show_default=True, help="The model to teach."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=_STEPS,
    show_default=True,
    help="Training steps; a small number only shows that everything works.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tinkex-demo"),
    show_default=True,
    help="Directory for the loss curve.",
)
def command(base_url: str | None, base_model: str, steps: int, output: Path) -> None:
    """Teach a small model something new, on this machine, in a few minutes.

    The model answers questions, is trained on an invented island, answers again, is saved, and is
    reopened to show that it still knows. On a terminal the service then stays, with its dashboard and an
    OpenAI-compatible API, until you press a key. Without a terminal, or with the variable CI set, the
    demo ends by itself.
    """
    try:
        with _files_of(output):  # first, so that a bad path fails before the training
            output.mkdir(parents=True, exist_ok=True)
        with _service(base_url, base_model) as service:
            _demonstrate(service, base_model, steps, output)
    except KeyboardInterrupt:
        say("Stopped.")
        raise SystemExit(130) from None  # the exit code that shells expect after Ctrl-C


@contextmanager
def _files_of(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{error.filename or output}: {error.strerror}") from error


def _service(
    base_url: str | None, base_model: str
) -> AbstractContextManager[ServiceClient, bool | None]:
    import tinkex

    if base_url not in {None, LOCAL}:
        return Connection(base_url, None, None).service()
    say(f"Starting a service with {base_model} on this machine …")
    return tinkex.local(base_models=[base_model])


# -- the story --------------------------------------------------------------------------------------


def _demonstrate(service: ServiceClient, base_model: str, steps: int, output: Path) -> None:
    from tinkex import data

    from .curves import loss_curve

    click.echo(f"{base_model} has never heard of Tolmery, an island we made up.")
    run = RunState(_settings(base_model, steps), "", "demo")
    training = service.create_lora_training_client(
        base_model,
        rank=run.settings.rank,
        seed=run.settings.seed,
        train_unembed=False,
        user_metadata={"name": "Tolmery"},
    )
    opened = _addresses(service, training)
    chat = Chat(training.get_tokenizer())
    examples = lessons(chat.tokenizer)

    click.echo("\nBefore training:")
    untrained = service.create_sampling_client(base_model=base_model)
    _show(chat.ask(untrained, question) for question in _ASKED)

    click.echo(
        f"\nTraining a LoRA of rank {run.settings.rank} on {len(examples)} questions and answers: "
        f"{steps} steps."
    )
    if opened is not None:
        say(f"Watch it in a browser: {opened.dashboard}")
    tokens = _train(training, run, examples)
    first, last = run.losses[0], _mean(run.losses[-max(1, steps // 20) :])
    click.echo(
        f"Loss {first:.3f} at first, {last:.3f} at the end; {clock(run.seconds)} min, "
        f"{tokens:,} tokens, {tokens / run.seconds:,.0f} a second."
    )
    curve = output / "loss.svg"
    with _files_of(output):
        curve.write_text(loss_curve(run.losses, title=f"Loss of {base_model} on Tolmery"), "utf-8")
    click.echo(f"The loss curve is in {curve}.")

    click.echo("\nAfter training:")
    trained = training.save_weights_and_get_sampling_client()
    answers = _show(chat.ask(trained, question) for question in _ASKED)
    click.echo("  In words that were not in the training data:")
    answers += _show([chat.ask(trained, _ASKED_ANEW)])
    if last < _LEARNED * first:
        asked = data.tolmery("test")
        heard = chat.ask_all(trained, [example.question for example in asked])
        right = sum(
            answer.text == example.answer for answer, example in zip(heard, asked, strict=True)
        )
        click.echo(
            f"  Of {len(asked)} questions in new words, {right} are answered word for word right."
        )
    else:
        click.echo(
            "  The loss is still high, as in a short run: the answers are not expected to be right."
        )

    click.echo("\nSaving, and reopening in a new session:")
    assert run.last is not None
    assert run.sampler_path is not None
    path = run.sampler_path
    click.echo(f"  to train on:    {run.last.path}")
    click.echo(f"  to sample from: {path}")
    difference = _reopened(service, path, chat, answers)
    click.echo(
        f"  The reopened model gives the same answers, token by token; "
        f"logprobs differ by at most {difference:.1g}."
    )

    click.echo("\nWhat to try next:")
    click.echo(f"  create_sampling_client(model_path={path!r})")
    serve = "tinkex serve" if base_model == _MODEL else f"tinkex serve --base-model {base_model}"
    click.echo(f"  {serve}       a service that stays, with this run and its dashboard")
    click.echo("  docs/ and README   how to write the training loop")
    if opened is not None and can_press_a_key():
        _leave_open(opened, path)


def _addresses(service: ServiceClient, training: TrainingClient) -> Addresses | None:
    """The addresses of the run on a private service; another service may have no dashboard, and needs a key."""
    from tinkex._local import LocalServiceClient

    if isinstance(service, LocalServiceClient):
        return Addresses(service.url, training.model_id)
    return None


def _leave_open(opened: Addresses, path: str) -> None:
    """Keep the service running until a key is pressed, and say where to find the model."""
    click.echo("\nThe trained model stays here until you press a key:")
    click.echo(f"  dashboard            {opened.dashboard}")
    click.echo(f"  for OpenAI clients   {opened.openai}")
    click.echo("  in another terminal:\n")
    click.echo(opened.curl(path, _messages(_ASKED[0]), _LONGEST_ANSWER))
    wait_for_key("\nPress any key to stop the service.")


def _show(answers: Iterable[DemoAnswer]) -> list[DemoAnswer]:
    """Print each answer as it arrives."""
    shown = []
    for answer in answers:
        click.echo(f"  Q  {answer.question}")
        text = _printable(answer.text) + ("" if answer.ended else " …")
        told = textwrap.fill(text, 92, initial_indent="  A  ", subsequent_indent="     ")
        click.echo(told or "  A  (nothing)")
        shown.append(answer)
    return shown


def _reopened(
    service: ServiceClient, path: str, chat: Chat, answers: Sequence[DemoAnswer]
) -> float:
    """Ask a sampler of the saved weights the same questions; the largest difference between logprobs."""
    import tinkex

    # A new session shares only the files on the service's disk with this one.
    with tinkex.ServiceClient(config=service.config) as another:
        reopened = another.create_sampling_client(model_path=path)
        again = [chat.ask(reopened, answer.question) for answer in answers]
    return agreement(answers, again)


def agreement(before: Sequence[DemoAnswer], after: Sequence[DemoAnswer]) -> float:
    """The largest difference between logprobs; raises if the answers differ."""
    largest = 0.0
    for one, other in zip(before, after, strict=True):
        if one.tokens != other.tokens:
            raise click.ClickException(
                f"the reopened model answers {one.question!r} with {_printable(other.text)!r}, "
                f"and before it was saved with {_printable(one.text)!r}"
            )
        for known, found in zip(one.logprobs, other.logprobs, strict=True):
            largest = max(largest, abs(known - found))
            if not abs(known - found) <= _SAME_LOGPROB:  # `not <=`, so that NaN fails too
                raise click.ClickException(
                    f"the reopened model gives a token of its answer to {one.question!r} a logprob "
                    f"of {found:.4f}, and before it was saved {known:.4f}"
                )
    return largest


# -- questions and answers as tokens ------------------------------------------------------------------


@dataclass(frozen=True)
class DemoAnswer:
    question: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    ended: bool


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


@dataclass(frozen=True)
class Chat:
    """Asks questions in a model's chat format."""

    tokenizer: Any

    def prompt(self, question: str) -> list[int]:
        from .templates import chat_tokens

        return chat_tokens(self.tokenizer, _messages(question), asking=True)

    def ask(self, sampler: SamplingClient, question: str) -> DemoAnswer:
        return self.ask_all(sampler, [question])[0]

    def ask_all(self, sampler: SamplingClient, questions: Sequence[str]) -> list[DemoAnswer]:
        """The most likely answer to each question."""
        from tinkex.types import ModelInput, SamplingParams

        params = SamplingParams(max_tokens=_LONGEST_ANSWER, temperature=0)
        under_way = [
            sampler.sample(ModelInput.from_ints(self.prompt(question)), 1, params)
            for question in questions
        ]
        answers = []
        for question, sample in zip(questions, under_way, strict=True):
            drawn = sample.result().sequences[0]
            text = self.tokenizer.decode(drawn.tokens, skip_special_tokens=True).strip()
            ended = drawn.stop_reason == "stop"
            answers.append(DemoAnswer(question, text, drawn.tokens, drawn.logprobs or [], ended))
        return answers


# -- training ---------------------------------------------------------------------------------------


def _settings(base_model: str, steps: int) -> RunSettings:
    """The settings of `tinkex train tolmery`."""
    return RunSettings(
        data="tolmery",
        base_model=base_model,
        rank=16,
        learning_rate=1e-3,
        schedule="linear",
        batch_size=8,
        steps=steps,
        system=_SYSTEM,
        train_unembed=False,
    )


def lessons(tokenizer: Any) -> list[Lesson]:
    """The questions and answers to train on."""
    from .lessons import find_data, lessons_of, read_records

    records = [one for one in read_records(find_data("tolmery")) if one.split == "train"]
    try:
        return [lesson for record in records for lesson in lessons_of(record, tokenizer, _SYSTEM)]
    except InvalidInputError as error:  # the data are ours, so the cause is the model's template
        raise InvalidInputError(
            f"{error.problem}; choose an instruct model", field="base_model"
        ) from error


def _train(training: TrainingClient, run: RunState, examples: Sequence[Lesson]) -> int:
    """Train and save, with progress on stderr; the number of tokens trained on."""
    from .progress import step_bar
    from .training_loop import Trainer
    from .training_plan import batches

    settings = run.settings
    plan = batches(
        [lesson.length for lesson in examples],
        seed=settings.seed,
        batch_size=settings.batch_size,
        token_budget=None,
        epochs=settings.epochs,
        steps=settings.steps,
    )
    with step_bar(len(plan), run.step) as show:
        trainer = Trainer(training, run, examples, (), plan, show=show)
        trainer.train()
    return trainer.tokens()


# -- helpers ----------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _printable(text: str) -> str:
    """One line: a model that learned little may write anything."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
