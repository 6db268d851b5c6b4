# SPDX-License-Identifier: Apache-2.0
"""transformers: under Ulysses the gradient is sp_size times too large in ZeRO-1 and 2 (gloo)."""

import os

import deepspeed
import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.multiprocessing import start_processes
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "MASTER_ADDR": "127.0.0.1"}
os.environ["MASTER_PORT"] = str(20000 + os.getpid() % 10000)
os.environ["PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"] = "sdpa"
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # It would be compiled.
ROW = dict.fromkeys(["input_ids", "position_ids", "labels"], torch.arange(64))
ONE_STEP = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True}


def train(rank: int, stage: int) -> None:
    options = {}
    if stage > 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
        zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        mesh = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
        options = {"deepspeed": zero, "parallelism_config": mesh}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=64))
    arguments = TrainingArguments(per_device_train_batch_size=1, **ONE_STEP, **options)
    trainer = Trainer(model, arguments, train_dataset=[ROW])
    trainer.train()
    if rank == 0:
        name = f"got, ZeRO-{stage}" if stage > 0 else "expected, one process"
        print(f"{name}: {trainer.state.log_history[0]['grad_norm']:.4f}")


for number, ranks in ((0, 1), (1, 2), (2, 2), (3, 2)):
    start_processes(train, (number,), nprocs=ranks, start_method="fork")
