"""Tables break between words as long as there is any room for that."""

from __future__ import annotations

import io
import os
import re

import pytest
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from moe_core.cli.output import fields, print_error, stdout
from moe_core.cli.word_table import WordTable

NAMES = ("a_name_of_thirty_characters__1,", ".another_name_of_twenty_six", "short")


def _printed(width, *rows):
    view = WordTable("", "NAMES", "ABOUT", "MORE")
    for row in rows:
        view.add_row(*row)
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    return console.file.getvalue().splitlines()


def _rows():
    sentence = "words that may stand wherever there is room for words"
    return [(str(place), " ".join(NAMES), sentence, sentence) for place in range(2)]


@pytest.mark.parametrize("width", [60, 70, 80, 100, 400])
def test_no_word_is_broken_where_all_of_them_fit(width):
    lines = _printed(width, *_rows())
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for name in NAMES:
        assert words.count(name) == 2
    assert words.count("wherever") == 4


def test_columns_without_room_go_on_in_a_further_line():
    name = "plugin_with_a_name:family_of_kernels.two_stage_untuned"
    row = ("1", f"torch:none.standard + {name}", "no permutation on one rank", "(input-global-scale)")
    for width in range(len(name) + 3, 140):
        lines = _printed(width, row, ("2", "short", "", ""))
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        # Nothing is broken, lost or told twice; the second row has nothing to go on with.
        expected = " ".join(("NAMES ABOUT MORE", *row, "2 short"))
        assert sorted(words) == sorted(expected.split()), width
        assert lines[-1].split() == ["2", "short"]
    assert len(lines) == 3


@pytest.mark.parametrize("width", range(20, 100, 7))
def test_numbers_are_never_broken(width):
    numbers = [f"{-0.5 - place:.4f}" for place in range(14)]
    view = WordTable("T", *map(str, range(len(numbers))))
    for column in view.columns:
        column.justify = "right"
    view.add_row("8192", *numbers)
    console = Console(file=io.StringIO(), width=width)
    console.print(view)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert [word for line in lines for word in line.split()][-15:] == ["8192", *numbers]


def test_further_lines_of_rows_lie_below_each_other():
    first, second = ("1", "a" * 30, "x" * 20, "yes"), ("2", "b", "c d", "no")
    lines = _printed(50, first, second)
    # Header and rows alike: what begins below MORE begins there.
    assert [line.split() for line in lines[0::2]] == [["NAMES"], ["1", "a" * 30], ["2", "b"]]
    places = {lines[index].index(word) for index, word in ((1, "MORE"), (3, "yes"), (5, "no"))}
    assert len(places) == 1


def test_a_word_longer_than_a_line_is_cut_and_not_lost():
    lines = _printed(20, *_rows())
    assert max(map(len, lines)) <= 20
    assert "".join("".join(lines).split()).count("a_name_of_thirty_characters__1,") == 2


def test_a_table_is_as_wide_as_it_needs_to_be():
    lines = _printed(80, ("1", "name", "word", "word"))
    assert [line.split() for line in lines] == [["NAMES", "ABOUT", "MORE"], ["1", "name", "word", "word"]]
    assert max(len(line.rstrip()) for line in lines) == len("1  NAMES  ABOUT  MORE")


def test_what_narrow_columns_leave_goes_to_the_wide_ones():
    long = "one two three four five six seven eight nine ten"
    lines = _printed(len(long) + 20, ("1", long, "two words", "yes"))
    assert len(lines) == 2
    assert lines[1].split() == ["1", *long.split(), "two", "words", "yes"]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_texts_stand_below_labels_that_leave_them_no_room(width):
    path, long = "a" * 36, "decode, from 129 to 256 tokens"
    console = Console(file=io.StringIO(), width=width)
    console.print(fields({"  of": "one two three four", long: "five six seven", "path": path, "none": ""}))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert path in (line.strip().removeprefix("path").strip() for line in lines)
    assert any(line.startswith(long) for line in lines)
    assert "five six seven" in " ".join(" ".join(lines).split())
    assert "none" not in " ".join(lines)
    # Beside its label, where there is room for it.
    assert lines[0].split() == ["of", "one", "two", "three", "four"]


def test_lines_end_with_their_last_word(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    view = WordTable("NAME", "ABOUT")
    view.add_row("one", "short")
    view.add_row("another one", "words " * 20)
    tree = Tree("a tree")
    tree.add("words " * 20)
    for printed in (view, fields({"label": "words " * 20}), tree, Text("words " * 20), "words   "):
        stdout().print(printed)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 15
    assert [line for line in lines if line != line.rstrip()] == []


def test_lines_are_as_wide_as_the_terminal_behind_a_pipe(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    # The terminal is where the errors go.
    monkeypatch.setattr(os, "isatty", lambda number: number == 2)
    monkeypatch.setattr(os, "get_terminal_size", _terminal_of_70_columns)
    stdout().print(fields({"label": "word " * 40}))
    assert 60 < max(map(len, capsys.readouterr().out.splitlines())) <= 70


def _terminal_of_70_columns(number):
    if number != 2:
        raise OSError
    return os.terminal_size((70, 24))


def test_lines_are_long_where_the_output_is_no_terminal_unless_the_user_says_how_long(monkeypatch, capsys):
    monkeypatch.setattr(os, "isatty", lambda number: False)
    sentence = "word " * 25
    for columns, num_lines in (("", 1), ("80", 2)):
        monkeypatch.setenv("COLUMNS", columns)
        stdout().print(fields({"label": sentence}))
        assert len(capsys.readouterr().out.splitlines()) == num_lines


@pytest.mark.error_path
def test_a_message_on_a_terminal_breaks_neither_options_nor_names(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    long = "a_name_" * 7
    print_error(f"pin another with --runner-backend or --a2a-backend, or leave out --no-measurements: {long}")
    words = re.sub("\x1b\\[[0-9]*m", "", capsys.readouterr().err).split()
    assert {"--runner-backend", "--a2a-backend,", "--no-measurements:"} <= set(words)
    assert any(long in word for word in words)


def test_what_would_act_on_a_terminal_is_shown_as_it_is_written():
    console = Console(file=io.StringIO(), width=60)
    console.print(fields({"variables": "A=\x1b[31m\tb\nB=ü"}))
    assert console.file.getvalue().split() == ["variables", r"A=\x1b[31m\tb", "B=ü"]


@pytest.mark.parametrize("columns", ["0", "-5", "wide", ""])
def test_columns_that_are_none_are_not_believed(monkeypatch, columns, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    stdout().print("a line with words")
    assert capsys.readouterr().out == "a line with words\n"
