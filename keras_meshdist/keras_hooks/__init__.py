"""Every touch on a private part of Keras, each a small function.

A hook does nothing but call Keras unless the current distribution is one of
ours. All hooks are checked before the first is installed: on a Keras that
doesn't fit, importing this package raises, and nothing is patched.
"""

import functools
import inspect

import jax
import keras
from packaging.version import Version

OLDEST_KERAS = Version("3.7.0")
OLDEST_JAX = Version("0.4.38")

# Before anything of Keras' JAX backend is imported, which fails elsewhere with
# errors that name no remedy.
if keras.backend.backend() != "jax":
    raise ImportError(
        "keras_meshdist needs the JAX backend of Keras. Received: backend "
        f"{keras.backend.backend()!r}. Set the environment variable "
        "KERAS_BACKEND=jax before Keras is imported."
    )
if Version(keras.__version__) < OLDEST_KERAS or (
    Version(jax.__version__) < OLDEST_JAX
):
    raise ImportError(
        f"keras_meshdist needs Keras {OLDEST_KERAS} or newer and JAX "
        f"{OLDEST_JAX} or newer. Received: Keras {keras.__version__}, JAX "
        f"{jax.__version__}. Run: pip install -U keras jax."
    )

from keras_meshdist.keras_hooks import lowering  # noqa: E402
from keras_meshdist.keras_hooks.access import (  # noqa: E402
    agree_on_seed,
    current_iterator,
    end_epoch,
    forget_functions,
    input_structure,
    is_fitting,
    is_remote_path,
    layers_of,
    num_processes,
    random_seed,
    set_initial_epoch,
    untouched_names,
    without_first_steps,
)
from keras_meshdist.keras_hooks.base import (  # noqa: E402
    HookedDistribution,
    constructed,
)
from keras_meshdist.keras_hooks.names import (  # noqa: E402
    naming_outputs,
    output_of,
)
from keras_meshdist.keras_hooks.table import HOOKS, of_hub  # noqa: E402
from keras_meshdist.keras_hooks.tensors import without_values  # noqa: E402
from keras_meshdist.keras_hooks.training import making_adapter  # noqa: E402
from keras_meshdist.keras_hooks.values import (  # noqa: E402
    draw_seed,
    forget_layout,
    forget_value,
    has_value,
    is_symbolic,
    layout_given,
    seed_dtype,
    set_no_value,
    set_value,
)
from keras_meshdist.keras_hooks.variables import is_scattered  # noqa: E402

__all__ = [
    "HookedDistribution",
    "agree_on_seed",
    "constructed",
    "current_iterator",
    "draw_seed",
    "end_epoch",
    "forget_functions",
    "forget_layout",
    "forget_value",
    "has_value",
    "input_structure",
    "install",
    "install_for_hub",
    "installed",
    "is_fitting",
    "is_remote_path",
    "is_scattered",
    "is_symbolic",
    "layers_of",
    "layout_given",
    "making_adapter",
    "misfits",
    "naming_outputs",
    "num_processes",
    "output_of",
    "random_seed",
    "remove",
    "seed_dtype",
    "set_initial_epoch",
    "set_no_value",
    "set_value",
    "untouched_names",
    "without_first_steps",
    "without_values",
]

# How to take away what is installed, by its dotted path.
_undo = {}
# Before JAX 0.5 random numbers depend on how an array is split, unless this
# is set; from 0.5 on it is JAX's default.
_THREEFRY = "jax_threefry_partitionable"


def install():
    """Installs all hooks, or none; importing the package calls it.

    Raises:
        ImportError: if a part of Keras that a hook replaces has changed.
    """
    if _undo:
        return
    _check(HOOKS)
    primitives = lowering.primitives()
    _replace(HOOKS)
    install_for_hub()
    for name, primitive in primitives.items():
        _undo[f"jax._src.lax.slicing.{name}_p"] = functools.partial(
            lowering.unhook, primitive, lowering.hook(primitive)
        )
    _undo["jax._src.lax.fft.fft_p"] = lowering.hook_fourier_transform()
    if Version(jax.__version__) < Version("0.6.2"):
        _undo["jax._src.lax.lax.concatenate_p"] = lowering.hook_concatenation()
    if Version(jax.__version__) < Version("0.5"):
        before = getattr(jax.config, _THREEFRY)
        _undo[_THREEFRY] = functools.partial(
            jax.config.update, _THREEFRY, before
        )
        jax.config.update(_THREEFRY, True)


def misfits(hooks=HOOKS):
    """Returns a sentence for each hook that doesn't fit this Keras."""
    changed = []
    for place, name, _, parameters in hooks:
        found = getattr(place, name, None)
        signature = tuple(inspect.signature(found).parameters) if found else ()
        if signature[: len(parameters)] != parameters:
            changed.append(
                f"`{_path(place, name)}` should take {parameters}. Received: "
                f"{signature or 'no such function'}"
            )
    return changed


def install_for_hub():
    """Installs the hooks on KerasHub, once it has been imported."""
    hooks = of_hub() if _undo else ()
    if hooks and _path(*hooks[0][:2]) not in _undo:
        _check(hooks)
        _replace(hooks)


def _check(hooks):
    changed = misfits(hooks)
    if changed:
        raise ImportError(
            f"This version of keras_meshdist doesn't fit Keras "
            f"{keras.__version__}: {'; '.join(changed)}. Nothing was changed. "
            "Install an older Keras or a newer keras_meshdist."
        )


def _replace(hooks):
    for place, name, wrapper, _ in hooks:
        original = getattr(place, name)
        _undo[_path(place, name)] = functools.partial(
            setattr, place, name, original
        )
        setattr(place, name, wrapper(original))


def remove():
    """Puts everything back as Keras and JAX had it."""
    while _undo:
        _, undo = _undo.popitem()
        undo()


def installed():
    """Returns the list of what is replaced at the moment, as dotted paths."""
    return sorted(_undo)


def _path(place, name):
    module = getattr(place, "__module__", None)
    owner = f"{module}.{place.__name__}" if module else place.__name__
    return f"{owner}.{name}"
