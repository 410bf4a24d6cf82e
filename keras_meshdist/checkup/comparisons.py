"""Comparisons of what the processes see: code, mesh, seeds, clocks."""

from keras_meshdist.checkup.report import Check, Finding
from keras_meshdist.verdicts import grouped

# Seconds by which clocks may differ.
_CLOCKS = 1.0


def code(everyone):
    """Whether all processes run the same code on the same packages."""
    found = []
    for package in _names(everyone, "versions"):
        texts = _texts(everyone, "versions", package)
        found += _differing(
            f"{package} has different versions",
            texts,
            "Install the same versions everywhere, for instance by one "
            "container image or `pip install -r` of one file.",
        )
    for name in _names(everyone, "code"):
        found += _differing(
            f"the code of {name} differs",
            _texts(everyone, "code", name),
            "Copy the same files to every host, and restart all processes.",
        )
    return _compared("code", everyone, "the same on all processes", found)


def settings(everyone):
    """Whether settings that change numbers are the same everywhere."""
    found = []
    for name in _names(everyone, "settings"):
        found += _differing(
            f"{name} is set differently",
            _texts(everyone, "settings", name),
            "Set it alike on all processes: they compile one program together.",
        )
    return _compared("settings", everyone, "the same on all processes", found)


def mesh(everyone):
    """Whether all processes see the same devices in the same mesh."""
    if any("devices" not in seen for seen in everyone):
        return Check("mesh", "devices weren't seen", skipped=True)
    found = _differing(
        "processes see different devices",
        [_listed(seen["devices"]) for seen in everyone],
        "Join by `kmd.initialize()` on all processes before anything that "
        "uses devices.",
    )
    meshes = [seen["mesh"] for seen in everyone]
    shown = [_mesh(mesh) for mesh in meshes]
    found += _differing(
        "processes have different distributions",
        shown,
        "Construct the same mesh and distribution on every process; "
        "`kmd.make_mesh` takes the devices in the same order everywhere.",
    )
    if not found and meshes[0]:
        found += _differing(
            "the devices of the mesh have another order",
            [_listed(mesh["devices"]) for mesh in meshes],
            "Give `kmd.make_mesh` the devices in the same order everywhere.",
        )
    if meshes[0] and not meshes[0]["ours"]:
        found.append(
            Finding(
                f"the current distribution is {meshes[0]['distribution']}, "
                "which is right on some meshes only",
                "Take `kmd.ModelParallel` or `kmd.DataParallel`.",
            )
        )
    count = len(everyone[0]["devices"])
    return Check("mesh", f"{_devices(count)}, {shown[0]}", tuple(found))


def seeds(everyone):
    """Whether all processes draw the same random numbers."""
    numbers = [seen.get("seed") for seen in everyone]
    if set(numbers) == {None}:
        return Check("seeds", "none set; a distribution agrees on one")
    found = _differing(
        "processes have different random seeds",
        [str(number) for number in numbers],
        "Call `keras.utils.set_random_seed` with one number on every "
        "process, or on none.",
    )
    return _compared("seeds", everyone, f"{numbers[0]}", found)


def hosts(everyone):
    """On which hosts the processes are, and whether names lead to them."""
    names = [seen.get("host", "unknown") for seen in everyone]
    found = [
        Finding(
            f"the name of host {seen['host']} leads to {seen['ip']}, where "
            "no other host finds it",
            "Correct /etc/hosts or the name service, so that it leads to the "
            "host's address in the network.",
        )
        for seen in everyone
        if len(set(names)) > 1
        and str(seen.get("ip")).startswith("127.")
        and seen.get("platform") == "cpu"
    ]
    if len(set(names)) == 1:
        return Check("hosts", names[0], tuple(found))
    return Check("hosts", grouped(names), tuple(found))


def clocks(everyone):
    """Whether the hosts' clocks agree."""
    if len(everyone) == 1:
        return Check("clocks", "one process", skipped=True)
    if any("clock" not in seen for seen in everyone):
        return Check("clocks", "processes didn't meet", skipped=True)
    # All met between the two times of each, so that times without a moment
    # in common are of clocks that differ, by what lies between at least.
    apart = max(seen["clock"][0] for seen in everyone) - min(
        seen["clock"][1] for seen in everyone
    )
    message = f"differ by less than {_CLOCKS:g} s"
    if apart <= _CLOCKS:
        return Check("clocks", message)
    late = min(everyone, key=lambda seen: seen["clock"][1])
    finding = Finding(
        f"the clocks of hosts differ by {apart:.1f} s; that of process "
        f"{late['process']} on {late['host']} is behind",
        "Set the clocks by a time service, such as chrony.",
    )
    return Check("clocks", f"differ by {apart:.1f} s", (finding,))


def collective(everyone):
    """Whether devices can add up a number together."""
    errors = {
        seen["process"]: seen["error"] for seen in everyone if "error" in seen
    }
    if errors:
        finding = Finding(
            "devices must be able to work together, and didn't "
            f"({grouped(list(errors.values()), list(errors))})",
            "If devices weren't there in time, look at the network between "
            "the hosts: ports that a firewall closes, or an interface that "
            "JAX takes and that doesn't lead to the others "
            "(NCCL_SOCKET_IFNAME on GPUs). On virtual CPU devices see "
            "`threads`.",
        )
        return Check("collective", "failed", (finding,))
    if any("sums" not in seen for seen in everyone):
        return Check("collective", "processes didn't meet", skipped=True)
    count = sum(len(seen["local_devices"]) for seen in everyone)
    wanted = count * (count + 1) // 2
    wrong = {
        seen["process"]: str(seen["sums"])
        for seen in everyone
        if set(seen["sums"]) != {wanted}
    }
    message = f"a sum over {_devices(count)} is right"
    if not wrong:
        seconds = max(seen["collective_seconds"] for seen in everyone)
        return Check("collective", f"{message}, {seconds:.2f} s")
    finding = Finding(
        f"the sum of 1 to {count} over all devices must be {wanted}; it is "
        f"on {grouped(list(wrong.values()), list(wrong))}",
        "Some devices were left out or counted twice: join by "
        "`kmd.initialize()` first, and update the drivers.",
    )
    return Check("collective", "wrong", (finding,))


def _names(everyone, key):
    return sorted({name for seen in everyone for name in seen.get(key, {})})


def _texts(everyone, key, name):
    return [str(seen.get(key, {}).get(name)) for seen in everyone]


def _differing(what, texts, remedy):
    if len(set(texts)) < 2:
        return []
    return [Finding(f"{what} ({grouped(texts)})", remedy)]


def _compared(name, everyone, message, found):
    if found:
        return Check(name, "not the same on all processes", tuple(found))
    return Check(name, "one process" if len(everyone) == 1 else message)


def _devices(count):
    return "1 device" if count == 1 else f"{count} devices"


def _listed(devices):
    return ", ".join(f"{kind}:{number}" for _, kind, number in devices)


def _mesh(mesh):
    if not mesh:
        return "no distribution is set"
    axes = zip(mesh["axes"], mesh["shape"], strict=True)
    sizes = ", ".join(f"{name}={size}" for name, size in axes)
    return f"{mesh['distribution']} on ({sizes}), rows over {mesh['batch']}"
