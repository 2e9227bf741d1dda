"""`.ci/gpu`: its commands exist, outcomes survive, and one archive has it all."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench.__main__ import import_module
from bench.options import Options

ROOT = Path(__file__).parents[2]
# in place of python: notes its arguments, and does what BEHAVIOUR says of a step
FAKE = """#!/bin/bash
[ "$1" = -c ] && exit 0
echo "$*" >> "$NOTES"
echo "commit $FUSEDCKPT_COMMIT"
case "$*" in *"$SLOW"*) sleep 60 ;; *"$BAD"*) echo "tests/x.py::test_y FAILED"; exit 1 ;; esac
"""


@pytest.fixture
def ask(tmp_path):
    """Run the script with another python; returns its status, output and the commands it gave."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "python").write_text(FAKE)
    (binaries / "python").chmod(0o755)

    def run(*options: str, slow: str = "none of them", bad: str = "none of them"):
        notes = tmp_path / "notes"
        notes.write_text("")
        names = {"NOTES": str(notes), "SLOW": slow, "BAD": bad, "FUSEDCKPT_COMMIT": "0123abc"}
        environment = os.environ | names | {"PATH": f"{binaries}:{os.environ['PATH']}"}
        command = [str(ROOT / ".ci/gpu"), "--out", str(tmp_path / "out"), *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr, notes.read_text().splitlines()

    return run


@pytest.mark.parametrize("toys", [(), ("--toys",)])
def test_the_steps_are_commands_that_exist(ask, toys):
    status, said, commands = ask(*toys)
    assert status == 0, said
    parsed = []
    for command in commands:
        words = command.split()
        if words[:3] == ["-m", "bench", "run"]:
            run = import_module("bench.run")
            parser = Options("run", "", "cuda")
            run.options(parser)
            parsed.append(run.prepare(parser.parse_args(words[3:])))
        elif words[:2] == ["-m", "pytest"]:
            files = [word.rpartition("=")[2] for word in words if word.endswith(".py")]
            assert files
            assert all((ROOT / file).exists() for file in files)
            assert {"-v", "--maxfail=200"} <= {*words}
        else:
            assert words == ["-m", "fusedckpt"]
    assert sum(bool(chosen.memory) for chosen in parsed) == 1
    assert sum(chosen.profile for chosen in parsed) == 1
    assert sum(chosen.no_graphs for chosen in parsed) == 1
    # compilers take part once, at the end
    compiled = [chosen for chosen in parsed if "compile" not in (*chosen.skip, *chosen.only)]
    assert len([chosen for chosen in compiled if not chosen.profile]) == (0 if toys else 1)


def test_the_first_part_asks_for_what_is_new_before_what_is_known(ask):
    _, _, commands = ask("--part", "1")
    numbers = next(command for command in commands if "bench run" in command)
    cases = [word.partition("=")[2] for word in numbers.split() if word.startswith("--case=")]
    assert cases[:4] == ["head", "attention", "stack", "experts"]
    assert {*cases} == {*import_module("bench.cases").CASES}
    (tests,) = (command for command in commands if "-m pytest" in command)
    for name in ("codes", "experts", "head", "dropout"):
        assert f"test_{name}.py" in tests


def test_outcomes_survive_and_one_archive_has_them_all(ask, tmp_path):
    options = ("--toys", "--part", "1")
    status, said, commands = ask(*options, bad="-m pytest")
    assert (status, len(commands)) == (1, 3)
    assert "tests/x.py::test_y FAILED" in said
    with tarfile.open(tmp_path / "out.tar.gz") as file:
        names = {Path(name).name for name in file.getnames()}
        log = file.extractfile("./numbers.log").read()
    assert {"env.log", "numbers.log", "kernel-tests.log", "0123abc.steps"} <= names
    assert log == b"commit 0123abc\n"
    # what ended is not taken again, what did not is
    status, said, commands = ask(*options)
    assert (status, len(commands)) == (1, 0)
    assert "kernel-tests failed: status 1" in said
    assert "in an earlier call" in said


def test_a_step_ends_with_its_time(ask):
    status, said, _ = ask("--part", "1", "--minutes", "1", slow="-m fusedckpt")
    assert status == 1
    assert "env unfinished: status 124 after " in said
    status, said, commands = ask("--part", "1", "--minutes", "1")
    assert (status, commands) == (0, ["-m fusedckpt"])


def test_bad_options_end_in_one_line(ask):
    for options, message in ((("--part", "4"), "--part expects 1, 2 or 3"), (("x",), "usage: ")):
        status, said, commands = ask(*options)
        assert (status, commands) == (2, [])
        assert message in said
