"""The commands and their options; no torch here, so that `--help` is quick."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, NamedTuple

from bench.options import FRACTION, MINUTES, NATURAL, POSITIVE, Default, Options

CASE_NAMES = (
    *("rms_norm", "layer_norm", "add_rms_norm", "linear_act", "norm_linear", "mlp", "gated_mlp"),
    *("head", "experts", "norm_gated_mlp_residual", "attention", "decoder_layer", "stack"),
)
# of `bench gpu`
PARTS = (1, 2, 3)
# the cases that can trade time for memory
BLOCKS = ("norm_gated_mlp_residual", "decoder_layer", "stack")
DTYPES = ("float32", "bfloat16", "float16")
# kinds of the weights below adapters
BASES = ("dense", "quantised")
DEFAULT_TOKENS = {"cpu": 4096, "cuda": 8192}
# tokens that attend to one another, in cases with attention
SEQUENCE = 2048


class Size(NamedTuple):
    """A model's widths: dim D, hidden F, that of its key and value projections, and of a head."""

    dim: int
    hidden: int
    kv: int
    head_dim: int = 64
    tokens: int | None = None


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


def _trained(add: Options) -> None:
    """The options of a model that is trained in lockstep."""
    add.count("layers", "transformer blocks", 4, 12)
    add.count("dim", "width of the residual stream, a multiple of the head size 64", 256, 1024)
    add.count("seq", "bytes per sequence", 128, 1024)
    add.one("dtype", "dtype of the model", "float32", "bfloat16", choices=DTYPES[:2])
    add.one("seed", "random seed", 0, type=NATURAL, metavar="N")


def demo(add: Options) -> None:
    """Train one model eagerly, checkpointed, fused and planned, and compare.

    Trains a byte-level transformer on the standard library's sources five ways, step by step in
    turn: eager, with torch.utils.checkpoint, fused by fusedckpt.fuse(model), fused with
    fusedckpt.Checkpoint, and fused under a plan. Compares loss, memory and time.
    """
    add.count("steps", "training steps", 32, 200)
    _trained(add)
    add.count("batch", "sequences per step", 16, 8)
    models = ("own", "llama", "gpt2", "bert", "vit")
    text = "what to train: the demo's own transformer, or one of transformers' classes"
    add.one("model", text, "own", choices=models)
    text = "kind of the own model's MLPs: plain with GELU, or gated"
    add.one("mlp", text, "gelu", choices=("gelu", "swiglu"))
    add.place("demo.json and demo.png")


def finetune(add: Options) -> None:
    """Finetune a small Llama with LoRA on all linears five ways, and compare.

    Trains a byte-level Llama on the standard library's sources for some steps, freezes it, and
    trains peft's LoRA on every linear, step by step in turn: eager, with gradient checkpointing,
    fused at two levels, and fused under a plan. Compares loss, memory and time.
    """
    add.many("base", "kind of frozen weights", BASES, choices=BASES)
    add.many("rank", "rank of the adapters", (8, 64), type=POSITIVE, metavar="N")
    add.count("pretrain", "training steps of the base", 8, 100)
    add.count("steps", "training steps of the adapters", 16, 100)
    _trained(add)
    add.count("batch", "sequences per step", 8)
    add.place("a json and a png for every base and rank")


def paper(add: Options) -> None:
    """Fine-tune a small ViT and a small Llama: exact, approximate, checkpointed.

    Trains both a little, then fine-tunes them by LoRA on q and v and in full, step by step in turn,
    eager, with gradient checkpointing, fused by fusedckpt.fuse(model), and with the approximate
    activations of arXiv 2406.16282. Compares memory, time, losses and accuracy over seeds.
    """
    add.many("models", "models to fine-tune", ("vit", "llama"), choices=("vit", "llama"))
    add.many(
        "tuning", "adapters of q and v, or all weights", ("lora", "full"), choices=("lora", "full")
    )
    add.many("seeds", "random seeds", (0, 1, 2), type=NATURAL, metavar="N")
    add.count("pretrain", "training steps of the base", 80, 200)
    add.count("steps", "fine-tuning steps", 24, 200)
    add.count("layers", "transformer blocks", 3, 12)
    add.count("dim", "width of the residual stream, a multiple of the head size 64", 128, 768)
    add.count("seq", "bytes per sequence of the Llama", 32, 1024)
    add.count("batch", "pictures or sequences per step", 32)
    add.count("rank", "rank of the adapters", 4)
    add.one("dtype", "dtype of the models", "float32", "bfloat16", choices=DTYPES[:2])
    add.place("paper.json and paper.png")


def fit(add: Options) -> None:
    """Fit piecewise-constant derivatives: the constants of ReGELU2 and ReSiLU2, and best ones."""
    add.many("activations", "activations to fit, by names of linear_act", ("gelu", "silu"))
    add.count("steps", "slopes of the best derivative", 4)


def run(add: Options) -> None:
    """Compare time and memory of functions with eager, torch.compile and checkpoint.

    Checks every implementation of each case numerically, then measures its memory and, in turns,
    its time: eager, torch.compile, torch.utils.checkpoint, fusedckpt at every level, and other
    libraries. Each case runs in its own process.
    """
    add.many("case", "what to measure", CASE_NAMES, choices=CASE_NAMES)
    add.many("size", f"widths: {', '.join(SIZES)}", ("cpu",), ("llama-3-8b",), choices=SIZES)
    text = "rows of x; default: 4096 on a CPU, 8192 on a GPU, 48 at tiny"
    add.many("tokens", text, type=POSITIVE, metavar="N")
    add.one("dtype", "dtype of every tensor", "float32", "bfloat16", choices=DTYPES)
    add.count("repeat", "timed rounds", 10, 50)
    add.names()
    add.flag("no-graphs", "launch kernels from Python on a GPU instead of replaying CUDA graphs")
    add.flag("resume", "keep rows of this device and commit in the file, measure the rest")
    add.place("run.jsonl")


def capacity(add: Options) -> None:
    """Find how many tokens fit in a given memory, and their speed.

    Finds how many tokens each implementation fits into the same memory, and times it at that
    number.
    """
    add.many("case", "what to measure", BLOCKS, choices=CASE_NAMES)
    add.many("size", f"widths: {', '.join(SIZES)}", ("gpt2",), ("llama-3-8b",), choices=SIZES)
    add.count("memory", "MiB that forward and backward may add", 1 << 10, 1 << 14)
    add.one("dtype", "dtype of every tensor", "float32", "bfloat16", choices=DTYPES)
    add.count("repeat", "timed rounds", 3, 10)
    add.names()
    add.place("capacity.jsonl")


def classics(add: Options) -> None:
    """Reproduce the classic workloads of gradient checkpointing.

    Trains many convolutions, a deep MLP and the deepest stack that fits a budget: eager, with
    torch's checkpoint_sequential, with ours, and under plans.
    """
    text = "many convolutions, a deep MLP, or how deep a stack can go"
    add.one("part", text, "all", choices=("conv", "mlp", "depth", "all"))
    add.count("layers", "convolutions", 100)
    # 320 channels on a CPU would be 92 million parameters and 1.1 TFLOP a step
    add.count("width", "channels of the convolutions, 320 in the classic net", 32, 320)
    add.count("batch", "images per step", 64)
    add.count("mlp-layers", "layers of the MLP", 20)
    add.count("mlp-width", "width of the MLP and of its input, a square number", 1024)
    add.count("mlp-batch", "images per step of the MLP", 32)
    add.count("depth-dim", "width of the stack, a multiple of the head size 64", 64)
    add.count("depth-seq", "tokens per sequence of the stack", 128)
    add.count("depth-batch", "sequences per step of the stack", 8, 512)
    # more activations than parameters
    add.one(
        "depth-budget", "memory that a step of the stack may take", "24MiB", "4GiB", metavar="SIZE"
    )
    add.count("steps", "training steps per turn", 2)
    add.count("repeat", "turns of every way", 2, 10)
    add.one("seed", "random seed", 0, type=NATURAL, metavar="N")
    add.place("classics.json and classics.png")


def ways(add: Options) -> None:
    """Compare ways of training a model of yours.

    Trains your model eager, with torch's checkpoint around every unit, fused, fused with our
    checkpoint, and under plans, and compares memory, recomputed FLOPs, time and losses. The factory
    returns (model, args), (model, kwargs) or (model, args, kwargs), on the device to measure. The
    loss is the output's .loss, or else the mean square of its tensors; for another loss, wrap the
    model.
    """
    text = "the function that makes the model and its inputs: package.module:name or file.py:name"
    add.one("model", text, required=True, metavar="MODULE:FACTORY")
    text = "activation budget of a plan, such as 2GiB; default: three between the extremes"
    add.many("budget", text, metavar="SIZE")
    add.count("steps", "training steps per turn, on the same inputs", 2)
    add.count("repeat", "turns of every way", 3)
    add.one("seed", "random seed", 0, type=NATURAL, metavar="N")
    add.place("ways.json and ways.png", device=False)


def model(add: Options) -> None:
    """Count instructions and bytes of each compiled kernel, without a GPU.

    Compiles every kernel at every size for a chip, and prints the bytes it moves and waits for, its
    barriers, instructions, registers and spills, and the chip's limits.
    """
    add.one("arch", "the chip", "sm_90", choices=("sm_80", "sm_90", "sm_100"))


def profile(add: Options) -> None:
    """List the kernels that fusedckpt launches, and their times.

    Runs forward and backward of every level and variant of the cases under torch's profiler.
    """
    add.many("case", "what to look at", CASE_NAMES[:-2], choices=CASE_NAMES)
    add.many("size", f"widths: {', '.join(SIZES)}", ("cpu",), ("llama-3-8b",), choices=SIZES)
    add.many("tokens", "rows of x", type=POSITIVE, metavar="N")
    add.one("dtype", "dtype of every tensor", "float32", "bfloat16", choices=DTYPES)
    add.many("only", "only implementations with this in their name", ("fusedckpt",))
    add.many("skip", "no implementations with this in their name")
    add.flag("bare", "mark the calls for another profiler, such as ncu, and print nothing")
    add.place("profile.jsonl")


LAYERS = ("linear_act", "norm_linear", "mlp", "gated_mlp", "rms_norm", "layer_norm")


def schedule(add: Options) -> None:
    """Print tensors a layer's forward and backward make, read, write over and free, with widths."""
    add.parser.add_argument("layer", help="the function", choices=LAYERS)
    add.one("save", "save level", "inputs", choices=("inputs", "gate", "preact"))
    add.one("norm", "a norm before; default: none, but for norm_linear", choices=("rms", "layer"))
    add.flag("residual", "add x to the result")
    add.one("chunks", "chunks of rows", type=POSITIVE, metavar="N")
    add.many("wanted", "gradients: x, norm, or a linear; default: all", metavar="NAME")


def gpu(add: Options) -> None:
    """Test and measure everything on a machine with a GPU, in minutes.

    Measures all cases and runs the kernels' tests (part 1), profiles and measures more widths (2),
    and takes the final times (3), each step within a share of its part's time. Call it again to
    continue.
    """
    text = "numbers and kernel tests, profile and widths, or final times; default: all three"
    add.many("part", text, type=int, choices=PARTS, metavar="1|2|3")
    add.one("minutes", "how long a part may take", 9.0, type=MINUTES, metavar="N")
    text = "folder for results; default: bench/results/gpu-<device>"
    add.one("out", text, type=Path, metavar="DIR")
    text = "archive of the folder, replaced after every step; default: DIR.tar.gz"
    add.one("archive", text, type=Path, metavar="FILE")
    add.flag("allow-cpu", "run all steps on a CPU, at toy sizes")
    add.flag("tiny", "toy sizes on a GPU too")
    add.flag("restart", "repeat every step; earlier measurements move to before-N")


def table(add: Options) -> None:
    """Print the tables of a results file."""
    add.file("file", "results of bench run or capacity")
    add.flag("markdown", "print Markdown")


def plot(add: Options) -> None:
    """Draw a results file: bars, time against memory, roofline."""
    add.file("file", "results of bench run, capacity, demo, finetune, classics or ways")
    add.one("out", "folder for the figures; default: the file's", type=Path, metavar="DIR")


def compare(add: Options) -> None:
    """Show the changes between two results files."""
    add.file("before", "results of bench run", "A")
    add.file("after", "a later one, or one of another machine", "B")
    text = "ignore times that differ by less than this fraction"
    add.one("threshold", text, 0.05, type=FRACTION, metavar="X")


def env(add: Options) -> None:
    """Show versions, devices and the path of each function."""


# a command is the module of its name
COMMANDS = (demo, finetune, paper, fit, run, classics, ways, capacity, profile, model)
COMMANDS += (schedule, gpu, table, plot, compare, env)


def filled(given: dict[str, Any], device_type: str) -> Namespace:
    """Return a command's options, with the defaults of a device."""
    return Namespace(
        **{
            name: getattr(value, device_type) if isinstance(value, Default) else value
            for name, value in given.items()
        }
    )


def parsers() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser of the command line, and those of its commands."""
    parser = ArgumentParser(prog="python -m bench", description="Measure fusedckpt.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    found = {}
    for command in COMMANDS:
        name, text = command.__name__, str(command.__doc__)
        # one line, where argparse would print every option above an error
        usage = f"python -m bench {name} [options]" if "\n\n" in text else None
        short = text.split("\n\n")[0].rstrip(".")
        found[name] = commands.add_parser(name, usage=usage, help=short, description=text)
        command(Options(found[name]))
    return parser, found
