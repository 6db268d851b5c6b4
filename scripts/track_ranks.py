"""How far the planner is off under each YAML: its peaks against the live tensors of real CPU ranks.

    python scripts/track_ranks.py --json results/planner_ranks.json
    python scripts/track_ranks.py --configs ddp fsdp1_full_shard --jobs plain LoRA
    python scripts/track_ranks.py --plan --json results/planner_ranks.json   # measured before: only plan

Each launch rehearses three optimizer steps of the recipe (scripts/rehearse.py) on two ranks, a mesh of 2 x 2
on four. torch's MemTracker is on in every rank from the second optimizer step to the third, over all tensors there
are by then. A rank's planned peak is that of its device and its host together, since on CPU ranks they are one.
About six minutes on two cores for a job under all YAMLs.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from memory_zero import BUCKET
from usage import Parser

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
}
LINES, LONGEST = 2, 256  # of a micro-batch: lines, tokens in each


class Job(NamedTuple):
    """Flags of the recipe, tokens of a line, mixed precision."""

    flags: tuple = ()
    length: int = LONGEST
    precision: str = "no"

    @property
    def arguments(self):
        return [
            *self.flags,
            "--max_length",
            str(self.length),
            "--per_device_train_batch_size",
            str(LINES),
        ]


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


def track(path):
    """Let a rank write to `path` the peak between its second optimizer step and the end of its third."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._python_dispatch import TorchDispatchMode

    from proof.step_hooks import around_steps, when_prepared

    class Tracker(MemTracker):
        """torch's tracker without its hooks on modules and parameters, for which it wants leaves: neither FSDP1's
        views of flat parameters nor ZeRO-3's empty ones are. Not counted is gloo's own copy of what it reduces and
        scatters, which NCCL does not make: it splits a tensor that no op before has made."""

        def __enter__(self):
            self._fake_mode_on_entry = None
            self._track_resize()
            return TorchDispatchMode.__enter__(self)

        def __exit__(self, *error):
            self._restore_resize()
            TorchDispatchMode.__exit__(self, *error)

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.split.Tensor and args[0].untyped_storage() not in self._WINFO:
                return func(*args, **kwargs or {})
            return super().__torch_dispatch__(func, types, args, kwargs)

    steps, tracker = [], Tracker()

    def before(zero, base):
        steps.append("begins")
        if len(steps) == 2:
            tracker.track_external(*all_tensors())
            tracker.__enter__()

    def after(zero, base):
        if len(steps) == 3:
            tracker.__exit__(None, None, None)
            peak = sum(
                snapshot["Total"] for snapshot in tracker.get_tracker_snapshot("peak").values()
            )
            Path(path).write_text(json.dumps(peak))

    when_prepared(lambda model, optimizer, _: around_steps(model, optimizer, before, after))


def all_tensors():
    """Every tensor with bytes that Python knows of in this process; DDP's buckets among them, as gradients."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of objects that warn when they are looked at
        found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [
        tensor
        for tensor in found
        if tensor.device.type == "cpu" and type(tensor).__name__ != "FakeTensor"
    ]


def make_model(folder):
    """Write the model, and rows that are all longer than a line, so that each batch has the same shape."""
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny.py"), "llama", str(folder)]
    command += [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    subprocess.run(command, check=True, capture_output=True)
    row = {"prompt": "Say:", "completion": "again and again " * (LONGEST // 16)}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 100)


def learnt_tokens(folder, length):
    """Tokens of a micro-batch that are learnt."""
    from transformers import AutoTokenizer

    import llama

    row = json.loads((folder / "rows.jsonl").read_text().splitlines()[0])
    labels = llama.tokenize_row(row, AutoTokenizer.from_pretrained(folder / "model"), length)[
        "labels"
    ]
    assert len(labels) == length
    return LINES * sum(label != -100 for label in labels[1:])


def launch(config, ranks, job, tiny, folder):
    """Rehearse three steps; return the peak of each rank in bytes. Raises RuntimeError with what the run printed."""
    command = [
        sys.executable,
        ROOT / "scripts" / "rehearse.py",
        "--num_processes",
        ranks,
        "--mixed_precision",
    ]
    command += [
        job.precision,
        "--config_file",
        CONFIGS / f"{config}.yaml",
        ROOT / "recipes" / "llama.py",
    ]
    command += [
        *job.arguments,
        "--model_name_or_path",
        tiny / "model",
        "--dataset_name",
        tiny / "rows.jsonl",
    ]
    command += [
        "--max_steps",
        3,
        "--save_steps",
        0,
        "--eval_strategy",
        "no",
        "--output_dir",
        folder,
    ]
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "REHEARSAL_PEAKS": str(folder),
    }
    command = [str(word) for word in command]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peaks = [json.loads(path.read_text()) for path in sorted(folder.glob("peak.*"))]
    if done.returncode or len(peaks) != ranks:
        raise RuntimeError(done.stdout[-3000:])
    return peaks


def measure(config, job, tiny, folder):
    """One line of the table: what was launched, learnt tokens of a micro-batch, and the peak of each rank in bytes."""
    from proof.jobs import ranks_of

    ranks = ranks_of(config, 2)
    peaks = launch(config, ranks, JOBS[job], tiny, folder)
    return {
        "config": config,
        "job": job,
        "ranks": ranks,
        "learnt": learnt_tokens(tiny, JOBS[job].length),
        "measured": peaks,
    }


def planned(row):
    """{category: bytes} of a rank of a measured line, device and host together."""
    from transformers import AutoConfig

    import llama
    from components.config_files import load
    from components.config_reading import as_read
    from memory_plan import Batch, closed_form, plan_of

    job = JOBS[row["job"]]
    sys.argv = ["llama.py", "--eval_strategy", "no", *job.arguments]
    read = as_read(load(str(CONFIGS / f"{row['config']}.yaml")).content)
    machines = 2 if row["config"] == "fsdp1_hybrid_shard" else 1  # as the rehearsal simulates them
    plan = plan_of(llama.parse_args(), read, row["ranks"], machines, job.precision)
    if (
        plan.engine == "fsdp2"
    ):  # whose shards on the host are those of the device here: nothing moves
        plan.offloads_parameters = plan.offloads_optimizer = False
    device, host = closed_form(
        plan, AutoConfig.for_model("llama", **MODEL), Batch(LINES, job.length, row["learnt"])
    )
    return {name: device.get(name, 0) + host.get(name, 0) for name in {**device, **host}}


def compare(row):
    """A measured line with its planned peak and the relative error. ZeRO's bucket of 2 GB (in fp32), the same for
    every model, would hide all else: the second error is of what is beside it."""
    size, measured = sum(planned(row).values()), max(row["measured"])
    in_fp32 = (
        JOBS[row["job"]].precision == "no" or "zero3" in row["config"]
    )  # whose bucket is that of the reduction
    bucket = BUCKET * (4 if in_fp32 else 2)
    if not re.search("zero[123]", row["config"]) or min(size, measured) < bucket:
        bucket = 0
    errors = {
        "error": size / measured - 1,
        "beside_bucket": (size - bucket) / (measured - bucket) - 1,
    }
    return row | {"planned": size} | errors


def parse_args():
    from proof.jobs import configs

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--configs",
        nargs="+",
        choices=configs(),
        default=configs(),
        help="YAML files (default: all)",
    )
    parser.add_argument(
        "--jobs", nargs="+", choices=list(JOBS), default=list(JOBS), help="default: all"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH.json",
        help="write the table here; other lines there stay",
    )
    parser.add_argument(
        "--plan", action="store_true", help="launch nothing: plan anew for what --json has measured"
    )
    args = parser.parse_args()
    if args.plan and not (args.json and args.json.is_file()):
        parser.error("--plan needs --json with the measurements")
    return args


def measured_rows(args):
    """Yield measured lines: those of --json with --plan, else of launches, each as soon as it is there."""
    if args.plan:
        rows = json.loads(args.json.read_text())["rows"]
        yield from (
            row for row in rows if row["config"] in args.configs and row["job"] in args.jobs
        )
        return
    with tempfile.TemporaryDirectory(prefix="tracked_") as folder:
        tiny = Path(folder) / "tiny"
        make_model(tiny)
        for job in args.jobs:
            for config in args.configs:
                if not (
                    config == "fsdp1_no_shard" and "--use_peft" in JOBS[job].flags
                ):  # which the recipe refuses
                    yield measure(
                        config, job, tiny, Path(folder) / f"{job}_{config}".replace(" ", "_")
                    )


def write(path, rows):
    """Write the lines, one a row of the file, over those of the same job and YAML; of other versions none stay."""
    from proof.results import versions

    before = json.loads(path.read_text()) if path.is_file() else {}
    kept = before["rows"] if before.get("versions") == versions() else []
    lines = {(row["job"], row["config"]): row for row in [*kept, *rows]}
    order = sorted(lines, key=lambda key: (list(JOBS).index(key[0]), key[1]))
    text = ",\n".join(json.dumps(lines[key]) for key in order)
    path.write_text(f'{{"versions": {json.dumps(versions())}, "rows": [\n{text}\n]}}\n')


def main():
    args = parse_args()
    sys.path.insert(0, str(ROOT / "recipes"))
    for row in map(compare, measured_rows(args)):
        sizes = f"{max(row['measured']) / 2**20:9.1f} MiB measured, {row['planned'] / 2**20:9.1f} planned"
        beside = (
            ""
            if row["beside_bucket"] == row["error"]
            else f", {row['beside_bucket']:+.2%} beside the bucket"
        )
        print(
            f"{row['config']:24} {row['job']:13} {sizes}, {row['error']:+.2%}{beside}", flush=True
        )
        if args.json:
            write(args.json, [row])


if __name__ == "__main__":
    main()
