# SPDX-License-Identifier: Apache-2.0
"""What the makers refuse: every problem of a call at once, each with the flag's name."""

import pytest

from tiny import makers
from tiny.options import LlamaOptions, MixtralOptions, PreferenceOptions, TextOptions

MOST_TEST_ROWS = "--num_test_rows must be at most 1743"
SENTENCES = "--num_train_rows and --num_test_rows must be at most 200,000 together"
HEADS = "--hidden_size / --num_attention_heads must be a whole, even number"


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("llama x --hidden_size 0", "--hidden_size must be at least 1"),
        ("llama x --hidden_size 100", "--hidden_size must be a multiple of 64, not 100"),
        ("llama x --intermediate_size 100", "--intermediate_size must be a multiple of 64"),
        ("llama x --num_attention_heads 3", HEADS),
        ("llama x --num_key_value_heads 3", "a multiple of --num_key_value_heads"),
        ("llama x --num_key_value_heads 1", "x head size must be a multiple of 64, not 32"),
        ("llama x --vocab_size 262", "--vocab_size must be at least 263"),
        ("llama x --num_test_rows 1744", MOST_TEST_ROWS),
        ("llama x --text rows.csv", "--text must be a .txt or .jsonl file"),
        ("llama x --dtype float64", "invalid choice: 'float64'"),
        ("llama x --num_local_experts 4", "unrecognized arguments: --num_local_experts"),
        ("mixtral x --num_local_experts 1", "a token takes two of them"),
        ("llama_dpo x --num_test_rows 801", "--num_test_rows must be at most 800"),
        ("llama_dpo x --num_key_value_heads 1", "x head size must be a multiple of 64"),
        ("llama_dpo x --num_key_value_heads 0", "--num_key_value_heads must be at least 1"),
        ("mistral_pretrain x --sliding_window 0", "--sliding_window must be at least 1"),
        ("mistral_pretrain x --vocab_size 1", "--vocab_size must be at least 263"),
        ("bert x --hidden_size 30", "--hidden_size must be a multiple of --num_attention_heads"),
        ("bert x --vocab_size 159", "--vocab_size must be at least 160"),
        ("bert x --dropout 1", "--dropout must be at least 0 and below 1"),
        ("t5 x --vocab_size 255", "--vocab_size must be at least 256"),
        ("t5 x --num_train_rows 200000", SENTENCES),
        ("vit x --image_size 36", "--image_size must be a multiple of --patch_size"),
        ("vit x --image_size 8", "and at least 16"),
        ("vit x --seed -1", "--seed must be at least 0"),
        ("resnet x", "invalid choice: 'resnet'"),
        ("llama", "required: folder"),
    ],
)
def test_a_wrong_call_ends_with_one_line(call, problem, capsys):
    with pytest.raises(SystemExit) as end:
        makers.parse(call.split())
    error = capsys.readouterr().err
    assert end.value.code == 64
    assert problem in error and error.count("\n") == 1


def test_all_problems_are_named_at_once(capsys):
    with pytest.raises(SystemExit):
        makers.parse("bert x --hidden_size 30 --vocab_size 1 --dropout 1".split())
    assert capsys.readouterr().err.count(";") == 2


@pytest.mark.parametrize("recipe", sorted(makers.MAKERS))
def test_the_defaults_can_be_made(recipe):
    assert makers.parse([recipe, "folder"]).options.problems() == []


def test_there_are_as_many_key_value_heads_as_heads_unless_given():
    assert TextOptions(num_attention_heads=8).key_value_heads == 8
    assert TextOptions(num_attention_heads=8, num_key_value_heads=2).key_value_heads == 2


def test_a_mixtral_has_small_experts():
    assert MixtralOptions().num_local_experts == 4
    assert MixtralOptions().intermediate_size == LlamaOptions().intermediate_size // 2


def test_preferences_get_the_model_of_the_llama_maker():
    assert PreferenceOptions(hidden_size=64, seed=3).of_model() == LlamaOptions(
        hidden_size=64, seed=3
    )
