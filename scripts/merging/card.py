# SPDX-License-Identifier: Apache-2.0
"""The model card of a merged folder: that of the trained run, and how the merge compares.

Without a card of the run, or with peft's stub in its place, the card says what run.json, the
adapters and the receipt say.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import model_card
from components.folder import CARD, MARKER
from components.model_card import CARD_ERRORS, code_to_load, fenced, table
from components.private_text import Cleaner, is_hub_id
from components.status import write_file
from exits import first_line
from generation.recorded import read_run
from merging.adapter import AdapterFolder
from merging.receipt import Receipt

HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LOADING = "Load it"  # the section that is another one for a whole model
CURVE = "Loss"
ADAPTER_TAGS = ("lora", "peft", "base_model:adapter:")  # or what such a tag begins with
# What a base is called in a receipt, and in the card
BASES = {"16bit": "the base as it is", "8bit": "the int8 base", "4bit": "the 4-bit base"}


@dataclass(frozen=True)
class RunCard:
    """The card of a run, as far as it also holds for the merged model.

    Attributes:
        metadata: what its YAML block has.
        intro: the text before the first section, without the title.
        sections: {title: text}.
    """

    metadata: Mapping[str, Any]
    intro: str
    sections: Mapping[str, str]


def write_card(folder: Path, title: str, adapter: AdapterFolder, slip: Receipt) -> str | None:
    """Write the card of a merged folder, and return why not, or None.

    Args:
        folder: in which the merged model is.
        title: what the merged folder will be called.
    """
    try:
        write_file(folder / CARD, card_of(folder, title, adapter, slip))
    except CARD_ERRORS as error:  # The model is merged: that is of use also without a card.
        return f"the model card is not written: {type(error).__name__}: {error}".splitlines()[0]
    return None


def card_of(folder: Path, title: str, adapter: AdapterFolder, slip: Receipt) -> str:
    """Return the text of the card. Raises one of CARD_ERRORS if the run's card is damaged."""
    clean = Cleaner({**adapter.arguments, "adapters": str(adapter.path), "base": adapter.base})
    run = read_run(adapter.path)
    card = read_card(adapter.path, clean) or card_of_record(run, clean)
    data = metadata_of(folder, adapter, card.metadata)
    sections = dict(card.sections)
    sections["Merge"] = f"{fact_lines(adapter, slip, clean)}\n\n{receipt_lines(slip)}"
    sections[LOADING] = fenced("python", code_to_load(data.library_name, data.pipeline_tag))
    intro = [base_line(adapter, clean), card.intro]
    return model_card.join(data, clean(title), intro, sections)


# ---- The card of the run ----
def read_card(folder: Path, clean: Cleaner) -> RunCard | None:
    """Return the card of a run, or None if there is none, or only peft's stub."""
    import yaml
    from huggingface_hub import ModelCard

    path = folder / CARD
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    if model_card.is_stub(text):
        return None
    try:
        card = ModelCard(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {first_line(error)}") from None
    body = card.text
    if MARKER in body:  # What its owner has written is left as it is.
        body = clean(body.replace(MARKER, ""))
    intro, sections = split(body)
    sections.pop(LOADING, None)
    if model_card.PICTURE in sections.get(CURVE, ""):  # It stays with the run.
        del sections[CURVE]
    return RunCard(card.data.to_dict(), intro, sections)


def card_of_record(run: Mapping[str, Any], clean: Cleaner) -> RunCard:
    """Return what a run.json says, in the form of a card.

    Args:
        run: {} without a run.json.
    """
    if not run:
        return RunCard({}, "The run that trained the adapters has left no record.", {})
    intro = ""
    if run.get("base_weights"):
        intro = f"Fingerprint of the base's weights: `{run['base_weights']}`."
    sections = {
        "Data": model_card.data_lines(run, clean),
        "Training": table(("what", "value"), model_card.summary_rows(run, clean)),
        "Versions": table(("library", "version"), sorted(run.get("versions", {}).items())),
    }
    return RunCard({}, intro, sections)


def split(body: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, without the title, and {title: text}."""
    # A comment in a block of code looks like a heading.
    hidden = FENCE.sub(lambda found: " " * len(found[0]), body)
    starts = list(HEADING.finditer(hidden))
    ends = [found.start() for found in starts[1:]]
    ends.append(len(body))
    intro = body[: starts[0].start()] if starts else body
    lines = [line for line in intro.strip().splitlines() if not line.startswith("# ")]
    sections: dict[str, str] = {}
    for found, end in zip(starts, ends, strict=False):
        text = body[found.end() : end].strip()
        title = found[1].strip()
        if title in sections:
            text = f"{sections[title]}\n\n{text}"
        sections[title] = text
    return "\n".join(lines).strip(), sections


# ---- Parts ----
def metadata_of(folder: Path, adapter: AdapterFolder, before: Mapping[str, Any]) -> Any:
    """Return the ModelCardData: that of the run, as it is for a whole model."""
    from huggingface_hub import ModelCardData

    kept = dict(before)
    kept.pop("base_model", None)  # It may be a path.
    kept.pop("base_model_relation", None)
    tags = kept.pop("tags", None) or ["accelerate"]
    kept["tags"] = [tag for tag in tags if not tag.startswith(ADAPTER_TAGS)]
    kept["library_name"] = "transformers"
    kept["pipeline_tag"] = model_card.task_of(folder) or before.get("pipeline_tag")
    if is_hub_id(adapter.base):
        kept["base_model"] = adapter.base
        kept["base_model_relation"] = "finetune"
    return ModelCardData(**kept)


def base_line(adapter: AdapterFolder, clean: Cleaner) -> str:
    """Return what was merged into what."""
    return (
        f"A whole model: the adapters `{clean(adapter.path.resolve().name)}`, merged into their "
        f"base `{clean(adapter.base)}` by `scripts/merge.py`. What follows is about the training "
        "of the adapters."
    )


def fact_lines(adapter: AdapterFolder, slip: Receipt, clean: Cleaner) -> str:
    """Return what was merged into which base, with which gaps."""
    facts = slip.facts
    rows: list[tuple[str, Any]] = [
        ("adapters", describe_adapters(adapter.config)),
        ("SHA-256 of the adapters", facts["adapters_sha256"]),
        ("base", clean(adapter.base)),
    ]
    if is_hub_id(adapter.base):
        rows.append(("revision of the base", facts["base_revision"]))
    rows.append(("trained on", BASES[facts["trained_on"]]))
    rows.append(("merged into", BASES[facts["merged_into"]]))
    for base, gap in facts.get("gaps_of_bases", {}).items():
        said = "not a number" if gap is None else f"{gap:.2e}"
        rows.append((f"largest logit gap if merged into {BASES[base]}", said))
    for source, number in facts["prompts_from"].items():
        rows.append(("prompts", f"{number}: {clean(source)}"))
    rows.append(("made by", facts["made_by"]))
    return table(("what", "value"), rows)


def describe_adapters(config: Any) -> str:
    """Return what kind of adapters it is, by peft's LoraConfig."""
    kind = "LoRA"
    if config.use_dora:
        kind = "DoRA"
    elif config.use_rslora:
        kind = "rsLoRA"
    return f"{kind}, rank {config.r}, alpha {config.lora_alpha:g}"


def receipt_lines(slip: Receipt) -> str:
    """Return the table of a receipt, and what it compares."""
    lines = "\n".join(slip.table())
    return (
        "Compared with the trained model on these prompts (`reloaded`: as loaded from the files; "
        f"details in `receipt.json`):\n\n{fenced('text', lines)}"
    )
