# SPDX-License-Identifier: Apache-2.0
"""A GGUF: made by llama.cpp's converter, read back, and compared with the folder it was made of."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from exits import Exit, stop
from exporting import converter, quantizer
from exporting.converter import Plan
from exporting.experts import Place, find_places
from merging import shards

LOG = "converter.log"
PROGRESS = "%|"  # in each line of a progress bar
# By how much each type rounds a value, as a part of it; Q8_0 as a part of the largest in its block,
# of which it keeps the 127th part in fp16
ROUNDING = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8, "Q8_0": 1.2 / 254}


@dataclass(frozen=True)
class Gguf:
    """What a GGUF holds.

    Attributes:
        fields: {key: value}.
        tensors: {name: tensor of the gguf package}.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def tokens(self) -> list[str]:
        """Return the vocabulary."""
        return self.fields["tokenizer.ggml.tokens"]

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the kind of model."""
        return self.fields["general.architecture"]


# ---- Write ----
def convert(plan: Plan) -> None:
    """Write a GGUF. Raises SystemExit with 65 if the converter cannot, with 73 if the disk is full.

    What the converter prints is in a log beside the GGUF until it has succeeded.
    """
    folder = Path(plan.outfile).parent
    plan_file = folder / "plan.json"
    plan_file.write_text(json.dumps(asdict(plan)), encoding="utf-8")
    log = folder / LOG
    command = [sys.executable, str(Path(converter.__file__)), str(plan_file)]
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    plan_file.unlink()
    if done.returncode or not Path(plan.outfile).is_file():
        reason = last_words(log)
        if reason.startswith("OSError"):
            stop(Exit.CANNOT_WRITE, f"cannot write {plan.outfile}: {reason}")
        stop(Exit.DATA, f"{plan.model}: {explain(reason)}; all that it says is in {log}")
    log.unlink()


def last_words(log: Path) -> str:
    """Return the last line that the converter printed and that is not its progress bar."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    words = [line.strip() for line in lines if line.strip() and PROGRESS not in line]
    if not words:
        return "it says nothing"
    return words[-1]


def explain(reason: str) -> str:
    """Return in one line why the converter failed, and what can be done about it."""
    if "pre-tokenizer was not recognized" in reason:
        return (
            "llama.cpp's converter does not know how this tokenizer cuts words; it knows those of "
            "the models that it lists, with their own vocabularies"
        )
    return f"llama.cpp's converter cannot convert it: {reason[:300]}"


def link_model(folder: Path, source: Path, chat_template: str | None) -> None:
    """Make a folder with the files of a model, and with another chat template.

    Args:
        chat_template: in place of the tokenizer's own; None for one without.
    """
    folder.mkdir()
    for path in source.iterdir():
        is_weights = path.suffix == ".safetensors" or path.name == shards.INDEX
        if is_weights or path.suffix in (".json", ".model", ".txt"):
            (folder / path.name).symlink_to(path.resolve())
    config = source / "tokenizer_config.json"
    if chat_template is None or not config.is_file():
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    content["chat_template"] = chat_template
    (folder / config.name).unlink()
    (folder / config.name).write_text(json.dumps(content), encoding="utf-8")


def find_quantizer() -> list[str] | None:
    """Return the command that quantizes a GGUF, by llama.cpp's program or llama-cpp-python."""
    program = shutil.which("llama-quantize")
    if program is not None:
        return [program]
    if importlib.util.find_spec("llama_cpp") is not None:
        return [sys.executable, str(Path(quantizer.__file__))]
    return None


def quantize(path: Path, outfile: Path, outtype: str) -> None:
    """Write a GGUF in one of llama.cpp's quantized types. Raises SystemExit with 65."""
    program = find_quantizer()
    assert program is not None, "check_tools has found one"
    command = [*program, str(path), str(outfile), outtype.upper()]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or not outfile.is_file():
        lines = done.stderr.decode(errors="replace").splitlines()
        reason = lines[-1] if lines else f"it ended with {done.returncode}"
        stop(Exit.DATA, f"llama.cpp cannot quantize {path} to {outtype}: {reason[:300]}")


# ---- Read ----
def read(path: Path) -> Gguf:
    """Return what a GGUF holds. Raises SystemExit with 65 if it is not a whole one."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except (OSError, ValueError, LookupError, OverflowError) as error:
        stop(Exit.DATA, f"{path}: not a whole GGUF: {' '.join(str(error).split())[:200]}")
    return Gguf(path, fields, tensors)


def values_of(tensor: Any, expert: int | None = None) -> np.ndarray:
    """Return the values of a tensor of a GGUF in fp32, with its shape.

    Args:
        expert: the number of the only one whose values are returned; None for the whole tensor.
    """
    import gguf

    shape = shape_of(tensor)
    data = tensor.data
    if expert is not None:
        shape = shape[1:]
        data = data[expert]
    return gguf.dequantize(data, tensor.tensor_type).reshape(shape)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor of a GGUF as torch has it."""
    return tuple(int(size) for size in reversed(tensor.shape))


# ---- Compare ----
def find_wrong_facts(
    found: Gguf, tokenizer: Any, chat_template: str | None, plan: Plan, stop_tokens: frozenset[int]
) -> Iterator[str]:
    """Yield what a GGUF says of the tokenizer that is not so."""
    name = found.path.name
    theirs = found.tokens
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if token is not None and (number >= len(theirs) or theirs[number] != token):
            other = theirs[number] if number < len(theirs) else "nothing"
            yield f"{name}: token {number} is {other!r}, not {token!r}"
            break
    if found.fields.get("tokenizer.chat_template") != chat_template:
        yield f"{name}: its chat template is not the one of the folder"
    ends = {found.fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    missing = sorted(stop_tokens - ends)
    if missing:
        yield f"{name}: the tokens {missing} end no answer in it"
    if bool(found.fields.get("tokenizer.ggml.add_bos_token")) != plan.adds_bos:
        begins = "does not begin" if plan.adds_bos else "begins"
        yield f"{name}: a text {begins} with the token of its beginning"


@dataclass(frozen=True)
class Compared:
    """How many tensors of a GGUF were compared with those of the folder, and what is wrong.

    Attributes:
        equal: tensors of the GGUF whose values are those of the folder, but for the rounding of
            their type.
        unknown: names of those of the folder that are not compared, since the converter computes
            others of them.
    """

    equal: int
    unknown: tuple[str, ...]
    problems: tuple[str, ...]


def compare_tensors(found: Gguf, folder: Path, config: Any) -> Compared:
    """Compare each tensor of a GGUF with those of the folder that llama.cpp's names give it.

    One tensor of each is in memory at a time.
    """
    import gguf

    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[found.architecture]
    names = gguf.get_tensor_name_map(architecture, config.get_text_config().num_hidden_layers)
    experts_seen: dict[str, set[int | None]] = {}  # by the name of the GGUF's tensor
    unknown = []
    faults: dict[str, str] = {}  # the first one of each tensor of the GGUF
    for file in shards.find_files(str(folder), "main").shards:
        with safe_open(file.path, framework="pt") as tensors:
            for name in file.names:
                own = names.get_name(name, try_suffixes=(".weight", ".bias"))
                places = places_of(name, own, found)
                if not places:
                    unknown.append(name)
                    continue
                ours = tensors.get_tensor(name).float()
                for place in places:
                    experts_seen.setdefault(place.own, set()).add(place.expert)
                    fault = differs(place, ours, found, config)
                    if fault:
                        faults.setdefault(place.own, fault)
    for own, experts in experts_seen.items():
        number = shape_of(found.tensors[own])[0]
        if experts != {None} and len(experts) < number:
            faults.setdefault(own, f"has {number} experts, but the folder {len(experts)}")
    problems = [f"{found.path.name}: {own} {fault}" for own, fault in faults.items()]
    more = sorted(found.tensors.keys() - experts_seen.keys())
    if not unknown and more:
        problems.append(f"{found.path.name}: has tensors that the folder lacks: {', '.join(more)}")
    return Compared(len(experts_seen) - len(faults), tuple(unknown), tuple(problems))


def places_of(name: str, own: str | None, found: Gguf) -> list[Place]:
    """Return where a tensor of the folder is in a GGUF; nothing if it is not known.

    Args:
        own: llama.cpp's name for a tensor that it takes as it is.
    """
    if own in found.tensors:
        return [Place(own)]
    places = find_places(name, found.architecture)
    return [place for place in places if place.own in found.tensors]


def differs(place: Place, ours: torch.Tensor, found: Gguf, config: Any) -> str | None:
    """Return how a tensor of a GGUF differs from the folder's, or None."""
    theirs = found.tensors[place.own]
    of_expert = ""
    if place.expert is not None:
        of_expert = f" in expert {place.expert}"
        number = shape_of(theirs)[0]
        if place.expert >= number:
            return f"has only {number} experts"
    values = torch.from_numpy(values_of(theirs, place.expert).copy())
    ours = place.take(ours)
    kind = theirs.tensor_type.name
    if values.shape != ours.shape:
        return f"has the shape {tuple(values.shape)}, not {tuple(ours.shape)}{of_expert}"
    if kind not in ROUNDING:
        return None if values.isfinite().all() else f"is not finite{of_expert}"
    for arranged in arrangements(theirs.name, ours, found, config):
        if ((values - arranged).abs() <= rounding(arranged, kind)).all():
            return None
    return f"has other values{of_expert}"


def rounding(ours: torch.Tensor, kind: str) -> torch.Tensor:
    """Return by how much a type may change each value: Q8_0 shares a scale in a block of 32."""
    if kind == "Q8_0":
        blocks = ours.abs().reshape(-1, 32).amax(1, keepdim=True)
        return (blocks.expand(-1, 32) * ROUNDING[kind]).reshape(ours.shape)
    smallest = 2.0**-25 if kind == "F16" else 0.0  # half of the smallest number of fp16
    return ours.abs() * ROUNDING[kind] + smallest


def arrangements(name: str, ours: torch.Tensor, found: Gguf, config: Any) -> Iterator[torch.Tensor]:
    """Yield the ways in which llama.cpp may hold a tensor.

    In its architecture "llama" the rows of queries and keys are in the order of another rotary
    embedding, head by head (LlamaModel.permute in conversion/llama.py). Norms of Gemma have 1
    added. All other tensors are as they are.

    Args:
        name: llama.cpp's name of the tensor.
    """
    text = config.get_text_config()
    heads = {"attn_q": text.num_attention_heads, "attn_k": text.num_key_value_heads}
    kind = name.split(".")[-2]
    if found.architecture == "llama" and kind in heads:
        number = heads[kind]
        pairs = ours.reshape(number, 2, ours.shape[0] // number // 2, *ours.shape[1:])
        yield pairs.swapaxes(1, 2).reshape(ours.shape)
        return
    yield ours
    if found.architecture.startswith("gemma") and "norm" in kind:
        yield ours + 1
