"""TPU chips and GPUs of this computer, found without starting JAX."""

import glob
import importlib.util
import os
import re
import shutil
import subprocess


def tpu_chips() -> int:
    """Returns the number of TPU chips that this computer shows as files.

    ```python
    tpu_chips()  # 4 on a host of a pod
    ```

    Returns:
        Integer, `0` if there are none.
    """
    # Older TPUs have a driver of their own, newer ones that of Linux, by which
    # a virtual machine passes other devices through, too.
    chips = glob.glob("/dev/accel[0-9]*")
    if not chips and _is_meant_for_tpu():
        chips = glob.glob("/dev/vfio/[0-9]*")
    return len(chips)


def gpus() -> int:
    """Returns the number of NVIDIA GPUs, whether a program may use them or not.

    ```python
    gpus()  # 8
    ```

    Returns:
        Integer, by NVIDIA's own command, or by files if it isn't installed.
    """
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=False
        ).stdout
        return sum(line.startswith("GPU ") for line in listed.splitlines())
    files = glob.glob("/dev/nvidia[0-9]*")
    return sum(bool(re.fullmatch(r"/dev/nvidia\d+", path)) for path in files)


def _is_meant_for_tpu():
    named = any(name.startswith("TPU_") for name in os.environ)
    return named or importlib.util.find_spec("libtpu") is not None
