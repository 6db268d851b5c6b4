# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_grpo.py --rollout_server learns from the answers of a real `transformers serve`.

What that does not do is asked of a stand-in, as is vLLM, which needs a GPU.
"""

import json
import shutil
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.exits import End
from extras.rollout_server.hooks import answerer
from launching import (
    REPO,
    data_of,
    errors_of,
    read_metrics,
    read_rows,
    recipe,
    rehearse,
    tensors_of,
)

RUN = ["--learning_rate", 3e-3, "--reward_weights", 1, 1, "--num_generations", 4]
RUN += ["--max_completion_length", 4, "--logging_steps", 1]
STEPS = 8


@pytest.fixture(scope="module")
def tiny(net_tiny):
    return net_tiny("llama_grpo")


def learn(folder, tiny, url, **options):
    words = [*data_of(tiny), *RUN, "--max_steps", STEPS, "--save_steps", STEPS - 1]
    words += ["--per_device_train_batch_size", 48, "--eval_strategy", "no"]
    words += ["--rollout_server", url, "--output_dir", folder]
    return recipe(*words, name="llama_grpo", **options)


def test_the_reward_rises_and_a_continued_run_reads_answers_back(url, tiny, tmp_path):
    """It rises only if each rollout is answered with the weights of its step."""
    learn(tmp_path, tiny, url, code=0)
    rewards = [line["reward"] for line in read_metrics(tmp_path)[0]]
    assert rewards[0] < 0.35 and rewards[-1] > 0.4  # 0.12 and 0.05 by chance
    samples = read_rows(tmp_path / "samples.jsonl")
    assert len({row["answer"] for row in samples[:4]}) > 1  # to one prompt
    # What was answered with the same weights is not asked for again
    before = (tmp_path / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / f"checkpoint-{STEPS}")
    (tmp_path / "status.json").unlink()
    learn(tmp_path, tiny, url, code=0)
    assert read_rows(tmp_path / "samples.jsonl") == samples
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert len(list(tmp_path.glob("rollouts/answers-*.json"))) == STEPS


def test_a_server_gets_split_adapters_as_a_whole_model(url, tiny, tmp_path):
    words = [*data_of(tiny), *RUN, "--max_steps", 2, "--eval_steps", 2, "--use_peft"]
    words += ["--per_device_train_batch_size", 24, "--rollout_server", url]
    program = REPO / "recipes" / "llama_grpo.py"
    words += ["--output_dir", tmp_path]
    rehearse("fsdp2_full_shard", *words, num_processes=2, script=program, code=0)
    assert [path.name for path in tmp_path.glob("rollouts/policy-*")] == ["policy-2"]
    base = AutoModelForCausalLM.from_pretrained(tiny / "model")
    untrained = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    pushed = tensors_of(tmp_path / "rollouts" / "policy-2")
    moved = [name for name in pushed if not pushed[name].equal(untrained[name])]
    assert moved and all(pushed[name].allclose(merged[name], atol=1e-6) for name in pushed)


# ---- Servers that are not as they should be ----
class Listener(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def standing_in(reply):
    """A server whose answers to (path, body) a function returns; the address, and its requests."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers.get("Content-Length", 0))
            asked.append((self.path, json.loads(self.rfile.read(size) or "null")))
            answer = reply(*asked[-1], len(asked))
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(b"" if answer is None else json.dumps(answer).encode())

        do_GET = do_POST  # noqa: N815

        def log_message(self, *words):
            pass

    with Listener(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
        server.shutdown()


def completion(text, reason="length", tokens=None, **other):
    choice = {"message": {"content": text, **other}, "finish_reason": reason}
    return {"choices": [choice], "usage": {"prompt_tokens": tokens}}


def test_a_server_that_stops_answering_ends_the_run_and_nothing_is_lost(url, tiny, tmp_path):
    def once_only(path, body, count):  # two probes and a rollout
        is_chat = path.endswith("completions")
        return None if count > 1 + 2 + 48 else completion(f"{count}") if is_chat else {}

    with standing_in(once_only) as (address, _):
        done = learn(tmp_path, tiny, address, code=69)
    [line] = errors_of(done)
    assert address in line and (tmp_path / "checkpoint-1").is_dir()
    done = learn(tmp_path, tiny, url, code=0)
    assert "checkpoint-1" in done.output
    assert [line["step"] for line in read_metrics(tmp_path)[0]] == [*range(1, STEPS + 1)]


@pytest.fixture
def answer(tiny, tmp_path):
    """A function that has a server answer one prompt of three tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")

    def save_and_end(code, why):
        raise End(code, why)

    def call(reply):
        with standing_in(reply) as (address, asked):
            args = SimpleNamespace(
                rollout_server=address,
                output_dir=str(tmp_path),
                chat_template_kwargs=None,
                temperature=1.0,
                max_completion_length=4,
                ddp_timeout=60,
            )
            run = SimpleNamespace(step=3, save_and_end=save_and_end)
            options = {"eos_token_id": [2]}
            server = answerer(args, run, Accelerator(cpu=True), tokenizer, options)
            row = {"hash": 5, "columns": '{"prompts": "?"}', "input_ids": np.arange(3)}
            return server.answer(model, [row], [7]), asked

    return call


CAUGHT = {
    "one answer for all seeds": lambda path, body, count: completion("7"),
    "another prompt": lambda path, body, count: completion(f"{count}", tokens=4),
    "without its reasoning": lambda path, body, count: completion(
        f"{count}", reasoning_content="?"
    ),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_answers_that_would_be_learned_from_wrongly_are_caught(name, answer):
    with pytest.raises(End) as caught:
        answer(CAUGHT[name])
    assert caught.value.code == 76


@pytest.mark.parametrize(("reason", "is_cut"), [("stop", False), ("length", True)])
def test_text_gets_the_token_that_ends_a_turn_unless_it_was_cut(reason, is_cut, answer, tiny):
    [(ids, is_truncated)], asked = answer(lambda path, body, count: completion(f"{count}", reason))
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    end = [tokenizer.convert_tokens_to_ids("<|end_of_turn|>")]
    assert ids == tokenizer(f"{len(asked)}")["input_ids"] + end * (not is_cut)
    assert is_truncated == is_cut


def test_vllm_reloads_the_weights_and_its_token_ids_are_taken_as_they_are(answer, tmp_path):
    def vllm(path, body, count):
        if path.endswith("completions"):
            choice = completion(f"{count}", "stop", 3)
            choice["choices"][0]["token_ids"] = [9, 8, 2]
            return choice
        return {"/v1/models": {"data": [{"id": "served"}]}, "/reset": None}.get(path, {})

    [(ids, _)], asked = answer(vllm)
    assert ids == [9, 8, 2]
    order = [path for path, _ in asked[:4]]
    assert order == ["/reset", "/collective_rpc", "/reset_prefix_cache", "/v1/models"]
    policy = str(tmp_path / "rollouts" / "policy-3")
    assert asked[1][1] == {"method": "reload_weights", "kwargs": {"weights_path": policy}}
    assert asked[-1][1]["model"] == "served" and asked[-1][1]["return_token_ids"]
