# SPDX-License-Identifier: Apache-2.0
"""Describe in words what a config does: what runs, who holds what, which keys have no effect."""

from dataclasses import dataclass, replace

from components.accelerate_keys import (
    COMMAND_LINE_ONLY,
    COUNTS_OF_TORCHRUN,
    FOR_SEVERAL_MACHINES,
    READ_BY_ONE_VERSION,
    WITHOUT_TORCHRUN,
)
from components.config_findings import STOPS, Finding
from components.config_reading import written_in
from components.config_strategy import (
    MESH_KINDS,
    OFFLOADED_FROM_STAGE,
    OTHER_VERSION,
    SHARING_KINDS,
    SPLITS_BY,
    ConfigStrategy,
    mesh_sizes,
    shards_of,
    strategy_of,
    strategy_run,
    words_of_mesh,
)

# Parameters are gathered for the forward pass, and freed only after the backward pass.
KEEPS_PARAMETERS = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
# How much is gathered at once, by wrap policy; DeepSpeed has none
GATHERED = {"NO_WRAP": "all at once", "SIZE_BASED_WRAP": "unit by unit"}
# The same strategy under each engine
SIBLINGS = {
    "NO_SHARD": {
        "ddp": "DDP (ddp.yaml)",
        "fsdp1": "FSDP1 NO_SHARD (fsdp1_no_shard.yaml)",
        "fsdp2": "none in FSDP2",
        "zero": "ZeRO-0 (deepspeed_zero0.yaml)",
    },
    "ZeRO-1": {"fsdp": "none in FSDP"},
    "ZeRO-2": {
        "fsdp": "in FSDP only SHARD_GRAD_OP, which also splits parameters at rest "
        "(fsdp2_shard_grad_op.yaml)"
    },
    "SHARD_GRAD_OP": {
        "fsdp2": "FSDP2 fsdp_reshard_after_forward: false (fsdp2_shard_grad_op.yaml)",
        "fsdp1": "FSDP1 SHARD_GRAD_OP (fsdp1_shard_grad_op.yaml)",
        "zero": "nearly ZeRO-2, which keeps parameters whole (deepspeed_zero2.yaml)",
    },
    "FULL_SHARD": {
        "fsdp2": "FSDP2 full shard (fsdp.yaml)",
        "fsdp1": "FSDP1 FULL_SHARD (fsdp1_full_shard.yaml)",
        "zero": "ZeRO-3 (deepspeed_zero3.yaml)",
    },
    "HYBRID_SHARD": {
        "fsdp2": "FSDP2 on a mesh (fsdp2_hybrid_shard.yaml)",
        "zero": "ZeRO++ hpZ (in a DeepSpeed JSON)",
        "fsdp1": "FSDP1 HYBRID_SHARD (fsdp1_hybrid_shard.yaml)",
    },
}
# Engines whose processes share in ways that are not described here
NOT_DESCRIBED = {
    "MEGATRON_LM": "Megatron-LM, whose parallelism is not described here",
    "XLA": "torch_xla, whose processes on TPUs are not described here",
}
WRAP_POLICY_OF = {
    "fsdp_transformer_layer_cls_to_wrap": "TRANSFORMER_BASED_WRAP",
    "fsdp_min_num_params": "SIZE_BASED_WRAP",
}


@dataclass(frozen=True)
class Run:
    """What a config runs.

    Attributes:
        config: as accelerate reads it.
        requested: the strategy that it requests.
        strategy: the strategy in force, in FSDP1's words.
        processes: how many are started.
        machines: on how many.
        for_recipes: whether the run is one of the recipes here, or of accelerate by itself. The
            recipes reduce gradients in fp32, and under FSDP in each micro-batch.
    """

    config: dict
    requested: ConfigStrategy
    strategy: str
    processes: int
    machines: int
    for_recipes: bool

    @property
    def engine(self) -> str:
        """single, ddp, fsdp1, fsdp2 or zero."""
        return self.requested.engine

    @property
    def is_on_cpus(self) -> bool:
        """Whether it runs on CPUs: only the launchers that torchrun does not start heed use_cpu."""
        engine = self.config["distributed_type"]
        return engine == "MULTI_CPU" or (engine == "NO" and self.config.get("use_cpu", False))

    @property
    def is_fsdp(self) -> bool:
        """Whether either version of FSDP runs."""
        return self.engine in ("fsdp1", "fsdp2")


def describe(
    content: dict,
    config: dict,
    findings: list[Finding],
    deepspeed: dict | None = None,
    for_recipes: bool = False,
) -> dict[str, str]:
    """Return what a config really does, as {aspect: words}.

    Args:
        content: of the file, as written.
        config: the same as accelerate reads it.
        findings: on the file; if accelerate or DeepSpeed stops, only that is described.
        deepspeed: content of the DeepSpeed JSON that the file points to.
        for_recipes: describe a run of the recipes here, and not of accelerate by itself.
    """
    if any(item.kind == STOPS for item in findings):
        return {"runs": "nothing: accelerate or DeepSpeed stops, see below"}
    run = run_of(config, for_recipes, deepspeed)
    words = {"runs": words_of_strategy(run), "processes": words_of_processes(run)}
    if content.get("num_processes") in COUNTS_OF_TORCHRUN:
        words["processes"] = "one for each GPU or core that torchrun finds"
    if config["distributed_type"] in NOT_DESCRIBED:
        words["no effect"] = words_of_no_effect(content, config, deepspeed)
        return words
    words |= words_of_sharing(run)
    words |= words_of_shares(run)
    words["state"] = words_of_place(run)
    words["precision"] = words_of_precision(run)
    if run.is_fsdp:
        default = "FULL_STATE_DICT" if run.engine == "fsdp1" else "SHARDED_STATE_DICT"
        words["checkpoints"] = config["fsdp_config"].get("fsdp_state_dict_type", default)
    if not words_of_sharing(run):
        words["siblings"] = words_of_siblings(run)
    words |= words_of_flags(run)
    words["no effect"] = words_of_no_effect(content, config, deepspeed)
    return words


def run_of(config: dict, for_recipes: bool, deepspeed: dict | None) -> Run:
    """Return what a config, as accelerate reads it, and its DeepSpeed JSON run."""
    requested = strategy_of(config)
    machines = config["num_machines"]
    unused = unused_kinds(config, requested)
    sizes = {kind: 1 if kind in unused else getattr(requested, kind) for kind in SHARING_KINDS}
    if requested.engine == "zero":
        sizes["tp"] = autotp_size(deepspeed)
    requested = replace(requested, tp=sizes["tp"], cp=sizes["cp"], sp=sizes["sp"])
    processes = 1
    if requested.engine != "single" or config["distributed_type"] in NOT_DESCRIBED:
        processes = max(config.get("num_processes", 1) // machines * machines, 1)
    if config["distributed_type"] == "MULTI_CPU" and not config.get("mpirun_config"):
        processes = 1  # only mpirun starts more
    return Run(config, requested, strategy_run(config), processes, machines, for_recipes)


def autotp_size(deepspeed: dict | None) -> int:
    """Return over how many processes a DeepSpeed JSON splits matrices; 1 if it splits none."""
    section = (deepspeed or {}).get("tensor_parallel")
    size = section.get("autotp_size") if isinstance(section, dict) else None
    return size if isinstance(size, int) and size > 1 else 1


def unused_kinds(config: dict, requested: ConfigStrategy) -> list[str]:
    """Return the sizes of the mesh by which nothing is split, as other findings say."""
    used: tuple[str, ...] = ()
    if config["distributed_type"] not in WITHOUT_TORCHRUN:
        used = SPLITS_BY[requested.engine]
    return [kind for kind in MESH_KINDS if kind not in used]


def words_of_strategy(run: Run) -> str:
    """Return the name of what runs."""
    engine = run.config["distributed_type"]
    if engine in NOT_DESCRIBED:
        return NOT_DESCRIBED[engine]
    if engine == "MULTI_CPU" and run.processes == 1:
        return "one process, unless mpirun starts the launcher"
    if run.engine == "single":
        return "one process"
    if run.engine == "ddp" and run.requested.tp > 1:
        return "tensor parallelism, by the plan of transformers for the model"
    if run.engine == "ddp":
        return "DDP"
    if run.engine == "zero":
        return f"DeepSpeed ZeRO-{run.requested.stage}"
    return f"{run.engine.upper()} {run.strategy}"


def words_of_processes(run: Run) -> str:
    """Return how many processes run, and on how many machines."""
    if run.processes == 1 and run.engine != "single" and not run.is_on_cpus:
        return "1, so that nothing is split; --num_processes N for more"
    if run.machines > 1:
        return f"{run.processes} on {run.machines} machines"
    return str(run.processes)


# ---- Who computes what ----
def words_of_sharing(run: Run) -> dict[str, str]:
    """Return which processes share rows, layers or tokens; {} if each has rows of its own."""
    requested = run.requested
    sharing = requested.tp * requested.cp * requested.sp
    if sharing == 1:
        return {}
    shared = []
    if requested.cp > 1:
        shared.append(f"{requested.cp} share the tokens of a row, and attend by a ring")
    if requested.sp > 1:
        shared.append(f"{requested.sp} share the tokens of a row, and its heads in attention")
    if requested.tp > 1:
        words = f"{requested.tp} share the matrices of each layer"
        if run.engine == "fsdp2" and not run.for_recipes:
            words += ", in a script that works around accelerate's fault (see below)"
        shared.append(words)
    groups = max(run.processes // sharing, 1)
    rows = "all processes see the same rows"
    if groups > 1:
        rows = f"{groups} groups of {sharing} processes have rows of their own"
    sizes = mesh_sizes(run.config) | dict.fromkeys(unused_kinds(run.config, requested), 1)
    sizes["tp"] = requested.tp
    mesh = words_of_mesh(sizes)
    return {"mesh": f"{mesh}: {'; '.join(shared)}", "rows": rows}


# ---- Who holds what ----
def words_of_shares(run: Run) -> dict[str, str]:
    """Return what each process holds of parameters, gradients and optimizer state."""
    processes = max(run.processes, 2)
    sharing = processes
    if run.engine == "zero":  # It shards the parts of a matrix over the ranks that have the same
        sharing = max(processes // run.requested.tp, 1)
    shards = shards_of(run.requested, sharing, sharing // run.machines)
    words = {}
    for kind in ("parameters", "gradients", "optimizer"):
        words[kind] = "whole on each process"
        if shards[kind] > 1:
            # For a single process, describe what each of N processes would hold.
            count = shards[kind] * run.requested.tp if run.processes > 1 else "N"
            words[kind] = f"1/{count} on each process"
        elif run.requested.tp > 1:
            words[kind] = f"1/{run.requested.tp} of each split matrix on each process, norms whole"
    if shards["parameters"] > 1:
        words["parameters"] += words_of_gathering(run)
    if shards["gradients"] > 1 and run.engine != "zero":
        when = "reduced in each of" if run.for_recipes else "whole between"
        words["gradients"] += f"; {when} the micro-batches of an accumulation"
    if shards["optimizer"] > 1 and run.strategy == "ZeRO-1":
        words["gradients"] += "; for the step each keeps its own share"
    return words


def words_of_gathering(run: Run) -> str:
    """Return how parameters that are split at rest become whole for the computation."""
    unit = "layer by layer"
    if run.engine != "zero":
        policy = run.config["fsdp_config"]["fsdp_auto_wrap_policy"]
        unit = GATHERED.get(policy, unit)
    when = "for the forward and again for the backward pass, freed after each"
    if run.strategy in KEEPS_PARAMETERS:
        when = "in the forward pass and kept until the backward pass is done"
    whole = "; small tensors whole" if run.engine == "zero" else ""
    return f"; gathered {unit} {when}{whole}"


def words_of_place(run: Run) -> str:
    """Return where parameters, gradients and optimizer state are."""
    if run.is_fsdp and run.config["fsdp_config"].get("fsdp_offload_params"):
        return "in host memory, all of it; the optimizer steps on the CPU"
    names = {"offload_optimizer": "optimizer state and step", "offload_param": "parameters"}
    moved = []
    for what, first_stage in OFFLOADED_FROM_STAGE.items():
        device = run.config["deepspeed_config"][f"{what}_device"]
        if (run.requested.stage or 0) >= first_stage and device != "none":
            moved.append(f"{names[what]} on {device}")
    if run.is_on_cpus:
        return "in host memory: the training runs on the CPU"
    if not moved:
        return "on the GPU"
    return f"{', '.join(moved)}; the rest on the GPU"


def words_of_precision(run: Run) -> str:
    """Return the types of computation, communication and storage."""
    kind = run.config["mixed_precision"]
    if kind == "no":
        return "not mixed: all in the type of the weights as loaded"
    if run.engine == "zero":
        words = f"{kind} weights, gradients and computation; fp32 master weights in the optimizer"
        if run.for_recipes:
            words += "; gradients are reduced in fp32"
        return words
    if run.is_fsdp:
        does = f"computes and communicates in {kind}"
        if run.for_recipes:
            does = f"computes in {kind}, reduces gradients in fp32"
        return f"{does}; trained weights, gradients and optimizer state rest in fp32"
    kept = "weights, gradients and optimizer in the type of the weights as loaded"
    return f"computes in {kind} (autocast); {kept}"


def words_of_siblings(run: Run) -> str:
    """Return the same strategy under the other engines."""
    siblings = SIBLINGS[run.strategy.removesuffix("_ZERO2")]
    return ", ".join(name for engine, name in siblings.items() if engine != run.engine)


# ---- What a flag adds ----
def words_of_flags(run: Run) -> dict[str, str]:
    """Return what flags of recipes make of a run, for which accelerate has no key; {} if nothing.

    It is where `find_expert_problems` and `find_pipeline_problems` of recipes/components/ have
    nothing against the file.
    """
    flags = []
    if takes_experts(run):
        flags.append("mixtral.py --ep_size N gives each of N processes 1/N of a layer's experts")
    if takes_pipelines(run):
        flags.append("llama_pipeline.py --pp_size N gives each of N processes some of the layers")
    if not flags:
        return {}
    return {"flags": f"{', and '.join(flags)}; the other lines are about runs without these flags"}


def takes_experts(run: Run) -> bool:
    """Return whether a recipe of mixtures may spread experts over the processes."""
    fsdp = run.config["fsdp_config"]
    if run.engine == "fsdp2":
        loads_once = fsdp.get("fsdp_cpu_ram_efficient_loading", True)
        offloads = fsdp.get("fsdp_offload_params", False)
        return takes_groups(run) and not (loads_once or offloads)
    return takes_pipelines(run)


def takes_pipelines(run: Run) -> bool:
    """Return whether a recipe of pipelines may cut the layers over the processes."""
    return run.engine == "ddp" and takes_groups(run)


def takes_groups(run: Run) -> bool:
    """Return whether processes with rows of their own can make groups that share weights."""
    requested = run.requested
    meshes = requested.tp * requested.cp * requested.sp * requested.replicas
    return meshes == 1 and run.config["mixed_precision"] != "fp16"


# ---- Keys without effect ----
def words_of_no_effect(content: dict, config: dict, deepspeed: dict | None) -> str:
    """Return the keys that change nothing in this run, with the reason."""
    parts = [
        f"{', '.join(found)} ({reason})"
        for reason, found in keys_without_effect(content, config, deepspeed).items()
        if found
    ]
    return "; ".join(parts) or "none of the keys"


def keys_without_effect(
    content: dict, config: dict, deepspeed: dict | None
) -> dict[str, list[str]]:
    """Return the written keys that change nothing in this run, as {reason: keys}."""
    other_version = OTHER_VERSION[config["fsdp_config"]["fsdp_version"]]
    found = {
        "only read from the command line": [key for key in COMMAND_LINE_ONLY if key in content],
        "for TPUs": keys_for_tpus(content, config),
        "for several machines": keys_for_machines(content, config),
        "for a CPU run": keys_for_cpus(content, config),
        "for fp8": keys_for_fp8(content, config),
        f"for FSDP{other_version}": keys_for_other_version(content, other_version),
        "for another wrap policy": keys_for_other_policy(content, config),
        "for ZeRO-3": keys_for_zero3(config, deepspeed),
        "accelerate sets it to infinity": keys_that_accelerate_sets(deepspeed),
        "transformers' models do not use it": keys_for_other_models(deepspeed),
    }
    found["for rows that are split"] = keys_for_split_rows(content, config)
    return found


def keys_for_tpus(content: dict, config: dict) -> list[str]:
    """Return the keys that only matter on TPUs."""
    if config["distributed_type"] == "XLA":
        return []
    found = []
    for key in content:
        is_for_tpus = str(key).startswith(("tpu_", "command")) or key == "main_training_function"
        if is_for_tpus and key not in COMMAND_LINE_ONLY:
            found.append(key)
    return found


def keys_for_machines(content: dict, config: dict) -> list[str]:
    """Return the keys that only matter on several machines."""
    if config["num_machines"] > 1:
        return []
    found = [key for key in ("machine_rank", "main_process_ip") if key in content]
    if config["distributed_type"] == "DEEPSPEED":
        written = written_in(content, "deepspeed_config")
        found += [key for key in FOR_SEVERAL_MACHINES if key in written]
    return found


def keys_for_cpus(content: dict, config: dict) -> list[str]:
    """Return the key that only matters without GPUs, if it is written."""
    if "use_cpu" in content and config["distributed_type"] not in ("NO", "MULTI_CPU"):
        return ["use_cpu"]
    return []


def keys_for_fp8(content: dict, config: dict) -> list[str]:
    """Return the section that only matters in fp8, if it is written."""
    if "fp8_config" in content and config["mixed_precision"] != "fp8":
        return ["fp8_config"]
    return []


def keys_for_split_rows(content: dict, config: dict) -> list[str]:
    """Return the keys of the mesh that only matter if processes share the tokens of a row."""
    sizes = mesh_sizes(config)
    found = []
    for key in written_in(content, "parallelism_config"):
        for kind in ("cp", "sp"):
            is_of_kind = key.startswith(f"parallelism_config_{kind}_") and not key.endswith("_size")
            if is_of_kind and sizes[kind] <= 1:
                found.append(key)
    return found


def keys_for_other_version(content: dict, other_version: int) -> list[str]:
    """Return the keys of fsdp_config that the other version of FSDP reads."""
    written = written_in(content, "fsdp_config")
    return [key for key in written if READ_BY_ONE_VERSION.get(key) == other_version]


def keys_for_other_policy(content: dict, config: dict) -> list[str]:
    """Return the keys of fsdp_config that another wrap policy reads."""
    written = written_in(content, "fsdp_config")
    policy = config["fsdp_config"]["fsdp_auto_wrap_policy"]
    return [key for key, reader in WRAP_POLICY_OF.items() if key in written and reader != policy]


def keys_for_zero3(config: dict, deepspeed: dict | None) -> list[str]:
    """Return the keys of the YAML and of the DeepSpeed JSON that only ZeRO-3 reads."""
    zero = config["deepspeed_config"]
    if config["distributed_type"] != "DEEPSPEED" or zero["zero_stage"] == 3:
        return []
    found = [key for key in ("zero3_init_flag", "zero3_save_16bit_model") if key in zero]
    in_json = (deepspeed or {}).get("zero_optimization", {})
    return found + [key for key in in_json if key.startswith("stage3_")]


def keys_that_accelerate_sets(deepspeed: dict | None) -> list[str]:
    """Return the key of a DeepSpeed JSON that accelerate overwrites, so that DeepSpeed is quiet."""
    return ["steps_per_print"] if "steps_per_print" in (deepspeed or {}) else []


def keys_for_other_models(deepspeed: dict | None) -> list[str]:
    """Return the section that only models written for DeepSpeed use, if it is written."""
    if "activation_checkpointing" in (deepspeed or {}):
        return ["activation_checkpointing"]
    return []
