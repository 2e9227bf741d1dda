"""CONTRIBUTING.md is true: its flows run as they are listed, its folders and files exist."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import SwiGLU

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def norm() -> Callable[[], torch.Tensor]:
    module, x = fusedckpt.RMSNorm(8), torch.randn(4, 8, requires_grad=True)
    return lambda: module(x)


def checkpointed_mlp() -> Callable[[], torch.Tensor]:
    module, x = SwiGLU(8, 16), torch.randn(4, 8, requires_grad=True)
    fusedckpt.fuse(module)
    return lambda: fusedckpt.checkpoint(module, x)


def recipes() -> Callable[[], torch.Tensor]:
    layers = nn.Conv2d(1, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1)
    net, x = nn.Sequential(*layers), torch.randn(8, 1, 64, 64)
    fusedckpt.fuse(net, recompute_elementwise=True)
    return lambda: net(x)


FLOWS = {
    "A norm": norm,
    "A swapped MLP in a checkpoint": checkpointed_mlp,
    "A step with recipes": recipes,
}


def calls_in(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the file and name of each function of the library that `run` calls, in order."""
    calls = []

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_file() and file.resolve().is_relative_to(ROOT):
            path = file.resolve().relative_to(ROOT).as_posix().removeprefix("fusedckpt/")
            calls.append((path, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("title", FLOWS)
def test_flows_run_as_listed(title):
    text = PAGE.partition(f"**{title}**")[2].partition("\n\n**")[0].partition("\n## ")[0]
    listed = re.findall(r"`([\w/]+\.py):(?:\w+\.)?(\w+)`", text)
    assert len(listed) > 8
    with forced_path("aten"):
        forward = FLOWS[title]()
        forward().sum().backward()
        calls = iter(calls_in(lambda: forward().sum().backward()))
    assert [call for call in listed if call not in calls] == []


def test_layout_has_every_folder_and_file():
    table = PAGE.partition("| folder or file |")[2].partition("\n\n")[0]
    listed = {*re.findall(r"`(fusedckpt/[\w./]+)`", table)}
    package = [path for path in (ROOT / "fusedckpt").iterdir() if path.name[:2] != "__"]
    expected = {f"fusedckpt/{p.name}/" for p in package if p.is_dir() and not p.is_symlink()}
    expected |= {f"fusedckpt/{p.name}" for p in package if p.suffix == ".py"}
    assert listed == {*expected, "fusedckpt/__main__.py"}


def test_files_of_the_page_exist():
    paths = re.findall(r"`((?:tests|bench|fusedckpt|kernels)/[\w/]+\.\w+)`", PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).is_file()] == []
