# SPDX-License-Identifier: Apache-2.0
"""transformers: under Ulysses with ZeRO-1 and 2, the gradient is sp_size times too large."""

import os

import deepspeed
import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

# Without a GPU, DeepSpeed would compile collectives of its own and accelerate would see no ranks.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
gloo = staticmethod(lambda *_, **__: ("gloo", DistributedType.MULTI_GPU))
os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
os.environ["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] = "sdpa"
IDS = torch.arange(64)  # of one row, which serve as positions and labels too
LIMITS = {"max_steps": 1, "per_device_train_batch_size": 1, "max_grad_norm": 1e9}


def train(rank: int, stage: int, **options: object) -> None:
    if stage:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        os.environ |= ranks | {"MASTER_PORT": str(20000 + os.getppid() % 10000 + stage)}
        PartialState._prepare_backend = gloo
        zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        mesh = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
        options = {"deepspeed": zero, "parallelism_config": mesh}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64))
    rows = [{"input_ids": IDS, "position_ids": IDS, "labels": IDS}]
    trainer = Trainer(
        model,
        TrainingArguments(
            "out", logging_steps=1, report_to="none", save_strategy="no", **LIMITS, **options
        ),
        train_dataset=rows,
    )
    trainer.train()
    if rank == 0:
        print(f"stage {stage}: {trainer.state.log_history[0]['grad_norm']:.4f}")


if __name__ == "__main__":
    for stage, ranks in ((0, 1), (1, 2), (2, 2), (3, 2)):
        start_processes(train, (stage,), nprocs=ranks, start_method="fork")
