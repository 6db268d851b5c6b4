# SPDX-License-Identifier: Apache-2.0
"""deepspeed: Ulysses does not miss position ids that nobody gave, and is wrong (2 gloo ranks)."""

import os

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

# Without a GPU, DeepSpeed would compile collectives of its own and accelerate would see no ranks.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 10000)
os.environ["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] = "sdpa"


def compare(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    mesh = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero), parallelism_config=mesh)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "initializer_range": 0.5}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    expected = model(torch.arange(16)[None]).logits[0, -1, 0]
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    try:
        got = f"{engine(torch.arange(16).chunk(2)[rank][None]).logits[0, -1, 0]:.4f}"
    except AssertionError:
        got = "AssertionError"
    if rank == 1:
        print(f"expected: {expected:.4f} or AssertionError\ngot: {got}")


if __name__ == "__main__":
    start_processes(compare, nprocs=2, start_method="fork")
