"""Several processes with virtual devices on one computer: tests and trials."""

from keras_meshdist.cluster.cluster import Cluster
from keras_meshdist.cluster.devices import (
    accelerator_count,
    environment,
    use_virtual_devices,
)
from keras_meshdist.cluster.failures import ClusterError
from keras_meshdist.cluster.pod import join_pod, on_pod
from keras_meshdist.cluster.scripts import run_script

__all__ = [
    "Cluster",
    "ClusterError",
    "accelerator_count",
    "environment",
    "join_pod",
    "on_pod",
    "run_script",
    "use_virtual_devices",
]
