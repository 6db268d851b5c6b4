# SPDX-License-Identifier: Apache-2.0
"""What the product makes of texts, files, lengths and configs: the part of the net that names it.

Each function takes plain values and returns plain ones, so that a rewrite of the product changes
the lines below and no golden file.
"""

import contextlib
import datetime
import io

import numpy as np


def trained_text(template, messages, tools):
    """The text of a conversation with what is trained on in [[ ]]; None if it is refused."""
    from chat_templates import show, tokenizer_of
    from core.chat import ChatTemplate, make_conversation, tokenize_conversation

    tokenizer = tokenizer_of(template)
    try:
        conversation = make_conversation(messages, tools)
        row = tokenize_conversation(conversation, ChatTemplate(tokenizer), 10**6)
    except Exception:  # a template may raise anything
        return None
    text = show(tokenizer, row["input_ids"], [label != -100 for label in row["labels"]])
    for form in ("%Y-%m-%d", "%d %b %Y"):  # in which templates say the date
        text = text.replace(datetime.date.today().strftime(form), "TODAY")
    return text


def prepared_rows(folder, tokenizer, skip_bad_rows):
    """[number, tokens, tokens trained on] of each row that llama.py reads; None if it refuses."""
    import llama
    from core.cli import parse

    words = ["--dataset_name", str(folder), "--eval_strategy", "no", "--max_length", "200"]
    words += ["--skip_bad_rows"] if skip_bad_rows else []
    args = parse(llama.Arguments, "", words)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            rows, _ = llama.load_data(args, tokenizer)
    except SystemExit as stopped:
        return stopped.code
    found = []
    for row in rows.dataset:
        trained_on = sum(label >= 0 for label in row["labels"])
        found.append([int(row["row"]), tokenizer.decode(row["input_ids"]), int(trained_on)])
    return found


def batches(lengths, sampling, batch, accumulation, ranks, seed, epochs):
    """The rows of each micro-batch of all ranks, in order, with empty ones."""
    from core.batches import Plan
    from example_arguments import language_model_arguments
    from fakes import rows_of_their_own

    words = f"--train_sampling_strategy {sampling} --per_device_train_batch_size {batch} "
    words += f"--gradient_accumulation_steps {accumulation} --seed {seed} "
    words += f"--num_train_epochs {epochs}"
    args = language_model_arguments(*words.split())
    of_ranks = []
    for rank in range(ranks):
        layout = rows_of_their_own(ranks, rank)
        plan = Plan(args, layout, len(lengths), np.array(lengths))
        of_ranks.append(list(plan.training_batches(first_step=0)))
        done = plan.total_steps // 2
        resumed = list(plan.training_batches(first_step=done))
        assert resumed == of_ranks[rank][done * accumulation :]
    return [micro_batch for of_round in zip(*of_ranks, strict=True) for micro_batch in of_round]


def packed(lengths, width):
    """The rows of each packed sequence."""
    from core.batches import pack

    return sorted(pack(np.array(lengths), width), key=min)
