"""Fixtures of all tests: a tiny model with its rows, made once a run, and the real rows where they are at hand."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from filelock import FileLock

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "recipes"), str(REPO / "scripts"), str(REPO / "tests")]
# The interpreter's own programs (accelerate, ninja) without an activated environment, and no hub
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
# One thread a process: several processes with two spinning threads each take turns on two cores, 50 times slower
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import parity  # noqa: E402  from scripts/
from gpu import machine  # noqa: E402  from scripts/


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory, worker_id):
    """A folder for what all workers of one run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def tiny_of(shared_tmp):
    """A function from a recipe's name to the folder of its tiny model and few rows, made once a test run: model/,
    data/train.jsonl, data/test.jsonl (scripts/parity.py, MAKERS)."""

    def folder_of(recipe):
        folder = shared_tmp / f"tiny_{recipe}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                maker, *shape = parity.MAKERS[recipe]  # in process: half of a maker's time is imports
                with mock.patch.object(sys, "argv", [maker, str(folder), *shape]):
                    runpy.run_path(str(REPO / "scripts" / maker), run_name="__main__")
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny(tiny_of):
    """The folder of the tiny language model that recipes/llama.py trains."""
    return tiny_of("llama")


@pytest.fixture(scope="session")
def one_process(tiny_of, shared_tmp):
    """A function from kind of weights, and recipe, to the folder of its job in scripts/parity.py in one process, run
    once a test run."""

    def folder_of(weights, recipe="llama"):
        group = "strategies" if recipe == "llama" else recipe
        reference = parity.Run(group, "single", weights=weights, recipe=recipe)
        folder = shared_tmp / f"one_process_{reference.name}"
        with FileLock(f"{folder}.lock"):
            if not (folder / "done").exists():
                code, output = parity.launch(reference, tiny_of(recipe), folder)
                assert code == 0, output[-3000:]
                (folder / "done").touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def gsm8k():
    """Real rows (question, answer), which are not part of the project."""
    folder = REPO.parent / "shared" / "data" / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("the GSM8K rows are not at hand (../shared/data/gsm8k)")
    return folder


@pytest.fixture(scope="session")
def gsm8k_model(gsm8k, shared_tmp):
    """A 12M-parameter Llama with a tokenizer trained on the GSM8K rows."""
    folder = shared_tmp / "gsm8k"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            shape = "--vocab_size 4096 --hidden_size 384 --num_hidden_layers 5 --num_attention_heads 6".split()
            shape += "--num_key_value_heads 6 --intermediate_size 1024 --max_position_embeddings 1024".split()
            script = [str(REPO / "scripts" / "make_tiny_model.py"), str(folder), "--text", str(gsm8k / "train.jsonl")]
            subprocess.run([sys.executable, *script, *shape], check=True, capture_output=True)
    return folder / "model"


def pytest_report_header():
    versions = "torch accelerate transformers peft bitsandbytes deepspeed datasets".split()
    return "libraries: " + json.dumps({name: machine.version_of(name) for name in versions})
