# SPDX-License-Identifier: Apache-2.0
"""Start the shipped recipe under the shipped YAML files as a user would, and read what it wrote."""

import contextlib
import json
import os
import sys
from pathlib import Path

from net import ROOT as REPO
from net import TIMEOUT, data_of, read_json, run  # noqa: F401  for tests

CONFIGS = REPO / "accelerate_configs"
RECIPE = str(REPO / "recipes" / "llama.py")
# It starts cold; tests/launch/conftest.py puts another program in the place of sys.executable
INTERPRETER = sys.executable


@contextlib.contextmanager
def starting_cold():
    """Within this context Python starts cold.

    So it must where a test looks for a process in /proc, which shows the server of a warm start in
    the place of the process.
    """
    program = sys.executable
    sys.executable = INTERPRETER
    try:
        yield
    finally:
        sys.executable = program


def recipe(*arguments, name="llama", **options):
    """Run a recipe as one plain process."""
    return run(sys.executable, REPO / "recipes" / f"{name}.py", *arguments, **options)


def script(name, *arguments, **options):
    """Run a command of scripts/."""
    return run(sys.executable, REPO / "scripts" / f"{name}.py", *arguments, **options)


def accelerate_launch(*arguments, **options):
    """Run accelerate launch, cold: the recipe looks for it among the processes above its own."""
    return run(INTERPRETER, "-m", "accelerate.commands.launch", *arguments, **options)


def rehearse(
    config,
    *arguments,
    num_processes=None,
    report=None,
    mixed_precision=None,
    script=RECIPE,
    code=None,
):
    """Rehearse a script under a YAML, or one of accelerate_configs/ by its name, on CPU ranks."""
    command = [sys.executable, REPO / "scripts" / "rehearse.py", "--device", "cpu"]
    command += ["--config_file", config if isinstance(config, Path) else CONFIGS / f"{config}.yaml"]
    if num_processes:
        command += ["--num_processes", num_processes]
    if report:
        command += ["--report", report]
    if mixed_precision:
        command += ["--mixed_precision", mixed_precision]
    return run(*command, script, *arguments, code=code)


def quickstart(recipe, out):
    """Run a recipe's quickstart into `out` in the environment of the tests; return its output."""
    (Path(sys.prefix) / ".installed").touch()  # it holds what the quickstart would install
    words = [f"RECIPE={recipe}", f"VENV={sys.prefix}", f"OUT={out}", "THREADS=1"]
    # With the best kernels of this CPU, as a user has them: no figure is compared
    environment = {name: value for name, value in os.environ.items() if "AVX2" not in value.upper()}
    done = run("make", "quickstart", *words, timeout=900, env=environment)
    assert done.returncode == 0, done.output[-4000:]
    return done.output


def write_rows(path, rows):
    """Write rows as lines of JSON; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def edit_json(path, **values):
    """Change values of a JSON file, which may not be there."""
    content = read_json(path) if path.exists() else {}
    path.write_text(json.dumps(content | values))


def tensors_of(folder, pattern="model*.safetensors"):
    """{name: tensor} of the files of a folder."""
    from safetensors.torch import load_file

    tensors = {}
    for path in Path(folder).glob(pattern):
        tensors |= load_file(path)
    return tensors


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def errors_of(done):
    """The lines by which a command refuses; what it prints is no traceback."""
    assert "Traceback" not in done.output, done.output[-4000:]
    return [line for line in done.output.splitlines() if line.startswith("error: ")]


def read_metrics(output_dir):
    """Lines of metrics.jsonl: (training steps, evaluations)."""
    lines = read_rows(Path(output_dir, "metrics.jsonl"))
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "loss" not in line]
    return steps, evaluations
