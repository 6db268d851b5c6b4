# SPDX-License-Identifier: Apache-2.0
"""recipes/embeddings.py has the losses and gradients of sentence-transformers, which loads its
result and gives the vectors, recall and nDCG that the recipe's last evaluation had.
"""

import shutil
import sys

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModel, AutoTokenizer

from core.engine import Layout
from embeddings import tokenize_texts
from launching import edit_json, read_metrics, read_rows, recipe, run, script
from tasks.contrast import TextsCollator, contrast, embed

NAMES = ("query", "positive", "negative")
SCALE, SIZE = 20.0, 128
PROMPTS = {"query": "who ? ", "document": "the answer : "}


@pytest.fixture(scope="module")
def tiny(net_tiny):
    return net_tiny("embeddings")


def gradients_of(model):
    return {
        name.removeprefix("0.").removeprefix("model."): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }


def of_library(tiny, rows, dims, is_cached):
    """The loss of sentence-transformers over these rows, and its gradients."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses

    model = SentenceTransformer(str(tiny / "model"), device="cpu")  # A bare folder: mean
    if is_cached:
        loss = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=5)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, scale=SCALE)
    if dims != [SIZE]:
        loss = losses.MatryoshkaLoss(model, loss, dims)
    value = loss([model.tokenize([row[name] for row in rows]) for name in NAMES], None)
    value.backward()
    return value, gradients_of(model)


def of_recipe(tiny, rows, dims):
    """The recipe's loss over the same rows in micro-batches of five, five and two."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    prepared = [tokenize_texts(row, tokenizer, 128, {}, ("", "")) | {"row": 1} for row in rows]
    collator = TextsCollator(tokenizer)
    cuts = torch.arange(len(rows)).split(5)
    source = Dataset.from_list(prepared)
    batches = [collator(source, [[number] for number in cut.tolist()]) for cut in cuts]
    model = AutoModel.from_pretrained(tiny / "model", dtype="float32")
    with torch.no_grad():
        embedded = [embed(model, batch, "mean") for batch in batches]
    losses, gradients = contrast(Layout(Accelerator(cpu=True)), embedded, batches, SCALE, dims)
    for batch, gradient in zip(batches, gradients, strict=True):
        (embed(model, batch, "mean") * gradient).sum().backward()
    return sum(losses), gradients_of(model)


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("dims", [[SIZE], [SIZE, 64, 16]])
def test_loss_and_gradients_are_those_of_the_library(dims, is_cached, tiny):
    rows = read_rows(tiny / "data" / "train.jsonl")[:12]
    expected, theirs = of_library(tiny, rows, dims, is_cached)
    found, ours = of_recipe(tiny, rows, dims)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # The keys' biases have no gradient but rounding
        assert (ours[name] - gradient).norm() <= max(1e-5 * gradient.norm(), 1e-6), name


def last_evaluation(model, pooling_mode, tiny, folder, *flags):
    words = ["--model_name_or_path", model, "--pooling_mode", pooling_mode]
    words += ["--dataset_name", tiny / "data" / "train.jsonl"]
    words += ["--eval_dataset_name", tiny / "data" / "test.jsonl", "--output_dir", folder]
    words += ["--max_steps", 3, "--learning_rate", 1e-3, "--scale", SCALE, "--max_length", 100]
    words += ["--query_prompt", PROMPTS["query"], "--document_prompt", PROMPTS["document"]]
    recipe(*words, *flags, name="embeddings", code=0)
    return read_metrics(folder)[1][-1]


# llama's tokenizer has a chat template, in which newer versions of the library wrap each text
@pytest.mark.parametrize(
    ("model", "pooling_mode", "flags"),
    [
        ("embeddings", "mean", ["--use_peft"]),
        ("embeddings", "cls", []),
        ("llama", "lasttoken", []),
    ],
)
def test_the_folder_gives_the_vectors_of_the_last_evaluation(
    model, pooling_mode, flags, tiny, net_tiny, tmp_path
):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    folder = tmp_path / "run"
    told = last_evaluation(net_tiny(model) / "model", pooling_mode, tiny, folder, *flags)
    loaded = SentenceTransformer(str(folder), device="cpu")
    assert loaded.max_seq_length == 100
    rows = read_rows(tiny / "data" / "test.jsonl")
    queries = loaded.encode_query([row["query"] for row in rows], convert_to_tensor=True)
    texts = [row[name] for name in NAMES[1:] for row in rows]
    documents = loaded.encode_document(texts, convert_to_tensor=True)
    loss = cross_entropy(SCALE * queries @ documents.T, torch.arange(len(rows)))
    assert loss.item() == pytest.approx(told["eval_loss"], rel=1e-5)
    corpus = {text: text for text in texts}
    evaluator = InformationRetrievalEvaluator(
        {str(number): row["query"] for number, row in enumerate(rows)},
        corpus,
        {str(number): {row["positive"]} for number, row in enumerate(rows)},
        query_prompt_name="query",
        corpus_prompt_name="document",
        show_progress_bar=False,
    )
    found = evaluator(loaded)
    assert found["cosine_recall@10"] == pytest.approx(told["eval_recall@10"])
    assert found["cosine_ndcg@10"] == pytest.approx(told["eval_ndcg@10"])


def test_the_second_pass_drops_what_the_first_one_has_dropped(tiny, tmp_path):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    edit_json(model / "config.json", hidden_dropout_prob=0.3)
    script("copy_recipe", "embeddings", tmp_path / "copy", code=0)
    path = tmp_path / "copy" / "embeddings.py"
    line = "again = embed(model, batch, args.pooling_mode)\n"
    check = f"{' ' * 16}assert torch.equal(again, embedded.pop(0))\n"
    assert path.read_text().count(line) == 1
    path.write_text(path.read_text().replace(line, line + check))
    words = ["--model_name_or_path", model, "--dataset_name", tiny / "data" / "train.jsonl"]
    words += ["--output_dir", tmp_path / "run", "--max_steps", 2]
    words += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 3]
    run(sys.executable, path, *words, cwd=path.parent, code=0)
