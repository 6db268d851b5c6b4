# SPDX-License-Identifier: Apache-2.0
"""The whole tensors of a model, before a strategy gives each rank its part of them."""

import gc
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import _get_parameter_plan

# (elements, rows, whether it is trained) of each tensor of a model, which its strategy may split;
# under tensor and expert parallelism of the part that the model's plan gives to a rank
Shapes = list[tuple[int, int, bool]]
# The style of a plan that spreads the experts of a weight, its first dimension
OF_EXPERTS = "grouped_gemm"
# {words in a style of a plan: the dimension that it splits}; the first ones that are in it count
SPLIT_DIMENSION = {"embedding_rowwise": -2, "embedding_colwise": -1, "colwise": -2, "rowwise": -1}
# The matrix of an adapter that is split with a weight's dimension; the other one is whole
SPLIT_MATRIX = {-2: "lora_B", -1: "lora_A"}
# What peft puts into the names of weights
OF_PEFT = ("base_layer", "original_module", "modules_to_save", "default")


@dataclass(frozen=True)
class Part:
    """What a rank has to hold.

    Attributes:
        tensors: whole ones; in a pipeline those of its own stages.
        shards: in a pipeline, the ranks that share its stages.
        place: in a pipeline, that of this rank among those.
    """

    tensors: Shapes
    shards: int | None = None
    place: int | None = None


def describe(model: Any) -> Shapes:
    """Return the tensors of a model that is not prepared, tied ones once.

    ZeRO-3 has split such a model already and keeps the shape of each whole tensor in `ds_shape`.
    Experts are spread over ranks already. FSDP2 shards these parts over the ranks that have the
    same experts, which comes to one shard for each rank, as of all other weights.
    """
    shards_experts = any(isinstance(module, FSDPModule) for module in model.modules())
    plan = getattr(model, "ep_plan", None) or {}
    described = []
    for name, parameter in model.named_parameters():
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        dimension = planned_dimension(model, name, len(shape))
        if dimension is not None:
            shape[dimension] //= model.tp_size
        elif plan and isinstance(parameter, DTensor) and not shards_experts:
            if _get_parameter_plan(name.removeprefix("base_model.model."), plan) == OF_EXPERTS:
                shape[0] //= parameter.device_mesh.size()
        rows = shape[0] if shape else 1
        described.append((math.prod(shape), rows, parameter.requires_grad))
    return described


def planned_dimension(model: Any, name: str, dimensions: int = 2) -> int | None:
    """Return the dimension by which the plan of tensor parallelism splits a weight, if it does.

    Args:
        name: of the weight, as peft names it if the model has adapters.
        dimensions: their number, 1 for a bias.
    """
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    words = name.removeprefix("base_model.model.").split(".")
    matrix = {"lora_A", "lora_B"}.intersection(words)
    planned = ".".join(word for word in words if word not in {*OF_PEFT, *matrix})
    style = _get_parameter_plan(planned, model.tp_plan) or ""
    dimension = next((split for word, split in SPLIT_DIMENSION.items() if word in style), None)
    if dimension is None or (matrix and SPLIT_MATRIX[dimension] not in matrix):
        return None
    if dimensions == 1:  # A bias is as long as the output.
        return 0 if dimension == -2 else None
    return dimension


# ---- Pipelines, whose model no call of Accelerator.prepare is given ----
def find_pipeline() -> Any | None:
    """Return the pipeline that a recipe has made, if it has; nothing hands it out."""
    module = sys.modules.get("extras.pipeline.pipeline")
    if module is None:
        return None
    return next((one for one in gc.get_objects() if type(one) is module.Pipeline), None)


def part_of_pipeline(pipeline: Any) -> Part:
    """Return what this rank has to hold for its stages."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(pipeline.model.config)
    layout = pipeline.layout
    shards = layout.num_pipelines if pipeline.is_sharded else 1
    return Part(tensors_of(whole, pipeline.stages), shards, layout.data_rank)


def tensors_of(whole: Any, stages: Sequence[Any]) -> Shapes:
    """Return the tensors of a whole model that belong to some of its stages.

    The first stage has the embedding, the last one norm and output head; if these two share their
    weight, the last one has it too.
    """
    layers = {number for stage in stages for number in stage.layers}
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    has_embedding = has_first or (has_last and whole.config.tie_word_embeddings)
    found = []
    names = [name for name, _ in whole.named_parameters()]
    for name, shape in zip(names, describe(whole), strict=True):
        layer = re.search(r"\blayers\.(\d+)\.", name)
        belongs = has_embedding if "embed_tokens" in name else has_last
        if layer:
            belongs = int(layer[1]) in layers
        if belongs:
            found.append(shape)
    return found
