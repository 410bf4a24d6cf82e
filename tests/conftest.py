"""Before any test: eight virtual devices, or the pod's own."""

import signal

import hypothesis
import pytest

from tests import clusters

clusters.configure()

# JAX compiles within a test, so an absolute time says nothing.
hypothesis.settings.register_profile("meshdist", deadline=None)
hypothesis.settings.load_profile("meshdist")


def pytest_collection_modifyitems(items):
    """What takes the place of all shared clusters goes last."""
    items.sort(key=lambda item: item.get_closest_marker("crowd") is not None)


@pytest.fixture(autouse=True)
def _no_distribution():
    """Each test begins and ends on one device."""
    import keras

    keras.distribution.set_distribution(None)
    yield
    assert keras.distribution.distribution() is None


@pytest.fixture
def sigint():
    """A shell lets what it starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
