#include "plugin.h"

#include <new>
#include <string>
#include <vector>

#include "fused_correction.h"
#include "plugin_check.h"

using namespace nvinfer1;

namespace domino {
namespace {

// Order of the inputs and outputs of the operator (plugins/op.py).
enum Input { kBaseLogits, kHiddenProjection, kStateProjection, kCodebook, kInputCount };
enum Output { kTokenIds, kCorrectedLogits, kOutputCount };

constexpr PluginFieldCollection kNoFields{0, nullptr};

WeightType weightTypeOf(DataType type) {
    switch (type) {
        case DataType::kHALF: return WeightType::kFloat16;
        case DataType::kBF16: return WeightType::kBfloat16;
        default: return WeightType::kFloat32;
    }
}

template <typename Description>
std::vector<Shape> shapesOf(Description const* inputs, int32_t count) {
    std::vector<Shape> shapes;
    for (int32_t i = 0; i < count; ++i) {
        shapes.push_back(shapeOf(inputs[i]));
    }
    return shapes;
}

bool isRefused(std::vector<Shape> const& inputs) {
    const std::string problem = problemOfShapes(inputs);
    if (!problem.empty()) {
        logError(problem);
    }
    return !problem.empty();
}

}  // namespace

IPluginCapability* FusedLogitCorrection::getCapabilityInterface(PluginCapabilityType type) noexcept {
    switch (type) {
        case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
        case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuild*>(this);
        case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

IPluginV3* FusedLogitCorrection::clone() noexcept {
    return new (std::nothrow) FusedLogitCorrection(*this);
}

AsciiChar const* FusedLogitCorrection::getPluginName() const noexcept {
    return DOMINO_NAME;
}

AsciiChar const* FusedLogitCorrection::getPluginVersion() const noexcept {
    return DOMINO_VERSION;
}

AsciiChar const* FusedLogitCorrection::getPluginNamespace() const noexcept {
    return DOMINO_DOMAIN;
}

int32_t FusedLogitCorrection::getNbOutputs() const noexcept {
    return kOutputCount;
}

int32_t FusedLogitCorrection::getOutputDataTypes(DataType* outputTypes, int32_t /*nbOutputs*/, const DataType* inputTypes,
                                                 int32_t nbInputs) const noexcept {
    const std::string problem = problemOfTypes(inputTypes, nbInputs);
    if (!problem.empty()) {
        logError(problem);
        return -1;
    }
    outputTypes[kTokenIds] = DataType::kINT64;
    outputTypes[kCorrectedLogits] = DataType::kFLOAT;
    return 0;
}

int32_t FusedLogitCorrection::getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const* /*shapeInputs*/,
                                              int32_t /*nbShapeInputs*/, DimsExprs* outputs, int32_t nbOutputs,
                                              IExprBuilder& /*exprBuilder*/) noexcept {
    if (isRefused(shapesOf(inputs, nbInputs))) {
        return -1;
    }
    for (int32_t i = 0; i < nbOutputs; ++i) {
        outputs[i].nbDims = 1;
        outputs[i].d[0] = inputs[kBaseLogits].d[0];
    }
    return 0;
}

bool FusedLogitCorrection::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* inOut, int32_t /*nbInputs*/,
                                                     int32_t /*nbOutputs*/) noexcept {
    const PluginTensorDesc& tensor = inOut[pos].desc;
    if (tensor.format != TensorFormat::kLINEAR) {
        return false;
    }
    switch (pos) {
        case kCodebook: return tensor.type == DataType::kFLOAT || tensor.type == DataType::kHALF || tensor.type == DataType::kBF16;
        case kInputCount + kTokenIds: return tensor.type == DataType::kINT64;
        default: return tensor.type == DataType::kFLOAT;
    }
}

int32_t FusedLogitCorrection::configurePlugin(DynamicPluginTensorDesc const* /*in*/, int32_t /*nbInputs*/,
                                              DynamicPluginTensorDesc const* /*out*/, int32_t /*nbOutputs*/) noexcept {
    return 0;
}

size_t FusedLogitCorrection::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t /*nbInputs*/,
                                              DynamicPluginTensorDesc const* /*outputs*/, int32_t /*nbOutputs*/) const noexcept {
    return workspaceBytes(inputs[kBaseLogits].max.d[0], inputs[kCodebook].max.d[0]);
}

// Sizes that were not known when the network was made are looked at here: the kernels read as far as the codebook's tell them.
int32_t FusedLogitCorrection::onShapeChange(PluginTensorDesc const* in, int32_t nbInputs, PluginTensorDesc const* /*out*/,
                                            int32_t /*nbOutputs*/) noexcept {
    return isRefused(shapesOf(in, nbInputs)) ? -1 : 0;
}

int32_t FusedLogitCorrection::enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* /*outputDesc*/, void const* const* inputs,
                                      void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    FusedCorrection correction{};
    correction.batch = static_cast<int32_t>(inputDesc[kBaseLogits].dims.d[0]);
    correction.vocab = static_cast<int32_t>(inputDesc[kCodebook].dims.d[0]);
    correction.rank = static_cast<int32_t>(inputDesc[kCodebook].dims.d[1]);
    correction.weightType = weightTypeOf(inputDesc[kCodebook].type);
    correction.baseLogits = static_cast<float const*>(inputs[kBaseLogits]);
    correction.hiddenProjection = static_cast<float const*>(inputs[kHiddenProjection]);
    correction.stateProjection = static_cast<float const*>(inputs[kStateProjection]);
    correction.codebook = inputs[kCodebook];
    correction.workspace = workspace;
    correction.tokenIds = static_cast<int64_t*>(outputs[kTokenIds]);
    correction.correctedLogits = static_cast<float*>(outputs[kCorrectedLogits]);
    const cudaError_t status = launch(correction, stream);
    if (status != cudaSuccess) {
        logError(std::string("Expected both kernels to start, found: ") + cudaGetErrorString(status) +
                 ". Check that the library was built for this GPU.");
        return -1;
    }
    return 0;
}

IPluginV3* FusedLogitCorrection::attachToContext(IPluginResourceContext* /*context*/) noexcept {
    return clone();
}

PluginFieldCollection const* FusedLogitCorrection::getFieldsToSerialize() noexcept {
    return &kNoFields;
}

// Fields are not looked at: an engine that was built with the Python form of the plugin brings its PTX, which this form does not need.
IPluginV3* FusedLogitCorrectionCreator::createPlugin(AsciiChar const* /*name*/, PluginFieldCollection const* /*fields*/,
                                                     TensorRTPhase /*phase*/) noexcept {
    return new (std::nothrow) FusedLogitCorrection();
}

PluginFieldCollection const* FusedLogitCorrectionCreator::getFieldNames() noexcept {
    return &kNoFields;
}

AsciiChar const* FusedLogitCorrectionCreator::getPluginName() const noexcept {
    return DOMINO_NAME;
}

AsciiChar const* FusedLogitCorrectionCreator::getPluginVersion() const noexcept {
    return DOMINO_VERSION;
}

AsciiChar const* FusedLogitCorrectionCreator::getPluginNamespace() const noexcept {
    return DOMINO_DOMAIN;
}

}  // namespace domino

// What IPluginRegistry::loadLibrary looks for in a library of plugins.
extern "C" __attribute__((visibility("default"))) IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static domino::FusedLogitCorrectionCreator creator;
    static IPluginCreatorInterface* const creators[] = {&creator};
    count = 1;
    return creators;
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(ILoggerFinder* finder) {
    domino::setLoggerFinderOfPlugin(finder);
}
