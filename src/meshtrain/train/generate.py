"""Text from a model while it is still spread over its mesh. Not an inference engine: there is no key-value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ContractError
from ..parallel.state import find_state


@torch.no_grad()
def generate(
    model: nn.Module, ids: Sequence[int], n: int, *, window: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Continue the token ids `ids` by `n` tokens, and return those. Collective on a parallelized model.

    model: called as model(input_ids [1, window]) -> logits [1, window, vocab], as a DTensor where tp cuts them. It sees
    the last `window` tokens, always in the same shape, so that nothing is compiled twice. temperature 0 takes the most
    likely token. The first rank chooses each token, with a generator of its own seed, and tells the others.

    On a mesh every token gathers every FSDP unit: fine for a sample, and for a small model much slower than in one process.

    Raises ContractError when there is no token to begin from, or the window is below 1.
    """
    if not ids or window < 1:
        raise ContractError(f"generate() was given {len(ids)} tokens and a window of {window}; both must be at least 1")
    state = find_state(model)
    device = torch.device(state.mesh.device_type) if state else next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(ids)
    training = model.training
    model.eval()
    try:
        for _ in range(n):
            seen = text[-window:]
            # Attention is causal, so what stands after the last token does not matter.
            padded = torch.tensor([seen + [0] * (window - len(seen))], device=device)
            token = _choose(model(padded), len(seen) - 1, temperature, generator)
            if state is not None and state.sizes.world > 1:
                dist.broadcast(token, src=0, group=state.world)
            text.append(int(token))
    finally:
        model.train(training)
    return text[len(ids) :]


def _choose(logits: Tensor, position: int, temperature: float, generator: torch.Generator) -> Tensor:
    row = (logits.full_tensor() if isinstance(logits, DTensor) else logits)[0, position].float()
    if temperature <= 0:
        return row.argmax()
    # On the CPU, whose generator gives the same numbers everywhere.
    chances = torch.softmax(row.cpu() / temperature, dim=-1)
    return torch.multinomial(chances, 1, generator=generator)[0].to(row.device)
