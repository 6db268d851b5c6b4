# SPDX-License-Identifier: Apache-2.0
"""A folder with adapters: its configuration, its tensors, and the run that wrote it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import PeftConfig
from safetensors import SafetensorError, safe_open

from exits import Exit, first_line, stop
from generation.loading import Source, find_source
from generation.recorded import arguments_of_run, find_run
from merging.quantized import Quantization

WEIGHTS = "adapter_model.safetensors"
# Values of init_lora_weights that leave the base as it is; the others also change its weights
PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")
# Options of LoraConfig with which an adapter is more than two matrices and a magnitude
NOT_MERGED = (
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "ensure_weight_tying",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "megatron_config",
)


@dataclass(frozen=True)
class AdapterFolder:
    """Adapters of a causal language model, and what their run says of them.

    Attributes:
        source: the folder, and the folder or hub id of the base.
        config: peft's LoraConfig.
        arguments: those of the run; {} without a run.json.
        quantization: that of the base in training; None if it was not quantized.
    """

    source: Source
    config: Any
    arguments: Mapping[str, Any]
    quantization: Quantization | None

    @property
    def path(self) -> Path:
        """Return the folder."""
        return Path(self.source.name)

    @property
    def base(self) -> str:
        """Return the folder or hub id of the base."""
        return self.source.weights

    @property
    def revision(self) -> str:
        """Return the revision of the base on the hub."""
        return self.source.revision


def read_adapter_folder(name: str) -> AdapterFolder:
    """Return the adapters in a folder.

    Raises SystemExit with 64 if the folder has none, with 65 if they cannot be merged.
    """
    source = find_source(name)
    if source.base is None:
        stop(Exit.USAGE, f"{name}: has no adapter_config.json, so there is nothing to merge")
    try:
        config: Any = PeftConfig.from_pretrained(name)
    except (OSError, ValueError, TypeError, KeyError) as error:
        stop(Exit.DATA, f"{name}/adapter_config.json: {first_line(error)}")
    for problem in find_unsupported(config):
        stop(Exit.DATA, f"{name}: {problem}")
    arguments = arguments_of_run(Path(name))
    for problem in find_other_base(source.base, arguments):
        stop(Exit.DATA, f"{name}: {problem}")
    try:
        quantization = Quantization.of_run(arguments)
    except ValueError as error:
        stop(Exit.DATA, f"{find_run(Path(name))}: {error}")
    return AdapterFolder(source, config, arguments, quantization)


def find_unsupported(config: Any) -> Iterator[str]:
    """Yield why adapters with a configuration of peft are not merged here."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        yield f"its adapters are of the type {kind}; only LoRA, rsLoRA and DoRA are merged"
        return
    if config.task_type != "CAUSAL_LM":
        task = getattr(config.task_type, "value", config.task_type)
        yield f"its task is {task}; only adapters of causal language models are merged"
    if config.bias != "none":
        yield f"its adapters also train biases (bias={config.bias}), which is not merged"
    for option in NOT_MERGED:
        if getattr(config, option, None):
            yield f"its adapters use peft's {option}, which is not merged"
    if config.init_lora_weights not in PLAIN_STARTS:
        yield (
            f"its adapters began with init_lora_weights={config.init_lora_weights}, which changed "
            "the base; convert them with peft's path_initial_model_for_weight_conversion first"
        )


def find_other_base(base: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem if the run was on another base than the one that its adapters name."""
    trained_on = arguments.get("model_name_or_path", base)
    if Path(base).is_absolute() and not Path(trained_on).exists():
        return  # It is a path from the folder in which the training was started.
    if Path(trained_on).resolve() != Path(base).resolve():
        yield (
            f"adapter_config.json names the base {base}, but run.json says that the adapters were "
            f"trained on {trained_on}; correct the one that is wrong"
        )


def read_shapes(adapter: AdapterFolder) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors of adapters. Raises SystemExit with 65."""
    path = adapter.path / WEIGHTS
    if not path.is_file():
        stop(Exit.DATA, f"{adapter.path}: has no {WEIGHTS}; save the adapters as safetensors")
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        stop(Exit.DATA, f"{path}: cannot be read: {first_line(error)}")
