from __future__ import annotations

import pytest

from .quick import HEAVY, Refusing


def test_every_file_left_out_of_a_quick_run_exists():
    assert [str(path) for path in HEAVY if not path.exists()] == []


@pytest.mark.parametrize("name", ["torch", "transformers", "peft"])
def test_import_of_torch_in_a_quick_test_names_the_heavy_marker(name):
    with pytest.raises(ModuleNotFoundError, match=f"may not import {name}: mark the test `heavy`"):
        Refusing().find_spec(name, None)
    assert Refusing().find_spec("json", None) is None
