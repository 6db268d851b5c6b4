# SPDX-License-Identifier: Apache-2.0
"""Fixtures of several folders of unit tests."""

import pytest


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Let accelerate see a GPU: FSDP1 asks which one it is on."""
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
