from __future__ import annotations

import enum
import pickle
from typing import Any

import attrs
import pytest
from fakes import BF16_TOKENS, VENDORS, dispatcher, plugin, runner

from moe_core import activation, quant, specs
from moe_core.declared import Candidate, DeclaredDispatcher, DeclaredRunner, answers_to, belongs_to
from moe_core.errors import SpecError
from moe_core.specs import DeviceGeneration, Limit, PluginSpec, Requirement, TokenDtype
from moe_core.vocabulary import arch_order


class Word(str, enum.Enum):  # noqa: UP042 - it is written into a message as `Word.CPU`
    CPU = "cpu"


NAMES = {**vars(quant), **vars(activation), **vars(specs)}


@pytest.mark.parametrize("declared", VENDORS, ids=lambda spec: spec.name)
def test_a_declaration_can_be_written_down_and_read_back(declared: PluginSpec) -> None:
    assert eval(repr(declared), NAMES) == declared
    copied = pickle.loads(pickle.dumps(declared))
    assert copied == declared
    assert hash(copied) == hash(declared)


def test_generations_are_sorted_by_their_numbers() -> None:
    archs = ("a", "a2", "a10", "a10b", "a²", "a٣", "a" + "9" * 5000)
    assert sorted(reversed(archs), key=arch_order) == ["a", "a2", "a10", "a10b", archs[-1], "a²", "a٣"]


@pytest.mark.error_path
@pytest.mark.parametrize("arch", ["sm٣", "²", "٣", "sm" + "9" * 5000], ids=len)
def test_digits_that_are_no_number_are_no_generation(arch: str) -> None:
    with pytest.raises(SpecError, match=r"field 'archs': expected lower-case like 'sm90'"):
        runner(archs=(arch, "sm90"))


def test_unordered_alternatives_are_sorted_and_ordered_ones_are_not() -> None:
    one = runner(archs=["sm90", "sm100", "sm90"], devices={"npu", "cuda"}, reads=(TokenDtype("fp16"), BF16_TOKENS))
    assert one.archs == ("sm90", "sm100")
    assert one.devices == ("cuda", "npu")
    assert one == runner(archs=("sm100", "sm90"), devices=("cuda", "npu"), reads=[TokenDtype("fp16"), BF16_TOKENS])
    assert [token.dtype for token in one.reads] == ["fp16", "bf16"]


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("make", "fields", "match"),
    [
        (runner, {"devices": "cuda"}, r"RunnerSpec 'toy', field 'devices': .*'cuda'; write \('cuda',\)"),
        (runner, {"devices": ("GPU",)}, "RunnerSpec 'toy', field 'devices': expected lower-case like 'cuda'"),
        (runner, {"devices": ()}, "field 'devices': must not be empty"),
        (runner, {"devices": ("cuda", 3)}, "field 'devices'"),
        (
            runner,
            {"archs": ("SM90",)},
            "field 'archs': expected lower-case like 'sm90' or 'a3', at most 64 letters, got 'SM90'",
        ),
        (runner, {"archs": ("a" * 65,)}, "field 'archs': expected lower-case .* at most 64 letters, got 'a{63}$"),
        (plugin, {"device_types": ("a" * 65,)}, "'device_types': .* at most 64 letters, got 'a{63}$"),
        (runner, {"devices": (Word.CPU,)}, "field 'devices': expected lower-case"),
        (runner, {"archs": (90,)}, "field 'archs': expected a tuple of str, got the element 90"),
        (runner, {"reads": ()}, "field 'reads': must not be empty"),
        (runner, {"reads": {BF16_TOKENS}}, "field 'reads': .*order counts: write a tuple"),
        (runner, {"reads": ("bf16",)}, "field 'reads': expected a tuple of TokenDtype, got the element 'bf16'"),
        (
            runner,
            {"reads": (runner(),)},
            "field 'reads': expected a tuple of TokenDtype, got the element of type RunnerSpec",
        ),
        (runner, {"schemes": quant.BF16}, "field 'schemes': expected a tuple"),
        (runner, {"schemes": ("bf16",)}, "field 'schemes': expected a tuple of LayerQuant"),
        (runner, {"activations": ()}, "field 'activations': must not be empty"),
        (runner, {"dtypes": ("bfloat16",)}, "field 'dtypes': 'bfloat16' is not one of"),
        (runner, {"format": "blocked"}, "field 'format': 'blocked' is not one of standard"),
        (runner, {"format": "fused"}, "field 'a2a' goes with format 'fused'"),
        (runner, {"a2a": "deepep"}, "field 'a2a' goes with format 'fused'"),
        (runner, {"tier": "best"}, "field 'tier'"),
        (runner, {"phases": ()}, "field 'phases': must not be empty"),
        (runner, {"row_alignment": 0}, "field 'row_alignment': expected an int >= 1"),
        (runner, {"weight_layout": ""}, "field 'weight_layout': expected letters"),
        (runner, {"bias": "yes"}, "field 'bias': expected bool"),
        (runner, {"name": "a.b"}, "field 'name': expected letters"),
        (runner, {"name": "a" * 65}, "expected letters, digits, .* at most 64"),
        (runner, {"kernel": "a:b"}, "field 'kernel': expected letters"),
        (runner, {"limits": Limit("top_k", "<=", 1)}, "field 'limits': expected a tuple"),
        (dispatcher, {"format": "fused"}, "DispatcherSpec 'toy', field 'format': 'fused' is not one of"),
        (dispatcher, {"binder": "toy"}, "field 'binder': expected 'package.module:function', got 'toy'"),
        (dispatcher, {"binder": "toy:a.b"}, "field 'binder'"),
        (dispatcher, {"sends": BF16_TOKENS}, "field 'sends': expected a tuple"),
        (dispatcher, {"token_placements": ("local",)}, "field 'token_placements'"),
        (dispatcher, {"id_space": "rank"}, "field 'id_space'"),
        (dispatcher, {"needs_max_tokens": 1}, "DispatcherSpec 'toy', field 'needs_max_tokens': expected bool, got 1"),
        (plugin, {"hook_api": "1"}, "PluginSpec 'toy', field 'hook_api': expected an int >= 1, got '1'"),
        (plugin, {"dispatchers": [runner()]}, "field 'dispatchers': expected a tuple of DispatcherSpec"),
        (plugin, {"runners": [runner(), runner()]}, "'toy' declares runner toy.standard more than once"),
        (
            plugin,
            {"runners": [runner(devices=("gpu",))], "device_types": ("zephyr",)},
            "RunnerSpec 'toy': device type 'gpu' is not one of cpu, .*, zephyr, any; .* PluginSpec.device_types",
        ),
        (plugin, {"generations": [DeviceGeneration("gpu", "Z", "z1")]}, "DeviceGeneration: device type 'gpu'"),
        (plugin, {"device_types": ("Zephyr",)}, "field 'device_types': expected lower-case"),
        (plugin, {"dispatchers": [dispatcher(), dispatcher()]}, "declares dispatcher toy.standard more than once"),
    ],
)
def test_a_wrong_declaration_names_object_and_field(make: Any, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        make(**fields)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("topk", "<=", 8), "Limit, field 'field': 'topk' is not one of top_k"),
        (("top_k", "<", 8), "Limit, field 'relation': '<' is not one of"),
        (("top_k", "<=", "8"), "Limit top_k <=: expected an int, got '8'"),
        (("top_k", "<=", True), "Limit top_k <=: expected an int, got True"),
        (("top_k", "<=", (8,)), "Limit top_k <=: expected an int"),
        (("top_k", "in", 8), "Limit top_k in: expected a tuple of ints"),
        (("hidden_size", "multiple_of", 0), "Limit hidden_size multiple_of: expected sizes >= 1"),
        (("top_k", "<=", 0), "Limit top_k <=: expected sizes >= 1, got 0"),
        (("top_k", ">=", -1), "Limit top_k >=: expected sizes >= 1, got -1"),
        (("top_k", "in", ()), r"Limit top_k in: expected sizes >= 1, got \(\)"),
        (("top_k", "<=", float("inf")), "Limit top_k <=: expected an int, got inf"),
        (("top_k", "<=", 8, "two\nlines"), "Limit, field 'hint': expected one printable line"),
    ],
)
def test_a_wrong_limit(arguments: tuple[Any, ...], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        Limit(*arguments)


@pytest.mark.parametrize(
    ("relation", "value", "allowed", "refused"),
    [
        ("<=", 11, [1, 11], [12]),
        (">=", 2, [2, 3], [1]),
        ("multiple_of", 128, [128, 256], [64, 129]),
        ("in", (2048, 7168), [2048, 7168], [4096]),
    ],
)
def test_limits(relation: str, value: Any, allowed: list[int], refused: list[int]) -> None:
    limit = Limit("hidden_size", relation, value)
    assert all(limit.allows(size) for size in allowed)
    assert not any(limit.allows(size) for size in refused)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("arguments", "match"), [(("bf16", "row_128"), "bf16 with scale"), (("fp8",), "fp8 with scale layout 'none'")]
)
def test_token_dtypes_that_do_not_exist(arguments: tuple[str, ...], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        TokenDtype(*arguments)


@pytest.mark.error_path
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"module": "a.b"}, "Requirement, field 'module': expected letters"),
        ({"module": "a", "minimum": "newest"}, "Requirement 'a', field 'minimum': Invalid version"),
        ({"module": "a", "minimum": 2.1}, "field 'minimum': expected str"),
        ({"module": "a", "excluded": "1 to 2"}, "Requirement 'a', field 'excluded': Invalid specifier"),
    ],
)
def test_a_wrong_requirement(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        Requirement(**fields)


@pytest.mark.parametrize(
    ("found", "is_met"),
    [
        ("0.1.2", False),
        ("0.1.3", True),
        ("0.1.5.post1", True),
        ("1.0.0", False),
        ("2.0.9", False),
        ("2.1.0+local", True),
        ("2.0.0rc1", False),
        ("", False),
        ("main", False),
    ],
)
def test_versions_of_several_distributions(found: str, is_met: bool) -> None:
    requirement = Requirement(module="lib", minimum="0.1.3", excluded=">=1,<2.1")
    assert requirement.is_met_by(found) == is_met
    assert str(requirement) == "lib >= 0.1.3, not >=1,<2.1"


@pytest.mark.parametrize(
    ("minimum", "excluded", "text"),
    [
        ("0.1.1", ">=1", "lib >= 0.1.1, < 1"),
        ("", ">=1", "lib < 1"),
        ("2", ">3", "lib >= 2, <= 3"),
        ("", "==2.1", "lib not ==2.1"),
        ("1", "", "lib >= 1"),
    ],
)
def test_what_excludes_all_higher_versions_is_an_upper_bound(minimum: str, excluded: str, text: str) -> None:
    assert str(Requirement(module="lib", minimum=minimum, excluded=excluded)) == text


def test_any_version_is_enough_without_conditions() -> None:
    assert Requirement(module="lib").is_met_by("")
    assert str(Requirement(module="lib")) == "lib"


DECLARED = DeclaredDispatcher("cuda", dispatcher("deepep", "normal"))
FUSED = DeclaredRunner("ascend", runner("fuseep", "m1", format="fused", a2a="ascend_fuseep"))


@pytest.mark.parametrize(
    ("name", "pins", "prefers"),
    [
        ("deepep", True, True),
        ("deepep.normal", True, True),
        ("cuda:deepep", True, True),
        ("cuda:deepep.normal", True, True),
        ("cuda", False, True),
        ("other:deepep", False, False),
        ("normal", False, False),
        ("deepep.low", False, False),
        (":deepep", False, False),
    ],
)
def test_what_a_name_means(name: str, pins: bool, prefers: bool) -> None:
    assert answers_to(name, DECLARED) is pins
    assert belongs_to(name, DECLARED) is prefers


def test_a_fused_runner_stands_alone() -> None:
    alone = Candidate(None, FUSED)
    assert (alone.full_name, alone.a2a_backend) == ("ascend:fuseep.m1", "ascend_fuseep")
    assert belongs_to("ascend_fuseep", FUSED)


@pytest.mark.parametrize(
    ("mine", "theirs", "most"),
    [((), (), None), ((128,), (), 128), ((128,), (64,), 64), ((), (512, 256), 256)],
)
def test_declared_tokens(mine: tuple[int, ...], theirs: tuple[int, ...], most: int | None) -> None:
    limits = [[Limit("max_tokens", "<=", bound) for bound in bounds] for bounds in (mine, theirs)]
    other = Limit("hidden_size", "<=", 1)
    pair = Candidate(
        attrs.evolve(DECLARED, spec=dispatcher(limits=[*limits[0], other])),
        DeclaredRunner("x", runner(limits=limits[1])),
    )
    assert pair.declared_max_tokens == most
