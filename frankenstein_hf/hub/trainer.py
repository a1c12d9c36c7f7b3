"""Keeping code and card when transformers' `Trainer` writes to the Hub.

`Trainer.create_model_card` writes its own card after the model was saved and offers models no way to take part (it
calls `create_or_update_model_card` only where the card before was PEFT's). Pushes during training copy the weights and
the configuration from a checkpoint, but not the code beside them. So two methods of `Trainer` are wrapped. Importing
the module of `Trainer` takes seconds that most programs need not spend; the wrapping waits until somebody else does.
"""

import functools
import inspect
import shutil
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..modeling.hub_bundle import bundle_files, read_card, refuse_foreign
from .cards import is_generated, parse_card, render
from .foreign import markdown

logger = logging.get_logger(__name__)


def keep_our_cards(trainer_module: Any) -> None:
    """Wrap `Trainer` so that the models of this package keep their card and code; other models see no difference."""
    trainer_class = trainer_module.Trainer
    if hasattr(trainer_class.create_model_card, "__wrapped__"):
        return
    create, push = trainer_class.create_model_card, trainer_class._push_from_checkpoint
    signature = inspect.signature(create)

    @functools.wraps(create)
    def create_model_card(self: Any, *args: Any, **kwargs: Any) -> None:
        before = read_card(self.args.output_dir)
        if _ours(self) is not None and not is_generated(parse_card(before or "")):
            logger.warning("README.md in %s was written by hand and stays as it is.", self.args.output_dir)
            return
        if _ours(self) is not None:
            given = signature.bind(self, *args, **kwargs)
            given.arguments["model_name"] = given.arguments.get("model_name") or Path(self.args.output_dir).name
            for name in ("model_name", "dataset"):  # Trainer puts them into its text as they are
                if value := given.arguments.get(name):
                    safe = [str(markdown(part)) for part in ([value] if isinstance(value, str) else value)]
                    given.arguments[name] = safe[0] if isinstance(value, str) else safe
            args, kwargs = given.args[1:], given.kwargs
        create(self, *args, **kwargs)
        _refresh(self, before)

    @functools.wraps(push)
    def push_from_checkpoint(self: Any, checkpoint_folder: str) -> None:
        if _ours(self) is not None and self.is_world_process_zero():
            names = bundle_files(checkpoint_folder)
            refuse_foreign(self.args.output_dir, names)
            for name in (*names, "config.json"):
                shutil.copyfile(Path(checkpoint_folder) / name, Path(self.args.output_dir) / name)
        _refresh(self, None)
        push(self, checkpoint_folder)

    trainer_class.create_model_card, trainer_class._push_from_checkpoint = create_model_card, push_from_checkpoint


def _ours(trainer: Any) -> Any:
    """The trainer's model if it is of this package (or of a bundle of it), else None; PEFT's wrappers are not."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    is_ours = isinstance(model, PreTrainedModel) and hasattr(model, "create_or_update_model_card")
    return model if is_ours else None


def _refresh(trainer: Any, before: str | None) -> None:
    model = _ours(trainer)
    if model is not None and trainer.is_world_process_zero():
        render(model, trainer.args.output_dir, getattr(trainer, "hub_model_id", None), before)
