# SPDX-License-Identifier: Apache-2.0
"""Which model families recipes/llama.py trains: its loss beside the model's own.

    pytest evidence/test_families.py --all -n 2                  # all: two hours on two cores
    pytest evidence/test_families.py --all -k "gemma2 or qwen3"

Each family has a tiny configuration (catalog.yaml) with random weights. The shipped recipe trains
it as a whole and with LoRA under single.yaml, and as a whole on two processes under fsdp.yaml, in
fp32 on CPU ranks. No flag chooses the attention, the layers that get adapters, or what FSDP wraps.
In each run the first loss must be what the model computes by itself on the same rows, with nothing
but transformers: labels by the chat template's own mask of what the assistant says, padding with an
attention mask. The loss must fall, each adapter must be trained, and the result must load, as
adapters on the untouched model, and have the loss that the trained model had.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from job import ROOT, output_of, read_steps, rehearsal, relative
from net import load_result, metrics
from tiny import llama, models

CATALOG = yaml.safe_load(Path(__file__).with_name("catalog.yaml").read_text(encoding="utf-8"))
ROWS = 16  # all families are trained on the same rows, of 20 to 50 tokens
STEPS = 4  # each is of all rows
VOCABULARY = 320  # rows of the embedding; the tokenizer has fewer tokens
# Relative. A loss is a mean over some hundred tokens in fp32, which rounds to 6e-8.
BOUND = 1e-6
SHORT = ("qwen3",)
# A parameter of Gemma 3n: 0 in an untrained model, so that whole layers would have no effect
ZERO_AT_START = "correct_output_scale"
# {how it is trained: (YAML, ranks, flags)}
KINDS = {
    "full": ("single", 1, ("--learning_rate", "1e-3")),
    "LoRA": ("single", 1, ("--use_peft", "--learning_rate", "1e-2")),
    "FSDP": ("fsdp", 2, ("--learning_rate", "1e-3")),
}


@pytest.fixture(scope="session")
def rows(once):
    """The file of the rows of all families."""

    def fill(folder):
        folder.mkdir()
        lines = [json.dumps(row) for row in llama.make_rows(ROWS, 0, 0)["train"]]
        (folder / "rows.jsonl").write_text("\n".join(lines))

    return once("families", fill) / "rows.jsonl"


def write_model(family, folder):
    """Write a random model of a family with the tokenizer that all families share."""
    shared = CATALOG["shared"]
    tokenizer = models.byte_level_bpe([], VOCABULARY)
    tokenizer.model_max_length = shared["max_position_embeddings"]
    known = shared | {
        "vocab_size": VOCABULARY,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        # so large that weights matter
        "initializer_range": 0.7 * shared["hidden_size"] ** -0.5,
    }
    config = AutoConfig.for_model(family, **(known | CATALOG["families"][family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if name.endswith(ZERO_AT_START):
            torch.nn.init.normal_(weight)
    end_of_turn = tokenizer.convert_tokens_to_ids(models.END_OF_TURN)
    model.generation_config.eos_token_id = [end_of_turn, tokenizer.eos_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_batch(rows, folder):
    """Return the rows as one padded batch: input_ids, attention_mask and labels, [rows, tokens]."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    conversations = []
    for row in map(json.loads, rows.read_text().splitlines()):
        user = {"role": "user", "content": row["prompt"]}
        conversations.append([user, {"role": "assistant", "content": row["completion"]}])
    encoded = tokenizer.apply_chat_template(
        conversations,
        return_dict=True,
        return_assistant_tokens_mask=True,
        return_tensors="pt",
        padding=True,
    )
    labels = encoded["input_ids"].masked_fill(encoded["assistant_masks"] == 0, -100)
    return {name: encoded[name] for name in ("input_ids", "attention_mask")} | {"labels": labels}


@torch.no_grad()
def loss_of(model, batch):
    """Return the model's own loss of a batch: the mean over its trained tokens, in nats.

    It is computed in training mode, as a step of training does.
    """
    model.train()
    return model(**batch, use_cache=False).loss.item()


def launch(kind, model, rows, folder):
    """Train a model on the rows, and evaluate it on the same rows after each step.

    Returns:
        The attention that transformers chose, the loss of each step before its update, and the loss
        after the last one.
    """
    config, ranks, flags = KINDS[kind]
    command = [*rehearsal(config, ranks), ROOT / "recipes" / "llama.py", *flags]
    command += ["--model_name_or_path", model, "--output_dir", folder, "--max_steps", STEPS]
    command += ["--dataset_name", rows, "--eval_dataset_name", rows]
    command += ["--per_device_train_batch_size", ROWS // ranks]
    command += ["--per_device_eval_batch_size", ROWS // ranks]
    code, told = output_of(command)
    assert code == 0, f"{kind}: {told[-3000:]}"
    losses = [line["loss"] for line in read_steps(folder)]
    evaluations = [line["eval_loss"] for line in metrics(folder) if "eval_loss" in line]
    assert len(losses) == len(evaluations) == STEPS
    attention = re.search(r"attention: (\S+)", told)[1]
    return attention, losses, evaluations[-1]


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("family", CATALOG["families"])
def test_family(family, rows, tmp_path, record):
    model_folder = tmp_path / "model"
    write_model(family, model_folder)
    batch = read_batch(rows, model_folder)
    own = loss_of(load_result(model_folder, tmp_path)[0], batch)
    record(family=family, own_loss=own)
    for kind in KINDS:
        attention, losses, trained = launch(kind, model_folder, rows, tmp_path / kind)
        # Adapters are loaded on the model that was there before. So their loss is only that of the
        # trained model if the run changed nothing else.
        model, _ = load_result(tmp_path / kind, tmp_path)
        loaded = loss_of(model, batch)
        run = {"losses": losses, "trained": trained, "loaded": loaded}
        if kind == "LoRA":
            # LoRA's second matrix begins with zeros. As long as it is zero, nothing was trained.
            effects = {
                name: weight for name, weight in model.named_parameters() if ".lora_B." in name
            }
            run["adapters"] = len(effects)
            run["untrained"] = [name for name, weight in effects.items() if not weight.any()]
            assert run["adapters"] and not run["untrained"], run
        record(**{kind: run}, attention=attention)
        assert relative(losses[0], own) <= BOUND, (kind, losses[0], own)
        assert trained < losses[0], (kind, losses, trained)
        assert relative(loaded, trained) <= BOUND, (kind, loaded, trained)
