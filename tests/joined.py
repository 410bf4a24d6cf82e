"""What processes run for test_joining.py and test_doctor.py."""

import json
import sys
import time

import numpy as np


def initialize_again(seeds=None):
    """`initialize` in a process that has joined, with its seed or none."""
    import jax
    import keras

    import keras_meshdist as kmd
    from tests.processes import forget_seeds

    forget_seeds()
    if seeds is not None:
        keras.utils.set_random_seed(seeds[jax.process_index()])
    try:
        kmd.initialize()
        return {"drawn": np.random.permutation(1000).tolist()}
    finally:
        keras.utils.set_random_seed(0)


def initialize_otherwise():
    import keras_meshdist as kmd

    try:
        kmd.initialize(num_processes=7, local_device_ids=3)
    except ValueError as error:
        return str(error)


def examine(seeds=None, floatx=None, only=None, timeout=60.0):
    """The report of `doctor`, with something that differs between processes."""
    import jax
    import keras

    import keras_meshdist as kmd

    me = jax.process_index()
    if only not in (None, me):
        return None
    keras.utils.set_random_seed(0 if seeds is None else seeds[me])
    before = keras.config.floatx()
    keras.config.set_floatx("float32" if floatx is None else floatx[me])
    try:
        return kmd.doctor(timeout, verbose=False).to_dict()
    finally:
        keras.config.set_floatx(before)
        keras.utils.set_random_seed(0)


def examine_where_one_hangs(timeout):
    """`doctor`, while process 1 never comes to the collective."""
    import jax

    import keras_meshdist as kmd
    from keras_meshdist.checkup import together

    if jax.process_index() == 1:
        together.collective = lambda: time.sleep(60)
    return kmd.doctor(timeout, verbose=False).to_dict()


def main(arguments):
    """Joins by the environment or by arguments, and trains a little."""
    import keras_meshdist as kmd

    began = time.monotonic()
    try:
        if arguments:
            address, count, process, timeout = arguments
            kmd.initialize(
                address, int(count), int(process), timeout=float(timeout)
            )
        else:
            kmd.initialize()
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - began,
        }
    return {"drawn": np.random.permutation(1000).tolist(), **train()}


def train(mesh=True):
    """Trains on all devices, or on one; returns what came out."""
    import os

    import jax
    import keras

    import keras_meshdist as kmd
    from keras_meshdist import environments

    keras.utils.set_random_seed(3)
    dist = None
    if mesh:
        devices = kmd.make_mesh({"model": 2, "batch": -1})
        layout_map = kmd.LayoutMap(devices)
        layout_map[".*dense.*/kernel"] = (None, "model")
        dist = kmd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    keras.distribution.set_distribution(dist)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    x = np.linspace(-1, 1, 13 * 8, dtype="float32").reshape(13, 8)
    y = np.cos(x[:, :4])
    history = model.fit(x, y, batch_size=5, epochs=3, verbose=0)
    weights = [w.tolist() for w in model.get_weights()]
    keras.distribution.set_distribution(None)
    return {
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "losses": history.history["loss"],
        "weights": weights,
        "launcher": ", ".join(e.name for e in environments.found()),
        "pid": os.getpid(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])), flush=True)
