# SPDX-License-Identifier: Apache-2.0
"""Whether the hub can be reached, asked once: the libraries try again for a minute and more."""

from pathlib import Path

from datasets import config
from huggingface_hub import constants
from huggingface_hub.utils import get_session

from exits import Exit, first_line, stop
from hub_ids import is_in_cache

TIMEOUT = 10  # seconds


def refuse_without_hub(name: str) -> None:
    """End with 69 if a model is not here, was not loaded before, and the hub is out of reach."""
    reason = why_not_from_hub(name)
    if reason is not None:
        stop(Exit.NO_HUB, f"{name}: no such folder, and {reason}")


def why_not_from_hub(name: str, kind: str = "model") -> str | None:
    """Return why something can neither be read here nor loaded from the hub; None if it may be.

    With HF_HUB_OFFLINE the libraries do not try, and say so themselves.

    Args:
        kind: "model" or "dataset".
    """
    if constants.is_offline_mode() or Path(name).exists() or was_loaded(name, kind):
        return None
    reason = why_out_of_reach()
    if reason is None:
        return None
    return f"{constants.ENDPOINT} cannot be reached: {reason}"


def was_loaded(name: str, kind: str) -> bool:
    """Return whether a model or a data set of the hub may be in a cache of this machine."""
    if is_in_cache(name, kind):
        return True
    return kind == "dataset" and Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).exists()


def why_out_of_reach() -> str | None:
    """Return why one request to the hub fails, or None if it is answered, in whatever way."""
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as error:  # Network, proxy and certificates have errors of their own
        return first_line(error)
    return None
