# SPDX-License-Identifier: Apache-2.0
"""The mark of a test that shows the harm for which there is a workaround."""

import pytest


def shows_harm_without(name):
    """Run a test without a workaround and with it; its argument `cured` says which.

    Without it the test must find the harm in the library as it is installed, and with it none.
    Where the first fails and the second passes, the library is fixed and the workaround goes.

    Args:
        name: of the workaround.
    """

    def mark(test):
        both = pytest.mark.parametrize("cured", [False, True], ids=["without", "with"])
        return pytest.mark.workaround(name)(both(test))

    return mark
