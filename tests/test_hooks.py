"""Hooks: few, listed, reversible, and silent under a foreign distribution."""

import inspect
import os
import subprocess
import sys

import jax
import keras
import numpy as np
import pytest

import keras_meshdist as kmd
from keras_meshdist import keras_hooks


@pytest.fixture
def hooks():
    yield keras_hooks
    keras_hooks.install()


def owners():
    """What each hook replaces, as it stands in Keras now."""
    return {
        (place, name): getattr(place, name)
        for place, name, _, _ in keras_hooks.HOOKS
    }


def test_they_are_listed_and_documented(hooks):
    listed = [n for n in hooks.installed() if n.startswith("keras.")]
    assert len(listed) == len(hooks.HOOKS)
    for name in listed:
        assert name.startswith("keras.src.")
    for _, name, wrapper, _ in hooks.HOOKS:
        text = inspect.getdoc(wrapper)
        assert name in text
        assert "Keras 3.7" in text


def test_they_can_be_removed_and_installed_again(hooks):
    hooked = owners()
    threefry = jax.config.jax_threefry_partitionable
    hooks.remove()
    assert hooks.installed() == []
    plain = owners()
    for key, function in hooked.items():
        assert plain[key] is inspect.unwrap(function)
    hooks.install()
    hooks.install()
    again = owners()
    for key, function in plain.items():
        assert inspect.unwrap(again[key]) is function
        assert again[key].__wrapped__ is function
    assert jax.config.jax_threefry_partitionable == threefry


def test_random_numbers_do_not_depend_on_how_arrays_lie():
    assert jax.config.jax_threefry_partitionable


def test_a_keras_that_has_changed_is_refused_whole(hooks, monkeypatch):
    hooks.remove()
    before = owners()
    place, name, _, _ = hooks.HOOKS[-1]
    monkeypatch.setattr(place, name, lambda self, other: None)
    before[place, name] = getattr(place, name)
    with pytest.raises(ImportError, match=r"(?s)doesn't fit Keras.*Nothing"):
        hooks.install()
    assert owners() == before
    assert hooks.installed() == []
    monkeypatch.undo()


def fit(model_input=16):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    x = np.linspace(0, 1, model_input * 4).reshape(-1, 4)
    y = np.ones((model_input, 8))
    loss = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    return loss.history["loss"], [
        (np.asarray(v.value).tobytes(), str(v.value.sharding))
        for v in [*model.variables, *model.optimizer.variables]
    ]


def test_a_foreign_distribution_is_as_without_this_package(hooks):
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"])
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    foreign = [
        keras.distribution.ModelParallel(
            layout_map=layout_map, batch_dim_name="batch"
        ),
        keras.distribution.DataParallel(devices=jax.devices()),
        None,
    ]
    for distribution in foreign:
        keras.distribution.set_distribution(distribution)
        with_hooks = fit()
        hooks.remove()
        jax.config.update("jax_threefry_partitionable", True)
        assert fit() == with_hooks
        hooks.install()
    keras.distribution.set_distribution(None)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_another_backend_is_refused():
    done = run("import keras_meshdist", KERAS_BACKEND="numpy")
    assert done.returncode == 1
    assert "needs the JAX backend" in done.stderr
    assert "KERAS_BACKEND=jax" in done.stderr


def test_jax_is_the_backend_if_none_was_asked_for(tmp_path):
    code = (
        "import os; os.environ.pop('KERAS_BACKEND', None);"
        "import keras_meshdist, keras; print(keras.backend.backend())"
    )
    done = run(code, KERAS_HOME=str(tmp_path))
    assert done.stdout.split() == ["jax"], done.stderr


@pytest.mark.parametrize("package", ["keras", "jax"])
def test_a_version_out_of_range_is_refused(package):
    code = (
        f"import os, keras, jax; {package}.__version__ = '0.4.1';"
        "import keras_meshdist"
    )
    done = run(code, KERAS_BACKEND="jax")
    assert done.returncode == 1
    assert "needs Keras 3.7.0 or newer and JAX 0.4.38" in done.stderr
    assert "0.4.1" in done.stderr


def test_the_package_does_not_start_jax():
    code = (
        "import keras_meshdist as kmd;"
        "kmd.cluster.use_virtual_devices(3);"
        "import jax; print(jax.device_count())"
    )
    done = run(code, KERAS_BACKEND="jax", XLA_FLAGS="")
    assert done.stdout.split() == ["3"], done.stderr


@pytest.mark.parametrize("given", [None, True, False])
def test_attention_on_tpu_is_one_that_xla_can_split(monkeypatch, given):
    """By what Keras is asked for; compiling it takes a TPU's compiler."""
    from keras_meshdist.keras_hooks import tensors

    asked = []

    def keras_function(query, key, value, bias=None, flash_attention=None):
        asked.append(flash_attention)

    class Device:
        platform = "tpu"

    attend = tensors.attention(keras_function)
    with kmd.DataParallel().scope():
        attend(1, 2, 3, flash_attention=given)
        monkeypatch.setattr(jax, "devices", lambda: [Device()])
        attend(1, 2, 3, flash_attention=given)
    attend(1, 2, 3, flash_attention=given)
    assert asked == [given, False if given is None else given, given]
