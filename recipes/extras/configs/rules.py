# SPDX-License-Identifier: Apache-2.0
"""What in a config has no effect, or costs: facts about accelerate, DeepSpeed and these recipes.

What stops a launch is named where accelerate's own words do not lead to the key.
"""

from argparse import Action, Namespace
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser
from accelerate.utils import ComputeEnvironment, DistributedType, DynamoBackend, str_to_bool
from accelerate.utils.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_STATE_DICT_TYPE,
)

from core.config_names import OWNED_BY_FLAGS, SECTIONS, Fault, read_keys
from extras.configs.config import (
    MESH_KINDS,
    SECTION_OF,
    STRATEGIES,
    Config,
    Found,
    at_keys,
    read_config,
)
from extras.configs.deepspeed_json import check_json

# FSDP1's names of FSDP2's strategies on a mesh with replicas
ON_A_MESH = {"HYBRID_SHARD": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP"}
# {setting: the words that it may have}, where the launcher's options do not list them
WORDS: dict[str, Any] = {
    "compute_environment": [member.value for member in ComputeEnvironment],
    "distributed_type": DistributedType.__members__,
    "dynamo_backend": DynamoBackend.__members__,
    "fsdp_auto_wrap_policy": FSDP_AUTO_WRAP_POLICY,
    "fsdp_backward_prefetch": FSDP_BACKWARD_PREFETCH,
    "fsdp_state_dict_type": FSDP_STATE_DICT_TYPE,
    "fsdp_sharding_strategy": (*STRATEGIES, *"12345"),
    "offload_optimizer_device": ("none", "cpu", "nvme"),
    "offload_param_device": ("none", "cpu", "nvme"),
    "zero_stage": tuple("0123"),
    "zero3_save_16bit_model": ("true", "false"),  # accelerate takes all but true for false
}


def check(file: str, launch: Namespace | None = None, for_recipes: bool = True) -> Iterator[Fault]:
    """Yield what is wrong with a config, apart from the names of its keys.

    The arguments are those of `read_config` and `at_keys`, as are the exceptions.
    """
    config = read_config(file, launch)
    keys = {}
    for key in read_keys(Path(file).read_text(encoding="utf-8")):
        if len(key.path) > 2 or (len(key.path) == 2 and key.path[0] not in SECTIONS):
            continue
        first = keys.setdefault(key.name, key)
        if first.path != key.path:
            reason = f"the same setting as {'.'.join(key.path)}, and one of them counts"
            yield Fault(file, first.line, ".".join(first.path), reason, "keep one")
    yield from at_keys(rules(config), file, keys, for_recipes)
    if config.engine == "DEEPSPEED" and config.json is not None:
        yield from check_json(config.json, for_recipes)


def rules(config: Config) -> Iterator[Found]:
    """Yield what the rules find."""
    yield from rules_of_launcher(config)
    yield from rules_of_sections(config)
    yield from rules_of_values(config)
    if config.engine == "FSDP":
        yield from rules_of_fsdp(config)
        yield from rules_of_sharding_keys(config)
    if config.engine == "DEEPSPEED" and config.json is None:
        yield from rules_of_zero(config)
    if config.places != 1:
        yield from rules_of_mesh(config)


# ---- The launcher ----
def rules_of_launcher(c: Config) -> Iterator[Found]:
    """Check the number of processes, and what the launcher does not pass on."""
    processes = c.number("num_processes")
    is_one = c.engine in ("NO", "MULTI_CPU") and not c.values.get("cpu")
    if c.values.get("distributed_type", "") is None:
        yield "error", "distributed_type", "empty: one process runs", "FSDP, DEEPSPEED or MULTI_GPU"
    elif is_one and processes > 1 and not c.text("mpirun_hostfile"):
        yield "error", "distributed_type", f"one process runs, not {processes}", "MULTI_GPU"
    if processes % c.machines:
        reason = f"{c.machines} machines start the same number each"
        yield "error", "num_processes", reason, "a multiple of num_machines"
    starts_itself = c.text("deepspeed_multinode_launcher", "pdsh") == "standard"
    is_started = starts_itself or c.text("deepspeed_hostfile")
    if c.engine == "DEEPSPEED" and c.machines > 1 and not is_started:
        reason = "without a deepspeed_hostfile DeepSpeed trains on this machine only"
        fix = "deepspeed_multinode_launcher: standard and a launch on each machine"
        yield "error", "num_machines", reason, fix
    if c.engine == "DEEPSPEED" and c.text("dynamo_backend", "NO").upper() != "NO":
        name = "dynamo_config" if "dynamo_config" in c.values else "dynamo_backend"
        yield "error", name, "not passed on under DeepSpeed: nothing is compiled", "delete it"
    if c.machines > 1 and not c.text("main_process_ip"):
        reason = "the machines have no address to connect to"
        yield "warning", "num_machines", reason, "main_process_ip, or the flag"


def rules_of_sections(c: Config) -> Iterator[Found]:
    """An engine reads its own section only, and of a section its keys."""
    others = {}
    for engine, section in SECTION_OF.items():
        if engine != c.engine and c.values.get(section):
            others[engine] = section
    own = SECTION_OF.get(c.engine, "")
    if others and c.values.get(own):
        for section in others.values():
            yield "error", section, f"{c.engine} runs and does not read it", "delete it"
    elif others:
        reason = f"{c.engine} runs and does not read {' or '.join(others.values())}"
        yield "error", "distributed_type", reason, " or ".join(others)
    for section in SECTIONS:
        if not isinstance(c.values.get(section), dict | None):
            yield "error", section, "must be a mapping: nothing of it is read", "indent its keys"


# ---- Values ----
@cache
def options() -> dict[str, Action]:
    """Return the options of `accelerate launch`, {name: argparse's action}."""
    return {action.dest: action for action in launch_command_parser()._actions}


def rules_of_values(c: Config) -> Iterator[Found]:
    """A value is one that the launcher, or what it starts, can read."""
    for name, value in c.values.items():
        of_others = name.startswith(("fp8_", "megatron_lm_", "mpirun_"))
        if name in SECTIONS or of_others or (name.startswith("fsdp_") and not c.fsdp):
            continue
        if name == "fsdp_reshard_after_forward" and c.fsdp == 1:
            continue  # it may have FSDP1's names, and is not read
        wanted = what_it_has_to_be(name, value)
        if wanted:
            yield "error", name, f"{value!r} is not what accelerate takes", wanted


def what_it_has_to_be(name: str, value: Any) -> str:
    """Return what accelerate needs in place of a value, or "" if it can read this one."""
    option = options().get(name)
    words = list(WORDS.get(name, ()))
    if option is not None and not words:
        words = list(option.choices or ())
    is_no = name == "distributed_type" and not value  # NO without quotes
    takes_small_letters = name != "distributed_type" and str(value).upper() in map(str.upper, words)
    if words and str(value) not in words and not takes_small_letters and not is_no:
        return f"one of {', '.join(words)}"
    if option is None:
        return ""
    if option.nargs == 0 and option.default is None and isinstance(value, str):
        return "true or false, without quotes"  # accelerate takes any text for true
    if option.default in ("true", "false"):
        try:
            str_to_bool(str(value))
        except ValueError:
            return "true or false"
    # These two are compared with numbers; of processes torchrun can count what there is
    is_compared = name == "num_machines" or (name == "main_process_port" and value is not None)
    can_count = value in (None, "auto", "gpu", "cpu") or str(value).lstrip("-").isdigit()
    if (is_compared and type(value) is not int) or (name == "num_processes" and not can_count):
        return "a number, without quotes"
    return ""


# ---- FSDP ----
def rules_of_fsdp(c: Config) -> Iterator[Found]:
    """Check fsdp_config, apart from the two keys of the sharding strategy."""
    if means_fsdp2(c):
        yield "error", "fsdp_version", "missing, so FSDP1 runs with FULL_SHARD", "fsdp_version: 2"
        return
    if not c.text("fsdp_version"):
        yield "warning", "fsdp_version", "missing, so FSDP1 runs", "fsdp_version: 1 or 2"
    is_whole = c.fsdp == 1 and c.strategy("fsdp_sharding_strategy") == "NO_SHARD"
    if c.text("fsdp_auto_wrap_policy", "NO_WRAP").upper() == "NO_WRAP" and not is_whole:
        reason = "the model is one unit: each process gathers all of it at once"
        yield "warning", "fsdp_auto_wrap_policy", reason, "TRANSFORMER_BASED_WRAP"
    if c.fsdp == 2 and c.is_on("fsdp_forward_prefetch"):
        yield "warning", "fsdp_forward_prefetch", "FSDP2 does not read it", "delete it"
    if isinstance(c.values.get("fsdp_transformer_layer_cls_to_wrap"), list):
        reason = "a list: accelerate looks for classes with brackets in their names"
        yield "error", "fsdp_transformer_layer_cls_to_wrap", reason, "text, with commas"
    if c.fsdp == 1 and not c.is_on("fsdp_use_orig_params", default=True):
        reason = "an optimizer made before prepare keeps parameters that FSDP1 replaces"
        yield "recipes", "fsdp_use_orig_params", reason, "true"
    loads_once = c.is_on("fsdp_cpu_ram_efficient_loading", default=True)
    if c.fsdp == 2 and c.size("tp") > 1 and loads_once:
        reason = "FSDP would copy tensor parallel parts into whole weights, and stop"
        yield "recipes", "fsdp_cpu_ram_efficient_loading", reason, "false"


def means_fsdp2(c: Config) -> bool:
    """Return whether a file without a version has its strategy in a form that only FSDP2 takes."""
    is_form_of_2 = isinstance(c.values.get("fsdp_reshard_after_forward"), bool)
    return is_form_of_2 and not c.text("fsdp_version")


def rules_of_sharding_keys(c: Config) -> Iterator[Found]:
    """accelerate exports both keys of the strategy, and each version of FSDP reads one of them."""
    names = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    read, unread = names if c.fsdp == 1 else names[::-1]
    if unread not in c.values or means_fsdp2(c):
        return
    runs = c.strategy(read)
    wanted = c.strategy(unread)
    if c.fsdp == 2 and c.size("dp_replicate") > 1:
        wanted = ON_A_MESH.get(wanted, wanted)
    fix = f"{read}: {wanted}"
    if c.fsdp == 2:
        fix = f"{read}: {str(wanted == 'FULL_SHARD').lower()}"
        if wanted == "NO_SHARD":
            fix = "distributed_type: MULTI_GPU does the same"
        elif "HYBRID" in wanted:
            fix = "a mesh, as in fsdp2_hybrid_shard.yaml"
    if wanted != runs:
        yield "error", unread, f"FSDP{c.fsdp} does not read it: {runs} runs, not {wanted}", fix
    elif read not in c.values:
        yield "warning", unread, f"FSDP{c.fsdp} does not read it: {runs} runs anyway", fix


# ---- DeepSpeed ----
def rules_of_zero(c: Config) -> Iterator[Found]:
    """Check the keys of deepspeed_config, which count without a JSON."""
    stage = c.number("zero_stage", 2)
    if "zero_stage" not in c.values:
        yield "warning", "zero_stage", "missing: ZeRO-2 runs", "zero_stage: 2"
    for name, flag in OWNED_BY_FLAGS.items():
        if c.text(name):
            yield "recipes", name, f"the recipes take it from {flag}", "delete it"
    for what, first in (("optimizer", 1), ("param", 3)):
        name = f"offload_{what}_device"
        device = c.text(name, "none").lower()
        if device != "none" and stage < first:
            yield "error", name, f"ZeRO-{stage} does not offload this", f"zero_stage: {first}"
        elif device == "nvme":
            reason = f"the launcher drops offload_{what}_nvme_path: DeepSpeed swaps to ./none"
            yield "error", name, reason, "a deepspeed_config_file that names the path"
    if stage == 3 and not c.is_on("zero3_save_16bit_model"):
        reason = "accelerator.get_state_dict fails at the end, after the training"
        yield "warning", "zero3_save_16bit_model", reason, "zero3_save_16bit_model: true"
    if stage == 3 and not c.is_on("zero3_init_flag", default=True):
        reason = "each process first loads the whole model into host memory"
        yield "warning", "zero3_init_flag", reason, "true"


# ---- Meshes ----
def rules_of_mesh(c: Config) -> Iterator[Found]:
    """Check the sizes of parallelism_config, of which at least one is not 1."""
    mesh = "parallelism_config"
    is_ddp = c.engine.startswith("MULTI")
    rows_are_split = c.size("sp") > 1
    if c.fsdp == 1:
        yield "error", mesh, "FSDP1 takes no mesh", "fsdp_version: 2, or HYBRID_SHARD"
    elif c.fsdp == 2 and c.size("dp_shard") * c.size("cp") == 1:
        yield "error", mesh, "FSDP2 has nothing to shard over", "a dp_shard_size above 1"
    elif c.engine == "DEEPSPEED" and not rows_are_split:
        yield "error", mesh, "DEEPSPEED does not split by it", "delete it"
    elif is_ddp and c.size("dp_shard") > 1 and c.size("tp") == 1:
        yield "error", mesh, "DDP runs and shards nothing", "FSDP with fsdp_version: 2"
    elif is_ddp and c.size("dp_shard") > 1:
        reason = "without FSDP nothing is sharded, and nothing averages gradients of the groups"
        yield "error", f"{mesh}_dp_shard_size", reason, "FSDP with fsdp_version: 2"
    if rows_are_split and c.engine != "DEEPSPEED":
        reason = "without DeepSpeed nothing splits rows by heads"
        yield "error", f"{mesh}_sp_size", reason, "DEEPSPEED, as in deepspeed_ulysses.yaml"
    elif c.places != c.number("num_processes", c.places) and c.engine != "NO":
        sizes = " x ".join(str(c.size(kind)) for kind in MESH_KINDS)
        reason = f"its sizes are {sizes}, num_processes is {c.number('num_processes')}"
        yield "error", mesh, reason, f"other sizes, or num_processes: {c.places}"
