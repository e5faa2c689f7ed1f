"""What building engines will take, from the bundle's graphs alone: bytes, room, memory.

Weights are exact; what is made of them is an estimate, from builds of the demo pair on a machine without a GPU (docs/tensorrt.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from domino_deploy.bundle import GRAPHS, Bundle
from domino_deploy.engines import PluginForm
from domino_deploy.errors import BundleError, ExportError
from domino_deploy.exporters.engine_options import EngineSettings
from domino_deploy.memory_plan import MemoryPlan, Pair, plan_memory
from domino_deploy.resources import free_disk, free_memory
from domino_deploy.signature import GraphForm

# Peak memory of a build, in weights of its graph, beside what the libraries take: measured 3.6 to 3.8 in float32, 3.9 in float16.
_PEAK_COPIES = 4
# Fewer are not possible: the builder's and the engine's.
_LEAST_COPIES = 2
_PROCESS_BYTES = 300_000_000
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What a build will do and take.

    Args:
        settings: of the build.
        weights: bytes per graph; a matrix that several graphs use counts in each, as in the engines.
        converted_bytes: of the private bundle in another type, removed at the end; 0 without one.
        serving: memory of the GPU while serving, by the engines' sizes.
        free_memory_bytes, free_disk_bytes: None where the system does not say.
    """

    settings: EngineSettings
    weights: Mapping[str, int]
    converted_bytes: int
    serving: MemoryPlan
    free_memory_bytes: int | None
    free_disk_bytes: int | None

    @property
    def engine_bytes(self) -> int:
        """Of all engines, about."""
        return 0 if self.settings.is_stripped else sum(self.weights.values())

    @property
    def written_bytes(self) -> int:
        return self.engine_bytes + self.converted_bytes

    @property
    def peak_bytes(self) -> int:
        """Memory of the worker that builds the largest engine, about."""
        return _PROCESS_BYTES + _PEAK_COPIES * max(self.weights.values())

    @property
    def least_bytes(self) -> int:
        """Below this memory no build can end well."""
        return _PROCESS_BYTES + _LEAST_COPIES * max(self.weights.values())

    def shortages(self) -> Iterator[str]:
        """What this machine surely has too little of."""
        if self.free_memory_bytes is not None and self.free_memory_bytes < self.least_bytes:
            yield f"memory: at least {_gigabytes(self.least_bytes)} are needed, {_gigabytes(self.free_memory_bytes)} are free"
        if self.free_disk_bytes is not None and self.free_disk_bytes < self.written_bytes:
            yield f"disk: about {_gigabytes(self.written_bytes)} are written, {_gigabytes(self.free_disk_bytes)} are free"

    def warnings(self) -> Iterator[str]:
        """What may go wrong."""
        if self.free_memory_bytes is not None and self.least_bytes <= self.free_memory_bytes < self.peak_bytes:
            yield f"memory: about {_gigabytes(self.peak_bytes)} are needed at the peak, {_gigabytes(self.free_memory_bytes)} are free"
        gpu = self.settings.gpu
        if gpu is not None and gpu.memory_bytes < self.serving.total:
            yield f"serving needs about {_gigabytes(self.serving.total)} of GPU memory, this {gpu.name} has {_gigabytes(gpu.memory_bytes)}"

    def check(self) -> None:
        """Refuse what cannot end well.

        Raises:
            ExportError: too little memory or disk.
        """
        shortages = list(self.shortages())
        if shortages:
            raise ExportError(
                f"Expected room to build {self.settings.output.name}, found too little {'; too little '.join(shortages)}. "
                "Free some, build on another machine, or export the pair in a smaller type."
            )

    def lines(self) -> Iterator[str]:
        """For a reader."""
        settings = self.settings
        built_for = f"{settings.gpu.name}, " if settings.gpu is not None else ""
        capabilities = ", ".join(settings.compute_capabilities) or "all that it supports"
        yield f"engines   {settings.output}"
        yield f"backend   {settings.flavour} {settings.flavour_version}, for {built_for}compute capability {capabilities}"
        yield f"precision {settings.weights}{', converted first' if settings.is_converted else ''}"
        yield f"plugin    {plugin_words(settings)}"
        yield (
            f"sizes     {settings.max_batch_size} sequence(s) of {settings.max_model_len} tokens, "
            f"{settings.num_speculative_tokens} drafted per cycle, {settings.prefill_rows} prompt tokens per pass"
        )
        yield "weights   " + ", ".join(f"{name} {_gigabytes(size)}" for name, size in self.weights.items())
        yield f"written   about {_gigabytes(self.written_bytes)}{_free(self.free_disk_bytes)}"
        yield f"memory    about {_gigabytes(self.peak_bytes)} at the peak{_free(self.free_memory_bytes)}"
        yield f"serving   about {_gigabytes(self.serving.total)} of GPU memory"
        yield from (f"warning   {warning}" for warning in self.warnings())
        yield from (f"too little {shortage}" for shortage in self.shortages())


def plan_engines(bundle: Bundle, settings: EngineSettings) -> EnginePlan:
    """Plan a build; nothing is written.

    Raises:
        BundleError: a file is no graph.
    """
    itemsize = settings.dtype.bits // 8
    weights = {name: _weight_bytes(_graph(bundle.path / file), itemsize) for name, file in GRAPHS.items()}
    stored = sum(entry.bytes for name, entry in bundle.manifest.files.items() if name.endswith(".safetensors"))
    form = GraphForm(dtype=str(settings.dtype), draft_vocab_size=bundle.form.draft_vocab_size, candidate_pool=bundle.form.candidate_pool)
    pair = Pair(target=bundle.target, drafter=bundle.drafter, form=form)
    return EnginePlan(
        settings=settings,
        weights=weights,
        converted_bytes=stored * settings.dtype.bits // bundle.precision.activations.bits if settings.is_converted else 0,
        serving=plan_memory(pair, weights, batch=settings.max_batch_size, context=settings.max_model_len),
        free_memory_bytes=free_memory(),
        free_disk_bytes=free_disk(settings.output),
    )


def plugin_words(settings: EngineSettings) -> str:
    """Which plugin computes the correction, for a reader."""
    plugin = settings.plugin
    if plugin.form is PluginForm.NONE:
        return "none: the correction is built of TensorRT's own layers"
    where = {
        PluginForm.AOT: "compiled into the engine",
        PluginForm.V3: "in Python, which this package registers when it opens the engine",
        PluginForm.CPP: f"{plugin.library}, which must be there when the engine is opened",
    }
    return f"{plugin.form}: {plugin.name} version {plugin.version}, {where[plugin.form]}"


def _graph(file: Path) -> ir.Model:
    try:
        return ir.load(file)
    except Exception as error:  # protobuf's errors have no common base but this
        raise BundleError(f"{file}: expected an ONNX graph, found: {error}. Export the bundle again.") from error


def _weight_bytes(model: ir.Model, itemsize: int) -> int:
    """Of a graph's weights, each once, floats in the engines' type."""
    total = 0
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            total += tensor.size * itemsize if tensor.dtype in _FLOATS else tensor.nbytes
    return total


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.2f} MB"


def _free(size: int | None) -> str:
    return "" if size is None else f", {_gigabytes(size)} free"
