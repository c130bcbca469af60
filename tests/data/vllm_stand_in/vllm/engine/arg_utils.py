from dataclasses import dataclass
from typing import Any


@dataclass
class EngineArgs:
    model: str
    dtype: str
    max_model_len: int
    enable_lora: bool
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    gpu_memory_utilization: float
    logprobs_mode: str
    max_logprobs: int
    enforce_eager: bool
    enable_prefix_caching: bool
    extra: Any = None
