# SPDX-License-Identifier: Apache-2.0
"""Write the tables of README.md and docs/ from results/*.json.

    python evidence/tables.py            # after a measurement
    python evidence/tables.py --check    # write nothing, exit with 1 if a table differs

A table is between `<!-- NAME -->` and `<!-- end of NAME -->`; BLOCKS has the function of each NAME.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

import rooms  # noqa: F401  before what it makes importable
import tables_speed
from common import Parser, run_command
from paths import ROOT
from tables_speed import Row, table

MARKED = re.compile(r"(^<!-- (\w+) -->\n).*?(?=\n<!-- end of \2 -->$)", re.DOTALL | re.MULTILINE)
# The order of the YAMLs in each table, by how their names begin
ORDER = ("single", "ddp", "tp", "ep", "pp", "fsdp2", "hsdp", "fsdp1", "deepspeed")


# ---- What all tables are made of ----


def rows_of(name: str, key: str = "versions") -> list[Row]:
    """Return the rows of results/NAME.json, one for each test that recorded, which have a key."""
    return [row for row in tables_speed.rows_of(name) if key in row]


def decimal(number: float) -> str:
    """Return a number with one significant digit and without an exponent, such as 0.0000002."""
    return f"{Decimal(f'{number:.0e}'):f}"


def yaml_of(row: Row) -> str:
    """Return the name of a row's YAML as code."""
    return f"`{row['config']}.yaml`"


def place_of(row: Row) -> tuple[int, str]:
    """Return the sort key of a row's YAML. Raises StopIteration for a kind that is not in ORDER."""
    config = row["config"]
    return next(place for place, start in enumerate(ORDER) if config.startswith(start)), config


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
MOST_NAMES = 3  # YAMLs that are named one by one when a bound is explained


def group_of(run: Row) -> str:
    """Return the key of GROUPS of a run."""
    return "others" if run["group"] == run["recipe"] else run["group"]


def compared_runs() -> list[Row]:
    """Return the runs that were compared with another one, without those that were refused."""
    runs = []
    for run in rows_of("parity"):
        is_reference = run["config"] == "single" and group_of(run) in REFERENCED
        if run["verdict"] == "ok" and not is_reference:
            runs.append(run)
    return runs


def usual_bounds() -> dict[str, float]:
    """Return the bounds of a run without a reason for wider ones: those of DDP."""
    return next(run["bounds"] for run in compared_runs() if run["config"] == "ddp")


def parity() -> str:
    """Return the largest differences from one process, by kind of run, weights and bound."""
    usual = usual_bounds()
    places = list(GROUPS)
    weights = list(dict.fromkeys(run["weights"] for run in compared_runs()))
    found: dict[tuple[int, int, bool], list[Row]] = {}
    for run in compared_runs():
        bound = run["bounds"]["grad_norm"]
        sharded = run["precision"] == "no" and bound not in (None, usual["grad_norm"])
        place = (places.index(group_of(run)), weights.index(run["weights"]), sharded)
        found.setdefault(place, []).append(run)
    rows = []
    for (place, weight, sharded), runs in sorted(found.items()):
        what = GROUPS[places[place]]
        if sharded:
            what += ", sharded"
        cells = [with_bound(runs, number) for number in NUMBERS]
        rows.append([what, weights[weight], len(runs), *cells])
    columns = ["what was compared", "weights", "runs"]
    columns += [f"{name} (bound)" for name in NUMBERS.values()]
    return f"{table(columns, rows)}\n\n{reasons(usual)}"


def with_bound(runs: Iterable[Row], number: str) -> str:
    """Return the largest difference of some runs in one number, with its bound in brackets."""
    reported = [run for run in runs if run["bounds"][number] is not None]
    difference = max(run["differences"][number] for run in reported)
    return f"{decimal(difference)} ({decimal(reported[0]['bounds'][number])})"


def reasons(usual: Mapping[str, float]) -> str:
    """Return a line for each reason for bounds other than the usual ones, and where it applies."""
    places: dict[str, dict[str, None]] = {}
    for run in compared_runs():
        if run["precision"] != "no":
            words = [f"{NUMBERS[name]} {size:.0e}" for name, size in run["bounds"].items() if size]
            reason = f"bounds are {', '.join(words)}. {run['why']}"
            places.setdefault(reason, {})[run["precision"]] = None
            continue
        for name, bound in run["bounds"].items():
            if bound != usual[name]:
                what = "not reported" if bound is None else f"within {bound:.0e}"
                reason = f"{NUMBERS[name]} {what}. {run['why']}"
                places.setdefault(reason, {})[yaml_of(run)] = None
    lines = []
    for reason, names in places.items():
        where = ", ".join(names) if len(names) <= MOST_NAMES else "full weights, sharded"
        lines.append(f"- {where}: {reason}.")
    return "\n".join(lines)


# ---- Sharding ----

CLASSES = ("parameters", "gradients", "optimizer")


def shares() -> str:
    """Return the share of each class that the fullest rank has; one row for YAMLs that agree."""
    fullest: dict[tuple[str, int, str], int] = {}  # bytes by YAML, ranks and class
    yamls = {}
    for run in rows_of("parity"):
        if run["group"] == "strategies" and run["weights"] == "full" and "held" in run:
            yamls[run["config"]] = run
            for kind, held in run["held"].items():
                most = max(size for size, _ in held["ranks"])
                fullest[run["config"], run["ranks"], kind] = most
    del yamls["single"]
    named: dict[tuple[str, ...], list[str]] = {}
    for run in sorted(yamls.values(), key=place_of):
        cells = []
        for ranks in (2, 4):
            for kind in CLASSES:
                size = fullest.get((run["config"], ranks, kind))
                cells.append(share_text(size, fullest["single", 1, kind]))
        named.setdefault(tuple(cells), []).append(yaml_of(run))
    columns = [f"{kind}, {ranks} processes" for ranks in (2, 4) for kind in CLASSES]
    return table(["YAML", *columns], [[", ".join(names), *cells] for cells, names in named.items()])


def share_text(size: int | None, whole: int) -> str:
    """Return a share as a fraction if it is within 1% of one, "" for what was not measured."""
    if size is None:
        return ""
    share = size / whole
    for parts, text in {1: "1", 2: "1/2", 4: "1/4"}.items():
        if abs(share * parts - 1) < 0.01:
            return text
    return f"{share:.2f}"


# ---- The planner ----

# {kind of jobs: what their plans are compared with}
COMPARED = {
    "one thing": "one CPU process, one setting changed at a time",
    "drawn": "one CPU process, random settings",
    "DDP, FSDP2, ZeRO-0 to 2": "2 and 4 CPU processes, each with rows of its own",
    "FSDP1": "the same",
    "ZeRO-3": "the same",
    "TP": "2 to 8 CPU processes that share rows",
    "CP": "the same",
    "SP": "the same",
}


def planner() -> str:
    """Return the errors of the planned peak, by what it is compared with."""
    jobs = rows_of("planner", "kind") + tracked_jobs()
    rows = []
    for kind, text in COMPARED.items():
        errors = [job["error"] for job in jobs if job["kind"] == kind]
        if errors:
            sizes = (mean_size(errors), max(*errors, 0), abs(min(*errors, 0)))
            name = "one process" if kind in ("one thing", "drawn") else kind
            rows.append([name, text, len(errors), *(f"{size:.2%}" for size in sizes)])
    columns = ["planned", "compared with", "jobs", "mean error", "most above", "most below"]
    return table(columns, rows)


def mean_size(errors: Sequence[float]) -> float:
    """Return the mean of the sizes of relative errors."""
    return sum(map(abs, errors)) / len(errors)


def tracked_jobs() -> list[Row]:
    """Return the jobs on CPU ranks with their kinds."""
    jobs = []
    for row in rows_of("planner", "config"):
        config = row["config"]
        kind = "DDP, FSDP2, ZeRO-0 to 2"
        if config.endswith(("tp", "cp")):
            kind = config[-2:].upper()
        elif config == "deepspeed_ulysses":
            kind = "SP"
        elif config.startswith("fsdp1"):
            kind = "FSDP1"
        elif "zero3" in config:
            kind = "ZeRO-3"
        jobs.append(row | {"kind": kind})
    return jobs


# ---- Memory of hosts ----

MB = 10**6


def host_memory() -> str:
    """Return the host memory that each rank took to load a model and to resume, by YAML.

    The unit is the size of the model in fp32.
    """
    rows = []
    measured = sorted(rows_of("memory", "loading"), key=place_of)
    for row in sorted(measured, key=lambda row: row["ranks"]):
        copies = []
        for kind in ("loading", "resuming"):
            copies.append(" ".join(f"{size:.2f}" for size in row.get(kind, [])))
        rows.append([yaml_of(row), row["ranks"], *copies])
    columns = ["YAML", "ranks", "loading: model sizes, by rank", "resuming: the same"]
    return table(columns, rows)


def checkpoint_memory() -> str:
    """Return the MB that each rank took to save, beside what the first may take, by YAML.

    It may take its share, which is all of the folder, and the largest tensor.
    """
    rows = []
    for row in sorted(rows_of("memory", "checkpoint"), key=place_of):
        cells = []
        for kind in ("checkpoint", "folder"):
            saved = row[kind]
            bound = saved["shares"][0] + saved["largest"]
            grown = " ".join(f"{size / MB:.0f}" for size in saved["grown"])
            cells += [grown, f"{bound / MB:.0f}"]
        rows.append([yaml_of(row), row["ranks"], *cells])
    columns = ["YAML", "ranks", "checkpoint: MB, by rank", "bound of rank 0"]
    return table([*columns, "folder: the same", "bound of rank 0"], rows)


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
    for row in rows_of("families"):
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
    finished = [run for run in rows_of("parity") if run["verdict"] == "ok"]
    interrupted, _ = trials_of(*INTERRUPTED)
    kills, lost = trials_of("random kills")
    beside_saves, lost_there = trials_of("random kills, --async_save")
    tracked = rows_of("planner", "config")
    drawn = [job["error"] for job in rows_of("planner", "kind") if job["kind"] == "drawn"]
    errors = [job["error"] for job in tracked]
    on_ranks = errors_text(errors, "jobs, every YAML but EP's and PP's on two to eight ranks")
    tiny = measured_families()
    first = decimal(max(row["first"] for row in tiny))
    rows = [
        (
            f"Every strategy gives the same loss: {len(runs)} runs, {len(recipes)} recipes, "
            f"{len(configs)} multi-GPU YAMLs",
            f"largest relative difference from a single-process run: {difference}",
            decimal(usual_bounds()["loss"]),
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
            "Planned peak memory equals the measured tensors",
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
    trials = [trial for trial in rows_of("faults") if trial["group"] in groups]
    tried = sum(trial["count"] for trial in trials)
    return tried, math.ceil(max(trial["figure"] for trial in trials))


def errors_text(errors: Sequence[float], kind: str) -> str:
    """Return how many plans there are, the mean size of their errors, and the largest."""
    worst = max(map(abs, errors))
    return f"{len(errors)} {kind}: mean error {mean_size(errors):.2%}, largest {worst:.2%}"


# ---- The documents ----

DIFFERENCES = "differences from an uninterrupted run: {}"
LOSS = "largest relative difference in loss: {}"
GROUPS_OF_FAULTS = {  # {group of evidence/test_faults.py: (what was done, its worst outcome)}
    "every step": ("stopped in each step: one process, DDP, FSDP2", DIFFERENCES),
    "resume": ("stopped and continued under every YAML: full, LoRA, nf4 LoRA", DIFFERENCES),
    "five": ("five interruptions in one epoch", DIFFERENCES),
    "signals": ("SIGTERM, SIGUSR1, SIGINT to one rank, to all, to a process group", DIFFERENCES),
    "twice": ("two signals, or a signal, and then `kill -9`", DIFFERENCES),
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
        trials = [row for row in rows_of("faults") if row["group"] == group]
        if trials:
            worst = Decimal(f"{max(row['figure'] for row in trials):.2g}")
            tried = sum(row["count"] for row in trials)
            lines.append([what, f"{tried:,}", outcome.format(f"{worst:f}")])
    return table(["what was done", "trials, all as promised", "worst outcome"], lines)


BLOCKS: dict[str, Callable[[], str]] = {
    "parity": parity,
    "shares": shares,
    "proof": proof,
    "faults": faults,
    "planner": planner,
    "host_memory": host_memory,
    "checkpoint_memory": checkpoint_memory,
    "families": families,
    **tables_speed.BLOCKS,
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
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
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
