# SPDX-License-Identifier: Apache-2.0
"""Every file of examples/ passes a dry run under its YAML and fits its card, with a model of the
true shape, and a finished run is repeated from its run.json."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from jobs import LLAMA_3_1_8B
from launching import REPO, data_of, read_json, recipe, rehearse, run

EXAMPLES = sorted(path.stem for path in (REPO / "examples").glob("*.yaml"))
MOST_RANKS = 2  # CPU ranks that a rehearsal starts for eight GPUs
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
SMOLLM = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
SHAPES = {
    "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_3_1_8B | LLAMA_1B | {"tie_word_embeddings": True},
    "HuggingFaceTB/SmolLM2-135M": LLAMA_3_1_8B | SMOLLM | {"tie_word_embeddings": True},
}


def commands_of(text):
    """The words of the two commands in the head of an example: its launch, and its plan."""
    joined = re.sub(r"\\\n#", " ", text)
    return [shlex.split(line) for line in re.findall(r"^#   (\w.*)", joined, re.MULTILINE)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_fits_its_card_and_passes_a_dry_run(name, tiny, tmp_path):
    path = REPO / "examples" / f"{name}.yaml"
    launch, plan = commands_of(path.read_text())
    args = yaml.safe_load(path.read_text())
    assert launch[-2:] == plan[-2:] == ["--config", f"examples/{name}.yaml"]
    assert args["output_dir"] == f"runs/{name}"
    shutil.copytree(tiny / "model", tmp_path / "model", ignore=lambda *_: ["model.safetensors"])
    shape = SHAPES[args["model_name_or_path"]]
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    model = ["--model_name_or_path", tmp_path / "model"]
    assert ": fits" in run(sys.executable, *plan[1:], *model, code=0).output
    processes = int(launch[launch.index("--num_processes") + 1])
    done = rehearse(
        Path(launch[launch.index("--config_file") + 1]).stem,
        *launch[-2:],
        *("--dry_run", "--output_dir", tmp_path / "run", *model),
        *("--dataset_name", tiny / "data" / "train.jsonl"),
        num_processes=min(processes, MOST_RANKS),
        script=launch[-3],
    )
    if done.returncode == 73:  # the last thing that is checked, after all else
        assert "bytes are needed for checkpoints and result" in done.output
    else:
        assert done.returncode == 0 and "Dry run" in done.output, done.output[-3000:]


def test_a_run_is_repeated_from_its_run_json_and_a_changed_flag_wins(tiny, tmp_path):
    job = [*data_of(tiny), "--max_steps", "2", "--save_steps", "0", "--seed", "7", "--use_peft"]
    recipe(*job, "--output_dir", tmp_path / "first", code=0)
    replay = ["--config", tmp_path / "first" / "run.json"]
    recipe(*replay, "--output_dir", tmp_path / "again", code=0)
    first = read_json(tmp_path / "first" / "run.json")["arguments"]
    again = read_json(tmp_path / "again" / "run.json")["arguments"]
    assert again == first | {"output_dir": str(tmp_path / "again")}
    weights = "adapter_model.safetensors"
    trained = (tmp_path / "first" / weights).read_bytes()
    assert (tmp_path / "again" / weights).read_bytes() == trained
    # All the same otherwise, the folder of the run included
    assert "seed" in recipe(*replay, "--seed", "8", code=64).output
