"""The recipe tells what accelerate runs from what the launcher was asked for, for every form that FSDP's keys take."""

import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils import cpp_extension

import llama
import preflight
from fakes import fake_accelerator
from whole_state import strategy_in_force

# What `accelerate launch` exports where the YAML is silent (accelerate 1.15, utils/launch.py)
LAUNCHER = {
    "ACCELERATE_USE_FSDP": "true",
    "WORLD_SIZE": "4",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SYNC_MODULE_STATES": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


def accelerator_of(
    monkeypatch, version, strategy, reshard, replicas=1, processes=4, gpus_per_host=2
):
    """An Accelerator whose plugin is accelerate's own, made from the environment."""
    monkeypatch.setattr(torch.cpu, "device_count", lambda: gpus_per_host)
    changes = {
        "FSDP_VERSION": str(version),
        "FSDP_SHARDING_STRATEGY": strategy,
        "FSDP_RESHARD_AFTER_FORWARD": reshard,
    }
    for name, value in (LAUNCHER | changes).items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(), backend="gloo")
    mesh = SimpleNamespace(dp_replicate_size=replicas) if replicas > 1 else None
    return SimpleNamespace(
        distributed_type=DistributedType.FSDP,
        state=state,
        parallelism_config=mesh,
        num_processes=processes,
        device=SimpleNamespace(type="cpu"),
    )


def problems(monkeypatch, *strategy, **setting):
    """check_strategy's answer for such an Accelerator."""
    accelerator = accelerator_of(monkeypatch, *strategy, **setting)
    found = preflight.check_strategy(accelerator, strategy_in_force(accelerator))
    return [problem for broken, problem in found if broken]


@pytest.mark.parametrize(
    ("version", "strategy", "reshard", "replicas"),
    [
        *(
            (1, strategy, "true", 1)
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
        ),
        (1, "FULL_SHARD", "full_shard", 1),  # as `accelerate config` writes it
        (1, "NO_SHARD", "no_shard", 1),
        (2, "FULL_SHARD", "true", 1),
        (2, "FULL_SHARD", "false", 1),
        (2, "SHARD_GRAD_OP", "false", 1),
        (2, "1", "true", 1),
        (2, "FULL_SHARD", "true", 2),
        (2, "HYBRID_SHARD", "true", 2),
        (2, "FULL_SHARD", "false", 2),
    ],
)
def test_what_is_run_as_asked_is_accepted(version, strategy, reshard, replicas, monkeypatch):
    assert problems(monkeypatch, version, strategy, reshard, replicas) == []


@pytest.mark.parametrize(
    ("version", "strategy", "reshard", "runs"),
    [
        (1, "FULL_SHARD", "no_shard", "FSDP1 FULL_SHARD"),
        (1, "FULL_SHARD", "shard_grad_op", "FSDP1 FULL_SHARD"),
        (1, "FULL_SHARD", "false", "FSDP1 FULL_SHARD"),
        (2, "NO_SHARD", "true", "FSDP2 FULL_SHARD"),
        (2, "SHARD_GRAD_OP", "true", "FSDP2 FULL_SHARD"),
        (2, "HYBRID_SHARD", "true", "FSDP2 FULL_SHARD"),
    ],
)
def test_what_has_no_effect_is_refused(version, strategy, reshard, runs, monkeypatch):
    found = problems(monkeypatch, version, strategy, reshard)
    assert (
        len(found) == 1
        and f"has no effect, accelerate runs {runs}" in found[0]
        and "check_config.py" in found[0]
    )


@pytest.mark.parametrize(
    ("strategy", "state", "says"),
    [
        (("DeepSpeed ZeRO-3", 0, 3), {"zero_optimization": {}}, "set zero3_save_16bit_model: true"),
        (
            ("DeepSpeed ZeRO-2", 0, 2),
            {"gradient_accumulation_steps": 4},
            "command line owns gradient_accumulation_steps",
        ),
        (
            ("DeepSpeed ZeRO-2", 0, 2),
            {"gradient_clipping": 1.0},
            "command line owns gradient_clipping",
        ),
        (("FSDP1 FULL_SHARD", 1, -1), None, "trains nothing"),
    ],
)
def test_what_a_config_file_would_be_refused_for_is_refused_without_one_too(
    strategy, state, says, monkeypatch
):
    # under torchrun, with what accelerate reads from the environment: launch_command.py finds no file there
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    zero = None if state is None else SimpleNamespace(deepspeed_config=state)
    plugins = SimpleNamespace(
        deepspeed_plugin=zero, fsdp_plugin=SimpleNamespace(use_orig_params=False)
    )
    accelerator = fake_accelerator(state=plugins)
    found = preflight.rules_of_strategy(llama.parse_args(), accelerator, strategy)
    assert [says in problem for broken, problem in found if broken] == [True]


def test_fewer_processes_than_asked_for_are_refused(monkeypatch):
    assert "asked for more" in problems(monkeypatch, 2, "FULL_SHARD", "true", processes=1)[0]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_fsdp1_over_one_rank_is_told_as_the_no_shard_that_torch_makes_of_it(strategy, monkeypatch):
    accelerator = accelerator_of(monkeypatch, 1, strategy, "true", processes=1, gpus_per_host=1)
    assert strategy_in_force(accelerator)[0] == "FSDP1 NO_SHARD"


def test_a_hybrid_of_hosts_with_one_gpu_each_is_refused(monkeypatch):
    found = problems(monkeypatch, 1, "HYBRID_SHARD", "true", processes=4, gpus_per_host=1)
    assert len(found) == 1 and "neither shard nor average" in found[0]


class TestUnusedGpus:
    """Shipped YAMLs ask for one process: on a host with several GPUs that is said loudly."""

    @pytest.fixture
    def accelerator(self, monkeypatch):
        def accelerator(kind, ranks, here, gpus, replicas=1):
            monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
            plugin = SimpleNamespace(fsdp_version=2, reshard_after_forward=True)
            return SimpleNamespace(
                distributed_type=kind,
                num_processes=ranks,
                device=SimpleNamespace(type="cuda"),
                is_main_process=True,
                state=SimpleNamespace(fsdp_plugin=plugin),
                gradient_state=SimpleNamespace(plugin_kwargs={}),
                parallelism_config=SimpleNamespace(dp_replicate_size=replicas),
                mixed_precision="bf16",
            )

        return accelerator

    @pytest.mark.parametrize(
        ("case", "strategy", "says"),
        [
            (
                (DistributedType.FSDP, 1, 1, 8),
                "FSDP2 FULL_SHARD",
                "1 of 8 GPUs is used, and nothing is sharded: pass --num_processes 8 to accelerate launch",
            ),
            (
                (DistributedType.DEEPSPEED, 1, 1, 4),
                "DeepSpeed ZeRO-3",
                "1 of 4 GPUs is used, and nothing is sharded: pass --num_processes 4 to accelerate launch",
            ),
            (
                (DistributedType.MULTI_GPU, 1, 1, 2),
                "one process",
                "1 of 2 GPUs is used: pass --num_processes 2 to accelerate launch",
            ),
            (
                (DistributedType.MULTI_GPU, 2, 2, 8),
                "DDP",
                "2 of 8 GPUs are used: pass --num_processes 8 to accelerate launch",
            ),
            (
                (DistributedType.FSDP, 8, 4, 8),
                "FSDP2 FULL_SHARD",
                "4 of 8 GPUs are used on each host: pass --num_processes 16 to accelerate launch",
            ),
            (
                (DistributedType.FSDP, 4, 4, 8, 2),
                "FSDP2 HYBRID_SHARD",
                "4 of 8 GPUs are used: pass --num_processes 8 to "
                "accelerate launch and enlarge the mesh in the YAML to match",
            ),
            ((DistributedType.FSDP, 8, 8, 8), "FSDP2 FULL_SHARD", None),
            ((DistributedType.NO, 1, 1, 8), "one process", None),  # single.yaml: asked for one
        ],
    )
    def test_fewer_processes_than_gpus_are_told_with_the_flag(
        self, case, strategy, says, accelerator
    ):
        assert preflight.unused_gpus(accelerator(*case), strategy) == says

    def test_it_heads_the_start_summary(self, accelerator, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(sys, "argv", ["llama.py", "--output_dir", str(tmp_path)])
        model = torch.nn.Linear(1, 1)
        model.config = SimpleNamespace(_attn_implementation="sdpa")
        for gpus, first in (
            (8, "    WARNING: 1 of 8 GPUs is used, and nothing is sharded"),
            (1, "      model: "),
        ):
            fsdp = accelerator(DistributedType.FSDP, 1, 1, gpus)
            facts, told = {"rows_per_step": 1}, {"sample": "a row"}
            preflight.report_start(
                fsdp, llama.parse_args(), model, None, [{}], [[0]], 1, facts, told
            )
            assert capsys.readouterr().out.startswith(first)


class TestStaleLock:
    """A lock of a build that was killed is named, not waited for: torch.utils.file_baton."""

    @pytest.fixture
    def problems_of(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

        def problems_of(minutes, device="cuda", offload="cpu", running="python", op="cpu_adam"):
            (tmp_path / op).mkdir(exist_ok=True)
            lock = tmp_path / op / "lock"
            lock.touch()
            os.utime(lock, (time.time() - 60 * minutes,) * 2)
            process = SimpleNamespace(info={"name": running})
            monkeypatch.setattr(preflight.psutil, "process_iter", lambda names: [process])
            zero = {"offload_optimizer": {"device": offload}}
            plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero})
            accelerator = SimpleNamespace(
                device=SimpleNamespace(type=device), state=SimpleNamespace(deepspeed_plugin=plugin)
            )
            for rules in (
                "rules_of_values",
                "check_strategy",
                "rules_of_strategy",
                "rules_of_device",
            ):
                monkeypatch.setattr(preflight, rules, lambda *_: [])
            monkeypatch.setattr(preflight, "strategy_in_force", lambda _: None)
            found = preflight.find_problems(None, accelerator)
            lock.unlink()
            return found, capsys.readouterr().err

        return problems_of

    @pytest.mark.parametrize("case", [{}, {"offload": "nvme", "op": "async_io"}], ids=str)
    def test_an_old_one_is_refused_and_named(self, case, problems_of, tmp_path):
        (found,), said = problems_of(90, **case)
        op = case.get("op", "cpu_adam")
        assert (
            f"{tmp_path / op / 'lock'}" in found
            and "90 minutes ago" in found
            and "delete that file" in found
        )
        assert said == ""

    @pytest.mark.parametrize(
        "case",
        [
            {"device": "cpu"},
            {"offload": "none"},
            {"running": "cc1plus"},
            {"op": "another_extension"},
        ],
        ids=str,
    )
    def test_one_that_is_not_in_the_way_is_not(self, case, problems_of):
        assert problems_of(90, **case) == ([], "")

    def test_a_young_one_may_be_of_a_build_that_runs_and_is_only_named(self, problems_of, tmp_path):
        found, said = problems_of(1)
        assert (
            found == []
            and said.startswith("warning: ")
            and str(tmp_path / "cpu_adam" / "lock") in said
        )

    def test_it_is_the_folder_that_torch_locks(self, tmp_path, monkeypatch):
        locked = []
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        monkeypatch.setattr(
            cpp_extension, "FileBaton", lambda path, *_, **__: locked.append(path) or 1 / 0
        )
        (tmp_path / "a.cpp").touch()
        with pytest.raises(ZeroDivisionError):
            cpp_extension.load("cpu_adam", [str(tmp_path / "a.cpp")])
        assert locked == [f"{preflight.build_folder('cpu_adam')}/lock"]
