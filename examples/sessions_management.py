"""Sessions: list them, show the models and samplers of one, and count those of others that you may see.

python examples/sessions_management.py [--base-url local] [--base-model tinkex/tiny]
"""

from __future__ import annotations

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__)
    with tinkex.ServiceClient(
        {"recipe": "cat"}, base_url=options.base_url, display_name="sessions example"
    ) as service:
        training = service.create_lora_training_client(options.base_model, rank=4)
        service.create_sampling_client(base_model=options.base_model)
        session_id = service.holder.get_session_id()

        rest = service.create_rest_client()
        for each in rest.list_sessions(limit=5).result().sessions:
            print(f"{each}{'  ← this one' if each == session_id else ''}")
        found = rest.get_session(session_id).result()
        print(f"named {found.display_name!r}, metadata {found.user_metadata}")
        print(f"trains {found.training_run_ids}\nsamples {found.sampler_ids}")

        owned = rest.list_sessions(limit=1000).result().sessions
        accessible = rest.list_sessions(limit=1000, access_scope="accessible").result().sessions
        print(f"{len(owned)} sessions are mine, {len(accessible)} are visible to me.")
    assert session_id in owned
    assert found.training_run_ids == [training.model_id]
    assert len(found.sampler_ids) == 1
    assert found.user_metadata == {"recipe": "cat"}


if __name__ == "__main__":
    main()
