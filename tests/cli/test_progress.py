"""Progress goes to stderr: a bar on a terminal, otherwise lines if the work takes long."""

from __future__ import annotations

import pytest
from rich.console import Console

from carryall.cli import progress as module
from carryall.cli.options import human_bytes
from carryall.cli.progress import progress


def work(label: str = "export", *, quiet: bool = False) -> None:
    with progress(label, quiet=quiet) as tell:
        for done in range(5):
            tell(done, 4, "tensor")


def test_short_work_outside_a_terminal_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert capsys.readouterr() == ("", "")


def test_long_work_outside_a_terminal_writes_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.0)
    work()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "export: 0 %\nexport: 100 %\n"  # no line is due between them


def test_another_total_is_the_next_step_and_a_share_never_falls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed([(3, 4), (2, 4), (4, 4), (1, 5), (5, 5)], 4.0, module.PREPARE, capsys, monkeypatch)
    first, second = "prepare (the first time only)", "prepare (the first time only), step 2"
    assert lines == [
        *(f"{first}: {share} %" for share in (75, 75, 100)),
        *(f"{second}: {share} %" for share in (20, 100)),
    ]


def printed(
    reports: list[tuple[int, int]],
    pace: float,
    label: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """The lines for reports that are ``pace`` seconds apart."""
    clock = [0.0]
    monkeypatch.setattr(module, "FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(module, "NEXT_LINE_SECONDS", 0.0)
    monkeypatch.setattr("carryall.cli.progress.time.monotonic", lambda: clock[0])
    with progress(label) as tell:
        for done, total in reports:
            tell(done, total, "tensor")
            clock[0] += pace
    return capsys.readouterr().err.splitlines()


def test_a_line_tells_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed([(0, 100), (10, 100), (25, 100), (100, 100)], 30.0, "export", capsys, monkeypatch)
    assert lines == [
        "export: 0 %",
        "export: 10 %, about 4:30 left",
        "export: 25 %, about 3:00 left",
        "export: 100 %",
    ]


def test_work_that_ends_before_its_total_is_shown_as_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed([(0, 100), (51, 100)], 30.0, "export", capsys, monkeypatch)
    assert lines[-1] == "export: 100 %"
    assert lines.count("export: 100 %") == 1


def test_a_long_calibration_names_what_is_quicker_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed([(0, 100), (1, 100), (2, 100)], 60.0, "calibrate", capsys, monkeypatch)
    advice = [line for line in lines if "-fast" in line]
    assert advice == [
        "calibrate: about 1:39:00 left; methods that end in -fast read no text and take a fraction of it"
    ]
    lines = printed([(0, 100), (50, 100), (99, 100)], 60.0, "calibrate", capsys, monkeypatch)
    assert not [line for line in lines if "-fast" in line]


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Console(stderr=True, force_terminal=True, width=90)
    monkeypatch.setattr("rich.console.Console", lambda **_: terminal)
    work()
    out, err = capsys.readouterr()
    assert out == ""
    assert "export" in err
    assert "100%" in err
    work(quiet=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (14_680_064, "14.7 MB"), (2.4e9, "2.4 GB"), (3e15, "3000.0 TB")],
)
def test_sizes_for_people(size: float, text: str) -> None:
    assert human_bytes(size) == text
