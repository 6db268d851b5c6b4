# SPDX-License-Identifier: Apache-2.0
"""Planned peak memory equals that of real tensors, in one process and on CPU ranks.

    pytest evidence/test_planner.py --all

A cell is a model with flags. It runs with real tensors on the CPU, in fp32, whose live bytes the
planner's own watch counts. Some cells change one thing at a time, the others are drawn at random,
so that they are not hand-picked. On ranks a rehearsal takes three steps, and every rank tracks the
third (peak_probe.py). A rank's planned peak counts its device and its host together, since on CPU
ranks they are one. Nothing in the planner is fitted to these.
"""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import llama
import planner_jobs
from core.chat import ChatTemplate
from core.engine import Layout
from core.loss import LossInHead
from core.model import make_adamw
from job import ROOT, make_model, output_of, rehearsal
from peak_probe import STEPS
from planner.engines import Profiles
from planner.model import loss_of
from planner.plan import Batch, Plan, first_rank
from planner.trace import Live
from planner_jobs import BASE, JOBS, LONGEST, MODEL, ONE_THING, SEQUENCES, Mesh
from test_parity import MESHES, configs, ranks_of

BOUND = 0.005  # of the peak in one process
SHORT = ("one_thing-0", "one_thing-1", "deepspeed_zero2-short-2 ranks")

# ---- In one process ----


def cells():
    """Return the cells that run, as parameters of a test."""
    found = [("one thing", BASE | change) for change in ONE_THING]
    found += [("drawn", cell) for cell in planner_jobs.drawn(24, seed=6)]
    names = [f"{kind.replace(' ', '_')}-{number}" for number, (kind, _) in enumerate(found)]
    return [pytest.param(*pair, id=name) for pair, name in zip(found, names, strict=True)]


def measured(plan, batch):
    """Return the bytes of real tensors at the peak of a second step, which allocates no state."""
    with first_rank(plan) as layout:
        model = llama.load_model(plan.args, Layout(layout.accelerator)).train()
        optimizer = make_adamw(model, plan.args)
        token_loss = LossInHead(model, plan.args.max_logits_mib, torch.device("cpu"))

        def step():
            for _ in range(plan.args.gradient_accumulation_steps):
                with loss_of(plan, model, token_loss, layout, batch) as loss:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        live = Live()
        states = [state for one in optimizer.state.values() for state in one.values()]
        for tensor in [*model.parameters(), *states]:
            live.see(tensor)
        with live:
            step()
    return live.lap()[0]


@pytest.mark.parametrize(("kind", "cell"), cells())
def test_peak(kind, cell, record, tmp_path):
    config = planner_jobs.config_of(cell)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = planner_jobs.training_arguments(tmp_path, cell.get("flags", []))
    tokens = cell["lines"] * cell["length"]
    supervised = max(int(tokens * cell.get("supervised_share", 1.0)), 1)
    batch = Batch(cell["lines"], cell["length"], supervised, args.packing)
    size = measured(Plan(args), batch)
    planned = Profiles().held(Plan(args), batch).peak
    error = planned / size - 1
    record(**cell, measured=size, planned=planned, error=error, kind=kind)
    assert abs(error) < BOUND, error


# ---- On ranks ----

ROWS = 100
SHORT_ROWS = 1200  # more than STEPS steps of any packed job take
IGNORED = -100  # the label of a token that the loss leaves out


def jobs_under(mesh):
    """Return what is trained under a mesh in which ranks share rows."""
    jobs = ["plain", "short", "checkpointed"]
    if mesh.config.endswith("tp"):
        jobs.append("LoRA")
    if mesh.config == "deepspeed_ulysses":
        jobs.append("packed")
    return jobs


def places():
    """Return each (job, mesh) that is launched, as parameters.

    Where each rank has rows of its own, packed rows change nothing that one process does not show.
    """
    found = []
    for name, job in JOBS.items():
        if not job.is_packed:
            for config in configs():
                if config != "fsdp1_no_shard" or "--use_peft" not in job.flags:  # is refused
                    found.append((name, Mesh(config, ranks_of(config, 2))))
    meshes = [Mesh(*mesh) for mesh in MESHES[:12]]
    found += [(name, mesh) for mesh in meshes for name in jobs_under(mesh)]
    parameters = []
    for job, mesh in found:
        name = "-".join([mesh.config, job, f"{mesh.ranks} ranks", *mesh.sizes])
        parameters.append(pytest.param(job, mesh, id=name))
    return parameters


@pytest.fixture(scope="session")
def tiny(once):
    """A folder with the model and rows, so that each batch of a job has the same shape.

    All rows are longer than LONGEST, but those that are packed fill their sequences.
    """

    def fill(folder):
        words = [word for name, size in MODEL.items() for word in (f"--{name}", str(size))]
        own = make_model(folder / "llama", ["llama", *words])
        rows = [{"prompt": "Say:", "completion": "again and again " * (LONGEST // 16)}] * ROWS
        (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        short = short_row(own, planner_jobs.LONG // JOBS["packed"].rows)
        (own / "short_rows.jsonl").write_text(f"{short}\n" * SHORT_ROWS)

    return once("planner", fill)


def labels(own, row, length):
    """Return the labels of a row of the model in a folder."""
    tokenizer = AutoTokenizer.from_pretrained(own / "model", trust_remote_code=False)
    return llama.tokenize_row(row, ChatTemplate(tokenizer), length)["labels"]


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
    command = [*rehearsal(mesh.config, mesh.ranks, mesh.sizes, folder), "--report", report]
    command += [
        "--mixed_precision",
        job.precision,
        ROOT / "recipes" / mesh.recipe,
        *job.words,
        "--max_steps",
        STEPS,
    ]
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
        "supervised": SEQUENCES * supervised,
        "measured": [rank["peak"] for rank in found],
    }
    if mesh.sizes or mesh.config in {name for name, *_ in MESHES}:
        row["sizes"] = list(mesh.sizes)
    return row


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize(("job", "mesh"), places())
def test_peak_of_ranks(job, mesh, tiny, tmp_path, record):
    own = tiny / "llama"
    AutoConfig.for_model("llama", **MODEL).save_pretrained(tmp_path)
    row = planner_jobs.compare(launched(mesh, job, own, tmp_path / "run"), tmp_path, Profiles())
    record(**row)
    assert abs(row["error"]) < planner_jobs.bound_of(row), row


def test_every_place_has_a_row():
    rows = planner_jobs.tracked_rows()
    found = [(row["config"], row["ranks"], tuple(row.get("sizes", ()))) for row in rows]
    assert sorted(found) == sorted(tuple(place.values[1][:3]) for place in places())
