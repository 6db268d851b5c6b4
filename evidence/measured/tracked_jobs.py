# SPDX-License-Identifier: Apache-2.0
"""What evidence/track_ranks.py trains under each YAML. It imports nothing slow."""

from dataclasses import dataclass

from measured.rehearsals import Mesh, words_of

SEQUENCES = 2  # sequences per micro-batch
LONGEST = 256  # tokens of rows that do not share a sequence
PACKED = 1024  # tokens of a sequence of several rows, whose masks are then much of a layer


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        flags: of the recipe.
        length: tokens of a sequence.
        precision: of mixed precision.
        rows: that share a sequence, all of one length; they fill it.
    """

    flags: tuple[str, ...] = ()
    length: int = LONGEST
    precision: str = "no"
    rows: int = 1

    @property
    def is_packed(self) -> bool:
        """Whether rows share a sequence."""
        return self.rows > 1

    def words_under(self, mesh: Mesh) -> list[str]:
        """The flags of the recipe that runs under a mesh, with the sizes of the batch.

        Spread experts have no adapters.
        """
        sizes = {"max_length": self.length, "per_device_train_batch_size": sequences_under(mesh)}
        words = [*mesh.words, *self.flags, *words_of(sizes)]
        if mesh.ep > 1 and "--use_peft" in words:
            words.append("--lora_target_parameters")
        return words


ACCUMULATION = ("--gradient_accumulation_steps", "3")
PACKING = ("--packing",)
CHECKPOINTING = ("--gradient_checkpointing",)
LORA = ("--use_peft",)
LORA_AND_HEAD = (*LORA, "--modules_to_save", "lm_head", "embed_tokens")
LORA_AND_NORMS = (*LORA, "--modules_to_save", "norm")  # Every name of a norm ends with this.
UNPACKED = {
    "plain": Job(),
    "short": Job(length=16),  # few activations: most bytes are held by the engines
    "checkpointed": Job(CHECKPOINTING),
    "LoRA": Job(LORA),
    "accumulation": Job(ACCUMULATION, length=16),
    "bf16": Job(precision="bf16"),
    "short bf16": Job(length=16, precision="bf16"),
    "LoRA bf16": Job(LORA, precision="bf16"),
    "LoRA head": Job(LORA_AND_HEAD),
    "LoRA head bf16": Job(LORA_AND_HEAD, precision="bf16"),
    "LoRA norms": Job(LORA_AND_NORMS),
}
PACKED_JOBS = {
    "packed": Job(PACKING, PACKED, rows=16),
    "together": Job((*PACKING, *ACCUMULATION), precision="bf16", rows=4),
    "together checkpointed": Job(
        (*PACKING, *ACCUMULATION, *CHECKPOINTING), precision="bf16", rows=4
    ),
}
JOBS = UNPACKED | PACKED_JOBS


def sequences_under(mesh: Mesh) -> int:
    """Return the sequences of a batch: in a pipeline as many for each rank, each by itself."""
    return SEQUENCES * mesh.pp


def is_left_out(config: str, job: str) -> bool:
    """Return whether a job is not trained under a YAML for ranks with rows of their own.

    The recipe refuses some. Packed rows change nothing there that evidence/validate_planner.py does
    not measure in one process.
    """
    is_refused = config == "fsdp1_no_shard" and "--use_peft" in JOBS[job].flags
    return is_refused or JOBS[job].is_packed
