"""The Llama model in one process: equal to transformers', whatever the settings, and sound when cut or built
on meta.

Not its behaviour on a mesh.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshtrain.errors import ContractError
from meshtrain.models.llama import Attention, DecoderLayer, Llama, parallel_plan
from meshtrain.models.llama_config import PRESETS, LlamaConfig, RopeScaling
from meshtrain.models.rope import RotaryEmbedding, rotate
from meshtrain.parallel.init import Constant, Normal
from tests.ranks import RankPool, mesh

transformers = pytest.importorskip("transformers")
from transformers.models.llama import modeling_llama  # noqa: E402

TINY = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2,
)  # fmt: skip
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
VARIANTS = {
    "plain": TINY,
    "tied": dataclasses.replace(TINY, tie_word_embeddings=True),
    "grouped": dataclasses.replace(TINY, num_key_value_heads=2),
    "one-kv-head": dataclasses.replace(TINY, num_key_value_heads=1, tie_word_embeddings=True),
    "wide-heads": dataclasses.replace(TINY, head_dim=12, num_key_value_heads=2),
    "llama3": dataclasses.replace(TINY, rope_scaling=LLAMA3, rope_theta=500.0),
    "linear": dataclasses.replace(TINY, rope_scaling=RopeScaling("linear", 4.0)),
    "biases": dataclasses.replace(TINY, attention_bias=True, mlp_bias=True, num_key_value_heads=2),
    "all": dataclasses.replace(
        TINY,
        tie_word_embeddings=True,
        num_key_value_heads=2,
        head_dim=6,
        rope_scaling=LLAMA3,
        attention_bias=True,
        mlp_bias=True,
    ),
}
SEQ = 48
Pair = tuple[Llama, nn.Module]


def token_ids(config: LlamaConfig, seed: int = 0, seq: int = SEQ) -> Tensor:
    return torch.randint(config.vocab_size, (2, seq), generator=torch.Generator().manual_seed(seed))


def hf_model(config: LlamaConfig, dtype: torch.dtype) -> nn.Module:
    """transformers' model with random parameters, norms and biases included, so that none can hide."""
    hf_config = transformers.LlamaConfig(**config.to_hf())
    model = transformers.LlamaForCausalLM._from_config(hf_config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model.to(dtype)


def pair(config: LlamaConfig, dtype: torch.dtype = torch.float32) -> Pair:
    theirs = hf_model(config, dtype)
    ours = Llama(config).to(dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def assert_agrees(models: Pair, tolerance: float) -> None:
    ours, theirs = models
    ids, labels = token_ids(ours.config), token_ids(ours.config, seed=1)
    labels[0, :7] = -100
    logits = theirs(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours(ids), logits, rtol=tolerance, atol=tolerance)
    expected, loss = summed_loss(logits, labels), ours(ids, labels)
    assert loss.shape == () and loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    expected.backward()
    loss.backward()
    gradients = {name: gradient_of(p) for name, p in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == gradients.keys()
    for name, parameter in ours.named_parameters():
        scale = gradients[name].abs().max().item()
        assert (gradient_of(parameter) - gradients[name]).abs().max().item() <= tolerance * max(scale, 1.0), name


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers_in_fp32(name: str) -> None:
    """Names, logits, loss and every gradient. Catches any difference in RoPE, norms, grouping, biases or
    ties.
    """
    assert_agrees(pair(VARIANTS[name]), 1e-5)


def exact_frequencies(config: LlamaConfig) -> list[float]:
    """RoPE's frequencies with Python's float64, from the published description."""
    result = []
    for i in range(config.head_dim // 2):
        f = config.rope_theta ** (-2 * i / config.head_dim)
        s = config.rope_scaling
        if s is not None and s.rope_type == "linear":
            f /= s.factor
        elif s is not None:
            assert s.original_max_position_embeddings and s.low_freq_factor and s.high_freq_factor
            turns = s.original_max_position_embeddings * f / (2 * math.pi)  # in the original context
            if turns < s.low_freq_factor:
                f /= s.factor
            elif turns <= s.high_freq_factor:
                smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
                f = (1 - smooth) * f / s.factor + smooth * f
        result.append(f)
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_equals_transformers_in_fp64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above to 1e-12, with the two places where transformers drops to fp32 (norms, RoPE) done in fp64."""
    config = VARIANTS[name]
    angles = torch.outer(
        torch.arange(SEQ, dtype=torch.float64), torch.tensor(exact_frequencies(config), dtype=torch.float64)
    )
    both = torch.cat((angles, angles), -1)[None]

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(
        modeling_llama.LlamaRotaryEmbedding, "forward", lambda self, x, position_ids: (both.cos(), both.sin())
    )
    assert_agrees(pair(config, torch.float64), 1e-12)


def test_bf16_is_as_close_to_fp32_as_transformers_is() -> None:
    ours, theirs = pair(VARIANTS["all"])
    ids = token_ids(ours.config)
    exact = ours(ids)
    error = (ours.bfloat16()(ids).float() - exact).pow(2).mean()
    their_error = (theirs.bfloat16()(input_ids=ids, use_cache=False).logits.float() - exact).pow(2).mean()
    assert 0 < error <= 1.2 * their_error


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama3.2-1b"])
def test_published_rope_tables_equal_transformers_bit_for_bit(name: str) -> None:
    """At long positions an error of one unit in a frequency would be visible."""
    config, length = PRESETS[name], 9000
    theirs = modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**config.to_hf()))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    tables = RotaryEmbedding(config).tables(torch.zeros(1, length, dtype=torch.int64), torch.zeros(1))
    half = config.head_dim // 2
    assert torch.equal(tables.cos, cos[0])
    assert torch.equal(tables.sin[:, half:], sin[0, :, half:]) and torch.equal(tables.sin[:, :half], -sin[0, :, :half])


def test_the_tie_is_one_parameter_and_untied_is_two() -> None:
    tied, untied = Llama(VARIANTS["tied"]), Llama(TINY)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@pytest.mark.parametrize("name", ["tied", "llama3"])
def test_c8_a_model_built_on_meta_gives_the_same_logits(name: str) -> None:
    """Nothing but parameters is needed: there are no buffers that meta init, to_empty or .to(bf16) could
    spoil.
    """
    config = VARIANTS[name]
    ours, _ = pair(config)
    ids = token_ids(config)
    with torch.device("meta"):
        assigned, emptied = Llama(config), Llama(config)
    assert not list(emptied.buffers()) and all(p.is_meta for p in emptied.parameters())
    assigned.load_state_dict(ours.state_dict(), assign=True)
    emptied.to_empty(device="cpu")
    if config.tie_word_embeddings:  # both lose ties in torch
        assigned.lm_head.weight = assigned.model.embed_tokens.weight
        emptied.lm_head.weight = emptied.model.embed_tokens.weight
    emptied.load_state_dict(ours.state_dict())
    assert torch.equal(assigned(ids), ours(ids)) and torch.equal(emptied(ids), ours(ids))


def bf16_tables_in_fsdp_units() -> list[tuple[torch.dtype, torch.dtype]]:
    """(dtype of the stream, dtype of the tables) that each layer sees under FSDP's mixed precision."""
    model = Llama(TINY)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.self_attn.register_forward_pre_hook(lambda _, args: seen.append((args[0].dtype, args[1].cos.dtype)))
        fully_shard(layer, mesh=mesh(1, 1)["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mesh=mesh(1, 1)["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(token_ids(TINY), token_ids(TINY)).backward()
    return seen


def test_c8_rope_tables_stay_fp32_in_a_bf16_model(ranks: Callable[[int], RankPool]) -> None:
    """Neither .to(bf16) nor FSDP, which casts the inputs of its units, may round the angles."""
    tables = Llama(TINY).bfloat16().model.rotary.tables(token_ids(TINY), torch.zeros(1, dtype=torch.bfloat16))
    assert tables.cos.dtype == tables.sin.dtype == torch.float32
    assert ranks(1).run(bf16_tables_in_fsdp_units) == [[(torch.bfloat16, torch.float32)] * 2]


def test_runs_on_meta_tensors() -> None:
    with torch.device("meta"):
        model = Llama(VARIANTS["all"])
        assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, TINY.vocab_size)


def test_tables_made_in_inference_mode_serve_a_later_training_step() -> None:
    model = Llama(TINY)
    with torch.inference_mode():
        model(token_ids(TINY))
    model(token_ids(TINY)).sum().backward()
    assert model.model.embed_tokens.weight.grad is not None


def test_the_table_cache_is_bounded_and_right_for_every_length() -> None:
    rotary = RotaryEmbedding(TINY)
    longest = rotary.tables(token_ids(TINY, seq=40), torch.zeros(1))
    for length in range(1, 41):
        tables = rotary.tables(token_ids(TINY, seq=length), torch.zeros(1))
        torch.testing.assert_close(tables.cos, longest.cos[:length])
    assert len(rotary._cache) <= 8


def test_attention_takes_its_head_counts_from_the_tensors() -> None:
    """As under tensor parallelism: two halves of the heads, summed after o_proj, are the whole."""
    config = dataclasses.replace(TINY, num_key_value_heads=2, head_dim=6)
    whole = Attention(config)
    hidden = torch.randn(2, SEQ, config.hidden_size)
    tables = RotaryEmbedding(config).tables(token_ids(config), hidden)
    total = torch.zeros_like(hidden)
    for part in range(2):
        local = Attention(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(local, name).weight = nn.Parameter(getattr(whole, name).weight.chunk(2, dim=0)[part])
        local.o_proj.weight = nn.Parameter(whole.o_proj.weight.chunk(2, dim=1)[part])
        total = total + local(hidden, tables)
    torch.testing.assert_close(total, whole(hidden, tables), rtol=1e-5, atol=1e-5)


def test_blocks_work_position_by_position_outside_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under sequence parallelism: the stream may hold a share of the positions that attention sees."""
    layer = DecoderLayer(TINY)
    stream, attended = torch.randn(2, SEQ // 2, 32), torch.randn(2, SEQ // 2, 32)
    tables = RotaryEmbedding(TINY).tables(token_ids(TINY), stream)
    # The gathered attention, returned as a share.
    monkeypatch.setattr(layer.self_attn, "forward", lambda hidden, tables: attended)
    middle = stream + attended
    expected = middle + layer.mlp(layer.post_attention_layernorm(middle))
    torch.testing.assert_close(layer(stream, tables), expected)


def test_rotation_keeps_dtype_and_length() -> None:
    x = torch.randn(2, 3, SEQ, 8)
    tables = RotaryEmbedding(TINY).tables(token_ids(TINY), x)
    turned = rotate(x, tables)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])
    low = rotate(x.bfloat16(), tables)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, rotate(x.bfloat16().float(), tables).bfloat16()), (
        "bf16 is rotated in fp32, and rounded once"
    )


def test_a_block_compiles_without_graph_breaks() -> None:
    model = Llama(dataclasses.replace(VARIANTS["all"], num_hidden_layers=1))
    ids = token_ids(model.config)
    expected = model(ids)
    model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(ids), expected)


def test_initial_values() -> None:
    config = dataclasses.replace(TINY, attention_bias=True, mlp_bias=True, hidden_size=64, vocab_size=400)
    torch.manual_seed(0)
    model = Llama(config)
    for name, parameter in model.named_parameters():
        value = model.initial_value(name)
        if name.endswith("bias"):
            assert value == Constant(0.0) and not parameter.any(), name
        elif name.endswith("norm.weight"):
            assert value == Constant(1.0) and (parameter == 1).all(), name
        else:
            assert value == Normal(config.initializer_range), name
            assert parameter.std().item() == pytest.approx(config.initializer_range, rel=0.1), name
    assert model.initial_value("model.layers.0.self_attn.q_proj.lora_a") is None


@pytest.mark.parametrize("ids, labels", [((5,), None), ((2, 5), (2, 4)), ((2, 5), (5,))])
def test_wrong_shapes_are_refused(ids: tuple[int, ...], labels: tuple[int, ...] | None) -> None:
    targets = None if labels is None else torch.zeros(labels, dtype=torch.int64)
    with pytest.raises(ContractError, match=r"\[batch, seq\]"):
        Llama(TINY)(torch.zeros(ids, dtype=torch.int64), targets)


def test_the_plan_names_every_module_that_holds_parameters() -> None:
    model = Llama(TINY)
    holders = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    patterns = {name.replace(".layers.0.", ".layers.*.").replace(".layers.1.", ".layers.*.") for name in holders}
    assert set(parallel_plan().styles) == patterns
