# SPDX-License-Identifier: Apache-2.0
"""Which kinds of weights the recipes train under which mesh, asked of their own refusals.

Each pair of a YAML and a kind of weights is given to the checks that a recipe makes before it loads
a model. Nothing is launched: evidence/parity.py runs every pair that is not refused.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from accelerate import DistributedType

from components.arguments import ExpertParallelArguments
from components.config_reading import as_read
from components.config_strategy import mesh_sizes, strategy_of
from components.expert_checks import find_misfits_of_arguments, find_misfits_of_launch
from components.strategy import Strategy
from components.strategy_checks import find_misfits
from measured.rehearsals import expert_names as expert_configs
from measured.rehearsals import mesh_names as mesh_configs
from paths import OF_PIPELINES
from planner.recipe import (
    Mesh,
    deepspeed_settings,
    fsdp_settings,
    parallelism_settings,
    parse_words_of,
)
from test_parity import LAYERS_ONLY, MAKERS, WEIGHTS, Run, content_of

# transformers' names of what the recipes train that are not for causal language models
TASKS = {
    "t5": "SEQ_TO_SEQ_CAUSAL_LM",
    "bert": "SEQUENCE_CLASSIFICATION",
    "bert_ner": "TOKEN_CLASSIFICATION",
    "vit": "IMAGE_CLASSIFICATION",
}
GROUPS_OF_EXPERTS = ("--ep_size", "2")
EXPERTS = "experts' adapters"
# A quantized base is stored in what the YAMLs compute in.
IN_BF16 = ("--dtype", "bfloat16")
KINDS = (*WEIGHTS, EXPERTS)
ENGINES = {
    "fsdp2": DistributedType.FSDP,
    "zero": DistributedType.DEEPSPEED,
    "ddp": DistributedType.MULTI_GPU,
}


def refusals_by_pair() -> dict[str, dict[str, str]]:
    """Return {YAML: {kind of weights: why it is refused, "" if it is not}}."""
    found: dict[str, dict[str, str]] = {}
    for config in (*mesh_configs(), *expert_configs(), OF_PIPELINES.stem):
        found[config] = {kind: refusal_of(config, kind) for kind in KINDS}
    return found


def refusal_of(config: str, kind: str) -> str:
    """Return the first reason why a recipe refuses a kind of weights under a YAML, "" if none."""
    return next(refusals(config, kind), "")


def refusals(config: str, kind: str) -> Iterator[str]:
    """Yield the reasons of the recipe that trains a kind of weights, under a YAML."""
    recipe = recipe_of(config, kind)
    arguments = arguments_of(recipe)
    known = {field.name for field in dataclasses.fields(arguments)}
    words = words_of(config, kind)
    missing = [word for word in words if word.startswith("--") and word[2:] not in known]
    args = parse_words_of(arguments, [word for word in words if word not in missing])
    accelerator: Any = stand_in(content_of(config))
    strategy = Strategy.of(accelerator)
    engine = strategy.name.split()[0]
    problems = [*args.find_own_conflicts(), *find_misfits(args, accelerator, strategy)]
    if config in expert_configs():
        problems += find_misfits_of_launch(args.ep_size, accelerator)
        problems += find_misfits_of_arguments(args, accelerator)
    for problem in problems:
        # The same words under YAMLs that differ in their sizes
        yield problem.replace(strategy.name, engine)
    if missing:
        yield f"{recipe}.py has no {' '.join(missing)}"


def pair_of(run: Run) -> tuple[str, str]:
    """Return the YAML and the kind of weights of a run of evidence/parity.py, as in the table."""
    adapts_experts = run.recipe == "mixtral" and not set(LAYERS_ONLY) <= set(run.flags)
    if run.weights == "LoRA" and adapts_experts:
        return run.config, EXPERTS
    return run.config, run.weights


def kinds_by_recipe() -> dict[str, Sequence[str]]:
    """Return {recipe: the kinds of mesh that it takes, such as "tp"}, in the order of MAKERS."""
    found: dict[str, Sequence[str]] = {}
    for recipe in MAKERS:
        arguments = arguments_of(recipe)
        kinds = list(arguments.MESH)
        if issubclass(arguments, ExpertParallelArguments):
            kinds.append("ep")
        found[recipe] = kinds
    return found


def has_plan(recipe: str) -> bool:
    """Return whether transformers can split the matrices of the family that names a recipe."""
    from transformers import CONFIG_MAPPING

    family = recipe.partition("_")[0]
    return bool(CONFIG_MAPPING[family].base_model_tp_plan)


def takes_a_model_with_a_plan(recipe: str) -> bool:
    """Return whether transformers can split a model of the kind that a recipe trains.

    Args:
        recipe: one of TASKS, whose family has no plan.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    families = getattr(modeling_auto, f"MODEL_FOR_{TASKS[recipe]}_MAPPING_NAMES")
    known = [CONFIG_MAPPING[family] for family in families if family in CONFIG_MAPPING]
    return any(config.base_model_tp_plan for config in known)


def arguments_of(recipe: str) -> Any:
    """Return the class of a recipe's arguments."""
    return importlib.import_module(recipe).Arguments


def recipe_of(config: str, kind: str) -> str:
    """Return the recipe that is asked about a kind of weights."""
    if config == OF_PIPELINES.stem:
        return "llama_pipeline"
    if kind == EXPERTS or config in expert_configs():
        return "mixtral"
    return "llama"


def words_of(config: str, kind: str) -> list[str]:
    """Return the flags of a kind of weights, and of groups where the YAML has no key for them."""
    base = "LoRA" if kind == EXPERTS else kind
    words = [str(word) for word in WEIGHTS[base]]
    if config in expert_configs():
        words += GROUPS_OF_EXPERTS
        if kind not in ("full", EXPERTS):
            words += LAYERS_ONLY
    if "--load_in_4bit" in words:
        words += IN_BF16
    return words


def stand_in(content: Mapping[str, Any]) -> Any:
    """Return what the checks ask of the Accelerator that accelerate makes of a YAML."""
    config = as_read(dict(content))
    facts = strategy_of(config)
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None)
    if facts.engine == "fsdp2":
        state.fsdp_plugin = fsdp_settings(config["fsdp_config"])
    if facts.engine == "zero":
        state.deepspeed_plugin = deepspeed_settings(facts.stage)
    mesh = Mesh(**mesh_sizes(config))
    return SimpleNamespace(
        distributed_type=ENGINES[facts.engine],
        num_processes=config["num_processes"],
        process_index=0,
        mixed_precision=config["mixed_precision"],
        parallelism_config=parallelism_settings(mesh, config.get("parallelism_config") or {}),
        state=state,
    )
