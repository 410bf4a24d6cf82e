"""Which functions of Keras are replaced, and by what."""

import importlib
import sys

from keras.src import backend
from keras.src.backend.common.variables import Variable
from keras.src.backend.jax import core as jax_core
from keras.src.backend.jax import (
    distribution_lib as jax_distribution,
)
from keras.src.backend.jax import nn as jax_nn
from keras.src.backend.jax import trainer as jax_trainer
from keras.src.callbacks.backup_and_restore import (
    BackupAndRestore,
)
from keras.src.callbacks.callback_list import CallbackList
from keras.src.callbacks.early_stopping import EarlyStopping
from keras.src.distribution import distribution_lib
from keras.src.legacy.saving import legacy_h5_format
from keras.src.models.model import Model
from keras.src.optimizers import base_optimizer
from keras.src.saving import saving_lib
from keras.src.trainers import data_adapters, epoch_iterator
from keras.src.utils import file_utils

from keras_meshdist.keras_hooks import (
    callbacks,
    exports,
    files,
    presets,
    tensors,
    training,
    variables,
)

# place, name, wrapper, parameters that Keras' own must begin with
HOOKS = (
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
        "_initialize_with_initializer",
        variables.initialize,
        ("self", "initializer"),
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
        files.is_memory_sufficient,
        ("model",),
    ),
    (
        saving_lib,
        "_load_model_from_fileobj",
        files.load_archive,
        ("fileobj", "custom_objects"),
    ),
    (saving_lib.H5IOStore, "__init__", files.open_store, ("self",)),
    (
        getattr(saving_lib, "H5Entry", saving_lib.H5IOStore),
        "__getitem__",
        files.read_value,
        ("self",),
    ),
    (Model, "export", exports.export, ("self", "filepath")),
    (CallbackList, "__init__", callbacks.make_list, ("self", "callbacks")),
    (BackupAndRestore, "_save_model", callbacks.back_up, ("self",)),
    (BackupAndRestore, "on_train_end", callbacks.end_backup, ("self",)),
    (EarlyStopping, "on_epoch_end", callbacks.keep_best, ("self", "epoch")),
    (file_utils, "makedirs", callbacks.make_folder, ("path",)),
)


# Where KerasHub reads what Transformers wrote.
_SAFETENSORS = "keras_hub.src.utils.transformers.safetensor_utils"


def of_hub():
    """Returns what is replaced of KerasHub; nothing if it isn't imported."""
    models = getattr(sys.modules.get("keras_hub"), "models", None)
    if not hasattr(models, "Task"):  # not yet, or in the middle of it
        return ()
    saves = tuple(
        (place, "save_to_preset", exports.save_preset, ("self", "preset_dir"))
        for place in (models.Backbone, models.Task)
    )
    loader = importlib.import_module(_SAFETENSORS).SafetensorLoader
    return (
        *saves,
        (loader, "__init__", presets.open_tensors, ("self", "preset")),
    )
