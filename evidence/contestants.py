# SPDX-License-Identifier: Apache-2.0
"""Three contestants that train the same rows, each in a process of its own with its steps timed.

    ours       recipes/llama.py, unmodified
    trainer    transformers' Trainer
    trl        TRL's SFTTrainer

`run` starts `python evidence/contestants.py CALL.json`, which writes CALL's folder/timed.json: the
end of each step, and peaks of memory. A hook that torch calls after `step` of any optimizer notes
the time. On a GPU, Python runs ahead of the kernels, so the hook waits for the GPU at both ends of
the timed steps. gpu/test_race.py has the jobs.
"""

import itertools
import json
import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPO = Path(__file__).resolve().parents[1]
CHARACTERS_PER_TOKEN = 6  # more than the average, so that rows are long enough
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
# What Trainer and SFTTrainer call as the recipe does
SAME_NAMES = (
    "per_device_train_batch_size",
    "learning_rate",
    "lr_scheduler_type",
    "weight_decay",
    "max_grad_norm",
    "max_steps",
)
DEFAULTS = {"dtype": "float32"}
# A model whose steps take next to no time, and flags that a tiny job on a CPU leaves out
NEAR_ZERO = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": 320,
}
NOT_IN_SMALL = ("dtype", "load_in_4bit", "bnb_4bit_use_double_quant", "no_master_weights")

Flags = Mapping[str, Any]  # of recipes/llama.py, without dashes; True: a flag without a value
Run = dict[str, Any]  # what was measured of one run, or "failed" with the reason


@dataclass(frozen=True)
class Job:
    """What contestants are compared on."""

    name: str
    shape: Flags  # of scripts/make_tiny.py
    flags: Flags  # of all contestants
    contestants: Mapping[str, Flags]  # own flags by label, whose first word is the program
    rows: str = "long"  # than --max_length, or "varied"
    steps: int = 20  # timed ones
    warmup: int = 3  # steps before
    device: str = "cpu"
    maker: Sequence[str] = ()  # more words for scripts/make_tiny.py

    def in_small(self) -> "Job":
        """Return a tiny form of the job for a CPU, whose figures mean nothing."""
        flags = {name: self.flags[name] for name in self.flags if name not in NOT_IN_SMALL}
        flags |= {"max_length": 64, "per_device_train_batch_size": 2}
        return replace(
            self,
            shape=dict(self.shape) | NEAR_ZERO,
            flags=flags,
            steps=min(self.steps, 2),
            device="cpu",
            maker=(),
        )


def slug(name: str) -> str:
    """Return a name that is suitable for a file."""
    return re.sub(r"\W+", "_", name)


def words_of(flags: Flags) -> list[str]:
    """Return flags as words of a command line."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words


# ---- What they read ----
def prepare(job: Job, home: Path) -> None:
    """Write home/model if it is missing, with random weights, and the rows to home/rows.jsonl."""
    import net  # of tests/, which is not on the path of a contestant

    if not (home / "model" / "config.json").exists():
        words = [*job.maker, "--num_train_rows", "9000", "--num_test_rows", "210"]
        net.make("llama", home, [*words, *words_of(job.shape)])
    count = job.flags["per_device_train_batch_size"] * (job.steps + job.warmup)
    (home / "rows.jsonl").write_text("\n".join(text_rows(job, home, count)) + "\n")


def text_rows(job: Job, home: Path, count: int) -> list[str]:
    """Return the first `count` rows of a job as lines of JSON."""
    lines = (home / "data" / "train.jsonl").read_text().splitlines()
    texts = itertools.cycle(json.loads(line)["prompt"] for line in lines)
    length = job.flags["max_length"] * CHARACTERS_PER_TOKEN
    found = []
    shares = random.Random(0)
    for _ in range(count):
        text = ""
        share = shares.uniform(0.02, 0.5) if job.rows == "varied" else 1
        while len(text) < share * length:
            text += next(texts) + " "
        found.append(json.dumps({"prompt": "Go on.", "completion": text}))
    return found


# ---- Runs ----
def run(job: Job, label: str, home: Path) -> Run:
    """Train with one contestant; return what was measured, with the losses of its steps, in nats.

    home: as `prepare` left it.
    """
    folder = home / "runs" / slug(f"{job.name} {label}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tool = label.split()[0]
    steps = job.steps + job.warmup
    flags = dict(job.flags) | dict(job.contestants[label]) | {"max_steps": steps}
    flags |= {"model_name_or_path": str(home / "model"), "output_dir": str(folder / "run")}
    call = {"tool": tool, "flags": flags, "data": str(home / "rows.jsonl"), "folder": str(folder)}
    precision = "bf16" if job.device == "cuda" else "no"
    call |= {"warmup": job.warmup, "steps": steps, "precision": precision}
    (folder / "call.json").write_text(json.dumps(call))
    cache = home / "cache" / slug(tool)
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables |= {"HF_DATASETS_CACHE": str(cache), "ACCELERATE_MIXED_PRECISION": precision}
    if job.device == "cpu":
        variables |= ON_A_CPU
    with open(folder / "output.txt", "w") as output:
        command = [sys.executable, __file__, str(folder / "call.json")]
        done = subprocess.run(
            command, cwd=REPO, env=os.environ | variables, stdout=output, stderr=output
        )
    if done.returncode:
        last = (folder / "output.txt").read_text().strip().splitlines()[-1:]
        return {"failed": f"exit code {done.returncode}: {''.join(last)[:300]}"}
    found = measured(folder, job.warmup)
    if job.device == "cuda":
        for path in folder.rglob("*.safetensors"):
            path.unlink()  # gigabytes that nobody reads
    return found


def measured(folder: Path, warmup: int) -> Run:
    """Return tokens per second, peaks in MiB, and the loss of each step, in nats."""
    timed = json.loads((folder / "timed.json").read_text())
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    seen = [line["num_input_tokens_seen"] for line in steps]
    ends = timed["ends"]
    if len(ends) != len(seen):
        return {"failed": f"{len(ends)} optimizer steps, but {len(seen)} lines of metrics"}
    seconds = ends[-1] - ends[warmup - 1]
    return {
        "memory_mib": {name: round(size / 2**20, 1) for name, size in timed["memory"].items()},
        "losses": [line["loss"] for line in steps],
        "tokens_per_second": round((seen[-1] - seen[warmup - 1]) / seconds, 2),
    }


# ---- In the process of a contestant ----
def watch(call: SimpleNamespace) -> dict[str, Any]:
    """Make torch note the end of each step, and the peaks of memory at the last timed one.

    Returns what is noted, which grows.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    begun = time.perf_counter()
    noted: dict[str, Any] = {"ends": []}

    def after_step(*_: object) -> None:
        ends = noted["ends"]
        number = len(ends) + 1
        on_gpu = torch.cuda.is_initialized()
        if on_gpu and number in (call.warmup, call.steps):
            torch.cuda.synchronize()
        ends.append(time.perf_counter() - begun)
        if on_gpu and number == call.warmup:
            torch.cuda.reset_peak_memory_stats()
        if number == call.steps:
            noted["memory"] = peaks(on_gpu)

    register_optimizer_step_post_hook(after_step)
    return noted


def peaks(on_gpu: bool) -> dict[str, int]:
    """Return the most bytes of memory so far: of the process, and of tensors and allocator."""
    import torch

    status = Path("/proc/self/status").read_text()
    found = {"resident": int(status.split("VmHWM:")[1].split()[0]) * 1024}
    if on_gpu:
        found["allocated"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
    return found


def run_recipe(call: SimpleNamespace) -> None:
    """Run the recipe as `python recipes/llama.py` would, without evaluation and checkpoints."""
    own = {"dataset_name": call.data, "eval_strategy": "no", "save_steps": 0}
    recipe = str(REPO / "recipes" / "llama.py")
    sys.argv = [recipe, *words_of(call.flags | own | {"report_to": "none"})]
    sys.path[0] = str(REPO / "recipes")
    runpy.run_path(recipe, run_name="__main__")


def load_model(args: SimpleNamespace) -> Any:
    """Return the model as the recipe loads it, with the recipe's adapters if they are asked for."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed

    set_seed(42)  # adapters start from random numbers
    options = {"dtype": args.dtype, "attn_implementation": "sdpa", "trust_remote_code": False}
    if hasattr(args, "load_in_4bit"):
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_quant_storage=args.dtype,
            bnb_4bit_compute_dtype=args.dtype,
            bnb_4bit_use_double_quant=True,
        )
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **options)
    if not hasattr(args, "use_peft"):
        return model
    adapters = LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", r=args.lora_r, lora_alpha=32
    )
    return get_peft_model(model, adapters)


def run_trainer(call: SimpleNamespace) -> None:
    """Train with transformers' Trainer or TRL's SFTTrainer."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    args = SimpleNamespace(**DEFAULTS | call.flags)
    folder = args.model_name_or_path
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="right")
    settings = {name: getattr(args, name) for name in SAME_NAMES}
    settings |= {"output_dir": args.output_dir, "save_strategy": "no", "report_to": "none"}
    settings["bf16"] = call.precision == "bf16"  # TRL would turn it on by itself
    settings |= {"optim": "adamw_torch_fused", "logging_steps": 1}
    settings["train_sampling_strategy"] = args.train_sampling_strategy
    for name in ("gradient_checkpointing", "torch_compile", "use_liger_kernel"):
        settings[name] = hasattr(args, name)
    rows = tokenized_rows(call.data, tokenizer, args.max_length)
    common = {"train_dataset": rows, "processing_class": tokenizer}
    if call.tool == "trl":
        from trl import SFTConfig, SFTTrainer

        packing = hasattr(args, "packing")
        config = SFTConfig(**settings, max_length=args.max_length, packing=packing)
        trainer = SFTTrainer(load_model(args), config, **common)
    else:
        # The default collator does not pad labels. transformers' own examples use this one.
        collator = DataCollatorForSeq2Seq(tokenizer)
        settings = TrainingArguments(**settings)
        trainer = Trainer(load_model(args), settings, data_collator=collator, **common)
    train(trainer, args.output_dir)


def tokenized_rows(file: str, tokenizer: Any, max_length: int) -> Any:
    """Return questions and answers as tokens, as a user of Trainer would make them."""
    from datasets import load_dataset

    def to_tokens(row: dict[str, str]) -> dict[str, list[int]]:
        prompt, completion = list(row.values())[:2]
        answer = {"role": "assistant", "content": completion}
        messages = [{"role": "user", "content": prompt}, answer]
        encoded = tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            truncation=True,
            max_length=max_length,
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        labels = [token if of_answer else -100 for token, of_answer in pairs]
        return {"input_ids": encoded["input_ids"], "labels": labels}

    rows = load_dataset("json", data_files=file, split="train")
    return rows.map(to_tokens, remove_columns=rows.column_names)


def train(trainer: Any, output_dir: str) -> None:
    """Train, counting the tokens of each batch without padding, and write the metrics."""
    collate: Callable[[Any], Any] = trainer.data_collator
    tokens = []

    def counting(rows: Sequence[Mapping[str, Any]]) -> Any:
        tokens.append(sum(len(row["input_ids"]) for row in rows))
        return collate(rows)

    trainer.data_collator = counting
    trainer.train()
    logged = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    steps = range(1, trainer.state.global_step + 1)
    losses = [logged.get(step) for step in steps]
    write_metrics(output_dir, tokens[: len(steps)], losses)


def write_metrics(folder: str, tokens: Sequence[int], losses: Sequence[float | None]) -> None:
    """Write metrics.jsonl as the recipe does, by the tokens of each step and its loss."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = []
    for loss, seen in zip(losses, itertools.accumulate(tokens), strict=True):
        lines.append(json.dumps({"loss": loss, "num_input_tokens_seen": seen}) + "\n")
    Path(folder, "metrics.jsonl").write_text("".join(lines))


TOOLS = {
    "ours": run_recipe,
    "trainer": run_trainer,
    "trl": run_trainer,
}


def main() -> None:
    """Train as a call says, and write the times."""
    call = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text()))
    noted = watch(call)
    TOOLS[call.tool](call)
    Path(call.folder, "timed.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main()
