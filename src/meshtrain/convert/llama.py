"""The keys of a Llama: what its config says they are, and how torchtitan, torchtune and Meta call them.

Those three rotate neighbouring elements of a head (RoPE on pairs (2i, 2i + 1)); Hugging Face's weights pair element i with
i + head_dim / 2. So the rows of their query and key projections are put in another order. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from einops import rearrange

from meshtrain.convert.key_map import Change, KeyMap, Target
from meshtrain.errors import Refused
from meshtrain.models.llama_checks import ARCHITECTURE
from meshtrain.models.llama_config import LlamaConfig

KEY_MAPS = ("llama-torchtitan", "llama-torchtune")
_LAYER = "model.layers.*."


def llama_shapes(config: Mapping[str, Any], source: str) -> dict[str, tuple[tuple[int, ...], bool]] | None:
    """Key -> (shape, whether it must be there), or None for a config that is not of a Llama.

    A head that is tied may be stored or not. Raises Refused for a Llama's config that cannot be read.
    """
    if config.get("model_type") != "llama" or config.get("architectures") not in (None, [], [ARCHITECTURE]):
        return None
    c = LlamaConfig.from_hf(config, source)
    hidden, inner = c.hidden_size, c.intermediate_size
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    matrices = {
        "self_attn.q_proj": (queries, hidden, c.attention_bias),
        "self_attn.k_proj": (keys, hidden, c.attention_bias),
        "self_attn.v_proj": (keys, hidden, c.attention_bias),
        "self_attn.o_proj": (hidden, queries, c.attention_bias),
        "mlp.gate_proj": (inner, hidden, c.mlp_bias),
        "mlp.up_proj": (inner, hidden, c.mlp_bias),
        "mlp.down_proj": (hidden, inner, c.mlp_bias),
    }
    for name, (rows, columns, bias) in matrices.items():
        layer[f"{name}.weight"] = (rows, columns)
        if bias:
            layer[f"{name}.bias"] = (rows,)
    shapes: dict[str, tuple[tuple[int, ...], bool]] = {"model.embed_tokens.weight": ((c.vocab_size, hidden), True)}
    for number in range(c.num_hidden_layers):
        shapes.update({f"model.layers.{number}.{name}": (shape, True) for name, shape in layer.items()})
    shapes["model.norm.weight"] = ((hidden,), True)
    shapes["lm_head.weight"] = ((c.vocab_size, hidden), not c.tie_word_embeddings)
    return shapes


def llama_key_map(name: str, config: LlamaConfig) -> KeyMap:
    """The ready-made map `name`, one of KEY_MAPS, for a model of this config."""
    queries = _halves_together(config.num_attention_heads)
    keys = _halves_together(config.num_key_value_heads)
    if name == "llama-torchtitan":  # and Meta's own files
        return KeyMap(_torchtitan(config, queries, keys), name)
    if name == "llama-torchtune":
        return KeyMap(_torchtune(queries, keys), name)
    raise Refused(f"key map {name!r} is unknown: use one of {', '.join(KEY_MAPS)}, or a JSON file")


def _torchtitan(config: LlamaConfig, queries: Change, keys: Change) -> dict[str, tuple[Target, ...]]:
    query, key, value = (Target(f"{_LAYER}self_attn.{name}.weight") for name in ("q_proj", "k_proj", "v_proj"))
    query, key = query._replace(change=queries), key._replace(change=keys)
    table = {
        "tok_embeddings.weight": (Target("model.embed_tokens.weight"),),
        "layers.*.attention.wo.weight": (Target(f"{_LAYER}self_attn.o_proj.weight"),),
        "layers.*.feed_forward.w1.weight": (Target(f"{_LAYER}mlp.gate_proj.weight"),),
        "layers.*.feed_forward.w2.weight": (Target(f"{_LAYER}mlp.down_proj.weight"),),
        "layers.*.feed_forward.w3.weight": (Target(f"{_LAYER}mlp.up_proj.weight"),),
        "layers.*.attention_norm.weight": (Target(f"{_LAYER}input_layernorm.weight"),),
        "layers.*.ffn_norm.weight": (Target(f"{_LAYER}post_attention_layernorm.weight"),),
        "norm.weight": (Target("model.norm.weight"),),
        "output.weight": (Target("lm_head.weight"),),
        "lm_head.weight": (Target("lm_head.weight"),),
        # Tables of the rotation, which follow from the config.
        "freqs_cis": (),
        "rope.**": (),
    }
    for module in ("attention", "attention.qkv_linear"):  # the second since 2026
        table[f"layers.*.{module}.wq.weight"] = (query,)
        table[f"layers.*.{module}.wk.weight"] = (key,)
        table[f"layers.*.{module}.wv.weight"] = (value,)
        table[f"layers.*.{module}.wqkv.weight"] = tuple(
            target._replace(change=_of_fused(config, part, target.change))
            for part, target in enumerate((query, key, value))
        )
    return table


def _torchtune(queries: Change, keys: Change) -> dict[str, tuple[Target, ...]]:
    return {
        "tok_embeddings.weight": (Target("model.embed_tokens.weight"),),
        "layers.*.attn.q_proj.weight": (Target(f"{_LAYER}self_attn.q_proj.weight", queries),),
        "layers.*.attn.k_proj.weight": (Target(f"{_LAYER}self_attn.k_proj.weight", keys),),
        "layers.*.attn.v_proj.weight": (Target(f"{_LAYER}self_attn.v_proj.weight"),),
        "layers.*.attn.output_proj.weight": (Target(f"{_LAYER}self_attn.o_proj.weight"),),
        "layers.*.mlp.w1.weight": (Target(f"{_LAYER}mlp.gate_proj.weight"),),
        "layers.*.mlp.w2.weight": (Target(f"{_LAYER}mlp.down_proj.weight"),),
        "layers.*.mlp.w3.weight": (Target(f"{_LAYER}mlp.up_proj.weight"),),
        "layers.*.sa_norm.scale": (Target(f"{_LAYER}input_layernorm.weight"),),
        "layers.*.mlp_norm.scale": (Target(f"{_LAYER}post_attention_layernorm.weight"),),
        "norm.scale": (Target("model.norm.weight"),),
        "output.weight": (Target("lm_head.weight"),),
    }


def _halves_together(heads: int) -> Change:
    """Rows of a projection from neighbouring pairs to Hugging Face's order: first elements, then second ones."""

    def change(weight: Any) -> Any:
        return rearrange(weight, "(head pair two) dim -> (head two pair) dim", head=heads, two=2)

    return change


def _of_fused(config: LlamaConfig, part: int, change: Change | None) -> Change:
    """The rows of queries (0), keys (1) or values (2) in a fused weight: each KV head's queries, then its key and value."""
    group = config.num_attention_heads // config.num_key_value_heads
    rows = (slice(0, group), slice(group, group + 1), slice(group + 1, group + 2))[part]

    def taken(weight: Any) -> Any:
        by_head = rearrange(
            weight, "(kv slot row) dim -> kv slot row dim", kv=config.num_key_value_heads, slot=group + 2
        )
        whole = rearrange(by_head[:, rows], "kv slot row dim -> (kv slot row) dim")
        return whole if change is None else change(whole)

    return taken
