"""The settings of an engine that accelerate keeps while it is in force."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # upstream.py needs this before any library is imported
    from accelerate import Accelerator


def fsdp_plugin(accelerator: "Accelerator") -> Any:
    """Return accelerate's settings of FSDP, None where it is not in force.

    They are Any, since accelerate annotates what its fields may be given, not what they hold later.
    """
    from accelerate import DistributedType

    if accelerator.distributed_type != DistributedType.FSDP:
        return None
    return accelerator.state.fsdp_plugin
