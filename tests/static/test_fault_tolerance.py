"""Checkpoints in this process: damage is found, foreign files stay, one is always whole, no argument drifts unseen."""

import importlib
import json
import os
import sys
from argparse import Namespace
from types import SimpleNamespace

import damage
import fault_tolerance
import llama
import preflight
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

# Arguments that change what is learnt: a run goes on with other values only where --allow_change names them
UNSAFE = frozenset("""
    model_name_or_path dtype load_in_8bit load_in_4bit bnb_4bit_quant_type bnb_4bit_use_double_quant use_peft lora_r
    lora_alpha lora_dropout lora_target_modules use_rslora use_dora dataset_name dataset_config dataset_train_split
    max_length skip_bad_rows train_sampling_strategy num_train_epochs max_steps optim learning_rate lr_scheduler_type
    warmup_steps weight_decay max_grad_norm seed packing tf32""".split())
UNSAFE_OF = {  # recipe: what it has not of these, and what it has besides
    "llama": ("", ""),
    "llama_dpo": ("packing", "loss_type beta"),
    "mistral_pretrain": ("packing train_sampling_strategy",
                         "text_column streaming shuffle_buffer_size num_eval_documents max_train_tokens"),
    "mixtral": ("packing bnb_4bit_quant_type bnb_4bit_use_double_quant",
                "lora_target_parameters router_aux_loss_coef"),
    "t5": ("packing max_length", """source_column target_column source_lang target_lang source_prefix max_source_length
           max_target_length forced_bos_token"""),
    "bert": ("packing", "text_columns label_column problem_type class_weights"),
    "vit": ("packing max_length train_sampling_strategy",
            "image_column_name label_column_name problem_type class_weights augmentation"),
}
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def polled(look, function, *arguments, **options):
    """Call a function, and `look` before each change of the file system in it; an audit hook stays, so it is inert."""
    active = [True]

    def hook(event, _):
        if active and event in CHANGES:
            active.clear()  # what `look` opens itself is no change
            look()
            active.append(True)

    sys.addaudithook(hook)
    function(*arguments, **options)
    active.clear()


def read_json(path):
    return json.loads(path.read_text())


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    return llama.parse_args()


class TestDamage:
    @pytest.mark.parametrize("function", [damage.flipped_bits, damage.mutated_manifests], ids=lambda f: f.__name__)
    def test_random_changes_are_found(self, function, tmp_path):
        number = 10_000 if function is damage.mutated_manifests else 1000
        assert function(damage.make_checkpoint(tmp_path, 5), number) == (number, [])

    def test_cut_and_lost_files_are_found(self, tmp_path):
        assert damage.cut_and_lost_files(damage.make_checkpoint(tmp_path, 5)) == (42, [])

    def test_the_checkpoint_before_a_damaged_one_is_taken(self, tmp_path):
        assert damage.older_one_is_taken(tmp_path / "run") == (3, [])

    def test_without_any_whole_checkpoint_it_refuses(self, tmp_path, capsys):
        (damage.make_checkpoint(tmp_path, 5) / "progress.json").unlink()
        with pytest.raises(SystemExit, match="65"):
            arguments = Namespace(output_dir=tmp_path, resume_from_checkpoint="auto", dry_run=False)
            fault_tolerance.search_checkpoint(arguments)
        assert "progress.json" in capsys.readouterr().err and (tmp_path / "checkpoint-5").is_dir()

    @pytest.mark.parametrize("name", fault_tolerance.FILES)
    def test_a_pickle_with_a_manifest_that_fits_is_not_run(self, name, tmp_path):
        checkpoint, mark = damage.make_checkpoint(tmp_path, 5), tmp_path / "mark"
        damage.forge(checkpoint, name, mark)
        assert fault_tolerance.problem_of(checkpoint).startswith(name)
        with pytest.raises((SafetensorError, ValueError)):
            (load_file if name == "state.safetensors" else read_json)(checkpoint / name)
        assert not mark.exists()
        torch.load((checkpoint / name).rename(tmp_path / "pickle"), weights_only=False)
        assert mark.exists()  # the pickle was a real one


class TestFolder:
    def test_foreign_files_stay_and_are_not_taken(self, tmp_path):
        assert damage.stray_files(tmp_path / "run")[1] == []

    def test_one_checkpoint_is_whole_at_each_change(self, tmp_path):
        damage.make_checkpoint(tmp_path, 1)
        seen = []

        def look():
            there = fault_tolerance.checkpoints_in(tmp_path).values()
            seen.append(sum(fault_tolerance.problem_of(path) is None for path in there))

        for step in range(2, 6):
            polled(look, damage.make_checkpoint, tmp_path, step, limit=1)
        assert len(seen) > 40 and min(seen) == 1, seen
        assert list(fault_tolerance.checkpoints_in(tmp_path)) == [5]

    def test_hashing_costs_at_most_a_tenth_of_a_save(self, tmp_path):
        assert min(damage.share_of_hashing(tmp_path, 50_000_000) for _ in range(3)) <= 0.1


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoints(tmp_path):
    before, own = damage.make_checkpoint(tmp_path / "before", 100), tmp_path / "own"
    arguments = Namespace(output_dir=own, resume_from_checkpoint=str(before), dry_run=False)
    assert fault_tolerance.search_checkpoint(arguments) == before
    newer = damage.make_checkpoint(own, 120)
    assert fault_tolerance.search_checkpoint(arguments) == newer
    (newer / "progress.json").unlink()
    assert fault_tolerance.search_checkpoint(arguments) == before  # and the damaged one is set aside
    assert len(list(own.glob("checkpoint-120.damaged-*"))) == 1


def alone(ranks):
    """What check_changes asks of an Accelerator, on rank 0 of so many."""
    return SimpleNamespace(num_processes=ranks, print=print, is_main_process=True, wait_for_everyone=lambda: None,
                           end_training=lambda: None)


class TestChanges:
    def test_each_argument_is_in_one_class(self, arguments):
        free, known = preflight.FREE_TO_CHANGE, {"llama": set(vars(arguments))}
        for recipe, (without, besides) in UNSAFE_OF.items():
            known[recipe] = set(vars(importlib.import_module(recipe).parse_args()))
            assert known[recipe] - free == UNSAFE - set(without.split()) | set(besides.split()), recipe
        assert free <= set().union(*known.values())

    @pytest.mark.parametrize("name", sorted(UNSAFE | {"data"}))
    def test_what_changes_the_run_is_refused(self, name, arguments, capsys):
        facts, accelerator = {"rows_per_step": 8, "data": "abc"}, alone(1)
        progress = {"step": 3, "arguments": vars(arguments) | facts | {name: "another"}}
        with pytest.raises(SystemExit, match="64"):
            preflight.check_changes(accelerator, arguments, progress, facts)
        assert f"--allow_change {name}" in capsys.readouterr().err
        arguments.allow_change = [name]
        preflight.check_changes(accelerator, arguments, progress, facts)

    def test_the_rest_may_change(self, arguments):
        facts, accelerator = {"rows_per_step": 8, "data": "abc"}, alone(1)
        before = vars(arguments) | facts | dict.fromkeys(preflight.FREE_TO_CHANGE, "another")
        preflight.check_changes(accelerator, arguments, {"step": 3, "arguments": before}, facts)

    @pytest.mark.parametrize(("ranks", "fix"), [(1, "_size 8 --gradient_accumulation_steps 3"), (5, "divides 24"),
                                                (3, "_size 8 --gradient_accumulation_steps 1")])
    def test_other_rows_a_step_are_refused_with_what_fits(self, ranks, fix, arguments, capsys):
        accelerator = alone(ranks)
        progress = {"step": 3, "arguments": vars(arguments) | {"rows_per_step": 24, "data": "abc"}}
        with pytest.raises(SystemExit, match="64"):
            preflight.check_changes(accelerator, arguments, progress, {"rows_per_step": 7, "data": "abc"})
        assert fix in capsys.readouterr().err


def test_a_full_disk_does_not_hide_how_the_run_ended(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, os.strerror(28))

    monkeypatch.setitem(fault_tolerance.RUN, "output_dir", tmp_path)
    monkeypatch.setattr(fault_tolerance, "write_file", full)
    with pytest.raises(SystemExit, match="73"):
        fault_tolerance.fail(73, "no room")


@pytest.mark.parametrize("words", [
    ["--output_dir", "FOLDER"], ["--output_dir=FOLDER"],
    ["--output_dir", "FOLDER/first", "--output_dir", "FOLDER"],  # of several argparse takes the last
    ["--output_dir=FOLDER/first", "--seed", "1", "--output_dir=FOLDER"],
], ids=str)
def test_a_wrong_call_is_recorded_where_its_run_would_have_been(words, tmp_path, monkeypatch):
    monkeypatch.setattr(fault_tolerance, "RUN", {"state": "starting", "step": 0})
    monkeypatch.setattr(sys, "argv", ["llama.py", *(word.replace("FOLDER", str(tmp_path)) for word in words), "--sed"])
    with pytest.raises(SystemExit) as ended:
        fault_tolerance.fail(64, "no such argument: --sed")
    assert ended.value.code == 64
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["exit_code"], status["why"]) == ("failed", 64, "no such argument: --sed")


def test_a_rank_in_a_container_of_its_own_does_not_stop_the_others(monkeypatch):
    """Its number belongs to another PID namespace: no process has it here, though the name of the host is the same."""
    host, nobody, watched = fault_tolerance.HOST, 2**22 + 1, []  # above the largest number that Linux gives
    pids = [(0, host, os.getpid()), (1, host, nobody), (2, host, os.getppid())]
    monkeypatch.setattr(fault_tolerance, "RANK", 0)
    monkeypatch.setattr(fault_tolerance, "gather_object", lambda _: pids)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(fault_tolerance.RUN, "woken", None)

    def thread(target, args, daemon):
        watched.append(args[0])
        return SimpleNamespace(start=lambda: None)

    monkeypatch.setattr(fault_tolerance.threading, "Thread", thread)
    fault_tolerance.watch_ranks(None, Namespace(ddp_timeout=1))
    (peers,) = watched
    for descriptor in peers:
        os.close(descriptor)
    assert [*peers.values()] == [(2, os.getppid())]
