"""`doctor`: what it finds, and that it finds nothing where all is well."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import keras
import pytest
from packaging.version import Version
from parameterized import parameterized

import keras_meshdist as kmd
from keras_meshdist import cli, cluster, keras_hooks
from keras_meshdist.checkup import checks, comparisons, facts, together
from tests import joined
from tests.clusters import local_only, shared_cluster

ROOT = Path(__file__).parents[1]
CHECKS = [
    "launcher",
    "processes",
    "versions",
    "hooks",
    "devices",
    "threads",
    "code",
    "settings",
    "mesh",
    "seeds",
    "hosts",
    "clocks",
    "collective",
]

# What two GPU processes on one host see, one GPU each.
GPU = {
    "process": 0,
    "host": "a",
    "ip": "10.0.0.1",
    "versions": {"python": "3.11.7", "jax": "0.10.2"},
    "code": {"keras_meshdist": "1f", "program": "2e"},
    "settings": {"floatx": "float32", "XLA_FLAGS": None},
    "hooks": ["keras.src.x"],
    "seed": 7,
    "platform": "gpu",
    "jax_processes": 2,
    "local_devices": [0],
    "device_kinds": ["NVIDIA H200"],
    "devices": [[0, "gpu", 0], [1, "gpu", 1]],
    "mesh": None,
    "threads": 16,
    "accelerators": {"gpu": 2, "tpu": 0},
    "gpus": ["0"],
    "chosen": {
        "JAX_PLATFORMS": None,
        "CUDA_VISIBLE_DEVICES": None,
        "NPROC": None,
    },
    "sums": [3],
    "collective_seconds": 0.1,
    "clock": [1000.0, 1000.1],
}


def pair(**second):
    """What both processes see, the second one partly something else."""
    other = {**copy.deepcopy(GPU), "process": 1, "gpus": ["1"], **second}
    return [copy.deepcopy(GPU), other]


def named(report, name):
    return next(c for c in report["checks"] if c["name"] == name)


def found(report):
    return [c["name"] for c in report["checks"] if c["status"] == "finding"]


@local_only
def test_all_is_well_on_one_process(capsys):
    report = kmd.doctor()
    assert report.ok
    assert report.findings == []
    assert repr(report) == "<Checkup: 0 findings>"
    assert [check.name for check in report.checks] == CHECKS
    assert report.check("processes").message == "1 of 1"
    assert "a sum over 8 devices" in report.check("collective").message
    assert report.check("clocks").status == "skipped"
    out = capsys.readouterr().out
    assert out.endswith("All is well.\n")
    assert "ok hooks" in out


@local_only
def test_the_command(capsys, tmp_path):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == 1
    assert report["ok"] is True
    assert report["process"] == 0
    assert report["expected_processes"] == 1
    assert [check["name"] for check in report["checks"]] == CHECKS
    (process,) = report["processes"]
    assert len(process["devices"]) == 8
    assert process["sums"] == [36] * 8
    path = tmp_path / "report.json"
    assert cli.main(["doctor", "--json", str(path)]) == 0
    assert "All is well." in capsys.readouterr().out
    assert json.loads(path.read_text())["ok"] is True


@local_only
def test_findings_are_the_exit_status(capsys, monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    starves = Version(jax.__version__) >= Version("0.5")
    assert cli.main(["doctor"]) == (1 if starves else 0)
    out = capsys.readouterr().out
    if starves:
        assert "!! threads    4 for 8 virtual CPU devices" in out
        assert "remedy: Set NPROC=16 before JAX starts" in out
        assert out.endswith("Findings: 1.\n")


@pytest.mark.parametrize("wrong", [["--timeout", "0"], ["--now"], ["x"]])
def test_misuse(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", *wrong])
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@local_only
def test_hooks_that_were_removed():
    keras_hooks.remove()
    try:
        report = kmd.doctor(verbose=False)
    finally:
        keras_hooks.install()
    assert [check.name for check in report.checks if check.findings] == [
        "hooks"
    ]
    assert "keras_hooks.install()" in report.findings[0].remedy


@local_only
def test_a_hook_that_does_not_fit(monkeypatch):
    place, name, _, _ = keras_hooks.HOOKS[-1]
    monkeypatch.setattr(place, name, lambda self, other: None)
    check = checks.hooks([GPU])
    assert name in check.findings[0].message
    assert "an older Keras" in check.findings[0].remedy


@local_only
def test_a_distribution_of_plain_keras():
    mesh = kmd.make_mesh({"batch": 8})
    plain = keras.distribution.DataParallel(device_mesh=mesh)
    with plain.scope():
        report = kmd.doctor(verbose=False)
    (finding,) = report.findings
    assert "DataParallel, which is right on some meshes" in finding.message
    with kmd.DataParallel(mesh).scope():
        report = kmd.doctor(verbose=False)
    assert report.ok
    assert "on (batch=8), rows over batch" in report.check("mesh").message


@local_only
def test_a_variable_that_is_no_number(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "many")
    report = kmd.doctor(verbose=False)
    assert report.check("launcher").findings
    assert "SLURM_NTASKS='many'" in report.findings[0].message


@local_only
def test_processes_that_slurm_was_to_start(monkeypatch):
    for name in ("SLURM_STEP_NODELIST", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    report = kmd.doctor(verbose=False)
    check = report.check("processes")
    assert check.message == "1 of 4"
    assert "Start the program with srun" in check.findings[0].message
    assert report.check("launcher").message == "SLURM"


def test_all_is_well_on_two_processes():
    both = shared_cluster(2, 4).call(joined.examine)
    for process, report in enumerate(both):
        assert report.pop("process") == process
        assert [check["name"] for check in report["checks"]] == CHECKS
        assert found(report) == []
        assert named(report, "processes")["message"] == "2 of 2"
        assert named(report, "clocks")["status"] == "ok"
        assert [len(seen["devices"]) for seen in report["processes"]] == [8, 8]
        assert [set(s["sums"]) for s in report["processes"]] == [{36}, {36}]
    assert both[0] == both[1]


def test_what_differs_between_processes():
    for report in shared_cluster(2, 4).call(
        joined.examine, seeds=(1, 2), floatx=("float32", "float64")
    ):
        assert set(found(report)) <= {"seeds", "settings"}
        (finding,) = named(report, "settings")["findings"]
        assert "process 0: float32; process 1: float64" in finding["message"]
        if "seeds" in found(report):
            (finding,) = named(report, "seeds")["findings"]
            assert "(process 0: 1; process 1: 2)" in finding["message"]
            assert "set_random_seed" in finding["remedy"]
        else:  # Keras before 3.9 doesn't tell its seed.
            assert "none set" in named(report, "seeds")["message"]


@local_only
def test_a_process_that_does_not_call_it():
    report, _ = shared_cluster(2, 4).call(joined.examine, only=0, timeout=1.0)
    assert found(report) == ["processes"]
    (finding,) = named(report, "processes")["findings"]
    assert "nothing from process 1" in finding["message"]
    assert named(report, "collective")["status"] == "skipped"


def test_two_processes_with_a_gpu_each():
    for name in ("devices", "threads", "hooks"):
        assert not getattr(checks, name)(pair()).findings
    for name in CHECKS[6:]:
        check = getattr(comparisons, name)(pair())
        assert check.status == "ok", check


@parameterized.expand(
    [
        ("devices", {"gpus": ["0"]}, "processes 0, 1 on a use the same GPU 0"),
        ("devices", {"device_kinds": ["P4"]}, "process 1: 1 on gpu, kind P4"),
        ("devices", {"accelerators": {"gpu": 8, "tpu": 0}}, ""),
        ("code", {"versions": {"jax": "0.10.1"}}, "process 1: 0.10.1"),
        ("code", {"code": {"program": "x"}}, "the code of program differs"),
        ("settings", {"settings": {"floatx": "bfloat16"}}, "1: bfloat16"),
        ("mesh", {"devices": [[1, "gpu", 1]]}, "process 1: gpu:1"),
        ("seeds", {"seed": None}, "process 0: 7; process 1: None"),
        (
            "hosts",
            {"host": "b", "ip": "127.0.1.1", "platform": "cpu"},
            "the name of host b leads to 127.0.1.1",
        ),
        ("clocks", {"clock": [997.0, 997.2]}, "differ by 2.8 s; that of proce"),
        ("collective", {"sums": [1]}, "must be 3; it is on process 1: [1]"),
        ("collective", {"error": "gone"}, "(process 1: gone)"),
    ]
)
def test_what_a_second_process_has_otherwise(name, seen, message):
    everyone = pair(**seen)
    module = checks if hasattr(checks, name) else comparisons
    findings = getattr(module, name)(everyone).findings
    if message:
        assert any(message in finding.message for finding in findings)
        assert all(finding.remedy for finding in findings)
    else:
        assert not findings


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"accelerators": {"gpu": 8, "tpu": 0}}, "shows 8 GPUs, and 1 are"),
        ({"platform": "cpu", "gpus": []}, "shows a GPU, and JAX uses CPU"),
        (
            {"platform": "cpu", "accelerators": {"gpu": 0, "tpu": 4}},
            "shows a TPU, and JAX uses CPU",
        ),
        ({"platform": "cpu", "accelerators": {"gpu": 0, "tpu": 0}}, ""),
    ],
)
def test_accelerators_that_are_not_used(seen, message):
    findings = checks.devices([{**copy.deepcopy(GPU), **seen}]).findings
    assert [message in finding.message for finding in findings] == (
        [True] if message else []
    )


def test_packages_that_do_not_fit(monkeypatch):
    installed = {**facts.versions(), "jaxlib": "0.4.1"}
    monkeypatch.setattr(facts, "versions", lambda: installed)
    (finding,) = checks.versions([GPU]).findings
    assert "needs jaxlib" in finding.message
    assert "and there is 0.4.1" in finding.message
    assert "pip install -U 'jaxlib" in finding.remedy


def test_a_libtpu_that_does_not_fit(monkeypatch):
    needs = {"jax": ["libtpu==0.0.42.*; extra=='tpu'", "jaxlib>=9; extra=='x'"]}
    monkeypatch.setattr(checks.importlib.metadata, "requires", needs.get)
    for there, count in (("0.0.42.1", 0), ("0.0.41", 1)):
        installed = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": there}
        monkeypatch.setattr(facts, "versions", lambda x=installed: x)
        assert len(checks.versions([GPU]).findings) == count


def test_a_collective_that_hangs_has_an_end():
    with pytest.raises(TimeoutError, match="no end within 0.1 seconds"):
        together.within(threading.Event().wait, 0.1)


@local_only
@pytest.mark.extra
def test_a_process_that_hangs_is_found_on_all():
    with cluster.Cluster(processes=2, devices=1) as own:
        reports = own.call(joined.examine_where_one_hangs, 10.0)
        for report in reports:
            assert found(report) == ["collective"]
            (finding,) = named(report, "collective")["findings"]
            assert "0, 1: TimeoutError: no end within 10" in finding["message"]
            assert "firewall" in finding["remedy"]


@local_only
@pytest.mark.extra
def test_on_several_processes_from_the_command_line(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "keras_meshdist", "run", "-n2", "-d4"]
    command += ["-m", "keras_meshdist", "doctor", "--json", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] All is well." in done.stdout
    assert "[1]" not in done.stdout
    report = json.loads(path.read_text())
    assert report["expected_processes"] == 2
    assert "KERAS_DISTRIBUTION" in named(report, "launcher")["message"]


@local_only
@pytest.mark.extra
def test_processes_join_by_themselves_and_one_is_missing():
    """As `srun meshdist doctor` would, with a node that doesn't start."""
    from tests.test_joining import free_port, start

    port = free_port()
    processes = [
        start(
            {
                "KERAS_DISTRIBUTION_JOB_ADDRESSES": f"127.0.0.1:{port}",
                "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
                "KERAS_DISTRIBUTION_PROCESS_ID": str(process),
            },
            ["doctor", "--json", "--timeout", "10"],
            "keras_meshdist",
        )
        for process in (0, 1)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 1, err
        report = json.loads(out)
        assert found(report) == ["processes"]
        assert named(report, "processes")["message"] == "1 of 3"
        (finding,) = named(report, "processes")["findings"]
        assert "processes 0, 1 came, process 2 of 3" in finding["message"]
