"""Checkpoints: list all, by page or by run; show one; change its expiry; delete it.

python examples/checkpoints_management.py [--base-url local] [--base-model tinkex/tiny]
"""

from __future__ import annotations

from collections.abc import Iterator

import tinkex
from _shared import parsed


def main() -> None:
    options = parsed(__doc__)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        training = service.create_lora_training_client(options.base_model, rank=8)
        state = training.save_state("one", ttl_seconds=86_400)  # deleted after one day
        weights = training.save_weights_for_sampler("one")  # kept
        paths = [state.result().path, weights.result().path]

        rest = service.create_rest_client()
        newest = rest.list_user_checkpoints(limit=3).result().checkpoints
        print("The newest three of all:")
        for each in newest:
            print(
                f"  {each.checkpoint_type:9} {each.size_bytes or 0:>9,} bytes  {each.tinker_path}"
            )
        total = sum(1 for _ in all_checkpoints(rest, page=50))
        print(f"{total} in total, fetched in pages of 50.")

        of_run = rest.list_checkpoints(training.model_id).result().checkpoints
        print(f"Of this run: {[each.checkpoint_id for each in of_run]}")
        info = rest.get_weights_info_by_tinker_path(paths[0]).result()
        print(f"{paths[0]}: {info.base_model}, rank {info.lora_rank}")

        expiry = {each.tinker_path: each.expires_at for each in of_run}
        print(f"The first expires at {expiry[paths[0]]}, the second {expiry[paths[1]] or 'never'}.")
        rest.set_checkpoint_ttl_from_tinker_path(paths[0], None).result()  # now both are kept
        kept = rest.list_checkpoints(training.model_id).result().checkpoints

        for path in paths:
            rest.delete_checkpoint_from_tinker_path(path).result()
        left = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {each.tinker_path for each in of_run} == set(paths)
    assert total >= 2
    assert expiry[paths[0]] is not None
    assert all(each.expires_at is None for each in kept)
    assert not left, "something was not deleted"
    print("Both are deleted.")


def all_checkpoints(rest: tinkex.RestClient, page: int) -> Iterator[tinkex.Checkpoint]:
    offset = 0
    while found := rest.list_user_checkpoints(page, offset).result().checkpoints:
        yield from found
        offset += len(found)


if __name__ == "__main__":
    main()
