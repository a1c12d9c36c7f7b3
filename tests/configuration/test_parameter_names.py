"""Parameters are called alike in all mixers, former names still load, and what old configurations meant stays."""

import dataclasses

import pytest

import frankenstein_hf as fhf
from frankenstein_hf.configuration.registries import MIXERS

NAMES = {"short_conv": "use_short_conv", "window": "window_size", "epsilon": "eps"}
RENAMED = [(spec.name, former) for spec in MIXERS for former in spec.params.former_names]
CONVOLVED = [spec.name for spec in MIXERS if spec.params().__dict__.get("activation") == "silu"]


@pytest.mark.parametrize("name", MIXERS.names())
def test_what_mixers_share_is_called_alike(name):
    names = {field.name for field in dataclasses.fields(MIXERS.get(name).params)}
    assert not names & set(NAMES), f"call it {[NAMES[x] for x in names & set(NAMES)]}"


@pytest.mark.parametrize(("name", "former"), RENAMED)
def test_a_former_name_means_the_parameter_of_today(name, former):
    params = MIXERS.get(name).params
    today = params.former_names[former]
    default = next(field.default for field in dataclasses.fields(params) if field.name == today)
    value = (not default) if isinstance(default, bool) else default + 1 if isinstance(default, int) else 0.125
    config = fhf.FrankensteinConfig(layer_pattern=name, mixer_params={name: {former: value}})
    again = fhf.FrankensteinConfig.from_dict(config.to_dict())
    for read in (config, again):
        assert getattr(read.params_for(0), today) == value
    with pytest.raises(ValueError, match=f"'{former}' and '{today}' are one parameter"):
        fhf.FrankensteinConfig(layer_pattern=name, mixer_params={name: {former: value, today: value}})


@pytest.mark.parametrize("name", CONVOLVED)
def test_without_convolution_old_configurations_have_no_activation_and_new_ones_do(name):
    def activations(**values):
        config = fhf.FrankensteinConfig(
            layer_pattern=name, num_hidden_layers=2, mixer_params={name: {"use_short_conv": False}},
            per_layer_config={1: {"mixer_params": {name: {"use_short_conv": False}}}}, **values,
        )  # fmt: skip
        again = fhf.FrankensteinConfig.from_dict(config.to_dict() | {"frankenstein_version": fhf.__version__})
        return {read.params_for(i).activation for read in (config, again) for i in range(2)}

    assert activations() == {"silu"}
    assert activations(frankenstein_version="0.1.0") == {"identity"}


def test_widths_must_be_whole_numbers():
    with pytest.raises(ValueError, match=r"expand_v=0\.3 makes heads 19\.2 wide at head_dim=64"):
        fhf.FrankensteinConfig(layer_pattern="gla", mixer_params={"gla": {"expand_v": 0.3}})
