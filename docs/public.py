"""What users are meant to call, for the pages and for the tests."""

import inspect

import keras_meshdist as kmd

# What users call of a module that has more for the rest of the package.
_PUBLIC_OF = {"keras_hooks": ["install", "installed", "remove"]}


def public_objects():
    """Yields dotted name and object of all that users are meant to call."""
    for name in kmd.__all__:
        found = getattr(kmd, name)
        if not inspect.ismodule(found):
            yield f"keras_meshdist.{name}", found
            continue
        for inner in _PUBLIC_OF.get(name) or found.__all__:
            yield f"keras_meshdist.{name}.{inner}", getattr(found, inner)
