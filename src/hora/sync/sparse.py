"""Sparse gradients (embeddings with `sparse=True`): rows gathered from all ranks instead of a dense sum.

What travels is the rows that were used, so a large table costs what its batch touches. Relies on `all_gather` with unequal sizes.
"""

import torch
from torch import Tensor, nn

from hora.comm.collectives import all_gather
from hora.errors import ConfigError


def sparse_parameter_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters whose gradients are sparse: weights of embeddings made with `sparse=True`."""
    return frozenset(
        f"{prefix}.weight" if prefix else "weight"
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )


def sum_sparse_gradient(parameter: nn.Parameter, total_weight: Tensor) -> None:
    """Replaces the sparse `.grad` by the mean over the global batch, coalesced; leaves None where no rank has rows.

    Collective: all ranks call it for the same parameters in one order.

    Raises:
        ConfigError: the gradient is dense although the embedding says `sparse=True`.
    """
    gradient = parameter.grad
    if gradient is not None and not gradient.is_sparse:
        raise ConfigError(
            "a weight of an embedding with sparse=True must get sparse gradients, but a dense one came; do not tie it to a dense layer"
        )
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device)
    else:
        gradient = gradient.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
    all_rows, all_values = torch.cat(all_gather(rows)), torch.cat(all_gather(values))
    if gradient is None and all_rows.numel() == 0:
        return
    # Said outright, since torch warns (inside `coalesce` too) when nobody has said whether indices are to be checked. These come from other
    # ranks, and are.
    with torch.sparse.check_sparse_tensor_invariants():
        total = torch.sparse_coo_tensor(all_rows.unsqueeze(0), all_values, parameter.shape, device=parameter.device).coalesce()
        mean = total.values() / total_weight
        parameter.grad = torch.sparse_coo_tensor(total.indices(), mean, parameter.shape, is_coalesced=True, device=parameter.device)
