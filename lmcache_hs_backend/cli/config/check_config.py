"""``lmcache-hs-inspect check-config``: would the plugin load, and if not, which key is wrong?"""

from __future__ import annotations

import argparse
from typing import Any

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.config.verdict import Remark, Verdict, check
from lmcache_hs_backend.cli.console import Output, add_output_options, bytes_text
from lmcache_hs_backend.config import ADVANCED
from lmcache_hs_backend.integrations.lmcache.lmcache_settings import lmcache_directory

HELP = "say whether LMCache would load the plugin with a configuration, and if not, which key is wrong"
EXAMPLE = """\
Reads FILE, then LMCACHE_* from the environment over it, as LMCache does. Exit status 1 when the plugin would not
load, or would load and do nothing, or keep nothing on disk.

example:
  lmcache-hs-inspect check-config lmcache.yaml --probe-disk
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="LMCache's YAML file (default: $LMCACHE_CONFIG_FILE, else no file)"
    )
    parser.add_argument(
        "--probe-disk",
        action="store_true",
        help="also write and read a file of 64 MB in the cold path, which is created for it, and say how fast that was",
    )
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Check, print, and give the exit status. Raises CommandError where the disk cannot be probed."""
    verdict = check(args.file)
    probe: dict[str, Any] | None = None
    if args.probe_disk and verdict.config is not None and verdict.loads:
        from lmcache_hs_backend.cli.config.disk_probe import probe_disk

        probe = probe_disk(verdict.config)
    disk = verdict.disk._asdict() if verdict.disk else {}
    with Output(args) as output:
        if output.json:
            output.dump(
                {
                    "loads": verdict.loads,
                    "plugin": verdict.plugin or None,
                    "problems": [problem._asdict() for problem in verdict.problems],
                    "warnings": [warning._asdict() for warning in verdict.warnings],
                    "settings": [setting._asdict() for setting in verdict.settings],
                    "disk": {**disk, **(probe or {})},
                    "lmcache_installed": lmcache_directory() is not None,
                }
            )
        else:
            _print(output, verdict, disk, probe)
    return exit_status.DONE if verdict.loads else exit_status.FINDING


def _print(output: Output, verdict: Verdict, disk: dict[str, Any], probe: dict[str, Any] | None) -> None:
    for advanced in (False, True):
        rows = [(s.name, _text(s.value), s.source, s.doc) for s in verdict.settings if (s.name in ADVANCED) is advanced]
        if rows:
            output.table(("advanced" if advanced else "setting", "value", "from", "meaning"), rows)
            output.show("")
    if disk:
        free, total = bytes_text(disk["free_bytes"]), bytes_text(disk["total_bytes"])
        output.show(f"disk: {free} free of {total} at {disk['path']}")
    if probe:
        output.show(
            f"disk: O_DIRECT {'works' if probe['o_direct'] else 'does not work'}; wrote "
            f"{bytes_text(probe['write_bytes_per_sec'])}/s, read {bytes_text(probe['read_bytes_per_sec'])}/s"
        )
    for warning in verdict.warnings:
        output.show(f"warning: {_say(warning)}", style="yellow")
    for problem in verdict.problems:
        output.show(f"problem: {_say(problem)}", style="bold red")
    if lmcache_directory() is None:
        output.show("note: LMCache is not installed here; only what matters to the plugin is judged")
    if verdict.loads:
        output.show(f"the plugin would load, as {verdict.plugin!r}", style="bold green")
    else:
        keys = list(dict.fromkeys(problem.key for problem in verdict.problems if problem.key))
        what = f": wrong {'key' if len(keys) == 1 else 'keys'}: {', '.join(keys)}" if keys else ""
        output.show(f"the plugin would not work{what}", style="bold red")


def _say(remark: Remark) -> str:
    return remark.text if not remark.key or remark.key in remark.text else f"{remark.key}: {remark.text}"


def _text(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
