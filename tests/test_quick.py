from __future__ import annotations

import pytest

from .quick import HEAVY, Refusing


def test_every_file_left_out_of_a_quick_run_exists():
    assert [str(path) for path in HEAVY if not path.exists()] == []


@pytest.mark.parametrize("name", ["torch", "transformers", "peft"])
def test_a_quick_test_that_imports_torch_is_told_what_to_do(name):
    with pytest.raises(ModuleNotFoundError, match=f"may not import {name}: mark the test `heavy`"):
        Refusing().find_spec(name, None)
    assert Refusing().find_spec("json", None) is None
