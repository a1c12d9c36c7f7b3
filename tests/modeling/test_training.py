"""The stock `Trainer` as people use it: half precision, accumulation for every head, interruption in mid-epoch."""

import pytest
import torch
from datasets import Dataset
from transformers import DynamicCache, Trainer, TrainerCallback, TrainingArguments

from frankenstein_hf.configuration.registries import MIXERS
from frankenstein_hf.data import CausalLMCollator, MaskedLMCollator, MaskRateSchedule, pack, train_tokenizer
from frankenstein_hf.modeling.hub_bundle import HEADS

from ..heads import head_batch, head_model
from ..tiny import ALL_MIXERS, CAUSAL, assert_near, tiny_model, tokens

PATTERN = ["gated_deltanet", "swa", "standard"]


class Examples(torch.utils.data.Dataset):
    """The rows of a batch, one example each."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {key: value[i] for key, value in self.batch.items()}


def trainer(model, rows, path, data_collator=None, callbacks=None, **arguments) -> Trainer:
    values = dict(
        output_dir=str(path), per_device_train_batch_size=2, max_steps=2, report_to=[], disable_tqdm=True,
        save_strategy="no", learning_rate=1e-2, use_cpu=True, logging_steps=1,
    )  # fmt: skip
    arguments = TrainingArguments(**values | arguments)
    return Trainer(model, arguments, data_collator, train_dataset=rows, callbacks=callbacks)


# ---------------------------------------------------------------------- half precision


@pytest.mark.parametrize("name", ALL_MIXERS)
def test_bf16_training_stays_close_to_fp32(name, tmp_path):
    x = tokens(4, 40)
    batch, losses = {"input_ids": x, "labels": x}, []
    for bf16 in (False, True):
        model = tiny_model(name, MIXERS.get(name).causal, initializer_range=0.1).train()
        run = trainer(model, Examples(batch), tmp_path, bf16=bf16, learning_rate=1e-3)
        run.train()
        losses.append(torch.tensor([entry["loss"] for entry in run.state.log_history if "loss" in entry]))
        assert all(p.dtype == torch.float32 and p.isfinite().all() for p in model.parameters())
    assert len(losses[0]) == 2
    assert_near(losses[1], losses[0], rtol=2e-2, atol=0)


ACTIVATIONS = (
    "tail",
    "key",
    "value",
    "sink_key",
    "sink_value",
)  # convolution tails and rings: projections as they came


@pytest.mark.parametrize("name", sorted(name for name in CAUSAL if "state" in MIXERS.get(name).cache))
def test_states_and_decays_are_not_downcast_under_autocast(name):
    model = tiny_model(name)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens(2, 9), cache=cache)
        model(tokens(2, 1), cache=cache)
    layer = cache.layers[0]
    states = {key: x.dtype for key, x in layer.states.items() if key not in ACTIVATIONS and x.is_floating_point()}
    assert states and set(states.values()) == {torch.float32}, states
    decays = {key: x.dtype for key, x in layer._history[-1].inputs.items() if key.startswith(("log_", "step", "beta"))}
    assert set(decays.values()) <= {torch.float32}, decays


# ---------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("auto_name", [name for name in HEADS if name != "AutoModel"])
def test_accumulated_gradients_equal_those_of_the_large_batch(auto_name, tmp_path):
    """Micro-batches with unequal numbers of labels: a mean of means would differ."""
    batch = head_batch(auto_name, 8, 12)
    gradients = []
    for size, steps in ((8, 1), (2, 4)):
        model = head_model(auto_name, PATTERN)
        run = trainer(
            model,
            Examples(batch),
            tmp_path,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=1,
            optim="sgd",
            max_grad_norm=0.0,
            learning_rate=1.0,
        )
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        run.train()
        gradients.append({key: before[key] - p.detach() for key, p in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0, key
        assert_near(gradients[1][key], gradient, rtol=1e-4, atol=2e-6)


# ---------------------------------------------------------------------- interruption


class StopAfter(TrainerCallback):
    """Ends a run after so many steps, as a lost connection would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = state.global_step >= self.step


TEXTS = [f"Number {i}: {'the lazy dog, ' * (i % 4)}{i * 7919 % 1000} times." for i in range(10)]


@pytest.mark.parametrize("kind", ["padded", "packed", "masked"])
def test_training_interrupted_in_mid_epoch_resumes_bit_for_bit(kind, tmp_path):
    """Shuffled rows, masks on a schedule, an optimizer with state; stopped inside the second of three epochs."""
    tokenizer = train_tokenizer(TEXTS, 300, "mlm" if kind == "masked" else "clm")
    rows = pack(Dataset.from_dict({"text": TEXTS}), tokenizer, 12, "documents" if kind == "packed" else "none")
    folders = {"whole": tmp_path / "whole", "stopped": tmp_path / "half", "resumed": tmp_path / "half"}
    trained = {}
    for name, folder in folders.items():
        size = dict(vocab_size=len(tokenizer), initializer_range=0.1)
        model = tiny_model(PATTERN, kind != "masked", seed=9 if name == "resumed" else 0, **size).train()
        callbacks = [StopAfter(8)] if name == "stopped" else []
        collator = CausalLMCollator(tokenizer)
        if kind == "masked":
            collator = MaskedLMCollator(tokenizer, MaskRateSchedule(0.6, 0.1))
            callbacks.append(collator.callback())
        run = trainer(model, rows, folder, data_collator=collator, callbacks=callbacks, max_steps=12,
                      optim="adamw_torch", save_strategy="steps", save_steps=8)  # fmt: skip
        run.train(resume_from_checkpoint=str(folder / "checkpoint-8") if name == "resumed" else None)
        trained[name] = run
    assert trained["stopped"].state.global_step == 8 and 8 % (len(rows) / 2) != 0
    whole, resumed = trained["whole"], trained["resumed"]
    assert whole.state.global_step == resumed.state.global_step == 12
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), resumed.model.parameters()))
    states = [run.optimizer.state_dict()["state"] for run in (whole, resumed)]
    assert states[0].keys() == states[1].keys() and len(states[0]) > 10
    for i, state in states[0].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][i][key])), (i, key)
