"""Estimate the longest sequence, or the largest video, that a training step fits on a card.

Models have published sizes and are made of a config on the meta device, without weights, memory or
a GPU; see `fusedckpt.find_max_size`. The same as a command, of one model:

    python -m fusedckpt fits bench.contexts:llama_qlora --grows seq --batch 1 --step 1024
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusedckpt
from bench.env import environment
from bench.options import Options
from bench.results import Row, append
from bench.shares import quiet_on_one_thread
from bench.tables import Columns, show, sources
from fusedckpt.autograd.private import pytree
from fusedckpt.planning.max_size import MaxSizes

FILE = "contexts.jsonl"
CARDS = (24, 48, 80)
# of which sizes are multiples, in tokens
STEP = 1024
# those that differ most; the others of `find_max_size` lie between them
WAYS = (
    "eager",
    "torch checkpoint",
    "fuse",
    "fuse, head",
    "fuse, checkpoint, head",
    "fuse, checkpoint, head, nine bits",
    "fuse, checkpoint, head, offload",
)
# published sizes
QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_position_embeddings": 40960,
}
# values of a block that share a scale, as in NF4
_BLOCK = 64
# of adapters
_RANK = 32


class Nibbles(Tensor):
    """A frozen weight [N, K] of 4 bits a value, two in a byte, and a scale in float32 a block."""

    # two values a byte
    packed: Tensor
    # one for each block
    scales: Tensor

    @staticmethod
    def __new__(cls, packed: Tensor, scales: Tensor, shape: Any, dtype: torch.dtype) -> Nibbles:
        """Return a weight of a dense shape and dtype."""
        options: Any = {"dtype": dtype, "device": packed.device, "requires_grad": False}
        made = Tensor._make_wrapper_subclass(cls, shape, **options)
        made.packed, made.scales = packed, scales
        return made

    @staticmethod
    def of(weight: Tensor) -> Nibbles:
        """Return a weight of the shape and dtype of a dense one, with values of no meaning."""
        packed = weight.new_empty(weight.numel() // 2, dtype=torch.uint8)
        scales = weight.new_empty(weight.numel() // _BLOCK, dtype=torch.float32)
        return Nibbles(packed, scales, weight.shape, weight.dtype)

    def dense(self) -> Tensor:
        """Return the weight as its dtype has it."""
        low = self.packed & 15
        values = torch.stack((low, self.packed >> 4), -1).view(-1, _BLOCK).to(self.dtype)
        return ((values - 8) * self.scales[:, None].to(self.dtype)).view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run F.linear so that backward gets the weight in 4 bits, as bitsandbytes' does."""
        kwargs = kwargs or {}
        if func is F.linear and type(args[1]) is cls:
            return _Linear.apply(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the tensors inside, and the other arguments that make the weight."""
        return ["packed", "scales"], (self.shape, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Nibbles:
        """Return a weight of the tensors inside."""
        return cls(inner["packed"], inner["scales"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on the dense weight."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight = args[0]
            return cls(weight.packed, weight.scales, weight.shape, weight.dtype)
        unpack = lambda x: x.dense() if isinstance(x, cls) else x  # noqa: E731
        args, kwargs = pytree.tree_map(unpack, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Linear(torch.autograd.Function):
    """F.linear with a frozen weight that is dense only while a GEMM reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """Return x @ weight.T + bias."""
        ctx.weight = weight
        return F.linear(x, weight.dense(), bias)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        """Return the gradient of x."""
        return dys[0] @ ctx.weight.dense(), None, None


fusedckpt.register_quantized(Nibbles, Nibbles.dense)


def _adapted(model: nn.Module, targets: str | list[str]) -> nn.Module:
    """Return a frozen language model of which the named linears have adapters of peft."""
    import peft

    config = peft.LoraConfig(
        r=_RANK, lora_alpha=_RANK, target_modules=targets, task_type="CAUSAL_LM"
    )
    adapted: Any = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    return adapted


def _quantized(model: nn.Module) -> nn.Module:
    """Return a model whose linears, but the head, are of 4 bits."""
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            module.weight = nn.Parameter(Nibbles.of(module.weight), requires_grad=False)
    return model


def _llama() -> nn.Module:
    """Return Llama-3.1-8B."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    return _in_bfloat16(lambda: transformers.LlamaForCausalLM(config))


def _in_bfloat16(make: Any) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def llama_qlora() -> nn.Module:
    """Return Llama-3.1-8B with a base of 4 bits and adapters of rank 32 at all linears."""
    return _adapted(_quantized(_llama()), "all-linear")


def llama_full() -> nn.Module:
    """Return Llama-3.1-8B in bfloat16, of which all parameters are trained."""
    return _llama()


def qwen_moe_lora() -> nn.Module:
    """Return Qwen3-30B-A3B in bfloat16 with adapters of rank 32 at the linears of attention."""
    import transformers

    config = transformers.Qwen3MoeConfig(**QWEN3_30B_A3B)
    model = _in_bfloat16(lambda: transformers.Qwen3MoeForCausalLM(config))
    return _adapted(model, ["q_proj", "k_proj", "v_proj", "o_proj"])


def video_transformer(size: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a diffusion transformer of 2B parameters, and `size` tokens of video.

    1,024 tokens are 8 frames of 1024 x 1024 pixels.
    """
    diffusers: Any = importlib.import_module("diffusers")

    model = _in_bfloat16(
        lambda: diffusers.LTXVideoTransformer3DModel(
            num_attention_heads=32, attention_head_dim=64, num_layers=28
        )
    )
    inputs = {
        "hidden_states": torch.randn(1, size, 128, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 256, 4096, dtype=torch.bfloat16),
        "timestep": torch.zeros(1, 1, dtype=torch.bfloat16),
        "encoder_attention_mask": torch.ones(1, 256, dtype=torch.bfloat16),
        "num_frames": size // 1024,
        "height": 32,
        "width": 32,
    }
    return model, inputs


class Model(NamedTuple):
    """A model of the table."""

    title: str
    factory: Callable[..., Any]
    # the name of the size that grows, see `find_max_size`
    grows: str = "seq"


MODELS = {
    "llama_qlora": Model("Llama-3.1-8B, 4 bits, adapters of rank 32 at all linears", llama_qlora),
    "llama_full": Model("Llama-3.1-8B in bfloat16, all parameters", llama_full),
    "qwen_moe_lora": Model(
        "Qwen3-30B-A3B in bfloat16, adapters of rank 32 at attention's linears", qwen_moe_lora
    ),
    "video_transformer": Model(
        "a diffusion transformer of 2B parameters, all of them, tokens of video",
        video_transformer,
        "factory",
    ),
}


def options(add: Options) -> None:
    """Add the options."""
    add.many("model", "a model", tuple(MODELS), choices=[*MODELS])
    add.many("way", "a way of training", WAYS, choices=[*WAYS])
    add.place(FILE, has_device=False)


def run(chosen: Namespace) -> int:
    """Estimate, print and record each model."""
    facts = environment(torch.device("cpu"), torch.bfloat16)
    for name in chosen.model:
        rows = []
        with quiet_on_one_thread():
            for row in estimated(name, chosen.way, facts):
                append([row], chosen.out / FILE)
                rows.append(row)
        note = "estimated, with a tenth of the card left free; no GPU was used"
        show(rows[0]["title"], COLUMNS, rows, [note, *sources([rows])])
    return 0


def estimated(name: str, ways: tuple[str, ...], facts: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each way that the model takes."""
    model = MODELS[name]
    cards = [f"{card}GiB" for card in CARDS]
    batch = 1 if model.grows == "seq" else None
    for way in ways:
        sizes = fusedckpt.find_max_size(
            model.factory, cards, grows=model.grows, step=STEP, batch=batch, ways=[way]
        )
        if not sizes.left:
            yield _row(name, way, sizes) | facts


def _row(name: str, way: str, sizes: MaxSizes) -> Row:
    return {
        "command": "contexts",
        "case": name,
        "name": way,
        "title": MODELS[name].title,
        "failure": None,
        "is_wrong": False,
        "dtype": "bfloat16",
        "both_ms": None,
        "saved_bytes": None,
        "peak_bytes": None,
        "optimizer": sizes.optimizer,
        "step": sizes.step,
        "slack": sizes.slack,
        "largest": sizes.to_dict()["largest"],
    }


def _column(index: int) -> Callable[[Row], str]:
    return lambda row: f"{row['largest'][index]['size']:,}"


COLUMNS: Columns = {
    "way": lambda row: row["name"],
    **{f"{card} GiB": _column(index) for index, card in enumerate(CARDS)},
}
