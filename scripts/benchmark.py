"""Benchmark: the recipe against a bare PyTorch loop, transformers' Trainer and TRL's SFTTrainer, side by side.

    python scripts/benchmark.py                                # all cells of this device: hours on two cores
    python scripts/benchmark.py --cells matched --repeats 5    # some of them; --list names all
    python scripts/benchmark.py --device cuda --cells 8B       # what a GPU is needed for
    python scripts/benchmark.py --smoke                        # every cell in small, to see that it works; no figures

A cell is one comparison: a model, rows and a few contestants. Each contestant is a process of its own, started in
turn (A B C D A B C D ...) and watched by scripts/benchmark_probe.py; ours is the untouched recipe. The first steps are
not timed. Cells are of four kinds, and in the first three a contestant that fails its gate has no figure:

    matched     the same batches in the same order, loss normalisation, optimizer, dtype and attention; all tools log
                each step (the loops note the loss), and it is within 1e-5 of the bare loop's (in bf16: 1e-2)
    shipped     each tool as it comes (padding, order, checkpointing, which SFTTrainer has on, logs), but in fp32 and,
                where the label says so, with --packing; about equal tokens a step, a pass over the same rows; the loss
                on held-out rows after it is within 2 % of the bare loop's
    start       the time from the start of the process to the end of the first step, rows tokenised on the way
    growth      our recipe alone, against one quantity

Times are those of one thread a process on CPU. A run beside which the machine did something else (CPU: by its load
average; GPU: another process computes there) is done again, and left out if that does not help. On a GPU all
contestants compute in bf16 (autocast), as the YAML files have it. The results of a cell go to --json as soon as it is
done, in place of older ones of that cell. Rows are those of GSM8K (https://github.com/openai/grade-school-math, MIT):
train.jsonl and test.jsonl in --data; on a GPU without that folder rows are made here.

Exit code: 0 every contestant passed its gate, 1 not, 64 for a wrong call.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import benchmark_tables
from benchmark_tables import MOST_LOAD, judge
from gpu import machine
from paths import ROOT
from usage import Parser

sys.path.append(str(ROOT / "recipes"))
RECIPE, PEERS, PROBE = (
    "recipes/llama.py",
    "scripts/benchmark_peers.py",
    "scripts/benchmark_probe.py",
)
LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "bitsandbytes")
ROWS_A_LINE = 4  # at most, of GSM8K at 512 tokens
HELD_OUT = 200  # rows of GSM8K's test set
PATIENCE = 1800  # seconds to wait until the machine is idle
ATTEMPTS = 3  # at a run beside which the machine did something else
PRECISION = {"cpu": "no", "cuda": "bf16"}  # mixed precision of all contestants


class Contestant(NamedTuple):
    """One side of a comparison: who trains, with which flags besides those of the cell, on how many ranks."""

    tool: str  # ours, or one of benchmark_peers.py
    flags: dict = {}
    ranks: int = 1
    model: str = ""  # another than the cell's
    needs: str = ""  # a package without which it is left out


class Cell(NamedTuple):
    """One comparison. flags: of the recipe and the peers, for all contestants. steps: timed ones; 0: one pass."""

    name: str
    kind: str  # matched, shipped, start or growth
    model: str
    rows: str  # gsm8k, words (what make_tiny.py writes) or long (each longer than --max_length)
    contestants: dict
    flags: dict = {}
    steps: int = 20
    num_rows: int = 0  # 0: as many as the steps need
    device: str = "cpu"


def shape(hidden, layers, heads, inner, vocab, kv_heads=None, **more):
    """Arguments of scripts/make_tiny.py llama."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        **more,
    }


MODELS = {
    # The head has 32 times as many columns as the hidden state, as in Llama 3
    "medium": shape(512, 6, 8, 1408, 16384, max_position_embeddings=2048),
    "near zero": shape(64, 1, 1, 64, 320),
    "1.5M": shape(128, 2, 4, 384, 4096, max_position_embeddings=2048),
    "7M": shape(256, 4, 4, 704, 8192, max_position_embeddings=2048),
    "20M": shape(384, 6, 6, 1024, 12288, max_position_embeddings=2048),
    # Of Llama 3: bfloat16, with its vocabulary
    "1B": shape(
        2048, 16, 32, 8192, 128256, 8, max_position_embeddings=16384, tie_word_embeddings=True
    ),
    "3B": shape(
        3072, 28, 24, 8192, 128256, 8, max_position_embeddings=16384, tie_word_embeddings=True
    ),
    "8B": shape(4096, 32, 32, 14336, 128256, 8, max_position_embeddings=16384),
}
OF_GPU = ("1B", "3B", "8B")
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
}  # what --smoke makes of each model

FIVE = {name: Contestant(name) for name in ("floor", "lean", "ours", "trainer", "trl")}
LEARN = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "max_length": 512,
}
MATCHED = LEARN | {"weight_decay": 0.1, "train_sampling_strategy": "sequential", "logging_steps": 1}
SHIPPED = {
    "floor": Contestant("floor"),
    "ours": Contestant("ours", {"packing": True, "per_device_train_batch_size": 3}),
    "trainer": Contestant("trainer"),
    "trl": Contestant("trl"),
    "trl packed": Contestant("trl", {"packing": True, "per_device_train_batch_size": 3}),
}
BARE_AND_OURS = ("floor", "lean", "ours")
PADDED = {"per_device_train_batch_size": 8}
FEW = {"per_device_train_batch_size": 2}  # a step of about a second
TEXT = {"text": True}  # tokenises itself


def grow(flag, values, **others):
    """Our recipe once for each value of a flag; others: flags that depend on the value, as functions of it."""
    return {
        f"{value}": Contestant(
            "ours", {flag: value, **{name: make(value) for name, make in others.items()}}
        )
        for value in values
    }


def cpu_cells():
    """What two CPU cores can show: ratios."""
    growth = MATCHED | {"max_length": 256, "per_device_train_batch_size": 2}
    tokens = 2048  # a step
    return [
        Cell("matched, medium", "matched", "medium", "gsm8k", FIVE, MATCHED | FEW),
        Cell(
            "matched, near zero",
            "matched",
            "near zero",
            "words",
            FIVE,
            MATCHED | PADDED,
            steps=1000,
        ),
        Cell(
            "matched, medium, LoRA",
            "matched",
            "medium",
            "gsm8k",
            FIVE,
            MATCHED | FEW | {"use_peft": True},
        ),
        Cell(
            "matched, medium, accumulation",
            "matched",
            "medium",
            "gsm8k",
            FIVE,
            MATCHED | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        ),
        # No other tool makes the same lines: the loops against ours
        Cell(
            "matched, medium, packed",
            "matched",
            "medium",
            "gsm8k",
            {name: FIVE[name] for name in BARE_AND_OURS},
            MATCHED | {"per_device_train_batch_size": 3, "packing": True},
        ),
        Cell(
            "shipped, medium",
            "shipped",
            "medium",
            "gsm8k",
            SHIPPED,
            LEARN | PADDED | {"num_train_epochs": 1},
            steps=0,
            num_rows=256,
        ),  # with 200 the order of the rows alone makes 2 %
        *(
            Cell(
                f"start, {cache} cache",
                "start",
                "1.5M",
                "gsm8k",  # whose first step takes no time of note
                {
                    "floor": Contestant("floor"),
                    "ours": Contestant("ours"),
                    "trainer": Contestant("trainer", TEXT),
                },
                MATCHED | PADDED,
                steps=1,
                num_rows=7473,
            )
            for cache in ("cold", "warm")
        ),
        Cell(
            "growth, length",
            "growth",
            "1.5M",
            "long",
            grow("max_length", (128, 512, 2048), per_device_train_batch_size=lambda n: tokens // n),
            growth,
        ),
        Cell(
            "growth, batch",
            "growth",
            "1.5M",
            "long",
            grow("per_device_train_batch_size", (1, 4, 16)),
            growth,
        ),
        Cell(
            "growth, ranks",
            "growth",
            "7M",
            "long",
            {str(ranks): Contestant("ours", ranks=ranks) for ranks in (1, 2)},
            growth,
        ),
        Cell(
            "growth, model",
            "growth",
            "medium",
            "long",
            {name: Contestant("ours", model=name) for name in ("1.5M", "7M", "20M", "medium")},
            growth,
        ),
    ]


# Full fine-tuning without fp32 weights, which the recipe refuses unless it is told so: small updates are lost in bf16
FULL_IN_BF16 = {"dtype": "bfloat16", "no_master_weights": True}


def gpu_cells():
    """What one GPU can show: absolute numbers. Random weights, rows of exactly --max_length but for the ladder's.

    All compute in bf16. Weights that are trained are fp32, but for the full fine-tuning of 8B: its fp32 weights and
    state alone would take 120 GiB."""
    common = MATCHED | {"max_length": 4096, "weight_decay": 0.0}
    lora = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
    nf4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}

    def cell(name, model, flags, rows="long", kind="growth", contestants=None):
        contestants = contestants or {"ours": Contestant("ours")}
        return Cell(name, kind, model, rows, contestants, common | flags, device="cuda")

    ladder, flags = {}, {"per_device_train_batch_size": 2, "max_logits_mib": 1e6}
    for name, more in (
        ("padded", {}),
        ("packing", {"packing": True}),
        ("compile", {"torch_compile": True}),
        ("loss in pieces", {"max_logits_mib": 256}),
        ("liger", {"use_liger_kernel": True}),
        ("checkpointing", {"gradient_checkpointing": True}),
        ("8-bit AdamW", {"optim": "adamw_8bit"}),
        ("LoRA", lora | {"optim": "adamw_torch_fused"}),
        ("QLoRA", nf4),
    ):
        flags = flags | more
        needs = "liger-kernel" if "use_liger_kernel" in flags else ""
        ladder[name] = Contestant("ours", flags, needs=needs)
    attention = {}
    for kind, more, needs in (
        ("eager", {}, ""),
        ("sdpa", {}, ""),
        ("varlen", {}, ""),
        # With one row a batch transformers reads the borders of rows from the device in every
        # layer, unless they are known beforehand, as they are without padding
        ("flash_attention_2", {"padding_free": True}, "flash-attn"),
    ):
        for length in (1024, 4096, 16384):
            flags = {"attn_implementation": kind, "max_length": length} | more
            attention[f"{kind}, {length}"] = Contestant("ours", flags, needs=needs)
    return [
        cell("8B LoRA", "8B", lora | {"per_device_train_batch_size": 2, "max_grad_norm": 0}),
        cell(
            "8B full",
            "8B",
            FULL_IN_BF16 | {"gradient_checkpointing": True, "per_device_train_batch_size": 4},
        ),
        cell(
            "8B QLoRA",
            "8B",
            lora
            | nf4
            | {
                "gradient_checkpointing": True,
                "max_length": 2048,
                "per_device_train_batch_size": 2,
            },
        ),
        cell("3B ladder", "3B", {}, "gsm8k", contestants=ladder),
        cell(
            "1B matched",
            "1B",
            {"per_device_train_batch_size": 4},
            kind="matched",
            contestants={name: FIVE[name] for name in (*BARE_AND_OURS, "trainer")},
        ),
        cell("1B attention", "1B", {"per_device_train_batch_size": 1}, contestants=attention),
    ]


def in_small(cell):
    """The cell as --smoke runs it: on CPU, two timed steps, short rows, float32."""

    def shrink(flags):
        flags = flags | (
            {"max_length": max(flags["max_length"] // 32, 16)} if "max_length" in flags else {}
        )
        flags = flags | (
            {"per_device_train_batch_size": 2} if "per_device_train_batch_size" in flags else {}
        )
        cannot = (
            "dtype",
            "torch_compile",
            "use_liger_kernel",
            "load_in_4bit",
            "bnb_4bit_use_double_quant",
            "optim",
            "no_master_weights",
        )
        flags = {name: value for name, value in flags.items() if name not in cannot}
        return flags | ({"attn_implementation": "sdpa"} if "attn_implementation" in flags else {})

    contestants = {
        label: one._replace(flags=shrink(one.flags)) for label, one in cell.contestants.items()
    }
    rows = "words" if cell.rows == "gsm8k" else cell.rows
    steps, flags = (
        min(cell.steps, 2),
        shrink(cell.flags) | {"max_length": 64 if rows == "words" else 16},
    )
    return cell._replace(
        contestants=contestants,
        flags=flags,
        rows=rows,
        steps=steps,
        device="cpu",
        num_rows=min(cell.num_rows, 24),
    )


# ---- What a contestant gets: a model, rows, a command ----


def shape_of(name, args):
    return MODELS[name] | (SMALL if args.smoke else {})


def make_models(names, args):
    """Write the models that are missing to OUTPUT_DIR/models/NAME, with random weights."""
    for name in names:
        folder = args.output_dir / "models" / slug(name)
        if (folder / "model" / "config.json").exists():
            continue
        flags = shape_of(name, args)
        has_text = flags["vocab_size"] > 320 and (args.data / "train.jsonl").is_file()
        if has_text and not args.smoke:
            flags |= {"text": args.data / "train.jsonl"}
        else:
            flags |= {"num_train_rows": 9000, "num_test_rows": 210}
        flags |= (
            {"dtype": "bfloat16", "device": "cuda"} if name in OF_GPU and not args.smoke else {}
        )
        print(f"makes {folder}", flush=True)
        done = subprocess.run(
            words(
                sys.executable, "scripts/make_tiny.py", "llama", folder.resolve(), *as_words(flags)
            ),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            sys.exit(f"benchmark.py: {done.stdout[-2000:]}")


def text_rows(cell, flags, count, args):
    """The first `count` rows of a cell, as lines of JSON."""
    path = args.data / "train.jsonl"
    made = args.output_dir / "models" / slug(cell.model) / "data" / "train.jsonl"
    if cell.rows == "words" or args.smoke:
        path = made
    elif cell.device == "cuda" and not path.is_file():
        if cell.rows == "gsm8k":
            return [json.dumps(row) for row in ragged_rows(count)]
        path = made
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if cell.rows != "long":
        return [json.dumps(row) for row in rows[:count]]
    texts = itertools.cycle(row.get("answer") or row["prompt"] for row in rows)
    length = flags["max_length"] * 6  # characters: more than a token has
    return [
        json.dumps({"prompt": "Go on.", "completion": long_text(texts, length)})
        for _ in range(count)
    ]


def ragged_rows(count, seed=0):
    """Made-up rows in the place of GSM8K's: questions and answers of very different lengths, 30 to 500 words."""
    draw = random.Random(seed)
    words_of = "the quick brown fox jumps over a lazy dog and runs home before it rains".split()
    for _ in range(count):
        question = " ".join(draw.choices(words_of, k=draw.randint(10, 60)))
        answer = " ".join(
            draw.choices(words_of, k=draw.randint(20, 60) * draw.choice([1, 2, 4, 7]))
        )
        yield {"question": question, "answer": answer}


def long_text(texts, length):
    """Texts one after another until there are `length` characters."""
    parts, size = [], 0
    while size < length:
        parts.append(next(texts))
        size += len(parts[-1]) + 1
    return " ".join(parts)


def prepare(cell, contestant, args):
    """Write the rows of a contestant in every form that one of them reads, once; returns the folder."""
    import torch

    import llama

    flags = cell.flags | contestant.flags
    accumulation, batch = (
        flags.get("gradient_accumulation_steps", 1),
        flags["per_device_train_batch_size"],
    )
    per_step = batch * accumulation * contestant.ranks
    packed = flags.get("packing", False)
    count = cell.num_rows or per_step * (args.warmup + cell.steps) * (ROWS_A_LINE if packed else 1)
    name = (
        f"{cell.rows}-{contestant.model or cell.model}-{flags['max_length']}-{count}-{batch}"
        + "-packed" * packed
    )
    folder = args.output_dir / "data" / slug(name)
    if (folder / "own.pt").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = text_rows(cell, flags, count, args)
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = llama.load_tokenizer(
        str(args.output_dir / "models" / slug(contestant.model or cell.model) / "model")
    )
    tokens = tokens_of(lines, tokenizer, flags["max_length"])
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tokens))
    own = own_batches(tokens, tokenizer, batch, flags["max_length"], packed)
    torch.save([usual_batch(each, tokenizer.pad_token_id) for each in own], folder / "padded.pt")
    torch.save(own, folder / "own.pt")
    return folder


def tokens_of(lines, tokenizer, max_length):
    """Rows of text as the recipe's input_ids and labels."""
    import llama

    rows = [llama.tokenize_row(json.loads(line), tokenizer, max_length) for line in lines]
    return [{name: row[name] for name in ("input_ids", "labels")} for row in rows]


class Rows(list):
    """Rows as the recipe's collate reads them from datasets."""

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


def own_batches(tokens, tokenizer, batch_size, max_length, packed=False):
    """Rows of tokens as the recipe's own batches in its sequential order, flat: inputs, positions, targets, counts."""
    import llama

    lengths, source = (
        [len(row["input_ids"]) for row in tokens],
        Rows({**row, "row": 0} for row in tokens),
    )
    lines = (
        sorted(llama.best_fit(lengths, max_length), key=min)
        if packed
        else [[row] for row in range(len(tokens))]
    )
    batches = []
    for numbers in llama.global_batches(len(lines), batch_size, 1):
        width = max_length * packed
        batch = llama.collate(
            source, [lines[number] for number in numbers], tokenizer.pad_token_id, width
        )
        batches.append(
            {"inputs": batch["inputs"], **batch["supervised"], "counts": batch["counts"]}
        )
    return batches


def usual_batch(own, pad_token_id):
    """A batch as most loops have it: labels beside the tokens and, unless lines are packed, a mask of the padding."""
    import torch

    ids, inputs = own["inputs"]["input_ids"], dict(own["inputs"])
    labels = torch.full(ids.shape, -100)
    labels.view(-1)[own["positions"] + 1] = own["targets"]
    if (
        "position_ids" not in inputs
    ):  # by which transformers keeps the rows of a line apart, if there is no mask
        inputs["attention_mask"] = (ids != pad_token_id).long()
    return {"inputs": inputs, "labels": labels, "counts": own["counts"]}


def as_words(flags):
    """Flags as words of a command line; True stands for a flag without a value."""
    pairs = (
        [f"--{name}"] if value is True else [f"--{name}", value] for name, value in flags.items()
    )
    return [word for pair in pairs for word in pair]


def words(*command):
    return [str(word) for word in command]


def slug(name):
    return re.sub(r"\W+", "_", name)


def command_of(cell, contestant, data, folder, args):
    """The command line of one run into `folder`, from the repository's root."""
    flags = cell.flags | contestant.flags
    if cell.steps:
        flags = flags | {"max_steps": steps_of(cell, args)}
    model = args.output_dir / "models" / slug(contestant.model or cell.model) / "model"
    flags |= {"model_name_or_path": model, "output_dir": folder / "run"}
    if contestant.tool == "ours":
        script = [RECIPE]
        flags |= {
            "dataset_name": data / "rows.jsonl",
            "eval_strategy": "no",
            "save_steps": 0,
            "report_to": "none",
        }
    else:
        script = [PEERS, contestant.tool, *["--matched"] * (cell.kind != "shipped")]
        flags |= {"data": data, "mixed_precision": PRECISION[cell.device]}
        if cell.device == "cuda":  # gigabytes that nobody reads
            flags |= {"skip_save": True}
    launcher = [sys.executable]
    if contestant.ranks > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            contestant.ranks,
        ]
    warmup = args.warmup if cell.steps != 1 else 0
    probe = [PROBE, folder / "probe.json", "--warmup", warmup, "--steps", steps_of(cell, args)]
    return words(*launcher, *probe, *script, *as_words(flags))


def steps_of(cell, args):
    """All steps of a run, the warm-up among them; 0: as many as one pass has; the first alone needs no warm-up."""
    return cell.steps + args.warmup if cell.steps > 1 else cell.steps


# ---- Running ----


def wait_until_idle(limit=MOST_LOAD, patience=PATIENCE):
    """Wait until the load average is at most `limit`, `patience` seconds at most. Returns it."""
    end = time.monotonic() + patience
    while (load := os.getloadavg()[0]) > limit and time.monotonic() < end:
        time.sleep(5)
    return load


def environment(cell, contestant, folder, args):
    """What a run's process sees: no hub, one thread, and its own cache of data sets, new or kept."""
    kept = args.output_dir / "cache" / slug(contestant.tool)
    cache = folder / "cache" if "cold" in cell.name else kept
    variables = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(cache.resolve()),
    }
    if cell.device == "cpu":
        variables |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
        }
    variables["ACCELERATE_MIXED_PRECISION"] = PRECISION[
        cell.device
    ]  # what a YAML would say to the recipe
    return {**os.environ, **variables}


def gpu_is_busy(patience=5):
    """Whether a process computes on the GPU; one that has just ended may be listed for a moment."""
    end = time.monotonic() + patience
    while machine.gpu_processes():
        if time.monotonic() > end:
            return True
        time.sleep(0.5)
    return False


def machine_in_use(cell, args, ranks=1, after=False):
    """(load average of the host, whether something else disturbs a run): before it, or after it ended.

    On a CPU what counts is the load average, for which this waits before a run. A GPU does not care for the host's
    load, which the reading of weights raises by itself; what counts there is another process on the GPU.
    """
    if args.smoke:
        return 0.0, False
    if cell.device == "cuda":
        return os.getloadavg()[0], gpu_is_busy()
    if after:
        load = os.getloadavg()[0]
        return load, load > MOST_LOAD + ranks - 1
    load = wait_until_idle()
    return load, load > MOST_LOAD


def run_once(cell, label, data, args):
    """Launch one contestant and return what was measured: see `measured`; or {"failed": why}."""
    contestant, folder = (
        cell.contestants[label],
        args.output_dir / "cells" / slug(cell.name) / slug(label),
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = command_of(cell, contestant, data, folder, args)
    before, disturbed = machine_in_use(cell, args)
    with open(folder / "output.txt", "w") as output:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(cell, contestant, folder, args),
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    after, disturbed_after = machine_in_use(cell, args, contestant.ranks, after=True)
    facts = {
        "contestant": label,
        "load": [round(before, 2), round(after, 2)],
        "loaded": disturbed or disturbed_after,
    }
    if code:
        text = (folder / "output.txt").read_text().replace(str(args.output_dir.resolve()), "RUNS")
        errors = [line for line in text.splitlines() if re.match(r"(error: |\w*Error: )", line)]
        return facts | {
            "failed": f"exit code {code}: {(errors or text.splitlines()[-1:] or [''])[-1][:300]}"
        }
    if missing := [
        rank for rank in range(1, contestant.ranks) if not (folder / f"probe.{rank}.json").exists()
    ]:
        return facts | {"failed": f"rank {missing[0]} of {contestant.ranks} did not run"}
    return facts | measured(folder, 0 if cell.steps == 1 else args.warmup)


def measured(folder, warmup):
    """What the probe and metrics.jsonl of one run say: seconds, tokens a second, MiB, and the losses by step."""
    probe = json.loads((folder / "probe.json").read_text())
    steps = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    ends, seen = probe["ends"], [line["num_input_tokens_seen"] for line in steps]
    if len(ends) != len(seen):
        return {"failed": f"{len(ends)} optimizer steps, but {len(seen)} lines in metrics.jsonl"}
    found = {
        "seconds_to_first_step": round(probe["started"] + ends[0], 3),
        "memory_mib": {name: round(size / 2**20, 1) for name, size in probe["memory"].items()},
        "losses": [line["loss"] for line in steps],
        "steps": len(steps),
        "tokens": seen[-1],
    }
    if warmup and len(ends) > warmup:
        seconds = ends[-1] - ends[warmup - 1]
        found |= {
            "seconds_per_step": round(seconds / (len(ends) - warmup), 6),
            "tokens_per_second": round((seen[-1] - seen[warmup - 1]) / seconds, 2),
        }
    return found


def held_out_loss(model_folder, batches):
    """The loss of a saved model, in nats a supervised token, over batches of `usual_batch`."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, loss, count = AutoModelForCausalLM.from_pretrained(model_folder).eval(), 0.0, 0
    with torch.no_grad():
        for batch in batches:
            logits = model(**batch["inputs"]).logits[:, :-1].flatten(0, 1).float()
            loss += torch.nn.functional.cross_entropy(
                logits, batch["labels"][:, 1:].flatten(), reduction="sum"
            ).item()
            count += batch["counts"][0].item()
    return loss / count


def held_out_batches(cell, args):
    """Rows that no contestant of a cell has trained on, as batches of `usual_batch`."""
    import llama

    folder = args.output_dir / "models" / slug(cell.model)
    path = folder / "data" / "test.jsonl" if cell.rows == "words" else args.data / "test.jsonl"
    tokenizer = llama.load_tokenizer(str(folder / "model"))
    tokens = tokens_of(path.read_text().splitlines()[:HELD_OUT], tokenizer, 1024)
    return [
        usual_batch(batch, tokenizer.pad_token_id)
        for batch in own_batches(tokens, tokenizer, 8, 1024)
    ]


def delete_weights(folder):
    """Delete the weights that a run left, which are gigabytes for a large model; what was measured stays."""
    for path in folder.rglob("*.safetensors"):
        path.unlink()


def without_missing(cell):
    """The cell without the contestants whose package is not installed, and the names of those with the reason."""
    left_out = {
        label: f"not installed: {one.needs}"
        for label, one in cell.contestants.items()
        if one.needs and version_of(one.needs) is None
    }
    contestants = {label: one for label, one in cell.contestants.items() if label not in left_out}
    return cell._replace(contestants=contestants), left_out


def run_cell(cell, args):
    """Run every contestant of a cell `args.repeats` times in turn. Returns one object for --json."""
    cell, left_out = without_missing(cell)
    for label, reason in left_out.items():
        print(f"LEFT OUT  {cell.name}: {label}: {reason}", flush=True)
    data = {
        label: prepare(cell, contestant, args) for label, contestant in cell.contestants.items()
    }
    held_out = held_out_batches(cell, args) if cell.kind == "shipped" else None
    if "warm" in cell.name:  # the first run of each fills its cache
        for label in cell.contestants:
            run_once(cell, label, data[label], args)
    runs = []
    for repeat in range(args.repeats):
        for label in cell.contestants:
            for _ in range(ATTEMPTS):
                run = {"repeat": repeat, **run_once(cell, label, data[label], args)}
                if not run["loaded"]:
                    break
            if held_out and "failed" not in run:
                model = args.output_dir / "cells" / slug(cell.name) / slug(label) / "run"
                run["held_out_loss"] = round(held_out_loss(model, held_out), 5)
            if cell.device == "cuda":
                delete_weights(args.output_dir / "cells" / slug(cell.name) / slug(label))
            runs.append(run)
            print(benchmark_tables.line_of(cell.name, run), flush=True)
    dtype = "bfloat16" if PRECISION[cell.device] == "bf16" else cell.flags.get("dtype", "float32")
    described = describe(cell, args) | ({"left out": left_out} if left_out else {})
    return described | {"runs": judge(runs, cell.kind, dtype)}


def describe(cell, args):
    """What has to be known of a cell to measure it again."""
    relative = args.output_dir
    commands = {
        label: shlex.join(
            command_of(cell, one, relative / "data" / "ROWS", relative / "cells" / "RUN", args)
        )
        .replace(sys.executable, "python")
        .replace(str(relative), "RUNS")
        for label, one in cell.contestants.items()
    }
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    versions = {name: version_of(name) for name in LIBRARIES}
    names = {one.model or cell.model for one in cell.contestants.values()}
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "device": device_name(cell.device),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "versions": {name: text for name, text in versions.items() if text},
        "mixed precision": PRECISION[cell.device],
        "warmup": args.warmup if cell.steps != 1 else 0,
        "rows": cell.rows,
        "models": {name: shape_of(name, args) for name in sorted(names)},
        "flags": {label: cell.flags | one.flags for label, one in cell.contestants.items()},
        "commands": commands,
    }


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device):
    """The processor's name, and how many threads a process has."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, one thread a process"
    )


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cells", default="", metavar="REGEX", help="cells whose name has this (default: all)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="which cells")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contestant")
    parser.add_argument(
        "--steps", type=int, help="timed steps (20, near zero 1000, shipped one pass)"
    )
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument(
        "--list", action="store_true", help="print the cells and their contestants, and stop"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="every cell in small on CPU: does it work?"
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/gsm8k"), help="folder of GSM8K's rows"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/benchmark"), help="folder of all runs"
    )
    parser.add_argument(
        "--json", type=Path, help="the results (default: results/benchmark.json; smoke: none)"
    )
    args = parser.parse_args()
    for name, least in (("repeats", 1), ("steps", 2), ("warmup", 1)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")
    cells = (
        [*cpu_cells(), *gpu_cells()]
        if args.smoke
        else gpu_cells()
        if args.device == "cuda"
        else cpu_cells()
    )
    try:
        args.chosen = [cell for cell in cells if re.search(args.cells, cell.name)]
    except re.error as error:
        parser.error(f"--cells {args.cells}: {error}")
    if not args.chosen:
        parser.error(f"no cell of {args.device} has {args.cells!r} in its name; --list shows all")
    if not (args.smoke or args.json):
        args.json = Path("results/benchmark.json")
    if args.smoke:
        args.output_dir = args.output_dir / "smoke"
        args.chosen = [in_small(cell) for cell in args.chosen]
    if args.steps:
        args.chosen = [
            cell._replace(steps=args.steps if cell.steps > 1 else cell.steps)
            for cell in args.chosen
        ]
    return parser, args


def main():
    parser, args = parse_args()
    if args.list:
        print("\n".join(f"{cell.name}: {', '.join(cell.contestants)}" for cell in args.chosen))
        return
    if not (args.smoke or args.device == "cuda" or (args.data / "train.jsonl").is_file()):
        parser.error(
            f"--data {args.data}: no train.jsonl in it; get GSM8K's from openai/grade-school-math"
        )
    make_models(
        sorted(
            {one.model or cell.model for cell in args.chosen for one in cell.contestants.values()}
        ),
        args,
    )
    known = json.loads(args.json.read_text())["cells"] if args.json and args.json.exists() else []
    done = []
    for cell in args.chosen:
        done.append(run_cell(cell, args))
        print(f"\n## {cell.name}\n\n{benchmark_tables.whole_table(done[-1])}\n", flush=True)
        if args.json:
            known = [old for old in known if old["cell"] != cell.name] + [done[-1]]
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(benchmark_tables.as_text(known))
    sys.exit(any(run["void"] and run["void"] != "loaded" for cell in done for run in cell["runs"]))


if __name__ == "__main__":
    main()
