# SPDX-License-Identifier: Apache-2.0
"""Evaluation rows become prompts and references, and answers become verdicts."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import llama
from core.chat import ChatTemplate
from core.cli import parse
from core.data import Rows
from extras.predict.answers import (
    SHORT_ANSWER,
    Predictor,
    PromptCollator,
    attending_to_padded_rows,
    last_answer,
)
from extras.varlen import attention as varlen
from fakes import fake_accelerator

TALK = [
    {"role": "user", "content": "Spell ab."},
    {"role": "assistant", "content": "a-b"},
    {"role": "user", "content": "Spell cd."},
    {"role": "assistant", "content": "c-d"},
]


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture(scope="module")
def tokenize(tokenizer):
    """A function from conversations to prepared rows, as a data set with numbers from 1."""

    def prepare(*conversations):
        rows = []
        for number, messages in enumerate(conversations, 1):
            row = llama.tokenize_row({"messages": messages}, ChatTemplate(tokenizer), 1024)
            rows.append(row | {"row": number})
        return Dataset.from_list(rows).with_format("numpy")

    return prepare


# ---- Answers ----
class Parrot(torch.nn.Module):
    """A model that answers each prompt with the same tokens."""

    def __init__(self, answer, positions=1000):
        super().__init__()
        self.answer = answer
        text = SimpleNamespace(max_position_embeddings=positions)
        self.config = SimpleNamespace(
            _attn_implementation="sdpa", get_text_config=lambda: text, is_encoder_decoder=False
        )
        self.generation_config = SimpleNamespace(eos_token_id=7)

    def generate(self, input_ids, attention_mask, **options):
        answers = torch.tensor([self.answer] * len(input_ids))
        return torch.cat([input_ids, answers], dim=1)


@pytest.fixture
def predictor_of(tokenizer, tmp_path, monkeypatch):
    """A function that makes what answers rows, in one process, into tmp_path."""

    def make(rows, *flags, positions=1000):
        words = ["--predict_with_generate", "--output_dir", str(tmp_path), *map(str, flags)]
        args = parse(llama.Arguments, words=words)
        run = SimpleNamespace(step=5, interruptible=iter)
        accelerator = fake_accelerator(unwrap_model=lambda model: model, trackers=[])

        def loader(rows, collate, numbers):
            lines = [[number] for number in numbers]
            starts = range(0, len(lines), 2)
            return [collate(rows.dataset, lines[start : start + 2]) for start in starts]

        layout = SimpleNamespace(gather=list, heeding_masks=contextlib.nullcontext)
        plan = SimpleNamespace(ordered_loader=loader, layout=layout)
        model = Parrot([], positions)
        return Predictor(args, run, accelerator, plan, rows, tokenizer, model)

    def generate(accelerator, model, inputs, **options):
        return model.generate(**inputs, **options)

    monkeypatch.setattr("extras.predict.answers.generate", generate)
    return make


@pytest.fixture
def rows(tokenize):
    right = [TALK[0], {"role": "assistant", "content": "c-d"}]
    long = [TALK[0], {"role": "assistant", "content": "q-" * 4 * SHORT_ANSWER}]
    return Rows(tokenize(TALK, TALK[:2], right, long), "", [])


def test_a_reference_that_is_longer_than_what_may_be_generated_is_no_mistake(
    predictor_of, rows, tokenizer, tmp_path
):
    said = tokenizer.encode("c-d", add_special_tokens=False)
    enough = predictor_of(rows, "--generation_max_new_tokens", len(said))
    assert enough.predict(Parrot(said)) == {"eval_exact_match": pytest.approx(2 / 3)}
    assert "counts 3 with a short answer" in str(enough)
    less = predictor_of(rows, "--generation_max_new_tokens", len(said) - 1)
    assert less.predict(Parrot(said[:-1])) == {}
    assert "counts 0 with a short answer" in str(less)
    # So it is where the model has no positions for more
    longest = max(last_answer(row["labels"])[0] for row in rows.dataset)
    short = predictor_of(rows, positions=longest + len(said) - 1)
    short.predict(Parrot(said[:-1]))
    text = (tmp_path / "predictions-5.jsonl").read_text(encoding="utf-8")
    assert json.loads(text.splitlines()[0])["correct"] is None


@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "adapters"])
def test_a_model_with_varlen_answers_padded_prompts_as_with_sdpa(has_adapters, tiny, tokenize):
    batch = PromptCollator(0)(tokenize(TALK, TALK[:2]), [[0], [1]])
    answers = []
    for implementation in ("sdpa", varlen.NAME):
        model = AutoModelForCausalLM.from_pretrained(
            tiny / "model", attn_implementation=implementation
        )
        if has_adapters:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
        with attending_to_padded_rows(model):
            answers.append(model.generate(**batch["inputs"], max_new_tokens=4, do_sample=False))
        assert model.config._attn_implementation == implementation
    assert torch.equal(*answers)
