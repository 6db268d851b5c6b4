# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness, asked of a loaded model as the recipes would ask it."""

import argparse
import importlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import set_seed

from common import Exit, first_line, stop
from core.chat import ChatTemplate
from core.data import tokenize_text
from core.generation import answer_in, greedy_options
from generation.contestants import Contestant
from generation.loading import load_tokenizer, template_settings_of
from paths import SCRIPTS

# Hugging Face's package, from which lm-eval and its tasks take metrics
METRICS = "evaluate"
# What would print several lines where one says what is wrong, such as each retry of the hub
LOGGERS = ("lm_eval", "huggingface_hub", "datasets")
YAML = (".yaml", ".yml")
# Resamplings for errors of metrics that are no means. lm-eval's command makes 100,000, which takes
# minutes; a thousand tell an error within a few percent.
BOOTSTRAPS = 1000
NOT_METRICS = ("name", "alias", "sample_len", "sample_count")


def prepare(may_run_code: bool) -> None:
    """Import lm-eval, so that `import lm_eval` can be written from here on.

    Python puts the folder of a command first on its path, and lm-eval would get the command
    evaluate.py in place of the package of this name. So that folder is not on the path while the
    package is imported; every later import of the name finds it among the imported modules.

    Ends with 64 if it is not installed.

    Args:
        may_run_code: whether metrics that are code on the hub may be loaded.
    """
    sys.modules.pop(METRICS, None)
    path = list(sys.path)
    sys.path[:] = [entry for entry in path if Path(entry).resolve() != SCRIPTS]
    try:
        package = importlib.import_module(METRICS)
        importlib.import_module("lm_eval")
    except ModuleNotFoundError as error:
        fix = "pip install -r requirements-eval.txt"
        stop(Exit.USAGE, f"lm-eval is not installed (no module {error.name}): {fix}")
    finally:
        sys.path[:] = path
    if not may_run_code:
        vars(package)["load"] = refuse_code
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def refuse_code(name: str, *_: Any, **__: Any) -> NoReturn:
    """End with 64 in the place of loading a metric, since it is a program on the hub."""
    fix = "pass --confirm_run_unsafe_code if you trust it"
    stop(Exit.USAGE, f"the metric {name} is code on the hub, which would be run here; {fix}")


def load_tasks(args: argparse.Namespace) -> dict[str, Any]:
    """Return the tasks, groups and tags of --tasks with their data, as lm-eval has them.

    Ends with 64 for an unknown name, with 65 for a file that is no task, and with 69 for what
    cannot be loaded from the hub.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=args.include_path)
    loaded: dict[str, Any] = {}
    for name in filter(None, map(str.strip, args.tasks.split(","))):
        is_file = name.endswith(YAML)
        found = [name] if is_file else manager.match_tasks([name])
        if not found:
            fix = "`lm_eval ls tasks` lists them"
            stop(Exit.USAGE, f"--tasks {name}: lm-eval has no such task; {fix}")
        try:
            for key, value in manager.load(found).items():
                loaded.setdefault(key, {}).update(value)
        except Exception as error:  # A task file is a program, and may fail in any way
            code = Exit.DATA if is_file else Exit.NO_HUB
            stop(code, f"--tasks {name}: cannot be loaded: {first_line(error)}")
    for task in loaded["tasks"].values():  # As lm-eval does: a 0 of the task's own stays
        own = task.get_config("num_fewshot")
        if own is None or (own != 0 and args.num_fewshot is not None):
            task.set_config(key="num_fewshot", value=args.num_fewshot or 0)
    return loaded


def measure_tasks(
    args: argparse.Namespace,
    contestant: Contestant,
    model: torch.nn.Module,
    loaded: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each task with its metrics and how it was asked, and what was answered to it."""
    import lm_eval

    tokenizer = load_tokenizer(contestant.run, needs_template=args.apply_chat_template == "true")
    is_chat = bool(tokenizer.chat_template) and args.apply_chat_template != "false"
    asked = wrap(args, contestant, model, tokenizer, is_chat)
    set_seed(args.seed)
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=args.seed)
    results: Any = lm_eval.evaluate(
        asked,
        loaded,
        limit=args.limit,
        bootstrap_iters=BOOTSTRAPS,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        confirm_run_unsafe_code=args.confirm_run_unsafe_code,
    )
    found = {}
    for task in results["results"]:
        found[task] = {
            "rows": results["n-samples"].get(task, {}).get("effective"),
            "version": results["versions"].get(task),
            "num_fewshot": results["n-shot"].get(task),
            "chat_template": is_chat,
            "metrics": metrics_of(results, task),
        }
    return found, results["samples"]


def wrap(
    args: argparse.Namespace,
    contestant: Contestant,
    model: Any,
    tokenizer: Any,
    is_chat: bool,
) -> Any:
    """Return a model for lm-eval, which computes likelihoods in fp32 whatever its weights are.

    lm-eval ties the weights of each model that it is given (lm_eval/models/huggingface.py,
    HFLM.__init__, seen in lm-eval 0.4.13). transformers did so while it loaded the model, but for
    an output head with values of its own, which lm-eval would replace by the embeddings. Where the
    head is a whole module beside adapters, lm-eval would end with a KeyError.
    """
    from lm_eval.models.huggingface import HFLM

    template = ChatTemplate(tokenizer, template_settings_of(contestant.run.name))

    class AskedModel(HFLM):
        """Takes the likeliest tokens, and from an answer what the template writes around it."""

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            answers = super().generate_until(requests, disable_tqdm)
            if is_chat:
                answers = [answer_in(template, answer) for answer in answers]
            return answers

        def _model_generate(self, *words: Any, **options: Any) -> Any:
            return super()._model_generate(*words, **greedy_options(self.model) | options)

    options: dict[str, Any] = {}
    if is_chat:  # The text of a template has all special tokens
        options["add_bos_token"] = False
        model.generation_config.eos_token_id = contestant.answerer(model, 1).stop_tokens
    else:
        tokens = tokenize_text("a", tokenizer)
        if tokens != tokenizer("a")["input_ids"]:  # It appends an end, and texts are continued
            tokenizer.add_bos_token = tokens[0] == tokenizer.bos_token_id
            tokenizer.add_eos_token = False
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


def metrics_of(results: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the metrics of a task or a group, each with its error, as results.json has them."""
    found = {}
    metrics = results["results"][task]
    for key, value in metrics.items():
        name, _, filter_name = key.partition(",")
        if name in NOT_METRICS or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = metrics.get(f"{name}_stderr,{filter_name}")
        found[name if filter_name in ("", "none") else f"{name} ({filter_name})"] = {
            "value": value,
            "stderr": stderr if isinstance(stderr, int | float) else None,  # lm-eval writes N/A
            "higher_is_better": results["higher_is_better"].get(task, {}).get(name),
        }
    return found
