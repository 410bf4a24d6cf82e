"""`initialize`: this process joins a job of several."""

import os
import time
import warnings

import jax

from keras_meshdist import coordination, environments, keras_hooks, rendezvous

_COLLECTIVES = "jax_cpu_collectives_implementation"
_PAST_PROXY = "no_grpc_proxy"
_VISIBLE = "jax_cuda_visible_devices"
# Seconds for what follows once all processes are there, at least.
_CONNECT = 60.0

_VALID = (
    "Valid: initialize('10.0.0.1:1234', num_processes=2, process_id=0), the "
    f"variables {environments.ADDRESSES}, {environments.COUNT} and "
    f"{environments.NUMBER}, or a start by srun, mpirun or on a TPU pod. For "
    "one process alone: num_processes=1."
)

# What is done instead, if processes have joined before their script began.
_instead = None


def initialize(
    job_addresses=None,
    num_processes=None,
    process_id=None,
    *,
    local_device_ids=None,
    timeout=300.0,
):
    """Joins the processes of a job, before anything that uses devices.

    `keras.distribution.initialize` with a time limit, local device ids, and an
    error that names the processes that didn't come, on those that did. All
    processes then draw the same random numbers: a seed that they were given
    is compared, and without one process 0 draws it for all.

    What isn't given as an argument is taken from the variables
    `KERAS_DISTRIBUTION_JOB_ADDRESSES`, `KERAS_DISTRIBUTION_NUM_PROCESSES` and
    `KERAS_DISTRIBUTION_PROCESS_ID`, then from what SLURM, Open MPI, a TPU pod
    or Kubernetes tell, as JAX finds it.

    Called again, it does nothing. It may also come after
    `jax.distributed.initialize`, then only to agree on the seed.

    Example:

    ```python
    kmd.initialize("10.0.0.1:1234", num_processes=2, process_id=0)
    ```

    Args:
        job_addresses: str, `"host:port"` of process 0, with a port that is
            free there; further addresses, separated by commas, are ignored.
        num_processes: int, number of processes. With 1 nothing is joined.
        process_id: int, the number of this process, from 0.
        local_device_ids: int, or sequence of int: which GPUs of its host this
            process uses. Defaults to the one with the number of this process
            on the host under SLURM and Open MPI, else to all.
        timeout: float, seconds until all processes must have come. Defaults
            to 300.

    Raises:
        ValueError: if an argument or variable is malformed or missing,
            processes don't agree on how many they are, or their seeds differ;
            or if this process takes part in another job already.
        TimeoutError: if some processes don't come in time.
        RuntimeError: if JAX has started before, or process 0 can't listen at
            its port.
    """
    if _instead is not None:
        _instead()
        return
    _check_timeout(timeout)
    limit = time.monotonic() + timeout
    ids = _device_ids(local_device_ids)
    given = {
        "job_addresses": job_addresses,
        "num_processes": num_processes,
        "process_id": process_id,
        "local_device_ids": ids,
    }
    if coordination.initialized():
        _check_running(given)
    else:
        address, count, process, local = _settings(given, timeout)
        if count == 1:
            return
        if coordination.backend_started():
            raise RuntimeError(
                "`initialize` must come before JAX's first computation, and "
                "before the first look at its devices. Received: JAX runs with "
                f"{jax.local_devices()} already. Call it at the top of the "
                "program, or restart the notebook's kernel."
            )
        rendezvous.meet(address, count, process, timeout)
        _bypass_proxies(address)
        coordination.join(address, count, process, ids or local, _CONNECT)
    if not coordination.backend_started():
        _use_cpu_collectives()
    # All are there now, which also one that came late may rely on.
    keras_hooks.agree_on_seed(max(_CONNECT, limit - time.monotonic()))


def _use_cpu_collectives():
    """Lets CPU devices of several processes work together.

    It's JAX's default since 0.5; before, each process is alone.
    """
    if jax.config.values.get(_COLLECTIVES) in (None, "none"):
        jax.config.update(_COLLECTIVES, "gloo")


def joined_by(tell):
    """Makes later calls of `initialize` do nothing but call a function."""
    global _instead
    _instead = tell


def _settings(given, timeout):
    """Returns the address, number of processes, own number and local ids."""
    address, count = given["job_addresses"], given["num_processes"]
    process, local = given["process_id"], None
    around = environments.found()
    for environment in around:
        address = address or environment.address
        count = environment.processes if count is None else count
        process = environment.process if process is None else process
        local = environment.local_process if local is None else local
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if count == 1 and process in (None, 0):
        return None, 1, 0, None
    known = (_first(address, count), count, process)
    problems = []
    if None in known:
        known, problems = _detected(*known, timeout)
    if None in known:
        names = ("job_addresses", "num_processes", "process_id")
        missing = [
            n
            for n, value in zip(names, known, strict=True)
            if not value and value != 0
        ]
        problems += [f"{e.problem}. {e.remedy}" for e in around if e.problem]
        seen = ", ".join(e.name for e in around) or "no launcher"
        raise ValueError(
            "A process must know where process 0 is, how many processes there "
            f"are, and its own number. Received: no {', '.join(missing)}; in "
            f"the environment: {seen}. {' '.join(problems)} {_VALID}"
        )
    address, count, process = known
    _check_counts(count, process)
    uses_variable = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    local_ids = None if local is None or uses_variable else [local]
    return _first(address, count), count, process, local_ids


def _detected(address, count, process, timeout):
    """What JAX finds in the environment, and why it doesn't."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            known = coordination.detect(address, count, process, timeout)
        except Exception as error:
            return (address, count, process), [
                f"JAX can't tell more: {type(error).__name__}: {error}."
            ]
    texts = [" ".join(str(warning.message).split()) for warning in caught]
    return known, [f"{text}." for text in texts]


def _bypass_proxies(address):
    """Lets gRPC reach process 0 as directly as `rendezvous` has.

    A proxy between the hosts would make JAX wait until it ends the process.
    """
    if not any(name.lower().endswith("_proxy") for name in os.environ):
        return
    host = address.rpartition(":")[0].strip("[]")
    variables = os.environ
    others = variables.get(_PAST_PROXY) or variables.get("no_proxy")
    variables[_PAST_PROXY] = ",".join(filter(None, [others, host]))


def _first(addresses, count):
    """The address of process 0."""
    if addresses is None:
        return None
    listed = addresses.split(",") if isinstance(addresses, str) else [""]
    if len(listed) > 1 and count not in (None, len(listed)):
        raise ValueError(
            "`job_addresses` must be the address of process 0, or of each "
            f"process. Received: {len(listed)} addresses, num_processes="
            f"{count}."
        )
    host, _, port = listed[0].strip().rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            "The address of process 0 must be a host and a port. Received: "
            f"job_addresses={addresses!r}. Valid: '10.0.0.1:1234'."
        )
    return listed[0].strip()


def _check_counts(count, process):
    are_integers = all(
        isinstance(value, int) and not isinstance(value, bool)
        for value in (count, process)
    )
    if not are_integers or not 0 <= process < count:
        raise ValueError(
            "`process_id` must be an integer from 0 to `num_processes` - 1. "
            f"Received: process_id={process!r}, num_processes={count!r}."
        )


def _check_timeout(timeout):
    is_number = isinstance(timeout, int | float) and timeout is not True
    if not is_number or not 0 < timeout < float("inf"):
        raise ValueError(
            "`timeout` must be a positive number of seconds. Received: "
            f"timeout={timeout!r}."
        )


def _device_ids(ids):
    if ids is None:
        return None
    listed = [ids] if isinstance(ids, int) else list(ids)
    valid = all(isinstance(i, int) and i is not True and i >= 0 for i in listed)
    if not listed or not valid or len(set(listed)) != len(listed):
        raise ValueError(
            "`local_device_ids` must be a device number, or different ones. "
            f"Received: local_device_ids={ids!r}. Valid: 0, or [0, 1]."
        )
    return listed


def _check_running(given):
    """Raises if arguments are those of another job than the running one."""
    visible = jax.config.values.get(_VISIBLE, "all")
    running = {
        "job_addresses": coordination.address(),
        "num_processes": coordination.process_count(),
        "process_id": coordination.process_id(),
        "local_device_ids": [int(i) for i in visible.split(",")]
        if visible.replace(",", "").isdecimal()
        else None,
    }
    given = {
        **given,
        "job_addresses": _first(given["job_addresses"], given["num_processes"]),
    }
    others = {
        name: value
        for name, value in given.items()
        if value is not None and value != running[name]
    }
    if others:
        said = ", ".join(f"{n}={value!r}" for n, value in others.items())
        runs = ", ".join(f"{n}={running[n]!r}" for n in others)
        raise ValueError(
            "A process joins one job, once. Received: "
            f"{said}, while it takes part in a job with {runs}. Leave the "
            "arguments out, or restart the program."
        )
