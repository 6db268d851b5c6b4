#!/usr/bin/env python
"""Answer prompts with a trained folder: a model, or adapters, which are loaded on their base.

    python scripts/generate.py runs/tiny/run --prompt "Spell the word lamp."
    python scripts/generate.py runs/tiny/run               # chat until Ctrl-D; an empty line starts anew
    python scripts/generate.py runs/tiny/run --file runs/tiny/data/test.jsonl --output answers.jsonl
    python scripts/generate.py runs/gsm8k/run --file test.jsonl --answer_pattern "#### (.+)" --max_new_tokens 256

--file answers every row and scores exact match, per "skill" if the rows have one; the last line is such as
`exact match: 0.9421 (242/257)`. Prompts are built as in training.

Exit codes: 0 done, 64 usage, 65 data, 69 hub, 73 cannot write.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from datasets import disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError
from jinja2 import TemplateError
from peft import PeftModel
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    TextStreamer,
)
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes"))
from llama import row_to_messages  # noqa: E402
from rows import FILE_TYPES  # noqa: E402

LOAD_ERRORS = (OSError, ValueError, RuntimeError, ImportError, KeyError, TypeError, SafetensorError)


def stop(code, message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument("model_name_or_path", help="folder of a model or of adapters, or hub id")
    parser.add_argument(
        "--prompt", action="append", help="answer this and leave; may be given several times"
    )
    parser.add_argument(
        "--file", type=Path, help="answer and score its rows: .jsonl, .json, .csv or .parquet"
    )
    parser.add_argument("--limit", type=int, help="only so many rows of --file")
    parser.add_argument(
        "--output", type=Path, help="write prompts, answers and references there, as JSON lines"
    )
    parser.add_argument("--json", type=Path, help="write the score there, as JSON")
    parser.add_argument(
        "--answer_pattern", help="regular expression; its group 1 is compared instead of all text"
    )
    parser.add_argument("--max_new_tokens", type=int, default=128, help="longest answer")
    parser.add_argument(
        "--per_device_eval_batch_size", type=int, default=32, help="rows of --file at a time"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 always takes the likeliest token"
    )
    parser.add_argument(
        "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"]
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1"
    )
    parser.add_argument("--load_in_4bit", action="store_true", help="nf4 weights (bitsandbytes)")
    return parser.parse_args()


def validate_args(args):
    """Stop with every problem of the command line at once, and if --output or --json cannot be written."""
    rules = [
        (args.max_new_tokens < 1, "--max_new_tokens must be at least 1"),
        (args.per_device_eval_batch_size < 1, "--per_device_eval_batch_size must be at least 1"),
        (args.limit is not None and args.limit < 1, "--limit must be at least 1"),
        (not 0 <= args.temperature < float("inf"), "--temperature must be 0 (greedy) or more"),
        (args.prompt and args.file, "give --prompt or --file, not both"),
    ]
    for name in ("limit", "output", "json", "answer_pattern"):
        rules.append((getattr(args, name) and not args.file, f"--{name} needs --file"))
    try:
        groups = re.compile(args.answer_pattern or "()").groups
        rules.append(
            (
                groups == 0,
                f"--answer_pattern {args.answer_pattern}: put (...) around what to compare",
            )
        )
        torch.empty(0, device=args.device)
    except re.error as error:
        rules.append((True, f"--answer_pattern {args.answer_pattern}: {error}"))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        rules.append((True, f"--device {args.device}: {first_line(error)}"))
    problems = [problem for broken, problem in rules if broken]
    if problems:
        stop(64, "; ".join(problems))
    for path in filter(None, (args.output, args.json)):  # better now than after an hour of answers
        try:
            path.open("a").close()
        except OSError as error:
            stop(73, f"cannot write {path}: {error.strerror}")


def is_missing(name):
    """Whether a name is that of a folder that does not exist; one such as owner/model may be a hub id."""
    return not Path(name).is_dir() and (
        Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1
    )


def find_base(name):
    """Return the base of the adapters in a folder, or None for a whole model."""
    folder, config = Path(name), Path(name) / "adapter_config.json"
    if is_missing(name):
        stop(64, f"{name}: no such folder; give the --output_dir of a training run")
    if folder.is_dir() and not config.is_file() and not (folder / "config.json").is_file():
        stop(
            64,
            f"{name}: no config.json or adapter_config.json in it; give the --output_dir of a finished run",
        )
    if not config.is_file():
        return None
    try:
        base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        stop(65, f"{config}: not JSON with a base_model_name_or_path")
    if is_missing(base):
        stop(65, f"{name}: its base model {base} is not there; put it back or correct {config}")
    return base


def load_tokenizer(name, base):
    """Return the tokenizer of the folder or else of the base, padding on the left."""
    source = base if base and not (Path(name) / "tokenizer_config.json").is_file() else name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    except LOAD_ERRORS as error:
        if not Path(source).is_dir():
            stop(69, f"{source}: no such folder, and not from the hub: {first_line(error)}")
        stop(
            65,
            f"{source}: no tokenizer that can be loaded; copy tokenizer*.json of the base model into it",
        )
    if not tokenizer.chat_template:
        stop(
            65,
            f"{source}: its tokenizer has no chat template; recipes/llama.py saves one with what it trains",
        )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def load_model(name, base, args):
    """Return the model in evaluation mode on --device."""
    options = {"dtype": args.dtype, "device_map": args.device}
    if args.load_in_4bit:
        compute_dtype = torch.bfloat16 if args.dtype == "auto" else getattr(torch, args.dtype)
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(base or name, **options)
        return (PeftModel.from_pretrained(model, name) if base else model).eval()
    except LOAD_ERRORS as error:
        stop(
            65 if Path(base or name).is_dir() else 69,
            f"{name}: cannot be loaded: {first_line(error)}",
        )


def make_generation_config(model, tokenizer, args):
    """Return greedy or sampled decoding that stops at the end of the assistant's turn."""
    known = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(known if isinstance(known, list) else [known])}
    # Not every model lists the token that closes a turn of its chat template.
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = tokenizer.apply_chat_template(turn, return_dict=False)
    stops.add(next((token for token in reversed(ids) if token in tokenizer.all_special_ids), None))
    sampling = (
        {"do_sample": True, "temperature": args.temperature, "top_k": 0} if args.temperature else {}
    )
    return GenerationConfig(
        eos_token_id=sorted(stops - {None}), pad_token_id=tokenizer.pad_token_id, **sampling
    )


@torch.inference_mode()
def answer(model, tokenizer, config, conversations, max_new_tokens, streamer=None):
    """Return one stripped answer for each conversation; ValueError if one leaves no room for an answer."""
    options = {
        "add_generation_prompt": True,
        "padding": True,
        "return_dict": True,
        "return_tensors": "pt",
    }
    inputs = tokenizer.apply_chat_template(conversations, **options).to(model.device)
    inputs.pop("token_type_ids", None)
    length, longest = (
        inputs["input_ids"].shape[1],
        getattr(model.config, "max_position_embeddings", 10**9),
    )
    if length >= longest:
        raise ValueError(f"the prompt is {length} tokens long; the model holds {longest}")
    config.max_new_tokens = min(max_new_tokens, longest - length)
    output = model.generate(**inputs, generation_config=config, streamer=streamer)
    return [
        text.strip()
        for text in tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
    ]


def chat(model, tokenizer, config, args):
    """Stream an answer to each --prompt on its own, or hold a conversation with stdin; an empty line starts anew."""
    streamer, messages = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True), []
    for prompt in args.prompt or iter(lambda: input("> "), None):
        if args.prompt:
            print(f"> {prompt}")
        if args.prompt or not prompt.strip():
            messages = []
        if prompt.strip():
            messages.append({"role": "user", "content": prompt})
            text = answer(model, tokenizer, config, [messages], args.max_new_tokens, streamer)[0]
            messages.append({"role": "assistant", "content": text})


def read_rows(path):
    """Yield (place, row) of a file, the place being such as `rows.jsonl, line 3`."""
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"{path}: must be {', '.join(FILE_TYPES)}")
    if path.suffix != ".jsonl":
        rows = load_dataset(**FILE_TYPES[path.suffix], data_files=str(path), split="train")
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}"
                ) from None
            yield f"{path}, line {number}", row


def load_questions(args):
    """Return the rows of --file as {"messages", "reference", "skill"}, the reference being its last answer."""
    questions = []
    if not args.file.is_file():
        stop(65, f"{args.file}: no such file")
    try:
        for place, row in read_rows(args.file):
            if len(questions) == args.limit:
                break
            try:
                messages = row_to_messages(row)
            except (ValueError, AttributeError, TypeError) as error:
                reason = "not an object" if isinstance(error, AttributeError) else error
                raise ValueError(f"{place}: {reason}") from None
            last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
            reference = messages[last]["content"].strip()
            if args.answer_pattern and not re.search(args.answer_pattern, reference):
                raise ValueError(
                    f"{place}: nothing in its answer matches --answer_pattern {args.answer_pattern}"
                )
            questions.append(
                {"messages": messages[:last], "reference": reference, "skill": row.get("skill")}
            )
    except (OSError, ValueError, DatasetGenerationError) as error:
        reason = first_line(error.__cause__ or error)
        stop(65, reason if str(args.file) in reason else f"{args.file}: {reason}")
    return questions or stop(65, f"{args.file}: no rows")


def is_match(text, reference, pattern):
    """Whether both texts, or what group 1 of the pattern finds in them, are equal but for white space around."""
    if pattern is None:
        return text == reference
    found = re.search(pattern, text)
    return found is not None and found[1].strip() == re.search(pattern, reference)[1].strip()


def score_file(model, tokenizer, config, args, questions):
    """Answer all questions, print some of them and the exact match, write --output and --json."""
    for start in range(0, len(questions), args.per_device_eval_batch_size):
        batch = questions[start : start + args.per_device_eval_batch_size]
        conversations = [question["messages"] for question in batch]
        answers = answer(model, tokenizer, config, conversations, args.max_new_tokens)
        for question, text in zip(batch, answers, strict=True):
            question |= {
                "answer": text,
                "correct": is_match(text, question["reference"], args.answer_pattern),
            }
    for question in questions[:8]:
        mark = "right" if question["correct"] else f"wrong, should be: {question['reference']}"
        print(f"{question['messages'][-1]['content']} -> {question['answer']} ({mark})")
    rows = Counter(question["skill"] for question in questions)
    correct = Counter(question["skill"] for question in questions if question["correct"])
    for skill in filter(None, rows):
        print(f"{skill}: {correct[skill] / rows[skill]:.4f} ({correct[skill]}/{rows[skill]})")
    score = {
        "exact_match": correct.total() / rows.total(),
        "correct": correct.total(),
        "rows": rows.total(),
    }
    score["skills"] = {skill: correct[skill] / rows[skill] for skill in filter(None, rows)}
    if args.output:
        args.output.write_text(
            "".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8"
        )
    if args.json:
        args.json.write_text(json.dumps(score, indent=2) + "\n", encoding="utf-8")
    print(f"exact match: {score['exact_match']:.4f} ({score['correct']}/{score['rows']})")


def main():
    args = parse_args()
    validate_args(args)
    logging.disable_progress_bar()
    disable_progress_bars()
    questions = load_questions(args) if args.file else None
    base = find_base(args.model_name_or_path)
    tokenizer = load_tokenizer(args.model_name_or_path, base)
    model = load_model(args.model_name_or_path, base, args)
    config = make_generation_config(model, tokenizer, args)
    try:
        if questions:
            score_file(model, tokenizer, config, args, questions)
        else:
            chat(model, tokenizer, config, args)
    except (EOFError, KeyboardInterrupt):
        print()
    except (ValueError, TemplateError) as error:
        stop(65, first_line(error))


if __name__ == "__main__":
    main()
