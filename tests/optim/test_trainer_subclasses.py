"""Trainers that train more than their model, search hyperparameters, or travel between processes."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import frankenstein_hf as fhf
from frankenstein_hf.after_import import after_import
from frankenstein_hf.optim.spec import OPTIMIZERS

from .toy import NAMES, Rows, batches, language_model, small, trainer

sentence_transformers = pytest.importorskip("sentence_transformers")

ARGS = dict(
    per_device_train_batch_size=2,
    max_steps=2,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    save_strategy="no",
    lr_scheduler_type="constant",
    dataloader_pin_memory=False,
)


class Embedder(nn.Module):
    """A body that sentence-transformers can call: features of made-up texts."""

    def __init__(self):
        super().__init__()
        self.table, self.dense = nn.Embedding(9, 6), nn.Linear(6, 6)

    def tokenize(self, texts, **_):
        return {"input_ids": torch.tensor([[len(text) % 9, 1] for text in texts])}

    preprocess = tokenize

    def get_sentence_embedding_dimension(self):
        return 6

    get_embedding_dimension = get_sentence_embedding_dimension

    def forward(self, features, **_):
        features["sentence_embedding"] = self.dense(self.table(features["input_ids"]).mean(1))
        return features

    def save(self, *args, **kwargs):
        pass


def sentence_trainer(folder, name, through, **changes):
    """sentence-transformers' own trainer with a loss that has a classifier of its own."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import SoftmaxLoss

    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Embedder()], device="cpu")
    loss = SoftmaxLoss(model, sentence_embedding_dimension=6, num_labels=3)
    rows = Dataset.from_dict({"a": ["x", "yy", "zzz", "y"], "b": ["x", "y", "zz", "zzz"], "label": [0, 1, 2, 1]})
    values = ARGS | changes
    spec = OPTIMIZERS.get(name)
    kwargs = {"callbacks": fhf.trainer_callbacks(name)}
    if through == "optim":
        values |= {"optim": f"frankenstein_{name}", "learning_rate": spec.params().lr}
    else:
        kwargs["optimizer_cls_and_kwargs"] = fhf.trainer_optimizer(name, **small(name))
    run = SentenceTransformerTrainer(
        model, Arguments(str(folder), **values), train_dataset=rows, loss=loss, **kwargs
    )  # fmt: skip
    return run, loss


def names_of(optimizer):
    return {name: group for group in optimizer.param_groups for name in group["param_names"]}


# methods that ask the model for losses or curvature themselves call it as transformers do
MOVED = [spec.name for spec in OPTIMIZERS if spec.needs == "nothing" and not spec.stabilizers]


@pytest.mark.parametrize("through", ["optim", "trainer_optimizer"])
@pytest.mark.parametrize("name", MOVED)
def test_sentence_transformers_trainer_trains_the_weights_of_the_loss(name, through, tmp_path):
    run, loss = sentence_trainer(tmp_path, name, through)
    optimizer = run.create_optimizer()
    owned = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in loss.parameters())
    groups = names_of(optimizer)
    assert groups["classifier.weight"]["role"] == "embeddings" and groups["model.0.dense.weight"]["role"] == "other"
    if name == "muon":
        assert groups["classifier.weight"]["method"] == "adamw" and "method" not in groups["model.0.dense.weight"]


@pytest.mark.parametrize("through", ["optim", "trainer_optimizer"])
def test_sentence_transformers_trainer_runs(through, tmp_path):
    run, loss = sentence_trainer(tmp_path, "muon", through)
    before = [p.detach().clone() for p in loss.parameters()]
    run.train()
    assert all(not torch.equal(p, q) for p, q in zip(before, loss.parameters()))


@pytest.mark.parametrize("through", ["optim", "trainer_optimizer"])
def test_learning_rates_by_pattern_are_honoured(through, tmp_path):
    run, _ = sentence_trainer(tmp_path, "muon", through, learning_rate_mapping={"classifier": 0.5, "table": 0.25})
    groups = names_of(run.create_optimizer())
    assert groups["classifier.weight"]["lr"] == groups["classifier.bias"]["lr"] == 0.5
    assert groups["model.0.table.weight"]["lr"] == 0.25 and groups["model.0.dense.weight"]["lr"] == 0.02


# ---------------------------------------------------------------------- other subclasses


class WithExtra(Trainer):
    """Multiplies the loss by a weight of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = nn.ModuleDict({"scale": nn.Linear(1, 1)})

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = model(**inputs).loss
        return loss + self.extra["scale"](loss.detach().view(1, 1)).square().sum()


class AddsLater(WithExtra):
    def create_optimizer(self, model=None):
        optimizer = super().create_optimizer(model)
        optimizer.add_param_group({"params": self.extra.parameters(), "kind": "vector", "method": "adamw"})
        return optimizer


def subclass_trainer(cls, folder, name="muon"):
    return cls(
        language_model(),
        TrainingArguments(str(folder), **ARGS),
        train_dataset=Rows(batches(1)),
        optimizer_cls_and_kwargs=fhf.trainer_optimizer(name),
    )


def test_parameters_beside_the_model_are_trained_or_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"extra.scale.weight, extra.scale.bias: .*add_param_group"):
        subclass_trainer(WithExtra, tmp_path).train()
    run = subclass_trainer(AddsLater, tmp_path)
    before = run.extra["scale"].weight.detach().clone()
    run.train()
    assert not torch.equal(run.extra["scale"].weight, before)
    frozen = subclass_trainer(WithExtra, tmp_path)
    frozen.extra.requires_grad_(False)
    frozen.train()


def test_parameters_of_no_known_module_are_refused():
    factory, kwargs = fhf.trainer_optimizer("muon")
    with pytest.raises(ValueError, match="1 of those that the Trainer hands over"):
        factory()(nn.Linear(2, 2), optimizer_dict=[{"params": [nn.Parameter(torch.ones(2))]}], **kwargs)


# ---------------------------------------------------------------------- hyperparameter search


@pytest.mark.parametrize("how", ["trainer_optimizer", "optim"])
def test_a_searched_rate_is_the_optimizers(how, tmp_path):
    extra = {"optim": "frankenstein_adamw"} if how == "optim" else {}
    values = [{"learning_rate": 0.5, "adam_beta1": 0.3}, {"learning_rate": 0.25, "weight_decay": 0.125}]
    run = trainer(tmp_path, language_model(), None if extra else fhf.trainer_optimizer("adamw"), **extra)
    run.hp_search_backend, found = "optuna", []
    for value in values:
        run._trial = SimpleNamespace(params=value)  # what `hyperparameter_search` does in every trial
        for key, number in value.items():
            setattr(run.args, key, number)
        run.optimizer = None
        found.append({group["role"]: group for group in run.create_optimizer().param_groups}["other"])
    assert [group["lr"] for group in found] == [0.5, 0.25]
    assert found[0]["betas"] == (0.3, 0.999) and found[1]["weight_decay"] == 0.125
    if how == "trainer_optimizer":
        for key, name in (("adam_beta2", "sgd"), ("optim", "adamw")):
            run.optimizer_cls_and_kwargs, run.optimizer = fhf.trainer_optimizer(name), None
            run._trial = SimpleNamespace(params={key: 1})
            with pytest.raises(ValueError, match=f"search over {key} has no effect"):
                run.create_optimizer()


# ---------------------------------------------------------------------- pickles


def test_pickled_arguments_can_be_read_in_a_process_that_has_imported_nothing(tmp_path):
    args = [TrainingArguments(str(tmp_path), optim=f"frankenstein_{name}") for name in NAMES]
    torch.save(args, tmp_path / "training_args.bin")
    (tmp_path / "args.pickle").write_bytes(pickle.dumps(args))
    code = f"""
import pickle, torch
first = torch.load(r"{tmp_path}/training_args.bin", weights_only=False)
for args in (first, pickle.load(open(r"{tmp_path}/args.pickle", "rb"))):
    print(*(one.optim.value for one in args))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert [line.split() for line in run.stdout.splitlines()] == [[f"frankenstein_{name}" for name in NAMES]] * 2


def test_several_functions_may_wait_for_one_import(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    called = []
    first, second = (lambda module: called.append(1)), (lambda module: called.append(2))
    for function in (first, second, first):
        after_import("waited_for", function)
    import waited_for

    assert waited_for.x == 1 and called == [1, 2]
