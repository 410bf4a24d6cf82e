"""What all distributions of the package do with values of variables."""

import jax
import keras
import numpy as np

from keras_meshdist import (
    initial_values,
    keras_hooks,
    predictions,
    saving,
    weights,
)
from keras_meshdist.layout import sharding_of
from keras_meshdist.mesh import jax_mesh


class MeshWeights(keras_hooks.HookedDistribution):
    """Puts values on the mesh, and brings them together, on any processes.

    A subclass has a `_board`, `None` on one process, and `_assigned`, what
    `weights.Assigned` keeps.
    """

    def gather(self, array, path=None):
        name = f"{array.dtype}{list(array.shape)}"
        saving.announce(self._board, f"{path} {name}" if path else name)
        return predictions.fetch(array)

    def initialize_variable(self, variable, initializer):
        keras_hooks.install_for_hub()
        layout = self.get_variable_layout(variable)
        return initial_values.initialize(variable, initializer, layout, self)

    def place_variable(self, variable, value, layout):
        if self._board is not None and weights.is_local(value):
            self._assigned.note(variable.path, value)
        return weights.place(value, sharding_of(layout))

    def check_place(self, model):
        weights.check_place(model, jax_mesh(self.device_mesh))

    def compare_assigned(self):
        """Raises if processes gave variables different values."""
        if self._board is not None:
            weights.compare(
                self._board.ask(
                    self._assigned.take(), "to compare values of variables"
                )
            )

    def ask(self, value, what):
        return [value] if self._board is None else self._board.ask(value, what)

    def save(self, write, target, among_others=False):
        return saving.save(self._board, write, target, among_others)

    def with_whole_values(self, model, function):
        wholes = [
            (v, v.value, keras_hooks.layout_given(v), self.value_to_save(v, ""))
            for v in model.variables
        ]
        if not saving.writes():
            return None
        before = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            for variable, _, _, whole in wholes:
                whole = jax.device_put(whole, _host())
                keras_hooks.set_value(variable, whole, None)
            return function()
        finally:
            keras.distribution.set_distribution(before)
            for variable, value, layout, _ in wholes:
                keras_hooks.set_value(variable, value, layout)

    def save_files(self, path, write, take_part):
        return saving.save_files(self._board, path, write, take_part)

    def value_to_save(self, value, key):
        if isinstance(value, keras.Variable):
            key, value = value.path, value.value
        if self._board is None:
            return np.asarray(value)
        if keras_hooks.is_scattered(value):
            value = self.gather(value, key)
        elif saving.is_saving():
            saving.announce(self._board, key)
        return np.asarray(value) if saving.writes() else None


def _host():
    """A device in the host's memory, if JAX was started with one."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
