"""Ask a service whether it takes heartbeats where clients send them, and nowhere else.

python examples/heartbeat_probe.py [--base-url local]

A service that has moved them would let every session expire, some hours later and without a word.
"""

from __future__ import annotations

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        session_id = service.holder.get_session_id()
        answers = {
            path: status(service, path, {"session_id": session_id})
            for path in ("/api/v1/session_heartbeat", "/api/v1/heartbeat")
        }
    for path, answer in answers.items():
        print(f"{answer}  POST {path}")
    assert list(answers.values()) == [200, 404]


def status(service: tinkex.ServiceClient, path: str, body: dict[str, str]) -> int | None:
    try:
        return service.http.with_raw_response("POST", path, body=body).result().status_code
    except tinkex.APIStatusError as error:
        return error.status_code


if __name__ == "__main__":
    main()
