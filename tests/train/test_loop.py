"""The loop, the files of metrics and the sample of text, on tiny models."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from meshtrain import NonFinite, adamw, initialise, parallelize
from meshtrain.errors import ContractError
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.train import loop
from meshtrain.train.generate import generate
from meshtrain.train.loop import StopRequest, stop_on_interrupt, train
from meshtrain.train.metrics import MetricsFile, StepMetrics, peak_memory_bytes
from meshtrain.train.step import loss_in_model
from tests.ranks import mesh

CONFIG = LlamaConfig(
    vocab_size=17,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def build(dp: int, tp: int) -> Llama:
    with torch.device("meta"):
        model = Llama(CONFIG)
    parallelize(model, mesh(dp, tp), parallel_plan())
    initialise(model, seed=1)
    return model


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(step))
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]


def stop_at_step_three(dp: int, tp: int) -> tuple[int, bool, list[int]]:
    """Only the last rank is asked, in its third step."""
    model, stop, seen = build(dp, tp), StopRequest(), []
    asked = torch.distributed.get_rank() == dp * tp - 1

    def given(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return batches(step)

    def report(metrics: StepMetrics) -> None:
        seen.append(metrics.step)
        if asked and metrics.step == 2:
            stop.at = time.monotonic()

    trained = train(
        model,
        adamw(model, lr=1e-3),
        given,
        steps=9,
        learning_rate=lambda step: 1e-3,
        loss_sum=loss_in_model,
        report=report,
        stop=stop,
    )
    return trained.steps, trained.stopped, seen


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_all_ranks_stop_after_the_same_step_when_one_is_asked(ranks, dp: int, tp: int) -> None:
    assert ranks(2).run(stop_at_step_three, dp, tp) == [(3, True, [1, 2, 3])] * 2


def rates_and_tokens() -> tuple[list[float], list[int], float, float]:
    model, seen = build(1, 1), []
    optimizer = adamw(model, lr=1.0)
    rates = []
    trained = train(
        model, optimizer, batches, steps=3, learning_rate=lambda step: step / 100, loss_sum=loss_in_model,
        report=lambda metrics: (seen.append(metrics), rates.append(optimizer.param_groups[0]["lr"])),
    )  # fmt: skip
    assert [metrics.lr for metrics in seen] == rates
    assert seen[0].loss == trained.first_loss
    return rates, [metrics.tokens for metrics in seen], trained.first_loss, trained.last_loss


def test_the_learning_rate_is_that_of_the_step_and_tokens_add_up(ranks) -> None:
    ((rates, tokens, first, last),) = ranks(1).run(rates_and_tokens)
    assert rates == [0.01, 0.02, 0.03]
    assert tokens == [16, 32, 48]
    assert first != last


def broken() -> str:
    model = build(1, 1)
    with torch.no_grad():
        model.model.norm.weight.to_local().fill_(float("nan"))
    with pytest.raises(NonFinite) as error:
        train(model, adamw(model, lr=1.0), batches, steps=3, learning_rate=lambda step: 1.0, loss_sum=loss_in_model)
    return str(error.value)


def test_non_finite_numbers_name_the_step(ranks) -> None:
    (message,) = ranks(1).run(broken)
    assert message.startswith("step 1: the loss is nan on rank 0")


def written(dp: int, tp: int, temperature: float) -> list[int]:
    model = build(dp, tp)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter.to_local().mul_(8)  # chances that differ
    text = generate(model, [3, 4], 12, window=8, temperature=temperature, seed=5)
    train(
        model, adamw(model, lr=1e-3), batches, steps=1, learning_rate=lambda step: 1e-3, loss_sum=loss_in_model
    )  # still trains
    return text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_text_is_written_on_every_mesh_and_rank(ranks, temperature: float) -> None:
    (alone,) = ranks(1).run(written, 1, 1, temperature)
    assert len(alone) == 12
    assert len(set(alone)) > 1
    assert ranks(2).run(written, 2, 1, temperature) == [alone] * 2
    assert ranks(2).run(written, 1, 2, temperature) == [alone] * 2


def test_greedy_text_is_that_of_the_plain_model() -> None:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    expected, text = [], [1, 2, 3]
    for _ in range(5):
        expected.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        text.append(expected[-1])
    assert generate(model, [1, 2, 3], 5, window=20, temperature=0) == expected
    assert model.training
    with pytest.raises(ContractError, match="0 tokens"):
        generate(model, [], 5, window=20)


def test_the_first_interruption_is_noted_and_a_later_second_one_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # torchrun's copy of the same Ctrl-C
        assert stop
        monkeypatch.setattr(loop, "SAME_INTERRUPTION_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_metrics_of_two_runs_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.write(StepMetrics(1, 1.0, 1.0, 1.0, 1, 1.0, 1.0, peak_memory_bytes()))
        assert path.read_text().endswith("}\n")  # at once, not when the file is closed
    with pytest.raises(FileExistsError):
        MetricsFile(path)
