# SPDX-License-Identifier: Apache-2.0
"""What merge.py does with its command line: merge, or check what was merged; write the receipt."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import disable_progress_bars
from transformers.utils import logging

from components import __version__
from components.left_out import find_placed
from exits import Exit, stop
from generation.loading import check_base_weights, default_device
from generation.questions import columns_of_run
from merging import card, checking, comparing, prompts, receipt, shards, tensors, trained, writing
from merging.adapter import WEIGHTS, AdapterFolder, read_adapter_folder
from merging.contestants import Asking, Contestant, stop_tokens_of, stop_tokens_of_recipe
from merging.plan import Plan, make_plan
from merging.receipt import Receipt
from merging.skeleton import read_skeleton

BATCH_SIZE = 8  # prompts at a time


def find_problems(args: argparse.Namespace) -> Iterator[str]:
    """Yield everything that is wrong with the command line."""
    yield from prompts.find_problems(args)
    if args.check and args.dtype != "auto":
        yield "--dtype is that of the written weights, and --check writes none; leave it out"


@dataclass(frozen=True)
class Job:
    """A merge, with everything that was read before weights are loaded.

    Attributes:
        dtype: of the written weights; None for that of the base's files.
        bound: of logit gaps, as a part of the largest logit; None for those of `comparing`.
    """

    adapter: AdapterFolder
    plan: Plan
    files: shards.Files
    tokenizer: Any
    asking: Asking
    sources: dict[str, int]
    device: str
    dtype: torch.dtype | None
    bound: float | None

    @property
    def trained_base(self) -> str:
        """Return the name of the base that the adapters were trained on."""
        return allowed_bases(self.adapter)[-1]


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of merge.py; exit with a code and one line if that fails."""
    problems = list(find_problems(args))
    if problems:
        stop(Exit.USAGE, "; ".join(problems))
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    if args.check and not args.output.is_dir():
        stop(Exit.USAGE, f"{args.output}: no such folder; --check needs a merged one")
    if not args.check:
        writing.check_output(args.output)
    job = read_job(args)
    if args.check:
        check(job, args)
    else:
        merge(job, args)


def read_job(args: argparse.Namespace) -> Job:
    """Return what the command line names, read and checked but for the weights."""
    adapter = read_adapter_folder(args.adapter)
    names = allowed_bases(adapter)
    if args.base != "auto" and args.base not in names:
        stop(Exit.USAGE, f"--base {args.base}: the run was on the {names[-1]} base, by run.json")
    skeleton = read_skeleton(adapter)
    files = shards.find_files(adapter.base, adapter.revision)
    check_base_weights(adapter.source)
    # As from_pretrained does: by them a parameter finds its tensors in the files again
    _, skeleton.model._weight_conversions = find_placed(skeleton.model, files.names)
    plan = make_plan(adapter, skeleton, files.names)
    tokenizer = checking.load_tokenizer(adapter.source.tokenizer, adapter.revision)
    settings = dict(adapter.arguments.get("chat_template_kwargs") or {})
    template = Asking([], settings, 1, 1).template_of(tokenizer)
    longest = prompts.longest_prompt(skeleton.model.config, args.max_new_tokens)
    reader = prompts.Reader(tokenizer, template, columns_of_run(adapter.path), longest)
    found = prompts.collect(reader, args.prompts, adapter.arguments, args.num_prompts)
    asking = Asking(found.items, settings, args.max_new_tokens, BATCH_SIZE)
    unknown = asking.find_unknown_token(skeleton.model, tokenizer)
    if unknown is not None:
        stop(Exit.DATA, f"{adapter.path}: {unknown}")
    dtype = getattr(torch, args.dtype, None)  # None for auto
    device = args.device or default_device()
    return Job(adapter, plan, files, tokenizer, asking, found.sources, device, dtype, args.bound)


def allowed_bases(adapter: AdapterFolder) -> list[str]:
    """Return the names of the bases into which adapters can be merged.

    The last one is the base of the training.
    """
    names = [trained.SIXTEEN_BITS]
    if adapter.quantization is not None:
        names.append(adapter.quantization.name)
    return names


# ---- Merge ----
def merge(job: Job, args: argparse.Namespace) -> None:
    """Merge into a new folder and write its receipt; exit with 76 if it has a problem."""
    staging = writing.start_staging(args.output)
    model = trained.load_trained(job.adapter, job.device)
    stop_tokens = stop_tokens_of_recipe(model, job.tokenizer)
    slip = start_receipt(job, model, stop_tokens)
    base = merge_in_memory(job, model, slip, args.base)
    del model
    slip.facts["merged_into"] = base
    is_quantized = base != trained.SIXTEEN_BITS
    writing.write_weights(staging, job.adapter, job.plan, job.files, is_quantized, job.dtype)
    writing.copy_tokenizer(staging, job.adapter)
    of_base = writing.read_json_of_base(job.adapter, writing.GENERATION_CONFIG) or {}
    writing.write_generation_config(staging, of_base, stop_tokens, job.tokenizer)
    writing.write_config(staging, job.adapter, job.plan.unties, job.dtype)
    reload(job, staging, slip, base)
    slip.write(staging)
    report(slip, args.num_prompts)
    if slip.all_problems:
        fail(slip, f"what was merged is in {staging}")
    problem = card.write_card(staging, args.output.resolve().name, job.adapter, slip)
    if problem is not None:
        print(f"warning: {problem}", file=sys.stderr)
    writing.finish(staging, args.output)
    print(f"The merged model is in {args.output}, its receipt in {args.output / receipt.NAME}")


def merge_in_memory(job: Job, model: Any, slip: Receipt, wanted: str) -> str:
    """Compare peft's merge in memory with the trained model; return the base to merge into.

    Args:
        model: as trained.
        wanted: "auto", or the name of a base.
    """
    unties = job.plan.unties
    if job.adapter.quantization is None:
        merged = ask_merged(job, trained.merge_by_peft(model, unties), slip.reference)
        bound = relative_bound(job, trained.SIXTEEN_BITS, slip.reference.dtype, merged.dtype)
        slip.add(merged, bound)
        return trained.SIXTEEN_BITS
    contestants = {}
    gaps: dict[str, float] = {}
    for name in allowed_bases(job.adapter):
        merged_model = trained.load_merged_by_peft(job.adapter, name, job.device, unties)
        contestants[name] = ask_merged(job, merged_model, slip.reference)
        del merged_model
        gap = comparing.largest_gap(slip.reference, contestants[name])
        assert gap is not None, "models of transformers have logits"
        gaps[name] = gap
        print(f"Merged into the {name} base, the largest logit gap is {gaps[name]:.2e}")
    slip.facts["gaps_of_bases"] = {name: comparing.only_finite(gap) for name, gap in gaps.items()}
    chosen = wanted
    why = "as requested"
    if wanted == "auto":
        chosen = nearest_base(gaps)
        why = "the nearer one"
    print(f"Merging into the {chosen} base, {why}")
    merged = contestants[chosen]
    slip.add(merged, relative_bound(job, chosen, slip.reference.dtype, merged.dtype))
    return chosen


def nearest_base(gaps: Mapping[str, float]) -> str:
    """Return the name of the base with the smallest gap. Raises SystemExit with 76 if none has one.

    Args:
        gaps: of each base; one that is not a number is none.
    """
    finite = {name: gap for name, gap in gaps.items() if math.isfinite(gap)}
    if not finite:
        stop(Exit.DIFFERS, f"merged into {' or '.join(gaps)}, the model's logits are not numbers")
    return min(finite, key=finite.__getitem__)


def ask_merged(job: Job, model: Any, reference: Contestant) -> Contestant:
    """Return peft's merged model as a contestant."""
    stop_tokens = reference.stop_tokens or frozenset()
    return job.asking.ask("merged", model, job.tokenizer, stop_tokens, reference.tokens)


def relative_bound(job: Job, base: str, *dtypes: str) -> float:
    """Return the bound of a comparison with the trained model, relative to its largest logit.

    Args:
        base: the name of the base into which the adapters were merged.
        dtypes: of the trained and of the merged weights.
    """
    if job.bound is not None:
        return job.bound
    bounds = [comparing.ROUNDING.get(dtype, 0.0) for dtype in dtypes]
    if base != job.trained_base:
        bounds.append(comparing.OTHER_BASE)
    if job.trained_base == "8bit":
        bounds.append(comparing.INT8_ACTIVATIONS)
    return max(bounds)


# ---- The merged folder ----
def reload(job: Job, folder: Path, slip: Receipt, base: str) -> None:
    """Load a merged folder as its users will, and add it to the receipt.

    Args:
        base: the name of the base into which the adapters were merged.
    """
    files = shards.find_files(str(folder), "main")
    slip.problems += checking.find_problems_of_files(folder, files)
    is_quantized = base != trained.SIXTEEN_BITS
    slip.problems += tensors.find_wrong_tensors(
        job.adapter, job.plan, job.files, files, is_quantized
    )
    tokenizer = checking.load_tokenizer(str(folder))
    model, problems = checking.load_folder(folder, job.device)
    slip.problems += problems
    stop_tokens = stop_tokens_of(model.generation_config)
    unknown = job.asking.find_unknown_token(model, tokenizer)
    if unknown is not None:
        slip.problems.append(unknown)
        return
    found = job.asking.ask("reloaded", model, tokenizer, stop_tokens, slip.reference.tokens)
    slip.add(found, relative_bound(job, base, slip.reference.dtype, found.dtype))


def check(job: Job, args: argparse.Namespace) -> None:
    """Compare a merged folder with what was trained; exit with 76 if it has a problem.

    The receipt is only written if it has none: otherwise its hashes would be those of the fault.
    """
    folder = args.output
    base = args.base
    if base == "auto":
        base = base_of_receipt(folder, job)
    model = trained.load_trained(job.adapter, job.device)
    stop_tokens = stop_tokens_of_recipe(model, job.tokenizer)
    slip = start_receipt(job, model, stop_tokens)
    del model
    slip.facts["merged_into"] = base
    slip.problems += receipt.find_changed_files(folder)
    reload(job, folder, slip, base)
    report(slip, args.num_prompts)
    if slip.all_problems:
        fail(slip, f"{folder} is not what was trained")
    slip.write(folder)
    print(f"{folder} is what was trained")


def base_of_receipt(folder: Path, job: Job) -> str:
    """Return the base that a receipt names, or without one that of the training."""
    try:
        content = json.loads((folder / receipt.NAME).read_text(encoding="utf-8"))
        base = content["merged_into"]
    except (OSError, ValueError, LookupError, TypeError):
        return job.trained_base
    if base not in allowed_bases(job.adapter):
        return job.trained_base
    return base


# ---- The receipt ----
def start_receipt(job: Job, model: Any, stop_tokens: frozenset[int]) -> Receipt:
    """Return a receipt without comparisons but the one of the trained model with its base."""
    reference = job.asking.ask("trained", model, job.tokenizer, stop_tokens)
    slip = Receipt(facts_of(job), reference)
    with model.disable_adapter():
        of_base = job.asking.logits_of(model, reference, job.tokenizer.pad_token_id)
    assert reference.logits is not None, "models of transformers have logits"
    slip.gap_without_adapters = comparing.gap_of_logits(reference.logits, of_base)
    return slip


def facts_of(job: Job) -> dict[str, Any]:
    """Return what a receipt says of a merge beside its comparisons."""
    return {
        "made_by": f"scripts/merge.py {__version__}",
        "adapters": str(job.adapter.path),
        "adapters_sha256": receipt.hash_file(job.adapter.path / WEIGHTS),
        "base": job.adapter.base,
        "base_revision": job.adapter.revision,
        "trained_on": job.trained_base,
        "prompts_from": job.sources,
        "chat_template_kwargs": job.asking.settings,
    }


def report(slip: Receipt, wanted: int) -> None:
    """Print the table of a receipt, and where its prompts come from.

    Args:
        wanted: the number of prompts that were requested.
    """
    for source, number in slip.facts["prompts_from"].items():
        print(f"{number} prompts: {source}")
    num_prompts = len(slip.reference.tokens)
    if num_prompts < wanted:
        print(f"There are no more than these {num_prompts} of --num_prompts {wanted}")
    for line in slip.table():
        print(line)


def fail(slip: Receipt, where: str) -> NoReturn:
    """Exit with 76 after a line with the first problem of a receipt."""
    problems = slip.all_problems
    more = ""
    if len(problems) > 1:
        more = f" (and {len(problems) - 1} more problems)"
    stop(Exit.DIFFERS, f"{problems[0]}{more}; {where}")
