# SPDX-License-Identifier: Apache-2.0
"""All cells, the most valuable first, so that a short time on a GPU proves as much as possible.

A cell's function is named and not imported, since only the process of a cell loads torch.
"""

from collections.abc import Iterator

from .cell import Cell

# What recipes/llama.py imports beyond the libraries that any model needs
RECIPE = ("datasets", "peft")
WITH_DEEPSPEED = (*RECIPE, "deepspeed")
WITH_BITSANDBYTES = (*RECIPE, "bitsandbytes")
WITH_METRICS = (*RECIPE, "sacrebleu", "rouge_score")

CUDA = "it is about CUDA itself"
MINUTES_ON_A_CPU = "the quickstart takes minutes on a CPU, where tests/launch runs it"
ATTENTIONS_OF_A_CPU = "tests/unit/test_masks.py has the attentions of a CPU"
NO_SHARDING_ON_A_CPU = "accelerate ignores FSDP and DeepSpeed without one"
MEMORY_OF_A_GPU = "it needs the GPU's memory of planner.small and planner.large"

TRAINS = "the loss falls, and each process holds what the YAML promises"
ALIKE = "losses of 20 steps within 2e-2 of the first row's"
RESUMED = "the losses after the checkpoint within 2e-3 of those without a stop"
RESUMED_PAGED = f"{RESUMED}; a resumed run's peak at most 1.1 times that before"
NEAR_THE_LEAN_LOOP = "losses agree; within 5 % of the lean loop"


def micro_cells() -> Iterator[Cell]:
    """Yield cells of a second or two, most of which is the start of the process."""
    yield Cell(
        "micro.pinned_answer",
        proves="a stop can be requested without waiting for the GPU",
        function="micro.pinned_answer",
        bound="the copy is in pinned memory",
        limit=60,
        cuda_only=CUDA,
    )
    yield Cell(
        "micro.found_inf",
        proves="fused AdamW skips a non-finite step and does not count it",
        function="micro.found_inf",
        bound="skipped, then one step counted",
        limit=60,
    )
    yield Cell(
        "micro.context",
        proves="the memory of a process besides its tensors is what the planner assumes",
        function="micro.context_size",
        bound="at most the planner's 819 MiB",
        limit=60,
        cuda_only=CUDA,
    )
    yield Cell(
        "micro.int8_rows",
        proves="how far an int8 row depends on its neighbors, and the price of a product",
        function="micro.int8_rows",
        limit=90,
        needs=("bitsandbytes",),
    )
    yield Cell(
        "micro.lora_cast",
        proves="LoRA without peft's cast of its input is as accurate, and faster",
        function="adapters.lora_cast",
        bound="gradients within 5e-3 of each other",
        limit=90,
        needs=("peft",),
    )
    yield Cell(
        "micro.head_in_pieces",
        proves="the loss in pieces preserves the head's gradient, and its cost",
        function="head_loss.head_in_pieces",
        bound="gradient within 5e-3 of fp32",
        limit=120,
        needs=RECIPE,
    )
    yield Cell(
        "micro.packed_attention",
        proves="attention kernels agree on packed rows, and their speed",
        function="packed_attention.packed_attention",
        bound="outputs within 2e-2 of the dense mask",
        limit=180,
    )


def strategy_cells() -> Iterator[Cell]:
    """Yield the cells of every YAML for one GPU."""
    yield Cell(
        "strategies.one_process",
        proves="single.yaml and ddp.yaml train in bf16, full and QLoRA",
        function="strategies.one_process",
        bound=TRAINS,
        limit=180,
        needs=RECIPE,
    )
    yield Cell(
        "strategies.fsdp2",
        proves="every FSDP2 YAML for one GPU trains in bf16, full and QLoRA",
        function="strategies.fsdp2",
        bound=TRAINS,
        limit=240,
        needs=RECIPE,
    )
    yield Cell(
        "strategies.fsdp1",
        proves="every FSDP1 YAML for one GPU trains in bf16",
        function="strategies.fsdp1",
        bound=TRAINS,
        limit=240,
        needs=RECIPE,
    )
    yield Cell(
        "strategies.zero",
        proves="ZeRO-0 to 3 train in bf16, full and QLoRA",
        function="strategies.zero",
        bound=TRAINS,
        limit=270,
        needs=WITH_DEEPSPEED,
    )
    yield Cell(
        "strategies.zero_offload",
        proves="ZeRO-2 and 3 with offload train in bf16, full and QLoRA",
        function="strategies.zero_offload",
        bound=TRAINS,
        limit=300,
        needs=WITH_DEEPSPEED,
    )


def agreement_cells() -> Iterator[Cell]:
    """Yield the cells of masks and precisions: other kernels, the same losses."""
    yield Cell(
        "masks.documents",
        proves="packed documents do not see each other under each installed attention",
        function="masks.documents",
        bound="no leak, and a planted one is detected",
        limit=200,
        needs=("pytest",),
        cuda_only=ATTENTIONS_OF_A_CPU,
    )
    yield Cell(
        "masks.packed_rows",
        proves="packed and padding-free rows have one loss under each installed attention",
        function="masks.packed_rows",
        bound=ALIKE,
        limit=240,
        needs=RECIPE,
    )
    yield Cell(
        "parity.precisions",
        proves="bf16, fp16, TF32, engines and pieces of the loss against fp32",
        function="precisions.padded",
        bound=ALIKE,
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "parity.packed",
        proves="packed, compiled and with Liger's kernels against fp32",
        function="precisions.packed",
        bound=ALIKE,
        limit=240,
        needs=RECIPE,
    )


def resume_cells() -> Iterator[Cell]:
    """Yield the cells of runs that continue from a checkpoint."""
    yield Cell(
        "resume.engines",
        proves="a run resumes under every engine",
        function="resume.engines",
        bound=RESUMED,
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "resume.optimizers",
        proves="a run resumes with every optimizer, and the paged ones stay paged",
        function="resume.optimizers",
        bound=RESUMED_PAGED,
        limit=240,
        needs=WITH_BITSANDBYTES,
    )
    yield Cell(
        "resume.precisions",
        proves="fp16 and quantized bases resume",
        function="resume.precisions",
        bound=RESUMED,
        limit=300,
        needs=WITH_BITSANDBYTES,
    )
    yield Cell(
        "resume.zero_offload",
        proves="ZeRO with offload resumes",
        function="resume.zero_offload",
        bound=RESUMED,
        limit=300,
        needs=WITH_DEEPSPEED,
    )


def quantized_cells() -> Iterator[Cell]:
    """Yield the cells of weights and optimizer state in fewer bits."""
    yield Cell(
        "quantized.bases",
        proves="int8 and 4-bit bases learn and hold fewer bytes, also sharded",
        function="quantized.bases",
        bound="first loss within 10 % of LoRA's, fewer bytes, the loss falls",
        limit=200,
        needs=WITH_BITSANDBYTES,
    )
    yield Cell(
        "optimizers.adamw",
        proves="8-bit and paged AdamW reach the loss of fused AdamW with less state",
        function="quantized.optimizers",
        bound="last loss within 10 %, 8-bit state below 0.3 of fp32's",
        limit=200,
        needs=WITH_BITSANDBYTES,
    )


def signal_cells() -> Iterator[Cell]:
    """Yield the cell of runs that are stopped or killed."""
    yield Cell(
        "signals.stop_and_kill",
        proves="SIGUSR1 saves and ends with 75, SIGKILL loses little, both resume",
        function="interruptions.signals",
        bound="exit codes, every step once, the GPU's memory is free again",
        limit=200,
        needs=RECIPE,
    )


def recipe_cells() -> Iterator[Cell]:
    """Yield the cells of the quickstarts.

    results/quickstarts.json has what they reach on a CPU in fp32, which is slightly more than these
    bounds; quickstarts.py has the bounds as numbers.
    """

    def quickstart(
        recipe: str, bound: str, needs: tuple[str, ...] = RECIPE, cuda_only: str = MINUTES_ON_A_CPU
    ) -> Cell:
        proves = f"the quickstart of {recipe}.py also trains its model in bf16"
        function = f"quickstarts.{recipe}"
        return Cell(f"recipes.{recipe}", proves, function, bound, 240, needs, cuda_only)

    yield quickstart("bert", "accuracy of at least 0.85 on held-out rows", cuda_only="")
    yield quickstart("bert_ner", "F1 of at least 0.85 on names in held-out rows")
    yield quickstart("t5", "BLEU of at least 80 on held-out rows", needs=WITH_METRICS)
    yield quickstart("vit", "accuracy of at least 0.85 on held-out images")
    yield quickstart("llama_dpo", "exact match of at least 0.6 on held-out rows")
    yield quickstart("mixtral", "exact match of at least 0.7 on held-out rows")
    yield quickstart("mistral_pretrain", "perplexity of at most 4 on held-out texts")
    yield quickstart("llama", "exact match of at least 0.9 on held-out rows")


def eight_b_cells() -> Iterator[Cell]:
    """Yield the cells that compare 8B runs, and attention, with published figures."""
    yield Cell(
        "models.8b",
        proves="the model of the cells that follow is made on the device",
        function="side_by_side.make_eight_b",
        bound="weights are on the disk",
        limit=150,
    )
    yield Cell(
        "speed.8b_lora",
        proves="8B LoRA at 4,096 tokens, beside bare loops, Trainer and SFTTrainer",
        function="side_by_side.eight_b_lora",
        bound=f"{NEAR_THE_LEAN_LOOP}; at least 0.7 of NeMo's 12,473 tokens/s",
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "speed.8b_qlora",
        proves="the peak of 8B QLoRA with two rows of 2,048 tokens, beside the others",
        function="side_by_side.eight_b_qlora",
        bound=f"{NEAR_THE_LEAN_LOOP}; at most 8.0 GiB of tensors (torchtune: 7.4)",
        limit=300,
        needs=WITH_BITSANDBYTES,
    )
    yield Cell(
        "speed.8b_full",
        proves="8B full fine-tuning in bf16 at 4,096 tokens, beside the others",
        function="side_by_side.eight_b_full",
        bound=f"{NEAR_THE_LEAN_LOOP}; at least 45 % MFU (KempnerForge: 57.8 %)",
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "attention.paper",
        proves="FlashAttention's published memory and speed, measured again",
        function="attention_paper.paper_figures",
        bound="10 and 20 times less memory at 2,048 and 4,096 tokens, at least 2 times as fast",
        limit=90,
    )


def lever_cells() -> Iterator[Cell]:
    """Yield the cells that measure the effect of each option."""
    yield Cell(
        "speed.ladder",
        proves="the effect of each lever on 8B LoRA",
        function="levers.lora",
        bound="every lever trains",
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "speed.ragged_rows",
        proves="the effect of packing on 1B with rows of varying length",
        function="levers.ragged_rows",
        bound="every lever trains",
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "speed.packed_16k",
        proves="packed sequences of 16,384 tokens under each attention",
        function="levers.packed_16k",
        bound="every attention trains",
        limit=240,
        needs=RECIPE,
    )


def planner_cells() -> Iterator[Cell]:
    """Yield the cells that compare the planner with real runs."""
    yield Cell(
        "planner.small",
        proves="tensors and memory of 1B runs against the plan",
        function="plans.small",
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "planner.large",
        proves="tensors and memory of 8B runs against the plan",
        function="plans.large",
        limit=300,
        needs=WITH_BITSANDBYTES,
    )
    yield Cell(
        "planner.constants",
        proves="the planner's constants, fitted on half of the runs",
        function="plans.constants",
        bound="held-out runs: mean error below 10 %, none planned over 3 % too low",
        limit=60,
        cuda_only=MEMORY_OF_A_GPU,
    )


def other_speed_cells() -> Iterator[Cell]:
    """Yield the cells of speed and memory without a published figure."""
    yield Cell(
        "speed.1b_full",
        proves="1B full fine-tuning on the batches of a bare loop",
        function="side_by_side.one_b_full",
        bound=NEAR_THE_LEAN_LOOP,
        limit=300,
        needs=RECIPE,
    )
    yield Cell(
        "saves.by_part",
        proves="seconds of a save, by what takes them",
        function="saves.by_part",
        limit=200,
        needs=RECIPE,
    )
    yield Cell(
        "speed.offload_threads",
        proves="offload with one thread of the host and with all",
        function="host.offload_threads",
        bound="every run trains",
        limit=300,
        needs=RECIPE,
        cuda_only=NO_SHARDING_ON_A_CPU,
    )
    yield Cell(
        "speed.image_workers",
        proves="processes that read images for a ViT-base",
        function="host.image_workers",
        bound="every run trains",
        limit=240,
        needs=RECIPE,
    )
    yield Cell(
        "memory.fragmentation",
        proves="memory that the allocator holds above what tensors take",
        function="fragmentation.of_ragged_rows",
        bound="every run trains",
        limit=150,
        needs=RECIPE,
    )


# Topics whose cells prove the recipes right; the others measure speed and memory.
PROVING_TOPICS = (
    "micro",
    "strategies",
    "masks",
    "parity",
    "resume",
    "quantized",
    "optimizers",
    "signals",
    "recipes",
)
CELLS = (
    *micro_cells(),
    *strategy_cells(),
    *agreement_cells(),
    *resume_cells(),
    *quantized_cells(),
    *signal_cells(),
    *recipe_cells(),
    *eight_b_cells(),
    *lever_cells(),
    *planner_cells(),
    *other_speed_cells(),
)
# tests/gpu holds these to their bounds.
PROVING_CELLS = [cell for cell in CELLS if cell.name.split(".")[0] in PROVING_TOPICS]
