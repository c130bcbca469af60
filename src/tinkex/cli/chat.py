"""`tinkex chat`: talk with a base model or a checkpoint, or with two of them side by side."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from tinkex.errors import InvalidInputError, TinkerError

from .connection import Connection, connected, formatted
from .drawing import drawn
from .output import Output, say
from .templates import Text, chat_tokens, stop_tokens

if TYPE_CHECKING:
    from tinkex import SamplingClient, ServiceClient
    from tinkex.types import SamplingParams

    from .payloads import ChatAnswer, ChatLine

__all__ = ["command"]

_HELP = "Type a question. /reset starts a new conversation, /quit ends the chat."


@click.command("chat")
@click.argument("model", required=False)
@click.option("--model-path", help="A checkpoint to talk with: tinker://…")
@click.option("--base-model", help="A base model to talk with.")
@click.option(
    "--compare",
    metavar="base|MODEL|PATH",
    help="Compare with a second model: base (its base model), another base model, or a checkpoint.",
)
@click.option("--system", help="A system message.")
@drawn(max_tokens=512, fewest=1, temperature=0.7)
@click.option("--seed", type=int, help="The same seed gives the same answers.")
@connected
@formatted
def command(
    model: str | None,
    model_path: str | None,
    base_model: str | None,
    compare: str | None,
    system: str | None,
    connection: Connection,
    output: Output,
    **sampling: Any,
) -> None:
    """Talk with MODEL, a checkpoint (tinker://…) or the name of a base model.

    From a pipe, each line is a question. With --format json, each line of the output is one answer.

    /reset starts a new conversation; /quit or the end of the input ends the chat.
    """
    from tinkex.types import SamplingParams

    if [model, model_path, base_model].count(None) != 2:
        raise click.UsageError("give either MODEL, --model-path or --base-model")
    if model is not None:
        model_path, base_model = (model, None) if model.startswith("tinker://") else (None, model)
    params = SamplingParams(**sampling)
    try:
        with connection.service() as service:
            partners = list(_partners(service, model_path, base_model, compare, system))
            _talk(partners, params, output)
    except KeyboardInterrupt:
        say("")
        raise SystemExit(130) from None  # the exit code that shells expect after Ctrl-C


@dataclass
class Partner:
    """A model in the chat, and the conversation with it so far."""

    name: str
    sampler: SamplingClient
    tokenizer: Any
    opening: list[dict[str, str]] = field(default_factory=list)
    said: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        self.said.clear()

    async def answer(
        self, question: str, params: SamplingParams, hear: Callable[[str], None]
    ) -> ChatAnswer:
        """Ask, and pass each piece of the answer to `hear` as it arrives.

        Question and answer join the conversation when the answer is complete.
        """
        from tinkex.types import ModelInput

        asked = {"role": "user", "content": question}
        prompt = chat_tokens(self.tokenizer, [*self.opening, *self.said, asked], asking=True)
        text, tokens, reason = Text(self.tokenizer), 0, None
        if params.stop is None and (ends := stop_tokens(self.tokenizer)):
            params = params.model_copy(update={"stop": ends})
        stream = self.sampler.sample_stream(ModelInput.from_ints(prompt), params)
        async with aclosing(stream) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if chunk.token_id is not None:
                    tokens += 1
                    hear(text.add(chunk.token_id))
                reason = chunk.finish_reason or reason
        hear(text.end())
        self.said += [asked, {"role": "assistant", "content": text.whole}]
        return {
            "model": self.name,
            "text": text.whole,
            "tokens": tokens,
            "stop_reason": reason,
        }


def _partners(
    service: ServiceClient,
    model_path: str | None,
    base_model: str | None,
    compare: str | None,
    system: str | None,
) -> Iterator[Partner]:
    opening = [] if system is None else [{"role": "system", "content": system}]

    def partner(path: str | None, model: str | None) -> Partner:
        sampler = service.create_sampling_client(model_path=path, base_model=model)
        return Partner(str(path or model), sampler, sampler.get_tokenizer(), opening)

    first = partner(model_path, base_model)
    yield first
    if compare is None:
        return
    if compare == "base":
        if model_path is None:
            raise InvalidInputError(
                "the model is a base model itself; name another model", field="compare"
            )
        compare = first.sampler.get_base_model()
    is_path = compare.startswith("tinker://")
    yield partner(compare if is_path else None, None if is_path else compare)


# -- the conversation -------------------------------------------------------------------------------


def _talk(partners: list[Partner], params: SamplingParams, output: Output) -> None:
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        say(f"{' and '.join(partner.name for partner in partners)}. {_HELP}")
    for line in _lines(at_terminal=at_terminal):
        question = line.strip()
        if not question:
            continue
        if question == "/quit":
            return
        if question == "/reset":
            for partner in partners:
                partner.reset()
            say("New conversation.")
            continue
        if question.startswith("/") and at_terminal:
            say(_HELP)
            continue
        try:
            _turn(partners, question, params, output)
        except KeyboardInterrupt:  # the user stops this answer, not the chat
            if not at_terminal:
                raise
            say("\n(stopped; this question and its answer are dropped)")
        except TinkerError as error:
            if not at_terminal:
                raise
            say(f"\n{error}\nIf the conversation has grown too long, /reset starts a new one.")


def _lines(*, at_terminal: bool) -> Iterator[str]:
    if not at_terminal:
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` the arrow keys
    while True:
        try:
            yield input("> ") if sys.stdout.isatty() else _asked_beside()
        except EOFError:
            say("")
            return


def _asked_beside() -> str:
    """Prompt on stderr, because stdout is piped."""
    click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _turn(partners: list[Partner], question: str, params: SamplingParams, output: Output) -> None:
    """Ask all models. If one fails, the question is dropped for all, so that their conversations stay equal."""
    before = [len(partner.said) for partner in partners]
    try:
        _ask(partners, question, params, output)
    except BaseException:
        for partner, count in zip(partners, before, strict=True):
            del partner.said[count:]
        raise


def _ask(partners: list[Partner], question: str, params: SamplingParams, output: Output) -> None:
    if output.json:
        answers = asyncio.run(_all(partners, question, params, lambda *_: None))
        told: ChatLine = {"question": question, "answers": answers}
        click.echo(json.dumps(told, ensure_ascii=False))
    elif len(partners) > 1 and sys.stdout.isatty():
        _side_by_side(partners, question, params)
    else:
        for partner in partners:
            if len(partners) > 1:
                click.echo(f"[{partner.name}]")
            asyncio.run(partner.answer(question, params, _write))
            click.echo()


def _write(text: str) -> None:
    click.echo(_harmless(text) if sys.stdout.isatty() else text, nl=False)


def _harmless(text: str) -> str:
    """Text without control characters, which could change the state of the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


async def _all(
    partners: list[Partner],
    question: str,
    params: SamplingParams,
    hear: Callable[[int, str], None],
) -> list[ChatAnswer]:
    async def one(number: int, partner: Partner) -> ChatAnswer:
        return await partner.answer(question, params, lambda text: hear(number, text))

    return await asyncio.gather(*(one(*numbered) for numbered in enumerate(partners)))


def _side_by_side(partners: list[Partner], question: str, params: SamplingParams) -> None:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text as Styled

    heard = [""] * len(partners)

    def drawn() -> Table:
        table = Table(*(partner.name for partner in partners), box=None, expand=True)
        table.add_row(
            *map(Styled, heard)
        )  # not a plain str: a model's text must not be read as markup
        return table

    with Live(drawn(), refresh_per_second=8) as live:

        def hear(number: int, text: str) -> None:
            heard[number] += _harmless(text)
            live.update(drawn())

        asyncio.run(_all(partners, question, params, hear))
