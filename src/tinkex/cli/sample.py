"""`tinkex sample`: draw from a base model or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tinkex.errors import InvalidInputError

from .connection import Connection, connected, formatted
from .output import Output, say

__all__ = ["command", "sample", "sampling_options"]


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of sampling, which two commands have."""
    for option in reversed(
        [
            click.option("--base-model", help="A base model to sample from."),
            click.option("--model-path", help="A checkpoint to sample from: tinker://…"),
            click.option("--prompt", help="The prompt."),
            click.option(
                "--prompt-file",
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                help='A file with the prompt: text, or token ids as JSON, [1, 2] or {"tokens": [1, 2]}.',
            ),
            click.option("--max-tokens", type=click.IntRange(min=0), default=64, show_default=True),
            click.option(
                "--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True
            ),
            click.option("--top-k", type=click.IntRange(min=-1), default=-1, show_default=True),
            click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True),
            click.option("--num-samples", type=click.IntRange(min=1), default=1, show_default=True),
            click.option("--seed", type=int, help="The same seed gives the same samples."),
            click.option(
                "--output",
                "file",
                type=click.Path(dir_okay=False, path_type=Path),
                help="Write to a file instead of stdout.",
            ),
        ]
    ):
        command = option(command)
    return command


@click.command("sample")
@sampling_options
@connected
@formatted
def command(connection: Connection, output: Output, **options: Any) -> None:
    """Sample from a base model or a checkpoint."""
    sample(connection, output, **options)


def sample(
    connection: Connection,
    output: Output,
    *,
    base_model: str | None,
    model_path: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    num_samples: int,
    seed: int | None,
    file: Path | None,
) -> None:
    """Draw, and print what was drawn."""
    from tinkex import types

    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give either --prompt or --prompt-file")
    if base_model is None and model_path is None:
        raise click.UsageError("give --base-model or --model-path")
    with connection.service() as service:
        say(f"Sampling from {model_path or base_model} …")
        sampler = service.create_sampling_client(model_path=model_path, base_model=base_model)
        ids = _ids(prompt_file)
        tokenizer = None
        if ids is None:
            tokenizer = sampler.get_tokenizer()
            text = prompt if prompt_file is None else prompt_file.read_text()
            ids = tokenizer.encode(text or "")
        params = types.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        drawn = sampler.sample(types.ModelInput.from_ints(ids), num_samples, params).result()
        if not output.json and tokenizer is None:
            tokenizer = _tokenizer(sampler)
    if output.json:
        text = json.dumps(_payload(drawn), indent=2)
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


def _ids(path: Path | None) -> list[int] | None:
    """Token ids, if that is what a file holds."""
    if path is None:
        return None
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return None
    if isinstance(content, dict):
        content = content.get("tokens")
    if not isinstance(content, list):
        return None
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in content):
        raise InvalidInputError(f"{path} holds a list that is not token ids", field="prompt_file")
    return content


def _tokenizer(sampler: Any) -> Any:
    try:
        return sampler.get_tokenizer()
    except Exception as error:
        say(f"The tokens cannot be shown as text: {error}")
        return None


def _told(number: int, sequence: Any, tokenizer: Any) -> str:
    if tokenizer is None:
        text = " ".join(map(str, sequence.tokens))
    else:
        try:
            text = tokenizer.decode(sequence.tokens)
        except Exception as error:
            text = f"[cannot be decoded: {error}]"
    logprobs = sequence.logprobs or []
    average = f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "n/a"
    return f"Sample {number}:\n{text}\nstop_reason={sequence.stop_reason} | avg_logprob={average}"


def _payload(drawn: Any) -> dict[str, Any]:
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": list(sequence.tokens),
                "logprobs": sequence.logprobs,
            }
            for sequence in drawn.sequences
        ],
        "prompt_logprobs": drawn.prompt_logprobs,
        "topk_prompt_logprobs": drawn.topk_prompt_logprobs,
    }
