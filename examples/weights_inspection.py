"""Inspect a checkpoint: its run, base model and rank, its trained parts, and its download URL.

python examples/weights_inspection.py [--base-url local] [--base-model tinkex/tiny] [--path tinker://…]

Without `--path`, a checkpoint is created.
"""

from __future__ import annotations

import tinkex
from _shared import parsed

RANK = 8


def main() -> None:
    options = parsed(__doc__, path="")
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        path = options.path
        if not path:
            training = service.create_lora_training_client(
                options.base_model, rank=RANK, train_unembed=False
            )
            path = training.save_weights_for_sampler("inspected").result().path
        rest = service.create_rest_client()

        print("The latest runs:")
        for run in rest.list_training_runs(limit=3).result().training_runs:
            print(f"  {run.training_run_id}  {run.base_model}  rank {run.lora_rank}")
        run = rest.get_training_run_by_tinker_path(path).result()
        print(f"{path}\n  belongs to {run.training_run_id}, owned by {run.model_owner}")
        if run.last_sampler_checkpoint is not None:
            print(f"  latest sampler checkpoint: {run.last_sampler_checkpoint.tinker_path}")

        info = rest.get_weights_info_by_tinker_path(path).result()
        trained = {"mlp": info.train_mlp, "attn": info.train_attn, "unembed": info.train_unembed}
        print(f"  {info.base_model}, LoRA {info.is_lora}, rank {info.lora_rank}, trained {trained}")

        sampler = service.create_sampling_client(model_path=path)
        print(f"  base model of its sampler: {sampler.get_base_model()}")

        archive = rest.get_checkpoint_archive_url_from_tinker_path(path).result()
        print(f"  its archive can be downloaded until {archive.expires}")
    assert run.training_run_id in path
    assert info.is_lora
    if not options.path:
        assert info.lora_rank == run.lora_rank == RANK
        assert trained == {"mlp": True, "attn": True, "unembed": False}


if __name__ == "__main__":
    main()
