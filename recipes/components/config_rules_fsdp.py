# SPDX-License-Identifier: Apache-2.0
"""Rules on fsdp_config: settings that only one version of FSDP reads, and conflicting ones."""

from collections.abc import Iterator

from components import accelerate_keys as keys
from components.config_findings import (
    ADVICE,
    COSTS,
    IGNORED,
    RECIPE,
    STOPS,
    Edit,
    Finding,
    delete,
    finding,
    rename,
    set_value,
)
from components.config_reading import Config
from components.config_strategy import OTHER_VERSION, SHARDING_KEY, mesh_sizes, strategy_run

VERSION = "fsdp_config.fsdp_version"
WRAP = "fsdp_config.fsdp_auto_wrap_policy"
STATE_DICT = "fsdp_config.fsdp_state_dict_type"
PREFETCH = "fsdp_config.fsdp_forward_prefetch"
SYNC = "fsdp_config.fsdp_sync_module_states"
RAM_EFFICIENT = "fsdp_config.fsdp_cpu_ram_efficient_loading"
ORIGINAL_PARAMETERS = "fsdp_config.fsdp_use_orig_params"
CHECKPOINTING = "fsdp_config.fsdp_activation_checkpointing"

NO_SHARD_IN_FSDP2 = "; FSDP2 has none, DDP does the same"


def rules_of_fsdp(config: Config) -> Iterator[Finding]:
    """Check fsdp_config against all rules about it."""
    version = config.fsdp_written.get("fsdp_version", 1)
    if config.engine != "FSDP" or not keys.is_readable("", version, keys.FSDP["fsdp_version"]):
        return
    if "fsdp_version" not in config.fsdp_written and means_fsdp2(config):
        # Under the right version, everything else may be correct
        fix = [set_value(VERSION, 2)]
        yield finding(IGNORED, VERSION, "missing, so FSDP1 runs with FULL_SHARD", fix)
        return
    yield from version_is_written(config)
    yield from strategy_is_under_the_key_of_the_version(config)
    yield from model_is_wrapped(config)
    yield from no_shard_is_deprecated(config)
    yield from state_dict_type_exists(config)
    yield from fsdp2_prefetches_by_itself(config)
    yield from modules_are_synchronized(config)
    yield from optimizer_keeps_its_parameters(config)
    yield from activations_can_be_offloaded(config)
    yield from activations_are_checkpointed_once(config)


def means_fsdp2(config: Config) -> bool:
    """Return whether a file without a version has its strategy in a form that only FSDP2 takes."""
    return isinstance(config.fsdp_written.get(SHARDING_KEY[2]), bool)


def holds_whole_model(config: Config) -> bool:
    """Return whether NO_SHARD is in force."""
    return strategy_run(config.read) == "NO_SHARD"


def version_is_written(config: Config) -> Iterator[Finding]:
    """The default is FSDP1, although `accelerate config` writes 2."""
    if "fsdp_version" not in config.fsdp_written:
        reason = "missing, so FSDP1 runs; `accelerate config` writes 2"
        yield finding(COSTS, VERSION, reason, [set_value(VERSION, 1)])


def model_is_wrapped(config: Config) -> Iterator[Finding]:
    """Without a wrap policy, a sharded model is one unit."""
    policy = str(config.fsdp_written.get("fsdp_auto_wrap_policy", "NO_WRAP"))
    if policy.upper() in ("NO_WRAP", "NONE") and not holds_whole_model(config):
        reason = "the model is one unit: each process gathers all of it at once"
        yield finding(COSTS, WRAP, reason, [set_value(WRAP, "TRANSFORMER_BASED_WRAP")])


def no_shard_is_deprecated(config: Config) -> Iterator[Finding]:
    """DDP does the same, without FSDP1's limits."""
    if config.fsdp_version == 1 and holds_whole_model(config):
        reason = "deprecated in torch; ddp.yaml does the same and takes adapters"
        yield finding(ADVICE, f"fsdp_config.{SHARDING_KEY[1]}", reason)


def state_dict_type_exists(config: Config) -> Iterator[Finding]:
    """NO_SHARD has no shards to save, and FSDP2 no local state."""
    kind = config.fsdp.get("fsdp_state_dict_type")
    if kind == "SHARDED_STATE_DICT" and holds_whole_model(config):
        reason = "there are no shards: torch warns and falls back"
        yield finding(COSTS, STATE_DICT, reason, [set_value(STATE_DICT, "FULL_STATE_DICT")])
    if kind == "LOCAL_STATE_DICT" and config.fsdp_version == 2:
        edits = [set_value(STATE_DICT, "SHARDED_STATE_DICT")]
        yield finding(STOPS, STATE_DICT, "FSDP2 has none", edits)


def fsdp2_prefetches_by_itself(config: Config) -> Iterator[Finding]:
    """Only FSDP1 reads fsdp_forward_prefetch."""
    if config.fsdp_version == 2 and config.fsdp.get("fsdp_forward_prefetch"):
        reason = "FSDP2 does not read it: nothing is prefetched because of it"
        yield finding(COSTS, PREFETCH, reason, [delete(PREFETCH)])


def modules_are_synchronized(config: Config) -> Iterator[Finding]:
    """If only the first process loads the weights, the others must get them from it."""
    is_off = not config.fsdp_written.get("fsdp_sync_module_states", True)
    if not is_off or not config.fsdp["fsdp_cpu_ram_efficient_loading"]:
        return
    reason = "the launcher refuses it while fsdp_cpu_ram_efficient_loading is true, its default"
    if config.fsdp_version == 2:
        fix = delete(SYNC)
    elif "fsdp_cpu_ram_efficient_loading" in config.fsdp_written:
        fix = set_value(SYNC, True)
    else:
        fix = set_value(RAM_EFFICIENT, False)
    yield finding(STOPS, SYNC, reason, [fix])


def optimizer_keeps_its_parameters(config: Config) -> Iterator[Finding]:
    """FSDP1 may replace parameters by flat ones, after the recipes have made their optimizer."""
    if config.fsdp_version == 1 and config.fsdp.get("fsdp_use_orig_params") is False:
        reason = (
            "an optimizer made before prepare keeps the parameters that FSDP1 replaces: "
            "nothing is trained"
        )
        fix = [set_value(ORIGINAL_PARAMETERS, True)]
        yield finding(RECIPE, ORIGINAL_PARAMETERS, reason, fix)


def activations_can_be_offloaded(config: Config) -> Iterator[Finding]:
    """FSDP2 can offload the activations that it checkpoints; FSDP1 cannot offload any."""
    fsdp = config.fsdp
    if not fsdp.get("fsdp_activation_checkpointing_offload"):
        return
    if config.fsdp_version == 1 or not fsdp.get("fsdp_activation_checkpointing"):
        reason = "needs FSDP2 and fsdp_activation_checkpointing"
        fix = "fsdp_version: 2 and fsdp_activation_checkpointing: true"
        yield finding(STOPS, f"{CHECKPOINTING}_offload", reason, fix)


def activations_are_checkpointed_once(config: Config) -> Iterator[Finding]:
    """Nested activation checkpointing recomputes the forward pass once more."""
    if config.fsdp.get("fsdp_activation_checkpointing"):
        reason = "do not combine it with a script's own (the recipes' --gradient_checkpointing)"
        yield finding(ADVICE, CHECKPOINTING, reason)


# ---- The two sharding keys ----
def strategy_is_under_the_key_of_the_version(config: Config) -> Iterator[Finding]:
    """accelerate exports both sharding keys, but each version of FSDP reads only one of them."""
    version = config.fsdp_version
    written = config.fsdp_written
    read, unread = SHARDING_KEY[version], SHARDING_KEY[OTHER_VERSION[version]]
    if not keys.is_readable(read, written.get(read, True), keys.STRATEGY):
        return  # rules_of_values reports it
    if read in written and is_value_of_the_other_version(written[read], version):
        yield value_of_the_other_version(config, read)
    elif unread in written and read in written:
        yield from keys_agree(config, read, unread)
    elif unread in written:
        yield under_the_other_key(config, unread)


def is_value_of_the_other_version(value: object, version: int) -> bool:
    """Return whether a strategy is true or false under FSDP1, or a name or number under FSDP2.

    1 is valid in both: FSDP1 reads it as FULL_SHARD, and FSDP2 as true.
    """
    word = str(value).lower()
    if word == "1":
        return False
    return (word in keys.TRUTHS) == (version == 1)


def value_of_the_other_version(config: Config, key: str) -> Finding:
    """Return the finding on a strategy in the form of the other version, under the right key."""
    other = OTHER_VERSION[config.fsdp_version]
    reason = f"{config.fsdp_written[key]} is a value of FSDP{other}'s {SHARDING_KEY[other]}"
    if config.fsdp[key] == "NO_SHARD":
        reason += NO_SHARD_IN_FSDP2
    return finding(STOPS, f"fsdp_config.{key}", reason, as_the_version_reads_it(config, key))


def keys_agree(config: Config, read: str, unread: str) -> Iterator[Finding]:
    """If both keys are written, the one that is not read must agree."""
    runs = strategy_run(config.read)
    if config.fsdp[unread] not in (runs, config.fsdp[read]):
        reason = f"FSDP{config.fsdp_version} does not read it: {runs} runs, not "
        reason += config.fsdp[unread]
        fix = f"delete it, or change {read}"
        yield finding(IGNORED, f"fsdp_config.{unread}", reason, fix)


def under_the_other_key(config: Config, key: str) -> Finding:
    """Return the finding on a strategy under the key that is not read, so that the default runs."""
    version = config.fsdp_version
    wanted = config.fsdp[key]
    runs = strategy_run(config.read)
    path = f"fsdp_config.{key}"
    fix = as_the_version_reads_it(config, key)
    reason = f"FSDP{version} does not read it: {runs} runs"
    # On a mesh, FSDP2's FULL_SHARD runs as HYBRID_SHARD
    if wanted in (runs, config.fsdp[SHARDING_KEY[version]]):
        return finding(COSTS, path, f"{reason} anyway", fix)
    reason += f", not {wanted}"
    if version == 2 and wanted == "NO_SHARD":
        reason += NO_SHARD_IN_FSDP2
    return finding(IGNORED, path, reason, fix)


def as_the_version_reads_it(config: Config, key: str) -> list[Edit] | str:
    """Return the edits that write the strategy under `key` as the file's version of FSDP reads it.

    If a person has to choose, the fix is returned in words.
    """
    wanted = config.fsdp[key]
    version = config.fsdp_version
    if version == 2 and wanted == "NO_SHARD":
        return [set_value("distributed_type", "MULTI_GPU"), delete("fsdp_config")]
    if version == 2 and "HYBRID" in wanted and mesh_sizes(config.read)["dp_replicate"] == 1:
        return "a mesh in parallelism_config, as in fsdp2_hybrid_shard.yaml"
    right_key = SHARDING_KEY[version]
    value = wanted
    if version == 2:
        value = wanted in ("FULL_SHARD", "HYBRID_SHARD")
    edits: list[Edit] = []
    if key != right_key:
        edits.append(rename(f"fsdp_config.{key}", right_key))
    edits.append(set_value(f"fsdp_config.{right_key}", value))
    return edits
