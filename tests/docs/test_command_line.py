"""docs/api/command_line.md, which shows what `--help` prints."""

from pathlib import Path

import pytest

from stackax.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "api" / "command_line.md"
COMMANDS = ("explain", "tradeoffs", "train")


def shown_help() -> list[str]:
    """The blocks of the page that begin with a usage."""
    blocks = PAGE.read_text(encoding="utf-8").split("```text\n")[1:]
    return [block.partition("```")[0] for block in blocks]


@pytest.mark.parametrize("place, command", [*enumerate(["", *COMMANDS])])
def test_the_page_shows_the_help_of_each_command(place, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    # Word by word, since releases of argparse break lines at other places.
    assert shown_help()[place].split() == printed.split(), (
        f"paste what `COLUMNS=80 python -m stackax {command} --help` prints into {PAGE}"
    )


def test_the_page_leaves_no_command_out(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out.partition("COMMAND\n")[2]
    names = [line[4:].split()[0] for line in listed.splitlines() if line[4:5].strip()]
    assert tuple(names) == COMMANDS and len(shown_help()) == 1 + len(COMMANDS)
