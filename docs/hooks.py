"""What MkDocs calls: no pages while a public name is undocumented."""

import inspect
import pathlib
import re

from mkdocs.exceptions import PluginError

import keras_meshdist as kmd

# What users call of a module that has more for the rest of the package.
_PUBLIC_OF = {"keras_hooks": ["install", "installed", "remove"]}


def on_pre_build(config):
    """Raises unless the API page has all public names, with docstrings."""
    page = pathlib.Path(config["docs_dir"], "api.md").read_text()
    documented = set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))
    public = dict(_public())
    missing = sorted(set(public) - documented)
    if missing:
        raise PluginError(f"docs/api.md must have all names: {missing}")
    bare = [name for name, found in public.items() if not inspect.getdoc(found)]
    if bare:
        raise PluginError(f"Public names must have docstrings: {bare}")


def _public():
    for name in kmd.__all__:
        found = getattr(kmd, name)
        if not inspect.ismodule(found):
            yield f"keras_meshdist.{name}", found
            continue
        for inner in _PUBLIC_OF.get(name) or found.__all__:
            yield f"keras_meshdist.{name}.{inner}", getattr(found, inner)
