# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness, asked of a loaded model as the recipes would ask it."""

import argparse
import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from common import Exit, stop
from core.chat import ChatTemplate
from core.generation import answer_in
from generation.answering import Answerer
from generation.loading import Source, load_tokenizer
from paths import SCRIPTS

# What would print several lines where one says what is wrong, such as each retry of the hub
LOGGERS = ("lm_eval", "huggingface_hub", "datasets")
# Resamplings for errors of metrics that are no means. lm-eval's command makes 100,000, which takes
# minutes; a thousand tell an error within a few percent.
BOOTSTRAPS = 1000
NOT_METRICS = ("name", "alias", "sample_len", "sample_count")


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Return what lm-eval has to be given of --tasks.

    Metrics that are code on the hub are not fetched unless the command line allows it.

    Ends with 64 without lm-eval, or if it has no task of a name.
    """
    if importlib.util.find_spec("lm_eval") is None:
        stop(Exit.USAGE, "lm-eval is not installed: pip install -r requirements-eval.txt")
    # Hugging Face's package evaluate, which lm-eval imports, has the name of a command here
    sys.path.sort(key=lambda folder: Path(folder).resolve() == SCRIPTS)
    if not args.confirm_run_unsafe_code:
        os.environ["HF_EVALUATE_OFFLINE"] = "1"  # read when evaluate is imported
    from lm_eval.tasks import TaskManager

    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    manager = TaskManager()
    tasks = []
    for name in args.tasks.split(","):
        found = [name] if name.endswith((".yaml", ".yml")) else manager.match_tasks([name])
        if not found:
            fix = "`lm_eval ls tasks` lists them"
            stop(Exit.USAGE, f"--tasks {name}: lm-eval has no such task; {fix}")
        tasks += found
    return {"tasks": tasks, "task_manager": manager}


def measure_tasks(
    args: argparse.Namespace, source: Source, model: torch.nn.Module, tasks: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each task with its metrics and how it was asked, and what was answered to it."""
    import lm_eval

    tokenizer = load_tokenizer(source, needs_template=args.apply_chat_template == "true")
    is_chat = bool(tokenizer.chat_template) and args.apply_chat_template != "false"
    results: Any = lm_eval.simple_evaluate(
        wrap(args, source, model, tokenizer, is_chat),
        **tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        bootstrap_iters=BOOTSTRAPS,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    found = {}
    for task, figures in results["results"].items():
        metrics = {}
        for key, value in figures.items():
            name, _, how = key.partition(",")
            is_metric = name not in NOT_METRICS and not name.endswith("_stderr")
            if is_metric and isinstance(value, int | float):
                error = figures.get(f"{name}_stderr,{how}")
                error = error if isinstance(error, int | float) else None  # lm-eval writes N/A
                full_name = name if how in ("", "none") else f"{name} ({how})"
                metrics[full_name] = {"value": value, "stderr": error}
        found[task] = {
            "rows": results["n-samples"].get(task, {}).get("effective"),
            "version": results["versions"].get(task),
            "num_fewshot": results["n-shot"].get(task),
            "chat_template": is_chat,
            "metrics": metrics,
        }
    return found, results["samples"]


def wrap(
    args: argparse.Namespace, source: Source, model: Any, tokenizer: Any, is_chat: bool
) -> Any:
    """Return a model for lm-eval, which takes the likeliest tokens whatever the base says.

    lm-eval ties the weights of each model that it is given (lm_eval/models/huggingface.py,
    HFLM.__init__, seen in lm-eval 0.4.13). transformers did so while it loaded the model, but for
    an output head with values of its own, which lm-eval would replace by the embeddings. Where the
    head is a whole module beside adapters, lm-eval would end with a KeyError.
    """
    from lm_eval.models.huggingface import HFLM

    template = ChatTemplate(tokenizer, source.settings)

    class AskedModel(HFLM):
        """Takes from an answer what the template writes around it."""

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            answers = super().generate_until(requests, disable_tqdm)
            return [answer_in(template, answer) if is_chat else answer for answer in answers]

    options: dict[str, Any] = {}
    ends = model.generation_config.eos_token_id
    if is_chat:  # The text of a template has all special tokens
        options["add_bos_token"] = False
        ends = Answerer(model, template, 0, 1).stop_tokens
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.tie_weights = lambda: None
    try:
        return AskedModel(
            pretrained=model,
            backend="causal",
            tokenizer=tokenizer,
            batch_size=args.batch_size,
            softmax_dtype="float32",
            trust_remote_code=False,
            chat_template_args=dict(template.settings),
            **options,
        )
    finally:
        del model.tie_weights
