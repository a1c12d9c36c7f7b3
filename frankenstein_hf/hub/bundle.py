"""The Python files that travel with a checkpoint: what its configuration reaches of the package, flattened.

The two modules that import by name are replaced by ones with a literal import per component the checkpoint uses; mixers
of one's own come along where they can (`own_mixers`).
"""

from collections.abc import Iterable, Sequence
from importlib import import_module

from ..configuration.component import ComponentSpec, MixerSpec
from ..configuration.discovered import spec_modules
from ..modeling.hub_bundle import HEADS, entry_modules
from ..modeling.implementations import is_third_party
from .flat import PACKAGE, Module, flat_name, flatten, source_path
from .own_mixers import pack_own

DISCOVERED: Module = ("configuration", "discovered")
CLASSES: Module = ("modeling", "discovered")

DISCOVERED_SOURCE = '''"""The specs of the mixers this checkpoint uses."""

from .component import MixerSpec

NAMES = {names}


def mixer_specs() -> list[MixerSpec]:
    """The specs this checkpoint carries."""
{imports}

    every = ({specs},)
    return [spec for specs in every for spec in specs if spec.name in NAMES]
'''

CLASSES_SOURCE = '''"""The code of components, as far as this checkpoint uses it."""


def find_class(place: str) -> type:
    """The class at `place`, "module:Class"."""
{branches}
    raise ValueError(
        f"The code of {{place!r}} is not part of this checkpoint; install frankenstein_hf to build a model with it."
    )


def entries() -> None:
    """Imports what the Auto classes load: transformers copies a checkpoint's code by the imports it sees."""
{entries}
'''


def bundle_sources(components: Sequence[ComponentSpec]) -> dict[str, str]:
    """The bundle of a checkpoint.

    Args:
        components: Specs of what the checkpoint uses.

    Returns:
        Source text by file name, of the modules reachable from the entry files through these components.

    Raises:
        ValueError: A module cannot be flattened, or a mixer from elsewhere cannot travel; the message names the line
            and the remedy.
    """
    own = pack_own(spec for spec in components if is_third_party(spec))
    ours = [spec for spec in components if not is_third_party(spec)]
    generated = {DISCOVERED: _discovered(ours, own.specs), CLASSES: _classes([*ours, *own.specs]), **own.sources}
    made = frozenset(own.sources)
    flat: dict[str, str] = {}
    origins: dict[str, Module] = {}
    pending: list[Module] = [(name.partition("_")[0], name) for name in entry_modules()]
    while pending:
        module = pending.pop()
        name = flat_name(module)
        if origins.setdefault(name, module) != module:
            raise ValueError(
                f"{source_path(module)} and {source_path(origins[name])} would both become {name}.py; rename one."
            )
        if f"{name}.py" not in flat:
            source = generated.get(module) or source_path(module).read_text(encoding="utf-8")
            flat[f"{name}.py"], imported = flatten(source, module, made)
            pending += imported
    return flat


def _discovered(ours: Iterable[ComponentSpec], own: Iterable[MixerSpec]) -> str:
    names = {spec.name for spec in ours if isinstance(spec, MixerSpec)}
    modules = sorted({_spec_module(name) for name in names})
    places = sorted({spec.implementation.partition(":")[0] for spec in own})
    imports = [f"    from .mixers.{module} import SPECS as {_variable(module)}" for module in modules]
    imports += [f"    from ..modeling.{place} import CARRIED as {_variable(place)}" for place in places]
    return DISCOVERED_SOURCE.format(
        names=tuple(sorted(names | {spec.name for spec in own})),
        imports="\n".join(imports),
        specs=", ".join(map(_variable, (*modules, *places))),
    )


def _variable(module: str) -> str:
    return module.replace(".", "_") + "_specs"


def _spec_module(name: str) -> str:
    for module in spec_modules():
        if any(spec.name == name for spec in import_module(f"{PACKAGE}.configuration.mixers.{module}").SPECS):
            return module
    raise ValueError(f"No module in {PACKAGE}/configuration/mixers declares the mixer {name!r}.")


def _classes(components: Iterable[ComponentSpec]) -> str:
    branches = []
    for place in sorted({spec.implementation for spec in components}):
        module, _, name = place.partition(":")
        branches += [
            f'    if place == "{place}":',
            f"        from .{module} import {name}",
            "",
            f"        return {name}",
        ]
    models = [reference.split(".") for reference in HEADS.values()]
    entries = (f"    from .{module} import {name}  # noqa: F401" for module, name in models)
    return CLASSES_SOURCE.format(branches="\n".join(branches), entries="\n".join(entries))
