"""Models, samplers and checkpoints of the real engine, with the tiny model."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tinkex.engine import base_models, checkpoint
from tinkex.engine.engine import TorchEngine
from tinkex.engine.memory import memory_of
from tinkex.engine.values import AdamStep, Example, LoraSpec, PassJob, SampleJob
from tinkex.errors import InvalidInputError, NotFoundError

from ..running import finish

TOKENS = np.frombuffer(b"to be or not to be, that is the question", np.uint8).astype(np.int32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    spec = base_models.parse_spec(base_models.TINY)
    return base_models.prepare(spec, tmp_path_factory.mktemp("models"))


@pytest.fixture
def engine(tiny, device):
    return TorchEngine([tiny], device=device)


def test_base_models_share_the_sampling_cache_budget(tiny):
    engine = TorchEngine([tiny], cache_bytes=1000)
    twin = dataclasses.replace(tiny, name="twin", directory=tiny.directory.parent / "twin")
    shutil.copytree(tiny.directory, twin.directory)
    for model in (tiny, twin):
        engine.load(model)
    assert [loaded.sampler.cache_bytes for loaded in engine._loaded.values()] == [500, 500]


def test_engines_that_share_a_machine_share_its_memory_for_keys_and_values(tiny):
    budgets = []
    for share in (1.0, 0.25):
        engine = TorchEngine([tiny], memory_share=share)
        engine.load(tiny)
        budgets += [loaded.sampler.cache_bytes for loaded in engine._loaded.values()]
    assert budgets[1] == pytest.approx(budgets[0] / 4)


def test_memory_size_respects_the_container_limit(tmp_path):
    cpu, limit = torch.device("cpu"), tmp_path / "memory.max"
    whole = memory_of(cpu, [limit])
    assert whole > 1 << 20
    for text, expected in (("max\n", whole), ("1048576\n", 1 << 20), (f"{2**62}\n", whole)):
        limit.write_text(text)
        assert memory_of(cpu, [limit]) == expected


def data():
    return [Example(TOKENS[:-1], {"target_tokens": TOKENS[1:].astype(np.int64)})]


def train(engine, model_id, steps):
    """Train and return the loss before each step."""
    losses = []
    for _ in range(steps):
        losses.append(
            finish(engine.run_pass(model_id, PassJob(data(), "cross_entropy"))).metrics["loss:sum"]
        )
        engine.optim_step(model_id, AdamStep(learning_rate=1e-2))
    return losses


def greedy(engine, sampler_id, count=8):
    engine.add_sample(
        "job", SampleJob(sampler_id, TOKENS[:10], max_tokens=count, temperature=0.0, stop_tokens=())
    )
    results = []
    while engine.sampling:
        results += [event.result for event in engine.sample_step() if event.result is not None]
    return results[0].tokens[0].tolist()


def test_training_learns_and_does_not_change_open_samplers(engine):
    engine.create_model("m", base_models.TINY, LoraSpec(8, seed=1))
    engine.open_sampler("before", base_models.TINY, model_id="m")
    before = greedy(engine, "before")
    losses = train(engine, "m", 30)
    assert losses[-1] < 0.5 * losses[0]
    engine.open_sampler("after", base_models.TINY, model_id="m")
    assert greedy(engine, "before") == before
    assert greedy(engine, "after") == TOKENS[10:18].tolist()


def test_training_resumed_from_a_checkpoint_is_bit_identical(engine, tmp_path):
    engine.create_model("m", base_models.TINY, LoraSpec(4, seed=2))
    train(engine, "m", 5)
    engine.save_state("m", tmp_path / "state", optimizer=True)
    engine.restore_model("resumed", base_models.TINY, tmp_path / "state", optimizer=True)
    engine.restore_model("fresh", base_models.TINY, tmp_path / "state", optimizer=False)
    undisturbed = train(engine, "m", 5)
    assert train(engine, "resumed", 5) == undisturbed
    assert train(engine, "fresh", 5) != undisturbed


def test_saved_adapter_loads_in_peft_unchanged(engine, tiny, tmp_path):
    from peft import PeftModel

    engine.create_model("m", base_models.TINY, LoraSpec(4, seed=3))
    train(engine, "m", 3)
    engine.save_state("m", tmp_path / "adapter", optimizer=False)
    theirs = PeftModel.from_pretrained(
        base_models.load(tiny, device="cpu", dtype=torch.float32), tmp_path / "adapter"
    ).eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(TOKENS[:-1].astype(np.int64))[None]).logits[0]
    expected = logits.log_softmax(-1).gather(
        -1, torch.tensor(TOKENS[1:].astype(np.int64))[:, None]
    )[:, 0]
    ours = finish(engine.run_pass("m", PassJob(data(), "cross_entropy", backward=False))).logprobs[
        0
    ]
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4)


def test_sampler_of_a_checkpoint_equals_sampler_of_the_model(engine, tmp_path):
    engine.create_model("m", base_models.TINY, LoraSpec(4, seed=4))
    train(engine, "m", 10)
    engine.save_state("m", tmp_path / "a", optimizer=False)
    engine.open_sampler("live", base_models.TINY, model_id="m")
    engine.open_sampler("saved", base_models.TINY, directory=tmp_path / "a")
    assert greedy(engine, "saved") == greedy(engine, "live")


# -- bfloat16 -----------------------------------------------------------------------------------------


@pytest.fixture
def narrow(tiny, device):
    return TorchEngine([tiny], device=device, dtype=torch.bfloat16)


def test_small_step_is_not_lost_in_bfloat16(narrow, tmp_path):
    narrow.create_model("m", base_models.TINY, LoraSpec(8, seed=1))
    train(narrow, "m", 1)  # the first step changes only B
    saved = []
    for number in range(2):
        narrow.save_state("m", tmp_path / str(number), optimizer=True)
        saved.append(load_file(tmp_path / str(number) / "adapter_model.safetensors"))
        finish(narrow.run_pass("m", PassJob(data(), "cross_entropy")))
        narrow.optim_step("m", AdamStep(learning_rate=1e-5))
    moved = [(saved[1][name] != before).float().flatten() for name, before in saved[0].items()]
    assert torch.cat(moved).mean() > 0.95
    files = load_file(tmp_path / "1" / "optimizer.safetensors")
    assert {tensor.dtype for tensor in (*saved[1].values(), *files.values())} == {torch.float32}


def test_bfloat16_training_and_sampling_are_close_to_float32(engine, narrow, tmp_path):
    losses = []
    for each in (engine, narrow):
        each.create_model("m", base_models.TINY, LoraSpec(8, seed=1))
        losses.append(train(each, "m", 30))
    np.testing.assert_allclose(losses[1][:5], losses[0][:5], rtol=0.02)
    assert losses[1][-1] < 0.5 * losses[1][0]
    narrow.save_state("m", tmp_path / "a", optimizer=True)
    narrow.open_sampler("live", base_models.TINY, model_id="m")
    narrow.open_sampler("saved", base_models.TINY, directory=tmp_path / "a")
    engine.open_sampler("wide", base_models.TINY, directory=tmp_path / "a")
    expected = TOKENS[10:18].tolist()
    assert greedy(narrow, "live") == greedy(narrow, "saved") == greedy(engine, "wide") == expected
    narrow.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=True)
    assert train(narrow, "n", 3) == train(narrow, "m", 3)


def test_adapters_and_the_base_model_share_a_batch_in_bfloat16(narrow):
    narrow.create_model("m", base_models.TINY, LoraSpec(8, seed=1))
    train(narrow, "m", 30)
    narrow.open_sampler("adapted", base_models.TINY, model_id="m")
    narrow.open_sampler("base", base_models.TINY)
    for sampler_id in ("adapted", "base"):
        narrow.add_sample(
            sampler_id,
            SampleJob(sampler_id, TOKENS[:10], max_tokens=8, temperature=0.0, stop_tokens=()),
        )
    results = {}
    while narrow.sampling:
        for event in narrow.sample_step():
            results[event.job_id] = event.result.tokens[0].tolist()
    assert results["adapted"] == TOKENS[10:18].tolist()
    assert results["base"] == greedy(narrow, "base")


# -- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"]
)
def test_damaged_file_is_refused_by_name(engine, tmp_path, name):
    engine.create_model("m", base_models.TINY, LoraSpec(2))
    engine.save_state("m", tmp_path / "a", optimizer=True)
    file = tmp_path / "a" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidInputError, match=name):
        engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=True)


def peft_adapter(engine, directory):
    """An adapter without tinkex.json, as PEFT or another program writes it."""
    engine.create_model("m", base_models.TINY, LoraSpec(2, seed=5))
    train(engine, "m", 2)
    engine.save_state("m", directory, optimizer=True)
    (directory / "tinkex.json").unlink()


def test_adapter_without_manifest_is_read_from_its_peft_config(engine, tmp_path):
    peft_adapter(engine, tmp_path / "a")
    engine.open_sampler("live", base_models.TINY, model_id="m")
    engine.open_sampler("saved", base_models.TINY, directory=tmp_path / "a")
    assert greedy(engine, "saved") == greedy(engine, "live")


def reconfigured(engine, directory, **settings):
    """A PEFT adapter with additional settings in its configuration."""
    peft_adapter(engine, directory)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def test_every_plain_peft_adapter_is_read(engine, tiny, tmp_path):
    from peft import LoraConfig, get_peft_model

    base: Any = base_models.load(tiny, device="cpu", dtype=torch.float32)
    for kind, changes in (
        ("plain", {}),
        ("rslora", {"use_rslora": True}),
        ("gaussian", {"init_lora_weights": "gaussian"}),
    ):
        config = LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], **changes)
        theirs = get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
            logits = theirs.eval()(torch.tensor(TOKENS[:-1].astype(np.int64))[None]).logits[0]
        theirs.save_pretrained(tmp_path / kind)
        base = theirs.unload()
        engine.restore_model("m", base_models.TINY, tmp_path / kind, optimizer=False)
        ours = finish(
            engine.run_pass("m", PassJob(data(), "cross_entropy", backward=False))
        ).logprobs[0]
        targets = torch.tensor(TOKENS[1:].astype(np.int64))[:, None]
        expected = logits.log_softmax(-1).gather(-1, targets)[:, 0]
        np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4)
        # Saving and loading it again keeps its meaning.
        engine.save_state("m", tmp_path / "again", optimizer=False)
        (tmp_path / "again" / "tinkex.json").unlink()
        engine.restore_model("n", base_models.TINY, tmp_path / "again", optimizer=False)
        again = finish(
            engine.run_pass("n", PassJob(data(), "cross_entropy", backward=False))
        ).logprobs[0]
        np.testing.assert_allclose(again, ours, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("alpha_pattern", {"q_proj": 8}),
        ("rank_pattern", {"q_proj": 4}),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [1, 2]),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("peft_type", "ADALORA"),
    ],
)
def test_unsupported_peft_settings_are_refused_by_name(engine, tmp_path, name, value):
    reconfigured(engine, tmp_path / "a", **{name: value})
    for load in (
        lambda: engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=False),
        lambda: engine.open_sampler("s", base_models.TINY, directory=tmp_path / "a"),
    ):
        with pytest.raises(InvalidInputError, match=f"{name}=") as caught:
            load()
        assert caught.value.field == "path"


def test_changing_a_file_after_load_does_not_change_the_model(engine, tmp_path):
    engine.create_model("m", base_models.TINY, LoraSpec(4, seed=2))
    train(engine, "m", 2)
    engine.save_state("m", tmp_path / "a", optimizer=True)
    engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=True)
    for file in (tmp_path / "a").iterdir():
        with file.open("r+b") as content:  # changes the file in place
            content.write(bytes(file.stat().st_size))
    assert train(engine, "n", 2) == train(engine, "m", 2)


@pytest.mark.parametrize("content", [b"", b"torn", None, b"[]", b"{}", b"\xff", "half"])
@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"]
)
def test_unreadable_file_of_a_peft_adapter_is_named(engine, tmp_path, name, content):
    peft_adapter(engine, tmp_path / "a")
    file = tmp_path / "a" / name
    if content == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif content is None:
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(InvalidInputError, match=name) as caught:
        engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=True)
    assert caught.value.field == "path"
    assert str(tmp_path) not in str(caught.value)


LAYER = "base_model.model.model.layers.0.self_attn.o_proj"
A, B = f"{LAYER}.lora_A.weight", f"{LAYER}.lora_B.weight"
FOREIGN = {
    "nothing": lambda tensors: tensors.clear(),
    "another tensor": lambda tensors: tensors.update(bias=torch.zeros(3)),
    "no B": lambda tensors: tensors.pop(B),
    "A is flat": lambda tensors: tensors.update({A: torch.zeros(2)}),
    "B is a number": lambda tensors: tensors.update({B: torch.zeros(())}),
    "another rank": lambda tensors: tensors.update(
        {A: tensors[A].repeat(2, 1), B: tensors[B].repeat(1, 2)}
    ),
    "another size": lambda tensors: tensors.update({A: torch.zeros(2, 3)}),
    "another layer": lambda tensors: tensors.update(
        {f"x.lora_{factor}.weight": torch.zeros(2, 2) for factor in "AB"}
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_tensors_that_do_not_fit_the_model_are_refused(engine, tmp_path, name):
    peft_adapter(engine, tmp_path / "a")
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)
    FOREIGN[name](tensors)
    save_file(tensors, file)
    with pytest.raises(InvalidInputError) as caught:
        engine.open_sampler("s", base_models.TINY, directory=tmp_path / "a")
    assert caught.value.field == "path"


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_optimizer_of_another_adapter_is_refused(engine, tmp_path, change):
    peft_adapter(engine, tmp_path / "a")
    file = tmp_path / "a" / "optimizer.safetensors"
    moments = load_file(file)
    name = next(iter(moments))
    moments.pop(name)
    if change == "shape":
        moments[name] = torch.zeros(1)
    save_file(moments, file)
    with pytest.raises(InvalidInputError, match=f"optimizer.safetensors .*{name}") as caught:
        engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=True)
    assert caught.value.field == "path"
    engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=False)


def test_save_replaces_and_failed_save_keeps_the_old_checkpoint(engine, tmp_path, monkeypatch):
    engine.create_model("m", base_models.TINY, LoraSpec(2))
    engine.save_state("m", tmp_path / "a", optimizer=True)
    train(engine, "m", 1)
    engine.save_state("m", tmp_path / "a", optimizer=True)
    assert json.loads((tmp_path / "a" / "tinkex.json").read_text())["steps"] == 1

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="space"):
        engine.save_state("m", tmp_path / "a", optimizer=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    monkeypatch.undo()
    engine.restore_model("n", base_models.TINY, tmp_path / "a", optimizer=True)


def test_sampling_a_model_on_another_base_model_is_refused(tiny):
    engine = TorchEngine([tiny, dataclasses.replace(tiny, name="twin")])
    engine.create_model("m", base_models.TINY, LoraSpec(2))
    with pytest.raises(InvalidInputError, match="'twin', the model was trained on") as caught:
        engine.open_sampler("s", "twin", model_id="m")
    assert caught.value.field == "base_model"


def test_stop_strings_without_a_tokenizer_are_refused_before_sampling(engine):
    engine.open_sampler("s", base_models.TINY)
    with pytest.raises(InvalidInputError, match="need a tokenizer") as caught:
        engine.add_sample("job", SampleJob("s", TOKENS, stop_texts=("x",)))
    assert caught.value.field == "stop"
    assert not engine.sampling


def test_reopened_sampler_frees_the_previous_one(engine):
    engine.create_model("m", base_models.TINY, LoraSpec(2))
    for _ in range(3):
        engine.open_sampler("s", base_models.TINY, model_id="m")
        greedy(engine, "s")
    layers = engine._base(base_models.TINY).language.llama.layers
    assert {len(layer.qkv._frozen) for layer in layers} == {1}


def test_base_model_that_fails_to_load_stays_unknown(engine, tiny, tmp_path):
    broken = dataclasses.replace(tiny, name="broken", directory=tmp_path / "nothing")
    with pytest.raises(OSError, match="nothing"):
        engine.load(broken)
    with pytest.raises(InvalidInputError, match="does not have 'broken'"):
        engine.create_model("m", "broken", LoraSpec(2))
    with pytest.raises(OSError, match="nothing"):
        engine.load(dataclasses.replace(broken, name=base_models.TINY))
    engine.create_model("m", base_models.TINY, LoraSpec(2))  # the other base model still works
    engine.load(dataclasses.replace(tiny, name="broken"))
    engine.create_model("m", "broken", LoraSpec(2))


def test_unknown_names_are_refused_by_name(engine, tmp_path):
    with pytest.raises(InvalidInputError, match="does not have 'other/model'"):
        engine.create_model("m", "other/model", LoraSpec(2))
    with pytest.raises(NotFoundError, match="no model"):
        engine.optim_step("nobody", AdamStep())
    with pytest.raises(NotFoundError, match="no sampler"):
        engine.add_sample("job", SampleJob("nobody", TOKENS))
    with pytest.raises(InvalidInputError, match="does not have 'other/model'"):
        engine.open_sampler("s", "other/model")
    with pytest.raises(InvalidInputError, match="no such checkpoint"):
        engine.restore_model("m", base_models.TINY, tmp_path / "nothing", optimizer=False)
