# SPDX-License-Identifier: Apache-2.0
"""Each workaround against the harm for which it is there, in the library as it is installed.

Ranks are forks of the test's process (tests/ranks.py), which takes a second or less for each.
"""

import copy
import importlib.util
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    set_seed,
)
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Linear4bit
from packaging.requirements import Requirement
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    ConvNextConfig,
    ConvNextForImageClassification,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

import mixtral
import ranks
from core import generation, workarounds
from core.cli import parse
from core.engine import make_layout, new_accelerator
from core.weights import load_pretrained
from core.zero import master_weights
from extras.experts import workarounds as of_experts
from extras.experts.layout import modules_of_experts
from extras.mesh import workarounds as of_meshes
from extras.pipeline import workarounds as of_pipelines
from fakes import mixture_of_two
from harm import shows_harm_without
from launching import REPO
from rehearsal.cpu_patches import treat_cpu_as_gpu
from tasks import images, labels, pairs, seq2seq

on_ranks = partial(ranks.on_ranks, prepare=treat_cpu_as_gpu)  # accelerate takes them for GPUs
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}
FSDP1 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 1}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": 2}
MESH = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BERT = BertConfig(**SIZES, vocab_size=16, max_position_embeddings=16)
VIT = ViTConfig(**SIZES, image_size=8, patch_size=4)
T5 = T5Config(
    d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=16, decoder_start_token_id=0
)
TOKENS = torch.ones(1, 2, dtype=torch.long)
# Which bf16, with 8 bits, loses when it is added to 1
SMALL = 2.0**-9


def zero(stage, precision="no", steps=1):
    """The Accelerator of a rank under ZeRO."""
    config = {
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": steps,
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": "auto",
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin, gradient_accumulation_steps=steps
    )


def fsdp(version, precision="no", steps=1, mesh=None, **options):
    """The Accelerator of a rank under FSDP, which wraps each layer of a model."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", **options
    )
    accumulation = GradientAccumulationPlugin(steps, sync_with_dataloader=False)
    return Accelerator(
        mixed_precision=precision,
        fsdp_plugin=plugin,
        gradient_accumulation_plugin=accumulation,
        parallelism_config=mesh,
    )


def linear(value=0.0):
    """A layer from two numbers to one, whose gradient is its input."""
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def prepared(accelerator, model):
    """A model and plain gradient descent, as accelerate prepares them."""
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def llama(dtype=torch.float32):
    """A tiny Llama."""
    config = LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=16)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def with_adapters(base, modules_to_save=None):
    """A model with adapters that change what it computes."""
    config = LoraConfig(
        target_modules="all-linear", init_lora_weights=False, modules_to_save=modules_to_save
    )
    return get_peft_model(base, config)


def outcome(function):
    """What a function returns, or what the error says that it ends with."""
    try:
        return function()
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return str(error)


# ---- The list ----
WORKAROUNDS = {}
OF_EXTRAS = (of_experts, of_meshes, of_pipelines)
for module in (workarounds, *OF_EXTRAS, generation, images, labels, pairs, seq2seq):
    for name, value in vars(module).items():
        if hasattr(value, "workaround"):
            WORKAROUNDS[name] = value


def texts_of(folder, pattern):
    return "\n".join(path.read_text() for path in (REPO / folder).rglob(pattern))


def test_each_workaround_is_called_and_has_its_harm_shown_by_a_test():
    """But for a race, which a script of a report shows in a minute."""
    shown = set(re.findall(r'@shows_harm_without\("(\w+)"\)', texts_of("tests", "test_*.py")))
    assert WORKAROUNDS.keys() == shown | {"keep_group_until_exit"}
    code = texts_of("recipes", "*.py") + texts_of("scripts", "*.py")
    for name in WORKAROUNDS:
        assert re.search(rf"(?<!def )\b{name}\(", code), name


@pytest.mark.parametrize("name", WORKAROUNDS)
def test_each_workaround_has_its_source_and_versions_that_are_required(name):
    link, seen = WORKAROUNDS[name].workaround
    if not re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", link):
        path, place = link.split(", ")
        package, _, rest = path.partition("/")
        (folder,) = importlib.util.find_spec(package).submodule_search_locations
        assert re.search(rf"\b{place}\b", Path(folder, rest).read_text())
    lines = (REPO / "requirements.txt").read_text().splitlines()
    required = [Requirement(line.split("#")[0]) for line in lines if line[0] != "#"]
    ranges = {requirement.name: requirement.specifier for requirement in required}
    library, *versions = seen.split()
    assert versions[1::2] in ([], ["to"])
    assert all(version in ranges[library] for version in versions[::2])


def check_errors(step, harm, cured, count=1, **environment):
    """Check that a step fails by the harm on each rank; where that is cured, on none."""
    found = on_ranks(lambda: outcome(step), count, **environment)
    assert all(one is None if cured else harm in str(one) for one in found), found


# ---- Accelerator ----
@shows_harm_without("reduce_each_micro_batch")
def test_fsdp_holds_whole_gradients_until_the_last_micro_batch(cured):
    def has_sharded_gradient():
        accelerator = fsdp(2, steps=2)
        if cured:
            workarounds.reduce_each_micro_batch(accelerator)
        model, _ = prepared(accelerator, linear())
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
        assert not accelerator.sync_gradients
        return model.weight.grad is not None

    assert on_ranks(has_sharded_gradient, 2, **FSDP2) == [cured] * 2


class BackToFront(torch.nn.Module):
    """Layers that run in the opposite order of their parameters, as DDP does not expect."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(7))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


@shows_harm_without("settle_gradient_buckets")
def test_the_first_gradients_of_ddp_on_three_ranks_have_other_last_bits(cured):
    def first_equals_second():
        torch.manual_seed(0)
        accelerator = Accelerator()
        model, _ = prepared(accelerator, BackToFront())
        if cured:
            workarounds.settle_gradient_buckets(model)
            assert all(weight.grad is None for weight in model.parameters())
        torch.manual_seed(accelerator.process_index)
        rows = torch.randn(8, 512)
        gradients = []
        for _ in range(2):
            accelerator.backward(model(rows).square().sum())
            gradients.append([weight.grad.clone() for weight in model.parameters()])
            model.zero_grad()
        return all(map(torch.equal, *gradients))

    assert on_ranks(first_equals_second, 3) == [cured] * 3


@shows_harm_without("configure_deepspeed_for_loop")
def test_deepspeed_ignores_the_norm_of_clip_grad_norm(cured):
    def step():
        accelerator = zero(2)
        if cured:
            workarounds.configure_deepspeed_for_loop(accelerator, 0.5, micro_batch_size=1)
        model, optimizer = prepared(accelerator, linear())
        accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return model.module.weight.norm().item()

    (length,) = on_ranks(step, **ZERO)
    assert length == pytest.approx(0.5 if cured else 1.0, rel=1e-5)  # accelerate's default is 1


@shows_harm_without("reduce_in_fp32")
def test_fsdp2_rounds_the_loss_and_what_is_reduced(cured):
    class Sum(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).float().sum() + 1 + SMALL

    def loss_and_gradient():
        accelerator = fsdp(2, "bf16")
        if cured:
            workarounds.reduce_in_fp32(accelerator)
        layer = Sum(2, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        model, _ = prepared(accelerator, layer)
        loss = model(torch.full((1, 2), 1.0 if accelerator.is_main_process else SMALL))
        accelerator.backward(loss)
        return loss.item(), model.weight.grad.full_tensor()[0, 0].item()

    exact = 1 + SMALL, (1 + SMALL) / 2
    assert on_ranks(loss_and_gradient, 2, **FSDP2) == [exact if cured else (1.0, 0.5)] * 2


@shows_harm_without("reduce_in_fp32")
def test_fsdp1_rounds_buffers(cured):
    class Rotary(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("frequencies", torch.tensor([1 + SMALL]))

    def frequency():
        accelerator = fsdp(1, "bf16")
        if cured:
            workarounds.reduce_in_fp32(accelerator)
        model, _ = prepared(accelerator, Rotary())
        model(torch.zeros(1, 2))
        return model.frequencies.item()

    assert on_ranks(frequency, **FSDP1) == [1 + SMALL if cured else 1.0]


@pytest.mark.parametrize("stage", [2, 3])
@shows_harm_without("reduce_in_fp32")
def test_zero_adds_micro_batches_in_the_type_that_is_computed_in(stage, cured):
    def length_of_step():
        accelerator = zero(stage, "bf16", steps=2)
        if cured:
            workarounds.reduce_in_fp32(accelerator)
        workarounds.configure_deepspeed_for_loop(accelerator, max_grad_norm=0.0, micro_batch_size=1)
        model, optimizer = prepared(accelerator, linear())
        for mine in (1.0, SMALL):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.full((1, 2), mine).bfloat16()).sum())
        (weight,) = model.parameters()
        from deepspeed.utils import safe_get_full_fp32_param

        return -safe_get_full_fp32_param(weight)[0, 0].item()

    assert on_ranks(length_of_step, **ZERO) == [(1 + SMALL) / 2 if cured else 0.5]


# ---- Model ----
@pytest.mark.skipif(not has_avx512bf16(), reason="only a CPU with AVX512-BF16 repacks")
@shows_harm_without("keep_4bit_weights_as_loaded")
def test_after_an_evaluation_on_a_cpu_gradients_stop_at_4_bit_layers(cured):
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    layer.to("cpu")
    if cured:
        workarounds.keep_4bit_weights_as_loaded(layer)
    layer.eval()
    with torch.no_grad():
        layer(torch.ones(1, 64, dtype=torch.bfloat16))
    layer.train()
    x = torch.ones(1, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    assert (x.grad is not None) == cured


@pytest.fixture
def bert(tmp_path):
    """The folder of a tiny BERT without a head."""
    BertModel(BERT, add_pooling_layer=False).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@shows_harm_without("drawing_new_weights_from")
def test_a_new_head_of_a_model_that_drew_before_differs_under_zero_3(cured, tmp_path):
    ViTModel(VIT).save_pretrained(tmp_path)

    def head():
        from deepspeed.runtime.zero import GatheredParameters

        set_seed(0)
        with workarounds.drawing_new_weights_from(0) if cured else nullcontext():
            model = AutoModelForImageClassification.from_pretrained(tmp_path)
        with GatheredParameters([model.classifier.weight]):
            return model.classifier.weight.tolist()

    def head_under_zero_3():
        zero(3)  # transformers asks this plugin whether to split what it loads
        return head()

    assert (on_ranks(head_under_zero_3, **ZERO) == on_ranks(head)) == cured


@shows_harm_without("share_new_modules")
def test_under_fsdp_only_rank_0_makes_new_weights(cured, bert):
    def head():
        accelerator = fsdp(1)
        set_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(bert)
        if cured:
            labels.share_new_modules(model, ["classifier"], accelerator)
        weight = model.classifier.weight
        return "meta" if weight.is_meta else weight.tolist()

    environment = FSDP1 | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    first, second = on_ranks(head, 2, **environment)
    assert (first == second) == cured


@shows_harm_without("cast_pixels")
def test_deepspeed_in_bf16_gives_pixels_in_fp32_to_the_model(cured):
    def forward():
        accelerator = zero(2, "bf16")
        config = ConvNextConfig(num_stages=1, hidden_sizes=[4], depths=[1])
        model = ConvNextForImageClassification(config)
        if cured:
            images.cast_pixels(model)
        model, _ = prepared(accelerator, model)
        model(pixel_values=torch.zeros(2, 3, 8, 8))

    check_errors(forward, "should be the same", cured, **ZERO)


@pytest.mark.parametrize(
    ("version", "ranks", "harm"),
    [(1, 2, "out of bounds for storage of size 0"), (2, 1, "mixed torch.Tensor and DTensor")],
    ids=["fsdp1", "fsdp2"],
)
@shows_harm_without("gathered_outside_of_layers")
def test_generate_calls_an_encoder_whose_weights_fsdp_has_not_gathered(version, ranks, harm, cured):
    def generate():
        accelerator = fsdp(version)
        model = T5ForConditionalGeneration(T5)
        seq2seq.share_embedding_modules(model)
        model, _ = prepared(accelerator, model)
        accelerator.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
        gathered = generation.gathered_outside_of_layers(model, accelerator)
        unwrapped = accelerator.unwrap_model(model)
        with gathered if cured else nullcontext():
            unwrapped.generate(TOKENS, max_new_tokens=1)

    check_errors(generate, harm, cured, ranks, **(FSDP1 if version == 1 else FSDP2))


@shows_harm_without("turn_off_layerdrop")
def test_layers_are_left_out_by_chance(cured):
    settings = {"d_model": 16, "vocab_size": 16, "max_position_embeddings": 16}
    for stack in ("encoder", "decoder"):
        settings |= {f"{stack}_layers": 1, f"{stack}_layerdrop": 0.5}
    model = BartForConditionalGeneration(BartConfig(**settings)).train()
    if cured:
        seq2seq.turn_off_layerdrop(model)
    calls = []
    for stack in (model.model.encoder, model.model.decoder):
        stack.layers[0].register_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    for _ in range(10):
        model(input_ids=TOKENS, labels=TOKENS)
    assert (len(calls) == 20) == cured


@shows_harm_without("share_embedding_modules")
def test_fsdp2_refuses_a_weight_that_is_in_several_modules(cured):
    def forward():
        accelerator = fsdp(2)
        model = T5ForConditionalGeneration(T5)
        if cured:
            seq2seq.share_embedding_modules(model)
        model, _ = prepared(accelerator, model)
        model(input_ids=TOKENS, labels=TOKENS)

    check_errors(forward, "is shared with a parameter already managed", cured, **FSDP2)


# ---- Adapters ----
@shows_harm_without("cast_for_zero3")
def test_under_zero_3_in_bf16_a_copied_head_fails(cured, bert):
    def forward():
        accelerator = zero(3, "bf16")
        model = AutoModelForSequenceClassification.from_pretrained(bert)
        config = LoraConfig(target_modules=["query"], modules_to_save=["classifier"])
        model = get_peft_model(model, config)
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()  # as adapters are
        if cured:
            workarounds.cast_for_zero3(model, accelerator)
        model, _ = prepared(accelerator, model)
        model(input_ids=TOKENS)

    check_errors(forward, "must have the same dtype", cured, **ZERO)


def forward_and_backward(model, kept):
    """The loss and the gradients of a step under autocast; `kept` collects what it keeps."""

    def keep(tensor):
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=torch.arange(16)[None]).logits.float().logsumexp(-1).sum()
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters() if weight.requires_grad)]


@shows_harm_without("leave_casts_to_autocast")
def test_query_key_and_value_each_keep_a_copy_of_the_input_that_they_share(cured):
    torch.manual_seed(0)
    base = llama(torch.bfloat16)
    model = with_adapters(base)
    inputs = []
    query = base.model.layers[0].self_attn.q_proj
    query.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    expected = forward_and_backward(model, kept=[])
    model.zero_grad()
    if cured:
        accelerator = SimpleNamespace(native_amp=True, is_fsdp2=False)
        workarounds.leave_casts_to_autocast(model, accelerator, use_dora=False)
    kept = []
    assert all(map(torch.equal, forward_and_backward(model, kept), expected))
    shared = inputs[-1].flatten()
    copies = {
        tensor.untyped_storage().data_ptr()
        for tensor in kept
        if tensor.dtype == shared.dtype and torch.equal(tensor.flatten(), shared)
    }
    assert len(copies) == (1 if cured else 3)


@shows_harm_without("wrap_adapters_for_fsdp1")
def test_fsdp1_keeps_gradients_for_the_frozen_base(cured):
    def gradients():
        accelerator = fsdp(1, use_orig_params=True)
        model = with_adapters(llama())
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
        if cured:
            workarounds.wrap_adapters_for_fsdp1(model, accelerator)
        model, _ = prepared(accelerator, model)
        accelerator.backward(model(input_ids=TOKENS).logits.sum())
        held = 0
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            if unit._handle and unit._handle.flat_param.grad is not None:
                held += unit._handle.flat_param.grad.numel()
        return held, trained

    ((held, trained),) = on_ranks(gradients, **FSDP1)
    assert (held == trained) == cured


@shows_harm_without("adapters_disabled")
def test_fsdp2_in_bf16_takes_adapters_for_frozen_after_peft_has_disabled_them(cured):
    if not cured and Version(torch.__version__) >= Version("2.14"):
        pytest.skip("torch 2.14 does so no more")

    def step():
        accelerator = fsdp(2, "bf16")
        model, _ = prepared(accelerator, with_adapters(llama()))
        with torch.no_grad(), pairs.adapters_disabled() if cured else model.disable_adapter():
            model(input_ids=TOKENS)
        accelerator.backward(model(input_ids=TOKENS).logits.sum())

    check_errors(step, "attempting to assign a gradient with dtype", cured, **FSDP2)


# ---- Mesh ----
@pytest.fixture
def saved(tmp_path):
    """The folder of a tiny Llama."""
    llama().save_pretrained(tmp_path)
    return tmp_path


def split_over_pairs(folder):
    """The model of a folder as transformers splits it over pairs of ranks."""
    splits = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=splits)
    del model.config.distributed_config
    return model


@shows_harm_without("splitting_over")
def test_transformers_splits_over_all_ranks_or_none(cured, saved):
    def rows_of_a_part():
        accelerator = fsdp(2, mesh=ParallelismConfig(dp_shard_size=2, tp_size=2))
        accelerator.wait_for_everyone()  # A rank that failed first would take the others' store
        with of_meshes.splitting_over(accelerator) if cured else nullcontext():
            model = split_over_pairs(saved)
        return model.model.layers[0].mlp.up_proj.weight.to_local().shape[0]

    all_ranks = "The parallel mesh requires 2 processes, but world_size is 4."
    found = on_ranks(lambda: outcome(rows_of_a_part), 4, **FSDP2)
    assert found == [8 if cured else all_ranks] * 4


@shows_harm_without("keep_gradients_split")
def test_the_gradient_of_split_embeddings_is_whole_on_each_rank(cured, saved):
    def rows_of_gradient():
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        model = split_over_pairs(saved)
        if cured:
            of_meshes.keep_gradients_split(model)
        model(input_ids=TOKENS).logits.sum().backward()
        weight = model.model.embed_tokens.weight
        return len(weight.to_local()), len(weight.grad.to_local())

    assert on_ranks(rows_of_gradient, 2, **MESH) == [(8, 8 if cured else 16)] * 2


@shows_harm_without("copying_split_weights")
def test_peft_cannot_copy_split_modules(cured, saved):
    def copy_of_head():
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        model = split_over_pairs(saved)
        with of_meshes.copying_split_weights() if cured else nullcontext():
            model = with_adapters(model, ["lm_head"])
        copied = model.get_base_model().lm_head.modules_to_save["default"]
        return len(copied.weight.to_local())

    first, second = on_ranks(lambda: outcome(copy_of_head), 2, **MESH)
    assert first == 8  # Its part begins where the whole weight does, at the address 0.
    assert (second == 8) if cured else ("invalid python storage" in second)


@shows_harm_without("run_copy_by_itself")
def test_the_copy_of_a_split_layer_computes_with_the_weights_of_the_original(cured, saved):
    def differs():
        accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        model = split_over_pairs(saved)
        with of_meshes.copying_split_weights():
            copied = copy.deepcopy(model.lm_head)
        if cured:
            style = ALL_PARALLEL_STYLES[model.tp_plan["lm_head"]]
            of_meshes.run_copy_by_itself(copied, style, accelerator.torch_device_mesh["tp"])
        torch.nn.init.zeros_(copied.weight)
        return bool(copied(torch.ones(1, 1, 8)).any())

    assert on_ranks(differs, 2, **MESH) == [not cured] * 2


@shows_harm_without("making_whole_adapters")
def test_peft_draws_adapters_for_the_width_of_a_part_on_each_rank_alike(cured, saved):
    def width_of_adapter():
        Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        model = split_over_pairs(saved)
        with of_meshes.making_whole_adapters() if cured else nullcontext():
            model = with_adapters(model)
        layer = model.get_base_model().model.layers[0].self_attn.o_proj
        return layer.weight.shape[1], layer.lora_A["default"].in_features

    assert on_ranks(width_of_adapter, 2, **MESH) == [(8, 8 if cured else 4)] * 2


@shows_harm_without("leave_whole_weights_to_fsdp")
def test_accelerate_imports_for_split_weights_what_transformers_does_not_have(cured, saved):
    def prepare():
        accelerator = fsdp(2, mesh=ParallelismConfig(dp_shard_size=2, tp_size=2))
        with of_meshes.splitting_over(accelerator):
            model = split_over_pairs(saved)
        if cured:
            of_meshes.leave_whole_weights_to_fsdp(accelerator)
        prepared(accelerator, model)

    check_errors(prepare, "ReplicateParallel", cured, 4, **FSDP2)


# ---- Experts that are spread over ranks ----
# Has accelerate take CPU ranks for GPUs also without an engine, and DDP for those of no device
AS_ON_GPUS = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_BYPASS_DEVICE_MAP": "true",
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a mixture of 2 experts."""
    AutoModelForCausalLM.from_config(mixture_of_two()).save_pretrained(tmp_path)
    return str(tmp_path)


def spread(folder):
    """An Accelerator of two ranks that share experts, and the mixture as they load it."""
    args = parse(mixtral.Arguments, words=["--ep_size", "2", "--report_to", "none"])
    accelerator = new_accelerator(args)
    layout = make_layout(args, accelerator)
    options = {"dtype": torch.float32, "attn_implementation": "sdpa", "output_loading_info": True}
    model, _ = load_pretrained(AutoModelForCausalLM, layout, folder, **options)
    return accelerator, model


@shows_harm_without("ddp_takes_split_weights")
def test_accelerate_refuses_split_weights_under_ddp(cured, folder):
    def prepare():
        accelerator, model = spread(folder)
        if cured:
            accelerator.prepare_model(model)
        else:
            Accelerator.prepare_model(accelerator, model)

    check_errors(prepare, "incompatible with DDP", cured, 2, **AS_ON_GPUS)


@shows_harm_without("leave_experts_out_of_ddp")
def test_ddp_takes_the_experts_of_rank_0_for_those_of_all(cured, folder):
    def prepare():
        _, model = spread(folder)
        (experts,) = modules_of_experts(model)
        own = experts.down_proj.to_local().detach().clone()
        if cured:
            of_experts.leave_experts_out_of_ddp(model)
        made = outcome(lambda: DistributedDataParallel(model))
        return not isinstance(made, str) and torch.equal(experts.down_proj.to_local(), own)

    assert all(on_ranks(prepare, 2)) == cured


@shows_harm_without("spreading_experts_over")
def test_transformers_shards_what_it_does_not_spread(cured, folder):
    def load():
        if cured:
            _, model = spread(folder)
        else:
            config = DistributedConfig(fsdp_size=2, ep_size=2)
            model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        return hasattr(model.lm_head.weight, "device_mesh")

    assert on_ranks(load, 2) == [not cured] * 2


# ---- Optimizer ----
@pytest.mark.parametrize("stage", [1, 2])
@shows_harm_without("link_optimizer_states")
def test_zero_1_and_2_find_the_state_of_the_first_group_only(stage, cured):
    def moment_of_second():
        from deepspeed.utils import safe_get_full_optimizer_state

        accelerator = zero(stage)
        model = torch.nn.Linear(2, 1)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        if cured:
            workarounds.link_optimizer_states(model.optimizer)
        first, second = model.parameters()
        assert safe_get_full_optimizer_state(first, "exp_avg") is not None
        return outcome(lambda: safe_get_full_optimizer_state(second, "exp_avg").item())

    (found,) = on_ranks(moment_of_second, **ZERO)
    if cured:  # a tenth of the gradient, of three ones that are clipped to a norm of 1
        assert found == pytest.approx(0.1 / 3**0.5, rel=1e-5)
    else:
        assert "exp_avg not found" in found


@shows_harm_without("check_gradients_of_zero0")
def test_zero_0_steps_with_gradients_that_are_not_finite(cured):
    def step():
        accelerator = zero(0)
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if cured:
            workarounds.check_gradients_of_zero0(optimizer, accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.tensor([[float("nan"), 1.0]])).sum())
        optimizer.step()
        return model.module.weight.isfinite().all().item(), accelerator.optimizer_step_was_skipped

    assert on_ranks(step, **ZERO) == [(cured, cured)]


@shows_harm_without("undo_allocating_step")
def test_zero_0_in_bf16_has_stepped_before_the_first_step(cured):
    def prepare():
        accelerator = zero(0, "bf16")
        model = linear(value=1.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        model, optimizer = accelerator.prepare(model, optimizer)
        masters = master_weights(optimizer.optimizer).items()
        inner = optimizer.optimizer.optimizer
        if cured:
            workarounds.undo_allocating_step(masters, inner)
        ((_, master),) = masters
        return master.tolist(), inner.state[master]["step"].item()

    (found,) = on_ranks(prepare, **ZERO)
    assert (found == ([[1.0, 1.0]], 0)) == cured
    if not cured:
        assert found == ([[pytest.approx(0.95)] * 2], 1)
