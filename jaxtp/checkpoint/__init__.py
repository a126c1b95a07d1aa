"""Saves, restores, inspects, verifies and compares checkpoints.

They are Orbax checkpoints, and can be restored on any mesh.
"""

import logging
import sys
import warnings


def silence_orbax() -> None:
    """Silences deprecations, Orbax's warnings, and messages about unawaited TensorStore futures.

    jaxtp's own errors report damage.
    """
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|grain|flax")
    for library in ("absl", "asyncio"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        is_read = "_read_array_index_and_device_put" in repr(unraisable.object)
        if not is_read and "Event loop is closed" not in str(unraisable.exc_value):
            default_hook(unraisable)

    sys.unraisablehook = hook
