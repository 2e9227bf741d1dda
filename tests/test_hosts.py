"""`.ci/hosts`: its pins are those of the pages, and only a test that ran has passed."""

import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "fusedckpt" / "integrations" / "README.md"


@pytest.fixture
def hosts():
    """Return the program as a module."""
    loader = importlib.machinery.SourceFileLoader("ci_hosts", str(ROOT / ".ci" / "hosts"))
    spec = importlib.util.spec_from_loader("ci_hosts", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_each_library_stands_in_the_table_with_its_tests_and_version(hosts):
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    by_name = {found[1]: row for row in rows if (found := re.search(r"\.ci/hosts (\w+)", row[-1]))}
    assert by_name.keys() == hosts.HOSTS.keys()
    for name, host in hosts.HOSTS.items():
        _, _, tests, tried, _ = by_name[name]
        assert all(f"`{path}`" in tests for path in host.tests)
        pins = dict(pin.split("==") for pin in (*host.alone, *host.packages))
        library = next(pin for pin in pins if name in pin)
        version = re.search(r"[\d.]*\d", tried)
        assert version, name
        assert f"{pins[library]}.".startswith(f"{version[0]}."), (name, tried)


def test_lightning_is_that_of_the_pinned_set(hosts):
    assert set(hosts.HOSTS["lightning"].packages) < {
        *(ROOT / "constraints.txt").read_text().split()
    }


def test_what_pip_cannot_install_is_not_run(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(hosts, "HOSTS", {"absent": hosts.Host(("fusedckpt-absent==1",), ())})
    outcome = hosts.outcome_of("absent", tmp_path)
    assert not outcome.is_failure
    assert re.match("NOT RUN, could not be installed: ERROR: .*fusedckpt-absent", outcome.text)


@pytest.mark.parametrize(
    ("body", "is_failure", "text"),
    [
        ("pass", False, "passed: 1 tests"),
        ("import pytest; pytest.skip()", True, "failed: 1 skipped of 1 tests"),
        ("assert False", True, "failed: 1 failures of 1 tests"),
        (None, True, "failed: "),
    ],
)
def test_only_a_test_that_ran_has_passed(hosts, tmp_path, monkeypatch, body, is_failure, text):
    path = tmp_path / "test_it.py"
    path.write_text(f"def test_it():\n    {body}\n" if body else "")
    monkeypatch.setattr(hosts, "install", lambda *_: "")
    monkeypatch.setattr(hosts, "HOSTS", {"it": hosts.Host((), (str(path),))})
    outcome = hosts.outcome_of("it", tmp_path / "environment")
    assert outcome.is_failure == is_failure
    assert outcome.text.startswith(text)
