# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests of a run: this process as one that has just started, or as a rank."""

import os
import sys

import pytest

import llama
from core import stop
from core.cli import parse
from core.run import Run


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    return parse(llama.Arguments, words=[])


@pytest.fixture
def start_run(monkeypatch):
    """A run that has begun, which here leaves the signals of this process as they are."""
    monkeypatch.setattr(stop.signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    return Run
