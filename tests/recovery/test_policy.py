from __future__ import annotations

import pickle

import pytest

from tinkex.errors import InvalidInputError, TinkerError
from tinkex.recovery import RecoveryError, RecoveryPolicy

PATH = "tinker://r/weights/a"
WRONG = [
    ("enabled", "yes"),
    ("max_attempts", 0),
    ("max_attempts", True),
    ("max_attempts", 2.5),
    ("backoff", 0),
    ("backoff", "5"),
    ("max_backoff", -1.0),
    ("poll_interval", float("inf")),
    ("poll_interval", None),
    ("checkpoint_strategy", "newest"),
    ("checkpoint_strategy", {"path": PATH}),
    ("restore_optimizer", 1),
    ("on_recovery", "call me"),
    ("on_failure", 3),
]


def test_the_defaults_are_the_documented_ones():
    assert RecoveryPolicy() == RecoveryPolicy(
        enabled=False,
        max_attempts=3,
        backoff=5.0,
        max_backoff=60.0,
        poll_interval=30.0,
        checkpoint_strategy="latest",
        restore_optimizer=True,
        on_recovery=None,
        on_failure=None,
    )


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_invalid_value_is_refused(name, value):
    with pytest.raises(InvalidInputError) as refused:
        RecoveryPolicy(**{name: value})
    assert refused.value.field == name


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_invalid_value_in_a_setting_becomes_the_default_with_a_warning(name, value, caplog):
    policy = RecoveryPolicy.of({"enabled": True, name: value})
    assert getattr(policy, name) == getattr(RecoveryPolicy(enabled=name != "enabled"), name)
    assert f"recovery.{name}" in caplog.text


def test_a_setting_may_be_a_policy_a_mapping_or_nothing(caplog):
    policy = RecoveryPolicy(enabled=True, max_attempts=7)
    assert RecoveryPolicy.of(policy) is policy
    assert RecoveryPolicy.of({"enabled": True, "max_attempts": 7}) == policy
    assert RecoveryPolicy.of(None) == RecoveryPolicy()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [("max_atempts", "max_attempts"), ("backoff_ms", "use backoff, in seconds")],
)
def test_an_option_that_does_not_exist_is_refused(name, told):
    with pytest.raises(InvalidInputError, match=told) as refused:
        RecoveryPolicy.of({"enabled": True, name: 5})
    assert refused.value.field == f"recovery.{name}"


@pytest.mark.parametrize("strategy", ["latest", "best", PATH])
def test_strategies(strategy):
    assert RecoveryPolicy.of({"checkpoint_strategy": strategy}).checkpoint_strategy == strategy


def test_waits_double_up_to_the_maximum_until_the_last_attempt():
    policy = RecoveryPolicy(max_attempts=7, backoff=5, max_backoff=60)
    waits = [policy.wait_before_retry(TinkerError("x"), attempt) for attempt in range(1, 8)]
    assert waits == [5, 10, 20, 40, 60, 60, None]


def test_recovery_errors_are_not_retried():
    error = RecoveryError("r", "missing_checkpoint")
    assert RecoveryPolicy().wait_before_retry(error, 1) is None
    assert not error.retryable


def test_recovery_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(RecoveryError("r", "already_pending")))
    assert (error.run_id, error.reason) == ("r", "already_pending")
    assert "r cannot be recovered: it is already being recovered" in str(error)
