# SPDX-License-Identifier: Apache-2.0
r"""Sequence to sequence with any encoder-decoder, T5 here: summaries, translations, answers.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/t5.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/t5.py --model_name_or_path facebook/bart-base --dataset_name rows.jsonl \
        --source_column report --target_column headline
    accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml --num_processes 8 \
        recipes/t5.py --use_peft

A good run prints a summary with one row as the model sees it, texts that it writes for held-out
rows and a ROUGE that rises, and the folder that `from_pretrained` loads, with predictions.jsonl of
the last evaluation. fp16 is too narrow for T5: use bf16. The same command again continues from the
newest checkpoint. Exit codes: core/exits.py. To make it yours:
python scripts/copy_recipe.py t5 my_project, then look for EDIT.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sacrebleu
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rouge_score.rouge_scorer import RougeScorer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM

from core.arguments import CommonArguments, DenseModelArguments, MixtureArguments, RowArguments
from core.batches import Plan
from core.cli import POSITIVE, arg, free, parse
from core.data import (
    Rows,
    describe_rows,
    hash_of_row,
    hold_out_and_mix,
    missing_columns,
    read_rows,
)
from core.engine import Layout, backward_of_sum, make_accelerator
from core.export import save_model
from core.generation import (
    NUM_SHOWN,
    SHOWN_LETTERS,
    generate,
    greedy_options,
    show_prediction,
    write_predictions,
)
from core.model import (
    add_adapters,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    set_up_layers,
)
from core.run import Run
from tasks.seq2seq import Seq2SeqCollator, cut_tokens, share_embedding_modules, turn_off_layerdrop

# EDIT: your columns, {source: target}; a column named translation needs --source_lang instead
SOURCE_AND_TARGET = {
    "document": "summary",
    "article": "highlights",
    "text": "summary",
    "dialogue": "summary",
    "question": "answer",
    "prompt": "completion",
    "source": "target",
}
START_OF_TARGET = -1  # separates source and target in the hash of a row; no token has this id


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    MixtureArguments,
    RowArguments,
):
    """Sequence to sequence."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh")
    model_name_or_path: str = "google/flan-t5-small"  # Apache-2.0
    # EDIT: your data set. Default: 18,949 bills of the US Congress and their summaries (CC0
    # license)
    dataset_name: list[str] = arg(["FiscalNote/billsum"])
    output_dir: str = "runs/t5"
    COLUMN_ARGUMENTS = {"source": "source_column", "target": "target_column"}
    learning_rate: float = arg(
        1e-4, "peak of the learning rate; BART needs less, 3e-5; adapters need ten times more"
    )
    source_column: str | None = arg(
        None, "column of the text to read [the first found of SOURCE_AND_TARGET]"
    )
    target_column: str | None = arg(
        None, "column of the text to write [the one that goes with the source]"
    )
    source_lang: str | None = arg(
        None, "language of the source, for rows {translation: {en: ..., de: ...}} and tokenizers"
    )
    target_lang: str | None = arg(None, "language of the target")
    source_prefix: str = arg("", "text before every source, as 'summarize: ' is for T5")
    max_source_length: int = arg(
        1024, "tokens of a source, prefix included; longer ones lose their end", POSITIVE
    )
    max_target_length: int = arg(128, "tokens of a target; longer ones lose their end", POSITIVE)
    predict_with_generate: bool = free(
        True, "generate texts in evaluations, for ROUGE, BLEU and exact match"
    )
    generation_max_length: int | None = free(
        None, "most tokens to generate per text [--max_target_length]", POSITIVE
    )
    generation_num_beams: int = free(1, "beams of the search; 1 is greedy", POSITIVE)
    forced_bos_token: str | None = arg(
        None, "token that generated texts begin with, the target language's of mBART and NLLB"
    )

    def conflicts(self) -> Iterator[str]:
        if bool(self.source_lang) != bool(self.target_lang):
            yield "--source_lang and --target_lang: give both or neither"


# ---- Data ----
def source_and_target(
    row: Mapping[str, Any],
    columns: Sequence[str | None],
    languages: Sequence[str | None],
) -> list[str]:
    """Return the texts of a row, the one to read and the one to write. EDIT: your columns.

    Args:
        columns: of source and target; None for the first pair of SOURCE_AND_TARGET in the row.
        languages: of source and target; None without --source_lang and --target_lang.

    Raises:
        ValueError: if the row has no such texts.
    """
    if all(languages) and isinstance(row.get("translation"), dict):
        row = row["translation"]
        # mBART's name of a language is en_XX, the key in the row is en
        keys = [language.split("_")[0] for language in languages if language]
    else:
        pairs = list(SOURCE_AND_TARGET.items())
        keys = next((pair for pair in pairs if set(pair) <= set(row)), pairs[-1])
    chosen = [column or key for column, key in zip(columns, keys, strict=True)]
    if not set(chosen) <= set(row):
        problem = missing_columns(row, " and ".join(chosen), "source", "target")
        if isinstance(row.get("translation"), dict):
            problem += ", or give --source_lang and --target_lang"
        raise ValueError(problem)
    for column in chosen:
        if not isinstance(row[column], str) or not row[column].strip():
            raise ValueError(f"has no text in {column}: {row[column]!s:.80}")
    return [row[column] for column in chosen]


def tokenize_pair(
    row: Mapping[str, Any],
    tokenizer: Any,
    columns: Sequence[str | None],
    languages: Sequence[str | None],
    prefix: str,
    max_lengths: tuple[int, int],
) -> dict[str, Any]:
    """Return the tokens of both texts, and the whole target text for the metrics.

    Args:
        columns, languages: as in `source_and_target`.
        max_lengths: of a source and of a target, in tokens.
    """
    source, target = source_and_target(row, columns, languages)
    max_source_length, max_target_length = max_lengths
    input_ids, source_was_cut = cut_tokens(tokenizer, max_source_length, text=prefix + source)
    labels, target_was_cut = cut_tokens(tokenizer, max_target_length, text_target=target)
    tokens = np.array([*input_ids, START_OF_TARGET, *labels], dtype=np.int32)
    return {
        "input_ids": input_ids,
        "labels": labels,
        "target": target,
        "truncated": source_was_cut or target_was_cut,
        "length": len(input_ids) + len(labels),
        "longest": max(len(input_ids), len(labels)),
        "largest": int(tokens.max()),
        "hash": hash_of_row(tokens.tobytes()),
    }


def load_data(args: Arguments, tokenizer: Any) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on. EDIT: add filters or sources."""
    prepare = partial(
        tokenize_pair,
        tokenizer=tokenizer,
        columns=(args.source_column, args.target_column),
        languages=(args.source_lang, args.target_lang),
        prefix=args.source_prefix,
        max_lengths=(args.max_source_length, args.max_target_length),
    )
    texts = [*SOURCE_AND_TARGET, *SOURCE_AND_TARGET.values()]
    texts += [column for column in (args.source_column, args.target_column) if column]
    rows, eval_rows = read_rows(args, prepare, texts)
    # EDIT: to filter rows, as in rows = rows.filter(lambda row: row["length"] >= 8)
    return hold_out_and_mix(args, rows, eval_rows)


# ---- Model ----
def load_model(args: Arguments, layout: Layout, tokenizer: Any) -> torch.nn.Module:
    """Return the model, quantized and with adapters if the arguments request it."""
    model, _ = load_pretrained(AutoModelForSeq2SeqLM, args, layout)
    if args.forced_bos_token:  # saved with a whole model, not with adapters
        token = tokenizer.get_vocab()[args.forced_bos_token]
        model.generation_config.forced_bos_token_id = token
    turn_off_layerdrop(model)
    share_embedding_modules(model)
    set_up_layers(model, args)
    return add_adapters(model, args, layout, task_type="SEQ_2_SEQ_LM")


def summed_target_loss(
    accelerator: Accelerator, model: torch.nn.Module, batch: Mapping[str, Any]
) -> torch.Tensor:
    """Return the cross-entropy summed over a batch's target tokens, in nats and fp32.

    The decoder reads the labels shifted by one. M2M100, NLLB and Blenderbot can only shift them in
    their forward pass, where they also compute a mean loss, which is not used.
    """
    labels = batch["labels"]
    unwrapped: Any = accelerator.unwrap_model(model)
    decoder_inputs = {"labels": labels}
    if hasattr(unwrapped, "prepare_decoder_input_ids_from_labels"):
        shifted = unwrapped.prepare_decoder_input_ids_from_labels(labels=labels)
        decoder_inputs = {"decoder_input_ids": shifted}
    logits = model(**batch["inputs"], **decoder_inputs, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


# ---- Evaluation ----
def text_metrics(texts: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Return ROUGE-1, -2 and -L, BLEU and exact match, in percent.

    ROUGE is the mean F-measure over stemmed words, as in transformers' run_summarization. It only
    reads a to z and digits, and BLEU splits words as European languages do: EDIT both for others.
    """
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
    scores = [scorer.score(target, text) for text, target in zip(texts, targets, strict=True)]
    metrics = {}
    for name in scores[0]:
        metrics[f"eval_{name}"] = 100 * float(np.mean([score[name].fmeasure for score in scores]))
    # force: do not warn about texts that end in " .", which sacrebleu takes for tokenized
    metrics["eval_bleu"] = sacrebleu.corpus_bleu(texts, [targets], force=True).score
    matches = [text == target for text, target in zip(texts, targets, strict=True)]
    metrics["eval_exact_match"] = 100 * float(np.mean(matches))
    return metrics


def keep_predictions(
    written: Sequence[tuple[int, str]], rows: Rows, tokenizer: Any, output_dir: str
) -> dict[str, float]:
    """Write predictions.jsonl and return the metrics of the texts.

    Args:
        written: the number in the file and the generated text of each evaluation row, in order.

    Raises:
        ValueError: if there are not as many texts as rows.
    """
    texts = [text.strip() for _, text in written]
    targets = [target.strip() for target in rows.column("target").tolist()]
    # The sources as the model reads them, which may be cut
    read = rows.dataset["input_ids"][:]
    sources = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in read]
    predictions = []
    for (number, _), source, text, target in zip(written, sources, texts, targets, strict=True):
        line = {"row": number, "source": source, "prediction": text, "target": target}
        predictions.append(line)
        if len(predictions) <= NUM_SHOWN:
            show_prediction(source[:SHOWN_LETTERS], text, target)
    write_predictions(predictions, Path(output_dir, "predictions.jsonl"))
    return text_metrics(texts, targets)


@torch.no_grad()
def evaluate(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    tokenizer: Any,
    args: Arguments,
    rows: Rows | None,
    loader: DataLoader,
) -> None:
    """Log the loss, in nats per target token, and the text metrics of exactly these rows."""
    model.eval()
    accelerator = layout.accelerator
    total = torch.zeros(2, device=layout.device)
    written: list[tuple[int, str]] = []
    options = greedy_options(accelerator.unwrap_model(model)) | {
        "max_new_tokens": args.generation_max_length or args.max_target_length,
        "num_beams": args.generation_num_beams,
    }
    for batch in run.interruptible(loader):
        loss = summed_target_loss(accelerator, model, batch)
        total += torch.stack([loss, batch["counts"][0]])
        if args.predict_with_generate:
            tokens = generate(accelerator, model, batch["inputs"], **options)
            texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            # Not strict: a rank without rows generates one text, which belongs to no row
            written += zip(batch["row"], texts, strict=False)
    model.train()
    loss, num_targets = layout.sum_over_rows(total).tolist()
    metrics = {"eval_loss": loss / num_targets}
    written = sorted(layout.gather(written))
    if written and rows is not None and accelerator.is_main_process:
        metrics |= keep_predictions(written, rows, tokenizer, args.output_dir)
    run.log_evaluation(metrics)


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    languages = {}
    if args.source_lang:  # mBART and NLLB mark texts with their language
        languages = {"src_lang": args.source_lang, "tgt_lang": args.target_lang}
    tokenizer = load_tokenizer(args, **languages)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        train_rows, eval_rows = load_data(args, tokenizer)
    lengths = train_rows.lengths
    plan = Plan(args, layout, len(train_rows), lengths)
    run.check_plan(plan, train_rows, eval_rows)
    collator = Seq2SeqCollator(tokenizer.pad_token_id)
    train_loader = plan.training_loader(train_rows, collator, first_step=run.step)
    eval_loader = plan.evaluation_loader(eval_rows, collator)

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout, tokenizer)
    check_model(model, train_rows.largest_token(tokenizer))
    notes = describe_rows(train_rows, eval_rows)
    notes["batch"] = plan.describe_batch()
    first = train_rows.dataset[0]
    source, target = tokenizer.batch_decode([first["input_ids"], first["labels"]])
    notes["sample"] = f"{source} -> {target}"
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule)

    # ---- Train ----
    measure = partial(evaluate, run, layout, model, tokenizer, args, eval_rows)
    if eval_loader and run.owes_evaluation(plan.evaluate_after):
        measure(eval_loader)
    model.train()
    batches = iter(train_loader)
    for step in run.steps():
        micro_batches = [next(batches) for _ in range(args.gradient_accumulation_steps)]
        # Tokens of targets, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_targets, num_tokens = counts
        losses = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model):
                loss = summed_target_loss(accelerator, model, batch) / num_targets
                losses.append(loss.detach())
                # Backward, without the division by ranks and micro-batches that engines add
                backward_of_sum(layout, loss)
                if accelerator.sync_gradients:
                    max_norm = args.max_grad_norm or math.inf  # 0 only measures the norm
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                    # Has optimizer.step() change nothing if the gradient is NaN or infinite
                    run.skip_if_not_finite(grad_norm, losses, micro_batches)
                # These act after the last micro-batch only. The schedule is not prepared:
                # accelerate would step it once per rank.
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        run.finish_step(losses, grad_norm, num_tokens, epoch=step / plan.steps_per_epoch)
        if eval_loader and step in plan.evaluate_after:
            measure(eval_loader)

    # ---- Save ----
    stop_tokens = {tokenizer.eos_token_id} - {None}
    save_model(accelerator, model, tokenizer, args.output_dir, stop_tokens)
    run.finish(f"Its curve: python scripts/plot_loss.py {args.output_dir}")


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
