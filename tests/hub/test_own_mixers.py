"""Which mixers from outside the package travel with a checkpoint, and what those that do not are told.

That they load and compute the same is in `test_bundle.py`, beside all others.
"""

from pathlib import Path

import pytest
import torch

import frankenstein_hf as fhf
from frankenstein_hf import components
from frankenstein_hf.hub.own_mixers import pack_own, public_homes
from frankenstein_hf.modeling.hub_bundle import bundle_files
from tests.hub.own import own_mixer, registering
from tests.tiny import tiny_config

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN = """
from frankenstein_hf import Mixer, MixerSpec, register_mixer


class Doubler(Mixer):
    def forward(self, hidden_states, context, cache=None):
        return 2 * hidden_states, None


SPEC = MixerSpec(name="doubler", family="test", summary="Twice.", reference="none")
register_mixer(SPEC, Doubler)
"""


def model_with(name):
    return fhf.FrankensteinModel(tiny_config("gla", layer_pattern=[name], mixer_params={}))


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("", "import numpy", "numpy may be missing"),
        ("", "from .other import x", "self-contained"),
        ("", "from . import x", "self-contained"),
        ("", "import frankenstein_hf as fhf", "from frankenstein_hf import"),
        ("", "from frankenstein_hf import create_optimizer", "create_optimizer of frankenstein_hf does not travel"),
        ("", "from frankenstein_hf import *", "does not travel"),
        ("", "from frankenstein_hf.optim import base", "does not travel"),
        ("", "from frankenstein_hf.modeling.ops.numerics import _secret", "does not travel"),
        ("", "from frankenstein_hf.modeling.ops.nothing import x", "does not travel"),
        ("", "if True: from frankenstein_hf import Params", "line of its own"),
        ("", "from importlib import import_module\nimport_module('torch')", "may need code that does not come along"),
        ("", "'''\nfrom .prose import this\n'''", "looks like an import"),
        ("SPEC = MixerSpec", "register_mixer(MixerSpec", "no variable of mine.py holds its MixerSpec"),
    ],
)
def test_a_file_that_needs_more_is_refused_with_the_reason_before_anything_is_written(
    before, after, reason, tmp_path, monkeypatch
):
    text = PLAIN.replace(before, after) if before else PLAIN
    if before.startswith("SPEC"):
        text = text.replace('reference="none")\nregister_mixer(SPEC, Doubler)', 'reference="none"), Doubler)')
    path = written(tmp_path / "mine.py", text)
    with own_mixer(path) as module:
        if not before:  # what it says it needs is not run here: it might not exist
            monkeypatch.setitem(components.SOURCES, module.__name__, f"{PLAIN}{after}\n".encode())
        model = model_with("doubler")
        with pytest.raises(ValueError, match=reason) as error:
            model.save_pretrained(tmp_path / "out")
        assert "'doubler'" in str(error.value) or "own/mine.py" in str(error.value)
        assert not (tmp_path / "out").exists()
        model.save_pretrained(tmp_path / "out", save_code=False)
        assert not bundle_files(tmp_path / "out")


def test_a_class_that_no_file_holds_at_its_top_level_is_refused(tmp_path, monkeypatch):
    class Identity(fhf.Mixer):
        def forward(self, hidden_states, context, cache=None):
            return hidden_states, None

    with registering():
        fhf.register_mixer(
            fhf.MixerSpec(name="somebodys", family="test", summary="Nothing.", reference="none"), Identity
        )
        model = model_with("somebodys")
        with pytest.raises(ValueError, match=r"'somebodys'.*not a class at the top level.*save_code=False"):
            model.save_pretrained(tmp_path / "out")
        monkeypatch.setattr(Identity, "__module__", "__main__")
        with pytest.raises(ValueError, match=r"'somebodys'.*in a notebook.*a file of their own.*save_code=False"):
            model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stem", ["Mine", "my-mixer", "1st"])
def test_a_file_whose_name_no_module_can_have_is_refused(stem, tmp_path):
    with own_mixer(written(tmp_path / f"{stem}.py", PLAIN)), pytest.raises(ValueError, match="rename the file"):
        model_with("doubler").save_pretrained(tmp_path / "out")


def test_two_files_of_one_name_are_refused_and_two_mixers_of_one_file_are_not(tmp_path):
    (tmp_path / "a").mkdir()
    again = PLAIN.replace('"doubler"', '"tripler"').replace("Doubler", "Tripler").replace("2 *", "3 *")
    first, second = written(tmp_path / "mine.py", PLAIN), written(tmp_path / "a" / "mine.py", again)
    both = written(tmp_path / "both.py", PLAIN + again.replace("SPEC", "OTHER"))
    with own_mixer(first), own_mixer(second):
        model = fhf.FrankensteinModel(tiny_config(["doubler", "tripler"], mixer_params={}))
        with pytest.raises(ValueError, match="same name"):
            model.save_pretrained(tmp_path / "out")
    with own_mixer(both):
        fhf.FrankensteinModel(tiny_config(["doubler", "tripler", "gla"], mixer_params={})).save_pretrained(
            tmp_path / "out"
        )
    assert {"modeling_own_both.py", "modeling_public.py", "modeling_mixers_gated_gla.py"} <= set(
        bundle_files(tmp_path / "out")
    )
    with registering():
        assert fhf.load_mixers(str(tmp_path / "out"), trust_remote_code=True) == ["doubler", "tripler"]
        model = fhf.FrankensteinModel.from_pretrained(tmp_path / "out")
        x = torch.ones(1, 2, dtype=torch.long)
        assert torch.isfinite(model(x).last_hidden_state).all()
    own = tmp_path / "out" / "modeling_own_both.py"
    own.write_text(f"from .modeling_ops_former import x\n{own.read_text()}")
    with (
        registering(),
        pytest.raises(ValueError, match=r"modeling_own_both.py imports modeling_ops_former, which this"),
    ):
        fhf.load_mixers(str(tmp_path / "out"), trust_remote_code=True)
    fhf.FrankensteinModel(tiny_config("gla")).save_pretrained(tmp_path / "out")  # and are cleared away like all others
    assert not {"modeling_own_both.py", "modeling_public.py"} & set(bundle_files(tmp_path / "out"))


def test_the_code_that_runs_travels_whatever_becomes_of_its_file(tmp_path):
    path = written(tmp_path / "mine.py", PLAIN)
    with own_mixer(path):
        path.write_text(PLAIN.replace("2 *", "3 *"))  # while a model trains
        model_with("doubler").save_pretrained(tmp_path / "one")
        path.unlink()
        model_with("doubler").save_pretrained(tmp_path / "two")
    for name in ("one", "two"):
        assert "return 2 * hidden_states" in (tmp_path / name / "modeling_own_mine.py").read_text()


def test_every_public_name_that_travels_is_one_of_a_travelling_module():
    homes = public_homes()
    assert {"Mixer", "RowMixer", "RecurrentMixer", "MixerSpec", "Params", "param", "register_mixer"} <= set(homes)
    assert all(home.partition(".")[0] in ("modeling", "configuration", "") for home in homes.values())
    assert pack_own([]) == ([], {})


def test_the_mixer_of_the_gallery_is_its_recurrence_and_honours_the_contract():
    """h_t = (1 − z_t) h_{t−1} + z_t h̃_t in a loop; pads, packing, decoding and causality follow from the base class."""
    with own_mixer(EXAMPLES / "min_gru.py"):
        torch.manual_seed(0)
        model = fhf.FrankensteinForCausalLM(tiny_config("gla", layer_pattern=["min_gru"], mixer_params={})).eval()
        mixer = model.model.layers[0].mixer
        x = torch.randint(4, 30, (2, 19))
        seen = []
        mixer.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output[0])))
        with torch.no_grad():
            logits = model(x).logits
            (hidden, output), h, expected = seen[0], 0.0, []
            for t in range(x.shape[1]):
                z = torch.sigmoid(mixer.z_proj(hidden[:, t]))
                h = (1 - z) * h + z * mixer.h_proj(hidden[:, t])
                expected.append(mixer.o_proj(h))
            torch.testing.assert_close(output, torch.stack(expected, 1), rtol=1e-5, atol=1e-6)
            left = torch.cat([torch.zeros(2, 3, dtype=torch.long), x], 1)
            mask = (torch.arange(22) >= 3).long().expand(2, -1)
            torch.testing.assert_close(model(left, attention_mask=mask).logits[:, 3:], logits, rtol=1e-5, atol=1e-5)
            options = {"max_new_tokens": 5, "do_sample": False}
            assert torch.equal(model.generate(x, **options), model.generate(x, use_cache=False, **options))
            model.set_attn_implementation("eager")
            torch.testing.assert_close(model(x).logits, logits, rtol=1e-5, atol=1e-5)
