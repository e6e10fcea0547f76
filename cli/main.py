"""``msmodeling``: sub-commands for every question. Nothing heavy is imported before a sub-command runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from cli.guard import Parser, run_guarded

#: Sub-command -> (module with ``add_arguments(parser)`` and ``run(args) -> exit code``, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "throughput_optimizer": (
        "cli.inference.throughput_optimizer",
        "find the layout and batch size that serve most tokens under limits on TTFT and TPOT",
    ),
    "text_generate": ("cli.inference.text_generate", "price one step: time by op and layer, bound, memory"),
    "capacity": (
        "cli.inference.capacity",
        "KV cache size as the engine computes it, memory by pipeline stage, best partition",
    ),
    "trace": ("cli.inference.trace", "list the ops, shapes and collectives of one step on one rank"),
    "verify": (
        "cli.inference.verify",
        "prove a layout: run a small copy on this machine, compare it with Transformers",
    ),
    "workload": ("cli.inference.workload", "an example cost model, stages against tensor parallelism and replicas"),
    "devices": ("cli.inference.devices", "list the embedded devices"),
    "models": ("cli.inference.models", "list the embedded model configs"),
}


def build_parser(command: str | None) -> Parser:
    """The parser; only ``command``'s own options are filled in, so that no other module is imported."""
    parser = Parser(
        prog="msmodeling",
        description="Predict, without an accelerator, how much memory an LLM deployment needs and how fast it serves.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            import_module(module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Exit codes: 0 done, 1 verify differs, 2 bad input, 3 nothing feasible."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in argv if a in COMMANDS), None)
    parser = build_parser(command)
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(f"msmodeling {version('msmodeling')}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    run: Callable[[argparse.Namespace], int] = import_module(COMMANDS[args.command][0]).run
    return run_guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
