# SPDX-License-Identifier: Apache-2.0
"""Launch the real runs whose curves and output are drawn.

Each function launches runs in a folder and returns what is kept of them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from components.pipeline_kinds import KINDS
from paths import ROOT
from plotting.runs import read_run
from proof.compare import read_steps
from proof.faults import Fault
from proof.jobs import MAKERS, Run, configs, ranks_of, run_on_ranks
from proof.launch import (
    ENVIRONMENT,
    data_of,
    launch,
    make_model,
    rehearsal,
    write_with_sizes,
)
from proof.trials.lab import Lab
from proof.trials.outcome import unequal, verified
from proof.trials.trial import make_job
from rehearsal.rank import PARTS, STAGES, Probe
from test_quickstarts import read_taught

from .parts import Box, Span, find_box, find_row, lines_of_tokens, read_lines, spans_of
from .passes import duration_of, read_passes, shortest_batch
from .recordings import Recording

RESUMED_CONFIG = "fsdp2_full_shard"
RESUMED_FLAGS = ("--max_steps", "40", "--num_train_epochs", "4", "--save_steps", "10")
KILLED_IN_STEP = 27  # between the checkpoints of steps 20 and 30
COMPARED_RATES = ("3e-4", "1e-3", "3e-3")
COMPARED_FLAGS = (
    "--max_steps 150 --per_device_train_batch_size 32 --warmup_steps 0.1 --eval_strategy steps "
    "--eval_steps 30 --predict_with_generate --num_predictions 100 --save_steps 0 "
    "--generation_max_new_tokens 24"
).split()
PIPELINE_RANKS = 2
PIPELINE_LAYERS = "8"
MICRO_BATCHES = "8"
PIPELINE_MODEL = (
    "--hidden_size 256 --intermediate_size 512 --num_attention_heads 4 --num_train_rows 4000"
).split()
# Packed sequences have one length, so that each micro-batch takes the same time
PIPELINE_FLAGS = "--packing --max_length 256 --max_steps 12 --eval_strategy no".split()
MESH_ROWS = 4  # a step has so many, however the ranks share them
MESH_MODEL = (
    "--hidden_size 320 --intermediate_size 640 --num_attention_heads 4 --num_key_value_heads 4 "
    "--num_hidden_layers 2"
).split()
ONE_STEP = "--max_steps 1 --save_steps 0 --eval_strategy no".split()
PIPELINES = 2  # the four ranks make so many, each of PIPELINE_RANKS
IN_PIPELINES = ("--pp_size", str(PIPELINE_RANKS))
IN_STAGES = partial(Run, "meshes", "pp", 4, 2, recipe="llama_pipeline")
PIPELINE_RUNS = (
    IN_STAGES(flags=IN_PIPELINES),
    IN_STAGES(flags=(*IN_PIPELINES, "--shard_stages")),
)
# YAML, ranks, rows of each batch, and sizes that are not the YAML's
MESHES = (
    ("ddp", 4, 1, ()),
    ("fsdp2_full_shard", 4, 1, ()),
    ("tp", 4, 4, ("tp_size=4",)),
    ("fsdp2_tp", 4, 2, ()),
    ("hsdp_tp", 8, 1, ()),
    ("fsdp2_cp", 4, 2, ()),
    ("hsdp_cp", 8, 1, ()),
    ("deepspeed_ulysses", 4, 2, ("dp_shard_size=2",)),
)
# The experts of a layer are drawn as the parts of one MLP
MIXTURE_MODEL = (
    "--hidden_size 320 --intermediate_size 128 --num_attention_heads 4 --num_key_value_heads 4 "
    "--num_hidden_layers 2 --num_local_experts 4"
).split()
MODELS = {"llama": MESH_MODEL, "mixtral": MIXTURE_MODEL}
EXPERT_RUNS = (
    Run("meshes", "ep", 4, 1, flags=("--ep_size", "4"), recipe="mixtral"),
    Run("meshes", "fsdp2_ep", 4, 1, flags=("--ep_size", "2"), recipe="mixtral"),
)
MATRICES = ("up_proj", "down_proj")  # as proof/part_probe.py, which imports torch
EXPERT = re.compile(r"model\.(layers\.\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[23])\.weight")
# {a matrix of an expert in files: its name here, and the dimension along which experts are joined}
OF_EXPERTS = {"w3": ("up_proj", 0), "w2": ("down_proj", 1)}
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colors and movements of a terminal's cursor
PROGRESS_BAR = re.compile(r"(.+?): +\d+%\|")


TAIL = 1500  # characters of a failed launch's output that are shown


class RecordingError(Exception):
    """A launch failed; the message says which one and ends with the end of its output."""


def curve_of(folder: Path) -> dict[str, list[float]]:
    """Return the steps and the losses, in nats per token, of a run's metrics.jsonl."""
    entries = read_steps(folder)
    return {
        "steps": [entry["step"] for entry in entries],
        "losses": [entry["loss"] for entry in entries],
    }


def record_parity(folder: Path) -> Recording:
    """Return the loss curve of the job of evidence/parity.py under every YAML.

    Raises RecordingError if a launch fails.
    """
    tiny = folder / "tiny"
    make_model(tiny, MAKERS["llama"])
    runs = {}
    for config in configs():
        run = run_on_ranks("strategies", config, ranks_of(config, 2))
        output_dir = folder / config
        code, output = launch(run, tiny, output_dir)
        if code:
            raise RecordingError(f"{config}.yaml ended with {code}: {output[-TAIL:]}")
        curve = curve_of(output_dir)
        runs[config] = {"ranks": run.ranks, **curve}
        last = curve["losses"][-1]
        print(f"parity: {config}, last loss {last}", flush=True)
    return {"runs": runs}


def record_resume(folder: Path) -> Recording:
    """Return the curves of a run that was killed, of its continuation, and of an unharmed run.

    Raises RecordingError if a launch ends in an unexpected way.
    """
    lab = Lab(folder)
    job = make_job(RESUMED_CONFIG)
    whole = lab.uninterrupted(job, flags=RESUMED_FLAGS)
    output_dir = folder / "killed"
    faults = [Fault("SIGKILL", "summed_loss", step=KILLED_IN_STEP)]
    ended = lab.run(job, output_dir, faults, flags=RESUMED_FLAGS)
    if ended.code == 0:
        raise RecordingError(f"the run was not killed: {ended.tail}")
    killed = curve_of(output_dir)
    checkpoint = max(verified(output_dir))
    ended = lab.run(job, output_dir, flags=RESUMED_FLAGS)
    if ended.code != 0:
        raise RecordingError(f"the continuation ended with {ended.code}: {ended.tail}")
    last = killed["steps"][-1]
    print(f"resume: killed after step {last}, checkpoint {checkpoint}", flush=True)
    return {
        "config": job.config,
        "ranks": job.ranks,
        "checkpoint": checkpoint,
        "killed": killed,
        "resumed": curve_of(output_dir),
        "uninterrupted": curve_of(whole),
        "unequal": unequal(output_dir, whole),
    }


def record_quickstart(folder: Path) -> Recording:
    """Return what `make quickstart` printed, its loss curve, and its score before and after.

    Raises RecordingError if it fails.
    """
    output_dir = folder / "quickstart"
    command = ["make", "--no-print-directory", "-C", str(ROOT), "quickstart-llama"]
    command += [f"VENV={sys.prefix}", f"OUT={output_dir}"]
    # As in a terminal, where both outputs are one
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, text=True, **pipes)
    code = done.returncode
    if code:
        raise RecordingError(f"quickstart ended with {code}: {done.stdout[-TAIL:]}")
    before, after = read_taught("llama", output_dir)
    print(f"quickstart: {before} before, {after} after", flush=True)
    return {
        "cores": os.cpu_count(),
        "exact_match": {"before": before, "after": after},
        "curve": curve_of(output_dir / "run"),
        "output": printed_lines(done.stdout, output_dir),
    }


def record_comparison(folder: Path) -> Recording:
    """Return what runs with different learning rates have written, as plot_loss.py reads it.

    Raises RecordingError if one of them fails.
    """
    tiny = folder / "tiny"
    run_script("scripts/make_tiny.py", "llama", str(tiny), "--quiet")
    runs = []
    for rate in COMPARED_RATES:
        output_dir = folder / f"rate_{rate}"
        data = ["--dataset_name", f"{tiny}/data/train.jsonl"]
        data += ["--eval_dataset_name", f"{tiny}/data/test.jsonl"]
        model = ["--model_name_or_path", f"{tiny}/model", "--output_dir", str(output_dir)]
        run_script("recipes/llama.py", *model, *data, "--learning_rate", rate, *COMPARED_FLAGS)
        run = read_run(str(output_dir))
        runs.append(
            {
                "folder": f"runs/{output_dir.name}",
                "steps": run.steps,
                "evaluations": run.evaluations,
                "facts": {"arguments": {"learning_rate": float(rate)}},
            }
        )
        print(f"comparison: learning rate {rate}, last loss {run.steps[-1]['loss']}", flush=True)
    return {"cores": os.cpu_count(), "runs": runs}


def record_pipeline(folder: Path) -> Recording:
    """Return when each rank of a pipeline computed what in one batch, under each schedule.

    Raises RecordingError if a launch fails.
    """
    tiny = folder / "tiny"
    layers = ["--num_hidden_layers", PIPELINE_LAYERS]
    run_script("scripts/make_tiny.py", "llama", str(tiny), "--quiet", *PIPELINE_MODEL, *layers)
    schedules = {}
    for schedule in KINDS:
        flags = ["--pipeline_schedule", schedule, "--output_dir", folder / schedule]
        flags += ["--per_device_train_batch_size", MICRO_BATCHES]
        times = folder / f"times_{schedule}"
        times.mkdir()
        run_pipeline([*data_of(tiny), *PIPELINE_FLAGS, *flags], times)
        ranks = []
        for rank in range(PIPELINE_RANKS):
            ranks.append(read_passes(times / f"stages.{rank}"))
        batch = shortest_batch(ranks)
        schedules[schedule] = batch
        seconds = duration_of(batch)
        print(f"pipeline: {schedule}, {seconds:.3f} seconds", flush=True)
    return {
        "cores": os.cpu_count(),
        "layers": int(PIPELINE_LAYERS),
        "micro_batches": int(MICRO_BATCHES),
        "schedules": schedules,
    }


def run_pipeline(arguments: Sequence[str | Path], times: Path) -> None:
    """Run the recipe of pipelines, whose ranks note the times of their passes in a folder.

    Raises RecordingError if it fails.
    """
    recipe = ROOT / "recipes" / "llama_pipeline.py"
    words = [*rehearsal("pp", PIPELINE_RANKS), recipe, *arguments]
    run_with_probe(words, STAGES, times)


def run_with_probe(words: Sequence[Any], probe: Probe, folder: Path) -> None:
    """Run a rehearsal whose ranks write what a probe measures to a folder.

    Raises RecordingError if it fails.
    """
    command = [str(word) for word in words]
    env = os.environ | ENVIRONMENT
    env[probe.variable] = str(folder)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=env, text=True, **pipes)
    code = done.returncode
    if code:
        raise RecordingError(f"{words} ended with {code}: {done.stdout[-TAIL:]}")


def record_meshes(folder: Path) -> Recording:
    """Return what each rank holds, uses, sees and keeps in the first step under each mesh.

    Raises RecordingError if a launch fails, UnknownPartError if a part is not in the whole.
    """
    single = Run("meshes", "single", batch=MESH_ROWS)
    wholes = {}
    models = {}
    for model, words in MODELS.items():
        run_script("scripts/make_tiny.py", model, str(folder / model), "--quiet", *words)
        wholes[model] = matrices_of(folder / model / "model")
        run = replace(single, recipe=model)
        noted = rehearse_parts(run, folder / model, folder / run.name)
        models[model] = {
            "matrices": {name: list(whole.shape) for name, whole in wholes[model].items()},
            "bytes": bytes_by_class(noted),
        }
    # The rows of all models are the same.
    pad = json.loads((folder / "llama" / "model" / "config.json").read_text())["pad_token_id"]
    rows = lines_of_tokens(read_lines(folder / single.name / "parts.0")[0], pad)
    runs = []
    for run in (*runs_of_meshes(), *EXPERT_RUNS, *PIPELINE_RUNS):
        noted = rehearse_parts(run, folder / run.model, folder / run.name)
        ranks = [noted / f"parts.{rank}" for rank in range(run.ranks)]
        boxes = [boxes_of(path, wholes[run.model]) for path in ranks]
        runs.append(
            {
                "model": run.model,
                "config": run.config,
                "ranks": run.ranks,
                "sizes": run.sizes,
                "flags": run.flags,
                "bytes": bytes_by_class(noted),
                "held": [box["held"] for box in boxes],
                "used": [box["used"] for box in boxes],
                "tokens": tokens_of_ranks(ranks, rows, pad),
            }
        )
        print(f"meshes: {run.config}, {run.ranks} ranks", flush=True)
    return {
        "cores": os.cpu_count(),
        "models": models,
        "rows": [len(row) for row in rows],
        "runs": runs,
    }


def runs_of_meshes() -> list[Run]:
    """Return the runs of llama.py, each of one step of MESH_ROWS rows."""
    runs = []
    for config, ranks, batch, sizes in MESHES:
        runs.append(Run("meshes", config, ranks, batch, sizes=sizes))
    return runs


def rehearse_parts(run: Run, tiny: Path, folder: Path) -> Path:
    """Rehearse one step, and return the folder with the parts of the ranks and report.json.

    Raises RecordingError if it fails.
    """
    folder.mkdir()
    words = [*rehearsal(run.config, run.ranks), "--report", folder / "report.json"]
    if run.sizes:
        words += ["--config_file", write_with_sizes(run, folder)]
    words += ["--mixed_precision", "no", ROOT / "recipes" / f"{run.recipe}.py", *run.flags]
    words += [*data_of(tiny)[:4], *ONE_STEP, "--per_device_train_batch_size", run.batch]
    run_with_probe([*words, "--output_dir", folder / "run"], PARTS, folder)
    return folder


def matrices_of(model: Path) -> dict[str, np.ndarray]:
    """Return the matrices of a model's folder that its ranks note, by the name of their layer."""
    found = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        layer = name.removeprefix("model.").removesuffix(".weight")
        if layer.endswith(MATRICES):
            found[layer] = weight
        expert = EXPERT.fullmatch(name)
        if expert:
            matrix, dimension = OF_EXPERTS[expert[3]]
            name = f"{expert[1]}.mlp.{matrix}"
            parts = experts.setdefault(name, [])
            parts.append(weight)
            found[name] = np.concatenate(parts, axis=dimension)
    return dict(sorted(found.items(), reverse=True))


def boxes_of(path: Path, wholes: Mapping[str, np.ndarray]) -> dict[str, dict[str, Box]]:
    """Return where the matrices that a rank holds and uses are in the whole ones.

    Args:
        path: what the rank noted; the weights are beside it.
    """
    boxes: dict[str, dict[str, Box]] = {"held": {}, "used": {}}
    for name, part in load_file(f"{path}.safetensors").items():
        kind, _, layer = name.partition(".")
        boxes[kind][layer] = find_box(part, wholes[layer])
    return boxes


def tokens_of_ranks(
    ranks: Sequence[Path], rows: Sequence[Mapping[int, int]], pad: int
) -> list[dict[int, list[Span]]]:
    """Return, for each rank, the tokens of each row that go through it.

    A rank that is given hidden states has the rows of the rank before it that is given tokens,
    since both have the same micro-batches in the same order.

    Args:
        ranks: what they noted.
        rows: the tokens of each row by their positions.
    """
    noted = [read_lines(path) for path in ranks]
    found = []
    for rank, passes in enumerate(noted):
        while passes[0]["ids"] is None:
            rank -= PIPELINES
            passes = noted[rank]
        spans: dict[int, list[Span]] = {}
        for one in passes:
            for tokens in lines_of_tokens(one, pad):
                spans[find_row(tokens, rows)] = spans_of(list(tokens))
        found.append(spans)
    return found


def bytes_by_class(noted: Path) -> dict[str, list[int]]:
    """Return the bytes of each class by rank, as the shard report has them."""
    found: dict[str, list[int]] = {}
    for row in json.loads((noted / "report.json").read_text())["rows"]:
        found.setdefault(row["class"], []).append(row["held_bytes"])
    return found


def run_script(script: str, *words: str) -> None:
    """Run a program of this repository. Raises RecordingError if it fails."""
    command = [sys.executable, str(ROOT / script), *words]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RecordingError(f"{script} ended with {done.returncode}: {done.stdout[-TAIL:]}")


def printed_lines(output: str, output_dir: Path) -> list[str]:
    """Return what a terminal shows of an output, with the folders that a user would see."""
    lines = []
    for line in ESCAPES.sub("", output).split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2]  # A progress bar overwrites its line.
        shown = shown.replace(str(output_dir), "runs/quickstart")
        shown = shown.replace(sys.prefix, ".venv").rstrip()
        if lines and is_later_state(shown, lines[-1]):
            lines.pop()
        lines.append(shown)
    return lines


def is_later_state(line: str, before: str) -> bool:
    """Return whether two lines are one progress bar: without a terminal it may end a line."""
    bar = PROGRESS_BAR.match(line)
    bar_before = PROGRESS_BAR.match(before)
    return bar is not None and bar_before is not None and bar[1] == bar_before[1]


RECORDERS = {
    "parity": record_parity,
    "resume": record_resume,
    "quickstart": record_quickstart,
    "comparison": record_comparison,
    "pipeline": record_pipeline,
    "meshes": record_meshes,
}
