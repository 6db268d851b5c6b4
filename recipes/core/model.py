# SPDX-License-Identifier: Apache-2.0
"""The model: tokenizer, quantized base, adapters, kernels, noise; its optimizer and schedule."""

import contextlib
import inspect
import math
import os
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from huggingface_hub.errors import HFValidationError
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from core import weights, workarounds
from core.chat import DEFAULT_TEMPLATE
from core.engine import Layout
from core.exits import Exit, fail
from core.extras import hooks
from core.workarounds import fsdp_plugin, mixed_dtype

OF_MODELS = "transformers.models."
# Their classes that read weights only where no recipe gets
CALL_THEIR_LAYERS = ("BloomAttention", "BloomMLP", "DisentangledSelfAttention")
# What follows where the code only looks at a weight, or draws it at the start
ONLY_LOOKS = r"\.(dtype|device|shape|data|_is)| = "
# In the names of parts that read no text: towers, and what maps their output to embeddings
OF_OTHER_INPUTS = re.compile("vision|visual|image|img|audio|multi_modal|connector")
# Found in the source of a model that makes its masks from the positions. OPT and Falcon take
# positions too, but make their masks without them.
MASKS_BY_POSITION = re.compile(
    r'mask\w*\([^)]*position_ids=position_ids|"position_ids": position_ids'
)
# Layers that attend by a mask, in which rows of one line can be kept apart
MASKED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Found in the source of a model: the arguments of each call of its attention
ATTENTION_CALLS = re.compile(r"attention_interface\((.*?)\n +\)", re.DOTALL)
# Operators of matrix products and of attention, by their names
PRODUCTS = re.compile(
    r"aten\.(mm|addmm|_scaled_mm|_grouped_mm)\b|bitsandbytes\.(gemm_4bit|int8\w*_scaled_mm)"
)
ATTENTION = re.compile("attention|attn")
# Features of the input of a product whose result is worth keeping: more than most adapters' ranks
LEAST_FEATURES = 64
# The optimizers of bitsandbytes by --optim
BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
}


# ---- Load ----
@contextlib.contextmanager
def loading(what: str, name: str, flag: str = "--model_name_or_path") -> Generator[None]:
    """End with one line, and 64, or 69 if the hub cannot be reached, if a model cannot be loaded.

    Args:
        what: is loaded, such as "tokenizer".
        name: the folder or hub id.
        flag: that names it.
    """
    try:
        yield
    # What transformers makes of most faults; a missing package is one
    except (OSError, ValueError, KeyError, ImportError) as error:
        is_of_hub = not Path(name).is_absolute() and not Path(name).exists()
        code = Exit.NO_HUB if is_of_hub and isinstance(error, OSError) else Exit.USAGE
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        if isinstance(error.__context__, HFValidationError):
            code = Exit.USAGE
            reason = "no such folder"
        fail(code, f"{flag} {name}: no {what}: {reason}")


@contextlib.contextmanager
def loading_whole(accelerator: Accelerator) -> Generator[None]:
    """Have transformers not split a model, as it does under ZeRO-3, while it loads it."""
    plugin: Any = accelerator.state.deepspeed_plugin
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None:
            set_hf_deepspeed_config(plugin.dschf)


def load_tokenizer(args: Any, **options: Any) -> Any:
    """Return the tokenizer of --model_name_or_path, with a pad token.

    Where the recipe has --chat_template, it has that, its own or a plain one.

    Args:
        options: further arguments of from_pretrained, such as src_lang.
    """
    with loading("tokenizer", args.model_name_or_path):
        tokenizer: Any = AutoTokenizer.from_pretrained(
            args.model_name_or_path,
            revision=args.model_revision,
            trust_remote_code=False,
            **options,
        )
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token
    if hasattr(args, "chat_template"):
        if args.chat_template is not None:
            tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
        tokenizer.chat_template = tokenizer.chat_template or DEFAULT_TEMPLATE
    return tokenizer


def read_config(args: Any) -> Any:
    """Return the config of --model_name_or_path."""
    with loading("model", args.model_name_or_path):
        return AutoConfig.from_pretrained(
            args.model_name_or_path, revision=args.model_revision, trust_remote_code=False
        )


def load_pretrained(
    auto_class: Any, args: Any, layout: Layout, **head: Any
) -> tuple[Any, set[str]]:
    """Return the model of --model_name_or_path, quantized if the arguments say so.

    With it come the names of the weights of its head that its files do not hold; they are drawn
    from the seed. Ends with 64 if it cannot be loaded, or would be trained as something else than
    its files say, a pooler aside. With --dry_run it has no weights, only their shapes.

    Args:
        auto_class: one of transformers' AutoModel classes.
        head: further arguments of from_pretrained, of a model whose head may be new.
    """
    name = args.model_name_or_path
    options: dict[str, Any] = {
        "dtype": args.dtype,
        "attn_implementation": args.attn_implementation,
        "revision": args.model_revision,
        "trust_remote_code": False,
        **head,
    }
    config = read_config(args)
    problems = [
        *find_encoder(auto_class, config),
        *find_other_quantization(args, layout.accelerator, config, bool(head)),
    ]
    if problems:
        fail(Exit.USAGE, *[f"--model_name_or_path {name}: {problem}" for problem in problems])
    drawing: Any = contextlib.nullcontext()
    if head:
        drawing = workarounds.drawing_new_weights_from(args.seed)
    with loading("model", name), drawing:
        if args.dry_run:
            return weights.make_skeleton(auto_class, name, **options), set()
        model, report = weights.load_pretrained(
            auto_class,
            layout,
            name,
            stays_on_host=getattr(args, "load_in_fp8", False),
            quantization_config=quantization(args, layout.accelerator, auto_class, bool(head)),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # These weights are in the report.
            **options,
        )
    new = {*report["missing_keys"], *(weight for weight, *_ in report["mismatched_keys"])}
    lacking = [one for one in sorted(new) if ".pooler." not in f".{one}"]
    if head:
        lacking = [one for one in lacking if is_of_body(one, model)]
    if getattr(model, "_hf_peft_config_loaded", False):
        fail(Exit.USAGE, f"--model_name_or_path {name}: is of adapters: first merge them")
    if lacking:
        problem = f"its files lack {len(lacking)} of its weights, or have them in other shapes"
        listed = ", ".join(lacking[:3])
        fail(Exit.USAGE, f"--model_name_or_path {name}: {problem} ({listed}): use a whole model")
    for hook in hooks(getattr(args, "EXTRAS", ()), "loaded"):
        hook(args, layout, model)
    return model, new


def is_of_body(name: str, model: Any) -> bool:
    """Return whether a weight of a classifier belongs to the model below its head."""
    if model.base_model is model:  # CLIP's and a few others, whose head comes last
        return not name.startswith(f"{list(model._modules)[-1]}.")
    return name.startswith(f"{model.base_model_prefix}.")


def quantization(
    args: Any, accelerator: Accelerator, auto_class: Any = None, of_classifier: bool = False
) -> BitsAndBytesConfig | None:
    """Return bitsandbytes' config for --load_in_8bit or --load_in_4bit, or None.

    Args:
        auto_class: of transformers. A model of images and text keeps its tower in its own type.
        of_classifier: whether the model has layers outside of blocks that may be new, which must
            not be quantized. Only the names of layers in blocks have a number.
    """
    skipped = [r"(?!.*\.\d).*"] if of_classifier else None
    if auto_class is transformers.AutoModelForImageTextToText:
        skipped = [f".*({OF_OTHER_INPUTS.pattern}).*", "lm_head"]
    if getattr(args, "load_in_8bit", False):
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    if not getattr(args, "load_in_4bit", False):
        return None
    # All four are set, since the library's defaults would be fp4, float32 and uint8.
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.bnb_4bit_quant_type,
        bnb_4bit_quant_storage=args.dtype,
        bnb_4bit_compute_dtype=mixed_dtype(accelerator) or args.dtype,
        bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
        llm_int8_skip_modules=skipped,
    )


# ---- What would be silently wrong ----
def find_encoder(auto_class: Any, config: Any) -> Iterator[str]:
    """Yield a problem if an encoder is to predict tokens that each of its tokens sees."""
    kind = config.model_type
    is_seq2seq = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    is_encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_seq2seq
    sees_only_the_past = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    is_causal = auto_class is transformers.AutoModelForCausalLM
    if is_causal and is_encoder and not sees_only_the_past:
        yield f"a model of type {kind} is no causal language model: see recipes/bert.py"


def find_other_quantization(
    args: Any, accelerator: Accelerator, config: Any, has_new_head: bool
) -> Iterator[str]:
    """Yield a problem if the files hold quantized weights that would not be read as such.

    Only those of bitsandbytes can be trained on, under the flags that say how they are stored. A
    new head beside them would be quantized too.
    """
    stored = getattr(config, "quantization_config", None)
    stored = stored or getattr(config.get_text_config(), "quantization_config", None)
    if not stored:
        return
    method = stored.get("quant_method", "bitsandbytes")
    fix = "use the unquantized model"
    if method == "bitsandbytes" and hasattr(args, "load_in_4bit") and not has_new_head:
        found: Any = BitsAndBytesConfig.from_dict(stored)
        names = ["load_in_8bit", "load_in_4bit"]
        if found.load_in_4bit:
            names += ["bnb_4bit_quant_type", "bnb_4bit_use_double_quant"]
        others = [name for name in names if getattr(args, name) != getattr(found, name)]
        storage = str(found.bnb_4bit_quant_storage).removeprefix("torch.")
        if others:
            flags = " ".join(f"--{name} {getattr(found, name)}" for name in others)
            fix = f"pass {flags}, or {fix}"
        elif found.load_in_4bit and fsdp_plugin(accelerator) and storage != args.dtype:
            fix = f"FSDP cannot shard {storage}: {fix}, or ddp.yaml"
        else:
            return
    yield f"its weights are quantized ({method}): {fix}"


def base_model_of(model: Any) -> Any:
    """Return the model that peft has wrapped, or the model itself if it has no adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_model(
    model: Any, largest_token: int, *, shares_lines: bool = False, gives_ends: bool = False
) -> None:
    """End with 64 if rows of a line would see each other, or a token has no embedding.

    Args:
        largest_token: the largest token of the rows, the pad token included.
        shares_lines: whether several rows share a line of a batch and must not see each other.
        gives_ends: whether the attention is given the ends or lengths of the rows of a line,
            in place of a mask.
    """
    base = base_model_of(model)
    if largest_token >= base.get_input_embeddings().num_embeddings:
        fail(
            Exit.USAGE,
            f"the rows have a token {largest_token}, but the model has no embedding for it: "
            "resize its embeddings first",
        )
    reason = why_rows_would_mix(base, gives_ends) if shares_lines else ""
    if reason:
        fail(
            Exit.USAGE,
            f"{type(base).__name__} cannot keep the rows of a line apart ({reason}): leave out "
            "--packing, --padding_free and --attn_implementation, or take another model",
        )


def why_rows_would_mix(base: Any, gives_ends: bool) -> str:
    """Return why rows that share a line would see each other, or "" if they would not.

    Rows mix where masks are made without positions, and in layers that carry a state along.
    """
    layer_types = getattr(base.config.get_text_config(), "layer_types", None) or []
    others = set(layer_types) - MASKED_LAYER_TYPES
    if others:
        return ", ".join(sorted(others))
    source = inspect.getsource(sys.modules[type(base.base_model).__module__])
    if not MASKS_BY_POSITION.search(source):
        return "its masks do not depend on position_ids"
    calls = ATTENTION_CALLS.findall(source)
    passes_ends = bool(calls) and all("**kwargs" in call for call in calls)
    if gives_ends and not passes_ends:
        return "its layers do not pass the ends of rows to their attention"
    return ""


# ---- Layers ----
def set_up_layers(model: Any, args: Any, frozen: re.Pattern = OF_OTHER_INPUTS) -> None:
    """Turn on --gradient_checkpointing and --use_liger_kernel, and freeze what nothing trains.

    Args:
        frozen: is found in the names of the weights to freeze.
    """
    if args.gradient_checkpointing != "no":
        options: dict[str, Any] = {"use_reentrant": False}
        if args.gradient_checkpointing == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_costly)
        model.activation_checkpointing_enable(options)
    workarounds.keep_4bit_weights_as_loaded(model)
    workarounds.keep_frozen_weights_frozen(model)
    for name, weight in model.named_parameters():
        if is_frozen(model, name, frozen):  # Weight decay would change it, and DDP wait for it.
            weight.requires_grad_(False)
    workarounds.name_layers_to_wrap(model)
    if getattr(args, "use_liger_kernel", False):
        from transformers.integrations.liger import apply_liger_kernel

        # Liger's loss stays off: LossInHead computes fewer logits.
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def keep_costly(_: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Have selective recomputation keep the results of products and attention.

    They take most of the time. The second product of an adapter is cheap, and its result large.
    Attention with dropout runs again, since what follows it then draws the same random numbers.
    """
    if PRODUCTS.match(str(operator)):
        if arguments[0].shape[-1] >= LEAST_FEATURES:
            return CheckpointPolicy.MUST_SAVE
    elif ATTENTION.search(str(operator)):
        schema = getattr(operator, "_schema", None)  # flex attention has none, and no dropout
        names = [argument.name for argument in getattr(schema, "arguments", ())]
        if not dict(zip(names, arguments, strict=False)).get("dropout_p"):
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def is_frozen(model: Any, name: str, frozen: re.Pattern = OF_OTHER_INPUTS) -> bool:
    """Return whether a part of a model is not trained: by default, one that reads no text."""
    return model.main_input_name == "input_ids" and bool(frozen.search(name))


def add_adapters(
    model: Any,
    args: Any,
    layout: Layout,
    new_modules: Sequence[str] = (),
    frozen: re.Pattern = OF_OTHER_INPUTS,
    **options: Any,
) -> Any:
    """Return the model with LoRA adapters, or with --use_peft off the model as it is.

    Args:
        new_modules: names of modules that are trained whole beside the adapters.
        frozen: as in `set_up_layers`; these parts get no adapters.
        options: further arguments of peft's LoraConfig, such as task_type.
    """
    if not args.use_peft:
        return model
    from peft import LoraConfig, get_peft_model

    problems = list(find_untrained(model, args, frozen))
    if problems:
        fail(Exit.USAGE, *problems)
    if os.path.isdir(args.model_name_or_path):  # peft writes it into adapter_config.json
        vars(model)["name_or_path"] = os.path.abspath(args.model_name_or_path)
    accelerator = layout.accelerator
    whole = [*new_modules, *args.modules_to_save]
    targets = args.lora_target_modules
    known: dict[str, Any] = {
        "r": args.lora_r,
        "lora_alpha": args.lora_alpha,
        "lora_dropout": args.lora_dropout,
        "target_modules": "all-linear" if targets == ["all-linear"] else targets,
        "modules_to_save": whole or None,
        "use_rslora": getattr(args, "use_rslora", False),
        "use_dora": getattr(args, "use_dora", False),
        "revision": args.model_revision,
    }
    excluded = []
    if targets == ["all-linear"]:
        excluded += map(re.escape, unfit_layers(model))
    if any(is_frozen(model, path, frozen) for path, _ in model.named_modules()):
        excluded.append(f".*({frozen.pattern}).*")
    if excluded:
        known["exclude_modules"] = "|".join(excluded)
    computes_in_16_bits = accelerator.mixed_precision != "no"
    # Adapters of a 16-bit base become fp32, except where FSDP2 needs one dtype in a unit.
    to_fp32 = computes_in_16_bits or not accelerator.is_fsdp2 or not whole
    with layout.making_adapters(model):
        config = LoraConfig(**(known | options))
        model = get_peft_model(model, config, autocast_adapter_dtype=to_fp32)
        if whole and computes_in_16_bits:
            cast_trained_to_fp32(model)
    workarounds.leave_casts_to_autocast(model, accelerator, getattr(args, "use_dora", False))
    workarounds.cast_for_zero3(model, accelerator)
    workarounds.wrap_adapters_for_fsdp1(model, accelerator)
    return model


def unfit_layers(model: torch.nn.Module) -> list[str]:
    """Return the paths of linear layers whose adapter would fail or have no effect.

    Routers of experts return several tensors. State-space mixers and Gemma 3n take the weight of a
    layer without calling it, which the code of their classes shows.
    """
    found = []
    for path, parent in model.named_modules():
        code = ""
        kind = type(parent)
        if kind.__module__.startswith(OF_MODELS) and kind.__name__ not in CALL_THEIR_LAYERS:
            code = inspect.getsource(kind)
        for name, layer in parent.named_children():
            taken = rf"(?<!isinstance\()(?<!_\()self\.{name}\.weight\b(?!{ONLY_LOOKS})"
            is_linear = isinstance(layer, torch.nn.Linear)
            if is_linear and (has_own_forward(type(layer)) or re.search(taken, code)):
                found.append(f"{path}.{name}")
    return found


def has_own_forward(kind: type) -> bool:
    """Return whether a class of linear layers may put out something else than torch's does."""
    is_of_models = kind.__module__.startswith(OF_MODELS)
    # FalconLinear computes the same in another way
    return is_of_models and "forward" in vars(kind) and kind.__name__ != "FalconLinear"


def find_untrained(model: Any, args: Any, frozen: re.Pattern = OF_OTHER_INPUTS) -> Iterator[str]:
    """Yield a problem for each name in a flag whose modules would silently not be trained.

    peft refuses names of layers only if none of them fits, and never those of whole modules.
    """
    modules = [path for path, _ in model.named_modules()]
    weights = [path for path, _ in model.named_parameters()]
    for flag in ("lora_target_modules", "modules_to_save", "lora_target_parameters"):
        places = weights if flag == "lora_target_parameters" else modules
        for name in getattr(args, flag, ()):
            found = [place for place in places if f".{place}".endswith(f".{name}")]
            if not found and name != "all-linear":
                kind = type(model).__name__
                yield f"--{flag} {name}: {kind} has none of this name: print(model) shows its names"
            elif found and all(is_frozen(model, place, frozen) for place in found):
                yield f"--{flag} {name}: it is frozen, or reads no text, so nothing would train it"
    for pair in model.all_tied_weights_keys.items():
        for name in args.modules_to_save:
            if any(f".{weight}".endswith(f".{name}.weight") for weight in pair):
                yield (
                    f"--modules_to_save {name}: {' and '.join(pair)} share their numbers, and only "
                    "a copy of one of them would be trained: leave it out, or train all weights"
                )


def cast_trained_to_fp32(model: torch.nn.Module) -> None:
    """Give new modules the dtype of the adapters. A DTensor has its data in another tensor."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and isinstance(weight, DTensor):
                setattr(module, name, torch.nn.Parameter(weight.detach().float()))
            elif weight.requires_grad:
                weight.data = weight.data.float()


# ---- Noise ----
def add_neftune(model: Any, alpha: float | None) -> None:
    """Have the model add NEFTune's noise to its embeddings while it trains; None adds none.

    The noise comes from the generator that Run seeds for each step, as that of dropout does, so
    that a resumed run draws the same.
    """
    if alpha is not None:
        embeddings = model.get_input_embeddings()
        embeddings.neftune_noise_alpha = alpha
        embeddings.register_forward_hook(neftune_post_forward_hook)


# ---- Optimizer and schedule ----
class Schedule:
    """transformers' schedule of the learning rate, which stays at steps known to be left out.

    core/README.md says which are known. It is not prepared: accelerate would step it once per rank
    (huggingface/accelerate#2926).

    Attributes:
        learning_rate: that of the latest optimizer step, applied or not; before any, of the first.
    """

    def __init__(
        self, schedule: torch.optim.lr_scheduler.LRScheduler, accelerator: Accelerator
    ) -> None:
        self._schedule = schedule
        self._accelerator = accelerator
        self._is_held = False
        self.learning_rate: Any = schedule.get_last_lr()[0]

    @property
    def steps(self) -> int:
        """The number of steps that the schedule has taken."""
        return self._schedule.last_epoch

    def hold(self) -> None:
        """Do not advance at the next optimizer step, which is left out."""
        self._is_held = True

    def step(self) -> None:
        """Advance by one step. Call it after each optimizer.step().

        The schedule stays where it is while gradients are accumulated, and if the step is known to
        have been left out: because of fp16's loss scale, by DeepSpeed, or after `hold`.
        """
        if not self._accelerator.sync_gradients:
            return
        self.learning_rate = self._schedule.get_last_lr()[0]
        was_held = self._is_held
        self._is_held = False
        if not was_held and not self._accelerator.optimizer_step_was_skipped:
            self._schedule.step()

    def advance(self, steps: int) -> None:
        """Take a number of steps at once, when a run resumes."""
        for _ in range(steps):
            self._schedule.step()
        self.learning_rate = self._schedule.get_last_lr()[0]


def make_optimizer(
    model: torch.nn.Module, args: Any, accelerator: Accelerator, total_steps: int
) -> tuple[torch.optim.Optimizer, Schedule]:
    """Return AdamW over what is trained, and the schedule of its learning rate.

    Call it before `prepare`, which takes the optimizer but not the schedule.

    Args:
        total_steps: the number of optimizer steps of the whole run.
    """
    optimizer = make_adamw(model, args)
    workarounds.check_gradients_of_zero0(optimizer, accelerator)
    schedule = transformers.get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        warmup_steps(args, total_steps),
        total_steps,
        args.lr_scheduler_kwargs,
    )
    return optimizer, Schedule(schedule, accelerator)


def make_adamw(model: torch.nn.Module, args: Any) -> torch.optim.Optimizer:
    """Return AdamW of torch or bitsandbytes over what is trained. EDIT: your optimizer."""
    groups = parameter_groups(model, args.weight_decay)
    settings: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.optim not in BITSANDBYTES:
        is_fused = args.optim == "adamw_torch_fused"
        return torch.optim.AdamW(groups, fused=is_fused, **settings)
    import bitsandbytes

    if args.optim.endswith("8bit"):
        workarounds.keep_embeddings_in_32_bits(model)
    kind = getattr(bitsandbytes.optim, BITSANDBYTES[args.optim])
    return kind(groups, **settings)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return what is trained in groups: with weight decay, and biases and norms without.

    Weights of different meshes are apart, those that no mesh splits among them: no kernel updates
    tensors of several meshes at once.
    """
    groups: dict[Any, dict] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_kept = "norm" in name.lower() or ".ln_" in name or name.endswith("bias")
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        empty = {"params": [], "weight_decay": 0.0 if is_kept else weight_decay}
        groups.setdefault((is_kept, mesh), empty)["params"].append(weight)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def warmup_steps(args: Any, total_steps: int) -> int:
    """Return the number of warmup steps; --warmup_steps below 1 is a share of all steps."""
    if args.warmup_steps < 1:
        return math.ceil(args.warmup_steps * total_steps)
    return int(args.warmup_steps)
