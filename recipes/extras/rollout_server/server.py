# SPDX-License-Identifier: Apache-2.0
"""Answers of a server that is given the weights before each rollout: `transformers serve` or vLLM.

OUTPUT_DIR/rollouts/ has policy-STEP, the whole, merged model that they load where they run, and
answers-STEP-HASH.json, what was answered with its weights and settings.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from core.chat import ChatTemplate, as_messages, read_message
from core.checkpoint import gather, hash_of, make_patient_group, on_rank_0
from core.data import hash_of_row
from core.exits import End, Exit
from core.export import ADAPTERS, save_model
from core.model import loading_whole

CHAT = "/v1/chat/completions"
# Two such answers are hardly ever the same
PROBE = {"messages": [{"role": "user", "content": "?"}], "temperature": 10.0, "max_tokens": 16}
Row = Mapping[str, Any]
Written = tuple[list[int], bool]  # tokens of an answer, and whether it was cut off


class Server:
    """A server that answers prompts with the weights of the run. Every rank makes every call."""

    def __init__(
        self, args: Any, run: Any, accelerator: Accelerator, tokenizer: Any, options: Row
    ) -> None:
        """Know whom to ask. The options are those of `generate`, with what ends an answer."""
        self._args = args
        self._run = run
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._options = options
        self._ends: list[int] = options["eos_token_id"]
        self._template = ChatTemplate(tokenizer, args.chat_template_kwargs or {})
        self._group = make_patient_group()
        self._step = -1  # after which the server has the weights
        self._same: dict[str, Any] = {}  # in all requests
        self._known: dict[str, Written] = {}  # answers with these weights, by row and seed
        disable_progress_bar()  # of each file that is written

    def answer(self, model: Any, rows: Sequence[Row], seeds: Sequence[int]) -> list[Written]:
        """Return an answer to each prompt of this rank; without one the run is saved and ends.

        What was answered with the same weights is read back and not asked for again, since a server
        that answers several requests at a time does not repeat itself.
        """
        keys = [f"{row['hash']}-{seed}" for row, seed in zip(rows, seeds, strict=True)]
        new: dict[str, Written] = {}
        problem = None
        try:
            if self._step != self._run.step:
                self._push(model)
            missing = [number for number, key in enumerate(keys) if key not in self._known]
            with ThreadPoolExecutor(32) as threads:  # of each rank
                replies = threads.map(lambda n: self._ask(rows[n], seeds[n]), missing)
                for number, reply in zip(missing, replies, strict=True):
                    new[keys[number]] = self._read(rows[number], reply)
        except End as end:
            problem = end
        for added, end in gather((new, problem), self._group):
            self._known |= added
            problem = problem or end
        if problem is not None:
            server = f"--rollout_server {self._args.rollout_server}"
            self._run.save_and_end(problem.code, f"{server}: {problem.why}")
        if self._accelerator.is_main_process:
            staged = self._stored.with_suffix(".tmp")
            staged.write_text(json.dumps(self._known))
            os.replace(staged, self._stored)
        return [self._known[key] for key in keys]

    def _push(self, model: Any) -> None:
        """Give the server the weights, and read what it has answered with them before."""
        self._step = self._run.step
        folder = Path(self._args.output_dir, "rollouts", f"policy-{self._step}").resolve()
        parts = (self._accelerator, model, self._tokenizer, str(folder), self._ends)
        save_model(*parts, group=self._group)
        found = on_rank_0(lambda: self._publish(folder), self._group)
        self._same, self._stored, self._known = found

    def _publish(self, folder: Path) -> tuple[dict[str, Any], Path, dict[str, Written]]:
        """Have the server load a folder, and delete the one before. Rank 0 does so."""
        args = self._args
        if (folder / ADAPTERS).is_file():
            options: Any = {"trust_remote_code": False, "revision": args.model_revision}
            name, dtype = args.model_name_or_path, args.dtype
            with loading_whole(self._accelerator):
                base = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
                merged: Any = PeftModel.from_pretrained(base, folder).merge_and_unload()
            merged.save_pretrained(folder)
            for name in (ADAPTERS, "adapter_config.json"):
                (folder / name).unlink()
        same = self._load(str(folder))
        for other in {*folder.parent.glob("policy-*")} - {folder}:
            shutil.rmtree(other)
        basis = [hash_of(path) for path in sorted(folder.glob("model*.safetensors"))]
        hashed = hash_of_row(f"{basis} {args.temperature} {args.max_completion_length}".encode())
        stored = folder.with_name(f"answers-{self._step}-{hashed:x}.json")
        return same, stored, json.loads(stored.read_text()) if stored.is_file() else {}

    def _load(self, folder: str) -> dict[str, Any]:
        """Have the server load a folder; return what all requests have in common."""
        same = {"model": folder, "max_tokens": self._args.max_completion_length, "top_p": 1.0}
        same["chat_template_kwargs"] = dict(self._template.settings)
        try:
            self._call("/reset", {})  # `transformers serve` keeps the models that it has loaded
            sampling = {"do_sample": True, "temperature": self._args.temperature, "top_k": 0}
            same["generation_config"] = json.dumps({**self._options, **sampling})
        except End:  # vLLM, with VLLM_SERVER_DEV_MODE=1
            reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
            self._call("/collective_rpc", reload)
            self._call("/reset_prefix_cache", {})
            same["model"] = self._call("/v1/models")["data"][0]["id"]
            same |= {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
            same |= {"stop_token_ids": self._ends, "return_token_ids": True}
        one, other = (self._call(CHAT, same | PROBE | {"seed": n})["choices"] for n in (1, 2))
        if one == other:
            raise End(Exit.DIFFERS, "does not sample: two seeds have the same answer")
        return same

    def _ask(self, row: Row, seed: int) -> Any:
        """Return the chat completion of a prompt."""
        asked = as_messages(json.loads(row["columns"])["prompts"], "user")
        messages = [read_message(message, number)[0] for number, message in enumerate(asked, 1)]
        own = {"messages": messages, "temperature": self._args.temperature, "seed": seed >> 1}
        return self._call(CHAT, self._same | own)

    def _read(self, row: Row, reply: Any) -> Written:
        """Return the answer in a chat completion, tokenized again where it is text alone."""
        choice = reply["choices"][0]
        message = choice["message"]
        number = (reply.get("usage") or {}).get("prompt_tokens")
        if number not in (None, len(row["input_ids"])):
            made = f"makes {number} tokens of a prompt that has {len(row['input_ids'])} here"
            raise End(Exit.DIFFERS, f"{made}: its chat template differs, or tools are used")
        ids = choice.get("token_ids")
        if ids is None:
            if message.get("reasoning_content") or message.get("tool_calls"):
                raise End(Exit.DIFFERS, "takes reasoning or calls out of its answers")
            ids = self._tokenizer(message["content"] or "", add_special_tokens=False)["input_ids"]
        is_truncated = choice["finish_reason"] == "length"
        if not is_truncated and not {*ids[-1:]} & {*self._ends}:
            end = self._template.end_of_turn or self._tokenizer.eos_token
            ids = [*ids, self._tokenizer.convert_tokens_to_ids(end)]
        return ids, is_truncated

    def _call(self, path: str, body: Any = None) -> Any:
        """Return what the server says, to a POST if there is a body; or raise an End."""
        root = self._args.rollout_server.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{root}{path}", data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=self._args.ddp_timeout) as response:
                return json.loads(response.read() or "null")
        except (OSError, HTTPException, ValueError) as error:
            raise End(Exit.NO_HUB, f"{path} has no answer: {error}") from error
