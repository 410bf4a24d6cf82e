"""What started this process, as its environment variables tell."""

import dataclasses
import os
import sys
from collections.abc import Mapping

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
NUMBER = "KERAS_DISTRIBUTION_PROCESS_ID"

_SLURM_STEP = (
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


@dataclasses.dataclass(frozen=True)
class Environment:
    """One thing that may have started this process.

    Args:
        name: str, such as `"SLURM"`.
        address: str, where process 0 is, as `"host:port"`; `None` if the
            variables don't say so.
        processes: int, of how many processes the job is; `None` likewise.
        process: int, this process' number; `None` likewise.
        local_process: int, its number among those of the same host; `None`
            likewise.
        variables: dict with the variables that say so.
        problem: str, why the processes can't join by these alone, or `""`.
        remedy: str, what helps.
    """

    name: str
    address: str | None = None
    processes: int | None = None
    process: int | None = None
    local_process: int | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problem: str = ""
    remedy: str = ""


def found(variables: Mapping[str, str] | None = None) -> list[Environment]:
    """Names what started this process, the most explicit first.

    ```python
    [environment.name for environment in environments.found()]
    ```

    Args:
        variables: mapping of environment variables. Defaults to
            `os.environ`.

    Returns:
        List of `Environment`; empty if nothing says that there are several
        processes.

    Raises:
        ValueError: if a variable that should be a number isn't one.
    """
    variables = os.environ if variables is None else variables
    looks = (_keras, _open_mpi, _slurm, _pmi, _tpu, _kubernetes, _ray)
    candidates = [look(variables) for look in looks]
    return [environment for environment in candidates if environment]


def _keras(variables):
    seen = _seen(variables, ADDRESSES, COUNT, NUMBER)
    if not seen:
        return None
    return Environment(
        "KERAS_DISTRIBUTION_* variables",
        seen.get(ADDRESSES),
        _number(variables, COUNT),
        _number(variables, NUMBER),
        variables=seen,
    )


def _open_mpi(variables):
    names = [f"OMPI_COMM_WORLD_{x}" for x in ("SIZE", "RANK", "LOCAL_RANK")]
    seen = _seen(variables, *names, "OMPI_MCA_orte_hnp_uri")
    if not seen:
        return None
    says_where = "OMPI_MCA_orte_hnp_uri" in seen
    return Environment(
        "Open MPI",
        None,
        *(_number(variables, name) for name in names),
        variables=seen,
        problem=""
        if says_where
        else "Open MPI 5 and newer don't say where process 0 is",
        remedy=f"Set {ADDRESSES} to the host of process 0 and a free port, "
        f"such as mpirun -x {ADDRESSES}=host0:1234.",
    )


def _slurm(variables):
    if "SLURM_JOB_ID" not in variables:
        return None
    is_step = all(name in variables for name in _SLURM_STEP)
    # Outside of a step the others describe the script of the batch job.
    numbers = _SLURM_STEP[1:] if is_step else ("SLURM_NTASKS",)
    return Environment(
        "SLURM",
        None,
        *(_number(variables, name) for name in numbers),
        variables=_seen(variables, "SLURM_JOB_ID", *_SLURM_STEP),
        problem=""
        if is_step
        else "this process is in an allocation of SLURM, but in none of its "
        "steps, so that it has no number",
        remedy="Start the program with srun, one task for each process.",
    )


def _pmi(variables):
    if "OMPI_COMM_WORLD_SIZE" in variables or "SLURM_JOB_ID" in variables:
        return None
    seen = _seen(variables, "PMI_SIZE", "PMI_RANK")
    if len(seen) < 2:
        return None
    return Environment(
        "MPI (MPICH, Intel MPI)",
        None,
        _number(variables, "PMI_SIZE"),
        _number(variables, "PMI_RANK"),
        _number(variables, "MPI_LOCALRANKID"),
        seen,
        "this MPI doesn't say where process 0 is",
        f"Set {ADDRESSES} to the host of process 0 and a free port, such as "
        f"mpiexec -genv {ADDRESSES} host0:1234.",
    )


def _tpu(variables):
    hosts = variables.get("TPU_PROCESS_ADDRESSES") or variables.get(
        "TPU_WORKER_HOSTNAMES"
    )
    number = _number(variables, "TPU_WORKER_ID")
    if not hosts:
        return None
    in_slice = len(hosts.split(","))
    slices = _number(variables, "MEGASCALE_NUM_SLICES") or 1
    if number is not None:
        number += in_slice * (_number(variables, "MEGASCALE_SLICE_ID") or 0)
    return Environment(
        "TPU pod",
        None,
        in_slice * slices,
        number,
        variables=_seen(
            variables,
            "TPU_PROCESS_ADDRESSES",
            "TPU_WORKER_HOSTNAMES",
            "TPU_WORKER_ID",
            "MEGASCALE_COORDINATOR_ADDRESS",
            "MEGASCALE_NUM_SLICES",
            "MEGASCALE_SLICE_ID",
        ),
    )


def _kubernetes(variables):
    if "KUBERNETES_SERVICE_HOST" not in variables:
        return None
    number = _number(variables, "JOB_COMPLETION_INDEX")
    problem, remedy = "", ""
    if number is None:
        problem = "the pod has no number, for it is of no indexed Job"
        remedy = 'Set completionMode: "Indexed" in the specification of the Job'
        remedy += f", or {NUMBER} in each pod."
    return Environment(
        "Kubernetes",
        process=number,
        variables=_seen(
            variables, "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"
        ),
        problem=problem,
        remedy=remedy,
    )


def _ray(variables):
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return Environment(
        "Ray",
        variables=_seen(variables, "RAY_JOB_ID", "RAY_ADDRESS"),
        problem="Ray gives its workers no numbers and no address of process 0",
        remedy="Give `initialize` the three as arguments, or let Ray Train's "
        "JaxTrainer start the workers.",
    )


def _seen(variables, *names):
    return {name: variables[name] for name in names if variables.get(name)}


def _number(variables, name):
    text = variables.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {name} must be an integer. Received: "
            f"{name}={text!r}."
        ) from None
