"""One pass over one or several cold paths: a verifier for each; one sample, one limit of time, one cursor for all.

What costs most comes first, everywhere: all are listed, then whole files are read, cold path after cold path, then
headers, then chains. So the next run goes on in the middle of where the time was over, and no cold path's chains keep
the files of a later one from their turn.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from lmcache_hs_backend.cli.console import Output
from lmcache_hs_backend.cli.inspect.care.record_check import RecordCheck
from lmcache_hs_backend.cli.inspect.care.verifier import (
    IDS_BYTES,
    Extent,
    FilePlace,
    FilesAndBytes,
    Finding,
    Verifier,
    draw,
)
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import ColdTierReader


class Verification:
    """The check of some cold paths. Its figures are the sums of those of its verifiers, by the same names."""

    def __init__(self, readers: Sequence[ColdTierReader], extent: Extent, after: Mapping[str, FilePlace]) -> None:
        """``after``: where an earlier pass has stopped, by cold path (``Extent.after``)."""
        self._extent = extent
        buckets = sum(not reader.source.is_local for reader in readers)
        self.verifiers = [
            Verifier(reader, extent._replace(after=after.get(reader.cold_path)), ids_bytes=IDS_BYTES // max(1, buckets))
            for reader in readers
        ]
        self.findings: list[list[Finding]] = [[] for _ in self.verifiers]

    def run(self, output: Output) -> list[list[Finding]]:
        """What is wrong, by cold path. Shows on ``output`` how far it has come."""
        to_read = self._find()
        for verifier, findings in zip(self.verifiers, self.findings, strict=True):
            findings += verifier.check_rest()
        with output.progress("reading files", to_read.bytes, in_bytes=True) as advance:
            self._go_on(lambda verifier: verifier.check_rows(advance))
        others = 0 if self.cut_short else self.found.chunks - to_read.chunks
        with output.progress("reading headers", others) as advance:
            self._go_on(lambda verifier: verifier.check_headers(advance))
        for verifier, findings in zip(self.verifiers, self.findings, strict=True):
            findings += verifier.check_records()
        links = 0 if self.cut_short else sum(verifier.links for verifier in self.verifiers)
        with output.progress("following chains", links) as advance:
            self._go_on(lambda verifier: verifier.check_chains(advance))
        return self.findings

    def _find(self) -> FilesAndBytes:
        """Find all files, and draw the sample from all of them; what is to be read whole."""
        if self._extent.sample is None:
            return FilesAndBytes.sum([verifier.find() for verifier in self.verifiers])
        every = itertools.chain.from_iterable(verifier.find_files() for verifier in self.verifiers)
        drawn = draw(every, self._extent.sample)
        for verifier in self.verifiers:
            below = f"{verifier.reader.cold_path}/"
            verifier.read_only({path: size for path, size in drawn.items() if path.startswith(below)})
        return FilesAndBytes.of(drawn.values())

    def _go_on(self, check: Callable[[Verifier], Iterable[Finding]]) -> None:
        """Check one cold path after the other, as long as there is time, but those whose listing has broken off."""
        for verifier, findings in zip(self.verifiers, self.findings, strict=True):
            if self.time_over:
                verifier.out_of_time()
            elif not verifier.broken_off:
                findings += check(verifier)

    # -- figures of all ------------------------------------------------------------------------------------

    @property
    def read(self) -> FilesAndBytes:
        """See Verifier, as for all that follow."""
        return FilesAndBytes.sum(verifier.read for verifier in self.verifiers)

    @property
    def found(self) -> FilesAndBytes:
        """All chunk files."""
        return FilesAndBytes.sum(verifier.found for verifier in self.verifiers)

    @property
    def headers(self) -> FilesAndBytes:
        """Those of which only the header was read."""
        return FilesAndBytes.sum(verifier.headers for verifier in self.verifiers)

    @property
    def read_before(self) -> FilesAndBytes:
        """Those that earlier passes have read."""
        return FilesAndBytes.sum(verifier.read_before for verifier in self.verifiers)

    @property
    def not_reached(self) -> FilesAndBytes:
        """Those that were not looked at."""
        return FilesAndBytes.sum(verifier.not_reached for verifier in self.verifiers)

    @property
    def skipped(self) -> Counter[str]:
        """Those that vanished."""
        return sum((verifier.skipped for verifier in self.verifiers), Counter())

    @property
    def time_over(self) -> bool:
        """Whether the time was over before everything was checked."""
        return any(verifier.time_over for verifier in self.verifiers)

    @property
    def broken_off(self) -> bool:
        """Whether a bucket has broken off its listing before everything was checked."""
        return any(verifier.broken_off for verifier in self.verifiers)

    @property
    def cut_short(self) -> bool:
        """Whether not everything was checked that should have been."""
        return any(verifier.cut_short for verifier in self.verifiers)

    @property
    def chains_followed(self) -> bool:
        """Whether chains have been followed everywhere."""
        return all(verifier.chains_followed for verifier in self.verifiers)

    @property
    def records(self) -> dict[str, RecordCheck]:
        """The request records, by the directory of the namespace."""
        return {directory: check for verifier in self.verifiers for directory, check in verifier.records.items()}

    @property
    def unjudged(self) -> list[NamespaceDirectory]:
        """Namespaces in use whose missing parents may be in RAM."""
        return [namespace for verifier in self.verifiers for namespace in verifier.unjudged]
