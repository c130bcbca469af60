"""Traced losses: the engine computes the same numbers as the client, and refuses anything but arithmetic."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

import tinkex
from tinkex.engine.graphs import check_graph
from tinkex.engine.traced import TracedLoss
from tinkex.engine.traced_cost import TracedSum
from tinkex.engine.values import Array, Example, LossLimits, TracedGraph


def clipped(logprobs, advantages, old):
    ratio = torch.exp(logprobs - old)
    terms = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -terms.sum(), {
        "custom/ratio:mean": ratio.mean(),
        "custom/positions:sum": (ratio > 0).sum(),
    }


RANKS = {"logprobs": 1, "advantages": 1, "old": 1}


def data(count=3):
    random = np.random.default_rng(0)
    made = []
    for index in range(count):
        row = random.integers(0, 256, 8 + 3 * index)
        length = len(row) - 1
        made.append(
            tinkex.Datum(
                model_input=tinkex.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": row[1:],
                    "advantages": random.standard_normal(length).astype(np.float32),
                    "old": np.full(length, -5.0, np.float32),
                },
            )
        )
    return made


def stepped(client, loss):
    training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=3)
    results = []
    for _ in range(4):
        results.append(training.forward_backward_custom(data(), loss).result().metrics)
        training.optim_step(tinkex.AdamParams(learning_rate=1e-2)).result()
    final = training.forward(data(), "cross_entropy").result()
    return results, [output["logprobs"].to_numpy() for output in final.loss_fn_outputs]


def test_traced_loss_gives_the_same_training_as_in_the_client(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(clipped, RANKS).result()
    assert handle.loss_id is not None
    at_service, final = stepped(client, handle)

    def here(data, logprobs):
        losses, ratios = [], []
        for datum, logp in zip(data, logprobs, strict=True):
            inputs = [datum.loss_fn_inputs[name].to_torch() for name in ("advantages", "old")]
            value, metrics = clipped(logp, *inputs)
            losses.append(value)
            ratios.append(metrics["custom/ratio:mean"].item())
        return sum(losses), {"custom/ratio:mean": sum(ratios) / len(ratios)}

    in_client, expected = stepped(client, here)
    for ours, theirs in zip(at_service, in_client, strict=True):
        assert ours["loss:sum"] == pytest.approx(theirs["loss:sum"], abs=1e-4)
        assert ours["custom/ratio:mean"] == pytest.approx(theirs["custom/ratio:mean"], rel=1e-4)
        assert ours["custom/positions:sum"] == sum(len(d.loss_fn_inputs["old"]) for d in data())
    for ours, theirs in zip(final, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_missing_input_or_wrong_rank_is_refused(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(clipped, RANKS).result()
    training = client.create_lora_training_client("tinkex/tiny", rank=4)
    lacking = data(1)
    del lacking[0].loss_fn_inputs["old"]
    with pytest.raises(tinkex.InvalidInputError, match=r"data\.0\.old"):
        training.forward_backward_custom(lacking, handle)
    with pytest.raises(tinkex.InvalidInputError, match="input_ranks"):
        client.create_custom_loss(clipped, {"logprobs": 1})


def test_loss_of_another_session_is_refused(tinkex_tiny):
    handle = tinkex_tiny.client().create_custom_loss(clipped, RANKS).result()
    training = tinkex_tiny.client().create_lora_training_client("tinkex/tiny", rank=4)
    with pytest.raises(tinkex.InvalidInputError, match=handle.session_id):
        training.forward_backward_custom(data(1), handle)
    with pytest.raises(tinkex.RequestFailedError, match="loss_id"):
        training.forward_backward(data(1), "custom", {"loss_id": handle.loss_id}).result()


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LOGPROBS = node("placeholder", "logprobs", "logprobs")
REF = {"ref": "logprobs"}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (node("call_function", "x", "os.system", "true"), "os.system"),
        (node("call_function", "x", "torch.load", "file"), "torch.load"),
        (node("call_function", "x", "builtins.eval", "1"), "builtins.eval"),
        (node("call_function", "x", "torch.zeros", 10), "torch.zeros"),
        (node("call_method", "x", "__class__", REF), "__class__"),
        (node("call_method", "x", "numpy", REF), "numpy"),
        (node("call_module", "x", "layer", REF), "layer"),
        (node("get_attr", "x", "weights"), "weights"),
        (node("call_function", "x", "getattr", REF, "__class__"), "__class__"),
        (node("call_function", "x", "getattr", REF, "grad_fn"), "grad_fn"),
        (node("call_function", "x", "getattr", REF, REF), "ref"),
        (node("call_function", "x", "getattr", REF, "shape", 0), "shape"),
        (node("call_function", "x", "torch.exp", {"ref": "later"}), "later"),
    ],
)
def test_operations_that_are_not_allowed_are_refused_by_name(bad, named):
    nodes = [LOGPROBS, bad, node("output", "output", "output", {"tuple": [REF, {"dict": {}}]})]
    with pytest.raises(tinkex.InvalidInputError, match=named) as refused:
        TracedLoss(TracedGraph("loss", [("logprobs", 1)], nodes))
    assert refused.value.field == "graph"


def shaped(logprobs, advantages, old):
    ones = torch.ones_like(logprobs, memory_format=torch.preserve_format, layout=torch.strided)
    moved = advantages.to(logprobs.dtype).to(logprobs.device) * ones
    flat = moved.contiguous(memory_format=torch.contiguous_format).reshape(logprobs.shape + (1,))  # noqa: RUF005
    mean = (logprobs * flat.T.mT[:, 0]).sum() / logprobs.shape[0] * logprobs.ndim
    return [mean, {"custom/mean:mean": mean}]


def test_loss_can_read_tensor_properties_and_return_a_list(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(shaped, RANKS).result()
    assert handle.loss_id is not None
    training = client.create_lora_training_client("tinkex/tiny", rank=4, seed=3)
    batch = data()
    outputs = training.forward(batch, "cross_entropy").result().loss_fn_outputs
    means = [
        float((output["logprobs"].to_numpy() * each.loss_fn_inputs["advantages"].to_numpy()).mean())
        for output, each in zip(outputs, batch, strict=True)
    ]
    metrics = training.forward_backward_custom(batch, handle).result().metrics
    assert metrics["loss:sum"] == pytest.approx(sum(means), rel=1e-5)
    assert metrics["custom/mean:mean"] == pytest.approx(sum(means) / len(means), rel=1e-5)


@pytest.mark.parametrize(
    "growing",
    [
        [node("call_function", "x", "operator.mul", {"tuple": [0]}, 1 << 40)],
        [node("call_function", "x", "operator.mod", "%999999999d", 1)],
        [
            node("call_function", "x", "operator.add", {"tuple": [0]}, {"tuple": [0]}),
            *(
                node("call_function", f"x{n}", "operator.add", *[{"ref": f"x{n - 1 or ''}"}] * 2)
                for n in range(1, 60)
            ),
        ],
        [node("call_function", "x", "getattr", {"tuple": [0]}, "T")],
    ],
)
def test_lists_and_strings_cannot_grow_without_limit(growing):
    output = node("output", "output", "output", {"tuple": [REF, {"dict": {}}]})
    loss = TracedLoss(TracedGraph("loss", [("logprobs", 1)], [LOGPROBS, *growing, output]))
    with pytest.raises(tinkex.InvalidInputError, match="failed at x"):
        loss(torch.zeros(3, requires_grad=True), {})


def test_inputs_that_may_not_be_written_are_copied():
    """As they come from the pipe. PyTorch would warn, and tests turn warnings into errors."""
    given = [
        node("placeholder", "given", "given"),
        node("call_function", "x", "operator.mul", {"ref": "logprobs"}, {"ref": "given"}),
        node("call_method", "total", "sum", {"ref": "x"}),
        node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
    ]
    loss = TracedLoss(TracedGraph("loss", [("logprobs", 1), ("given", 1)], [LOGPROBS, *given]))
    weights = np.array([1.0, 2.0], np.float32)
    weights.flags.writeable = False
    assert float(loss(torch.tensor([3.0, 4.0]), {"given": weights})[0]) == 11.0


def test_integers_cannot_grow_without_limit():
    power = node("call_function", "x", "operator.pow", 9, 1_000_000_000)
    total = node("call_method", "total", "sum", REF)
    output = node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]})
    loss = TracedLoss(TracedGraph("loss", [("logprobs", 1)], [LOGPROBS, power, total, output]))
    with pytest.raises(tinkex.InvalidInputError, match="x"):
        loss(torch.zeros(3, requires_grad=True), {})


# -- limits of a loss --------------------------------------------------------------------------------

TOTAL = node("call_method", "total", "sum", REF)
OUTPUT = node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]})


def ref(name):
    return {"ref": name}


def call(name, target, *args, **kwargs):
    return node("call_function", name, target, *args, **kwargs)


def graph(*between, total=TOTAL):
    return TracedGraph("loss", [("logprobs", 1)], [LOGPROBS, *between, total, OUTPUT])


def checked(made, lengths=(100,), *, backward=True, **limits):
    """Check a loss as a pass does before it starts."""
    examples = [
        Example(np.zeros(length, np.int32), {"target_tokens": np.zeros(length, np.int64)})
        for length in lengths
    ]
    TracedSum(made, LossLimits(**limits)).check(examples, backward=backward)


def doubled(kind, levels=60):
    """Each value contains the previous one twice: few nodes, but 2 ** levels elements."""
    nodes = [call("x0", "operator.getitem", {"tuple": [1, 2]}, 0)]
    for level in range(1, levels):
        held = [ref(f"x{level - 1}")] * 2
        pair = {"tuple": held} if kind == "tuple" else held
        nodes.append(call(f"x{level}", "operator.getitem", {"tuple": [pair]}, 0))
    last = ref(f"x{levels - 1}")
    return graph(*nodes, call("same", "operator.eq", last, last))


@pytest.mark.parametrize("kind", ["tuple", "list"])
def test_values_that_double_at_each_node_are_refused(kind):
    with pytest.raises(tinkex.InvalidInputError, match="makes a"):
        checked(doubled(kind))


def nested(depth):
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        (nested(9), "deeper than 8"),
        (nested(500), "deeper than 8"),
        ([1] * 20_001, "20000 elements"),
        ("x" * 201, "200 characters"),
        (1 << 54, "number above"),
        ({"lambda": 1}, "kind 'lambda'"),
        ({"tuple": 1}, "kind 'tuple'"),
        ({"slice": [1, 2, 3, 4]}, "kind 'slice'"),
        ({"dtype": "complex64"}, "kind 'dtype'"),
        ({"dtype": ["float32"]}, "kind 'dtype'"),
        ({"ref": ["logprobs"]}, "kind 'ref'"),
        ({"float": "1" * 50}, "kind 'float'"),
        ({"float": ["nan"]}, "kind 'float'"),
        ({}, "kind ''"),
    ],
)
def test_arguments_of_a_node_are_bounded(argument, complaint):
    with pytest.raises(tinkex.InvalidInputError, match=complaint) as refused:
        check_graph(graph(call("x", "torch.exp", argument)))
    assert refused.value.field == "graph"


def outer(levels):
    """x ⊗ x ⊗ …: each level multiplies the elements by the length."""
    nodes, left = [], REF
    for level in range(levels):
        column = node("call_method", f"column{level}", "unsqueeze", left, -1)
        nodes += [column, call(f"x{level}", "torch.mul", ref(f"column{level}"), REF)]
        left = ref(f"x{level}")
    return graph(*nodes, total=node("call_method", "total", "sum", left))


@pytest.mark.parametrize("backward", [True, False])
def test_loss_that_needs_too_much_memory_is_refused_before_it_allocates(backward):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(tinkex.InvalidInputError, match="setting max_loss_bytes"):
        checked(outer(6), backward=backward, max_loss_work=1 << 62)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # kilobytes
    checked(outer(1), backward=backward)


def test_loss_that_computes_too_much_is_refused():
    with pytest.raises(tinkex.InvalidInputError, match="setting max_loss_work"):
        checked(outer(2), lengths=(500,), max_loss_bytes=1 << 62, max_loss_work=10**8)


def test_work_is_counted_over_all_examples_of_a_pass():
    checked(outer(1), lengths=(100,) * 10, max_loss_work=4_000_000)
    with pytest.raises(tinkex.InvalidInputError, match=r"max_loss_work \(at data\.\d+\)"):
        checked(outer(1), lengths=(100,) * 100, max_loss_work=4_000_000)


def test_matrix_product_counts_its_multiplications():
    square = [
        node("call_method", "column", "unsqueeze", REF, 1),
        call("matrix", "operator.mul", ref("column"), REF),
        call("product", "operator.matmul", ref("matrix"), ref("matrix")),
    ]
    made = graph(*square, total=node("call_method", "total", "sum", ref("product")))
    checked(made, lengths=(512,), max_loss_work=10**9)
    with pytest.raises(tinkex.InvalidInputError, match="max_loss_work"):
        checked(made, lengths=(512,), max_loss_work=10**8)


def test_loss_with_too_many_torch_operations_is_refused():
    made = graph(*(call(f"x{n}", "torch.diff", REF, 100_000) for n in range(50)))
    with pytest.raises(tinkex.InvalidInputError, match="operations for one example"):
        checked(made, lengths=(2000,))


def test_memory_that_grows_with_shorter_examples_is_measured_exactly():
    """Here fewer positions need more memory, so rounded-up shapes are not an upper limit."""
    nodes = [
        node("call_method", "length", "numel", REF),
        call("size", "operator.floordiv", 10_000_000_000, ref("length")),
        node("call_method", "full", "new_full", REF, {"tuple": [ref("size")]}, 0.0),
    ]
    checked(graph(*nodes), lengths=(1000,))
    with pytest.raises(tinkex.InvalidInputError, match=r"max_loss_bytes \(at data\.1\)"):
        checked(graph(*nodes), lengths=(1000, 10))


def test_values_are_freed_after_their_last_use():
    chain = [call("x0", "torch.exp", REF)]
    chain += [call(f"x{n}", "torch.exp", ref(f"x{n - 1}")) for n in range(1, 100)]
    total = node("call_method", "total", "sum", ref("x99"))
    one = 4 * 100_000
    checked(graph(*chain, total=total), lengths=(100_000,), backward=False, max_loss_bytes=3 * one)
    with pytest.raises(tinkex.InvalidInputError, match="max_loss_bytes"):  # autograd keeps them
        checked(graph(*chain, total=total), lengths=(100_000,), max_loss_bytes=3 * one)


def test_inputs_of_unequal_length_are_refused_before_the_pass():
    made = TracedGraph(
        "loss",
        [("logprobs", 1), ("old", 1)],
        [
            LOGPROBS,
            node("placeholder", "old", "old"),
            call("x", "torch.sub", REF, ref("old")),
            TOTAL,
            OUTPUT,
        ],
    )
    inputs: dict[str, Array] = {"target_tokens": np.zeros(5, int), "old": np.zeros(4, np.float32)}
    with pytest.raises(tinkex.InvalidInputError, match=r"failed at x \(torch\.sub\)"):
        TracedSum(made, LossLimits()).check([Example(np.zeros(5, np.int32), inputs)], backward=True)


def masked(logprobs, advantages, old):
    kept = logprobs[advantages > 0]
    also = torch.masked_select(logprobs - old, advantages > 0)
    return -(kept * also).sum(), {"custom/kept:sum": (advantages > 0).sum()}


def test_loss_that_selects_by_a_mask_trains_as_in_the_client(tinkex_tiny):
    client = tinkex_tiny.client()
    handle = client.create_custom_loss(masked, RANKS).result()
    at_service, final = stepped(client, handle)

    def here(data, logprobs):
        losses = []
        for datum, logp in zip(data, logprobs, strict=True):
            inputs = [datum.loss_fn_inputs[name].to_torch() for name in ("advantages", "old")]
            losses.append(masked(logp, *inputs)[0])
        return sum(losses), {}

    in_client, expected = stepped(client, here)
    for ours, theirs in zip(at_service, in_client, strict=True):
        assert ours["loss:sum"] == pytest.approx(theirs["loss:sum"], abs=1e-3)
    for ours, theirs in zip(final, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("option", ["out", "pin_memory"])
def test_option_that_hides_memory_is_refused(option):
    made = graph(call("x", "torch.mul", REF, REF, **{option: REF}))
    with pytest.raises(tinkex.InvalidInputError, match=option):
        check_graph(made)


def test_device_argument_is_ignored():
    """The check allocates nothing on another device, and the run does not fail."""
    made = graph(
        node("call_method", "moved", "to", REF, "cpu"),
        node("call_method", "also", "to", ref("moved"), {"device": "cuda:0"}),
        call("zeros", "torch.zeros_like", ref("also"), device="cuda"),
        node("call_method", "typed", "to", REF, "cpu", {"dtype": "float64"}),
        node("call_method", "full", "new_full", REF, {"tuple": [3]}, 0.0, device="cpu"),
        call("picked", "operator.getitem", ref("also"), [0, 2, 1]),
        total=node("call_method", "total", "sum", ref("picked")),
    )
    checked(made)
    loss, _ = TracedLoss(made)(torch.arange(4.0, requires_grad=True), {})
    assert loss.item() == 3.0
    huge = graph(node("call_method", "x", "new_full", REF, {"tuple": [1 << 40]}, 0.0, device="cpu"))
    with pytest.raises(tinkex.InvalidInputError, match="max_loss_bytes"):
        checked(huge)
