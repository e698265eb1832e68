"""What is shown of a run: plain lines off a terminal, a live line on one, and numbers that people can read."""

import io
import re

import pytest
from rich.console import Console

from meshtrain.train import console as shown
from meshtrain.train.metrics import StepMetrics


def step(number: int, seconds: float = 0.5) -> StepMetrics:
    return StepMetrics(number, 5.0 / number, 1.25, 3e-4, 2048 * number, 2048 / seconds, seconds, 300 * 2**20)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(shown.time, "monotonic", lambda: now[0])
    return now


def lines_of(total: int, made: int, clock: list[float], seconds: float) -> list[str]:
    out = io.StringIO()
    with shown.StepView(Console(file=out, soft_wrap=True), total) as view:
        for number in range(1, made + 1):
            clock[0] += seconds
            view.show(step(number, seconds))
    return out.getvalue().splitlines()


def test_lines_are_at_most_one_a_second_with_the_first_and_the_last(clock: list[float]) -> None:
    lines = lines_of(100, 100, clock, 0.1)
    numbers = [int(re.match(r"step +(\d+)/100", line)[1]) for line in lines]  # type: ignore[index]
    assert (numbers[0], numbers[-1]) == (1, 100)
    assert 10 <= len(numbers) <= 13
    assert len(lines_of(5, 5, clock, 2.0)) == 5


def test_the_last_line_of_a_run_that_stops_early_is_shown(clock: list[float]) -> None:
    lines = lines_of(100, 7, clock, 0.01)
    assert [line.split()[1] for line in lines] == ["1/100", "7/100"]


def test_a_line_has_all_numbers(clock: list[float]) -> None:
    (line,) = lines_of(4, 1, clock, 0.5)
    assert line == "step 1/4  25%  loss 5.0000  lr 3.00e-04  norm 1.250  4.10k tokens/s  300 MiB  0:02 left"


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_one_live_line_and_no_color_is_honoured(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    with shown.StepView(Console(file=out, force_terminal=True, width=160), 3) as view:
        for number in (1, 2, 3):
            clock[0] += 1
            view.show(step(number))
    text = out.getvalue()
    assert "step 3/3" in text
    assert "loss 1.6667" in text
    colours = re.search(r"\x1b\[[\d;]*3[0-9][\d;]*m", text)
    assert (colours is None) == no_color


def live_lines(width: int, total: int, monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> list[str]:
    """What a terminal of `width` columns shows, one after the other."""
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    with shown.StepView(Console(file=out, force_terminal=True, width=width, soft_wrap=True), total) as view:
        for number in (total // 2, total):
            clock[0] += 1
            view.show(step(number))
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()))
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("width", "total", "names"),
    [
        (60, 60, "loss tokens/s left"),
        (60, 1000, "loss tokens/s left"),
        (60, 100_000, "loss left"),
        (80, 60, "loss lr norm tokens/s left"),
        (80, 1000, "loss lr tokens/s left"),
        (80, 100_000, "loss lr tokens/s left"),
        (120, 60, "loss lr norm tokens/s MiB left"),
        (120, 1000, "loss lr norm tokens/s MiB left"),
    ],
)
def test_a_live_line_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], width: int, total: int, names: str
) -> None:
    """Catches a line that the terminal cuts or wraps: at 80 columns the number of the step was lost."""
    lines = live_lines(width, total, monkeypatch, clock)
    assert len(lines) >= 3 and all(len(line.rstrip()) <= width for line in lines)
    assert "starting" in lines[0]
    for line, number, percent in [(lines[1], total // 2, 50), (lines[-1], total, 100)]:
        assert line.startswith(f"step {number:>{len(str(total))}}/{total} {percent:>3}%  ")
        assert [n for n in ("loss", "lr", "norm", "tokens/s", "MiB", "left") if f" {n}" in line] == names.split()
    assert ("━" * shown.BAR in lines[-1]) == (width == 120)


def test_numbers_are_left_out_in_order() -> None:
    numbers = shown.describe(step(3), 3700)
    names = [set(shown.fitted(numbers, width)) for width in range(80, 0, -1)]
    seen = list(dict.fromkeys(tuple(name for name in numbers if name in kept) for kept in names))
    assert seen == [
        ("loss", "rate", "norm", "speed", "memory", "left"),
        ("loss", "rate", "norm", "speed", "left"),
        ("loss", "rate", "speed", "left"),
        ("loss", "speed", "left"),
        ("loss", "left"),
        ("loss",),
    ]


def test_a_resumed_run_shows_its_first_step(clock: list[float]) -> None:
    out = io.StringIO()
    with shown.StepView(Console(file=out, soft_wrap=True), 100) as view:
        for number in range(51, 55):
            clock[0] += 0.01
            view.show(step(number))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["51/100", "54/100"]


def test_other_ranks_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    console = shown.RunConsole(quiet=True)
    console.say("words")
    console.label("name", "words")
    with console.steps(2) as view:
        view.show(step(1))
    assert capfd.readouterr().out == ""


def test_refusals_are_one_message_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    message = "--out [red]x[/red]: " + "very long " * 30
    shown.refuse(message)
    captured = capfd.readouterr()
    assert captured.err == f"refused: {message}\n"  # neither wrapped nor read as markup
    assert captured.out == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(7, "7"), (950, "950"), (999.6, "1.00k"), (12_345, "12.3k"), (456_000, "456k"), (8.03e9, "8.03B")],
)
def test_counts(number: float, text: str) -> None:
    assert shown.count(number) == text


def test_durations_and_sizes() -> None:
    assert [shown.duration(s) for s in (0, 59.6, 61, 3661, -3)] == ["0:00", "1:00", "1:01", "1:01:01", "0:00"]
    assert shown.size(300 * 2**20) == "300 MiB"
    assert shown.size(20 * 2**30) == "20.0 GiB"
