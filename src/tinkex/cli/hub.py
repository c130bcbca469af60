"""Uploads of checkpoints to the Hugging Face hub: the repository, the files and the model card."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from tinkex.errors import (
    APIConnectionError,
    ConfigError,
    ConflictError,
    InvalidInputError,
    TinkerError,
    status_error_class,
)
from tinkex.types import ParsedCheckpointTinkerPath

__all__ = ["Destination", "Hub", "check", "destination", "model_card", "prepare"]

#: Files that only the service uses; uploaded only if --allow-pattern matches them.
_OURS: Final = ("checkpoint_complete", "tinkex.json", "optimizer.safetensors")
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
#: Every file that a checkpoint may have, and the added model card.
_FILES: Final = ("adapter_config.json", "README.md", *_WEIGHTS, *_OURS)
#: Either of these marks a complete checkpoint.
_COMPLETE: Final = ("checkpoint_complete", "tinkex.json")
_NAMES_PATH: Final = re.compile(r"^tinker_path:\s*[\"']?(tinker://[^\s\"']+)", re.MULTILINE)


@dataclass(frozen=True)
class Destination:
    repo: str
    revision: str


def destination(
    tinker_path: str, base_model: str, user: str, repo: str | None, revision: str | None
) -> Destination:
    """The repository and branch: by default one repository per run and one branch per checkpoint."""
    path = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    if repo is None:
        short = base_model.rpartition("/")[2]
        repo = _sanitized(f"tinker-{short}-{path.training_run_id}")
        revision = revision or _sanitized(path.checkpoint_id)
    if "/" not in repo:
        repo = f"{user}/{repo}"
    return Destination(repo, revision or "main")


def _sanitized(text: str) -> str:
    """A valid name for the hub: at most 96 characters, no repeated, leading or trailing dots and dashes."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", text)
    return re.sub(r"([.-])[.-]+", r"\1", name).strip(".-")[:96].rstrip(".-")


def prepare(
    folder: Path, tinker_path: str, base_model: str, where: Destination, *, card: bool
) -> None:
    """Add the base model and a card to a downloaded checkpoint; refuse an incomplete one."""
    missing = [] if (folder / "adapter_config.json").is_file() else ["adapter_config.json"]
    missing += [
        " or ".join(either)
        for either in (_WEIGHTS, _COMPLETE)
        if not any((folder / name).is_file() for name in either)
    ]
    if missing:
        raise InvalidInputError(f"the checkpoint lacks {', '.join(missing)}", field="path")
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_bytes())
        known = config.get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise InvalidInputError(
            f"adapter_config.json cannot be read: {error}", field="path"
        ) from None
    if not known:
        file.write_text(json.dumps({**config, "base_model_name_or_path": base_model}, indent=2))
    if card and not (folder / "README.md").exists():
        (folder / "README.md").write_text(model_card(tinker_path, base_model, where, config))


def model_card(
    tinker_path: str, base_model: str, where: Destination, config: dict[str, Any]
) -> str:
    revision = "" if where.revision == "main" else f", revision={json.dumps(where.revision)}"
    facts = "\n".join(
        f"- {label}: {config[name]}"
        for name, label in (("r", "rank"), ("lora_alpha", "alpha"), ("target_modules", "layers"))
        if config.get(name)
    )
    return f"""\
---
base_model: {json.dumps(base_model)}
library_name: peft
tags:
- lora
- peft
- tinker
- tinkex
tinker_path: {json.dumps(tinker_path)}
---

# A LoRA adapter of {base_model}

Trained through the Tinker API and saved as `{tinker_path}`.

{facts}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({json.dumps(base_model)})
model = PeftModel.from_pretrained(model, {json.dumps(where.repo)}{revision})
```
"""


class Hub:
    """The Hugging Face hub; its errors are raised as errors of tinkex."""

    def __init__(self, token: str | None) -> None:
        huggingface_hub = _library()
        token = token or huggingface_hub.get_token()
        if not token:
            raise ConfigError(
                "missing",
                field="hf_token",
                advice="give --hf-token, set HF_TOKEN, or run `hf auth login`",
            )
        self._api = huggingface_hub.HfApi(token=token, library_name="tinkex")
        self._url: str = self._api.endpoint

    def user(self) -> str:
        with self._told("reading your user name"):
            return str(self._api.whoami()["name"])

    def make(self, where: Destination, *, public: bool) -> None:
        """Create the repository and the branch, unless they exist."""
        with self._told(f"creating {where.repo}"):
            self._api.create_repo(where.repo, private=not public, exist_ok=True)
            if where.revision != "main" and not where.revision.startswith("refs/"):
                self._api.create_branch(where.repo, branch=where.revision, exist_ok=True)

    def check_is_of(self, where: Destination, tinker_path: str, scratch: Path) -> None:
        """Refuse to overwrite another checkpoint, as named by the card in the repository."""
        from huggingface_hub.errors import (
            EntryNotFoundError,
            LocalEntryNotFoundError,
            RevisionNotFoundError,
        )

        with self._told(f"reading {where.repo}"):
            try:
                card = self._api.hf_hub_download(
                    where.repo, "README.md", revision=where.revision, local_dir=scratch
                )
            except (
                LocalEntryNotFoundError
            ):  # the hub is unreachable: the repository may hold a card
                raise
            except (EntryNotFoundError, RevisionNotFoundError):
                return
        named = _NAMES_PATH.search(Path(card).read_text(errors="replace"))
        if named is not None and named[1] != tinker_path:
            raise ConflictError(
                f"{where.repo} at {where.revision} holds {named[1]}; choose another --repo or --revision"
            )

    def upload(
        self,
        folder: Path,
        where: Destination,
        *,
        message: str,
        create_pr: bool,
        allow: Sequence[str],
        ignore: Sequence[str],
    ) -> tuple[list[str], str]:
        """Upload the files that match the patterns; their names, and the URL of the commit."""
        names = sorted(
            file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
        )
        chosen = _chosen(names, allow, ignore)
        if not chosen:
            raise _nothing_left()
        with self._told(f"uploading to {where.repo}"):
            commit = self._api.upload_folder(
                repo_id=where.repo,
                folder_path=folder,
                commit_message=message,
                revision=None if create_pr else where.revision,
                create_pr=create_pr,
                allow_patterns=chosen,
            )
        return chosen, str(commit.pr_url or commit.commit_url)

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Translate errors of the hub, whichever HTTP library it uses."""
        from huggingface_hub.errors import HfHubHTTPError

        # One of its base classes is the root of that library's errors; it may also be OSError.
        unreachable = tuple(
            base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)
        )
        try:
            yield
        except TinkerError:
            raise
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 500)
            why = error.server_message or f"status {status}"
            if status == 401:
                why = "the token is not valid"
            raise status_error_class(status)(f"{doing} failed: {why}") from error
        except unreachable as error:
            raise APIConnectionError(message=self._unreachable(doing, error)) from error
        except ValueError as error:  # the hub's library refuses the name
            raise InvalidInputError(f"{doing} failed: {error}", field="repo") from error
        except RuntimeError as error:  # raised by the library that transfers large files
            raise APIConnectionError(message=self._unreachable(doing, error)) from error

    def _unreachable(self, doing: str, error: Exception) -> str:
        reason = str(error).partition("\n")[0].strip() or type(error).__name__
        return (
            f"{doing} failed: the hub at {self._url} cannot be reached ({reason}). Check the network "
            "and the proxy settings; HF_ENDPOINT names another hub."
        )


def check(tinker_path: str, repo: str | None, allow: Sequence[str], ignore: Sequence[str]) -> None:
    """Refuse invalid arguments before any request to the service or the hub."""
    ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    if not _chosen(_FILES, allow, ignore):
        raise _nothing_left()
    if repo is not None:
        _library()
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(repo)
        except ValueError as error:
            raise InvalidInputError(str(error), field="repo") from None


def _chosen(names: Sequence[str], allow: Sequence[str], ignore: Sequence[str]) -> list[str]:
    def like(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    left_out = [*ignore, *(() if allow else _OURS)]
    return [name for name in names if (not allow or like(name, allow)) and not like(name, left_out)]


def _nothing_left() -> InvalidInputError:
    return InvalidInputError(
        f"the patterns match no file to upload; a checkpoint has {', '.join(_FILES)}",
        field="allow_pattern",
    )


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            "huggingface-hub is not installed", advice="pip install 'tinkex[hf]'"
        ) from error
    return huggingface_hub
