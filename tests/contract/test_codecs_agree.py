import pytest

pytestmark = pytest.mark.contract


def test_versions(oldest, newest):
    assert oldest.ask("version") == "0.7.0"
    assert newest.ask("version") == "0.36.0"
