"""Measure with real processes how much host memory each rank takes to load a model and to resume.

    python scripts/host_memory.py --json results/host_memory.json
    python scripts/host_memory.py --configs ddp fsdp2_full_shard --ranks 2

Without --configs every YAML is measured. Each launch is a rehearsal (scripts/rehearse.py) of
recipes/llama.py on a model whose files are in bf16, as on the hub, loaded with the default --dtype
float32, so that the weights cannot stay a mapping of the file. Numbers are in copies of the fp32
model (its parameters x 4 bytes): 1.0 means that the rank took as much host memory as the whole
model.

    loading    from the Accelerator to the call of `prepare`: the peak of the rank's private memory
               (RssAnon, sampled)
    resident   the same, with pages of files that are shared between ranks (VmHWM, exact)
    resuming   from `prepare` to the first forward pass, with a checkpoint of one step: the peak of
               private memory again. A step holds the optimizer's state and gradients, 3 copies over
               the number of shards; more than that is a second copy

On CPU ranks the device is the host: single, DDP and ZeRO-0 to 2 must hold a copy per rank here,
where on a GPU the weights go straight to the device (tests/unit/test_loading.py).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from usage import Parser

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "accelerate_configs"
SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 8000,
}
SAMPLE_SECONDS = 0.002
# glibc maps what is larger than this, and returns it when it is freed. Left to itself it raises the
# bound to 32 MiB, below which are the tensors of this model but hardly those of a real one: what
# ZeRO-3 frees while it loads would be counted as taken.
MALLOC_THRESHOLD = 2**20


# ---- In a rank ----
def memory(field):
    """Return the bytes of a field of /proc/self/status."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class Phase:
    """The growth of this process's memory between two places in the recipe."""

    def __init__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak of resident memory begins anew (man proc_pid_clear_refs)
        self.private = self.most_private = memory("RssAnon")
        self.resident = memory("VmRSS")
        self.running = True
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def sample(self):
        while self.running:
            self.most_private = max(self.most_private, memory("RssAnon"))
            time.sleep(SAMPLE_SECONDS)

    def end(self):
        """Stop the sampling; return the bytes by which the two kinds of memory grew at most."""
        self.running = False
        self.thread.join()
        self.most_private = max(self.most_private, memory("RssAnon"))
        return {
            "private": self.most_private - self.private,
            "resident": memory("VmHWM") - self.resident,
        }


def track(path):
    """Have this rank write {"loading": growth, "resuming": growth} to `path`, as JSON.

    It is called before the recipe starts, and hooks into the Accelerator that the recipe makes.
    """
    from accelerate import Accelerator
    from torch.nn import Module

    from proof.step_hooks import when_prepared

    phases = {}
    found = {}
    hook = None
    make = Accelerator.__init__
    prepare = Accelerator.prepare

    def make_and_begin(self, *args, **kwargs):
        make(self, *args, **kwargs)
        phases["loading"] = Phase()

    def end_and_prepare(self, *args, **kwargs):
        has_model = any(isinstance(arg, Module) for arg in args)
        if has_model and "loading" not in found:
            found["loading"] = phases["loading"].end()
        return prepare(self, *args, **kwargs)

    def before_first_forward(model, inputs):
        hook.remove()
        found["resuming"] = phases["resuming"].end()
        Path(path).write_text(json.dumps(found))

    def begin_to_resume(model, optimizer, tensors):
        nonlocal hook
        phases["resuming"] = Phase()
        hook = model.register_forward_pre_hook(before_first_forward)

    Accelerator.__init__ = make_and_begin
    Accelerator.prepare = end_and_prepare
    when_prepared(begin_to_resume)


# ---- The command ----
def make_model(folder):
    """Write a model in bf16, and short rows; return its number of parameters."""
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny.py"), "llama", str(folder)]
    command += ["--dtype", "bfloat16", "--num_train_rows", "40"]
    for name, value in SHAPE.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True, capture_output=True)
    size = (folder / "model" / "model.safetensors").stat().st_size
    return size // 2  # bytes of a parameter in bf16


def launch(config, ranks, tiny, output_dir, steps, peaks):
    """Rehearse `steps` steps, with a checkpoint after each; return what the ranks measured.

    peaks: a new folder for the ranks' files. Raises RuntimeError with the end of the output if a
    rank measured nothing.
    """
    command = [sys.executable, ROOT / "scripts" / "rehearse.py", "--num_processes", ranks]
    command += ["--config_file", CONFIGS / f"{config}.yaml", ROOT / "recipes" / "llama.py"]
    command += ["--model_name_or_path", tiny / "model"]
    command += ["--dataset_name", tiny / "data" / "train.jsonl"]
    command += ["--max_steps", steps, "--save_steps", 1, "--eval_strategy", "no"]
    command += ["--max_length", 64, "--per_device_train_batch_size", 1]
    command += ["--allow_change", "max_steps", "--output_dir", output_dir]
    peaks.mkdir(parents=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "REHEARSAL_HOST_MEMORY": str(peaks),
        "MALLOC_MMAP_THRESHOLD_": str(MALLOC_THRESHOLD),
    }
    done = subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    measured = [json.loads(path.read_text()) for path in sorted(peaks.glob("host.*"))]
    if done.returncode or len(measured) != ranks:
        raise RuntimeError(done.stdout[-3000:])
    return measured


def measure(config, ranks, tiny, size, folder, resumes):
    """Return one row of the table: copies of the model that each rank took.

    size: the model's parameters. resumes: whether to measure a second launch, which resumes.
    """

    def copies(launched, phase, kind):
        return [round(rank[phase][kind] / (4 * size), 3) for rank in launched]

    run = folder / f"{config}_{ranks}"
    first = launch(config, ranks, tiny, run, 1, folder / f"{config}_{ranks}_first")
    row = {
        "config": config,
        "ranks": ranks,
        "loading": copies(first, "loading", "private"),
        "resident": copies(first, "loading", "resident"),
    }
    if resumes:
        again = launch(config, ranks, tiny, run, 2, folder / f"{config}_{ranks}_again")
        row["resuming"] = copies(again, "resuming", "private")
    return row


def write_table(path, size, rows):
    """Write the rows measured so far as JSON, one a line."""
    from proof.results import versions

    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'{{"versions": {json.dumps(versions())}, "parameters": {size}, "rows": [\n'
    path.write_text(f"{head}{lines}\n]}}\n")


def parse_args():
    from proof.jobs import configs

    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = configs()
    parser.add_argument(
        "--configs", nargs="+", choices=names, default=names, help="YAML files (default: all)"
    )
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[2, 4], help="numbers of ranks (default: 2 and 4)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH.json", help="write the table here")
    return parser.parse_args()


def main():
    from proof.jobs import ranks_of

    args = parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="host_memory_") as folder:
        tiny = Path(folder) / "tiny"
        size = make_model(tiny)
        for config in args.configs:
            numbers = {ranks_of(config, wanted) for wanted in args.ranks}
            for ranks in sorted(numbers):
                resumes = ranks == ranks_of(config, 2)
                row = measure(config, ranks, tiny, size, Path(folder), resumes)
                print(json.dumps(row), flush=True)
                rows.append(row)
                if args.json:
                    write_table(args.json, size, rows)


if __name__ == "__main__":
    main()
