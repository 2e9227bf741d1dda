"""What a test process does after a kernel broke its device: it ends, for another to go on."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch


def end_if_broken(
    item: pytest.Item, synchronize: Callable[[], Any] = torch.cuda.synchronize
) -> None:
    """Wait for the device, and end this process if that raises: no later test could pass.

    Under pytest-xdist another process goes on with the tests that are left, and this one is
    reported as crashed; without it the run stops.
    """
    try:
        synchronize()
    except RuntimeError as error:
        message = f"{item.nodeid} broke the device: {error}"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(message, returncode=1)
        capture: Any = item.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(message, file=sys.__stderr__, flush=True)
        os._exit(1)
