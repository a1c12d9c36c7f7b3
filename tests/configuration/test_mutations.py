"""Whatever somebody writes into a configuration works, or is refused when it is built with key, value and remedy."""

import itertools

import pytest

from ..tiny import ALL_MIXERS
from .mutations import FAULTS, cases, fate

MANY, OF_EVERY_MIXER = 400, 12


def faults(stream, number):
    """One line for each of the first cases that is a fault."""
    found = []
    for values, key, value in itertools.islice(stream, number):
        what, line = fate(values, key, value)
        if what in FAULTS:
            found.append(f"{what}: {key}={value!r} in {values['layer_pattern']}: {line}")
    return "\n".join(found)


@pytest.mark.filterwarnings("ignore")
def test_a_mutated_configuration_works_or_is_refused_by_our_own_error():
    assert not faults(cases(seed=1), MANY)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL_MIXERS)
def test_a_mutated_parameter_of_a_mixer_works_or_is_refused_by_our_own_error(name):
    assert not faults(cases(seed=1, mixer=name), OF_EVERY_MIXER)


def test_the_examination_recognises_every_fault(monkeypatch):
    """Else the test above could not fail."""
    import frankenstein_hf as fhf
    from frankenstein_hf.configuration import validation

    good = dict(vocab_size=29, hidden_size=8, num_attention_heads=2, num_hidden_layers=2, layer_pattern=["gla"])
    assert fate(good, "vocab_size", 29) == ("works", "")
    assert fate({**good, "vocab_size": 0}, "vocab_size", 0)[0] == "ours"
    assert fate({**good, "vocab_size": 0}, "hidden_size", 0)[0] == "foreign"  # another key is named
    assert fate({**good, "use_bidirectional_attention": None}, "hidden_size", 8)[0] == "works"
    monkeypatch.setattr(fhf.FrankensteinConfig, "_read", classmethod(lambda cls, given: dict(given)))
    assert fate({**good, "vocab_size": 0}, "vocab_size", 0)[0] in ("foreign", "late")
    assert fate({**good, "dtype": "x"}, "dtype", "x")[0] == "foreign"
    monkeypatch.setattr(fhf.FrankensteinConfig, "_read", classmethod(_without_checks))
    monkeypatch.setattr(validation, "check_key", lambda *arguments: None)
    assert fate({**good, "is_decoder": True}, "is_decoder", True)[0] in ("ignored", "works")
    assert fate({**good, "temperature": 0.5}, "temperature", 0.5)[0] == "ignored"
    assert fate({**good, "initializer_range": 1e30}, "initializer_range", 1e30)[0] == "late"


def _without_checks(cls, given):
    from frankenstein_hf.configuration.validation import read_arguments

    return read_arguments(cls, given, ())
