# SPDX-License-Identifier: Apache-2.0
"""A model folder and a data set cannot run their own code, as SECURITY.md says."""

import ast
import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

import damage
from components import data_files, tokens, weights
from fakes import fake_accelerator
from generation import loading
from launching import REPO

PROGRAMS = sorted([*(REPO / "recipes").rglob("*.py"), *(REPO / "scripts").rglob("*.py")])
CODE = "import pathlib\npathlib.Path({mark!r}).touch()\n"
TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.fixture
def mark(tmp_path):
    """The file that planted code makes."""
    return tmp_path / "mark"


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny Llama with its tokenizer."""
    folder = tmp_path / "model"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=2, vocab_size=4, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<pad>": 2, "?": 3}, unk_token="?"))
    FastTokenizer(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)
    return folder


def set_in(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def calls_of(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


# ---- Code of a model ----
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(REPO)))
def test_code_of_a_model_is_turned_off_in_every_call(path):
    """Without the argument transformers asks on the terminal whether to run it."""
    for call in calls_of(path):
        written = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        passes_options = None in given  # **options, which has it in the caller
        if written.startswith("Auto") and written.endswith(".from_pretrained"):
            assert given.get("trust_remote_code") == "False" or passes_options, call.lineno
        assert given.get("trust_remote_code", "False") == "False", call.lineno


def test_the_code_of_a_model_is_not_run(model, mark):
    (model / "modeling_x.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    set_in(model / "config.json", auto_map=classes)
    weights.load_pretrained(
        AutoModelForCausalLM, fake_accelerator(), str(model), trust_remote_code=False
    )
    loading.load_model(loading.Source(str(model)), "auto", "cpu")
    assert not mark.exists()


def test_the_code_of_a_model_of_an_unknown_kind_is_refused(model, mark, capsys):
    (model / "modeling_x.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    set_in(model / "config.json", auto_map=classes, model_type="x")
    with pytest.raises(SystemExit, match="65"):
        loading.load_model(loading.Source(str(model)), "auto", "cpu")
    assert not mark.exists() and capsys.readouterr().err.count("\n") == 1


def test_the_code_of_a_tokenizer_is_not_run(model, mark):
    (model / "tokenization_x.py").write_text(CODE.format(mark=str(mark)))
    set_in(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_x.X"]})
    tokens.load_text_tokenizer(str(model))
    assert not mark.exists()


# ---- Pickles ----
@pytest.mark.parametrize("plant", [damage.torch_pickle, damage.plain_pickle])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_in_the_place_of_weights_is_refused(name, plant, model, mark):
    (model / "model.safetensors").unlink()
    plant(model / name, mark)
    with pytest.raises(Exception):  # noqa: B017  each reader raises one of its own
        weights.load_pretrained(
            AutoModelForCausalLM, fake_accelerator(), str(model), trust_remote_code=False
        )
    with pytest.raises(SystemExit, match="65"):
        loading.load_model(loading.Source(str(model)), "auto", "cpu")
    assert not mark.exists()


def test_a_pickle_in_the_place_of_adapters_is_refused(model, mark, tmp_path):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    config = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    damage.torch_pickle(adapters / "adapter_model.bin", mark)
    with pytest.raises(SystemExit, match="65"):
        loading.load_model(loading.Source(str(adapters), str(model)), "auto", "cpu")
    assert not mark.exists()


def test_a_planted_pickle_does_run_where_nothing_forbids_it(tmp_path, mark):
    """Otherwise the tests above would show nothing."""
    damage.torch_pickle(tmp_path / "weights.bin", mark)
    torch.load(tmp_path / "weights.bin", weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(REPO)))
def test_nothing_here_loads_a_pickle_that_may_run_code(path):
    for call in calls_of(path):
        written = ast.unparse(call.func)
        assert written not in ("pickle.load", "pickle.loads", "dill.load", "dill.loads")
        if written == "torch.load":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert given.get("weights_only") == "True", call.lineno


# ---- Chat templates ----
def test_a_chat_template_cannot_reach_python(model):
    tokenizer = tokens.load_text_tokenizer(str(model))
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


# ---- Data sets ----
def test_the_script_of_a_data_set_is_not_run(tmp_path, mark, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(CODE.format(mark=str(mark)))
    with pytest.raises(SystemExit, match="65"):
        data_files.load_rows(data_files.Source(str(folder), None, "train", (), True))
    assert not mark.exists() and "rows" in capsys.readouterr().err


def test_pickles_in_a_data_set_are_not_read(tmp_path, mark, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train.pkl", "train.pickle"):
        damage.plain_pickle(folder / name, mark)
    assert data_files.find_files(str(folder), "train") == ()
    with pytest.raises(SystemExit, match="65"):
        data_files.load_rows(data_files.Source(str(folder), None, "train", (), True))
    assert not mark.exists()
