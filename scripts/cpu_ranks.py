"""Start one rank of a rehearsal: make accelerate treat gloo CPU ranks as it treats GPUs, then run the recipe.

Not called by hand. `scripts/rehearse.py` lets `accelerate launch` start this file in every rank, with the recipe and
its arguments behind it. It is the only place in this project that changes accelerate, torch or deepspeed; every
change is one function below that says what upstream does. With REHEARSAL_DEVICE=cuda nothing is changed.
Measured with accelerate 1.15, torch 2.13, deepspeed 0.19.
"""

import importlib
import os
import runpy
import sys
import time
from pathlib import Path

from shard_report import watch

CLEAN_EXITS = (
    0,
    64,
    65,
    69,
    70,
    73,
    75,
)  # done, usage, data, no hub, not finite, cannot write, stopped and saved
FOLDER = Path(
    os.environ["REHEARSAL_FOLDER"]
)  # where ranks leave their pid, exit code and measurement
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


def upstream(owner, name):
    """Return `owner.name`, or stop with one line: a patch without its target would silently do nothing."""
    if not hasattr(owner, name):
        sys.exit(
            f"cpu_ranks.py: {owner.__name__}.{name} is gone in this version of the library; the rehearsal on CPU "
            "ranks changes it and must be adapted (or use --device cuda)"
        )
    return getattr(owner, name)


def use_gloo():
    """Let accelerate see a distributed job on CPU.

    Upstream `PartialState._prepare_backend` looks for a device, finds none and returns no backend: every rank
    believes it is alone. Its own CPU mode (MULTI_CPU) never becomes FSDP or DeepSpeed, so those two are
    announced as MULTI_GPU, from where accelerate switches to them; plain DDP is MULTI_CPU as upstream has it.
    """
    from accelerate.state import DistributedType, PartialState

    original = upstream(PartialState, "_prepare_backend")

    def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        if "LOCAL_RANK" not in os.environ:  # single.yaml: not a distributed job
            return original(self, cpu, sagemaker_dp, backend)
        sharded = any(
            os.environ.get(f"ACCELERATE_USE_{engine}") == "true" for engine in ("FSDP", "DEEPSPEED")
        )
        return "gloo", DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU

    PartialState._prepare_backend = prepare_backend


def do_not_pin_memory():
    """FSDP2 offload without pinned memory: upstream's `CPUOffloadPolicy()` pins, which needs a device."""
    from accelerate.utils import FullyShardedDataParallelPlugin as Plugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    original = upstream(Plugin, "set_cpu_offload")

    def set_cpu_offload(self):
        original(self)
        if isinstance(self.cpu_offload, CPUOffloadPolicy):
            self.cpu_offload = CPUOffloadPolicy(pin_memory=False)

    Plugin.set_cpu_offload = set_cpu_offload


def sync_fsdp1_states():
    """Let FSDP1 ranks get their weights from rank 0 over gloo, as they do on GPUs (fsdp_cpu_ram_efficient_loading).

    Upstream accelerate's plugin and torch's `_check_module_states_for_sync_module_states` refuse both where there is
    no GPU, although gloo broadcasts CPU tensors: the rehearsal would then load the model another way than production.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin as Plugin
    from torch.distributed.fsdp import _init_utils

    upstream(_init_utils, "_check_module_states_for_sync_module_states")
    _init_utils._check_module_states_for_sync_module_states = lambda module_states: None
    original = upstream(Plugin, "__post_init__")

    def post_init(self):
        hidden = ("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES")
        asked = {name: os.environ.pop(name) for name in hidden if name in os.environ}
        original(self)
        os.environ.update(asked)
        loads_once, syncs = (asked.get(name, "false").lower() == "true" for name in hidden)
        self.cpu_ram_efficient_loading = loads_once
        self.sync_module_states = loads_once or syncs
        self.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)

    Plugin.__post_init__ = post_init


def keep_full_state_dict():
    """FSDP1 full state dict without `offload_to_cpu`.

    Upstream frees the gathered parameters after it "moved" them to the CPU, where they are already: the state
    dict then points at freed memory (SIGSEGV). Without the flag it clones them first, which is right.
    """
    from torch.distributed.fsdp import FullStateDictConfig
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    original = upstream(FSDP, "set_state_dict_type")

    def set_state_dict_type(
        module, state_dict_type, state_dict_config=None, optim_state_dict_config=None
    ):
        if isinstance(state_dict_config, FullStateDictConfig):
            state_dict_config.offload_to_cpu = False
        if optim_state_dict_config is not None and hasattr(
            optim_state_dict_config, "offload_to_cpu"
        ):
            optim_state_dict_config.offload_to_cpu = False
        return original(module, state_dict_type, state_dict_config, optim_state_dict_config)

    FSDP.set_state_dict_type = staticmethod(set_state_dict_type)


def simulate_nodes(ranks_per_node):
    """Let FSDP1 HYBRID_SHARD see nodes of `ranks_per_node` devices.

    Upstream shards over `torch.cpu.device_count()` ranks, which is always 1: nothing would be sharded.
    """
    import torch

    upstream(torch.cpu, "device_count")
    torch.cpu.device_count = lambda: ranks_per_node


def do_not_compile():
    """DeepSpeed with gloo's collectives and torch's AdamW.

    Upstream compiles a shared-memory op for CPU ranks and, with offload, DeepSpeedCPUAdam: minutes, a compiler, and
    a lock file that stays behind when a rank is stopped meanwhile and blocks every later run.
    """
    from accelerate.utils import DeepSpeedPlugin

    backend = importlib.import_module(
        "deepspeed.comm.torch"
    )  # the package has torch itself under that name
    upstream(backend, "build_shm_op")
    backend.build_shm_op = lambda: None
    original = upstream(DeepSpeedPlugin, "__post_init__")

    def post_init(self):
        original(self)
        self.deepspeed_config["zero_force_ds_cpu_optimizer"] = False

    DeepSpeedPlugin.__post_init__ = post_init


def record_hard_exits():
    """Record the code of `os._exit` too, with which a thread ends its rank; not that of processes that load data."""
    original, rank = os._exit, os.getpid()
    os._exit = lambda code: original(agree(code) if os.getpid() == rank else code)


def exit_code_of(error):
    """The process exit code that Python gives to a SystemExit."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def agree(code):
    """Record the exit code for rehearse.py and return the one to end this rank with.

    A launcher turns every failure into 1 and a traceback. When all ranks agree on a clean exit code they leave
    with 0 and rehearse.py returns the code; else the real one makes the launcher stop the other ranks.
    """
    (FOLDER / f"exit.{RANK}").write_text(str(code))
    deadline = time.monotonic() + (
        2 if code else 20
    )  # seconds the other ranks have to reach the same end
    codes = []
    while (
        code in CLEAN_EXITS
        and (len(codes) < WORLD_SIZE or "" in codes)
        and time.monotonic() < deadline
    ):
        codes = [path.read_text() for path in FOLDER.glob("exit.*")]
        time.sleep(0.05)
    return 0 if codes == [str(code)] * WORLD_SIZE else code


def main():
    (FOLDER / f"pid.{RANK}").write_text(str(os.getpid()))
    if os.environ["REHEARSAL_DEVICE"] == "cpu":
        use_gloo()
        do_not_pin_memory()
        keep_full_state_dict()
        simulate_nodes(int(os.environ["REHEARSAL_RANKS_PER_NODE"]))
        if os.environ.get("FSDP_VERSION", "1") == "1":
            sync_fsdp1_states()
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            do_not_compile()
    watch(FOLDER / f"shards.{RANK}")
    if "REHEARSAL_PEAKS" in os.environ:  # a folder that scripts/track_ranks.py reads
        from planner.peak_probe import track

        track(Path(os.environ["REHEARSAL_PEAKS"]) / f"peak.{RANK}")
    if "REHEARSAL_HOST_MEMORY" in os.environ:  # a folder that scripts/host_memory.py reads
        from planner import host_probe

        host_probe.track(Path(os.environ["REHEARSAL_HOST_MEMORY"]) / f"host.{RANK}")
    record_hard_exits()
    recipe = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(recipe))  # as `python recipe` would have it
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as error:
        sys.exit(agree(exit_code_of(error)))
    sys.exit(agree(0))


if __name__ == "__main__":
    main()
