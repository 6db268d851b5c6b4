# SPDX-License-Identifier: Apache-2.0
"""What accelerate itself makes of a config: its launcher, its plugins and its questionnaire."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accelerate.commands.config import cluster
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
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
    prepare_tpu,
)
from torch.distributed.run import determine_local_world_size

EXPORTED = ("ACCELERATE_", "FSDP_", "PARALLELISM_")


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    """Write a file and return its path."""
    path = folder / name
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Launched:
    """What the launcher makes of a file.

    Attributes:
        environment: what it exports to the processes.
        args: its own arguments.
    """

    environment: dict[str, str]
    args: Namespace


def launched(folder: Path, text: str, *flags: str) -> Launched:
    """Return what accelerate's launcher makes of a file with this text.

    A free port is taken if the file has none.
    """
    path = write(folder, text, "launched.yaml")
    if "main_process_port" not in text:
        flags += ("--main_process_port", "0")
    words = ["--config_file", str(path), *flags, "train.py"]
    args = launch_command_parser().parse_args(words)
    args, defaults, has_precision = _validate_launch_command(args)
    fields = list(defaults.deepspeed_config)
    if has_precision:
        fields.append("mixed_precision")
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as launch_command does
    if args.use_deepspeed:
        _, environment = prepare_deepspeed_cmd_env(args)
    elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        environment = prepare_multi_gpu_env(args)
    elif args.tpu:
        _, environment = prepare_tpu(args, {})
    else:
        with mock.patch("accelerate.utils.launch._get_mpirun_args", return_value=["mpirun"] * 5):
            _, environment = prepare_simple_launcher_cmd_env(args)
    exported = {name: environment[name] for name in environment if name.startswith(EXPORTED)}
    return Launched(exported, args)


def fsdp_run(folder: Path, text: str) -> dict[str, str]:
    """Return FSDP's settings."""
    with patch_environment(**launched(folder, text).environment):
        plugin = FullyShardedDataParallelPlugin()
    return {name: str(value) for name, value in vars(plugin).items() if name != "param_init_fn"}


def deepspeed_run(folder: Path, text: str, *flags: str) -> dict[str, Any]:
    """Return the DeepSpeed config that comes of a file."""
    environment = launched(folder, text, *flags).environment
    with patch_environment(**environment):
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    int(environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", 1))  # as Accelerator() does
    return plugin.deepspeed_config


@dataclass(frozen=True)
class Outcome:
    """What comes of a file: what accelerate would do, or why it stops.

    Attributes:
        state: {name: value} of what the launcher passes on, and of its own arguments that count.
        stopped: the error; "" if it runs.
    """

    state: dict[str, str]
    stopped: str = ""

    def changes(self, other: "Outcome") -> set[str]:
        """Return the names whose values differ."""
        names = {*self.state, *other.state}
        return {name for name in names if self.state.get(name) != other.state.get(name)}


# Arguments of the launcher that are no variables of the environment
COUNTING_ARGUMENTS = (
    "use_deepspeed",
    "use_fsdp",
    "multi_gpu",
    "num_processes",
    "num_machines",
    "main_process_port",
    "rdzv_backend",
    "same_network",
    "mpirun_hostfile",
)


def outcome(folder: Path, text: str) -> Outcome:
    """Return what comes of a file: through the launcher, torchrun's count, plugins and mesh."""
    try:
        launch = launched(folder, text)
        args = launch.args
        with patch_environment(**launch.environment):
            if args.use_fsdp or args.multi_gpu or args.use_deepspeed:
                count = determine_local_world_size(args.nproc_per_node)
                if count < 1:
                    raise ValueError("no process")
            if args.use_fsdp:
                FullyShardedDataParallelPlugin()
            if args.use_deepspeed:
                deepspeed_run(folder, text)
            validate_mesh(args)
            if not args.use_deepspeed:
                TorchDynamoPlugin()
    except (ValueError, KeyError, AttributeError, TypeError, AssertionError) as error:
        return Outcome({}, f"{type(error).__name__}: {error}")
    state = {name: str(getattr(args, name, None)) for name in COUNTING_ARGUMENTS}
    if "main_process_port" not in text:
        state["main_process_port"] = "a free one"
    state |= launch.environment
    # The names of the keys in deepspeed_config, which only count beside a JSON
    state.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    return Outcome(state)


def validate_mesh(args: Namespace) -> None:
    """Raise what ParallelismConfig raises in the processes."""
    if not args.use_parallelism_config or not (
        args.use_fsdp or args.multi_gpu or args.use_deepspeed
    ):
        return
    version = int(getattr(args, "fsdp_version", 1))
    engine = DistributedType.FSDP if args.use_fsdp else DistributedType.MULTI_GPU
    if args.use_deepspeed:
        engine = DistributedType.DEEPSPEED
    accelerator = Namespace(
        multi_device=args.multi_gpu,
        num_processes=int(args.num_processes),
        is_fsdp2=args.use_fsdp and version == 2,
        distributed_type=engine,
        is_main_process=False,
    )
    ParallelismConfig()._validate_accelerator(accelerator)


def run(folder: Path, text: str) -> None:
    """Go as far as accelerate goes without processes and a model; raises where it stops."""
    args = launched(folder, text).args
    if args.use_fsdp:
        fsdp_run(folder, text)
    elif args.use_deepspeed:
        deepspeed_run(folder, text)


def questionnaire(monkeypatch: pytest.MonkeyPatch, folder: Path, answers: dict[str, Any]) -> Path:
    """Return the file that `accelerate config` writes.

    Args:
        monkeypatch: of the test.
        folder: for the file.
        answers: by a part of the question; Enter is the answer to any other.
    """

    def answer_to(question: str) -> Any:
        for part, answer in answers.items():
            if part in question:
                return answer
        return None

    def ask_options(question: str, options: Any = (), convert: Any = None, default: int = 0) -> Any:
        number = default
        answer = answer_to(question)
        if answer is not None:
            number = [str(option) for option in options].index(str(answer))
        return convert(number) if convert else number

    def ask_field(
        question: str, convert: Any = None, default: Any = None, error_message: Any = None
    ) -> Any:
        answer = answer_to(question)
        if answer is None:
            return default
        return convert(answer) if convert else answer

    monkeypatch.setattr(cluster, "_ask_options", ask_options)
    monkeypatch.setattr(cluster, "_ask_field", ask_field)
    path = folder / "default_config.yaml"
    cluster.get_cluster_input().to_yaml_file(str(path))
    return path


GPUS = {"type of machine": "multi-GPU", "GPU(s) should be used": "8", "mixed precision": "bf16"}
