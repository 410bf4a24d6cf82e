"""The shapes of a batch, given or read off a model."""

import jax
import keras

from keras_meshdist import keras_hooks


def example_batch(model, batch, seq=None):
    """Returns the shapes and dtypes of a batch that a model is trained on.

    Example:

    ```python
    example_batch(model, 16)  # x and y as the model and its loss have them
    example_batch(model, ((16, 32, 32, 3), (16,)))  # shapes, float32
    ```

    Args:
        model: `keras.Model`, compiled.
        batch: int, the rows of a batch of what the model takes as inputs. Or
            the batch itself: `(x, y)` or `(x, y, sample_weight)`, structures
            of arrays, of whatever has a shape and a dtype, or of shapes.
        seq: int, the size of the second dimension of inputs where the model
            leaves it open. Defaults to `None`.

    Returns:
        Tuple `(x, y)` or `(x, y, sample_weight)` of structures of
        `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: if the shapes of a batch can't be known.
    """
    if not isinstance(batch, int):
        return _given(batch)
    if batch < 1:
        raise ValueError(
            f"A batch has one row or more. Received: batch={batch}."
        )
    inputs = keras_hooks.input_structure(model)
    if inputs is None:
        raise ValueError(
            "The shapes of a batch can be read off a functional or sequential "
            f"model. Received: batch={batch} for {model.name!r} of class "
            f"{type(model).__name__}. Give shapes: batch=((16, 128), (16,))."
        )
    x = keras.tree.map_structure(lambda t: _filled(t, batch, seq), inputs)
    outputs = model.compute_output_spec(
        keras.tree.map_structure(
            lambda s: keras.KerasTensor(s.shape, str(s.dtype)), x
        )
    )
    return x, _targets(model, outputs)


def rows_of(data):
    """Returns the number of rows of a batch, and that of its tokens.

    Tokens are the elements of the first of the inputs that has two dimensions
    and whole numbers; without one, they are the rows.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data[0]) if leaf.shape]
    rows = leaves[0].shape[0]
    for leaf in leaves:
        if len(leaf.shape) == 2 and "int" in str(leaf.dtype):
            return rows, rows * leaf.shape[1]
    return rows, rows


def _given(batch):
    if not isinstance(batch, tuple) or not 2 <= len(batch) <= 3:
        raise ValueError(
            "A batch is a number of rows, or a tuple (x, y) or (x, y, "
            f"sample_weight). Received: {type(batch).__name__} "
            f"{batch!r}."[:500]
        )
    return tuple(_shapes(part) for part in batch)


def _shapes(part):
    if hasattr(part, "shape") and hasattr(part, "dtype"):
        dtype = keras.backend.standardize_dtype(part.dtype)
        return jax.ShapeDtypeStruct(tuple(part.shape), dtype)
    if isinstance(part, dict):
        return {name: _shapes(inner) for name, inner in part.items()}
    if isinstance(part, list | tuple):
        if all(isinstance(size, int) for size in part):
            return jax.ShapeDtypeStruct(tuple(part), keras.config.floatx())
        if (
            len(part) == 2
            and isinstance(part[1], str)
            and isinstance(part[0], list | tuple)
        ):
            return jax.ShapeDtypeStruct(tuple(part[0]), part[1])
        return type(part)(_shapes(inner) for inner in part)
    raise ValueError(
        "What a batch consists of has a shape and a dtype, or is a shape, or "
        f"a pair of both. Received: {part!r}. Valid: (16, 128), or "
        "((16, 128), 'int32')."
    )


def _filled(tensor, rows, seq):
    shape = list(tensor.shape)
    shape[0] = rows
    if len(shape) > 1 and shape[1] is None:
        shape[1] = seq
    if None in shape:
        raise ValueError(
            "Every dimension of a batch must be known. Received: the model's "
            f"input {tensor.name!r} of shape {tuple(tensor.shape)}, with "
            f"seq={seq}. Give `seq`, the size of the second dimension, or "
            "the shapes of the batch."
        )
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _targets(model, outputs):
    """What the losses compare the outputs with."""
    losses = getattr(model, "loss", None)

    def target(path, output):
        loss = losses
        for key in path:
            if isinstance(loss, dict):
                loss = loss.get(key)
            elif isinstance(loss, list | tuple):
                loss = loss[key]
        name = loss if isinstance(loss, str) else getattr(loss, "name", None)
        name = str(name or getattr(loss, "__name__", loss))
        shape = tuple(output.shape)
        if "sparse" in name.lower():
            return jax.ShapeDtypeStruct(shape[:-1], "int32")
        dtype = keras.backend.standardize_dtype(output.dtype)
        return jax.ShapeDtypeStruct(shape, dtype)

    if isinstance(outputs, dict):
        return {name: target((name,), o) for name, o in outputs.items()}
    if isinstance(outputs, list | tuple):
        return type(outputs)(target((i,), o) for i, o in enumerate(outputs))
    return target((), outputs)
