# SPDX-License-Identifier: Apache-2.0
"""What the files of a base say is what is trained: its quantization, its weights, its classes."""

import json
import re
import shutil
import sys
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BitsAndBytesConfig,
)

from jobs import RECIPES
from launching import REPO, data_of, read_json, read_metrics, rehearse, run

CLASSIFIERS = {
    "bert": AutoModelForSequenceClassification,
    "bert_ner": AutoModelForTokenClassification,
    "vit": AutoModelForImageClassification,
}
UNCHANGED = ["--max_steps", "1", "--learning_rate", "1e-9", "--warmup_steps", "0"]
# As config.json names them; transformers does not know the last one
METHODS = (
    "fp8 gptq awq compressed-tensors mxfp4 torchao hqq quanto bitnet auto-round modelopt"
).split()


def train(recipe, model, tiny, folder, *flags, **options):
    """Run a recipe in one process on the rows of a tiny folder and another model."""
    words = data_of(tiny)
    words[1] = model
    script = REPO / "recipes" / f"{recipe}.py"
    return run(
        sys.executable, script, *words, *UNCHANGED, "--output_dir", folder, *flags, **options
    )


def edit_config(model, **values):
    path = Path(model) / "config.json"
    path.write_text(json.dumps(read_json(path) | values))


def tensors_of(model):
    return load_file(Path(model) / "model.safetensors")


def write_tensors(model, tensors):
    save_file(tensors, Path(model) / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def base(short_of, tmp_path):
    """A function from a recipe to a copy of its tiny model, which may be spoiled."""

    def copy(recipe):
        return shutil.copytree(short_of(recipe) / "model", tmp_path / "base")

    return copy


def assert_refused(done, *says):
    assert done.returncode == 64, done.output[-3000:]
    [line] = [line for line in done.output.splitlines() if line.startswith("error: ")]
    for words in says:
        assert words in line
    return line


# ---- Quantized ----
@pytest.mark.parametrize(("method", "recipe"), list(zip(METHODS, cycle(RECIPES), strict=False)))
def test_a_base_that_is_quantized_on_disk_is_refused(method, recipe, base, short_of, tmp_path):
    """Its numbers without their scales would be trained. Half of the runs are dry ones."""
    model = base(recipe)
    edit_config(model, quantization_config={"quant_method": method, "bits": 4})
    flags = ["--dry_run"] if METHODS.index(method) % 2 else []
    if recipe not in ("mixtral", "bert", "llama"):
        flags += ["--use_peft", "--load_in_4bit"]  # which do not make other weights readable
    done = train(recipe, model, short_of(recipe), tmp_path / "out", *flags)
    assert_refused(done, f"({method})", str(model), "unquantized model")


def test_quantization_is_found_in_the_config_of_a_text_model(base, short_of, tmp_path):
    model = base("llama")
    text = read_json(model / "config.json")
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    text |= {"model_type": "gemma3_text", "quantization_config": {"quant_method": "gptq"}}
    (model / "config.json").write_text(json.dumps(whole | {"text_config": text}))
    done = train("llama", model, short_of("llama"), tmp_path / "out")
    assert_refused(done, "(gptq)")


def test_each_rank_of_a_pipeline_refuses_a_quantized_base(base, short_of, tmp_path):
    model = base("llama")
    edit_config(model, quantization_config={"quant_method": "fp8"})
    words = ["--dataset_name", short_of("llama") / "data" / "train.jsonl", *UNCHANGED]
    words += ["--model_name_or_path", model, "--pp_size", 2, "--output_dir", tmp_path / "out"]
    script = REPO / "recipes" / "llama_pipeline.py"
    done = rehearse("pp", *words, num_processes=2, script=script)
    assert "ended with exit code 64" in done.output and "(fp8)" in done.output


def test_no_quantization_in_config_json_is_none(base, short_of, tmp_path):
    model = base("llama")
    edit_config(model, quantization_config=None)
    done = train("llama", model, short_of("llama"), tmp_path / "out")
    assert done.returncode == 0, done.output[-3000:]


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
def in_bits(once, short_of):
    return lambda bits: once(
        f"base_in_{bits}_bits", partial(write_in_bits, IN_BITS[bits], short_of("llama"))
    )


@pytest.mark.parametrize("bits", IN_BITS)
def test_a_base_of_bitsandbytes_is_trained_as_it_was_saved(bits, in_bits, short_of, tmp_path):
    """The first loss is that of the same base when it is quantized as it is loaded."""
    tiny, flags = short_of("llama"), ["--use_peft", f"--load_in_{bits}bit"]
    losses = []
    for model in (in_bits(bits), tiny / "model"):
        done = train("llama", model, tiny, tmp_path / model.name, *flags)
        assert done.returncode == 0, done.output[-3000:]
        losses.append(read_metrics(tmp_path / model.name)[0][0]["loss"])
    # 4 bits: the same numbers; 8 bits: scales of fp16 weights, as bitsandbytes documents them
    assert losses[0] == pytest.approx(losses[1], abs=1e-5 if bits == "4" else 5e-3)


@pytest.mark.parametrize(
    ("bits", "flags", "fix"),
    [
        ("4", [], "--load_in_4bit"),
        ("8", [], "--load_in_8bit"),
        ("8", ["--load_in_4bit"], "--load_in_8bit"),
        ("4", ["--load_in_4bit", "--bnb_4bit_quant_type", "fp4"], "--bnb_4bit_quant_type nf4"),
    ],
)
def test_flags_that_say_otherwise_than_the_files_are_refused(
    bits, flags, fix, in_bits, short_of, tmp_path
):
    done = train("llama", in_bits(bits), short_of("llama"), tmp_path / "out", "--use_peft", *flags)
    assert_refused(done, "(bitsandbytes)", fix)


def test_fsdp_does_not_get_bytes_that_it_cannot_shard(in_bits, short_of, tmp_path):
    words = data_of(short_of("llama"))
    words[1] = in_bits("4")
    words += ["--use_peft", "--load_in_4bit", *UNCHANGED, "--output_dir", tmp_path / "out"]
    done = rehearse("fsdp", *words, num_processes=2)
    assert "ended with exit code 64" in done.output and "cannot shard uint8" in done.output


# ---- Missing ----
def drop_one(model):
    """Drop a matrix from the middle of a base, and return its name."""
    tensors = tensors_of(model)
    # Not an expert: transformers itself refuses a layer that has not all of them
    inside = [name for name in tensors if re.search(r"\.\d+\.", name) and "expert" not in name]
    name = next(name for name in sorted(inside) if tensors[name].dim() > 1)
    del tensors[name]
    write_tensors(model, tensors)
    return name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_base_that_lacks_one_tensor_is_refused(recipe, base, short_of, tmp_path):
    model = base(recipe)
    name = drop_one(model)
    done = train(recipe, model, short_of(recipe), tmp_path / "out")
    # Some families have other names in their files than in transformers
    assert_refused(done, str(model), "lack 1 of its weights", name.rpartition(".")[2])
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("config", "recipe", "flags"),
    [
        ("fsdp", "llama", []),
        ("deepspeed_zero3", "llama", []),
        ("pp", "llama_pipeline", ["--pp_size", 2]),
        ("ep", "mixtral", ["--ep_size", 2]),
    ],
)
def test_every_strategy_refuses_it(config, recipe, flags, base, short_of, tmp_path):
    tiny = recipe.removesuffix("_pipeline")
    model = base(tiny)
    name = drop_one(model)
    words = [*data_of(short_of(tiny)), *flags]
    words[1] = model
    script = REPO / "recipes" / f"{recipe}.py"
    out = ["--output_dir", tmp_path / "out"]
    done = rehearse(config, *words, *UNCHANGED, *out, num_processes=2, script=script)
    assert "ended with exit code 64" in done.output, done.output[-3000:]
    assert "lack 1 of its weights" in done.output and name.rpartition(".")[2] in done.output


@pytest.mark.parametrize("recipe", ["llama", "bert"])
def test_weights_under_other_names_are_refused(recipe, base, short_of, tmp_path):
    """As a compiled model has them when it is saved by hand."""
    model = base(recipe)
    tensors = tensors_of(model)
    write_tensors(model, {f"_orig_mod.{name}": weight for name, weight in tensors.items()})
    done = train(recipe, model, short_of(recipe), tmp_path / "out")
    number = re.search(r"lack (\d+) of", assert_refused(done, str(model)))
    assert len(tensors) - 4 <= int(number[1]) <= len(tensors)  # a pooler may be new


@pytest.mark.parametrize("recipe", ["llama", "bert"])
def test_weights_of_another_shape_are_named(recipe, base, short_of, tmp_path):
    """A classifier's head may have any shape, its embedding may not. Nothing speaks of ZeRO-3."""
    model = base(recipe)
    size = read_json(model / "config.json")["vocab_size"]
    edit_config(model, vocab_size=size + 8)
    done = train(recipe, model, short_of(recipe), tmp_path / "out")
    assert_refused(done, "in other shapes", "embed")
    assert "ZeRO-3" not in done.output


# ---- Classes ----
def names_in(recipe, tiny):
    """The names of the classes of the rows, as a run without a head of its own orders them."""
    if recipe == "vit":
        return sorted(path.name for path in (tiny / "data" / "train").iterdir())
    rows = [json.loads(line) for line in (tiny / "data" / "train.jsonl").read_text().splitlines()]
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
def test_an_untrained_step_leaves_each_class_its_weights(recipe, short_of, tmp_path):
    """Also where the base has its classes in another order than that of the alphabet."""
    tiny = short_of(recipe)
    names = names_in(recipe, tiny)[::-1]
    model = with_head(recipe, tiny, names, tmp_path / "base")
    done = train(recipe, model, tiny, tmp_path / "out")
    assert done.returncode == 0, done.output[-3000:]
    before, after = heads(model, tmp_path / "out")
    assert list(after) == names and "head: new" not in done.output
    for name in names:
        for old, new in zip(before[name], after[name], strict=True):
            assert torch.allclose(old, new, atol=1e-6), name  # the step is 1e-9 a weight


@pytest.mark.parametrize("recipe", CLASSIFIERS)
def test_a_head_for_as_many_other_classes_is_not_kept(recipe, short_of, tmp_path):
    tiny = short_of(recipe)
    names = names_in(recipe, tiny)
    other = [f"other {number}" for number in range(len(names))]
    model = with_head(recipe, tiny, other, tmp_path / "base")
    done = train(recipe, model, tiny, tmp_path / "out")
    assert done.returncode == 0 and "head: new" in done.output, done.output[-3000:]
    _, after = heads(model, tmp_path / "out")
    assert set(after) == set(names)
    for _, bias in after.values():
        assert abs(bias) < 0.1


def test_a_head_of_other_classes_is_the_same_new_one_under_every_strategy(short_of, tmp_path):
    tiny = short_of("bert")
    names = names_in("bert", tiny)
    model = with_head("bert", tiny, [f"other {name}" for name in names], tmp_path / "base")
    words = data_of(tiny)
    words[1] = model
    script = REPO / "recipes" / "bert.py"
    for config in ("fsdp", "deepspeed_zero3"):
        out = ["--output_dir", tmp_path / config, "--eval_strategy", "no"]
        done = rehearse(config, *words, *UNCHANGED, *out, num_processes=2, script=script)
        assert "head: new" in done.output, done.output[-3000:]
    sharded, split = heads(tmp_path / "fsdp", tmp_path / "deepspeed_zero3")
    for name, (weight, bias) in sharded.items():
        assert abs(bias) < 0.1 and weight.any()
        assert torch.allclose(weight, split[name][0], atol=1e-6)


@pytest.mark.parametrize(
    ("of_base", "of_rows", "is_kept"),
    [
        (["POSITIVE", "NOT SO GOOD"], ["not so good", "positive"], True),
        (["LABEL_0", "LABEL_1"], [0, 1], True),
        (["LABEL_0", "LABEL_1"], ["bad", "good"], False),
        (["positive", "negative"], [0, 1], False),
        ([f"c{n}" for n in (3, 1, 2, 0, *range(4, 12))], [f"c{n}" for n in range(12)], True),
    ],
    ids=["case", "numbers", "unnamed", "unnamed_rows", "twelve"],
)
def test_names_of_classes_are_compared_as_people_write_them(
    of_base, of_rows, is_kept, short_of, tmp_path
):
    tiny = short_of("bert")
    model = with_head("bert", tiny, of_base, tmp_path / "base")
    rows = [{"text": "the room was dark", "label": name} for name in of_rows] * 2
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["--eval_strategy", "no", "--dataset_name", tmp_path / "rows.jsonl"]
    done = train("bert", model, tiny, tmp_path / "out", *words)
    assert done.returncode == 0, done.output[-3000:]
    _, after = heads(model, tmp_path / "out")
    assert ("head: new" in done.output) is not is_kept
    if is_kept:
        expected = [str(name).casefold().removeprefix("label_") for name in of_base]
        assert [name.casefold() for name in after] == expected
    for number, (_, bias) in enumerate(after.values()):
        assert bias == pytest.approx(number if is_kept else 0, abs=0.1)


# ---- Adapters ----
def test_adapters_name_a_local_base_from_any_folder(short_of, tmp_path):
    tiny = shutil.copytree(short_of("llama"), tmp_path / "tiny")
    words = ["--model_name_or_path", "tiny/model", "--dataset_name", "tiny/data/train.jsonl"]
    words += [*UNCHANGED, "--use_peft", "--output_dir", "out"]
    script = REPO / "recipes" / "llama.py"
    done = run(sys.executable, script, *words, cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    config = read_json(tmp_path / "out" / "adapter_config.json")
    assert config["base_model_name_or_path"] == str(tiny / "model")
    for script, *words in (["generate", "--prompt", "hi"], ["merge", tmp_path / "merged"]):
        done = run(sys.executable, REPO / "scripts" / f"{script}.py", tmp_path / "out", *words)
        assert done.returncode == 0, done.output[-3000:]
