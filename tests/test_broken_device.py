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


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "test_it.py").write_text(TESTS)
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
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_another_process_goes_on(tmp_path):
    pytest.importorskip("xdist")
    code, output = run(tmp_path, "-n", "1")
    assert code == 1
    assert re.search(r"FAILED .*test_that_breaks", output)
    assert "test_that_breaks broke the device: an illegal memory access" in output
    # the test passed before its kernel was waited for, and was then reported as crashed
    assert re.search(r"1 failed, 5 passed", output)


def test_without_xdist_the_run_stops(tmp_path):
    code, output = run(tmp_path, "-p", "no:xdist")
    assert code == 1
    assert "test_that_breaks broke the device: an illegal memory access" in output
    assert "test_after" not in output
