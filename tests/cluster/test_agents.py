# SPDX-License-Identifier: Apache-2.0
"""clusters/trainjob.yaml and clusters/skypilot.yaml are valid, and their commands train.

Their operators are not here. What they would put into the environment of each container is set by
hand, and the very command of the file runs twice on this machine, as it would on two.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from launching import CONFIGS, REPO, data_of, read_json, read_metrics, rehearse
from ranks import free_port

CLUSTERS = REPO / "clusters"
PYTHON = Path(os.environ.get("CLUSTERS_PYTHON", REPO / ".venv-clusters" / "bin" / "python"))
LAUNCHER = f"{sys.executable} scripts/rehearse.py --device cpu"
STEPS = 40
PATIENCE = 900  # seconds, of a busy machine; an attempt starts within 20 on two idle cores


# ---- Valid ----
def validate(*words):
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: make test-cluster")
    command = [str(word) for word in (PYTHON, Path(__file__).with_name("validate.py"), *words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def validate_trainjob(path):
    return validate("trainjob", path, Path(__file__).with_name("trainjob_schema.json"))


@pytest.mark.parametrize("kind", ["skypilot", "trainjob"])
def test_the_file_is_valid(kind):
    path = CLUSTERS / f"{kind}.yaml"
    done = validate_trainjob(path) if kind == "trainjob" else validate("skypilot", path)
    assert done.stdout.split()[-1:] == ["2"], done.stderr


# ---- Run ----
def pod_command(words):
    """The command of the container of trainjob.yaml, with other words for the recipe."""
    trainer = yaml.safe_load((CLUSTERS / "trainjob.yaml").read_text())["spec"]["trainer"]
    line, name, *_ = trainer["args"]
    return [*trainer["command"], line, name, *words]


def pod_environment(rank, port):
    """What the operator and the file put into the environment of a container."""
    trainer = yaml.safe_load((CLUSTERS / "trainjob.yaml").read_text())["spec"]["trainer"]
    injected = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": port,
    }
    return {pair["name"]: pair["value"] for pair in trainer["env"]} | injected


def machine_command(words):
    """The commands of skypilot.yaml."""
    return ["bash", "-c", yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())["run"]]


def machine_environment(rank, words):
    """What SkyPilot and the file put into the environment of a machine."""
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    injected = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "WORDS": shlex.join(words),
    }
    return task["envs"] | injected


class Agents:
    """The two processes of a run."""

    def __init__(self, kind, folder, words, recipe="llama", config="fsdp"):
        self.folder = folder
        self.processes = []
        port = str(free_port())
        folder.parent.mkdir(exist_ok=True)
        for rank in (0, 1):
            if kind == "trainjob":
                command, injected = pod_command(words), pod_environment(rank, port)
            else:
                command, injected = machine_command(words), machine_environment(rank, words)
            environment = os.environ | injected
            environment["LAUNCHER"] = LAUNCHER
            environment["RECIPE"] = f"recipes/{recipe}.py"
            environment["CONFIG"] = str(CONFIGS / f"{config}.yaml")
            environment["OUTPUT_DIR"] = str(folder)
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=REPO,
                    env=environment,
                    stdout=(folder.parent / f"{rank}.log").open("a"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def end(self):
        """The exit codes."""
        return [process.wait(PATIENCE) for process in self.processes]

    def wait_for_step(self, step):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and all(one.poll() is None for one in self.processes):
            metrics = self.folder / "metrics.jsonl"
            if metrics.exists() and len(read_metrics(self.folder)[0]) >= step:
                return
            time.sleep(0.2)
        pytest.fail(f"no step {step}:\n{self.output()}")

    def output(self):
        return "\n".join(path.read_text() for path in sorted(self.folder.parent.glob("*.log")))


@pytest.fixture
def words_of(tiny_of):
    """A function from a recipe to its words."""
    flags = ("--max_steps", str(STEPS), "--logging_steps", "1")
    return lambda recipe: [*map(str, data_of(tiny_of(recipe))), *flags]


@pytest.fixture
def whole_of(once, words_of):
    """A function from recipe and YAML to the folder of the same run on two ranks of one machine."""

    def whole_of(recipe, config):
        def train(folder):
            words = (*words_of(recipe), "--output_dir", folder)
            rehearse(config, *words, script=REPO / "recipes" / f"{recipe}.py", code=0)

        return once(f"on_one_machine_{recipe}_{config}", train)

    return whole_of


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("kind", "recipe", "config", "strategy"),
    [
        ("trainjob", "bert", "deepspeed_zero2", "DeepSpeed ZeRO-2"),
        ("skypilot", "llama", "fsdp", "FSDP2 FULL_SHARD"),
    ],
)
def test_the_command_of_the_file_trains_as_one_machine_does(
    kind, recipe, config, strategy, words_of, whole_of, tmp_path
):
    agents = Agents(kind, tmp_path / "run", words_of(recipe), recipe, config)
    assert agents.end() == [0, 0], agents.output()
    assert f"strategy: {strategy}, 2 x cpu" in agents.output()
    assert weights(agents.folder) == weights(whole_of(recipe, config))


def test_a_pod_that_is_evicted_saves_and_the_job_goes_on(words_of, whole_of, tmp_path):
    words = words_of("llama")
    agents = Agents("trainjob", tmp_path / "run", words)
    agents.wait_for_step(3)
    agents.processes[1].send_signal(signal.SIGTERM)  # as a kubelet sends it, to the first process
    assert 0 not in agents.end()
    assert read_json(agents.folder / "status.json")["exit_code"] == 75, agents.output()
    again = Agents("trainjob", agents.folder, words)
    assert again.end() == [0, 0], again.output()
    assert weights(again.folder) == weights(whole_of("llama", "fsdp"))


@pytest.mark.parametrize("kind", ["trainjob", "skypilot"])
@pytest.mark.parametrize("flag", [["--output_dir", "elsewhere"], ["--output-dir=elsewhere"]])
def test_the_folder_of_the_run_is_named_by_its_variable_only(kind, flag, words_of, tmp_path):
    agents = Agents(kind, tmp_path / "run", [*words_of("llama"), *flag])
    assert agents.end() == [64, 64] and "OUTPUT_DIR" in agents.output()


def test_skypilot_sees_the_exit_code_of_the_recipe(words_of, tmp_path):
    words = [*words_of("llama"), "--dataset_name", "missing.jsonl"]
    agents = Agents("skypilot", tmp_path / "run", words)
    assert agents.end() == [65, 65], agents.output()
