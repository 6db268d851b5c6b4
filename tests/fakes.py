"""Stand-ins for what a launch would make."""

from types import SimpleNamespace

import torch
from accelerate import DistributedType


def fake_accelerator(**settings):
    """What recipes ask an Accelerator for: one process on a CPU without mixed precision, unless
    settings differ."""
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    plain = {
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "is_main_process": True,
        "is_fsdp2": False,
        "mixed_precision": "no",
        "native_amp": False,
        "device": torch.device("cpu"),
        "state": state,
    }
    return SimpleNamespace(**plain | settings)
