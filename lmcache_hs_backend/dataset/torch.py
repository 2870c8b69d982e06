"""``HiddenStateDataset``: a cold path as a torch Dataset, rows straight from the chunks.

For a training loop of one's own. Nothing is written but the cache of what URLs give; a sample is read and checked when
it is asked for, and only the layers asked for are read. Picklable, so it works with DataLoader workers of every start
method; where a path is a URL (``s3://``, …), of every one but fork, which the client of a bucket does not survive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from lmcache_hs_backend.dataset.chains import neighbours
from lmcache_hs_backend.dataset.plan import Choice, Plan, make_plan, plan_norm
from lmcache_hs_backend.format.url_files import DEFAULT_CACHE_GB, url_options


class HiddenStateDataset(Dataset[dict[str, torch.Tensor]]):
    """Samples of one or more cold paths, as they were when this object was made.

    An item is a dict of CPU tensors, for S tokens, n auxiliary layers and hidden size H:
    ``input_ids``, ``loss_mask``, ``position_ids`` int64 ``[S]``; ``hidden_states`` bf16 ``[S, n * H]``;
    ``last_hidden_states`` bf16 ``[S, H]``.

    A context manager, or to be closed: with URLs it has threads and connections.
    """

    def __init__(
        self,
        cold_paths: str | Sequence[str],
        *,
        layers: Sequence[int] | None = None,
        last_layer: int | None = None,
        sequences: str = "leaves",
        loss_mask: str | None = None,
        tokenizer: str | None = None,
        model: str | None = None,
        min_tokens: int = 1,
        max_tokens: int | None = None,
        final_norm: str | None = None,
        norm_kind: str | None = None,
        shared_options: Mapping[str, Any] | None = None,
        cache_dir: str | None = None,
        cache_gb: float = DEFAULT_CACHE_GB,
    ) -> None:
        """Look through the cold paths and plan the samples. Arguments mean what the extractor's options mean.

        Args:
            cold_paths: One or more cold paths, or URLs of shared tiers. The same chunk found twice counts once.
            layers: Storage slots of the auxiliary layers, in the order of the columns; None: all but the last.
            last_layer: Storage slot of the last layer; None: the one that the capture names.
            sequences: ``leaves``, ``requests`` or ``dataset:PATH``: what becomes a sample.
            loss_mask: ``all``, ``generated``, ``chatml``, ``llama3`` or ``dataset``; None: what suits ``sequences``.
            tokenizer: Directory with a ``tokenizer.json``, for the masks of chat templates.
            model: ``NAME[@REVISION][/KV_DTYPE]``, where there are several.
            min_tokens: Shorter samples are left out.
            max_tokens: Longer samples are cut.
            final_norm: Directory of the model. ``last_hidden_states`` are then after its final norm, which is
                applied where they were stored before it.
            norm_kind: Which norm that is, where the model's type does not tell.
            shared_options: obstore's options for URLs, as the setting of that name; see ``ColdTierReader``.
            cache_dir: Where rows that came from a URL are kept for the next epoch; None: in the user's cache directory.
            cache_gb: GB (1024³ bytes) of them, at most; 0: none.

        Raises:
            DatasetError: The paths, layers or options do not fit what is stored; says what does.
        """
        choice = Choice(
            cold_paths=(cold_paths,) if isinstance(cold_paths, str) else tuple(cold_paths),
            model=model,
            layers=None if layers is None else tuple(layers),
            last_layer=last_layer,
            sequences=sequences,
            loss_mask=loss_mask,
            tokenizer=tokenizer,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            urls=url_options(shared_options, cache_dir, int(cache_gb * 2**30)),
        )
        self.plan: Plan = make_plan(choice)
        try:
            norm = plan_norm(self.plan, None if final_norm is None else True, final_norm, norm_kind)
        except BaseException:
            self.close()
            raise
        self._reader, self.normed = norm.reader, norm.normed
        self.warnings = list(self.plan.warnings)

    def close(self) -> None:
        """Give up the threads and connections of URLs, without waiting. What is read after that starts new ones.

        Those of DataLoader workers end with the workers.
        """
        self.plan.close()

    def __enter__(self) -> HiddenStateDataset:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.plan.samples)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sample, for batching, without reading any."""
        return [sample.tokens for sample in self.plan.samples]

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Read and check one sample.

        Raises:
            RowRejected: The sample fails a check, such as a chunk that has been deleted since.
        """
        sample = self.plan.samples[number]
        rows = self._reader.read(sample, stacked=False)
        return {
            "input_ids": rows.ids,
            "loss_mask": self.plan.mask(sample, rows.ids),
            "hidden_states": rows.aux.flatten(1),
            "last_hidden_states": rows.last,
            "position_ids": torch.arange(sample.tokens),
        }

    def nearby(self, block: int = 64, seed: int = 0) -> NearbySampler:
        """A shuffle that keeps samples which share chunks near each other, so that those are read once."""
        return NearbySampler(neighbours(self.plan.index, self.plan.samples), block, seed)


class NearbySampler(Sampler[int]):
    """Shuffles blocks of neighbouring samples, and the samples within each; another order in every epoch."""

    def __init__(self, order: Sequence[int], block: int, seed: int) -> None:
        if block < 1:
            raise ValueError(f"block is {block}, but must be at least 1")
        self._order = list(order)
        self._block = block
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The next pass is this epoch; its order depends on seed and epoch alone."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        self._epoch += 1  # now: an epoch that is broken off is one too
        blocks = -(-len(self._order) // self._block)
        for block in torch.randperm(blocks, generator=generator).tolist():
            members = self._order[block * self._block : (block + 1) * self._block]
            for member in torch.randperm(len(members), generator=generator).tolist():
                yield members[member]
