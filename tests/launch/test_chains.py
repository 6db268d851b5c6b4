# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped in each step and continued under another YAML has the recorded figures.

The golden row is that of a run in one process that nothing stopped (test_cells.py): a checkpoint
holds all that training changes, whatever wrote it and whatever reads it.
"""

import pytest

import net
from jobs import OTHERS
from net import Cell

# DDP runs forward once before the loop; otherwise this is the second micro-batch of the first step
STOP = {"at": "forward 2", "do": "SIGTERM", "rank": 0}
# Of recipes that do not run one whole model, or run it to sample answers: between two steps on the
# same answers, after the last of which GRPO ends
STOP_BY_STEP = {
    "llama_pipeline": STOP | {"at": "step 2"},
    "llama_distill": STOP | {"at": "step 2"},
    "llama_grpo": STOP | {"at": "step 3"},
}


def on(config, ranks=2, sharing=1, **options):
    return Cell(config, ranks=ranks, sharing=sharing, **options)


ONE = Cell()
ENGINES = [
    on("fsdp1_no_shard"),
    on("deepspeed_zero3_offload"),
    on("fsdp2_cpu_offload"),
    on("deepspeed_zero2_offload"),
    ONE,
    on("fsdp1_shard_grad_op"),
]
MESHES = [
    on("fsdp2_cp", 4, 2),
    on("deepspeed_zero1"),
    on("fsdp2_tp", 4, 2),
    on("fsdp2_hybrid_shard", 4),
    on("deepspeed_zero0"),
    ONE,
]
BF16 = [
    on("deepspeed_zero2", precision="bf16"),
    on("fsdp2_full_shard", precision="bf16"),
    Cell(precision="bf16"),
]
NF4 = [
    on("fsdp2_full_shard", weights="nf4"),
    on("deepspeed_zero3", weights="nf4"),
    Cell(weights="nf4"),
]
ADAPTERS = [
    on("deepspeed_zero3", weights="LoRA"),
    on("tp", sharing=2, weights="LoRA"),
    on("fsdp1_full_shard", weights="LoRA"),
]
PADDED = [on("deepspeed_zero3", 3)] * 2  # It pads the last parts
ADAM_8BIT = [Cell(flags=("--optim", "adamw_8bit"))] * 2
EXPERTS = [
    on("ep", recipe="mixtral"),
    on("tp", sharing=2, recipe="mixtral"),  # Ranks have parts of gate and up projections in turn
    on("fsdp2_ep", 4, recipe="mixtral", riding=("--ep_size", "2")),
    on("fsdp2_full_shard", recipe="mixtral"),
]
# Blocks of a stream of texts, read through a window that a step ends within
STREAM = ("--streaming", "--shuffle_buffer_size", "16", "--max_length", "48")
TEXTS = [
    Cell(recipe="mistral_pretrain", flags=STREAM),
    on("ddp", recipe="mistral_pretrain", flags=STREAM),
]
PIPELINE = [
    on("pp", sharing=2, recipe="llama_pipeline"),
    on("fsdp2_full_shard"),
    on("pp", sharing=2, recipe="llama_pipeline", riding=("--pipeline_schedule", "gpipe")),
]
# What draws random numbers, and a schedule with settings of its own
NOISE = (
    *("--neftune_noise_alpha", "5", "--lr_scheduler_type", "cosine_with_min_lr"),
    *("--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}', "--adam_beta2", "0.95"),
)
CHAINS = {
    "engines": ENGINES,
    "meshes": MESHES,
    "bf16": BF16,
    "nf4": NF4,
    "adapters": ADAPTERS,
    "padded": PADDED,
    "8-bit": ADAM_8BIT,
    "experts": EXPERTS,
    "pipeline": PIPELINE,
    "stream": TEXTS,
}
for recipe in OTHERS:
    if recipe != "mixtral":  # "experts" has it
        CHAINS[recipe] = [Cell(recipe=recipe), on("deepspeed_zero3", recipe=recipe)]


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_continues_under_another_yaml(name, net_tiny, golden, tmp_path):
    chain = CHAINS[name]
    first, last = chain[0], chain[-1]
    tiny = net_tiny(first.model)
    for number, cell in enumerate(chain, start=1):
        if cell is last and number == len(chain):
            done = net.launch(cell, tiny, tmp_path / "run").expect(0)
        else:
            stop = STOP_BY_STEP.get(cell.recipe, STOP)
            done = net.launch(cell, tiny, tmp_path / "run", inject=stop).expect(75)
        assert done.report.get("verdict", "ok") == "ok", done.report
        if number > 1:
            assert "Continuing from" in done.output
    # A stop writes a checkpoint of its own, and ZeRO-0 tells no norm
    without = ["checkpoints"]
    if any(cell.config == "deepspeed_zero0" for cell in chain):
        without.append("grad_norm")
    row = {
        "figures": net.figures(done.folder),
        "tensors": net.tensors(done.folder),
        "saved_loss": net.saved_loss(done.folder, tiny),
    }
    bound = "bf16" if first.precision == "bf16" else "fp32"
    golden.check("cells", first.row, row, bound, f"chain of {name}", without)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(weights="dropout", flags=NOISE),
        Cell(weights="float8"),
        on("deepspeed_zero2", precision="bf16"),
    ],
    ids=lambda cell: cell.name.replace(" ", "-"),
)
def test_a_run_continues_under_its_own_yaml_bit_for_bit(cell, net_tiny, tmp_path):
    tiny = net_tiny("llama")
    whole = net.launch(cell, tiny, tmp_path / "whole").expect(0)
    stop = STOP | {"at": "forward 9"}
    net.launch(cell, tiny, tmp_path / "run", inject=stop).expect(75)
    done = net.launch(cell, tiny, tmp_path / "run").expect(0)
    assert net.figures(done.folder) == net.figures(whole.folder)
    assert net.bytes_of_result(done.folder) == net.bytes_of_result(whole.folder)


def test_a_compiled_run_compiles_in_its_first_step_and_continues_bit_for_bit(
    net_tiny, golden, tmp_path
):
    cell = Cell(flags=("--packing", "--max_length", "128"), riding=("--torch_compile",))
    tiny = net_tiny("llama")
    whole = net.launch(cell, tiny, tmp_path / "whole").expect(0)
    row = {"figures": net.figures(whole.folder), "saved_loss": net.saved_loss(whole.folder, tiny)}
    golden.check("cells", cell.row, row, "fp32", cell.name, ["checkpoints", "tensors"])
    net.launch(cell, tiny, tmp_path / "run", inject=STOP | {"at": "forward 9"}).expect(75)
    done = net.launch(cell, tiny, tmp_path / "run").expect(0)
    assert net.figures(done.folder) == net.figures(whole.folder)
    assert net.bytes_of_result(done.folder) == net.bytes_of_result(whole.folder)
    for run, step in ((whole, 1), (done, 3)):
        assert f"the last one in step {step}." in run.output
