"""Checkpoints used in ways that nobody planned: each is right, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain import (
    ContractError,
    Damaged,
    Refused,
    Saver,
    adamw,
    allocate,
    initialise,
    load_checkpoint,
    parallelize,
    save_checkpoint,
    save_pretrained,
    train_step,
)
from meshtrain.models.llama import Llama, parallel_plan
from meshtrain.models.llama_config import LlamaConfig
from meshtrain.ranks import is_secondary
from meshtrain.state.names import checkpoints_in
from meshtrain.state.record import check_record
from meshtrain.state.team import Team
from meshtrain.train.step import loss_in_model
from tests.ranks import mesh

CONFIG = LlamaConfig(
    vocab_size=17,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def llama(dp: int, tp: int, dtype: torch.dtype = torch.float32) -> Llama:
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        model = Llama(CONFIG)
    torch.set_default_dtype(torch.float32)
    parallelize(model, mesh(dp, tp), parallel_plan())
    return model


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    ids = torch.randint(0, 17, (1, 7), generator=torch.Generator().manual_seed(step))
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())]


def test_an_error_that_one_rank_agrees_on_is_not_its_own_cause() -> None:
    with pytest.raises(Refused) as raised:
        Team().agree(Refused("no"))
    assert raised.value.__cause__ is None
    raised.value.__cause__ = raised.value  # whoever makes such a ring: looking along it still ends
    assert not is_secondary(raised.value)


def save_and_export(folder: Path) -> list[int]:
    model = llama(2, 1)
    initialise(model, seed=0)
    optimizer = adamw(model, lr=1e-2)
    with Saver(folder / "c", model, optimizer) as saver:
        for step in (1, 2, 3):
            train_step(model, optimizer, batch(step), loss_sum=loss_in_model)
            saver.save(step)
            save_pretrained(model, folder / "export", join_seconds=20)
    return [step for step, _ in checkpoints_in(folder / "c")]


def test_a_model_is_exported_while_a_checkpoint_is_written(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    assert ranks(2).run(save_and_export, tmp_path) == [[3, 2, 1]] * 2


def saver_of_a_plain_model(folder: Path) -> str:
    model = nn.Linear(2, 2)
    try:
        Saver(folder / "c", model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ContractError as error:
        return str(error)
    return ""


def test_many_ranks_do_not_save_one_plain_model(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    for message in ranks(2).run(saver_of_a_plain_model, tmp_path):
        assert "Linear was not parallelized, but there are 2 ranks" in message


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


def test_extra_state_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Extra(2, 2))
    with pytest.raises(ContractError, match=r"'1' \(Extra\) has get_extra_state"):
        save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "c", step=1)
    assert list(tmp_path.iterdir()) == []


def test_milestones_stay_when_a_later_run_asks_for_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Saver(tmp_path, model, optimizer, keep=1, milestone=2) as saver:
        for step in (1, 2, 3):
            saver.save(step)
    with Saver(tmp_path, model, optimizer, keep=1) as saver:
        saver.save(4)
        saver.save(5)
    assert [step for step, _ in checkpoints_in(tmp_path)] == [5, 2]


def continue_in(dtype: torch.dtype, path: Path) -> str:
    model = llama(2, 1, dtype)
    allocate(model)
    optimizer = adamw(model, lr=1e-2)
    load_checkpoint(model, optimizer, path)
    loss = train_step(model, optimizer, batch(2), loss_sum=loss_in_model).loss
    return f"{loss:.4f} {next(iter(optimizer.state.values()))['exp_avg'].dtype}"


def begin(path: Path) -> str:
    model = llama(2, 1)
    initialise(model, seed=0)
    optimizer = adamw(model, lr=1e-2)
    train_step(model, optimizer, batch(1), loss_sum=loss_in_model)
    save_checkpoint(model, optimizer, path, step=1)
    return f"{train_step(model, optimizer, batch(2), loss_sum=loss_in_model).loss:.4f}"


def test_moments_follow_their_parameters_into_another_precision(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    loss = ranks(2).run(begin, tmp_path / "c")[0]
    assert ranks(2).run(continue_in, torch.float64, tmp_path / "c")[0] == f"{loss} torch.float64"
    assert ranks(2).run(continue_in, torch.float32, tmp_path / "c")[0] == f"{loss} torch.float32"


def path_on_the_first_rank_only(folder: Path) -> str:
    model = llama(2, 1)
    initialise(model, seed=0)
    try:
        save_checkpoint(model, adamw(model, lr=1e-2), folder / "c" if dist.get_rank() == 0 else None, step=1)  # type: ignore[arg-type]
    except Exception as error:
        return str(error)
    return ""


def test_a_path_that_one_rank_lacks_is_an_error_on_all(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    for message in ranks(2).run(path_on_the_first_rank_only, tmp_path):
        assert message.startswith("rank 1: TypeError")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", None), ("step", "8"), ("step", 8.5), ("step", True), ("run", None), ("optimizer", None), ("optimizer.moments", None),
        ("optimizer.moments", {"exp_avg": {"load": ["weight"]}}), ("optimizer.numbers", {"step": {"all": "x", "of": []}}),
        ("optimizer.groups", [{"params": [1]}]), ("optimizer.kind", 5), ("parallel", []),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_damaged(tmp_path: Path, field: str, value: Any) -> None:
    model = nn.Linear(2, 2)
    path = save_checkpoint(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path / "c", step=1)
    state = json.loads((path / "training/state.json").read_text())
    check_record(state, path)
    *above, last = field.split(".")
    held = state[above[0]] if above else state
    held[last] = value
    with pytest.raises(Damaged, match="optimizer" if above else field):
        check_record(state, path)
