# SPDX-License-Identifier: Apache-2.0
"""What the rules of recipes/extras/configs say is what the installed accelerate does.

Its launcher's reading and its plugins are run on each broken config: a key of which the rules say
that it is not read has no effect. Without it, accelerate does the same.

    pytest evidence/test_configs.py

Run it when accelerate or DeepSpeed is upgraded: what a newer version reads is no fault any more.
"""

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedType,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    patch_environment,
)
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from broken_configs import BROKEN
from core.config_names import Fault, find_unknown_keys, read_command
from extras.configs.rules import check

EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
# Arguments of the launcher that are no variables of the environment
ARGUMENTS = ("use_deepspeed", "use_fsdp", "multi_gpu", "num_processes", "num_machines")
# {version of FSDP: the key of a strategy that it does not read}
UNREAD = {1: "fsdp_reshard_after_forward", 2: "fsdp_sharding_strategy"}
# What a reason says of a key that has no effect
CLAIMS = ("no such key", "does not read it", "nothing of it is read", "not passed on")


def outcome(folder: Path, content: dict) -> tuple[dict[str, str], str]:
    """Return what accelerate would pass on to its processes, and why it stops, or ""."""
    path = folder / "launched.yaml"
    path.write_text(yaml.safe_dump(content))
    words = ["--config_file", str(path), "--main_process_port", "0", "train.py"]
    try:
        args, defaults, has_precision = _validate_launch_command(read_command(words, "."))
        fields = [*defaults.deepspeed_config, *["mixed_precision"] * has_precision]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        state = {name: str(getattr(args, name, None)) for name in ARGUMENTS}
        return state | what_is_passed_on(args), ""
    except Exception as error:  # of any kind
        return {}, f"{type(error).__name__}: {error}"


def what_is_passed_on(args: Namespace) -> dict[str, str]:
    """Return the environment of the processes, and what the plugins make of it."""
    if args.use_deepspeed:
        _, environment = prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.multi_gpu:
        environment = prepare_multi_gpu_env(args)
    else:
        _, environment = prepare_simple_launcher_cmd_env(args)
    made: dict[str, Any] = {k: v for k, v in environment.items() if k.startswith(EXPORTED)}
    made.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # only names, which count beside a JSON
    with patch_environment(**made):
        if args.use_fsdp:
            plugin = FullyShardedDataParallelPlugin()
            unread = ["param_init_fn", UNREAD[plugin.fsdp_version]]
            if plugin.fsdp_version == 2:
                unread.append("fsdp_forward_prefetch")
            made |= {name: str(value) for name, value in vars(plugin).items()}
            for name in unread:  # by the wrapping of the model
                made.pop(name.upper(), None)
                made.pop(name.removeprefix("fsdp_"), None)
        if args.use_deepspeed:
            plugin = DeepSpeedPlugin()
            plugin.set_mixed_precision(made["ACCELERATE_MIXED_PRECISION"])
            int(made.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))  # as Accelerator() does
            made["deepspeed"] = str(plugin.deepspeed_config)
        else:
            TorchDynamoPlugin()
        if args.use_parallelism_config and (args.use_fsdp or args.multi_gpu or args.use_deepspeed):
            ParallelismConfig()._validate_accelerator(accelerator_of(args))
    return made


def accelerator_of(args: Namespace) -> Namespace:
    """Return what the check of a mesh asks of an Accelerator."""
    engine = DistributedType.FSDP if args.use_fsdp else DistributedType.MULTI_GPU
    if args.use_deepspeed:
        engine = DistributedType.DEEPSPEED
    return Namespace(
        multi_device=args.multi_gpu,
        num_processes=int(args.num_processes),
        is_fsdp2=args.use_fsdp and int(args.fsdp_version) == 2,
        distributed_type=engine,
        is_main_process=False,
    )


def without(content: dict, fault: Fault) -> dict:
    """Return a config without the key of a fault."""
    content = copy.deepcopy(content)
    *sections, key = fault.key.split(".")
    inner = content
    for section in sections:
        inner = inner[section]
    inner.pop(key, None)
    return content


@pytest.mark.parametrize("name", BROKEN)
def test_a_key_that_is_not_read_has_no_effect(name, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)  # FSDP1 asks for it
    path = tmp_path / "config.yaml"
    path.write_text(BROKEN[name].text)
    content = yaml.safe_load(BROKEN[name].text)
    state, stopped = outcome(tmp_path, content)
    found = [*find_unknown_keys(str(path)), *check(str(path), for_recipes=False)]
    for fault in found:
        if any(claim in fault.reason for claim in CLAIMS) and not stopped:
            assert outcome(tmp_path, without(content, fault)) == (state, ""), fault
