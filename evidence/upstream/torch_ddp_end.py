# SPDX-License-Identifier: Apache-2.0
"""torch: a model under DDP that outlives its process group can hang when it is freed (2 ranks)."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMES, SECONDS = 100, 30


def end_often(rank: int, folder: str) -> None:
    for number in range(TIMES):
        address = f"file://{folder}/{number}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
        del model
    open(f"{folder}/done{rank}", "w").close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(end_often, (folder,), nprocs=2, join=False)
        for process in ranks.processes:
            process.join(SECONDS)
        ended = [rank for rank in range(2) if os.path.exists(f"{folder}/done{rank}")]
        result = "both ranks end" if len(ended) == 2 else "a rank hangs"
        print(f"expected: both ranks end\ngot: {result}")
        for process in ranks.processes:
            process.kill()
