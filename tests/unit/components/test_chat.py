"""Rows become the tokens and labels that they should, and batches cover every row once, however they are cut."""

import json
import re

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import llama
import llama_dpo
from components.batches import global_batches
from components.chat import DEFAULT_CHAT_TEMPLATE
from components.packing import TokenCollator

QUESTION, ANSWER = "Spell the word lamp.", "l-a-m-p"
FORMATS = {
    "prompt, completion": {"prompt": QUESTION, "completion": ANSWER},
    "question, answer": {"question": QUESTION, "answer": ANSWER},
    "instruction, output": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "messages": {
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
        ]
    },
    "prompt and completion as messages": {
        "prompt": [{"role": "user", "content": QUESTION}],
        "completion": [{"role": "assistant", "content": ANSWER}],
    },
    "columns that are not used": {
        "prompt": QUESTION,
        "completion": ANSWER,
        "skill": "spell",
        "messages": None,
    },
}


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


def supervised(row, tokenizer):
    """Text of the supervised part."""
    return tokenizer.decode([token for token in row["labels"] if token != -100])


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_become_the_same_row(name, tokenizer):
    row = llama.tokenize_row(FORMATS[name], tokenizer, 1024)
    assert row == llama.tokenize_row(FORMATS["prompt, completion"], tokenizer, 1024)
    assert supervised(row, tokenizer) == ANSWER + "<|end_of_turn|>"
    assert (
        row["labels"][-1] == row["input_ids"][-1]
    )  # the last token is supervised: the end of the turn


def test_the_input_of_an_instruction_follows_it(tokenizer):
    messages = llama.row_to_messages({"instruction": "Add.", "input": "1 and 2", "output": "3"})
    assert messages[0]["content"] == "Add.\n\n1 and 2"


def test_every_answer_of_a_conversation_is_supervised_and_nothing_else(tokenizer):
    turns = [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
        ("assistant", "two"),
    ]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    text = supervised(llama.tokenize_row(row, tokenizer, 1024), tokenizer)
    assert text == "one<|end_of_turn|>two<|end_of_turn|>"


def test_a_pad_token_equal_to_the_end_of_turn_does_no_harm(tokenizer):
    tokenizer.pad_token = "<|end_of_turn|>"
    answers = ("a", "a longer one")
    rows = [
        llama.tokenize_row({"prompt": QUESTION, "completion": text}, tokenizer, 1024)
        for text in answers
    ]
    for row in rows:
        assert row["labels"][-1] == tokenizer.pad_token_id  # its end of turn is learnt
    collate = TokenCollator(pad_token_id=tokenizer.pad_token_id)
    learnt = collate(Dataset.from_list([row | {"row": 1} for row in rows]), [[0], [1]])
    told = [label for row in rows for label in row["labels"] if label != -100]
    assert learnt["targets"].tolist() == told  # and the padding is not


def test_a_prompt_is_tokenised_as_generation_will_see_it(tokenizer):
    row = llama.tokenize_row({"prompt": QUESTION, "completion": ANSWER}, tokenizer, 1024)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    assert row["input_ids"][: len(prompt)] == prompt and row["labels"][: len(prompt)] == [
        -100
    ] * len(prompt)


def test_without_a_chat_template_the_default_ends_the_answer_with_eos(tokenizer):
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    row = llama.tokenize_row({"prompt": QUESTION, "completion": ANSWER}, tokenizer, 1024)
    assert supervised(row, tokenizer) == ANSWER + tokenizer.eos_token


def test_a_template_that_leaves_the_turn_open_gets_an_end(tokenizer):
    turns = (
        "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '\n' }}{% endfor %}"
    )
    tokenizer.chat_template = turns + "{{ 'assistant: ' if add_generation_prompt }}"
    row = llama.tokenize_row({"prompt": QUESTION, "completion": ANSWER}, tokenizer, 1024)
    assert supervised(row, tokenizer).endswith(tokenizer.eos_token) and ANSWER in supervised(
        row, tokenizer
    )


def test_long_rows_lose_their_end_and_say_so(tokenizer):
    full = llama.tokenize_row({"prompt": QUESTION, "completion": ANSWER}, tokenizer, 1024)
    cut = llama.tokenize_row(
        {"prompt": QUESTION, "completion": ANSWER}, tokenizer, len(full["input_ids"]) - 3
    )
    assert not full["truncated"] and cut["truncated"]
    assert cut["input_ids"] == full["input_ids"][:-3] and cut["labels"] == full["labels"][:-3]


def test_a_template_that_rewrites_earlier_answers_teaches_the_last_alone(tokenizer):
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ '<|' + turn['role'] + '|>' }}"
        "{{ '(thinks) ' if loop.last and turn['role'] == 'assistant' }}{{ turn['content'] + '<|end_of_turn|>' }}"
        "{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    turns = [("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert (
        supervised(llama.tokenize_row(row, tokenizer, 1024), tokenizer)
        == "(thinks) two<|end_of_turn|>"
    )


def test_a_conversation_that_ends_with_a_question_teaches_no_end_after_it(tokenizer):
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    turns = [("user", "a"), ("assistant", "one"), ("user", "b")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    row = llama.tokenize_row(row, tokenizer, 1024)
    assert supervised(row, tokenizer) == "one" + tokenizer.eos_token and row["labels"][-1] == -100


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "has the columns text; needs messages | prompt, completion"),
        (
            {"prompt": "a", "completion": 5},
            "message 2 (assistant) has no text: its content is 5; content has",
        ),
        ({"prompt": None, "completion": "b"}, "message 1 (user) has no text: its content is null"),
        ({"prompt": "a", "completion": ""}, "no answer to train on"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer to train on"),
        ({"messages": [{"role": "user"}]}, "message 1 (user) has no text: it has no content"),
        ({"messages": ["a"]}, "message 1 is not an object with role and content"),
    ],
    ids=json.dumps,
)
def test_rows_that_cannot_be_used_say_why(row, says, tokenizer):
    with pytest.raises(ValueError, match=re.escape(says)):
        llama.tokenize_row(row, tokenizer, 1024)


def with_answer(content=ANSWER, before=(), **keys):
    """A row with a conversation whose answer has more keys than role and content."""
    answer = {"role": "assistant", "content": content, **keys}
    return {"messages": [{"role": "user", "content": QUESTION}, *before, answer]}


CALL = [{"function": {"name": "spell", "arguments": {"word": "lamp"}}}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            with_answer() | {"tools": [{"name": "spell"}]},
            "has tools, which this recipe does not pass to the chat",
        ),
        (with_answer() | {"functions": '[{"name": "spell"}]'}, "has functions, which"),
        (
            with_answer("", tool_calls=CALL),
            "message 2 (assistant) has tool_calls, and tool calls are not",
        ),
        (
            with_answer(None, tool_calls=CALL),
            "message 2 (assistant) has tool_calls, and tool calls are not",
        ),
        (with_answer(function_call=CALL[0]), "message 2 (assistant) has function_call"),
        (
            with_answer(before=[{"role": "tool", "content": "5"}]),
            "message 2 (tool) has the role of a tool",
        ),
        (
            with_answer([{"type": "text", "text": "a"}]),
            "message 2 (assistant) has no text: its content is a list of 1 part",
        ),
        (with_answer(None), "message 2 (assistant) has no text: its content is null"),
        (
            with_answer(reasoning_content="l, a, m, p"),
            "message 2 (assistant) has reasoning_content, which the chat template drops",
        ),
        (
            with_answer(name="Ann", thinking="hm"),
            "has name, thinking, which the chat template drops",
        ),
        (with_answer(weight=0), "has weight 0, but what the assistant says is trained on"),
        (
            with_answer(before=[{"role": "user", "content": "b", "train": True}]),
            "what the user says is not trained on",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_trained_on_wrongly_is_refused(row, says, tokenizer):
    with pytest.raises(ValueError, match=re.escape(says)):
        llama.tokenize_row(row, tokenizer, 1024)


def test_what_is_null_empty_or_only_describes_a_message_is_as_if_absent(tokenizer):
    plain = llama.tokenize_row(with_answer(), tokenizer, 1024)
    for row in (
        with_answer() | {"tools": None},
        with_answer() | {"tools": "[]"},
        with_answer(tool_calls=[]),
        with_answer(tool_calls=None, reasoning_content="", name=None),
        with_answer(weight=1),
        with_answer(id="x7", timestamp=12),
    ):
        assert llama.tokenize_row(row, tokenizer, 1024) == plain


def test_a_key_that_the_template_writes_is_trained_on(tokenizer):
    tokenizer.chat_template = (
        "{% for turn in messages %}{{ '<|' + turn['role'] + '|>' }}"
        "{% if turn.reasoning_content %}{{ '(' + turn.reasoning_content + ') ' }}{% endif %}"
        "{{ turn['content'] + '<|end_of_turn|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    row = llama.tokenize_row(with_answer(reasoning_content="hm", id="x7"), tokenizer, 1024)
    assert supervised(row, tokenizer) == "(hm) " + ANSWER + "<|end_of_turn|>"
    with pytest.raises(ValueError, match="has name, which the chat template drops"):
        llama.tokenize_row(with_answer(reasoning_content="hm", name="Ann"), tokenizer, 1024)


@pytest.mark.parametrize(
    "keys", [{"tool_calls": CALL}, {"reasoning_content": "hm"}, {"weight": 0.5}]
)
def test_preferences_are_checked_like_conversations(keys, tokenizer):
    question = with_answer()["messages"][:1]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("good", "bad"))
    row = {"prompt": question, "chosen": chosen, "rejected": [rejected[0] | keys]}
    with pytest.raises(ValueError, match="message 2 .assistant. has " + next(iter(keys))):
        llama_dpo.tokenize_answers(row, tokenizer, 1024)
    with pytest.raises(ValueError, match="has tools"):
        llama_dpo.tokenize_answers(
            {"prompt": "a", "chosen": "b", "rejected": "c", "tools": ["t"]}, tokenizer, 1024
        )


@pytest.mark.parametrize("num_rows", [1, 11, 12, 13, 210])
@pytest.mark.parametrize(
    ("batch_size", "accumulation", "ranks"), [(12, 1, 1), (3, 4, 1), (3, 2, 2), (1, 3, 4)]
)
def test_an_epoch_has_every_row_once_in_the_same_steps_however_it_is_cut(
    num_rows, batch_size, accumulation, ranks
):
    window = accumulation * ranks
    batches = global_batches(num_rows, batch_size, window, num_epochs=2, seed=0)
    assert len(batches) % window == 0
    steps = [sorted(sum(batches[i : i + window], [])) for i in range(0, len(batches), window)]
    half = len(steps) // 2
    assert sorted(sum(steps[:half], [])) == sorted(sum(steps[half:], [])) == list(range(num_rows))
    whole = global_batches(num_rows, 12, 1, num_epochs=2, seed=0)
    assert steps == [sorted(batch) for batch in whole]
    assert all(steps)  # no step without rows


def test_the_order_is_a_function_of_seed_and_epoch():
    order = [global_batches(50, 50, 1, num_epochs=2, seed=seed) for seed in (0, 0, 1)]
    assert order[0] == order[1] != order[2] and order[0][0] != order[0][1]
    assert global_batches(5, 2, 1) == [[0, 1], [2, 3], [4]]  # sequential
