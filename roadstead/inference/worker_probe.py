"""What a worker's model computes now, told apart from what it computed before.

Owns: one forward pass on eight fixed tokens. Never touches: requests and their KV, the scheduler, the weights.
Invariant: it is the serving model on the serving kernels, alone in its batch, so that the same weights give the same
bits however busy the engine is; and it runs while the scheduler is paused, so that an update is proved before its
version is claimed. It reads and writes the null block only, whose content no request ever reads.
A crash leaves: nothing.

Why not a request: one waits in the queue behind the paused ones, and on a busy engine for minutes after them.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec

_TOKENS = 8
"""At least one block of KV holds so many: 16 is the smallest block size in use."""
_NULL_BLOCK = 0


def logits_digest(runner: Any, vllm_config: Any) -> str | None:
    """sha256 of the logits of eight fixed tokens, each given those before it; float32, (8, vocabulary).

    None: the model isn't one of attention layers and plain positions, and no verdict is possible. With tensor
    parallelism only some ranks hold logits; the others answer None too.
    """
    groups = [group for by_cache in runner.attn_groups for group in by_cache]
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    if vllm_config.model_config.uses_mrope or not all(isinstance(spec, AttentionSpec) for spec in specs):
        return None
    device = runner.device
    tokens = torch.arange(1, _TOKENS + 1, device=device)
    positions = torch.arange(_TOKENS, device=device)
    ends = torch.tensor([0, _TOKENS], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=ends.to(device),
        query_start_loc_cpu=ends,
        seq_lens=ends[1:].to(device),
        num_reqs=1,
        num_actual_tokens=_TOKENS,
        max_query_len=_TOKENS,
        max_seq_len=_TOKENS,
        block_table_tensor=torch.full((1, 1), _NULL_BLOCK, dtype=torch.int32, device=device),
        slot_mapping=positions.clone(),
        positions=positions,
        seq_lens_cpu_upper_bound=ends[1:],
        is_prefilling=torch.tensor([True]),
    )
    metadata: dict[str, Any] = {}
    slots: dict[str, Any] = {}
    for group in groups:
        built = group.get_metadata_builder(0).build(common_prefix_len=0, common_attn_metadata=batch)
        metadata |= dict.fromkeys(group.layer_names, built)
        slots |= dict.fromkeys(group.layer_names, batch.slot_mapping)
    model = runner.get_model()
    with (
        torch.inference_mode(),
        set_forward_context(metadata, vllm_config, num_tokens=_TOKENS, slot_mapping=slots),
    ):
        logits = model.compute_logits(model(input_ids=tokens, positions=positions))
    return None if logits is None else hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()
