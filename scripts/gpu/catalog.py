"""All cells, the most valuable first: ten minutes of a GPU give the first ten minutes of this list.

Only the process of a cell loads torch, so the modules of the cells are imported when their function
is called.
"""

import importlib
from dataclasses import dataclass

from .cell import Cell

CUDA = "it asks about CUDA itself"
MINUTES_ON_A_CPU = "the quick example takes minutes on a CPU, where tests/launch runs it"
# What recipes/llama.py imports besides the libraries that a model needs anyway
RECIPE = ("datasets", "peft")


@dataclass(frozen=True)
class Call:
    """A cell's function: `name` of a module here or, with arguments, what `name` makes of them."""

    module: str
    name: str
    arguments: tuple = ()

    def function(self):
        return getattr(importlib.import_module(f".{self.module}", __package__), self.name)

    def __call__(self, setup):
        function = self.function()
        if self.arguments:
            function = function(*self.arguments)
        return function(setup)


def call(module, name, *arguments):
    return Call(module, name, arguments)


def micro_cells():
    """A second or two each, most of it the start of the process."""
    return [
        Cell(
            "micro.tf32_positions",
            "TF32 does not reach the rotary angles of older transformers",
            call("micro", "tf32_positions"),
            "angles within 0.01 rad",
            60,
        ),
        Cell(
            "micro.pinned_answer",
            "a stop can be asked for without waiting for the GPU",
            call("micro", "pinned_answer"),
            "the copy is in pinned memory",
            60,
            cuda_only=CUDA,
        ),
        Cell(
            "micro.found_inf",
            "fused AdamW leaves a non-finite step out and does not count it",
            call("micro", "found_inf"),
            "left out, then one step counted",
            60,
        ),
        Cell(
            "micro.context",
            "the memory of a process besides its tensors is what the planner assumes",
            call("micro", "context_size"),
            "at most the planner's 819 MiB",
            60,
            cuda_only=CUDA,
        ),
        Cell(
            "micro.int8_rows",
            "how far an int8 row depends on its neighbors, and the price of a product",
            call("micro", "int8_rows"),
            "",
            90,
            needs=("bitsandbytes",),
        ),
        Cell(
            "micro.lora_cast",
            "LoRA without peft's cast of its input: as right, and faster",
            call("micro", "lora_cast"),
            "gradients within 5e-3 of each other",
            90,
            needs=("peft",),
        ),
        Cell(
            "micro.head_in_pieces",
            "the loss in pieces keeps the head's gradient, and what it costs",
            call("micro", "head_in_pieces"),
            "gradient within 5e-3 of fp32",
            120,
            needs=RECIPE,
        ),
        Cell(
            "micro.packed_attention",
            "attention kernels agree on packed rows, and their speed",
            call("micro", "packed_attention"),
            "outputs within 2e-2 of the dense mask",
            180,
        ),
    ]


def correct_cells():
    """The recipes do on a GPU what the tests show on CPU ranks."""
    trains = "the loss falls, and each process holds what the YAML promises"
    alike = "losses of 20 steps within 2e-2 of the first row's"
    resumed = "the losses after the checkpoint within 2e-3 of those without a stop"
    return [
        Cell(
            "strategies.one_process",
            "single.yaml and ddp.yaml train in bf16, full and QLoRA",
            call("correct", "strategies", "single", "ddp"),
            trains,
            180,
            needs=RECIPE,
        ),
        Cell(
            "strategies.fsdp2",
            "every FSDP2 YAML for one GPU trains in bf16, full and QLoRA",
            call(
                "correct",
                "strategies",
                "fsdp2_full_shard",
                "fsdp2_shard_grad_op",
                "fsdp2_cpu_offload",
                "fsdp2_hybrid_shard",
            ),
            trains,
            240,
            needs=RECIPE,
        ),
        Cell(
            "strategies.fsdp1",
            "every FSDP1 YAML for one GPU trains in bf16",
            call(
                "correct",
                "strategies",
                "fsdp1_full_shard",
                "fsdp1_shard_grad_op",
                "fsdp1_no_shard",
                "fsdp1_hybrid_shard",
            ),
            trains,
            240,
            needs=RECIPE,
        ),
        Cell(
            "strategies.zero",
            "ZeRO-0 to 3 train in bf16, full and QLoRA",
            call(
                "correct",
                "strategies",
                "deepspeed_zero2",
                "deepspeed_zero0",
                "deepspeed_zero1",
                "deepspeed_zero3",
            ),
            trains,
            270,
            needs=(*RECIPE, "deepspeed"),
        ),
        Cell(
            "strategies.zero_offload",
            "ZeRO-2 and 3 with offload train in bf16, full and QLoRA",
            call(
                "correct",
                "strategies_with_compiler",
                "deepspeed_zero2_offload",
                "deepspeed_zero3_offload",
            ),
            trains,
            300,
            needs=(*RECIPE, "deepspeed"),
        ),
        Cell(
            "masks.documents",
            "packed documents do not see each other under any attention",
            call("correct", "masks"),
            "no leak, a planted one is seen",
            200,
            needs=("pytest",),
            cuda_only="tests/unit/test_masks.py has the attentions of a CPU",
        ),
        Cell(
            "masks.packed_rows",
            "packed and padding-free rows have one loss under any attention",
            call("correct", "packed_rows"),
            alike,
            240,
            needs=RECIPE,
        ),
        Cell(
            "parity.precisions",
            "bf16, fp16, TF32, engines and pieces of the loss against fp32",
            call("correct", "parity_table"),
            alike,
            300,
            needs=RECIPE,
        ),
        Cell(
            "parity.packed",
            "packed, compiled and with Liger's kernels against fp32",
            call("correct", "parity_of_packed"),
            alike,
            240,
            needs=RECIPE,
        ),
        Cell(
            "resume.engines",
            "a run resumes under every engine",
            call("correct", "resume_cell", "resume_of_engines"),
            resumed,
            300,
            needs=RECIPE,
        ),
        Cell(
            "resume.optimizers",
            "a run resumes with every optimizer, and the paged ones stay paged",
            call("correct", "resume_cell", "resume_of_optimizers", True),
            f"{resumed}; a resumed run's peak at most 1.1 times that before",
            240,
            needs=(*RECIPE, "bitsandbytes"),
        ),
        Cell(
            "resume.precisions",
            "fp16 and quantized bases resume",
            call("correct", "resume_cell", "resume_of_precisions"),
            resumed,
            300,
            needs=(*RECIPE, "bitsandbytes"),
        ),
        Cell(
            "resume.zero_offload",
            "ZeRO with offload resumes",
            call("correct", "resume_with_compiler", "resume_of_offload"),
            resumed,
            300,
            needs=(*RECIPE, "deepspeed"),
        ),
        Cell(
            "quantized.bases",
            "int8 and 4-bit bases learn and hold fewer bytes, also sharded",
            call("correct", "quantized"),
            "first loss within 10 % of LoRA's, fewer bytes, the loss falls",
            200,
            needs=(*RECIPE, "bitsandbytes"),
        ),
        Cell(
            "optimizers.adamw",
            "8-bit and paged AdamW reach the loss of fused AdamW with less state",
            call("correct", "optimizers"),
            "last loss within 10 %, 8-bit state below 0.3 of fp32's",
            200,
            needs=(*RECIPE, "bitsandbytes"),
        ),
        Cell(
            "signals.stop_and_kill",
            "SIGUSR1 saves and ends with 75, SIGKILL loses little, both resume",
            call("interruptions", "signals"),
            "exit codes, every step once, the GPU's memory is free again",
            200,
            needs=RECIPE,
        ),
    ]


def recipe_cells():
    """The quick example of every recipe in bf16."""
    cells = []
    for recipe in ("bert", "t5", "vit", "llama_dpo", "mixtral", "mistral_pretrain", "llama"):
        slow = "" if recipe == "bert" else MINUTES_ON_A_CPU
        needs = ("datasets", "peft", "sacrebleu", "rouge_score") if recipe == "t5" else RECIPE
        cells.append(
            Cell(
                f"recipes.{recipe}",
                f"the quick example of {recipe}.py teaches in bf16 what it shows",
                call("correct", "quickstart", recipe),
                QUICKSTARTS[recipe],
                240,
                needs,
                slow,
            )
        )
    return cells


# results/quickstarts.json has what the examples reach on a CPU in fp32, which is a little more;
# correct.py has these bounds as numbers.
QUICKSTARTS = {
    "bert": "accuracy of at least 0.85 on held-out rows",
    "vit": "accuracy of at least 0.85 on held-out images",
    "t5": "BLEU of at least 80 on held-out rows",
    "llama_dpo": "exact match of at least 0.6 on held-out rows",
    "mixtral": "exact match of at least 0.7 on held-out rows",
    "llama": "exact match of at least 0.9 on held-out rows",
    "mistral_pretrain": "perplexity of at most 4 on held-out texts",
}


def speed_cells():
    """Speed and memory at real sizes."""
    return [
        Cell(
            "models.8b",
            "the model of the cells that follow is made on the device",
            call("speed", "make_eight_b"),
            "weights are on the disk",
            150,
        ),
        Cell(
            "speed.8b_lora",
            "8B LoRA at 4,096 tokens, beside bare loops, Trainer and SFTTrainer",
            call("speed", "eight_b_lora"),
            "losses agree; within 5 % of the lean loop; at least 0.7 of NeMo's 12,473 tokens/s",
            300,
            needs=RECIPE,
        ),
        Cell(
            "speed.8b_qlora",
            "the peak of 8B QLoRA with two rows of 2,048 tokens, beside the others",
            call("speed", "eight_b_qlora"),
            "losses agree; within 5 % of the lean loop; "
            "at most 8.0 GiB of tensors (torchtune: 7.4)",
            300,
            needs=(*RECIPE, "bitsandbytes"),
        ),
        Cell(
            "speed.8b_full",
            "8B full fine-tuning in bf16 at 4,096 tokens, beside the others",
            call("speed", "eight_b_full"),
            "losses agree; within 5 % of the lean loop; at least 45 % MFU (KempnerForge: 57.8 %)",
            300,
            needs=RECIPE,
        ),
        Cell(
            "attention.paper",
            "FlashAttention's published memory and speed, measured again",
            call("attention_paper", "paper_figures"),
            "10 and 20 times less memory at 2,048 and 4,096 tokens, at least 2 times as fast",
            90,
        ),
        Cell(
            "speed.ladder",
            "what each lever brings to 8B LoRA",
            call("speed", "ladder_of_lora"),
            "every lever trains",
            300,
            needs=RECIPE,
        ),
        Cell(
            "speed.ragged_rows",
            "what packing brings to 1B with rows of varying length",
            call("speed", "ladder_of_ragged_rows"),
            "every lever trains",
            300,
            needs=RECIPE,
        ),
        Cell(
            "speed.packed_16k",
            "packed lines of 16,384 tokens under each attention",
            call("speed", "packed_16k"),
            "every attention trains",
            240,
            needs=RECIPE,
        ),
        Cell(
            "planner.small",
            "tensors and memory of 1B runs against the plan",
            call("planner", "measure_points", "SMALL_POINTS"),
            "",
            300,
            needs=RECIPE,
        ),
        Cell(
            "planner.large",
            "tensors and memory of 8B runs against the plan",
            call("planner", "measure_points", "LARGE_POINTS"),
            "",
            300,
            needs=(*RECIPE, "bitsandbytes"),
        ),
        Cell(
            "planner.constants",
            "the planner's constants, fitted on half of the runs",
            call("planner", "constants"),
            "held-out runs: mean error below 10 %, none planned over 3 % too low",
            60,
            cuda_only="it needs the GPU's memory of planner.small and planner.large",
        ),
        Cell(
            "speed.1b_full",
            "1B full fine-tuning on the batches of a bare loop",
            call("speed", "one_b_full"),
            "losses agree; within 5 % of the lean loop",
            300,
            needs=RECIPE,
        ),
        Cell(
            "saves.by_part",
            "seconds of a save, by what takes them",
            call("speed", "saves"),
            "",
            200,
            needs=RECIPE,
        ),
        Cell(
            "speed.offload_threads",
            "offload with one thread of the host and with all",
            call("speed", "offload_threads"),
            "every run trains",
            300,
            needs=RECIPE,
            cuda_only="accelerate ignores FSDP and DeepSpeed without one",
        ),
        Cell(
            "speed.image_workers",
            "processes that read images for a ViT-base",
            call("speed", "image_workers"),
            "every run trains",
            240,
            needs=RECIPE,
        ),
        Cell(
            "memory.fragmentation",
            "memory that the allocator holds above what tensors take",
            call("speed", "fragmentation"),
            "every run trains",
            150,
            needs=RECIPE,
        ),
    ]


CELLS = [*micro_cells(), *correct_cells(), *recipe_cells(), *speed_cells()]
