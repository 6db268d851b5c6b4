"""Fixtures of all tests: tiny models with their rows, made once per test run, and real rows."""

import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "recipes"), str(REPO / "scripts"), str(REPO / "tests")]
# The interpreter's own programs (accelerate, ninja) without an activated environment, and no hub
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# One thread per process: several processes with two spinning threads each take turns on two cores,
# 50 times slower
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

gc.disable()  # until all is imported: looking for garbage would take a fifth of that time
from gpu import machine  # noqa: E402  from scripts/
from proof.jobs import MAKERS, Run  # noqa: E402  from scripts/
from proof.launch import launch  # noqa: E402  from scripts/

LIBRARIES = ("torch", "accelerate", "transformers", "peft", "bitsandbytes", "deepspeed", "datasets")
GSM8K_SHAPE = [
    *"--vocab_size 4096 --hidden_size 384 --num_hidden_layers 5 --num_attention_heads 6".split(),
    *"--num_key_value_heads 6 --intermediate_size 1024 --max_position_embeddings 1024".split(),
]


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory, worker_id):
    """A folder for what all workers of one run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def once(shared_tmp):
    """A function from a name, and a function that fills a folder, to that folder of the test run.

    The folder is filled by the worker that asks first; the others wait.
    """

    def folder_of(name, fill):
        folder = shared_tmp / name
        done = shared_tmp / f"{name}.done"
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
                fill(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_of(once):
    """A function from a recipe's name to the folder of its tiny model and few rows.

    The folder is made once per test run by MAKERS of scripts/proof/jobs.py. It contains model/,
    data/train.jsonl and data/test.jsonl.
    """

    def make(recipe, folder):
        maker, *shape = MAKERS[recipe]
        # In process, since half of a maker's time is imports
        with mock.patch.object(sys, "argv", [maker, str(folder), *shape]):
            runpy.run_path(str(REPO / "scripts" / maker), run_name="__main__")

    return lambda recipe: once(f"tiny_{recipe}", partial(make, recipe))


@pytest.fixture(scope="session")
def tiny(tiny_of):
    """The folder of the tiny language model that recipes/llama.py trains."""
    return tiny_of("llama")


@pytest.fixture(scope="session")
def one_process(tiny_of, once):
    """A function from kind of weights, and recipe, to the folder of its job in one process.

    The job is that of scripts/parity.py, and is run once per test run.
    """

    def train(reference, folder):
        code, output = launch(reference, tiny_of(reference.recipe), folder)
        assert code == 0, output[-3000:]

    def folder_of(weights, recipe="llama"):
        group = "strategies" if recipe == "llama" else recipe
        reference = Run(group, "single", weights=weights, recipe=recipe)
        return once(f"one_process_{reference.name}", partial(train, reference))

    return folder_of


@pytest.fixture(scope="session")
def gsm8k():
    """Real rows (question, answer), which are not part of the project."""
    folder = REPO.parent / "shared" / "data" / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("the GSM8K rows are not at hand (../shared/data/gsm8k)")
    return folder


@pytest.fixture(scope="session")
def gsm8k_model(gsm8k, once):
    """A 12M-parameter Llama with a tokenizer trained on the GSM8K rows."""

    def make(folder):
        script = str(REPO / "scripts" / "make_tiny_model.py")
        flags = ["--text", str(gsm8k / "train.jsonl"), *GSM8K_SHAPE]
        command = [sys.executable, script, str(folder), *flags]
        subprocess.run(command, check=True, capture_output=True)

    return once("gsm8k", make) / "model"


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_report_header():
    versions = {name: machine.version_of(name) for name in LIBRARIES}
    return f"libraries: {json.dumps(versions)}"
