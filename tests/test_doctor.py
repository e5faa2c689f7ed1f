"""`domino-deploy doctor`: every check on facts made up for it, and the command on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from domino_deploy import doctor as judging
from domino_deploy import doctor_facts
from domino_deploy.backends import BACKENDS, Backend
from domino_deploy.cli import COMMANDS, main
from domino_deploy.doctor import COMMAND_NEEDS, commands, diagnose, findings, runs
from domino_deploy.doctor_facts import PACKAGES, Facts, Gpu, Machine, cpu_flags, gpus_of
from domino_deploy.known_bad import KNOWN_BAD, Severity
from domino_deploy.precision import Dtype
from domino_deploy.requirements import below, parse_requirement, release

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
MACHINE = Machine(
    os="Linux 6.1",
    architecture="x86_64",
    cpu="Some CPU",
    cpu_flags=("AVX2", "AVX-512", "AVX-512 VNNI"),
    cores=4,
    threads=8,
    memory_bytes=32 * 10**9,
    free_memory_bytes=20 * 10**9,
    free_disk_bytes=10**11,
    gpus=(),
)
GOOD = {
    "cuda-bindings": "13.0.1",
    "domino-deploy": "0.1.0",
    "h11": "0.16.0",
    "jinja2": "3.1.6",
    "llguidance": "1.7.6",
    "matplotlib": "3.11.2",
    "numpy": "2.4.6",
    "onnx": "1.20.0",
    "onnx-ir": "1.1.0",
    "onnxruntime": "1.32.0",
    "onnxscript": "0.7.2",
    "prometheus-client": "0.26.0",
    "pydantic": "2.14.4",
    "safetensors": "0.8.0",
    "starlette": "1.10.0",
    "tensorrt-rtx": "1.7.1.3",
    "tokenizers": "0.23.3",
    "torch": "2.13.0+cpu",
    "uvicorn": "0.54.0",
}
REQUIREMENTS = (
    "numpy>=1.26",
    "onnxruntime>=1.30",
    'torch<3,>=2.10; extra == "export"',
    'cuda-bindings>=12.9; extra == "tensorrt"',
    'pytest>=8.3; extra == "dev"',
)


def facts(packages: dict[str, str | None] | None = None, **changes: Any) -> Facts:
    """A healthy environment with `packages` put in (None: taken out)."""
    found = {name: GOOD.get(name) for name in PACKAGES} | (packages or {})
    return dataclasses.replace(Facts(machine=MACHINE, python="3.12.1", packages=found, requirements=REQUIREMENTS), **changes)


def names(found: Facts) -> dict[str, Severity]:
    return {finding.name: finding.severity for finding in findings(found)}


class TestKnownBad:
    def test_a_healthy_environment_has_none(self) -> None:
        assert list(findings(facts())) == []
        assert diagnose(facts()).is_healthy

    @pytest.mark.parametrize(
        ("packages", "name"),
        [
            ({"onnxruntime-gpu": "1.32.0"}, "onnxruntime beside onnxruntime-gpu"),
            ({"onnxruntime": "1.29.1"}, "ONNX Runtime without Attention and TensorScatter of opset 24"),
            ({"onnxruntime": None, "onnxruntime-gpu": "1.24.2"}, "Qwen3 gives gibberish on the CUDA provider"),
            ({"onnxruntime": "1.18.1", "numpy": "2.0.0"}, "ONNX Runtime built for numpy 1 with numpy 2"),
            ({"torch": "2.9.1"}, "a version outside the supported range"),
            ({"torch": "3.0.0"}, "a version outside the supported range"),
            ({"onnxruntime": None, "onnxruntime-gpu": "1.25.0"}, "a version outside the supported range"),
            ({"cuda-bindings": "12.8.0"}, "a version outside the supported range"),
        ],
    )
    def test_a_bad_combination_is_found(self, packages: dict[str, str | None], name: str) -> None:
        found = facts(packages)
        assert names(found)[name] is Severity.BAD
        assert not diagnose(found).is_healthy

    @pytest.mark.parametrize(
        "packages",
        [
            {"onnxruntime": None, "onnxruntime-gpu": "1.32.0"},
            {"onnxruntime": "1.30"},
            {"numpy": "1.26.4"},
            {"torch": "2.10.0"},
            {"torch": None, "onnx": None},
            {"onnxruntime": "unknown"},  # a build of one's own; its version says nothing
        ],
        ids=str,
    )
    def test_a_combination_beside_it_is_not(self, packages: dict[str, str | None]) -> None:
        assert names(facts(packages)) == {}

    def test_a_triton_that_torch_does_not_name(self) -> None:
        pinned = ('triton==3.6.0; platform_system == "Linux"', "filelock")
        cuda = {"torch": "2.11.0", "triton": "3.5.1"}
        (finding,) = findings(facts(cuda, torch_requirements=pinned))
        assert (finding.severity, finding.found) == (Severity.BAD, "torch 2.11.0 asks for triton==3.6.0, found 3.5.1")
        assert names(facts(cuda | {"triton": "3.6.0"}, torch_requirements=pinned)) == {}
        assert names(facts(cuda)) == {}, "a CPU build names none"

    @pytest.mark.parametrize(
        ("packages", "name"),
        [({"onnx": "1.21.0"}, "onnx refuses hard links"), ({"tensorrt": "11.4.0.106"}, "TensorRT without weak typing")],
    )
    def test_a_note_leaves_the_environment_healthy(self, packages: dict[str, str | None], name: str) -> None:
        assert names(facts(packages)) == {name: Severity.NOTE}
        assert diagnose(facts(packages)).is_healthy

    @pytest.mark.parametrize(
        ("architecture", "flags", "expected"),
        [
            ("x86_64", (), []),  # a system that does not tell
            ("x86_64", ("AVX-512",), ["no AVX2"]),
            ("x86_64", ("AVX2",), ["no integer dot products (VNNI)"]),
            ("x86_64", ("AVX2", "AVX-VNNI"), []),
            ("aarch64", ("Arm dot product",), []),
        ],
    )
    def test_slow_instruction_sets_are_noted(self, architecture: str, flags: tuple[str, ...], expected: list[str]) -> None:
        machine = dataclasses.replace(MACHINE, architecture=architecture, cpu_flags=flags)
        assert list(names(facts(machine=machine))) == expected

    def test_bad_ones_come_first_and_all_are_told(self) -> None:
        found = list(findings(facts({"onnx": "1.23.2", "onnxruntime": "1.17.0"})))
        severities = [finding.severity for finding in found]
        assert severities == sorted(severities, key=lambda severity: severity is Severity.NOTE)
        assert len(found) == 4

    def test_every_entry_names_its_source_and_what_to_do(self) -> None:
        assert all(entry.source and entry.advice for entry in KNOWN_BAD)
        assert len({entry.name for entry in KNOWN_BAD}) == len(KNOWN_BAD)


class TestWhatWorks:
    def test_everything_does_where_everything_is_installed(self) -> None:
        assert [command.name for command in commands(facts()) if not command.works] == []

    def test_what_is_missing_names_the_extra(self) -> None:
        found = {command.name: command for command in commands(facts({"torch": None, "matplotlib": None}))}
        assert found["export"].missing == ("torch",)
        assert found["export"].install == "pip install 'domino-deploy[export]'"
        assert found["train"].missing == ("torch", "matplotlib")
        assert found["train"].install == "pip install 'domino-deploy[train]'"
        assert [name for name, command in found.items() if command.works] == ["generate", "serve", "bench", "inspect", "doctor"]

    def test_the_cuda_build_stands_in_for_onnxruntime(self) -> None:
        packages = {"onnxruntime": None, "onnxruntime-gpu": "1.32.0"}
        assert all(command.works for command in commands(facts(packages)))
        assert all(run.works for run in runs(facts(packages)) if run.precision == "int4" and run.backend == "ort")

    def test_backends_and_precisions(self) -> None:
        found = {(run.backend, run.precision): run for run in runs(facts({"torch": None}))}
        assert [key for key, run in found.items() if run.works] == [("ort", name) for name in ("float32", "float16", "int8", "int4")]
        assert found["ort", "bfloat16"].reason == "ort does not compute it"
        assert found["eager", "bfloat16"].reason == "torch is not installed: pip install 'domino-deploy[export]'"
        assert found["eager", "int4"].reason == "eager does not compute it"
        assert len(found) == len(Dtype) * len(Backend)

    def test_tensorrt_needs_its_packages_and_a_gpu(self) -> None:
        machine = dataclasses.replace(MACHINE, gpus=(Gpu(name="H200", driver="580.95.05", memory_bytes=2**37, compute_capability="9.0"),))
        install = "pip install 'domino-deploy[tensorrt]'"
        for found, reason in (
            (facts(), "no GPU that nvidia-smi shows"),
            (facts(machine=machine), ""),
            (facts({"tensorrt": "10.15.1", "tensorrt-rtx": None}, machine=machine), ""),
            (facts({"tensorrt-rtx": None}, machine=machine), f"tensorrt or tensorrt-rtx is not installed: {install}"),
            (facts({"cuda-bindings": None}), f"cuda-bindings is not installed: {install}"),
        ):
            reasons = {run.precision: run.reason for run in runs(found) if run.backend == "tensorrt"}
            assert {reasons.pop(name) for name in ("int8", "int4")} == {"tensorrt does not compute it"}
            assert set(reasons.values()) == {reason}

    def test_engines_are_built_with_either_product_and_without_a_gpu(self) -> None:
        for packages, missing in (
            ({}, ()),
            ({"tensorrt": "10.15.1", "tensorrt-rtx": None}, ()),
            ({"tensorrt-rtx": None, "cuda-bindings": None}, ("tensorrt or tensorrt-rtx",)),
            ({"onnx": None}, ("onnx",)),
        ):
            (command,) = (command for command in commands(facts(packages)) if command.name == "build-engine")
            assert command.missing == missing
            assert command.install == ("pip install 'domino-deploy[tensorrt-rtx]'" if missing else "")

    def test_every_command_and_backend_of_the_project_is_judged(self) -> None:
        assert COMMAND_NEEDS.keys() == COMMANDS.keys()
        assert {run.backend for run in runs(facts())} == set(Backend)

    def test_an_extra_brings_the_packages_that_are_said_to_come_with_it(self) -> None:
        extras = PROJECT["optional-dependencies"]

        def brought(extra: str) -> set[str]:
            lines = PROJECT["dependencies"] if not extra else extras[extra]
            wanted = [parse_requirement(line) for line in lines]
            own = {one.name for one in wanted if one}
            return own | (brought("export") if "domino-deploy" in own else set())

        for command, (extra, packages) in COMMAND_NEEDS.items():
            assert all(brought(extra) & set(package.split(" or ")) for package in packages), command
        for needs in BACKENDS.values():
            assert needs.package in brought(needs.install.removeprefix("domino-deploy").strip("[]"))
        core = {name for needed in (judging._SERVING, *judging._CORE_NEEDS.values()) for name in needed}
        assert core <= brought("")

    def test_every_package_that_any_extra_names_is_looked_at(self) -> None:
        lines = [
            *PROJECT["dependencies"],
            *(line for extra, lines in PROJECT["optional-dependencies"].items() if extra != "dev" for line in lines),
        ]
        named = {wanted.name for wanted in map(parse_requirement, lines) if wanted}
        assert named - set(PACKAGES) == set()


class TestCollecting:
    def test_the_flags_that_matter(self) -> None:
        amd = "processor\t: 0\nflags\t\t: fpu avx avx2 avx512f avx512_vnni avx512_bf16 fsrm\n"
        assert cpu_flags(amd) == ("AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 bf16")
        assert cpu_flags("Features\t: fp asimd asimddp i8mm\n") == ("Arm dot product", "Arm int8 matrix product")
        assert cpu_flags("") == ()

    def test_gpus(self) -> None:
        listing = "NVIDIA H200, 570.86.15, 143771, 9.0\nNVIDIA GB10, 580.95.05, [N/A], 12.1\n"
        assert gpus_of(listing) == (
            Gpu(name="NVIDIA H200", driver="570.86.15", memory_bytes=143771 * 2**20, compute_capability="9.0"),
            Gpu(name="NVIDIA GB10", driver="580.95.05", memory_bytes=None, compute_capability="12.1"),
        )
        assert gpus_of("") == gpus_of("No devices were found") == ()

    def test_a_driver_that_answers_nonsense_is_no_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU \\377, 1, \302\262, 9.0\\n\\377'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        (gpu,) = doctor_facts.collect().machine.gpus
        assert (gpu.name, gpu.memory_bytes) == ("GPU \N{REPLACEMENT CHARACTER}", None)

    @pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), subprocess.TimeoutExpired("nvidia-smi", 10)])
    def test_a_driver_that_does_not_answer_is_no_gpu(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(*arguments: object, **keywords: object) -> None:
            raise error

        monkeypatch.setattr(doctor_facts.subprocess, "run", run)
        assert doctor_facts.collect().machine.gpus == ()

    def test_versions_are_those_of_this_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import numpy
        import onnxruntime

        monkeypatch.setattr(doctor_facts, "PACKAGES", (*PACKAGES, "no-such-package"))
        found = doctor_facts.collect()
        assert (found.packages["numpy"], found.packages["onnxruntime"]) == (numpy.__version__, onnxruntime.__version__)
        assert found.packages["no-such-package"] is None
        assert any(line.startswith("onnxruntime") for line in found.requirements)


class TestRequirements:
    @pytest.mark.parametrize(
        ("line", "inside", "outside"),
        [
            ("torch<3,>=2.10", ["2.10", "2.10.0+cu128", "2.99"], ["2.9.1", "3.0", "3"]),
            ("x==1.2.*", ["1.2", "1.2.7"], ["1.3", "1.20"]),
            ("x~=1.4.2", ["1.4.2", "1.4.9"], ["1.5", "1.4.1"]),
            ("x!=2.0", ["2.0.1"], ["2", "2.0.0"]),
            ("x (>=1.0)", ["1"], ["0.9"]),
            ("x", ["0", "99"], []),
        ],
    )
    def test_bounds(self, line: str, inside: list[str], outside: list[str]) -> None:
        wanted = parse_requirement(line)
        assert wanted is not None
        assert [version for version in (*inside, *outside) if wanted.allows(version)] == inside

    def test_names_and_extras(self) -> None:
        wanted = parse_requirement("Domino_Deploy[export]>=1 ; platform_system == \"Linux\" and extra == 'gpu'")
        assert wanted is not None
        assert (wanted.name, wanted.specifiers, wanted.extra) == ("domino-deploy", ">=1", "gpu")
        assert parse_requirement("") is None

    def test_releases(self) -> None:
        assert release("2.13.0+cpu") == (2, 13, 0)
        assert release("11.4.0.106") == (11, 4, 0, 106)
        assert release("nightly") == ()
        assert below("1.9", "1.10")
        assert not below("1.30.0", "1.30")


class TestCommand:
    def test_this_machine(self) -> None:
        done = CliRunner().invoke(main, ["doctor", "--json"])
        told = json.loads(done.stdout)
        assert done.exit_code == (0 if told["healthy"] else 1)
        assert {command["name"] for command in told["commands"]} == COMMANDS.keys()
        assert told["machine"]["free_disk_bytes"] > 0

    @pytest.mark.parametrize(("packages", "code"), [({}, 0), ({"onnx": "1.23.2"}, 0), ({"onnxruntime": "1.24.0", "torch": None}, 1)])
    def test_the_exit_code_and_the_table(self, packages: dict[str, str | None], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("domino_deploy.cli.doctor.collect", lambda: facts(packages))
        done = CliRunner().invoke(main, ["doctor"])
        assert done.exit_code == code, done.output
        lines = done.stdout.splitlines()
        assert "cpu       Some CPU, 4 cores, 8 threads" in lines
        assert "onnxruntime\t" + (packages.get("onnxruntime") or "1.32.0") in lines
        assert lines[-1] == ("2 known-bad combination(s) found" if code else "no known-bad combination found")
        if code:
            assert "export\tlacks torch\tpip install 'domino-deploy[export]'" in lines
            assert any(line.startswith("bad\tONNX Runtime without Attention") and "1.24.0" in line for line in lines)

    def test_no_examined_package_is_imported(self) -> None:
        modules = ("torch", "onnx", "onnxruntime", "numpy", "transformers", "tokenizers", "tensorrt")
        code = f"""
import sys
from domino_deploy.cli import main
main(["--quiet", "doctor", "--json"], standalone_mode=False)
print("LOADED", [name for name in {modules!r} if name in sys.modules])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert "LOADED []" in done.stdout
