# SPDX-License-Identifier: Apache-2.0
"""What clusters/torchrun_elastic.sh refuses, waits for and says, with a stand-in for the launcher.

tests/cluster and tests/hosts run it with torchrun.
"""

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from slurm_cluster import free_ports

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "accelerate_configs"
# What starts the ranks: it writes the words that it was given, and a status if there is to be one.
LAUNCHER = """#!/bin/bash
printf '%s\\n' "$@" > "$WORDS"
[[ $STATUS ]] && sleep 0.05 && echo "$STATUS" > "$OUTPUT_DIR/status.json"
exit "$CODE"
"""
NO_GPUS = "#!/bin/bash\nexit 127\n"
# In place of Python, to which the script leaves the question whether MEETING is this host
NOT_THIS_HOST = "#!/bin/bash\nexit 1\n"


@pytest.fixture
def program(tmp_path):
    """A function that writes a program, and returns the folder to put before PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, text):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        return folder

    return write


@pytest.fixture
def start(program, tmp_path):
    """A function that starts the script, and returns its process."""
    program("nvidia-smi", NO_GPUS)
    folder = program("launcher", LAUNCHER)
    started = []

    def start(*words, code=0, status="", **changes):
        environment = os.environ | {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "RECIPE": str(REPO / "recipes/llama.py"),
            "CONFIG": str(CONFIGS / "fsdp.yaml"),
            "LAUNCHER": shlex.quote(str(folder / "launcher")),
            "OUTPUT_DIR": str(tmp_path / "run"),
            "MEETING": f"127.0.0.1:{free_ports(1)[0]}",
            "HOSTS": "1:2",
            "GPUS": "2",
            "BATCH": "2",
            "ROWS_PER_STEP": "8",
            "WORDS": str(tmp_path / "words"),
            "STATUS": status,
            "CODE": str(code),
        }
        process = subprocess.Popen(
            [str(REPO / "clusters" / "torchrun_elastic.sh"), *words],
            env=environment | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def call(start):
    """A function that runs the script, and returns its exit code and what it says."""

    def call(*words, **options):
        process = start(*words, **options)
        told, _ = process.communicate(timeout=60)
        return process.returncode, told

    return call


# ---- Refused in one line ----
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RECIPE": "missing.py"}, "RECIPE is the script to train"),
        ({"CONFIG": "missing.yaml"}, "CONFIG is the YAML"),
        *(
            ({"MEETING": meeting}, "MEETING is where the agents meet, a host and a port")
            for meeting in ("", ":", "host1", "host1:", ":29400", "host1:x", "a b:1", "host1:65536")
        ),
        ({"MEETING": "no-such-host.invalid:1"}, "MEETING=no-such-host.invalid:1: the name"),
        *(
            ({"HOSTS": hosts}, "HOSTS is how many hosts take part")
            for hosts in ("", "all", "0:2", "1:08", "1:", "1:2:3", "1:99999999999999999999")
        ),
        ({"HOSTS": "4:1"}, "HOSTS=4:1 has to begin with the least number: HOSTS=1:4"),
        ({"ROWS_PER_STEP": ""}, "ROWS_PER_STEP is the rows of a step"),
        ({"ROWS_PER_STEP": "08"}, "ROWS_PER_STEP is the rows of a step"),
        ({"ROWS_PER_STEP": "12"}, "ROWS_PER_STEP=12 is not a multiple of 8"),
        ({"BATCH": "two"}, "BATCH is the rows of a micro-batch"),
        ({"GPUS": ""}, "nvidia-smi finds no GPU on this host: GPUS=N says how many ranks it has"),
        *(
            ({"GPUS": gpus}, "GPUS is how many ranks this host has")
            for gpus in ("0", "abc", "1 2", "08", "-1", "RANDOM", "9" * 20)
        ),
        ({"JOIN_TIMEOUT": "10m"}, "JOIN_TIMEOUT is seconds"),
        ({"OUTPUT_DIR": ""}, "OUTPUT_DIR is the folder of the run"),
        ({"CONFIG": str(CONFIGS / "single.yaml")}, "CONFIG={} is not for several processes"),
        *(
            ({"CONFIG": str(CONFIGS / f"{name}.yaml")}, "CONFIG={} has a mesh")
            for name in ("tp", "fsdp2_hybrid_shard", "deepspeed_ulysses")
        ),
        ({"RECIPE": str(REPO / "recipes/llama_pipeline.py")}, "RECIPE={} trains pipelines"),
    ],
    ids=str,
)
def test_a_wrong_variable_is_refused_in_one_line(changes, message, call, tmp_path):
    code, told = call(**changes)
    assert told.startswith(f"error: {message.format(*changes.values())}")
    assert (code, told.count("\n")) == (64, 1)
    assert not (tmp_path / "words").exists()


@pytest.mark.parametrize(
    ("flag", "variable"),
    [
        ("--output_dir", "OUTPUT_DIR"),
        ("--per_device_train_batch_size", "BATCH"),
        ("--gradient_accumulation_steps", "ROWS_PER_STEP"),
    ],
)
@pytest.mark.parametrize("form", ["{} 4", "{}=4"])
@pytest.mark.parametrize("separator", ["_", "-"])
def test_a_flag_that_a_variable_decides_is_refused(flag, variable, form, separator, call):
    spelled = "--" + flag[2:].replace("_", separator)
    code, told = call("--seed", "1", *form.format(spelled).split())
    assert told.startswith(f"error: {variable} ") and told.endswith(f", not {spelled}\n")
    assert (code, told.count("\n")) == (64, 1)


def test_a_folder_that_cannot_be_written_is_named_with_the_reason(call, tmp_path):
    (tmp_path / "file").touch()
    code, told = call(OUTPUT_DIR=f"{tmp_path}/file/run")
    reason = "cannot be written (Not a directory): choose a folder that can"
    assert (code, told) == (73, f"error: OUTPUT_DIR={tmp_path}/file/run {reason}\n")


# ---- Taken ----
@pytest.mark.parametrize("hosts", ["1:2", "2", "2:2"])
@pytest.mark.parametrize("name", ["ddp", "fsdp1_hybrid_shard", "deepspeed_zero3", "fsdp2_ep"])
def test_a_yaml_for_any_number_of_ranks_is_taken(name, hosts, call, tmp_path):
    config = str(CONFIGS / f"{name}.yaml")
    assert call("--seed", "1", CONFIG=config, HOSTS=hosts) == (0, "")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--config_file") + 1] == config
    assert words[-2:] == ["--seed", "1"]


def test_an_empty_mesh_is_none(call, tmp_path):
    (tmp_path / "my.yaml").write_text("distributed_type: 'FSDP'\nparallelism_config: {}\n")
    assert call(CONFIG=str(tmp_path / "my.yaml")) == (0, "")


def test_gpus_are_counted(program, call, tmp_path):
    program("nvidia-smi", "#!/bin/bash\necho 'GPU 0: H100'; echo '  MIG 1g'; echo 'GPU 1: H100'")
    assert call(GPUS="") == (0, "")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--num_processes") + 1] == "2"


# ---- The last line ----
@pytest.mark.parametrize("earlier", [None, '{\n  "exit_code": 70,\n  "why": "an earlier run"\n}'])
def test_status_json_does_not_say_why_if_this_run_recorded_nothing(earlier, call, tmp_path):
    if earlier is not None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "status.json").write_text(earlier)
    code, told = call(code=1)
    assert code == 1 and "status.json" not in told
    assert told.startswith("ended with exit code 1, of which the recipe has recorded nothing")


def test_the_last_line_names_what_this_run_recorded(call, tmp_path):
    code, told = call(code=1, status='{\n  "exit_code": 65,\n  "why": "no rows"\n}')
    assert code == 65
    assert told == f"ended with exit code 65: {tmp_path}/run/status.json says why\n"


# ---- In any order ----
def rendezvous(tmp_path):
    """The settings of the rendezvous that the launcher was given."""
    words = (tmp_path / "words").read_text().splitlines()
    return dict(pair.split("=") for pair in words[words.index("--rdzv_conf") + 1].split(","))


def test_the_host_of_the_meeting_waits_for_nobody_and_has_the_store(call, tmp_path):
    assert call(JOIN_TIMEOUT="77") == (0, "")
    settings = rendezvous(tmp_path)
    assert settings == {"is_host": "1", "join_timeout": "77", "last_call_timeout": "30"}


def test_a_host_that_is_started_first_waits_for_the_one_of_the_meeting(start, program, tmp_path):
    program("python", NOT_THIS_HOST)
    (port,) = free_ports(1)
    process = start(MEETING=f"127.0.0.1:{port}")
    line = process.stdout.readline()
    waits = "waiting up to 600 s for the same command on 127.0.0.1, which does not answer at"
    assert line == f"{waits} 127.0.0.1:{port} yet\n"
    assert process.poll() is None and not (tmp_path / "words").exists()
    with socket.create_server(("127.0.0.1", port)):
        assert process.communicate(timeout=60) == ("", None)
    assert process.returncode == 0
    assert rendezvous(tmp_path)["is_host"] == "0"


def test_a_host_of_the_meeting_that_never_comes_is_named(call, program):
    program("python", NOT_THIS_HOST)
    (port,) = free_ports(1)
    code, told = call(MEETING=f"127.0.0.1:{port}", JOIN_TIMEOUT="1")
    _, last = told.splitlines()
    cure = "start the same command there too"
    assert last == f"error: 127.0.0.1 does not answer at 127.0.0.1:{port} after 1 s: {cure}"
    assert code == 1
