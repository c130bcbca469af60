"""The protocol with raw requests: open a session, create a model and poll for it, get its info, unload it.

python examples/model_info_and_unload.py [--base-url local] [--base-model tinkex/tiny]

The typed methods are `service.create_lora_training_client(…)`, `training.get_info()` and `training.unload_model()`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__)
    with tinkex.ServiceClient(base_url=options.base_url) as service:

        def post(path: str, **body: Any) -> Any:
            return service.http.post(f"/api/v1/{path}", body).result()

        def promised(promise: Any) -> Any:
            """Poll until the result is there; the service answers try_again while it is not."""
            while "request_id" in promise:
                found = post("retrieve_future", request_id=promise["request_id"])
                if found.get("type") != "try_again":
                    return found
                print(f"  not yet: {found}")
            return promise

        session = post("create_session", tags=["example"], sdk_version=version("tinkex"))
        print(f"session {session['session_id']}")
        promise = post(
            "create_model",
            session_id=session["session_id"],
            model_seq_id=0,
            base_model=options.base_model,
            lora_config={"rank": 8},
        )
        model_id = promised(promise)["model_id"]
        print(f"model {model_id}")

        info = post("get_info", model_id=model_id)
        for name, value in info.items():
            print(f"  {name}: {value}")

        unloaded = promised(post("unload_model", model_id=model_id))
        print(f"unloaded {unloaded}; checkpoints of the model would be kept")
    assert info["lora_rank"] == 8
    assert unloaded["model_id"] == model_id
    assert info["model_data"]["model_name"] == options.base_model


if __name__ == "__main__":
    main()
