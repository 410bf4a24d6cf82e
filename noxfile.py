"""Checks in environments of their own; `nox -l` lists them.

What follows `--` goes to pytest: `nox -s tests -- -k predict`.
"""

import pathlib

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["tests", "lint", "docs"]

OLDEST = ("keras==3.7.0", "jax==0.4.38", "jaxlib==0.4.38")


def run_tests(session, *requirements, extras="test", pytest=()):
    session.install("-e", f".[{extras}]", *requirements)
    session.run("python", "-m", "pytest", *pytest, *session.posargs)


@nox.session(python="3.11")
def tests(session):
    """The tests with the newest Keras and JAX for Python 3.11."""
    run_tests(session)


@nox.session(python="3.11")
def extra(session):
    """Longer tests, which CI runs too: notebooks, Keras' own tests."""
    run_tests(session, pytest=["-m", "extra"])


@nox.session(python="3.11")
def oldest(session):
    """The tests with the oldest Keras and JAX."""
    run_tests(
        session,
        *OLDEST,
        pytest=["-m", "not full and not extra and not matrix"],
    )


@nox.session(python="3.12")
def newest312(session):
    """The tests with the newest JAX, which needs a newer Python."""
    run_tests(session)


@nox.session(python="3.11")
def hub(session):
    """KerasHub's models on meshes."""
    run_tests(
        session,
        "safetensors",
        extras="test,hub",
        pytest=[
            "-m",
            "full or not full",
            "tests/test_hub.py",
            "tests/test_presets.py",
            "tests/test_families.py",
            "tests/test_tasks.py",
        ],
    )


@nox.session(python="3.11")
def plan(session):
    """Plans compiled for TPUs; needs Linux with an x86 processor."""
    run_tests(
        session,
        extras="test,hub,plan",
        pytest=[
            "-m",
            "full or not full",
            "tests/test_planner.py",
            "tests/test_plans.py",
            "tests/test_remat.py",
        ],
    )


@nox.session(python="3.11")
def full(session):
    """Whole matrices of meshes, datasets and processes; long."""
    run_tests(
        session,
        "torch",
        pytest=[
            "-m",
            "full",
            "--ignore=tests/upstream",
            "--ignore=tests/test_hub.py",
            "--ignore=tests/test_presets.py",
            "--ignore=tests/test_families.py",
            "--ignore=tests/test_tasks.py",
            "--ignore=tests/test_plans.py",
        ],
    )


@nox.session(python="3.11")
def upstream(session):
    """Keras' own tests, with this package under them."""
    run_tests(
        session, "torch", pytest=["-m", "full or not full", "tests/upstream"]
    )


@nox.session(python="3.11")
def keras_dev(session):
    """The tests with a checkout of Keras: `nox -s keras_dev -- PATH`."""
    if not session.posargs:
        session.error("Give the path of a checkout: nox -s keras_dev -- PATH")
    checkout = pathlib.Path(session.posargs[0]).resolve()
    if not (checkout / "keras" / "src").is_dir():
        session.error(f"This is no checkout of Keras: {checkout}")
    session.install("-e", ".[test]")
    # Put in front of the Keras that is installed, so no build is needed.
    session.run(
        "python",
        "-m",
        "pytest",
        "--ignore=tests/upstream",
        *session.posargs[1:],
        env={"PYTHONPATH": str(checkout), "KERAS_BACKEND": "jax"},
    )


@nox.session(python="3.11")
def notebooks(session):
    """Executes the notebooks, also those that need KerasHub."""
    run_tests(
        session,
        "keras-hub",
        pytest=["-m", "extra or not extra", "tests/test_notebooks.py"],
    )


@nox.session(python="3.11")
def ray(session):
    """Joins the workers of a local Ray."""
    run_tests(
        session,
        "ray>=2.40",
        pytest=["-m", "extra or not extra", "tests/test_ray.py"],
    )


@nox.session(python="3.11")
def lint(session):
    """Style, and what pre-commit checks."""
    session.install("ruff>=0.6", "pre-commit")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pre-commit", "run", "--all-files", *session.posargs)


@nox.session(python="3.11")
def docs(session):
    """Builds the pages; a warning is an error."""
    session.install("-e", ".[docs]")
    session.run(
        "mkdocs",
        "build",
        "--strict",
        "--site-dir=build/site",
        env={"NO_MKDOCS_2_WARNING": "1"},
    )


@nox.session(python="3.11")
def wheel(session):
    """Builds the wheel, and tries it away from the sources."""
    folder = pathlib.Path(session.create_tmp()).resolve()
    session.install("build")
    session.run("python", "-m", "build", "--wheel", "-o", str(folder), ".")
    newest = max(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    session.run("python", "-m", "venv", "--clear", f"{folder}/clean")
    clean = f"{folder}/clean/bin"
    session.run(f"{clean}/pip", "install", "-q", str(newest), external=True)
    session.chdir(folder)
    session.run(
        f"{clean}/python",
        "-c",
        "import keras_meshdist as kmd; kmd.cluster.use_virtual_devices(8); "
        "print(kmd.make_mesh({'model': 4, 'batch': -1}), kmd.__file__)",
        external=True,
    )
    session.run(f"{clean}/meshdist", "run", "--help", external=True)
