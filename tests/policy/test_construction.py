"""ScanCheckpointPolicy as a value: what it accepts and refuses, and that it can be compared."""

import dataclasses

import numpy as np
import pytest

from stackax import ScanCheckpointPolicy

ACCEPTED = [
    dict(),
    dict(save_carries=True),
    dict(save_carries=False),
    dict(save_carries="offload"),
    dict(save_block_internals=True),
    dict(save_block_internals=False),
    dict(save_block_internals=["a", "b"]),
    dict(save_inputs=True, save_block_internals=True),
    dict(offload_block_internals=["a"]),
    dict(save_block_internals=["a"], offload_block_internals=["b"]),
    dict(save_carries="offload", save_block_internals=["a"], offload_block_internals=["b"]),
    dict(save_block_internals=["a"], match_names="any"),
    dict(save_block_internals=["a"], prevent_cse=True),
    dict(prevent_cse=True),
    dict(prevent_cse=False),
    dict(disable=True),
    dict(simple=True),
    dict(simple=True, nested=2),  # Haliax's own tests write it so.
    dict(nested=True),
    dict(nested=2),
    dict(nested=(2, 3)),
    dict(slots=1),
    dict(slots=100),
    dict(slots=3, save_carries="offload"),
    dict(nested=True, save_carries="offload"),
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_every_field_is_accepted_where_it_has_an_effect(fields):
    policy = ScanCheckpointPolicy(**fields)
    assert policy == ScanCheckpointPolicy(**fields)
    assert hash(policy) == hash(ScanCheckpointPolicy(**fields))


REFUSED_TOGETHER = [
    dict(nested=True, slots=2),
    dict(slots=2, save_block_internals=["a"]),
    dict(slots=2, offload_block_internals=["a"]),
    dict(slots=2, save_block_internals=True),
    dict(nested=2, save_block_internals=["a"]),
    dict(nested=2, offload_block_internals=["a"]),
    dict(nested=True, save_block_internals=True),
    dict(simple=True, save_block_internals=["a"]),
    dict(simple=True, save_block_internals=True),
    dict(simple=True, offload_block_internals=["a"]),
    dict(disable=True, nested=True),
    dict(disable=True, slots=2),
    dict(disable=True, simple=True),
    dict(disable=True, save_carries="offload"),
    dict(disable=True, save_block_internals=["a"]),
    dict(disable=True, offload_block_internals=["a"]),
    dict(save_block_internals=True, save_carries="offload"),
    dict(save_block_internals=True, offload_block_internals=["a"]),
    dict(save_block_internals=["a"], offload_block_internals=["a"]),
    dict(save_inputs=True),
    dict(match_names="any"),
]


@pytest.mark.parametrize("fields", REFUSED_TOGETHER, ids=str)
def test_fields_that_cancel_each_other_raise_and_are_named(fields):
    with pytest.raises(ValueError) as raised:
        ScanCheckpointPolicy(**fields)
    assert any(field in str(raised.value) for field in fields)


IMPOSSIBLE = [
    ("save_carries", "disk"),
    ("save_carries", 1),
    ("save_carries", None),
    ("save_inputs", "offload"),
    ("save_inputs", "yes"),
    ("save_block_internals", 3),
    ("save_block_internals", None),
    ("save_block_internals", [1]),
    ("save_block_internals", [""]),
    ("save_block_internals", ""),
    ("offload_block_internals", True),
    ("offload_block_internals", None),
    ("prevent_cse", "no"),
    ("prevent_cse", 1),
    ("disable", "no"),
    ("disable", None),
    ("simple", 1),
    ("nested", 0),
    ("nested", 1),
    ("nested", -2),
    ("nested", 2.5),
    ("nested", "yes"),
    ("nested", None),
    ("nested", ()),
    ("nested", (4, 1)),
    ("nested", (4, "2")),
    ("slots", 0),
    ("slots", -1),
    ("slots", 2.0),
    ("slots", True),
    ("slots", "4"),
    ("match_names", "some"),
    ("match_names", True),
]


@pytest.mark.parametrize("field, value", IMPOSSIBLE, ids=str)
def test_an_impossible_value_raises_and_the_field_is_named(field, value):
    with pytest.raises((ValueError, TypeError), match=field):
        ScanCheckpointPolicy(**{field: value})


def test_an_unknown_field_raises_type_error():
    with pytest.raises(TypeError, match="save_carry"):
        ScanCheckpointPolicy(save_carry=True)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "make, nearest",
    [
        (lambda: ScanCheckpointPolicy(save_carries="offlod"), "offload"),
        (lambda: ScanCheckpointPolicy.from_bool_or_str("nestd"), "nested"),
        (lambda: ScanCheckpointPolicy.from_bool_or_str("recomput"), "recompute"),
        (lambda: ScanCheckpointPolicy.from_bool_or_str("save_qkv_prj"), "save_qkv_proj"),
        (lambda: ScanCheckpointPolicy.from_bool_or_str("Minimal"), "minimal"),
        (lambda: ScanCheckpointPolicy.custom({"context": "devcie"}), "device"),
        (lambda: ScanCheckpointPolicy.custom({"context": "ofload"}), "offload"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_typing_error_is_answered_with_the_nearest_word(make, nearest):
    with pytest.raises(ValueError) as raised:
        make()
    assert f"did you mean '{nearest}'?" in str(raised.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda word: ScanCheckpointPolicy(save_carries=word),
        lambda word: ScanCheckpointPolicy.from_bool_or_str(word),
        lambda word: ScanCheckpointPolicy.custom({"context": word}),
    ],
    ids=["field", "alias", "custom"],
)
def test_a_misspelt_memory_kind_raises_and_what_works_is_listed(make):
    with pytest.raises(ValueError, match="pinned_hots") as raised:
        make("pinned_hots")
    assert "'offload'" in str(raised.value)


@pytest.mark.parametrize("names", [["sin"], ("sin",), {"sin"}, frozenset({"sin"}), "sin"], ids=repr)
@pytest.mark.parametrize("field", ["save_block_internals", "offload_block_internals"])
def test_names_mean_the_same_in_every_collection(field, names):
    policy = ScanCheckpointPolicy(**{field: names})
    assert getattr(policy, field) == ("sin",)
    assert policy == ScanCheckpointPolicy(**{field: ["sin"]})
    assert hash(policy) == hash(ScanCheckpointPolicy(**{field: ["sin"]}))


def test_names_of_equal_sets_are_equal_in_any_order():
    one = ScanCheckpointPolicy(save_block_internals={"c", "a", "b"})
    other = ScanCheckpointPolicy(save_block_internals=frozenset(["b", "c", "a"]))
    assert one == other and hash(one) == hash(other)


def test_a_generator_of_names_is_read_once_and_kept():
    policy = ScanCheckpointPolicy(save_block_internals=(name for name in ("a", "b")))
    assert policy.save_block_internals == ("a", "b")


def test_no_names_at_all_are_the_same_as_false():
    assert ScanCheckpointPolicy(save_block_internals=[]) == ScanCheckpointPolicy()


def test_different_policies_are_unequal():
    policies = [ScanCheckpointPolicy(**fields) for fields in ACCEPTED]
    spelt_alike = [dict(), dict(save_carries=True), dict(save_block_internals=False)]
    distinct = [p for p, f in zip(policies, ACCEPTED, strict=True) if f not in spelt_alike]
    assert len(set(distinct)) == len(distinct)


def test_a_list_for_nested_is_kept_as_a_hashable_tuple():
    assert ScanCheckpointPolicy(nested=[2, 3]) == ScanCheckpointPolicy(nested=(2, 3))


def test_fields_cannot_be_assigned():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ScanCheckpointPolicy().slots = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_replace_changes_one_field_and_checks_the_result():
    policy = ScanCheckpointPolicy(save_carries="offload")
    thinned = dataclasses.replace(policy, slots=4)
    assert thinned == ScanCheckpointPolicy(save_carries="offload", slots=4)
    with pytest.raises(ValueError, match="slots"):
        dataclasses.replace(thinned, nested=True)


def test_a_policy_is_a_key_of_a_dict():
    table = {ScanCheckpointPolicy(slots=4): "few", ScanCheckpointPolicy(nested=True): "some"}
    assert table[ScanCheckpointPolicy(slots=4)] == "few"


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_the_repr_makes_the_same_policy_again(fields):
    policy = ScanCheckpointPolicy(**fields)
    assert eval(repr(policy)) == policy


def test_the_first_eight_fields_are_haliaxs_in_haliaxs_order():
    import haliax.nn

    theirs = [field.name for field in dataclasses.fields(haliax.nn.ScanCheckpointPolicy)]
    ours = [field.name for field in dataclasses.fields(ScanCheckpointPolicy)]
    assert ours[: len(theirs)] == theirs


def test_numbers_of_numpy_are_numbers():
    assert ScanCheckpointPolicy(slots=np.int64(3)) == ScanCheckpointPolicy(slots=3)
    assert ScanCheckpointPolicy(nested=(np.int32(4), 2)) == ScanCheckpointPolicy(nested=(4, 2))
