"""torchtitan's own Trainer and debug model without a GPU; to be imported before its models are.

It takes a device module for granted that counts memory, attention that CPUs have no backward of, a
function of torch's nightly builds, and sums that gloo cannot scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

NO_MEMORY = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")


class CPU:
    """`torch.cpu` with what torchtitan asks an accelerator's module for."""

    get_device_name = staticmethod(lambda device=None: "cpu")
    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda device=None: SimpleNamespace(total_memory=1))
    memory_stats = staticmethod(lambda device=None: dict.fromkeys(NO_MEMORY, 0))
    reset_peak_memory_stats = empty_cache = staticmethod(lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


torchtitan.tools.utils.device_type = "cpu"
torchtitan.tools.utils.device_module = CPU()
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = lambda timeout, group: None  # type: ignore[attr-defined]

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, tokenizer_path: str):
        super().__init__()

    encode = decode = get_vocab_size = None  # abstract, and never called


class Data(BaseDataLoader):
    """Each token follows from the one before."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Any, dp_rank: int, seq_len: int, local_batch_size: int, **unused: Any
    ):
        self.rank, self.shape, self.batch = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(100 * self.batch + self.rank)
            self.batch += 1
            tokens = torch.randint(64, self.shape, generator=generator)
            for t in range(1, self.shape[1]):
                tokens[:, t] = (5 * tokens[:, t - 1] + 7) % 64
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch = state_dict["batch"]


def make_trainer(folder: str, steps: int, optimizer: Any) -> Trainer:
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.optimizer = optimizer
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Data.Config()
    config.training.seq_len, config.training.local_batch_size = 32, 4
    config.training.steps, config.training.disable_cuda_graphs = steps, True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable, config.checkpoint.interval = True, steps // 2
    config.validator.enable, config.dump_folder = False, folder
    trainer = Trainer(config)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return trainer
