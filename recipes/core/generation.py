# SPDX-License-Identifier: Apache-2.0
"""Text generation: under every strategy, and greedy whatever the base's generation config says."""

import contextlib
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel
from tqdm.auto import tqdm
from transformers import GenerationConfig

from core.chat import ANSWER, EXAMPLE, ChatTemplate
from core.workarounds import workaround

NO_LIMIT = 10**9  # tokens, for a model whose configuration has no longest sequence
NUM_SHOWN = 3  # predictions of an evaluation
SHOWN_LETTERS = 200


def generate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    **options: Any,
) -> torch.Tensor:
    """Return the tokens that the model generates, [rows, tokens].

    Every rank takes part until the last one has finished. The model must have run a forward pass
    before. Layers that --torch_compile compiles run as they are, since they would be compiled
    again for the lengths that grow with each token.

    Args:
        inputs: what the model reads, [rows, tokens].
        options: arguments of transformers' generate.
    """
    is_synced = accelerator.num_processes > 1
    with (
        gathered_outside_of_layers(model, accelerator),
        accelerator.autocast(),
        torch.compiler.set_stance("force_eager"),
    ):
        unwrapped: Any = accelerator.unwrap_model(model)
        return unwrapped.generate(**inputs, **options, synced_gpus=is_synced)


def greedy_options(model: Any) -> dict[str, Any]:
    """Return the arguments of generate by which the likeliest token is taken each time.

    What it is not given, a penalty on repeated words for example, it takes from the base. Only the
    tokens that begin and end a text stay, and those that an encoder-decoder forces.
    """
    neutral = GenerationConfig()
    options = neutral.to_dict() | neutral._get_default_generation_params()
    kept = ["max_length", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"]
    kept += ["decoder_start_token_id", "transformers_version"]
    if model.config.is_encoder_decoder:
        kept += ["forced_bos_token_id", "forced_eos_token_id"]
    return {name: value for name, value in options.items() if name not in kept}


def most_positions(config: Any) -> int:
    """Return the most tokens of a text and its continuation, from a model's configuration."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or NO_LIMIT


def listed_stop_tokens(generation_config: Any) -> set[int]:
    """Return the tokens that a generation config lists as ends of a text: none, one or several."""
    listed = generation_config.eos_token_id
    if listed is None:
        return set()
    return set(listed) if isinstance(listed, list) else {listed}


# ---- Answers in a conversation ----
def around_answer(template: ChatTemplate) -> tuple[str, str]:
    """Return what a template writes before and behind an answer that is no token: "" if nothing.

    Such as the tags of reasoning that was not given, or an <|im_end|> that is mere text.
    """
    try:
        prompt = template.render(EXAMPLE.up_to(1), add_generation_prompt=True)
        text = template.render(EXAMPLE)
    except ValueError:
        return "", ""
    before, answer, after = text.removeprefix(prompt).rpartition(ANSWER)
    if not answer or not text.startswith(prompt):
        return "", ""
    for token in template.end_tokens:
        after = after.partition(token)[0]
    tokens = template.tokenizer([before, after], add_special_tokens=False)["input_ids"]
    before, after = template.tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return before.strip(), after.strip()


def answer_in(template: ChatTemplate, written: str) -> str:
    """Return what a model wrote without what the template writes around an answer."""
    before, after = around_answer(template)
    answer = written.strip().removeprefix(before)
    if after:
        answer = answer.partition(after)[0]
    return answer.strip()


@workaround("https://github.com/huggingface/transformers/issues/30228", seen="transformers 5.23")
@contextlib.contextmanager
def gathered_outside_of_layers(model: Any, accelerator: Accelerator) -> Generator[None]:
    """Have FSDP keep whatever belongs to no layer gathered within this context.

    FSDP gathers embeddings and head in the forward pass of the whole model, but generate first
    calls the encoder by itself. Layers gather themselves, and under ZeRO-3 so do all modules.
    """
    if accelerator.is_fsdp2:
        model.unshard()
    # This is for FSDP1, and does nothing to other models.
    with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
        yield


# ---- Predictions ----
def write_predictions(predictions: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a file with one JSON object per row."""
    with open(path, "w", encoding="utf-8") as file:
        for prediction in predictions:
            file.write(json.dumps(prediction, ensure_ascii=False) + "\n")


def show_prediction(read: str, written: str, wanted: str) -> None:
    """Print above the progress bar, on one line, what was read, written and wanted."""
    wanted = wanted[:SHOWN_LETTERS]
    shown = f"{read} -> {written[:SHOWN_LETTERS]} (should be: {wanted})"
    tqdm.write(" ".join(shown.split()))
