"""`python -m bench <command>`: reads the command line and hands over to the command's module."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from bench.settings import parsers

# and these draw
NEEDS, DRAWING = ("matplotlib",), ("demo", "paper", "classics", "ways", "plot")
INSTALL = 'pip install -c constraints.txt -e ".[bench]"'
# the exit status of a command that Ctrl-C ended
INTERRUPTED = 130


def _run(parser: ArgumentParser, args: Namespace) -> int:
    before = signal.getsignal(signal.SIGINT)
    # libraries being imported swallow KeyboardInterrupt; in a shell's background it is ignored
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        module = import_module(f"bench.{args.command}")
        environment = import_module("bench.env")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        chosen = environment.settled(vars(args))
        # a command that only prints has nothing to check
        prepared = module.prepare(chosen) if hasattr(module, "prepare") else chosen
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return module.run(prepared)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, 130 where Ctrl-C ended it."""
    # kineto reports every profile on stderr unless told not to before the first one; 5, the value
    # commonly advised, still lets its highest level through
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # a backward measured alone frees memory allocated before it, which the profiler warns of
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # read when torch is imported: four steps of the demo took 77 s on two busy cores with threads
    # that spin while they wait, 17 s with threads that sleep
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser, commands = parsers()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing and args.command in DRAWING:
        parser.exit(2, f"bench needs {' and '.join(missing)}: {INSTALL}\n")
    try:
        return _run(commands[args.command], args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
