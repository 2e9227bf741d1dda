"""A kernel that breaks the device fails the test that launched it, and no other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest
from broken_device import end_if_broken

broken = False

def synchronize():
    if broken:
        raise RuntimeError("an illegal memory access was encountered")

@pytest.fixture(autouse=True)
def unbroken(request):
    yield
    end_if_broken(request.node, synchronize)

def test_before():
    assert not broken

def test_that_breaks():
    global broken
    broken = True

@pytest.mark.parametrize("number", range(3))
def test_after(number):
    assert not broken
"""


@pytest.mark.parametrize("options", [("-n", "1"), ("-p", "no:xdist")], ids=["xdist", "alone"])
def test_another_process_goes_on_or_the_run_stops(options, tmp_path):
    if "-n" in options:
        pytest.importorskip("xdist")
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-v",
        *options,
        "test_it.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 1
    assert "test_that_breaks broke the device: an illegal memory access" in output
    if "-n" in options:
        # the test passed before its kernel was waited for, and was then reported as crashed
        assert re.search(r"FAILED .*test_that_breaks", output)
        assert "1 failed, 5 passed" in output
    else:
        assert "test_after" not in output
