# SPDX-License-Identifier: Apache-2.0
"""What the files of a base say is what is trained: its quantization, its weights, its classes."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
)

from launching import (
    REPO,
    data_of,
    edit_json,
    errors_of,
    read_json,
    read_metrics,
    read_rows,
    recipe,
    rehearse,
    script,
    tensors_of,
    write_rows,
)

CLASSIFIERS = {
    "bert": AutoModelForSequenceClassification,
    "bert_ner": AutoModelForTokenClassification,
    "vit": AutoModelForImageClassification,
}
UNCHANGED = ["--max_steps", "1", "--learning_rate", "1e-9", "--warmup_steps", "0"]


def train(name, model, tiny, folder, *flags, **options):
    """Run a recipe in one process on the rows of a tiny folder and another model."""
    words = data_of(tiny)
    words[1] = model
    return recipe(*words, *UNCHANGED, "--output_dir", folder, *flags, name=name, **options)


def write_tensors(model, tensors):
    save_file(tensors, Path(model) / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def base(tiny_of, tmp_path):
    """A function from a recipe to a copy of its tiny model, which may be spoiled."""

    def copy(recipe):
        return shutil.copytree(tiny_of(recipe) / "model", tmp_path / "base")

    return copy


def refused(done):
    """The one line by which a run is refused."""
    assert done.returncode == 64, done.output[-3000:]
    (line,) = errors_of(done)
    return line


# ---- What is not all there ----
def quantize(model, method):
    """Have a base say that its numbers are quantized: without scales they would be trained."""
    edit_json(model / "config.json", quantization_config={"quant_method": method, "bits": 4})
    return f"({method})", "unquantized model"


def nest_quantization(model):
    """Have the text model within a base say so."""
    text = read_json(model / "config.json")
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    text |= {"model_type": "gemma3_text", "quantization_config": {"quant_method": "gptq"}}
    (model / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    return ("(gptq)",)


def drop_one(model):
    """Drop a matrix from the middle of a base."""
    tensors = tensors_of(model)
    # Not an expert: transformers itself refuses a layer that has not all of them
    inside = [name for name in tensors if re.search(r"\.\d+\.", name) and "expert" not in name]
    name = next(name for name in sorted(inside) if tensors[name].dim() > 1)
    del tensors[name]
    write_tensors(model, tensors)
    # Some families have other names in their files than in transformers
    return "lack 1 of its weights", name.rpartition(".")[2]


def rename(model):
    """Give all tensors other names, as a compiled model has them when it is saved by hand."""
    tensors = tensors_of(model)
    write_tensors(model, {f"_orig_mod.{name}": weight for name, weight in tensors.items()})
    return "lack ", "weights"


def reshape(model):
    """Have the config ask for a larger embedding than there is; a head may have any shape."""
    size = read_json(model / "config.json")["vocab_size"] + 8
    edit_json(model / "config.json", vocab_size=size)
    return "in other shapes", "embed"


SPOILED = [
    ("llama", rename),
    ("llama", nest_quantization),
    ("llama_dpo", partial(quantize, method="modelopt")),  # which transformers does not know
    ("mixtral", drop_one),
    ("t5", partial(quantize, method="gptq")),
    ("bert", reshape),
    ("vit", drop_one),
]


@pytest.mark.parametrize(("recipe", "spoil"), SPOILED)
def test_a_base_that_is_not_all_there_is_refused(recipe, spoil, base, tiny_of, tmp_path):
    model = base(recipe)
    says = spoil(model)
    line = refused(train(recipe, model, tiny_of(recipe), tmp_path / "out"))
    assert str(model) in line and all(words in line for words in says), line
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("config", "recipe", "flags"),
    [
        ("fsdp", "llama", []),
        ("pp", "llama_pipeline", ["--pp_size", 2]),
    ],
)
def test_every_strategy_refuses_it(config, recipe, flags, base, tiny_of, tmp_path):
    tiny = recipe.removesuffix("_pipeline")
    model = base(tiny)
    says = drop_one(model)
    words = [*data_of(tiny_of(tiny)), *flags]
    words[1] = model
    words += [*UNCHANGED, "--output_dir", tmp_path / "out"]
    program = REPO / "recipes" / f"{recipe}.py"
    done = rehearse(config, *words, num_processes=2, script=program)
    assert "ended with exit code 64" in done.output, done.output[-3000:]
    assert all(words in done.output for words in says)


# ---- Quantized ----
def write_in_bits(options, tiny, folder):
    """Write the tiny model as bitsandbytes quantizes it, with its tokenizer."""
    shutil.copytree(tiny / "model", folder)
    (folder / "model.safetensors").unlink()
    quantization = BitsAndBytesConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(
        tiny / "model", device_map="cpu", quantization_config=quantization
    )
    model.save_pretrained(folder)


IN_BITS = {
    "4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
        "bnb_4bit_quant_storage": torch.uint8,
    },
    "8": {"load_in_8bit": True},
}


@pytest.fixture
def in_bits(once, tiny_of):
    return lambda bits: once(
        f"base_in_{bits}_bits", partial(write_in_bits, IN_BITS[bits], tiny_of("llama"))
    )


@pytest.mark.parametrize("bits", IN_BITS)
def test_a_base_of_bitsandbytes_is_trained_as_it_was_saved(bits, in_bits, tiny_of, tmp_path):
    """The first loss is that of the same base when it is quantized as it is loaded."""
    tiny, flags = tiny_of("llama"), ["--use_peft", f"--load_in_{bits}bit"]
    losses = []
    for model in (in_bits(bits), tiny / "model"):
        train("llama", model, tiny, tmp_path / model.name, *flags, code=0)
        losses.append(read_metrics(tmp_path / model.name)[0][0]["loss"])
    # 4 bits: the same numbers; 8 bits: scales of fp16 weights, as bitsandbytes documents them
    assert losses[0] == pytest.approx(losses[1], abs=1e-5 if bits == "4" else 5e-3)


@pytest.mark.parametrize(
    ("bits", "flags", "fix"),
    [
        ("8", ["--load_in_4bit"], "--load_in_8bit"),
        ("4", ["--load_in_4bit", "--bnb_4bit_quant_type", "fp4"], "--bnb_4bit_quant_type nf4"),
    ],
)
def test_flags_that_say_otherwise_than_the_files_are_refused(
    bits, flags, fix, in_bits, tiny_of, tmp_path
):
    done = train("llama", in_bits(bits), tiny_of("llama"), tmp_path / "out", "--use_peft", *flags)
    line = refused(done)
    assert "(bitsandbytes)" in line and fix in line


def test_fsdp_does_not_get_bytes_that_it_cannot_shard(in_bits, tiny_of, tmp_path):
    words = data_of(tiny_of("llama"))
    words[1] = in_bits("4")
    words += ["--use_peft", "--load_in_4bit", *UNCHANGED, "--output_dir", tmp_path / "out"]
    done = rehearse("fsdp", *words, num_processes=2)
    assert "ended with exit code 64" in done.output and "cannot shard uint8" in done.output


# ---- Classes ----
def names_in(recipe, tiny):
    """The names of the classes of the rows, as a run without a head of its own orders them."""
    if recipe == "vit":
        return sorted(path.name for path in (tiny / "data" / "train").iterdir())
    rows = read_rows(tiny / "data" / "train.jsonl")
    if recipe == "bert_ner":
        return sorted({tag for row in rows for tag in row["ner_tags"]})
    return sorted({str(row["label"]) for row in rows})


def with_head(recipe, tiny, names, folder):
    """A base with a head that is no other: row i of its bias is i, and its weights are random."""
    model = shutil.copytree(tiny / "model", folder)
    config = AutoConfig.from_pretrained(model)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    torch.manual_seed(1)
    loaded = CLASSIFIERS[recipe].from_pretrained(model, config=config)
    loaded.classifier.bias.data = torch.arange(len(names)).float()
    loaded.save_pretrained(model)
    # Files of the hub have the numbers in the order of text: 0, 1, 10, 2
    content = read_json(model / "config.json")
    content["id2label"] = dict(sorted((str(number), name) for number, name in enumerate(names)))
    content["quantization_config"] = None  # which is none
    (model / "config.json").write_text(json.dumps(content))
    return model


def heads(*folders):
    """{name of a class: (its weights, its bias)} in each folder."""
    found = []
    for folder in folders:
        names = {int(k): v for k, v in read_json(folder / "config.json")["id2label"].items()}
        weight, bias = (tensors_of(folder)[f"classifier.{kind}"] for kind in ("weight", "bias"))
        found.append({name: (weight[i], bias[i]) for i, name in names.items()})
    return found


@pytest.mark.parametrize("recipe", CLASSIFIERS)
def test_an_untrained_step_leaves_each_class_its_weights(recipe, tiny_of, tmp_path):
    """Also where the base has its classes in another order than that of the alphabet."""
    tiny = tiny_of(recipe)
    names = names_in(recipe, tiny)[::-1]
    model = with_head(recipe, tiny, names, tmp_path / "base")
    done = train(recipe, model, tiny, tmp_path / "out", code=0)
    before, after = heads(model, tmp_path / "out")
    assert list(after) == names and "head: new" not in done.output
    for name in names:
        for old, new in zip(before[name], after[name], strict=True):
            assert torch.allclose(old, new, atol=1e-6), name  # the step is 1e-9 a weight


@pytest.mark.parametrize(
    ("of_base", "of_rows", "is_kept"),
    [
        (["POSITIVE", "NOT SO GOOD"], ["not so good", "positive"], True),
        (["LABEL_0", "LABEL_1"], ["bad", "good"], False),
        ([f"c{n}" for n in (3, 1, 2, 0, *range(4, 12))], [f"c{n}" for n in range(12)], True),
    ],
    ids=["case", "unnamed", "twelve"],
)
def test_names_of_classes_are_compared_as_people_write_them(
    of_base, of_rows, is_kept, tiny_of, tmp_path
):
    tiny = tiny_of("bert")
    model = with_head("bert", tiny, of_base, tmp_path / "base")
    rows = [{"text": "the room was dark", "label": name} for name in of_rows] * 2
    file = write_rows(tmp_path / "rows.jsonl", rows)
    words = ["--eval_strategy", "no", "--dataset_name", file]
    done = train("bert", model, tiny, tmp_path / "out", *words, code=0)
    _, after = heads(model, tmp_path / "out")
    assert ("head: new" in done.output) is not is_kept
    if is_kept:
        expected = [str(name).casefold().removeprefix("label_") for name in of_base]
        assert [name.casefold() for name in after] == expected
    for number, (_, bias) in enumerate(after.values()):
        assert bias == pytest.approx(number if is_kept else 0, abs=0.1)


# ---- Adapters ----
def test_adapters_name_a_local_base_from_any_folder(tiny_of, tmp_path):
    tiny = shutil.copytree(tiny_of("llama"), tmp_path / "tiny")
    words = ["--model_name_or_path", "tiny/model", "--dataset_name", "tiny/data/train.jsonl"]
    words += [*UNCHANGED, "--use_peft", "--output_dir", "out"]
    recipe(*words, cwd=tmp_path, code=0)
    config = read_json(tmp_path / "out" / "adapter_config.json")
    assert config["base_model_name_or_path"] == str(tiny / "model")
    script("generate", tmp_path / "out", "--prompt", "hi", "--max_new_tokens", 2, code=0)
