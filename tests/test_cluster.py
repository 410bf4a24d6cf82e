"""Clusters of local processes, and clusters that are there already."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from keras_meshdist import cluster, coordination, hardware
from keras_meshdist.cluster.processes import reserve_port
from tests.clusters import local_only, shared_cluster

pytestmark = [local_only, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[1]

# How soon all must be over, on a busy computer.
SECONDS = 50


def place(offset=0):
    import jax

    counts = jax.process_count(), jax.device_count(), jax.local_device_count()
    return offset + jax.process_index(), *counts


def everyone(value):
    import numpy as np
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(np.float32(value)).tolist()


def speak():
    print(f"out of {os.environ['KERAS_DISTRIBUTION_PROCESS_ID']}")
    print("first\nsecond", file=sys.stderr)
    os.write(1, b"\x00raw bytes\n")
    return "quiet"


def random_numbers():
    import random

    import keras
    import numpy as np

    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    return random.random(), np.random.rand(), float(layer.kernel[0, 0])


def fail(processes, then=None):
    if place()[0] in processes:
        raise LookupError(f"nothing on {place()[0]}")
    return then and everyone(then)


def stop(process, how):
    if place()[0] == process:
        print("the last words", flush=True)
        how(9)
    return everyone(0)


def kill_myself(number):
    os.kill(os.getpid(), number)


def sleep(seconds, process=None):
    if process is None or place()[0] == process:
        time.sleep(seconds)


def pair():
    return shared_cluster(2, 2)


class TestEnvironment:
    def test_flags_of_the_user_stay(self):
        base = {
            "XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=3 --b"
        }
        variables = cluster.environment(8, base)
        assert variables == {
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--a=1 --b --xla_force_host_platform_device_count=8",
            "NPROC": "16",
        }

    def test_enough_threads_for_many_devices(self):
        assert cluster.environment(64, {})["NPROC"] == "128"

    @pytest.mark.parametrize("devices", [0, -1, 2.0, "8", True, None])
    def test_not_a_number_of_devices(self, devices):
        for function in (cluster.environment, cluster.use_virtual_devices):
            with pytest.raises(ValueError, match=r"`devices` must be a pos.*R"):
                function(devices)

    def test_use_in_a_fresh_process(self):
        code = """
import jax, keras_meshdist as kmd
kmd.cluster.use_virtual_devices(2)
kmd.cluster.use_virtual_devices(3)
assert jax.device_count() == 3
kmd.cluster.use_virtual_devices(3)
try:
    kmd.cluster.use_virtual_devices(4)
except RuntimeError as error:
    print(error)
"""
        names = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "KERAS_BACKEND")
        env = {k: v for k, v in os.environ.items() if k not in names}
        output = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**env, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert output.startswith("Virtual devices must be asked for before")
        assert "Received: devices=4" in output


class TestAccelerators:
    """What `accelerator_count` finds on computers that aren't this one."""

    @pytest.fixture(autouse=True)
    def computer(self, monkeypatch, tmp_path):
        """Before JAX starts; a command and a plugin as JAX for CUDA has."""
        monkeypatch.setattr(coordination, "backend_started", lambda: False)
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.syspath_prepend(tmp_path)
        command = tmp_path / "nvidia-smi"
        command.write_text("#!/bin/sh\necho 'GPU 0: T4'\necho 'GPU 1: T4'\n")
        command.chmod(0o755)
        return tmp_path

    def install_plugin(self, folder):
        info = folder / "jax_cuda12_plugin-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: jax-cuda12-plugin\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            "[jax_plugins]\nxla_cuda12 = jax_plugins.xla_cuda12\n"
        )

    def test_gpus_count_where_jax_can_use_them(self, computer, monkeypatch):
        assert cluster.accelerator_count() == 0
        self.install_plugin(computer)
        assert cluster.accelerator_count() == 2
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert cluster.accelerator_count() == 1
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        assert cluster.accelerator_count() == 0

    def test_tpu_chips_count_where_jax_can_use_them(self, monkeypatch):
        files = {"/dev/accel[0-9]*": [], "/dev/vfio/[0-9]*": list("01234567")}
        monkeypatch.setattr(hardware.glob, "glob", files.get)
        installed = []
        monkeypatch.setattr(
            hardware.importlib.util, "find_spec", installed.count
        )
        assert cluster.accelerator_count() == 0
        installed.append("libtpu")
        assert cluster.accelerator_count() == 8

    def test_other_devices_are_no_tpu_chips(self, monkeypatch):
        files = {"/dev/accel[0-9]*": [], "/dev/vfio/[0-9]*": ["/dev/vfio/7"]}
        monkeypatch.setattr(hardware.glob, "glob", files.get)
        monkeypatch.setattr(
            hardware.importlib.util, "find_spec", lambda name: None
        )
        for name in list(os.environ):
            if name.startswith("TPU_"):  # JAX sets some where libtpu is
                monkeypatch.delenv(name)
        assert hardware.tpu_chips() == 0
        monkeypatch.setenv("TPU_WORKER_ID", "0")
        assert hardware.tpu_chips() == 1

    def test_gpus_are_counted_by_files_without_the_command(self, monkeypatch):
        files = [f"/dev/nvidia{end}" for end in ("0", "1", "0-caps")]
        monkeypatch.setattr(hardware.glob, "glob", lambda pattern: files)
        monkeypatch.setattr(hardware.shutil, "which", lambda name: None)
        assert hardware.gpus() == 2


def test_accelerators_once_jax_has_started():
    import jax

    found = [d for d in jax.local_devices() if d.platform != "cpu"]
    assert cluster.accelerator_count() == len(found)


class TestCalls:
    def test_every_process_answers_in_order(self):
        assert pair().call(place) == [(0, 2, 4, 2), (1, 2, 4, 2)]
        assert pair().call(place, offset=7) == [(7, 2, 4, 2), (8, 2, 4, 2)]
        assert pair().call(everyone, 3.0) == [[3.0, 3.0]] * 2

    def test_one_process_is_called(self):
        assert pair().call_on(1, place) == (1, 2, 4, 2)
        with pytest.raises(ValueError, match=r"process_id=2\. Valid.*0 to 1"):
            pair().call_on(2, place)

    def test_output_is_passed_on_and_does_no_harm(self, capsys):
        assert pair().call(speak) == ["quiet"] * 2
        deadline = time.monotonic() + 10
        out = err = ""
        while time.monotonic() < deadline and err.count("second") < 2:
            time.sleep(0.05)
            captured = capsys.readouterr()
            out, err = out + captured.out, err + captured.err
        assert "[0] out of 0\n" in out
        assert "[1] out of 1\n" in out
        assert "[1] \x00raw bytes\n" in out
        assert "[1] first\n[1] second\n" in err.replace("[0] first\n", "")

    def test_random_numbers_are_the_same_everywhere(self):
        first, second = pair().call(random_numbers)
        assert first == second

    def test_one_process_alone(self):
        assert shared_cluster(1, 3).call(place) == [(0, 1, 3, 3)]

    def test_functions_that_cannot_be_sent(self):
        with pytest.raises(ValueError, match=r"top level of a module.*lambda"):
            pair().call(lambda: 0)

    @pytest.mark.parametrize(
        ("arguments", "name"),
        [((0, 2), "processes"), ((2, 0), "devices"), ((2, "4"), "devices")],
    )
    def test_shapes_that_are_none(self, arguments, name):
        with pytest.raises(ValueError, match=f"`{name}` must be a positive"):
            cluster.Cluster(*arguments)


class TestFailures:
    @pytest.mark.parametrize("processes", [(1,), (0, 1)])
    def test_a_failure_is_shown_and_the_cluster_goes_on(self, processes):
        used = pair()
        with pytest.raises(cluster.ClusterError) as caught:
            used.call(fail, processes)
        error = caught.value
        assert error.process_id in processes
        assert f"process {error.process_id} of 2 failed in `fail`" in str(error)
        assert f"LookupError: nothing on {error.process_id}" in str(error)
        assert "the cluster can be used on" in str(error)
        assert error.traceback.count("File") == 1
        assert "test_cluster.py" in error.traceback
        assert sorted(error.failures) == list(processes)
        assert not error.closed
        assert not used.closed
        assert used.call(everyone, 1) == [[1, 1]] * 2

    @pytest.mark.extra
    def test_the_cluster_closes_when_others_hang(self):
        used = cluster.Cluster(2, 1, settle=1)
        start = time.monotonic()
        with pytest.raises(cluster.ClusterError) as caught:
            used.call(fail, [1], then=5)
        assert time.monotonic() - start < SECONDS
        assert caught.value.process_id == 1
        assert "LookupError: nothing on 1" in str(caught.value)
        assert "process 0 still ran `fail`" in str(caught.value)
        assert caught.value.closed
        assert used.closed
        assert all(popen.poll() is not None for popen in used.processes)
        with pytest.raises(RuntimeError, match=r"runs no calls.*process 0 st"):
            used.call(place)

    def test_a_killed_process_is_named_and_others_are_not_disturbed(self):
        pair().call(place)
        with cluster.Cluster(2, 1, settle=1) as other:
            assert other.call(everyone, 1) == [[1, 1]] * 2
            assert pair().call(everyone, 2) == [[2, 2]] * 2
            start = time.monotonic()
            with pytest.raises(cluster.ClusterError) as caught:
                other.call(stop, 1, kill_myself)
            assert time.monotonic() - start < SECONDS
            assert caught.value.process_id == 1
            message = str(caught.value)
            assert "process 1 of 2 was killed by SIGKILL (status 137)" in (
                message
            )
            assert message.endswith("\n  the last words")
            assert other.closed
        assert pair().call(everyone, 2) == [[2, 2]] * 2

    def test_a_kill_from_outside(self):
        used = cluster.Cluster(1, 1)
        threading.Timer(0.5, used.kill, [0]).start()
        with pytest.raises(cluster.ClusterError, match="process 0 of 1 was ki"):
            used.call(sleep, 300)

    @pytest.mark.extra
    def test_the_time_limit_of_a_call(self):
        with cluster.Cluster(2, 1, timeout=10) as used:
            start = time.monotonic()
            with pytest.raises(cluster.ClusterError) as caught:
                used.call(sleep, 300, process=1)
            assert time.monotonic() - start < SECONDS
            assert caught.value.process_id == 1
            message = str(caught.value)
            assert "`sleep` must end within 10 seconds" in message
            assert "no answer from process 1 of 2" in message
            assert "in sleep\n" in message
            assert used.closed

    def test_an_interrupt_ends_all(self, sigint):
        used = cluster.Cluster(1, 1)
        timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            used.call(sleep, 300)
        assert used.closed
        assert used.processes[0].poll() is not None


PARENT = """
import sys, threading, time
from keras_meshdist import cluster, coordination, hardware
from tests.test_cluster import sleep

def start():
    used = cluster.Cluster(1, 1)
    print(used.processes[0].pid, flush=True)
    used.call(sleep, 300)

thread = threading.Thread(target=start)
if sys.argv[1] == "main":
    start()
else:
    thread.start()
    thread.join()
"""


def alive(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "thread", ["main", pytest.param("another", marks=pytest.mark.extra)]
)
def test_no_process_outlives_its_parent(thread):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, thread],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        worker = int(parent.stdout.readline())
        assert alive(worker)
        parent.kill()
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(worker)


def test_a_reserved_port_is_given_to_nobody_else():
    held = [reserve_port() for _ in range(50)]
    try:
        assert len({port.getsockname() for port in held}) == 50
    finally:
        for port in held:
            port.close()


POD_TEST = """
import pytest
from keras_meshdist import cluster, coordination, hardware
from tests.clusters import configure, shared_cluster
from tests.test_cluster import everyone, fail, place

configure()

def test_results_of_all():
    used = shared_cluster(2, 2)
    assert used.call(place, offset=10) == [(10, 2, 4, 2), (11, 2, 4, 2)]
    assert used.call(everyone, 4) == [[4, 4]] * 2
    assert used.call_on(1, place) == (1, 2, 4, 2)
    assert used.processes == []

def test_failure_of_one():
    with pytest.raises(cluster.ClusterError, match="nothing on 1") as caught:
        shared_cluster(2, 2).call(fail, [1])
    assert caught.value.process_id == 1
    assert shared_cluster(2, 2).call(everyone, 4) == [[4, 4]] * 2

def test_kill():
    with pytest.raises(RuntimeError, match="cannot be killed from here"):
        shared_cluster(2, 2).kill(1)

def test_another_shape():
    shared_cluster(4, 1)
"""


@pytest.mark.extra
def test_the_same_tests_on_a_pod(tmp_path):
    (tmp_path / "test_pod.py").write_text(POD_TEST)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error\nmarkers = extra\n"
    )
    with reserve_port() as port:
        address = "127.0.0.1:{1}".format(*port.getsockname())
        hosts = []
        for process in range(2):
            env = {
                **os.environ,
                **cluster.environment(2),
                "PYTHONPATH": str(ROOT),
                "MESHDIST_CLUSTER": "external",
                "JAX_COORDINATOR_BIND_ADDRESS": address,
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": address,
                "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
                "KERAS_DISTRIBUTION_PROCESS_ID": str(process),
            }
            hosts.append(
                subprocess.Popen(
                    [sys.executable, "-m", "pytest", "-rs", "test_pod.py"],
                    env=env,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for host in hosts:
            output, _ = host.communicate(timeout=200)
            assert host.returncode == 0, output
            assert "3 passed, 1 skipped" in output
            assert (
                "processes=4, devices=1, while the pod has processes=2 with "
                "devices=2 each" in output
            )


def test_where_the_cluster_is(monkeypatch):
    monkeypatch.setenv("MESHDIST_CLUSTER", "somewhere")
    with pytest.raises(ValueError, match=r"'local' or 'external'.*'somewhere'"):
        cluster.Cluster(1, 1)
