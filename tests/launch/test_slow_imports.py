# SPDX-License-Identifier: Apache-2.0
"""A program imports what takes seconds only when it needs it: each is its own, cold process."""

import os
import subprocess
import sys

import pytest
from transformers import AutoConfig

from launching import REPO, run

pytestmark = pytest.mark.cold("what it imports itself is looked at")
RECIPES = sorted((REPO / "recipes").glob("*.py"))
FEW_ROWS = ["--num_train_rows", "20", "--num_test_rows", "8"]


def refused_at_once(path, folder, *words):
    """What a recipe prints that must refuse its words before it imports torch."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"sys.argv = ['x.py', '--output_dir', '{folder}', *{words}]\n"
        f"sys.path.insert(0, '{path.parent}')\n"
        f"runpy.run_path('{path}', run_name='__main__')\n"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 64, done.output
    assert done.output.endswith("False\n") and (folder / "status.json").exists()
    return done.output


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_wrong_flag_is_told_before_the_imports_that_take_seconds(path, tmp_path):
    assert "did you mean --seed?" in refused_at_once(path, tmp_path, "--sede", "1")


@pytest.mark.parametrize(
    ("recipe", "pair", "meaning"),
    [
        ("llama", "promt=question", "prompt=question"),
        ("bert", "lable=stars", "label=stars"),
        ("vit", "imge=scan", "image=scan"),
    ],
)
def test_a_wrong_role_of_a_column_is_told_before_them_too(recipe, pair, meaning, tmp_path):
    path = REPO / "recipes" / f"{recipe}.py"
    output = refused_at_once(path, tmp_path, "--columns", pair)
    assert f"--columns {pair}: no such role; the roles are " in output
    assert f"did you mean {meaning}?" in output


def test_the_check_of_a_config_loads_neither_torch_nor_accelerate():
    code = "import check_config, sys; print({'torch', 'accelerate'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO / "scripts"
    )
    assert done.stdout.strip() == "set()"


def test_a_plan_loads_no_library_that_only_training_needs(tmp_path):
    """Those that take a tenth of a second and more: half of the time of a plan would go there."""
    config = AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=1, vocab_size=100)
    config.save_pretrained(tmp_path)
    code = (
        "import plan_memory, sys\n"
        f"sys.argv = ['x.py', '--gpu', '24GB', {str(tmp_path)!r}]\n"
        "assert plan_memory.main() == 0\n"
        "print({'peft', 'bitsandbytes', 'datasets', 'pandas', 'deepspeed'} & {*sys.modules})"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO / "scripts")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert done.stdout.endswith("\nset()\n"), done.stdout + done.stderr


def test_only_the_process_of_a_cell_of_the_gpu_proof_loads_torch():
    code = "import sys; from gpu import catalog, runner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO / "scripts", check=True)


def test_a_wrong_call_of_a_maker_is_refused_before_torch_is_imported():
    program = (
        "import sys\n"
        "from tiny import makers\n"
        "try:\n"
        "    makers.make('bert', 'folder', ['--dropout', '2'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 64\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPO / "scripts")


def test_a_maker_imports_nothing_that_only_another_one_needs(tmp_path):
    program = (
        "import sys\n"
        "from tiny import makers\n"
        f"makers.make('vit', {str(tmp_path)!r}, {FEW_ROWS})\n"
        "own = {name for name in sys.modules if name.startswith('tiny.')}\n"
        "assert not own & {'tiny.tokenizers', 'tiny.llama', 'tiny.bert', 'tiny.t5'}, own\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPO / "scripts")


def test_the_help_of_the_chat_comes_before_the_imports_that_take_seconds():
    program = (
        "import sys, chat\n"
        "sys.argv = ['chat.py', '--help']\n"
        "try:\n"
        "    chat.main()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not {'torch', 'datasets', 'gradio'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPO / "scripts")
