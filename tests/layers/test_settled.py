"""A decision is remembered for equal calls: a change of anything that it depends on is seen."""

import pytest
import torch
from support import DEVICE, Watched, randn, saved_bytes
from torch import nn

import fusedckpt
from fusedckpt import ClampedSwiGLU, NormSpec, functional
from fusedckpt.autograd import dispatch
from fusedckpt.blocks import run

D, F, ROWS = 8, 12, 6


def modules():
    norm = fusedckpt.RMSNorm(D)
    return {
        "Linear": fusedckpt.Linear(D, F, activation="gelu"),
        "RMSNorm": fusedckpt.RMSNorm(D),
        "LayerNorm": fusedckpt.LayerNorm(D),
        "MLP": fusedckpt.MLP(D, F, norm=norm, residual=True),
        "GatedMLP": fusedckpt.GatedMLP(D, F),
        "NormLinear": fusedckpt.NormLinear(fusedckpt.LayerNorm(D), nn.Linear(D, F)),
    }


@pytest.fixture(params=list(modules()))
def module(request):
    """A module that was called before, so that its call is remembered."""
    module = modules()[request.param].to(DEVICE)
    first(module(randn(ROWS, D))).sum().backward()
    return module


def first(y):
    return y[0] if isinstance(y, tuple) else y


def node(y):
    return type(first(y).grad_fn).__name__


def test_another_dtype_or_shape(module):
    assert first(module(randn(2, 3, D))).shape[:2] == (2, 3)
    with pytest.raises(ValueError, match=r"must end in|expects 8 input features"):
        module(randn(ROWS, D + 1))
    assert first(module.double()(randn(ROWS, D, dtype=torch.float64))).dtype == torch.float64
    if not isinstance(module, nn.RMSNorm):
        with pytest.raises(TypeError, match="must share a dtype"):
            module(randn(ROWS, D))


def test_autocast_grad_mode_and_frozen_tensors(module):
    # a CPU's autocast leaves norms alone, and a residual is added in its own dtype
    wide = isinstance(module, (nn.RMSNorm, nn.LayerNorm, fusedckpt.MLP))
    for enabled in (True, False):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
            y = first(module(randn(ROWS, D)))
        assert y.dtype == (torch.float32 if wide or not enabled else torch.bfloat16)
    with torch.no_grad():
        assert not first(module(randn(ROWS, D))).requires_grad
    module.requires_grad_(False)
    assert saved_bytes(module, [randn(ROWS, D, requires_grad=False)]) == 0
    assert saved_bytes(module, [randn(ROWS, D)]) > 0


def test_chunks():
    for chunks in (3, 2, None):
        module = fusedckpt.MLP(D, F, chunks=chunks).to(DEVICE)
        assert module(randn(ROWS, D)).grad_fn.call.chunks == (chunks or 1)


def test_chunks_count_what_is_computed_in(monkeypatch):
    """Temporaries of 3 KiB under autocast, which would take 6 in float32."""
    monkeypatch.setattr(run, "CHUNK_BYTES", 3072)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = fusedckpt.MLP(D, F).to(DEVICE)(randn(64, D))
    assert y.grad_fn.call.chunks == 1


def test_true_is_not_one():
    x, w = randn(ROWS, 1), randn(1)
    functional.rms_norm(x, (1,), w, 1.0)
    functional.mlp(x, randn(F, 1), None, randn(1, F), None, norm=NormSpec("rms", w, eps=1.0))
    with pytest.raises(TypeError, match="eps must be a number"):
        functional.rms_norm(x, (1,), w, True)
    with pytest.raises(TypeError, match="normalized_shape must be an integer"):
        functional.rms_norm(x, (True,), w, 1.0)
    with pytest.raises(TypeError, match=r"norm\.eps must be a number"):
        functional.mlp(x, randn(F, 1), None, randn(1, F), None, norm=NormSpec("rms", w, eps=True))
    head = (x, randn(F, 1), torch.zeros(ROWS, dtype=torch.int64, device=DEVICE))
    functional.linear_cross_entropy(*head, scale=1.0)
    with pytest.raises(TypeError, match="scale must be a number"):
        functional.linear_cross_entropy(*head, scale=True)
    index = torch.zeros(ROWS, 1, dtype=torch.int64, device=DEVICE)
    routed = (x, index, randn(ROWS, 1), randn(2, 2 * F, 1), randn(2, 1, F))
    functional.experts(*routed, activation=ClampedSwiGLU(offset=1.0))
    with pytest.raises(TypeError, match=r"activation\.offset must be a number"):
        functional.experts(*routed, activation=ClampedSwiGLU(offset=True))


def test_the_environment(module, monkeypatch):
    ours = node(module(randn(ROWS, D)))
    monkeypatch.setattr(dispatch, "DISABLED", True)
    assert node(module(randn(ROWS, D))) != ours
    monkeypatch.setattr(dispatch, "DISABLED", False)
    assert node(module(randn(ROWS, D))) == ours


def test_whoever_watches_sees_ops(module):
    """Ops are called straight where nothing watches, and only there, in forward and backward."""
    x = randn(ROWS, D)
    for direction in ("forward", "backward", "both"):
        with Watched() if direction != "backward" else torch.enable_grad() as forward:
            y = first(module(x)).sum()
        with Watched() if direction != "forward" else torch.enable_grad() as backward:
            torch.autograd.grad(y, x)
        for mode in (forward, backward):
            assert mode is None or mode.ours()
    with torch.profiler.profile() as profiler:
        first(module(x)).sum().backward()
    names = {event.name for event in profiler.events()}
    assert any(name.startswith("fusedckpt::") and "backward" not in name for name in names)
    assert any(name.startswith("fusedckpt::") and "backward" in name for name in names)
