# SPDX-License-Identifier: Apache-2.0
"""accelerate: FSDP2 with tensor parallelism imports what transformers 5 has not (4 gloo ranks)."""

import os

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import start_processes

# accelerate sees no distributed job without a GPU
PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)


def prepare(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2)
    accelerator = Accelerator(parallelism_config=mesh, fsdp_plugin=plugin)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    result = "a prepared model"
    try:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    except ImportError as error:
        result = f"ImportError: {error.msg.partition(' (')[0]}"
    if rank == 0:
        print(f"expected: a prepared model\ngot: {result}")


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    start_processes(prepare, nprocs=4, start_method="fork")
