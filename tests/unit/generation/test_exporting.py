# SPDX-License-Identifier: Apache-2.0
"""Faults in a GGUF are found, and a chat template is written in Ollama's language or refused."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import gguf as gguf_files
import numpy as np
import pytest
import trl
from transformers import AutoTokenizer

from adapter_folders import make_base
from generation import exporting, ollama
from generation.comparing import read_trained
from generation.loading import Source

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# What Go 1.19 made of the templates and conversations, by the program in the same folder
BY_GO = Path(__file__).parents[2] / "data" / "go_templates" / "rendered.json"
ENDS = [2, 3]


@pytest.fixture(scope="module")
def trained(once):
    base = once("exporting_base", lambda folder: make_base(folder, shard="100KB"))
    args = Namespace(prompts=None, num_prompts=2, device="cpu")
    return read_trained(Source(str(base / "model")), args)


@pytest.fixture(scope="module")
def gguf(trained, once):
    def fill(folder):
        folder.mkdir()
        exporting.convert(trained, folder / "model.gguf", "f32", ENDS, "smollm")

    return once("exporting_gguf", fill) / "model.gguf"


def test_a_good_gguf_has_the_vocabulary_of_its_folder(gguf, trained):
    exporting.check_gguf(gguf, trained, ENDS)


def rewrite(path, output, fields):
    """Copy a GGUF with other values.

    Args:
        fields: {key: new value; None leaves the key out}.
    """
    reader = gguf_files.GGUFReader(path)
    writer = gguf_files.GGUFWriter(output, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        value = field.contents()
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = fields.get(key, value)
        if value is not None:
            sub_type = field.types[-1] if field.types[0] == gguf_files.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return output


@pytest.mark.parametrize(
    "fields",
    [
        {"tokenizer.chat_template": "{{ messages }}"},
        {"tokenizer.chat_template": None},
        {"tokenizer.ggml.eot_token_id": None},
        {"tokenizer.ggml.eos_token_id": 9},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.tokens": ["a"] * 263},
    ],
    ids=str,
)
def test_a_fault_of_a_gguf_is_found(fields, gguf, trained, tmp_path):
    path = rewrite(gguf, tmp_path / "model.gguf", fields)
    with pytest.raises(SystemExit, match="76"):
        exporting.check_gguf(path, trained, ENDS)


# ---- Ollama ----
@pytest.fixture
def find_turns(trained):
    """A function from a chat template to what is written for Ollama."""
    tokenizer = AutoTokenizer.from_pretrained(trained.source.name)

    def find(template):
        tokenizer.chat_template = template
        tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"  # those of the recorded texts
        source = SimpleNamespace(name="model", settings={})
        return ollama.find_turns(
            SimpleNamespace(source=source, tokenizer=tokenizer, conversations=[])
        )

    return find


@pytest.mark.parametrize(
    ("name", "family"), [("glm4moe", "glm4_5"), ("llama3_1", "llama3"), ("qwen3", "qwen3")]
)
def test_what_is_written_for_ollama_is_what_go_has_rendered(name, family, find_turns):
    found = find_turns((TEMPLATES / f"{name}.jinja").read_text())
    assert found.to_go() == json.loads(BY_GO.read_text())[family]["template"]


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        PLAIN.replace("m.content", "m.content | upper"),
        PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
        PLAIN.replace("<|end|>", "<|end {{ loop.index }}|>"),
        PLAIN.replace("m.content", "m.content | replace('<', '&lt;')"),
        PLAIN.replace("messages", "messages[-1:]"),
        (TEMPLATES / "gptoss.jinja").read_text(),
    ],
    ids=range(6),
)
def test_a_template_that_ollama_cannot_write_is_refused(template, find_turns):
    assert find_turns(PLAIN).before["user"] == "<|user|>"
    with pytest.raises(SystemExit, match="65"):
        find_turns(template)
