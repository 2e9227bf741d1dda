"""Try random configurations of every function, of Sequentials and of norms with several readers.

    python -m tests.fuzz --seconds 60 --seed 1 [--path interpreter] [--count 1000]
    python -m tests.fuzz --config '{"function": "mlp", "rows": [0]}'
    python -m tests.fuzz --nets 100 --first 0

Exits with 1 if any fails, after a line that reproduces it, made as plain as it still fails. With
--nets it runs random convolutional nets instead, and prints the code of those that fail.
"""

from __future__ import annotations

import argparse
import os
import sys


def main() -> int:
    """Parse the command line, choose the path, and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="how long (60, unless --count is given)")
    parser.add_argument("--count", type=int, help="how many configurations")
    parser.add_argument("--path", choices=("aten", "interpreter"), default="aten")
    parser.add_argument("--first", type=int, default=0, help="index of the first configuration")
    parser.add_argument("--nets", type=int, help="run so many nets, from the number --first on")
    parser.add_argument("--config", help="run this one, as a failure prints it")
    parser.add_argument("--max-failures", type=int, default=10, help="stop after so many")
    args = parser.parse_args()
    # fixed for the process when triton is imported
    os.environ.pop("TRITON_INTERPRET", None)
    if args.path == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"
        from tests import quick_interpreter

        quick_interpreter.patch()
    from .loop import reproduce, search

    if args.nets is not None:
        from .nets import search_nets

        return search_nets(range(args.first, args.first + args.nets))
    if args.config is not None:
        return reproduce(args.config, args.path)
    seconds = 60.0 if args.seconds is None and args.count is None else args.seconds
    return search(args.seed, args.first, seconds, args.count, args.path, args.max_failures)


if __name__ == "__main__":
    sys.exit(main())
