"""Every optimizer through transformers' own Trainer."""

import subprocess
import sys

import pytest
import torch
from transformers import TrainingArguments
from transformers.utils import logging

import frankenstein_hf as fhf
from frankenstein_hf.optim.spec import OPTIMIZERS

from .toy import NAMES, assert_equal_states, language_model, small, trainer

WITH_CALLBACK = [spec.name for spec in OPTIMIZERS if spec.needs == "callback"]


@pytest.mark.parametrize("name", NAMES)
def test_resuming_from_a_checkpoint_is_exact(name, tmp_path):
    def make(folder):
        kwargs = dict(optimizer=fhf.trainer_optimizer(name, **small(name)), callbacks=fhf.trainer_callbacks(name))
        return trainer(folder, language_model(), **kwargs)

    whole = make(tmp_path / "whole")
    whole.train()
    resumed = make(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for (key, p), q in zip(whole.model.named_parameters(), resumed.model.parameters()):
        assert torch.equal(p, q), key
    assert_equal_states(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    # and the checkpoint reads without trust
    torch.load(tmp_path / "whole" / "checkpoint-4" / "optimizer.pt", weights_only=True)


@pytest.mark.parametrize("name", WITH_CALLBACK)
def test_without_its_callback_a_method_raises_or_says_what_is_missing(name, tmp_path, caplog):
    logging.warning_once.cache_clear()
    run = trainer(tmp_path, language_model(), optimizer=fhf.trainer_optimizer(name, **small(name)))
    with caplog.at_level("WARNING"):
        try:
            run.train()
        except RuntimeError as error:
            message = str(error)
        else:
            message = caplog.text
    assert f"trainer_callbacks({name!r})" in message


@pytest.mark.parametrize("name", NAMES)
def test_training_arguments_know_the_name(name, tmp_path):
    assert TrainingArguments(output_dir=str(tmp_path), optim=f"frankenstein_{name}").optim == f"frankenstein_{name}"


def test_optim_and_optim_args_reach_the_optimizer(tmp_path):
    run = trainer(
        tmp_path,
        language_model(),
        optim="frankenstein_adamw",
        optim_args="betas=0.8:0.9, amsgrad=true, embeddings.lr=0.5",
        learning_rate=0.01,
        weight_decay=0.3,
    )
    optimizer = run.create_optimizer()
    assert type(optimizer).__name__ == "AdamW" and {g["role"] for g in optimizer.param_groups} == {
        "embeddings", "norms", "attention", "other"
    }  # fmt: skip
    by_role = {group["role"]: group for group in optimizer.param_groups}
    assert by_role["embeddings"]["lr"] == 0.5 and by_role["other"]["lr"] == 0.01
    assert by_role["norms"]["weight_decay"] == 0.0 and by_role["other"]["weight_decay"] == 0.3
    assert by_role["other"]["betas"] == (0.8, 0.9) and by_role["other"]["amsgrad"] is True
    wrong = trainer(tmp_path, language_model(), optim="frankenstein_adamw", optim_args="bets=0.8:0.9")
    with pytest.raises(ValueError, match="did you mean 'betas'"):
        wrong.create_optimizer()


def test_trainer_optimizer_refuses_at_once():
    with pytest.raises(ValueError, match="did you mean 'lr'"):
        fhf.trainer_optimizer("adamw", lrr=1.0)
    with pytest.raises(ValueError, match="did you mean 'embeddings'"):
        fhf.trainer_optimizer("adamw", groups={"embedding": {}})


def test_importing_the_package_leaves_transformers_trainer_alone():
    """And names registered before it is imported are known after."""
    code = """
import sys, frankenstein_hf
assert not {"transformers.trainer", "transformers.training_args"} & set(sys.modules)
assert not any(name.startswith("frankenstein_hf.optim.adam") for name in sys.modules)
from transformers import TrainingArguments
assert TrainingArguments("unused", optim="frankenstein_lion").optim.value == "frankenstein_lion"
from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
assert "frankenstein_lion" in _OPTIMIZER_HANDLERS
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
