# SPDX-License-Identifier: Apache-2.0
"""Every YAML, kind of weights and recipe gives recorded figures, and a result that has them.

A cell is one launch of the job of tests/net.py: two epochs of 42 rows whose last window is short,
evaluations, a best model that is not the last, checkpoints of which old ones go. It is held against
the golden row of its recipe, weights and flags: all YAMLs that train alike share one. Its result is
loaded and evaluated outside of the recipe, and under ranks each of them holds the bytes that its
YAML promises. Judges of the rows themselves are in test_judges.py.
"""

import pytest

import net
from net import Cell

PIECES = ("--max_logits_mib", "0.02")
RIDING = {
    "ddp": ("--padding_free",),
    "fsdp1_full_shard": ("--async_save",),
    "fsdp1_hybrid_shard": ("--attn_implementation", "eager"),
    "fsdp2_full_shard": PIECES,
    "fsdp2_cpu_offload": ("--gradient_checkpointing",),
    "deepspeed_zero1": ("--dataloader_num_workers", "2"),
}
WHOLE = [Cell()]
for config in (
    *("ddp", "fsdp1_full_shard", "fsdp1_shard_grad_op", "fsdp1_no_shard", "fsdp2_full_shard"),
    *("fsdp2_shard_grad_op", "fsdp2_cpu_offload", "deepspeed_zero0", "deepspeed_zero1"),
    *("deepspeed_zero2", "deepspeed_zero2_offload", "deepspeed_zero3", "deepspeed_zero3_offload"),
):
    WHOLE.append(Cell(config, ranks=2, riding=RIDING.get(config, ())))
for config in ("fsdp1_hybrid_shard", "fsdp2_hybrid_shard"):
    WHOLE.append(Cell(config, ranks=4, riding=RIDING.get(config, ())))

MESHES = [
    Cell("tp", ranks=2, sharing=2),
    Cell("deepspeed_ulysses", ranks=2, sharing=2),
    Cell("fsdp2_tp", ranks=4, sharing=2),
    Cell("fsdp2_cp", ranks=4, sharing=2),
    Cell("hsdp_tp", ranks=8, sharing=2),
    Cell("hsdp_cp", ranks=8, sharing=2),
]

ENGINES = ("ddp", "fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero2", "deepspeed_zero3")
ADAPTERS = [Cell(weights="LoRA"), Cell(weights="dropout")]
ADAPTERS += [Cell(config, weights="dropout", ranks=2) for config in ENGINES]
ADAPTERS += [
    Cell("tp", weights="LoRA", ranks=2, sharing=2),
    Cell("deepspeed_ulysses", weights="LoRA", ranks=2, sharing=2),
    Cell("fsdp2_cp", weights="LoRA", ranks=4, sharing=2),
]

QUANTIZED = [Cell(weights="nf4"), Cell(weights="int8")]
for config in ("ddp", "fsdp2_full_shard", "deepspeed_zero2", "deepspeed_zero3"):
    QUANTIZED.append(Cell(config, weights="nf4", ranks=2))
for config in ("ddp", "deepspeed_zero2"):
    QUANTIZED.append(Cell(config, weights="int8", ranks=2))

OTHERS = ("llama_dpo", "mistral_pretrain", "mixtral", "t5", "bert", "bert_ner", "vit")
RECIPES = [Cell(recipe=recipe) for recipe in OTHERS]
RECIPES += [Cell("fsdp2_full_shard", recipe=recipe, ranks=2) for recipe in OTHERS]
for recipe in ("llama_dpo", "mixtral", "bert"):
    RECIPES.append(Cell(recipe=recipe, weights="LoRA"))
    RECIPES.append(Cell("deepspeed_zero3", recipe=recipe, weights="LoRA", ranks=2))

EXPERTS = [
    Cell("ep", recipe="mixtral", ranks=2),
    Cell("fsdp2_ep", recipe="mixtral", ranks=4, riding=("--ep_size", "2")),
]
PIPELINES = [
    Cell("pp", recipe="llama_pipeline", ranks=2, sharing=2, riding=riding)
    for riding in ((), ("--pipeline_schedule", "gpipe"), ("--gradient_checkpointing",))
]

PACKING = ("--packing", "--max_length", "128")
HEAD = ("--modules_to_save", "lm_head")
DORA = ("--use_dora",)
ADAM_8BIT = ("--optim", "adamw_8bit")
OWN = [
    Cell(flags=PACKING),
    Cell("fsdp2_full_shard", flags=PACKING, ranks=2),
    Cell(precision="bf16"),
    Cell("ddp", precision="bf16", ranks=2),
    Cell("deepspeed_zero2", precision="bf16", ranks=2),
    Cell("fsdp2_full_shard", precision="bf16", ranks=2),
    Cell(weights="LoRA", flags=HEAD),
    Cell("fsdp2_full_shard", weights="LoRA", flags=HEAD, ranks=2),
    Cell(weights="dropout", flags=DORA),
    Cell(flags=ADAM_8BIT),
]
CELLS = [*WHOLE, *MESHES, *ADAPTERS, *QUANTIZED, *RECIPES, *EXPERTS, *PIPELINES, *OWN]
# The row of two ranks with dropout is that of DDP
REFERENCES = [cell for cell in CELLS if cell.ranks == 1]
REFERENCES.append(Cell("ddp", weights="dropout", ranks=2))


def bound_of(cell):
    if cell.precision == "bf16":
        return "bf16"
    return "int8" if cell.weights == "int8" else "fp32"


def row_of(done, tiny):
    return {
        "figures": net.figures(done.folder),
        "checkpoints": net.checkpoints(done.folder),
        "tensors": net.tensors(done.folder),
        "saved_loss": net.saved_loss(done.folder, tiny),
    }


def test_every_shipped_yaml_has_a_cell():
    shipped = {path.stem for path in (net.REPO / "accelerate_configs").glob("*.yaml")}
    assert shipped - {"fsdp"} == {cell.config for cell in CELLS}  # fsdp.yaml is a copy


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name.replace(" ", "-"))
def test_a_cell_gives_its_recorded_figures(cell, net_tiny, golden, tmp_path):
    tiny = net_tiny(cell.recipe.removesuffix("_pipeline"))
    done = net.launch(cell, tiny, tmp_path / "run").expect(0)
    if done.report:
        assert done.report["verdict"] == "ok", done.report
    own_name = None if cell in REFERENCES else cell.name
    without = []
    if cell.config == "deepspeed_zero0":
        without.append("grad_norm")  # The engine does not tell it
    if cell.config.startswith("deepspeed") and cell.precision == "bf16":
        without.append("tensors")  # They are in 16 bits, as the model is there
    golden.check("cells", cell.row, row_of(done, tiny), bound_of(cell), own_name, without)
