"""The table of aliases, tested once: each word against the fields that it stands for."""

import haliax as hax
import jax.random as jr
import pytest

from stackax import ScanCheckpointPolicy, Stacked
from tests.zoo import NAMED_MLP, NamedMlp, layers

ALIASES = {
    True: dict(simple=True),
    False: dict(disable=True),
    "none": dict(disable=True),
    "full": dict(simple=True),
    "recompute": dict(simple=True),
    "save_all": dict(save_inputs=True, save_block_internals=True),
    "offload": dict(save_carries="offload"),
    "nested": dict(nested=True),
}


@pytest.mark.parametrize("alias", ALIASES, ids=str)
def test_an_alias_stands_for_its_fields(alias):
    expected = ScanCheckpointPolicy(**ALIASES[alias])
    assert ScanCheckpointPolicy.from_bool_or_str(alias) == expected


@pytest.mark.parametrize("alias", ALIASES, ids=str)
def test_the_documentation_has_a_row_for_every_alias_with_its_fields(alias):
    rows = (ScanCheckpointPolicy.from_bool_or_str.__doc__ or "").splitlines()
    word = f"`{alias}`" if isinstance(alias, bool) else f'`"{alias}"`'
    (row,) = [row for row in rows if row.lstrip().startswith("|") and word in row]
    fields = row.rstrip().rstrip("|").rsplit("|", 1)[1].strip().strip("`")
    assert eval(f"dict({fields})") == ALIASES[alias]


@pytest.mark.parametrize("alias", [*ALIASES, "minimal_with_context"], ids=str)
def test_every_alias_is_accepted_as_gradient_checkpointing(alias):
    make = Stacked.init(layers(2), NamedMlp, gradient_checkpointing=alias)
    stack = make(key=jr.key(0))
    assert stack.gradient_checkpointing == ScanCheckpointPolicy.from_bool_or_str(alias)


@pytest.mark.parametrize("wrong", [None, 1, 0, 2.0, ["full"], object()], ids=repr)
def test_what_is_neither_a_bool_nor_a_string_raises_type_error(wrong):
    with pytest.raises(TypeError):
        ScanCheckpointPolicy.from_bool_or_str(wrong)


@pytest.mark.parametrize("argument", ["gradient_checkpointing", "remat"])
def test_an_unknown_word_raises_and_the_argument_is_named(argument):
    with pytest.raises(ValueError, match="nestd") as raised:
        if argument == "remat":
            NAMED_MLP.stack(2).fold(hax.zeros(()), remat="nestd")
        else:
            NAMED_MLP.stack(2, "nestd")
    assert argument in str(raised.value) and "'nested'" in str(raised.value)


def test_prevent_cse_given_to_init_is_deprecated_and_ends_up_in_the_policy():
    with pytest.warns(DeprecationWarning, match="prevent_cse"):
        make = Stacked.init(
            layers(2), NamedMlp, gradient_checkpointing=ScanCheckpointPolicy(), prevent_cse=True
        )
        stack = make(key=jr.key(0))
    assert stack.gradient_checkpointing.prevent_cse is True


def test_a_number_of_slots_can_be_written_as_an_alias():
    assert ScanCheckpointPolicy.from_bool_or_str("slots=12") == ScanCheckpointPolicy(slots=12)
    with pytest.raises(ValueError, match="slots=0"):
        ScanCheckpointPolicy.from_bool_or_str("slots=0")
