"""One line in a terminal, nothing elsewhere."""

import io
import sys

import pytest

from fusedckpt.reporting.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("is_wanted", [True, False])
def test_one_line_in_a_terminal(monkeypatch, is_wanted):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with progress("plan", 2, is_wanted) as begin:
        begin("measuring")
        begin("trying")
    clear = "\r\033[K"
    lines = [f"{clear}plan 1/2: measuring", f"{clear}plan 2/2: trying", clear]
    assert stream.getvalue() == ("".join(lines) if is_wanted else "")


def test_nothing_elsewhere(capsys):
    with progress("plan", 2) as begin:
        begin("measuring")
    assert capsys.readouterr() == ("", "")
