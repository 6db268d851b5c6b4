# SPDX-License-Identifier: Apache-2.0
"""Rules on what is launched: engine, processes, machines, GPUs and mixed precision."""

from collections.abc import Iterator
from typing import Any

from components import accelerate_keys as keys
from components.config_findings import (
    COSTS,
    IGNORED,
    STOPS,
    UNTESTED,
    Finding,
    delete,
    finding,
    rename,
    set_value,
)
from components.config_reading import NOT_GIVEN, Config
from components.config_rules_keys import is_placeholder


# ---- Engine ----
def rules_of_engine(config: Config) -> Iterator[Finding]:
    """The engine fits the sections of the file, and reads at most one of them."""
    path = "distributed_type"
    engine = config.engine
    others = sections_of_other_engines(config)
    fix = "one of FSDP, DEEPSPEED, MULTI_GPU, NO"
    if path not in config.written:
        if len(others) == 1:
            fix = [set_value(path, *others)]
        yield finding(STOPS, path, "missing", fix)
    elif config.written[path] is None:
        yield finding(IGNORED, path, "empty: one process runs", fix)
    elif engine and others:
        yield from sections_of_others_are_not_read(config, others)
    elif engine == "NO" and config.processes > 1:
        reason = f"one process runs, not {config.processes}"
        yield finding(IGNORED, path, reason, "MULTI_GPU, or num_processes: 1")
    elif engine == "MULTI_CPU":
        yield from mpirun_starts_the_processes(config)
    if engine in ("XLA", "MEGATRON_LM", "MULTI_CPU"):
        yield finding(UNTESTED, path, f"the recipes are not tested under {engine}", fix)


def sections_of_other_engines(config: Config) -> dict[str, str]:
    """Return {engine: section} of the sections that this file's engine does not read.

    A section that only sets options of other topics is read.
    """
    others = {}
    for engine, section in keys.SECTION_OF_ENGINE.items():
        options = {option.path for option in config.options_in_sections}
        content = config.written.get(section)
        if engine == config.engine or not content:
            continue
        if not isinstance(content, dict) or any((section, key) not in options for key in content):
            others[engine] = section
    return others


def sections_of_others_are_not_read(config: Config, others: dict[str, str]) -> Iterator[Finding]:
    """An engine reads its own section only; if that is missing, the engine itself may be wrong."""
    own_section = keys.SECTION_OF_ENGINE.get(str(config.engine))
    if config.written.get(own_section):
        reason = f"{config.engine} runs and does not read it"
        for section in others.values():
            holds_options = any(option.path[0] == section for option in config.options_in_sections)
            fix = "delete all but the options" if holds_options else [delete(section)]
            yield finding(IGNORED, section, reason, fix)
        return
    sections = " or ".join(others.values())
    reason = f"{config.engine} runs and does not read {sections}"
    fix = f"{' or '.join(others)}, or delete {sections}"
    yield finding(IGNORED, "distributed_type", reason, fix)


def mpirun_starts_the_processes(config: Config) -> Iterator[Finding]:
    """Only mpirun starts several processes on CPUs, and the launcher needs its list of hosts."""
    hosts = config.read.get("mpirun_config", {}).get("mpirun_hostfile")
    if hosts is None and config.processes > 1:
        reason = f"one process runs, not {config.processes}, unless mpirun starts the launcher"
        fix = "mpirun_hostfile in mpirun_config"
        yield finding(IGNORED, "distributed_type", reason, fix)


# ---- Processes, machines, GPUs ----
def rules_of_processes(config: Config) -> Iterator[Finding]:
    """Processes divide evenly among machines that can reach each other and have enough GPUs."""
    yield from there_is_a_machine(config)
    yield from processes_spread_over_machines(config)
    yield from machine_is_one_of_them(config)
    yield from every_process_has_a_gpu(config)
    yield from port_exists(config)
    yield from machines_have_an_address(config)
    yield from deepspeed_reaches_all_machines(config)
    yield from launcher_reads_the_key(config)


def there_is_a_machine(config: Config) -> Iterator[Finding]:
    """num_machines is 1 or more."""
    written = config.written.get("num_machines")
    if type(written) is int and written < 1:
        fix = [set_value("num_machines", 1)]
        yield finding(COSTS, "num_machines", f"{written}: one machine runs", fix)


def processes_spread_over_machines(config: Config) -> Iterator[Finding]:
    """num_processes is a multiple of num_machines, since all machines start the same number."""
    path = "num_processes"
    processes = config.processes
    machines = config.machines
    if processes == NOT_GIVEN:
        written = config.written.get(path)
        if config.engine not in ("NO", None) and written in (None, NOT_GIVEN):
            reason = "missing: the launcher needs --num_processes"
            yield finding(COSTS, path, reason, "a number, or the flag")
        return
    if config.engine in keys.WITHOUT_TORCHRUN:
        return  # one process, or as many as mpirun starts
    on_each = processes // machines
    if on_each < 1:
        reason = f"{processes} processes on {machines} machines"
        yield finding(STOPS, path, reason, "at least one on each")
    elif processes % machines:
        reason = f"{machines} machines start {on_each} each: {on_each * machines} run"
        yield finding(IGNORED, path, reason, "a multiple of num_machines")


def machine_is_one_of_them(config: Config) -> Iterator[Finding]:
    """machine_rank counts from 0; on one machine it is not read."""
    if not config.is_read(("machine_rank",)):
        return
    if not 0 <= config.read["machine_rank"] < config.machines:
        reason = "the machines would wait for each other"
        yield finding(STOPS, "machine_rank", reason, f"0 to {config.machines - 1}")


def every_process_has_a_gpu(config: Config) -> Iterator[Finding]:
    """gpu_ids names a GPU for each process of a machine; on one machine, MULTI_* needs two."""
    ids = config.read["gpu_ids"]
    if ids == "all" or config.engine in ("MULTI_CPU", "XLA"):
        return
    needed = max(config.processes // config.machines, 1)
    if config.machines == 1 and str(config.engine).startswith("MULTI"):
        needed = max(needed, 2)
    if len(ids.split(",")) < needed:
        reason = f"{needed} processes on a machine need as many GPUs"
        yield finding(STOPS, "gpu_ids", reason, "more of them, or all")


def port_exists(config: Config) -> Iterator[Finding]:
    """A port has a number of 16 bits; at 0, the launcher takes a free one."""
    port = config.read.get("main_process_port", 0)
    if config.uses_torchrun and not 0 <= port <= 65535:
        yield finding(STOPS, "main_process_port", f"{port}: no such port", "0 to 65535")


def machines_have_an_address(config: Config) -> Iterator[Finding]:
    """Several machines meet at the address of one; with GPUs, the default port is 29500."""
    ip = config.read.get("main_process_ip")
    if config.machines > 1 and is_placeholder(ip):
        reason = f"{ip}: accelerate fills in no variables, and looks for a machine of this name"
        yield finding(STOPS, "main_process_ip", reason, "an address, or the flag")
    address = ["main_process_ip"]
    if config.engine in ("NO", "MULTI_CPU"):
        address.append("main_process_port")
    if config.machines > 1 and not all(config.read.get(key) for key in address):
        fix = f"{' and '.join(address)}, or the flags"
        yield finding(COSTS, "num_machines", "the machines have no address to connect to", fix)


def deepspeed_reaches_all_machines(config: Config) -> Iterator[Finding]:
    """DeepSpeed's launchers need a list of hosts, unless each machine is launched by itself."""
    if config.machines == 1 or config.engine != "DEEPSPEED":
        return
    if config.zero["deepspeed_multinode_launcher"] == "standard":
        return
    if not config.zero.get("deepspeed_hostfile"):
        reason = "without a deepspeed_hostfile DeepSpeed trains on this machine only"
        fix = "deepspeed_multinode_launcher: standard and a launch on each machine"
        yield finding(IGNORED, "num_machines", reason, f"{fix}, or a deepspeed_hostfile")


def launcher_reads_the_key(config: Config) -> Iterator[Finding]:
    """Some settings only take effect as flags of the launcher."""
    for key, without_effect in keys.COMMAND_LINE_ONLY.items():
        if without_effect is None or read_at_top_level(config, key) == without_effect:
            continue
        if key == "rdzv_backend" and config.machines == 1:
            continue
        reason = "accelerate launch never takes it from the file"
        yield finding(COSTS, key, reason, f"the flag --{key} instead")


def read_at_top_level(config: Config, key: str) -> Any:
    """Return the value of the top level as accelerate would read it, or what has no effect."""
    without_effect = keys.COMMAND_LINE_ONLY[key]
    kind = keys.TOP_LEVEL[key]
    value = config.written.get(key, without_effect)
    in_sections = [option.home for option in config.options_in_sections]
    if (key,) in in_sections or not keys.is_readable(key, value, kind):
        return without_effect
    return keys.read_value(key, value, kind)


# ---- Mixed precision ----
def rules_of_precision(config: Config) -> Iterator[Finding]:
    """mixed_precision has its current name, and is one in which the recipes are tested."""
    yield from precision_has_its_current_name(config)
    if config.read["mixed_precision"] == "fp8":
        yield from fp8_names_its_backend(config)
        yield finding(UNTESTED, "mixed_precision", "the recipes are not tested in fp8", "bf16")


def precision_has_its_current_name(config: Config) -> Iterator[Finding]:
    """mixed_precision was called fp16 in older versions."""
    if "fp16" not in config.written:
        return
    if "mixed_precision" in config.written:
        reason = "an old name, not read beside mixed_precision"
        yield finding(COSTS, "fp16", reason, [delete("fp16")])
        return
    value = "fp16" if config.read.get("fp16") else "no"
    edits = [rename("fp16", "mixed_precision"), set_value("mixed_precision", value)]
    yield finding(COSTS, "fp16", "an old name", edits)


def fp8_names_its_backend(config: Config) -> Iterator[Finding]:
    """Without a name, accelerate takes the first backend that is installed."""
    if "fp8_backend" not in config.read.get("fp8_config", {}):
        reason = "fp8 runs on the first installed of AO, TE and MSAMP"
        yield finding(COSTS, "mixed_precision", reason, "fp8_backend in fp8_config, or bf16")
