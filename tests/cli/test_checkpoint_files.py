"""Moving checkpoints out of a service and into one: `export`, `import` and `push-hf`."""

from __future__ import annotations

import json
import socket
import tarfile
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import torch

from tinkex.cli.hub import Hub, destination
from tinkex.engine import base_models
from tinkex.errors import APIConnectionError, InvalidInputError, PayloadTooLargeError
from tinkex.server.imports import unpack
from tinkex.testing import service
from tinkex.types import Datum, ModelInput

from ..tars import tar
from .commands import payload, process, run
from .hub import TOKEN, hub

TINY = "tinkex/tiny"
PROMPT = list(b"The quick brown fox jumps over")


@pytest.fixture(scope="module")
def paths(tinkex_tiny):
    """A model after some training, saved for training and for sampling."""
    training = tinkex_tiny.client().create_lora_training_client(TINY, rank=4, seed=3)
    tokens = np.array(PROMPT, np.int32)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:].astype(np.int64)})
    for _ in range(2):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step()
    saved = training.save_state("trained"), training.save_weights_for_sampler("drawn")
    return tuple(one.result().path for one in saved)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    return base_models.prepare(base_models.parse_spec(TINY), cache)


@pytest.fixture(scope="module")
def exported(tinkex_tiny, paths, tmp_path_factory):
    """The adapter, and the base model with the adapter in it."""
    place = tmp_path_factory.mktemp("exported")
    outcomes = []
    for kind in ("adapter", "merge"):
        where = ["--output", place / kind, "--base-url", tinkex_tiny.url]
        outcomes.append(run("checkpoint", "export", paths[1], f"--{kind}", *where, "--json"))
    return place, [payload("checkpoint export", outcome) for outcome in outcomes]


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return found


def logprobs_of(model) -> np.ndarray:
    """The logprobs of all prompt tokens after the first, from the service."""
    logprobs = logits_of(model).log_softmax(-1)[:-1]
    return logprobs[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])].numpy()


def with_adapter(base, directory):
    import peft

    model = base_models.load(base, device="cpu", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, str(directory)).eval()


def service_logprobs(running, path) -> np.ndarray:
    sampler = running.client().create_sampling_client(model_path=path)
    found = sampler.compute_logprobs(ModelInput.from_ints(PROMPT)).result()
    assert found[0] is None
    return np.array(found[1:])


# -- export -----------------------------------------------------------------------------------------


def test_peft_reads_the_exported_adapter_as_the_service_does(tinkex_tiny, paths, exported, base):
    place, (adapter, _) = exported
    assert adapter["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert adapter["merged"] is False
    expected = service_logprobs(tinkex_tiny, paths[1])
    plain = logprobs_of(base_models.load(base, device="cpu", dtype=torch.float32))
    assert np.abs(plain - expected).max() > 1e-3  # the adapter does something
    assert logprobs_of(with_adapter(base, place / "adapter")) == pytest.approx(expected, abs=1e-4)


def test_merged_model_loads_alone_and_gives_the_same_logits(exported, base):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place, (_, merged) = exported
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(merged["files"])
    expected = logits_of(with_adapter(base, place / "adapter"))
    model = AutoModelForCausalLM.from_pretrained(place / "merge")
    assert (logits_of(model) - expected).abs().max() < 1e-3
    tokenizer = AutoTokenizer.from_pretrained(place / "merge")
    assert tokenizer.encode("Hi") == [72, 105]
    assert tokenizer.chat_template


def test_merging_in_memory_gives_the_same_weights(exported, base, tmp_path):
    from safetensors.torch import load_file

    from tinkex.cli.merging import merge_loaded

    place, _ = exported
    merge_loaded(place / "adapter", base, tmp_path)
    streamed = load_file(place / "merge" / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert streamed.keys() == loaded.keys()
    for name, tensor in streamed.items():
        assert torch.allclose(tensor, loaded[name], atol=1e-6), name
    assert (tmp_path / "tokenizer.json").is_file()


def test_an_adapted_unembedding_gets_weights_of_its_own(base, tmp_path):
    """In a model that shares them with the embeddings, written in two files."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tinkex.cli.merging import merge
    from tinkex.engine import checkpoint
    from tinkex.engine.lora import Adapter, wrap
    from tinkex.engine.values import LoraSpec

    network = base_models.load(base, device="cpu", dtype=torch.float32)
    network.config.tie_word_embeddings = True
    network.tie_weights()
    shared = tmp_path / "shared"
    network.save_pretrained(shared, max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (shared / name).write_bytes((base.directory / name).read_bytes())
    assert (shared / "model.safetensors.index.json").is_file()

    layers = wrap(network)
    adapter = Adapter.fresh(layers, LoraSpec(rank=2, seed=0, train_mlp=False), "cpu")
    for pair in adapter.pairs.values():
        torch.nn.init.normal_(pair.b, std=0.05)
    with adapter.switched_on(layers):
        expected = logits_of(network)
    checkpoint.save(tmp_path / "adapter", adapter, TINY)

    (tmp_path / "merged").mkdir()
    seen: list[tuple[int, int | None]] = []
    merge(
        tmp_path / "adapter",
        base_models.read("shared", shared),
        tmp_path / "merged",
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1]
    assert (
        json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
        is False
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits_of(model) - expected).abs().max() < 1e-3
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    file = tmp_path / "merged" / index["weight_map"]["lm_head.weight"]
    assert "lm_head.weight" in load_file(file)


def test_an_export_is_all_or_nothing(tinkex_tiny, paths, tmp_path):
    where = ["--base-url", tinkex_tiny.url, "--output", tmp_path / "out"]
    unknown = run("checkpoint", "export", "tinker://none/weights/x", *where)
    assert unknown.code == 1
    bad_base = run("checkpoint", "export", paths[0], "--base-model", tmp_path / "gone", *where)
    assert bad_base.code == 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    there = run("checkpoint", "export", paths[0], "--adapter", *where)
    assert "--force replaces it" in there.err
    assert (tmp_path / "out" / "mine").exists()
    assert run("checkpoint", "export", paths[0], "--adapter", "--force", *where).code == 0
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


# -- import -----------------------------------------------------------------------------------------


def test_imported_peft_adapter_gives_the_same_logprobs(tinkex_tiny, paths, exported, tmp_path):
    place, _ = exported
    where = ["--base-url", tinkex_tiny.url, "--name", "came-in", "--json"]
    outcome = run("checkpoint", "import", place / "adapter", "--base-model", TINY, *where)
    assert outcome.code == 0, outcome.err
    answer = payload("checkpoint import", outcome)
    assert answer["base_model"] == TINY
    assert answer["lora_rank"] == 4
    kinds = {one["checkpoint_type"]: one["tinker_path"] for one in answer["checkpoints"]}
    assert set(kinds) == {"training", "sampler"}
    assert all(path.endswith("/came-in") for path in kinds.values())
    assert service_logprobs(tinkex_tiny, kinds["sampler"]) == pytest.approx(
        service_logprobs(tinkex_tiny, paths[1]), abs=1e-5
    )
    listed = run("checkpoint", "list", "--run-id", answer["run_id"], *where[:2], "--json")
    assert json.loads(listed.out)["total"] == 2
    going_on = tinkex_tiny.client().create_training_client_from_state_with_optimizer(
        kinds["training"]
    )
    assert going_on.get_info().lora_rank == 4
    place = tinkex_tiny.data_dir / "checkpoints" / "imports" / "training"
    assert list(place.iterdir()) == []


def test_imported_tinkex_checkpoint_keeps_its_optimizer(tinkex_fake, tmp_path):
    training = tinkex_fake.client().create_lora_training_client(TINY, rank=4)
    tokens = np.array(PROMPT, np.int32)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:].astype(np.int64)})
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step().result()
    path = training.save_state("gone").result().path
    url = ["--base-url", tinkex_fake.url]
    assert run("checkpoint", "download", path, "--output", tmp_path, *url).code == 0
    (directory,) = tmp_path.iterdir()
    outcome = run("checkpoint", "import", directory, "--type", "training", *url, "--json")
    assert outcome.code == 0, outcome.err
    (checkpoint,) = json.loads(outcome.out)["checkpoints"]
    again = tinkex_fake.client().create_training_client_from_state_with_optimizer(
        checkpoint["tinker_path"]
    )
    losses = []
    for model in (training, again):
        model.forward_backward([datum], "cross_entropy").result()
        model.optim_step().result()
        losses.append(model.forward([datum], "cross_entropy").result().metrics)
    assert losses[0] == losses[1]


def test_directories_that_are_no_adapters_are_refused_before_anything_is_sent(tmp_path):
    where = ["--base-url", "http://127.0.0.1:9"]
    empty = run("checkpoint", "import", tmp_path, *where)
    assert empty.code == 1
    assert "lacks adapter_config.json and adapter_model.safetensors" in empty.err
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    assert "can run any code" in run("checkpoint", "import", tmp_path, *where).err
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "give --base-model" in run("checkpoint", "import", tmp_path, *where).err
    far = ["--base-model", TINY, "--base-url", "https://tinker.example.com"]
    assert "is another machine" in run("checkpoint", "import", tmp_path, *far).err
    dead = run("checkpoint", "import", tmp_path, "--base-model", TINY, *where)
    assert dead.code == 1
    assert "did not answer" in dead.err


def test_import_names_a_service_that_cannot_import_adapters(exported, tmp_path):
    place, _ = exported
    with hub() as other:  # an HTTP server that is not a Tinker service
        where = ["--base-model", TINY, "--base-url", other.url]
        outcome = run("checkpoint", "import", place / "adapter", *where)
    assert outcome.code == 1
    assert "cannot import adapters" in outcome.err


def test_an_adapter_that_does_not_fit_is_refused_and_leaves_nothing(
    tinkex_tiny, exported, tmp_path
):
    from safetensors.torch import load_file, save_file

    place, _ = exported
    where = ["--base-url", tinkex_tiny.url, "--base-model", TINY, "--name", "x"]
    tensors = load_file(place / "adapter" / "adapter_model.safetensors")
    narrow = {
        name: tensor[:, :3] if "lora_A" in name else tensor for name, tensor in tensors.items()
    }
    save_file(
        {k: v.contiguous() for k, v in narrow.items()}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_bytes(
        (place / "adapter" / "adapter_config.json").read_bytes()
    )
    wrong = run("checkpoint", "import", tmp_path, *where)
    assert wrong.code == 1
    assert "does not fit this base model" in wrong.err
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    assert (
        "adapter_model.safetensors is missing, damaged"
        in run("checkpoint", "import", tmp_path, *where).err
    )
    unknown = run("checkpoint", "import", tmp_path, *where[:2], "--base-model", "no/such")
    assert "does not have 'no/such'" in unknown.err
    scratch = tinkex_tiny.data_dir / "checkpoints" / "imports" / "training"
    assert not list(scratch.glob(".*"))


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


BOTH = (("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"x" * 600))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a readable tar"),
        (b"junk" * 500, "is not a readable tar"),
        (tar(*BOTH)[:1800], "is not a readable tar"),
        (tar(BOTH[0]), "lacks adapter_model.safetensors"),
        (tar(*BOTH, ("../evil", b"x")), "'../evil'"),
        (tar(*BOTH, ("/etc/evil", b"x")), "evil'"),
        (tar(*BOTH, ("README.md", b"x")), "'README.md'"),
        (tar(*BOTH, BOTH[0]), "twice"),
        (tar(link("adapter_config.json", tarfile.SYMTYPE)), "not a file of an adapter"),
        (tar(link("adapter_config.json", tarfile.LNKTYPE)), "not a file of an adapter"),
        (tar(link("adapter_config.json", tarfile.FIFOTYPE)), "not a file of an adapter"),
        (tar(link("adapter_config.json", tarfile.DIRTYPE)), "not a file of an adapter"),
    ],
)
def test_archives_that_are_no_adapters_are_refused(tmp_path, content, says):
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(InvalidInputError, match=f"archive: .*{says}"):
        unpack(tmp_path / "archive", tmp_path / "files")
    assert {file.name for file in tmp_path.iterdir()} <= {"archive", "files"}


def test_an_archive_may_not_hold_more_than_is_allowed(tmp_path):
    (tmp_path / "archive").write_bytes(tar(*BOTH))
    unpack(tmp_path / "archive", tmp_path / "enough", limit=602)
    with pytest.raises(PayloadTooLargeError):
        unpack(tmp_path / "archive", tmp_path / "files", limit=601)


def test_the_route_asks_for_a_key_a_type_and_a_name(tinkex_fake):
    url = f"{tinkex_fake.url}/local/import"
    kind = {"content-type": "application/x-tar"}
    asked = {"base_model": TINY, "name": "x"}
    with httpx.Client(trust_env=False) as http:

        def post(params, headers=kind, content=b"junk"):
            answer = http.post(url, params=params, headers=headers, content=content)
            return answer.status_code, answer.json()["detail"]

        assert post(asked, {})[0] == 415
        assert post({"name": "x"}) == (400, "base_model: is missing")
        assert post(asked | {"name": "../x"})[0] == 400
        assert post(asked | {"type": "external"})[0] == 400
        status, detail = post(asked)
        assert status == 400
        assert detail.startswith("archive: is not a readable tar")
        assert http.get(url).status_code == 405


def test_a_body_that_is_too_large_is_refused_unread(tinkex_fake):
    where = urlsplit(tinkex_fake.url)
    head = [
        f"POST /local/import?base_model={TINY}&name=x HTTP/1.1",
        f"host: {where.netloc}",
        "content-type: application/x-tar",
        f"content-length: {1 << 40}",
        "",
        "",
    ]
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall("\r\n".join(head).encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_keys_count_for_imports_too(tmp_path):
    from tinkex.server.auth import Keys

    (tmp_path / "keys").write_text("tml-secret\n")
    with (
        service("fake", keys=Keys.from_file(tmp_path / "keys")) as running,
        httpx.Client(trust_env=False) as http,
    ):
        asked = {"base_model": TINY, "name": "x"}
        headers = {"content-type": "application/x-tar"}
        answer = http.post(f"{running.url}/local/import", params=asked, headers=headers)
        assert answer.status_code == 401


# -- push-hf ----------------------------------------------------------------------------------------


@pytest.fixture
def standing_in():
    with hub() as running:
        yield running


def push(standing_in, running, path, *options, token=TOKEN, **settings):
    environment = {
        "HF_ENDPOINT": standing_in.url,
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **settings,
    }
    where = ["--base-url", running.url, "--json"]
    return process("checkpoint", "push-hf", path, *where, *options, **environment)


def test_a_checkpoint_is_pushed_with_a_card_to_a_branch_of_its_own(standing_in, tinkex_tiny, paths):
    outcome = push(standing_in, tinkex_tiny, paths[0])
    assert outcome.code == 0, outcome.err
    result = payload("checkpoint push-hf", outcome)
    assert result["repo_id"].startswith("ada/tinker-tiny-")
    assert result["revision"] == "weights-trained"
    assert standing_in.private[result["repo_id"]]
    files = standing_in.files[result["repo_id"], "weights-trained"]
    expected = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sorted(files) == result["files"] == expected
    card = files["README.md"].decode()
    assert card.startswith(f'---\nbase_model: "{TINY}"\nlibrary_name: peft\n')
    assert f'tinker_path: "{paths[0]}"' in card
    # A repository with this checkpoint refuses another one, but accepts the same one again.
    there = ["--repo", result["repo_id"], "--revision", result["revision"]]
    other = push(standing_in, tinkex_tiny, paths[1], *there)
    assert other.code == 1
    assert "choose another --repo" in other.err
    assert len(standing_in.commits) == 1


def test_push_respects_its_options_and_patterns(standing_in, tinkex_tiny, paths):
    options = ["--repo", "mine", "--public", "--no-model-card", "--commit-message", "here"]
    patterns = ["--allow-pattern", "*.json", "--ignore-pattern", "adapter_c*"]
    outcome = push(standing_in, tinkex_tiny, paths[1], *options, *patterns)
    assert outcome.code == 0, outcome.err
    assert standing_in.private == {"ada/mine": False}
    assert sorted(standing_in.files["ada/mine", "main"]) == ["tinkex.json"]
    assert standing_in.commits[0]["summary"] == "here"


@pytest.mark.parametrize(
    ("path", "options", "named"),
    [
        ("nonsense", [], "CHECKPOINT_PATH: must start with tinker://"),
        ("tinker://run/weights/x", ["--allow-pattern", "*.gguf"], "--allow-pattern"),
        ("tinker://run/weights/x", ["--ignore-pattern", "*"], "match no file to upload"),
        ("tinker://run/weights/x", ["--repo", "a//b"], "--repo"),
    ],
)
def test_push_checks_its_arguments_before_any_request(path, options, named):
    nobody = "http://127.0.0.1:1"
    where = ["--base-url", nobody, *options]
    outcome = process("checkpoint", "push-hf", path, *where, HF_ENDPOINT=nobody, HF_TOKEN=TOKEN)
    assert outcome.code == 1
    assert named in outcome.err
    assert nobody not in outcome.err


def test_push_names_a_hub_that_cannot_be_reached(paths):
    nobody = "http://127.0.0.1:1"
    outcome = process("checkpoint", "push-hf", paths[0], HF_ENDPOINT=nobody, HF_TOKEN=TOKEN)
    assert outcome.code == 1
    assert f"the hub at {nobody} cannot be reached" in outcome.err
    assert "HF_ENDPOINT" in outcome.err
    assert "Traceback" not in outcome.err


def test_push_needs_no_http_library_besides_that_of_the_hub(
    standing_in, tinkex_tiny, paths, tmp_path
):
    (tmp_path / "httpx.py").write_text("raise ModuleNotFoundError(name='httpx')")
    outcome = push(standing_in, tinkex_tiny, paths[0], PYTHONPATH=str(tmp_path))
    assert outcome.code == 0, outcome.err


def test_push_overwrites_nothing_when_the_card_cannot_be_read(standing_in, tmp_path):
    """If the hub does not answer, the card must not count as missing."""
    where = destination("tinker://run/weights/x", "base", "ada", "mine", None)
    hub_client = Hub(TOKEN)
    hub_client._api.endpoint = "http://127.0.0.1:1"
    with pytest.raises(APIConnectionError, match="cannot be reached"):
        hub_client.check_is_of(where, "tinker://run/weights/x", tmp_path)


def test_push_can_open_a_pull_request(standing_in, tinkex_tiny, paths):
    proposed = ["-r", "mine", "--create-pr"]
    for branch in ([], ["--revision", "main"]):
        outcome = push(standing_in, tinkex_tiny, paths[1], *proposed, *branch)
        assert outcome.code == 0, outcome.err
        result = payload("checkpoint push-hf", outcome)
        assert result["url"].endswith("/discussions/1")
    assert standing_in.proposals == ["ada/mine"] * 2
    assert standing_in.files == {("ada/mine", "main"): {}}
    other = push(standing_in, tinkex_tiny, paths[1], *proposed, "--revision", "dev")
    assert other.code == 2
    assert "main only" in other.err


def test_push_with_an_invalid_token_says_so(standing_in, tinkex_tiny, paths, tmp_path):
    bad = push(standing_in, tinkex_tiny, paths[1], "--hf-token", "hf_bad")
    assert bad.code == 1
    assert "the token is not valid" in bad.err
    assert "Traceback" not in bad.err
    none = push(standing_in, tinkex_tiny, paths[1], token="", HF_HOME=str(tmp_path))
    assert none.code == 1
    assert "hf auth login" in none.err


def test_destinations():
    path = "tinker://ab:train:0/sampler_weights/final.1"
    by_default = destination(path, "org/Base-1.5", "ada", None, None)
    assert (by_default.repo, by_default.revision) == (
        "ada/tinker-Base-1.5-ab-train-0",
        "sampler_weights-final.1",
    )
    only_repo = destination(path, "b", "ada", "team/x", None)
    assert (only_repo.repo, only_repo.revision) == ("team/x", "main")
    only_revision = destination(path, "b", "ada", None, "dev")
    assert (only_revision.repo, only_revision.revision) == ("ada/tinker-b-ab-train-0", "dev")
