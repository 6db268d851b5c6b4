# SPDX-License-Identifier: Apache-2.0
"""Hooks on a pipeline, whose model no call of `Accelerator.prepare` is given."""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import Module
from torch.optim import Optimizer

from rehearsal.step_hooks import Shapes, describe


@dataclass(frozen=True)
class Part:
    """What a rank of a pipeline has to hold.

    Attributes:
        tensors: those of its own stages, whole.
        shards: ranks that share its stages.
        place: of this rank among those.
    """

    tensors: Shapes
    shards: int
    place: int


PartAction = Callable[[Module, Optimizer, Part], None]


def when_pipelined(action: PartAction) -> None:
    """Call action(model, optimizer, part) once a recipe has made a pipeline and its optimizer.

    The module of pipelines is not imported here, since most recipes have none.
    """
    make = Accelerator.__init__

    @functools.wraps(make)
    def make_and_watch(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        module = sys.modules.get("extras.pipeline.pipeline")
        if module is not None:
            watch(module.Pipeline, action)

    Accelerator.__init__ = make_and_watch


def watch(pipelines: Any, action: PartAction) -> None:
    """Call the action for the next pipeline of a class, at the next call of `prepare`."""
    make = pipelines.__init__

    @functools.wraps(make)
    def make_and_note(self: Any, args: Any, layout: Any, stages: Sequence[Any], model: Any) -> None:
        make(self, args, layout, stages, model)
        part = part_of(args, layout, stages)
        accelerator = layout.accelerator
        prepare = accelerator.prepare

        @functools.wraps(prepare)
        def prepare_and_call(*prepared: Any, **kwargs: Any) -> Any:
            result = prepare(*prepared, **kwargs)
            accelerator.prepare = prepare
            action(model, result, part)
            return result

        accelerator.prepare = prepare_and_call

    pipelines.__init__ = make_and_note


def part_of(args: Any, layout: Any, stages: Sequence[Any]) -> Part:
    """Return what a rank of a PipelineLayout has to hold for its stages."""
    whole = whole_model(args)
    shards = layout.num_pipelines if args.shard_stages else 1
    return Part(tensors_of(whole, stages), shards, layout.data_rank)


def whole_model(args: Any) -> Any:
    """Return the whole model of a recipe's arguments on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(
        args.model_name_or_path, revision=args.model_revision, trust_remote_code=False
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def tensors_of(whole: Any, stages: Sequence[Any]) -> Shapes:
    """Return the tensors of a whole model that belong to some of its stages.

    The first stage has the embedding, the last one norm and output head; if these two share their
    weight, the last one has it too.
    """
    layers = {number for stage in stages for number in stage.layers}
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    is_tied = whole.config.tie_word_embeddings
    found = []
    names = [name for name, _ in whole.named_parameters()]
    for name, shape in zip(names, describe(whole), strict=True):
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer:
            belongs = int(layer[1]) in layers
        elif "embed_tokens" in name:
            belongs = has_first or (has_last and is_tied)
        else:
            belongs = has_last
        if belongs:
            found.append(shape)
    return found
