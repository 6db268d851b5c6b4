# SPDX-License-Identifier: Apache-2.0
"""What would be silently wrong, and what most users meet, is refused before the model is loaded.

A line of a table is a call, its exit code, and one word that its message names: 64 is wrong usage,
65 wrong data, 69 no hub, 73 no place to write. tests/golden/rows.json has all kinds of bad rows.
"""

import json
import os
import shutil
import sys

import pytest
from transformers import BertConfig, GPT2Config

from launching import CONFIGS, RECIPE, REPO, accelerate_launch, rehearse, run

GOOD = '{"prompt": "Spell lamp.", "completion": "l-a-m-p"}'
# Files of rows. The template of the tiny model writes no tools.
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ASKED = {"role": "user", "content": "Is it sunny?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
FILES = {
    "rows.jsonl": GOOD,
    "two.jsonl": f"{GOOD}\n{GOOD}\n",
    "torn.jsonl": f'{GOOD}\n{{"prompt": "a", \n{GOOD}\n',
    "latin.jsonl": f"{GOOD}\n" * 8 + "caf\xe9\n",
    "spells.csv": "spell,letters\nlamp,l-a-m-p\nox,o-x\n",
    "no_answer.jsonl": f'{GOOD}\n{{"prompt": "Spell.", "completion": ""}}\n',
    "no_rejected.jsonl": '{"prompt": "a", "chosen": "b", "rejected": ""}\n',
    "no_target.jsonl": '{"source": "the dog", "target": ""}\n',
    "pairs.jsonl": '{"anchor": "a", "positive": "b"}\n',
    "uneven.jsonl": '{"query": "a", "answer": "b"}\n{"query": "a", "answer": "b", "negative": "c"}',
    "tools.jsonl": json.dumps({"messages": [ASKED, CALLED]}),
}
BEST = "--load_best_model_at_end --max_steps 2"
ROWS = "--dataset_name {tiny}/data/train.jsonl"
ANSWERS = "--predict_with_generate --num_predictions 1"
CALLS = [  # recipe, words, exit code, word
    # Files and rows
    ("llama", "--dataset_name {tmp}/rwos.jsonl", 65, "rwos.jsonl"),
    ("llama", "--dataset_name {tmp}/torn.jsonl", 65, "line 2"),
    ("llama", "--dataset_name {tmp}/latin.jsonl --dataset_num_proc 2", 65, "line 9"),
    ("llama", "--dataset_name {tmp}/spells.csv", 65, "--columns"),
    ("llama", "--dataset_name {tmp}/spells.csv --columns prompt=spel", 65, "spel"),
    ("llama", "--dataset_name {tmp}/two.jsonl --max_length 5", 65, "--max_length"),
    ("llama", "--dataset_name {tiny}/data --dataset_train_split none", 65, "none"),
    ("llama", "--dataset_name {tmp}/tools.jsonl", 65, "line 1"),
    ("llama_dpo", "--dataset_name {tmp}/no_rejected.jsonl", 65, "line 1"),
    ("t5", "--dataset_name {tmp}/no_target.jsonl", 65, "line 1"),
    ("mixtral", "--dataset_name {tmp}/no_answer.jsonl", 65, "line 2"),
    ("embeddings", "--dataset_name {tmp}/uneven.jsonl", 65, "line 2"),
    ("embeddings", "--dataset_name {tmp}/pairs.jsonl --matryoshka_dims 999", 64, "999"),
    ("vit", "--dataset_name {tmp}/images", 65, "00001.png"),
    # Flags: tests/unit/core/test_cli.py has more of them
    ("llama", "--learning_rat 1", 64, "--learning_rate"),
    ("llama", "--attn_implementation flash_attention_2", 64, "package"),
    ("llama", "--use_peft --lora_target_modules q_prj", 64, "none of this name"),
    ("llama", BEST, 64, "--eval_split"),
    ("mistral_pretrain", f"--dataset_name {{tmp}}/text.txt {BEST}", 64, "--num_eval_documents"),
    ("llama", ANSWERS, 64, "--predict_with_generate"),
    ("llama", f"{ROWS} --eval_split 10 {ANSWERS} --no_completion_only_loss", 64, "prompt"),
    # Models
    ("llama", "--model_name_or_path {tmp}/none", 64, "none"),
    ("llama", "--model_name_or_path {tmp}/model", 64, "tokenizer"),
    ("llama", "--model_name_or_path {tmp}/short", 64, "safetensors"),
    ("llama", "--model_name_or_path {tmp}/bert", 64, "recipes/bert.py"),
    ("llama", "--model_name_or_path owner/none", 69, "huggingface.co"),
    # Output
    ("llama", "--output_dir {tmp}/rows.jsonl", 73, "rows.jsonl"),
    ("llama", "--output_dir {tiny}/model --dry_run", 64, "--output_dir"),
    ("llama", "--output_dir {tmp}/model", 64, "--output_dir"),
]


@pytest.fixture
def inputs(tiny, tmp_path):
    """A folder with FILES, models that lack something, and the status of an earlier run."""
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    (tmp_path / "text.txt").write_text("A text.\n")
    # By hard links: nothing changes a file
    no_tokenizer = shutil.ignore_patterns("*token*")
    shutil.copytree(tiny / "model", tmp_path / "model", ignore=no_tokenizer, copy_function=os.link)
    no_weights = shutil.ignore_patterns("*.safetensors", "config.json")
    for config in (GPT2Config(vocab_size=512, n_positions=4), BertConfig(vocab_size=512)):
        folder = tmp_path / ("short" if config.model_type == "gpt2" else "bert")
        shutil.copytree(tiny / "model", folder, ignore=no_weights)
        config.save_pretrained(folder)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "stopped", "exit_code": 75}')
    return tmp_path


@pytest.mark.parametrize(("name", "call", "code", "word"), CALLS)
def test_a_call_is_refused(name, call, code, word, tiny, tiny_of, inputs):
    if name == "vit":
        shutil.copytree(tiny_of("vit") / "data" / "train", inputs / "images" / "train")
        (inputs / "images" / "train" / "cross" / "00001.png").write_text("no image")
    words = [word.format(tmp=inputs, tiny=tiny) for word in call.split()]
    defaults = {
        "--model_name_or_path": tiny_of(name) / "model",
        "--dataset_name": inputs / "rows.jsonl",
        "--output_dir": inputs / "run",
    }
    for flag, value in defaults.items():
        if flag not in words:
            words += [flag, value]
    done = run(sys.executable, REPO / "recipes" / f"{name}.py", *words)
    assert_refused(done, code, word)
    # A wrong flag may be refused before there is a run
    if code != 64 and "--output_dir" not in call and "--dry_run" not in call:
        status = json.loads((inputs / "run" / "status.json").read_text())
        assert status["exit_code"] == code


# What can only be told of a model that is loaded, or is told after it
OF_THE_MODEL = ("none of this name", "--predict_with_generate", "prompt")


def assert_refused(done, code, word):
    assert done.returncode == code, done.output[-3000:]
    assert "Traceback" not in done.output
    assert word in OF_THE_MODEL or "Loading weights" not in done.output
    message = done.output[done.output.index("error: ") :]
    assert word in message and len(message.splitlines()) <= 8, message


UNDER = [  # YAML, recipe, words, word
    ("tp", "mixtral", "--ep_size 2", "cannot be combined"),
    ("fsdp2_full_shard", "llama_pipeline", "", "pp.yaml"),
    ("pp", "llama_pipeline", "--pp_size 3", "--pp_size"),
]


@pytest.mark.parametrize(("config", "name", "call", "word"), UNDER)
def test_what_cannot_work_under_a_yaml_is_refused(config, name, call, word, tiny, inputs):
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", inputs / "rows.jsonl"]
    words += [*call.format(tmp=inputs).split(), "--output_dir", inputs / "run"]
    done = rehearse(config, *words, num_processes=2, script=REPO / "recipes" / f"{name}.py")
    assert_refused(done, 64, word)


# What accelerate would not tell: it runs one process in the place of two, and ignores a key that it
# does not know. tests/unit/core/test_engine.py has what it drops besides.
LAUNCHED = [  # file, words of the launcher, word
    ("ddp", ["--num_processes", 2], "one process"),
    ("misspelt", [], "ofload_params"),
]


@pytest.mark.parametrize(("config", "launcher", "word"), LAUNCHED)
def test_a_launch_that_would_run_something_else_is_refused(config, launcher, word, tiny, inputs):
    path = CONFIGS / f"{config}.yaml"
    if config == "misspelt":
        path = inputs / "misspelt.yaml"
        text = (CONFIGS / "fsdp2_cpu_offload.yaml").read_text()
        path.write_text(text.replace("fsdp_offload_params", "fsdp_ofload_params"))
    words = ["--model_name_or_path", tiny / "model", "--dataset_name", inputs / "rows.jsonl"]
    launcher = ["--config_file", path, "--mixed_precision", "no", *launcher]
    done = accelerate_launch(
        *launcher,
        *("--main_process_port", 0, RECIPE, *words, "--output_dir", inputs / "run"),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode != 0 and word in done.output, done.output[-3000:]
    assert "Loading weights" not in done.output and not (inputs / "new").exists()
