"""``lmcache-hs-inspect``: puts the sub-commands together.

Each is a module of its own with ``HELP``, ``EXAMPLE``, ``add_arguments`` and ``execute``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Sequence

from lmcache_hs_backend import __version__
from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.arguments import Parser
from lmcache_hs_backend.cli.console import run

PROGRAM = "lmcache-hs-inspect"

#: Sub-command → its module below ``cli``.
COMMANDS = {
    "list": "inspect.browse.list",
    "show": "inspect.browse.show",
    "tree": "inspect.browse.tree",
    "stats": "inspect.figures.stats",
    "report": "inspect.figures.report",
    "verify": "inspect.care.verify",
    "rm": "inspect.care.rm",
    "gc": "inspect.care.gc",
    "check-config": "config.check_config",
}


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Look into the cold tier of LMCache's hidden states. Needs neither LMCache nor a GPU, and reads "
        "beside a running engine.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(f"lmcache_hs_backend.cli.{module_name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=module.EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Returns:
        One of ``exit_status``.
    """
    return run(PROGRAM, lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return exit_status.ERROR  # as LMCache's own program
    with contextlib.ExitStack() as args.at_end:
        return int(args.execute(args))
