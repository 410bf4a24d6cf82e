"""What MkDocs calls: no pages while a public name is undocumented."""

import inspect
import pathlib
import re

import public
from mkdocs.exceptions import PluginError


def on_pre_build(config):
    """Raises unless the API page has all public names, with docstrings."""
    page = pathlib.Path(config["docs_dir"], "api.md").read_text()
    documented = set(re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE))
    objects = dict(public.public_objects())
    missing = sorted(set(objects) - documented)
    if missing:
        raise PluginError(f"docs/api.md must have all names: {missing}")
    bare = [name for name, x in objects.items() if not inspect.getdoc(x)]
    if bare:
        raise PluginError(f"Public names must have docstrings: {bare}")
