"""Compare the host's time for forward and backward of a layer.

A GPU waits for its host where a layer has few tokens. The time is the CPU time of one thread, which
runs forward and backward. All implementations of a case run in turns, and the minimum of all
repetitions is reported, so other load on the machine hardly matters. A row also has the launches,
the waits for the device, and the tokens from which on the device's time covers the host's.

The device's time is arithmetic: FLOPs of eager's GEMMs at --tflops, and each input, result and
gradient read or written once at --tbytes. Recomputed work is left out: it covers more of the host's
time.
"""

from __future__ import annotations

import ctypes
import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from bench.cases import CASES, DEFAULT_TOKENS, EPS, SIZES, VOCAB, Case, Size, draw, load_of
from bench.clock import turns
from bench.env import announced
from bench.implementations import implementations_of, ours, stock
from bench.options import POSITIVE, Options
from bench.results import Row, append, rounded
from bench.show import show_rows
from fusedckpt import fuse
from fusedckpt.checkpointing import samples

FILE = "host.jsonl"
# transformers' layer of a Llama, and ways of training it: beside the cases of functions
LAYER = "llama_layer"
# the case of the same widths, attention included
LIKE = "decoder_layer"
# an H100's peak in bfloat16, of which GEMMs reach so much, and its memory
TFLOPS = 593
TBYTES = 3.0
# of a launch, where the driver is a stand-in that takes no time: CUDA's takes 2 to 3 us
LAUNCH_US = 2.5
# calls before the first that counts, and calls of a round
WARMUP = 4
CALLS = 12
# counters of a driver that stands in for CUDA's where there is no GPU
STAND_IN = ("launches", "triton", "gemms", "lt", "d2d", "memsets"), ("syncs",)
# the host's calls of CUDA that launch, and that wait
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


class Subject(NamedTuple):
    """An implementation, of x and tensors that require grad."""

    name: str
    # called with x
    fn: Callable[[Tensor], Any]
    # the leaves of x's other inputs, and parameters
    leaves: Sequence[Tensor]
    # why it is not measured
    failure: str | None = None


class Counts(NamedTuple):
    """The calls of a driver, None where they are not known."""

    launches: int | None
    waits: int | None


def options(add: Options) -> None:
    """Add the options."""
    add.many("case", "what to measure; default: all", choices=(*CASES, LAYER))
    add.many("size", f"widths: {', '.join(SIZES)}", ("cpu",), ("llama-3.2-1b",), choices=SIZES)
    add.one("tokens", "rows of x; default: 2048, 48 at tiny", type=POSITIVE, metavar="N")
    add.dtype()
    add.many("skip", "no implementations with this in their name")
    add.count("repeat", "rounds", 6, 12)
    for name, text, default in (
        ("tflops", "the device's rate in GEMMs", TFLOPS),
        ("tbytes", "the device's memory, in TB/s", TBYTES),
        ("launch-us", "us of a launch beside the thread's; of a driver that stands in", LAUNCH_US),
    ):
        add.one(name, text, default, type=float, metavar="X")
    add.place(FILE)


def run(chosen: Namespace) -> int:
    """Measure, print a table per case, append its rows."""
    facts = announced(chosen, f", the least of {chosen.repeat} rounds of {CALLS} calls")
    device = torch.device(chosen.device)
    if device.type == "cpu":
        print("on a CPU the arithmetic is in these times: compare them on a GPU")
    failed = False
    for size_name in chosen.size:
        for size in SIZES[size_name]:
            for name in chosen.case or (*CASES, LAYER):
                rows = list(_rows(name, size_name, size, chosen))
                append([row | facts for row in rows], chosen.out / FILE)
                show_rows(rows)
                failed = failed or any(row["name"] == "eager" and row["failure"] for row in rows)
    return int(failed)


def _rows(name: str, size_name: str, size: Size, chosen: Namespace) -> Iterator[Row]:
    """Measure a case; yield a row for each implementation."""
    device = torch.device(chosen.device)
    dtype = getattr(torch, chosen.dtype)
    tokens = chosen.tokens or size.tokens or min(2048, DEFAULT_TOKENS[device.type])
    if name == LAYER:
        x, subjects = _layers(size, tokens, device, dtype)
    else:
        x, subjects = _functions(name, size, tokens, device, dtype)
    is_left = [not any(part in s.name for part in chosen.skip) for s in subjects]
    subjects = [s for s, left in zip(subjects, is_left, strict=True) if left or s.name == "eager"]
    times, counts, failures = measure(subjects, x, chosen.repeat)
    case = CASES[LIKE if name == LAYER else name]
    # on a real device its launches are in the thread's time
    beside = chosen.launch_us if _stand_in() is not None else 0.0
    per_call, per_token = device_us(case, size, tokens, dtype, chosen.tflops, chosen.tbytes)
    widths = {"dim": size.dim, "hidden": size.hidden, "kv": size.kv}
    for subject in subjects:
        samples = times.get(subject.name)
        row: Row = {
            **{"command": "host", "case": name, "size": size_name, **widths, "tokens": tokens},
            **{"name": subject.name, "dtype": chosen.dtype, "is_wrong": False},
            "failure": failures.get(subject.name),
            **dict.fromkeys(("saved_bytes", "peak_bytes", "forward_ms", "backward_ms", "both_ms")),
            **{"tflops": chosen.tflops, "tbytes": chosen.tbytes, "launch_us": beside},
        }
        if samples:
            forward, backward = samples
            row["forward_ms"], row["backward_ms"] = rounded(forward), rounded(backward)
            row["both_ms"] = rounded(map(sum, zip(forward, backward, strict=True)))
            count = counts[subject.name]
            row |= count._asdict()
            host = 1e3 * (min(forward) + min(backward)) + beside * (count.launches or 0)
            row["break_even"] = break_even(host, per_call, per_token)
        yield row


def break_even(host_us: float, per_call: float, per_token: float) -> int:
    """Return the tokens from which on per_call + tokens * per_token us of a device cover a host's.

    Zero where its time without tokens, for weights, covers it.
    """
    return max(0, round((host_us - per_call) / per_token))


def device_us(
    case: Case, size: Size, tokens: int, dtype: torch.dtype, tflops: float, tbytes: float
) -> tuple[float, float]:
    """Return a device's us of a forward and a backward without tokens, and its us a token."""

    def took(count: int) -> float:
        load = load_of(case, size, count, dtype)
        return load["flops"] / tflops / 1e6 + load["bytes"] / tbytes / 1e6

    once, twice = took(tokens), took(2 * tokens)
    return max(0.0, 2 * once - twice), (twice - once) / tokens


def _functions(
    name: str, size: Size, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, list[Subject]]:
    """Return x, and the implementations of a case of functions but for compiled ones."""
    inputs = draw(CASES[name], size, tokens, device, dtype)
    subjects = []
    for implementation in implementations_of(name, size, False):
        if implementation.name.startswith("torch.compile"):
            continue
        leaves = inputs[1:]
        with suppress(Exception):
            # an implementation that fails here fails again when it is called
            if implementation.pack is not None and implementation.failure is None:
                leaves = list(implementation.pack(inputs))[1:]
        fn = partial(_with_x_first, implementation.fn, leaves)
        subjects.append(Subject(implementation.name, fn, leaves, implementation.failure))
    return inputs[0], subjects


def _with_x_first(fn: Callable[..., Any], leaves: Sequence[Tensor], x: Tensor) -> Any:
    return fn(x, *leaves)


def _layers(
    size: Size, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, list[Subject]]:
    """Return x, and ways of training transformers' layer of a Llama."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config: Any = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size.dim,
        intermediate_size=size.hidden,
        num_hidden_layers=1,
        num_attention_heads=size.dim // size.head_dim,
        num_key_value_heads=size.kv // size.head_dim,
        rms_norm_eps=EPS,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    x = torch.zeros(1, tokens, size.dim, device=device, dtype=dtype, requires_grad=True)
    places = torch.arange(tokens, device=device)[None]
    position = LlamaRotaryEmbedding(config).to(device)(x.detach(), places)

    def way(name: str, wrap: Any = None, prepare: Any = None, **how: Any) -> Subject:
        layer: nn.Module = LlamaDecoderLayer(config, 0).to(device, dtype)
        try:
            if prepare is not None:
                prepare(layer, **how)
        except ImportError:
            return Subject(name, layer, [], "not installed")
        call = partial(layer, position_embeddings=position, attention_mask=None)
        fn = call if wrap is None else partial(wrap, call)
        return Subject(name, fn, list(layer.parameters()))

    swap = partial(fuse, verify=False)
    return x, [
        way("eager"),
        way("checkpoint", stock),
        way("Liger", None, _liger),
        way("fuse", None, swap),
        way("fuse preact", None, swap, save="preact"),
        way("fuse recipes", None, swap, recompute_elementwise=True),
        way("checkpoint(fuse)", stock, swap),
        way("ours(fuse)", ours, swap),
    ]


def _liger(layer: Any) -> None:
    """Replace a layer's norms and MLP by Liger's."""
    # an extra has it
    library: Any = import_module("liger_kernel.transformers")
    weight = layer.input_layernorm.weight
    for name in ("input_layernorm", "post_attention_layernorm"):
        setattr(
            layer, name, library.LigerRMSNorm(len(weight), eps=EPS).to(weight.device, weight.dtype)
        )
    config: Any = layer.mlp.config
    layer.mlp = library.LigerSwiGLUMLP(config).to(weight.device, weight.dtype)


def _step(subject: Subject, x: Tensor, douts: list[Tensor]) -> tuple[int, int]:
    """Run forward and backward; return the thread's ns of each."""
    clock = time.thread_time_ns
    # a tensor that an op has made, as in a model
    inner = x.view_as(x)
    start = clock()
    outputs = subject.fn(inner)
    middle = clock()
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    if not douts:
        douts[:] = map(torch.ones_like, outputs)
    again = clock()
    torch.autograd.backward(outputs, douts)
    end = clock()
    for leaf in (x, *subject.leaves):
        leaf.grad = None
    return middle - start, end - again


def measure(
    subjects: Sequence[Subject], x: Tensor, repeat: int
) -> tuple[dict[str, tuple[list[float], list[float]]], dict[str, Counts], dict[str, str]]:
    """Return ms of forward and backward by round, counts of a step, and failures, by name.

    The time of an empty backward is taken off: that is the engine's start.
    """
    engine = Subject("", lambda x: x, ())
    douts: dict[str, list[Tensor]] = {s.name: [] for s in (engine, *subjects)}
    times: dict[str, tuple[list[float], list[float]]] = {}
    counts: dict[str, Counts] = {}
    failures = {s.name: s.failure for s in subjects if s.failure is not None}
    # cuDNN's attention makes plans, which takes the host as long as a layer
    attentions = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with _on_this_thread(), sdpa_kernel(attentions), _samples_agree():
        for subject in (engine, *subjects):
            if subject.name in failures:
                continue
            try:
                for _ in range(WARMUP):
                    _step(subject, x, douts[subject.name])
                counts[subject.name] = count(partial(_step, subject, x, douts[subject.name]))
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                failures[subject.name] = f"{type(error).__name__}: {lines[0]}"
        left = [s for s in (engine, *subjects) if s.name not in failures]
        for _, subject in turns(left, repeat):
            steps = [_step(subject, x, douts[subject.name]) for _ in range(CALLS)]
            forward, backward = times.setdefault(subject.name, ([], []))
            forward.append(min(step[0] for step in steps) / 1e6)
            backward.append(min(step[1] for step in steps) / 1e6)
            gc.collect()
    start = min(times.pop("")[1])
    for _, backward in times.values():
        backward[:] = [max(0.0, ms - start) for ms in backward]
    return times, counts, failures


@contextmanager
def _on_this_thread() -> Iterator[None]:
    """Run backward on this thread, and collect no garbage while it is timed."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        if was_enabled:
            gc.enable()


def _stand_in() -> ctypes.CDLL | None:
    """Return the libraries of this process, if a driver among them counts its own calls."""
    loaded = ctypes.CDLL(None)
    return loaded if hasattr(loaded, "fake_launches") else None


@contextmanager
def _samples_agree() -> Iterator[None]:
    """Let samples of recomputes agree where a driver stands in, which computes no numbers."""
    compare = samples._are_same

    def agree(*args: Any) -> Tensor:
        flag = compare(*args)
        # its device's memory is the host's
        ctypes.memset(flag.data_ptr(), 1, flag.nbytes)
        return flag

    samples._are_same = compare if _stand_in() is None else agree
    try:
        yield
    finally:
        samples._are_same = compare


def count(step: Callable[[], Any]) -> Counts:
    """Return the launches and waits of a step, after it: by the driver, or by the profiler."""
    loaded = _stand_in()
    if loaded is not None:

        def totals() -> list[int]:
            names = [[ctypes.c_long.in_dll(loaded, f"fake_{n}") for n in ns] for ns in STAND_IN]
            return [sum(counter.value for counter in counters) for counters in names]

        before = totals()
        step()
        launches, waits = (b - a for a, b in zip(before, totals(), strict=True))
        return Counts(launches, waits)
    if not torch.cuda.is_available():
        step()
        return Counts(None, None)
    with profile() as profiler:
        step()
    names = [event.name for event in profiler.events() or ()]
    return Counts(
        sum(name.startswith(LAUNCHES) for name in names), sum(name in WAITS for name in names)
    )
