# SPDX-License-Identifier: Apache-2.0
"""torch: a pipeline stage in DistributedDataParallel fails in its second step (4 gloo ranks)."""

import os

import torch
from torch.distributed import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel


def train(rank: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4"}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage = mesh.get_local_rank("pipeline")
    layer = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=mesh.get_group("data"))
    piece = PipelineStage(layer, stage, 2, torch.device("cpu"), group=mesh.get_group("pipeline"))
    schedule = ScheduleGPipe(piece, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    inputs = [torch.ones(4, 8)] if stage == 0 else []
    targets = {"target": torch.zeros(4, 8)} if stage == 1 else {}
    result = "the second step is taken"
    schedule.step(*inputs, **targets)
    try:
        schedule.step(*inputs, **targets)
    except RuntimeError as error:
        result = str(error.__cause__).partition(", please")[0].replace("/__w/pytorch/pytorch/", "")
    if rank == 0:
        print(f"expected: the second step is taken\ngot: {result}", flush=True)
    os._exit(0)  # The other stage waits for a stage that has failed.


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
    start_processes(train, nprocs=4, start_method="fork")
