# SPDX-License-Identifier: Apache-2.0
r"""Continued pretraining of any causal language model on raw text, Mistral as the example.

The YAML file owns the strategy, the command line everything about learning:

    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/mistral_pretrain.py \
        --num_eval_documents 200
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 4 \
        recipes/mistral_pretrain.py --dataset_name books/ --num_eval_documents 5 \
        --num_train_epochs 2
    accelerate launch --config_file accelerate_configs/fsdp.yaml recipes/mistral_pretrain.py \
        --max_length 8192 --model_name_or_path mistralai/Mistral-7B-v0.3 \
        --dataset_name org/web_text --streaming --max_train_tokens 2e9

Documents come in an order that follows from the seed. Each gets an end-of-sequence token, and
together they are cut into blocks of --max_length tokens, with nothing lost or padded. Documents in
one block do not see each other. Each token but a document's first is trained on once per pass. A
good run prints a summary, a loss and a perplexity that fall, and the folder that `from_pretrained`
loads. The same command again continues from the newest checkpoint. Exit codes: core/exits.py.
To make it yours: python scripts/copy_recipe.py mistral_pretrain my_project, then look for EDIT.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import send_to_device, set_seed
from transformers import AutoModelForCausalLM

from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    LengthArguments,
    LigerArguments,
    LossInHeadArguments,
)
from core.batches import Plan, starts_of_batches, takes_one_line
from core.cli import NOT_NEGATIVE, POSITIVE, arg, free, parse
from core.engine import Layout, backward_of_sum, is_compiled, make_accelerator
from core.exits import Exit, fail
from core.export import save_model
from core.loss import LossInHead, evaluate_perplexity
from core.model import (
    add_adapters,
    check_model,
    load_pretrained,
    load_tokenizer,
    make_optimizer,
    set_up_layers,
)
from core.run import Run
from tasks.stream import (
    START,
    BlockStream,
    Documents,
    count_tokens,
    cut_blocks,
    first_blocks,
    open_documents,
    read_documents,
)

SHOWN_TOKENS = 200  # tokens of the first block that the start summary shows


@dataclass(kw_only=True)
class Arguments(
    CommonArguments,
    DenseModelArguments,
    LossInHeadArguments,
    LigerArguments,
    LengthArguments,
):
    """Continued pretraining."""

    EXTRAS = ("configs", "hosts", "object_store", "mesh", "varlen", "float8")
    MESH = ("tp", "cp", "sp")
    FIXED_SHAPES = True
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M"
    # EDIT: your data set. Default: 100,000 synthetic texts without a test split (Apache-2.0
    # license on its hub page)
    dataset_name: str = arg(
        "HuggingFaceTB/cosmopedia-100k",
        "hub id, folder, or .txt (one document per file), .jsonl, .json, .csv or .parquet file",
    )
    output_dir: str = "runs/mistral_pretrain"
    COLUMN_ARGUMENTS = {"text": "text_column"}
    text_column: str = arg("text", "column of the text; .txt files have none")
    streaming: bool = arg(False, "read the data in order, without a copy on this disk")
    shuffle_buffer_size: int = arg(
        1000, "documents that --streaming holds in memory and shuffles at a time", POSITIVE
    )
    eval_split: float = arg(
        0, "for rows; documents are held out with --num_eval_documents", NOT_NEGATIVE
    )
    num_eval_documents: int = arg(
        0, "documents to hold out from the start of the data and evaluate on", NOT_NEGATIVE
    )
    max_eval_tokens: int = free(1_000_000, "most tokens to evaluate on, from the start", POSITIVE)
    max_length: int = arg(1024, "tokens per block; a batch counts blocks")
    max_train_tokens: float = arg(
        1e7, "tokens to train on, rounded up to whole steps; shorter data are read again", POSITIVE
    )
    # pyrefly: ignore[bad-override-mutable-attribute]  # narrower: arguments are only read
    num_train_epochs: int | None = arg(
        None, "passes over the data instead; each rank tokenizes all of it first, to count tokens"
    )
    # pyrefly: ignore[bad-override-mutable-attribute]  # narrower: arguments are only read
    eval_strategy: Literal["no", "steps"] = free(
        "steps", "whether to evaluate: every --eval_steps, and after the last step"
    )

    def conflicts(self) -> Iterator[str]:
        if self.eval_split:
            yield (
                "--eval_split: documents are too many to be drawn from, so they are held out from "
                "the start of the data: use --num_eval_documents"
            )
        if self.num_eval_documents and self.eval_dataset_name:
            yield "--num_eval_documents and --eval_dataset_name: choose one"


# ---- Data ----
@dataclass(frozen=True)
class Corpus:
    """The text of a run.

    Attributes:
        documents: those to train on.
        first_block: the first block that is trained on, [3, max_length + 1].
        passes: how often the documents are read at most; math.inf under a budget of tokens.
        num_tokens: those that are trained on: of all passes, or the budget.
        eval_documents: those to evaluate on, or None.
        eval_blocks: the first blocks of their text.
    """

    documents: Documents
    first_block: torch.Tensor
    passes: float
    num_tokens: float
    eval_documents: Documents | None
    eval_blocks: list[torch.Tensor]


def load_data(args: Arguments, tokenizer: Any) -> Corpus:
    """Return the text to train on and the blocks to evaluate on. EDIT: add filters or sources.

    Ends with 65 if a document cannot be used, or none has text.
    """
    documents, eval_documents = open_documents(args)
    passes = math.inf
    num_tokens = args.max_train_tokens
    eval_blocks = []
    try:
        if eval_documents is not None:
            number = math.ceil(args.max_eval_tokens / args.max_length)
            eval_blocks = first_blocks(eval_documents, tokenizer, args.max_length, number)
        ordered = read_documents(documents, START, 1, args.seed, args.shuffle_buffer_size)
        placed = cut_blocks(ordered, documents, tokenizer, args.max_length)
        blocks = (block for block, _ in placed)
        first_block = next(blocks, None)
        if first_block is None:
            fail(Exit.DATA, f"{args.dataset_name}: no text in any document")
        if args.num_train_epochs and args.max_steps <= 0:
            passes = args.num_train_epochs
            tokens_per_pass = count_tokens(first_block) + sum(map(count_tokens, blocks))
            num_tokens = passes * tokens_per_pass - 1  # Nothing predicts the first token of all
    except ValueError as error:
        fail(Exit.DATA, str(error))
    return Corpus(documents, first_block, passes, num_tokens, eval_documents, eval_blocks)


def make_batch(
    blocks: Sequence[torch.Tensor],
    max_length: int,
    one_line: bool = False,
    layout: Layout | None = None,
    height: int = 1,
) -> dict[str, Any]:
    """Return a batch of blocks, each [3, max_length + 1], of which those that lack are empty.

    A batch has inputs: input_ids, [blocks, max_length], and position_ids, which start again at 0
    with each document: without a mask and a cache, these keep documents apart. The rest is as in
    core.batches.TokenCollator, with the numbers of the documents in "row".

    Args:
        one_line: put all blocks into one line, for FlashAttention.
        layout: that of the run. If ranks share the tokens of a line, nothing keeps documents in it
            apart, so each gets a line of its own.
        height: the number of blocks that a batch has at least, unless they are in one line.
    """
    empty = torch.zeros(3, max_length + 1, dtype=torch.long)
    height = 1 if one_line else height
    stacked = torch.stack([*blocks, *[empty] * (height - len(blocks))]).long()
    ids, places, numbers = stacked[:, :, :-1].unbind(1)
    next_ids, next_places, _ = stacked[:, :, 1:].unbind(1)
    positions = next_places.flatten().nonzero()[:, 0]  # a document's first token has no context
    targets = next_ids.flatten()[positions]
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": places}
    if one_line:
        starts = places.flatten().eq(0).nonzero()[:, 0]
        ends = torch.cat([starts, torch.tensor([places.numel()])]).int()
        longest = int(ends.diff().max())
        inputs = {name: line.reshape(1, -1) for name, line in inputs.items()}
        # Computed here on the host, so that no layer has to wait for the device
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        inputs |= {"max_length_q": longest, "max_length_k": longest}
    is_text = numbers > 0
    if layout is not None and layout.parts_of_row() > 1:
        ids, places_in_lines = part_documents(ids, places, is_text, layout.multiple_of)
        inputs = {"input_ids": ids}
        positions = places_in_lines[positions]
    return {
        "inputs": inputs,
        "positions": positions,
        "targets": targets,
        "counts": torch.tensor([len(positions), int(is_text.sum())]),
        "row": numbers[is_text].unique().tolist(),
    }


def part_documents(
    ids: torch.Tensor, places: torch.Tensor, is_text: torch.Tensor, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the documents of blocks in lines of their own, and where each token now is.

    Args:
        ids, places, is_text: of the tokens of blocks, [blocks, tokens]; a document's part of a
            block begins at place 0.
        multiple: the length of a line is a multiple of this; lines are padded on the right.

    Returns:
        [lines, tokens], and for each token of the flattened blocks its place in the flattened
        lines.
    """
    begins = is_text & (places == 0)
    lines = begins.flatten().cumsum(0) - 1
    num_lines = max(int(begins.sum()), 1)
    longest = int(places.max()) + 1
    width = longest + -longest % multiple
    places_in_lines = lines * width + places.flatten()
    parted = torch.zeros(num_lines, width, dtype=ids.dtype)
    parted.view(-1)[places_in_lines[is_text.flatten()]] = ids[is_text]
    return parted, places_in_lines


# ---- Model ----
def load_model(args: Arguments, layout: Layout) -> torch.nn.Module:
    """Return the model, quantized and with adapters if the arguments request it."""
    model, _ = load_pretrained(AutoModelForCausalLM, args, layout)
    set_up_layers(model, args)
    return add_adapters(model, args, layout, task_type="CAUSAL_LM")


def train(args: Arguments, run: Run) -> None:
    accelerator, layout = make_accelerator(args)
    run.start(layout)
    set_seed(args.seed)

    # ---- Data ----
    tokenizer = load_tokenizer(args)
    with accelerator.local_main_process_first():  # the other ranks read its cache
        corpus = load_data(args, tokenizer)
    # All blocks of the run are one pass, since the stream itself begins anew
    num_blocks = math.ceil(corpus.num_tokens / args.max_length)
    plan = Plan(replace(args, num_train_epochs=1), layout, num_blocks)
    run.check_plan(plan, corpus.documents, corpus.eval_documents)
    stream = BlockStream(corpus.documents, tokenizer, plan, corpus.passes)
    one_line = takes_one_line(args.attn_implementation)
    to_batch = partial(make_batch, max_length=args.max_length, one_line=one_line, layout=layout)
    size = args.per_device_eval_batch_size
    eval_batches = []
    for start in starts_of_batches(len(corpus.eval_blocks), size, layout):
        batch = to_batch(corpus.eval_blocks[start : start + size])
        eval_batches.append(send_to_device(batch, accelerator.device))

    # ---- Model, optimizer, schedule ----
    model = load_model(args, layout)
    # EDIT: another loss of a token is one line of token_losses in core/loss.py, as in
    #     cross_entropy(logits, targets, reduction="none", label_smoothing=0.1)
    token_loss = LossInHead(model, args.max_logits_mib, layout.device, is_compiled(accelerator))
    # The first block, since the whole text may be too much to be read before training
    largest_token = max(tokenizer.pad_token_id, int(corpus.first_block[0].max()))
    check_model(model, largest_token, shares_lines=True, gives_ends=one_line)
    passes = "until the budget is spent" if corpus.passes == math.inf else f"{corpus.passes} times"
    notes = {
        "train text": f"{corpus.documents.size or 'a stream of'} documents, {passes}",
        "eval text": f"{len(corpus.eval_blocks)} blocks",
        "batch": plan.describe_batch("blocks", args.max_length),
        "loss": str(token_loss),
        "sample": tokenizer.decode(corpus.first_block[0, :SHOWN_TOKENS].tolist()),
    }
    run.summarize(model, notes)
    optimizer, schedule = make_optimizer(model, args, accelerator, plan.total_steps)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.resume(model, optimizer, schedule, stream=stream)

    # ---- Train ----
    measure = partial(evaluate_perplexity, run, layout, model, token_loss, eval_batches)
    if eval_batches and run.owes_evaluation(plan.evaluate_after):
        measure()
    model.train()
    for step in run.steps():
        try:
            blocks = stream.next_step(is_last=step == plan.total_steps)
        except ValueError as error:
            run.save_and_end(Exit.DATA, str(error))
        # Of one shape, for which layers are compiled once
        batches = [to_batch(part, height=args.per_device_train_batch_size) for part in blocks]
        micro_batches: Any = send_to_device(batches, accelerator.device, non_blocking=True)
        # Tokens that are trained on, and all tokens without padding.
        # Divided by the counts of the whole step on all ranks, the loss is the same for any number
        # of ranks and micro-batches.
        counts = layout.sum_over_rows(sum(batch["counts"] for batch in micro_batches))
        num_trained_on, num_tokens = counts
        losses = []
        grad_norm = None
        for batch in micro_batches:
            with accelerator.accumulate(model), layout.part_of(batch) as part:
                loss = token_loss(model, part) / num_trained_on
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
        run.finish_step(losses, grad_norm, num_tokens, epoch=stream.epoch)
        if eval_batches and step in plan.evaluate_after:
            measure()

    # ---- Save ----
    stop_tokens = {tokenizer.eos_token_id} - {None}
    save_model(accelerator, model, tokenizer, args.output_dir, stop_tokens)
    accelerator.print(stream.describe())
    run.finish(f'Try it: python scripts/generate.py {args.output_dir} --raw --prompt "..."')


def main() -> None:
    args = parse(Arguments, __doc__)
    # From here on a signal stops the run cleanly, and status.json records how it ends
    with Run(args) as run:
        train(args, run)


if __name__ == "__main__":
    main()
