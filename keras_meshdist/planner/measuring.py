"""Real steps on the devices of this machine, timed."""

import dataclasses
import os
import statistics
import time

import jax
import keras
import numpy as np

from keras_meshdist import cluster
from keras_meshdist.abstract import abstract
from keras_meshdist.mesh import make_mesh
from keras_meshdist.planner.example import example_batch
from keras_meshdist.planner.libtpu import first_line
from keras_meshdist.planner.step import distribute

# Versions by what JAX calls a device.
_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Asks which devices there are.

    Args:
        virtual: int, virtual CPU devices to be had instead, or `None`.
    """

    virtual: int | None = None
    axes: tuple = ()

    def answer(self):
        """Returns a dict with the name of the `topology`."""
        devices = jax.devices()
        platform, kind = devices[0].platform, devices[0].device_kind
        if platform == "cpu":
            name = f"cpu:{len(devices)}"
        elif kind in _KINDS:
            dimensions = 2 if _KINDS[kind] in ("v5e", "v6e") else 3
            sizes = [
                max(d.coords[i] for d in devices) + 1 for i in range(dimensions)
            ]
            name = f"{_KINDS[kind]}:{'x'.join(map(str, sizes))}"
        else:
            return {
                "error": "Steps are timed on TPUs and on CPU devices. "
                f"Received: {len(devices)} devices of kind {kind!r}."
            }
        return {"error": None, "topology": name, "compiled": False}

    def environment(self):
        """The environment of a process that has these devices."""
        env = {**os.environ, "KERAS_BACKEND": "jax"}
        if self.virtual is not None:
            env.update(cluster.environment(self.virtual, env))
        return env


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One mesh on which real steps are timed.

    Args:
        job: `Job`, what is run.
        machine: `Machine`, where.
        steps: int, how many are timed, after one that compiles.
    """

    job: object
    machine: Machine
    steps: int = 5

    @property
    def axes(self):
        """The axes of the mesh."""
        return self.job.axes

    def environment(self):
        """The environment of a process that has the devices."""
        return self.machine.environment()

    def answer(self):
        """Returns a dict with the median of the `seconds` of a step."""
        try:
            return {"error": None, "seconds": self._seconds()}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {first_line(error)}"}

    def _seconds(self):
        job = self.job
        if job.dtype is not None:
            keras.config.set_dtype_policy(job.dtype)
        build = job.build.load()
        layout = job.layout
        layout = layout.load() if hasattr(layout, "load") else layout
        mesh = make_mesh(dict(job.axes))
        keras.distribution.set_distribution(
            distribute(abstract(build), mesh, layout)
        )
        model = build()
        batch = keras.tree.map_structure(
            _values, example_batch(model, job.batch, job.seq)
        )
        model.train_on_batch(*batch)
        taken = []
        for _ in range(self.steps):
            begin = time.perf_counter()
            # It returns numbers, so the step is over.
            model.train_on_batch(*batch)
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)


def _values(shape):
    """Values of a shape: whole numbers are valid indices of anything."""
    if np.issubdtype(shape.dtype, np.floating):
        values = np.random.default_rng(0).normal(size=shape.shape)
        return values.astype(shape.dtype)
    return np.ones(shape.shape, shape.dtype)
