"""The loop, the files of metrics and the sample of text, on tiny models."""

import json
import os
import signal
import time
from collections.abc import Mapping
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
from meshtrain.train.metrics import MetricsFile, StepMetrics, peak_memory_bytes, write_settings
from meshtrain.train.saving import Saving
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


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def measured(step: int) -> StepMetrics:
    return StepMetrics(step, 1.0, 1.0, 1.0, 1, 1.0, 1.0, peak_memory_bytes())


def test_each_line_is_handed_over_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2):
            file.write(measured(step))
            assert path.read_text().endswith("}\n")
            assert steps_in(path)[-1] == step


@pytest.mark.parametrize(("after", "kept"), [(0, []), (2, [1, 2]), (3, [1, 2, 3]), (9, [1, 2, 3])])
@pytest.mark.parametrize("torn", ["", '{"step": 2, "lo', '{"loss": 1.0}\n', "nonsense\n", "[]\n", "\xff\n"])
def test_a_run_that_goes_on_keeps_the_lines_of_the_steps_before_it(
    tmp_path: Path, after: int, kept: list[int], torn: str
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3):
            file.write(measured(step))
    with open(path, "ab") as raw:
        raw.write(torn.encode("latin-1"))
    with MetricsFile(path, after) as file:
        assert steps_in(path) == kept
        file.write(measured(after + 1))
    assert steps_in(path) == [*kept, after + 1]
    others = [name for name in os.listdir(tmp_path) if name != path.name]
    if after:
        assert others == []
    else:  # a run that starts anew puts the record of the one before it aside
        (aside,) = others
        assert aside.startswith("metrics.before-")
        assert (tmp_path / aside).read_bytes().count(b'"grad_norm"') == 3


def test_settings_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    write_settings(path, {"steps": 3}, course={"seed": 1})
    before = json.loads(path.read_text())
    assert (before["settings"], before["course"]) == ({"steps": 3}, {"seed": 1})
    with pytest.raises(TypeError):
        write_settings(path, {"steps": object()})
    monkeypatch.setattr(os, "replace", lambda *paths: pytest.fail("killed here"))
    with pytest.raises(pytest.fail.Exception):
        write_settings(path, {"steps": 4})
    assert json.loads(path.read_text()) == before


# Saving.


class Noted:
    """A writer that notes the steps that it is to save, and whose third save fails on one rank."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.broken = False

    @property
    def failed(self) -> bool:
        return self.broken

    def reserve(self) -> None:
        pass

    def save(self, step: int, run: Mapping[str, int]) -> float:
        self.steps.append((step, run["tokens"]))
        self.broken = step == 6 and torch.distributed.get_rank() == 1
        return 0.0

    def wait(self) -> None:
        pass

    def failure(self) -> Exception | None:
        # The ranks of a save share its failure.
        found = OSError("full") if self.steps and self.steps[-1][0] == 6 else None
        self.broken = False
        return found


def save_and_go_on(dp: int, tp: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """From step 2 to step 5, asked to stop in step 4; then from step 5 on, until a save fails on one rank."""
    model, stop, writer, seen = build(dp, tp), StopRequest(), Noted(), []
    optimizer = adamw(model, lr=1e-3)
    saving = Saving(writer, lambda step, tokens: {"tokens": tokens}, every=3)

    def report(metrics: StepMetrics) -> None:
        seen.append((metrics.step, metrics.tokens))
        if metrics.step == 4 and torch.distributed.get_rank() == 1:
            stop.at = time.monotonic()

    how = {"learning_rate": lambda step: 1e-3, "loss_sum": loss_in_model, "report": report, "saving": saving}
    trained = train(model, optimizer, batches, steps=20, stop=stop, done=2, seen=100, **how)
    assert (trained.steps, trained.stopped) == (5, True)
    with pytest.raises(OSError, match="full"):
        train(model, optimizer, batches, steps=20, done=5, seen=seen[-1][1], **how)
    return writer.steps, seen


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2)])
def test_the_loop_goes_on_saves_also_when_it_stops_and_ends_everywhere_when_a_save_fails(
    ranks, dp: int, tp: int
) -> None:
    first, second = ranks(2).run(save_and_go_on, dp, tp)
    assert first == second
    saved, seen = first
    size = 16 * dp
    assert seen == [(step, 100 + size * (step - 2)) for step in (3, 4, 5, 6, 7)]
    assert saved == [(step, 100 + size * (step - 2)) for step in (3, 5, 6)]
