"""A tokenizer without files, for commands that run against a dialect."""

from __future__ import annotations

__all__ = ["Letters"]


class Letters:
    """One token per letter. Token 2 ends the text, token 3 ends a turn."""

    chat_template = "yes"
    eos_token_id = 2

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, return_dict: bool, add_generation_prompt: bool
    ) -> list[int]:
        said = [[*(ord(letter) for letter in each["content"]), 3] for each in messages]
        return [token for tokens in said for token in tokens]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + each) for each in ids if each > 3 or not skip_special_tokens)
