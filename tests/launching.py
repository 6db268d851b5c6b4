"""Start the shipped recipe under the shipped YAML files as a user would, in subprocesses, and read what it wrote."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

from proof.launch import data_of  # noqa: F401  for tests

REPO = Path(__file__).resolve().parents[1]
CONFIGS = REPO / "accelerate_configs"
RECIPE = str(REPO / "recipes" / "llama.py")
INTERPRETER = (
    sys.executable
)  # which starts cold; tests/launch/conftest.py puts another program in its place
TIMEOUT = 400  # seconds; a cold launch takes 10-30 on two idle cores


@contextlib.contextmanager
def starting_cold():
    """Within this context Python starts cold, as it must where a test looks for a process in /proc, which shows the
    server of a warm start in its place."""
    program, sys.executable = sys.executable, INTERPRETER
    try:
        yield
    finally:
        sys.executable = program


def run(*command, **options):
    """Run a command; the result has returncode and output (stdout and stderr together)."""
    options = {
        "timeout": TIMEOUT,
        "cwd": REPO,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    } | options
    done = subprocess.run([str(word) for word in command], text=True, **options)
    done.output = done.stdout
    return done


def recipe(*arguments, **options):
    """Run the recipe as one plain process."""
    return run(sys.executable, RECIPE, *arguments, **options)


def accelerate_launch(*arguments, **options):
    """Run accelerate launch, cold: the recipe looks for it among the processes above its own."""
    return run(INTERPRETER, "-m", "accelerate.commands.launch", *arguments, **options)


def rehearse(
    config, *arguments, num_processes=None, report=None, mixed_precision=None, script=RECIPE
):
    """Rehearse a script under accelerate_configs/`config`.yaml on CPU ranks."""
    command = [sys.executable, REPO / "scripts" / "rehearse.py", "--device", "cpu"]
    command += ["--config_file", CONFIGS / f"{config}.yaml"]
    command += ["--num_processes", num_processes] if num_processes else []
    command += ["--report", report] if report else []
    command += ["--mixed_precision", mixed_precision] if mixed_precision else []
    return run(*command, script, *arguments)


def read_metrics(output_dir):
    """Lines of metrics.jsonl: (training steps, evaluations)."""
    lines = [
        json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    ]
    return [line for line in lines if "loss" in line], [
        line for line in lines if "eval_loss" in line
    ]
