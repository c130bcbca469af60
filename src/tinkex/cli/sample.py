"""`tinkex sample`: sample from a base model or a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.errors import InvalidInputError

from .connection import Connection, connected, formatted
from .drawing import drawn
from .output import Output, say

if TYPE_CHECKING:
    from .payloads import SampleOutput

__all__ = ["command"]


@click.command("sample")
@click.option("--base-model", help="A base model to sample from.")
@click.option("--model-path", help="A checkpoint to sample from: tinker://…")
@click.option("--prompt", help="The prompt.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help='A file with the prompt, or - for stdin: text, or token ids as JSON, [1, 2] or {"tokens": [1, 2]}.',
)
@drawn(max_tokens=64, fewest=0, temperature=1.0)
@click.option(
    "--num-samples",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of samples.",
)
@click.option("--seed", type=int, help="The same seed gives the same samples.")
@click.option(
    "--output",
    "-o",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to a file instead of stdout.",
)
@click.option("--http-pool", expose_value=False, help="No effect: accepted for older scripts.")
@connected
@formatted
def command(
    base_model: str | None,
    model_path: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    num_samples: int,
    file: Path | None,
    connection: Connection,
    output: Output,
    **sampling: Any,
) -> None:
    """Sample from a base model or a checkpoint."""
    from tinkex import types

    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give either --prompt or --prompt-file")
    if base_model is None and model_path is None:
        raise click.UsageError("give --base-model or --model-path")
    content = prompt if prompt_file is None else _read(prompt_file)
    ids = None if prompt_file is None else _ids(str(content), prompt_file)
    with connection.service(patient=False) as service:
        say(f"Sampling from {model_path or base_model} …")
        sampler = service.create_sampling_client(model_path=model_path, base_model=base_model)
        tokenizer = sampler.get_tokenizer() if ids is None else None
        if ids is None:
            assert tokenizer is not None
            ids = tokenizer.encode(content)
        params = types.SamplingParams(**sampling)
        drawn = sampler.sample(types.ModelInput.from_ints(ids), num_samples, params).result()
        if not output.json and tokenizer is None:
            tokenizer = _tokenizer(sampler)
    if output.json:
        text = json.dumps(_payload(drawn, tokenizer), indent=2, ensure_ascii=False)
    else:
        text = "\n".join(
            _told(index, sequence, tokenizer) for index, sequence in enumerate(drawn.sequences, 1)
        )
    if file is None:
        click.echo(text)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        say(f"Written to {file}.")


def _read(path: Path) -> str:
    content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path} is not UTF-8 text: {error}", field="prompt_file") from None


def _ids(content: str, path: Path) -> list[int] | None:
    """The token ids of a file; None if it holds text."""
    try:
        ids = json.loads(content)
    except ValueError:
        return None
    if isinstance(ids, dict):
        ids = ids.get("tokens")
    if not isinstance(ids, list):
        return None
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise InvalidInputError(f"{path} holds a list that is not token ids", field="prompt_file")
    return ids


def _tokenizer(sampler: Any) -> Any:
    try:
        return sampler.get_tokenizer()
    except Exception as error:
        say(f"The tokens cannot be shown as text: {error}")
        return None


def _told(number: int, sequence: Any, tokenizer: Any) -> str:
    text = _text(sequence.tokens, tokenizer) or " ".join(map(str, sequence.tokens))
    logprobs = sequence.logprobs or []
    average = f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "n/a"
    return f"Sample {number}:\n{text}\nstop_reason={sequence.stop_reason} | avg_logprob={average}"


def _text(tokens: Any, tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    try:
        text: str = tokenizer.decode(tokens)
    except Exception as error:
        return f"[cannot be decoded: {error}]"
    return text


def _payload(drawn: Any, tokenizer: Any) -> SampleOutput:
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": list(sequence.tokens),
                "logprobs": sequence.logprobs,
                "text": _text(sequence.tokens, tokenizer),
            }
            for sequence in drawn.sequences
        ],
        "prompt_logprobs": drawn.prompt_logprobs,
        "topk_prompt_logprobs": drawn.topk_prompt_logprobs,
    }
