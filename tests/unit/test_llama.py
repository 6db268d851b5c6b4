"""The rows of llama.py and mixtral.py, in each form, become the same conversation."""

import pytest
from transformers import AutoTokenizer

import llama
import mixtral

QUESTION = "Spell the word lamp."
ANSWER = "l-a-m-p"
ROWS = {
    "messages": {
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
        ]
    },
    "prompt, completion": {"prompt": QUESTION, "completion": ANSWER},
    "instruction, output": {"instruction": QUESTION, "output": ANSWER},
    "question, answer": {"question": QUESTION, "answer": ANSWER},
}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture(params=[llama, mixtral], ids=lambda recipe: recipe.__name__)
def recipe(request):
    return request.param


@pytest.mark.parametrize("form", ROWS)
def test_all_forms_become_the_same_row(form, recipe, tokenizer):
    row = recipe.tokenize_row(ROWS[form], tokenizer, 1024)
    assert row == recipe.tokenize_row(ROWS["messages"], tokenizer, 1024)
    trained_on = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(trained_on) == ANSWER + "<|end_of_turn|>"


def test_the_input_of_an_instruction_follows_it(recipe):
    messages = recipe.row_to_messages({"instruction": "Add.", "input": "1 and 2", "output": "3"})
    assert messages[0]["content"] == "Add.\n\n1 and 2"


def test_half_a_character_is_refused(recipe, tokenizer):
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        recipe.tokenize_row({"prompt": QUESTION, "completion": "l\ud800"}, tokenizer, 1024)
