"""What all distributions of the package do with values of variables."""

import keras
import numpy as np

from keras_meshdist import keras_hooks, predictions, saving, weights
from keras_meshdist.layout import sharding_of


class MeshWeights(keras_hooks.HookedDistribution):
    """Puts values on the mesh, and brings them together, on any processes.

    A subclass has a `_board`, `None` on one process, and `_assigned`, what
    `weights.Assigned` keeps.
    """

    def gather(self, array, path=None):
        name = f"{array.dtype}{list(array.shape)}"
        saving.announce(self._board, f"{path} {name}" if path else name)
        return predictions.fetch(array)

    def place_variable(self, variable, value, layout):
        if self._board is not None and weights.is_local(value):
            self._assigned.note(variable.path, np.asarray(value))
        return weights.place(value, sharding_of(layout))

    def compare_assigned(self):
        """Raises if processes gave variables different values."""
        if self._board is not None:
            weights.compare(
                self._board.ask(
                    self._assigned.take(), "to compare values of variables"
                )
            )

    def save(self, write, target):
        return saving.save(self._board, write, target)

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
