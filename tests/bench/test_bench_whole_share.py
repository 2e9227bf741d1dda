"""The whole models' saved bytes: one model, at its published depth."""

import re

import pytest

pytest.importorskip("transformers")

from bench.whole_share import WHOLE, main


def test_logits_and_layers_are_gone(capsys):
    main(["llama"])
    row, median = capsys.readouterr().out.splitlines()[1:]
    layers, classes, before, after = map(int, row.split()[1:5])
    assert (layers, classes) == (32, WHOLE["llama"].classes // 16)
    # eager saves the logits of 64 tokens in bfloat16, at least
    assert before * 1024 > 2 * 64 * classes
    assert after < 0.12 * before
    assert re.fullmatch(r"median of 1: \d+\.\d% gone", median)
