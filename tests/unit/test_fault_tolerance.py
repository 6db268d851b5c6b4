"""Checkpoints in this process: damage is found, foreign files stay, and one is always whole."""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import llama
from components import checkpoint, nonfinite, status, watch
from components.cli import may_change, parse_arguments
from components.ending import end_all_ranks
from components.folder import WRITTEN, find_problem
from components.run import Run
from components.status import HOST, fail, process_status
from components.watch import Watch
from proof import damage

# Arguments that change what is trained on, or how: a run continues with other values only where
# --allow_change names them
UNSAFE = frozenset(
    """
    model_name_or_path dtype load_in_8bit load_in_4bit bnb_4bit_quant_type
    bnb_4bit_use_double_quant use_peft lora_r lora_alpha lora_dropout lora_target_modules
    use_rslora use_dora dataset_name dataset_config dataset_train_split max_length skip_bad_rows
    train_sampling_strategy num_train_epochs max_steps optim learning_rate lr_scheduler_type
    warmup_steps weight_decay max_grad_norm seed packing tf32""".split()
)
UNSAFE_OF = {  # recipe: what it has not of these, and what it has besides
    "llama": ("", ""),
    "llama_dpo": ("packing", "loss_type beta"),
    "mistral_pretrain": (
        "packing train_sampling_strategy",
        "text_column streaming shuffle_buffer_size num_eval_documents max_train_tokens",
    ),
    "mixtral": (
        """packing load_in_8bit load_in_4bit bnb_4bit_quant_type bnb_4bit_use_double_quant
           use_rslora use_dora""",
        "lora_target_parameters router_aux_loss_coef",
    ),
    "t5": (
        "packing max_length",
        """source_column target_column source_lang target_lang source_prefix max_source_length
           max_target_length forced_bos_token""",
    ),
    "bert": ("packing", "text_columns label_column problem_type class_weights"),
    "vit": (
        "packing max_length train_sampling_strategy",
        "image_column_name label_column_name problem_type class_weights augmentation",
    ),
}
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def polled(look, function, *arguments, **options):
    """Call a function, and `look` before each change of the file system in it.

    An audit hook stays, so it is made inert.
    """
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


def set_rank(monkeypatch, rank):
    """Make this process the one of this rank."""
    for module in (status, watch, nonfinite):
        monkeypatch.setattr(module, "RANK", rank)


@pytest.fixture(autouse=True)
def new_process():
    """The status of this process as it is when a process starts, before and after each test."""
    process_status.cache_clear()
    yield
    process_status.cache_clear()


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    return parse_arguments(llama.Arguments, words=[])


class TestDamage:
    @pytest.mark.parametrize(
        "function", [damage.flipped_bits, damage.mutated_manifests], ids=lambda f: f.__name__
    )
    def test_random_changes_are_found(self, function, tmp_path):
        number = 2000 if function is damage.mutated_manifests else 1000
        assert function(damage.make_checkpoint(tmp_path, 5), number) == (number, [])

    def test_cut_and_lost_files_are_found(self, tmp_path):
        assert damage.cut_and_lost_files(damage.make_checkpoint(tmp_path, 5)) == (42, [])

    def test_the_checkpoint_before_a_damaged_one_is_taken(self, tmp_path):
        assert damage.older_one_is_taken(tmp_path / "run") == (3, [])

    def test_without_any_whole_checkpoint_it_refuses(self, tmp_path, capsys):
        (damage.make_checkpoint(tmp_path, 5) / "progress.json").unlink()
        with pytest.raises(SystemExit, match="65"):
            checkpoint.choose_checkpoint(tmp_path, "auto", dry_run=False)
        assert "progress.json" in capsys.readouterr().err and (tmp_path / "checkpoint-5").is_dir()

    @pytest.mark.parametrize("name", checkpoint.FILES)
    def test_a_pickle_with_a_manifest_that_fits_is_not_run(self, name, tmp_path):
        forged, mark = damage.make_checkpoint(tmp_path, 5), tmp_path / "mark"
        damage.forge(forged, name, mark)
        assert checkpoint.find_damage(forged).startswith(name)
        with pytest.raises((SafetensorError, ValueError)):
            (load_file if name == "state.safetensors" else read_json)(forged / name)
        assert not mark.exists()
        torch.load((forged / name).rename(tmp_path / "pickle"), weights_only=False)
        assert mark.exists()  # the pickle was a real one


class TestFolder:
    def test_foreign_files_stay_and_are_not_taken(self, tmp_path):
        assert damage.stray_files(tmp_path / "run")[1] == []

    def test_one_checkpoint_is_whole_at_each_change(self, tmp_path):
        damage.make_checkpoint(tmp_path, 1)
        seen = []

        def look():
            there = checkpoint.checkpoints_in(tmp_path).values()
            seen.append(sum(checkpoint.find_damage(path) is None for path in there))

        for step in range(2, 6):
            polled(look, damage.make_checkpoint, tmp_path, step, limit=1)
        assert len(seen) > 40 and min(seen) == 1, seen
        assert list(checkpoint.checkpoints_in(tmp_path)) == [5]

    def test_hashing_costs_at_most_a_tenth_of_a_save(self, tmp_path):
        shares = (damage.share_of_hashing(tmp_path, 20_000_000) for _ in range(3))
        assert any(share <= 0.1 for share in shares)  # beside other work one may take longer


def test_a_run_that_began_elsewhere_goes_on_from_its_own_checkpoints(tmp_path):
    before, own = damage.make_checkpoint(tmp_path / "before", 100), tmp_path / "own"
    assert checkpoint.choose_checkpoint(own, str(before), dry_run=False) == before
    newer = damage.make_checkpoint(own, 120)
    assert checkpoint.choose_checkpoint(own, str(before), dry_run=False) == newer
    (newer / "progress.json").unlink()
    # The damaged one is set aside
    assert checkpoint.choose_checkpoint(own, str(before), dry_run=False) == before
    assert len(list(own.glob("checkpoint-120.damaged-*"))) == 1


def alone(ranks):
    """What a run asks of an Accelerator before its first step, on rank 0 of so many."""
    return SimpleNamespace(
        num_processes=ranks,
        print=print,
        is_main_process=True,
        wait_for_everyone=lambda: None,
        end_training=lambda: None,
    )


@pytest.fixture
def start_run(monkeypatch):
    """A run that has begun, which here leaves the signals of this process as they are."""
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(watch.signal, "set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    return Run


FACTS = {"rows_per_step": 8, "data": "abc"}


@pytest.fixture
def resumed(start_run, arguments, tmp_path):
    """A function from step, arguments of the checkpoint's run, and ranks to a resumed run."""

    def resumed(step, before, ranks=1):
        if arguments.output_dir == "runs/llama":
            arguments.output_dir = str(tmp_path)
        run = start_run(arguments)
        run._accelerator = alone(ranks)
        run._checkpoint = tmp_path / f"checkpoint-{step}"
        run._restored = {"step": step, "arguments": before}
        run.step = step
        return run

    return resumed


class TestChanges:
    @pytest.mark.parametrize("recipe", UNSAFE_OF)
    def test_each_argument_is_in_one_class(self, recipe):
        without, besides = UNSAFE_OF[recipe]
        kind = importlib.import_module(recipe).Arguments
        known = {field.name for field in dataclasses.fields(kind)}
        unsafe = UNSAFE - set(without.split()) | set(besides.split())
        assert known - may_change(kind) == unsafe and may_change(kind) <= known

    @pytest.mark.parametrize("name", sorted(UNSAFE | {"data"}))
    def test_what_changes_the_run_is_refused(self, name, arguments, resumed, capsys):
        run = resumed(3, vars(arguments) | FACTS | {name: "another"})
        with pytest.raises(SystemExit, match="64"):
            run.check_plan(9, **FACTS)
        assert f"--allow_change {name}" in capsys.readouterr().err
        arguments.allow_change = [name]
        run.check_plan(9, **FACTS)

    def test_the_rest_may_change(self, arguments, resumed):
        before = vars(arguments) | FACTS | dict.fromkeys(may_change(type(arguments)), "another")
        resumed(3, before).check_plan(9, **FACTS)

    @pytest.mark.parametrize(
        ("ranks", "fix"),
        [
            (1, "_size 8 --gradient_accumulation_steps 3"),
            (5, "divides 24"),
            (3, "_size 8 --gradient_accumulation_steps 1"),
        ],
    )
    def test_other_rows_a_step_are_refused_with_what_fits(
        self, ranks, fix, arguments, resumed, capsys
    ):
        run = resumed(3, vars(arguments) | {"rows_per_step": 24, "data": "abc"}, ranks)
        with pytest.raises(SystemExit, match="64"):
            run.check_plan(9, rows_per_step=7, data="abc")
        assert fix in capsys.readouterr().err


def test_a_full_disk_does_not_hide_how_the_run_ended(tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, os.strerror(28))

    process_status().open(tmp_path)
    monkeypatch.setattr(status, "write_file", full)
    with pytest.raises(SystemExit, match="73"):
        fail(73, "no room")


@pytest.mark.parametrize(
    "words",
    [
        ["--output_dir", "FOLDER"],
        ["--output_dir=FOLDER"],
        [
            "--output_dir",
            "FOLDER/first",
            "--output_dir",
            "FOLDER",
        ],  # of several argparse takes the last
        ["--output_dir=FOLDER/first", "--seed", "1", "--output_dir=FOLDER"],
    ],
    ids=str,
)
def test_a_wrong_call_is_recorded_where_its_run_would_have_been(words, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["llama.py", *(word.replace("FOLDER", str(tmp_path)) for word in words), "--sed"],
    )
    with pytest.raises(SystemExit) as ended:
        fail(64, "no such argument: --sed")
    assert ended.value.code == 64
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["exit_code"], status["why"]) == (
        "failed",
        64,
        "no such argument: --sed",
    )


def test_a_wrong_call_leaves_the_status_of_a_run_that_is_going_on(tmp_path, monkeypatch):
    running = {"state": "running", "host": HOST, "process": os.getppid()}
    (tmp_path / "status.json").write_text(json.dumps(running))
    monkeypatch.setattr(sys, "argv", ["llama.py", "--output_dir", str(tmp_path), "--sed"])
    with pytest.raises(SystemExit):
        fail(64, "no such argument: --sed")
    assert read_json(tmp_path / "status.json") == running
    monkeypatch.setattr(psutil, "pid_exists", lambda process: False)  # it was killed
    process_status.cache_clear()
    with pytest.raises(SystemExit):
        fail(64, "no such argument: --sed")
    assert read_json(tmp_path / "status.json")["state"] == "failed"


def test_a_wrong_dry_run_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["llama.py", "--output_dir", str(tmp_path), "--dry_run", "--sed"]
    )
    with pytest.raises(SystemExit):
        fail(64, "no such argument: --sed")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_in_a_container_of_its_own_does_not_stop_the_others(monkeypatch):
    """No process has its number here, where the host has the same name: another PID namespace."""
    nobody = 2**22 + 1  # above the largest number that Linux gives
    pids = [(0, HOST, os.getpid()), (1, HOST, nobody), (2, HOST, os.getppid())]
    set_rank(monkeypatch, 0)
    monkeypatch.setattr(watch, "gather_object", lambda _: pids)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    started = []
    thread = SimpleNamespace(start=lambda: started.append(True))
    monkeypatch.setattr(watch.threading, "Thread", lambda **_: thread)
    ours = Watch("runs/llama")
    ours.join(alone(3), timeout=1)
    assert started == [True]
    for descriptor in ours.peers:
        os.close(descriptor)
    assert [*ours.peers.values()] == [(2, os.getppid())]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run's folder, as at the start of a process of rank 0 outside of torchrun."""
    process_status().output_dir = tmp_path
    process_status().is_open = True
    set_rank(monkeypatch, 0)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return tmp_path


@pytest.fixture
def errors(tmp_path, monkeypatch):
    """A function that makes this process a rank of torchrun, and returns the file it reads then."""

    def file_of(rank):
        path = tmp_path / "attempt_0" / str(rank) / "error.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        set_rank(monkeypatch, rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        return path

    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    return file_of


class Exit(BaseException):
    """What os._exit raises here instead."""


@pytest.fixture
def exits(monkeypatch):
    """The codes with which the process would have ended at once."""
    codes = []

    def record(code):
        codes.append(code)
        raise Exit

    monkeypatch.setattr(os, "_exit", record)
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    return codes


class TestFinishedRun:
    DONE = {"state": "done", "exit_code": 0, "why": None, "step": 9}

    @pytest.fixture(autouse=True)
    def done(self, folder):
        (folder / "status.json").write_text(json.dumps(self.DONE))

    def test_a_refused_or_failed_call_leaves_it_done_and_is_recorded_beside_that(
        self, folder, capsys
    ):
        with pytest.raises(SystemExit, match="64"):
            end_all_ranks(alone(1), 64, "other values of max_steps")
        status = read_json(folder / "status.json")
        assert status.items() >= self.DONE.items()
        assert (
            status["later_call"]["exit_code"] == 64
            and status["later_call"]["why"] == "other values of max_steps"
        )
        process_status().state = "starting"
        process_status().set("failed", 70, "a later one")  # of another rank: the first counts
        assert read_json(folder / "status.json")["later_call"]["exit_code"] == 64

    def test_a_wrong_flag_does_not_count_against_it(self, folder, monkeypatch):
        for code in (64, 65):  # the newest one is told
            process_status.cache_clear()
            monkeypatch.setattr(sys, "argv", ["llama.py", "--output_dir", str(folder)])
            with pytest.raises(SystemExit):
                fail(code, "no such argument")
            status = read_json(folder / "status.json")
            assert status["state"] == "done" and status["later_call"]["exit_code"] == code

    def test_a_call_that_starts_forgets_what_the_one_before_met(self, folder, arguments, start_run):
        process_status().set("failed", 64, "wrong")
        process_status().state = "starting"
        arguments.output_dir = str(folder)
        start_run(arguments)
        assert read_json(folder / "status.json") == self.DONE

    def test_once_it_trains_again_it_is_no_longer_done(self, folder):
        process_status().set("running")
        process_status().set("failed", 70, "not finite")
        status = read_json(folder / "status.json")
        assert status["state"] == "failed" and "later_call" not in status

    @pytest.mark.parametrize("name", ["model.safetensors", "adapter_model.safetensors"])
    @pytest.mark.parametrize(
        ("flags", "further"),
        [
            ({"max_steps": 9}, "max_steps"),
            ({}, "num_train_epochs"),
            ({"max_train_tokens": 1e7, "num_train_epochs": None}, "max_train_tokens"),
            ({"max_train_tokens": 1e7, "num_train_epochs": 2}, "num_train_epochs"),
        ],
    )
    def test_with_no_step_left_it_says_so_and_how_to_go_on(
        self, name, flags, further, folder, arguments, resumed, capsys
    ):
        vars(arguments).update({"output_dir": str(folder)} | flags)
        (folder / name).touch()
        with pytest.raises(SystemExit) as ended:
            resumed(9, vars(arguments) | FACTS).check_plan(9, **FACTS)
        assert ended.value.code in (0, None)
        said = capsys.readouterr().out
        assert (
            said.startswith("Nothing is left to do: all 9 steps are done")
            and len(said.splitlines()) == 1
        )
        assert f"larger --{further} and --allow_change {further};" in said
        assert read_json(folder / "status.json") == self.DONE

    def test_with_steps_left_or_without_its_result_it_goes_on(self, folder, arguments, resumed):
        arguments.output_dir = str(folder)
        run = resumed(9, vars(arguments) | FACTS)
        (folder / "config.json").touch()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
        run.check_plan(9, **FACTS)  # a damaged index is written again
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-1.safetensors"}}'
        )
        run.check_plan(9, **FACTS)  # its weights are gone
        (folder / "model-1.safetensors").touch()
        run.check_plan(10, **FACTS)
        (folder / "status.json").write_text(
            '{"state": "running"}'
        )  # killed while it wrote the model
        run.check_plan(9, **FACTS)


class TestLastWords:
    """What torchrun prints last, and what the other ranks know of a rank that has ended."""

    def launchers_report(self, path):
        failure = ProcessFailure(local_rank=0, pid=7, exitcode=64, error_file=str(path))
        return ChildFailedError("llama.py", {0: failure}).format_msg()

    def test_the_launchers_report_ends_with_the_reason(self, folder, errors, capsys):
        path = errors(0)
        with pytest.raises(SystemExit, match="64"):
            fail(64, "--learning_rate -1.0: must be above 0", "--lora_r 0: must be above 0")
        *_, first, second, border = self.launchers_report(path).splitlines()
        assert first == "  traceback : error: --learning_rate -1.0: must be above 0"
        assert second.strip() == "error: --lora_r 0: must be above 0" and set(border) == {"="}

    def test_so_it_does_after_a_stop_and_after_an_exception(self, folder, errors, exits, capsys):
        path = errors(0)
        with pytest.raises(SystemExit, match="75"):
            end_all_ranks(alone(1), 75, "Stopped and saved after step 3 of 9")
        assert "traceback : Stopped and saved after step 3 of 9\n" in self.launchers_report(path)
        path = errors(1)
        process_status().state = "starting"
        path.parent.parent.joinpath("0", "error.json").unlink()
        with pytest.raises(Exit):
            Watch(str(folder)).on_exception(ValueError, ValueError("odd"), None)
        assert exits == [1] and "traceback : error: ValueError: odd\n" in self.launchers_report(
            path
        )

    def test_what_an_earlier_run_told_is_not_of_this_one(self, folder):
        failed = {"state": "failed", "exit_code": 70, "time": "2026-01-01 00:00:00"}
        (folder / "status.json").write_text(json.dumps(failed))
        process_status().began = "2026-01-01 00:00:01"
        assert process_status().told_by_others() == {}
        process_status().began = "2026-01-01 00:00:00"
        assert process_status().told_by_others() == failed

    @pytest.mark.parametrize("there_is_a_folder", [True, False])
    def test_a_rank_that_is_ended_after_another_has_failed_says_nothing(
        self, there_is_a_folder, folder, errors, exits, capsys
    ):
        if not there_is_a_folder:
            process_status().output_dir = folder / "none"
        errors(0)
        with pytest.raises(SystemExit):
            fail(64, "no such argument")
        path = errors(1)
        process_status().state = "starting"
        capsys.readouterr()
        with pytest.raises(Exit):
            Watch(str(folder)).on_signal(signal.SIGTERM, None)
        assert exits == [64] and capsys.readouterr() == ("", "")
        failures = {rank: ProcessFailure(rank, 7, 64, str(errors(rank))) for rank in (1, 0)}
        others, root = ChildFailedError("llama.py", failures).format_msg().split("Root Cause")
        assert "traceback : error: no such argument\n" in root and path.exists()
        assert "traceback : ended by the launcher, since another rank had ended\n" in others
        if there_is_a_folder:
            assert read_json(folder / "status.json")["exit_code"] == 64

    @pytest.mark.parametrize("killed", [True, False])
    def test_after_a_rank_that_was_killed_it_does_not_say_to_repeat_the_call(
        self, killed, folder, errors, exits, capsys
    ):
        errors(0)
        peer = subprocess.Popen(["sleep", "60"])
        ours = Watch(str(folder))
        ours.peers = {os.pidfd_open(peer.pid): (1, peer.pid)}
        if killed:
            peer.kill()
            peer.wait()
        with pytest.raises(Exit):
            ours.on_signal(signal.SIGTERM, None)
        said = capsys.readouterr()
        peer.kill()
        assert exits == [1 if killed else 75] and ("run the same command" in said.out) != killed
        assert (f"error: rank 1 (process {peer.pid}) is gone" in said.err) == killed

    def test_a_rank_that_is_ended_by_a_person_names_the_signal(self, folder, errors, exits, capsys):
        path = errors(0)
        with pytest.raises(Exit):
            Watch(str(folder)).on_signal(signal.SIGTERM, None)
        says = "Stopped by SIGTERM before the first step: run the same command again"
        assert exits == [75] and capsys.readouterr().out == says + "\n"
        assert f"traceback : {says}\n" in self.launchers_report(path)


class TestOutputFolder:
    @pytest.fixture
    def problem(self, arguments, start_run, monkeypatch, capsys):
        """A function from an output folder to the exit code and the message."""
        monkeypatch.setattr(Watch, "join", lambda *_: None)

        def problem(folder):
            arguments.output_dir = str(folder)
            with pytest.raises(SystemExit) as ended:
                start_run(arguments).join(alone(1))
            return ended.value.code, capsys.readouterr().err

        return problem

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("file/run", "Not a directory"),
            ("/sys/run", ""),
            ("/proc/nope/x", "No such file or directory"),
            ("n" * 300, "File name too long"),
            ("link", "is a link to nowhere, which is not there"),
            ("circle/run", "symbolic links"),
            ("/sys/kernel", "cannot write to /sys/kernel: "),
        ],
        ids=lambda value: value[:9],
    )
    def test_one_that_cannot_be_is_one_line_and_73(self, name, words, folder, problem, tmp_path):
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to("nowhere")
        (tmp_path / "circle").symlink_to("circle")
        path = tmp_path / name
        process_status.cache_clear()
        code, said = problem(path)
        assert (
            code == 73
            and said.startswith(f"error: --output_dir {path}: ")
            and len(said.splitlines()) == 1
        )
        assert words in said

    @pytest.mark.parametrize("name", WRITTEN)
    def test_a_folder_in_the_place_of_a_file_is_found_at_the_start(self, name, folder, problem):
        (folder / name).mkdir()
        code, said = problem(folder)
        assert code == 73 and f"cannot write to {folder / name}: Is a directory" in said

    def test_what_is_there_stays_as_it_is(self, folder):
        (folder / "metrics.jsonl").write_text("{}\n")
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert find_problem(folder, dry_run=False) is None
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    def test_a_dry_run_makes_no_folder_and_looks_at_the_one_above(
        self, tmp_path, arguments, problem
    ):
        arguments.dry_run = True
        assert find_problem(tmp_path / "not" / "there", dry_run=True) is None
        assert list(tmp_path.iterdir()) == []
        code, said = problem("/sys/kernel/run/one")
        assert code == 73 and "cannot write to /sys/kernel: " in said

    @pytest.mark.parametrize(("path", "code"), [("run/metrics.jsonl", 73), ("rows.jsonl", 1)])
    def test_an_error_of_a_file_in_it_is_73_later_too(self, path, code, folder, exits, capsys):
        error = IsADirectoryError(21, "Is a directory", str(folder / path))
        with pytest.raises(Exit):
            Watch(str(folder / "run")).on_exception(IsADirectoryError, error, None)
        told = capsys.readouterr().err.startswith("error: cannot read or write: ")
        assert exits == [code] and told == (code == 73)
