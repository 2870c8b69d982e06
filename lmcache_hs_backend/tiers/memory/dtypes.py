"""The one place where the dtypes of rows meet torch: files and layers name them as safetensors does.

Both tables are looked up on the way of every chunk, so they are plain dictionaries. Also what rows must be to be kept.
"""

from __future__ import annotations

import torch

#: safetensors' name → torch's dtype, for the float types that rows keep.
TORCH_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: The other direction. A dtype that is not here is converted or refused before rows are stored.
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def checked_rows(rows: torch.Tensor, least: int, most: int | None = None) -> torch.Tensor:
    """Rows in a dtype that is kept, outside autograd: float64 becomes float32, everything else stays as it is.

    Args:
        rows: ``[num_tokens, hidden_dim]``, float.
        least: How many rows there must be.
        most: How many there may be; None: ``least``.

    Raises:
        ValueError: They cannot be kept; says what was given and what is allowed.
    """
    shape = rows.shape
    if len(shape) != 2:
        raise ValueError(f"hidden_states must be 2-D [num_tokens, hidden_dim], got shape {tuple(shape)}")
    if not least <= shape[0] <= (least if most is None else most):
        allowed = f"({least})" if most in (None, least) else f"({most}), or reach the end of the last chunk ({least})"
        raise ValueError(f"hidden_states first dim ({shape[0]}) must equal len(token_ids) - token_offset {allowed}")
    if shape[1] == 0:
        raise ValueError(f"hidden_states must have at least one column, got shape {tuple(shape)}")
    if rows.requires_grad:
        rows = rows.detach()  # or the whole tier would be a function of them, in the eyes of autograd
    if rows.dtype in DTYPE_NAMES:
        return rows
    if not rows.dtype.is_floating_point:
        raise ValueError(f"hidden_states must be float (bfloat16, float16, float32 or float64), got {rows.dtype}")
    converted = rows.to(torch.float32)
    if rows.dtype == torch.float64 and not torch.equal(converted.isfinite(), rows.isfinite()):
        raise ValueError(
            "hidden_states are float64 with a finite value beyond float32's range "
            f"(at most {torch.finfo(torch.float32).max:.4g}): scale them, or store another dtype"
        )
    return converted
