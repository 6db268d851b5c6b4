# SPDX-License-Identifier: Apache-2.0
"""Every file of examples/ passes a dry run under its YAML; a run is repeated from its run.json."""

import json
import re
import shutil

import pytest

from launching import REPO, read_json, recipe, rehearse
from net import data_of

EXAMPLES = sorted((REPO / "examples").glob("*.yaml"))
LAUNCH = re.compile(
    r"accelerate_configs/(\w+)\.yaml --num_processes (\d+) \\\n#\s+recipes/(\w+)\.py"
)
FEW_ROWS = {"mistral_pretrain": ["--num_eval_documents", "20"]}  # The tiny data has few documents


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_passes_a_dry_run(path, tiny_of, tmp_path):
    """As its header says, on at most two ranks, with a tiny model for rows as long as its own."""
    config, ranks, name = LAUNCH.search(path.read_text()).groups()
    tiny = shutil.copytree(tiny_of(name), tmp_path / "tiny")
    shape = read_json(tiny / "model" / "config.json") | {"max_position_embeddings": 131072}
    (tiny / "model" / "config.json").write_text(json.dumps(shape))
    words = ["--config", path, "--dry_run", *data_of(tiny), "--output_dir", tmp_path / "run"]
    words += FEW_ROWS.get(name, [])
    script = REPO / "recipes" / f"{name}.py"
    done = rehearse(config, *words, num_processes=min(int(ranks), 2), script=script)
    assert done.returncode == 0 and "Dry run" in done.output, done.output[-3000:]


def test_a_run_is_repeated_from_its_run_json_and_a_changed_flag_wins(tiny, tmp_path):
    job = [*data_of(tiny), "--max_steps", "2", "--save_steps", "0", "--seed", "7", "--use_peft"]
    assert recipe(*job, "--output_dir", tmp_path / "first").returncode == 0
    replay = ["--config", tmp_path / "first" / "run.json"]
    done = recipe(*replay, "--output_dir", tmp_path / "again")
    assert done.returncode == 0, done.output[-3000:]
    first = read_json(tmp_path / "first" / "run.json")["arguments"]
    again = read_json(tmp_path / "again" / "run.json")["arguments"]
    assert again == first | {"output_dir": str(tmp_path / "again")}
    weights = "adapter_model.safetensors"
    trained = (tmp_path / "first" / weights).read_bytes()
    assert (tmp_path / "again" / weights).read_bytes() == trained
    done = recipe(*replay, "--seed", "8")  # All the same otherwise, the folder of the run included
    assert done.returncode == 64 and "seed" in done.output, done.output[-3000:]
