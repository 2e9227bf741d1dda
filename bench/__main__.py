"""`python -m bench <command>`: reads the command line and hands over to the command's module."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench import options
from bench.supervisor import INTERRUPTED, supervise

__all__ = ["main"]

NEEDS = ("rich", "matplotlib")
INSTALL = 'pip install -c constraints.txt -e ".[bench]"'


class Command(NamedTuple):
    """A command, which is the module of its name, or another; `about`: its --help in full."""

    name: str
    add_options: Callable[[argparse.ArgumentParser], None]
    help: str
    about: str | None = None
    module: str | None = None


COMMANDS = (
    Command(
        "demo",
        options.add_demo_options,
        "train one model eagerly, checkpointed, fused and planned, and compare",
        "Train a byte-level transformer on the standard library's sources five ways, step by step"
        " in turn: eager, with torch.utils.checkpoint, after fusedckpt.fuse(model), with"
        " fusedckpt.Checkpoint besides, and under a plan. Compare loss, memory and time.",
    ),
    Command(
        "run",
        options.add_run_options,
        "time and weigh functions against eager, torch.compile and checkpoint",
        "Check, weigh and time every implementation of each case, in turns: eager, torch.compile,"
        " torch.utils.checkpoint and fusedckpt at every level.",
    ),
    Command(
        "classics",
        options.add_classics_options,
        "reproduce the classic workloads of gradient checkpointing",
        "Train many convolutions, a deep MLP and the deepest stack that fits a budget: plainly,"
        " with torch's checkpoint_sequential, ours, and plans.",
    ),
    Command(
        "ways",
        options.add_ways_options,
        "compare ways of training a model of yours",
        "Train your model eagerly, with torch's checkpoint around every unit, fused, with ours, and"
        " under plans, and compare memory, recomputed FLOPs, time and losses. The factory returns"
        " (model, args), (model, kwargs) or (model, args, kwargs), on the device to measure; the"
        " loss is the output's .loss, or else the mean square of what it holds, so a loss of your"
        " own goes into a module around the model.",
        "model_ways",
    ),
    Command(
        "capacity",
        options.add_capacity_options,
        "how many tokens fit in a given memory, and how fast they are",
        "Find how many tokens every implementation fits into the same memory, and time it there.",
    ),
    Command(
        "tune",
        options.add_tune_options,
        "measure tiles and plans on this machine, for layers to use",
        "Measure tiles and plans for the kernels on this machine's GPU, check each numerically, and"
        " keep the fastest in the user's cache, from where layers take them.",
    ),
    Command(
        "gpu",
        options.add_gpu_options,
        "test, measure and draw everything on a machine with a GPU, within minutes",
        "Run the tests, the main cases and the plan thresholds on this machine's GPU, each step"
        " within a share of the time. Call it again to go on where it stopped.",
    ),
    Command("table", options.add_table_options, "print the tables of a results file"),
    Command(
        "plot",
        options.add_plot_options,
        "draw a results file: bars, time against memory, roofline",
    ),
    Command("compare", options.add_compare_options, "show what changed between two results files"),
    Command("env", lambda parser: None, "show versions, devices and the path each op takes"),
)


def _leave(*_: Any) -> None:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process, where libraries being imported swallow KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    # else it is ignored, as in a shell's background
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    with _leaving_at_once():
        module = import_module(f"bench.{args.module}")
    ours = ("command", "module", "run")
    given = {name: value for name, value in vars(args).items() if name not in ours}
    try:
        settings = module.settings(**given)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return module.run(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure fusedckpt.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, add_options, text, about, module in COMMANDS:
        # one line, where argparse would print every option above an error
        usage = f"python -m bench {name} [options]" if about else None
        command = commands.add_parser(name, usage=usage, help=text, description=about)
        add_options(command)
        command.set_defaults(run=partial(_run, command), module=module or name)
    return parser


def main(argv: Sequence[str] | None = None, supervised: bool = False) -> int:
    """Run one command and return its exit status, 130 where Ctrl-C ended it.

    supervised: in a process of its own, where the command can go on after a crash.
    """
    try:
        return _main(sys.argv[1:] if argv is None else argv, supervised)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _main(argv: Sequence[str], supervised: bool) -> int:
    # kineto reports every profile on stderr unless told not to before the first one; 5, the value
    # commonly advised, still lets its highest level through
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # a backward measured alone frees what was there before, which the profiler warns of
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # read when torch is imported: four steps of the demo took 77 s on two busy cores with threads
    # that spin while they wait, 17 s with threads that sleep
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        parser.exit(2, f"bench needs {' and '.join(missing)}: {INSTALL}\n")
    # None: the command has a journal, and this is not yet the process that writes it
    if supervised and getattr(args, "journal", "") is None:
        return supervise(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main(supervised=True))
