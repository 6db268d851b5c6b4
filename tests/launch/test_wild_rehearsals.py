# SPDX-License-Identifier: Apache-2.0
"""What newcomers reported of rehearsals: that of a copy is of the copy, the shard report says what
is split, and an optimizer of their own is saved and resumed."""

import json
import shutil

import pytest
import yaml
from safetensors.torch import load_file

from launching import CONFIGS, REPO, data_of, read_json, rehearse, script

FAST = ["--logging_steps", 1, "--eval_strategy", "no", "--per_device_train_batch_size", 4]


@pytest.fixture
def project(once, tmp_path):
    """A copy of recipes/llama.py as a user makes it, to edit."""
    copied = once("copied", lambda folder: script("copy_recipe", "llama", folder, code=0))
    return shutil.copytree(copied, tmp_path / "project")


# ---- The rehearsal of a copy ----
# At its end each rank names the files of modules that belong to nobody but the repository
WATCH = """
import atexit, sys
def foreign():
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    own = [name for name in files if name.startswith(("core", "llama"))]
    others = [files[name] for name in own if not files[name].startswith(HERE)]
    print(f"foreign: {others}")  # as one text, since two ranks print at once
    inside = [folder for folder in sys.path if folder.startswith(REPO + "/")]
    print(f"on the path: {[folder for folder in inside if not folder.startswith(sys.prefix)]}")
atexit.register(foreign)
"""


# As Lion, it has a state without steps
OPTIMIZER = """

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    moment = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    update = torch.sign(0.9 * moment + 0.1 * weight.grad)
                    weight.add_(update, alpha=-group["lr"])
                    moment.mul_(0.99).add_(weight.grad, alpha=0.01)
"""


def test_a_copy_is_rehearsed_with_its_own_modules_and_its_own_optimizer_is_resumed(project, tiny):
    start = project / "core" / "__init__.py"
    names = f"HERE = {str(project)!r}; REPO = {str(REPO)!r}\n"
    start.write_text(start.read_text() + names + WATCH)
    path = project / "core" / "model.py"
    old = "optimizer = make_adamw(model, args)"
    new = "optimizer = Own(parameter_groups(model, args.weight_decay), args.learning_rate)"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) + OPTIMIZER)
    run = project / "run"
    flags = [*data_of(tiny), *FAST, "--max_steps", 4, "--save_steps", 2, "--learning_rate", "1e-3"]
    flags += ["--output_dir", run]
    program = project / "llama.py"
    done = rehearse("deepspeed_zero3", *flags, script=program, code=0)
    assert done.output.count("foreign: []") == 2 and done.output.count("on the path: []") == 2
    assert "shard report: ok" in done.output
    trained = (run / "model.safetensors").read_bytes()
    names = read_json(run / "checkpoint-2" / "boxes.json")["tensors"]
    # What the copy has changed counts
    assert {name.rpartition(".")[2] for name in names if name.startswith("state.")} == {"momentum"}
    shutil.rmtree(run / "checkpoint-4")
    (run / "model.safetensors").unlink()
    done = rehearse("deepspeed_zero3", *flags, script=program, code=0)
    assert f"Continuing from {run / 'checkpoint-2'}" in done.output
    assert (run / "model.safetensors").read_bytes() == trained


def test_a_broken_copy_fails_its_rehearsal(project, tiny):
    (project / "core" / "loss.py").write_text("raise RuntimeError('this copy is broken')")
    flags = [*data_of(tiny), *FAST, "--max_steps", 1, "--output_dir", project / "run"]
    done = rehearse("fsdp", *flags, script=project / "llama.py", code=1)
    # The recipe fails, and not what measures it
    trace = done.output.split("this copy is broken")[0]
    assert trace != done.output and "live_tensors" not in trace and "step_hooks" not in trace


# ---- What the shard report says ----
def test_half_a_model_is_half_of_its_bytes(tiny, tmp_path):
    config = with_deepspeed_json(tmp_path)
    flags = [*data_of(tiny), *FAST, "--max_steps", 1, "--output_dir", tmp_path / "run"]
    report = tmp_path / "report.json"
    done = rehearse(config, *flags, num_processes=2, report=report, code=0)
    assert "shard report: ok" in done.output
    weights = load_file(tiny / "model" / "model.safetensors")
    whole = 4 * sum(weight.numel() for weight in weights.values())
    rows = read_json(report)["rows"]
    held = [row["held_bytes"] for row in rows if row["class"] == "parameters"]
    assert {row["shards"] for row in rows} == {2} and len(held) == 2
    assert held == pytest.approx([whole / 2] * 2, rel=0.01)  # up to padding


def with_deepspeed_json(folder):
    """A YAML with a DeepSpeed JSON that keeps weights whole below a size that all have."""
    settings = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10_000_000},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    (folder / "ds.json").write_text(json.dumps(settings))
    content = yaml.safe_load((CONFIGS / "deepspeed_zero3.yaml").read_text())
    content["deepspeed_config"] = {
        "deepspeed_config_file": str(folder / "ds.json"),
        "zero3_init_flag": True,
    }
    content.pop("mixed_precision", None)
    (folder / "json.yaml").write_text(yaml.safe_dump(content))
    return folder / "json.yaml"
