"""What `build-engine` may choose, and what it comes to for one bundle on this machine; checks only, nothing is written."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from domino_deploy import tensorrt_libraries as libraries
from domino_deploy.bundle import Bundle
from domino_deploy.config import DrafterKind
from domino_deploy.engine_checks import DTYPES, FLOAT8, LEAST_PREFILL_ROWS, MOST_BATCH_SIZE, positions
from domino_deploy.engines import ENGINES_FOLDER, Flavour, Plugin, PluginForm
from domino_deploy.errors import MissingDependencyError, RequestError, listed
from domino_deploy.exporters.fp8 import CalibrationText, check_float8_capabilities
from domino_deploy.plugins import op
from domino_deploy.precision import Dtype
from domino_deploy.tensorrt_libraries import Gpu

AUTO = "auto"
# Longer only when asked for, as sessions do: caches of fixed length take their whole memory from the start.
DEFAULT_MAX_MODEL_LEN = 4096
_OPT_LEVELS = range(6)
LIBRARY_ENDINGS = (".so", ".dll")
_MOST_BYTES = 2**63 - 1
# Of TensorRT-RTX 1.7; it has 7.5 besides, but no float32 products for it, which our graphs have.
RTX_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0", "12.1")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a build may choose.

    Args:
        flavour: None for the one that is installed, TensorRT before TensorRT-RTX.
        dtype: what engines compute in; None for the bundle's own type. Another one converts first.
        is_float8: multiply the layers' matrices in float8, everything else in `dtype`.
        calibration_text: what float8's scales are taken from; None for our own (`fp8_texts.py`).
        compute_capabilities: "8.9"; for TensorRT-RTX, where none stands for all. TensorRT builds for the GPU at hand.
        max_batch_size: sequences at once.
        max_model_len: tokens of the longest sequence; None for the models' own maximum, but not above `DEFAULT_MAX_MODEL_LEN`.
        num_speculative_tokens: drafted per cycle; None for the bundle's number.
        prefill_rows: prompt tokens of a pass, or as many as the longest sequence has.
        workspace: bytes that a layer may use while it runs.
        opt_level: 0 (fast to build) to 5 (fast to run).
        plugin: "auto", a `PluginForm`, or the path of a compiled plugin library.
        is_stripped: leave the weights out: engines take them from the bundle when they are opened, by graphs that lie beside them.
        timing_cache: file; None for one in the user's cache folder. TensorRT alone measures while it builds.
    """

    flavour: Flavour | None = None
    dtype: Dtype | None = None
    is_float8: bool = False
    calibration_text: CalibrationText | None = None
    compute_capabilities: tuple[str, ...] = ()
    max_batch_size: int = 1
    max_model_len: int | None = None
    num_speculative_tokens: int | None = None
    prefill_rows: int = 256
    workspace: int = 4 * 2**30
    opt_level: int = 3
    plugin: str = AUTO
    is_stripped: bool = False
    timing_cache: Path | None = None


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Options without anything left open.

    Args:
        flavour_version: of the installed package.
        gpu: what TensorRT builds for; None for TensorRT-RTX, which needs none.
        dtype: what engines compute in.
        is_converted: whether that is not the bundle's own type.
        plugin: what computes the logit correction.
        plugin_library: file of a compiled one.
        output: folder of the engines.
    """

    flavour: Flavour
    flavour_version: str
    gpu: Gpu | None
    compute_capabilities: tuple[str, ...]
    dtype: Dtype
    is_converted: bool
    is_float8: bool
    max_batch_size: int
    max_model_len: int
    num_speculative_tokens: int
    prefill_rows: int
    workspace: int
    opt_level: int
    plugin: Plugin
    plugin_library: Path | None
    is_stripped: bool
    timing_cache: Path | None
    output: Path

    @property
    def weights(self) -> str:
        """Type of the layers' matrices, in NumPy's words."""
        return FLOAT8 if self.is_float8 else str(self.dtype)


def engine_settings(bundle: Bundle, options: EngineOptions, output: Path | None = None) -> EngineSettings:
    """What options come to for a bundle on this machine.

    Args:
        bundle: to build from.
        options: the user's.
        output: folder of the engines; None for one below the bundle that says what they are for.

    Raises:
        RequestError: values out of range or that do not go together, all of them at once; a quantised bundle.
        MissingDependencyError: TensorRT is not installed, or what it needs here.
    """
    problems = list(_problems(bundle, options))
    if problems:
        raise RequestError(listed(f"{bundle.path}: engines cannot be built this way", problems, "Correct these and build again."))
    flavour, version = _flavour(options.flavour)
    gpu = libraries.require_gpu(flavour) if flavour is Flavour.TENSORRT else None
    if options.is_stripped:
        libraries.require_gpu(flavour, " to build engines without weights")
    capabilities = _capabilities(options.compute_capabilities, gpu)
    dtype = options.dtype or bundle.precision.activations
    if options.is_float8:
        check_float8_capabilities(capabilities)
        dtype = Dtype.BFLOAT16 if dtype is Dtype.FLOAT32 else dtype  # products in float8 stand between values in 16 bits
    max_model_len = options.max_model_len or min(positions(bundle), DEFAULT_MAX_MODEL_LEN)
    plugin, library = _plugin(options.plugin, flavour, bundle)
    weights = "fp8" if options.is_float8 else str(dtype)
    name = "-".join([str(flavour), *(f"sm{capability.replace('.', '')}" for capability in capabilities), weights])
    return EngineSettings(
        flavour=flavour,
        flavour_version=version,
        gpu=gpu,
        compute_capabilities=capabilities,
        dtype=dtype,
        is_converted=dtype is not bundle.precision.activations,
        is_float8=options.is_float8,
        max_batch_size=options.max_batch_size,
        max_model_len=max_model_len,
        num_speculative_tokens=options.num_speculative_tokens or bundle.manifest.num_speculative_tokens,
        prefill_rows=min(options.prefill_rows, max_model_len),
        workspace=options.workspace,
        opt_level=options.opt_level,
        plugin=plugin,
        plugin_library=library,
        is_stripped=options.is_stripped,
        timing_cache=_timing_cache(options.timing_cache, flavour, version, gpu),
        output=(output or bundle.path / ENGINES_FOLDER / name).absolute(),
    )


def _problems(bundle: Bundle, options: EngineOptions) -> Iterator[str]:
    if bundle.precision.is_quantised:
        yield (
            f"expected a bundle in float32, float16 or bfloat16, found {bundle.precision.name}, whose operators are ONNX Runtime's: "
            "export the pair again with --dtype float16 and build from that (--fp8 for smaller engines)"
        )
    if options.dtype is not None and options.dtype not in DTYPES:
        yield f"dtype: expected {', '.join(DTYPES)}, found {options.dtype}"
    if options.calibration_text is not None and not options.is_float8:
        yield "calibration: expected it with float8 only, found engines in another type: add --fp8 or drop it"
    limits = {
        "max_batch_size": (options.max_batch_size, 1, MOST_BATCH_SIZE),
        "max_model_len": (options.max_model_len, LEAST_PREFILL_ROWS, positions(bundle)),
        "num_speculative_tokens": (options.num_speculative_tokens, 1, bundle.drafter.num_proposals),
        "prefill_rows": (options.prefill_rows, LEAST_PREFILL_ROWS, None),
        "workspace": (options.workspace, 1, _MOST_BYTES),
        "opt_level": (options.opt_level, _OPT_LEVELS[0], _OPT_LEVELS[-1]),
    }
    for name, (value, least, most) in limits.items():
        if value is not None and (value < least or (most is not None and value > most)):
            yield (
                f"{name}: expected {least} or more, found {value}" if most is None else f"{name}: expected {least} to {most}, found {value}"
            )
    if bundle.form.candidate_pool > op.MAX_TOP_K:
        yield (
            f"candidate pool: expected at most {op.MAX_TOP_K} tokens, the largest K of TensorRT's TopK, found "
            f"{bundle.form.candidate_pool}: export the pair again with a smaller --candidate-pool"
        )
    if options.is_stripped and (options.is_float8 or options.dtype not in (None, bundle.precision.activations)):
        yield "stripped weights: expected engines in the bundle's own type, whose weights go in later: export the pair in the wanted type"


def _flavour(wanted: Flavour | None) -> tuple[Flavour, str]:
    installed = libraries.installed()
    flavour = wanted or next((each for each in Flavour if each in installed), None)
    if flavour is None:
        raise MissingDependencyError(
            f"Expected {Flavour.TENSORRT} or {Flavour.TENSORRT_RTX}, found neither. Run: pip install "
            f"'domino-deploy[{Flavour.TENSORRT_RTX}]', which builds without a GPU, or 'domino-deploy[{Flavour.TENSORRT}]' beside one."
        )
    return flavour, libraries.check_installed(flavour)


def _capabilities(wanted: tuple[str, ...], gpu: Gpu | None) -> tuple[str, ...]:
    malformed = [repr(each) for each in wanted if re.fullmatch(r"[1-9][0-9]?\.[0-9]", each) is None]
    if malformed:
        raise RequestError(f"Expected compute capabilities like 8.9, found {', '.join(malformed)}. Correct --compute-capability.")
    if gpu is None:
        unknown = [each for each in wanted if each not in RTX_CAPABILITIES]
        if unknown:
            raise RequestError(
                f"Expected compute capabilities that {Flavour.TENSORRT_RTX} builds for ({', '.join(RTX_CAPABILITIES)}), found "
                f"{', '.join(unknown)}. Choose one of these, or build with --backend {Flavour.TENSORRT} on a machine with such a GPU."
            )
        return tuple(dict.fromkeys(wanted))
    foreign = [each for each in wanted if each != gpu.compute_capability]
    if foreign:
        raise RequestError(
            f"Expected {gpu.compute_capability}, the compute capability of this {gpu.name}: TensorRT builds for the GPU at hand; found "
            f"{', '.join(foreign)}. Build on such a GPU, or with --backend {Flavour.TENSORRT_RTX}."
        )
    return (gpu.compute_capability,)


def _plugin(wanted: str, flavour: Flavour, bundle: Bundle) -> tuple[Plugin, Path | None]:
    """The plugin, and the file of a compiled one."""
    none = Plugin(form=PluginForm.NONE)
    if wanted == PluginForm.NONE:
        return none, None
    objection = _nothing_to_do(bundle)
    if wanted == AUTO:
        form = PluginForm.AOT if flavour is Flavour.TENSORRT else PluginForm.V3
        return (none if objection or _unmet(form, flavour) else _python_plugin(form)), None
    if objection:
        raise RequestError(f"--plugin {wanted}: expected a head that a plugin computes, found {objection}. Leave --plugin out.")
    if wanted in (PluginForm.AOT, PluginForm.V3):
        form = PluginForm(wanted)
        unmet = _unmet(form, flavour)
        if unmet:
            raise RequestError(f"--plugin {wanted}: expected {unmet}. Provide it, or use --plugin none.")
        return _python_plugin(form), None
    library = Path(wanted)
    if library.suffix not in LIBRARY_ENDINGS or not library.is_file():
        found = "a folder" if library.is_dir() else "no such file" if library.suffix in LIBRARY_ENDINGS else repr(wanted)
        raise RequestError(f"--plugin: expected {AUTO}, none, aot, v3 or the path of a compiled plugin, found {found}. Correct it.")
    with library.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Plugin(form=PluginForm.CPP, name=op.NAME, version=op.VERSION, library=library.name, sha256=digest), library.absolute()


def _python_plugin(form: PluginForm) -> Plugin:
    return Plugin(form=form, name=op.TILES_NAME if form is PluginForm.AOT else op.NAME, version=op.VERSION)


def _nothing_to_do(bundle: Bundle) -> str | None:
    """Why a bundle's head has no place for the plugin."""
    if bundle.drafter.kind is DrafterKind.DFLASH:
        return "a DFlash drafter's, which is an argmax"
    if bundle.form.candidate_pool and not bundle.manifest.certified_pool:
        return "one with a candidate pool, which looks at few tokens anyway"
    return None


def _unmet(form: PluginForm, flavour: Flavour) -> str | None:
    """What a Python form of the plugin lacks here."""
    if form is PluginForm.AOT and flavour is not Flavour.TENSORRT:
        return f"--backend {Flavour.TENSORRT}: {flavour} has no plugins compiled ahead of time"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which compiles the kernel"
    return None


def _timing_cache(wanted: Path | None, flavour: Flavour, version: str, gpu: Gpu | None) -> Path | None:
    """By default in the user's cache folder, by what decides timings: product, version and GPU."""
    if wanted is not None and gpu is None:
        raise RequestError(
            f"--timing-cache: expected it with {Flavour.TENSORRT}, which measures while it builds, found {flavour}. Leave it out."
        )
    if wanted is not None and wanted.is_dir():
        raise RequestError(f"--timing-cache: expected a file, or the name of a new one, found the folder {wanted}. Name a file in it.")
    if wanted is not None or gpu is None:
        return wanted
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = "".join(letter if letter.isalnum() else "-" for letter in gpu.name.lower())
    return root / "domino-deploy" / f"{flavour}-{version}-sm{gpu.compute_capability.replace('.', '')}-{name}.timings"
