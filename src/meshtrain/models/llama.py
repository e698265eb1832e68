"""Llama 3.x as plain nn.Modules with Hugging Face's names, and its parallel plan. Not how a plan is applied.

The model also runs alone in one process. Around it tensor parallelism may be applied: then attention sees the
heads of one rank only, and the stream between blocks may hold a share of the sequence. So head counts and
sequence lengths are read from the tensors, inside attention alone, and everything outside it works position
by position.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from meshtrain.errors import ContractError
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.models.rope import RotaryEmbedding, RotaryTables, rotate
from meshtrain.parallel.cross_entropy import linear_cross_entropy
from meshtrain.parallel.init import Constant, Init, Normal
from meshtrain.parallel.plan import ParallelPlan
from meshtrain.parallel.styles import column, embedding, head, heads, row, sequence


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, computed in float32 (float64 for float64); Zhang and Sennrich,
    2019.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        # F.rms_norm accumulates low precision in float32 itself.
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions over whole sequences, for as many heads as are
    given.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_size, kv_size = (
            config.num_attention_heads * self.head_dim,
            config.num_key_value_heads * self.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden: Tensor, tables: RotaryTables) -> Tensor:
        """hidden: the stream; tables: for all positions of the sequence. Returns what o_proj makes of the
        heads.
        """
        to_heads = "batch seq (head dim) -> batch head seq dim"
        q = rotate(rearrange(self.q_proj(hidden), to_heads, dim=self.head_dim), tables)
        k = rotate(rearrange(self.k_proj(hidden), to_heads, dim=self.head_dim), tables)
        v = rearrange(self.v_proj(hidden), to_heads, dim=self.head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(rearrange(mixed, "batch head seq dim -> batch seq (head dim)"))


class MLP(nn.Module):
    """The SwiGLU feed-forward block (Shazeer, 2020)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DecoderLayer(nn.Module):
    """One block: attention and feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, tables: RotaryTables) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Backbone(nn.Module):
    """Embedding, blocks and last norm: token ids [batch, seq] -> hidden states (`model` in Hugging Face's
    names).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        # No padding_idx: the padding token's row is a parameter like any other, and its labels are ignored.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        # Made here once for all layers: only input_ids are sure to show the whole sequence's length.
        tables = self.rotary.tables(input_ids, hidden)
        for layer in self.layers:
            hidden = layer(hidden, tables)
        return self.norm(hidden)


class LMHead(nn.Linear):
    """The output head: logits, or with labels the summed loss without ever holding all logits."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """hidden [..., hidden_size] -> logits [..., vocab]; with labels [...] (int64, -100 ignored) the sum
        of losses.
        """
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels)


class Llama(nn.Module):
    """A causal language model with the modules and parameter names of transformers' `LlamaForCausalLM`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.reset_parameters()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of input_ids [batch, seq], or with labels the sum of the token losses.

        labels [batch, seq] are already shifted (labels[:, t] is the token after input_ids[:, t]), int64, -100
        to ignore. The sum is a scalar in float32 (float64 for a float64 model). Raises ContractError on other
        shapes.
        """
        if input_ids.dim() != 2 or (labels is not None and labels.shape != input_ids.shape):
            given = "" if labels is None else f" and labels of shape {tuple(labels.shape)}"
            raise ContractError(
                f"Llama got input_ids of shape {tuple(input_ids.shape)}{given}; both must be [batch, seq]. "
                f"Pass whole sequences, with the labels of every position."
            )
        return self.lm_head(self.model(input_ids), labels)

    def initial_value(self, name: str) -> Init | None:
        """How the parameter `name` starts: matrices normal with `initializer_range`, norms 1, biases 0; None
        if not ours.
        """
        *_, module, kind = ("", *name.split("."))
        if module in _NORMS and kind == "weight":
            return Constant(1.0)
        if module in _MATRICES and kind == "weight":
            return Normal(self.config.initializer_range)
        return Constant(0.0) if module in _MATRICES and kind == "bias" else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fills the parameters with initial values from torch's global generator, for use in one process.

        Parallel runs build the model on the meta device and take values keyed by seed, name and position
        instead.
        """
        for name, parameter in self.named_parameters():
            value = self.initial_value(name)
            if isinstance(value, Normal):
                parameter.normal_(value.mean, value.std)
            elif isinstance(value, Constant):
                parameter.fill_(value.value)


_NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
_MATRICES = {
    "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head",
}  # fmt: skip


def parallel_plan() -> ParallelPlan:
    """How Llama is cut over tp, and which modules FSDP gathers together."""
    return ParallelPlan(
        styles={
            "model.embed_tokens": embedding(),
            "model.layers.*.input_layernorm": sequence(),
            "model.layers.*.self_attn.q_proj": heads("num_attention_heads"),
            "model.layers.*.self_attn.k_proj": heads("num_key_value_heads", shared_by="num_attention_heads"),
            "model.layers.*.self_attn.v_proj": heads("num_key_value_heads", shared_by="num_attention_heads"),
            "model.layers.*.self_attn.o_proj": row(),
            "model.layers.*.post_attention_layernorm": sequence(),
            "model.layers.*.mlp.gate_proj": column(),
            "model.layers.*.mlp.up_proj": column(),
            "model.layers.*.mlp.down_proj": row(),
            "model.norm": sequence(),
            "lm_head": head(),
        },
        units=("model.layers.*",),
    )
