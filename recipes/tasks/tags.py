# SPDX-License-Identifier: Apache-2.0
"""Tags of words: their names, what tokens carry, and how well a model finds them.

Entities are counted as seqeval counts them. Their tags are those of IOB2, IOB1 and IOBES: B-PER,
I-PER, E-PER, S-PER and O. BILOU has L and U for E and S, and BMES has M for I; B_PER is read as
B-PER. A sequence need not be well-formed; it is read as conlleval and seqeval's default mode read
it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import PretrainedConfig

from core.data import IGNORED, Rows, missing_columns
from core.engine import Layout
from core.exits import Exit, fail
from core.run import Run

NO_WORD = -1  # The number of the word of a special token, which has none
ROWS_AT_A_TIME = 1000
OUTSIDE = "O"
TAG = re.compile(r"O|[BIESLUM]([-_].*)?")
STARTS = ("B", "S", "U")  # Prefixes of tags at which an entity always begins
ENDS = ("O", "E", "S", "L", "U")  # Prefixes of tags after which an entity always begins

Entity = tuple[str, int, int]  # its type, and the places of its first and last word


# ---- The words and tags of a row ----
def read_words(row: Mapping[str, Any], word_column: str, tag_column: str) -> list[str]:
    """Return the words of a row.

    Raises:
        ValueError: if there are none, or if the column of tags is missing.
    """
    if word_column not in row or tag_column not in row:
        raise ValueError(missing_columns(row, f"{word_column}, {tag_column}", "tokens", "tags"))
    words = row[word_column]
    is_list = isinstance(words, list) and len(words) > 0
    if not is_list or not all(isinstance(word, str) for word in words):
        raise ValueError(f"has no list of words in {word_column}: {words!s:.80}")
    return words


def read_tags(values: Any, names: Sequence[str] | None, column: str) -> list[str]:
    """Return the names of a row's tags.

    Args:
        values: names, or numbers of them.
        names: the names of the tags, in the order of their numbers; None if nothing names them.

    Raises:
        ValueError: if there are no tags in the column, or one that has no name.
    """
    if not isinstance(values, list):
        raise ValueError(f"has no list of tags in {column}: {values!s:.80}")
    by_number = dict(enumerate(names or []))
    found = []
    for value in values:
        tag = value.strip() if isinstance(value, str) else by_number.get(value, "")
        if not tag:
            raise ValueError(f"has a tag in {column} that neither data nor model name: {value!r}")
        found.append(tag)
    return found


def label_tokens(
    word_ids: np.ndarray, tags: Sequence[str], tag_ids: dict[str, int], all_tokens: bool
) -> np.ndarray:
    """Return the id of the tag of each token, IGNORED for those without one: [tokens].

    The first token of a word carries the word's tag. The others have none, or with `all_tokens`
    the same one, an I in place of a B if there is such a tag.

    Args:
        word_ids: the number of each token's word, NO_WORD of special tokens: [tokens].
        tags: of the words.
        tag_ids: the id of each tag.
    """
    labels = np.full(len(word_ids), IGNORED)
    is_first = first_tokens(word_ids)
    for place, word in enumerate(word_ids.tolist()):
        if is_first[place]:
            labels[place] = tag_ids[tags[word]]
        elif all_tokens and word != NO_WORD:
            tag = tags[word]
            inside = re.sub("^B(?=[-_])", "I", tag)
            labels[place] = tag_ids.get(inside, tag_ids[tag])
    return labels


def first_tokens(word_ids: np.ndarray) -> np.ndarray:
    """Return which tokens are the first ones of a word: [tokens]."""
    before = np.concatenate([[NO_WORD], word_ids[:-1]])
    return (word_ids != NO_WORD) & (word_ids != before)


def tag_words(
    numbers: np.ndarray, word_ids: np.ndarray, names: Sequence[str], num_words: int
) -> list[str]:
    """Return the tag that is predicted for each word, at its first token; O if it has no token.

    Args:
        numbers: the number of the tag that is predicted for each token, [tokens], and for padding.
    """
    tags = [OUTSIDE] * num_words
    for place in np.flatnonzero(first_tokens(word_ids)):
        tags[word_ids[place]] = names[numbers[place]]
    return tags


def show_tags(row: Mapping[str, Any], tokenizer: Any, tag_ids: dict[str, int]) -> str:
    """Return the tokens of a row, each with the tag that it carries."""
    labels = label_tokens(row["word_ids"], row["tags"], tag_ids, all_tokens=False)
    names = list(tag_ids)
    shown = tokenizer.convert_ids_to_tokens(row["input_ids"].tolist())
    for place in np.flatnonzero(labels != IGNORED):
        shown[place] += f"/{names[labels[place]]}"
    return " ".join(shown)


# ---- All tags ----
def names_in_config(config: PretrainedConfig) -> list[str] | None:
    """Return the names of the tags that a model was trained on, None if it has none of its own."""
    names = [name for _, name in sorted((config.id2label or {}).items())]
    if names == [f"LABEL_{number}" for number in range(len(names))]:  # transformers' default
        return None
    return names


def count_tags(rows: Rows) -> Counter[str]:
    """Return the number of words of each tag."""
    counts: Counter[str] = Counter()
    dataset: Any = rows.dataset  # datasets annotates its methods as if it were a DatasetDict too
    for part in dataset.with_format(None).select_columns("tags").iter(ROWS_AT_A_TIME):
        for tags in part["tags"]:
            counts.update(tags)
    return counts


def order_tags(counts: Counter[str], name: str, *sources: Sequence[str] | None) -> dict[str, int]:
    """Return the id of each tag that the model tells apart.

    Ends with 65 if all words have the same tag.

    Args:
        counts: of the training rows' words.
        name: of the data set, for the message.
        sources: lists of names in their order. The first one with all tags of the training rows is
            taken; without any, those tags are ordered alphabetically.
    """
    if len(counts) == 1:
        fail(Exit.DATA, f"{name}: all words have the tag {next(iter(counts))!r}")
    names: Sequence[str] = sorted(counts)
    for source in sources:
        if source is not None and set(counts) <= set(source):
            names = source
            break
    return {tag: number for number, tag in enumerate(names)}


def describe_tags(counts: Counter[str], tag_ids: dict[str, int]) -> str:
    """Return the tags and the words that have them, for the start summary."""
    listed = ", ".join(f"{tag} {counts[tag]}" for tag in tag_ids)
    text = f"{len(tag_ids)} tags: {listed[:400]}"
    if not are_of_entities(tag_ids):
        text += "; not all are of entities (B-TYPE, I-TYPE, O), so only the accuracy is measured"
    return text


def check_tags(rows: Rows, tag_ids: dict[str, int]) -> None:
    """End with 65 if rows have a tag that occurs in no training row."""
    unknown = set(count_tags(rows)) - set(tag_ids)
    if unknown:
        problem = f"no training row has the tags {', '.join(sorted(unknown))[:200]}"
        fail(Exit.DATA, f"{rows.sources[0].name}: {problem}: those have {', '.join(tag_ids)[:200]}")


# ---- Entities ----
def are_of_entities(tags: Iterable[str]) -> bool:
    """Return whether tags name entities, and not, for example, parts of speech."""
    return all(TAG.fullmatch(tag) for tag in tags)


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sequence of tags, in their order.

    An entity begins at a B or S, at the first tag after an O, E or S, and where the type changes.
    """
    entities: list[Entity] = []
    first = 0
    before = OUTSIDE
    for place, tag in enumerate([*tags, OUTSIDE]):  # The added tag ends the last entity.
        is_new = tag[0] in STARTS or before[0] in ENDS or tag[2:] != before[2:]
        if before != OUTSIDE and (is_new or tag == OUTSIDE):
            entities.append((before[2:], first, place - 1))
        if is_new:
            first = place
        before = tag
    return entities


def count_matches(
    true: Sequence[str], predicted: Sequence[str], has_entities: bool = True
) -> np.ndarray:
    """Return the counts of a row, of which `tag_metrics` takes the sum over all rows.

    Args:
        true, predicted: the tag of each word.
        has_entities: whether the tags name entities.

    Returns:
        Five numbers: all words, correctly tagged words; true entities, predicted entities, and
        those that are both.
    """
    correct = sum(one == other for one, other in zip(true, predicted, strict=True))
    counts = [len(true), correct, 0, 0, 0]
    if has_entities:
        true_entities = set(find_entities(true))
        found = set(find_entities(predicted))
        counts[2:] = [len(true_entities), len(found), len(true_entities & found)]
    return np.array(counts)


def tag_metrics(counts: Sequence[int], has_entities: bool = True) -> Mapping[str, float]:
    """Return precision, recall and F1 of entities, and the accuracy of words.

    A quotient without a denominator is 0, as with seqeval.

    Args:
        counts: the sum of what `count_matches` returned.
    """
    words, correct, true, predicted, found = counts
    metrics = {}
    if has_entities:
        precision = found / max(predicted, 1)
        recall = found / max(true, 1)
        f1 = 2 * precision * recall / (precision + recall) if found else 0.0
        metrics = {"eval_precision": precision, "eval_recall": recall, "eval_f1": f1}
    return {**metrics, "eval_accuracy": correct / words}


# ---- Loss and metrics ----
def summed_tag_loss(
    model: torch.nn.Module, batch: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy summed over a batch's labeled tokens, and the logits.

    Returns:
        A scalar, and [rows, tokens, tags]; both in fp32.
    """
    logits = model(**batch["inputs"]).logits.float()
    loss = cross_entropy(
        logits.flatten(0, 1),
        batch["labels"].flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return loss, logits


@torch.no_grad()
def evaluate_tags(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    names: Sequence[str],
    loader: DataLoader,
) -> None:
    """Log the loss, as in training, and how well the words of the evaluation rows are tagged.

    Args:
        names: the names of the tags, in the order of the logits.
    """
    model.eval()
    has_entities = are_of_entities(names)
    total = torch.zeros(2, device=layout.device)
    counts = np.zeros(5, dtype=np.int64)
    for batch in run.interruptible(loader):
        loss, logits = summed_tag_loss(model, batch)
        num_labeled = batch["counts"][0]
        total += torch.stack([loss, num_labeled.float()])
        numbers = logits.argmax(-1).cpu().numpy()
        for row, tags in enumerate(batch["tags"]):
            word_ids = batch["word_ids"][row]
            predicted = tag_words(numbers[row], word_ids, names, len(tags))
            counts += count_matches(tags, predicted, has_entities)
    model.train()
    loss, num_labeled = layout.sum_over_rows(total).tolist()
    whole = torch.from_numpy(counts).to(layout.device)
    whole = layout.sum_over_rows(whole).tolist()
    metrics = {"eval_loss": loss / num_labeled}
    metrics |= tag_metrics(whole, has_entities)
    run.log_evaluation(metrics)
