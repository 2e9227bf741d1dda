"""Packed sequences: documents in one row, told apart by positions, by their ends, or by a mask.

Attention in fused modules and in checkpoints runs once. Index tensors are the caller's own: they
are saved as they are, neither copied nor compared by value.
"""

from __future__ import annotations

import copy
import sys
import types
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import DEVICE, assert_near
from test_readme import blocks
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn

import fusedckpt
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.checkpointing import samples
from fusedckpt.memory import addresses_of, saved_tensors

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the stubs compute on a CPU")

# of the documents
LENGTHS = (5, 11, 16)
T, D, H, LAYERS = sum(LENGTHS), 32, 4, 2
# bytes of D values, and of a value of each head, of all tokens
ROW, STATISTIC = 4 * T * D, 4 * T * H
SDPA = F.scaled_dot_product_attention

# the implementations whose attention was called, and its index tensors
calls: list[tuple[str, tuple[Tensor, ...]]] = []


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, causal: bool, scale: Any) -> Tensor:
    """Return the attention of each document to itself, of tensors [tokens, heads, width]."""
    documents = []
    for start, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        heads = (x[start:end].transpose(0, 1) for x in (q, k, v))
        y = SDPA(*heads, is_causal=causal, scale=scale, enable_gqa=True)
        documents.append(y.transpose(0, 1))
    return torch.cat(documents)


class FlashAttnVarlenFunc(torch.autograd.Function):
    """In the place of flash_attn's."""

    @staticmethod
    def forward(ctx, q, k, v, ends, causal, scale):
        calls.append(("flash", (ends,)))
        y = attend(q, k, v, ends, causal, scale)
        ctx.save_for_backward(q, k, v, y, ends)
        ctx.options = causal, scale
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        q, k, v, _, ends = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            y = attend(q, k, v, ends, *ctx.options)
            return *torch.autograd.grad(y, (q, k, v), dy), None, None, None


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
):
    """As flash_attn has it: models import it by name, and it finds its Function in its module."""
    function = sys.modules["flash_attn.flash_attn_interface"].FlashAttnVarlenFunc
    return function.apply(q, k, v, cu_seqlens_q, causal, softmax_scale)


def counted(name, fn, indices=lambda *args, **kwargs: ()):
    def call(*args, **kwargs):
        calls.append((name, indices(*args, **kwargs)))
        return fn(*args, **kwargs)

    return call


@pytest.fixture(autouse=True)
def implementations(monkeypatch):
    """Stubs of flash_attn and of flex attention's compiled kernels; all note their calls."""
    calls.clear()
    library: Any = types.ModuleType("flash_attn.flash_attn_interface")
    library.FlashAttnVarlenFunc = FlashAttnVarlenFunc
    monkeypatch.setitem(sys.modules, library.__name__, library)
    flash = transformers.modeling_flash_attention_utils
    for name, value in {
        "_loaded_implementation": "flash_attention_2",
        "_flash_varlen_fn": flash_attn_varlen_func,
        "_process_flash_kwargs_fn": flash._lazy_define_process_function(flash_attn_varlen_func),
        "_pad_fn": flash._pad_input,
        "_unpad_fn": flash._unpad_input,
    }.items():
        monkeypatch.setattr(flash, name, value)
    # its reference, which has a backward on a CPU
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    wrapped = transformers.integrations.flex_attention.WrappedFlexAttention
    monkeypatch.setattr(wrapped, "__init__", lambda self, training: None)
    monkeypatch.setattr(wrapped, "__call__", lambda self: flex.flex_attention)

    masks = transformers.masking_utils
    # which inductor would compile
    uncompiled = partial(flex.create_block_mask, _compile=False)
    monkeypatch.setattr(
        masks, "create_block_mask", lambda *args, _compile, **kwargs: uncompiled(*args, **kwargs)
    )

    def of_block_mask(q, k, v, score_mod, mask, *options):
        return tuple(x for x in mask if isinstance(x, Tensor))

    hop = "flex_attention_hop"
    monkeypatch.setattr(flex, hop, counted("flex", vars(flex)[hop], of_block_mask))
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted("sdpa", SDPA))
    with forced_path("aten"):
        yield


DOCUMENTS = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))


def may_see(batch, head, q, k):
    return (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k])


def positions() -> Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def mask() -> Tensor:
    tokens = torch.arange(T)
    return may_see(0, 0, tokens[:, None], tokens)[None, None]


def ends() -> Tensor:
    return F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0)).int()


def by_ends() -> dict:
    # one tensor for queries and keys, as collators make it
    cu, longest = ends(), max(LENGTHS)
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, **lengths}


def by_mask() -> dict:
    return {"attention_mask": mask()}


def by_scores() -> dict:
    return {"attention_mask": torch.zeros(1, 1, T, T).masked_fill_(~mask(), -1e30)}


def by_blocks() -> dict:
    block_mask = flex.create_block_mask(may_see, 1, None, T, T, device="cpu", BLOCK_SIZE=16)
    return {"attention_mask": block_mask}


# the implementation of attention, arguments beside the positions, bytes of a layer's statistics,
# and bytes of masks and ends that the model makes of the positions, once for all layers, or, with
# flash, in the region, for each
CASES = {
    "sdpa": ("sdpa", dict, STATISTIC, T * T),
    "sdpa, mask": ("sdpa", by_mask, STATISTIC, 0),
    "eager, mask": ("eager", by_scores, 0, 0),
    "flash": ("flash_attention_2", dict, 0, LAYERS * 4 * (len(LENGTHS) + 1)),
    "flash, ends": ("flash_attention_2", by_ends, 0, 0),
    # log-sum-exp and largest scores; a block mask is four pairs of counts and indices
    "flex": ("flex_attention", dict, 2 * STATISTIC, 4 * (4 + 4)),
    "flex, block mask": ("flex_attention", by_blocks, 2 * STATISTIC, 0),
}


def llama(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": H, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, vocab_size=8, use_cache=False)
    model = transformers.LlamaModel(config).train()
    model.norm = nn.Identity()
    # the setter asks for the installed flash_attn
    model.config._attn_implementation_internal = implementation
    return model


def fused(model: nn.Module):
    return fusedckpt.fuse(model)


def in_checkpoints(model: Any):
    for layer in model.layers:
        fusedckpt.checkpoint_module(layer, save_regions=["attention"])


def step(model: nn.Module, x: Tensor, **options) -> list[Tensor]:
    """Return the loss, and the gradients of x and of the parameters."""
    loss = model(inputs_embeds=x, **options).last_hidden_state.square().sum()
    wanted = [p for name, p in model.named_parameters() if "embed" not in name]
    return [loss.detach(), *torch.autograd.grad(loss, [x, *wanted])]


@pytest.fixture(scope="module")
def documents_apart():
    """Return the tokens, and a step of each document by itself, in float64."""
    with forced_path("aten"):
        x = torch.randn(1, T, D)
        steps = [
            step(llama("sdpa").double(), part.double().requires_grad_())
            for part in x.split(LENGTHS, 1)
        ]
    loss, dx, *grads = zip(*steps, strict=True)
    return x.requires_grad_(), [sum(loss), torch.cat(dx, 1), *map(sum, grads)]


def tensors_in(options) -> list[Tensor]:
    parts = [part for x in options.values() for part in (x, *vars_of(x))]
    return [x for x in parts if isinstance(x, Tensor)]


def vars_of(x):
    return vars(x).values() if isinstance(x, flex.BlockMask) else ()


@pytest.mark.parametrize("way", [fused, in_checkpoints], ids=["fuse", "checkpoint"])
@pytest.mark.parametrize("case", CASES)
def test_as_each_document_by_itself(case, way, documents_apart, monkeypatch):
    implementation, by, statistics, made = CASES[case]
    x, truth = documents_apart
    model = llama(implementation)
    ours = copy.deepcopy(model)
    way(ours)
    options = {"position_ids": positions(), **by()}
    own = addresses_of(tensors_in(options))
    eager = step(model, x, **options)
    num_calls = len(calls)
    calls.clear()
    sampled = []
    add = samples.Gather.add

    def noted(gather, index, tensor, *args, **options):
        sampled.append(tensor)
        return add(gather, index, tensor, *args, **options)

    monkeypatch.setattr(samples.Gather, "add", noted)
    found = step(ours, x, **options)
    for a, b, c in zip(found, eager, truth, strict=True):
        assert_near(a, b, c.to(a.dtype), torch.float32)
    # attention runs once, with the caller's own ends and masks
    assert len(calls) == num_calls == (0 if implementation == "eager" else LAYERS)
    if implementation != "sdpa" and not made:
        assert all(addresses_of(indices) <= own for _, indices in calls)
    assert all(x.is_floating_point() for x in sampled)
    with saved_tensors(exclude=[x, *tensors_in(options)]) as saved:
        y = ours(inputs_embeds=x, **options)
    # a layer's input, attention's output and the MLP's input; x is the first
    num_rows = LAYERS * (3 if way is fused else 2) - 1
    if implementation == "eager":
        # it runs again
        num_rows -= LAYERS
    assert saved.nbytes == num_rows * ROW + LAYERS * statistics + made
    del y


@pytest.mark.parametrize("case", ["sdpa, mask", "flash, ends"])
def test_a_written_mask_raises(case):
    implementation, by, *_ = CASES[case]
    model = llama(implementation)
    fused(model)
    options = {"position_ids": positions(), **by()}
    x = torch.randn(1, T, D, requires_grad=True)
    y = model(inputs_embeds=x, **options).last_hidden_state
    tensors_in({k: v for k, v in options.items() if k != "position_ids"})[0].zero_()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|in place"):
        y.sum().backward()


class Varlen(nn.Module):
    """Calls torch's function, imported by name."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, cu):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, H, -1)).unbind(-3)
        y: Any = varlen_attn(q, k, v, cu, cu, max(LENGTHS), max(LENGTHS), window_size=(-1, 0))
        return x + self.out(y.flatten(1))


@pytest.fixture
def varlen_on_a_cpu(monkeypatch):
    """Give torch's op a kernel of a CPU."""

    # torch's own needs a GPU
    @torch.library.custom_op("test_packed_sequences::varlen_attn", mutates_args=())
    def of_cpu(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(("varlen", (ends,)))
        return attend(q, k, v, ends, True, None), q.new_zeros(q.shape[1], len(q))

    def backward(ctx, dy, _):
        q, k, v, _, _, ends = ctx.saved_tensors
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            return *torch.autograd.grad(attend(q, k, v, ends, True, None), (q, k, v), dy), None

    def save(ctx, inputs, output):
        q, k, v, cu = inputs
        ctx.save_for_backward(q, k, v, *output, cu)

    of_cpu.register_autograd(backward, setup_context=save)

    def op(q, k, v, ends, *options):
        run: Any = of_cpu
        return *run(q, k, v, ends), None

    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", op)


@pytest.mark.parametrize("way", ["fuse", "checkpoint"])
def test_varlen_attention_of_torch(way, varlen_on_a_cpu):
    """It runs once, and a module saves x, its output and the log-sum-exp."""
    torch.manual_seed(0)
    model = Varlen()
    x, cu = torch.randn(T, D, requires_grad=True), ends()
    expected = torch.autograd.grad(model(x, cu).square().sum(), [x, *model.parameters()])
    calls.clear()
    run = partial(fusedckpt.checkpoint, model, save_regions="attention")
    if way == "fuse":
        fusedckpt.fuse(nn.Sequential(model))
        run = model
    with saved_tensors(exclude=[x, cu]) as saved:
        y = run(x, cu)
    assert saved.nbytes == ROW + STATISTIC
    found = torch.autograd.grad(y.square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, expected)
    assert len(calls) == 1
    assert calls[0][1][0] is cu


def test_code_of_packed_sequences():
    """Of the page on checkpoints, in README.md."""
    code = blocks("fusedckpt/checkpointing/README.md", "python")[0]
    qkv = nn.Linear(D, 3 * D)
    x = torch.randn(1, T, D, requires_grad=True)
    names = {"fusedckpt": fusedckpt, "torch": torch, "x": x, "qkv": qkv, "heads": H}
    exec(code, names)
    assert [name for name, _ in calls] == ["flex"]
    (dx,) = torch.autograd.grad(names["y"].square().sum(), [x])
    # not again
    assert len(calls) == 1
    expected = names["block"](x, names["mask"])
    torch.testing.assert_close(dx, torch.autograd.grad(expected.square().sum(), [x])[0])
    q, k, v = qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
    apart = SDPA(q, k, v, attn_mask=mask()).transpose(1, 2).flatten(2)
    torch.testing.assert_close(names["y"], apart)
