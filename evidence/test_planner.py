# SPDX-License-Identifier: Apache-2.0
"""The planned peak of a step against real tensors, in one process and under every YAML.

    pytest evidence/test_planner.py --all -n 2                     # two hours on two cores
    pytest evidence/test_planner.py --all -k "one_thing or drawn"  # in one process: ten minutes
    pytest evidence/test_planner.py --all -k "ranks and fsdp2_cp"

In one process a cell runs two optimizer steps of a random model with the recipe's own loss and
optimizer, in fp32, and torch's MemTracker follows the second. Some cells change one thing at a
time, the others are drawn at random, so that they are not hand-picked. Shapes that are too large
to run here compare the planner's two methods with each other. On ranks a rehearsal takes three
steps, and every rank tracks the third (peak_probe.py). A rank's planned peak counts its device and
its host together, since on CPU ranks they are one. Nothing in the planner is fitted to these.
"""

import json
import random
import string
import sys

import pytest
import yaml
from transformers import AutoConfig, AutoTokenizer

import planner_jobs
from job import CONFIGS, ROOT, make_model, output_of
from peak_probe import STEPS
from planner.closed_form import closed_form
from planner.errors import UnplannableError
from planner.plan import IN_TWO_PARTS, Plan
from planner.recipe import labels_of
from planner.request import Batch
from planner.trace import measure, refuse_untraceable, simulate
from planner_jobs import BASE, CHECKPOINTED, JOBS, LONGEST, MIXTURE, MODEL, ONE_THING, WHOLE, Mesh
from test_parity import EXPERTS, MESHES, configs, ranks_of

METHODS = ("closed form", "traced")
BOUND = 0.05  # of the peak; the mean is below 0.2 %

# ---- In one process ----

# Llama with 1, 8 and 70 billion parameters
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES = {
    "1B": dict(zip(SIZES, (2048, 8192, 16, 32), strict=True), tie_word_embeddings=True),
    "8B": dict(zip(SIZES, (4096, 14336, 32, 32), strict=True)),
    "70B": dict(zip(SIZES, (8192, 28672, 80, 64), strict=True)),
}
BF16 = {"mixed_precision": "bf16"}
FSDP2 = BF16 | {"engine": "fsdp2"}
ON_8 = FSDP2 | {"ranks": 8, "shards": 8}
LORA = ["--use_peft", "--dtype", "bfloat16"]
QLORA = [*LORA, "--load_in_4bit", *CHECKPOINTED]
LARGE = [
    ("1B", [], BF16),
    ("1B", ["--dtype", "bfloat16", *CHECKPOINTED], {}),
    ("8B", [], ON_8),
    ("8B", CHECKPOINTED, ON_8),
    ("8B", LORA, BF16),
    ("8B", QLORA, BF16),
    ("8B", [*QLORA, *WHOLE], BF16),
    ("8B", [*QLORA, *WHOLE], ON_8),
    ("70B", CHECKPOINTED, FSDP2 | {"ranks": 64, "shards": 64}),
    ("70B", CHECKPOINTED, FSDP2 | {"ranks": 1024, "shards": 1024}),
    ("70B", QLORA, ON_8),
]


def cells():
    """Return the cells that run, as parameters of a test: whole but for the first two."""
    found = [("one thing", BASE | change) for change in ONE_THING]
    found += [("drawn", cell) for cell in planner_jobs.drawn(24, seed=6)]
    parameters = []
    for number, (kind, cell) in enumerate(found):
        marks = [pytest.mark.whole] if number > 1 else []
        name = f"{kind.replace(' ', '_')}-{number}"
        parameters.append(pytest.param(kind, cell, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(("kind", "cell"), cells())
def test_peak(kind, cell, record):
    args = planner_jobs.training_arguments(cell.get("flags", []))
    config = planner_jobs.config_of(cell)
    tokens = cell["lines"] * cell["length"]
    supervised = max(int(tokens * cell.get("supervised_share", 1.0)), 1)
    batch = Batch(cell["lines"], cell["length"], supervised, args.packing)
    plan = Plan(args)
    measured = sum(measure(plan, config, batch).values())
    sizes = (closed_form(plan, config, batch)[0], simulate(plan, config, batch))
    errors = [sum(planned.values()) / measured - 1 for planned in sizes]
    record(**cell, **dict(zip(METHODS, errors, strict=True)), measured=measured, kind=kind)
    assert all(abs(error) < BOUND for error in errors), errors


@pytest.mark.whole
@pytest.mark.parametrize(("model", "flags", "how"), LARGE)
def test_shape(model, flags, how, record):
    args = planner_jobs.training_arguments([*flags, "--max_length", "4096"])
    config = AutoConfig.for_model(
        "llama", vocab_size=128256, num_key_value_heads=8, **SHAPES[model]
    )
    plan, batch = Plan(args, **how), Batch(1, 4096, 4096)
    traced = sum(simulate(plan, config, batch).values())
    error = sum(closed_form(plan, config, batch)[0].values()) / traced - 1
    record(model=model, flags=flags, **how, **{"traced bytes": traced, "closed form": error})
    record(kind="shapes")
    assert abs(error) < BOUND, error


# ---- On ranks ----

# (ranks, ranks of a pipeline, schedule, whether the stages are sharded)
PIPELINES = [
    (2, 2, "1f1b", False),
    (2, 2, "gpipe", False),
    (2, 2, "interleaved", False),
    (2, 2, "interleaved_zero_bubble", False),
    (2, 2, "zbv", False),
    (4, 4, "1f1b", False),
    (4, 2, "1f1b", False),
    (4, 2, "1f1b", True),
    (4, 2, "interleaved", True),
    (4, 2, "zbv", True),
]
ROWS = 100
SHORT_ROWS = 1200  # more than STEPS steps of any packed job take
IGNORED = -100  # the label of a token that the loss leaves out


def meshes():
    """Return the meshes in which ranks share rows, experts or a model's layers."""
    shared = [Mesh(*mesh) for mesh in MESHES[:12]]
    experts = [Mesh(config, ranks, ep=ep) for config, ranks, ep in EXPERTS[:5]]
    staged = [Mesh("pp", ranks, (), 1, *how) for ranks, *how in PIPELINES]
    return [*shared, *experts, *staged]


def jobs_under(mesh):
    """Return what is trained under a mesh.

    LoRA is where its adapters are split like their matrices, or beside experts that are spread.
    Rows are packed where ranks compute them apart, and in pipelines, where each micro-batch in
    flight has masks of its own. One pipeline under 1f1b shows what each flag changes by itself; the
    others show all flags together, without checkpoints where they cannot be planned.
    """
    if mesh.pp > 1:
        if mesh.schedule == "1f1b" and mesh.ranks == 2:
            return ["plain", "accumulation", "bf16", "packed", "checkpointed"]
        suffix = "" if mesh.schedule in IN_TWO_PARTS else " checkpointed"
        return ["plain", f"together{suffix}"]
    jobs = ["plain", "short", "checkpointed"]
    if mesh.ep > 1 or mesh.config.endswith("tp"):
        jobs.append("LoRA")
    if mesh.config == "deepspeed_ulysses":
        jobs.append("packed")
    return jobs


def places():
    """Return each (job, mesh) that is launched, as parameters: whole but for one.

    Where each rank has rows of its own, packed rows change nothing that one process does not show.
    """
    found = []
    for name, job in JOBS.items():
        if not job.is_packed:
            for config in configs():
                if config != "fsdp1_no_shard" or "--use_peft" not in job.flags:  # is refused
                    found.append((name, Mesh(config, ranks_of(config, 2))))
    found += [(name, mesh) for mesh in meshes() for name in jobs_under(mesh)]
    return [pytest.param(*place, id=name_of(*place), marks=marks_of(*place)) for place in found]


def name_of(job, mesh):
    """Return the name of what is launched."""
    words = [mesh.config, job, f"{mesh.ranks} ranks", *mesh.sizes]
    if mesh.ep > 1:
        words.append(f"ep_size={mesh.ep}")
    if mesh.pp > 1:
        words += [f"pp_size={mesh.pp}", mesh.schedule, *["sharded"] * mesh.shards_stages]
    return "-".join(words)


def marks_of(job, mesh):
    """Return the marks of what is launched."""
    return [pytest.mark.whole] * ((job, mesh.config) != ("short", "deepspeed_zero2"))


@pytest.fixture(scope="session")
def tiny(once):
    """A folder with the models and rows, so that each batch of a job has the same shape.

    All rows are longer than LONGEST, but those that are packed fill their sequences. The letters of
    the mixture's rows are drawn, so that its routers send about as many tokens to each expert.
    """

    def fill(folder):
        drawn = random.Random(0)
        texts = {"llama": ["again and again " * (LONGEST // 16)] * ROWS}
        letters = string.ascii_letters
        texts["mixtral"] = ["".join(drawn.choices(letters, k=2 * LONGEST)) for _ in range(ROWS)]
        for maker, shape in (("llama", MODEL), ("mixtral", MIXTURE)):
            words = [word for name, size in shape.items() for word in (f"--{name}", str(size))]
            own = make_model(folder / maker, [maker, *words])
            rows = [{"prompt": "Say:", "completion": text} for text in texts[maker]]
            (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        short = short_row(folder / "llama", planner_jobs.LONG // JOBS["packed"].rows)
        (folder / "llama" / "short_rows.jsonl").write_text(f"{short}\n" * SHORT_ROWS)

    return once("planner", fill)


def labels(own, row, length):
    """Return the labels of a row of the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(own / "model", trust_remote_code=False)
    return labels_of(row, tokenizer, length)


def short_row(own, length):
    """Return a row of a number of tokens as the recipe sees it; its tokenizer splits digits."""
    others = len(labels(own, {"prompt": "Say:", "completion": "7"}, 2 * length)) - 1
    row = {"prompt": "Say:", "completion": "7" * (length - others)}
    assert len(labels(own, row, 2 * length)) == length
    return json.dumps(row)


def launched(mesh, name, own, folder):
    """Launch a job; return its row, with the peak of each rank in bytes.

    Args:
        own: the folder of its model and rows.
        folder: a new folder for the run.
    """
    job = JOBS[name]
    rows = own / ("short_rows.jsonl" if job.is_packed else "rows.jsonl")
    peaks, report = folder / "peaks", folder / "report.json"
    peaks.mkdir(parents=True)
    content = planner_jobs.content_of(mesh.config, mesh.sizes) | {"num_processes": mesh.ranks}
    (folder / "mesh.yaml").write_text(yaml.safe_dump(content))
    yaml_file = folder / "mesh.yaml" if mesh.sizes else CONFIGS / f"{mesh.config}.yaml"
    command = [sys.executable, ROOT / "scripts" / "rehearse.py", "--num_processes", mesh.ranks]
    command += ["--report", report, "--mixed_precision", job.precision, "--config_file", yaml_file]
    command += [ROOT / "recipes" / mesh.recipe, *job.words_under(mesh), "--max_steps", STEPS]
    command += ["--save_steps", 0, "--eval_strategy", "no", "--model_name_or_path", own / "model"]
    command += ["--dataset_name", rows, "--output_dir", folder / "run"]
    probe = f"{ROOT / 'evidence' / 'peak_probe.py'}:{peaks}"
    code, output = output_of(command, REHEARSAL_PROBE=probe)
    assert code == 0, output[-3000:]
    found = [json.loads((peaks / str(rank)).read_text()) for rank in range(mesh.ranks)]
    # The first token of a row is never supervised
    length = job.length // job.rows
    first = json.loads(rows.read_text().splitlines()[0])
    supervised = job.rows * sum(label != IGNORED for label in labels(own, first, length)[1:])
    row = {
        "config": mesh.config,
        "job": name,
        "ranks": mesh.ranks,
        "supervised": planner_jobs.sequences_under(mesh) * supervised,
        "measured": [rank["peak"] for rank in found],
    }
    if mesh.ep > 1:
        # A forward pass exchanges lines twice in each layer: to their experts, and back
        exchanges = 2 * MIXTURE["num_hidden_layers"]
        row["arrived"] = [rank["exchanged"][:exchanges:2] for rank in found]
        row["ep"] = mesh.ep
    if (mesh.config, mesh.ranks) not in [(one, ranks_of(one, 2)) for one in configs()]:
        row |= {"sizes": list(mesh.sizes)} | held_in_places(mesh, json.loads(report.read_text()))
    return row


def held_in_places(mesh, report):
    """Return the bytes of each class on the fullest rank, in a pipeline on that of each place."""
    per_place = mesh.ranks // mesh.pp  # ranks with the same stages are neighbors
    held = [{} for _ in range(mesh.pp)]
    for found in report["rows"]:
        of_place = held[found["rank"] // per_place if mesh.pp > 1 else 0]
        name = found["class"]
        of_place[name] = max(of_place.get(name, 0), found["held_bytes"])
    if mesh.pp == 1:
        return {"held": held[0]}
    how = {"pp": mesh.pp, "schedule": mesh.schedule, "shards_stages": mesh.shards_stages}
    return how | {"held": held}


def traced_error(row):
    """Return the error of the trace, None without one: it has whole models and no DeepSpeed."""
    if "sizes" not in row or "pp" in row:
        return None
    plan, shape = planner_jobs.plan_of_row(row), planner_jobs.model_of_row(row)
    batch = planner_jobs.batch_of_row(row)
    try:
        refuse_untraceable(plan, shape, batch)
    except UnplannableError:
        return None
    return sum(simulate(plan, shape, batch).values()) / max(row["measured"]) - 1


@pytest.mark.parametrize(("job", "mesh"), places())
def test_peak_of_ranks(job, mesh, tiny, tmp_path, record):
    own = tiny / ("mixtral" if mesh.ep > 1 else "llama")
    row = planner_jobs.compare(launched(mesh, job, own, tmp_path / "run"))
    traced = traced_error(row)
    record(**row, **({} if traced is None else {"traced": traced}))
    assert abs(row["error"]) < BOUND and abs(row["beside_bucket"]) < BOUND, row


def test_every_place_has_a_row():
    rows = [planner_jobs.mesh_of_row(row) for row in planner_jobs.tracked_rows()]
    assert sorted(rows) == sorted(place.values[1] for place in places())
