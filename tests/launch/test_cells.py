# SPDX-License-Identifier: Apache-2.0
"""Every YAML, kind of weights and recipe gives recorded figures, and a result that has them.

A cell is one launch of the job of tests/net.py: two epochs of 42 rows whose last window is short,
evaluations, a best model that is not the last, checkpoints of which old ones go. It is held against
the golden row of its recipe, weights and flags: all YAMLs that train alike share one. Its result is
loaded and evaluated outside of the recipe, and under ranks each of them holds the bytes that its
YAML promises. In one process and without further flags it is a copy of the recipe that is launched
(scripts/copy_recipe.py), which needs no module of this repository. Judges of the rows themselves
are in test_judges.py.
"""

import pytest

import net
from jobs import OTHERS
from net import Cell
from template import copying

PIECES = ("--max_logits_mib", "0.02")
SELECTIVE = ("--gradient_checkpointing", "selective")
# Nine rows in batches of four leave the second of two ranks without rows in its last batch
ANSWERS = (
    *("--predict_with_generate", "--num_predictions", "9", "--generation_max_new_tokens", "12"),
    *("--per_device_eval_batch_size", "4"),
)


def cut(batch, accumulation):
    """Flags that cut the rows of a step otherwise."""
    sizes = str(batch), str(accumulation)
    return "--per_device_train_batch_size", sizes[0], "--gradient_accumulation_steps", sizes[1]


# Further YAMLs of each engine are links of a chain (test_chains.py); all pairs of YAMLs, weights
# and recipes are in evidence/test_parity.py
IN_CHAINS = {
    *("fsdp1_no_shard", "fsdp1_shard_grad_op", "fsdp2_cpu_offload", "fsdp2_hybrid_shard"),
    *("deepspeed_zero1", "deepspeed_zero2_offload", "deepspeed_zero3_offload"),
    *("fsdp2_cp", "fsdp2_ep", "fsdp2_tp", "deepspeed_zero0"),
}
LOADERS = ("--dataloader_num_workers", "2", "--dataset_num_proc", "2")
WHOLE = [
    Cell(),
    Cell(riding=ANSWERS),
    # Only ranks that wait for others are timed
    Cell(riding=(*cut(1, 12), "--optim", "adamw_torch", "--ddp_timeout", "1")),
    Cell("ddp", ranks=2, riding=("--padding_free", *cut(6, 1), *ANSWERS, *SELECTIVE)),
    Cell("fsdp1_full_shard", ranks=2, riding=("--async_save", *ANSWERS, *SELECTIVE)),
    Cell("fsdp1_hybrid_shard", ranks=4, riding=("--attn_implementation", "eager")),
    Cell("fsdp2_full_shard", ranks=2, riding=(*PIECES, *ANSWERS, *SELECTIVE)),
    Cell("fsdp2_shard_grad_op", ranks=2, riding=LOADERS),
    Cell("deepspeed_zero3", ranks=2, riding=("--padding_free", *PIECES, *ANSWERS, *SELECTIVE)),
    Cell("deepspeed_ulysses", ranks=2, sharing=2, riding=ANSWERS),
]

ADAPTERS = [
    Cell(weights="LoRA"),
    Cell(weights="dropout"),
    Cell("ddp", weights="dropout", ranks=2),
    # As one process drops, and answers take no random number from training
    Cell("tp", weights="dropout", ranks=2, sharing=2, riding=ANSWERS),
]

QUANTIZED = [
    Cell(weights="nf4"),
    Cell(weights="int8"),
    Cell(weights="float8"),
    Cell("fsdp2_full_shard", weights="float8", ranks=2),
    Cell("fsdp1_full_shard", weights="nf4", ranks=2),
    Cell("fsdp2_full_shard", weights="nf4", ranks=2, riding=SELECTIVE),
    Cell("deepspeed_zero2", weights="int8", ranks=2, riding=SELECTIVE),
]

OF_TEACHER = (
    *("--teacher_load_in_4bit", "--loss_type", "jsd", "--beta", "0.3"),
    *("--temperature", "2", "--hard_loss_share", "0.3"),
)
RECIPES = [Cell(recipe=recipe) for recipe in OTHERS]
RECIPES += [
    Cell("fsdp2_full_shard", recipe="llama_dpo", ranks=2, riding=PIECES),
    Cell("fsdp2_full_shard", recipe="t5", ranks=2),
    Cell(recipe="mixtral", weights="LoRA"),
    Cell("deepspeed_zero3", recipe="mixtral", weights="LoRA", ranks=2),
    Cell(recipe="llama_dpo", weights="LoRA"),
    Cell(recipe="llama_dpo", weights="LoRA", riding=("--precompute_ref_log_probs",)),
    Cell(recipe="llama_reward", weights="nf4"),
    Cell("ddp", recipe="embeddings", ranks=2, riding=cut(2, 3)),
    Cell("fsdp2_full_shard", recipe="embeddings", ranks=2),
    Cell(recipe="embeddings", weights="LoRA"),
    Cell(recipe="embeddings", weights="nf4"),
    Cell("ep", recipe="mixtral", ranks=4, riding=("--ep_size", "2")),
    Cell("fsdp2_full_shard", recipe="llama_distill", ranks=2, riding=PIECES),
    Cell(recipe="llama_distill", weights="LoRA", flags=OF_TEACHER),
    Cell(recipe="llama_grpo", weights="LoRA"),
    Cell("fsdp2_full_shard", recipe="llama_grpo", weights="LoRA", ranks=2),
]

# One matrix for embedding and output, which the first and the last stage share, and which is
# gathered for a loss in pieces; as many layers as four stages need
TIED = ("--tie_word_embeddings", "--num_hidden_layers", "4")
STAGES = ("--shard_stages", "--pipeline_schedule", "interleaved_zero_bubble")
CHECKPOINTING = ("--gradient_checkpointing",)
PIPELINES = [
    Cell("pp", recipe="llama_pipeline", ranks=2, sharing=2, riding=CHECKPOINTING),
    Cell(shape=TIED),
    Cell("deepspeed_zero3", shape=TIED, ranks=2, riding=PIECES),
    Cell("pp", "llama_pipeline", ranks=4, sharing=2, riding=STAGES, shape=TIED),
]

PACKING = ("--packing", "--max_length", "128")
BF16 = Cell("ddp", precision="bf16", ranks=2)
BFLOAT16 = ("--dtype", "bfloat16")
STREAM = ("--streaming", "--shuffle_buffer_size", "16", "--max_length", "48")
OWN = [
    Cell(flags=PACKING),
    Cell("ddp", flags=PACKING, ranks=2, riding=("--torch_compile",)),
    Cell("ddp", weights="float8", ranks=2),
    Cell("fsdp2_full_shard", flags=PACKING, ranks=2, riding=("--torch_compile", *SELECTIVE)),
    BF16,
    Cell(weights="dropout", flags=("--use_dora",)),
    Cell(flags=("--optim", "adamw_8bit")),
    Cell(flags=("--no_completion_only_loss", "--no_assistant_only_loss")),
    Cell(flags=(*BFLOAT16, "--no_master_weights")),
    Cell(weights="LoRA", flags=("--use_rslora", "--lora_target_modules", "q_proj", "v_proj")),
    Cell(weights="nf4", flags=("--bnb_4bit_quant_type", "fp4", *CHECKPOINTING)),
    Cell(recipe="mistral_pretrain", flags=STREAM),
]
# Modules that are trained whole beside adapters; the reference of DPO has the original head
COPIES = ("--modules_to_save", "lm_head", "embed_tokens")
OF_DPO = ("--modules_to_save", "lm_head")
OWN += [
    Cell(weights="LoRA", flags=COPIES),
    Cell("ddp", weights="LoRA", flags=COPIES, ranks=2, riding=PIECES),
    Cell("deepspeed_zero3", weights="LoRA", flags=COPIES, ranks=2),
    Cell("tp", weights="LoRA", flags=COPIES, ranks=2, sharing=2, riding=SELECTIVE),
    Cell(recipe="llama_dpo", weights="LoRA", flags=OF_DPO),
    Cell("fsdp1_full_shard", recipe="llama_dpo", weights="LoRA", flags=OF_DPO, ranks=2),
]
# A new head beside adapters has their type: FSDP2 wants one in a unit, and DeepSpeed casts nothing
NEW_HEADS = [
    Cell("fsdp2_full_shard", "bert", "nf4", 2, precision="bf16", flags=BFLOAT16),
    Cell("deepspeed_zero3", "bert", "LoRA", 2, precision="bf16"),
]
CELLS = [*WHOLE, *ADAPTERS, *QUANTIZED, *RECIPES, *PIPELINES, *OWN, *NEW_HEADS]
# The rows of two ranks with dropout and of bf16 are those of DDP
REFERENCES = [cell for cell in CELLS if cell.ranks == 1 and not cell.riding]
REFERENCES += [Cell("ddp", weights="dropout", ranks=2), BF16, *NEW_HEADS]


# Prints, when the recipe ends, the files of all modules that lie neither beside it nor in packages
WATCH = """
import atexit, runpy, sys, sysconfig
before = set(sys.modules)  # of a warm start
def foreign():
    known = (sys.path[0], sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())
    modules = [module for name, module in list(sys.modules.items()) if name not in before]
    files = [getattr(module, "__file__", None) or "" for module in modules]
    files = [file for file in files if file.startswith("/") and file.endswith(".py")]
    print("foreign:", [file for file in files if not file.startswith(known)])
atexit.register(foreign)
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def copy_of(recipe, folder):
    """The words that run a copy of a recipe without extras, as the command writes its files."""
    copying.write(folder / "copy", copying.files_of_copy(net.ROOT, recipe))
    assert not (folder / "copy" / "extras").exists()
    (folder / "watch.py").write_text(WATCH)
    return [folder / "watch.py", folder / "copy" / f"{recipe}.py"]


def bound_of(cell):
    if cell.precision == "bf16" or "bfloat16" in cell.flags:
        return "bf16"
    return cell.weights if cell.weights in ("int8", "float8") else "fp32"


def row_of(done, tiny):
    figures = net.figures(done.folder)
    if (done.folder / "predictions-2.jsonl").exists():
        for line in figures:
            line.pop("eval_exact_match", None)  # Training is the same without answers
    return {
        "figures": figures,
        "checkpoints": net.checkpoints(done.folder),
        "tensors": net.tensors(done.folder),
        "saved_loss": net.saved_loss(done.folder, tiny),
    }


def tokenizer_of(folder):
    """What the files of a tokenizer say, without its vocabulary and how it was found."""
    settings = net.read_json(folder / "tokenizer_config.json")
    for name in ("is_local", "local_files_only"):
        settings.pop(name, None)
    whole = net.read_json(folder / "tokenizer.json")
    return settings, whole["truncation"], whole["padding"]


def test_every_shipped_yaml_has_a_cell():
    shipped = {path.stem for path in (net.REPO / "accelerate_configs").glob("*.yaml")}
    shipped -= {"fsdp"}  # a copy of fsdp2_full_shard.yaml
    shipped -= {"hsdp_tp", "hsdp_cp"}  # for eight ranks, which evidence/test_parity.py has
    assert shipped - IN_CHAINS == {cell.config for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name.replace(" ", "-"))
def test_a_cell_gives_its_recorded_figures(cell, net_tiny, golden, tmp_path):
    tiny = net_tiny(cell.model, *cell.shape)
    is_plain = cell == Cell(recipe=cell.recipe)
    script = copy_of(cell.recipe, tmp_path) if is_plain else None
    done = net.launch(cell, tiny, tmp_path / "run", script=script).expect(0)
    assert not is_plain or "foreign: []" in done.output, done.output[-1000:]
    if done.report:
        assert done.report["verdict"] == "ok", done.report
    if cell.recipe != "vit":  # Training pads and cuts; what serves the model must not
        assert tokenizer_of(done.folder) == tokenizer_of(tiny / "model")
    own_name = None if cell in REFERENCES else cell.name
    without = []
    if cell.config.startswith("deepspeed") and cell.precision == "bf16":
        without.append("tensors")  # They are in 16 bits, as the model is there
    golden.check("cells", cell.row, row_of(done, tiny), bound_of(cell), own_name, without)
    answers = net.answers(done.folder)
    if answers:
        own_name = None if cell.ranks == 1 else cell.name
        golden.check("answers", cell.row, answers, own_name=own_name)
