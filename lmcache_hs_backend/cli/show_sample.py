"""``lmcache-hs-extract show``: one sample of a written set as a person wants to see it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.text import Text

from lmcache_hs_backend.cli.arguments import Parser, at_least
from lmcache_hs_backend.cli.console import CommandError, Output, add_output_options, printable, run
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.masks import spans
from lmcache_hs_backend.dataset.written_set import WrittenSample, WrittenSet

PROGRAM = "lmcache-hs-extract show"
#: Around what is trained on, where there are no colours.
_OPEN, _CLOSE = "⟦", "⟧"
#: Tokens that one character may be spread over, at most.
_LONGEST = 4


def main(argv: Sequence[str]) -> int:
    """Run the command, and give its exit status: 0, 1 on an error."""
    parser = Parser(
        prog=PROGRAM,
        description="Show a sample of a set that lmcache-hs-extract has written, in any format: its text with what is "
        f"trained on in green (in {_OPEN} {_CLOSE} where there are no colours), and the layers with the norms of their "
        "rows. JSON has every token.",
    )
    parser.add_argument("set", metavar="SET", help="the folder, as given to --out")
    parser.add_argument("number", metavar="N", nargs="?", type=at_least(0), default=0, help="which sample (default: 0)")
    parser.add_argument("--tokenizer", metavar="DIR", help="where tokenizer.json is; without it ids are shown")
    parser.add_argument("--tokens", action="store_true", help="also a line for each token, with its norm in each layer")
    add_output_options(parser)
    return run(PROGRAM, lambda: _show(parser.parse_args(argv)))


def _show(args: argparse.Namespace) -> int:
    try:
        written = WrittenSet(args.set)
        sample = written.sample(args.number)
    except DatasetError as error:
        raise CommandError(str(error)) from None
    pieces = _pieces(sample.ids.tolist(), args.tokenizer)
    norms = [(slot, torch.linalg.vector_norm(rows.float(), dim=-1)) for slot, rows in sample.layers]
    with Output(args) as screen:
        if screen.json:
            screen.dump(_record(written, sample, pieces, norms))
        else:
            _print(screen, written, sample, pieces, norms, args.tokens)
    return 0


def _pieces(ids: list[int], tokenizer: str | None) -> list[str] | None:
    """The text of each token, so that they make the whole text; None without a tokenizer."""
    if tokenizer is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CommandError("--tokenizer needs tokenizers: pip install 'lmcache-hs-backend[extract]'") from None
    path = os.path.join(tokenizer, "tokenizer.json") if os.path.isdir(tokenizer) else tokenizer
    if not os.path.isfile(path):
        raise CommandError(f"--tokenizer {tokenizer}: there is no tokenizer.json")
    try:
        decode: Callable[..., str] = Tokenizer.from_file(path).decode
    except Exception as error:  # noqa: BLE001 - the library raises no narrower one for a file that is none
        raise CommandError(f"--tokenizer {tokenizer}: {path} cannot be read: {error}") from None
    pieces: list[str] = []
    before: list[int] = []  # what a token adds depends on the one before it: some decoders drop a text's first space
    pending: list[int] = []
    for token in ids:  # a character may be spread over several tokens: it is shown with the last of them
        pending.append(token)
        known = decode(before, skip_special_tokens=False) if before else ""
        text = decode([*before, *pending], skip_special_tokens=False)[len(known) :]
        if text.endswith("\ufffd") and len(pending) < _LONGEST and len(pieces) + 1 < len(ids):
            pieces.append("")
        else:
            pieces.append(text)
            before, pending = [token], []
    return pieces


def _names(written: WrittenSet) -> dict[int, str]:
    """What each storage slot is, in words."""
    layers = written.manifest["layers"]
    aux = [slot for slot in layers["slots"] if slot != layers["last"]]
    names = dict.fromkeys(aux, "")
    for slot, output in zip(aux, layers["output_ids"] or (), strict=False):
        names[slot] = f"output of layer {output}"
    return names | {layers["last"]: f"last layer, {written.manifest['last_layer']}"}


def _record(
    written: WrittenSet, sample: WrittenSample, pieces: list[str] | None, norms: list[tuple[int, torch.Tensor]]
) -> dict[str, Any]:
    names = _names(written)
    return {
        "set": written.path, "trainer_format": written.manifest["trainer_format"], "model": written.manifest["model"],
        "sample": sample.number, "samples": len(written), "file": sample.file, "split": sample.split,
        "tokens": len(sample.ids), "tokens_trained": int(sample.mask.sum()), "loss_spans": spans(sample.mask),
        "input_ids": sample.ids.tolist(), "loss_mask": sample.mask.tolist(), "text": pieces,
        "layers": [
            {
                "slot": slot, "what": names[slot], "hidden_size": rows.shape[1], "dtype": str(rows.dtype)[6:],
                "finite": bool(torch.isfinite(rows.float()).all()), "norms": [round(n, 4) for n in each.tolist()],
            }
            for (slot, rows), (_, each) in zip(sample.layers, norms, strict=True)
        ],
    }  # fmt: skip


def _print(
    screen: Output, written: WrittenSet, sample: WrittenSample, pieces: list[str] | None,
    norms: list[tuple[int, torch.Tensor]], every_token: bool,
) -> None:  # fmt: skip
    manifest = written.manifest
    trained = int(sample.mask.sum())
    screen.show(
        f"sample {sample.number} of {len(written)} ({manifest['trainer_format']}, {sample.split}), {sample.file}: "
        f"{len(sample.ids)} tokens, {trained} trained on, in {len(spans(sample.mask))} spans"
    )
    names = _names(written)
    screen.table(
        (">SLOT", "WHAT", "ROWS", "DTYPE", ">NORM: MEDIAN", ">LEAST", ">LARGEST"),
        [
            (
                str(slot), names[slot], f"{rows.shape[0]} x {rows.shape[1]}", str(rows.dtype)[6:],
                *(f"{float(value):.4g}" for value in (each.median(), each.min(), each.max())),
            )
            for (slot, rows), (_, each) in zip(sample.layers, norms, strict=True)
        ],
    )  # fmt: skip
    screen.show("")
    screen.show(_text(sample, pieces, colour=screen.width is not None))
    if every_token:
        screen.show("")
        texts = pieces or [""] * len(sample.ids)
        screen.table(
            (">TOKEN", ">ID", "TRAINED", "TEXT", *(f">NORM {slot}" for slot, _ in norms)),
            [
                (str(at), str(token), "yes" if on else "", printable(text), *(f"{float(n[at]):.4g}" for _, n in norms))
                for at, (token, on, text) in enumerate(
                    zip(sample.ids.tolist(), sample.mask.tolist(), texts, strict=True)
                )
            ],
        )


def _text(sample: WrittenSample, pieces: list[str] | None, *, colour: bool) -> Text:
    shown = [f"{token} " for token in sample.ids.tolist()] if pieces is None else pieces
    text = Text()
    before = 0
    for piece, on in zip(shown, sample.mask.tolist(), strict=True):
        if not colour and on != before:
            text.append(_OPEN if on else _CLOSE)
        before = on
        clean = "\n".join(printable(line) for line in piece.split("\n"))
        text.append(clean, style="black on green" if on and colour else None)
    if before and not colour:
        text.append(_CLOSE)
    return text
