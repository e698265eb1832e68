"""Arguments of styles and plans that cannot be right are refused where they are given, in Python and in a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshtrain.errors import Refused
from meshtrain.parallel import (
    ParallelPlan,
    Style,
    column,
    heads,
    packed_column,
    packed_row,
    replicate,
    resolve,
    sequence,
)
from meshtrain.parallel.style import Cut, Forward, Scope, Site

COUNT = "must be a number of heads, 1 to 65536, or the name of the attribute of model.config"
WRONG: list[tuple[Callable[[Any], Any], str, Any, str]] = [
    *((lambda v: heads(v), "heads() was given count=", v, COUNT) for v in (0, -2, 65537, True, 2.0, "", "4", None, (2,))),
    *((lambda v: heads(4, shared_by=v), "heads() was given shared_by=", v, COUNT) for v in (0, False, "")),
    *((lambda v: packed_column(heads=v), "packed_column() was given heads=", v, "tuple (in a file a list)") for v in ((0, 0), (2, -1), (2, 1.5), "qkv", 3, None)),
    *((lambda v: packed_row(heads=v), "packed_row() was given heads=", v, "tuple (in a file a list)") for v in ((0, 0), 3)),
    *((lambda v: packed_column(v), "packed_column() was given parts=", v, "a whole number, 2 to 65536") for v in ("3", 0, 1, -1, 2.0, True, 10**6)),
    *((lambda v: packed_row(v), "packed_row() was given parts=", v, "a whole number, 2 to 65536") for v in ("3", 1)),
    *((lambda v: column(fused=v), "column() was given fused=", v, "must be False, or left out: a fused weight takes packed_column()") for v in ("no", True, 0)),
    *((lambda v: heads(2, fused=v), "heads() was given fused=", v, "must be False, or left out") for v in ("no",)),
    *((lambda v: sequence(v), "sequence() was given gather_output=", v, "True or False (in a file true or false)") for v in ("yes", 1, None)),
    *((lambda v: sequence(recurse=v), "sequence() was given recurse=", v, "True or False") for v in ("no", 0)),
    *((lambda v: replicate(v), "replicate() was given gradient=", v, "'whole' or 'partial'") for v in ("partail", None, True)),
    *((lambda v: replicate(recurse=v), "replicate() was given recurse=", v, "True or False") for v in ("no",)),
]  # fmt: skip


@pytest.mark.parametrize(("style", "start", "value", "rule"), WRONG)
def test_a_style_names_itself_the_argument_the_value_and_the_rule(
    style: Callable[[Any], Any], start: str, value: Any, rule: str
) -> None:
    with pytest.raises(Refused) as caught:
        style(value)
    message = str(caught.value)
    assert message.startswith(f"{start}{value!r}; it ")
    assert rule in message and "Correct it in the plan" in message


def test_numbers_that_python_does_not_write_out() -> None:
    for make in (heads, packed_column):
        with pytest.raises(Refused, match="=a number of 16610 bits; it must be"):
            make(10**5000)


def test_arguments_that_exclude_each_other() -> None:
    with pytest.raises(Refused, match=r"packed_column\(parts=2, heads=\(4, 2\)\) gives `parts`.*and `heads`.*Drop one"):
        packed_column(2, (4, 2))
    with pytest.raises(Refused, match=r"sequence\(gather_output=True, recurse=False\) would end the stream"):
        sequence(True, recurse=False)


def test_what_is_right_is_taken() -> None:
    assert packed_column() == packed_column(2) == packed_column(parts=2)
    assert packed_column(heads=[4, "kv", 2]) == packed_column(heads=(4, "kv", 2))
    assert (heads("_n").count, heads(65536).count, column(fused=False).fused) == ("_n", 65536, False)


@dataclass
class Own(Style):
    """A style of one's own, without a name, and with an argument that is its own business."""

    sizes: list[int] = field(default_factory=list)

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return {}

    def forward(self, site: Site) -> Forward:
        return site.original


@dataclass
class Half(Style):
    """A style that does not say what it runs."""

    def cover(self, module: nn.Module, path: str, scope: Scope) -> dict[str, Cut]:
        return {}


def test_a_style_that_lacks_a_method_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="forward"):
        Half()  # type: ignore[abstract]


def test_a_style_of_ones_own_needs_no_rules() -> None:
    assert Own([1, 2]).sizes == [1, 2]
    assert "Own(sizes=[1, 2])" in str(ParallelPlan({"up": Own([1, 2])}))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"style": "heads", "count": 0}, "heads() was given count=0; it must be"),
        ({"style": "heads", "count": True}, "heads() was given count=True; it must be"),
        ({"style": "packed_column", "heads": [0, 0]}, "packed_column() was given heads=(0, 0); it must be"),
        ({"style": "packed_column", "parts": "3"}, "packed_column() was given parts='3'; it must be"),
        ({"style": "column", "fused": "no"}, "column() was given fused='no'; it must be"),
        ({"style": "sequence", "recurse": "no"}, "sequence() was given recurse='no'; it must be"),
        ({"style": "heads"}, "heads() does not take these arguments"),
        ({"style": "packed_column", "fused": False}, "packed_column() does not take these arguments"),
    ],
)
@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file_is_named_with_its_entry(tmp_path: Path, kind: str, entry: dict[str, Any], message: str) -> None:
    path = tmp_path / f"plan.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"styles": {"a.b": entry}}))
    else:
        path.write_text("[styles]\n'a.b' = {" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in entry.items()) + "}\n")
    with pytest.raises(Refused) as caught:
        ParallelPlan.load(path)
    assert str(caught.value).startswith(f"{path}, 'a.b': {message}")


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_plan_with_all_arguments_comes_back_from_a_file(tmp_path: Path, kind: str) -> None:
    plan = ParallelPlan(
        {
            "": sequence(recurse=False),
            "q": heads("n_head", shared_by=4, fused=False),
            "qkv": packed_column(heads=[4, "n_kv", 2]),
            "gate_up": packed_column(),
            "out": packed_row(3),
            "inner": replicate("partial", recurse=False),
            "last": sequence(gather_output=True),
        },
        ("blocks.*",),
    )
    plan.save(path := tmp_path / f"plan.{kind}")
    assert ParallelPlan.load(path) == plan
    assert "''" in str(plan).splitlines()[0], "the root's entry can be seen"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({3: column()},), "an entry 3, which is no path"),
        (([("up", column())],), "must be a dict of patterns and styles"),
        (({}, (3,)), "units=(3,) must be a tuple of patterns"),
        (({}, 3), "units=3 must be a tuple of patterns"),
    ],
)
def test_a_plan_of_the_wrong_types(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(Refused) as caught:
        ParallelPlan(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("found", [0, True, 2.0, "4", 10**12])
def test_a_number_of_heads_in_the_config(found: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.config = {"n_head": found}  # type: ignore[assignment]
    with pytest.raises(Refused, match=r"'0': .* config.n_head, which is .*must be a whole number, 1 to 65536"):
        resolve(ParallelPlan({"0": heads("n_head")}), model, (1, 2))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_matrix_of_size_zero() -> None:
    with pytest.raises(Refused, match="'0': the output size is 0, and there is nothing to cut"):
        resolve(ParallelPlan({"0": column()}), nn.Sequential(nn.Linear(4, 0)), (1, 2))
