"""Who looked at what: attention of a prompt's last queries over its keys, from the rotated tensors themselves."""

import torch


def window_attention(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Attention weights of the last queries of a prompt, each seeing what came before it and itself.

    Args:
        queries: (w, query_heads, head_width), of the last w tokens.
        keys: (kv_heads, n, head_width), of all n tokens.

    Returns:
        float32 (query_heads, w, n); query head h belongs to KV head `h // (query_heads / kv_heads)`.
    """
    window, heads, width = queries.shape
    context = keys.shape[1]
    grouped = queries.float().view(window, keys.shape[0], -1, width).permute(1, 2, 0, 3)
    scores = torch.einsum("hgwd,hnd->hgwn", grouped, keys.float()) * width**-0.5
    seen = torch.ones(window, context, dtype=torch.bool, device=keys.device).tril(context - window)
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).reshape(heads, window, context)


def group_mean(per_query_head: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The mean over the query heads of each KV head: (query_heads, ...) -> (kv_heads, ...)."""
    return per_query_head.unflatten(0, (kv_heads, -1)).mean(dim=1)
