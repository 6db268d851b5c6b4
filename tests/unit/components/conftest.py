# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests of a run: this process as one that has just started, or as a rank."""

import os
import sys

import pytest

import llama
from components import status, watch
from components.cli import parse_arguments
from components.run import Run
from components.status import process_status
from fakes import Exit


@pytest.fixture
def new_process():
    """The status of this process as it is when a process starts, before and after each test."""
    process_status.cache_clear()
    yield
    process_status.cache_clear()


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    return parse_arguments(llama.Arguments, words=[])


@pytest.fixture
def start_run(monkeypatch):
    """A run that has begun, which here leaves the signals of this process as they are."""
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(watch.signal, "set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    return Run


@pytest.fixture
def folder(new_process, tmp_path, monkeypatch):
    """A run's folder, as at the start of a process of rank 0 outside of torchrun."""
    process_status().output_dir = tmp_path
    process_status().is_open = True
    for module in (status, watch):
        monkeypatch.setattr(module, "RANK", 0)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return tmp_path


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
