"""Parity: one job gives the same numbers under every YAML, cut of the batch, attention and kind of weights.

    python scripts/parity.py                                  # all runs: about an hour on two cores
    python scripts/parity.py --groups cuts checkpointing      # some of them; --list names all
    python scripts/parity.py --json results/parity.json       # what the README's tables are made from

The job: ragged rows, accumulation, clipping that bites, warm-up and cosine decay, weight decay, 20 steps over two
epochs, so that it crosses a window with fewer rows. Each run is the shipped recipe under the shipped YAML through
`scripts/rehearse.py`, in fp32 on CPU ranks, and is compared with the same job in one process: the largest relative
difference over the steps in loss, gradient norm and learning rate, and over the tensors in the final weights
(||a - b|| / ||b||, Frobenius). The bytes each rank held against the YAML's promise come along.

A pair that the recipe refuses, and should, is listed with its reason. Exit code: 0 all within their bounds, 1 not, 64
for a wrong call.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.torch import load_file
from usage import USAGE, Parser

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
# What makes a recipe's tiny model and rows. Matrices of 320 x 320 and more, since ZeRO-3 does not shard tensors below
# 100,000 elements
WIDTH = ["--hidden_size", "320", "--intermediate_size", "640", "--num_attention_heads", "5"]
ROWS = ["--num_train_rows", "210", "--num_test_rows", "21"]
MODEL = [*WIDTH, "--num_key_value_heads", "5", *ROWS]
MAKERS = {
    "llama": ["llama", *MODEL],
    "llama_dpo": ["llama_dpo", *MODEL],
    "mistral_pretrain": ["mistral_pretrain", *MODEL],
    "mixtral": [
        "mixtral",
        *MODEL,
        "--num_local_experts",
        "4",
        "--intermediate_size",
        "128",
    ],
    "t5": ["t5", *WIDTH, *ROWS],
    "bert": ["bert", *WIDTH, *ROWS],
    "vit": ["vit", *WIDTH, *ROWS],
}
FLAGS = {
    "mistral_pretrain": [
        "--max_length",
        "80",
    ],  # blocks of a text or two, longer than the model's window
    # At the job's own rate rounding grows from step to step: T5 does not scale its attention down by its width, and
    # random BERTs and ViTs swing
    "t5": [
        "--learning_rate",
        "3e-4",
        "--generation_max_length",
        "16",
    ],  # under ZeRO-3 each token gathers all layers
    "bert": ["--learning_rate", "1e-4"],
    "vit": ["--learning_rate", "1e-4"],
    "mixtral": ["--lora_r", "128"],  # the adapters of experts are large enough for ZeRO-3 too
}
# 210 rows do not divide by the global batch of 12: the last window of an epoch has 6, and some ranks have none of them
JOB = [
    "--max_steps",
    "20",
    "--num_train_epochs",
    "2",
    "--learning_rate",
    "1e-3",
    "--warmup_steps",
    "0.1",
    "--lr_scheduler_type",
    "cosine",
    "--weight_decay",
    "0.1",
    "--max_grad_norm",
    "0.5",
    "--save_steps",
    "0",
]
LEVERS = ("--padding_free", "--max_logits_mib", "0.02")  # pieces of 16 tokens, several a batch
PACKING = ("--packing", "--max_length", "96")  # two or three rows a line
ENGINES = (
    "single",
    "ddp",
    "fsdp1_full_shard",
    "fsdp2_full_shard",
    "deepspeed_zero2",
    "deepspeed_zero3",
)
QUANTIZED = (
    ("single", "int8 LoRA"),
    ("deepspeed_zero2", "int8 LoRA"),
    ("single", "nf4 LoRA"),
    ("fsdp2_full_shard", "nf4 LoRA"),
)
CUT = {1: (3, 4), 2: (3, 2), 4: (3, 1)}  # ranks: per-device batch, accumulation
WEIGHTS = {
    "full": [],
    "LoRA": ["--use_peft"],
    "int8 LoRA": ["--use_peft", "--load_in_8bit"],
    "nf4 LoRA": ["--use_peft", "--load_in_4bit", "--bnb_4bit_use_double_quant"],
}
NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "weights": "final weights",
}
NO_GRADIENT = (
    "key.bias",
    "k_proj.bias",
)  # softmax does not see them: AdamW makes steps of what is rounding alone
BOUNDS = {"loss": 1e-6, "grad_norm": 1e-6, "learning_rate": 0.0, "weights": 1e-5}
BF16_BOUNDS = {"loss": 5e-3, "grad_norm": 2e-2, "learning_rate": 0.0, "weights": 1e-2}


class Run(NamedTuple):
    """One launch: a YAML without its suffix, a cut of the batch, kind of weights, further flags of a recipe, and mixed
    precision."""

    group: str
    config: str
    ranks: int = 1
    batch: int = 3
    accumulation: int = 4
    weights: str = "full"
    flags: tuple = ()
    recipe: str = "llama"
    precision: str = "no"

    @property
    def name(self):
        cut = f"{self.ranks}x{self.batch}x{self.accumulation}"
        words = [self.recipe, self.weights.replace(" ", "_"), self.config, cut]
        words += [self.precision] if self.precision != "no" else []
        return "-".join([*words, *(flag.removeprefix("--") for flag in self.flags)])

    @property
    def arguments(self):
        cut = [
            "--per_device_train_batch_size",
            self.batch,
            "--gradient_accumulation_steps",
            self.accumulation,
        ]
        return [*JOB, *FLAGS.get(self.recipe, []), *cut, *WEIGHTS[self.weights], *self.flags]


def reference_of(run):
    """The same job in one process, with the same kind of weights, and with packed lines if those make the batches."""
    if run.recipe != "llama" or "--packing" in run.flags:
        return run._replace(config="single", ranks=1, batch=CUT[1][0], accumulation=CUT[1][1])
    return Run("strategies", "single", weights=run.weights)


def configs():
    """Names of the shipped YAML files, links left out."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if not path.is_symlink())


def ranks_of(config, wanted):
    """The number of ranks that a YAML can have nearest to `wanted`: one for single, four for a mesh of 2 x 2."""
    return 1 if config == "single" else 4 if "hybrid" in config else wanted


def all_runs():
    """Every run, by group."""
    runs = []
    for ranks in (2, 4):
        for config in configs():
            if ranks == 2 or ranks_of(config, 2) == 2:
                cut = CUT[ranks_of(config, ranks)]
                runs += [
                    Run("strategies", config, ranks_of(config, ranks), *cut, weights)
                    for weights in WEIGHTS
                ]
    cuts = {1: [(1, 12), (2, 6), (4, 3), (6, 2), (12, 1)], 2: [(1, 6), (2, 3), (6, 1)], 4: [(1, 3)]}
    for ranks, few in (
        (1, ["single"]),
        *((n, ["ddp", "fsdp2_full_shard", "deepspeed_zero2"]) for n in (2, 4)),
    ):
        runs += [Run("cuts", engine, ranks, *cut) for cut in cuts[ranks] for engine in few]
    for config in ENGINES:
        ranks = ranks_of(config, 2)
        runs.append(
            Run("checkpointing", config, ranks, *CUT[ranks], flags=("--gradient_checkpointing",))
        )
        runs += [
            Run("levers", config, ranks, *CUT[ranks], weights, LEVERS)
            for weights in ("full", "LoRA")
        ]
        runs.append(Run("packing", config, ranks, *CUT[ranks], flags=PACKING))
    runs.append(Run("attention", "single", flags=("--attn_implementation", "eager")))
    for config in (*ENGINES, "deepspeed_zero0", "deepspeed_zero1"):
        ranks = ranks_of(config, 2)
        runs.append(Run("bf16", config, ranks, *CUT[ranks], precision="bf16"))
    for recipe in (name for name in MAKERS if name != "llama"):
        for config in configs():
            cut = ranks_of(config, 2), *CUT[ranks_of(config, 2)]
            kinds = ("full", "LoRA") if config in ENGINES else ("full",)
            runs += [Run(recipe, config, *cut, weights, recipe=recipe) for weights in kinds]
        for config, weights in (
            QUANTIZED if recipe != "mixtral" else ()
        ):  # bitsandbytes packs no experts
            cut = ranks_of(config, 2), *CUT[ranks_of(config, 2)]
            runs.append(Run("quantized", config, *cut, weights, recipe=recipe))
    return runs


def refuses(run):
    """Whether the recipe has to refuse a run: what FSDP cannot hold."""
    return (
        run.weights == "int8 LoRA"
        and run.config.startswith("fsdp")
        or run.weights != "full"
        and run.config == "fsdp1_no_shard"
        or run.weights != "full"
        and run.config.startswith("fsdp1")
        and run.recipe == "mixtral"
        or run.weights == "nf4 LoRA"
        and run.config == "fsdp1_shard_grad_op"
    )


def make_model(folder, recipe="llama"):
    """Write the tiny model and rows of a recipe to `folder`/model and `folder`/data."""
    maker, *shape = MAKERS[recipe]
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny.py"), maker, str(folder), *shape]
    subprocess.run(command, check=True, capture_output=True)


def data_of(tiny):
    """Arguments that name a tiny model and its rows: files, or folders of images."""
    files = [tiny / "data" / f"{split}.jsonl" for split in ("train", "test")]
    train, test = (path if path.exists() else path.with_suffix("") for path in files)
    return [
        "--model_name_or_path",
        tiny / "model",
        "--dataset_name",
        train,
        "--eval_dataset_name",
        test,
    ]


def launch(run, tiny, folder):
    """Run the recipe into `folder`, with the shard report in report.json. Returns exit code and output."""
    command = [
        sys.executable,
        ROOT / "scripts" / "rehearse.py",
        "--device",
        "cpu",
        "--num_processes",
        run.ranks,
    ]
    command += ["--config_file", CONFIGS / f"{run.config}.yaml", "--report", folder / "report.json"]
    command += ["--mixed_precision", run.precision]
    command += [
        ROOT / "recipes" / f"{run.recipe}.py",
        *run.arguments,
        *data_of(tiny),
        "--output_dir",
        folder,
    ]
    command = [str(word) for word in command]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def read_steps(folder):
    """The training lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def read_weights(folder):
    """The exported tensors by name, as float64 arrays."""
    weights = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(
            path
        ).items():  # DeepSpeed exports in bf16, which numpy does not know
            if not name.endswith(NO_GRADIENT):
                weights[name] = tensor.double().numpy()
    return weights


def relative(ours, theirs):
    """||a - b|| / ||b|| of two arrays: 0 if they are equal, NaN or inf where a number in them is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (
            0.0
            if np.array_equal(ours, theirs)
            else float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        )


def compare(folder, reference):
    """Largest relative differences between two finished runs: {"loss", "grad_norm", "learning_rate", "weights"}.

    None stands for a number that one of them does not report. NaN is never within a bound.
    """
    found, ours, theirs = {}, read_steps(folder), read_steps(reference)
    for key in ("loss", "grad_norm", "learning_rate"):
        pairs = [(a[key], b[key]) for a, b in zip(ours, theirs, strict=True)]
        reported = all(number is not None for pair in pairs for number in pair)
        found[key] = (
            float(np.max([relative(np.array(a), np.array(b)) for a, b in pairs]))
            if reported
            else None
        )
    ours, theirs = read_weights(folder), read_weights(reference)
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError(f"{folder} and {reference} hold other tensors")
    found["weights"] = float(np.max([relative(ours[name], theirs[name]) for name in ours]))
    return found


def bounds_of(run):
    """(bounds, reason): what the differences of a run may be, and why where it is not `BOUNDS`; None: not reported."""
    if run.precision == "bf16":
        return BF16_BOUNDS, (
            "bf16 keeps 8 bits: a single number is off by up to 2^-9, and later steps by more. One process, "
            "DDP and FSDP1 autocast products alone, FSDP2 and DeepSpeed compute all of a layer in bf16"
        )
    if run.config == "deepspeed_zero0":
        return {
            **BOUNDS,
            "grad_norm": None,
        }, "DeepSpeed reports no gradient norm in fp32 when nothing is sharded"
    if run.weights == "full" and run.config not in ("single", "ddp", "fsdp1_no_shard"):
        return {**BOUNDS, "grad_norm": 2e-5}, (
            "torch's fp32 sum of squares over a whole matrix of this size is low by up to 2e-5 on CPU; FSDP sums "
            "shorter parts, DeepSpeed in fp64"
        )
    return BOUNDS, ""


def within(found, bounds):
    """Whether each difference is there and at most its bound."""
    return all(
        found[key] is None if bound is None else found[key] is not None and found[key] <= bound
        for key, bound in bounds.items()
    )


def measure(run, tiny, folder, reference):
    """Launch one run and return its row of the table."""
    code, output = launch(run, tiny, folder)
    row = {**run._asdict(), "exit_code": code}
    errors = [
        line.removeprefix("error: ") for line in output.splitlines() if line.startswith("error: ")
    ]
    if code == USAGE and refuses(run) and errors:
        return row | {"verdict": "refused", "reason": errors[0]}
    if code or refuses(run):
        return row | {"verdict": "FAILED", "reason": output[-1000:]}
    try:
        found = compare(folder, reference)
    except (OSError, ValueError) as error:  # other tensors or steps, or the reference itself failed
        return row | {"verdict": "FAILED", "reason": str(error)}
    report, (bounds, why) = json.loads((folder / "report.json").read_text()), bounds_of(run)
    ok = within(found, bounds) and report["verdict"] == "ok"
    return row | {
        "differences": found,
        "bounds": bounds,
        "why": why,
        "bytes": report["verdict"],
        "held": held_bytes(report["rows"]),
        "verdict": "ok" if ok else "OUT OF BOUNDS",
    }


def held_bytes(rows):
    """The shard report by class: [held, promised] bytes of each rank, and into how many shards it is split."""
    classes = {}
    for row in rows:
        entry = classes.setdefault(
            row["class"], {"shards": row["shards"], "dtypes": row["dtypes"], "ranks": []}
        )
        entry["ranks"].append([row["held_bytes"], row["promised_bytes"]])
    return classes


def table(header, lines):
    """A Markdown table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *lines, strict=True)]
    rows = [header, ["-" * width for width in widths], *lines]
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    )


def reasons(rows):
    """Where a bound is not that of `BOUNDS`, and why, as lines of text."""
    found = {}
    for row in rows:
        if row["precision"] != "no" and "bounds" in row:
            bounds = ", ".join(
                f"{NAMES[name]} {bound:.0e}" for name, bound in row["bounds"].items() if bound
            )
            found.setdefault(f"bounds are {bounds}. {row['why']}", {})[row["precision"]] = True
            continue
        for name, bound in row.get("bounds", {}).items():
            if bound != BOUNDS[name]:
                what = "not reported" if bound is None else f"within {bound:.0e}"
                found.setdefault(f"{NAMES[name]} {what}. {row['why']}", {})[
                    f"`{row['config']}.yaml`"
                ] = True
    lines = []
    for text, names in found.items():
        lines.append(
            f"- {', '.join(names) if len(names) < 4 else 'full weights, sharded'}: {text}."
        )
    return lines


def tables(rows):
    """All rows as one Markdown table a group, with the bounds below."""
    parts = []
    for group in dict.fromkeys(row["group"] for row in rows):
        lines, of_group = [], [row for row in rows if row["group"] == group]
        several = len({row["recipe"] for row in of_group}) > 1
        for row in of_group:
            found = row.get("differences", {})
            cells = ["" if found.get(key) is None else f"{found[key]:.1e}" for key in BOUNDS]
            name = [f"{row['recipe']}.py"] * several
            lines.append(
                [
                    f"{row['config']}.yaml",
                    " ".join([*name, row["weights"], *row["flags"]]),
                    f"{row['ranks']} x {row['batch']} x {row['accumulation']}",
                    *cells,
                    row.get("bytes", ""),
                    row["verdict"],
                ]
            )
        header = [
            "YAML",
            "weights and flags",
            "ranks x batch x accumulation",
            *NAMES.values(),
            "bytes",
            "verdict",
        ]
        parts.append(f"## {group}\n\n{table(header, lines)}")
    bounds = ", ".join(f"{NAMES[name]} {bound:.0e}" for name, bound in BOUNDS.items())
    return "\n\n".join([*parts, "\n".join([f"Bounds: {bounds}.", *reasons(rows)])])


def parse_args():
    groups = list(dict.fromkeys(run.group for run in all_runs()))
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups", nargs="+", choices=groups, default=groups, help="tables to make (default: all)"
    )
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=configs(),
        default=configs(),
        help="YAML files (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="print the runs and stop")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/parity"), help="folder of all runs"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results here; other groups there stay"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="launches at a time (default: one a core)"
    )
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    args.runs = [
        run for run in all_runs() if run.group in args.groups and run.config in args.configs
    ]
    if not args.runs:
        parser.error(
            f"no run of {', '.join(args.groups)} is under {', '.join(args.configs)}; --list shows all runs"
        )
    return args


def kept_rows(args):
    """Rows that --json has of earlier runs with the same versions."""
    before = (
        json.loads(args.json.read_text()) if args.json and args.json.is_file() else {"rows": []}
    )
    return before["rows"] if before.get("versions") == versions() else []


def versions():
    names = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")
    return {name: importlib.metadata.version(name) for name in names}


def main():
    args = parse_args()
    if args.list:
        print("\n".join(f"{run.group}: {run.name}" for run in args.runs))
        return
    references = list(dict.fromkeys(reference_of(run) for run in args.runs))
    for recipe in dict.fromkeys(run.recipe for run in args.runs):
        make_model(args.output_dir / f"tiny_{recipe}", recipe)

    def finish(run):
        tiny, reference = (
            args.output_dir / f"tiny_{run.recipe}",
            args.output_dir / reference_of(run).name,
        )
        row = measure(run, tiny, args.output_dir / run.name, reference)
        print(f"{row['verdict']:>13}  {run.group}: {run.name}", flush=True)
        return row

    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(finish, references))  # the others are compared with these
        rows += pool.map(finish, [run for run in args.runs if run not in references])
    kept = [row for row in kept_rows(args) if row["group"] not in args.groups]
    rows = [row for row in rows if row["group"] in args.groups or not kept] + kept
    rows.sort(
        key=lambda row: [
            row["group"] != "strategies",
            row["group"],
            list(WEIGHTS).index(row["weights"]),
            row["ranks"] > 2 and "hybrid" not in row["config"],
        ]
    )
    print(f"\n{tables(rows)}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(
            json.dumps(row) for row in rows
        )  # one a run, so that a change can be read
        args.json.write_text(
            f'{{"device": "cpu", "versions": {json.dumps(versions())}, "rows": [\n{lines}\n]}}\n'
        )
    sys.exit(any(row["verdict"] not in ("ok", "refused") for row in rows))


if __name__ == "__main__":
    main()
