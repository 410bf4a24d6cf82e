"""What is planned, in a form that another process understands."""

import dataclasses
import json
import pathlib
from typing import Any

from keras_meshdist.options import named_function


@dataclasses.dataclass(frozen=True)
class Named:
    """A function by its module and name."""

    text: str

    def load(self):
        """Imports the function."""
        return named_function(self.text)


@dataclasses.dataclass(frozen=True)
class Pickled:
    """A function of this program, as bytes."""

    data: bytes

    def load(self):
        """Returns the function."""
        import pickle

        return pickle.loads(self.data)


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model of KerasHub by the name of its task and its backbone's config.

    Args:
        name: str, for instance `"Llama3CausalLM"`.
        config: dict, arguments of the backbone.
    """

    name: str
    config: dict[str, Any]

    @classmethod
    def from_file(cls, name, path):
        """Reads the config from a JSON file.

        Raises:
            ValueError: if the file can't be read, or holds no object.
        """
        try:
            config = json.loads(pathlib.Path(path).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                "`--config` takes a JSON file with the arguments of the "
                f"model's backbone. Received: {path!r} ({error})."
            ) from None
        if not isinstance(config, dict):
            raise ValueError(
                "The file of `--config` must hold a JSON object. Received: "
                f"{type(config).__name__} in {path!r}."
            )
        return cls(name, config.get("config", config))

    def load(self):
        """Returns a function that builds the model.

        Raises:
            ValueError: if KerasHub isn't installed or has no such model.
        """
        try:
            import keras_hub
        except ImportError as error:
            raise ValueError(
                "`--hub` needs KerasHub: pip install keras-hub. Received: "
                f"--hub {self.name} ({error})."
            ) from None
        task = getattr(keras_hub.models, self.name, None)
        backbone = getattr(task, "backbone_cls", None)
        if backbone is None:
            import difflib

            near = difflib.get_close_matches(
                self.name, dir(keras_hub.models), 3, 0
            )
            raise ValueError(
                "`--hub` takes the name of a task of KerasHub. Received: "
                f"{self.name!r}. Nearest: {near}."
            )

        def build():
            return task(backbone=backbone(**self.config), preprocessor=None)

        return build


def travelling(function):
    """Returns a function in a form that another process understands.

    Args:
        function: callable, `"module:name"`, or what is in such a form.

    Returns:
        Something with `load()`.

    Raises:
        ValueError: if the function can't be handed to another process.
    """
    if isinstance(function, Named | Pickled | HubModel):
        return function
    if isinstance(function, str):
        return Named(function)
    if not callable(function):
        raise ValueError(
            "A model is planned from a function that builds it. Received: "
            f"{type(function).__name__}. Valid: a function without arguments, "
            "or its name 'my_module:build_model'."
        )
    try:
        import cloudpickle as pickler
    except ImportError:
        import pickle as pickler
    try:
        return Pickled(pickler.dumps(function))
    except Exception as error:
        raise ValueError(
            "The function is called in another process, and must be such that "
            f"it can be handed over. Received: {function!r} ({error}). Put it "
            "into a module, without variables from outside."
        ) from error
