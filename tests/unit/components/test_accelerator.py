# SPDX-License-Identifier: Apache-2.0
"""Only one rank of each host shows the progress of loading."""

import datasets
import pytest
from transformers.utils import logging

from components.accelerator import hide_progress_bars


@pytest.fixture
def shown():
    """Progress is shown, before the test and after it."""
    logging.enable_progress_bar()
    datasets.enable_progress_bars()
    yield
    logging.enable_progress_bar()
    datasets.enable_progress_bars()


def test_a_rank_that_hides_them_shows_no_bar_of_transformers_or_datasets(shown):
    assert logging.is_progress_bar_enabled() and datasets.are_progress_bars_disabled() is False
    hide_progress_bars()
    assert not logging.is_progress_bar_enabled() and datasets.are_progress_bars_disabled()
