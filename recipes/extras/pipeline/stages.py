# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline: which layers each one has, and the part of a model on one rank.

A rank's part is a model of transformers whose modules keep their own names and numbers. Where
another rank has a module, `Elsewhere` takes its place and passes hidden states on. So the
forward pass is transformers' own, with its masks and positions, and every weight has the name that
it has in the whole model: in files, in checkpoints and in the optimizer.
"""

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.exits import Exit, fail
from core.model import loading
from core.weights import make_skeleton
from extras.pipeline.layout import PipelineLayout
from extras.pipeline.schedules import KINDS, num_microbatches


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline.

    Attributes:
        index: its place among all stages, from 0.
        layers: the numbers of its layers.
        is_last: whether it ends with the norm and the output head.
    """

    index: int
    layers: range
    is_last: bool

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.index == 0


def cut_into_stages(num_layers: int, num_stages: int) -> list[Stage]:
    """Return the stages of a model, in order.

    The first stage also has the embedding and the last one the output head. So those in the middle
    get the layers that are left over.
    """
    counts = [num_layers // num_stages] * num_stages
    from_the_middle = sorted(range(num_stages), key=lambda index: abs(2 * index + 1 - num_stages))
    for index in from_the_middle[: num_layers % num_stages]:
        counts[index] += 1
    stages = []
    first = 0
    for index, count in enumerate(counts):
        layers = range(first, first + count)
        stages.append(Stage(index, layers, is_last=index == num_stages - 1))
        first += count
    return stages


class Elsewhere(torch.nn.Module):
    """What is in the place of a module that another rank has: it passes hidden states on.

    Attributes:
        num_embeddings: that of the embedding in whose place this is; 0 in other places.
    """

    def __init__(self, num_embeddings: int = 0) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the hidden states as they are."""
        return hidden


# ---- The part of a model ----
def keep_only(model: Any, stages: Sequence[Stage]) -> None:
    """Leave in a whole model only the modules of some stages.

    If embedding and output head share their weight, the last stage has both: the weight keeps its
    name, which is that of the embedding.
    """
    body = model.base_model
    is_tied = bool(model.all_tied_weights_keys)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    kept = {number for stage in stages for number in stage.layers}
    for number in range(len(body.layers)):
        if number not in kept:
            body.layers[number] = Elsewhere()
    if not has_first and not (has_last and is_tied):
        body.embed_tokens = Elsewhere(body.embed_tokens.num_embeddings)
    if not has_last:
        body.norm = Elsewhere()
        model.lm_head = Elsewhere()
        model.all_tied_weights_keys = {}


def view_of(model: Any, stage: Stage) -> Any:
    """Return a model that computes one stage, with the modules of a rank's part.

    Args:
        model: the part of this rank, which may have several stages.
    """
    view = twin_of(model)
    view.model = twin_of(model.base_model)
    layers = list(model.base_model.layers)
    for number in range(len(layers)):
        if number not in stage.layers:
            layers[number] = Elsewhere()
    view.model.layers = torch.nn.ModuleList(layers)
    # The weight of a head may be that of the embedding, which FSDP2 has to find in both
    if not stage.is_first and not (stage.is_last and model.all_tied_weights_keys):
        view.model.embed_tokens = Elsewhere()
    if not stage.is_last:
        view.model.norm = Elsewhere()
        view.lm_head = Elsewhere()
    return view


def twin_of(module: Any) -> Any:
    """Return a module with the same submodules, some of which can then be replaced."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    return twin


class PartOfModel:
    """What AutoModelForCausalLM is for a whole model, for the part of it that a rank has.

    transformers reads from files only the weights that a model has. So its class is derived from
    the model's own, with an `__init__` that leaves out what other ranks have.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        """stages: those of this rank."""
        self._stages = stages

    def from_pretrained(self, name: str, **options: Any) -> Any:
        """Return the part of a model with its weights, as a class of transformers does."""
        revision = options.get("revision")
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        return self._class_for(config).from_pretrained(name, config=config, **options)

    def from_config(self, config: Any, **options: Any) -> Any:
        """Return the part of a model with new weights, as an AutoModel does."""
        return self._class_for(config)._from_config(config, **options)

    def _class_for(self, config: Any) -> Any:
        """Return the class of the part: the model's own, without the modules of other ranks."""
        whole: Any = AutoModelForCausalLM._model_mapping[type(config)]
        stages = self._stages

        class Part(whole):
            _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [".*"]

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                keep_only(self, stages)

        # config.json names the class of a model, and the part is saved as the whole model
        Part.__name__ = whole.__name__
        Part.__module__ = whole.__module__
        return Part


# ---- Can a model be cut? ----
def outline_of(args: Any) -> Any:
    """Return the model of --model_name_or_path without its weights, which are on the meta device.

    Ends with 64 or 69 if there is no such model.
    """
    with loading("model", args.model_name_or_path):
        return make_skeleton(
            AutoModelForCausalLM,
            args.model_name_or_path,
            dtype=args.dtype,
            attn_implementation=args.attn_implementation,
            revision=args.model_revision,
            trust_remote_code=False,
        )


def why_not_cut(model: Any) -> str:
    """Return why a model cannot be cut into stages, or "" if it can.

    A stage must be all that the model does between its layers. This is tried: without embedding,
    layers, norm and output head, nothing may change what passes through.

    Args:
        model: of transformers, whole; its parameters may be on the meta device. It is changed.
    """
    body = model.base_model
    needed = {"embed_tokens": body, "layers": body, "norm": body, "model": model, "lm_head": model}
    missing = [name for name, owner in needed.items() if not hasattr(owner, name)]
    if missing or not isinstance(body.layers, torch.nn.ModuleList):
        return f"it has no {', '.join(missing) or 'list of layers'}"
    hidden = torch.linspace(-1, 1, 2 * model.config.hidden_size).view(1, 2, -1)
    keep_only(model, [Stage(index=1, layers=range(0), is_last=False)])
    with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
        passed = body(inputs_embeds=hidden, use_cache=False).last_hidden_state
        if torch.equal(passed, hidden):
            return ""
    return "it computes more between its embedding, layers and norm than their modules do"


def check_stages(args: Any, model: Any) -> list[Stage]:
    """Return the stages of a model; end with 64 if it cannot be cut into them.

    Args:
        model: of transformers, whole; its parameters may be on the meta device.
    """
    kind = KINDS[args.pipeline_schedule]
    num_stages = args.pp_size * kind.stages_per_rank
    name = f"--model_name_or_path {args.model_name_or_path}"
    reason = why_not_cut(copy.deepcopy(model))
    if reason:
        fail(
            Exit.USAGE,
            f"{name}: {type(model).__name__} cannot be cut into stages, since {reason}: train it "
            "with recipes/llama.py under fsdp2_full_shard.yaml",
        )
    num_layers = len(model.base_model.layers)
    if num_layers < num_stages:
        fail(
            Exit.USAGE,
            f"{name} has {num_layers} layers, and --pp_size {args.pp_size} with "
            f"{args.pipeline_schedule} makes {num_stages} stages: use a smaller --pp_size, or 1f1b",
        )
    if args.shard_stages and kind.is_folded and model.config.tie_word_embeddings:
        fail(
            Exit.USAGE,
            "--shard_stages: embedding and output head of this model share their weight, which "
            f"{args.pipeline_schedule} has in two stages of one rank: use "
            "--pipeline_schedule interleaved_zero_bubble",
        )
    return cut_into_stages(num_layers, num_stages)


def stages_of_rank(args: Any, layout: PipelineLayout, stages: Sequence[Stage]) -> list[Stage]:
    """Return those of all stages that this rank has under --pipeline_schedule."""
    numbers = KINDS[args.pipeline_schedule].stages_of(layout.rank, layout.num_ranks)
    return [stages[number] for number in numbers]


def describe_pipeline(args: Any, stages: Sequence[Stage]) -> str:
    """Return a line of the start summary: the stages, the schedule and the micro-batches.

    Args:
        stages: of the whole pipeline.
    """
    layers = " + ".join(str(len(stage.layers)) for stage in stages)
    number = num_microbatches(args)
    rows = args.per_device_train_batch_size // number
    return (
        f"{len(stages)} stages of {layers} layers on {args.pp_size} ranks, "
        f"{args.pipeline_schedule}, each batch in {number} micro-batches, rows in each: {rows}"
    )
