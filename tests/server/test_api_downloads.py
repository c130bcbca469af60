"""Checkpoint downloads over HTTP: expiring links and resumed transfers."""

from __future__ import annotations

import tarfile
from datetime import UTC, datetime, timedelta
from io import BytesIO

import pytest

from tinkex.testing import service

from .api import Api

HOUR = timedelta(hours=1)


class FakeClock:
    def __init__(self) -> None:
        self.moment = datetime(2026, 5, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.moment


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def running(clock):
    with service("fake", now=clock, monotonic=lambda: clock().timestamp()) as started:
        yield started


@pytest.fixture
def api(running):
    with Api(running.url) as user:
        yield user


def link(api: Api, path: str) -> str:
    """The download URL of a checkpoint."""
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    answer = api.get(f"training_runs/{run}/checkpoints/{checkpoint}/archive")
    assert answer.status_code == 302
    url: str = answer.headers["location"]
    return url


def file_links(api: Api, path: str) -> dict[str, str]:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    urls: dict[str, str] = api.got(
        f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls"
    )["urls"]
    return urls


def test_an_archive_can_be_downloaded_in_ranges(api):
    url = link(api, api.model().save("one"))
    whole = api.http.get(url)
    size = len(whole.content)
    assert whole.status_code == 200
    assert whole.headers["content-length"] == str(size)
    assert whole.headers["accept-ranges"] == "bytes"
    tag = whole.headers["etag"]
    again = api.http.get(url)
    assert (again.content, again.headers["etag"]) == (whole.content, tag)
    put_together = b""
    while len(put_together) < size:
        first = len(put_together)
        asked = {"range": f"bytes={first}-{first + 4999}", "if-range": tag}
        part = api.http.get(url, headers=asked)
        assert part.status_code == 206
        last = min(first + 5000, size) - 1
        assert part.headers["content-range"] == f"bytes {first}-{last}/{size}"
        assert part.headers["content-length"] == str(len(part.content)) == str(last - first + 1)
        assert part.headers["etag"] == tag
        put_together += part.content
    assert put_together == whole.content
    rest = api.http.get(url, headers={"range": f"bytes={size - 7}-"})
    assert (rest.status_code, rest.content) == (206, whole.content[-7:])


def test_an_unsatisfiable_range_is_416_and_a_changed_archive_is_sent_whole(api):
    model = api.model()
    path = model.save("one")
    url = link(api, path)
    whole = api.http.get(url)
    beyond = api.http.get(url, headers={"range": "bytes=99999999-"})
    assert beyond.status_code == 416
    assert beyond.headers["content-range"] == f"bytes */{len(whole.content)}"
    model.step()
    assert model.save("one", overwrite=True) == path
    stale = {"range": "bytes=1000-", "if-range": whole.headers["etag"]}
    changed = api.http.get(url, headers=stale)
    assert changed.status_code == 200
    assert changed.headers["etag"] != whole.headers["etag"]
    with tarfile.open(fileobj=BytesIO(changed.content)) as tar:
        assert "adapter_model.safetensors" in tar.getnames()


def test_head_of_an_archive_gives_its_size_and_tag(api):
    url = link(api, api.model().save("one"))
    whole, about = api.http.get(url), api.http.head(url)
    assert (about.status_code, about.content) == (200, b"")
    part = api.http.head(url, headers={"range": "bytes=100-"})
    assert part.status_code == 200
    for name in ("content-length", "etag", "accept-ranges", "content-type"):
        assert about.headers[name] == part.headers[name] == whole.headers[name]


def test_external_weights_can_be_downloaded_in_ranges(api):
    path = api.model().save("one", "save_weights_external")
    url = file_links(api, path)["adapter_model.safetensors"]
    whole = api.http.get(url)
    asked = {"range": "bytes=100-", "if-range": whole.headers["etag"]}
    part = api.http.get(url, headers=asked)
    assert (part.status_code, part.content) == (206, whole.content[100:])
    asked = {"range": "bytes=100-", "if-range": '"another"'}
    assert api.http.get(url, headers=asked).content == whole.content


def test_links_expire(api, clock):
    model = api.model()
    session = model.session_id
    urls = [
        link(api, model.save("one")),
        *file_links(api, model.save("two", "save_weights_external")).values(),
        api.got(f"sessions/{session}/trace_export")["url"],
    ]
    clock.moment += HOUR - timedelta(seconds=1)
    assert {api.http.get(url).status_code for url in urls} == {200}
    clock.moment += timedelta(seconds=1)
    for url in urls:
        refused = api.http.get(url)
        assert refused.status_code == 403
        assert "expired" in refused.json()["detail"]
        # Neither can a range of it, nor a link with a changed expiry.
        assert api.http.get(url, headers={"range": "bytes=0-"}).status_code == 403
        later = url.replace("expires=1", "expires=2")
        assert "signature is wrong" in api.http.get(later).json()["detail"]


def test_links_do_not_outlive_the_checkpoint(api, clock):
    model = api.model()
    path = model.save("one", ttl_seconds=3600)
    clock.moment += HOUR - timedelta(minutes=1)
    url = link(api, path)
    assert api.http.get(url).status_code == 200
    clock.moment += timedelta(minutes=1)  # the link has 59 minutes left; no cleanup has run yet
    assert api.http.get(url).status_code == 404


def test_a_link_opens_only_its_own_checkpoint(api, running):
    model = api.model()
    one, two = model.save("one"), model.save("two")
    url, other = link(api, one), link(api, two)
    query = url.partition("?")[2]
    for path in (
        other.partition("?")[0],
        url.partition("?")[0] + "/../two",
        url.partition("?")[0].replace("/one", "/%2e%2e"),
        f"{running.url}/files/{model.model_id}/training/one/tinkex.json",
        f"{running.url}/files/{model.model_id}/training/one/..%2f..%2fsecret",
    ):
        assert api.http.get(f"{path}?{query}").status_code in {403, 404}
    assert api.http.get(url.partition("?")[0]).status_code == 403


def test_files_outside_a_checkpoint_are_not_sent(api, running):
    """Even with a link that the service has signed."""
    path = api.model().save("one", "save_weights_external")
    (place,) = (running.data_dir / "checkpoints").glob("*/external/one")
    (place / "link").symlink_to(running.data_dir / "secret")
    for url in file_links(api, path).values():
        assert api.http.get(url).content != (running.data_dir / "secret").read_bytes()
