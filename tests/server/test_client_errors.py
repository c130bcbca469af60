"""Errors that are not of tinkex: clients receive the kind and a reference, the log has the rest."""

from __future__ import annotations

import errno
import os
import shutil
import threading

import pytest

from tinkex.engine.interface import EngineFailedError
from tinkex.errors import NotFoundError
from tinkex.server.client_errors import client_error
from tinkex.testing import service

from .api import Api


def test_text_of_an_unknown_error_is_only_in_the_log(caplog):
    told = client_error(KeyError("/home/ann/secret"), "optim_step", "the-id")
    assert told.message.startswith("The service failed on optim_step: KeyError. ")
    assert "the-id" in told.message
    assert "ann" not in told.message
    assert told.request_id == "the-id"
    assert (told.status_code, told.user_error) == (500, False)
    assert "reference the-id" in caplog.text
    assert "/home/ann/secret" in caplog.text


def test_kind_of_an_engine_error_is_that_in_the_engine(caplog):
    error = EngineFailedError("ZeroDivisionError: by zero", "ZeroDivisionError")
    error.add_note("In the engine: Traceback of it")
    assert "ZeroDivisionError. " in client_error(error, "forward").message
    assert "Traceback of it" in caplog.text


def test_lack_of_memory_says_what_to_do():
    told = client_error(MemoryError("you tried to allocate"), "forward_backward").message
    assert "too little memory for forward_backward" in told
    assert "fewer or shorter sequences" in told


def test_errors_of_tinkex_and_of_a_full_disk_keep_their_text(caplog):
    known = NotFoundError("There is no model 'm'.")
    assert client_error(known, "forward") is known
    full = client_error(OSError(errno.ENOSPC, "No space left", "/data/x"), "forward")
    assert full.message == (
        "The service cannot write to its disk (No space left). Free some space, then try again."
    )
    assert not caplog.records


@pytest.fixture(scope="module")
def broken():
    """A service whose directories for samplers and for training checkpoints are files."""
    with service("fake") as running, Api(running.url) as api:
        model = api.model()
        path = model.save("s", "save_weights_for_sampler")
        (of_run,) = (running.data_dir / "checkpoints").iterdir()
        (of_run / "training").write_bytes(b"")
        (running.data_dir / "samplers").write_bytes(b"")
        yield running, api, model, path


def check_hidden(running, caplog, text):
    assert str(running.data_dir) not in text
    assert "ExistsError" in text or "NotADirectoryError" in text
    reference = text.partition("reference ")[2].partition('"')[0].rstrip(".")
    assert reference
    assert f"reference {reference}" in caplog.text
    assert str(running.data_dir) in caplog.text
    assert "Traceback" in caplog.text


def test_refused_call_does_not_name_files_of_the_service(broken, caplog):
    running, api, _, path = broken
    asked = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": path}
    answer = api.post("create_sampling_session", asked)
    assert answer.status_code == 500
    check_hidden(running, caplog, answer.text)
    assert answer.headers["x-request-id"] in answer.text


def test_failed_request_does_not_name_files_of_the_service(broken, caplog):
    running, api, model, _ = broken
    promise = model.send("save_weights", path="a")
    failed = api.retrieve(promise)
    assert failed["category"] == "server"
    assert promise["request_id"] in failed["error"]
    check_hidden(running, caplog, failed["error"])


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_other_apis_do_not_name_files_of_the_service(broken, caplog, url, body):
    running, api, _, path = broken
    answer = api.http.post(url, json={"model": path, "max_tokens": 2, **body})
    assert answer.status_code == 500
    check_hidden(running, caplog, answer.text)


def test_playground_does_not_name_files_of_the_service(broken, caplog):
    running, api, _, path = broken
    answer = api.http.post("/local/playground", json={"model": path, "prompt": "a"})
    check_hidden(running, caplog, answer.text)


# -- checkpoints of others -------------------------------------------------------------------------


def sampling_session(bob, path):
    asked = {"session_id": bob.session(), "sampling_session_seq_id": 0, "model_path": path}
    answer = bob.post("create_sampling_session", asked)
    return answer.status_code, answer.text


def completion(bob, path):
    answer = bob.http.post("/v1/completions", json={"model": path, "prompt": "a"})
    return answer.status_code, answer.text


def copied(bob, path):
    answer = bob.post("copy_weights", {"source_path": path})
    return answer.status_code, answer.text


def loaded(bob, path):
    asked = {"session_id": bob.session(), "model_seq_id": 0, "path": path}
    failed = bob.retrieve(bob.told("load_weights", asked))
    return {"user": 404, "server": 500}[failed["category"]], failed["error"]


@pytest.mark.parametrize(
    ("use", "save", "kind", "step"),
    [
        (sampling_session, "save_weights_for_sampler", "sampler_weights", (os, "link")),
        (completion, "save_weights_for_sampler", "sampler_weights", (os, "link")),
        (loaded, "save_weights", "weights", (shutil, "copy2")),
        (copied, "save_weights", "weights", (shutil, "copy2")),
    ],
    ids=["sampling session", "completion", "load", "copy"],
)
def test_published_checkpoint_deleted_while_another_key_reads_it_is_not_found(
    two, monkeypatch, use, save, kind, step
):
    ann, bob = two
    owner = ann.model()
    path = owner.save(f"of-{use.__name__}", save)
    place = f"training_runs/{owner.model_id}/checkpoints/{kind}/of-{use.__name__}"
    ann.post(f"{place}/publish")
    reached, go_on, take = threading.Event(), threading.Event(), getattr(*step)

    def slow(source, target, **options):
        reached.set()
        assert go_on.wait(30)
        return take(source, target, **options)

    def delete():
        assert reached.wait(30)
        assert ann.ask("DELETE", place).status_code == 200
        go_on.set()

    monkeypatch.setattr(*step, slow)
    deleting = threading.Thread(target=delete)
    deleting.start()
    status, text = use(bob, path)
    deleting.join()
    assert status == 404
    assert "was deleted or replaced meanwhile" in text
    assert path in text
