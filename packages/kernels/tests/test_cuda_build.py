"""Building the compiled back end: the hook's wheels, and the machine code for sm_75."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pagetide_kernels import AttentionShape
from pagetide_kernels.cuda.tuning import tuning_for

PACKAGE = Path(__file__).resolve().parents[1]
MAX_SHARED_BYTES = 64 * 1024  # all that sm_75 has


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_cuda", PACKAGE / "build_cuda.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_cuda"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build_cuda = load_build()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, with a library in it that another build left."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed")
    folder = tmp_path_factory.mktemp("kernels") / "kernels"
    ignored = shutil.ignore_patterns("tests", "build", "__pycache__", ".*", "*.so")
    shutil.copytree(PACKAGE, folder, ignore=ignored)
    stale = folder / "src" / "pagetide_kernels" / "_lib" / "libpagetide_kernels.so"
    stale.parent.mkdir(exist_ok=True)
    stale.write_bytes(b"stale")
    return folder


def build_wheel(checkout: Path, target: Path, **environment: str) -> subprocess.CompletedProcess:
    inherited = {name: value for name, value in os.environ.items() if "PAGETIDE" not in name}
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=checkout, env={**inherited, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PAGETIDE_BUILD_CUDA": "0"}, "PAGETIDE_BUILD_CUDA=0: the CUDA library is not built"),
        ({"CXX": "no-such-compiler"}, "no C++ compiler: install g++"),
    ],
    ids=["asked", "no-compiler"],
)
def test_a_pure_wheel_is_pure_and_said(
    checkout: Path, tmp_path: Path, environment: dict[str, str], said: str
) -> None:
    done = build_wheel(checkout, tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert said in " ".join((done.stdout + done.stderr).split())
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "pagetide_kernels/cuda/backend.py" in names
    assert not [name for name in names if name.endswith(".so") or "csrc" in name]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PAGETIDE_BUILD_CUDA": "1", "CXX": "no-such-compiler"}, "no C++ compiler"),
        ({"PAGETIDE_BUILD_CUDA": "yes"}, "PAGETIDE_BUILD_CUDA='yes' must be 0, 1 or unset"),
        ({"PAGETIDE_BUILD_CUDA": "1", "PAGETIDE_CUDA_ARCHS": "sm_75"}, "names 'sm_75'"),
    ],
    ids=["no-compiler", "wish", "architecture"],
)
def test_a_build_that_was_asked_for_and_cannot_be_is_an_error(
    checkout: Path, tmp_path: Path, environment: dict[str, str], said: str
) -> None:
    done = build_wheel(checkout, tmp_path, **environment)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_the_source_distribution_holds_what_a_wheel_is_built_from() -> None:
    text = (PACKAGE / "pyproject.toml").read_text()
    (included,) = re.findall(r"targets\.sdist\]\ninclude = \[(.*)\]", text)
    for name in ("src", "csrc", "build_cuda.py", "hatch_build.py"):
        assert f'"{name}"' in included


def test_the_compiled_wheel_holds_one_library_for_every_python() -> None:
    if not os.environ.get("PAGETIDE_CUDA_WHEEL"):
        pytest.skip("PAGETIDE_CUDA_WHEEL names no wheel: the nox session cuda builds one")
    wheel = Path(os.environ["PAGETIDE_CUDA_WHEEL"])
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "pagetide_kernels/_lib/libpagetide_kernels.so" in names


def test_every_mutant_still_finds_its_line() -> None:
    """What they prove needs a GPU (``mutants_cuda.py``); that they can be made does not."""
    command = [sys.executable, str(PACKAGE / "tests" / "mutants_cuda.py"), "--check"]
    assert re.fullmatch(r"(\d\d) mutants apply\n", run(command))


def nvcc_toolchain() -> object:
    if reason := build_cuda.missing_reason():
        pytest.skip(reason)
    if importlib.util.find_spec("tvm_ffi") is None:
        pytest.skip("apache-tvm-ffi is not installed")
    return build_cuda.find_toolchain()


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def disassembler() -> str:
    """cuobjdump of the CUDA toolkit, or the one that Triton brings along."""
    if on_path := shutil.which("cuobjdump"):
        return on_path
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent if spec and spec.origin else Path("/nowhere")
    brought = folder / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not brought.exists():
        pytest.skip("there is no cuobjdump: what the compiler said was checked, not the code")
    return str(brought)


def assert_no_spills(said_by_ptxas: str) -> None:
    """None at all on sm_75; elsewhere a few words, if they buy a kernel its second thread block."""
    entries = said_by_ptxas.split("Compiling entry function '")[1:]
    assert entries, said_by_ptxas
    for entry in entries:
        (architecture,) = re.findall(r"for 'sm_(\d+)a?'", entry)
        ((stored, loaded),) = re.findall(
            r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry
        )
        allowed = 0 if architecture == "75" else 32
        if re.search(r"prefill_hopper_kernel\w+EaLi128E", entry):
            allowed = 64  # INT8's producer widens a tile in registers; faster so than with fewer
        assert max(int(stored), int(loaded)) <= allowed, entry


# Two prefill kernels and a decode kernel, and the shared memory of all of them on sm_75.
PROBE = """
#include "decode_mma.cuh"
#include "decode_simt.cuh"
#include "prefill_launch.cuh"
namespace pagetide {
constexpr int MAX = 64 * 1024;
template <typename T, typename KV, int DIM>
constexpr bool MMA_FITS = PrefillTiles<T, KV, DIM>::bytes(75) <= MAX &&
                          DecodeMemory<MmaEngine<T, KV, DIM, 1>>::bytes(75) <= MAX;
template <int DIM>
constexpr bool SIMT_FITS = DecodeMemory<SimtEngine<float, DIM>>::bytes(75) <= MAX &&
                           DecodeMemory<SimtEngine<Half, DIM>>::bytes(75) <= MAX &&
                           DecodeMemory<SimtEngine<int8_t, DIM>>::bytes(75) <= MAX;
static_assert(MMA_FITS<Half, Half, 64> && MMA_FITS<Half, Half, 80> && MMA_FITS<Half, Half, 96>);
static_assert(MMA_FITS<Half, Half, 128> && MMA_FITS<Half, Half, 256>);
static_assert(MMA_FITS<Half, int8_t, 64> && MMA_FITS<Half, int8_t, 128>);
static_assert(MMA_FITS<Half, int8_t, 256>);
static_assert(DecodeMemory<MmaEngine<Half, Half, 128, 2>>::bytes(75) <= MAX, "sixteen rows");
static_assert(DecodeMemory<MmaEngine<Half, int8_t, 128, 2>>::bytes(75) <= MAX, "sixteen rows");
static_assert(SIMT_FITS<64> && SIMT_FITS<128> && SIMT_FITS<256>, "64 KB");
// As many as `Tuning.pair_blocks_an_sm` says, of Hopper's 228 KB; each takes 1 KB besides.
template <class Engine, int BLOCKS>
constexpr bool PAIRS_FIT = BLOCKS * (DecodeMemory<Engine>::bytes(90, 2) + 1024) <= 228 * 1024;
static_assert(PAIRS_FIT<MmaEngine<Half, Half, 64, 1>, PAIRS_OF(float16xfloat16)>);
static_assert(PAIRS_FIT<MmaEngine<Half, int8_t, 64, 1>, PAIRS_OF(float16xint8)>);
static_assert(PAIRS_FIT<SimtEngine<float, 64>, PAIRS_OF(float32xfloat32)>);
static_assert(PAIRS_FIT<SimtEngine<int8_t, 64>, PAIRS_OF(float32xint8)>);
template void launch_prefill_instance<Half, Half, 64>(const AttentionParams&, cudaStream_t);
template void launch_prefill_instance<Half, int8_t, 64>(const AttentionParams&, cudaStream_t);
using Engine = MmaEngine<Half, Half, 64, 1>;
template void launch_decode_instance<Engine>(const AttentionParams&, cudaStream_t);
}  // namespace pagetide
"""


def pairs_of(found: re.Match[str]) -> str:
    """Pairs of thread blocks on a multiprocessor, for head_dim 64 and two dtypes."""
    query, stored = found.groups()
    shape = AttentionShape(7, 7, 64, 16, getattr(torch, query), stored)
    return str(tuning_for(shape, is_hopper=True).pair_blocks_an_sm)


def test_sm_75_code_uses_tensor_cores_within_its_limits(tmp_path: Path) -> None:
    """Registers that suffice, shared memory that there is, and HMMA.1688 in the machine code."""
    toolchain = nvcc_toolchain()
    source = tmp_path / "probe.cu"
    source.write_text(re.sub(r"PAIRS_OF\((\w+)x(\w+)\)", pairs_of, PROBE))
    cubin = tmp_path / "probe.cubin"
    said = run(
        [str(toolchain.nvcc), "-ccbin", str(toolchain.host_compiler), "-std=c++17", "-O3", "-I",
         str(PACKAGE / "csrc"), "-arch=sm_75", "-Xptxas", "-v", "-cubin", "-o", str(cubin),
         str(source)]
    )  # fmt: skip
    assert_no_spills(said)
    static = [int(each) for each in re.findall(r"(\d+) bytes smem", said)]
    assert sum(static) < 1024  # beside the dynamic shared memory that the probe asserts
    code = run([disassembler(), "-sass", str(cubin)])
    kernels = code.split("Function : ")[1:]
    assert len(kernels) == 3
    for kernel in kernels:
        assert "HMMA.1688.F32" in kernel, kernel[:200]


SUMS = """
#include "softmax_state.cuh"
extern "C" __global__ void each_maximum(float* out) {
  pagetide::SoftmaxSum sums[2][3];
  for (int i = 0; i < 6; ++i) out[i] = sums[i / 3][i % 3].m;
}
"""


def test_every_sum_of_an_array_begins_at_minus_infinity(tmp_path: Path) -> None:
    """nvcc gives the defaults of a class's members to the first of several rows only."""
    toolchain = nvcc_toolchain()
    source, assembly = tmp_path / "sums.cu", tmp_path / "sums.ptx"
    source.write_text(SUMS)
    run(
        [str(toolchain.nvcc), "-ccbin", str(toolchain.host_compiler), "-std=c++17", "-O3", "-I",
         str(PACKAGE / "csrc"), "-arch=compute_75", "-ptx", "-o", str(assembly), str(source)]
    )  # fmt: skip
    code = assembly.read_text()
    values = dict(re.findall(r"mov\.\w32\s+(%\w+), (\S+);", code))
    stored = [values[name] for name in re.findall(r"st\.global\.\w32\s+\[\S+\], (%\w+);", code)]
    assert stored in (["-8388608"] * 6, ["0fFF800000"] * 6), code


@pytest.mark.parametrize("stored", ["f16", "f16_i8"])
def test_hopper_code_multiplies_by_warpgroups_without_waiting(stored: str, tmp_path: Path) -> None:
    """HGMMA in every kernel, and none of the compiler's notes that it had to serialise them."""
    toolchain = nvcc_toolchain()
    cubin = tmp_path / "hopper.cubin"
    said = run(
        [str(toolchain.nvcc), "-ccbin", str(toolchain.host_compiler), "-std=c++17", "-O3", "-I",
         str(PACKAGE / "csrc"), "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin",
         "-o", str(cubin), str(PACKAGE / "csrc" / "instances" / f"prefill_hopper_{stored}.cu")]
    )  # fmt: skip
    assert_no_spills(said)
    assert "serialized" not in said, said
    kernels = run([disassembler(), "-sass", str(cubin)]).split("Function : ")[1:]
    assert len(kernels) == 2
    for keys in (96, 128):  # of head_dim 64 and 128
        assert sum(f"HGMMA.64x{keys}x16.F32" in kernel for kernel in kernels) == 1, said


@pytest.mark.long
@pytest.mark.parametrize("source", build_cuda.sources(), ids=lambda path: path.name)
def test_every_source_compiles_for_every_architecture(source: Path, tmp_path: Path) -> None:
    toolchain = nvcc_toolchain()
    command = build_cuda.compile_command(
        toolchain, source, tmp_path / "object.o", build_cuda.ARCHITECTURES
    )
    said = run([*command, "-Xptxas", "-v"])
    if source.suffix == ".cu":
        assert_no_spills(said)
