"""Small things to optimize, and the loops the tests of optimizers share."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import frankenstein_hf as fhf
from frankenstein_hf.optim.spec import COMMON_PARAMS, OPTIMIZERS, load

NAMES = OPTIMIZERS.names()
WITH_GRADIENT = [spec.name for spec in OPTIMIZERS if spec.gradient]
PATTERN = ["mamba", "swa"]
VOCAB = 32


def language_model(seed: int = 0, **changes: Any) -> Any:
    """A tied hybrid of two layers."""
    torch.manual_seed(seed)
    values: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        num_hidden_layers=len(PATTERN),
        layer_pattern=PATTERN,
        mixer_params={"swa": {"window_size": 8}},
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    return fhf.FrankensteinForCausalLM(fhf.FrankensteinConfig(**values | changes))


def batches(number: int, seed: int = 1, rows: int = 4, length: int = 12) -> list[torch.Tensor]:
    """Token ids [rows, length] in which each token mostly decides the next."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(number):
        x = torch.randint(1, VOCAB, (rows, length), generator=generator)
        for t in range(1, length):
            follow = torch.rand(rows, generator=generator) < 0.9
            x[:, t] = torch.where(follow, (x[:, t - 1] * 5 + 3) % VOCAB, x[:, t])
        result.append(x)
    return result


def small(name: str) -> dict[str, Any]:
    """Hyperparameters at which every branch is reached within a few steps."""
    return dict(OPTIMIZERS.get(name).small_params)


def optimizer_of(name: str, params: Sequence[Any] | nn.Module, **values: Any) -> Any:
    """An optimizer of a model, or of groups of tensors (whose kind follows from their number of axes)."""
    if isinstance(params, nn.Module):
        return fhf.create_optimizer(params, name, **small(name) | values)
    spec = OPTIMIZERS.get(name)
    groups: list[dict[str, Any]] = []
    for group in params:
        group = group if isinstance(group, dict) else {"params": [group]}
        for kind in ("matrix", "vector"):
            chosen = [p for p in group["params"] if (p.dim() >= 2) == (kind == "matrix")]
            if chosen or not (group["params"] or groups):
                extra = {"kind": kind, "layout": "stack"} if spec.by_kind or spec.fallback else {}
                extra |= {"method": "adamw"} if kind in spec.fallback else {}
                groups.append({**group, "params": chosen, **extra})
    return load(spec.implementation)(groups, **small(name) | values)


def step(name: str, optimizer: Any, loss_function: Callable[[], torch.Tensor]) -> float:
    """One update, with a closure where the method needs one."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_function()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    if hasattr(optimizer, "train"):
        optimizer.train()
    if OPTIMIZERS.get(name).closure:
        return float(optimizer.step(closure))
    loss = closure()
    optimizer.step()
    return float(loss)


def train(name: str, model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    """One step a batch; the losses."""
    return [step(name, optimizer, lambda x=x: model(x, labels=x).loss) for x in data]


def saved(optimizer: Any) -> dict[str, Any]:
    """The state dict after a round trip through a file, read without trust."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_equal_states(actual: Any, expected: Any) -> None:
    """Both state dicts bit for bit."""
    assert type(actual) is type(expected)
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            assert_equal_states(actual[key], expected[key])
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            assert_equal_states(one, other)
    elif isinstance(actual, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    else:
        assert actual == expected


class Rows(torch.utils.data.Dataset):
    """Rows of token ids as a dataset."""

    def __init__(self, rows):
        self.rows = torch.cat(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def trainer(folder: Any, model: Any, optimizer: Any = None, callbacks: Any = None, **changes: Any) -> Any:
    """transformers' Trainer, saving every second of four steps."""
    from transformers import Trainer, TrainingArguments

    values: dict[str, Any] = dict(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
    )
    return Trainer(
        model,
        TrainingArguments(**values | changes),
        train_dataset=Rows(batches(4)),
        optimizer_cls_and_kwargs=optimizer,
        callbacks=callbacks,
    )


NO_MATHEMATICS = {*COMMON_PARAMS, "fused", "foreach"}  # parameters that derivations from papers do not know
SHAPES = ((4, 3), (5,), (3, 2, 6), (1, 7))
TWO_GROUPS = ({"lr": 0.1, "weight_decay": 0.2}, {"lr": 0.03, "weight_decay": 0.0})


def check_parity(
    name: str,
    derive: Callable[..., np.ndarray],
    *,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    groups: Sequence[dict[str, Any]] = TWO_GROUPS,
    steps: int = 10,
    rtol: float = 1e-5,
    **params: Any,
) -> None:
    """Ten steps of the optimizer equal a derivation in numpy, in double precision.

    Args:
        name: The optimizer.
        derive: `(w, gradients, **hyperparameters) -> w` after one step a gradient, written from the paper for a single
            parameter; gets every field of the method's `Params` but `NO_MATHEMATICS`, with the group's own values.
        shapes: Of the parameters in each group.
        groups: Hyperparameters of the groups.
        params: Hyperparameters common to all groups.
    """
    random = np.random.default_rng(0)
    start = [[random.normal(size=shape) for shape in shapes] for _ in groups]
    gradients = [[random.normal(size=(steps, *shape)) for shape in shapes] for _ in groups]
    tensors = [[nn.Parameter(torch.from_numpy(w.copy())) for w in group] for group in start]
    optimizer = optimizer_of(name, [{"params": ps, **own} for ps, own in zip(tensors, groups)], **params)
    for t in range(steps):
        for group, gs in zip(tensors, gradients):
            for p, g in zip(group, gs):
                p.grad = torch.from_numpy(g[t].copy())
        optimizer.step()
        for group, gs in zip(tensors, gradients):
            for p, g in zip(group, gs):
                assert p.grad is not None and np.array_equal(p.grad.numpy(), g[t]), "a gradient was written to"
    settings = OPTIMIZERS.get(name).params(**small(name) | params).as_dict()
    settings = {key: value for key, value in settings.items() if key not in NO_MATHEMATICS}
    for own, ws, gs, ps in zip(groups, start, gradients, tensors):
        for w, g, p in zip(ws, gs, ps):
            expected = derive(w.copy(), list(g), **settings | own)
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=rtol, atol=1e-9, err_msg=f"{w.shape} {own}")


def parity_of(*names: str) -> Callable[[Any], Any]:
    """Marks a test that derives the steps of these optimizers from the paper without `check_parity`."""
    assert set(names) <= set(NAMES)
    return lambda test: test
