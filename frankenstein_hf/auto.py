"""Registration with transformers and PEFT; runs on import of the package.

Everything waits until the module that it is registered with is imported: the configuration for `AutoConfig`, model
classes for the Auto classes and `pipeline()`, attention implementations, optimizers, the targets of adapters. So the
package itself costs nothing to import, and a command can answer without torch.
"""

import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from .after_import import after_import

# Modules that may be what imports the Auto classes, and that our model classes have to wait for in turn.
WAITED_FOR = (
    "transformers.modeling_layers",
    f"{__package__}.modeling.modeling_frankenstein",
    f"{__package__}.modeling.modeling_frankenstein_heads",
)


def register() -> None:
    """Make transformers and PEFT know the family; safe to repeat."""
    after_import("transformers.models.auto.configuration_auto", register_config)
    for name in WAITED_FOR:
        after_import(name, lambda module: None)  # so that its end can be waited for
    after_import("transformers.models.auto.modeling_auto", _register_models_when_possible)
    after_import(f"{__package__}.modeling.hub_bundle", _install_toolkit)
    after_import("transformers.modeling_utils", _register_attention)
    after_import("transformers.training_args", _connect_optimizers)
    after_import("transformers.trainer", _keep_cards)
    after_import("transformers.cli.serving.model_manager", _let_serve)
    after_import("peft", _connect_peft)


def register_config(configuration_auto: ModuleType) -> None:
    """Make `AutoConfig` know the family."""
    from .configuration.configuration_frankenstein import FrankensteinConfig

    configuration_auto.AutoConfig.register(FrankensteinConfig.model_type, FrankensteinConfig, exist_ok=True)


def head_class(reference: str) -> type:
    """The installed class behind an entry of `HEADS`, "module.Class"."""
    module, _, name = reference.partition(".")
    return getattr(import_module(f".modeling.{module}", __package__), name)


def _register_models_when_possible(modeling_auto: ModuleType, ended: tuple[str, ...] = ()) -> None:
    """Register when none of `WAITED_FOR` is being imported; `ended` are those that have just run."""
    for name in WAITED_FOR:
        initializing = getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False)
        if initializing and name not in ended:
            after_import(name, partial(_register_later, modeling_auto, (*ended, name)))
            return
    register_models(modeling_auto)


def _register_later(modeling_auto: ModuleType, ended: tuple[str, ...], module: ModuleType) -> None:
    _register_models_when_possible(modeling_auto, ended)


def register_models(modeling_auto: ModuleType) -> None:
    """Make `AutoModelFor….from_pretrained` and `pipeline()` know our classes."""
    from .configuration.configuration_frankenstein import FrankensteinConfig
    from .modeling.hub_bundle import HEADS

    for auto_name, reference in HEADS.items():
        auto_class = getattr(modeling_auto, auto_name)
        model_class = head_class(reference)
        auto_class.register(FrankensteinConfig, model_class, exist_ok=True)
        # the MODEL_FOR_…_MAPPING_NAMES, which pipelines consult
        auto_class._model_mapping._model_mapping[FrankensteinConfig.model_type] = model_class.__name__


def _install_toolkit(hub_bundle: ModuleType) -> None:
    def sources(*args: Any) -> Any:
        return import_module(".hub.bundle", __package__).bundle_sources(*args)

    def render(*args: Any) -> None:
        import_module(".hub.cards", __package__).render(*args)

    hub_bundle.install_toolkit(sources, render)  # imported when a model is saved


def _register_attention(modeling_utils: ModuleType) -> None:
    import_module(".attention_interface", __package__)  # registers them at its end, also if it is being imported now


def _connect_optimizers(training_args: ModuleType) -> None:
    from .optim.trainer import register_with_trainer

    register_with_trainer()


def _keep_cards(trainer: ModuleType) -> None:
    from .hub.trainer import keep_our_cards

    keep_our_cards(trainer)


def _let_serve(model_manager: ModuleType) -> None:
    """`transformers serve` looks a model's class up by its name among those of transformers."""
    import transformers

    from .modeling.hub_bundle import HEADS

    for reference in HEADS.values():
        model_class = head_class(reference)
        if not hasattr(transformers, model_class.__name__):
            setattr(transformers, model_class.__name__, model_class)


def _connect_peft(peft: ModuleType) -> None:
    from .adapters import connect_peft

    connect_peft()
