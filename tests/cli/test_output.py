"""Tables break between words as long as there is any room for that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moe_core.cli.output import table

NAMES = ("a_name_of_thirty_characters__1,", ".another_name_of_twenty_six", "short")


def _printed(width, *rows):
    view = table("", "NAMES", "ABOUT", "MORE")
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


def test_the_longest_name_stays_whole_where_other_words_have_to_break():
    pair = "torch:none.standard + plugin_with_a_name:family_of_kernels.two_stage_untuned"
    for width in range(74, 96):
        lines = _printed(width, ("1", pair, "no permutation on one rank", "(input-global-scale)"))
        assert max(map(len, lines)) <= width
        assert "plugin_with_a_name:family_of_kernels.two_stage_untuned" in " ".join(lines).split(), width
        assert "torch:none.standard + " in lines[1], width


def test_what_has_no_room_is_cut_and_not_lost():
    lines = _printed(40, *_rows())
    assert max(map(len, lines)) <= 40
    assert "a_name" in " ".join(lines)


def test_a_table_is_as_wide_as_it_needs_to_be():
    lines = _printed(80, ("1", "name", "word", "word"))
    assert [line.split() for line in lines] == [["NAMES", "ABOUT", "MORE"], ["1", "name", "word", "word"]]
    assert max(len(line.rstrip()) for line in lines) == len("1  NAMES  ABOUT  MORE")


def test_what_narrow_columns_leave_goes_to_the_wide_ones():
    long = "one two three four five six seven eight nine ten"
    lines = _printed(len(long) + 20, ("1", long, "two words", "yes"))
    assert len(lines) == 2
    assert lines[1].split() == ["1", *long.split(), "two", "words", "yes"]
