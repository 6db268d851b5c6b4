# SPDX-License-Identifier: Apache-2.0
"""Compare the planner's peaks under each YAML with those of live tensors on real CPU ranks.

Each launch rehearses three optimizer steps of the recipe, and every rank measures the third
(peak_probe.py). A rank's planned peak counts its device and its host together, since on CPU ranks
they are one.
"""

import itertools
import json
import random
import string
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from measured.accuracy import METHODS
from measured.activations import row_of
from measured.peak_probe import STEPS
from measured.rehearsals import (
    Mesh,
    config_names,
    content_of,
    expert_meshes,
    make_model,
    meshes,
    pipelines,
    ranks_of,
    rehearse,
    report_of,
    versions,
    words_of,
)
from measured.tracked_jobs import JOBS, LONGEST, PACKED, Job, sequences_under
from paths import CONFIGS
from planner import recipe, yaml_files
from planner.autograd import FP32
from planner.closed_form import closed_form
from planner.errors import UnplannableError
from planner.ledger import Sizes, both
from planner.pipeline import peaks_of_ranks
from planner.plan import IN_TWO_PARTS, Plan, plan_of
from planner.request import Batch
from planner.trace import refuse_untraceable, simulate
from planner.zero import BUCKET

Row = dict[str, Any]

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "max_position_embeddings": PACKED,
}
# The mixture whose experts are spread over ranks: an expert is an MLP as in MODEL, but narrower
MIXTURE = MODEL | {"intermediate_size": 512, "num_hidden_layers": 2, "num_local_experts": 8}
MIXTURES = "mixture"  # the folder of that model and its rows
ROWS = 100
SHORT_ROWS = 1200  # more than STEPS steps of any packed job take
MOST_RANKS = 8  # larger meshes are not launched
IGNORED = -100  # the label of a token that the loss leaves out
FLAGS = {"max_steps": STEPS, "save_steps": 0, "eval_strategy": "no"}  # for the recipe


# ---- Measured ----
def make_model_and_rows(folder: Path) -> None:
    """Write the models and rows, so that each batch of a job has the same shape.

    All rows are longer than LONGEST, but those that are packed fill their sequences. The letters of
    the mixture's rows are drawn, so that its routers send about as many tokens to each expert.
    """
    make_model(folder, MODEL)
    write_rows(folder, ["again and again " * (LONGEST // 16)] * ROWS)
    write_short_rows(folder)
    mixture = folder / MIXTURES
    make_model(mixture, MIXTURE, kind="mixtral")
    generator = random.Random(0)
    drawn = [generator.choices(string.ascii_letters, k=2 * LONGEST) for _ in range(ROWS)]
    write_rows(mixture, ["".join(letters) for letters in drawn])


def write_rows(folder: Path, completions: list[str]) -> None:
    """Write rows with these completions into a folder."""
    rows = [json.dumps({"prompt": "Say:", "completion": text}) for text in completions]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")


def write_short_rows(folder: Path) -> None:
    """Write rows that fill the sequences of the packed jobs for the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    [length] = {job.length // job.rows for job in JOBS.values() if job.is_packed}
    line = json.dumps(row_of(length, tokenizer))
    (folder / "short_rows.jsonl").write_text(f"{line}\n" * SHORT_ROWS)


def rows_of_job(folder: Path, job: Job) -> Path:
    """Return the file of a job's rows in the folder of its model."""
    return folder / ("short_rows.jsonl" if job.is_packed else "rows.jsonl")


def measure(config: str, job: str, tiny: Path, folder: Path) -> Row:
    """Launch a job under a YAML; return its row, with the peak of each rank in bytes.

    tiny: the folder of `make_model_and_rows`. folder: a new folder for the run.
    """
    return launched(Mesh(config, ranks_of(config, 2)), job, tiny, folder)


def measure_mesh(mesh: Mesh, job: str, tiny: Path, folder: Path) -> Row:
    """Launch a job under a mesh; return its row, with the bytes of each class on the fullest rank.

    In a pipeline that is the fullest rank of each place, since stages differ.

    tiny, folder: as for `measure`.
    """
    row = launched(mesh, job, tiny, folder) | {"sizes": list(mesh.sizes)}
    report = json.loads(report_of(folder / "peaks").read_text())["rows"]
    if mesh.pp > 1:
        row |= {"pp": mesh.pp, "schedule": mesh.schedule, "shards_stages": mesh.shards_stages}
        per_place = mesh.ranks // mesh.pp  # ranks with the same stages are neighbors
        places = range(mesh.pp)
        parts = [[row for row in report if row["rank"] // per_place == place] for place in places]
        return row | {"held": [held_at_most(part) for part in parts]}
    if mesh.ep > 1:
        row["ep"] = mesh.ep
    return row | {"held": held_at_most(report)}


def held_at_most(report: Iterable[Row]) -> dict[str, int]:
    """Return the bytes of each class on the rank of a shard report that holds most of it."""
    held: dict[str, int] = {}
    for found in report:
        name = found["class"]
        held[name] = max(held.get(name, 0), found["held_bytes"])
    return held


def launched(mesh: Mesh, job: str, tiny: Path, folder: Path) -> Row:
    """Launch a job; return its row, with the peak of each rank in bytes."""
    if mesh.ep > 1:
        tiny = tiny / MIXTURES
    flags = FLAGS | {
        "model_name_or_path": tiny / "model",
        "dataset_name": rows_of_job(tiny, JOBS[job]),
        "output_dir": folder / "run",
    }
    found = rehearse(
        mesh,
        JOBS[job].words_under(mesh) + words_of(flags),
        variable="REHEARSAL_PEAKS",
        folder=folder / "peaks",
        precision=JOBS[job].precision,
    )
    row = {
        "config": mesh.config,
        "job": job,
        "ranks": mesh.ranks,
        "supervised": sequences_under(mesh) * supervised_tokens(tiny, JOBS[job]),
        "measured": [rank["peak"] for rank in found],
    }
    if mesh.ep > 1:
        # A forward pass exchanges lines twice in each layer: to their experts, and back
        exchanges = 2 * MIXTURE["num_hidden_layers"]
        row["arrived"] = [rank["exchanged"][:exchanges:2] for rank in found]
    return row


def supervised_tokens(folder: Path, job: Job) -> int:
    """Return the supervised tokens of a sequence; the first one of a row is never supervised."""
    line, *_ = rows_of_job(folder, job).read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=False)
    length = job.length // job.rows
    labels = recipe.labels_of(json.loads(line), tokenizer, length)
    assert len(labels) == length
    return job.rows * sum(label != IGNORED for label in labels[1:])


# ---- Planned ----
def planned(row: Row) -> Sizes:
    """Return {category: bytes} of the fullest rank of a measured row, device and host together.

    Ranks that share experts differ by the lines that arrived at them.
    """
    batch = batch_of_row(row)
    batches = [replace(batch, arrived=tuple(lines)) for lines in row.get("arrived", [()])]
    ranks = [planned_rank(row, batch) for batch in batches]
    return max(ranks, key=lambda sizes: sum(sizes.values()))


def planned_rank(row: Row, batch: Batch) -> Sizes:
    """Return {category: bytes} of a rank of a measured row that has this batch."""
    return both(*closed_form(plan_of_row(row), model_of_row(row), batch))


def planned_places(row: Row) -> list[Sizes]:
    """Return {category: bytes} of each place in a pipeline of a measured row."""
    peaks = peaks_of_ranks(plan_of_row(row), model_of_row(row), batch_of_row(row))
    return [both(peak.device, peak.host) for peak in peaks]


def batch_of_row(row: Row) -> Batch:
    """Return the micro-batch of a measured row, or all that goes through a pipeline at a time."""
    job = JOBS[row["job"]]
    sequences = sequences_under(mesh_of_row(row))
    return Batch(sequences, job.length, row["supervised"], job.is_packed)


def model_of_row(row: Row) -> PretrainedConfig:
    """Return the config of the model of a measured row."""
    if "ep" in row:
        return AutoConfig.for_model("mixtral", **MIXTURE)
    return AutoConfig.for_model("llama", **MODEL)


def mesh_of_row(row: Row) -> Mesh:
    """Return the mesh of a measured row."""
    pipeline = {name: row[name] for name in ("pp", "schedule", "shards_stages") if name in row}
    sizes = tuple(row.get("sizes", ()))
    return Mesh(row["config"], row["ranks"], sizes, row.get("ep", 1), **pipeline)


def plan_of_row(row: Row) -> Plan:
    """Return the plan of a measured row, as it runs on CPU ranks."""
    job = JOBS[row["job"]]
    mesh = mesh_of_row(row)
    args = recipe.parse_words(["--eval_strategy", "no", *job.words_under(mesh)], mesh.recipe)
    config = yaml_files.read(CONFIGS / f"{row['config']}.yaml")
    if mesh.sizes:
        config = yaml_files.read_content(content_of(row["config"], mesh.sizes))
    machines = 1
    if row["config"] == "fsdp1_hybrid_shard":
        machines = 2  # The rehearsal simulates them.
    plan = plan_of(args, config, row["ranks"], machines, job.precision)
    if plan.engine == "fsdp2":  # On CPU ranks the shards on the host are those of the device.
        return replace(plan, offloads_parameters=False, offloads_optimizer=False)
    return plan


def compare(row: Row) -> Row:
    """Return a measured row with its planned peak and the relative error.

    ZeRO's bucket of 2 GB (in fp32) is the same for every model and would hide all other errors. The
    second error, `beside_bucket`, leaves it out. The error of ranks that share experts is that of
    the plan for the lines that arrived; `even` is that of the plan for equally many on each rank,
    which plan_memory.py makes.
    """
    if "pp" in row:
        return compare_places(row)
    size = sum(planned(row).values())
    measured = max(row["measured"])
    bucket = bucket_of(plan_of_row(row))
    if min(size, measured) < bucket:
        bucket = 0
    compared = row | {
        "planned": size,
        "error": size / measured - 1,
        "beside_bucket": (size - bucket) / (measured - bucket) - 1,
    }
    if "arrived" in row:
        even = planned_rank(row, batch_of_row(row))
        compared["even"] = sum(even.values()) / measured - 1
    return compared


def compare_places(row: Row) -> Row:
    """Return a measured row of a pipeline with the planned peak of each of its places.

    The error is that of the place which is furthest off.
    """
    sizes = [sum(place.values()) for place in planned_places(row)]
    per_place = row["ranks"] // row["pp"]
    errors = []
    for place, size in enumerate(sizes):
        ranks = row["measured"][place * per_place :][:per_place]
        errors.append(size / max(ranks) - 1)
    error = max(errors, key=abs)
    return row | {"planned": sizes, "error": error, "beside_bucket": error}


def with_trace(row: Row) -> Row:
    """Return a compared row of a mesh with the relative error of the trace too, if it has one.

    A trace has whole models, of which a rank of a pipeline has stages.
    """
    if "sizes" not in row or "pp" in row:
        return row
    plan = plan_of_row(row)
    shape = model_of_row(row)
    batch = batch_of_row(row)
    try:
        refuse_untraceable(plan, shape, batch)
    except UnplannableError:
        return row
    _, traced = METHODS
    size = sum(simulate(plan, shape, batch).values())
    return row | {traced: size / max(row["measured"]) - 1}


def bucket_of(plan: Plan) -> int:
    """Return the bytes of ZeRO's bucket; stage 3 has it in the precision of reductions, fp32."""
    if plan.stage == 0:
        return 0
    if plan.stage == 3 or plan.low_itemsize is None:
        return BUCKET * FP32
    return BUCKET * plan.low_itemsize


def kept_rows(path: Path) -> list[Row]:
    """Return the rows of a file, or none if other versions of the libraries measured them."""
    if not path.is_file():
        return []
    before = json.loads(path.read_text())
    if before.get("versions") != versions():
        return []
    return before["rows"]


def place_of(row: Row) -> tuple:
    """Return what a row measures: its job, and its YAML or mesh."""
    if "sizes" in row:
        return row["job"], *mesh_of_row(row)
    return row["job"], row["config"]


def all_meshes() -> list[Mesh]:
    """Return every mesh under which jobs are launched."""
    return [*meshes(MOST_RANKS), *expert_meshes(), *pipelines()]


def jobs_under(mesh: Mesh) -> list[str]:
    """Return what is trained under a mesh in which ranks share rows, experts or a model's layers.

    LoRA is where its adapters are split like their matrices, or beside experts that are spread.
    Rows are packed where ranks compute them apart, and in pipelines, where each micro-batch in
    flight has masks of its own.
    """
    if mesh.pp > 1:
        return jobs_in_pipelines(mesh)
    if mesh.ep > 1:
        return ["plain", "short", "checkpointed", "LoRA"]
    jobs = ["plain", "short", "checkpointed"]
    if mesh.config.endswith("tp"):
        jobs.append("LoRA")
    if mesh.config == "deepspeed_ulysses":
        jobs.append("packed")
    return jobs


def jobs_in_pipelines(mesh: Mesh) -> list[str]:
    """Return what is trained in pipelines.

    One pipeline under 1f1b shows what each flag changes by itself. The others show all flags
    together, without checkpoints where they cannot be planned.
    """
    if mesh.schedule == "1f1b" and mesh.ranks == 2:
        return ["plain", "accumulation", "bf16", "packed", "checkpointed"]
    if mesh.schedule in IN_TWO_PARTS:
        return ["plain", "together"]
    return ["plain", "together checkpointed"]


def tracked_places() -> list[tuple[str, Mesh]]:
    """Return each (job, mesh) that is launched."""
    return [(job, mesh) for mesh in all_meshes() for job in jobs_under(mesh)]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file, one per line, replacing those of the same job and YAML.

    Rows that other versions of the libraries measured are dropped.
    """
    by_place = {place_of(row): row for row in [*kept_rows(path), *rows]}
    order = [*itertools.product(JOBS, config_names())]
    order += [(job, *mesh) for job, mesh in tracked_places()]
    found = [by_place[place] for place in order if place in by_place]
    lines = ",\n".join(json.dumps(row) for row in found)
    head = f'{{"versions": {json.dumps(versions())}, "rows": ['
    path.write_text(f"{head}\n{lines}\n]}}\n")
