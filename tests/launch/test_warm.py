# SPDX-License-Identifier: Apache-2.0
"""A warm start is what a cold one would have been.

The same bits under each engine, and the same arguments, streams, limits and ends of a process.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from proof.jobs import ranks_of, run_on_ranks
from proof.trials.outcome import unequal

from jobs import data_of, launch
from launching import INTERPRETER, REPO, run

if "WARM_PYTHON" not in os.environ:
    pytest.skip("all starts are cold", allow_module_level=True)

CANARIES = [
    ("single", "full"),
    ("ddp", "LoRA"),
    ("fsdp1_full_shard", "full"),
    ("fsdp2_full_shard", "nf4 LoRA"),
    ("deepspeed_zero3", "full"),
]


@pytest.mark.parametrize(("config", "weights"), CANARIES, ids=[" ".join(pair) for pair in CANARIES])
def test_a_launch_gives_the_same_bits(config, weights, tiny, tmp_path, monkeypatch):
    ranks = ranks_of(config, 2)
    planned = run_on_ranks("strategies", config, ranks, weights, flags=("--max_steps", "8"))
    for folder, program in (("warm", sys.executable), ("cold", INTERPRETER)):
        monkeypatch.setattr(sys, "executable", program)
        code, output = launch(planned, tiny, tmp_path / folder)
        assert code == 0, output[-3000:]
        assert "warm: " not in output  # a fallback
    assert unequal(tmp_path / "warm", tmp_path / "cold") == 0
    assert what_ran(tmp_path / "warm") == what_ran(tmp_path / "cold")


def what_ran(folder):
    """The shard report and run.json of a run, without its place, which differs."""
    texts = [(folder / name).read_text() for name in ("report.json", "run.json")]
    return [json.loads(text.replace(str(folder), "FOLDER")) for text in texts]


# ---- What a process starts with ----


def start(program, *arguments, **options):
    """Start a small program warm, with a pipe for each of its streams."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, program, *arguments]
    return subprocess.Popen([str(word) for word in command], **pipes | {"text": True} | options)


@pytest.fixture
def program(tmp_path):
    """A function that writes a program and returns its path."""

    def write(text):
        (tmp_path / "program.py").write_text(text)
        return tmp_path / "program.py"

    return write


def test_arguments_streams_folder_environment_and_mask_are_those_of_the_caller(program, tmp_path):
    path = program(
        "import os, sys\n"
        "mask = os.umask(0)\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['WARM_X'], mask)\n"
        "print(sys.stdin.read(), file=sys.stderr)\n"
        "print(__name__, sys.path[0], 'torch' in sys.modules)\n"
    )
    environment = os.environ | {"WARM_X": "7"}
    process = start(path, "a b", "--c", cwd=tmp_path, env=environment, umask=0o27)
    out, told = process.communicate("typed")
    first, second = out.splitlines()
    assert first == f"['a b', '--c'] {tmp_path} 7 23"
    assert second == f"__main__ {tmp_path} True"
    assert told == "typed\n"


def test_no_file_of_this_project_is_there_before_it_is_imported(program):
    text = (
        "import sys\n"
        f"own = ('{REPO}/recipes', '{REPO}/scripts')\n"
        "del sys.modules['__mp_main__']\n"  # what multiprocessing made of the server's own file
        "files = [str(vars(module).get('__file__')) for module in sys.modules.values()]\n"
        "print([file for file in files if file.startswith(own)])\n"
        "print([folder for folder in sys.path if folder.startswith(own)])\n"
    )
    assert start(program(text)).communicate()[0] == "[]\n[]\n"


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("", 0, ""),
        ("import sys\nsys.exit(75)", 75, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("import os\nos.kill(os.getpid(), 9)", -9, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import atexit, sys\natexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
    ids=["nothing", "code", "text", "signal", "exception", "atexit"],
)
def test_it_ends_as_the_interpreter_would(text, code, told, program):
    process = start(program(text))
    _, error = process.communicate()
    assert process.returncode == code and told in error


def test_a_signal_reaches_the_process(program):
    text = (
        "import signal, sys\n"
        "signal.signal(15, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    process = start(program(text))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75


def test_what_is_killed_is_gone(program):
    process = start(program("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)"))
    pid = int(process.stdout.readline())
    assert pid != process.pid
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_limits_hold(program):
    text = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    process = start(
        program(text), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (321, 4000))
    )
    assert process.communicate()[0] == "321\n"


def test_children_start_warm_too(program):
    text = (
        "import os, subprocess, sys\nif sys.argv[1:]: sys.exit(len(sys.modules) > 2000)\n"
        "sys.exit(subprocess.run([sys.executable, '-u', __file__, 'child']).returncode)"
    )
    process = start(program(text))
    assert process.wait(10) == 1  # true


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"OMP_NUM_THREADS": "2"}, "another value of OMP_NUM_THREADS"),
        ({"HF_HOME": "/x"}, "another value of HF_HOME"),
        ({"PYTHONPATH": "/x"}, "another value of PYTHONPATH"),
    ],
    ids=["threads", "cache", "path"],
)
def test_what_imports_have_read_otherwise_starts_cold_and_says_why(variables, reason, program):
    process = start(
        program("import sys\nprint('torch' in sys.modules)"), env=os.environ | variables
    )
    out, told = process.communicate()
    assert out == "False\n" and told.startswith("warm: a cold start, since ") and reason in told


def test_a_rehearsal_by_hand_starts_warm(tiny, tmp_path):
    command = [INTERPRETER, "scripts/rehearse.py", "--warm", "--device", "cpu"]
    command += ["--config_file", "accelerate_configs/single.yaml", "recipes/llama.py"]
    command += [*data_of(tiny), "--max_steps", 2, "--output_dir", tmp_path / "run"]
    # It would start a server of its own, which takes seconds, and finds that of the tests
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    server = Path(os.environ["WARM_PYTHON"]).parent
    os.symlink(server, default_folder(tmp_path))
    done = run(*command, "--warm", "x", env=environment)
    # The second --warm is the recipe's, which does not know it
    assert done.returncode == 64 and "--warm" in done.output
    done = run(*command, env=environment)
    assert done.returncode == 0 and "warm: " not in done.output, done.output[-3000:]
    assert (server / "log").read_text().count("warm\n") >= 3


def default_folder(tmp_path):
    code = "from warm.start import default_folder\nprint(default_folder())"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(REPO / "scripts")}
    return run(INTERPRETER, "-c", code, env=environment).output.strip()
