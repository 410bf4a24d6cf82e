"""Values of variables, and seeds, as Keras keeps them."""

import jax
import keras
from keras.src import backend
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.random.seed_generator import draw_seed
from keras.src.utils import jax_utils

__all__ = [
    "draw_seed",
    "forget_layout",
    "forget_value",
    "has_value",
    "is_symbolic",
    "is_traced",
    "layout_given",
    "seed_dtype",
    "set_no_value",
    "set_value",
]


def layout_given(variable):
    """Returns the `TensorLayout` that a variable was given, or `None`."""
    layout = getattr(variable, "_layout", None)
    is_layout = isinstance(layout, keras.distribution.TensorLayout)
    return layout if is_layout else None


def forget_value(variable):
    """Leaves a variable its shape and dtype only."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    variable._value = jax.ShapeDtypeStruct(tuple(variable.shape), dtype)


def forget_layout(variable):
    """Lets a variable take the layout of another distribution."""
    variable._layout = None


def set_value(variable, value, layout):
    """Gives a variable a value that lies as a layout says."""
    variable._layout = layout
    variable._value = value


def set_no_value(variable, make, layout):
    """Leaves a variable without a value, until it is assigned or read.

    Args:
        variable: `keras.Variable`.
        make: function from a shape and a dtype to the value, which is called
            whenever the variable is read.
        layout: `keras.distribution.TensorLayout`.
    """
    variable._layout = layout
    variable._value = None
    variable._initializer = make


def has_value(variable):
    """Whether a variable has a value."""
    return variable._value is not None


def is_symbolic():
    """Whether Keras computes shapes and dtypes only."""
    return in_symbolic_scope()


def is_traced():
    """Whether JAX traces a function."""
    return jax_utils.is_in_jax_tracing_scope()


def seed_dtype():
    """Returns the dtype of seeds, a str."""
    return backend.random_seed_dtype()
