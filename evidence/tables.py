# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README.md, docs/ and results/README.md from results/*.json.

    python evidence/tables.py            # after a measurement
    python evidence/tables.py --check    # write nothing, exit with 1 if a table differs

A table is between `<!-- NAME -->` and `<!-- end of NAME -->`; BLOCKS has the function of each NAME.
"""

import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any

import rooms  # noqa: F401  before what it makes importable
from common import Parser, run_command
from paths import ROOT

RESULTS = ROOT / "results"
MARKED = re.compile(r"(^<!-- (\w+) -->\n).*?(?=\n<!-- end of \2 -->$)", re.DOTALL | re.MULTILINE)
GIB = 2**30

Row = dict[str, Any]  # facts of one measurement, as `record` keeps them


# ---- What all tables are made of ----


@functools.cache
def read(name: str) -> list[Row]:
    """Return the rows of results/NAME.json in the order of the file."""
    return list(json.loads((RESULTS / f"{name}.json").read_text()).values())


def rows_of(name: str, key: str) -> list[Row]:
    """Return the rows of results/NAME.json that have a key."""
    return [row for row in read(name) if key in row]


def table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return an aligned Markdown table. Every line has as many cells as the header."""
    rows = [list(map(str, line)) for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = [" | ".join(map(str.ljust, cells, widths)) for cells in rows]
    return "\n".join(f"| {line} |" for line in padded)


def decimal(number: float) -> str:
    """Return a number with one significant digit and without an exponent, such as 0.0000002."""
    return f"{Decimal(f'{number:.0e}'):f}"


# ---- Parity ----

NUMBERS = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "weights": "final weights",
}
# {group of runs: what the table calls it}; the runs of a recipe other than llama.py are "others"
GROUPS = {
    "strategies": "llama.py, every YAML, 2 and 4 processes",
    "cuts": "the global batch split differently, 1, 2 and 4 processes",
    "checkpointing": "gradient checkpointing",
    "attention": "eager attention",
    "bf16": "bf16 under each engine, against a single process in fp32",
    "levers": "padding-free batches, loss in chunks",
    "packing": "packed sequences, against a single packed process",
    "others": "the other recipes, every YAML, 2 processes",
    "quantized": "the other recipes, ZeRO-2 and FSDP2",
    "meshes": "TP, CP, SP, EP and PP, each recipe that has them, 2 to 8 processes",
}
# Groups in which the run of one process is what the others are compared with
REFERENCED = ("strategies", "others", "quantized", "meshes")


def group_of(run: Row) -> str:
    """Return the key of GROUPS of a run."""
    return "others" if run["group"] == run["recipe"] else run["group"]


def compared_runs() -> list[Row]:
    """Return the runs that were compared with another one, without those that were refused."""
    runs = []
    for run in read("parity"):
        is_reference = run["config"] == "single" and group_of(run) in REFERENCED
        if run.get("verdict") == "ok" and not is_reference:
            runs.append(run)
    return runs


def parity() -> str:
    """Return the largest differences from one process by kind of run and weights, and bounds."""
    found: dict[tuple[str, str], list[Row]] = {}
    bounds: dict[str, None] = {}
    for run in compared_runs():
        found.setdefault((group_of(run), run["weights"]), []).append(run)
        words = [f"{NUMBERS[name]} {size:g}" for name, size in run["bounds"].items() if size]
        if run["recipe"] == "embeddings":  # Its gradients nearly cancel out
            words.append("in embeddings.py")
        bounds[f"- {run['why'] or 'All others'}: {', '.join(words)}."] = None
    rows = []
    for group, what in GROUPS.items():
        for weights in dict.fromkeys(run["weights"] for run in compared_runs()):
            if runs := found.get((group, weights)):
                rows.append([what, weights, len(runs), *largest_differences(runs)])
    columns = ["what was compared", "weights", "runs", *NUMBERS.values()]
    return "\n".join([table(columns, rows), "", "Bounds:", "", *bounds])


def largest_differences(runs: Sequence[Row]) -> list[str]:
    """Return the largest difference of some runs in each of NUMBERS, where it is reported."""
    cells = []
    for name in NUMBERS:
        found = [run["differences"][name] for run in runs]
        cells.append(decimal(max(number for number in found if number is not None)))
    return cells


# ---- The planner ----

# {kind of jobs: what the table calls it}
PLANNED = {
    "one thing": "one process, one setting changed at a time",
    "drawn": "one process, random settings",
    "DDP, FSDP2, ZeRO-0 to 2": "DDP, FSDP2, ZeRO-0 to 2, 2 and 4 processes with rows of their own",
    "FSDP1": "FSDP1, the same",
    "ZeRO-3": "ZeRO-3, the same",
    "TP": "TP, 2 to 8 processes that share rows",
    "CP": "CP, the same",
    "SP": "SP, the same",
}


def planner() -> str:
    """Return the errors of the planned peak, by what it is compared with."""
    rows = []
    for kind, text in PLANNED.items():
        errors = [job["error"] for job in read("planner") if kind_of(job) == kind]
        sizes = (mean_size(errors), max(*errors, 0), abs(min(*errors, 0)))
        rows.append([text, len(errors), *(f"{size:.2%}" for size in sizes)])
    columns = ["planned and measured on CPUs", "jobs", "mean error", "most above", "most below"]
    return table(columns, rows)


def mean_size(errors: Sequence[float]) -> float:
    """Return the mean of the sizes of relative errors."""
    return sum(map(abs, errors)) / len(errors)


def kind_of(job: Row) -> str:
    """Return the key of PLANNED of a job, which has a YAML if it is on ranks."""
    config = job.get("config", "")
    if not config:
        return job["kind"]
    if config.endswith(("tp", "cp")):
        return config[-2:].upper()
    if config == "deepspeed_ulysses":
        return "SP"
    if config.startswith("fsdp1"):
        return "FSDP1"
    return "ZeRO-3" if "zero3" in config else "DDP, FSDP2, ZeRO-0 to 2"


# ---- Model families ----

FAMILY_BOUND = 1e-6  # relative: a loss is a mean over some hundred tokens in fp32


def families() -> str:
    """Return how close the families are to transformers, a line for each, and the versions."""
    rows = sorted(measured_families(), key=lambda row: row["family"])
    first = decimal(max(row["first"] for row in rows))
    loaded = decimal(max(row["loaded"] for row in rows))
    summary = (
        f"{len(rows)} families train as transformers would. Over all of their runs, the first loss "
        f"differs from the model's own by at most {first}, and the loss of the loaded result from "
        f"that of the trained model by at most {loaded}."
    )
    columns = ["`model_type`", "attention", "own loss", "first loss differs by", "trained"]
    columns += ["trained with LoRA", "adapters", "loaded differs by"]
    listed = table(columns, map(cells_of_family, rows))
    versions = rows[0]["versions"].items()
    measured_with = ", ".join(f"{name} {version}" for name, version in versions)
    return f"{summary}\n\n{listed}\n\nMeasured with {measured_with}."


def measured_families() -> list[Row]:
    """Return each family with the largest relative differences of losses that should be equal.

    "first": of a run's first loss and the model's own; "loaded": of what a run wrote and trained.
    """
    rows = []
    for row in read("families"):
        runs = [row[kind] for kind in ("full", "LoRA", "FSDP")]
        first = [abs(run["losses"][0] - row["own_loss"]) / row["own_loss"] for run in runs]
        loaded = [abs(run["loaded"] - run["trained"]) / run["trained"] for run in runs]
        rows.append(row | {"first": max(first), "loaded": max(loaded)})
    return rows


def cells_of_family(row: Row) -> list[str]:
    """Return the cells of a family."""
    lora = row["LoRA"]
    own, full, adapted = row["own_loss"], row["full"]["trained"], lora["trained"]
    cells = [f"`{row['family']}`", row["attention"], f"{own:.4f}", decimal(row["first"])]
    cells += [f"{full:.4f}", f"{adapted:.4f}", lora["adapters"], decimal(row["loaded"])]
    return cells


# ---- The sum of it ----

INTERRUPTED = ("resume", "every step", "five", "signals", "twice")


def proof() -> str:
    """Return one row for each claim: what was checked, the result, its bound and the command."""
    runs = [run for run in compared_runs() if run["precision"] == "no"]
    configs = {run["config"] for run in runs} - {"single"}
    recipes = {run["recipe"] for run in runs}
    difference = decimal(max(run["differences"]["loss"] for run in runs))
    finished = [run for run in read("parity") if run.get("verdict") == "ok"]
    interrupted, _ = trials_of(*INTERRUPTED)
    kills, lost = trials_of("random kills")
    beside_saves, lost_there = trials_of("random kills, --async_save")
    tracked = rows_of("planner", "config")
    drawn = [job["error"] for job in read("planner") if kind_of(job) == "drawn"]
    errors = [job["error"] for job in tracked]
    on_ranks = errors_text(errors, "jobs, every YAML but EP's and PP's on two to eight ranks")
    tiny = measured_families()
    first = decimal(max(row["first"] for row in tiny))
    rows = [
        (
            f"Every strategy gives the same loss: {len(runs)} runs, {len(recipes)} recipes, "
            f"{len(configs)} multi-GPU YAMLs",
            f"largest relative difference from a single-process run: {difference}",
            decimal(max(run["bounds"]["loss"] for run in runs)),
            "`pytest evidence/test_parity.py --all`",
        ),
        (
            "Each process has only the share of the training state that its YAML promises",
            f"{len(finished)} runs",
            "all",
            "`pytest evidence/test_parity.py --all`",
        ),
        (
            "A run that was interrupted and resumed equals an uninterrupted one, bit for bit",
            f"{interrupted} interruptions; {kills} `kill -9` at random moments, at most {lost} "
            f"steps lost when saving every second step, and {beside_saves} with `--async_save`, at "
            f"most {lost_there} lost",
            "all",
            "`pytest evidence/test_faults.py --all`",
        ),
        (
            "Planned peak memory beside the measured tensors",
            f"{on_ranks}; {errors_text(drawn, 'fp32 jobs with random settings')}",
            "0.5%, ZeRO-3 and SP 3%, TP 2%",
            "`pytest evidence/test_planner.py --all`",
        ),
        (
            f"Tiny models of {len(tiny)} model families have the loss that transformers gives",
            f"largest relative difference in the first loss: {first}",
            decimal(FAMILY_BOUND),
            "`pytest evidence/test_families.py --all`",
        ),
    ]
    return table(["what was checked", "result", "bound", "how to repeat it"], rows)


def trials_of(*groups: str) -> tuple[int, int]:
    """Return how many attempts there were, all as promised, and the largest figure of all."""
    trials = [trial for trial in read("faults") if trial["group"] in groups]
    tried = sum(trial["count"] for trial in trials)
    return tried, math.ceil(max(trial["figure"] for trial in trials))


def errors_text(errors: Sequence[float], kind: str) -> str:
    """Return how many plans there are, the mean size of their errors, and the largest."""
    worst = max(map(abs, errors))
    return f"{len(errors)} {kind}: mean error {mean_size(errors):.2%}, largest {worst:.2%}"


DIFFERENCES = "differences from an uninterrupted run: {}"
LOSS = "largest relative difference in loss: {}"
GROUPS_OF_FAULTS = {  # {group of evidence/test_faults.py: (what was done, its worst outcome)}
    "every step": ("stopped in each step: one process, DDP, FSDP2", DIFFERENCES),
    "resume": ("stopped and continued under every YAML: full, LoRA, nf4 LoRA; images", DIFFERENCES),
    "five": ("five interruptions in one epoch", DIFFERENCES),
    "signals": ("SIGTERM, SIGUSR1 to one rank, to all", DIFFERENCES),
    "twice": ("two signals, and then `kill -9`", DIFFERENCES),
    "elastic": ("continued on other numbers of ranks", LOSS),
    "strategies": ("another strategy every two steps, another mesh in each step", LOSS),
    "dead ranks": ("a rank or the launcher killed, a rank suspended", "others ended after {} s"),
    "random kills": ("`kill -9` of all processes at a random moment", "steps lost: {}"),
    "random kills, --async_save": ("the same with `--async_save`", "steps lost: {}"),
    "writes": ("a crash before each change of a file and within each write", DIFFERENCES),
    "disk": ("a full disk", DIFFERENCES),
    "secrets": ("secrets in the environment", "broken promises: {}"),
    "numbers": ("a loss or gradient that is not finite", "broken promises: {}"),
}


def faults() -> str:
    """Return a row for each kind of fault: how many trials, and the worst outcome of them."""
    lines = []
    for group, (what, outcome) in GROUPS_OF_FAULTS.items():
        trials = [row for row in read("faults") if row["group"] == group]
        worst = Decimal(f"{max(row['figure'] for row in trials):.2g}")
        tried = sum(row["count"] for row in trials)
        lines.append([what, f"{tried:,}", outcome.format(f"{worst:f}")])
    return table(["what was done", "trials, all as promised", "worst outcome"], lines)


# ---- Quickstarts ----


def quickstarts() -> str:
    """Return the table of quickstarts: a number of held-out rows before and after, and seconds."""
    lines = []
    for row in read("quickstarts"):
        command = f"`make quickstart RECIPE={row['recipe']}`"
        figures = [f"{row['before']:.3g}", f"{row['after']:.3g}", f"{row['seconds']:.0f}"]
        lines.append([command, row["shown"], *figures])
    seconds = f"seconds, {read('quickstarts')[0]['cores']} CPU cores"
    return table(["quickstart", "on held-out rows", "before", "after", seconds], lines)


# ---- A real model ----

NAMES = {
    "floor": "plain PyTorch loop",
    "lean": "plain loop without unneeded logits",
    "ours": "this recipe",
    "trainer": "Trainer",
    "trl": "SFTTrainer",
}
TRAINED = {
    "full": "all weights",
    "LoRA": "LoRA",
    "int8": "LoRA, int8 base",
    "float8": "LoRA, float8 base",
    "nf4": "LoRA, nf4 base",
}


def real_model() -> str:
    """Return losses of held-out rows and right answers of a real model, and how it was trained."""
    rows = {row["kind"]: row for row in read("real_model")}
    sizes = rows["LoRA"]
    text = (
        f"In fp32 on one CPU thread: {sizes['steps']} steps of {sizes['batch']} rows of at most "
        f"{sizes['most_tokens']} tokens; the loss of {sizes['held_out']} held-out rows, in nats "
        "per token, and how many of them are answered right."
    )
    if "before" in rows:
        text += f" Before training it was {right_answers(rows['before'], sizes)}."
    lines = []
    for kind, what in TRAINED.items():
        for program in ("ours", "trl"):
            if run := rows.get(kind, {}).get(program):
                losses = [f"{loss:.5f}" for loss in run["held_out_losses"]]
                lines.append([what, NAMES[program], *losses, right_answers(run, sizes)])
    header = ["trained", "program", "held-out loss before"]
    evaluated = range(sizes["every"], sizes["steps"] + 1, sizes["every"])
    header += [f"after {step} steps" for step in evaluated]
    return f"{text}\n\n{table([*header, 'right answers'], lines)}"


def right_answers(run: Row, sizes: Row) -> str:
    """Return how many held-out rows a model answered right, and how many there are."""
    return f"{run['exact_match'] * sizes['held_out']:.0f} of {sizes['held_out']}"


# ---- On a GPU ----

GPU_JOBS = {
    "speed.8b_lora": "8B LoRA, 2 rows of 4,096 tokens",
    "speed.8b_full": "8B full, 4 rows of 4,096 tokens",
    "speed.8b_qlora": "8B QLoRA, 2 rows of 2,048 tokens",
}
GPU_FIGURES = {
    "tokens/s": "{:,}",
    "allocated, GiB": "{:.2f}",
    "planned, GiB": "{:.2f}",
    "MFU": "{:.1%}",
}
HOLDS = {True: "yes", False: "**no**", None: "measured", "no time": "**no time**"}


def gpu_cells() -> list[Row]:
    """Return the rows of results/gpu/ by the names of their cells."""
    rows = [row for path in RESULTS.glob("gpu/*.json") for row in read(f"gpu/{path.stem}")]
    return sorted(rows, key=lambda row: row["cell"])


def gpu() -> str:
    """Return each claim about a GPU with its bound and whether it holds, and the machines."""
    machines: dict[str, None] = {}
    lines = []
    for row in gpu_cells():
        versions = [f"{name} {version}" for name, version in row["versions"].items() if version]
        machines[", ".join([row["device"], f"driver {row['driver']}", *versions])] = None
        lines.append([f"`{row['cell']}`", row["proves"], row["bound"], HOLDS[row["holds"]]])
    commits = sorted({row["commit"] for row in gpu_cells()})
    text = f"Measured on {'; and on '.join(machines)}, at {' and '.join(commits)}."
    return f"{text}\n\n{table(['cell', 'claim', 'bound', 'holds'], lines)}"


def gpu_speed() -> str:
    """Return the table of speed and of tensors at the peak beside other programs."""
    lines = []
    for cell in gpu_cells():
        for row in cell["rows"]:
            if cell["cell"] in GPU_JOBS and "tokens/s" in row:
                figures = [
                    form.format(row[name]) if name in row else ""
                    for name, form in GPU_FIGURES.items()
                ]
                lines.append([GPU_JOBS[cell["cell"]], row["what"], *figures])
    header = ["job", "program", "tokens/s", "peak, GiB", "planned, GiB", "MFU"]
    return table(header, lines)


def gpu_race() -> str:
    """Return the table of each race and ladder, "" before they were run."""
    lines = []
    for cell in gpu_cells():
        name = cell["cell"].removeprefix("race.")
        if name == cell["cell"]:
            continue
        first = next(row["tokens/s"] for row in cell["rows"] if row["label"] == "ours")
        for row in cell["rows"]:
            tool, *levers = row["label"].split()
            line = [name.replace("_", " "), " ".join([NAMES[tool], *levers])]
            if row["result"] != "trained":
                lines.append([*line, row["result"], "", "", ""])
                continue
            times = [speed / own for speed, own in zip(row["tokens/s"], first, strict=True)]
            line += [spread(row["tokens/s"], "{:,.0f}"), spread(times, "{:.2f}")]
            share = spread(row["MFU, causal"], "{:.1%}")
            lines.append([*line, share, f"{row['allocated, GiB']:.2f}"])
    header = ["job and settings", "program", "tokens/s, median and range", "times the recipe's"]
    return table([*header, "MFU, causal", "peak, GiB"], lines) if lines else ""


def spread(numbers: Iterable[float], form: str) -> str:
    """Return the median of some numbers and their range, as text."""
    found = sorted(numbers)
    middle = form.format(statistics.median(found))
    low, high = form.format(found[0]), form.format(found[-1])
    return middle if low == high else f"{middle} ({low} to {high})"


def gpu_plan() -> str:
    """Return the table of planned and measured tensors at the peak of each run."""
    lines = []
    for cell in gpu_cells():
        for row in cell["rows"]:
            if "planned tensors" in row and "allocated" in row:
                planned = row["planned tensors"] / GIB
                measured = row["allocated"] / GIB
                error = round(planned / measured - 1, 3) + 0.0  # so that it is never -0.0
                sizes = [f"{planned:.2f}", f"{measured:.2f}", f"{error:+.1%}"]
                lines.append([f"`{row['run']}`", *sizes])
    return table(["run", "planned, GiB", "measured, GiB", "error"], lines)


# ---- The documents ----

BLOCKS: dict[str, Callable[[], str]] = {
    "parity": parity,
    "proof": proof,
    "faults": faults,
    "planner": planner,
    "families": families,
    "quickstarts": quickstarts,
    "real_model": real_model,
    "gpu": gpu,
    "gpu_speed": gpu_speed,
    "gpu_race": gpu_race,
    "gpu_plan": gpu_plan,
}


def filled(text: str) -> str:
    """Return the text of a document with its tables. Raises KeyError if BLOCKS has no such NAME."""
    return MARKED.sub(lambda found: found[1] + BLOCKS[found[2]](), text)


def main() -> int:
    """Write the documents that differ, or with --check only name them; return the exit code."""
    parser = Parser(description="Write the tables of README.md and docs/ from results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; print what differs")
    args = parser.parse_args()
    differ = 0
    for path in [ROOT / "README.md", *ROOT.glob("results/*.md"), *sorted(ROOT.glob("docs/*.md"))]:
        text = path.read_text()
        wanted = filled(text)
        if text != wanted:
            differ += 1
            print(f"{path.relative_to(ROOT)} differs from results/")
            if not args.check:
                path.write_text(wanted)
    return 1 if args.check and differ else 0


if __name__ == "__main__":
    run_command(main)
