# SPDX-License-Identifier: Apache-2.0
"""deepspeed: Ulysses drops the masks of packed documents and of left padding (2 gloo ranks)."""

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
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=1, use_cache=False))
    ids = torch.arange(16)[None]
    packed = {"input_ids": ids, "position_ids": ids % 8}  # two documents
    padded = {"input_ids": ids, "position_ids": ids, "attention_mask": (ids > 3).long()}
    expected = [model(**batch).logits[0, -1, 0] for batch in (packed, padded)]
    engine, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    mine = {name: whole.chunk(2, 1)[rank] for name, whole in packed.items()}
    got = [engine(**mine).logits[0, -1, 0], engine.module.eval()(**padded).logits[0, -1, 0]]
    for case, one, two in zip(("packed", "padded"), expected, got, strict=True):
        accelerator.on_last_process(print)(f"expected, {case}: {one:.4f}\ngot, {case}: {two:.4f}")


if __name__ == "__main__":
    start_processes(compare, nprocs=2, start_method="fork")
