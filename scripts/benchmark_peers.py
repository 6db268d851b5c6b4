"""The other contestants of scripts/benchmark.py, one a process: a bare loop, transformers' Trainer, TRL's SFTTrainer.

    python scripts/benchmark_peers.py floor --model_name_or_path MODEL --data FOLDER --output_dir runs/floor
    python scripts/benchmark_peers.py lean --model_name_or_path MODEL --data FOLDER --output_dir runs/lean
    python scripts/benchmark_peers.py trainer --model_name_or_path MODEL --data FOLDER --output_dir runs/trainer
    python scripts/benchmark_peers.py trl --packing --model_name_or_path MODEL --data FOLDER --output_dir runs/trl

The flags are those of recipes/llama.py, with the same meaning. FOLDER is what scripts/benchmark.py prepares:
rows.jsonl (text), tokens.jsonl (the recipe's input_ids and labels), padded.pt (the recipe's batches in its order, with
a mask over the padding, as most loops have them) and own.pt (the same as the recipe's own tensors).

There are two bare loops. Both read batches that lie ready and have nothing left to do but to compute: no accelerate,
no data loader, no log. `floor` is the usual one, with padded.pt and the logits of all tokens. `lean` has own.pt and
the logits of learnt tokens alone, as the recipe (but all at once, where --max_logits_mib would cut them): what
the recipe takes longer is its overhead.
With --matched Trainer and SFTTrainer are told to do what the floor does; without it they keep their own defaults, but
for the precision, which is fp32, or with --mixed_precision bf16 autocast.

Each writes OUTPUT_DIR/metrics.jsonl as the recipe does: step, loss where it was logged, num_input_tokens_seen (real
tokens, no padding); and the model.
"""

import argparse
import json
import math
from pathlib import Path

from usage import Parser


def load_model(args):
    """The model as the recipe loads it, with the recipe's adapters if asked for."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(args.seed)  # adapters start from random numbers
    quantization = None
    if (
        args.load_in_4bit
    ):  # as the recipe has it in mixed precision: stored and multiplied in the compute dtype
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_quant_storage=args.dtype,
            bnb_4bit_compute_dtype=args.dtype,
            bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
        )
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        dtype=args.dtype,
        attn_implementation=args.attn_implementation,
        quantization_config=quantization,
    )
    if args.use_peft:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=args.lora_r,
                lora_alpha=args.lora_alpha,
                target_modules="all-linear",
            ),
        )
    return model


def write_metrics(folder, tokens, losses):
    """Write metrics.jsonl; tokens: real ones of each step, losses: by number of the step, from 1."""
    seen, lines = 0, []
    for step, count in enumerate(tokens, 1):
        seen += count
        lines.append(
            json.dumps({"step": step, "loss": losses.get(step), "num_input_tokens_seen": seen})
            + "\n"
        )
    (folder / "metrics.jsonl").write_text("".join(lines))


# ---- Bare loops ----


def weight_groups(model, weight_decay):
    """The weights that are trained, in two groups: biases and norms do not decay."""
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups["norm" in name or ".ln_" in name or name.endswith("bias")]["params"].append(
                weight
            )
    return [group for group in groups if group["params"]]


def usual_loss(model, batch):
    """The cross-entropy summed over a batch's supervised tokens; a function, so that no logits outlive it."""
    from torch.nn.functional import cross_entropy, pad

    logits = model(**batch["inputs"], use_cache=False).logits.flatten(0, 1).float()
    targets = pad(batch["labels"], (0, 1), value=-100)[
        :, 1:
    ].flatten()  # moved, so that no logits are copied
    return cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def lean_loss(model, batch):
    """The same, without the logits of tokens after which nothing is learnt."""
    from torch.nn.functional import cross_entropy

    inner = getattr(model, "get_base_model", lambda: model)()
    hidden = inner.base_model(**batch["inputs"], use_cache=False).last_hidden_state.flatten(0, 1)
    logits = inner.lm_head(hidden[batch["positions"]]).float()
    return cross_entropy(logits, batch["targets"], reduction="sum")


def to_device(batch, device):
    """A batch with its tensors, and those one level below, on a device."""
    return {
        name: to_device(one, device) if isinstance(one, dict) else one.to(device)
        for name, one in batch.items()
    }


def run_bare(args, loss_of, file):
    """Train with plain PyTorch on batches that lie ready in a file."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = [
        to_device(batch, device) for batch in torch.load(args.data / file, weights_only=True)
    ]
    model = load_model(args)
    if not args.load_in_4bit:  # a quantized model is on the device already
        model = model.to(device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    accumulation, weights = (
        args.gradient_accumulation_steps,
        [w for w in model.parameters() if w.requires_grad],
    )
    steps = args.max_steps if args.max_steps > 0 else math.ceil(len(batches) / accumulation)
    if len(batches) < steps * accumulation:
        raise ValueError(
            f"{args.data / file} has {len(batches)} batches, {steps * accumulation} are needed"
        )
    optimizer = torch.optim.AdamW(
        weight_groups(model, args.weight_decay), lr=args.learning_rate, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    losses, tokens = [], []
    for step in range(steps):
        window = batches[step * accumulation : (step + 1) * accumulation]
        (num_supervised, num_tokens), total = sum(batch["counts"] for batch in window), 0.0
        tokens.append(num_tokens)
        for batch in window:
            with torch.autocast(device, torch.bfloat16, enabled=args.mixed_precision == "bf16"):
                loss = loss_of(model, batch) / num_supervised
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights, args.max_grad_norm or math.inf)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    if not args.skip_save:
        model.save_pretrained(args.output_dir)
    losses = {step: loss.item() for step, loss in enumerate(losses, 1)}
    write_metrics(args.output_dir, [int(count) for count in tokens], losses)


def run_floor(args):
    """The usual bare loop."""
    run_bare(args, usual_loss, "padded.pt")


def run_lean(args):
    """The bare loop that computes what the recipe does."""
    run_bare(args, lean_loss, "own.pt")


# ---- Trainer and SFTTrainer ----


class Counted:
    """A collator that also writes down the real tokens of each batch that it makes."""

    def __init__(self, collator):
        self.collator, self.tokens = collator, []

    def __call__(self, rows):
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self.collator(rows)


def common_settings(args):
    """Arguments of TrainingArguments and SFTConfig: what is learnt, nothing beside it, and with --matched how."""
    settings = {
        name: getattr(args, name)
        for name in (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "learning_rate",
            "lr_scheduler_type",
            "weight_decay",
            "max_grad_norm",
            "max_steps",
            "num_train_epochs",
            "seed",
        )
    }
    settings |= {"output_dir": str(args.output_dir), "save_strategy": "no", "report_to": "none"}
    settings |= {"bf16": args.mixed_precision == "bf16"}  # TRL would turn it on by itself
    if args.matched:
        settings |= {
            "gradient_checkpointing": args.gradient_checkpointing,
            "optim": "adamw_torch_fused",
            "logging_steps": args.logging_steps,
            "train_sampling_strategy": args.train_sampling_strategy,
        }
    return settings


def tokenise(args, tokenizer):
    """The rows as the prepared tokens or, with --text, made from the text as a user of Trainer would."""
    from datasets import Dataset, load_dataset

    if not args.text:
        return Dataset.from_list(
            [json.loads(line) for line in (args.data / "tokens.jsonl").read_text().splitlines()]
        )

    def to_tokens(row):
        ask, say = (
            row[name]
            for name in (("question", "answer") if "question" in row else ("prompt", "completion"))
        )
        messages = [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
        encoded = tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            truncation=True,
            max_length=max_length,
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return {
            "input_ids": encoded["input_ids"],
            "labels": [token if learnt else -100 for token, learnt in pairs],
        }

    max_length = args.max_length  # not args: the cache knows a function by all that it refers to
    rows = load_dataset("json", data_files=str(args.data / "rows.jsonl"), split="train")
    return rows.map(to_tokens, remove_columns=rows.column_names)


def finish(trainer, args):
    """Train, and write what was logged and the model."""
    trainer.data_collator = counted = Counted(trainer.data_collator)
    trainer.train()
    if not args.skip_save:
        trainer.save_model()
    per_step = args.gradient_accumulation_steps
    tokens = [
        sum(counted.tokens[i : i + per_step]) for i in range(0, len(counted.tokens), per_step)
    ]
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    write_metrics(args.output_dir, tokens[: trainer.state.global_step], losses)


def run_trainer(args):
    """Train with transformers' Trainer."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, padding_side="right")
    rows = tokenise(args, tokenizer)
    # Its default collator does not pad labels; this is the one of its own examples that keeps them
    finish(
        Trainer(
            load_model(args),
            TrainingArguments(**common_settings(args)),
            train_dataset=rows,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            processing_class=tokenizer,
        ),
        args,
    )


def run_trl(args):
    """Train with TRL's SFTTrainer."""
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, padding_side="right")
    config = SFTConfig(**common_settings(args), max_length=args.max_length, packing=args.packing)
    rows = tokenise(args, tokenizer)
    finish(
        SFTTrainer(load_model(args), config, train_dataset=rows, processing_class=tokenizer), args
    )


CONTESTANTS = {"floor": run_floor, "lean": run_lean, "trainer": run_trainer, "trl": run_trl}


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=CONTESTANTS)
    parser.add_argument("--model_name_or_path", required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prepared rows")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the result")
    parser.add_argument(
        "--matched", action="store_true", help="what differs by default is set as the floor has it"
    )
    parser.add_argument("--text", action="store_true", help="tokenise rows.jsonl itself")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument(
        "--mixed_precision", default="no", choices=["no", "bf16"], help="bf16: autocast"
    )
    parser.add_argument(
        "--no_master_weights", action="store_true", help="as for the recipe; changes nothing here"
    )
    parser.add_argument("--load_in_4bit", action="store_true")
    parser.add_argument("--bnb_4bit_use_double_quant", action="store_true")
    parser.add_argument("--skip_save", action="store_true", help="write no weights at the end")
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--packing", action="store_true", help="lines of --max_length (trl)")
    parser.add_argument("--use_peft", action="store_true")
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--lora_alpha", type=float, default=32)
    parser.add_argument("--max_length", type=int, default=1024)
    parser.add_argument("--train_sampling_strategy", default="sequential")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_train_epochs", type=float, default=1.0)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--lr_scheduler_type", default="linear", choices=["linear"])
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--logging_steps", type=int, default=1)
    return parser, parser.parse_args()


def main():
    parser, args = parse_args()
    if not (args.data / "tokens.jsonl").is_file():
        parser.error(
            f"--data {args.data}: no prepared rows in it; scripts/benchmark.py writes them"
        )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    CONTESTANTS[args.contestant](args)


if __name__ == "__main__":
    main()
