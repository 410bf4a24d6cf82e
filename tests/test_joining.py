"""Joining a job: what the environment says, who comes, and who doesn't."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from parameterized import parameterized

from keras_meshdist import joining, rendezvous
from keras_meshdist.cluster import ClusterError
from keras_meshdist.cluster.processes import reserve_port
from keras_meshdist.coordination import MissingProcessError
from tests import joined
from tests.clusters import local_only, shared_cluster

ROOT = Path(__file__).parents[1]
ADDRESS = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
NUMBER = "KERAS_DISTRIBUTION_PROCESS_ID"
SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "node[007-015],other3",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
}
OPEN_MPI_5 = {k: v for k, v in OPEN_MPI.items() if "uri" not in k}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
GIVEN = dict.fromkeys(
    ("job_addresses", "num_processes", "process_id", "local_device_ids")
)


@pytest.fixture
def address():
    with contextlib.closing(reserve_port()) as port:
        yield f"127.0.0.1:{port.getsockname()[1]}"


@pytest.fixture
def variables(monkeypatch):
    """An environment that nothing has started a process in."""
    for name in list(os.environ):
        if name.startswith(("KERAS_DIST", "SLURM", "OMPI", "PMI", "KUBERN")):
            monkeypatch.delenv(name)

    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def come(address, processes, timeout=30.0, count=None, late=()):
    """Lets threads meet as if they were processes; returns what each got."""
    results = {}

    def meet(key, process):
        time.sleep(0.5 if process in late else 0)
        try:
            rendezvous.meet(address, count or len(processes), process, timeout)
            results[key] = "met"
        except Exception as error:
            results[key] = error

    threads = [
        threading.Thread(target=meet, args=place)
        for place in enumerate(processes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[key] for key in range(len(processes))]


@pytest.mark.parametrize("late", [(), (0,), (1, 2)])
def test_all_come(address, late):
    assert come(address, [0, 1, 2], late=late) == ["met"] * 3
    # The port is free again, for JAX's service.
    assert come(address, [0, 1]) == ["met"] * 2


def test_the_missing_are_named_on_all_that_came(address):
    start = time.monotonic()
    for error in come(address, [0, 3, 1], timeout=0.9, count=5, late=[3]):
        assert isinstance(error, MissingProcessError)
        assert error.missing == (2, 4)
        assert "processes 0, 1, 3 came, processes 2, 4 of 5 did" in str(error)
        assert "within the time limit (0.9 seconds" in str(error)
        assert address in str(error)
    assert time.monotonic() - start < 10


def test_process_0_is_missing(address):
    start = time.monotonic()
    for process, error in enumerate(come(address, [1, 2], timeout=0.5), 1):
        assert isinstance(error, TimeoutError)
        assert error.missing == (0,)
        assert f"nothing from it at {address} (no connection" in str(error)
        assert f"This is process {process} of 2" in str(error)
    assert time.monotonic() - start < 10


def test_the_name_of_process_0_leads_nowhere():
    (error,) = come("no-such-host.invalid:1234", [1], timeout=0.3, count=2)
    assert "name can't be resolved" in str(error)


def test_processes_that_disagree_on_how_many_they_are(address):
    def say(count, process):
        with pytest.raises(ValueError, match="agree on how many") as caught:
            rendezvous.meet(address, count, process, 30.0)
        said.append(str(caught.value))

    said = []
    threads = [
        threading.Thread(target=say, args=place) for place in [(2, 0), (3, 1)]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(said) == 2
    for text in said:
        assert "process 0 says 2, process 1 says 3" in text


def test_two_processes_with_one_number(address):
    for error in come(address, [0, 1, 1], count=3):
        assert isinstance(error, ValueError)
        assert "Received: process 1 is number" in str(error)
        assert str(error).count(f"on host {socket.gethostname()}") == 2


def test_strangers_at_the_port_do_no_harm(address):
    host, port = address.split(":")
    results = []
    meeting = threading.Thread(
        target=lambda: results.extend(come(address, [0, 1], late=[1]))
    )
    meeting.start()
    strangers = []
    for greeting in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 9000,
        b"keras_meshdist 1 {}\n",
    ):
        for _ in range(100):
            with contextlib.suppress(OSError):
                strangers.append(socket.create_connection((host, port)))
                strangers[-1].sendall(greeting)
                break
            time.sleep(0.05)
    meeting.join(60)
    assert len(strangers) == 4
    for stranger in strangers:
        stranger.close()
    assert results == ["met", "met"]


@pytest.mark.parametrize("answer", [b"", b"\x00\x00\x12\x04\n", b"{}\n"])
def test_another_program_answers(answer):
    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (error,) = come(address, [1], timeout=0.2, count=2)
        server.shutdown(socket.SHUT_RDWR)
    assert error.missing == (0,)
    assert "what answers there isn't process 0 in `initialize`" in str(error)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        (error,) = come(taken, [0], count=2)
    assert isinstance(error, RuntimeError)
    assert "a program listens already" in str(error)


@parameterized.expand(
    [
        # The port is JAX's: 61440 + the job's number modulo 4096.
        ("slurm", SLURM, ("node007:61443", 6, 4, [1])),
        ("open_mpi", OPEN_MPI, ("10.96.0.1:61442", 6, 5, [2])),
        (
            "open_mpi_5",
            {**OPEN_MPI_5, ADDRESS: "host0:1234"},
            ("host0:1234", 6, 5, [2]),
        ),
        (
            "kubernetes",
            {
                **KUBERNETES,
                "JOB_COMPLETION_INDEX": "1",
                ADDRESS: "train-0.train:1234",
                COUNT: "2",
            },
            ("train-0.train:1234", 2, 1, None),
        ),
        (
            "variables_before_slurm",
            {**SLURM, ADDRESS: "a:1,b:2,c:3", COUNT: "3", NUMBER: "0"},
            ("a:1", 3, 0, [1]),
        ),
        (
            "mpich",
            {"PMI_SIZE": "3", "PMI_RANK": "2", ADDRESS: "[fe80::1]:99"},
            ("[fe80::1]:99", 3, 2, None),
        ),
        ("one", {COUNT: "1"}, (None, 1, 0, None)),
    ]
)
def test_what_the_environment_says(name, said, expected):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for variable in (ADDRESS, COUNT, NUMBER):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in said.items():
            monkeypatch.setenv(variable, value)
        assert joining._settings(GIVEN, 10.0) == expected


def test_arguments_come_before_variables(variables):
    variables({ADDRESS: "a:1", COUNT: "3", NUMBER: "2", **SLURM})
    given = {**GIVEN, "job_addresses": "b:2", "process_id": 0}
    assert joining._settings(given, 10.0) == ("b:2", 3, 0, [1])


@pytest.mark.parametrize(
    ("said", "messages"),
    [
        ({}, ["no job_addresses, num_processes, process_id", "no launcher"]),
        ({COUNT: "two"}, [f"{COUNT} must be an integer", "'two'"]),
        ({ADDRESS: "a:1", COUNT: "2"}, ["Received: no process_id;"]),
        ({ADDRESS: "a", COUNT: "2", NUMBER: "0"}, ["'a'", "'10.0.0.1:1234'"]),
        ({ADDRESS: "a:1", COUNT: "2", NUMBER: "2"}, ["process_id=2, num_pro"]),
        ({ADDRESS: "a:1,b:1", COUNT: "3"}, ["2 addresses, num_processes=3"]),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
            ["in the environment: SLURM", "in none of its steps", "with srun"],
        ),
        (OPEN_MPI_5, ["Open MPI", "mpirun -x", "no job_addresses"]),
        (
            KUBERNETES,
            ["environment: Kubernetes", "completionMode", "kubernetes"],
        ),
    ],
)
def test_what_is_missing_or_malformed(variables, said, messages):
    variables(said)
    with pytest.raises(ValueError, match="Received") as caught:
        joining._settings(GIVEN, 10.0)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout": 0}, "`timeout` must be a positive number"),
        ({"timeout": True}, "Received: timeout=True"),
        ({"local_device_ids": []}, r"local_device_ids=\[\]"),
        ({"local_device_ids": [0, 0]}, "or different ones"),
        ({"local_device_ids": -1}, "Valid: 0, or"),
        ({"job_addresses": 8, "num_processes": 2}, "a host and a port"),
    ],
)
@local_only
def test_arguments_that_are_wrong(variables, arguments, message):
    with pytest.raises(ValueError, match=message):
        joining.initialize(**arguments)


@local_only
def test_one_process_joins_nothing(variables):
    joining.initialize(num_processes=1)
    assert jax.device_count() == 8
    with pytest.raises(RuntimeError, match=r"must come before JAX's first"):
        joining.initialize("127.0.0.1:1234", 2, 0)


def test_a_second_call_agrees_on_the_seed():
    cluster = shared_cluster(2, 4)
    first, second = cluster.call(joined.initialize_again)
    assert first["drawn"] == second["drawn"]
    again, _ = cluster.call(joined.initialize_again)
    assert again["drawn"] != first["drawn"]
    kept = cluster.call(joined.initialize_again, seeds=(5, 5))
    assert kept == cluster.call(joined.initialize_again, seeds=(5, 5))


@local_only
def test_a_second_call_with_other_arguments():
    cluster = shared_cluster(2, 4)
    for error in cluster.call(joined.initialize_otherwise):
        assert "joins one job, once. Received: num_processes=7" in error
        assert "local_device_ids=[3]" in error
        assert "takes part in a job with num_processes=2, local" in error


def test_different_seeds_are_an_error():
    pytest.importorskip("keras", minversion="3.9")
    with pytest.raises(ClusterError, match=r"same random seed.*\[5, 6\]"):
        shared_cluster(2, 4).call(joined.initialize_again, seeds=(5, 6))


def start(variables, arguments=(), module="tests.joined"):
    """Starts a process as a launcher would; returns it."""
    env = {
        **{k: v for k, v in os.environ.items() if "KERAS_DIST" not in k},
        "PYTHONPATH": str(ROOT),
        "KERAS_BACKEND": "jax",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "NPROC": "16",
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcomes(processes):
    """Waits for processes; returns what each printed last, as JSON."""
    answers = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise
        assert out, err
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def variables_on_page():
    """What the manifest on the page for Kubernetes sets in each pod."""
    yaml = pytest.importorskip("yaml")
    page = (ROOT / "docs" / "multi-host.md").read_text()
    manifest = yaml.safe_load(
        re.search(r"^```yaml\n(.*?)^```$", page, re.M | re.S)[1]
    )
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    variables = {v["name"]: v["value"] for v in container["env"]}
    assert variables[COUNT] == str(spec["parallelism"])
    assert variables[ADDRESS] == (
        f"{manifest['metadata']['name']}-{job['name']}-0-0."
        f"{manifest['metadata']['name']}:1234"
    )
    return variables


def free_port():
    with contextlib.closing(reserve_port()) as port:
        return port.getsockname()[1]


@local_only
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("slurm", marks=pytest.mark.extra),
        pytest.param("kubernetes", marks=pytest.mark.extra),
        pytest.param("open mpi", marks=pytest.mark.full),
    ],
)
def test_processes_with_the_variables_of_a_launcher(launcher):
    port = str(free_port())

    def said(process):
        if launcher == "slurm":
            return {
                **SLURM,
                "SLURM_STEP_NODELIST": "localhost,other",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(process),
                "SLURM_LOCALID": str(process),
                "JAX_COORDINATOR_PORT": port,
            }
        if launcher == "kubernetes":
            on_page = variables_on_page()
            host = on_page[ADDRESS].partition(":")[0]
            assert host == "train-workers-0-0.train"
            return {
                **KUBERNETES,
                **on_page,
                "JOB_COMPLETION_INDEX": str(process),
                ADDRESS: f"localhost:{port}",
            }
        return {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(process),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(process),
            ADDRESS: f"localhost:{port}",
        }

    first, second = outcomes([start(said(i)) for i in range(2)])
    assert (first["process"], second["process"]) == (0, 1)
    for seen in (first, second):
        assert (seen["processes"], seen["devices"]) == (2, 4)
        expected = joined.train(mesh=False)["losses"]
        for mine, other in zip(seen["losses"], expected, strict=True):
            assert abs(mine - other) < 1e-5 * abs(other)
    for name in ("drawn", "losses", "weights"):
        assert first[name] == second[name]


@local_only
@pytest.mark.full
def test_a_process_that_never_starts_is_named():
    port = free_port()
    arguments = [(f"127.0.0.1:{port}", 3, i, 12) for i in (0, 2)]
    for answer in outcomes([start({}, args) for args in arguments]):
        assert answer["error"] == "MissingProcessError"
        assert "process 1 of 3 did not" in answer["message"]
        assert answer["seconds"] < 40
