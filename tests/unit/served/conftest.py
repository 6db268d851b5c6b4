# SPDX-License-Identifier: Apache-2.0
"""A server to be asked."""

import pytest

from chat_server import serving


@pytest.fixture
def stand_in():
    with serving() as server:
        yield server
