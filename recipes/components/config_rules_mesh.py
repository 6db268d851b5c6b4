# SPDX-License-Identifier: Apache-2.0
"""Rules on parallelism_config: the sizes of a mesh, and the engine that splits by it."""

import math
from collections.abc import Iterator

from components import accelerate_keys as keys
from components.config_findings import (
    ADVICE,
    IGNORED,
    RECIPE,
    STOPS,
    UPSTREAM,
    Finding,
    delete,
    finding,
    set_value,
)
from components.config_reading import NOT_GIVEN, Config
from components.config_strategy import MESH_KINDS, how_to_fit_mesh, mesh_sizes

SECTION = "parallelism_config"


def size_path(kind: str) -> str:
    """Return the key of a size: "dp_replicate", "dp_shard", "cp", "sp" or "tp"."""
    return f"{SECTION}.{SECTION}_{kind}_size"


def rules_of_mesh(config: Config) -> Iterator[Finding]:
    """parallelism_config fits the engine and the number of processes."""
    if not config.written.get(SECTION) or not sizes_are_readable(config):
        return
    yield from sizes_are_possible(config)
    yield from sizes_go_together(config)
    if config.engine == "FSDP":
        yield from fsdp_can_use_the_mesh(config)
    elif config.engine == "DEEPSPEED":
        yield from deepspeed_can_use_the_mesh(config)
    else:
        yield from processes_can_use_the_mesh(config)


# ---- Sizes ----
def sizes_are_readable(config: Config) -> bool:
    """Return whether the launcher can read all sizes; rules_of_values report those that it cannot.

    Nothing is known about a mesh of which one size is not known.
    """
    written = config.written[SECTION]
    if not isinstance(written, dict):
        return False
    sizes = [written.get(f"{SECTION}_{kind}_size", 1) for kind in MESH_KINDS]
    return all(keys.is_readable("", size, keys.INT) for size in sizes)


def sizes_are_possible(config: Config) -> Iterator[Finding]:
    """Each size is 1 or more."""
    for kind, size in mesh_sizes(config.read).items():
        if size < 1 and config.uses_torchrun:
            reason = "a group has at least one process"
            yield finding(STOPS, size_path(kind), reason, "1 or more")


def sizes_go_together(config: Config) -> Iterator[Finding]:
    """A row is split in one way, and replicas of split layers are shards of FSDP2 too.

    accelerate/parallelism_config.py, __post_init__, which the processes call under any engine.
    """
    sizes = mesh_sizes(config.read)
    if not config.uses_torchrun:
        return
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        reason = "context and sequence parallelism split the same rows"
        yield finding(STOPS, size_path("sp"), reason, "one of the two sizes")
    if sizes["tp"] > 1 and sizes["cp"] > 1:
        reason = "the recipes take no tensor and context parallelism together"
        yield finding(RECIPE, size_path("cp"), reason, "one of the two sizes")
    is_split = sizes["tp"] > 1 or sizes["cp"] > 1
    if is_split and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
        reason = "accelerate replicates no tensor or context parallel group without shards"
        fix = "a parallelism_config_dp_shard_size above 1, as in hsdp_tp.yaml"
        yield finding(STOPS, size_path("dp_replicate"), reason, fix)


def mesh_has_a_place_for_each_process(config: Config) -> Iterator[Finding]:
    """The sizes multiply to the number of processes.

    accelerate/parallelism_config.py, _validate_accelerator, leaves out meshes with sequence
    parallelism; under DeepSpeed, DeepSpeed then counts the rows of a batch by the sizes.
    """
    sizes = mesh_sizes(config.read)
    places = math.prod(sizes.values())
    if sizes["sp"] > 1 and config.engine != "DEEPSPEED":
        return
    if places < 1 or config.processes in (NOT_GIVEN, places):
        return
    reason = f"its sizes multiply to {places}, num_processes is {config.processes}"
    yield finding(STOPS, SECTION, reason, how_to_fit_mesh(sizes, config.processes))


# ---- Engines ----
def fsdp_can_use_the_mesh(config: Config) -> Iterator[Finding]:
    """FSDP2 has something to shard over, and reads split weights on each process."""
    sizes = mesh_sizes(config.read)
    if config.fsdp_version == 1:
        if math.prod(sizes.values()) > 1:
            fix = "fsdp_version: 2, or HYBRID_SHARD without a mesh"
            yield finding(STOPS, SECTION, "FSDP1 takes no mesh", fix)
        return
    if math.prod(sizes.values()) == 1:
        return  # accelerate then makes no mesh, and FSDP2 shards over all processes
    if sizes["sp"] > 1:
        reason = "FSDP has no sequence parallelism, and each process would take whole rows"
        fix = "parallelism_config_cp_size, or DeepSpeed as in deepspeed_ulysses.yaml"
        yield finding(IGNORED, size_path("sp"), reason, fix)
    if sizes["dp_shard"] == sizes["cp"] == 1:
        fix = "a parallelism_config_dp_shard_size above 1"
        if sizes["tp"] > 1:
            fix += ", or distributed_type: MULTI_GPU as in tp.yaml"
        yield finding(STOPS, SECTION, "FSDP2 has nothing to shard over", fix)
        return
    yield from mesh_has_a_place_for_each_process(config)
    if sizes["tp"] > 1:
        yield from each_process_reads_its_part(config)
        yield matrices_are_not_split(sizes)


def matrices_are_not_split(sizes: dict[str, int]) -> Finding:
    """Return the finding on tensor parallelism under FSDP2, with which accelerate cannot deal.

    accelerate/accelerator.py, _prepare_tp: weights are only looked at if one of them is split, and
    then as transformers 4 did it.
    """
    reason = (
        "accelerate 1.15 with transformers 5 stops in prepare if the script has loaded the model "
        "with a tp_plan (ImportError of ReplicateParallel), and splits no matrix if it has not: "
        f"each {sizes['tp']} processes then compute the same; the recipes work around it"
    )
    shards = sizes["dp_shard"] * sizes["tp"]
    fix = f"leave it out, with parallelism_config_dp_shard_size: {shards}, which splits as much"
    return finding(UPSTREAM, size_path("tp"), reason, fix)


def each_process_reads_its_part(config: Config) -> Iterator[Finding]:
    """FSDP does not broadcast whole weights into parts.

    accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict, copies by the shapes of rank 0.
    """
    key = "fsdp_cpu_ram_efficient_loading"
    path = f"fsdp_config.{key}"
    if config.read["fsdp_config"].get(key, True):
        reason = "FSDP would copy tensor parallel parts into whole weights, and stop"
        yield finding(RECIPE, path, reason, [set_value(path, False)])


def deepspeed_can_use_the_mesh(config: Config) -> Iterator[Finding]:
    """DeepSpeed splits rows by heads, from ZeRO-1 on, and nothing else."""
    sizes = mesh_sizes(config.read)
    if math.prod(sizes.values()) > 1:
        # accelerate/accelerator.py, _prepare_deepspeed, counts the rows of a batch by the sizes
        yield from mesh_has_a_place_for_each_process(config)
    if sizes["sp"] <= 1 < math.prod(sizes.values()):
        yield finding(IGNORED, SECTION, "DEEPSPEED does not split by it", [delete(SECTION)])
    if sizes["sp"] <= 1:
        return
    for name in ("tp", "cp"):
        if sizes[name] > 1:
            path = size_path(name)
            yield finding(IGNORED, path, "DEEPSPEED does not split by it", [delete(path)])
    if config.read["deepspeed_config"].get("zero_stage") == 0:
        reason = "the recipes split no rows under ZeRO-0, which measures no gradient norm"
        yield finding(RECIPE, "deepspeed_config.zero_stage", reason, "1, 2 or 3")
    path = f"{SECTION}.{SECTION}_sp_seq_length_is_variable"
    if config.read[SECTION].get(f"{SECTION}_sp_seq_length_is_variable", True) is False:
        reason = "the rows of the recipes differ in length"
        yield finding(RECIPE, path, reason, [set_value(path, True)])


def processes_can_use_the_mesh(config: Config) -> Iterator[Finding]:
    """Without an engine, only transformers splits layers; nothing shards or splits rows."""
    sizes = mesh_sizes(config.read)
    if math.prod(sizes.values()) <= 1:
        return
    if config.engine == "MEGATRON_LM":
        fix = "delete it, and write its sizes in megatron_lm_config"
        yield finding(STOPS, SECTION, "MEGATRON_LM takes no mesh", fix)
    elif not config.uses_torchrun:
        reason = f"{config.engine} does not split by it"
        yield finding(IGNORED, SECTION, reason, [delete(SECTION)])
    if not (str(config.engine).startswith("MULTI") and config.uses_torchrun):
        return
    if sizes["cp"] > 1:
        reason = "context parallelism needs FSDP2"
        yield finding(STOPS, size_path("cp"), reason, "FSDP with fsdp_version: 2")
    if sizes["sp"] > 1:
        reason = "without DeepSpeed nothing splits rows by heads"
        fix = "DEEPSPEED, as in deepspeed_ulysses.yaml"
        yield finding(IGNORED, size_path("sp"), reason, fix)
    if sizes["dp_shard"] > 1 and sizes["tp"] == 1:
        fix = "FSDP with fsdp_version: 2, or delete parallelism_config"
        yield finding(IGNORED, SECTION, "DDP runs and shards nothing", fix)
    if sizes["tp"] > 1:
        yield from only_groups_of_tp_run(sizes)
    yield from mesh_has_a_place_for_each_process(config)


def only_groups_of_tp_run(sizes: dict[str, int]) -> Iterator[Finding]:
    """Without FSDP, accelerate wraps a model with split matrices in nothing, not even in DDP.

    accelerate/accelerator.py, prepare_model: under tensor parallelism it only compares the size
    by which the model is split.
    """
    if sizes["dp_shard"] > 1:
        reason = (
            "without FSDP nothing is sharded, and nothing averages the gradients of the "
            f"{sizes['dp_shard']} groups; prepare stops besides, unless the script has split the "
            f"model over {sizes['tp']} processes, where transformers 5 splits it over all"
        )
        fix = f"1, with num_processes: {sizes['tp']}; or FSDP2 without parallelism_config_tp_size"
        yield finding(IGNORED, size_path("dp_shard"), reason, fix)
    reason = (
        "accelerate splits no model itself: prepare stops unless the script has loaded it with "
        'tp_plan="auto" of transformers'
    )
    yield finding(ADVICE, size_path("tp"), reason)
