# SPDX-License-Identifier: Apache-2.0
"""What newcomers reported of rehearsals: that of a copy is of the copy, the shard report says what
is split, and an optimizer of their own is saved and resumed."""

import json
import shutil
import sys

import pytest
import yaml
from safetensors import safe_open

from launching import CONFIGS, REPO, data_of, read_json, read_metrics, run, starting_cold

FAST = ["--logging_steps", 1, "--eval_strategy", "no", "--per_device_train_batch_size", 4]


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of recipes/llama.py as a user makes it, for tests that edit copies of it."""
    folder = tmp_path_factory.mktemp("copied") / "project"
    done = run(sys.executable, REPO / "scripts" / "copy_recipe.py", "llama", folder)
    assert done.returncode == 0, done.output
    return folder


@pytest.fixture
def project(copied, tmp_path):
    """A copy to edit."""
    return shutil.copytree(copied, tmp_path / "project")


def rehearse_copy(project, config, *arguments):
    """Rehearse a copy with the tools of the repository, as its ORIGIN.md says."""
    command = [sys.executable, REPO / "scripts" / "rehearse.py", "--device", "cpu"]
    command += ["--config_file", config, "--report", project / "report.json"]
    return run(*command, project / "llama.py", *arguments)


# ---- The rehearsal of a copy ----
# At its end each rank names the files of modules that belong to nobody but the repository
WATCH = """
import atexit, sys
def foreign():
    files = {name: str(getattr(module, "__file__", "")) for name, module in sys.modules.items()}
    own = [name for name in files if name.startswith(("core", "llama"))]
    print("foreign:", [files[name] for name in own if not files[name].startswith(HERE)])
    inside = [folder for folder in sys.path if folder.startswith(REPO + "/")]
    print("on the path:", [folder for folder in inside if not folder.startswith(sys.prefix)])
atexit.register(foreign)
"""


@pytest.mark.parametrize("config", ["ddp", "fsdp", "deepspeed_zero3"])
def test_a_copy_is_rehearsed_with_its_own_modules(config, project, tiny):
    start = project / "core" / "__init__.py"
    names = f"HERE = {str(project)!r}; REPO = {str(REPO)!r}\n"
    start.write_text(start.read_text() + names + WATCH)
    # What it has changed counts
    loss = project / "core" / "loss.py"
    loss.write_text(loss.read_text() + "\nprint('loss of the copy')\n")
    flags = [*data_of(tiny), *FAST, "--max_steps", 1, "--output_dir", project / "run"]
    done = rehearse_copy(project, CONFIGS / f"{config}.yaml", *flags)
    assert done.returncode == 0, done.output[-3000:]
    assert done.output.count("foreign: []") == 2 and done.output.count("on the path: []") == 2
    assert done.output.count("loss of the copy") == 2


@pytest.mark.parametrize(
    ("config", "module", "cold"),
    [
        ("ddp", "core/loss", False),
        ("fsdp", "core/loss", False),
        ("deepspeed_zero3", "core/loss", False),
        ("fsdp", "core/cli", True),
        ("deepspeed_zero3", "core/cli", True),
    ],
)
def test_a_broken_copy_fails_its_rehearsal(config, module, cold, project, tiny):
    (project / f"{module}.py").write_text("raise RuntimeError('this copy is broken')")
    flags = [*data_of(tiny), *FAST, "--max_steps", 1, "--output_dir", project / "run"]
    if cold:
        with starting_cold():
            done = rehearse_copy(project, CONFIGS / f"{config}.yaml", *flags)
    else:
        done = rehearse_copy(project, CONFIGS / f"{config}.yaml", *flags)
    assert done.returncode == 1 and "this copy is broken" in done.output, done.output[-3000:]
    # The recipe fails, and not what measures it
    trace = done.output.split("this copy is broken")[0]
    assert "live_tensors" not in trace and "step_hooks" not in trace


# ---- What the shard report says ----
def bytes_of_model(folder):
    """The bytes of a model's tensors in fp32."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                total += 4 * file.get_tensor(name).numel()
    return total


@pytest.fixture(scope="module")
def loss_in_one_process(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_process")
    command = [*data_of(tiny), *FAST, "--max_steps", 2, "--output_dir", folder]
    command += ["--per_device_train_batch_size", 8]
    done = run(sys.executable, REPO / "recipes" / "llama.py", *command)
    assert done.returncode == 0, done.output[-3000:]
    return [step["loss"] for step in read_metrics(folder)[0]]


@pytest.mark.parametrize(
    ("kind", "adapters"),
    [
        ("deepspeed_zero3", []),
        ("deepspeed_zero3", ["--use_peft", "--lora_target_modules", "q_proj"]),
        ("deepspeed_zero3_offload", []),
        ("a JSON", []),
        ("fsdp", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value[:1]) or "whole",
)
def test_half_a_model_is_half_of_its_bytes(kind, adapters, tiny, loss_in_one_process, tmp_path):
    config = CONFIGS / f"{kind}.yaml"
    if kind == "a JSON":
        config = with_deepspeed_json(tmp_path)
    command = [sys.executable, REPO / "scripts" / "rehearse.py", "--device", "cpu"]
    command += ["--num_processes", 2, "--config_file", config, "--report", tmp_path / "report.json"]
    flags = [*data_of(tiny), *FAST, *adapters, "--max_steps", 2, "--output_dir", tmp_path / "run"]
    done = run(*command, REPO / "recipes" / "llama.py", *flags)
    assert done.returncode == 0 and "shard report: ok" in done.output, done.output[-3000:]
    says_so = "stage3_param_persistence_threshold: 0" in done.output
    assert says_so == (kind != "fsdp")
    whole = bytes_of_model(tiny / "model")
    if adapters:
        whole += bytes_of_model(tmp_path / "run")
    else:
        losses = [step["loss"] for step in read_metrics(tmp_path / "run")[0]]
        assert losses == pytest.approx(loss_in_one_process, rel=1e-6)
    rows = read_json(tmp_path / "report.json")["rows"]
    held = [row["held_bytes"] for row in rows if row["class"] == "parameters"]
    assert {row["shards"] for row in rows} == {2} and len(held) == 2
    for size in held:  # up to padding
        assert size == pytest.approx(whole / 2, rel=0.01)


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


# ---- Optimizers of their own ----
# The update of Lion for all weights; or one moment for matrices and two for the rest, as Muon with
# AdamW has them
OPTIMIZER = """

class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                for key in KEYS(weight):
                    state.setdefault(key, torch.zeros_like(weight))
                moment = next(iter(state.values()))
                weight.add_(torch.sign(0.9 * moment + 0.1 * weight.grad), alpha=-group["lr"])
                for moment in state.values():
                    moment.mul_(0.99).add_(weight.grad, alpha=0.01)
"""


def use_own_optimizer(project, keys):
    path = project / "core" / "model.py"
    old = "optimizer = make_adamw(model, args)"
    new = "optimizer = Own(parameter_groups(model, args.weight_decay), args.learning_rate)"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) + OPTIMIZER.replace("KEYS", f"({keys})"))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ("deepspeed_zero3", "momentum"),
        ("deepspeed_zero2", "exp_avg"),
        ("fsdp1_full_shard", "momentum"),
    ],
)
def test_a_state_without_steps_is_saved_and_resumed(config, key, project, tiny):
    use_own_optimizer(project, f"lambda weight: [{key!r}]")
    flags = [*data_of(tiny), *FAST, "--max_steps", 4, "--save_steps", 2, "--learning_rate", "1e-3"]
    flags += ["--output_dir", project / "run"]
    done = rehearse_copy(project, CONFIGS / f"{config}.yaml", *flags)
    assert done.returncode == 0 and "shard report: ok" in done.output, done.output[-3000:]
    trained = (project / "run" / "model.safetensors").read_bytes()
    assert keys_of_state(project / "run" / "checkpoint-2") == {key}
    shutil.rmtree(project / "run" / "checkpoint-4")
    (project / "run" / "model.safetensors").unlink()
    done = rehearse_copy(project, CONFIGS / f"{config}.yaml", *flags)
    assert done.returncode == 0, done.output[-3000:]
    assert f"Continuing from {project / 'run' / 'checkpoint-2'}" in done.output
    assert (project / "run" / "model.safetensors").read_bytes() == trained


def keys_of_state(checkpoint):
    """What a checkpoint has of each weight besides the weight itself."""
    names = read_json(checkpoint / "boxes.json")["tensors"]
    return {name.rpartition(".")[2] for name in names if name.startswith("state.")}


def test_less_state_than_promised_is_no_failure(project, tiny):
    use_own_optimizer(project, "lambda weight: ['a'] if weight.dim() > 1 else ['a', 'b']")
    flags = [*data_of(tiny), *FAST, "--max_steps", 1, "--output_dir", project / "run"]
    done = rehearse_copy(project, CONFIGS / "fsdp2_full_shard.yaml", *flags)
    assert done.returncode == 0 and "shard report: ok" in done.output, done.output[-3000:]
    verdicts = {row["class"]: row["verdict"] for row in read_json(project / "report.json")["rows"]}
    assert verdicts == {"parameters": "ok", "gradients": "ok", "optimizer": "ok, less"}
