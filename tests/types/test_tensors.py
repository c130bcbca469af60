import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.strategies import arrays, sparse_tensors, tensors, topk_rows
from tests.types import refuses
from tinkex.types import (
    PromptAltTokens,
    SampleRequest,
    TensorData,
    TopkLogprobs,
    check_precision_loss,
    dtype_of,
)
from tinkex.types.tensors import tensor_from_object, tensor_to_object

# -- contents -------------------------------------------------------------------------------


def test_holds_a_flat_list_without_shape():
    tensor = TensorData([1, 2, 3], "int64")
    assert (tensor.data, tensor.dtype, tensor.shape) == ([1, 2, 3], "int64", None)
    assert tensor.tolist() == [1, 2, 3]
    assert len(tensor) == 3
    assert not tensor.is_sparse


def test_holds_a_flat_list_with_its_shape():
    tensor = TensorData(data=[1, 2, 3, 4, 5, 6], dtype="float32", shape=[2, 3])
    assert tensor.data == [1, 2, 3, 4, 5, 6]
    assert tensor.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert len(tensor) == 2


def test_data_is_always_flat():
    assert TensorData([[1, 2], [3, 4]], "int64").data == [1, 2, 3, 4]


def test_dtype_is_inferred_when_left_out():
    assert TensorData([1, 2]).dtype == "int64"
    assert TensorData([1, 2.5]).dtype == "float32"
    assert TensorData(np.arange(3, dtype=np.int16)).dtype == "int64"
    assert TensorData([]).dtype == "float32"


@pytest.mark.parametrize("data", [[[1.0, 2.0, 3.0]] * 2, np.ones((2, 3), np.float32)])
def test_data_with_several_dimensions_gets_a_shape(data):
    tensor = TensorData(data)
    assert tensor.shape == [2, 3]
    assert tensor_from_object(tensor_to_object(tensor)) == tensor


def test_a_scalar_has_the_empty_shape():
    tensor = TensorData.from_numpy(np.array(2.5))
    assert (tensor.shape, tensor.data, len(tensor)) == ([], [2.5], 1)
    assert tensor.to_numpy().ndim == 0


def test_integers_become_floats_but_never_the_other_way():
    assert TensorData([1, 2], "float32").data == [1.0, 2.0]
    assert TensorData(np.array([1.0, 2.0]), "int64").data == [1, 2]
    with refuses("data", "expected integers"):
        TensorData([1.5], "int64")


def test_repr_is_short_and_says_dtype_shape_and_layout():
    text = repr(TensorData(np.zeros(10_000, np.float32), "float32", [100, 100]))
    assert len(text) < 100
    assert "float32" in text
    assert "[100, 100]" in text
    assert "sparse" in repr(TensorData([1], "int64", [1, 9], [0, 1], [3]))


@given(arrays(min_dims=0))
def test_equality_is_by_dtype_shape_and_numbers(array):
    tensor = TensorData.from_numpy(array)
    assert tensor == TensorData.from_numpy(array.copy())
    assert tensor != TensorData(array.reshape(-1), str(array.dtype), [*array.shape, 1])  # type: ignore[arg-type]
    assert tensor != array.tolist()


def test_nan_equals_nan():
    assert TensorData([float("nan")], "float32") == TensorData([float("nan")], "float32")


# -- memory --------------------------------------------------------------------------------------


@given(arrays(min_dims=0))
def test_numpy_arrays_of_a_wire_dtype_are_not_copied(array):
    for tensor in (
        TensorData.from_numpy(array),
        TensorData(array, str(array.dtype), array.shape),  # type: ignore[arg-type]
    ):
        if array.size:
            assert np.shares_memory(tensor.values, array)
            assert np.shares_memory(tensor.to_numpy(), array)


def test_torch_tensors_of_a_wire_dtype_are_not_copied():
    tensor = torch.arange(6, dtype=torch.int64)
    assert np.shares_memory(TensorData.from_torch(tensor).values, tensor.numpy())


def test_to_torch_returns_a_copy():
    array = np.zeros(3, np.float32)
    TensorData.from_numpy(array).to_torch().add_(1)
    assert array.tolist() == [0, 0, 0]


# -- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numpy_dtype", "dtype"),
    [
        (np.float16, "float32"),
        (np.float32, "float32"),
        (np.float64, "float32"),
        (np.int8, "int64"),
        (np.int32, "int64"),
        (np.int64, "int64"),
        (np.uint8, "int64"),
        (np.uint64, "int64"),
        (np.dtype(">i4"), "int64"),
        (np.dtype(">f8"), "float32"),
    ],
)
def test_numpy_dtypes_become_int64_or_float32(numpy_dtype, dtype):
    tensor = TensorData.from_numpy(np.array([1, 2], numpy_dtype))
    assert (tensor.dtype, tensor.shape, tensor.data) == (dtype, [2], [1, 2])
    assert tensor.values.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    "array",
    [
        np.array([True]),
        np.array([1j]),
        np.array(["a"]),
        np.array([None]),
        np.array(["2026-01-01"], "M8[D]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_error_names_the_unsupported_numpy_dtype(array):
    with refuses("dtype", f"unsupported dtype {array.dtype.name.partition('[')[0]}"):
        TensorData.from_numpy(array)


@pytest.mark.parametrize(
    ("torch_dtype", "dtype"),
    [
        (torch.bfloat16, "float32"),
        (torch.float16, "float32"),
        (torch.float32, "float32"),
        (torch.float64, "float32"),
        (torch.bool, "int64"),
        (torch.uint8, "int64"),
        (torch.int32, "int64"),
        (torch.int64, "int64"),
    ],
)
def test_torch_dtypes_become_int64_or_float32(torch_dtype, dtype):
    tensor = TensorData.from_torch(torch.tensor([[0, 1]], dtype=torch_dtype))
    assert (tensor.dtype, tensor.shape, tensor.data) == (dtype, [1, 2], [0, 1])


def test_torch_gradients_layouts_and_strides_do_not_matter():
    tensor = torch.tensor([[0.0, 2.0], [3.0, 0.0]], requires_grad=True)
    expected = TensorData([0, 2, 3, 0], "float32", [2, 2])
    assert TensorData.from_torch(tensor) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse layouts beta
        assert TensorData.from_torch(tensor.detach().to_sparse_csr()) == expected
        assert TensorData.from_torch(tensor.detach().to_sparse()) == expected
    assert TensorData.from_torch(tensor.T).tolist() == [[0, 3], [2, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_torch_round_trip(dtype):
    tensor = torch.arange(12, dtype=dtype).reshape(3, 4)
    again = TensorData.from_torch(tensor).to_torch()
    assert again.dtype == dtype
    assert torch.equal(again, tensor)


def test_precision_loss_is_reported_and_warned_about():
    assert check_precision_loss(np.float64) == (
        "float32",
        "float64 is narrowed to float32: precision loss",
    )
    target, reason = check_precision_loss(np.uint64) or ("", "")
    assert (target, "overflow" in reason) == ("int64", True)
    assert check_precision_loss(np.float32) is check_precision_loss(np.int32) is None
    with pytest.warns(UserWarning, match="precision loss"):
        assert dtype_of(np.float64, quiet=False) == "float32"
    assert dtype_of(np.float64) == "float32"


# -- compressed sparse rows ----------------------------------------------------------------------


def test_sparse_tensors_list_their_values_by_row():
    tensor = TensorData([5, 7], "int64", [3, 4], [0, 1, 1, 2], [2, 0])
    assert tensor.is_sparse
    assert (tensor.data, tensor.sparse_crow_indices, tensor.sparse_col_indices) == (
        [5, 7],
        [0, 1, 1, 2],
        [2, 0],
    )
    assert tensor.tolist() == [[0, 0, 5, 0], [0, 0, 0, 0], [7, 0, 0, 0]]
    assert tensor.tolist(pad_value=-1)[1] == [-1, -1, -1, -1]
    assert tensor.to_torch().tolist() == tensor.tolist()
    assert len(tensor) == 3


@given(
    npst.arrays(
        np.int64,
        npst.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=8),
        elements=st.sampled_from([0, 0, 0, 0, 1, -7, 2**40]),
    )
)
def test_from_torch_sparse_round_trips(array):
    tensor = TensorData.from_torch_sparse(torch.from_numpy(array))
    assert np.array_equal(tensor.to_numpy(), array)
    rows, columns = array.shape
    smaller = (rows + 1) + 2 * np.count_nonzero(array) < rows * columns
    assert tensor.is_sparse == smaller


def test_from_torch_sparse_can_leave_out_another_pad_value():
    dense = torch.full((4, 8), -1.0)
    dense[2, 3] = 0.0
    tensor = TensorData.from_torch_sparse(dense, pad_value=-1)
    assert (tensor.is_sparse, tensor.data) == (True, [0.0])
    assert torch.equal(tensor.to_torch(pad_value=-1), dense)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2, 2)])
def test_from_torch_sparse_leaves_other_than_two_dimensions_dense(shape):
    made = TensorData.from_torch_sparse(torch.zeros(shape))
    assert made == TensorData.from_torch(torch.zeros(shape))
    assert not made.is_sparse


@given(sparse_tensors())
def test_sparse_and_dense_agree(tensor):
    crow, col = tensor.indices
    expected = np.full(tensor.shape, -1, tensor.values.dtype)
    for row in range(tensor.shape[0]):
        listed = slice(crow[row], crow[row + 1])
        expected[row, col[listed]] = tensor.values[listed]
    assert np.array_equal(tensor.to_numpy(pad_value=-1), expected)


# -- other forms ---------------------------------------------------------------------------------


@given(tensors)
def test_object_form_round_trip(tensor):
    written = tensor_to_object(tensor)
    assert tensor_from_object(written) == tensor
    assert None not in written.values()


@given(tensors)
def test_pickles_and_copies(tensor):
    for again in (pickle.loads(pickle.dumps(tensor)), copy.copy(tensor), copy.deepcopy(tensor)):
        assert again == tensor


def test_null_is_read_as_nan():
    tensor = tensor_from_object({"data": [None, 1.5], "dtype": "float32"})
    assert tensor == TensorData([float("nan"), 1.5], "float32")


def test_is_a_field_of_pydantic_models():
    fields: dict[str, Any] = {"prompt": {"chunks": []}, "sampling_params": {}}
    tensor = TensorData([1, 2], "int64", [1, 2])
    given_as_tensor = SampleRequest(**fields, target_prompt_logprobs=tensor)
    given_as_object = SampleRequest(
        **fields, target_prompt_logprobs={"data": [1, 2], "dtype": "int64", "shape": [1, 2]}
    )
    assert given_as_tensor == given_as_object
    assert given_as_tensor.target_prompt_logprobs is tensor
    assert SampleRequest.model_validate_json(given_as_tensor.model_dump_json()) == given_as_tensor


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "dtype", "words"),
    [
        (None, "int64", "required"),
        (5, "int64", "expected numbers, got int"),
        ("12", "int64", "expected numbers, got str"),
        (b"12", "int64", "expected numbers, got bytes"),
        ({1: 2}, "int64", "expected numbers, got dict"),
        ([1, "a"], "int64", "got 'a'"),
        ([1, None], "int64", "got None"),
        ([1j], "float32", "got 1j"),
        ([[1, "a"]], "int64", "got 'a'"),
        ([[1], [1, 2]], "int64", "ragged"),
        ([[1.0], [1.0, 2.0]], "float32", "ragged"),
        ([1, [2]], "float32", "ragged"),
        ([0.5], "int64", "expected integers"),
        ([float("nan")], "int64", "expected integers"),
        ([float("inf")], "int64", "does not fit"),
        ([2**63], "int64", "does not fit"),
        ([1e39], "float32", "does not fit"),
        ([float("inf"), -1e308], "float32", "does not fit"),
        ([2.0**63], "int64", "does not fit"),
        ([2**64], "int64", "does not fit"),
        (np.array([2**63], np.uint64), "int64", "does not fit in int64"),
        (np.array(["a"]), "int64", "unsupported dtype"),
        (torch.tensor([1.0], requires_grad=True), "float32", "requires grad"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "float32", "BFloat16"),
    ],
    ids=str,
)
def test_data_that_is_not_a_tensor_is_refused(data, dtype, words):
    with refuses("data", words):
        TensorData(data, dtype)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bfloat16", "", 3, []])
def test_unknown_dtypes_are_refused(dtype):
    with refuses("dtype", "must be int64 or float32"):
        TensorData([1], dtype)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([3], "needs 3 values, data has 4"),
        ([2, 3], "needs 6 values, data has 4"),
        ([], "needs 1 values"),
        ([-1], "0 or more"),
        ([2.0, 2], "0 or more"),
        ([True, 4], "0 or more"),
        (["4"], "0 or more"),
        (4, "list of sizes"),
        ("4", "list of sizes"),
        ({"4": 4}, "list of sizes"),
        ([1] * 70 + [4], "maximum supported dimension"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_shapes_that_do_not_fit_are_refused(shape, words):
    with refuses("shape", words):
        TensorData([1, 2, 3, 4], "int64", shape)


def test_shape_too_large_for_an_array_is_refused():
    with refuses("shape"):
        TensorData([], "int64", [0, 2**70])


@pytest.mark.parametrize(
    ("shape", "crow", "col", "field"),
    [
        (None, [0, 1], [0], "shape"),
        ([3], [0, 1], [0], "shape"),
        ([1, 1, 3], [0, 1], [0], "shape"),
        ([1, 3], None, [0], "sparse_crow_indices"),
        ([1, 3], [0, 1], None, "sparse_col_indices"),
        ([1, 3], [], [0], "sparse_crow_indices"),
        ([1, 3], [0], [0], "sparse_crow_indices"),
        ([1, 3], [1, 1], [0], "sparse_crow_indices"),
        ([1, 3], [0, 2], [0], "sparse_crow_indices"),
        ([2, 3], [0, 2, 1], [0], "sparse_crow_indices"),
        ([1, 3], [0, 1], [], "sparse_col_indices"),
        ([1, 3], [0, 1], [0, 1], "sparse_col_indices"),
        ([1, 3], [0, 1], [3], "sparse_col_indices"),
        ([1, 3], [0, 1], [-1], "sparse_col_indices"),
        ([1, 3], "ab", [0], "sparse_crow_indices"),
        ([1, 3], [0, 1], [0.5], "sparse_col_indices"),
    ],
)
def test_sparse_indices_that_do_not_fit_are_refused(shape, crow, col, field):
    with refuses(field):
        TensorData([7], "int64", shape, crow, col)


@pytest.mark.parametrize("value", [None, 5, [], {}, {"dtype": "int64"}])
def test_invalid_object_form_is_refused(value):
    with refuses("weights", "expected an object with data and dtype"):
        tensor_from_object(value, field="weights")


def test_errors_in_the_object_form_name_tensor_and_field():
    with refuses("weights", "shape: .*needs 3 values"):
        tensor_from_object({"data": [1], "dtype": "int64", "shape": [3]}, field="weights")


# -- top-k tables and alternative tokens ---------------------------------------------------------


@given(topk_rows)
def test_topk_rows_round_trip(rows):
    assert TopkLogprobs.from_rows(rows).tolist() == rows


def test_topk_rows_may_be_pairs_or_objects():
    pairs = TopkLogprobs.from_rows([[[5, -0.5], [6, -1.5]], None])
    objects = TopkLogprobs.from_rows(
        [[{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}], []]
    )
    assert pairs.tolist() == objects.tolist() == [[(5, -0.5), (6, -1.5)], None]


def test_topk_cells_without_a_token_are_marked():
    table = TopkLogprobs.from_rows([[[5, -0.5]], None])
    assert table.token_ids.tolist() == [[5], [0]]
    assert table.logprobs.tolist() == [[-0.5], [-99999.0]]


@pytest.mark.parametrize(
    "rows",
    [
        *[5, "ab", {"a": 1}, [5], ["ab"], [[5]], [[None]], [[[1]]], [[[1, 2, 3]]]],
        *[[[cell]] for cell in (["a", -1.0], [1, "x"], [1, None], [[1], 0], [2**31, -1.0])],
        [[{"token_id": 1}]],
    ],
    ids=str,
)
def test_malformed_topk_rows_are_refused(rows):
    with refuses("topk_logprobs", "expected a"):
        TopkLogprobs.from_rows(rows)


def test_prompt_alt_tokens_compare_by_value():
    def alternatives() -> PromptAltTokens:
        return PromptAltTokens(TensorData([1], "int64"), TensorData([-0.5], "float32"))

    assert alternatives() == alternatives()
