"""One token per request and step. Like vLLM, it keeps the first adapter that it was given under an integer."""

import hashlib
import json
import multiprocessing
import secrets
import time
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[Completion]
    finished: bool
    prompt_logprobs: Any


@dataclass
class Request:
    name: str
    prompt: list[int]
    params: Any
    weights: str
    drawn: int = 0


def weights_of(directory: str) -> str:
    return hashlib.sha256(Path(directory, "adapter_model.safetensors").read_bytes()).hexdigest()


@dataclass
class LLMEngine:
    arguments: Any
    shared: SharedMemory
    loras: dict[int, str] = field(default_factory=dict)
    #: By vLLM's own ids, of which callers do not learn: it appends to theirs, and answers and aborts by theirs.
    requests: dict[str, Request] = field(default_factory=dict)

    @classmethod
    def from_engine_args(cls, arguments: Any) -> "LLMEngine":
        config = json.loads(Path(arguments.model, "config.json").read_text())
        if config["architectures"] != ["LlamaForCausalLM"]:
            raise ValueError(f"Model architectures {config['architectures']} are not supported")
        # As vLLM starts its workers, which exchange values with it through shared memory.
        shared = SharedMemory(create=True, size=64)
        core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
        core.daemon = True
        core.start()
        return cls(arguments, shared)

    def add_lora(self, lora: Any) -> bool:
        config = json.loads(Path(lora.lora_path, "adapter_config.json").read_text())
        if config["r"] > self.arguments.max_lora_rank:
            raise ValueError(f"LoRA rank {config['r']} is greater than max_lora_rank")
        self.loras.setdefault(lora.lora_int_id, weights_of(lora.lora_path))
        return True

    def remove_lora(self, number: int) -> bool:
        return self.loras.pop(number, None) is not None

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> str:
        weights = "base"
        if lora_request is not None:
            # Evicted adapters are read again from their path, as vLLM does.
            number = lora_request.lora_int_id
            weights = self.loras.setdefault(number, weights_of(lora_request.lora_path))
        internal = f"{name}-{secrets.token_hex(4)}"
        self.requests[internal] = Request(name, prompt["prompt_token_ids"], params, weights)
        return internal

    def abort_request(self, names: list[str], internal: bool = False) -> None:
        for own, request in list(self.requests.items()):
            if (own if internal else request.name) in names:
                del self.requests[own]

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def step(self) -> list[RequestOutput]:
        outputs = []
        for internal, request in list(self.requests.items()):
            params = request.params
            text = f"{request.weights} {request.prompt} {params.seed} {request.drawn}"
            token = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 250
            request.drawn += 1
            stopped = token in params.stop_token_ids
            finished = stopped or request.drawn == params.max_tokens
            choices = {token: Logprob(-1.0)}
            choices |= {250 + rank: Logprob(-2.0 - rank) for rank in range(params.logprobs)}
            scores = None
            if params.prompt_logprobs is not None and request.drawn == 1:
                scores = [None, *({each: Logprob(-0.5)} for each in request.prompt[1:])]
            reason = None if not finished else "stop" if stopped else "length"
            completion = Completion([token], [choices], reason)
            outputs.append(RequestOutput(request.name, [completion], finished, scores))
            if finished:
                del self.requests[internal]
        return outputs
