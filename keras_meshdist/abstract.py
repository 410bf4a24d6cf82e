"""A Keras model without memory: names, shapes and dtypes only."""

import contextlib

import jax
import keras

from keras_meshdist import keras_hooks


def abstract(model_or_build_fn, inputs=None):
    """Builds a Keras model without taking memory for its weights.

    The model's variables have paths, shapes and dtypes, but no values, so that
    a model of any size is there within seconds. Keras counts the names that it
    gives layers as if the model had not been built: what is built next from
    the same function has the same paths.

    Example:

    ```python
    model = kmd.abstract(lambda: keras_hub.models.LlamaBackbone(**config))
    sum(math.prod(v.shape) for v in model.variables)  # its parameters
    ```

    Args:
        model_or_build_fn: function without arguments that returns a
            `keras.Model`, compiled or not. A `keras.Model` is returned as it
            is.
        inputs: nested structure of `keras.KerasTensor` or arrays, with which a
            model is called that doesn't know its inputs yet, such as a
            subclassed one. Defaults to `None`.

    Returns:
        A `keras.Model`. If it is compiled, its optimizer has its slots.

    Raises:
        ValueError: if the function returns no model, or one that can't be
            built without `inputs`.
    """
    if isinstance(model_or_build_fn, keras.Model):
        return model_or_build_fn

    def finish(model, arguments):
        if arguments is not None:
            model(arguments)
        if not model.built:
            raise ValueError(
                "A model that is called before it knows its shapes needs "
                f"`inputs`. Received: inputs=None for {model.name!r} of "
                f"class {type(model).__name__}. Valid: inputs=keras."
                "KerasTensor((1, 128), dtype='int32')."
            )
        optimizer = getattr(model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)

    return build_abstractly(model_or_build_fn, finish, shapes_of(inputs))


def build_abstractly(build_fn, finish, arguments=None):
    """Builds a model without memory, and what else is to be built with it.

    Args:
        build_fn: function without arguments that returns a `keras.Model`.
        finish: function that is called with the model and the arguments as
            JAX traces them; what it creates has no memory either.
        arguments: nested structure of `jax.ShapeDtypeStruct`.

    Returns:
        A `keras.Model`.

    Raises:
        ValueError: if the function returns no model.
    """
    built = []

    def build(arguments):
        model = build_fn()
        if not isinstance(model, keras.Model):
            raise ValueError(
                "The function must return a `keras.Model`. Received: "
                f"{build_fn!r}, which returns {type(model).__name__}."
            )
        finish(model, arguments)
        built.append(model)

    with (
        keras_hooks.untouched_names(),
        keras_hooks.without_values(),
        no_distribution(),
    ):
        jax.eval_shape(build, arguments)
    (model,) = built
    for variable in variables_of(model):
        keras_hooks.forget_value(variable)
    return model


def variables_of(model):
    """Returns all variables of a model and of its optimizer."""
    optimizer = getattr(model, "optimizer", None)
    return [
        *model.variables,
        *model.metrics_variables,
        *(optimizer.variables if optimizer is not None else ()),
    ]


def shapes_of(inputs, rows=2, length=64):
    """Returns what `jax.eval_shape` takes for arrays or symbolic tensors.

    Args:
        inputs: nested structure of whatever has a shape and a dtype.
        rows: int, for a first dimension of unknown size.
        length: int, for any other dimension of unknown size.
    """

    def shape(tensor):
        if tensor is None:
            return None
        known = [
            (rows if d == 0 else length) if size is None else size
            for d, size in enumerate(tensor.shape)
        ]
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return jax.ShapeDtypeStruct(tuple(known), dtype)

    return keras.tree.map_structure(shape, inputs)


@contextlib.contextmanager
def no_distribution():
    """Context without a distribution: nothing in it lies on devices."""
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)
