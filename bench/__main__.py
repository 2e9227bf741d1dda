"""`python -m bench <command>`: reads the command line and runs the command's module."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "demo": "train one model eagerly, checkpointed, fused and planned, and compare",
    "ways": "compare ways of training a model, also of yours",
    "finetune": "ways of training adapters of a small Llama in int8",
    "paper": "ways of fine-tuning a small ViT and a small Llama, exact and approximate",
    "run": "compare functions with eager, torch.compile, checkpoint and other libraries",
    "host": "compare the time that the host takes for a layer, and its launches and waits",
    "classics": "reproduce the classic workloads of gradient checkpointing",
    "show": "print or draw a results file, or the changes between two",
    "predict": "predict the time of kernels on cards that are not there; nothing is measured",
    "step": "predict the device's time of a layer in ways of training; nothing is measured",
    "rounding": "compare gradients of checkpoints that keep their inputs in fewer bits",
    "contexts": "estimate the longest sequences that models of 2B to 30B parameters fit on cards",
    "shares": "count the bytes that models save, before and after fuse",
}
# those that are `ways` with other defaults
PRESETS = ("demo", "finetune", "paper")
INSTALL = 'pip install -c constraints.txt -e ".[bench]"'
# exit statuses, as a shell has them: of a command that Ctrl-C ended, and of one with an
# output that nothing reads
INTERRUPTED = 130
UNREAD = 141


def _run(command: str, argv: Sequence[str]) -> int:
    from bench.env import choose_device
    from bench.options import Options

    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--device")
    module = import_module(f"bench.{'ways' if command in PRESETS else command}")
    preset = module.PRESETS[command] if command in PRESETS else None
    parser = Options(command, module.__doc__, "cpu", preset)
    try:
        parser.device = str(choose_device(early.parse_known_args(argv)[0].device))
        module.options(parser)
        chosen = parser.parse_args(argv)
        if "out" in chosen and chosen.out is not None:
            chosen.out.mkdir(parents=True, exist_ok=True)
        # a command that only prints has nothing to check
        prepared = module.prepare(chosen) if hasattr(module, "prepare") else chosen
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return module.run(prepared)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    # kineto reports every profile on stderr unless told not to before the first one; 5, the value
    # commonly advised, still lets its highest level through
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # a backward measured alone frees memory allocated before it, which the profiler warns of
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # read when torch is imported: four steps of the demo took 77 s on two busy cores with threads
    # that spin while they wait, 17 s with threads that sleep
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = ArgumentParser(prog="python -m bench", description="Measure fusedckpt.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    command = parser.parse_args(argv[:1]).command
    if command is None:
        parser.print_help()
        return 0
    try:
        return _run(command, argv[1:])
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        parser.exit(2, f"bench needs matplotlib: {INSTALL}\n")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # such as `| head`; the rest of the buffer is flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


if __name__ == "__main__":
    sys.exit(main())
