# SPDX-License-Identifier: Apache-2.0
"""A lock that a killed build of a DeepSpeed op has left is named before a run waits for it."""

import os
import time
from types import SimpleNamespace

import psutil
import pytest
from accelerate import DistributedType
from torch.utils import cpp_extension

from components import deepspeed_builds
from components.deepspeed_builds import find_locked_builds
from components.strategy_checks import find_strategy_problems
from example_arguments import language_model_arguments
from fakes import fake_accelerator


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
            monkeypatch.setattr(psutil, "process_iter", lambda names: [process])
            zero = {"offload_optimizer": {"device": offload}}
            plugin = SimpleNamespace(zero_stage=2, deepspeed_config={"zero_optimization": zero})
            accelerator = fake_accelerator(
                distributed_type=DistributedType.DEEPSPEED,
                device=SimpleNamespace(type=device),
                state=SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=None, backend="nccl"),
            )
            found = list(find_strategy_problems(language_model_arguments(), accelerator))
            assert found == list(find_locked_builds(accelerator))
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
        assert locked == [f"{deepspeed_builds.build_folder('cpu_adam')}/lock"]
