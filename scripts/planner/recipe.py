# SPDX-License-Identifier: Apache-2.0
"""What the planner needs from the recipes that it plans. No other module here imports them.

A recipe parses its own arguments, refuses what it would refuse in a launch, and provides the loss
and the optimizer that are traced. Importing this module takes as long as importing the recipe.
"""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from accelerate import DistributedType, init_empty_weights
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.distributed import DistributedConfig

import llama
import llama_pipeline
import mixtral
from core import loss, workarounds
from core.chat import ChatTemplate
from core.cli import Parser, find_conflicts, parse, with_extras, with_files_read
from core.engine import find_faults_of_dtypes, find_faults_of_engine
from core.loss import LossInHead
from core.model import (
    base_model_of,
    find_encoder,
    find_untrained,
    lora_config,
    make_adamw,
    read_config,
    wrap_in_adapters,
)
from extras.experts import hooks as expert_hooks
from extras.experts import workarounds as expert_workarounds
from extras.experts.layout import average_under_ddp, shard_copies
from extras.mesh import hooks as mesh_hooks
from extras.mesh import workarounds as mesh_workarounds
from extras.mesh.layout import MeshLayout
from extras.pipeline import hooks as pipeline_hooks
from extras.pipeline import workarounds as pipeline_workarounds
from extras.pipeline.layout import why_not_divided
from extras.pipeline.schedules import KINDS, num_microbatches
from extras.pipeline.stages import Stage, check_stages

from .mesh import Mesh, layout_of, misfits_of_arguments


class OnlyOfLlama:
    """Constants for the arguments that only recipes/llama.py has."""

    padding_free = False
    predict_with_generate = False
    use_dora = False
    load_in_4bit = False
    load_in_8bit = False
    bnb_4bit_use_double_quant = False
    bnb_4bit_quant_type = "nf4"


class MixtureArguments(OnlyOfLlama, mixtral.Arguments):
    """The arguments of recipes/mixtral.py, and constants for those that it lacks."""

    packing = False


class StagesArguments(OnlyOfLlama, llama_pipeline.Arguments, pipeline_hooks.Arguments):
    """The arguments of recipes/llama_pipeline.py, and constants for those that it lacks."""


# The arguments of a recipe that can be planned; `with_values` copies them
RecipeArguments = llama.Arguments | MixtureArguments | StagesArguments
RECIPES = {
    "llama.py": llama.Arguments,
    "mixtral.py": MixtureArguments,
    "llama_pipeline.py": StagesArguments,
}
FIRST = "llama.py"
OF_MIXTURES = "mixtral.py"
A = TypeVar("A")
MIB = 2**20
CPU = torch.device("cpu")
# Refusals that depend on this machine, which is not the one that is planned for
ABOUT_THIS_MACHINE = ("--model_name_or_path", "DeepSpeed compiles")


# ---- Arguments ----
def parse_words(words: Sequence[str], recipe: str = FIRST) -> RecipeArguments:
    """Return a recipe's arguments from the words of its command line, read by its own parser.

    Raises SystemExit, after the recipe's own one-line message, if a word is wrong.
    """
    return parse_words_of(RECIPES[recipe], words)


def recipe_for(config: PretrainedConfig) -> str:
    """Return the name of the recipe that trains a model: of mixtures, the one with a router loss.

    It asks what load_model of recipes/mixtral.py asks.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        return FIRST
    has_loss = hasattr(sys.modules[kind.__module__], "load_balancing_loss_func")
    has_factor = hasattr(config.get_text_config(), "router_aux_loss_coef")
    return OF_MIXTURES if has_loss and has_factor else FIRST


def expert_ranks_of(args: RecipeArguments) -> int:
    """Return over how many ranks the arguments spread the experts of a layer."""
    return getattr(args, "ep_size", 1)


def adapts_experts(args: RecipeArguments) -> bool:
    """Return whether the arguments ask for adapters of experts."""
    return args.use_peft and bool(getattr(args, "lora_target_parameters", None))


def has_router_loss(args: RecipeArguments) -> bool:
    """Return whether the recipe adds the loss of the routers of a mixture."""
    return isinstance(args, MixtureArguments)


def parse_words_of(kind: type[A], words: Sequence[str]) -> A:
    """Do what `parse_words` does for a recipe with another class of arguments."""
    return parse(kind, words=words)


def with_config_read(words: Sequence[str], recipe: str = FIRST) -> list[str]:
    """Return the words of a command line with the arguments of its `--config` in its place."""
    return with_files_read(Parser(with_extras(RECIPES[recipe])), words)


def with_values(args: RecipeArguments, **values: Any) -> RecipeArguments:
    """Return a copy of the arguments in which some have other values."""
    return dataclasses.replace(args, **values)


def takes(args: RecipeArguments, names: Iterable[str]) -> bool:
    """Return whether the recipe of these arguments has all that are named."""
    return set(names) <= {field.name for field in dataclasses.fields(args)}


def with_plain_weights(args: RecipeArguments) -> RecipeArguments:
    """Return a copy of the arguments without adapters, quantization and groups of experts."""
    plain = {"use_peft": False, "load_in_4bit": False, "load_in_8bit": False, "ep_size": 1}
    return with_values(args, **{name: plain[name] for name in plain if takes(args, [name])})


def adapter_rate(args: RecipeArguments) -> float:
    """Return the learning rate to start from when adapters are trained.

    LoRA's best rate is about ten times that of full fine-tuning (Schulman et al., "LoRA Without
    Regret", Thinking Machines Lab, 2025).
    """
    rate = type(args).learning_rate  # the recipe's default, which is for all weights
    return float(f"{10 * rate:.2g}")


def refusals(plan: Any, config: Mapping[str, Any]) -> list[str]:
    """Return why the recipe would refuse to start, apart from reasons that depend on the machine.

    Args:
        plan: of plan.py.
        config: as accelerate reads it.
    """
    fsdp_version = {"fsdp1": 1, "fsdp2": 2}.get(plan.engine, 0)
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    kind = DistributedType.NO
    if plan.engine == "zero":
        state.deepspeed_plugin = SimpleNamespace(zero_stage=plan.stage, deepspeed_config={})
    if fsdp_version:
        state.fsdp_plugin = fsdp_settings(fsdp_version, config)
        kind = DistributedType.FSDP
    accelerator = SimpleNamespace(
        mixed_precision=plan.mixed_precision,
        num_processes=plan.ranks,
        process_index=0,
        device=CPU,
        parallelism_config=parallelism_settings(plan.mesh, config.get("parallelism_config", {})),
        distributed_type=kind,
        state=state,
    )
    return [
        problem
        for problem in problems_of(plan.args, accelerator, plan.mesh, plan.name)
        if not problem.startswith(ABOUT_THIS_MACHINE)
    ]


def fsdp_settings(version: int, config: Mapping[str, Any]) -> SimpleNamespace:
    """Return what accelerate makes of the keys of fsdp_config on which refusals depend."""
    written = config.get("fsdp_config", {})
    return SimpleNamespace(
        fsdp_version=version,
        sharding_strategy=SimpleNamespace(name="FULL_SHARD"),
        reshard_after_forward=written.get("fsdp_reshard_after_forward", True),
        use_orig_params=written.get("fsdp_use_orig_params", True) is not False,
    )


def parallelism_settings(mesh: Mesh, written: Mapping[str, Any]) -> SimpleNamespace | None:
    """Return what accelerate makes of a parallelism_config, None without one."""
    if not written:
        return None
    attention = written.get("parallelism_config_sp_attn_implementation")
    return SimpleNamespace(
        dp_replicate_size=mesh.dp_replicate,
        dp_shard_size=mesh.dp_shard,
        cp_size=mesh.cp,
        sp_size=mesh.sp,
        tp_size=mesh.tp,
        sp_handler=SimpleNamespace(sp_attn_implementation=attention),
    )


def problems_of(args: RecipeArguments, accelerator: Any, mesh: Mesh, name: str) -> Iterator[str]:
    """Yield conflicts between the recipe's arguments, and between them and the strategy."""
    yield from find_conflicts(args)
    if Path(args.model_name_or_path).is_dir():  # A hub's config is read by shapes.py
        yield from find_encoder(AutoModelForCausalLM, read_config(args))
    yield from misfits_of_arguments(args, name, mesh)
    yield from find_faults_of_engine(args, accelerator)
    yield from find_faults_of_dtypes(args, accelerator)
    layout = mesh.layout(accelerator)
    if isinstance(layout, MeshLayout):
        yield from mesh_hooks.find_faults_of_engine(layout)
        if layout.parts_of_row() > 1:
            yield from mesh_hooks.find_faults_of_parts(args, layout)
    if hasattr(args, "ep_size"):
        yield from expert_hooks.find_faults(args, layout)
    if isinstance(args, StagesArguments):
        problem = why_not_divided(args, accelerator.num_processes)
        if problem:
            yield problem
        yield from pipeline_hooks.find_faults(args, layout)


# ---- Pipelines ----
def is_pipelined(args: RecipeArguments) -> bool:
    """Return whether the recipe trains over pipelines."""
    return isinstance(args, StagesArguments)


def stages_of(args: StagesArguments, config: PretrainedConfig) -> list[Stage]:
    """Return the stages into which the recipe cuts a model.

    Raises SystemExit, after the recipe's own one-line message, if it cannot be cut.
    """
    with init_empty_weights():  # Its buffers are real, since it is tried whether it can be cut.
        outline = AutoModelForCausalLM.from_config(config)
    return check_stages(args, outline)


def stages_of_rank(args: StagesArguments, rank: int) -> list[int]:
    """Return the numbers of the stages of a rank. rank: its place in its pipeline."""
    return KINDS[args.pipeline_schedule].stages_of(rank, args.pp_size)


def microbatches_of(args: StagesArguments) -> int:
    """Return the number of micro-batches of a batch."""
    return num_microbatches(args)


def class_of_schedule(args: StagesArguments) -> str:
    """Return the name of the schedule's class in torch.distributed.pipelining."""
    return KINDS[args.pipeline_schedule].class_name


def run_only_forward(schedule: Any) -> None:
    """Have a schedule with several stages per rank leave out the backward passes in evaluation."""
    pipeline_workarounds.run_only_forward(schedule)


# ---- A rank's part of the model ----
def split_over_ranks(model: PreTrainedModel, accelerator: Any) -> None:
    """Leave a model this rank's part of its matrices or experts, as the recipe's layout does.

    The model is on the meta device, where the parts become DTensors without bytes.

    accelerator: of this rank, or a stand-in. Raises ValueError for a model without a plan.
    """
    sizes = layout_of(accelerator).sizes
    if sizes.get("tp", 1) > 1:
        config = DistributedConfig(tp_size=sizes["tp"])
        on_ranks = mesh_workarounds.splitting_over(accelerator)
    elif sizes.get("ep", 1) > 1:
        config = DistributedConfig(
            fsdp_size=sizes["ep"], ep_size=sizes["ep"], ep_implementation="all_to_all"
        )
        on_ranks = expert_workarounds.spreading_experts_over(
            accelerator.expert_mesh, accelerator.device
        )
    else:
        return
    untie(model)
    with on_ranks:
        config, _, ranks = model.prepare_distribute_model(config)
        model.maybe_distribute_model(model, config, ranks)
    model.tie_weights()
    vars(model.config).pop("distributed_config")


def untie(model: PreTrainedModel) -> None:
    """Give tied weights of a model parameters of their own, as they have while they are loaded."""
    for name in model.all_tied_weights_keys:
        path, _, own = name.rpartition(".")
        weight = torch.nn.Parameter(torch.empty_like(model.get_parameter(name)))
        setattr(model.get_submodule(path), own, weight)


def keep_split(model: torch.nn.Module, accelerator: Any) -> None:
    """Have the gradients of split weights be split or averaged as the recipe does.

    Call it once the weights are those of the step.
    """
    sizes = layout_of(accelerator).sizes
    if sizes.get("tp", 1) > 1:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        mesh_workarounds.keep_gradients_split(torch.nn.ParameterList(trained))
    if sizes.get("ep", 1) > 1 and accelerator.is_fsdp2:
        shard_copies(model, accelerator.expert_mesh, accelerator)
    elif sizes.get("ep", 1) > 1:
        average_under_ddp(model, accelerator.expert_mesh)


# ---- Adapters ----
def problems_of_whole_modules(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return why the recipe would refuse modules of --modules_to_save. model: without adapters."""
    args = SimpleNamespace(modules_to_save=names, lora_target_modules=[])
    return list(find_untrained(model, args))


def with_adapters(
    model: PreTrainedModel, args: RecipeArguments, accelerator: Any
) -> PreTrainedModel:
    """Return the model with the adapters of peft, and its copies of whole modules, as the recipe's.

    accelerator: of this rank, or a stand-in.
    """
    options: dict[str, Any] = {"modules_to_save": args.modules_to_save or None}
    if isinstance(args, MixtureArguments):
        options["target_modules"] = mixtral.lora_layers(model, args.lora_target_modules)
        options["target_parameters"] = args.lora_target_parameters
    config = lora_config(args, task_type="CAUSAL_LM", **options)
    with layout_of(accelerator).making_adapters(model):
        adapted = wrap_in_adapters(model, config, accelerator)
    if config.modules_to_save and accelerator.is_fsdp2 and accelerator.mixed_precision == "no":
        for weight in adapted.parameters():
            # peft gives adapters the precision of the base, but not on the meta device.
            if weight.requires_grad:
                weight.data = weight.data.to(getattr(torch, args.dtype))
    return adapted


# ---- The loss ----
def logits_mib(args: RecipeArguments) -> float:
    """Return how many MiB of fp32 logits the recipe computes at a time if it finds no GPU."""
    return loss.logits_mib(args.max_logits_mib, CPU)


def logits_mib_on(card: float) -> float:
    """Return how many MiB of fp32 logits the recipe computes at a time, by default, on a card.

    card: bytes.
    """
    return loss.LOGITS_SHARE * card / MIB


def prepare_model(model: PreTrainedModel, args: RecipeArguments, autocasts: bool) -> LossInHead:
    """Prepare a loaded model as the recipe does before `Accelerator.prepare`; return its loss.

    autocasts: whether autocast lowers the precision of matrix products.
    """
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    token_loss = LossInHead(model, logits_mib(args), CPU)
    if args.use_peft:
        # FSDP2 casts by itself instead of autocast; in a trace, autocast stands in for it.
        accelerator: Any = SimpleNamespace(native_amp=autocasts, is_fsdp2=False)
        workarounds.leave_casts_to_autocast(model, accelerator, args.use_dora)
    return token_loss


def summed_loss(
    args: RecipeArguments,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batch: Mapping[str, Any],
    accelerator: Any,
) -> torch.Tensor:
    """Return the loss of a micro-batch as the recipe sums it, that of its routers included.

    Args:
        args: the recipe's arguments.
        model: as `prepare` returned it.
        token_loss: the result of `prepare_model`.
        batch: as the recipe's collator returns it.
        accelerator: of this rank, or a stand-in.
    """
    if not isinstance(args, MixtureArguments):
        return token_loss(model, batch)
    per_token = base_model_of(model).config.get_text_config().num_experts_per_tok
    tokens, routers, _ = mixtral.summed_losses(
        layout_of(accelerator), model, token_loss, batch, per_token
    )
    return tokens + mixtral.router_loss_factor(base_model_of(model), args) * routers


def make_optimizer(model: torch.nn.Module, args: RecipeArguments) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over what trains."""
    return make_adamw(model, args)


# ---- Rows ----
def labels_of(row: dict[str, Any], tokenizer: Any, max_length: int) -> list[int]:
    """Return the labels of a row: token ids, and -100 for each token that is not supervised.

    tokenizer: one of transformers.
    """
    return llama.tokenize_row(row, ChatTemplate(tokenizer), max_length)["labels"]
