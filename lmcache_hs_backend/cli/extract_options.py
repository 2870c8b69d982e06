"""The options of ``lmcache-hs-extract``. What each means for the set is decided elsewhere; nothing is read here."""

from __future__ import annotations

import argparse

from lmcache_hs_backend import __version__
from lmcache_hs_backend.cli.arguments import Parser, add_shared_options, at_least, fraction, size
from lmcache_hs_backend.dataset.final_norm import check_kind
from lmcache_hs_backend.dataset.formats import FORMATS
from lmcache_hs_backend.dataset.masks import KINDS
from lmcache_hs_backend.dataset.norm_kinds import KINDS as NORM_KINDS
from lmcache_hs_backend.format.url_files import DEFAULT_CACHE_GB

PROGRAM = "lmcache-hs-extract"


def extract_parser() -> Parser:
    """The parser of the command."""
    parser = Parser(
        prog=PROGRAM,
        description="Write the hidden states of cold paths as a training set. Several cold paths (nodes, ranks) are "
        "merged; the same chunk found twice counts once. `show SET [N]` shows a sample of what was written.",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument(
        "cold_path", nargs="+", metavar="COLD_PATH",
        help="as in the setting cold_path; or the URL of a shared tier, as in shared_url, which is read as it is",
    )  # fmt: skip
    add_shared_options(parser)
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where objects that several samples share are kept (default: the user's cache)",
    )
    parser.add_argument(
        "--cache-size", metavar="SIZE", type=size, default=int(DEFAULT_CACHE_GB * 2**30),
        help=f"how much of them, in GB or with a unit; 0: none (default: {DEFAULT_CACHE_GB:g})",
    )  # fmt: skip
    parser.add_argument("--out", required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--format", required=True, choices=sorted(FORMATS), help="the trainer that will read it")
    parser.add_argument(
        "--algorithm", metavar="NAME", choices=sorted({name for known in FORMATS.values() for name in known}),
        help="what it will be trained as, which decides the tensors for specforge and torchspec: eagle3 (the default), "
        "dflash, domino or dspark",
    )  # fmt: skip
    parser.add_argument(
        "--model", metavar="NAME[@REVISION][/KV_DTYPE]", help="which rows, where there are several models"
    )
    parser.add_argument(
        "--chunk-size", type=at_least(1), metavar="N", help="which chunks, where there are several sizes"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing but warnings and errors")
    what = parser.add_argument_group("samples")
    what.add_argument(
        "--sequences", default="leaves", metavar="leaves|requests|dataset:PATH",
        help="every maximal chain of chunks; what request records say; or the rows of a prepared dataset with "
        "input_ids and loss_mask, assistant_masks or labels: a datasets folder, JSONL or Parquet (default: leaves)",
    )  # fmt: skip
    what.add_argument(
        "--loss-mask", choices=KINDS,
        help="tokens to train on (default: dataset with a dataset; recorded with requests: the spans in the request "
        "record, or else what follows the prompt; else all)",
    )  # fmt: skip
    what.add_argument("--tokenizer", metavar="DIR", help="where tokenizer.json is, for --loss-mask chatml and llama3")
    what.add_argument("--min-tokens", type=at_least(1), default=1, metavar="N", help="leave out shorter samples")
    what.add_argument("--max-tokens", type=at_least(1), metavar="N", help="cut longer samples")
    what.add_argument(
        "--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N shares, from 1/N to N/N"
    )
    what.add_argument("--limit", type=at_least(1), metavar="N", help="the first N samples only")
    what.add_argument("--val-fraction", type=fraction, default=0.0, metavar="F", help="share of samples for validation")
    rows = parser.add_argument_group("hidden states")
    rows.add_argument(
        "--layers",
        type=_slots,
        metavar="A,B,C",
        help="storage slots of the auxiliary layers (default: all but the last)",
    )
    rows.add_argument(
        "--last-layer", type=int, metavar="Z", help="storage slot of the last layer (default: as captured)"
    )
    rows.add_argument(
        "--final-norm", metavar="MODEL_DIR",
        help="the model whose final norm the rows are checked against; applied where the format wants them after it",
    )  # fmt: skip
    rows.add_argument(
        "--norm-kind", type=_norm_kind, metavar="KIND[:EPS]",
        help=f"how that norm computes, where the model's type is not known: {', '.join(NORM_KINDS)}",
    )  # fmt: skip
    rows.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16", help="fp8: speculators only (default: bf16)")
    how = parser.add_argument_group("running")
    how.add_argument(
        "--workers", type=at_least(1), metavar="N",
        help="threads, each with one sample in memory (default: the number of CPUs, at most 4; on Ray 1 for each part)",
    )  # fmt: skip
    how.add_argument("--resume", action="store_true", help="go on where an earlier run with the same options ended")
    how.add_argument("--dry-run", action="store_true", help="say what would be written, and how long it would take")
    how.add_argument(
        "--strict", action="store_true",
        help="end with 1 when a sample was rejected, or a request, row or chunk file could not be used",
    )  # fmt: skip
    many = parser.add_argument_group(
        "many machines", "The same command line with --plan, then with --part 1/N to N/N, anywhere that sees the paths "
        "and --out, then with --finish; or all of it with --ray. The set is the one that a single machine writes.",
    )  # fmt: skip
    which = many.add_mutually_exclusive_group()
    which.add_argument("--plan", action="store_true", help="find the samples, and write none")
    which.add_argument(
        "--part",
        type=_shard,
        metavar="I/N",
        help="write the I-th of N parts; run again, it goes on after what it wrote",
    )
    which.add_argument("--finish", action="store_true", help="put the samples of all parts in order, and describe them")
    which.add_argument(
        "--ray", nargs="?", const="auto", metavar="ADDRESS",
        help="plan here, write the parts as tasks on a Ray cluster (default: the one that is running here, or a new "
        "one on this machine), finish here",
    )  # fmt: skip
    many.add_argument(
        "--ray-parts", type=at_least(1), metavar="N", help="parts on Ray (default: four for each of its CPUs)"
    )
    return parser


def _norm_kind(text: str) -> str:
    try:
        return check_kind(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _slots(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text != "none" else ()
    except ValueError:
        raise argparse.ArgumentTypeError("must be storage slots such as 2,15,27, or none") from None


def _shard(text: str) -> tuple[int, int]:
    try:
        number, of = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError("must be I/N, such as 1/4") from None
    if not 1 <= number <= of:
        raise argparse.ArgumentTypeError("must be I/N with I from 1 to N")
    return number, of
