"""Check that a service accepts heartbeats at the path that clients use, and at no other path.

python examples/heartbeat_probe.py [--base-url local]

If a service moved the path, every session would silently expire some hours later.
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
