# SPDX-License-Identifier: Apache-2.0
"""The base and its adapters without weights: which parameters change, and which tensors do it.

peft says what a configuration of adapters changes, since only it knows how it resolves names,
patterns of ranks, and parameters of experts. transformers says under which names the files have a
parameter: for a mixture, the experts of a layer are one parameter of the model, but many tensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Embedding, Linear, LoraLayer, ParamWrapper
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.auto import AutoHfQuantizer

from components import upstream
from exits import Exit, first_line, stop
from generation.loading import LOAD_ERRORS
from merging.adapter import AdapterFolder, read_shapes
from merging.quantized import Quantization

PREFIX = "base_model.model."  # names in a file of adapters begin with it
ADAPTER = "default"
SHOWN = 3  # names in a message


@dataclass(frozen=True)
class Target:
    """A parameter with an adapter.

    Attributes:
        parameter: the name in the model.
        kind: "linear", "embedding" or "experts".
        a, b: the names of the adapter's matrices in its file.
        magnitude: the name of DoRA's magnitudes there; None for LoRA.
        is_transposed: whether the parameter is stored as [in, out].
        num_experts: of a parameter of experts, or else 1.
    """

    parameter: str
    kind: str
    a: str
    b: str
    magnitude: str | None
    scaling: float
    is_transposed: bool = False
    num_experts: int = 1


@dataclass(frozen=True)
class Skeleton:
    """A base without weights, and what adapters change in it.

    Attributes:
        model: of transformers, on the meta device, without adapters.
        targets: the parameters with adapters.
        whole: {parameter: name of the tensor that replaces it}, of modules that were saved whole.
    """

    model: Any
    targets: tuple[Target, ...]
    whole: Mapping[str, str]

    @property
    def tied(self) -> dict[str, str]:
        """Return {parameter: the one that it is tied to}."""
        return dict(getattr(self.model, "all_tied_weights_keys", None) or {})

    def parts(self, parameter: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of the files that make up a value of a parameter, by name."""
        return revert_weight_conversion(self.model, {parameter: value})


def make_base(adapter: AdapterFolder) -> Any:
    """Return the base on the meta device. Raises SystemExit with 65 or 69 if there is none."""
    try:
        model = build_without_weights(adapter.base, adapter.revision)
    except LOAD_ERRORS as error:
        stop(adapter_code(adapter), f"{adapter.base}: cannot be loaded: {first_line(error)}")
    if getattr(model.config, "quantization_config", None):
        fix = "name the model that it was made from in adapter_config.json and run.json"
        stop(Exit.DATA, f"{adapter.base}: its files are quantized, which cannot be merged; {fix}")
    return model


def build_without_weights(name: str, revision: str = "main") -> Any:
    """Return the causal language model of a folder or hub id on the meta device."""
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    return model


def adapter_code(adapter: AdapterFolder) -> Exit:
    """Return the exit code for a base that cannot be loaded: a folder, or a name on the hub."""
    return Exit.DATA if adapter.source.is_local else Exit.NO_HUB


def read_skeleton(adapter: AdapterFolder) -> Skeleton:
    """Return the base and the adapters of a folder without weights.

    Raises SystemExit with 65 if the file of the adapters does not hold what its configuration says.
    """
    upstream.silence_old_name_of_checkpointing()
    model = make_base(adapter)
    shapes = read_shapes(adapter)
    try:
        with init_empty_weights(include_buffers=False):
            wrapped = get_peft_model(model, adapter.config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        stop(Exit.DATA, f"{adapter.path}: its adapters do not fit its base: {first_line(error)}")
    expected = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    extra = find_saved_embeddings(shapes, expected, wrapped)
    for problem in find_differences(shapes, expected, extra):
        stop(Exit.DATA, f"{adapter.path}: {problem}")
    targets = tuple(find_targets(wrapped))
    whole = {}
    for name in (*expected, *extra):
        # Beside adapters of an embedding peft saves its base, which was not trained
        if ".lora_" not in name and ".base_layer." not in name:
            whole[name.removeprefix(PREFIX)] = name
    return Skeleton(wrapped.unload(), targets, whole)


def find_saved_embeddings(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, torch.Tensor], wrapped: Any
) -> list[str]:
    """Return the names of embeddings that peft saved beside the adapters, as it does on its own."""
    parameters = {}
    for name, weight in wrapped.named_parameters(remove_duplicate=False):
        parameters[name] = weight.shape
    found = []
    for name, shape in shapes.items():
        if name not in expected and parameters.get(name) == torch.Size(shape):
            found.append(name)
    return found


def find_differences(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, torch.Tensor], extra: list[str]
) -> Iterator[str]:
    """Yield what a file of adapters lacks, has too much, or has in another shape."""
    missing = sorted(expected.keys() - shapes.keys())
    if missing:
        yield f"adapter_model.safetensors lacks {shorten(missing)}, which its configuration names"
    unknown = sorted(shapes.keys() - expected.keys() - set(extra))
    if unknown:
        yield f"adapter_model.safetensors has {shorten(unknown)}, for which the base has no place"
    for name in sorted(expected.keys() & shapes.keys()):
        wanted = list(expected[name].shape)
        if list(shapes[name]) != wanted:
            yield (
                f"{name} is {list(shapes[name])}, but its configuration and its base make it "
                f"{wanted}: another rank, or another base"
            )


def shorten(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    text = ", ".join(names[:SHOWN])
    more = len(names) - SHOWN
    return f"{text} and {more} more" if more > 0 else text


def find_targets(wrapped: Any) -> Iterator[Target]:
    """Yield the parameters of a peft model that have adapters.

    Raises SystemExit with 65 for a kind of layer that is not merged here.
    """
    for path, layer in wrapped.named_modules():
        if isinstance(layer, LoraLayer):
            yield make_target(path, layer)


def make_target(path: str, layer: Any) -> Target:
    """Return the target of one layer of peft's."""
    module = path.removeprefix(PREFIX).replace(".base_layer", "")
    use_dora = layer.use_dora.get(ADAPTER, False)
    magnitude = f"{path}.lora_magnitude_vector" if use_dora else None
    a = f"{path}.lora_A.weight"
    b = f"{path}.lora_B.weight"
    scaling = layer.scaling[ADAPTER]
    if isinstance(layer, ParamWrapper):
        parameter = f"{module}.{layer.parameter_name}"
        if layer.get_param().ndim == 2:
            return Target(parameter, "linear", a, b, None, scaling)
        is_transposed = not layer._did_swap_in_out_features
        return Target(
            parameter, "experts", a, b, None, scaling, is_transposed, num_experts=layer.num_experts
        )
    if isinstance(layer, Embedding) and not use_dora:
        a = f"{path}.lora_embedding_A"
        b = f"{path}.lora_embedding_B"
        return Target(f"{module}.weight", "embedding", a, b, None, scaling)
    if isinstance(layer, Linear):
        return Target(f"{module}.weight", "linear", a, b, magnitude, scaling, layer.fan_in_fan_out)
    name = type(layer.get_base_layer()).__name__
    stop(Exit.DATA, f"{module}: adapters of a layer of the type {name} are not merged")


def find_quantized(model: Any, quantization: Quantization) -> set[str]:
    """Return the parameters that are quantized when a base is loaded as in training.

    Args:
        model: the base on the meta device; its linear layers are replaced.
    """
    quantizer: Any = AutoHfQuantizer.from_config(quantization.config(), pre_quantized=False)
    with init_empty_weights(include_buffers=False):
        quantizer.preprocess_model(model=model, dtype=quantization.dtype, device_map=None)
    found = set()
    for path, module in model.named_modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            found.add(f"{path}.weight")
    return found
