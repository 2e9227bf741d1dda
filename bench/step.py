"""Predict the device's time of a layer's training step, beside the bytes that it saves.

Layers of four models in bfloat16, of 8,192 tokens, trained in six ways, on cards that are not
there: predicted, not measured. A layer takes a training call of a few tokens on the CPU, in which
`fuse` looks at it, and then a step on meta tensors, of which ops and launches are counted.

- GEMMs and attention: FLOPs at a rate that is assumed, see RATES; attention with a causal mask does
  half of them.
- our kernels: the model of `bench predict`, whose errors are known.
- Liger's kernels: each of their operands moved once, the least that they could take.
- all other ops: their operands and results moved once.

Each launch costs 3 us more, as a further one does by that model. The host's time, where a record of
`bench host` has it, does not depend on the card; the device waits for it where it is longer.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.contexts import QWEN3_30B_A3B
from bench.env import environment
from bench.implementations import ours, stock
from bench.options import Options
from bench.predict import CARDS, NEXT, Card, fit, time_of
from bench.results import MIB, Row, append, read
from bench.shares import quiet_on_one_thread
from bench.tables import Columns, show, sources
from bench.work import ALLOCATIONS, flops_of, moved, nbytes
from fusedckpt import fuse
from fusedckpt.autograd.backward import implementations
from fusedckpt.autograd.dispatch import forced_path
from fusedckpt.kernels import products, routed
from fusedckpt.memory import saved_tensors
from fusedckpt.reporting.meta_step import moved_to_meta
from fusedckpt.reporting.without_memory import MetaRun, on_meta

if TYPE_CHECKING:
    from tests.kernels.emulated import Launch

FILE = "step.jsonl"
# ways of this command as `bench host` names them, and the layer that it has
HOST = {"fuse, checkpoint": "ours(fuse)"}
HOST_CASE = "llama_layer"
TOKENS = 8192
# of the first call, on the CPU
FEW = 16


class Rates(NamedTuple):
    """FLOPs a us that are assumed."""

    # cuBLAS in bfloat16: 75 % of an A100's peak of 312 TFLOP/s, 60 % of an H100's of 989
    gemm: float
    # FlashAttention 2, forward and backward together
    attention: float
    # relative error of other kernels: the most that tests allow on rows of 64 MB and more
    error: float


RATES = {"A100": Rates(234e6, 170e6, 0.12), "H100": Rates(593e6, 335e6, 0.05)}
# reads and writes of operands: Liger writes the results of these over some of them
OVERWRITING = {"_swiglu_backward_kernel": 5 / 3, "_triton_rope": 2.0}
GROUPED = ("grouped_gemm_kernel", "grouped_grad_kernel")


class Layer(NamedTuple):
    """A layer of a model."""

    title: str
    # returns the layer, and its call of x [B, S, D] with so many tokens a sequence
    make: Callable[[int, int], tuple[nn.Module, Callable[[nn.Module, Tensor], Any]]]
    dim: int
    seq: int
    # whether Liger has kernels for it
    has_liger: bool = True


def _llama(dim: int, hidden: int, head: int, batch: int, seq: int) -> Any:
    import transformers
    from transformers.models.llama import modeling_llama as code

    sizes: Any = {"head_dim": head, "num_key_value_heads": 8, "num_attention_heads": dim // head}
    config = transformers.LlamaConfig(
        **sizes, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=1, use_cache=False
    )
    config._attn_implementation = "sdpa"
    return code.LlamaDecoderLayer(config, 0), _with_positions(code.LlamaRotaryEmbedding(config))


def _qwen(batch: int, seq: int) -> Any:
    import transformers
    from transformers.models.qwen3_moe import modeling_qwen3_moe as code

    layer_alone: dict[str, Any] = {
        "num_hidden_layers": 1,
        "norm_topk_prob": True,
        "use_cache": False,
    }
    config = transformers.Qwen3MoeConfig(**QWEN3_30B_A3B | layer_alone)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "grouped_mm"
    layer = code.Qwen3MoeDecoderLayer(config, 0)
    return layer, _with_positions(code.Qwen3MoeRotaryEmbedding(config))


def _with_positions(rotary: Any) -> Callable[[nn.Module, Tensor], Any]:
    def call(layer: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            places = torch.arange(x.shape[1], device=x.device)[None]
            position = rotary.to(x.device)(x.detach(), places)
        return layer(x, position_embeddings=position, attention_mask=None)

    return call


def _dit(batch: int, seq: int) -> Any:
    attention: Any = import_module("diffusers.models.attention")
    layer = attention.BasicTransformerBlock(
        1152,
        16,
        72,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        attention_bias=True,
        norm_elementwise_affine=False,
        norm_type="ada_norm_zero",
    )

    def call(layer: nn.Module, x: Tensor) -> Any:
        numbers = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        return layer(x, timestep=numbers, class_labels=numbers)

    return layer, call


LAYERS = {
    "llama-1b": Layer("Llama 3.2 1B", partial(_llama, 2048, 8192, 64), 2048, 4096),
    "llama-8b": Layer("Llama 3.1 8B", partial(_llama, 4096, 14336, 128), 4096, 4096),
    "qwen3-30b-a3b": Layer("Qwen3 30B A3B", _qwen, 2048, 4096),
    "dit-xl": Layer("DiT-XL/2, 256 x 256 pixels", _dit, 1152, 256, has_liger=False),
}


@contextmanager
def liger(layer: nn.Module) -> Iterator[None]:
    """Replace a layer's RMSNorms, its SwiGLU and its rotation by Liger's."""
    library: Any = import_module("liger_kernel.transformers")
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                width = len(child.weight)  # type: ignore[reportArgumentType]  # a Parameter
                setattr(parent, name, library.LigerRMSNorm(width).bfloat16())
            elif type(child).__name__ == "LlamaMLP":
                setattr(parent, name, library.LigerSwiGLUMLP(child.config).bfloat16())
    code = sys.modules[type(layer).__module__]
    with patch.object(code, "apply_rotary_pos_emb", library.liger_rotary_pos_emb):
        yield


class Way(NamedTuple):
    """A way of training a layer."""

    name: str
    # changes the layer
    prepare: Callable[[nn.Module], Any] | None = None
    # runs a call of tensors
    wrap: Callable[..., Any] | None = None


WAYS = (
    Way("eager"),
    Way("Liger"),
    Way("checkpoint", wrap=stock),
    Way("fuse preact", partial(fuse, verify=False, save="preact")),
    Way("fuse", partial(fuse, verify=False)),
    Way("fuse, checkpoint", partial(fuse, verify=False), ours),
)


@dataclass
class Cost:
    """A step's work by kind: FLOPs, bytes that ops move, and its launches."""

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    # bytes of ops, and of other libraries' kernels
    op_bytes: float = 0.0
    num_ops: int = 0
    # us of our kernels
    kernel_us: float = 0.0
    num_kernels: int = 0
    # launches that the model gives no time: their bytes count
    num_untimed: int = 0

    def gemms_us(self, card: Card) -> float:
        """Return the us of GEMMs and attention."""
        rates = RATES[card.name]
        return self.gemm_flops / rates.gemm + self.attention_flops / rates.attention

    def others_us(self, card: Card) -> float:
        """Return the us of all other kernels, and of launches."""
        per_byte = fit(card.arch)[1]
        return self.op_bytes * per_byte + self.num_ops * NEXT + self.kernel_us


class Priced(TorchDispatchMode):
    """Adds the ops that it sees to a cost; fused layers run as the parts they are made of."""

    def __init__(self, cost: Cost):
        super().__init__()
        self.cost = cost

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in implementations:
            with self:
                return implementations[func](*args, **kwargs)
        results = _run(func, args, kwargs)
        flops = flops_of(func, args, kwargs, results)
        if flops is not None:
            self.cost.num_ops += 1
            if "attention" in str(func):
                self.cost.attention_flops += flops / (2 if _is_causal(func, args, kwargs) else 1)
            else:
                self.cost.gemm_flops += flops
        elif func.overloadpacket not in ALLOCATIONS:
            op_bytes = sum(moved(func, args, kwargs, results))
            self.cost.op_bytes += op_bytes
            self.cost.num_ops += op_bytes > 0
        return results


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op; GEMMs of half precision that write float32 know no meta tensors."""
    if func is torch.ops.aten.mm.dtype:
        return args[0].new_empty(args[0].shape[0], args[1].shape[1], dtype=args[2])
    if func is torch.ops.aten.addmm.dtype_out:
        return kwargs["out"]
    return func(*args, **kwargs)


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))


def add_launches(cost: Cost, launches: Sequence[Launch], card: Card) -> None:
    """Add launches of Triton's kernels to a cost."""
    start, per_byte = fit(card.arch)
    for launch in launches:
        tensors = [x for x in tree_leaves(launch.arguments) if isinstance(x, Tensor)]
        module = launch.kernel.src.fn.__module__
        if launch.name in GROUPED:
            cost.gemm_flops += grouped_flops(launch)
            cost.num_ops += 1
        elif not module.startswith("fusedckpt"):
            cost.op_bytes += sum(map(nbytes, tensors)) * OVERWRITING.get(launch.name, 1.0)
            cost.num_ops += 1
        else:
            us = _us_of(launch, card)
            cost.num_kernels += 1
            if us is None:
                cost.num_untimed += 1
                us = start + sum(map(nbytes, tensors)) * per_byte
            cost.kernel_us += us - start + NEXT


def grouped_flops(launch: Launch) -> float:
    """Return the FLOPs of a launch of experts' products."""
    given = launch.arguments
    rows, width = given["x"].shape
    return 2.0 * rows * width * (given["n"] if "w" in given else given["dy"].shape[1])


# us of launches that were counted, by card, kernel and arguments
_counted: dict[tuple[Any, ...], float | None] = {}


def _us_of(launch: Launch, card: Card) -> float | None:
    from tests.kernels.emulated import count

    leaves = tree_leaves(launch.arguments)
    shapes = [(x.shape, x.dtype, x.stride()) if isinstance(x, Tensor) else str(x) for x in leaves]
    key = card.name, launch.name, launch.grid, *shapes
    if key not in _counted:
        count(launch)
        _counted[key] = time_of(launch, card).us
    return _counted[key]


def cost_of(layer: Layer, way: Way, card: Card) -> tuple[Cost, int]:
    """Return the work of a layer's step on a card, and the bytes that it saves."""
    from tests.kernels.emulated import recorded

    batch = TOKENS // layer.seq
    module, call = layer.make(batch, layer.seq)
    module = module.bfloat16().train()
    if way.prepare is not None:
        way.prepare(module)
    run = partial(_called, way.wrap, call, module)
    with ExitStack() as stack:
        if way.name == "Liger":
            stack.enter_context(liger(module))
        else:
            few = torch.randn(1, FEW, layer.dim, dtype=torch.bfloat16, requires_grad=True)
            run(few.view_as(few)).sum().backward()
            module.zero_grad()
        meta = MetaRun()
        stack.enter_context(moved_to_meta(module, (), meta))
        # as on such a card: GEMMs write float32, torch has grouped products from sm_90 on
        wide = patch.object(products, "writes_wider", lambda device, dtype: dtype.itemsize == 2)
        stack.enter_context(wide)
        grouped = patch.object(routed, "has_kernel", lambda *_: card.arch == "sm_90")
        stack.enter_context(grouped)
        launches = stack.enter_context(recorded(card.arch, card.units))
        stack.enter_context(forced_path("triton"))
        cost = Cost()
        stack.enter_context(on_meta(meta))
        shape = batch, layer.seq, layer.dim
        # the layer before made it
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True).clone()
        stack.enter_context(Priced(cost))
        with saved_tensors() as saved:
            y = run(x)
        size = saved.nbytes
        y.backward(torch.empty_like(y))
    add_launches(cost, launches, card)
    return cost, size


def _called(wrap: Any, call: Any, module: nn.Module, x: Tensor) -> Tensor:
    run = partial(call, module)
    y = run(x) if wrap is None else wrap(run, x)
    return y if isinstance(y, Tensor) else y[0]


def options(add: Options) -> None:
    """Add the options."""
    add.many("layer", "a layer", tuple(LAYERS), choices=[*LAYERS])
    add.many(
        "way", "a way of training", tuple(w.name for w in WAYS), choices=[w.name for w in WAYS]
    )
    add.add_argument("--card", help="the card", choices=CARDS, default=None)
    add.one("host", "a record of `bench host`, whose times stand beside", type=Path, metavar="FILE")
    add.flag("plot", "draw the figure")
    add.place(FILE, has_device=False)


def run(chosen: Namespace) -> int:
    """Predict, print and record each layer."""
    facts = environment(torch.device("cpu"), torch.bfloat16)
    hosts = host_times(read(chosen.host)) if chosen.host else {}
    drawn: list[Row] = []
    for card in [CARDS[chosen.card]] if chosen.card else CARDS.values():
        for name in chosen.layer:
            with quiet_on_one_thread():
                rows = [_row(name, way, card) | facts for way in WAYS if way.name in chosen.way]
            rows = [row for row in rows if row["failure"] is None]
            for row in rows:
                has_host = name.startswith("llama")
                row["host_ms"] = [hosts[row["name"]]] if has_host and hosts else None
            drawn += rows
            append(rows, chosen.out / FILE)
            show(rows[0]["title"], COLUMNS, rows, ["predicted, not measured", *sources([rows])])
    if chosen.plot:
        draw(drawn, (chosen.out / FILE).with_suffix(".png"))
    return 0


def host_times(rows: Sequence[Row]) -> dict[str, float]:
    """Return the host's ms of a layer's step by way, launches included."""
    times: dict[str, float] = {}
    for row in rows:
        if row["case"] == HOST_CASE and row["both_ms"]:
            least = min(row["forward_ms"]) + min(row["backward_ms"])
            times[row["name"]] = least + row["launch_us"] * (row["launches"] or 0) / 1e3
    return {way.name: round(times[HOST.get(way.name, way.name)], 3) for way in WAYS}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw predicted time against saved bytes, a panel for each layer on each card."""
    from bench import figures

    panels = [list(group) for _, group in groupby(rows, lambda row: (row["size"], row["case"]))]
    columns = len({row["case"] for row in rows})

    def fill(figure: Any) -> None:
        grid = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            points = [(row["saved_bytes"] / MIB, row["predicted_ms"][0]) for row in panel]
            for row, point in zip(panel, points, strict=True):
                color = figures.color_of(HOST.get(str(row["name"]), str(row["name"])))
                look: dict[str, Any] = {"fmt": "o", "ms": 5, "color": color, "capsize": 2}
                axes.errorbar(*point, yerr=row["error_ms"][0], **look)
            axes.margins(0.2)
            axes.set_ylim(bottom=0)
            axes.grid(color=figures.GRID)
            axes.set_axisbelow(True)
            axes.set_title(f"{panel[0]['case']}, {panel[0]['size']}")
            axes.set(xlabel="saved (MiB)", ylabel="predicted ms")
            figures.name_points(axes, points, [row["name"] for row in panel])

    note = "Bars: the model's error on all but GEMMs and attention, whose rate is assumed."
    title = f"Predicted, not measured: a layer's step of {TOKENS:,} tokens in bfloat16"
    figures.save(path, 6.4, title, [note, *sources([list(rows)])], fill)


def _row(name: str, way: Way, card: Card) -> Row:
    layer = LAYERS[name]
    row: Row = {
        "command": "step",
        "case": name,
        "size": card.name,
        "name": way.name,
        "title": f"A layer of {layer.title} on an {card.name}, {TOKENS:,} tokens",
        "failure": None,
        "is_wrong": False,
        "dtype": "bfloat16",
        "both_ms": None,
        "saved_bytes": None,
        "peak_bytes": None,
        "tokens": TOKENS,
        "seq": layer.seq,
    }
    if way.name == "Liger":
        try:
            import_module("liger_kernel.transformers")
        except ImportError:
            return row | {"failure": "not installed"}
        if not layer.has_liger:
            return row | {"failure": "it has no kernels for this layer"}
    cost, saved = cost_of(layer, way, card)
    gemms, others = cost.gemms_us(card), cost.others_us(card)
    return row | {
        "saved_bytes": saved,
        "predicted_ms": [round((gemms + others) / 1e3, 4)],
        "predicted_gemm_ms": [round(gemms / 1e3, 4)],
        "error_ms": [round(others * RATES[card.name].error / 1e3, 4)],
        "num_launches": cost.num_ops + cost.num_kernels,
        "num_untimed": cost.num_untimed,
        "flops": cost.gemm_flops,
    }


COLUMNS: Columns = {
    "way": lambda row: row["name"],
    "saved MiB": lambda row: f"{row['saved_bytes'] / MIB:,.0f}",
    "predicted ms": lambda row: f"{row['predicted_ms'][0]:.2f}",
    "of it GEMMs": lambda row: f"{row['predicted_gemm_ms'][0]:.2f}",
    "+/- (others)": lambda row: f"{row['error_ms'][0]:.2f}",
    "launches": lambda row: str(row["num_launches"]),
    "host ms": lambda row: f"{row['host_ms'][0]:.2f}" if row["host_ms"] else "-",
    "without a time": lambda row: str(row["num_untimed"] or ""),
}
