from __future__ import annotations

import pytest
import torch

from tinkex.engine.devices import SMALL_MODEL, device_for, dtype_for, has_bfloat16

ZEN4 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni\n"
SAPPHIRE = "flags\t\t: avx512f amx_tile amx_bf16\n"
HASWELL = "flags\t\t: fpu avx avx2 fma\n"
#: Emulates bfloat16 with float32 instructions.
SKYLAKE = "flags\t\t: fpu avx2 avx512f avx512bw avx512vl\n"


@pytest.mark.parametrize(
    ("flags", "native"), [(ZEN4, True), (SAPPHIRE, True), (HASWELL, False), (SKYLAKE, False)]
)
def test_bfloat16_is_native_only_with_its_instructions(tmp_path, flags, native):
    file = tmp_path / "cpuinfo"
    file.write_text(flags)
    assert has_bfloat16("cpu", file) is native


def test_device_without_a_list_of_flags_has_no_native_bfloat16(tmp_path):
    assert not has_bfloat16("cpu", tmp_path / "missing")
    assert not has_bfloat16("mps")


def test_stated_type_is_used_for_every_model():
    assert dtype_for("float32", "cpu", 10**9) is torch.float32
    assert dtype_for("bfloat16", "cpu", 1) is torch.bfloat16


def test_auto_keeps_small_models_in_float32_and_follows_the_device_for_others():
    assert dtype_for("auto", "cpu", SMALL_MODEL - 1) is torch.float32
    expected = torch.bfloat16 if has_bfloat16("cpu") else torch.float32
    assert dtype_for("auto", "cpu", SMALL_MODEL) is expected


def test_stated_device_is_used():
    assert device_for("cpu") == "cpu"
