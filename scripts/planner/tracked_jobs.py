# SPDX-License-Identifier: Apache-2.0
"""What scripts/track_ranks.py trains under each YAML. It imports nothing slow."""

from dataclasses import dataclass

from .rehearsals import Mesh, words_of

SEQUENCES = 2  # sequences per micro-batch
LONGEST = 256  # tokens


@dataclass(frozen=True)
class Job:
    """What is trained: flags of the recipe, tokens of a sequence, mixed precision."""

    flags: tuple[str, ...] = ()
    length: int = LONGEST
    precision: str = "no"

    def words_under(self, mesh: Mesh) -> list[str]:
        """The flags of the recipe that runs under a mesh, with the sizes of the batch.

        Spread experts have no adapters.
        """
        sizes = {"max_length": self.length, "per_device_train_batch_size": sequences_under(mesh)}
        words = [*mesh.words, *self.flags, *words_of(sizes)]
        if mesh.ep > 1 and "--use_peft" in words:
            words.append("--lora_target_parameters")
        return words


LORA = ("--use_peft",)
LORA_AND_HEAD = (*LORA, "--modules_to_save", "lm_head", "embed_tokens")
LORA_AND_NORMS = (*LORA, "--modules_to_save", "norm")  # Every name of a norm ends with this.
JOBS = {
    "plain": Job(),
    "short": Job(length=16),  # few activations: most bytes are held by the engines
    "checkpointed": Job(("--gradient_checkpointing",)),
    "LoRA": Job(LORA),
    "accumulation": Job(("--gradient_accumulation_steps", "3"), length=16),
    "bf16": Job(precision="bf16"),
    "short bf16": Job(length=16, precision="bf16"),
    "LoRA bf16": Job(LORA, precision="bf16"),
    "LoRA head": Job(LORA_AND_HEAD),
    "LoRA head bf16": Job(LORA_AND_HEAD, precision="bf16"),
    "LoRA norms": Job(LORA_AND_NORMS),
}


def sequences_under(mesh: Mesh) -> int:
    """Return the sequences of a batch: in a pipeline as many for each rank, each by itself."""
    return SEQUENCES * mesh.pp


def jobs_under(mesh: Mesh) -> list[str]:
    """Return what is trained under a mesh in which ranks share rows, experts or a model's layers.

    LoRA is where its adapters are split like their matrices, or beside experts that are spread.
    """
    if mesh.pp > 1:
        return ["plain"]
    if mesh.ep > 1:
        return ["plain", "short", "LoRA"]
    jobs = ["plain", "short", "checkpointed"]
    if mesh.config.endswith("tp"):
        jobs.append("LoRA")
    return jobs


def is_refused(config: str, job: str) -> bool:
    """Return whether the recipe refuses a job under a YAML."""
    return config == "fsdp1_no_shard" and "--use_peft" in JOBS[job].flags
