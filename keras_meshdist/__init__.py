"""Keras distribution over any device mesh, on any number of processes."""

import os
import sys

if "keras" not in sys.modules:
    # This package works on the JAX backend only, so that is what Keras starts
    # with if nobody asked for another one.
    os.environ.setdefault("KERAS_BACKEND", "jax")

from keras_meshdist import callbacks, cluster, keras_hooks, layouts
from keras_meshdist.abstract import abstract
from keras_meshdist.checkpoints.restoring import restore
from keras_meshdist.checkup import doctor
from keras_meshdist.distribution import DataParallel, ModelParallel
from keras_meshdist.initial_values import skip_initializers
from keras_meshdist.joining import initialize
from keras_meshdist.layout import LayoutMap, TensorLayout
from keras_meshdist.mesh import make_mesh
from keras_meshdist.planner import MeshPlan, PlanReport, plan, remat_blocks
from keras_meshdist.predictions import local_predictions
from keras_meshdist.reports import inspect
from keras_meshdist.weights import distribute_model

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "LayoutMap",
    "MeshPlan",
    "ModelParallel",
    "PlanReport",
    "TensorLayout",
    "abstract",
    "callbacks",
    "cluster",
    "distribute_model",
    "doctor",
    "initialize",
    "inspect",
    "keras_hooks",
    "layouts",
    "local_predictions",
    "make_mesh",
    "plan",
    "remat_blocks",
    "restore",
    "skip_initializers",
]

keras_hooks.install()
