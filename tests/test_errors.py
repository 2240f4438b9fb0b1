"""Lists in messages end where nobody reads on."""

from __future__ import annotations

from moe_core.errors import UnknownNameError, WeightsError, some_of


def test_of_many_names_the_first_and_their_number_are_said() -> None:
    assert some_of([]) == ""
    assert some_of(["a", 2]) == "a, 2"
    assert some_of(range(12)) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert some_of(range(13), most=3) == "0, 1, 2 and 10 more"


def test_of_many_problems_the_first_are_listed_and_all_are_kept() -> None:
    problems = [f"tensor {number}" for number in range(40_000)]
    error = WeightsError.listing("wrong:", problems)
    lines = str(error).splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("wrong:", "  tensor 0", "  and 39950 more")
    assert len(lines) == 52
    assert error.problems == tuple(problems)


def test_who_stops_in_mid_name_means_what_begins_so():
    error = UnknownNameError("scheme", "fp8", ["mxfp8", "fp8_tensor_static", "fp8_block128"])
    assert "did you mean 'fp8_block128'?" in str(error)
    assert "did you mean 'mxfp8'?" in str(UnknownNameError("scheme", "mfp8", ["mxfp8", "fp8_block128"]))
    assert "did you mean" not in str(UnknownNameError("scheme", "", ["mxfp8"]))
