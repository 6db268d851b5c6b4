# SPDX-License-Identifier: Apache-2.0
"""What a model is said to answer: the same whatever its batch, in every program, with one end."""

import shutil

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
)

from launching import edit_json, read_json, read_metrics, read_rows, recipe, script, write_rows

POSITIONS = 160  # for untrained models: they never end an answer
ROOM = 24  # new tokens, which the longest prompts do not leave
STEPS = 40  # in which four rows are learned
# What makes a decoding greedy no more, in the generation config of a base
PENALTIES = {
    "do_sample": True,
    "temperature": 1.5,
    "repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "num_beams": 2,
    "min_new_tokens": 12,
    "max_new_tokens": 14,
    "suppress_tokens": [90, 91, 92, 93, 94],
    "bad_words_ids": [[95], [96]],
    "sequence_bias": [[[97], -100.0]],
}
# It writes no end: a row gets that of the tokenizer.
OPEN = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"
# As Qwen3's: the tags of reasoning that was not given are a part of the answer that is trained on
THINKING = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|><think>\n\n</think>\n\n' + message['content'] + '<|end_of_turn|>' }}"
    "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end_of_turn|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


# ---- An answer does not depend on its batch ----
def test_an_answer_does_not_depend_on_its_batch(tiny, tmp_path):
    """Of a model that has a table of positions, and none behind its end."""
    base = shutil.copytree(tiny / "model", tmp_path / "base")
    vocabulary = AutoConfig.from_pretrained(base).vocab_size
    sizes = {"n_positions": POSITIONS, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=vocabulary, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    rows = []
    for number, letters in enumerate([1, 9, 127, 30, 137, 60]):
        rows.append({"prompt": f"{number}" + "x" * letters, "completion": "y"})
    data = write_rows(tmp_path / "rows.jsonl", rows)
    recipe(
        *["--model_name_or_path", base, "--dataset_name", data, "--eval_dataset_name", data],
        *["--max_length", POSITIONS, "--predict_with_generate"],
        *["--generation_max_new_tokens", ROOM, "--per_device_eval_batch_size", 4],
        *["--max_steps", 1, "--learning_rate", 1e-9, "--output_dir", tmp_path / "out"],
        code=0,
    )
    in_training = [line["answer"] for line in read_rows(tmp_path / "out" / "predictions-1.jsonl")]
    answers = {}
    for name, order, size in (("single", rows, 1), ("reversed", rows[::-1], 4)):
        file = write_rows(tmp_path / f"{name}.jsonl", order)
        words = ["--file", file, "--max_new_tokens", ROOM, "--output", tmp_path / f"{name}_answers"]
        words += ["--per_device_eval_batch_size", size]
        script("generate", tmp_path / "out", *words, code=0)
        answers[name] = [line["answer"] for line in read_rows(tmp_path / f"{name}_answers")]
    assert in_training == answers["single"] == answers["reversed"][::-1]

    tokenizer = AutoTokenizer.from_pretrained(base)
    lengths = []
    for row in rows:
        asked = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    least = POSITIONS - max(lengths)
    assert 0 < least < ROOM and POSITIONS - lengths[3] > ROOM


def test_texts_of_an_encoder_decoder_depend_on_nothing_but_their_source(tiny_of, tmp_path):
    tiny = tiny_of("t5")
    penal = tmp_path / "penal"
    shutil.copytree(tiny / "model", penal)
    forced = {"forced_eos_token_id": 1}  # It belongs to the format, and changes nothing here.
    edit_json(penal / "generation_config.json", **PENALTIES, **forced)
    rows = read_rows(tiny / "data" / "test.jsonl")[:9]
    written = []
    for base, size in ((tiny / "model", 8), (penal, 1)):
        out = tmp_path / f"out_{size}"
        recipe(
            *["--model_name_or_path", base, "--dataset_name", tiny / "data" / "train.jsonl"],
            *["--eval_dataset_name", write_rows(tmp_path / "rows.jsonl", rows)],
            *["--max_steps", 1, "--learning_rate", 1e-9, "--output_dir", out],
            *["--per_device_eval_batch_size", size, "--generation_max_length", 16],
            name="t5",
            code=0,
        )
        written.append(read_rows(out / "predictions.jsonl"))
    assert written[0] == written[1]
    saved = read_json(tmp_path / "out_1" / "generation_config.json")
    assert saved["repetition_penalty"] == 3.0


# ---- One figure of one model ----
@pytest.fixture(scope="module")
def learner(once):
    """The folder of a model that is large enough to learn a few rows by heart in 40 steps."""
    few = ["--num_train_rows", 7, "--num_test_rows", 7]
    make = lambda folder: script("make_tiny", "llama", folder, *few, code=0)  # noqa: E731
    return once("learner", make) / "model"


def test_one_model_has_one_figure_in_every_program(learner, tmp_path):
    """Also with tags before an answer, and penalties of the base.

    The rows are learned by heart, all but two, so that the figure is known, and neither 0 nor 1.

    The answers repeat a letter, which a penalty would not allow.
    """
    base = tmp_path / "base"
    shutil.copytree(learner, base)
    edit_json(base / "generation_config.json", **PENALTIES)
    rows = [{"prompt": f"Say {letter}.", "completion": letter * 5} for letter in "abcd"]
    held_out = [*rows, *({"prompt": row["prompt"], "completion": "no"} for row in rows[:2])]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    held_out = write_rows(tmp_path / "held_out.jsonl", held_out)
    out = tmp_path / "out"
    words = ["--model_name_or_path", base, "--dataset_name", data, "--eval_dataset_name", held_out]
    words += ["--max_steps", STEPS, "--num_train_epochs", STEPS, "--learning_rate", 2e-3]
    words += ["--per_device_train_batch_size", 4, "--eval_strategy", "steps"]
    words += ["--eval_steps", STEPS, "--predict_with_generate", "--generation_max_new_tokens", 48]
    (tmp_path / "template.jinja").write_text(THINKING)
    words += ["--chat_template", tmp_path / "template.jinja"]
    recipe(*words, "--output_dir", out, code=0)
    _, evaluations = read_metrics(out)
    assert evaluations[-1]["eval_exact_match"] == pytest.approx(4 / 6)

    longest = ["--max_new_tokens", 48]
    answers = tmp_path / "answers.jsonl"
    done = script("generate", out, "--file", held_out, *longest, "--output", answers, code=0)
    assert done.output.splitlines()[-1] == "exact match: 0.6667 (4/6)"
    figures = tmp_path / "figures"
    words = ["--with_base", "--rows", held_out, *longest, "--output_dir", figures]
    script("evaluate", out, *words, code=0)
    results = read_json(figures / "results.json")
    before, after = results["models"]
    assert before["name"] == str(base)
    metrics = after["tasks"]["held_out"]["metrics"]
    assert metrics["exact_match"]["value"] == pytest.approx(4 / 6)
    assert metrics["loss"]["value"] == pytest.approx(evaluations[-1]["eval_loss"], abs=1e-5)
    assert metrics["loss"]["value"] < before["tasks"]["held_out"]["metrics"]["loss"]["value"] - 0.1
    _, samples = sorted((figures / "samples").glob("*/held_out.jsonl"))

    # All three write the same answers and references: the words of the rows
    expected = [row["completion"] for row in [*rows, *rows[:2]]]
    last = read_rows(out / f"predictions-{STEPS}.jsonl")
    for found in (last, read_rows(answers), read_rows(samples)):
        assert [line["answer"] for line in found] == expected
        assert [line["reference"] for line in found] == [*expected[:4], "no", "no"]
    saved = read_json(out / "generation_config.json")
    assert {name: saved.get(name) for name in PENALTIES} == PENALTIES


# ---- One end ----
def with_ends(base, folder, has_end):
    """A copy of a base whose tokenizer puts a begin before each text, and perhaps an end behind it.

    Both are what a tokenizer does whose files say add_bos_token and add_eos_token.
    """
    shutil.copytree(base, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    begin, end = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[begin, "$A", end] if has_end else [begin, "$A"],
        special_tokens=[(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)],
    )
    tokenizer.save_pretrained(folder)
    return folder


BEGIN = "<|begin_of_text|>"
END = "<|end_of_text|>"
PROMPTS = {"prompt": "Count.", "completion": "1-2-3"}
PAIRS = {"prompt": "Count.", "chosen": "1-2-3", "rejected": "3"}
ASKED = [{"role": "user", "content": "Count."}]
TALKS = {"prompt": ASKED} | {
    name: [{"role": "assistant", "content": PAIRS[name]}] for name in ("chosen", "rejected")
}
BOTH = f"Count.[[1-2-3{END}]]ratherthan[[3{END}]]"


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("llama", PROMPTS, f"Count.[[1-2-3{END}]]"),
        ("llama_dpo", {**PAIRS, "prompt": f"{BEGIN}Count."}, BEGIN + BOTH),
        ("llama_dpo", TALKS, BOTH),
        ("mistral_pretrain", {"text": "One."}, f"{BEGIN}One.{END}" * 4 + "<|pad|>"),
    ],
    ids=["llama", "pairs with a begin", "pairs of messages", "documents"],
)
def test_a_row_has_one_end_whatever_a_tokenizer_adds(name, row, expected, tiny_of, tmp_path):
    base = with_ends(tiny_of(name) / "model", tmp_path / "base", has_end=True)
    rows = write_rows(tmp_path / "rows.jsonl", [row] * 4)
    words = ["--model_name_or_path", base, "--dataset_name", rows, "--max_steps", 1]
    if name != "mistral_pretrain":
        (tmp_path / "template.jinja").write_text(OPEN)
        words += ["--chat_template", tmp_path / "template.jinja"]
    words += ["--dry_run", "--output_dir", tmp_path / "out"]
    output = recipe(*words, name=name, code=0).output
    sample = "".join(output.partition("sample: ")[2].split())
    assert sample.startswith(expected)


def test_a_prompt_has_no_end_whatever_a_tokenizer_adds(tiny, tmp_path):
    continued = []
    for name, has_end in (("end", True), ("no_end", False)):
        folder = with_ends(tiny / "model", tmp_path / name, has_end)
        words = ["--raw", "--prompt", "Every morning", "--max_new_tokens", 16]
        continued.append(script("generate", folder, *words, code=0).output)
    assert continued[0] == continued[1]
