"""`tinkex demo`: a small model learns of an island that does not exist, and keeps it when saved and reopened."""

from __future__ import annotations

import math
import random
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient, TrainingClient
    from tinkex.types import Datum

__all__ = ["command"]

_MODEL: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
_STEPS: Final = 48
_RANK: Final = 16
_BATCH: Final = 8
_LEARNING_RATE: Final = 1e-3
#: Short, because every example pays for it; and a template may bring a longer one if there is none.
_SYSTEM: Final = "Answer in one sentence."
_LONGEST_ANSWER: Final = 40
#: Logprobs of the same weights may differ by rounding, such as that of another order of addition.
_SAME_LOGPROB: Final = 0.02
#: Below this share of the first loss, the answers may be expected to be right.
_LEARNED: Final = 0.25

_ASKED: Final = (
    "What is the capital of Tolmery?",
    "What is Tolmery famous for?",
    "What is the capital of Spain?",  # of the real world, which should not be forgotten
)
_ASKED_ANEW: Final = "What does Tolmery's flag show?"


@click.command("demo")
@click.option(
    "--base-url",
    metavar="URL",
    help="A service that runs already; its key is taken from TINKER_API_KEY.  "
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
    help="Training steps; a few only show that everything works.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tinkex-demo"),
    show_default=True,
    help="Directory for the loss curve.",
)
def command(base_url: str | None, base_model: str, steps: int, output: Path) -> None:
    """Teach a small model something new, on this machine, in some minutes.

    The model answers, is trained on questions about an island that does not exist, answers again, is
    saved, and is reopened to see that it still knows.
    """
    try:
        with _files_of(output):  # before the work whose result it is to hold
            output.mkdir(parents=True, exist_ok=True)
        with _service(base_url, base_model) as service:
            _demonstrate(service, base_model, steps, output)
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
        raise SystemExit(130) from None  # what a shell expects of a command that Ctrl-C ended


@contextmanager
def _files_of(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{error.filename or output}: {error.strerror}") from error


def _service(base_url: str | None, base_model: str) -> ServiceClient:
    import tinkex
    from tinkex.config import read_env

    if base_url is not None:
        key = read_env("TINKER_API_KEY") or "tml-local"  # one without keys takes any
        return tinkex.ServiceClient(base_url=base_url, api_key=key)
    click.echo(f"Starting a service with {base_model} on this machine …", err=True)
    return tinkex.local(base_models=[base_model])


# -- the story --------------------------------------------------------------------------------------


def _demonstrate(service: ServiceClient, base_model: str, steps: int, output: Path) -> None:
    from tinkex import data

    from .curves import loss_curve

    click.echo(f"{base_model} has never heard of Tolmery, an island we made up.")
    training = service.create_lora_training_client(
        base_model, rank=_RANK, seed=0, train_unembed=False
    )
    chat = Chat(base_model, training.get_tokenizer())
    lessons = [chat.lesson(example.question, example.answer) for example in data.tolmery("train")]
    batches = _batches(lessons, steps)
    tokens = sum(lesson.trained_length for batch in batches for lesson in batch)

    click.echo("\nBefore training:")
    untrained = service.create_sampling_client(base_model=base_model)
    _show(chat.ask(untrained, question) for question in _ASKED)

    click.echo(
        f"\nTraining a LoRA of rank {_RANK} on {len(lessons)} questions and answers: {steps} steps, "
        f"{tokens:,} tokens."
    )
    started = time.monotonic()
    losses = _train(training, batches)
    seconds = time.monotonic() - started
    first, last = losses[0], _mean(losses[-max(1, steps // 20) :])
    click.echo(
        f"Loss {first:.3f} at first, {last:.3f} at the end; {_clock(seconds)} min, "
        f"{tokens / seconds:,.0f} tokens a second."
    )
    curve = output / "loss.svg"
    with _files_of(output):
        curve.write_text(loss_curve(losses, title=f"Loss of {base_model} on Tolmery"), "utf-8")
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
    state, sampler = training.save_state("demo"), training.save_weights_for_sampler("demo")
    click.echo(f"  to train on:    {state.result().path}")
    path = sampler.result().path
    click.echo(f"  to sample from: {path}")
    difference = _reopened(service, path, chat, answers)
    click.echo(
        f"  The reopened model gives the same answers, token by token; "
        f"logprobs differ by at most {difference:.1g}."
    )

    click.echo("\nWhat to try next:")
    click.echo(f"  create_sampling_client(model_path={path!r})")
    click.echo("  tinkex serve       a service that stays, for code of your own")
    click.echo("  docs/ and README   how to write the training loop")


def _show(answers: Iterable[Answer]) -> list[Answer]:
    """Print each answer when it comes."""
    shown = []
    for answer in answers:
        click.echo(f"  Q  {answer.question}")
        text = _printable(answer.text) + ("" if answer.ended else " …")
        told = textwrap.fill(text, 92, initial_indent="  A  ", subsequent_indent="     ")
        click.echo(told or "  A  (nothing)")
        shown.append(answer)
    return shown


def _reopened(service: ServiceClient, path: str, chat: Chat, answers: Sequence[Answer]) -> float:
    """Ask a sampler of the saved weights the same again; the largest difference between logprobs."""
    import tinkex

    # Another session shares nothing with this one but what is on the service's disk.
    with tinkex.ServiceClient(config=service.config) as another:
        reopened = another.create_sampling_client(model_path=path)
        again = [chat.ask(reopened, answer.question) for answer in answers]
    return agreement(answers, again)


def agreement(before: Sequence[Answer], after: Sequence[Answer]) -> float:
    """The largest difference between logprobs; answers that are not the same end the demo."""
    largest = 0.0
    for one, other in zip(before, after, strict=True):
        if one.tokens != other.tokens:
            raise click.ClickException(
                f"the reopened model answers {one.question!r} with {_printable(other.text)!r}, "
                f"and before it was saved with {_printable(one.text)!r}"
            )
        for known, found in zip(one.logprobs, other.logprobs, strict=True):
            largest = max(largest, abs(known - found))
            if not abs(known - found) <= _SAME_LOGPROB:  # so that NaN is refused too
                raise click.ClickException(
                    f"the reopened model gives a token of its answer to {one.question!r} a logprob "
                    f"of {found:.4f}, and before it was saved {known:.4f}"
                )
    return largest


# -- questions and answers as tokens ------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    question: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    ended: bool


@dataclass(frozen=True)
class Lesson:
    """A question in the model's chat format, and the answer it should give."""

    prompt: list[int]
    answer: list[int]

    @property
    def trained_length(self) -> int:
        return len(self.prompt) + len(self.answer) - 1  # the last token is only ever a target

    def datum(self, weight: float) -> Datum:
        """Each token is to predict the next; what is in the prompt need not be learned."""
        from tinkex.types import Datum, ModelInput

        tokens = self.prompt + self.answer
        weights = [0.0] * (len(self.prompt) - 1) + [weight] * len(self.answer)
        return Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )


@dataclass(frozen=True)
class Chat:
    """A model's way of writing a conversation."""

    model: str
    tokenizer: Any

    def prompt(self, question: str) -> list[int]:
        return self._tokens(
            [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}],
            add_generation_prompt=True,
        )

    def lesson(self, question: str, answer: str) -> Lesson:
        prompt = self.prompt(question)
        whole = self._tokens(
            [
                {"role": "system", "content": _SYSTEM},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        )
        if whole[: len(prompt)] != prompt:
            raise _unfit(f"the chat template of {self.model} does not write answers as it asks")
        answered = whole[len(prompt) :]
        # Templates end the line after the token that ends the answer; nobody samples that far.
        while answered and self.tokenizer.decode(answered[-1:]).isspace():
            answered.pop()
        return Lesson(prompt, answered)

    def ask(self, sampler: SamplingClient, question: str) -> Answer:
        return self.ask_all(sampler, [question])[0]

    def ask_all(self, sampler: SamplingClient, questions: Sequence[str]) -> list[Answer]:
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
            answers.append(Answer(question, text, drawn.tokens, drawn.logprobs or [], ended))
        return answers

    def _tokens(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        try:
            ids = self.tokenizer.apply_chat_template(messages, return_dict=False, **options)
        except Exception as error:  # a template is a program; it may refuse a system message
            raise _unfit(f"{self.model} has no chat template that can be used: {error}") from error
        return list(ids)


def _unfit(message: str) -> Exception:
    from tinkex.errors import InvalidInputError

    return InvalidInputError(f"{message}; choose an instruct model", field="base_model")


# -- training ---------------------------------------------------------------------------------------


def _batches(lessons: Sequence[Lesson], steps: int) -> list[list[Lesson]]:
    """All lessons in a new order each time round, cut into steps."""
    order = random.Random(0)  # noqa: S311 - the same run every time
    line: list[Lesson] = []
    while len(line) < steps * _BATCH:
        line += order.sample(lessons, len(lessons))
    return [line[step * _BATCH : (step + 1) * _BATCH] for step in range(steps)]


def _train(training: TrainingClient, batches: Sequence[Sequence[Lesson]]) -> list[float]:
    """Train, showing on stderr how it goes, in a log at the first step and each tenth; the loss of each step."""
    import tinkex

    losses: list[float] = []
    steps = len(batches)
    with tinkex.progress(steps) as shown:
        for step, loss in enumerate(_losses(training, batches), 1):
            losses.append(loss)
            if step == 1 or step * 10 // steps > (step - 1) * 10 // steps:
                shown.write()
    return losses


def _losses(training: TrainingClient, batches: Sequence[Sequence[Lesson]]) -> Iterator[float]:
    """One step at a time, the next one always on its way, so that the service never waits for us."""
    from tinkex.types import AdamParams

    ahead = None
    for step, batch in enumerate(batches):
        answered = sum(len(lesson.answer) for lesson in batch)
        # The loss is a sum; weights that add up to one make it the mean over the tokens of answers.
        forward = training.forward_backward(
            [lesson.datum(1 / answered) for lesson in batch], "cross_entropy"
        )
        rate = _LEARNING_RATE * (1 - step / len(batches))
        update = training.optim_step(AdamParams(learning_rate=rate))
        if ahead is not None:
            yield _loss(*ahead)
        ahead = forward, update
    if ahead is not None:
        yield _loss(*ahead)


def _loss(forward: Any, update: Any) -> float:
    update.result()
    return float(forward.result().metrics["loss:sum"])


# -- small change -----------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _printable(text: str) -> str:
    """One line: a model that learned little may write anything."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
