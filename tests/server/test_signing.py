"""Signed links: what opens, what is refused, and the secret file behind them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from urllib.parse import parse_qs

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tinkex.errors import ConfigError, PermissionDeniedError
from tinkex.server.signing import Signer

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
PATH = "/api/v1/runs/r1/checkpoints/weights/c1/archive"

moments = st.datetimes(datetime(1970, 1, 2), datetime(9998, 1, 1), timezones=st.just(UTC))


def parts(query):
    values = parse_qs(query, strict_parsing=True)
    assert sorted(values) == ["expires", "signature"]
    return values["expires"][0], values["signature"][0]


def names_in(directory):
    return sorted(entry.name for entry in directory.iterdir())


@given(st.binary(min_size=1), st.text(), moments, st.timedeltas(timedelta(seconds=1), 99 * HOUR))
def test_a_signed_link_opens_its_path_until_it_expires(secret, path, expires_at, early):
    signer = Signer(secret)
    expires, signature = parts(signer.sign(path, expires_at))
    signer.check(path, expires, signature, expires_at - early)
    with pytest.raises(PermissionDeniedError, match="expired"):
        signer.check(path, expires, signature, expires_at)


@given(st.text(), st.text(), st.text(), st.text())
def test_any_change_to_a_signed_link_is_refused(path, other_path, other_expires, forged):
    signer = Signer(b"secret")
    expires, signature = parts(signer.sign(path, NOON + HOUR))
    assume(path != other_path and expires != other_expires and signature != forged)
    for asked, until, proof in (
        (other_path, expires, signature),
        (path, other_expires, signature),
        (path, expires, forged),
        (path, "", ""),
    ):
        with pytest.raises(PermissionDeniedError, match="signature is wrong"):
            signer.check(asked, until, proof, NOON)


def test_a_later_expiry_invalidates_the_signature():
    signer = Signer(b"secret")
    expires, signature = parts(signer.sign(PATH, NOON))
    with pytest.raises(PermissionDeniedError, match="signature"):
        signer.check(PATH, str(int(expires) + 3600), signature, NOON)


def test_part_of_the_path_cannot_move_into_the_expiry():
    signer = Signer(b"secret")
    expires, signature = parts(signer.sign("first\nsecond", NOON + HOUR))
    with pytest.raises(PermissionDeniedError, match="signature"):
        signer.check("second", f"{expires}\nfirst", signature, NOON)


def test_a_link_signed_with_another_secret_is_refused():
    expires, signature = parts(Signer(b"one").sign(PATH, NOON + HOUR))
    with pytest.raises(PermissionDeniedError, match="signature"):
        Signer(b"two").check(PATH, expires, signature, NOON)


def test_expiry_may_be_in_any_time_zone_but_not_naive():
    signer = Signer(b"secret")
    elsewhere = NOON.astimezone(timezone(timedelta(hours=9)))
    assert signer.sign(PATH, elsewhere) == signer.sign(PATH, NOON)
    with pytest.raises(TypeError):
        signer.sign(PATH, NOON.replace(tzinfo=None))


def test_a_refusal_is_403_and_shows_no_secret():
    signer = Signer(b"very secret")
    expires, signature = parts(signer.sign(PATH, NOON + HOUR))
    with pytest.raises(PermissionDeniedError) as caught:
        signer.check(PATH, expires, "0" * 64, NOON)
    assert caught.value.status_code == 403
    assert signature not in str(caught.value)
    assert "secret" not in repr(signer)


def test_the_secret_is_created_once_and_only_its_owner_can_read_it(tmp_path):
    file = tmp_path / "state" / "secret"
    link = Signer.from_file(file).sign(PATH, NOON)
    assert len(file.read_bytes()) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Signer.from_file(file).sign(PATH, NOON) == link
    assert names_in(file.parent) == ["secret"]


def test_services_that_start_at_the_same_time_share_one_secret(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        signers = list(pool.map(Signer.from_file, [tmp_path / "secret"] * 8))
    assert len({signer.sign(PATH, NOON) for signer in signers}) == 1
    assert names_in(tmp_path) == ["secret"]


@pytest.mark.parametrize("length", [0, 31])
def test_a_short_secret_is_refused_and_not_overwritten(tmp_path, length):
    file = tmp_path / "secret"
    file.write_bytes(b"x" * length)
    with pytest.raises(ConfigError, match=f"{length} bytes"):
        Signer.from_file(file)
    assert file.read_bytes() == b"x" * length
