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

from keras.src import backend  # noqa: E402
from keras.src.backend.common.variables import Variable  # noqa: E402
from keras.src.backend.jax import core as jax_core  # noqa: E402
from keras.src.backend.jax import (  # noqa: E402
    distribution_lib as jax_distribution,
)
from keras.src.backend.jax import nn as jax_nn  # noqa: E402
from keras.src.backend.jax import trainer as jax_trainer  # noqa: E402
from keras.src.callbacks.backup_and_restore import (  # noqa: E402
    BackupAndRestore,
)
from keras.src.callbacks.callback_list import CallbackList  # noqa: E402
from keras.src.distribution import distribution_lib  # noqa: E402
from keras.src.legacy.saving import legacy_h5_format  # noqa: E402
from keras.src.optimizers import base_optimizer  # noqa: E402
from keras.src.saving import saving_lib  # noqa: E402
from keras.src.trainers import data_adapters, epoch_iterator  # noqa: E402
from keras.src.utils import file_utils  # noqa: E402

from keras_meshdist.keras_hooks import (  # noqa: E402
    callbacks,
    lowering,
    tensors,
    training,
    variables,
)
from keras_meshdist.keras_hooks.access import (  # noqa: E402
    agree_on_seed,
    current_iterator,
    end_epoch,
    forget_functions,
    forget_layout,
    forget_value,
    input_structure,
    is_fitting,
    is_remote_path,
    layers_of,
    layout_given,
    num_processes,
    random_seed,
    set_initial_epoch,
    set_value,
    untouched_names,
    without_first_steps,
)
from keras_meshdist.keras_hooks.base import HookedDistribution  # noqa: E402
from keras_meshdist.keras_hooks.names import (  # noqa: E402
    naming_outputs,
    output_of,
)
from keras_meshdist.keras_hooks.tensors import without_values  # noqa: E402
from keras_meshdist.keras_hooks.training import making_adapter  # noqa: E402
from keras_meshdist.keras_hooks.variables import is_scattered  # noqa: E402

__all__ = [
    "HookedDistribution",
    "agree_on_seed",
    "current_iterator",
    "end_epoch",
    "forget_functions",
    "forget_layout",
    "forget_value",
    "input_structure",
    "install",
    "installed",
    "is_fitting",
    "is_remote_path",
    "is_scattered",
    "layers_of",
    "layout_given",
    "making_adapter",
    "misfits",
    "naming_outputs",
    "num_processes",
    "output_of",
    "random_seed",
    "remove",
    "set_initial_epoch",
    "set_value",
    "untouched_names",
    "without_first_steps",
    "without_values",
]

# place, name, wrapper, parameters that Keras' own must begin with
_HOOKS = (
    (
        jax_distribution,
        "distribute_data_input",
        training.distribute_data_input,
        ("per_process_batch", "layout"),
    ),
    (
        jax_trainer,
        "_distribute_data",
        training.distribute_data,
        ("data", "layouts"),
    ),
    (
        jax_trainer.JAXEpochIterator,
        "_get_iterator",
        training.get_iterator,
        ("self",),
    ),
    (
        data_adapters,
        "get_data_adapter",
        training.make_adapter,
        ("x", "y"),
    ),
    (
        epoch_iterator.EpochIterator,
        "__init__",
        training.count_batches,
        ("self", "x"),
    ),
    (
        epoch_iterator.EpochIterator,
        "reset",
        training.count_batches,
        ("self",),
    ),
    (
        epoch_iterator.EpochIterator,
        "_enumerate_iterator",
        training.enumerate_steps,
        ("self",),
    ),
    (
        jax_trainer.JAXTrainer,
        "_make_function",
        training.make_function,
        ("self", "step_function", "concatenate_outputs"),
    ),
    (
        jax_trainer.JAXTrainer,
        "predict_on_batch",
        training.predict_on_batch,
        ("self", "x"),
    ),
    (
        distribution_lib,
        "distribute_tensor",
        tensors.distribute_tensor,
        ("tensor", "layout"),
    ),
    (
        base_optimizer.BaseOptimizer,
        "add_variable",
        tensors.add_variable,
        ("self", "shape"),
    ),
    (
        base_optimizer.BaseOptimizer,
        "add_variable_from_reference",
        tensors.add_variable_from_reference,
        ("self", "reference_variable"),
    ),
    (backend, "convert_to_numpy", tensors.convert_to_numpy, ("x",)),
    (
        jax_nn,
        "dot_product_attention",
        tensors.attention,
        ("query", "key", "value"),
    ),
    (jax_nn, "conv", tensors.convolution, ("inputs", "kernel")),
    (jax_nn, "depthwise_conv", tensors.convolution, ("inputs", "kernel")),
    (jax_nn, "conv_transpose", tensors.convolution, ("inputs", "kernel")),
    (
        jax_core.Variable,
        "_direct_assign",
        variables.direct_assign,
        ("self", "value"),
    ),
    (
        jax_core.Variable,
        "_convert_to_tensor",
        variables.to_tensor,
        ("self", "value", "dtype"),
    ),
    (Variable, "__array__", variables.to_array, ("self", "dtype")),
    (saving_lib, "save_model", variables.save, ("model", "filepath")),
    (saving_lib, "save_weights_only", variables.save, ("model", "filepath")),
    (
        legacy_h5_format,
        "save_model_to_hdf5",
        variables.save,
        ("model", "filepath"),
    ),
    *(
        (store, "__setitem__", variables.store_value, ("self", "key", "value"))
        for name in ("H5Entry", "H5IOStore", "ShardedH5IOStore")
        for store in [getattr(saving_lib, name, None)]
        if hasattr(store, "__setitem__")
    ),
    (
        saving_lib,
        "is_memory_sufficient",
        variables.is_memory_sufficient,
        ("model",),
    ),
    (CallbackList, "__init__", callbacks.make_list, ("self", "callbacks")),
    (BackupAndRestore, "_save_model", callbacks.back_up, ("self",)),
    (BackupAndRestore, "on_train_end", callbacks.end_backup, ("self",)),
    (file_utils, "makedirs", callbacks.make_folder, ("path",)),
)

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
    changed = misfits()
    if changed:
        raise ImportError(
            f"This version of keras_meshdist doesn't fit Keras "
            f"{keras.__version__}: {'; '.join(changed)}. Nothing was changed. "
            "Install an older Keras or a newer keras_meshdist."
        )
    primitives = lowering.primitives()
    for place, name, wrapper, _ in _HOOKS:
        original = getattr(place, name)
        _undo[_path(place, name)] = functools.partial(
            setattr, place, name, original
        )
        setattr(place, name, wrapper(original))
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


def misfits():
    """Returns a sentence for each hook that doesn't fit this Keras."""
    changed = []
    for place, name, _, parameters in _HOOKS:
        found = getattr(place, name, None)
        signature = tuple(inspect.signature(found).parameters) if found else ()
        if signature[: len(parameters)] != parameters:
            changed.append(
                f"`{_path(place, name)}` should take {parameters}. Received: "
                f"{signature or 'no such function'}"
            )
    return changed


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
