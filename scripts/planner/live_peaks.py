"""The planner's peaks under each YAML against those of live tensors on real CPU ranks.

Each launch rehearses three optimizer steps of the recipe, and has every rank measure the third
(peak_probe.py). A rank's planned peak is that of its device and its host together, since on CPU
ranks they are one.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from paths import CONFIGS

from . import recipe, yaml_files
from .autograd import FP32
from .closed_form import closed_form
from .ledger import Sizes
from .peak_probe import STEPS
from .plan import Plan, plan_of
from .rehearsals import make_model, ranks_of, rehearse, versions
from .request import Batch
from .zero import BUCKET

Row = dict[str, Any]

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
}
SEQUENCES = 2  # of a micro-batch
LONGEST = 256  # tokens


@dataclass(frozen=True)
class Job:
    """What is trained: flags of the recipe, tokens of a sequence, mixed precision."""

    flags: tuple[str, ...] = ()
    length: int = LONGEST
    precision: str = "no"

    @property
    def words(self) -> list[str]:
        """The flags, with the sizes of the micro-batch."""
        sizes = {"--max_length": self.length, "--per_device_train_batch_size": SEQUENCES}
        words = list(self.flags)
        for flag, value in sizes.items():
            words += [flag, str(value)]
        return words


JOBS = {
    "plain": Job(),
    "short": Job(length=16),  # hardly any activations: what the engines themselves hold
    "checkpointed": Job(("--gradient_checkpointing",)),
    "LoRA": Job(("--use_peft",)),
    "accumulation": Job(("--gradient_accumulation_steps", "3"), length=16),
    "bf16": Job(precision="bf16"),
    "short bf16": Job(length=16, precision="bf16"),
    "LoRA bf16": Job(("--use_peft",), precision="bf16"),
}


def is_refused(config: str, job: str) -> bool:
    """Tell whether the recipe refuses a job under a YAML."""
    return config == "fsdp1_no_shard" and "--use_peft" in JOBS[job].flags


# ---- Measured ----
def make_model_and_rows(folder: Path) -> None:
    """Write the model, and rows that are all longer than LONGEST, so that each batch has the same
    shape."""
    make_model(folder, MODEL)
    row = {"prompt": "Say:", "completion": "again and again " * (LONGEST // 16)}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 100)


def measure(config: str, job: str, tiny: Path, folder: Path) -> Row:
    """Return what was launched, and the peak of each rank in bytes.

    tiny: of `make_model_and_rows`. folder: a new one.
    """
    ranks = ranks_of(config, 2)
    words = [*JOBS[job].words, "--model_name_or_path", tiny / "model"]
    words += ["--dataset_name", tiny / "rows.jsonl", "--output_dir", folder / "run"]
    words += ["--max_steps", STEPS, "--save_steps", 0, "--eval_strategy", "no"]
    peaks = rehearse(
        config, ranks, words, "REHEARSAL_PEAKS", folder / "peaks", precision=JOBS[job].precision
    )
    return {
        "config": config,
        "job": job,
        "ranks": ranks,
        "learnt": supervised_tokens(tiny, JOBS[job].length),
        "measured": peaks,
    }


def supervised_tokens(folder: Path, length: int) -> int:
    """Return the tokens of a micro-batch that the loss counts; the first of a row never is."""
    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[0])
    labels = recipe.labels_of(row, AutoTokenizer.from_pretrained(folder / "model"), length)
    assert len(labels) == length
    return SEQUENCES * sum(label != -100 for label in labels[1:])


# ---- Planned ----
def planned(row: Row) -> Sizes:
    """Return {category: bytes} of a rank of a measured row, device and host together."""
    job = JOBS[row["job"]]
    device, host = closed_form(
        plan_of_row(row),
        AutoConfig.for_model("llama", **MODEL),
        Batch(SEQUENCES, job.length, row["learnt"]),
    )
    return {name: device.get(name, 0) + host.get(name, 0) for name in {**device, **host}}


def plan_of_row(row: Row) -> Plan:
    """Return the plan of a measured row, as it runs on CPU ranks."""
    job = JOBS[row["job"]]
    args = recipe.parse_words(["--eval_strategy", "no", *job.words])
    config = yaml_files.read(CONFIGS / f"{row['config']}.yaml")
    machines = 1
    if row["config"] == "fsdp1_hybrid_shard":  # whose machines the rehearsal simulates
        machines = 2
    plan = plan_of(args, config, row["ranks"], machines, job.precision)
    if plan.engine == "fsdp2":  # whose shards on the host are those of the device here
        return replace(plan, offloads_parameters=False, offloads_optimizer=False)
    return plan


def compare(row: Row) -> Row:
    """Return a measured row with its planned peak and the relative error.

    ZeRO's bucket of 2 GB (in fp32), the same for every model, would hide all else: the second error
    is of what is beside it.
    """
    size = sum(planned(row).values())
    measured = max(row["measured"])
    bucket = bucket_of(row)
    if min(size, measured) < bucket:
        bucket = 0
    return row | {
        "planned": size,
        "error": size / measured - 1,
        "beside_bucket": (size - bucket) / (measured - bucket) - 1,
    }


def bucket_of(row: Row) -> int:
    """Return the bytes of ZeRO's bucket; stage 3 has it in the precision of reductions, fp32."""
    if re.search("zero[123]", row["config"]) is None:
        return 0
    in_fp32 = JOBS[row["job"]].precision == "no" or "zero3" in row["config"]
    return BUCKET * (FP32 if in_fp32 else 2)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, each on a line of the file, over those of the same job and YAML; of other versions
    of the libraries none stay."""
    before = json.loads(path.read_text()) if path.is_file() else {}
    kept = before["rows"] if before.get("versions") == versions() else []
    by_job = {(row["job"], row["config"]): row for row in [*kept, *rows]}
    order = sorted(by_job, key=lambda key: (list(JOBS).index(key[0]), key[1]))
    text = ",\n".join(json.dumps(by_job[key]) for key in order)
    path.write_text(f'{{"versions": {json.dumps(versions())}, "rows": [\n{text}\n]}}\n')
