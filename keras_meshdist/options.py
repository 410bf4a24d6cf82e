"""What the commands take as text."""

import importlib


def parse_axes(text: str) -> dict[str, int]:
    """Returns the axes of a mesh.

    ```python
    parse_axes("model=4,batch=2")  # {"model": 4, "batch": 2}
    ```

    Args:
        text: string, axes with their sizes in the order of the mesh.

    Returns:
        A dictionary from axis name to size.

    Raises:
        ValueError: If it is something else, or an axis stands there twice.
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        axes = {name.strip(): int(size) for name, size in pairs}
    except ValueError:
        axes = {}
    if not axes or len(axes) != len(pairs):
        raise ValueError(
            "`--mesh` takes axes with their sizes, each once. Received: "
            f"{text!r}. Valid: model=4,batch=2."
        )
    return axes


def named_function(text: str):
    """Returns a function by the name of its module and its own.

    Args:
        text: string, for instance `"my_module:build_model"`.

    Returns:
        The function.

    Raises:
        ValueError: If there is none.
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            "A function is named by its module and its name. Received: "
            f"{text!r} ({error}). Valid: my_module:build_model."
        ) from None
    if not callable(found):
        raise ValueError(
            "A function is named by its module and its name. Received: "
            f"{text!r}, which is {type(found).__name__}."
        )
    return found
