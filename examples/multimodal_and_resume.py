"""An image in a prompt; a run resumed with its optimizer state; deleting the checkpoint.

python examples/multimodal_and_resume.py [--base-url local] [--base-model tinkex/tiny] [--image FILE]
    [--expected-tokens N]

Text-only models, such as those of the local service, refuse the image with a reason; the example then continues.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import tinkex
from _shared import parsed
from tinkex.objectives import completion

DATA = [completion([65, 66, 67], [68, 69, 70])]
ADAM = tinkex.AdamParams(learning_rate=1e-2)


def main() -> None:
    options = parsed(__doc__, image="", expected_tokens=1)
    with tinkex.ServiceClient(base_url=options.base_url) as service:
        image = tinkex.ImageChunk(
            data=Path(options.image).read_bytes() if options.image else red_dot(),
            format="jpeg" if options.image.endswith(("jpg", "jpeg")) else "png",
            expected_tokens=options.expected_tokens,
        )
        prompt = tinkex.ModelInput.from_ints([65, 66]).append(image).append_int(67)
        sampler = service.create_sampling_client(base_model=options.base_model)
        try:
            drawn = sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=8)).result()
            print(f"The model read the image and sampled {drawn.sequences[0].tokens}")
        except tinkex.TinkerError as error:
            assert error.user_error, "an image should not break a service"
            print(f"The model does not accept images: {error}")

        training = service.create_lora_training_client(options.base_model, rank=8)
        before = [step(training) for _ in range(3)]
        saved = training.save_state("to-resume").result()
        expected = step(training)
        resumed = service.create_training_client_from_state_with_optimizer(saved.path)
        after = step(resumed)
        print(f"losses {before}, then {expected}; resumed from {saved.path}: {after}")

        service.create_rest_client().delete_checkpoint_from_tinker_path(saved.path).result()
        print("Deleted. Many at once: tinkex checkpoint delete PATH PATH …")
    assert abs(after - expected) < 1e-3, "the resumed run differs from the original"


def step(training: tinkex.TrainingClient) -> float:
    passed = training.forward_backward(DATA, "cross_entropy")
    training.optim_step(ADAM).result()
    return passed.result().metrics["loss:sum"]


def red_dot() -> bytes:
    """A PNG image of one red pixel."""

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixel = zlib.compress(b"\x00\xff\x00\x00")
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", pixel) + part(b"IEND", b"")


if __name__ == "__main__":
    main()
