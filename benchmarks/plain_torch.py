"""The plain torch recipe that the benchmarks compare with: stock styles with sequence and loss parallelism, FSDP2 per
block, torch's `clip_grad_norm_`, foreach AdamW. It trains meshtrain's own Llama module, on the same mesh and data."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from meshtrain.models.llama import Llama


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Stock tensor, sequence and loss parallelism over tp, then FSDP2 over dp; the weights keep their values."""
    tp, dp = mesh["tp"], mesh["dp"]
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.model.layers:
        parallelize_module(
            layer,
            tp,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def step(model: nn.Module, opt: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """One step; returns the local mean loss."""
    with loss_parallel():
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if isinstance(norm, DTensor):
        norm.full_tensor()
    opt.step()
    opt.zero_grad()
    return loss.detach()
