"""Plugins: installed packages that add mixers, optimizers and other parts, and register them when they are asked to.

A package has entry points in the group `frankenstein_hf.plugins`; each is a function that is called once. A recipe
names the *package*, never a module: what a data file says is not imported unless it was installed as a plugin.
"""

from collections.abc import Iterable
from importlib import metadata

from ..training.failures import BadInput

GROUP = "frankenstein_hf.plugins"
_loaded: set[str] = set()


def installed() -> dict[str, metadata.EntryPoint]:
    """The plugins there are, by name; nothing is imported."""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def load_plugins(requirements: Iterable[str]) -> None:
    """Have the plugins of these packages register their parts, each once.

    Args:
        requirements: Names of packages with or without versions, such as "my_mixers>=0.2".

    Raises:
        BadInput: It is no requirement, the package is not installed, is another version, has no plugin, or its plugin
            fails.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    for text in requirements:
        try:
            asked = Requirement(text)
        except InvalidRequirement:
            raise BadInput(f"plugins: {text!a} is no requirement, such as 'my_mixers>=0.2'.") from None
        if asked.url or asked.marker or asked.extras:
            raise BadInput(f"plugins: {text!a} may have a name and versions only, such as 'my_mixers>=0.2'.")
        try:
            package = metadata.distribution(asked.name)
        except metadata.PackageNotFoundError:
            raise BadInput(f"plugins: {asked.name} is not installed: pip install {str(asked)!r}.") from None
        if not asked.specifier.contains(package.version, prereleases=True):
            raise BadInput(f"plugins: {asked.name} is {package.version} here, and {asked.specifier} is asked for.")
        points = [point for point in package.entry_points if point.group == GROUP]
        if not points:
            raise BadInput(f"plugins: {asked.name} has no plugin for frankenstein_hf (entry points in {GROUP!r}).")
        for point in points:
            if f"{asked.name}:{point.name}" not in _loaded:
                try:
                    point.load()()
                except Exception as error:  # whatever the code of others does
                    raise BadInput(f"plugins: {asked.name} cannot be used: {type(error).__name__}: {error}") from error
                _loaded.add(f"{asked.name}:{point.name}")
