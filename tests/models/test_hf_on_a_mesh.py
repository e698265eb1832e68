"""Checkpoints go from transformers to a mesh and back, and a step there is a step of a plain transformers loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.parallel import parallelize
from meshtrain.state.pretrained import load_pretrained, save_pretrained
from meshtrain.train.optim import adamw
from meshtrain.train.step import loss_in_model, train_step
from tests.ranks import mesh

VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "uneven": {"vocab_size": 257, "intermediate_size": 51},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "bf16": {},
    "sharded": {"num_hidden_layers": 4},
}  # fmt: skip
MESHES = [(1, 1), (2, 2), (4, 2)]
LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8


def checkpoint(folder: Path, name: str) -> Any:
    """A random model of transformers, saved by it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": None,
        "attn_implementation": "eager",
    } | VARIANTS[name]  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    if name == "bf16":
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB" if name == "sharded" else "5GB")
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def loaded(folder: str, dp: int, tp: int, loss_parallel: bool) -> Llama:
    with torch.device("meta"):
        model = Llama(LlamaConfig.from_pretrained_dir(folder))
    parallelize(model, mesh(dp, tp), parallel_plan(), loss_parallel=loss_parallel)
    load_pretrained(model, folder)
    return model


def logits_on_mesh(folder: str, out: str, ids: torch.Tensor, dp: int, tp: int) -> torch.Tensor:
    model = loaded(folder, dp, tp, loss_parallel=False)
    with torch.no_grad():
        logits = model(ids)
    save_pretrained(model, out)
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_checkpoints_load_on_every_mesh_and_export_back(ranks: Any, tmp_path: Path, name: str) -> None:
    import transformers

    source = tmp_path / "source"
    reference = checkpoint(source, name)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (name == "sharded")
    ids = torch.randint(0, reference.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits
    for dp, tp in MESHES:
        out = tmp_path / f"{dp}x{tp}"
        for logits in ranks(dp * tp).run(logits_on_mesh, str(source), str(out), ids, dp, tp):
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        again, info = transformers.LlamaForCausalLM.from_pretrained(
            out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
        )
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)


def step_on_mesh(folder: str, out: str, ids: torch.Tensor, dp: int, tp: int) -> tuple[float, float]:
    model = loaded(folder, dp, tp, loss_parallel=True)
    optimizer = adamw(model, lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS)
    share = slice(mesh(dp, tp)["dp"].get_local_rank() * len(ids) // dp, None)
    own = ids[share][: len(ids) // dp]
    result = train_step(model, optimizer, [(own[:, :-1], own[:, 1:])], max_norm=1.0, loss_sum=loss_in_model)
    save_pretrained(model, out)
    return result.loss, result.grad_norm


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_a_step_equals_a_step_of_a_plain_transformers_loop(ranks: Any, tmp_path: Path, name: str) -> None:
    import transformers

    source = tmp_path / "source"
    reference = checkpoint(source, name)
    ids = torch.randint(0, reference.config.vocab_size, (4, 21), generator=torch.Generator().manual_seed(2))
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    vectors = [p for p in reference.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    loss = torch.nn.functional.cross_entropy(reference(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    optimizer.step()
    for dp, tp in MESHES:
        out = tmp_path / f"{dp}x{tp}"
        got_loss, got_norm = ranks(dp * tp).run(step_on_mesh, str(source), str(out), ids, dp, tp)[0]
        assert got_loss == pytest.approx(loss.item(), rel=1e-5)
        assert got_norm == pytest.approx(norm.item(), rel=1e-5)
        again = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
        for key, value in reference.state_dict().items():
            # Adam's first step is lr * sign(gradient) where the gradient is far above eps, and noise where it is not.
            gradient = gradients.get(key, gradients.get("model.embed_tokens.weight"))
            clear = gradient.abs() > 1e-5
            assert clear.float().mean() > 0.2
            torch.testing.assert_close(again[key][clear], value[clear], rtol=1e-5, atol=1e-5)
