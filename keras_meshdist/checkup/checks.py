"""Checks of what processes see, each by itself: versions, hooks, devices."""

import collections
import importlib.metadata

import jax
import keras
from packaging.requirements import Requirement
from packaging.version import Version

from keras_meshdist import coordination, environments, keras_hooks
from keras_meshdist.checkup import facts
from keras_meshdist.checkup.report import Check, Finding
from keras_meshdist.verdicts import grouped

# Without them nobody asked for what needs them.
_EXTRAS = ("", "tpu", "cuda12", "cuda13", "cuda12-local", "cuda13-local")
_STARVED_FROM = Version("0.5")


def launcher(everyone):
    """What started the processes."""
    try:
        around = environments.found()
    except ValueError as error:
        finding = Finding(str(error), "Correct or unset the variable.")
        return Check("launcher", "not known", (finding,))
    message = ", ".join(e.name for e in around) or "none: one process by itself"
    counts = {e.name: e.processes for e in around if e.processes is not None}
    if len(set(counts.values())) < 2:
        return Check("launcher", message)
    said = ", ".join(f"{name}: {count}" for name, count in counts.items())
    return Check(
        "launcher",
        message,
        (
            Finding(
                f"what started the processes differs in their number ({said})",
                "The first one counts. Unset the variables of the others, or "
                "start as many processes as they say.",
            ),
        ),
    )


def processes(everyone, expected, findings):
    """How many processes there are, and should be."""
    count = coordination.process_count()
    expected = count if expected is None else expected
    found = list(findings)
    if not found and count != expected:
        found.append(
            Finding(
                f"{expected} processes were started, and {count} have joined",
                "Let every process call `kmd.initialize()` first of all.",
            )
        )
    alone = [s for s in everyone if s.get("jax_processes", count) != count]
    if alone:
        found.append(
            Finding(
                f"the processes have joined, but the devices of each work "
                f"alone: JAX counts {alone[0]['jax_processes']} of {count}",
                "Join by `kmd.initialize()`, which turns on collectives for "
                "CPU devices, before anything that uses devices.",
            )
        )
    return Check("processes", f"{count} of {expected}", tuple(found))


def versions(everyone):
    """Whether the packages fit each other."""
    python = everyone[0].get("versions", {}).get("python")
    message = (
        f"Python {python}, Keras {keras.__version__}, JAX {jax.__version__}"
    )
    found = [
        Finding(
            f"{package} {own} needs {needed}, and there is {there}",
            f"Run: pip install -U '{needed}', or take another {package}.",
        )
        for package, own, needed, there in _unmet(facts.versions())
    ]
    return Check("versions", message, tuple(found))


def _unmet(installed):
    """What a package asks of another one that has another version."""
    unmet = {}
    for package, own in installed.items():
        for text in importlib.metadata.requires(package) or ():
            requirement = Requirement(text)
            other = requirement.name.lower().replace("_", "-")
            marker = requirement.marker
            applies = marker is None or any(
                marker.evaluate({"extra": extra}) for extra in _EXTRAS
            )
            there = installed.get(other)
            if not there or not applies:
                continue
            if requirement.specifier.contains(there, prereleases=True):
                continue
            needed = f"{requirement.name}{requirement.specifier}"
            unmet[package, other] = (package, own, needed, there)
    return list(unmet.values())


def hooks(everyone):
    """Which hooks fit, and whether they are installed."""
    changed = keras_hooks.misfits()
    found = [
        Finding(
            f"a hook doesn't fit Keras {keras.__version__}: {sentence}",
            "Install an older Keras or a newer keras_meshdist.",
        )
        for sentence in changed
    ]
    without = [
        seen["process"] for seen in everyone if not seen.get("hooks", True)
    ]
    if without:
        found.append(
            Finding(
                f"no hooks are installed on {coordination.named(without)}",
                "Call `kmd.keras_hooks.install()`, or leave out the call of "
                "`remove()`.",
            )
        )
    count = len(everyone[0].get("hooks", ()))
    return Check("hooks", f"{count} installed, all fit", tuple(found))


def devices(everyone):
    """Which devices there are, and which aren't used."""
    if any("local_devices" not in seen for seen in everyone):
        reason = everyone[0].get("error", "other processes are missing")
        return Check("devices", reason, skipped=True)
    counts = [
        f"{len(seen['local_devices'])} on {seen['platform']}, kind "
        f"{', '.join(seen['device_kinds'])}"
        for seen in everyone
    ]
    found = []
    if len(set(counts)) > 1:
        found.append(
            Finding(
                f"processes have different devices ({grouped(counts)})",
                "Look for a device that failed, or that another program "
                "holds; CUDA_VISIBLE_DEVICES and `local_device_ids` choose.",
            )
        )
    by_host = collections.defaultdict(list)
    for seen in everyone:
        by_host[seen["host"]].append(seen)
    for host, there in by_host.items():
        found += _shared(host, there) + _idle(host, there)
    return Check("devices", f"in each process {counts[0]}", tuple(found))


def _shared(host, there):
    holders = collections.defaultdict(list)
    for seen in there:
        for gpu in seen["gpus"]:
            holders[gpu].append(seen["process"])
    return [
        Finding(
            f"{coordination.named(who)} on {host} use the same GPU {gpu}",
            "Give each process its own: `local_device_ids` of `initialize`, "
            "or CUDA_VISIBLE_DEVICES.",
        )
        for gpu, who in holders.items()
        if len(who) > 1
    ]


def _idle(host, there):
    chosen = there[0]["chosen"]
    shown = there[0]["accelerators"]
    platforms = chosen["JAX_PLATFORMS"] or ""
    if chosen["CUDA_VISIBLE_DEVICES"] is not None:
        return []
    if there[0]["platform"] == "cpu":
        kinds = [kind for kind, count in shown.items() if count]
        if not kinds or "cpu" in platforms.split(","):
            return []
        return [
            Finding(
                f"{host} shows a {kinds[0].upper()}, and JAX uses CPU devices",
                f"Install the JAX for it: pip install 'jax[{_extra(kinds[0])}]'"
                ". If CPU devices are meant, set JAX_PLATFORMS=cpu.",
            )
        ]
    used = {gpu for seen in there for gpu in seen["gpus"]}
    if not used or len(used) >= shown["gpu"]:
        return []
    return [
        Finding(
            f"{host} shows {shown['gpu']} GPUs, and {len(used)} are used",
            "Start a process for each GPU of the host, or give one process "
            "several: `local_device_ids` of `initialize`.",
        )
    ]


def _extra(kind):
    return "tpu" if kind == "tpu" else "cuda12"


def threads(everyone):
    """Whether XLA has threads enough for virtual CPU devices."""
    shown = [seen for seen in everyone if "threads" in seen]
    virtual = [
        seen
        for seen in shown
        if seen["platform"] == "cpu" and len(seen["local_devices"]) > 1
    ]
    if not virtual:
        why = "no virtual CPU devices" if shown else "devices weren't seen"
        return Check("threads", why, skipped=True)
    starved = [
        seen
        for seen in virtual
        if seen["threads"] < 2 * len(seen["local_devices"])
        and Version(jax.__version__) >= _STARVED_FROM
    ]
    seen = (starved or virtual)[0]
    count = len(seen["local_devices"])
    message = f"{seen['threads']} for {count} virtual CPU devices"
    if not starved:
        return Check("threads", message)
    who = coordination.named([seen["process"] for seen in starved])
    return Check(
        "threads",
        message,
        (
            Finding(
                f"XLA has {seen['threads']} threads for {count} virtual CPU "
                f"devices on {who}: the devices of a collective can wait for "
                "each other for ever",
                f"Set NPROC={max(16, 2 * count)} before JAX starts, or call "
                "`kmd.cluster.use_virtual_devices` first of all.",
            ),
        ),
    )
