"""The cases of `python -m bench run`: each once, over the functions of either library.

A case calls functions of `lib`: of `bench.eager`, which is plain torch, or of
`fusedckpt.functional`, which is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench import eager
from fusedckpt import NormSpec, functional

Function = Callable[..., Tensor | tuple[Tensor, ...]]
Shapes = tuple[tuple[int, ...], ...]
Tensors = Sequence[Tensor]
Wrap = Callable[..., Tensor]

# Llama 3's
EPS = 1e-5
# of the stack
LAYERS = 4
# Llama 2's
VOCAB = 32000
# Qwen/Qwen3-30B-A3B's experts a token, of fewer experts
TOP_K = 8
EXPERTS = 16
# tokens that attend to one another, in cases with attention
SEQUENCE = 2048
DEFAULT_TOKENS = {"cpu": 4096, "cuda": 8192}


class Size(NamedTuple):
    """A model's widths."""

    # D, of the residual stream
    dim: int
    # F, of the hidden layer
    hidden: int
    # of the key and the value projection
    kv: int
    # of a head
    head_dim: int = 64
    # rows of x, of a size that has its own
    tokens: int | None = None

    @property
    def expert(self) -> int:
        """F of an expert: 3/8 of D, in 16 byte steps of bfloat16, as grouped products need."""
        return 8 * -(-3 * self.dim // 64)


# The models' published configurations (config.json on the Hugging Face hub, by the name below):
# hidden_size, intermediate_size, num_key_value_heads * head_dim, head_dim. GPT-2's and ViT-L/16's
# hidden layer is four times as wide as the model, and every head has keys and values of its own.
SIZES: dict[str, tuple[Size, ...]] = {
    "tiny": (Size(32, 80, 16, 8, tokens=48),),
    "cpu": (Size(512, 2048, 512), Size(768, 3072, 768)),
    # openai-community/gpt2: n_embd 768, n_inner null, n_head 12
    "gpt2": (Size(768, 3072, 768),),
    # google/vit-large-patch16-224; Dosovitskiy et al., arXiv 2010.11929, table 1
    "vit-l": (Size(1024, 4096, 1024),),
    # meta-llama/Llama-3.2-1B: 8 of 32 heads have keys and values
    "llama-3.2-1b": (Size(2048, 8192, 512),),
    # Qwen/Qwen2.5-7B: 4 of 28 heads
    "qwen2.5-7b": (Size(3584, 18944, 512, 128),),
    # meta-llama/Meta-Llama-3-8B: 8 of 32 heads
    "llama-3-8b": (Size(4096, 14336, 1024, 128),),
}


class Case(NamedTuple):
    """A call of a library's functions, and the choices that ours have."""

    # returns the result of (lib, size, x, *parameters, **options)
    call: Callable[..., Any]
    # returns the shapes of the parameters
    shapes: Callable[[Size], Shapes]
    # values of `save`
    levels: tuple[str, ...] = ()
    # values of `kernel`
    variants: tuple[str, ...] = ()
    # the number of tensors of x's shape, which come before the parameters
    num_inputs: int = 1
    # whether x is [B, S, D], not [T, D]
    sequences: bool = False
    # whether all tokens are one sequence
    has_context: bool = False

    def eager(self, size: Size) -> Function:
        """The eager form, of x and the parameters."""
        return partial(self.call, eager, size)

    def fused(self, size: Size) -> Function:
        """Ours, of x and the parameters, with `save` and `kernel` where there are any."""
        return partial(self.call, functional, size)

    def seq(self, size: Size, tokens: int) -> int | None:
        """Return how many tokens attend to one another; None in a case without sequences.

        Raises ValueError where sequences would not be equally long.
        """
        if not self.sequences:
            return None
        if self.has_context:
            return tokens
        seq = min(tokens, SEQUENCE if size.tokens is None else size.tokens // 2)
        if tokens % seq:
            raise ValueError(
                f"{tokens} tokens are no multiple of {seq}, a sequence of decoder_layer and stack"
            )
        return seq

    def inputs(self, size: Size, tokens: int) -> Shapes:
        """Return the shapes of all tensors, x first. Raises ValueError as `seq` does."""
        seq = self.seq(size, tokens)
        x = (tokens, size.dim) if seq is None else (tokens // seq, seq, size.dim)
        return (*[x] * self.num_inputs, *self.shapes(size))


def _named(name: str) -> Callable[..., Any]:
    """Call a function of the library as it is."""
    return lambda lib, size, *inputs, **options: getattr(lib, name)(*inputs, **options)


def _rms_norm(lib: Any, size: Size, x: Tensor, weight: Tensor) -> Any:
    return lib.rms_norm(x, (size.dim,), weight, EPS)


def _layer_norm(lib: Any, size: Size, x: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return lib.layer_norm(x, (size.dim,), weight, bias)


def _add_rms_norm(lib: Any, size: Size, x: Tensor, residual: Tensor, weight: Tensor) -> Any:
    return lib.add_rms_norm(x, residual, (size.dim,), weight, eps=EPS)


def _norm_linear(lib: Any, size: Size, x: Tensor, norm: Tensor, *weights: Tensor) -> Any:
    return lib.norm_linear(x, NormSpec("rms", norm, eps=EPS), weights)


def _cross_entropy(lib: Any, size: Size, x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    target = torch.arange(x.shape[0], device=x.device) % weight.shape[0]
    return lib.linear_cross_entropy(x, weight, target, **options)


def routed(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, the same for every implementation, and their scores.

    Some experts get several times as many tokens as others.
    """
    starts = torch.arange(x.shape[0], device="cpu" if x.is_meta else x.device).square()
    index = (starts[:, None] + torch.arange(TOP_K, device=starts.device)) % len(router)
    return index, F.linear(x, router).gather(1, index.to(x.device)).softmax(-1)


def _experts(
    lib: Any, size: Size, x: Tensor, router: Tensor, *weights: Tensor, **options: Any
) -> Any:
    return lib.experts(x, *routed(x, router), *weights, **options)


def _block(lib: Any, size: Size, x: Tensor, norm: Tensor, *weights: Tensor, **options: Any) -> Any:
    spec = NormSpec("rms", norm, eps=EPS)
    return lib.gated_mlp(x, *weights, norm=spec, residual=True, **options)


def _decoder_layer(lib: Any, size: Size, x: Tensor, *parameters: Tensor, **options: Any) -> Tensor:
    """Pre-norm causal attention with grouped heads, then SwiGLU, each added to x [B, S, D].

    Attention is torch's in both libraries, without positions, which would cost them the same.
    """
    attn_norm, q, k, v, o, *block = parameters
    heads = (
        y.unflatten(-1, (-1, size.head_dim)).transpose(1, 2)
        for y in _norm_linear(lib, size, x, attn_norm, q, k, v)
    )
    y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=size.kv < size.dim)
    x = x + F.linear(y.transpose(1, 2).flatten(2), o)
    return _block(lib, size, x, *block, **options)


def stack(
    lib: Any,
    size: Size,
    x: Tensor,
    *parameters: Tensor,
    per_layer: Wrap | None = None,
    whole: Wrap | None = None,
    **options: Any,
) -> Tensor:
    """LAYERS decoder layers; `per_layer` or `whole` calls fn(x) for one, or for all of them."""
    count = len(parameters) // LAYERS

    def layer(start: int, x: Tensor) -> Tensor:
        return _decoder_layer(lib, size, x, *parameters[start : start + count], **options)

    def run(x: Tensor) -> Tensor:
        for start in range(0, len(parameters), count):
            run_layer = partial(layer, start)
            x = run_layer(x) if per_layer is None else per_layer(run_layer, x)
        return x

    return run(x) if whole is None else whole(run, x)


def _vector(size: Size) -> Shapes:
    return ((size.dim,),)


def _mlp_shapes(size: Size) -> Shapes:
    return (size.hidden, size.dim), (size.hidden,), (size.dim, size.hidden), (size.dim,)


def _gated_shapes(size: Size) -> Shapes:
    up = (size.hidden, size.dim)
    return up, up, up[::-1]


def _expert_shapes(size: Size) -> Shapes:
    gate_up = (EXPERTS, 2 * size.expert, size.dim)
    return (EXPERTS, size.dim), gate_up, (EXPERTS, size.dim, size.expert)


def _qkv_shapes(size: Size) -> Shapes:
    kv = (size.kv, size.dim)
    return (size.dim,), (size.dim, size.dim), kv, kv


def _head_shapes(size: Size) -> Shapes:
    return ((VOCAB if size.tokens is None else size.hidden, size.dim),)


def _block_shapes(size: Size) -> Shapes:
    return _vector(size) + _gated_shapes(size)


def _layer_shapes(size: Size) -> Shapes:
    return *_qkv_shapes(size), (size.dim, size.dim), *_block_shapes(size)


LEVELS = ("inputs", "preact")
GATED_LEVELS = ("inputs", "gate", "preact")
HYBRID = ("split", "hybrid")

CASES: dict[str, Case] = {
    "rms_norm": Case(_rms_norm, _vector),
    "layer_norm": Case(_layer_norm, lambda size: _vector(size) * 2),
    "add_rms_norm": Case(_add_rms_norm, _vector, num_inputs=2),
    "linear_act": Case(
        _named("linear_act"), lambda size: _mlp_shapes(size)[:2], LEVELS, ("split", "fused")
    ),
    "norm_linear": Case(_norm_linear, _qkv_shapes),
    "mlp": Case(_named("mlp"), _mlp_shapes, LEVELS, HYBRID),
    "gated_mlp": Case(_named("gated_mlp"), _gated_shapes, GATED_LEVELS, HYBRID),
    "head": Case(_cross_entropy, _head_shapes),
    "experts": Case(_experts, _expert_shapes, GATED_LEVELS),
    "norm_gated_mlp_residual": Case(_block, _block_shapes, GATED_LEVELS, HYBRID),
    "attention": Case(
        _decoder_layer, _layer_shapes, GATED_LEVELS, sequences=True, has_context=True
    ),
    "decoder_layer": Case(_decoder_layer, _layer_shapes, GATED_LEVELS, sequences=True),
    "stack": Case(stack, lambda size: _layer_shapes(size) * LAYERS, LEVELS, sequences=True),
}


def draw(
    case: Case, size: Size, tokens: int, device: torch.device, dtype: torch.dtype
) -> list[Tensor]:
    """Draw x, which requires grad, and the case's parameters; results are of order one.

    The same numbers in every dtype, up to rounding; drawn on the device, where that takes no time.
    """
    generator = torch.Generator(device).manual_seed(0)
    inputs: list[Tensor] = []
    for index, shape in enumerate(case.inputs(size, tokens)):
        value = torch.randn(shape, generator=generator, device=device)
        if index < case.num_inputs:
            inputs.append(value.to(dtype).requires_grad_())
            continue
        if len(shape) == 2:
            value /= shape[1] ** 0.5
        inputs.append(nn.Parameter(value.to(dtype)))
    return inputs


def load_of(case: Case, size: Size, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """Count the FLOPs and bytes of forward and backward that any implementation must do.

    FLOPs are those of eager's GEMMs, attention counted without its mask, on tensors without data;
    bytes are each input and result read or written once, in backward also the gradients.
    """
    shapes = case.inputs(size, tokens)
    inputs = [torch.empty(s, dtype=dtype, device="meta", requires_grad=True) for s in shapes]
    with FlopCounterMode(display=False) as counter:
        result = case.eager(size)(*inputs)
        outputs = (result,) if isinstance(result, Tensor) else result
        torch.autograd.grad(outputs, inputs, [torch.empty_like(y) for y in outputs])
    nbytes = 3 * sum(x.nbytes for x in inputs) + 2 * sum(y.nbytes for y in outputs)
    return {"flops": counter.get_total_flops(), "bytes": nbytes}
