# SPDX-License-Identifier: Apache-2.0
"""The quickstart of every recipe, in bf16."""

import os
import shutil
import sys

from bench.quickstarts import SHOWN, read_taught

from . import launches
from .cell import Outcome, Setup, Skip

# What a quickstart must reach on held-out rows after training
AT_LEAST = {
    "llama": 0.9,
    "llama_dpo": 0.6,
    "mixtral": 0.7,
    "bert": 0.85,
    "bert_ner": 0.85,
    "vit": 0.85,
    "t5": 80.0,
}
AT_MOST = {"mistral_pretrain": 4.0}


def bert(setup: Setup) -> Outcome:
    """Teach BERT to distinguish praise from complaint."""
    return quick_example(setup, "bert")


def bert_ner(setup: Setup) -> Outcome:
    """Teach BERT to find names."""
    return quick_example(setup, "bert_ner")


def t5(setup: Setup) -> Outcome:
    """Teach T5 to translate."""
    return quick_example(setup, "t5")


def vit(setup: Setup) -> Outcome:
    """Teach ViT to name what is drawn."""
    return quick_example(setup, "vit")


def llama(setup: Setup) -> Outcome:
    """Teach Llama seven skills."""
    return quick_example(setup, "llama")


def llama_dpo(setup: Setup) -> Outcome:
    """Teach Llama to prefer right answers."""
    return quick_example(setup, "llama_dpo")


def mixtral(setup: Setup) -> Outcome:
    """Teach Mixtral seven skills."""
    return quick_example(setup, "mixtral")


def mistral_pretrain(setup: Setup) -> Outcome:
    """Teach Mistral to continue texts."""
    return quick_example(setup, "mistral_pretrain")


def quick_example(setup: Setup, recipe: str) -> Outcome:
    """Run a recipe's quickstart, in bf16 on a GPU, and read its held-out result.

    Raises Skip without make, and RuntimeError if the quickstart fails.
    """
    if shutil.which("make") is None:
        raise Skip("make is not on the PATH")
    folder = setup.work / "quickstart"
    precision = "bf16" if setup.on_gpu else "no"
    command = ["make", f"quickstart-{recipe}", f"OUT={folder}"]
    command += [f"PRECISION={precision}", f"VENV={sys.prefix}"]
    done = launches.finish(command, dict(os.environ), setup.seconds_left())
    (setup.work / "output.txt").write_text(done.output)
    if done.failure:
        raise RuntimeError(done.failure)
    taught = read_taught(recipe, folder)
    row = {
        "recipe": recipe,
        "shown": SHOWN[recipe],
        "before": taught.before,
        "after": taught.after,
        "precision": precision,
    }
    is_taught = taught.after >= AT_LEAST.get(recipe, float("-inf"))
    is_near = taught.after <= AT_MOST.get(recipe, float("inf"))
    return Outcome(
        [row], is_taught and is_near, [f"make quickstart-{recipe} PRECISION={precision}"]
    )
